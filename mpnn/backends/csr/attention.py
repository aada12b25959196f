"""Attention along the rows of any graph on CPU: converts a round for `mpnn.kernels.rows.attention`. The scores it
supports are supported on GPUs too (`mpnn.backends.csr.cuda_attention`).

Torch operations pad widths to whole vectors and cast 16-bit features to float32, so autograd differentiates both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.backends import reference as again
from mpnn.backends.cost_model import Estimate, both_ways, of_biases, priced
from mpnn.backends.csr import edges, operands
from mpnn.backends.csr.operands import KINDS, Operands
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, numbers, per_edge
from mpnn.kernels.cpu import library
from mpnn.kernels.rows import attention as row_attention
from mpnn.kernels.rows.attention import LANES, SHARED_BACKWARD, SHARED_FORWARD, EdgeTypes, Spec, Tensors, shares_keys
from mpnn.kernels.rows.rows import Rows
from mpnn.kernels.rows.spec import ACTIVATED, ADDITIVE, CONSTANT, DOT
from mpnn.round import Result, Round, reads
from mpnn.round.needs import FLOATS, NORMALIZED, on_edges
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot

_BEYOND_CACHE = 1 << 24  # bytes of features
COSTS = {CONSTANT: "biased", DOT: "dot", ADDITIVE: "additive", ACTIVATED: "activated"}


SERVES = (
    FLOATS | NORMALIZED | on_edges("bias") | on_edges("edge_key") | on_edges("edge_value") | on_edges("edge")
    | {"bias by nodes", "return_weights", "return_lse", "weights and lse", "keep_accumulate_dtype"}
    | {"cpu", "no score", "Dot", "AdditiveScore", "AdditiveV2Score", "softcap", "sum", "dropout", "head_ids",
       "node_ids", "explicit graph", "gradient"}
)  # fmt: skip


def refusal(round: Round) -> str | None:
    return library.why_missing() or unsupported(round)


def unsupported(round: Round) -> str | None:
    """Returns why the kernels of every device refuse a round."""
    score = round.score
    value = round.value
    if round.heads == 0:
        return "there is no head to compute"
    vectors = [("edge_value", round.edge_value, value.shape[-1])]
    if isinstance(score, Dot):
        vectors.append(("edge_key", score.edge_key, score.query.shape[-1]))
    elif isinstance(score, AdditiveV2Score):
        vectors.append(("edge", score.edge, score.dst.shape[-1]))
    for name, data, width in vectors:
        if data is not None and (wide := numbers(data).shape[-1]) != width:
            return f"{name} is {wide} wide, and the features it is added to are {width} wide"
    if max(round.graph.num_dst, round.graph.num_src) >= 2**31:
        return "it numbers nodes with 32 bits"
    return None


def counts(round: Round) -> dict[str, float]:
    """Edges, edges times heads, and the components that each edge gathers from its two ends; of heads that share keys,
    the components that it copies, and products with them."""
    num_dst = round.graph.num_dst
    num_src = round.graph.num_src
    back = _one_way(round, max(num_dst, num_src), SHARED_BACKWARD)  # it writes also sources without edges
    return both_ways(_one_way(round, num_dst, SHARED_FORWARD), round.needs_grad, back)


def _one_way(round: Round, nodes: int, least: int) -> dict[str, float]:
    """The counts of a pass that copies keys where at least so many heads share one."""
    graph = round.graph
    batch = round.batch.numel()
    kind = COSTS[KINDS[type(round.score)]]
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


def estimate(round: Round) -> Estimate:
    size = round.graph.num_edges * round.batch.numel() * round.heads * 2 * round.needs_grad
    return priced(round.value.device, "csr", counts(round), size * torch.finfo(round.accumulate_dtype).bits / 8)


_READ_OF_SCORES = frozenset({"query", "key", "dst", "src", "vector", "scale", "softcap", "activation"})


class _Shared(NamedTuple):
    """The data that all rounds of one form share."""

    heads: int
    kind: int
    normalize: int
    dtype: torch.dtype
    result_dtype: torch.dtype
    is_padded: bool  # values have the width and dtype that kernels read


def bind(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form."""
    shared = _Shared(
        round.heads,
        KINDS[type(round.score)],
        operands.normalizer(round),
        round.accumulate_dtype,
        round.result_dtype,
        round.value.dtype == round.accumulate_dtype and _is_whole(round.value.shape[-1]),
    )
    repeated = _repeated(round, shared)
    return partial(_run, shared) if repeated is None else partial(_run_again, repeated)


def _repeated(round: Round, shared: _Shared) -> row_attention.Repeated | None:
    """The call of the kernel for plain features of this form, which it reads where they lie; None for other rounds."""
    is_plain = round.score is not None and reads(round, ("value", "normalize"), _READ_OF_SCORES)
    if not is_plain or not shared.is_padded or round.needs_grad:
        return None
    own = operands.of(round)
    spec = _spec(round, own, shared, edges.by_destination(round.graph), {})
    tensors = Tensors(round.value, own.query, own.key, own.vector)
    return row_attention.Repeated(spec, tensors) if row_attention.Repeated.serves(spec, tensors) else None


def _run_again(kernel: row_attention.Repeated, round: Round) -> Result:
    own = operands.of(round)
    numbers = own.scale, own.softcap, own.slope
    return Result(kernel(edges.by_destination(round.graph), numbers, round.value, own.query, own.key, own.vector))


def run(round: Round) -> Result:
    return bind(round)(round)


def _spec(round: Round, own: Operands, shared: _Shared, rows: Rows, types: dict[str, EdgeTypes]) -> Spec:
    graph = round.graph
    return Spec(
        rows,
        partial(edges.by_source_with_slots, graph),
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


def _run(shared: _Shared, round: Round) -> Result:
    kind = shared.kind
    dtype = shared.dtype
    own = operands.of(round)
    on_edges: dict[str, Tensor] = {}
    types: dict[str, EdgeTypes] = {}
    if round.bias or own.edge is not None or round.edge_value is not None:
        on_edges, types = _on_edges(round, own)
    spec = _spec(round, own, shared, edges.by_destination(round.graph), types)
    query = own.query
    key = own.key
    vector = own.vector
    if kind == ADDITIVE:  # numbers, of which no vectors are made
        query, key = query.to(dtype), key.to(dtype)  # type: ignore[union-attr]
    elif kind != CONSTANT:
        query, key, vector = _pad(query, dtype), _pad(key, dtype), _pad(vector, dtype)
    value = round.value if shared.is_padded else _pad(round.value, dtype)
    tensors = Tensors(value, query, key, vector, **on_edges)
    if round.dst_bias is not None or round.src_bias is not None:
        dst_bias, src_bias = round.node_biases()
        tensors = tensors._replace(dst_bias=dst_bias, src_bias=src_bias)
    differentiable = None
    if torch.is_grad_enabled():
        differentiable = partial(_reference, again.form(round), {name: x.ids for name, x in types.items()})
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
        is_number = isinstance(round.score, AdditiveScore)
        keeps_table = isinstance(round.score, Dot)
        edge = own.edge if keeps_table else per_edge(own.edge, graph, dtype)
        terms["edge_term" if is_number else "edge_key"] = edge
    present = {name: x for name, x in terms.items() if x is not None}
    types = {name: edges.edge_types(graph, x) for name, x in present.items() if isinstance(x, EmbeddingTable)}
    return {name: numbers(x).to(dtype) for name, x in present.items()}, types


def _reference(
    form: Round, types: dict[str, Tensor], *tensors: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    return operands.reference(form, types, dict(zip(Tensors._fields, tensors, strict=True)))


def _is_whole(width: int) -> bool:
    """Whether features of this width are whole vectors, one or more."""
    return width > 0 and width % LANES == 0


def _pad(x: Any, dtype: torch.dtype) -> Any:
    """Features padded with zeros to at least one whole vector; None for None."""
    if x is None:
        return None
    missing = -x.shape[-1] % LANES if x.shape[-1] else LANES
    return F.pad(x.to(dtype), (0, missing)) if missing else x.to(dtype)
