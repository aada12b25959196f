"""Images as graphs of patches or pixels: ViT, Swin, and convolution as message passing, on scikit-learn's digits.

The 1,797 images of 8 x 8 pixels are split 1,197 / 200 / 400. The weights of the best validation count.
For ViT it draws which patches the class token attends to, and saves the model of the first seed with a test image.

    python examples/images.py                                           a quarter of an hour on two cores
    python examples/images.py --seeds 1 --steps 3                       a quick test
    mpnn view results/digits-vit --image results/digit.npy -o vit.html  the attention of all layers and heads
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from experiment import Outcome, Row, measure, parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from mpnn import graphs
from mpnn.data import digits
from mpnn.models import Convolution, ImageClassifier, Swin, SwinConfig, ViT, ViTConfig
from mpnn.train.loop import Settings, fit, shuffled, warm_cosine

MODELS = ("ViT", "ViT over neighbours", "Swin", "convolution")
VIT = ViTConfig(image=8, patch=2, channels=1, dim=64, layers=4, heads=4, hidden=128, dropout=0.1)
SWIN = SwinConfig(image=8, patch=1, channels=1, dim=32, depths=(2, 2), heads=(2, 4), window=4)
BATCH = 64


def build(name: str) -> nn.Module:
    """A classifier [B, 1, 8, 8] -> [B, 10]. What the models differ in is which pixels or patches send messages."""
    if name == "ViT":
        return ImageClassifier(ViT(VIT), 10)
    if name == "ViT over neighbours":
        return ImageClassifier(ViT(VIT, graphs.neighborhood(4, 4, 1)), 10)
    if name == "Swin":
        return ImageClassifier(Swin(SWIN), 10)
    layers = [Convolution(1, 32, 3, padding=1), nn.ReLU(), Convolution(32, 64, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10))


class Images:
    """Images [1797, 1, 8, 8] and labels, and the indices of the three parts."""

    def __init__(self) -> None:
        data = digits()
        x = data.x.view(-1, 1, 8, 8)
        self.x, self.y = (x - x.mean()) / x.std(), data.y
        order = torch.randperm(len(self.y), generator=torch.Generator().manual_seed(0))
        self.train, self.val, self.test = order.split([1197, 200, 400])


def train(name: str, images: Images, steps: int, out: Path, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    model = build(name)

    def loss(k: int) -> Tensor:
        index = images.train[shuffled(len(images.train), BATCH, k, seed)]
        return F.cross_entropy(model(images.x[index]), images.y[index])

    @torch.no_grad()
    def measured(part: Tensor) -> dict[str, float]:
        model.eval()
        logits = torch.cat([model(images.x[index]) for index in part.split(200)])
        accuracy = 100 * (logits.argmax(1) == images.y[part]).float().mean().item()
        return {"loss": F.cross_entropy(logits, images.y[part]).item(), "accuracy": accuracy}

    history = fit(
        model,
        AdamW(model.parameters(), lr=2e-3, weight_decay=0.01),
        loss,
        Settings(steps, rate=warm_cosine(steps), clip=1.0, validate_every=min(100, steps), keep="best"),
        validate=lambda: measured(images.val),
        progress=progress,
        checkpoint=checkpoint,
    )
    if seed == 0 and name.startswith("ViT"):
        draw_attention(model, images, out / f"{file_name(name)}-attention.png")
        model.save_pretrained(out / file_name(name))
        np.save(out / "digit.npy", images.x[images.test[0]].numpy())
    return Outcome(history, measured(images.test)["accuracy"])


def file_name(model: str) -> str:
    return f"digits-{model.lower().replace(' ', '-')}"


@torch.no_grad()
def draw_attention(model: ImageClassifier, images: Images, path: Path) -> None:
    """Draws four test images and how much the class token of a ViT attends to each patch in the last layer."""
    chosen = images.test[:4]
    output = model.eval().encoder(images.x[chosen], return_weights=True)
    weights = output.weights[-1].mean(1)[:, 0, 1:].unflatten(1, VIT.grid)
    figure, axes = plt.subplots(2, 4, figsize=(8, 4.3), layout="constrained")
    for k, (above, below) in enumerate(axes.T):
        above.imshow(images.x[chosen[k], 0].numpy(), cmap="Greys")
        above.set(title=f"a {images.y[chosen[k]]}", xticks=[], yticks=[])
        below.imshow(weights[k].numpy(), cmap="Greys", vmin=0)
        below.set(xticks=[], yticks=[])
    axes[1, 0].set_ylabel("attention")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, 3, MODELS).parse_args()
    images = Images()
    steps = options.steps or 1500
    for name in options.models:
        row = Row(file_name(name), "digits", name, "% test accuracy", "none", "")
        measure(row, partial(train, name, images, steps, options.out), options, {"steps": steps})


if __name__ == "__main__":
    main()
