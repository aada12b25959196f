"""Swin (Liu et al. 2021): attention within windows that shift from layer to layer. Each stage merges 2 x 2 patches.

topology   windows(h, w, size), then windows(h, w, size, shift=size // 2), alternating
attention  DotProduct(dim, heads, position=Table)  w_ij = softmax_j( <q_i, k_j> / sqrt(D) + B[dy, dx] )       (eq. 4)
aggregate  "sum"
update     PreNorm(dim, FeedForward(dim))          z = x + m,  y = z + ffn(norm(z))                           (eq. 3)

merging    pooling(h, w, 2), Typed: one linear map for each position in a cell of 2 x 2, after a norm over the four

If windows do not divide the grid of patches, it is padded at the bottom and the right with zero patches. As in the
published code, these are sources of the attention: their keys and values are the maps' biases. A grid that is not
larger than a window is a single window without shift.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import MessagePassing, Topology
from mpnn.attention import DotProduct, Typed
from mpnn.engine import build_once
from mpnn.graph.relations import GridOffset, KernelOffset
from mpnn.graphs import pooling, windows
from mpnn.models.layers.blocks import ACTIVATIONS
from mpnn.models.layers.images import GridPositions, ImageOutput, Patches, Size, as_image, pair
from mpnn.models.saving import Model
from mpnn.position import Table
from mpnn.update import FeedForward, PreNorm
from mpnn.update.dropout import Dropout


@dataclass(frozen=True)
class SwinConfig:
    """Configuration of a Swin. The defaults are those of Swin-T.

    image, patch, channels, activation, dropout, attention_dropout: as in `ViTConfig`. dim: width of the first stage; it
    doubles with each stage. depths, heads: numbers of layers and of attention heads of each stage. window: side of a
    window in patches. ratio: width of the feed-forward networks relative to the width of their stage. positions:
    whether learned position embeddings are added to the patches. eps: added to variances by the layers' LayerNorm.
    drop_path: drop probability of the last layer's residual branches, see `DropPath`; it increases linearly from 0 at
    the first layer.
    """

    image: int | list[int] = 224
    patch: int | list[int] = 4
    channels: int = 3
    dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    ratio: float = 4.0
    positions: bool = False
    activation: str = "gelu"
    eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.1

    @property
    def grid(self) -> Size:
        """Number of patches of an image (rows, columns). Images are padded with zeros to whole patches."""
        (height, width), (down, across) = pair(self.image), pair(self.patch)
        return -(-height // down), -(-width // across)


class Swin(Model):
    """Swin transformer (Liu et al. 2021).

    Args:
        config: the configuration.
        graph: topology that replaces the windows in every layer. It must bind to the grids of all stages.
    """

    def __init__(self, config: SwinConfig, graph: Topology | None = None) -> None:
        super().__init__()
        self.config = config
        self.width = config.dim * 2 ** (len(config.depths) - 1)
        self.patches = Patches(config.channels, config.dim, config.patch)
        self.patch_norm = nn.LayerNorm(config.dim)
        self.positions = GridPositions(config.grid, config.dim) if config.positions else None
        self.dropout = Dropout(config.dropout)
        last = len(config.depths) - 1
        layers = sum(config.depths)
        drop_paths = iter([config.drop_path * k / max(layers - 1, 1) for k in range(layers)])
        self.stages = nn.ModuleList(Stage(config, k, graph, drop_paths, merges=k < last) for k in range(last + 1))
        self.norm = nn.LayerNorm(self.width, eps=config.eps)

    def forward(self, images: Tensor, *, stretch: bool = False) -> ImageOutput:
        """Encodes images.

        Args:
            images: [B, channels, H, W], padded with zeros to whole patches.
            stretch: whether position embeddings are interpolated to images of another size.

        Returns:
            last [B, patches of the last stage, width]; pooled [B, width], its mean.
        """
        images, size = self.pad_images(images)
        x = self.patch_norm(self.patches(images))
        x = x if self.positions is None else x + self.positions(size, stretch=stretch)
        x = self.dropout(x)
        for stage in self.stages:
            x, size = stage(x, size)
        last = self.norm(x)
        return ImageOutput(last, last.mean(1))

    def pad_images(self, images: Tensor) -> tuple[Tensor, Size]:
        """Pads images with zeros to whole patches. Returns the images and their grid of patches."""
        (down, across), (height, width) = self.patches.patch, images.shape[-2:]
        images = F.pad(images, (0, -width % across, 0, -height % down))
        return images, self.patches.grid(images)


class Stage(nn.Module):
    """Layers over one grid of patches, followed by patch merging except in the last stage."""

    def __init__(
        self, config: SwinConfig, number: int, graph: Topology | None, drop_paths: Iterator[float], *, merges: bool
    ) -> None:
        super().__init__()
        dim = config.dim * 2**number
        self.layers = nn.ModuleList(
            WindowLayer(config, dim, config.heads[number], graph, next(drop_paths), shifted=k % 2 == 1)
            for k in range(config.depths[number])
        )
        self.merge = PatchMerging(dim) if merges else None

    def forward(self, x: Tensor, size: Size) -> tuple[Tensor, Size]:
        """x [B, N, dim] over a grid of `size` -> the next stage's input and its grid."""
        for layer in self.layers:
            x = layer(x, size)
        return (x, size) if self.merge is None else self.merge(x, size)


class WindowLayer(nn.Module):
    """A transformer layer over windows. The grid of patches is an argument of the call."""

    def __init__(
        self, config: SwinConfig, dim: int, heads: int, graph: Topology | None, drop_path: float, *, shifted: bool
    ) -> None:
        super().__init__()
        self.graph = graph
        self.window = config.window
        self.shifted = shifted
        relations = (2 * config.window - 1) ** 2
        attention = DotProduct(dim, heads, dropout=config.attention_dropout, position=Table(heads, relations=relations))
        ffn = FeedForward(dim, int(config.ratio * dim), ACTIVATIONS[config.activation])
        norm = partial(nn.LayerNorm, eps=config.eps)
        update = PreNorm(dim, ffn, dropout=config.dropout, norm=norm, drop_path=drop_path)
        self.round = MessagePassing(None, "sum", update, attention)

    def forward(self, x: Tensor, size: Size) -> Tensor:
        """x [B, N, dim] over a grid of `size` -> the same shape."""
        topology, padded = build_once(window_topology, self.graph, self.window, self.shifted, *size)
        return self.round(x, topology, source=None if padded == size else partial(pad_nodes, size=size, padded=padded))


class PatchMerging(nn.Module):
    """Merges each cell of 2 x 2 patches to one patch of twice the width, with one linear map per position in the cell:

        y = W norm(x_00 || x_01 || x_10 || x_11) = sum_k W_k norm(...)_k

    Patches outside of the grid are zeros.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.round = MessagePassing(None, "sum", None, NormedTyped(dim, 2 * dim, relations=4))

    def forward(self, x: Tensor, size: Size) -> tuple[Tensor, Size]:
        """x [B, N, dim] over a grid of `size` -> [B, N', 2 * dim] and its grid, half of `size` rounded up."""
        rows = (size[0] + 1) // 2
        columns = (size[1] + 1) // 2
        merged = x.new_empty(len(x), rows * columns, 0)  # destinations without features
        return self.round(merged, build_once(pooling, *size, 2), source=x), (rows, columns)


class NormedTyped(Typed):
    """`Typed` without a bias, with a LayerNorm over the concatenated messages of a node."""

    depends_on = "node"

    def __init__(self, in_dim: int, out_dim: int, relations: int) -> None:
        super().__init__(in_dim, out_dim, relations, bias=False)
        self.norm = nn.LayerNorm(relations * in_dim)
        nn.init.xavier_uniform_(
            self.weight.detach().flatten(0, 1)
        )  # the maps of a cell act as one map of its concatenated patches

    def concat_types(self, out: Tensor) -> Tensor:
        return self.norm(super().concat_types(out))


def window_topology(
    graph: Topology | None, window: int, shifted: bool, rows: int, columns: int
) -> tuple[Topology, Size]:
    """Returns the topology over a grid of patches, and the padded size of the grid.

    `graph` replaces the windows of `window` x `window` patches. In both cases the edge type is the relative position,
    clipped to the range within a window.
    """
    size = (rows, columns)
    reach = window - 1
    offset = GridOffset(columns, reach, reach)
    if graph is not None:
        return graph.with_relation(offset), size
    side = min(window, *size)
    shift = window // 2 if shifted and min(size) > window else 0
    padded = rows + -rows % side, columns + -columns % side
    if padded == size:
        return windows(*size, side, shift).with_relation(offset), padded
    taps = KernelOffset(padded[1], columns, kernel=(2 * reach + 1,) * 2, padding=(reach, reach))
    return Topology.of(_padded_windows, size, padded, side, shift, relation=taps), padded


def pad_nodes(x: Tensor, size: Size, padded: Size) -> Tensor:
    """Pads nodes [B, N, dim] of a grid of `size` with zeros to a grid of size `padded`."""
    image = F.pad(as_image(x, *size), (0, padded[1] - size[1], 0, padded[0] - size[0]))
    return image.flatten(2).mT


def _padded_windows(i: Any, num_src: int, size: Size, padded: Size, side: int, shift: int) -> Iterator[tuple[Any, Any]]:
    """`windows` of a padded grid: destinations are the patches of the grid, sources those of the padded grid."""
    (top, bottom), (left, right) = (
        _window(at, length, side, shift) for at, length in ((i // size[1], padded[0]), (i % size[1], padded[1]))
    )
    for row in range(side):
        base = (top + row) * padded[1]
        yield base + left, np.where(top + row < bottom, base + right, 0)


def _window(at: Any, length: int, side: int, shift: int) -> tuple[Any, Any]:
    """Start and stop, along one axis, of the window that contains position `at`."""
    start = shift + (at - shift) // side * side
    return np.maximum(start, 0), np.minimum(start + side, np.where(at < shift, shift, length))
