"""Attention along the rows of a sparse graph as a differentiable function of tensors, on CPU.

`attend` takes features of one dtype, padded to whole vectors. The backend converts a `mpnn.round.Round` to
that form with torch operations. No E x D tensor is allocated, forward or backward, except gradients of E x D inputs.
The formulas and the loops are in `mpnn/kernels/cpu/row_attention.cpp`.
"""

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn.kernels import memory
from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address, addresses, fields
from mpnn.kernels.derivatives import Fused, gradients_again, is_recorded
from mpnn.kernels.dropout_threshold import threshold
from mpnn.kernels.function import Function, tangents_again
from mpnn.kernels.rows.rows import Chunks, EdgeTensor, NodeTensor, Rows, RowsStruct, edge_tensor, node_tensor
from mpnn.kernels.rows.spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, NORMALIZERS

LANES = 8  # features are padded to a multiple of this
_SOFTMAX = NORMALIZERS["softmax"]
# kinds of RowSums
_WEIGHTED = 0
_NUMBERS = 1
_ACTIVATIONS = 2
_KINDS = {DOT: _WEIGHTED, ADDITIVE: _NUMBERS, ACTIVATED: _ACTIVATIONS}
_MAX_PARTS = 32
_MIN_COMPONENTS = 1 << 17  # of a part's edges
# heads of a key from which on the kernels copy keys
SHARED_FORWARD = 8
SHARED_BACKWARD = 4
_LONG = 16  # edges of a node from which on copies of keys pay
_SHARED_PARTS = 8  # chunks with copies of the gradients of keys


class EdgeTypes(NamedTuple):
    """For a tensor with a row for each edge type: the type of each edge, int64 [E] in the caller's order, and a
    function that returns the edges sorted by type, whose `col` is the destination."""

    ids: Tensor
    by_type: Callable[[], Rows]


class Tensors(NamedTuple):
    """The tensors of a call, of one dtype; absent ones are None.

    value [..., N_src, H_kv, DV]. A `DOT` score: query [..., N_dst, H, D] are queries, key [..., N_src, H_kv, D] keys.
    `ADDITIVE`: query [..., N_dst, H], key [..., N_src, H]. `ACTIVATED`: query, key [..., N, H, D], vector [H, D]. D and
    DV are multiples of LANES. Per edge or per edge type: edge_key [..., E, H or 1, width] is added to keys or under the
    activation, edge_value [..., E, H or 1, width] to values, edge_term [..., E, H or 1] under the activation, bias and
    table [..., E, H or 1] to the logits; dst_bias [..., N_dst, H] and src_bias [..., N_src, H] too, both or neither.
    """

    value: Tensor
    query: Tensor | None = None
    key: Tensor | None = None
    vector: Tensor | None = None
    edge_key: Tensor | None = None
    edge_value: Tensor | None = None
    edge_term: Tensor | None = None
    bias: Tensor | None = None
    table: Tensor | None = None
    dst_bias: Tensor | None = None
    src_bias: Tensor | None = None


_TRAILING = {"edge_key": 3, "edge_value": 3, "edge_term": 2, "bias": 2, "table": 2}  # dimensions after the batch
_OF_EDGES = _TRAILING.keys() - {"table"}
_KEY_AND_VALUE = {Tensors._fields.index("key"), Tensors._fields.index("value")}
_QUERY_AND_KEY = {Tensors._fields.index("query"), Tensors._fields.index("key")}


class Spec(NamedTuple):
    """All other arguments. `rows`: the edges by destination. `by_source`: returns the edges by source. `types`: for
    tensors of `Tensors` with a row for each edge type. `dropout_keys`, int32 [2 + batch * H], None without dropout;
    `dropout_ids`: what it hashes in place of the numbers of destinations and sources, int32, or None."""

    rows: Rows
    by_source: Callable[[], Rows]
    types: dict[str, EdgeTypes]
    heads: int
    score: int
    normalize: int
    scale: float = 1.0
    softcap: float = 0.0
    slope: float = 1.0
    tanh: bool = False
    dropout_keys: Tensor | None = None
    dropout: float = 0.0
    dropout_ids: tuple[Tensor, Tensor] | None = None
    return_weights: bool = False
    return_lse: bool = False

    @property
    def trailing(self) -> int:
        """The number of dimensions of query and key from the nodes on."""
        return 2 if self.score == ADDITIVE else 3


class RowAttention(Structure):
    """The parameters of the kernels, as `RowAttention` in `mpnn/kernels/cpu/row_attention.cpp`."""

    _fields_ = (
        ("rows", RowsStruct),
        *fields(c_int64, "heads score normalize activation shared"),
        *fields(c_double, "scale softcap slope"),
        *fields(NodeTensor, "query key value"),
        ("vector", c_void_p),
        *fields(EdgeTensor, "edge_key edge_value edge_term bias table"),
        *fields(c_void_p, "row_bias col_bias"),
        ("num_cols", c_int64),
        *fields(c_void_p, "dropout_keys row_ids col_ids"),
        ("threshold", c_int64),
        ("keep_scale", c_double),
        *fields(c_void_p, "out stats weights partial partial_row"),
        ("d_out", NodeTensor),
        *fields(c_void_p, "saved_stats saved_out saved_weights d_weights row_stats"),
        ("num_dst", c_int64),
        ("numbers", c_void_p),
        *fields(c_int64, "stride weight_at bias_at"),
        *fields(NodeTensor, "d_value d_key d_query"),
        ("d_vector", c_void_p),
        *fields(EdgeTensor, "d_edge_key d_edge_value d_edge_term d_bias"),
        ("tangent", c_void_p),
    )


def _nothing() -> RowAttention:
    """Parameters all of whose tensors are absent."""
    p = RowAttention()
    for name, kind, *_ in RowAttention._fields_:
        if kind in (NodeTensor, EdgeTensor):
            setattr(p, name, kind(heads=1))
    return p


_NOTHING = _nothing()


class RowSums(Structure):
    """The parameters of `row_attention_sums`, as `RowSums` in `mpnn/kernels/cpu/row_attention.cpp`."""

    _fields_ = (
        ("rows", RowsStruct),
        *fields(c_int64, "heads kind activation"),
        *fields(c_double, "slope factor"),
        ("numbers", c_void_p),
        *fields(c_int64, "stride which"),
        *fields(NodeTensor, "x own"),
        ("vector", c_void_p),
        ("edge_key", EdgeTensor),
        ("out", NodeTensor),
        *fields(c_void_p, "partial partial_row"),
    )


def chunks_of(rows: Rows, width: int) -> Chunks:
    """The chunks that are run side by side, where an edge has `width` components."""
    return rows.chunks(width, _MAX_PARTS, _MIN_COMPONENTS)


def attend(
    spec: Spec, tensors: Tensors, reference: Callable[..., tuple[Tensor | None, ...]] | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out [..., N_dst, H, DV]; weights before dropout [..., E, H] in the caller's order; log-sum-exp of the logits,
    lse [..., N_dst, H], +inf for a row without edges. Weights and lse are None unless returned. `reference`: an equal
    function of the tensors, see `Fused`."""
    batch = tensors.value.shape[:-3]
    for name, trailing in _TRAILING.items():
        x = getattr(tensors, name)
        if x is not None and 1 < x.shape[:-trailing].numel() < batch.numel():  # the kernels share all or nothing
            tensors = tensors._replace(**{name: x.expand(*batch, *x.shape[-trailing:])})
    if is_recorded():
        out, _, weights, lse = _RowAttention.apply(spec, reference, *tensors)
        return out, weights, lse
    out, stats, weights = _forward(spec, _readable(spec, *tensors))
    return out, weights, _lse(stats) if spec.return_lse else None


class Repeated:
    """`attend` without derivatives, edges with data and dropout, for tensors of the widths and strides of these, which
    are read where they lie. Everything but addresses, numbers and rows is filled in."""

    def __init__(self, spec: Spec, tensors: Tensors) -> None:
        value = tensors.value
        self._nodes = spec.trailing
        self._batch = value.shape[:-3]
        self._heads = spec.heads
        self._width = value.shape[-1]
        self._filled = bytes(_parameters(spec, tensors, chunks_of(spec.rows, self._heads * self._width)))

    @staticmethod
    def serves(spec: Spec, tensors: Tensors) -> bool:
        """Whether these tensors, and all others of their strides, are read where they lie."""
        key = tensors.key
        if key is None or not tensors.value.numel() or (key.shape[-1] % LANES and spec.score != ADDITIVE):
            return False
        shares = spec.score == DOT and spec.heads >= SHARED_FORWARD * max(key.shape[-2], tensors.value.shape[-2])
        return not shares and all(
            (x.is_contiguous() or (spec.score == ADDITIVE and x.dim() < 4 and x.stride(-1) == 1)) and not x.is_neg()
            for x in tensors
            if x is not None
        )

    def __call__(
        self,
        rows: Rows,
        numbers: tuple[float, float, float],
        value: Tensor,
        query: Any,
        key: Any,
        vector: Tensor | None,
    ) -> Tensor:
        """Out [..., N_dst, H, DV]. `numbers`: scale, softcap and slope."""
        heads = self._heads
        width = self._width
        chunks = rows.chunks(heads * width, _MAX_PARTS, _MIN_COMPONENTS)
        pieces = chunks.count
        out = _by_rows(value, chunks, 3, (*self._batch, rows.num_rows, heads, width))
        if not rows.num_edges:
            return out
        stats = value.new_empty((*self._batch, rows.num_rows, 2, heads))
        p = RowAttention.from_buffer_copy(self._filled)
        p.rows = chunks.struct
        p.scale, p.softcap, p.slope = numbers
        if self._batch:  # strides between entries depend on the number of nodes
            p.value = node_tensor(value, 3)
            p.query, p.key = (node_tensor(x, self._nodes) for x in (query, key))
        p.query.data, p.key.data, p.value.data, p.out, p.stats = addresses(query, key, value, out, stats)
        if vector is not None:
            p.vector = address(vector)
        count = self._batch.numel()
        if pieces > 1:
            _launch("forward", "join", p, value, count, pieces, heads * (2 + width))
        else:  # a call less on the way of each small layer
            library.run("row_attention_forward", value.dtype, p, count)
        return out


class _RowAttention(Function, Fused):
    TENSORS = slice(2, None)

    @staticmethod
    def forward(spec: Spec, reference: Any, *tensors: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        out, stats, weights = _forward(spec, _readable(spec, *tensors))
        return out, stats, weights, _lse(stats) if spec.return_lse else None

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        spec, reference, *tensors = inputs
        out, stats, weights, _ = output
        ctx.kernel = _RowAttention
        ctx.spec = spec
        ctx.reference = reference
        ctx.mark_non_differentiable(stats)
        ctx.save_for_backward(*tensors, out, stats, weights)
        ctx.save_for_forward(*tensors, out, stats, weights)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, _: None, d_weights: Tensor | None, d_lse: Tensor | None) -> Any:
        return Fused.backward(ctx, d_out, d_weights, d_lse)

    @staticmethod
    def tangents(ctx: Any, saved: Sequence[Any], _spec: None, _reference: None, *tangents: Tensor | None) -> Any:
        out, weights, lse = _Tangents.apply(ctx.spec, ctx.reference, *saved, *tangents)
        return out, None, weights, lse

    @staticmethod
    def gradients(ctx: Any, d_out: Tensor | None, d_weights: Tensor | None, d_lse: Tensor | None) -> Any:
        *tensors, out, stats, weights = ctx.saved_tensors
        if d_out is None and d_lse is None and (d_weights is None or weights is None):
            return [None] * len(tensors)
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_weights = None if weights is None else d_weights
        saved = _Saved(*_plain(out, stats, d_out, weights, d_weights, d_lse))
        inputs = Tensors(*_plain(*tensors))
        return _Backward(ctx.spec, inputs, saved, ctx.needs_input_grad[2:]).gradients()


_COUNT = len(Tensors._fields)


class _Tangents(Function):
    """`_Tangents.apply(spec, reference, *tensors, out, stats, weights, *tangents)`: the tangents of out, and of weights
    and lse if they are returned, from those of `Tensors`, None for one that is 0."""

    @staticmethod
    def forward(spec: Spec, reference: Any, *inputs: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tensors, results, tangents = inputs[:_COUNT], inputs[_COUNT : _COUNT + 3], inputs[_COUNT + 3 :]
        moved = [None if x is None or x._is_zerotensor() else memory.plain(x) for x in tangents]
        return _tangents(spec, Tensors(*_plain(*tensors)), Tensors(*moved), *_plain(*results))  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        # Not `out`, `stats` and `weights`: what they depend on is among the tensors.
        tensors = _inputs(inputs)
        ctx.reference = inputs[1]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        function = partial(_tangents_again, ctx.reference)
        found = gradients_again(function, ctx.saved_tensors, _inputs(ctx.needs_input_grad), upstream)
        return None, None, *found[:_COUNT], None, None, None, *found[_COUNT:]

    @staticmethod
    def tangents(ctx: Any, saved: Sequence[Any], *tangents: Tensor | None) -> Any:
        return tuple(tangents_again(partial(_tangents_again, ctx.reference), saved, _inputs(tangents)))


def _inputs(x: Sequence[Any]) -> tuple[Any, ...]:
    """Of the arguments of `_Tangents`, or of one number for each of them, those of tensors and tangents."""
    return (*x[2 : 2 + _COUNT], *x[5 + _COUNT :])


def _tangents_again(function: Callable[..., Any], *inputs: Tensor | None) -> Any:
    """`_Tangents` by differentiable operations."""
    return tuple(tangents_again(function, inputs[:_COUNT], inputs[_COUNT:]))


def _tangents(
    spec: Spec, inputs: Tensors, moved: Tensors, out: Tensor, stats: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The tangents of out, weights and lse from those of the inputs, by one pass along the rows."""
    heads = spec.heads
    rows = spec.rows
    width = inputs.value.shape[-1]
    batch = inputs.value.shape[:-3]
    count = batch.numel()
    chunks = chunks_of(rows, heads * width)
    d_out = _by_rows(out, chunks, 3, out.shape)
    d_lse = _by_rows(out, chunks, 2, (*batch, rows.num_rows, heads))
    d_weights = None if weights is None else memory.empty(weights, *weights.shape)
    if rows.num_edges and count and d_out.numel():
        if moved.dst_bias is not None or moved.src_bias is not None:  # the kernel reads both or neither
            of_nodes = {name: getattr(moved, name) for name in ("dst_bias", "src_bias")}
            zeros = {name: torch.zeros_like(getattr(inputs, name)) for name, x in of_nodes.items() if x is None}
            moved = moved._replace(**zeros)
        p = _parameters(spec, inputs, chunks)
        tangent = _parameters(spec, moved, chunks)
        p.out, p.stats = addresses(out, stats)
        tangent.out, tangent.stats, tangent.weights = map(address, (d_out, d_lse, d_weights))
        p.tangent = ctypes.addressof(tangent)
        _launch("tangent", "join_tangent", p, out, count, len(chunks), heads * (1 + width))
    if weights is not None and d_weights is not None and spec.normalize == _SOFTMAX:
        # w' = w (l' - t), of which the kernel wrote w l'
        d_weights -= weights * rows.to_edges(d_lse)
    return d_out, d_weights, d_lse if spec.return_lse else None


def _lse(stats: Tensor) -> Tensor:
    """The log-sum-exp of the logits of each row, of its maximum and inverse sum."""
    row_max, inverse_sum = stats.unbind(-2)  # 0 without edges
    return row_max - inverse_sum.log()


class _Saved(NamedTuple):
    """Results of the forward pass, and incoming gradients."""

    out: Tensor
    stats: Tensor
    d_out: Tensor
    weights: Tensor | None
    d_weights: Tensor | None
    d_lse: Tensor | None


def _plain(*tensors: Tensor | None) -> Iterator[Any]:
    return (x if x is None else memory.plain(x) for x in tensors)


def _readable(spec: Spec, *tensors: Tensor | None) -> Tensors:
    """The inputs of the forward pass. A copy of keys and values costs more than it saves where few edges read them, as
    those of a new token read a cache with heads outside of nodes. Numbers of nodes are read where they lie, which may
    be next to other numbers of the node."""
    values: Any = tensors[0]
    is_additive = spec.score == ADDITIVE
    few = not is_additive and spec.rows.num_edges <= values.shape[-3]
    in_place = _QUERY_AND_KEY if is_additive else _KEY_AND_VALUE if few else ()
    found: list[Any] = list(tensors)
    for k, x in enumerate(tensors):
        if x is None or (x.is_contiguous() and not (x.requires_grad or x.is_neg())):
            continue
        stays = k in in_place and x.dim() <= 4 - is_additive and x.stride(-1) == 1
        found[k] = x.detach().resolve_neg() if stays else memory.plain(x)
    return Tensors(*found)


def _forward(spec: Spec, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor | None]:
    """out; the row maximum and inverse row sum [..., N_dst, 2, H]; and the weights, if they are returned."""
    value = inputs.value
    heads = spec.heads
    rows = spec.rows
    batch, width = value.shape[:-3], value.shape[-1]
    count = batch.numel()
    chunks = rows.chunks(heads * width, _MAX_PARTS, _MIN_COMPONENTS)
    pieces = chunks.count
    out = _by_rows(value, chunks, 3, (*batch, rows.num_rows, heads, width))
    stats = _by_rows(value, chunks, 3, (*batch, rows.num_rows, 2, heads))
    weights = memory.empty(value, *batch, rows.num_edges, heads) if spec.return_weights else None
    if not rows.num_edges or not count:
        return out, stats, weights
    p = _parameters(spec, inputs, chunks)
    p.shared = spec.score == DOT and _shared(spec, inputs, SHARED_FORWARD)
    p.out = address(out)
    p.stats = address(stats)
    if weights is not None:
        p.weights = address(weights)
    _launch("forward", "join", p, value, count, pieces, heads * (2 + width))
    if spec.return_weights and spec.normalize == _SOFTMAX:
        library.run("row_attention_weights", value.dtype, p, count, pieces)
    return out, stats, weights


def _parameters(spec: Spec, inputs: Tensors, chunks: Chunks, *, by_source: bool = False) -> RowAttention:
    """The parameters that the forward and backward passes share."""
    nodes = spec.trailing
    p = RowAttention.from_buffer_copy(_NOTHING)
    p.rows = chunks.struct
    p.heads = spec.heads
    p.score = spec.score
    p.normalize = spec.normalize
    p.activation = int(spec.tanh)
    p.scale = spec.scale
    p.softcap = spec.softcap
    p.slope = spec.slope
    p.value = node_tensor(inputs.value, 3)
    p.query = node_tensor(inputs.query, nodes)
    p.key = node_tensor(inputs.key, nodes)
    p.vector = address(inputs.vector)
    for name, trailing in _TRAILING.items():
        if (x := getattr(inputs, name)) is not None:
            ids = spec.types[name].ids if name in spec.types else None
            setattr(p, name, edge_tensor(x, trailing, ids))
    row, col = (inputs.dst_bias, inputs.src_bias)[:: -1 if by_source else 1]
    if col is not None:
        p.row_bias = address(row)
        p.col_bias = address(col)
        p.num_cols = col.shape[-2]
    if spec.dropout_keys is not None:
        p.threshold = threshold(spec.dropout)
        p.keep_scale = 1 / (1 - spec.dropout)
        dst_ids, src_ids = spec.dropout_ids or (None, None)
        row_ids, col_ids = (src_ids, dst_ids) if by_source else (dst_ids, src_ids)
        p.dropout_keys, p.row_ids, p.col_ids = map(address, (spec.dropout_keys, row_ids, col_ids))
    return p


def _shared(spec: Spec, inputs: Tensors, least: int) -> bool:
    """Whether heads of a `DOT` score share keys so that the kernels' `shared` way pays."""
    key: Any = inputs.key
    value = inputs.value
    rows = spec.rows
    key_heads, nodes = max(key.shape[-2], value.shape[-2]), max(rows.num_rows, key.shape[-3])
    shares = shares_keys(spec.heads, key_heads, rows.num_edges, nodes, least)
    return shares and all(x.stride(-2) == x.shape[-1] for x in (key, value))


def shares_keys(heads: int, key_heads: int, edges: int, nodes: int, least: int) -> bool:
    """Whether at least this many heads share keys and values, and rows are long enough for the `shared` kernels."""
    return key_heads * least <= heads and edges >= _LONG * nodes


def _launch(
    name: str, join: str, p: Any, like: Tensor, count: int, chunks: int, size: int, together: int | None = None
) -> None:
    """Runs a kernel for each entry of the batch and each chunk, and joins the rows that chunks share.

    Args:
        count: entries of the batch, of which `together` run side by side. size: numbers of a row in its partial sums.
    """
    together = count if together is None else together
    if chunks > 1:
        # Sums of the first and the last row of each chunk, and the numbers of these rows, -1 for none.
        sums = like.new_empty(count, chunks, 2, size)
        rows = like.new_full((count, chunks, 2), -1, dtype=torch.int64)
        p.partial, p.partial_row = address(sums), address(rows)
    for first in range(0, count, together):
        library.run(f"row_attention_{name}", like.dtype, p, together, chunks, first)
    if chunks > 1:
        library.run(f"row_attention_{join}", like.dtype, p, count)


class _Backward:
    """The backward pass of a call."""

    def __init__(self, spec: Spec, inputs: Tensors, saved: _Saved, needed: Sequence[bool]) -> None:
        self.spec = spec
        self.inputs = inputs
        self.saved = saved
        self.count = inputs.value.shape[:-3].numel()
        self.heads = spec.heads
        self.width = self.heads * inputs.value.shape[-1]
        self.wanted = {name for name, need in zip(Tensors._fields, needed, strict=True) if need}
        self.tables = [name for name in self.wanted if name in spec.types]
        self.shared = spec.score == DOT and _shared(spec, inputs, SHARED_BACKWARD)
        if self.shared:  # each part has a copy of the gradients of keys
            self.chunks = spec.rows.chunks(self.width, _SHARED_PARTS, _MIN_COMPONENTS, equal=True)
        else:
            self.chunks = chunks_of(spec.by_source(), self.width)
        # numbers of each edge: the gradient of its logit; for tables also its weight and the gradient of its bias
        with_weight = "edge_value" in self.tables
        of_nodes = bool({"dst_bias", "src_bias"} & self.wanted)
        with_bias = ("table" in self.tables or of_nodes) and (spec.softcap != 0 or spec.score in (ADDITIVE, ACTIVATED))
        self.weight_at = 1 if with_weight else -1
        self.bias_at = 1 + with_weight if with_bias else -1
        is_read = ("query" in self.wanted and not self.shared) or bool(self.tables) or of_nodes
        self.stride = 1 + with_weight + with_bias if is_read else 0
        self.numbers = inputs.value.new_empty(self.count, spec.rows.num_edges, self.stride, self.heads)
        self.results: dict[str, Tensor] = {}

    def gradients(self) -> list[Tensor | None]:
        """The gradient of each tensor of `inputs`, or None if it is not needed."""
        if self.spec.rows.num_edges and self.count:
            self._by_rows()
            if "query" in self.wanted and not self.shared:
                self._by_destination()
            for name in self.tables:
                self._by_type(name)
            for name in sorted(self.wanted & {"dst_bias", "src_bias"}):
                rows = self.spec.rows if name == "dst_bias" else self.spec.by_source()
                p = RowSums(kind=_NUMBERS, factor=1.0, which=max(self.bias_at, 0))
                self.results[name] = self._sums(p, rows, getattr(self.inputs, name).shape, 2)
        for name, x in self.inputs._asdict().items():
            if name in self.wanted and name not in self.results:  # no edges
                self.results[name] = torch.zeros_like(x)
        return [self.results.get(name) for name in Tensors._fields]

    def _by_rows(self) -> None:
        """Gradients of the tensors of sources and edges, and of queries if heads share keys."""
        spec = self.spec
        inputs = self.inputs
        saved = self.saved
        count = self.count
        value = inputs.value
        nodes = spec.trailing
        chunks = self.chunks
        p = _parameters(spec, inputs, chunks, by_source=not self.shared)
        p.shared = self.shared
        p.d_out = node_tensor(saved.d_out, 3)
        p.num_dst = spec.rows.num_rows
        p.d_weights = address(saved.d_weights)
        p.numbers = address(self.numbers) if self.stride else None
        p.stride = self.stride
        p.weight_at = self.weight_at
        p.bias_at = self.bias_at
        if spec.normalize == _SOFTMAX:
            row_stats = memory.empty(value, count, p.num_dst, 3, self.heads)
            p.row_stats = address(row_stats)
            self._prepare(row_stats)
        of_parts = self.wanted & {"value", "key"} if self.shared else set()
        for name in self.wanted & ({"value", "key", "query"} if self.shared else {"value", "key"}):
            shape = getattr(inputs, name).shape
            trailing = nodes if name == "key" else 3
            if name in of_parts:
                result = memory.zeros(value, count * len(chunks), *shape[-3:])
            else:
                result = _by_rows(value, chunks, trailing, shape)
            self.results[name] = result
            setattr(p, f"d_{name}", node_tensor(result, trailing))
        for name in self.wanted.intersection(_OF_EDGES).difference(self.tables):
            self.results[name] = memory.zeros(value, *getattr(inputs, name).shape)
            setattr(p, f"d_{name}", edge_tensor(self.results[name], _TRAILING[name]))
        if "vector" in self.wanted:
            d_vector = value.new_zeros(count, len(chunks), *inputs.vector.shape)  # type: ignore[union-attr]
            p.d_vector = address(d_vector)
        keys = 0 if spec.score == CONSTANT else inputs.query.shape[-1] if nodes == 3 else 1  # type: ignore[union-attr]
        size = (0 if self.shared else self.width) + self.heads * keys
        # entries of the batch that share a tensor of edges must not add to its gradient side by side
        entries = [self.results[name].shape[:-k].numel() for name, k in _TRAILING.items() if name in self.results]
        together = 1 if min(entries, default=count) < count else count
        _launch("backward", "join_backward", p, value, count, len(chunks), size, together)
        for name in of_parts:
            total = self.results[name].unflatten(0, (count, len(chunks))).sum(1).view(getattr(inputs, name).shape)
            self.results[name] = total * spec.scale if name == "key" else total
        if "vector" in self.wanted:
            self.results["vector"] = d_vector.sum((0, 1))

    def _prepare(self, row_stats: Tensor) -> None:
        """Fills `row_stats`: what weights and their gradients depend on, by destination."""
        spec = self.spec
        saved = self.saved
        rows = chunks_of(spec.rows, self.width).struct
        p = RowAttention(rows=rows, heads=self.heads, d_out=node_tensor(saved.d_out, 3))
        p.num_dst = spec.rows.num_rows
        p.row_stats = address(row_stats)
        p.saved_stats = address(saved.stats)
        p.saved_out, p.saved_weights, p.d_weights = map(address, (saved.out, saved.weights, saved.d_weights))
        library.run("row_attention_prepare", row_stats.dtype, p, self.count, len(self.chunks))
        if saved.d_lse is not None:  # w_ij is also the derivative of lse_i by l_ij
            row_stats[:, :, 2] -= saved.d_lse.view(-1, p.num_dst, self.heads)

    def _by_destination(self) -> None:
        spec = self.spec
        inputs = self.inputs
        score = self.spec.score
        p = RowSums(kind=_KINDS[score], activation=int(spec.tanh), slope=spec.slope, which=0)
        p.factor = spec.scale if score == DOT else 1.0
        if score != ADDITIVE:
            p.x = node_tensor(inputs.key, 3)
            p.vector = address(inputs.vector)
            p.own = node_tensor(inputs.query if score == ACTIVATED else None, 3)
            ids = spec.types["edge_key"].ids if "edge_key" in spec.types else None
            p.edge_key = edge_tensor(inputs.edge_key, 3, ids)
        shape = inputs.query.shape  # type: ignore[union-attr]
        self.results["query"] = self._sums(p, spec.rows, shape, spec.trailing)

    def _by_type(self, name: str) -> None:
        """The gradient of a tensor with a row for each edge type."""
        table = getattr(self.inputs, name)
        spec = self.spec
        numbers = name == "table"
        which = {"edge_value": self.weight_at, "table": max(self.bias_at, 0)}.get(name, 0)
        p = RowSums(
            kind=_NUMBERS if numbers else _WEIGHTED, factor=spec.scale if name == "edge_key" else 1.0, which=which
        )
        shape = table.shape
        if not numbers:
            p.x = node_tensor(self.saved.d_out if name == "edge_value" else self.inputs.query, 3)
            shape = (*shape[:-1], shape[-1] + -shape[-1] % LANES)
        out = self._sums(p, spec.types[name].by_type(), (self.count, *shape), 2 if numbers else 3)
        self.results[name] = out.sum(0)[..., : table.shape[-1]]

    def _sums(self, p: RowSums, rows: Rows, shape: Sequence[int], trailing: int) -> Tensor:
        """Runs `row_attention_sums` along the rows of an order of edges."""
        chunks = chunks_of(rows, self.width)
        out = _by_rows(self.inputs.value, chunks, trailing, shape)
        p.rows = chunks.struct
        p.heads = self.heads
        p.numbers = address(self.numbers)
        p.stride = self.stride
        p.out = node_tensor(out, trailing)
        _launch("sums", "join_sums", p, out, self.count, len(chunks), self.heads * p.out.width)
        return out


def _by_rows(like: Tensor, chunks: Chunks, trailing: int, shape: Sequence[int]) -> Tensor:
    """Allocates an output [..., rows, ...] with `trailing` dimensions from the rows on. Rows that no part writes in
    full are zero."""
    rows = chunks.rows
    size = math.prod(shape) * like.element_size()
    if size < memory.LARGE or not rows.num_edges:
        return like.new_zeros(shape)
    out = memory.empty(like, *shape)
    out.view(-1, rows.num_rows, math.prod(shape[1 - trailing :])).index_fill_(1, chunks.unwritten, 0)
    return out
