"""Distributes the rows of a graph to programs: long rows are cut into pieces, and all pieces are sorted by length.

A program takes one or several rows of about the same length side by side, so that none waits for another. The longest
come first, so that no long row is left at the end. Everything is computed on the graph's device, once for each graph.

A tile is [rows, edges, heads, width], each a power of two, as Triton requires. `TUNING` holds the sizes of tiles and
the warps of programs.
"""

from collections.abc import Iterable
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

from mpnn.kernels.cuda.launch import Launches

MAX_WIDTH = 4096  # the widest head
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MIN_TRITON = 3, 6  # Triton version; older ones were never tried
_PAIRS = 256  # the most rows times edges of a tile, so that narrow features leave enough programs
_PIECE = 256  # the fewest edges of a piece
_PIECES = 1 << 14  # pieces of the whole graph that suffice to fill any GPU evenly


class Program(NamedTuple):
    """How large a program is: its warps, the numbers of one of its tiles, and the edges that it takes of a row at
    once."""

    warps: int
    numbers: int
    edges: int


# A pass gathers features of the other ends of edges: as many bytes in as few dependent steps as registers allow.
TUNING: dict[str, Program] = {
    "sum": Program(1, 256, 2),
    "extreme": Program(1, 256, 2),
    "dot": Program(1, 256, 2),
    "dot, back": Program(1, 256, 2),
    "additive": Program(1, 512, 8),
    "additive, back": Program(1, 512, 8),
    "activated": Program(1, 512, 8),
    "activated, back": Program(1, 512, 8),
    "join": Program(1, 256, 1),
}


def unavailable(value: Tensor, tensors: Iterable[Tensor]) -> str | None:
    """The reason why no GPU kernel supports this value and all tensors of a round, or None."""
    if (why := unusable()) is not None:
        return why
    if value.dtype not in _TYPES:
        return f"it has no kernels for {value.dtype}"
    width = max((x.shape[-1] for x in tensors if x.dim()), default=0)
    return (
        f"on CUDA its features are at most {MAX_WIDTH:,} wide, and these are {width:,} wide"
        if width > MAX_WIDTH
        else None
    )


def unusable() -> str | None:
    """The reason why no kernel for GPUs runs with the Triton that is installed, or None."""
    try:
        version: str = import_module("triton").__version__
    except ImportError:
        return "triton is not installed: pip install triton"
    if tuple(map(int, version.split(".")[:2])) < _MIN_TRITON:
        return f"its kernels need triton 3.6, which PyTorch 2.11 and newer install, and triton {version} is installed"
    return None


class Tile(NamedTuple):
    """[rows, edges, heads, width], the number of such blocks of heads that hold all heads, and the warps."""

    rows: int
    edges: int
    heads: int
    width: int
    blocks: int
    warps: int


class Divided(NamedTuple):
    """The rows cut into pieces: row `row[k]` has the slots `ptr[k]` to `ptr[k + 1]`, in the order of its edges."""

    row: Tensor
    ptr: Tensor
    count: int
    slots: int


class Edges(NamedTuple):
    """The other end of each edge, [E], and its number in the caller's order; None if that is the same order."""

    col: Tensor
    edge: Tensor | None


class Sorted:
    """Edges sorted by row, and the distribution of their rows. Indices are int32 where they fit, so that kernels read
    half as much.

    Args:
        ptr: [rows + 1] int64: row r has the edges `ptr[r]` to `ptr[r + 1]`.
        col: [E] int64, below `num_cols`.
        edge: [E] int64, or None.
        piece: the most edges of a row that one program takes. Default: as many as leave any GPU evenly filled.
    """

    def __init__(self, ptr: Tensor, col: Tensor, edge: Tensor | None, num_cols: int, piece: int | None = None) -> None:
        self.ptr = ptr
        self.num_rows = len(ptr) - 1
        self.num_edges = len(col)
        self.edges = Edges(_narrow(col, num_cols), None if edge is None else _narrow(edge, len(col)))
        self.piece = piece or max(_PIECE, power_of_two(len(col) // _PIECES))
        self.launches = Launches()

    @property
    def units(self) -> Tensor:
        """The pieces of rows [count, 4]: row, first edge, last edge, and the slot for the result of a piece of a
        divided row; -1 for whole rows."""
        return self._distribution[0]

    @property
    def divided(self) -> Divided:
        return self._distribution[1]

    def programs(self, tile: Tile, batch: int) -> int:
        """The programs of a launch."""
        return -(-len(self.units) // tile.rows) * tile.blocks * batch

    @cached_property
    def numbered(self) -> Edges:
        """The edges as if each came from a node of its own, which has the number of the edge."""
        edge = self.edges.edge
        return Edges(torch.arange(self.num_edges, device=self.ptr.device) if edge is None else edge, None)

    def inverse_degree(self, dtype: torch.dtype) -> Tensor:
        """[rows, 1, 1]; 1 for rows without edges."""
        return (1 / self.ptr.diff().clamp(min=1).to(dtype))[:, None, None]

    @cached_property
    def row_of_number(self) -> Tensor:
        """The row of each edge in the caller's order, [E]."""
        rows = torch.arange(self.num_rows, device=self.ptr.device)
        row = rows.repeat_interleave(self.ptr.diff(), output_size=self.num_edges)
        return row if self.edges.edge is None else torch.empty_like(row).index_copy_(0, self.edges.edge.long(), row)

    @cached_property
    def _distribution(self) -> tuple[Tensor, Divided]:
        degree = self.ptr.diff()
        pieces = (degree + self.piece - 1).div(self.piece, rounding_mode="floor").clamp(min=1)
        is_cut = pieces > 1
        slots = torch.where(is_cut, pieces, 0)
        # the host waits once, for all the numbers it needs
        count, rows_cut, num_slots = torch.stack([x.sum() for x in (pieces, is_cut, slots)]).tolist()

        row = torch.arange(self.num_rows, device=self.ptr.device).repeat_interleave(pieces, output_size=count)
        number = torch.arange(count, device=row.device) - (pieces.cumsum(0) - pieces)[row]
        first, last = (self.ptr[row] + degree[row] * k // pieces[row] for k in (number, number + 1))
        slot = torch.where(is_cut[row], (slots.cumsum(0) - slots)[row] + number, -1)
        order = _size(last - first).argsort(descending=True, stable=True)
        units = torch.stack([row, first, last, slot], 1)[order]
        cut = is_cut.int().argsort(descending=True, stable=True)[:rows_cut]
        ptr = torch.cat([pieces.new_zeros(1), pieces[cut].cumsum(0)])
        return _narrow(units, max(self.num_edges, self.num_rows) + 1), Divided(cut, ptr, rows_cut, num_slots)


def _size(length: Tensor) -> Tensor:
    """Numbers by which pieces are sorted. Equal ones are of lengths within an eighth of each other, and stay in the
    order of rows, whose features may lie together."""
    mantissa, exponent = torch.frexp(length.double())
    return exponent * 8 + (mantissa * 16).long() % 8


def _narrow(x: Tensor, most: int) -> Tensor:
    return x.int() if most < 2**31 else x


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile(heads: int, width: int, program: Program) -> Tile:
    """The tile of a program for features [heads, width]."""
    width = power_of_two(width)
    together = min(power_of_two(heads), max(1, program.numbers // program.edges // width))
    pairs = max(1, min(_PAIRS, program.numbers // (together * width)))
    edges = min(program.edges, pairs)
    return Tile(pairs // edges, edges, together, width, -(-heads // together), program.warps)
