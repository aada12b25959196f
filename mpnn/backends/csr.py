"""Fused row kernels for sparse graphs, on CPU and GPU: one pass along each row, without an E x D tensor.

A round is plain aggregation or attention, and each has a way for each kind of device. A way converts a round for the
kernels of `mpnn.kernels.rows`, by operations of torch, which autograd differentiates.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.aggregate import Max, Mean, Min, Sum, Var
from mpnn.backends import edge_orders, reference
from mpnn.backends.cost_model import Counts, both_ways, kind_of, of_biases
from mpnn.backends.way import Way, members
from mpnn.graph import Graph
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, numbers, per_edge, total
from mpnn.graph.modes import is_transformed
from mpnn.kernels.cpu import library
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.kernels.derivatives import is_recorded, launch
from mpnn.kernels.function import apply_of
from mpnn.kernels.rows import attention as row_attention, combine, reduce as row_reduce
from mpnn.kernels.rows.attention import LANES, SHARED_BACKWARD, SHARED_FORWARD, EdgeTypes, Spec, Tensors, shares_keys
from mpnn.kernels.rows.combine import Associative
from mpnn.kernels.rows.reduce import LinearReduce, Reduction, RowSum
from mpnn.kernels.rows.rows import Rows
from mpnn.kernels.rows.spec import ACTIVATED, ADDITIVE, CONSTANT, DOT, NORMALIZERS
from mpnn.round import Result, Round, reads
from mpnn.round.needs import (
    AGGREGATES,
    FLOATS,
    NAMES_OF_AGGREGATES as KINDS,
    NORMALIZED,
    class_of,
    first,
    name_of,
    on_edges,
)
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, slope_of

NAME = "csr"
ANY_EDGES = True
_OUT_OF_CACHE = 40e6  # bytes of features beyond which almost all reads miss the cache
_BEYOND_CACHE = 1 << 24  # the same for attention


def serves(round: Round) -> tuple[frozenset[str], dict[str, str]]:
    if round.value.device.type not in ATTENTION:
        return frozenset(), {}
    way = _way(round)
    return way.SERVES, way.REASONS


def has_tangents(round: Round) -> bool:
    return round.value.is_cpu and (not is_plain(round) or type(round.reduce) in (Sum, Mean))


def _way(round: Round) -> Way:
    return (AGGREGATION if is_plain(round) else ATTENTION)["cpu" if round.value.is_cpu else "cuda"]


refusal, counts, estimate, bind, run = members(_way)


def is_plain(round: Round) -> bool:
    """Whether this aggregates without attention: no score, normalizer, dropout, edge_value, biases of nodes or returned
    weights."""
    unscored = round.score is None and round.normalize == "none" and round.edge_value is None
    of_nodes = round.dst_bias is not None or round.src_bias is not None
    return unscored and not of_nodes and not round.dropout and not round.return_weights


# ------------------------------------------------------------------------------------------------ aggregation

FAMILIES: dict[type, str] = {Sum: "sum", Mean: "sum", Max: "extreme", Min: "extreme", Var: "variance"}
"""Aggregators that run as one kernel, as those with a `combine` do on a CPU."""


def _refuse_to_aggregate(round: Round) -> str | None:
    of_aggregator = None if class_of(round.reduce) in KINDS else _why_not(round.reduce, round.needs_grad)
    return library.why_missing() or first(_of_nodes(round)) or of_aggregator


def _of_nodes(round: Round) -> dict[str, object]:
    return {"it numbers nodes with 32 bits": max(round.graph.num_dst, round.graph.num_src) >= 2**31}


def _why_not(aggregator: Any, needs_grad: bool) -> str | None:
    """The reason why there are no kernels for a user's aggregator, or None if there are."""
    name = name_of(aggregator)
    functions = {"combine": "two numbers", "gradient": "two numbers", "lift": "one number"}
    methods = {
        f"{function} of {name} must be a function of {what}: make it a staticmethod": inspect.ismethod(
            getattr(aggregator, function, None)
        )
        for function, what in functions.items()
    }
    has_gradient = getattr(aggregator, "gradient", None) is not None
    reasons = {
        f"{name} has no combine(a, b)": not hasattr(aggregator, "combine"),
        f"{name} has combine(a, b), but no identity to start from": not hasattr(aggregator, "identity"),
        **methods,
        f"{name} has no gradient(message, out), so there is no backward pass": needs_grad and not has_gradient,
    }
    return first(reasons) or combine.why_missing()


def _count_aggregation(round: Round) -> dict[str, float]:
    """Edges, their components, and the components of nodes."""
    graph = round.graph
    batch = round.batch.numel()
    kind = type(round.reduce)
    family = FAMILIES.get(kind, "own")
    width = round.heads * round.value.shape[-1]
    edges, components = float(graph.num_edges * batch), float(graph.num_edges * batch * width)
    beyond = min(1.0, graph.num_src * width * (torch.finfo(round.accumulate_dtype).bits // 8) / _OUT_OF_CACHE)
    operations = {"reduced edge": edges, f"{family} call": 1.0, f"{family} number": components}
    operations["node number"] = float((graph.num_dst + graph.num_src) * batch * width)
    operations["far number"] = components * beyond
    if round.bias:
        operations |= {"weights call": 1.0, "weighed edge": edges}
        columns = max(numbers(bias).shape[-1] for bias in round.bias)
        operations["weighed head"] = edges * columns * (columns > 1)
    own = {} if kind in KINDS else {"compilation call": 1.0}
    return {**both_ways(operations, round.needs_grad), **own}


def _bytes_of_aggregation(round: Round) -> float:
    width = round.heads * round.value.shape[-1] * (torch.finfo(round.accumulate_dtype).bits // 8)
    return round.graph.num_dst * round.batch.numel() * width * (2.0 if round.needs_grad else 0.0)


def _bind_aggregation(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form."""
    if is_transformed() or not _is_row_sum(round):
        return _aggregate
    sum_rows = apply_of(RowSum, round.tensors) if round.needs_grad else row_reduce.row_sum
    return partial(_run_sum, KINDS[type(round.reduce)], sum_rows)


def _is_row_sum(round: Round) -> bool:
    """Whether this is a sum or mean along a list of edges that `row_sum` computes: of one head, with fixed weights."""
    value = round.value
    return (
        type(round.reduce) in (Sum, Mean)
        and reads(round, ("value", "normalize", "reduce", "bias"))
        and round.graph.is_explicit
        and round.graph.stored_edges.dtype is torch.int64  # else they are many
        and value.dtype in (torch.float32, torch.float64)
        and value.dim() == 3
        and value.shape[1] == 1
        and value.numel() > 0
        and not value.is_neg()
        and all(_is_fixed(weight, value.dtype) for weight in round.bias)
        and len(round.bias) < 2
    )


def _is_fixed(weight: Any, dtype: torch.dtype) -> bool:
    """Whether weights are one number for each edge, without a gradient."""
    is_tensor = type(weight) is Tensor and weight.dtype is dtype and not weight.is_neg()
    return is_tensor and weight.dim() == 2 and weight.shape[1] == 1 and not weight.requires_grad


_EDGE_LIST = "edge list"


def _run_sum(kind: str, sum_rows: Callable[..., Tensor], round: Round) -> Result:
    graph = round.graph
    edge_list = graph._memo.get(_EDGE_LIST)
    if edge_list is None:
        edge_list = graph.cached(_EDGE_LIST, lambda: row_reduce.EdgeList(graph.ends, graph.num_dst, graph.num_src))
    weight: Any = round.bias[0].unsqueeze(0).contiguous() if round.bias else None  # type: ignore[union-attr]
    return Result(sum_rows(round.value.contiguous(), weight, partial(edge_orders.in_order, graph), edge_list, kind))


def _aggregate(round: Round) -> Result:
    weight = _weight(round)
    value = round.value
    # Kernels read bfloat16 as it is, and round their results to it.
    is_rounded = value.dtype == torch.bfloat16 and not round.keep_accumulate_dtype
    if not (is_rounded and type(round.reduce) in KINDS):
        value = value.to(round.accumulate_dtype)
    if weight is not None:
        value = _repeat(value, round.heads)
    recorded = round.needs_grad or is_transformed()
    return Result(reduced(round.graph, round.reduce, value, weight, recorded).to(round.result_dtype))


def reduced(graph: Graph, aggregator: Any, value: Tensor, weight: Tensor | None, recorded: bool) -> Tensor:
    """The aggregates [batch..., N_dst, H, D] of value [batch..., N_src, H, D] times weight, [B or 1, E, H] or None.
    `recorded`: whether they are differentiated, or transformed."""
    kind: Any = KINDS.get(type(aggregator))
    if kind is None:
        kind = Associative(
            aggregator.combine,
            float(aggregator.identity),
            getattr(aggregator, "gradient", None),
            getattr(aggregator, "lift", None),
            bool(getattr(aggregator, "shares_ties", False)),
        )
    shape = value.shape
    rows = edge_orders.in_order(graph, transposed=False)
    flat = value.reshape(shape[:-3].numel(), graph.num_src, shape[-2:].numel())
    if not recorded:
        return row_reduce.reduced(flat, weight, rows, kind).view(*shape[:-3], graph.num_dst, *shape[-2:])
    columns = edge_orders.in_order(graph, transposed=True)
    flat = flat.contiguous()
    if kind in ("sum", "mean"):
        out = LinearReduce.apply(flat, weight, rows, columns, kind)
    else:
        differentiable = partial(_aggregate_again, graph, shape[:-3], shape[-2:], aggregator)
        options = Reduction(rows, lambda: columns, kind, flat.dtype, flat.dtype)
        out = launch(row_reduce.KERNEL, options, differentiable, flat, weight)
    return out.view(*shape[:-3], graph.num_dst, *shape[-2:])


def _aggregate_again(
    graph: Graph, batch: torch.Size, shape: torch.Size, aggregator: Any, value: Tensor, weight: Tensor | None
) -> Tensor:
    """Reductions by differentiable operations."""
    of_value = value.shape
    value = value.view(*batch, graph.num_src, *shape)
    bias = () if weight is None else (weight.expand(batch.numel(), *weight.shape[1:]).view(*batch, *weight.shape[1:]),)
    out = reference.run(Round(graph, value, bias=bias, normalize="none", reduce=aggregator)).out
    return out.reshape(batch.numel(), graph.num_dst, *of_value[2:])


def _weight(round: Round) -> Tensor | None:
    """The sum of all biases, [B or 1, E, H or 1] in the caller's order; None without biases."""
    total = round.edge_bias(round.bias)
    if total is None:
        return None
    batch = round.batch if total.dim() > 2 else torch.Size(())
    return total.expand(*batch, *total.shape[-2:]).reshape(batch.numel(), *total.shape[-2:]).contiguous()


def _count_aggregation_on_gpu(round: Round) -> Counts:
    """Edges, the numbers that they gather, and those of nodes."""
    edges = float(round.graph.num_edges * round.batch.numel())
    family = FAMILIES[type(round.reduce)]
    kind = kind_of(round.value.dtype)
    width = round.heads * round.value.shape[-1]
    operations = {
        f"{family} call": 1.0,
        "reduced edge": edges,
        f"{kind}{family} number": edges * width,
        f"{kind}reduced number": float(round.graph.num_dst * round.batch.numel() * width),
    }
    if round.biased:
        operations |= {"weights call": 1.0, "weighed edge": edges * round.heads}
    return both_ways(operations, round.needs_grad)


def _bytes_of_aggregation_on_gpu(round: Round) -> float:
    saved = round.graph.num_dst * round.batch.numel() * round.heads * round.value.shape[-1] * 4.0
    return saved * (2 if round.needs_grad else 1)


def _aggregate_on_gpu(round: Round) -> Result:
    from mpnn.kernels.rows.cuda import reduce as on_gpu  # imports Triton

    graph = round.graph
    value = round.value
    weight = total([_numbers(b, round) for b in round.bias])
    if weight is not None:
        value = _repeat(value, round.heads)
        weight = _each_edge(weight, round.heads, round)
    walks = edge_orders.rows_on_gpu(graph), edge_orders.columns_on_gpu(graph)
    options = Reduction(*walks, KINDS[type(round.reduce)], value.dtype, round.result_dtype)
    differentiable = partial(_aggregate_again_on_gpu, reference.form(round))
    out: Tensor = launch(on_gpu.KERNEL, options, differentiable, value, weight)
    return Result(out.to(round.result_dtype))


def _aggregate_again_on_gpu(form: Round, value: Tensor, weight: Tensor | None) -> Tensor:
    bias = () if weight is None else (weight.reshape(*value.shape[:-3], *weight.shape[1:]),)
    return reference.run(reference.filled(form, {}, value=value, bias=bias)).out


_AGGREGATION = FLOATS | AGGREGATES | on_edges("bias") | {
    "cpu", "no score", "unnormalized", "own aggregate", "explicit graph", "gradient",
    "keep_accumulate_dtype",
}  # fmt: skip
AGGREGATION = {
    "cpu": Way(
        NAME, _AGGREGATION, {}, _refuse_to_aggregate, _count_aggregation, _bytes_of_aggregation, _bind_aggregation
    ),
    "cuda": Way(
        NAME,
        (_AGGREGATION | {"cuda"}) - {"cpu", "own aggregate"},
        {"own aggregate": f"on CUDA it runs {', '.join(KINDS.values())}, and not {{aggregate}}"},
        lambda round: unavailable(round.value, round.tensors),
        _count_aggregation_on_gpu,
        _bytes_of_aggregation_on_gpu,
        lambda round: _aggregate_on_gpu,
    ),
}


# ------------------------------------------------------------------------------------------------ operands of scores


class _Kind(NamedTuple):
    """How kernels know a score: by its number, the prefix of its prices, and the operand that each of its fields is.
    `edge`: its field of edges."""

    number: int
    price: str
    operands: dict[str, str]
    edge: str = ""


SCORES: dict[type, _Kind] = {
    type(None): _Kind(CONSTANT, "biased", {}),
    Dot: _Kind(DOT, "dot", {"query": "query", "key": "key", "edge_key": "edge_key"}, "edge_key"),
    AdditiveScore: _Kind(ADDITIVE, "additive", {"dst": "query", "src": "key", "edge": "edge_term"}, "edge"),
    AdditiveV2Score: _Kind(
        ACTIVATED, "activated", {"dst": "query", "src": "key", "vector": "vector", "edge": "edge_key"}, "edge"
    ),
}


class Operands(NamedTuple):
    """The features of a score, what it adds for each edge, and its numbers.

    `scale` is 0 for rounds without a score, whose logits are their biases. An activation is LeakyReLU with `slope`, or
    tanh.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    vector: Tensor | None = None
    edge: PerEdge | None = None
    scale: float = 1.0
    softcap: float = 0.0
    slope: float = 1.0
    tanh: bool = False


def _operands_of(round: Round) -> Operands:
    """The operands of a round's score."""
    match round.score:
        case Dot(query, key, scale, edge, softcap):
            return Operands(query, key, None, edge, scale, softcap or 0.0)
        case AdditiveScore(dst, src, activation, edge):
            vector = None
        case AdditiveV2Score(dst, src, vector, activation, edge):
            pass
        case _:
            return Operands(scale=0.0 if round.weighted else 1.0)
    # GAT's activation takes no call.
    slope: Any = activation.slope if type(activation) is LeakyReLU else slope_of(activation)
    tanh = slope == "tanh"
    return Operands(dst, src, vector, edge, slope=1.0 if tanh else slope, tanh=tanh)


def _normalizer(round: Round) -> int:
    """The number of the normalizer that the kernels apply."""
    return NORMALIZERS[round.normalize if round.weighted else "none"]


_BY_TYPE = {"edge_key": 3, "edge_value": 3, "table": 2}
"""Operands that may have a row for each edge type, and their dimensions from the edges on."""


def _attend_again(
    form: Round, types: dict[str, Tensor], names: Sequence[str], *tensors: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The results of the kernels by operations that are differentiable again. `types`: those of the edges, for operands
    with a row for each edge type. `names`: of the tensors."""
    of = dict(zip(names, tensors, strict=True))
    for name, ids in types.items():
        of[name] = of[name].index_select(of[name].dim() - _BY_TYPE[name], ids)
    for name, features in (("edge_key", "query"), ("edge_value", "value")):
        if (x := of.get(name)) is not None:  # features are padded to whole vectors
            of[name] = F.pad(x, (0, of[features].shape[-1] - x.shape[-1]))
    score = {field: of.get(operand) for field, operand in SCORES[type(form.score)].operands.items()}
    fields = {name: of.get(name) for name in ("value", "edge_value", "dst_bias", "src_bias")}
    round = reference.filled(form, score, bias=(of.get("bias"), of.get("table")), **fields)
    out, weights, lse, _ = reference.run(round)
    return out, weights, lse


# ------------------------------------------------------------------------------------------------ attention


def _unsupported(round: Round) -> str | None:
    """Returns why the kernels of every device refuse a round."""
    own = _operands_of(round)
    kind = SCORES[type(round.score)]
    vectors: list[Any] = [("edge_value", round.edge_value, round.value)]
    vectors += [(kind.edge, own.edge, own.query)] if kind.number in (DOT, ACTIVATED) else []
    widths = [(name, numbers(data).shape[-1], x.shape[-1]) for name, data, x in vectors if data is not None]
    of_widths = {
        f"{name} is {wide} wide, and the features it is added to are {width} wide": wide != width
        for name, wide, width in widths
    }
    return first({"there is no head to compute": round.heads == 0} | of_widths | _of_nodes(round))


def _count_attention(round: Round) -> dict[str, float]:
    """Edges, edges times heads, and the components that each edge gathers from its two ends; of heads that share keys,
    the components that it copies, and products with them."""
    num_dst = round.graph.num_dst
    num_src = round.graph.num_src
    back = _one_way(round, max(num_dst, num_src), SHARED_BACKWARD)  # it writes also sources without edges
    return both_ways(_one_way(round, num_dst, SHARED_FORWARD), round.needs_grad, back)


def _one_way(round: Round, nodes: int, least: int) -> dict[str, float]:
    """The counts of a pass that copies keys where at least this many heads share one."""
    graph = round.graph
    batch = round.batch.numel()
    kind = SCORES[type(round.score)].price
    width = round.heads * -(-round.value.shape[-1] // 8) * 8  # whole vectors
    edges = float(graph.num_edges * batch)
    gathered = edges * width * (2 if kind in ("dot", "activated") else 1)
    # features that exceed the cache are read from memory for each edge
    far = max(graph.num_dst, graph.num_src) * width * (torch.finfo(round.accumulate_dtype).bits // 8) > _BEYOND_CACHE
    operations = {f"{kind} call": 1.0, "scored edge": edges, f"{kind} head": edges * round.heads}
    operations["attending number"] = float(nodes * batch * width)
    key_heads = max(round.score.key.shape[-2], round.value.shape[-2]) if isinstance(round.score, Dot) else round.heads
    if shares_keys(round.heads, key_heads, graph.num_edges, max(graph.num_dst, graph.num_src), least):
        operations |= {"copied number": gathered * key_heads / round.heads, "shared product": gathered}
    else:
        operations["far gathered number" if far else "gathered number"] = gathered
    if kind == "activated":
        operations["activated number"] = edges * width
    if round.biased:
        operations |= of_biases(round.biases, "edge", graph.num_edges)
    added = (round.edge_value, round.score.edge_key if isinstance(round.score, Dot) else None)
    if vectors := sum(vector is not None for vector in added):
        operations["vector number"] = edges * width * vectors
    if round.return_weights:
        operations["returned weight"] = edges * round.heads
    if round.dropout:
        operations["dropped head"] = edges * round.heads
    return operations


def _bytes_of_attention(round: Round) -> float:
    size = round.graph.num_edges * round.batch.numel() * round.heads * 2 * round.needs_grad
    return size * torch.finfo(round.accumulate_dtype).bits / 8


_READ_OF_SCORES = frozenset({"query", "key", "dst", "src", "vector", "scale", "softcap", "activation"})


class _Shared(NamedTuple):
    """The data that all rounds of one form share."""

    heads: int
    kind: int
    normalize: int
    dtype: torch.dtype
    result_dtype: torch.dtype
    is_padded: bool  # values have the width and dtype that kernels read


def _bind_attention(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form."""
    width = round.value.shape[-1]
    shared = _Shared(
        round.heads,
        SCORES[type(round.score)].number,
        _normalizer(round),
        round.accumulate_dtype,
        round.result_dtype,
        round.value.dtype == round.accumulate_dtype and width > 0 and width % LANES == 0,
    )
    repeated = None if is_transformed() else _repeated(round, shared)
    return partial(_attend, shared) if repeated is None else partial(_attend_repeated, repeated)


def _repeated(round: Round, shared: _Shared) -> row_attention.Repeated | None:
    """The call of the kernel for plain features of this form, which it reads where they lie; None for other rounds."""
    is_plain = round.score is not None and reads(round, ("value", "normalize"), _READ_OF_SCORES)
    if not is_plain or not shared.is_padded or round.needs_grad:
        return None
    own = _operands_of(round)
    spec = _spec(round, own, shared, edge_orders.by_destination(round.graph), {})
    tensors = Tensors(round.value, own.query, own.key, own.vector)
    return row_attention.Repeated(spec, tensors) if row_attention.Repeated.serves(spec, tensors) else None


def _attend_repeated(kernel: row_attention.Repeated, round: Round) -> Result:
    own = _operands_of(round)
    numbers = own.scale, own.softcap, own.slope
    rows = round.graph._memo.get(edge_orders.ROWS) or edge_orders.by_destination(round.graph)
    return Result(kernel(rows, numbers, round.value, own.query, own.key, own.vector))


def _spec(round: Round, own: Operands, shared: _Shared, rows: Rows, types: dict[str, EdgeTypes]) -> Spec:
    graph = round.graph
    return Spec(
        rows,
        partial(edge_orders.by_source_with_slots, graph),
        types,
        shared.heads,
        shared.kind,
        shared.normalize,
        own.scale,
        own.softcap,
        own.slope,
        own.tanh,
        round.dropout_keys() if round.dropout else None,
        round.dropout,
        graph.node_ids,
        round.return_weights,
        round.return_lse,
    )


def _attend(shared: _Shared, round: Round) -> Result:
    dtype = shared.dtype
    own = _operands_of(round)
    on_edges: dict[str, Tensor] = {}
    types: dict[str, EdgeTypes] = {}
    if round.bias or own.edge is not None or round.edge_value is not None:
        on_edges, types = _on_edges(round, own)
    spec = _spec(round, own, shared, edge_orders.by_destination(round.graph), types)
    lanes = 1 if shared.kind == ADDITIVE else LANES  # numbers, of which no vectors are made
    value = round.value if shared.is_padded else _pad(round.value, dtype)
    of_score = _pad(own.query, dtype, lanes), _pad(own.key, dtype, lanes), _pad(own.vector, dtype)
    tensors = Tensors(value, *of_score, **on_edges)
    if round.dst_bias is not None or round.src_bias is not None:
        dst_bias, src_bias = round.node_biases()
        tensors = tensors._replace(dst_bias=dst_bias, src_bias=src_bias)
    differentiable = None
    if is_recorded():
        ids = {name: x.ids for name, x in types.items()}
        differentiable = partial(_attend_again, reference.form(round), ids, Tensors._fields)
    out, weights, lse = row_attention.attend(spec, tensors, differentiable)
    out = out if shared.is_padded else out[..., : round.value.shape[-1]]
    return Result(
        out.to(shared.result_dtype),
        None if weights is None else weights.to(shared.result_dtype),
        None if lse is None else lse.nan_to_num(torch.nan, -torch.inf, -torch.inf),
    )


def _on_edges(round: Round, own: Operands) -> tuple[dict[str, Tensor], dict[str, EdgeTypes]]:
    """Returns the kernel's operands for each edge or edge type, by its name in `Tensors`, and the edge types of tables.
    It looks up one table of biases; all other biases are summed."""
    graph = round.graph
    dtype = round.accumulate_dtype
    table = next((b for b in round.bias if isinstance(b, EmbeddingTable)), None)
    terms: dict[str, PerEdge | None] = {
        "edge_value": round.edge_value,
        "bias": round.edge_bias(b for b in round.bias if b is not table),
        "table": table,
    }
    if own.edge is not None:
        kind = SCORES[type(round.score)]
        terms[kind.operands[kind.edge]] = own.edge if kind.number == DOT else per_edge(own.edge, graph, dtype)
    present = {name: x for name, x in terms.items() if x is not None}
    types = {name: edge_orders.edge_types(graph, x) for name, x in present.items() if isinstance(x, EmbeddingTable)}
    return {name: numbers(x).to(dtype) for name, x in present.items()}, types


def _pad(x: Any, dtype: torch.dtype, lanes: int = LANES) -> Any:
    """Pads features with zeros to at least one whole vector of `lanes` numbers; None for None."""
    if x is None:
        return None
    missing = -x.shape[-1] % lanes if x.shape[-1] else lanes
    return F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype)


def _count_attention_on_gpu(round: Round) -> Counts:
    """Edges, heads on edges, the numbers that edges gather from their sources, and those of nodes. The backward pass
    gathers by destination and by source."""
    graph = round.graph
    batch = round.batch.numel()
    what = SCORES[type(round.score)].price
    kind = kind_of(round.value.dtype)
    gathered = round.value.shape[-2:].numel()
    for _, x, role in round.features:
        if role.of == "src":
            gathered += x.shape[-role.trailing :].numel()
    edges = float(graph.num_edges * batch)
    operations = {
        f"{what} call": 1.0,
        "scored edge": edges,
        f"{kind}{what} head": edges * round.heads,
        f"{kind}gathered number": edges * gathered,
        f"{kind}node number": float(graph.num_dst * batch * round.heads * round.value.shape[-1]),
    }
    if round.biased:
        operations |= of_biases(round.biases, "edge", graph.num_edges)
    if round.dropout:
        operations["dropped head"] = edges * round.heads
    return both_ways(operations, round.needs_grad)


def _bytes_of_attention_on_gpu(round: Round) -> float:
    saved = round.graph.num_dst * round.batch.numel() * round.heads * (12.0 if round.needs_grad else 4.0)
    weights = round.graph.num_edges * round.batch.numel() * round.heads * 4.0
    return saved + weights * (round.return_weights + bool(round.bias) * round.needs_grad)


def _attend_on_gpu(round: Round) -> Result:
    from mpnn.kernels.rows.cuda import attention as on_gpu  # imports Triton

    graph = round.graph
    heads = round.heads
    own = _operands_of(round)
    value = round.value
    key = own.key
    of_heads = -1 if isinstance(round.score, AdditiveScore) else -2
    if key is not None and key.shape[of_heads] != value.shape[-2]:  # the kernel groups both or neither
        key, value = _repeat(key, heads, of_heads), _repeat(value, heads)
    edge_key, key_types = _edge_keys_on_gpu(own.edge, round)
    edge_value, value_types = _vectors_on_gpu(round.edge_value, round)
    bias = total([_numbers(b, round) for b in round.bias])
    score = on_gpu.Score(
        heads,
        SCORES[type(round.score)].number,
        _normalizer(round),
        own.scale,
        own.softcap,
        own.slope,
        own.tanh,
        round.dropout if round.weighted else 0.0,
        *(round.head_ids or (0, heads)),
    )
    spec = on_gpu.Spec(
        edge_orders.rows_on_gpu(graph),
        edge_orders.columns_on_gpu(graph),
        score,
        round.result_dtype,
        round.seed.to(value.device) if score.dropout and round.seed is not None else None,
        round.return_weights,
        key_types,
        value_types,
    )
    on_edges = edge_key, edge_value, None if bias is None else _each_edge(bias, heads, round)
    tensors = on_gpu.Tensors(value, own.query, key, own.vector, *on_edges)
    form = reference.form(round).with_fields(seed=spec.seed, keep_accumulate_dtype=True)
    types = {name: x.ids for name, x in (("edge_key", key_types), ("edge_value", value_types)) if x is not None}
    out, weights, lse = on_gpu.attend(spec, tensors, partial(_named_on_gpu, form, types))
    weights = None if weights is None else weights.to(out.dtype)
    if not round.return_lse or lse is None:
        return Result(out, weights)
    return Result(out, weights, lse.masked_fill(lse == torch.inf, -torch.inf))


def _named_on_gpu(form: Round, types: dict[str, Tensor], *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    value, query, key, vector, *of_edges = tensors
    batch = value.shape[:-3]
    edge_key, edge_value, bias = (x if x is None else x.reshape(*batch, *x.shape[1:]) for x in of_edges)
    of = {"value": value, "query": query, "key": key, "vector": vector, "edge_value": edge_value, "bias": bias}
    of["edge_term" if isinstance(form.score, AdditiveScore) else "edge_key"] = edge_key
    return _attend_again(form, types, list(of), *of.values())


def _edge_keys_on_gpu(data: PerEdge | None, round: Round) -> tuple[Tensor | None, Any]:
    """Returns the terms that edges add to keys: numbers [B, E, H] of an additive score, else as `_vectors_on_gpu`."""
    if data is not None and isinstance(round.score, AdditiveScore):
        return _each_edge(_numbers(data, round), round.heads, round), None
    return _vectors_on_gpu(data, round)


def _vectors_on_gpu(data: PerEdge | None, round: Round) -> tuple[Tensor | None, Any]:
    """Vectors per edge or per edge type, [B, E or edge types, H, D], and the edge types, None for vectors per edge."""
    from mpnn.kernels.rows.cuda import attention as on_gpu

    if data is None:
        return None, None
    if isinstance(data, Tensor):
        return _each_edge(data, round.heads, round, trailing=2), None
    graph = round.graph
    src, dst = graph.ends
    ids = edge_orders.types_on_gpu(data, graph)
    types = on_gpu.EdgeTypes(ids, edge_orders.by_type_on_gpu(data, graph), on_gpu.Ends(dst, src))
    return _each_edge(data.table, round.heads, round, trailing=2), types


def _repeat(x: Tensor, heads: int, dim: int = -2) -> Tensor:
    """Repeats each shared head of x [..., H_kv, D] to [..., heads, D]."""
    return x if x.shape[dim] == heads else x.repeat_interleave(heads // x.shape[dim], dim)


def _each_edge(x: Tensor, heads: int, round: Round, trailing: int = 1) -> Tensor:
    """[B, E, H] (or, with 2 trailing dimensions, [B, E, H, D]) of x, broadcast over the batch and heads. A view
    if possible."""
    shape = (*x.shape[-1 - trailing : -trailing], heads, *x.shape[x.dim() - trailing + 1 :])
    if x.dim() == trailing + 1:
        return x.expand(round.batch.numel(), *shape)
    return x.expand(*round.batch, *shape).reshape(round.batch.numel(), *shape)


def _numbers(data: PerEdge, round: Round) -> Tensor:
    """The numbers of each edge, [..., E, H] in the caller's order. Tables are expanded."""
    if isinstance(data, Tensor):
        return data.to(round.accumulate_dtype)
    from mpnn.kernels.rows.cuda.reduce import gather  # imports Triton

    graph = round.graph
    table = data.table.to(round.accumulate_dtype)
    return gather(table, edge_orders.types_on_gpu(data, graph), edge_orders.by_type_on_gpu(data, graph))


_ATTENTION = (
    FLOATS | NORMALIZED | on_edges("bias") | on_edges("edge_key") | on_edges("edge_value") | on_edges("edge")
    | {"bias by nodes", "return_weights", "return_lse", "weights and lse", "keep_accumulate_dtype"}
    | {"cpu", "no score", "Dot", "AdditiveScore", "AdditiveV2Score", "softcap", "sum", "dropout", "head_ids",
       "node_ids", "explicit graph", "gradient"}
)  # fmt: skip
ATTENTION = {
    "cpu": Way(
        NAME,
        _ATTENTION,
        {},
        lambda round: library.why_missing() or _unsupported(round),
        _count_attention,
        _bytes_of_attention,
        _bind_attention,
    ),
    "cuda": Way(
        NAME,
        (_ATTENTION | {"cuda"}) - {"cpu", "node_ids", "bias by nodes"},
        {
            "bias by nodes": "on CUDA it does not add biases of nodes",
            "node_ids": "on CUDA its dropout hashes the numbers of nodes in the part, not in the whole graph",
        },
        lambda round: _unsupported(round) or unavailable(round.value, round.tensors),
        _count_attention_on_gpu,
        _bytes_of_attention_on_gpu,
        lambda round: _attend_on_gpu,
    ),
}
SERVES = AGGREGATION["cpu"].SERVES | ATTENTION["cpu"].SERVES | {"cuda"}  # on some device and in one way
