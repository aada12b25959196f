"""Images as nodes: pixels or patches in row-major order, and their positions.

Images are [B, C, H, W], as for `nn.Conv2d`. Nodes are [B, N, d], as for the operator. Graphs over them are in
`mpnn.graphs.image`.
"""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, Topology
from mpnn.graphs import as_topology, register
from mpnn.models.layers.positions import sinusoid
from mpnn.update.maps import Linear

Size = tuple[int, int]
"""Height and width, or rows and columns."""


@dataclass(frozen=True, eq=False)
class ImageOutput:
    """Output of an encoder for a batch of images.

    last: output of the last layer, [B, nodes, dim]. pooled: one vector per image, [B, width]. weights: attention
    weights of each layer, as documented by the encoder; None without them.
    """

    last: Tensor
    pooled: Tensor
    weights: tuple[Tensor, ...] | None = None


@register
def with_class_token(patches: Topology | Graph) -> Topology:
    """Adds a class token as node 0. It attends to all nodes, and all nodes attend to it. Node i of `patches` becomes
    node i + 1.

    `with_class_token(complete())` has the same edges as `complete()`.
    """
    return Topology.of(_with_class_token, as_topology(patches, prefixes=False))


def _with_class_token(i: Any, num_src: int, patches: Topology) -> Iterable[tuple[Any, Any]]:
    runs = patches.bind(len(i) - 1, num_src - 1).runs
    yield 0, np.where(i == 0, num_src, 1)
    nth = np.arange(len(runs.row)) - runs.ptr[runs.row]
    for k in range(int(nth.max(initial=-1)) + 1):  # the k-th run of each patch that has more than k runs
        start, stop = np.zeros_like(i), np.zeros_like(i)
        row = runs.row[nth == k] + 1
        start[row], stop[row] = runs.start[nth == k] + 1, runs.stop[nth == k] + 1
        yield start, stop


def pair(size: int | Sequence[int]) -> Size:
    """Returns (height, width) of a size given as one integer or as two."""
    height_width = (size, size) if isinstance(size, int) else tuple(size)
    if len(height_width) != 2:
        raise ValueError(f"a size must be one integer, or two: height and width; got {list(height_width)}")
    return height_width


def size_of(images: Tensor) -> Size:
    """Returns height and width as integers. `torch.compile` specializes programs to this size."""
    return operator.index(images.shape[-2]), operator.index(images.shape[-1])


def patchify(images: Tensor, patch: int | Sequence[int] = 1) -> Tensor:
    """Returns the patches of images [B, C, H, W] as nodes [B, N, pixels * C].

    Pixels of a patch are in row-major order, and the channels of a pixel are adjacent. Pixels beyond the last complete
    patch are dropped. With `patch=1`, nodes are pixels.
    """
    height, width = pair(patch)
    rows = images.shape[-2] // height
    columns = images.shape[-1] // width
    crop = images[..., : rows * height, : columns * width]
    cells = crop.unflatten(-1, (columns, width)).unflatten(-3, (rows, height))  # [B, C, rows, height, columns, width]
    return cells.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def as_image(nodes: Tensor, rows: int, columns: int) -> Tensor:
    """Returns nodes [B, rows * columns, d] as an image [B, d, rows, columns]."""
    return nodes.unflatten(1, (rows, columns)).permute(0, 3, 1, 2)


class Patches(nn.Module):
    """Linear patch embedding (Dosovitskiy et al. 2021, eq. 1).

    Equivalent to a convolution whose stride equals its kernel size, and to a round over `graphs.pooling(height, width,
    patch)` with one linear map for each position in a patch.
    """

    def __init__(self, channels: int, dim: int, patch: int | Sequence[int]) -> None:
        super().__init__()
        self.channels = channels
        self.patch = pair(patch)
        self.to_dim = Linear(self.patch[0] * self.patch[1] * channels, dim)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [B, channels, H, W] to [B, N, dim]. Pixels beyond the last complete patch are ignored."""
        if images.dim() != 4 or images.shape[1] != self.channels or not images.is_floating_point():
            raise ValueError(
                f"images must be floating point [batch, {self.channels}, height, width]; "
                f"got {images.dtype} of shape {list(images.shape)}"
            )
        return self.to_dim(patchify(images, self.patch))

    def grid(self, images: Tensor) -> Size:
        """Returns the numbers of rows and columns of patches of images [B, channels, H, W]."""
        height, width = size_of(images)
        return height // self.patch[0], width // self.patch[1]


def kernel_as_linear(kernel: Tensor) -> Tensor:
    """Returns the kernel [out, in, height, width] of a convolution as the weight [out, height * width * in] of
    `Patches.to_dim`."""
    return kernel.permute(0, 2, 3, 1).flatten(1)


def sinusoidal_2d(rows: int, columns: int, dim: int) -> Tensor:
    """Returns sinusoidal positions on a grid, [rows * columns, dim] (He et al. 2022, as in their code).

    The first half of the components encodes the column, the second half the row. Each is `sinusoid` with all sines
    before all cosines."""
    if dim % 4:
        raise ValueError(f"sinusoidal positions on a grid need a width that is a multiple of 4; got {dim}")
    index = torch.arange(rows * columns)
    return torch.cat([sinusoid(axis, dim // 2, halves=True) for axis in (index % columns, index // columns)], -1)


def interpolate_positions(positions: Tensor, old: Size, new: Size) -> Tensor:
    """Interpolates position vectors [old[0] * old[1], dim] of a grid of size `old` to size `new`, bicubically
    (Dosovitskiy et al. 2021, section 3.2)."""
    if old == new:
        return positions
    image = as_image(positions[None], *old)
    return F.interpolate(image, size=new, mode="bicubic", align_corners=False).flatten(2)[0].T


class GridPositions(nn.Module):
    """Learned position vectors for the nodes of a grid, and for `extra` nodes before them.

    Args:
        size: rows and columns of the grid.
        dim: width of the vectors.
        extra: number of nodes before the grid, such as a class token.
        sinusoidal: use fixed `sinusoidal_2d` vectors for the grid and zeros for the extra nodes. These are not trained.
    """

    def __init__(self, size: Size, dim: int, *, extra: int = 0, sinusoidal: bool = False) -> None:
        super().__init__()
        self.size = size
        self.extra = extra
        if sinusoidal:
            waves = F.pad(sinusoidal_2d(*size, dim), (0, 0, extra, 0))
            self.weight = nn.Parameter(waves, requires_grad=False)
        else:
            self.weight = nn.Parameter(torch.randn(extra + size[0] * size[1], dim) * 0.02)

    def forward(self, size: Size, *, stretch: bool = False) -> Tensor:
        """Returns vectors [extra + rows * columns, dim] for a grid of this size.

        stretch: interpolate the vectors if `size` differs from that of the table."""
        if size == self.size:
            return self.weight
        if not stretch:
            raise ValueError(
                f"these positions are for {self.size[0]} x {self.size[1]} patches, and the image has {size[0]} x "
                f"{size[1]}; resize the image, or interpolate the positions with stretch=True"
            )
        return torch.cat([self.weight[: self.extra], interpolate_positions(self.weight[self.extra :], self.size, size)])
