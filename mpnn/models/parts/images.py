"""Images as nodes: pixels or patches in reading order, and where they stand.

Images are [B, C, H, W], as torch's convolutions take them; nodes are [B, N, d], as the operator does. Graphs over them
are those of `mpnn.graphs.image`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graphs import register
from mpnn.models.parts.positions import sinusoid
from mpnn.topology import Topology

Size = tuple[int, int]
"""Down and across."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What an encoder makes of a batch of images.

    last [B, nodes, dim]. pooled [B, width], what it makes of each image as a whole. states, weights: of each layer or
    stage, as the encoder says.
    """

    last: Tensor
    pooled: Tensor
    states: tuple[Tensor, ...] | None = None
    weights: tuple[Tensor, ...] | None = None


@register
def with_class_token(patches: Topology) -> Topology:
    """One node more, at 0, which hears and is heard by all; the others, one further on, hear as they do in `patches`.

    Over `complete()` this is `complete()` again.
    """
    return Topology.of(_with_class_token, patches)


def _with_class_token(i: Any, num_src: int, patches: Topology) -> Iterable[tuple[Any, Any]]:
    runs = patches.bind(len(i) - 1, num_src - 1).runs
    yield 0, np.where(i == 0, num_src, 1)
    nth = np.arange(len(runs.row)) - runs.ptr[runs.row]
    for k in range(int(nth.max(initial=-1)) + 1):  # the k-th run of every patch that has so many
        start, stop = np.zeros_like(i), np.zeros_like(i)
        row = runs.row[nth == k] + 1
        start[row], stop[row] = runs.start[nth == k] + 1, runs.stop[nth == k] + 1
        yield start, stop


def as_matrix(weights: Tensor, graph: Graph) -> Tensor:
    """Attention weights [B, E, H] as matrices [B, H, num_dst, num_src], zeros where there is no edge."""
    src, dst = graph.edge_index
    matrix = weights.new_zeros(len(weights), graph.num_dst, graph.num_src, weights.shape[-1])
    return matrix.index_put((torch.arange(len(weights), device=dst.device)[:, None], dst, src), weights).movedim(-1, 1)


def pair(size: int | Sequence[int]) -> Size:
    """A size given as one integer or as two, down and across."""
    both = (size, size) if isinstance(size, int) else tuple(size)
    if len(both) != 2:
        raise ValueError(f"a size is one integer, or two: down and across; got {list(both)}")
    return both


def size_of(images: Tensor) -> Size:
    """Height and width; programs that `torch.compile` makes are for images of this size."""
    return operator.index(images.shape[-2]), operator.index(images.shape[-1])


def patchify(images: Tensor, patch: int | Sequence[int] = 1) -> Tensor:
    """The patches of images [B, C, H, W], each as the numbers of its pixels: [B, N, pixels * C], pixels in reading
    order and channels together. Pixels beyond the last whole patch are left out. Patches of 1 are the pixels.
    """
    height, width = pair(patch)
    rows, columns = images.shape[-2] // height, images.shape[-1] // width
    whole = images[..., : rows * height, : columns * width]
    cells = whole.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))  # [B, C, rows, height, columns, width]
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches: Tensor, patch: int | Sequence[int], rows: int, columns: int) -> Tensor:
    """Images [B, C, H, W] of `rows` x `columns` patches [B, N, pixels * C]."""
    height, width = pair(patch)
    cells = patches.unflatten(1, (rows, columns)).unflatten(-1, (height, width, -1))
    return cells.permute(0, 5, 1, 3, 2, 4).flatten(4).flatten(2, 3)


def as_image(nodes: Tensor, rows: int, columns: int) -> Tensor:
    """Nodes [B, rows * columns, d] as an image [B, d, rows, columns]."""
    return nodes.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)


class Patches(nn.Module):
    """A vector for each patch, linear in its pixels (Dosovitskiy et al. 2021, eq. 1).

    The same as a round over `graphs.pooling(height, width, patch)` with one linear map for each place in a patch, and
    as a convolution whose stride is its kernel.
    """

    def __init__(self, channels: int, dim: int, patch: int | Sequence[int]) -> None:
        super().__init__()
        self.channels, self.patch = channels, pair(patch)
        self.to_dim = nn.Linear(self.patch[0] * self.patch[1] * channels, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Images [B, channels, H, W] -> [B, N, dim]; pixels beyond the last whole patch are not looked at."""
        if images.dim() != 4 or images.shape[1] != self.channels or not images.is_floating_point():
            raise ValueError(
                f"images must be floating point [batch, {self.channels}, height, width]; "
                f"got {images.dtype} of shape {list(images.shape)}"
            )
        return self.to_dim(patchify(images, self.patch))

    def grid(self, images: Tensor) -> Size:
        """How many patches images have, down and across."""
        height, width = size_of(images)
        return height // self.patch[0], width // self.patch[1]


def hide(patches: Tensor, hidden: Tensor, token: Tensor | None) -> Tensor:
    """Patches [B, N, dim], those in `hidden` (bool [B, N]) behind one vector [dim]: masked image modelling."""
    if token is None:
        raise ValueError("this model has no vector to hide patches behind; make it with hides=True")
    return torch.where(hidden[..., None], token, patches)


def linear_of(kernel: Tensor) -> Tensor:
    """A convolution's kernel [out, in, height, width] as the weight of `Patches.to_dim`, [out, height * width * in]."""
    return kernel.permute(0, 2, 3, 1).flatten(1)


def sinusoidal_2d(rows: int, columns: int, dim: int) -> Tensor:
    """Places on a grid as waves, [rows * columns, dim]: the first half of the components says how far across, the
    second how far down, each as `sinusoid` with all sines before all cosines (He et al. 2022, as in their code).

    Raises:
        ValueError: `dim` is no multiple of 4, a sine and a cosine for each direction.
    """
    if dim % 4:
        raise ValueError(f"sinusoidal positions on a grid need a width that is a multiple of 4; got {dim}")
    at = torch.arange(rows * columns)
    return torch.cat([sinusoid(place, dim // 2, halves=True) for place in (at % columns, at // columns)], -1)


def stretched(positions: Tensor, old: Size, new: Size) -> Tensor:
    """Vectors of a grid of the size `old`, [old[0] * old[1], dim], for one of the size `new`: each new place between
    the old ones where it would lie (bicubic), so that what a place means is kept (Dosovitskiy et al. 2021, 3.2)."""
    if old == new:
        return positions
    image = as_image(positions[None], *old)
    return F.interpolate(image, size=new, mode="bicubic", align_corners=False).flatten(2)[0].T


class GridPositions(nn.Module):
    """A learned vector for each place of a grid (learned 2-D positions), and for `extra` nodes that stand before it.

    `sinusoidal`: the grid's are fixed waves instead (`sinusoidal_2d`), and those of extra nodes fixed zeros.
    """

    def __init__(self, size: Size, dim: int, *, extra: int = 0, sinusoidal: bool = False) -> None:
        super().__init__()
        self.size, self.extra = size, extra
        if sinusoidal:
            waves = F.pad(sinusoidal_2d(*size, dim), (0, 0, extra, 0))
            self.weight = nn.Parameter(waves, requires_grad=False)
        else:
            self.weight = nn.Parameter(torch.randn(extra + size[0] * size[1], dim) * 0.02)

    def forward(self, size: Size, *, stretch: bool = False) -> Tensor:
        """[extra + rows * columns, dim] for a grid of this size; `stretch` fits them to one that is not their own.

        Raises:
            ValueError: another grid, and no `stretch`.
        """
        if size == self.size:
            return self.weight
        if not stretch:
            raise ValueError(
                f"these positions are for {self.size[0]} x {self.size[1]} patches, and the image has {size[0]} x "
                f"{size[1]}; ask for them to be stretched, or resize the image"
            )
        return torch.cat([self.weight[: self.extra], stretched(self.weight[self.extra :], self.size, size)])
