"""Aggregation along the rows of a sparse graph as a differentiable function of tensors, by Triton's kernels.

The counterpart of `mpnn.kernels.rows.reduce`, with the same options.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn.kernels.cuda.launch import Arguments, layout
from mpnn.kernels.cuda.schedule import TUNING, Edges, Sorted, Tile, tile
from mpnn.kernels.cuda.tensors import index_type, on_device, real, strides, with_contiguous_rows
from mpnn.kernels.derivatives import Kernel, launch
from mpnn.kernels.rows.cuda import aggregate as reduce
from mpnn.kernels.rows.reduce import Reduction

_REDUCTIONS = {
    "sum": reduce.SUM,
    "mean": reduce.SUM,
    "max": reduce.LARGEST,
    "min": reduce.SMALLEST,
    "var": reduce.SQUARES,
    "centered mean": reduce.CENTERED,
}
_KINDS = {name: reduction.value for name, reduction in _REDUCTIONS.items()}
_TOGETHER = 1024  # most components of all heads that run as one head if there are no weights
_DIVIDED = ("mean", "var", "centered mean")  # by the number of edges


def _forward(
    options: Reduction, needs: Sequence[bool], value: Tensor, weight: Tensor | None
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """out [..., N_dst, H, D] of value [..., N_src, H, D] and weight [B, E, H] in the caller's edge order, whose strides
    may be 0, or None for ones. Weighted extremes are float32 or float64, because they must equal a message."""
    kind = options.kind
    rows = options.rows
    features = _features(value, weight)
    extreme = kind in ("max", "min")
    center = offset = None
    with on_device(value):
        if kind == "var":
            center, offset = _centered_mean(features, weight, rows)
        dtype = real(value.dtype)[0] if extreme and weight is not None else options.result_dtype
        counted = extreme and any(needs)
        out, equal = segment_reduce(features, weight, rows, rows.edges, kind, center, offset, counted, dtype)
        if center is not None and weight is not None:
            # A product is not rounded before the mean is subtracted from it, so equal messages differ by as much.
            out.masked_fill_(out <= (center * (torch.finfo(center.dtype).eps / 2)).square(), 0.0)
    result = out.view(*value.shape[:-3], rows.num_rows, *value.shape[-2:])
    return result, (out if extreme else center, offset, equal)


def _gradients(
    options: Reduction, needs: Sequence[bool], tensors: Sequence[Any], saved: Any, d_out: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    value, weight = tensors
    compared, offset, equal = saved
    kind = options.kind
    columns = options.columns()
    shape = *d_out.shape[:-3], columns.num_rows, *d_out.shape[-2:]
    d_out = _features(d_out, weight)
    if kind in ("mean", "var"):
        d_out = d_out * options.rows.inverse_degree(real(d_out.dtype)[0]) * (1 if kind == "mean" else 2)
    elif equal is not None:
        d_out = d_out / equal.clamp(min=1)
    d_out = d_out.contiguous()
    with on_device(d_out):
        if _reads_value(options, needs):
            given = d_out, compared, offset, _features(value, weight), weight
            d_value, d_weight = _segment_reduce_backward(*given, columns, kind, needs)
        else:
            d_value, _ = segment_reduce(d_out, weight, columns, columns.edges, "sum", dtype=options.dtype)
            d_weight = None
    return None if d_value is None else d_value.view(shape), d_weight


def _features(x: Tensor, weight: Tensor | None) -> Tensor:
    """Features [..., N, H, D] as kernels read them, [B, N, H, D]. Without weights, few heads are one."""
    *batch, nodes, heads, width = x.shape
    if weight is None and heads * width <= _TOGETHER:
        heads, width = 1, heads * width
    return with_contiguous_rows(x.reshape(prod(batch), nodes, heads, width))


def _reads_value(options: Reduction, needs: Sequence[bool]) -> bool:
    """Whether gradients depend on the value."""
    return options.kind not in ("sum", "mean") or needs[1]


KERNEL = Kernel(_forward, _gradients, _reads_value)


class _Lookup(NamedTuple):
    """The rows of a table that edges read, `ids` [E], and a function that returns the edges sorted by them, whose
    columns are numbers of edges."""

    ids: Tensor
    by_id: Callable[[], Sorted]


def gather(table: Tensor, ids: Tensor, by_id: Callable[[], Sorted]) -> Tensor:
    """`table[ids]` [E, H] of table [classes, H], float32 or float64. Its backward pass sums in a fixed order, unlike
    torch's."""
    out: Tensor = launch(_GATHER, _Lookup(ids, by_id), partial(torch.index_select, dim=0, index=ids), table)
    return out


def _gathered(options: _Lookup, needs: Sequence[bool], table: Tensor) -> tuple[Tensor, tuple[()]]:
    return table.index_select(0, options.ids), ()


def _gradient_of_table(
    options: _Lookup, needs: Sequence[bool], tensors: Sequence[Any], saved: Any, d_out: Tensor
) -> list[Tensor]:
    by_id = options.by_id()
    with on_device(d_out):
        sums, _ = segment_reduce(with_contiguous_rows(d_out)[None, :, None], None, by_id, by_id.edges, "sum")
    return [sums[0, :, 0]]


_GATHER = Kernel(_gathered, _gradient_of_table, lambda options, needs: False)


def segment_reduce(
    value: Tensor,
    weight: Tensor | None,
    rows: Sorted,
    edges: Edges,
    kind: str,
    own: Tensor | None = None,
    offset: Tensor | None = None,
    counted: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The results of rows [B, rows, H, D], of `dtype` or float32 or float64, and if `counted` the number of messages
    that equal each extreme, float32 or float64."""
    (batch, _, heads, width), (kept, language) = value.shape, real(value.dtype)
    slots = rows.divided.slots
    out = value.new_empty(batch, rows.num_rows, heads, width, dtype=dtype or kept)
    equal = torch.empty_like(out, dtype=kept) if counted else None
    if not out.numel():
        return out, equal
    part = value.new_empty(batch, slots, heads, width, dtype=kept) if slots else None
    part_equal = torch.empty_like(part) if part is not None and counted else None

    def arguments() -> Arguments:
        shape = _tile(value, kind)
        at = strides(value), strides(weight, False), strides(out), strides(part)
        constants = {"KIND": _KINDS[kind], "MEAN": kind in _DIVIDED, **_constants(shape, language, tensors)}
        numbers = len(rows.units), shape.blocks, heads
        return Arguments(rows.programs(shape, batch), (*at, *numbers), constants, shape.warps)

    key = kind, counted, out.dtype, edges is rows.edges, layout(value), weight is not None and layout(weight)
    tensors = rows.units, edges.col, edges.edge, value, weight, own, offset, out, equal, part, part_equal
    rows.launches.start(key, reduce.segment_reduce, tensors, arguments)
    _join(rows, kind, (part, part_equal), (out, equal), key)
    return out, equal


def _centered_mean(value: Tensor, weight: Tensor | None, rows: Sorted) -> tuple[Tensor, Tensor]:
    """The means of the rows, as the first message and the mean distance from it, each [B, rows, H, D]. A sum of the
    two would be rounded by more than messages that are nearly equal differ."""
    if not rows.num_edges:
        means = segment_reduce(value, weight, rows, rows.edges, "mean")[0]
        return means, means
    first = rows.ptr[:-1].clamp(max=rows.num_edges - 1)
    center = value.index_select(1, rows.edges.col.index_select(0, first)).to(real(value.dtype)[0])
    if weight is not None:
        edge = first if rows.edges.edge is None else rows.edges.edge.index_select(0, first)
        center = weight.index_select(1, edge)[..., None] * center
    center = center.contiguous()
    return center, segment_reduce(value, weight, rows, rows.edges, "centered mean", center)[0]


def _segment_reduce_backward(
    d_out: Tensor,
    compared: Tensor | None,
    offset: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    columns: Sorted,
    kind: str,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the value and of the weight, as far as they are needed."""
    batch, _, heads, width = value.shape
    d_value = torch.empty_like(value, memory_format=torch.contiguous_format) if needed[0] else None
    d_weight = weight.new_empty(weight.shape) if needed[1] and weight is not None else None
    if not value.numel():
        return d_value, None if d_weight is None else d_weight.zero_()
    slots, (kept, language) = columns.divided.slots, real(value.dtype)
    part = value.new_empty(batch, slots, heads, width, dtype=kept) if slots and d_value is not None else None

    def arguments() -> Arguments:
        shape = _tile(value, kind)
        at = (
            strides(value), strides(weight, False), strides(d_out), strides(d_value), strides(d_weight, False),
            strides(part),
        )  # fmt: skip
        constants = {"KIND": _KINDS[kind], **_constants(shape, language, tensors)}
        numbers = len(columns.units), shape.blocks, heads
        return Arguments(columns.programs(shape, batch), (*at, *numbers), constants, shape.warps)

    given = value, weight, d_out, compared, offset
    key = kind, tuple(needed), *[None if x is None else layout(x) for x in given]
    tensors = (
        columns.units, columns.edges.col, columns.edges.edge, value, weight, d_out, compared, offset, d_value, d_weight,
        part,
    )  # fmt: skip
    columns.launches.start(key, reduce.segment_reduce_backward, tensors, arguments)
    join_parts(columns, part, d_value)
    return d_value, d_weight


def join_parts(rows: Sorted, part: Tensor | None, out: Tensor | None) -> None:
    """Adds up the parts [B, slots, heads, width] of divided rows into out [B, rows, heads, width]."""
    if part is not None and out is not None:
        _join(rows, "sum", (part, None), (out, None), layout(out))


def _join(
    rows: Sorted,
    kind: str,
    parts: tuple[Tensor | None, Tensor | None],
    outs: tuple[Tensor, Tensor | None],
    key: Hashable,
) -> None:
    """Joins the parts of divided rows, and of the numbers of equal extremes."""
    part = parts[0]
    divided = rows.divided
    if part is None:
        return

    def arguments() -> Arguments:
        batch, _, heads, width = outs[0].shape
        shape = tile(heads, width, TUNING["join"])
        at = strides(part), strides(outs[0]), divided.count, shape.blocks, heads
        constants = {
            "KIND": _KINDS[kind], "MEAN": kind in _DIVIDED, "BH": shape.heads, "WIDTH": shape.width,
            "REAL": real(part.dtype)[1],
        }  # fmt: skip
        return Arguments(divided.count * shape.blocks * batch, at, constants, shape.warps)

    tensors = divided.row, divided.ptr, rows.ptr, *parts, *outs
    rows.launches.start((kind, key), reduce.join, tensors, arguments)


def _tile(value: Tensor, kind: str) -> Tile:
    _, _, heads, width = value.shape
    return tile(heads, width, TUNING["extreme" if kind in ("max", "min") else "sum"])


def _constants(shape: Tile, real: Any, tensors: Iterable[Tensor | None]) -> dict[str, Any]:
    sizes = {"R": shape.rows, "E": shape.edges, "BH": shape.heads, "WIDTH": shape.width}
    return {**sizes, "REAL": real, "INDEX": index_type(tensors)}
