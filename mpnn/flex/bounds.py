"""Bounds of a function of two indices over whole blocks of pairs, by interval arithmetic.

    q_idx >= kv_idx    is True for rows 128 to 255 and columns 0 to 127, and False for rows 0 to 127 and columns 128 on

A part that depends on one index is computed for each number of it, and its least and greatest numbers in a block are
its bounds; a condition on the difference of the indices is computed for each difference; a table of booleans is
counted. All else follows by one rule: an operation that ascends or descends in each of its operands has its least and
its greatest result where each operand is at one of its bounds, so the operation itself is run on these. Where nothing
is known, as of an unknown operation, an overflow, an infinity or NaN, a condition may be True or False. So bounds may
be wide, and are never wrong.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mpnn.flex.programs import KV, Node, Program, Q, call, mapped

Interval = tuple[Tensor, Tensor]
"""The least and the greatest number of each block, [blocks] or [1], of the type of the node."""

_aten = torch.ops.aten
_WIDE = 1 << 62  # beyond this, float64 may not show whether integers overflow
_MOST_OF_TABLE = 1 << 22  # entries of a table of booleans that are counted


class Blocks(NamedTuple):
    """Blocks of a grid of `height` rows and `width` columns, by the numbers of their row and column of blocks."""

    row: NDArray[np.int64]
    column: NDArray[np.int64]
    height: int
    width: int


class Bounds:
    """Bounds of the nodes of a program for one b and one h, over blocks of num_dst x num_src pairs."""

    def __init__(self, program: Program, b: int, h: int, num_dst: int, num_src: int) -> None:
        self.program = program
        self.at = torch.tensor(b), torch.tensor(h)
        self.sizes = num_dst, num_src
        self._cached: dict[tuple[Any, ...], Any] = {}

    def decide(self, blocks: Blocks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which blocks have all pairs, and which have none, bool [blocks] each."""
        least, greatest = _Grid(self, blocks).of(self.program.node) or _EITHER
        count = len(blocks.row)
        return least.expand(count).numpy(), (~greatest).expand(count).numpy()

    def once(self, build: Callable[..., Any], x: Node, *more: Any) -> Any:
        """`build(x, *more)`, computed once for all blocks."""
        key = (build, x, *more)
        if key not in self._cached:
            self._cached[key] = build(x, *more)
        return self._cached[key]

    def ends_of(self, x: Node) -> frozenset[int]:
        """Which of q_idx and kv_idx a node depends on."""
        return frozenset(self.program.at(x).depends_on() & {Q, KV})

    def numbers(self, x: Node) -> Tensor:
        """The numbers of a node, for each number of the index that it depends on."""
        program = self.program.at(x)
        zero = torch.zeros((), dtype=torch.int64)
        for end in self.once(self.ends_of, x):
            index = torch.arange(self.sizes[end - Q])
            q, kv = (index, zero) if end == Q else (zero, index)
            return mapped(program, (end,))(*self.at, q, kv).detach()
        return program(*self.at, zero, zero).detach()

    def by_size(self, x: Node, size: int) -> Interval:
        """The least and the greatest of every `size` numbers of a node."""
        numbers = self.once(self.numbers, x).reshape(-1)
        groups = torch.cat([numbers, numbers[-1:].expand(-len(numbers) % size)]).view(-1, size)
        least, greatest = groups.aminmax(dim=1)
        return least, greatest

    def counts(self, table: Node, at: tuple[int | None, ...]) -> Tensor | None:
        """How many entries of a table of booleans lie before each place, at these indices, of which None are those that
        vary; None if there are too many."""
        entries = self.once(self.numbers, table)[tuple(slice(None) if index is None else index for index in at)]
        if entries.dim() > 2 or entries.numel() > _MOST_OF_TABLE:
            return None
        return F.pad(reduce(torch.cumsum, range(entries.dim()), entries.long()), (1, 0) * entries.dim())

    def by_offset(self, x: Node) -> Tensor:
        """For how many differences q_idx - kv_idx below each one a condition on them holds."""
        offset = torch.arange(1 - self.sizes[1], self.sizes[0])
        holds = mapped(self.program.at(x), (Q, KV))(*self.at, offset.clamp(min=0), (-offset).clamp(min=0))
        return F.pad(holds.cumsum(0), (1, 0))


class _Grid:
    """Bounds of nodes over some blocks."""

    def __init__(self, bounds: Bounds, blocks: Blocks) -> None:
        self.bounds = bounds
        self.row = torch.from_numpy(blocks.row)
        self.column = torch.from_numpy(blocks.column)
        self.height = blocks.height
        self.width = blocks.width
        self._known: dict[Node, Interval | None] = {}

    def of(self, x: Any) -> Interval | None:
        """The bounds of a node; None if nothing is known."""
        if not isinstance(x, Node) or not isinstance(x.result, Tensor) or x.result.dim():
            return None
        if x not in self._known:
            interval = self._find(x)
            if interval is not None and x.result.is_floating_point():
                # Of an infinity, sums and products may be NaN.
                interval = interval if all(bool(end.isfinite().all()) for end in interval) else None
            self._known[x] = _EITHER if interval is None and x.result.dtype is torch.bool else interval
        return self._known[x]

    def _find(self, x: Node) -> Interval | None:
        ends = self.bounds.once(self.bounds.ends_of, x)
        if len(ends) < 2:
            return self._of_one_end(x, ends)
        if x.result.dtype is torch.bool and self.bounds.program.at(x).is_by_offset():
            return self._of_offset(x)
        name = _name(x)
        if name in _EQUAL:
            return self.of(self.bounds.once(_EQUAL[name], x))
        return self._of_table(x) if name == "index" else self._at_bounds(x)

    def _of_one_end(self, x: Node, ends: frozenset[int]) -> Interval | None:
        """The bounds of a node that depends only on q_idx, on kv_idx alone, or on neither."""
        if x.result.is_complex():
            return None
        if not ends:
            number = self.bounds.once(self.bounds.numbers, x).view(1)
            return number, number
        size, which = (self.height, self.row) if Q in ends else (self.width, self.column)
        least, greatest = self.bounds.once(self.bounds.by_size, x, size)
        return least[which], greatest[which]

    def _of_offset(self, x: Node) -> Interval:
        """The bounds of a condition on q_idx - kv_idx: whether it holds for all, or for some, of the differences."""
        num_dst, num_src = self.bounds.sizes
        counts = self.bounds.once(self.bounds.by_offset, x)
        top = self.row * self.height
        bottom = (top + self.height).clamp(max=num_dst)
        first = self.column * self.width
        last = (first + self.width).clamp(max=num_src)
        least = top - last + num_src
        stop = bottom - first + num_src - 1
        number = counts[stop] - counts[least]
        return number == stop - least, number > 0

    def _of_table(self, x: Node) -> Interval | None:
        """The bounds of a node that looks up a table of booleans, from those of its indices: whether all, or some, of
        the entries between them hold."""
        of, indices = x.args
        if not isinstance(of, Node) or of.result.dtype is not torch.bool or len(indices) != of.result.dim():
            return None
        between = [interval for interval in map(self.of, indices) if interval is not None]
        if len(between) < len(indices) or self.bounds.once(self.bounds.ends_of, of):
            return None
        at: list[int | None] = []
        varying = []
        for size, (least, greatest) in zip(of.result.shape, between, strict=True):
            if (least < 0).any() or (greatest >= size).any():
                return None  # negative numbers count from the end
            is_one = len(least) == 1 and least.equal(greatest)
            at.append(int(least) if is_one else None)
            varying += [] if is_one else [(least.long(), greatest.long())]
        counts = self.bounds.once(self.bounds.counts, of, tuple(at))
        if counts is None:
            return None
        number = torch.zeros(1, dtype=torch.int64)
        # Of a sum over a rectangle: the sums up to its corners, with alternating signs.
        for corner in product((0, 1), repeat=len(varying)):
            place = tuple(pair[0] if first else pair[1] + 1 for first, pair in zip(corner, varying, strict=True))
            number = number + (-1) ** sum(corner) * counts[place]
        total = prod([greatest + 1 - least for least, greatest in varying])
        return number == total, number > 0

    def _at_bounds(self, x: Node) -> Interval | None:
        """The bounds of an operation that ascends or descends in each operand: its results at bounds of these."""
        operands = [self.of(operand) if isinstance(operand, Node) else (operand, operand) for operand in x.args]
        if any(interval is None for interval in operands) or not _is_monotone(x, operands):
            return None
        return None if _overflows(x, operands) else _results(x, operands)


_EITHER = torch.tensor([False]), torch.tensor([True])


def _name(x: Node) -> str:
    """The name of an operation in torch's `aten`."""
    return getattr(getattr(x.target, "overloadpacket", None), "__name__", "")


def _is_monotone(x: Node, operands: Sequence[Any]) -> bool:
    """Whether the result of an operation ascends or descends in each operand between its bounds, whatever the others
    are."""
    name = _name(x)
    if name in _OF_BOOLEANS or (name in _CASTS and x.result.dtype is torch.bool):
        return all(operand.result.dtype is torch.bool for operand in x.inputs)
    if name == "floor_divide":
        return not x.result.is_floating_point() and bool(torch.as_tensor(operands[1][0] > 0).all())
    return name in _CASTS or (name in _SIGNS and not x.kwargs)


def _results(x: Node, operands: Sequence[Any]) -> Interval:
    """The least and the greatest result of an operation."""
    least, greatest = (
        [x.target(*corner, **x.kwargs) for corner in _corners(_SIGNS[_name(x)], operands, *ends)]
        for ends in ((0, 1), (1, 0))
    )
    return reduce(torch.minimum, least), reduce(torch.maximum, greatest)


def _corners(signs: str, operands: Sequence[Any], first: int, last: int) -> Iterator[tuple[Any, ...]]:
    """The bounds of operands at which a result is extreme."""
    ends = {"+": (first,), "-": (last,), "?": (first, last)}
    return product(*([pair[end] for end in ends[sign]] for pair, sign in zip(operands, signs, strict=False)))


def _overflows(x: Node, operands: Sequence[Any]) -> bool:
    """Whether an integer may not be the exact result of an operation, because that does not fit its type."""
    if x.result.dtype is torch.bool or x.result.is_floating_point():
        return False
    exact = [(_exact(torch.amin, least), _exact(torch.amax, greatest)) for least, greatest in operands]
    least, greatest = exact[0] if x.kwargs else _results(x, exact)
    info = torch.iinfo(x.result.dtype)
    return not max(info.min, -_WIDE) <= float(least) <= float(greatest) <= min(info.max, _WIDE)


def _exact(extreme: Callable[[Tensor], Tensor], x: Any) -> Any:
    """The extreme number of all blocks, in float64 unless it is a boolean."""
    if not isinstance(x, Tensor):
        return x
    return extreme(x) if x.dtype is torch.bool else extreme(x).double()


_CASTS = {"_to_copy", "clone", "detach", "alias", "lift_fresh"}
_OF_BOOLEANS = {f"{kind}_{name}" for kind in ("bitwise", "logical") for name in ("and", "or", "xor", "not")}
_SIGNS = {
    **dict.fromkeys(("add", "minimum", "maximum", "bitwise_and", "logical_and", "bitwise_or", "logical_or"), "++"),
    **dict.fromkeys(("sub", "ge", "gt"), "+-"),
    **dict.fromkeys(("rsub", "le", "lt"), "-+"),
    **dict.fromkeys(("mul", "bitwise_xor", "logical_xor"), "??"),
    **dict.fromkeys(("neg", "bitwise_not", "logical_not"), "-"),
    **dict.fromkeys(_CASTS, "+"),
    "floor_divide": "+?",
    "clamp": "+++",
    "where": "?++",
}
"""Whether operations, by their name in torch's `aten`, ascend (+) or descend (-) in each operand, or either (?)."""


def _like(x: Node, target: Any, *args: Any) -> Node:
    return call(target, *args, result=x.result)


def _compared(x: Node, joined: Any, *comparisons: Any) -> Node:
    """Two comparisons of the same numbers, joined."""
    return _like(x, joined, *(_like(x, getattr(one, x.target._overloadname), *x.args) for one in comparisons))


def _equal(x: Node) -> Node:
    return _compared(x, _aten.bitwise_and.Tensor, _aten.ge, _aten.le)


def _different(x: Node) -> Node:
    return _compared(x, _aten.bitwise_or.Tensor, _aten.lt, _aten.gt)


def _absolute(x: Node) -> Node:
    return _like(x, _aten.maximum.default, *x.args, _like(x, _aten.neg.default, *x.args))


def _remainder(x: Node) -> Node:
    number, divisor = x.args
    whole = _like(x, _aten.mul.Tensor, _like(x, _aten.floor_divide.default, number, divisor), divisor)
    return _like(x, _aten.sub.Tensor, number, whole)


_EQUAL: dict[str, Callable[[Node], Node]] = {
    "eq": _equal,
    "ne": _different,
    "abs": _absolute,
    "remainder": _remainder,
}
"""Operations that neither ascend nor descend, as others that do."""
