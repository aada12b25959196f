"""Images as graphs of patches or pixels: ViT, Swin, and convolution as message passing, on digits or clothes.

The data are scikit-learn's digits, 1,797 images of 8 x 8 pixels, split 1,197 / 200 / 400, or Fashion-MNIST, 70,000
images of 28 x 28 pixels, split 58,000 / 2,000 / 10,000. The weights of the best validation count. For ViT it draws
which patches the class token attends to, and saves the model of the first seed and a test image.

    python examples/images.py                              a quarter of an hour on two cores
    python examples/images.py --data Fashion-MNIST         clothes instead of digits
    python examples/images.py --seeds 1 --steps 3          a quick test
    mpnn view results/digits-vit --image results/digits-vit/image.npy -o vit.html
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from experiment import Outcome, Row, measure, parser
from fashion_mnist import fashion_mnist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from mpnn import graphs
from mpnn.data import digits
from mpnn.models import Convolution, ImageClassifier, Swin, SwinConfig, ViT, ViTConfig
from mpnn.train.loop import Settings, fit, shuffled, warm_cosine

MODELS = ("ViT", "ViT over neighbors", "Swin", "convolution")
BATCH = 64


@dataclass(frozen=True)
class Task:
    """The options of the models for a data set of images of `side` x `side` pixels."""

    side: int
    vit: ViTConfig
    swin: SwinConfig
    steps: int

    def build(self, name: str) -> nn.Module:
        """A classifier [B, 1, side, side] -> [B, 10]. The models differ in which pixels or patches send messages."""
        if name == "ViT":
            return ImageClassifier(ViT(self.vit), 10)
        if name == "ViT over neighbors":
            return ImageClassifier(ViT(self.vit, graphs.neighborhood(*self.vit.grid, 1)), 10)
        if name == "Swin":
            return ImageClassifier(Swin(self.swin), 10)
        layers = [Convolution(1, 32, 3, padding=1), nn.ReLU(), Convolution(32, 64, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * (self.side // 2) ** 2, 10))


TASKS = {
    "digits": Task(
        8,
        ViTConfig(image=8, patch=2, channels=1, dim=64, layers=4, heads=4, hidden=128, dropout=0.1),
        SwinConfig(image=8, patch=1, channels=1, dim=32, depths=(2, 2), heads=(2, 4), window=4),
        1500,
    ),
    "Fashion-MNIST": Task(
        28,
        ViTConfig(image=28, patch=4, channels=1, dim=64, layers=4, heads=4, hidden=128, dropout=0.1),
        SwinConfig(image=28, patch=2, channels=1, dim=32, depths=(2, 2), heads=(2, 4), window=7),
        6000,
    ),
}


class Images:
    """Images [P, 1, side, side] and labels of a data set, and the indices of the three parts."""

    def __init__(self, name: str = "digits") -> None:
        generator = torch.Generator().manual_seed(0)
        if name == "digits":
            data = digits()
            x, self.y = data.x.view(-1, 1, 8, 8), data.y
            self.train, self.val, self.test = torch.randperm(len(x), generator=generator).split([1197, 200, 400])
        else:
            parts = fashion_mnist("train"), fashion_mnist("test")
            x = torch.cat([images for images, _ in parts]).unsqueeze(1).float()
            self.y = torch.cat([kinds for _, kinds in parts])
            self.train, self.val = torch.randperm(60_000, generator=generator).split([58_000, 2_000])
            self.test = torch.arange(60_000, 70_000)
        self.x = (x - x[self.train].mean()) / x[self.train].std()


def train(
    name: str, task: Task, images: Images, steps: int, folder: Path, seed: int, progress: Any, checkpoint: Any
) -> Outcome:
    model = task.build(name)

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
        draw_attention(model, images, folder.with_name(f"{folder.name}-attention.png"))
        model.save_pretrained(folder)
        np.save(folder / "image.npy", images.x[images.test[0]].numpy())
    return Outcome(history, measured(images.test)["accuracy"])


@torch.no_grad()
def draw_attention(model: ImageClassifier, images: Images, path: Path) -> None:
    """Draws four test images and how much the class token of a ViT attends to each patch in the last layer."""
    chosen = images.test[:4]
    output = model.eval().encoder(images.x[chosen], return_weights=True)
    weights = output.weights[-1].mean(1)[:, 0, 1:].unflatten(1, model.encoder.config.grid)
    figure, axes = plt.subplots(2, 4, figsize=(8, 4.3), layout="constrained")
    for k, (above, below) in enumerate(axes.T):
        above.imshow(images.x[chosen[k], 0].numpy(), cmap="Greys")
        above.set(title=f"class {images.y[chosen[k]]}", xticks=[], yticks=[])
        below.imshow(weights[k].numpy(), cmap="Greys", vmin=0)
        below.set(xticks=[], yticks=[])
    axes[1, 0].set_ylabel("attention")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, 3, MODELS)
    options.add_argument("--data", choices=list(TASKS), default="digits", help="default: digits")
    options = options.parse_args()
    task, images = TASKS[options.data], Images(options.data)
    steps = options.steps or task.steps
    for name in options.models:
        row = Row(f"{options.data}-{name}".lower().replace(" ", "-"), options.data, name, "% test accuracy", "none", "")
        run = partial(train, name, task, images, steps, options.out / row.name)
        measure(row, run, options, {"steps": steps})


if __name__ == "__main__":
    main()
