"""MAE (He et al. 2022) on scikit-learn's digits: what learning to reconstruct masked patches is worth with few labels.

A ViT is trained with 5 labeled images of each digit: from scratch, and from the encoder of an MAE that was trained on
all 1,197 training images without their labels. Both have the same architecture, labeled images and fine-tuning.

    python examples/images_few_labels.py                           half an hour on one core
    python examples/images_few_labels.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from experiment import Outcome, Row, measure, parser, stage
from images import Images
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW

from mpnn.models import MAE, ImageClassifier, MAEConfig, ViT
from mpnn.models.layers.images import patchify
from mpnn.train.loop import Settings, fit, shuffled, warm_cosine

MODELS = ("ViT from scratch", "MAE, then ViT")
CONFIG = MAEConfig(
    image=8,
    patch=2,
    channels=1,
    dim=64,
    layers=4,
    heads=4,
    hidden=128,
    decoder_dim=32,
    decoder_layers=1,
    decoder_heads=4,
    decoder_hidden=64,
    mask_ratio=0.5,
)
BATCH, PER_CLASS = 64, 5


def labeled(images: Images, seed: int) -> Tensor:
    """The indices of `PER_CLASS` random training images of each class."""
    order = images.train[torch.randperm(len(images.train), generator=torch.Generator().manual_seed(seed))]
    return torch.cat([order[images.y[order] == digit][:PER_CLASS] for digit in range(10)])


def pretrain(images: Images, steps: int, seed: int, out: Path, progress: Any, checkpoint: Any) -> ViT:
    """The encoder of an MAE that was trained on all training images."""
    mae = MAE(CONFIG)
    fit(
        mae,
        AdamW(mae.parameters(), lr=2e-3, weight_decay=0.01),
        lambda k: mae.loss(images.x[images.train[shuffled(len(images.train), BATCH, k, seed)]]),
        Settings(steps, rate=warm_cosine(steps), clip=1.0),
        progress=progress,
        checkpoint=checkpoint,
    )
    if seed == 0:
        draw(mae, images.x[images.test[:4]], out / f"{file_name(MODELS[1])}-reconstruction.png")
    return mae.encoder


def train(
    name: str, images: Images, sizes: dict[str, int], out: Path, seed: int, progress: Any, checkpoint: Any
) -> Outcome:
    if name == MODELS[1]:
        encoder = pretrain(images, sizes["pretraining"], seed, out, progress, stage(checkpoint, "pretraining"))
    else:
        encoder = ViT(CONFIG)
    torch.manual_seed(seed)
    model, few = ImageClassifier(encoder, 10), labeled(images, seed)

    @torch.no_grad()
    def accuracy(part: Tensor) -> float:
        model.eval()
        return 100 * (model(images.x[part]).argmax(1) == images.y[part]).float().mean().item()

    history = fit(
        model,
        AdamW(model.parameters(), lr=1e-3, weight_decay=0.05),
        lambda k: F.cross_entropy(model(images.x[few]), images.y[few]),
        Settings(sizes["steps"], rate=warm_cosine(sizes["steps"]), clip=1.0, validate_every=min(20, sizes["steps"])),
        validate=lambda: {"accuracy": accuracy(images.val)},
        progress=progress,
        checkpoint=checkpoint,
    )
    return Outcome(history, accuracy(images.test))


def file_name(model: str) -> str:
    return "digits-few-labels-" + ("mae" if model == MODELS[1] else "scratch")


@torch.no_grad()
def draw(mae: MAE, images: Tensor, path: Path) -> None:
    """Draws images, what the encoder sees of them, and the reconstruction."""
    pixels = patchify(images, CONFIG.patch)
    output = mae.eval()(images, torch.rand(len(images), 16, generator=torch.Generator().manual_seed(0)))
    seen = output.seen[..., None]
    rows = {"image": pixels, "visible": pixels.where(seen, pixels.min()), "output": output.pixels.where(~seen, pixels)}
    figure, axes = plt.subplots(3, len(images), figsize=(2 * len(images), 6), layout="constrained")
    for (title, row), line in zip(rows.items(), axes, strict=True):
        for ax, patches in zip(line, row, strict=True):
            ax.imshow(patches.view(4, 4, 2, 2).transpose(1, 2).reshape(8, 8).numpy(), cmap="Greys")
            ax.set(xticks=[], yticks=[])
        line[0].set_ylabel(title)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__, 5, MODELS).parse_args()
    images = Images()
    sizes = {"steps": options.steps or 200, "pretraining": options.steps or 2000}
    for name in options.models:
        row = Row(file_name(name), f"digits, {PER_CLASS} labels a class", name, "% test accuracy", "none", "")
        settings = sizes if name == MODELS[1] else {"steps": sizes["steps"]}
        measure(row, partial(train, name, images, sizes, options.out), options, settings)


if __name__ == "__main__":
    main()
