"""Aggregation along the rows of a sparse graph, as a differentiable function of tensors; on CPU. The formulas and the
loops are in `mpnn/kernels/cpu/row_reduce.cpp`, those with a user's own `combine` in `mpnn/kernels/rows/combine.py`."""

from collections.abc import Callable, Hashable, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address, addresses, fields
from mpnn.kernels.derivatives import Fused, Kernel, are_batches, are_differentiated
from mpnn.kernels.function import Function
from mpnn.kernels.memory import LARGE, empty, plain, zeros
from mpnn.kernels.rows import combine
from mpnn.kernels.rows.combine import Associative
from mpnn.kernels.rows.rows import Chunks, Rows, RowsStruct

KINDS = ("sum", "mean", "max", "min", "var")
# what the kernels fold
_SUM = 0
_SQUARES = 1
_CENTERED = 2
_EXTREME = 3
_COUNTED = 4
_CENTERED_MEAN = "centered mean"
_FOLDS = {"sum": _SUM, "mean": _SUM, "var": _SQUARES, _CENTERED_MEAN: _CENTERED}
_FIRST_CALLS = 64  # of a graph, before its edges are sorted
_MAX_PARTS = 16
_MIN_COMPONENTS = 1 << 18  # of a part's edges


class RowReduceStruct(Structure):
    """The parameters of the kernels, as `RowReduce` in `mpnn/kernels/cpu/row_reduce.cpp`."""

    _fields_ = (
        ("rows", RowsStruct),
        *fields(c_int64, "kind size heads num_cols"),
        ("sign", c_double),
        ("mean", c_int64),
        *fields(c_void_p, "x compared weight"),
        ("weight_stride", c_int64),
        *fields(c_void_p, "own out count d_weight partial partial_count offset"),
    )


def chunks_of(rows: Rows, width: int) -> Chunks:
    """The chunks that are run side by side, where an edge has `width` components."""
    return rows.chunks(width, _MAX_PARTS, _MIN_COMPONENTS)


class Reduction(NamedTuple):
    """A reduction that is not linear, on some device: all but its tensors.

    Attributes:
        rows: the edges by destination. columns: returns the edges by source.
        kind: "max", "min" or "var"; on a CPU also an `Associative`, on a GPU also "sum" and "mean".
        dtype: of the value. result_dtype: of the results.
    """

    rows: Any
    columns: Callable[[], Any]
    kind: Any
    dtype: torch.dtype
    result_dtype: torch.dtype


def _forward(
    options: Reduction, needs: Sequence[bool], value: Tensor, weight: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """out [B, N_dst, H * D] of value [B, N_src, H * D], float32, float64 or, without an `Associative`, bfloat16,
    contiguous, and of weight [B or 1, E, H], contiguous, in the caller's edge order, or None for ones. bfloat16 is
    reduced in float32, which is the dtype of weights next to it."""
    mean = _mean(value, weight, options.rows, options.kind)
    out, count = _fold(value, weight, options.rows, options.kind, mean, counted=True)
    return out.to(options.result_dtype), mean or (out, count)


def _gradients(
    options: Reduction, needs: Sequence[bool], tensors: Sequence[Any], saved: Any, d_out: Tensor
) -> tuple[Tensor, Tensor | None]:
    value, weight = tensors
    compared, count = saved
    offset = None
    if options.kind == "var":
        offset = count
        count = options.rows.degree.to(_wide(d_out.dtype)) / 2
    if count is not None:
        d_out = _elementwise(torch.div, d_out, count)
    value, d_out = (x.to(_wide(x.dtype)) for x in (value, plain(d_out)))
    columns = options.columns()
    d_value, d_weight = _fold_backward(d_out, compared, offset, value, weight, columns, options.kind, needs[1])
    return d_value.to(options.dtype), d_weight


KERNEL = Kernel(_forward, _gradients)


class LinearReduce(Function, Fused):
    """`LinearReduce.apply(value, weight, rows, columns, kind)` -> out [B, N_dst, H * D]: sums and means, which are
    linear in the value and in the weight. Their derivatives are sums to any order, which kernels compute. `columns` is
    None if there is no backward pass. Tensors are those of `_forward`."""

    TENSORS = slice(0, 2)

    @staticmethod
    def forward(value: Tensor, weight: Tensor | None, rows: Rows, columns: Rows | None, kind: str) -> Tensor:
        out, _ = _fold(value, weight, rows, kind)
        return out if out.dtype is value.dtype else out.to(value.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        value, weight, ctx.rows, ctx.columns, ctx.kind = inputs
        ctx.kernel = LinearReduce
        ctx.form = value.shape, value.dtype
        ctx.reference = partial(_sum_by_torch, ctx.rows, ctx.kind == "mean")
        # The gradient of the value does not depend on it.
        needs_value = weight is not None and weight.requires_grad
        ctx.save_for_backward(value if needs_value else None, weight)
        ctx.save_for_forward(value, weight)
        ctx.set_materialize_grads(False)

    @staticmethod
    def tangents(
        ctx: Any, saved: Sequence[Any], d_value: Tensor | None, d_weight: Tensor | None, *_: None
    ) -> Tensor | None:
        value, weight = saved
        of_graph = ctx.rows, ctx.columns, ctx.kind
        of_value = None if d_value is None else LinearReduce.apply(d_value, weight, *of_graph)
        if d_weight is None:
            return of_value
        of_weight = LinearReduce.apply(value, d_weight, *of_graph)
        return of_weight if of_value is None else _added(of_value, of_weight)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None) -> Any:
        if d_out is None:
            return (None,) * 5
        if ctx.columns is None:
            raise RuntimeError("this was planned without gradients; run it again with gradients enabled")
        if are_batches((d_out,)):
            return Fused.backward(ctx, d_out)
        value, weight = ctx.saved_tensors
        if ctx.kind == "mean":
            # A product with the reciprocal, as the forward pass has it.
            d_out = _elementwise(torch.mul, d_out, ctx.rows.share(_wide(d_out.dtype)))
        if value is None and not are_differentiated((d_out,)):
            return _fold(d_out, weight, ctx.columns, "sum")[0].to(ctx.form[1]), *[None] * 4
        if value is not None:
            value, d_out = (x.to(_wide(x.dtype)) for x in (value, d_out))
        d_value, d_weight = Adjoint.apply(d_out, value, weight, ctx.rows, ctx.columns)
        return d_value.to(ctx.form[1]), d_weight, None, None, None


class Adjoint(Function, Fused):
    """The gradients of a sum: dx_j = sum_i w_ij dy_i, and dw_ij = <dy_i, x_j> if x is passed. Like the sum they are
    linear in each of dy, w and x, so that their gradients are sums and gradients of sums, to any order. x is passed
    wherever w requires a gradient."""

    TENSORS = slice(0, 3)

    @staticmethod
    def forward(
        d_out: Tensor, value: Tensor | None, weight: Tensor | None, rows: Rows, columns: Rows
    ) -> tuple[Tensor, Tensor | None]:
        if value is None:
            return _fold(d_out, weight, columns, "sum")[0], None
        return _fold_backward(plain(d_out), None, None, value, weight, columns, "sum", True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> None:
        *tensors, ctx.rows, ctx.columns = inputs
        ctx.kernel = Adjoint
        ctx.reference = partial(_adjoint_by_torch, ctx.rows, ctx.columns.num_rows)
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def tangents(
        ctx: Any,
        saved: Sequence[Any],
        of_d_out: Tensor | None,
        of_value: Tensor | None,
        of_weight: Tensor | None,
        *_: None,
    ) -> Any:
        d_out, value, weight = saved
        terms = []
        if of_d_out is not None:
            terms.append(Adjoint.apply(of_d_out, value, weight, ctx.rows, ctx.columns))
        if of_value is not None or of_weight is not None:
            of_value = torch.zeros_like(value) if of_value is None and value is not None else of_value
            of_weight = torch.zeros_like(weight) if of_weight is None and weight is not None else of_weight
            terms.append(Adjoint.apply(d_out, of_value, of_weight, ctx.rows, ctx.columns))
        return tuple(x[0] if x[0] is None else sum(x) for x in zip(*terms, strict=True))

    @staticmethod
    def backward(ctx: Any, of_value: Tensor | None, of_weight: Tensor | None = None) -> Any:
        d_out, value, weight = ctx.saved_tensors
        rows = ctx.rows
        columns = ctx.columns
        if are_batches((of_value, of_weight)):
            return Fused.backward(ctx, of_value, of_weight)
        terms = []
        if of_value is not None:
            terms.append(LinearReduce.apply(of_value, weight, rows, columns, "sum"))
        if of_weight is not None:
            terms.append(LinearReduce.apply(value, of_weight, rows, columns, "sum"))
        d_value = d_weight = None
        if value is not None and terms:
            of_value = torch.zeros_like(value) if of_value is None else of_value
            of_weight = torch.zeros_like(weight) if of_weight is None else of_weight
            d_value, d_weight = Adjoint.apply(d_out, of_value, of_weight, rows, columns)
        return sum(terms) if terms else None, d_value, d_weight, None, None


def reduced(value: Tensor, weight: Tensor | None, rows: Rows, kind: str | Associative) -> Tensor:
    """Reductions and sums where nothing is recorded for derivatives; a value of any strides."""
    out = _fold(value, weight, rows, kind, _mean(value, weight, rows, kind))[0]
    return out if out.dtype is value.dtype else out.to(value.dtype)


def summed(x: Tensor, weight: Tensor | None, rows: Rows, kind: str) -> Tensor:
    """Sums or means [N_dst, 1, D] of x [N_src, 1, D], contiguous, in float32 or float64; weight [1, E, 1] or None."""
    shape = rows.num_rows, 1, x.shape[-1]
    found = _again(x, weight, rows, kind, shape)
    return _fold(x.view(1, -1, shape[-1]), weight, rows, kind)[0].view(shape) if found is None else found


class EdgeSumStruct(Structure):
    """The parameters of `edge_sum`, as `EdgeSum` in `mpnn/kernels/cpu/row_reduce.cpp`."""

    _fields_ = (
        *fields(c_void_p, "to from_"),
        *fields(c_int64, "num_edges num_rows size"),
        *fields(c_void_p, "x weight out share"),
    )


class EdgeList:
    """The edges [2, E] of a graph, int64, as they are given, for the sums of its first calls: to sort the edges of a
    batch of molecules takes as long as several sums. Results have the same bits."""

    calls = 0

    def __init__(self, edges: Tensor, num_dst: int, num_src: int) -> None:
        # The kernel reads the ends one after the other; a transposed edge_index has them side by side.
        self.edges = edges.contiguous()
        self.nodes = (num_src, num_dst)
        self.sorted: dict[bool, Rows] = {}
        """By destination, and by source if transposed, once they are needed."""
        first = address(self.edges) or 0
        self._ends = first, first + 8 * edges.shape[1]
        self._shares: dict[torch.dtype, Tensor] = {}

    def summed(self, x: Tensor, weight: Tensor | None, kind: str, transposed: bool = False) -> Tensor:
        """As `summed`."""
        size = x.shape[-1]
        to = 0 if transposed else 1
        out = empty(x, self.nodes[to], 1, size)
        # The kernel counts edges in it, so a call in another thread must not see it before it is complete.
        share = out.new_empty(self.nodes[1], 1, 1) if kind == "mean" else None
        ends = self._ends[to], self._ends[1 - to], self.edges.shape[1]
        p = EdgeSumStruct(*ends, self.nodes[to], size, None, None, None, None)
        p.x, p.out = addresses(x, out)
        if weight is not None:
            p.weight = address(weight)
        if share is not None:
            p.share = address(share)
        library.run("edge_sum", x.dtype, p)
        if share is not None:
            self.keep_share(share)
        return out

    def share(self, dtype: torch.dtype) -> Tensor:
        """Returns the weight of each edge in the mean of its destination, [rows, 1, 1], after a mean of this dtype."""
        return self._shares[dtype]

    def keep_share(self, share: Tensor) -> None:
        self._shares.setdefault(share.dtype, share)


class RowSum(Fused):
    """`RowSum.apply(x, weight, rows, edge_list, kind, transposed)`: `row_sum`, with derivatives by x of any order.
    The weight is fixed. `rows(transposed)` are the edges by destination, or by source. `LinearReduce` does more, and
    takes longer over a molecule."""

    TENSORS = slice(0, 1)

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx,
        x: Tensor,
        weight: Tensor | None,
        rows: Callable[[bool], Rows],
        edge_list: EdgeList,
        kind: str,
        transposed: bool = False,
    ) -> Tensor:
        ctx.options = rows, edge_list, kind, transposed
        ctx.form = x.shape, x.dtype
        ctx.save_for_backward(None, weight)
        return row_sum(x, weight, rows, edge_list, kind, transposed)

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        _, weight = ctx.saved_tensors
        rows, edge_list, kind, transposed = ctx.options
        if are_batches((d_out,)):
            ctx.reference = partial(_row_sum_by_torch, rows(transposed), kind, weight)
            return Fused.backward(ctx, d_out)
        if kind == "mean":
            d_out = _elementwise(torch.mul, d_out, edge_list.share(d_out.dtype))
        options = weight, rows, edge_list, "sum", not transposed
        if are_differentiated((d_out,)):
            return RowSum.apply(d_out.resolve_neg().contiguous(), *options), *[None] * 5
        return row_sum(plain(d_out), *options), *[None] * 5


def _row_sum_by_torch(rows: Rows, kind: str, weight: Tensor | None, x: Tensor) -> Tensor:
    return _sum_by_torch(rows, kind == "mean", x.squeeze(1)[None], weight)[0].unsqueeze(1)


def row_sum(
    x: Tensor,
    weight: Tensor | None,
    rows: Callable[[bool], Rows],
    edge_list: EdgeList,
    kind: str,
    transposed: bool = False,
) -> Tensor:
    """`summed`, or the same by the edges as they are listed."""
    edge_list.calls += 1
    # They are summed as listed in the first calls, as far as one part sums them.
    if edge_list.calls <= _FIRST_CALLS and edge_list.edges.shape[1] * x.shape[-1] < 2 * _MIN_COMPONENTS:
        return edge_list.summed(x, weight, kind, transposed)
    own = edge_list.sorted.get(transposed)
    if own is None:
        own = edge_list.sorted[transposed] = rows(transposed)
    if kind == "mean":
        edge_list.keep_share(own.share(x.dtype)[:, None])
    return summed(x, weight, own, kind)


def _form(value: Tensor, weight: Tensor | None, kind: str) -> Hashable:
    """The form of a call for one entry: with its rows, what decides the parameters of the kernel but for addresses."""
    return kind, value.dtype, value.shape[-1], None if weight is None else weight.shape


def _again(value: Tensor, weight: Tensor | None, rows: Rows, kind: str, shape: tuple[int, int, int]) -> Tensor | None:
    """The result, of a shape, of a call with the parameters of one of the same form, for one entry and one part: to
    fill them in takes longer than to sum the edges of a molecule. None if there was none."""
    parameters = rows.repeated.get(_form(value, weight, kind))
    if parameters is None:
        return None
    out = value.new_empty(*shape)
    p = RowReduceStruct.from_buffer_copy(parameters)
    p.x, p.out = addresses(value, out)
    if weight is not None:
        p.weight = address(weight)
    library.run("row_reduce_forward", value.dtype, p)
    return out


def _sum_by_torch(rows: Rows, mean: bool, value: Tensor, weight: Tensor | None) -> Tensor:
    """`LinearReduce` by torch's operations, for batches of gradients, which kernels do not read."""
    row, col, edge = rows.ends
    messages = value.to(_wide(value.dtype)).index_select(1, col)
    if weight is not None:
        heads = weight.shape[-1]
        messages = (weight.index_select(1, edge)[..., None] * messages.unflatten(-1, (heads, -1))).flatten(-2)
    out = messages.new_zeros(len(messages), rows.num_rows, messages.shape[-1]).index_add(1, row, messages)
    if mean:
        degree = out.new_zeros(rows.num_rows).index_add(0, row, out.new_ones(len(row)))
        out = out / degree.clamp(min=1)[:, None]
    return out.to(value.dtype)


def _adjoint_by_torch(
    rows: Rows, sources: int, d_out: Tensor, value: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """`Adjoint` by torch's operations."""
    row, col, edge = rows.ends
    upstream = d_out.index_select(1, row)
    heads = 1 if weight is None else weight.shape[-1]
    chunks = upstream.unflatten(-1, (heads, -1))
    messages = chunks if weight is None else weight.index_select(1, edge)[..., None] * chunks
    d_value = d_out.new_zeros(len(d_out), sources, d_out.shape[-1]).index_add(1, col, messages.flatten(-2))
    if value is None or weight is None:
        return d_value, None
    products = (chunks * value.index_select(1, col).unflatten(-1, (heads, -1))).sum(-1)
    products = products.sum(0, keepdim=True) if len(weight) < len(products) else products
    return d_value, products.new_zeros(weight.shape).index_copy(1, edge, products)


def _added(results: Tensor, others: Tensor) -> Tensor:
    """`results + others`. To allocate a sum takes longer than to add, so results are overwritten if nothing records."""
    is_recorded = results.requires_grad or others.requires_grad or torch._C._are_functorch_transforms_active()
    return results + others if is_recorded else results.add_(others)


def _elementwise(function: Any, d_out: Tensor, other: Tensor) -> Tensor:
    """`function(d_out, other)`, in memory that is fast to write where no gradient is recorded."""
    if torch.is_grad_enabled():
        return cast(Tensor, function(d_out, other))
    return cast(Tensor, function(d_out, other, out=empty(other, *d_out.shape)))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype is torch.float32 or dtype is torch.float64 else torch.promote_types(dtype, torch.float32)


def _mean(value: Tensor, weight: Tensor | None, rows: Rows, kind: str | Associative) -> tuple[Tensor, Tensor] | None:
    """The means that variances are taken from, each [B, rows, size]: the first message of each row, and the mean
    distance from it. A sum of the two would be rounded by more than messages that are nearly equal differ."""
    if kind != "var":
        return None
    offset, center = _fold(value, weight, rows, _CENTERED_MEAN, counted=True)
    return cast(Tensor, center), offset


def _fold(
    value: Tensor,
    weight: Tensor | None,
    rows: Rows,
    kind: str | Associative,
    mean: tuple[Tensor, Tensor] | None = None,
    counted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The results of rows [B, rows, size], and the number of messages equal to each extreme if `counted`."""
    value = plain(value)
    weight = None if weight is None else plain(weight)
    shape = len(value), rows.num_rows, value.shape[2]
    is_repeated = mean is None and not counted and type(kind) is str and shape[0] == 1
    if is_repeated and (found := _again(value, weight, rows, cast(str, kind), shape)) is not None:
        return found, None
    out = empty(value, *shape, dtype=_wide(value.dtype))
    count = empty(out, *out.shape) if counted and kind in ("max", "min", _CENTERED_MEAN) else None
    if not out.numel():
        return out, count
    chunks = chunks_of(rows, value.shape[2])
    if isinstance(kind, Associative):
        combine.forward(kind, value, weight, chunks, out)
        return out, combine.ties(kind, value, weight, chunks, out) if counted and kind.shares_ties else None
    center, offset = mean or (None, None)
    p = _parameters(value, weight, chunks, center, out)
    p.offset = address(offset)
    p.kind = _FOLDS.get(kind, _EXTREME if count is None else _COUNTED)
    p.sign = -1.0 if kind == "min" else 1.0
    p.mean = int(kind in ("mean", "var", _CENTERED_MEAN))
    p.count = address(count)
    _run("row_reduce_forward", p, value, len(chunks))
    if is_repeated and len(chunks) == 1 and out.dtype is value.dtype and out.nbytes < LARGE:
        rows.repeated[_form(value, weight, kind)] = bytes(p)
    return out, count


def _fold_backward(
    d_out: Tensor,
    compared: Tensor | None,
    offset: Tensor | None,
    value: Tensor,
    weight: Tensor | None,
    columns: Rows,
    kind: str | Associative,
    with_weight: bool,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of the value and, if `with_weight`, of the weight."""
    value, d_value = plain(value), empty(value, *value.shape)
    weight = None if weight is None else plain(weight)
    d_weight = None
    if with_weight and weight is not None:
        allocate = zeros if isinstance(kind, Associative) or not d_value.numel() else empty
        d_weight = allocate(value, len(value), *weight.shape[1:])
    if d_value.numel():
        chunks = chunks_of(columns, value.shape[2])
        if isinstance(kind, Associative):
            combine.backward(kind, d_out, compared, value, weight, chunks, d_value, d_weight)
        else:
            p = _parameters(d_out, weight, chunks, value, d_value)
            p.kind = _FOLDS.get(kind, _EXTREME)
            p.sign = 1.0
            p.compared, p.offset, p.d_weight = address(compared), address(offset), address(d_weight)
            _run("row_reduce_backward", p, value, len(chunks))
    if d_weight is not None and weight is not None and len(weight) < len(d_weight):
        d_weight = d_weight.sum(0, keepdim=True)
    return d_value, d_weight


def _parameters(x: Tensor, weight: Tensor | None, chunks: Chunks, own: Tensor | None, out: Tensor) -> RowReduceStruct:
    heads, stride = (1, 0) if weight is None else (weight.shape[-1], weight[0].numel() if len(weight) > 1 else 0)
    _, columns, size = x.shape
    of_x = address(x), None, address(weight)
    return RowReduceStruct(chunks.struct, 0, size, heads, columns, 1.0, 0, *of_x, stride, address(own), address(out))


def _run(name: str, p: RowReduceStruct, like: Tensor, chunks: int) -> None:
    """Runs a kernel for each entry of the batch and each part, and adds up the rows that chunks share."""
    count, size = like.shape[0], like.shape[2]
    wide = _wide(like.dtype)
    if chunks > 1:
        partial = like.new_empty(2, count, chunks, size, dtype=wide)
        p.partial, p.partial_count = address(partial[0]), address(partial[1])
    library.run(name, like.dtype, p, count, chunks)
    if chunks > 1:
        library.run("row_reduce_join", wide, p, count)
