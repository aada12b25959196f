"""Aggregation along the rows of a sparse graph, as a differentiable function of tensors; on CPU. The formulas and the
loops are in `mpnn/kernels/cpu/row_reduce.cpp`, those with a user's own `combine` in `mpnn/kernels/combine.py`."""

from ctypes import Structure, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mpnn.kernels import combine
from mpnn.kernels.combine import Associative
from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address, fields
from mpnn.kernels.memory import empty, plain
from mpnn.kernels.once_differentiable import once_differentiable
from mpnn.kernels.rows import Rows, RowsStruct

KINDS = ("sum", "mean", "max", "min", "var")
_SUM, _SQUARES, _EXTREME, _COUNTED = 0, 1, 2, 3  # what the kernels fold
_FOLDS = {"sum": _SUM, "mean": _SUM, "var": _SQUARES}
_MAX_PARTS, _MIN_COMPONENTS = 16, 1 << 18  # components of a part's edges


class RowReduceStruct(Structure):
    """The parameters of the kernels, as `RowReduce` in `mpnn/kernels/cpu/row_reduce.cpp`."""

    _fields_ = (
        ("rows", RowsStruct),
        *fields(c_int64, "kind size heads num_cols"),
        ("sign", c_double),
        ("mean", c_int64),
        *fields(c_void_p, "x compared weight"),
        ("weight_stride", c_int64),
        *fields(c_void_p, "own out count d_weight partial partial_count"),
    )


def num_parts(rows: Rows, width: int) -> int:
    """The number of parts that are run side by side, where an edge has `width` components."""
    return rows.parts(width, _MAX_PARTS, _MIN_COMPONENTS)


class RowReduce(torch.autograd.Function):
    """`RowReduce.apply(value, weight, rows, columns, kind)` -> out [B, N_dst, H * D].

    value [B, N_src, H * D], float32, float64 or, without an `Associative`, bfloat16, contiguous; weight [B or 1, E, H],
    contiguous, in the caller's edge order, or None for ones; `rows` are the edges by destination, `columns` those by
    source, or None if there is no backward pass. `kind` is one of KINDS, or an `Associative`. bfloat16 is summed in
    float32, which is the dtype of weights beside it.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, value: Tensor, weight: Tensor | None, rows: Rows, columns: Rows | None, kind: str | Associative
    ) -> Tensor:
        ctx.rows, ctx.columns, ctx.kind = rows, columns, kind
        compared: Tensor | None = None
        if kind == "var":
            compared, _ = _fold(value, weight, rows, "mean")
        out, count = _fold(value, weight, rows, kind, compared, counted=columns is not None)
        linear = kind in ("sum", "mean")  # the gradient of the value does not depend on it
        if compared is None and not linear:
            compared = out
        needs_value = not linear or (weight is not None and weight.requires_grad)
        ctx.save_for_backward(value if needs_value else None, weight, compared, count)
        ctx.dtype = value.dtype
        return out.to(value.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        value, weight, compared, count = ctx.saved_tensors
        rows, columns, kind = ctx.rows, ctx.columns, ctx.kind
        if columns is None:
            raise RuntimeError("this was planned without gradients; run it again with gradients enabled")
        if kind == "mean":
            count = rows.degree.to(_wide(d_out.dtype))
        elif kind == "var":
            count = rows.degree.to(_wide(d_out.dtype)) / 2
        if count is not None:
            d_out = torch.div(d_out, count, out=empty(count, *d_out.shape))
        d_out = plain(d_out)
        if value is None:
            d_value, d_weight = _fold(d_out, weight, columns, "sum")[0], None
        else:
            with_weight = weight is not None and ctx.needs_input_grad[1]
            value, d_out = (x.to(_wide(x.dtype)) for x in (value, d_out))
            d_value, d_weight = _fold_backward(d_out, compared, value, weight, columns, kind, with_weight)
        return d_value.to(ctx.dtype), d_weight, None, None, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fold(
    value: Tensor,
    weight: Tensor | None,
    rows: Rows,
    kind: str | Associative,
    own: Tensor | None = None,
    counted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The results of rows [B, rows, size], and the number of messages equal to each extreme if `counted`."""
    value, weight = plain(value), None if weight is None else plain(weight)
    out = empty(value, value.shape[0], rows.num_rows, value.shape[2], dtype=_wide(value.dtype))
    count = empty(out, *out.shape) if counted and kind in ("max", "min") else None
    if not out.numel():
        return out, count
    parts = num_parts(rows, value.shape[2])
    if isinstance(kind, Associative):
        combine.forward(kind, value, weight, rows, parts, out)
        return out, None
    p = _parameters(value, weight, rows, parts, own, out)
    p.kind = _FOLDS.get(kind, _EXTREME if count is None else _COUNTED)
    p.sign, p.mean, p.count = (-1.0 if kind == "min" else 1.0), int(kind in ("mean", "var")), address(count)
    _run("row_reduce_forward", p, value, parts)
    return out, count


def _fold_backward(
    d_out: Tensor,
    compared: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    columns: Rows,
    kind: str | Associative,
    with_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the value and, if `with_weight`, of the weight."""
    value, d_value = plain(value), empty(value, *value.shape)
    weight = None if weight is None else plain(weight)
    d_weight = value.new_zeros(len(value), *weight.shape[1:]) if with_weight and weight is not None else None
    if d_value.numel():
        parts = num_parts(columns, value.shape[2])
        if isinstance(kind, Associative):
            combine.backward(kind, d_out, compared, value, weight, columns, parts, d_value, d_weight)
        else:
            p = _parameters(d_out, weight, columns, parts, value, d_value)
            p.kind, p.sign = _FOLDS.get(kind, _EXTREME), 1.0
            p.compared, p.d_weight = address(compared), address(d_weight)
            _run("row_reduce_backward", p, value, parts)
    if d_weight is not None and weight is not None and len(weight) < len(d_weight):
        d_weight = d_weight.sum(0, keepdim=True)
    return d_value, d_weight


def _parameters(
    x: Tensor, weight: Tensor | None, rows: Rows, parts: int, own: Tensor | None, out: Tensor
) -> RowReduceStruct:
    heads, stride = (1, 0) if weight is None else (weight.shape[-1], weight[0].numel() if len(weight) > 1 else 0)
    return RowReduceStruct(
        rows=rows.struct(parts),
        size=x.shape[2],
        heads=heads,
        num_cols=x.shape[1],
        x=x.data_ptr(),
        weight=address(weight),
        weight_stride=stride,
        own=address(own),
        out=out.data_ptr(),
    )


def _run(name: str, p: RowReduceStruct, like: Tensor, parts: int) -> None:
    """Runs a kernel for each entry of the batch and each part, and adds up the rows that parts share."""
    count, size = like.shape[0], like.shape[2]
    wide = _wide(like.dtype)
    if parts > 1:
        partial = like.new_empty(2, count, parts, size, dtype=wide)
        p.partial, p.partial_count = partial[0].data_ptr(), partial[1].data_ptr()
    library.run(name, like.dtype, p, count, parts)
    if parts > 1:
        library.run("row_reduce_join", wide, p, count)
