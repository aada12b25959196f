"""Bounds of a function of two indices over whole blocks of pairs, by interval arithmetic.

    q_idx >= kv_idx    is True for rows 128 to 255 and columns 0 to 127, and False for rows 0 to 127 and columns 128 on

Bounds follow from the operations of the function. A part that depends on one index is computed for each number of it,
and its least and greatest numbers in a block are its bounds; a condition on the difference of the indices is computed
for each difference; a table of booleans is counted. Sums, products, comparisons and so on have the bounds that follow
from those of their operands, computed in the same type: rounding is monotone. Where nothing is known, as of an unknown
operation, an overflow or NaN, a condition may be True or False. So bounds may be wide, and are never wrong.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.flex.programs import KV, Node, Program, Q, mapped

Numbers = NDArray[Any]
Interval = tuple[Numbers, Numbers]
"""The least and the greatest number of each block, [blocks] or []. Booleans are 0 and 1."""

_WIDE = 1 << 62  # integers beyond this may overflow in a sum
_FACTOR = 1 << 31  # and beyond this in a product
_MOST_OF_TABLE = 1 << 22  # entries of a table of booleans that are counted
_FLOATS = {torch.float32: np.float32, torch.float64: np.float64}
_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


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
        self._ends: dict[Node, frozenset[int]] = {}
        self._vectors: dict[Node, Numbers | None] = {}
        self._counts: dict[Node, Numbers] = {}
        self._of_grid: dict[tuple[Node, int], Interval] = {}

    def decide(self, blocks: Blocks) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Which blocks have all pairs, and which have none, bool [blocks] each."""
        with np.errstate(all="ignore"):
            least, greatest = self._interval(self.program.node, blocks, {}) or (np.zeros(()), np.ones(()))
        shape = blocks.row.shape
        return np.broadcast_to(least > 0, shape), np.broadcast_to(greatest < 1, shape)

    def _interval(self, x: Any, blocks: Blocks, known: dict[Node, Interval | None]) -> Interval | None:
        """The bounds of a node or a number; None if nothing is known."""
        if not isinstance(x, Node):
            return None
        if x not in known:
            interval = self._find(x, blocks, known) if _is_scalar(x.result) else None
            if interval is None and _is_scalar(x.result) and x.result.dtype is torch.bool:
                interval = np.zeros((), np.int64), np.ones((), np.int64)
            known[x] = interval
        return known[x]

    def _find(self, x: Node, blocks: Blocks, known: dict[Node, Interval | None]) -> Interval | None:
        ends = self._ends_of(x)
        if len(ends) < 2:
            return self._of_one_end(x, blocks)
        if x.result.dtype is torch.bool and self.program.at(x).is_by_offset():
            return self._of_offset(x, blocks)
        operation = _OPERATIONS.get(getattr(getattr(x.target, "overloadpacket", None), "__name__", ""))
        if operation is None:
            return None
        return operation(_Operands(self, x, blocks, known))

    def _ends_of(self, x: Node) -> frozenset[int]:
        """Which of q_idx and kv_idx a node depends on."""
        if x not in self._ends:
            self._ends[x] = frozenset(self.program.at(x).depends_on() & {Q, KV})
        return self._ends[x]

    # ------------------------------------------------------------------------------------ parts that are computed

    def _of_one_end(self, x: Node, blocks: Blocks) -> Interval | None:
        """The bounds of a node that depends only on q_idx, on kv_idx alone, or on neither."""
        if x not in self._vectors:
            self._vectors[x] = _numbers(self._computed(x))
        vector = self._vectors[x]
        if vector is None:
            return None
        ends = self._ends_of(x)
        if not ends:
            return vector, vector
        size = blocks.height if Q in ends else blocks.width
        if (x, size) not in self._of_grid:
            begins = np.arange(0, len(vector), size)
            self._of_grid[x, size] = np.minimum.reduceat(vector, begins), np.maximum.reduceat(vector, begins)
        which = blocks.row if Q in ends else blocks.column
        least, greatest = self._of_grid[x, size]
        return least[which], greatest[which]

    def _computed(self, x: Node) -> Tensor:
        """The numbers of a node for each number of the index that it depends on."""
        program = self.program.at(x)
        zero = torch.zeros((), dtype=torch.int64)
        for end in self._ends_of(x):
            index = torch.arange(self.sizes[end - Q])
            q, kv = (index, zero) if end == Q else (zero, index)
            return mapped(program, (end,))(*self.at, q, kv)
        return program(*self.at, zero, zero)

    def _of_offset(self, x: Node, blocks: Blocks) -> Interval | None:
        """The bounds of a condition on q_idx - kv_idx: whether it holds for all, or for some, of the differences."""
        num_dst, num_src = self.sizes
        if x not in self._counts:
            offset = torch.arange(1 - num_src, num_dst)
            holds = mapped(self.program.at(x), (Q, KV))(*self.at, offset.clamp(min=0), (-offset).clamp(min=0))
            self._counts[x] = np.append(0, np.cumsum(holds.numpy()))
        counts = self._counts[x]
        top = blocks.row * blocks.height
        bottom = np.minimum(top + blocks.height, num_dst)
        first = blocks.column * blocks.width
        last = np.minimum(first + blocks.width, num_src)
        least = top - last + num_src
        stop = bottom - first + num_src - 1
        return _of_counts(counts[stop] - counts[least], stop - least)

    def of_table(self, x: Node, of: Node, indices: list[Interval]) -> Interval | None:
        """The bounds of a node that looks up a table of booleans, from those of its indices: whether all, or some, of
        the entries between them hold."""
        if self._ends_of(of):
            return None
        table = self._computed(of)
        varying: list[Interval] = []
        for size, (least, greatest) in zip(table.shape, indices, strict=True):
            if (least < 0).any() or (greatest >= size).any():
                return None  # negative numbers count from the end
            if least.ndim == 0 and least == greatest:
                table = table.select(len(varying), int(least))
            else:
                varying.append((least, greatest))
        if len(varying) > 2 or table.numel() > _MOST_OF_TABLE:
            return None
        if x not in self._counts:
            counts = table.detach().numpy().astype(np.int64)
            for dim in range(len(varying)):
                counts = np.insert(np.cumsum(counts, dim), 0, 0, dim)
            self._counts[x] = counts
        counts = self._counts[x]
        number = np.zeros((), np.int64)
        total = np.ones((), np.int64)
        for least, greatest in varying:
            total = total * (greatest + 1 - least)
        # Of a sum over a rectangle: the sums up to its corners, with alternating signs.
        for corner in range(1 << len(varying)):
            at = tuple(pair[0] if corner >> k & 1 else pair[1] + 1 for k, pair in enumerate(varying))
            number = number + (-1) ** corner.bit_count() * counts[at]
        return _of_counts(number, total)


def _of_counts(number: Numbers, total: Numbers) -> Interval:
    return (number == total).astype(np.int64), (number > 0).astype(np.int64)


def _is_scalar(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dim() == 0


def _numbers(x: Tensor) -> Numbers | None:
    """Numbers as numpy's int64, float32 or float64; None if their type is another one."""
    if x.dtype in _INTEGERS:
        return x.detach().long().numpy()
    return x.detach().numpy() if x.dtype in _FLOATS else None


# ---------------------------------------------------------------------------------------- operations


class _Operands:
    """The operands of a node over blocks."""

    def __init__(self, bounds: Bounds, node: Node, blocks: Blocks, known: dict[Node, Interval | None]) -> None:
        self.bounds = bounds
        self.node = node
        self._blocks = blocks
        self._known = known

    @property
    def args(self) -> tuple[Any, ...]:
        return self.node.args

    @property
    def dtype(self) -> torch.dtype:
        """The type of the result."""
        dtype: torch.dtype = self.node.result.dtype
        return dtype

    @property
    def common_dtype(self) -> torch.dtype:
        """The type in which the first two operands are compared."""
        x, y = (a.result if isinstance(a, Node) else a for a in self.args[:2])
        return torch.result_type(x, y)

    def plain(self, k: int) -> Interval | None:
        """The bounds of operand k in its own type."""
        return self.bounds._interval(self.args[k], self._blocks, self._known)

    def of(self, x: Any, dtype: torch.dtype) -> Interval | None:
        """The bounds of a node or of a number, converted to a type."""
        if isinstance(x, Node):
            interval = self.bounds._interval(x, self._blocks, self._known)
            own = x.result.dtype
        elif isinstance(x, (bool, int, float)):
            own = torch.float64 if isinstance(x, float) else torch.int64
            if own is torch.int64 and abs(x) > _WIDE:
                return None
            number = np.asarray(x, np.float64 if isinstance(x, float) else np.int64)
            interval = number, number
        else:
            return None
        return None if interval is None else _converted(interval, own, dtype)

    def pair(self, dtype: torch.dtype) -> tuple[Interval, Interval] | None:
        """The bounds of the first two operands, converted to a type."""
        if len(self.args) != 2 or self.node.kwargs:
            return None
        x, y = (self.of(a, dtype) for a in self.args)
        return None if x is None or y is None else (x, y)


def _converted(x: Interval, own: torch.dtype, dtype: torch.dtype) -> Interval | None:
    """Bounds in another type; None if numbers do not fit it, or change in another way than by rounding."""
    if dtype in _FLOATS:
        return x[0].astype(_FLOATS[dtype]), x[1].astype(_FLOATS[dtype])
    if dtype not in _INTEGERS or own in _FLOATS:
        return None
    return _fitting(x, dtype)


def _fitting(x: Interval, dtype: torch.dtype) -> Interval | None:
    """Integer bounds, if all numbers between them fit the type; bounds of floats as they are."""
    if dtype in _FLOATS:
        return x
    if dtype is torch.bool:
        return x if np.min(x[0], initial=0) >= 0 and np.max(x[1], initial=1) <= 1 else None
    info = torch.iinfo(dtype)
    return x if np.min(x[0], initial=0) >= info.min and np.max(x[1], initial=0) <= info.max else None


def _within(limit: int, *intervals: Interval) -> bool:
    """Whether numbers are floats, or integers of at most this magnitude."""
    return all(x.dtype.kind == "f" or np.max(np.abs(x), initial=0) <= limit for pair in intervals for x in pair)


def _sum(x: Interval, y: Interval) -> Interval:
    return x[0] + y[0], x[1] + y[1]


def _difference(x: Interval, y: Interval) -> Interval:
    return x[0] - y[1], x[1] - y[0]


def _product(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    return np.minimum.reduce(np.broadcast_arrays(*corners)), np.maximum.reduce(np.broadcast_arrays(*corners))


def _arithmetic(compute: Callable[[Interval, Interval], Interval], limit: int) -> Callable[[_Operands], Any]:
    """An operation of two numbers."""

    def of(operands: _Operands) -> Interval | None:
        pair = operands.pair(operands.dtype)
        if pair is None or operands.dtype is torch.bool or not _within(limit, *pair):
            return None
        return _fitting(compute(*pair), operands.dtype)

    return of


def _negative(operands: _Operands) -> Interval | None:
    x = operands.plain(0)
    if x is None or not _within(_WIDE, x):
        return None
    return _fitting((-x[1], -x[0]), operands.dtype)


def _absolute(operands: _Operands) -> Interval | None:
    x = operands.plain(0)
    if x is None or not _within(_WIDE, x):
        return None
    crosses = (x[0] < 0) & (x[1] > 0)
    ends = np.abs(x[0]), np.abs(x[1])
    return _fitting((np.where(crosses, 0, np.minimum(*ends)), np.maximum(*ends)), operands.dtype)


def _minimum(x: Interval, y: Interval) -> Interval:
    return np.minimum(x[0], y[0]), np.minimum(x[1], y[1])


def _maximum(x: Interval, y: Interval) -> Interval:
    return np.maximum(x[0], y[0]), np.maximum(x[1], y[1])


def _clamped(operands: _Operands) -> Interval | None:
    """`clamp(x, least, greatest)`, of which one may be None."""
    if operands.node.kwargs:
        return None
    x = operands.of(operands.args[0], operands.dtype)
    limits = (*operands.args[1:], None)[:2]
    for limit, cut in zip(limits, (_maximum, _minimum), strict=True):
        if limit is not None and x is not None:
            at = operands.of(limit, operands.dtype)
            x = None if at is None else cut(x, at)
    return x


def _divisor(operands: _Operands) -> int | None:
    """A positive integer by which integers are divided."""
    pair = operands.pair(operands.dtype) if len(operands.args) == 2 else None
    if pair is None or pair[1][0].dtype.kind == "f" or pair[1][0].ndim or pair[1][0] != pair[1][1]:
        return None
    return int(pair[1][0]) if pair[1][0] > 0 else None


def _quotient(operands: _Operands) -> Interval | None:
    """The quotient of integers, rounded down."""
    divisor = _divisor(operands)
    x = operands.of(operands.args[0], operands.dtype)
    return None if divisor is None or x is None else (x[0] // divisor, x[1] // divisor)


def _remainder(operands: _Operands) -> Interval | None:
    """The remainder of integers, which has the sign of the divisor."""
    divisor = _divisor(operands)
    x = operands.of(operands.args[0], operands.dtype)
    if divisor is None or x is None:
        return None
    together = x[0] // divisor == x[1] // divisor
    return np.where(together, x[0] % divisor, 0), np.where(together, x[1] % divisor, divisor - 1)


def _comparison(holds: Callable[[Interval, Interval], Any], fails: Callable[[Interval, Interval], Any]) -> Any:
    """A condition on two numbers: whether it holds, and whether it fails, for all numbers between their bounds. NaN
    makes neither true."""

    def of(operands: _Operands) -> Interval | None:
        pair = operands.pair(operands.common_dtype)
        return None if pair is None else (holds(*pair).astype(np.int64), 1 - fails(*pair).astype(np.int64))

    return of


def _are_one(x: Interval, y: Interval) -> Any:
    return (x[0] == x[1]) & (y[0] == y[1]) & (x[0] == y[0])


def _are_apart(x: Interval, y: Interval) -> Any:
    return (x[1] < y[0]) | (y[1] < x[0])


def _of_booleans(compute: Callable[..., Interval]) -> Callable[[_Operands], Interval | None]:
    """An operation on booleans."""

    def of(operands: _Operands) -> Interval | None:
        if operands.dtype is not torch.bool or operands.node.kwargs:
            return None
        if any(not isinstance(x, Node) or x.result.dtype is not torch.bool for x in operands.args):
            return None
        values = [operands.plain(k) for k in range(len(operands.args))]
        return None if any(x is None for x in values) else compute(*values)

    return of


def _exclusive(x: Interval, y: Interval) -> Interval:
    return _are_apart(x, y).astype(np.int64), 1 - _are_one(x, y).astype(np.int64)


def _opposite(x: Interval) -> Interval:
    return 1 - x[1], 1 - x[0]


def _selected(operands: _Operands) -> Interval | None:
    """`where(condition, x, y)`."""
    if len(operands.args) != 3 or operands.node.kwargs:
        return None
    condition = operands.plain(0)
    x, y = (operands.of(a, operands.dtype) for a in operands.args[1:])
    if condition is None or x is None or y is None:
        return None
    never = condition[1] == 0
    always = condition[0] == 1
    either = _minimum(x, y)[0], _maximum(x, y)[1]
    return tuple(np.where(always, x[k], np.where(never, y[k], either[k])) for k in (0, 1))  # type: ignore[return-value]


def _looked_up(operands: _Operands) -> Interval | None:
    """A table of booleans at indices."""
    table, indices = operands.args[:2]
    of_table = table.result if isinstance(table, Node) else None
    if of_table is None or of_table.dtype is not torch.bool or len(indices) != of_table.dim():
        return None
    at = [operands.of(index, torch.int64) for index in indices]
    return None if any(x is None for x in at) else operands.bounds.of_table(operands.node, table, at)  # type: ignore[arg-type]


def _same(operands: _Operands) -> Interval | None:
    return operands.of(operands.args[0], operands.dtype)


_and = _of_booleans(_minimum)
_or = _of_booleans(_maximum)
_xor = _of_booleans(_exclusive)
_not = _of_booleans(_opposite)

_OPERATIONS: dict[str, Callable[[_Operands], Interval | None]] = {
    "add": _arithmetic(_sum, _WIDE // 2),
    "sub": _arithmetic(_difference, _WIDE // 2),
    "rsub": _arithmetic(lambda x, y: _difference(y, x), _WIDE // 2),
    "mul": _arithmetic(_product, _FACTOR),
    "minimum": _arithmetic(_minimum, _WIDE),
    "maximum": _arithmetic(_maximum, _WIDE),
    "neg": _negative,
    "abs": _absolute,
    "clamp": _clamped,
    "floor_divide": _quotient,
    "remainder": _remainder,
    "eq": _comparison(_are_one, _are_apart),
    "ne": _comparison(_are_apart, _are_one),
    "lt": _comparison(lambda x, y: x[1] < y[0], lambda x, y: x[0] >= y[1]),
    "le": _comparison(lambda x, y: x[1] <= y[0], lambda x, y: x[0] > y[1]),
    "gt": _comparison(lambda x, y: x[0] > y[1], lambda x, y: x[1] <= y[0]),
    "ge": _comparison(lambda x, y: x[0] >= y[1], lambda x, y: x[1] < y[0]),
    "bitwise_and": _and,
    "logical_and": _and,
    "bitwise_or": _or,
    "logical_or": _or,
    "bitwise_xor": _xor,
    "logical_xor": _xor,
    "bitwise_not": _not,
    "logical_not": _not,
    "where": _selected,
    "index": _looked_up,
    "_to_copy": _same,
    "clone": _same,
    "detach": _same,
    "alias": _same,
    "lift_fresh": _same,
}
"""Operations by their name in torch's `aten`."""
