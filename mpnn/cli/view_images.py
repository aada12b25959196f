"""The attention that `mpnn view` shows over an image: of vision models of transformers, and of mpnn's ViT."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from mpnn import Topology
from mpnn.cli.view_models import OWN, record_each, record_transformers, shown_name
from mpnn.graphs import parse
from mpnn.models import ImageClassifier, ViT
from mpnn.models.layers.images import pair, with_class_token
from mpnn.models.saving import CONFIG
from mpnn.view import Page, of_topology
from mpnn.view.attention import Recording, attention
from mpnn.view.subject import Patches

_BUDGET = 8 << 20  # bytes of the weights over one graph
_MAX_EXTRA = 16  # class and register tokens; more nodes than that are no grid of patches


@dataclass(frozen=True)
class _Input:
    """An image as a model takes it, float [1, channels, H, W], and as the page shows it, uint8 [H, W, 3]."""

    values: Tensor
    pixels: NDArray[np.uint8]


def of_transformers(name: str, model: Any, file: Path, graphs: Sequence[str] | None) -> Page:
    """The page of a vision model of transformers.

    Args:
        name: the folder or name of the model.
        file: an image, or an array (.npy) of the values that the model takes, [channels, H, W].
        graphs: expressions over the patches; "" stands for the model's own. None: this, and each patch's neighbors.
    """
    image = _array(file) if file.suffix == ".npy" else _processed(name, file)
    down, across = pair(model.config.patch_size)
    rows = image.values.shape[-2] // down
    columns = image.values.shape[-1] // across
    extra = 0

    def record(expression: str) -> Recording:
        graph = repr(_with_extra(parse(expression), extra)) if expression else None
        return record_transformers(model, {"pixel_values": image.values}, expression or OWN, graph, _BUDGET)

    own = record("")
    extra = own.size - rows * columns
    if not 0 <= extra <= _MAX_EXTRA:
        raise ValueError(
            f"{name} has layers over {own.size} nodes for {rows} x {columns} patches; the page shows models over one "
            "grid of patches, such as ViT, DeiT and DINOv2"
        )
    recorded = record_each(lambda graph: record(graph) if graph else own, graphs, _neighbors(rows, columns))
    return _page(name, file, Patches(image.pixels, rows, columns, _names(extra)), *recorded)


def saved_vit(folder: Path) -> ViT | None:
    """The ViT that `save_pretrained` wrote, alone or in a classifier; None if the folder holds no model of mpnn."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, _ = config["model"], config["arguments"]  # which a model of transformers does not have
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if kind == "ViT":
        return ViT.from_pretrained(folder)
    if kind == "ImageClassifier":
        encoder = ImageClassifier.from_pretrained(folder).encoder
        if isinstance(encoder, ViT):
            return encoder
        kind = type(encoder).__name__
    raise ValueError(
        f"{folder} holds a {kind} without its data; the page shows runs of mpnn train, and of the models that "
        "save_pretrained wrote ViT, alone or in an ImageClassifier"
    )


def of_saved(name: str, vit: ViT, file: Path, graphs: Sequence[str] | None) -> Page:
    """The page of a ViT of mpnn, as `of_transformers`. Images are resized to the size of the model, and their pixels
    scaled to -1 to 1."""
    config = vit.config
    image = _array(file) if file.suffix == ".npy" else _resized(file, config.channels, pair(config.image))
    shape = (config.channels, *pair(config.image))
    if tuple(image.values.shape[1:]) != shape:
        raise ValueError(f"{file} must be {list(shape)}: channels, height, width; got {list(image.values.shape[1:])}")
    rows, columns = config.grid
    own = vit.layers.graph

    def record(expression: str) -> Recording:
        graph = with_class_token(parse(expression)) if expression else own
        recording = Recording(expression or OWN, 1 + rows * columns, len(vit.layers), budget=_BUDGET)
        bound = graph.bind(recording.size)
        src, dst = bound.edge_index
        vit.layers.graph = graph
        try:
            with torch.no_grad():
                weights = vit(image.values, return_weights=True).weights or ()
        finally:
            vit.layers.graph = own
        for of_layer in weights:  # [1, heads, N, N]
            recording.add(bound, of_layer[0, :, dst, src].T)
        return recording

    recorded = record_each(record, graphs, _neighbors(rows, columns))
    return _page(name, file, Patches(image.pixels, rows, columns, _names(1)), *recorded)


def _with_extra(patches: Topology, extra: int) -> Topology:
    for _ in range(extra):
        patches = with_class_token(patches)
    return patches


def _neighbors(rows: int, columns: int) -> Any:
    return lambda _: f"neighborhood({rows}, {columns}, 1)"


def _names(extra: int) -> list[str]:
    return ["[CLS]", *(f"[extra {k}]" for k in range(1, extra))][:extra]


def _page(name: str, file: Path, patches: Patches, recordings: Sequence[Recording], named: str | None) -> Page:
    graph = of_topology(named or "complete", patches.rows * patches.columns)
    grid = f"{patches.rows} x {patches.columns}"
    said = f"What each of {grid} patches attends to in {shown_name(name)}, in every layer and head."
    return Page(file.name, said, graph.graph, attention(patches, recordings), graph.plan)


def _open(file: Path) -> Any:
    try:
        return Image.open(file).convert("RGB")
    except UnidentifiedImageError:
        raise ValueError(
            f"{file} is no image that Pillow reads; name one, or an array of the model's values (.npy)"
        ) from None


def _array(file: Path) -> _Input:
    """The array of a .npy file, [channels, H, W] or [H, W]. The page shows values from the smallest to the largest."""
    values = torch.from_numpy(np.load(file, allow_pickle=False).astype(np.float32))
    values = values[None] if values.dim() == 2 else values
    if values.dim() != 3 or not values.numel():
        raise ValueError(f"{file} must be an array [channels, height, width]; got {list(values.shape)}")
    low = values.min()
    high = values.max()
    return _Input(values[None], _pixels((values - low) / (high - low).clamp(min=1e-12)))


def _resized(file: Path, channels: int, size: tuple[int, int]) -> _Input:
    if channels not in (1, 3):
        raise ValueError(f"the model takes {channels} channels; give an array (.npy) of its values instead of {file}")
    image = _open(file).resize(size[::-1])
    pixels = np.asarray(image.convert("L"))[..., None] if channels == 1 else np.asarray(image)
    shares = torch.from_numpy(pixels.copy()).movedim(-1, 0) / 255
    return _Input(2 * shares[None] - 1, _pixels(shares))


def _processed(name: str, file: Path) -> _Input:
    """The image as the model's processor crops, resizes and normalizes it. The page shows it before normalization."""
    import transformers

    processor = transformers.AutoImageProcessor.from_pretrained(name)
    values = processor(images=_open(file), return_tensors="pt")["pixel_values"]
    shares = values[0]
    if getattr(processor, "do_normalize", False):
        mean, std = (torch.tensor(part).view(-1, 1, 1) for part in (processor.image_mean, processor.image_std))
        shares = shares * std + mean
    return _Input(values, _pixels(shares))


def _pixels(shares: Tensor) -> NDArray[np.uint8]:
    """uint8 [H, W, 3] of shares of the brightest, float [channels, H, W]. Of other numbers of channels, the mean."""
    shown = shares if len(shares) == 3 else shares.mean(0, keepdim=True).expand(3, -1, -1)
    pixels: NDArray[np.uint8] = (255 * shown.clamp(0, 1)).round().byte().movedim(0, -1).contiguous().numpy()
    return pixels
