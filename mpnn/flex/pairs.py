"""The pairs that a condition on indices allows, as runs, without asking it for each pair.

Blocks of pairs are decided by bounds (`bounds.py`). Those that are not are divided, until they are small, or until
dividing them decides little; then the condition is computed for their pairs. So a causal mask of packed documents over
N nodes takes time by N, and a condition whose bounds decide nothing is computed in blocks that fit the cache.
"""

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.flex.bounds import Blocks, Bounds
from mpnn.flex.programs import KV, Node, Program, Q, call, mapped
from mpnn.graph.runs import Runs, require_room

_SMALLEST = 16  # rows and columns of blocks that are not divided
_PARTS = 8  # of a side of a block that is divided
_MOST_AT_FIRST = 1024  # blocks
_MOST_BLOCKS = 1 << 22  # that are decided at a time
_DENSE = 128  # rows and columns of blocks that are computed where dividing them decides little
_FEW = 1 << 14  # pairs that are computed at once
_PAIRS = 1 << 20  # of a mask that are computed at a time
MOST_PAIRS = 1 << 38  # that are computed in all; they take an hour

Ints = NDArray[np.int64]
Intervals = tuple[Ints, Ints, Ints]
"""The row, the first and the last source plus 1 of each interval."""


def allowed(program: Program, b: int, h: int, num_dst: int, num_src: int) -> Runs:
    """The pairs (q_idx, kv_idx) for which a program returns True, with one b and one h.

    Raises:
        ValueError: too many pairs cannot be decided in blocks.
    """
    runs = None
    for condition in _conditions(program):
        table = _table(condition, b, h, num_dst, num_src)
        if table is None:
            more = _of_condition(condition, b, h, num_dst, num_src)
        else:
            more = _joined(num_dst, num_src, _in_strips(table.__getitem__, np.arange(num_dst), num_src))
        runs = more if runs is None else runs & more
    assert runs is not None
    return runs


def _conditions(program: Program) -> list[Program]:
    """The conditions that have to hold together: those that are looked up in tables of pairs, and the others as one."""
    todo = [program.node]
    tables = []
    others = []
    while todo:
        node = todo.pop()
        if node.target in _BOTH and all(isinstance(x, Node) for x in node.args):
            todo += node.args
        elif _is_table(program.at(node)):
            tables.append(program.at(node))
        else:
            others.append(node)
    if not tables:
        return [program]
    return [*tables, program.at(reduce(conjunction, others))] if others else tables


_BOTH = (torch.ops.aten.bitwise_and.Tensor, torch.ops.aten.logical_and.default)


def conjunction(x: Node, y: Node) -> Node:
    """Returns the node of the condition that holds where both conditions hold."""
    return call(torch.ops.aten.bitwise_and.Tensor, x, y, result=torch.ones((), dtype=torch.bool))


def _is_table(program: Program) -> bool:
    """Whether a condition is looked up in a table at (..., q_idx, kv_idx) themselves."""
    node = program.node
    if node.target is not torch.ops.aten.index.Tensor or program.at(node.args[0]).depends_on():
        return False
    indices = list(node.args[1])
    ends = list(program.inputs[-4:])
    return indices[-2:] == ends[2:] and all(x in ends[:2] for x in indices[:-2])


def _table(program: Program, b: int, h: int, num_dst: int, num_src: int) -> Tensor | None:
    """The table of a condition, bool [num_dst, num_src] or more; None if it is looked up in another way."""
    if not _is_table(program):
        return None
    zero = torch.zeros((), dtype=torch.int64)
    table = program.at(program.node.args[0])(zero, zero, zero, zero).detach()
    ends = dict(zip(program.inputs[-4:-2], (b, h), strict=True))
    for index in program.node.args[1][:-2]:
        table = table[ends[index]]
    is_large = table.shape[0] >= num_dst and table.shape[1] >= num_src
    return table[:num_dst, :num_src] if is_large and table.dtype is torch.bool else None


def _of_condition(program: Program, b: int, h: int, num_dst: int, num_src: int) -> Runs:
    """`allowed` of a condition, in blocks."""
    if not num_dst or not num_src:
        return Runs.of(num_dst, num_src, ())
    at = torch.tensor(b), torch.tensor(h)
    kv = torch.arange(num_src)
    computed = mapped(program, (Q,), (KV,))

    def rows_of(rows: Tensor) -> Tensor:
        return computed(*at, rows, kv)

    every = np.arange(num_dst)
    if num_dst * num_src <= _FEW:
        return _joined(num_dst, num_src, _in_strips(rows_of, every, num_src))
    whole, row, column, size = _in_blocks(program, b, h, num_dst, num_src)
    count = np.bincount(row, minlength=-(-num_dst // size))
    # Where most of a row of blocks is not decided, all of it is computed: what was decided comes out again.
    dense = 2 * count * size > num_src
    alone = ~dense[row]
    pairs = np.count_nonzero(dense) * size * num_src + np.count_nonzero(alone) * size * size
    if pairs > MOST_PAIRS:
        raise ValueError(
            f"a mask_mod is evaluated for {pairs:,} pairs, which are too many; build the graph by a topology of "
            "mpnn.graphs, and call ops.attend"
        )
    strips = _in_strips(rows_of, every[dense[every // size]], num_src)
    if dense.all():
        return _joined(num_dst, num_src, strips)
    tiles = _in_tiles(program, at, row[alone], column[alone], size, num_dst, num_src)
    return Runs.of(num_dst, num_src, chain(whole, strips, tiles))


def _in_blocks(program: Program, b: int, h: int, num_dst: int, num_src: int) -> tuple[list[Intervals], Ints, Ints, int]:
    """The intervals of blocks of which all pairs are allowed; and the rows and the columns of blocks that are not
    decided, with their size."""
    size = _SMALLEST
    while -(-num_dst // size) * -(-num_src // size) > _MOST_AT_FIRST:
        size *= _PARTS
    bounds = Bounds(program, b, h, num_dst, num_src)
    across = -(-num_src // size)
    row, column = np.divmod(np.arange(-(-num_dst // size) * across), across)
    whole: list[Intervals] = []
    while True:
        full, empty = bounds.decide(Blocks(row, column, size, size))
        whole += _of_blocks(row[full], column[full], size, num_dst, num_src)
        is_open = ~(full | empty)
        is_small = size == _SMALLEST or (size <= _DENSE and 2 * np.count_nonzero(is_open) > len(is_open))
        row = row[is_open]
        column = column[is_open]
        if is_small or not 0 < len(row) * _PARTS**2 <= _MOST_BLOCKS:
            return whole, row, column, size
        size //= _PARTS
        row, column = _divided(row, column, size, num_dst, num_src)


def _divided(row: Ints, column: Ints, size: int, num_dst: int, num_src: int) -> tuple[Ints, Ints]:
    """The blocks of `size` rows and columns that blocks of more consist of, sorted."""
    part = np.arange(_PARTS)
    row, column = np.broadcast_arrays(
        (row[:, None] * _PARTS + part)[:, :, None], (column[:, None] * _PARTS + part)[:, None, :]
    )
    row = row.reshape(-1)
    column = column.reshape(-1)
    inside = (row * size < num_dst) & (column * size < num_src)
    order = np.argsort(row[inside] * (num_src // size + 1) + column[inside], kind="stable")
    return row[inside][order], column[inside][order]


def _of_blocks(row: Ints, column: Ints, size: int, num_dst: int, num_src: int) -> Iterator[Intervals]:
    """The intervals of whole blocks, sorted; those side by side become one."""
    if not len(row):
        return
    begins = np.append(True, (np.diff(row) != 0) | (np.diff(column) != 1))
    first = column[begins] * size
    last = np.minimum((column[np.append(begins[1:], True)] + 1) * size, num_src)
    rows = row[begins][:, None] * size + np.arange(size)
    inside = rows < num_dst
    yield rows[inside], *(np.broadcast_to(x[:, None], rows.shape)[inside] for x in (first, last))


def _in_strips(rows_of: Callable[[Tensor], Tensor], rows: Ints, num_src: int) -> Iterator[Intervals]:
    """The intervals of whole rows, given what returns the pairs of some rows, bool [rows, num_src]."""
    if not len(rows) or not num_src:
        return
    for some in torch.from_numpy(rows).split(max(1, _PAIRS // num_src)):
        runs = Runs.from_dense(rows_of(some).numpy())
        yield some.numpy()[runs.row], runs.start, runs.stop


def _joined(num_dst: int, num_src: int, intervals: Iterator[Intervals]) -> Runs:
    """Runs of intervals that are sorted and disjoint."""
    parts = [np.zeros((3, 0), np.int64)]
    count = 0
    for part in intervals:
        parts.append(np.stack(part))
        count += len(part[0])
        require_room(num_dst, num_src, count)
    row, start, stop = np.concatenate(parts, 1)
    return Runs.on_line(num_dst, num_src, row * (num_src + 1) + start, row * (num_src + 1) + stop)


def _in_tiles(
    program: Program, at: tuple[Tensor, Tensor], row: Ints, column: Ints, size: int, num_dst: int, num_src: int
) -> Iterator[Intervals]:
    """The intervals of pairs in blocks."""
    run = mapped(program, (Q, KV), (Q,), (KV,))
    height = min(size, num_dst)
    width = min(size, num_src)
    step = max(1, _PAIRS // (height * width))
    for k in range(0, len(row), step):
        q = row[k : k + step, None] * size + np.arange(height)
        kv = column[k : k + step, None] * size + np.arange(width)
        # The last blocks may reach beyond the pairs: there the last index is computed again, and left out.
        ends = (torch.from_numpy(np.minimum(x, n - 1)) for x, n in ((q, num_dst), (kv, num_src)))
        runs = Runs.from_dense(run(*at, *ends).reshape(-1, width).numpy())
        which = runs.row
        rows = q.reshape(-1)[which]
        first = kv[:, 0][which // height]
        inside = rows < num_dst
        yield rows[inside], (first + runs.start)[inside], np.minimum(first + runs.stop, num_src)[inside]
