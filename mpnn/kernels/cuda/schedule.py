"""Distributes the rows of a graph to programs: long rows are cut into pieces, and all pieces are sorted by length.

A program takes several rows of about the same length side by side, so that none waits for another. The longest come
first, so that no long row is left at the end. Everything is computed on the graph's device, once for each graph.

A tile is [rows, edges, heads, width], each a power of two, as Triton requires. Its sizes are tuned here.
"""

from collections.abc import Iterable
from functools import cached_property
from importlib import import_module
from typing import NamedTuple

import torch
from torch import Tensor

SHORT = 8  # a row with at most so many edges shares a program with other rows
MAX_WIDTH = 4096  # the widest head
_EDGES = {True: 16, False: 4}  # edges of a row in a tile, of long rows and of short ones
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MIN_TRITON = 3, 6  # Triton version; older ones were never tried
_NUMBERS = 4096  # of a tile, over the four warps of a program: 32 registers a thread
_PAIRS = 256  # the most rows times edges of a tile, so that narrow features leave enough programs
_HEADS_WIDTH = 128  # heads times width of a tile, if more than one head fits
_PIECE = 256  # the fewest edges of a piece
_PIECES = 1 << 14  # pieces of the whole graph that suffice to fill any GPU evenly


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


class Units(NamedTuple):
    """The pieces of rows of one launch: `row` [count], and their edges `first` to `last` [count]. A piece of a divided
    row writes its partial result to `slot` [count]; -1 for whole rows."""

    row: Tensor
    first: Tensor
    last: Tensor
    slot: Tensor
    count: int


class Tile(NamedTuple):
    """[rows, edges, heads, width], and the number of such blocks of heads that hold all heads."""

    rows: int
    edges: int
    heads: int
    width: int
    blocks: int


class Bin(NamedTuple):
    """The units of long rows, or those of short rows."""

    units: Units
    long: bool

    def grid(self, tile: Tile, batch: int) -> tuple[int]:
        """The programs of a launch."""
        return (-(-self.units.count // tile.rows) * tile.blocks * batch,)


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
        piece: the most edges of a row that one program takes, more than twice `SHORT`. Default: as many as leave any
            GPU evenly filled.
    """

    def __init__(self, ptr: Tensor, col: Tensor, edge: Tensor | None, num_cols: int, piece: int | None = None) -> None:
        self.ptr, self.num_rows, self.num_edges = ptr, len(ptr) - 1, len(col)
        self.edges = Edges(_narrow(col, num_cols), None if edge is None else _narrow(edge, len(col)))
        self.piece = piece or max(_PIECE, power_of_two(len(col) // _PIECES))

    @property
    def bins(self) -> list[Bin]:
        return self._distribution[0]

    @property
    def divided(self) -> Divided:
        return self._distribution[1]

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
    def _distribution(self) -> tuple[list[Bin], Divided]:
        degree = self.ptr.diff()
        pieces = (degree + self.piece - 1).div(self.piece, rounding_mode="floor").clamp(min=1)
        is_cut = pieces > 1
        slots = torch.where(is_cut, pieces, 0)
        longer = torch.where(is_cut, pieces, (degree > SHORT).long())  # parts of cut rows are all long
        # the host waits once, for all the numbers it needs
        count, rows_cut, num_slots, num_long = torch.stack([x.sum() for x in (pieces, is_cut, slots, longer)]).tolist()

        row = torch.arange(self.num_rows, device=self.ptr.device).repeat_interleave(pieces, output_size=count)
        number = torch.arange(count, device=row.device) - (pieces.cumsum(0) - pieces)[row]
        first, last = (self.ptr[row] + degree[row] * k // pieces[row] for k in (number, number + 1))
        slot = torch.where(is_cut[row], (slots.cumsum(0) - slots)[row] + number, -1)
        size = torch.frexp((last - first - 1).clamp(min=0).double()).exponent  # a size is lengths of a factor of 2
        order = size.argsort(descending=True, stable=True)
        units = [_narrow(x[order], max(self.num_edges, self.num_rows) + 1) for x in (row, first, last, slot)]
        bins = [
            Bin(Units(*(x[begin:end] for x in units), end - begin), long)
            for begin, end, long in ((0, num_long, True), (num_long, count, False))
            if begin < end
        ]
        cut = is_cut.int().argsort(descending=True, stable=True)[:rows_cut]
        ptr = torch.cat([pieces.new_zeros(1), pieces[cut].cumsum(0)])
        return bins, Divided(cut, ptr, rows_cut, num_slots)


def _narrow(x: Tensor, most: int) -> Tensor:
    return x.int() if most < 2**31 else x


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, and at least 1."""
    return 1 << max(n - 1, 0).bit_length()


def tile(heads: int, width: int, long: bool, tensors: int = 1) -> Tile:
    """The tile for features [heads, width], if a program holds `tensors` tiles at once."""
    width = power_of_two(width)
    together = min(power_of_two(heads), max(1, _HEADS_WIDTH // width))
    pairs = max(1, min(_PAIRS, _NUMBERS // tensors // (together * width)))
    edges = min(_EDGES[long], pairs)
    return Tile(pairs // edges, edges, together, width, -(-heads // together))
