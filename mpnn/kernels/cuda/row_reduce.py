"""Aggregation along the rows of a sparse graph as a differentiable function of tensors, by Triton's kernels.

The counterpart of `mpnn.kernels.row_reduce`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpnn.kernels.cuda import reduce
from mpnn.kernels.cuda.schedule import Edges, Sorted, tile
from mpnn.kernels.cuda.tensors import on_device, real, view, with_contiguous_rows
from mpnn.kernels.once_differentiable import once_differentiable

_REDUCTIONS = {
    "sum": reduce.SUM,
    "mean": reduce.SUM,
    "max": reduce.LARGEST,
    "min": reduce.SMALLEST,
    "var": reduce.SQUARES,
}
_KINDS = {name: reduction.value for name, reduction in _REDUCTIONS.items()}


class RowReduce(torch.autograd.Function):
    """`RowReduce.apply(value, weight, rows, columns, kind)` -> out [B, N_dst, H, D], float32 or float64.

    value [B, N_src, H, D]; weight [B, E, H] in the caller's edge order, whose strides may be 0, or None for ones;
    `rows`: the edges by destination; `columns`: returns the edges by source; `kind`: "sum", "mean", "max", "min" or
    "var".
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor | None, rows: Sorted, columns: Callable[[], Sorted], kind: str
    ) -> Tensor:
        value, compared = with_contiguous_rows(value), None
        with on_device(value):
            if kind == "var":
                compared, _ = segment_reduce(value, weight, rows, rows.edges, "mean")
            needed = any(ctx.needs_input_grad)
            out, equal = segment_reduce(value, weight, rows, rows.edges, kind, compared, counted=needed)
        ctx.rows, ctx.columns, ctx.kind, ctx.like = rows, columns, kind, value.dtype
        if kind in ("max", "min"):
            compared = out
        elif kind != "var" and not ctx.needs_input_grad[1]:
            value = value.new_empty(0)  # the backward pass does not read it
        ctx.save_for_backward(value, weight, compared, equal)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        value, weight, compared, equal = ctx.saved_tensors
        columns, kind, needed = ctx.columns(), ctx.kind, ctx.needs_input_grad
        if kind in ("mean", "var"):
            d_out = d_out * ctx.rows.inverse_degree(d_out.dtype) * (1 if kind == "mean" else 2)
        elif equal is not None:
            d_out = d_out / equal.clamp(min=1)
        with on_device(d_out):
            if kind in ("sum", "mean") and not needed[1]:
                d_value = segment_reduce(d_out.contiguous(), weight, columns, columns.edges, "sum")[0]
                return d_value.to(ctx.like), None, None, None, None
            d_value, d_weight = _segment_reduce_backward(
                d_out.contiguous(), compared, value, weight, columns, kind, ctx.needs_input_grad
            )
        return d_value, d_weight, None, None, None


class Gather(torch.autograd.Function):
    """`Gather.apply(table, ids, by_id)` -> `table[ids]` [E, H], of table [classes, H], float32 or float64.

    Its backward pass sums in a fixed order, unlike torch's. `by_id` returns the edges sorted by id, whose columns are
    numbers of edges.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, ids: Tensor, by_id: Callable[[], Sorted]) -> Tensor:
        ctx.by_id = by_id
        return table.index_select(0, ids)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Any:
        by_id = ctx.by_id()
        with on_device(d_out):
            sums, _ = segment_reduce(with_contiguous_rows(d_out)[None, :, None], None, by_id, by_id.edges, "sum")
        return sums[0, :, 0], None, None


def segment_reduce(
    value: Tensor,
    weight: Tensor | None,
    rows: Sorted,
    edges: Edges,
    kind: str,
    own: Tensor | None = None,
    counted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The results of rows [B, rows, H, D], and if `counted` the number of messages that equal each extreme."""
    (batch, _, heads, width), (kept, language) = value.shape, real(value.dtype)
    counts, slots = counted and kind in ("max", "min"), rows.divided.slots

    def fresh(places: int, is_needed: bool = True) -> Tensor | None:
        return value.new_empty(batch, places, heads, width, dtype=kept) if is_needed else None

    out, equal = fresh(rows.num_rows), fresh(rows.num_rows, counts)
    part, part_equal = fresh(slots, slots > 0), fresh(slots, slots > 0 and counts)
    if not out.numel():
        return out, equal
    views = [view(x) for x in (out, equal, part, part_equal)]
    options = {"KIND": _KINDS[kind], "MEAN": kind in ("mean", "var"), "REAL": language}
    for b in rows.bins:
        shape = tile(heads, width, b.long, tensors=2)
        reduce.segment_reduce[b.grid(shape, batch)](
            b.units, edges, rows.ptr, shape.blocks, heads, view(value), view(weight, False), view(own), *views,
            **options, R=shape.rows, E=shape.edges, BH=shape.heads, WIDTH=shape.width,
        )  # fmt: skip
    if slots:
        shape = tile(heads, width, long=False)
        reduce.join[(rows.divided.count * shape.blocks * batch,)](
            rows.divided, rows.ptr, shape.blocks, heads, views[2], views[3], *views[:2], **options, BH=shape.heads,
            WIDTH=shape.width,
        )  # fmt: skip
    return out, equal


def _segment_reduce_backward(
    d_out: Tensor,
    compared: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    columns: Sorted,
    kind: str,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the value and of the weight, as far as they are needed."""
    batch, _, heads, width = value.shape
    d_value = torch.empty_like(value, memory_format=torch.contiguous_format) if needed[0] else None
    d_weight = weight.new_empty(weight.shape) if needed[1] and weight is not None else None
    if not value.numel():
        return d_value, None if d_weight is None else d_weight.zero_()
    slots, (kept, language) = columns.divided.slots, real(value.dtype)
    part = value.new_empty(batch, slots, heads, width, dtype=kept) if slots and d_value is not None else None
    for b in columns.bins:
        shape = tile(heads, width, b.long, tensors=2)
        reduce.segment_reduce_backward[b.grid(shape, batch)](
            b.units, columns.edges, shape.blocks, heads, view(value), view(weight, False), view(d_out), view(compared),
            view(d_value), view(d_weight, False), view(part), KIND=_KINDS[kind], R=shape.rows, E=shape.edges,
            BH=shape.heads, WIDTH=shape.width, REAL=language,
        )  # fmt: skip
    join_parts(columns, part, d_value)
    return d_value, d_weight


def join_parts(rows: Sorted, part: Tensor | None, out: Tensor | None) -> None:
    """Adds up the parts [B, slots, heads, width] of divided rows into out [B, rows, heads, width]."""
    if part is None or out is None:
        return
    (batch, _, heads, width), divided = out.shape, rows.divided
    shape = tile(heads, width, long=False)
    reduce.join[(divided.count * shape.blocks * batch,)](
        divided, rows.ptr, shape.blocks, heads, view(part), None, view(out), None, KIND=_KINDS["sum"], MEAN=False,
        BH=shape.heads, WIDTH=shape.width, REAL=real(part.dtype)[1],
    )  # fmt: skip
