"""Attention along the rows of any graph on a GPU: converts a round for `mpnn.kernels.cuda.row_attention`.

Features of any width and any supported dtype are passed without a copy, except that heads are repeated if keys and
values have different numbers of heads.
"""

from typing import Any

import torch
from torch import Tensor

from mpnn.aggregate import Mean
from mpnn.backends.cost_model import Counts, Estimate, on_gpu
from mpnn.backends.csr import attention, on_device
from mpnn.edge_tables import PerEdge
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.kernels.row_spec import NORMALIZERS
from mpnn.round import Result, Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, slope_of

SERVES = (attention.SERVES | {"cuda"}) - {
    "cpu", "sinks", "return_lse", "node_ids", "bias by nodes", "softmax_dst", "weights and lse",
    "keep_accumulate_dtype",
}  # fmt: skip
REASONS = {"sinks": "on CUDA it does not support sinks", "return_lse": "on CUDA it does not return lse",
    "bias by nodes": "on CUDA it does not add biases of nodes",
    "softmax_dst": "on CUDA it does not normalize over the destinations of a source",
    "node_ids": "on CUDA its dropout hashes the numbers of nodes in the part, not in the whole graph"}  # fmt: skip


def refusal(round: Round) -> str | None:
    return attention.unsupported(round) or unavailable(round.value, round.tensors)


def counts(round: Round) -> Counts:
    """Bytes moved by the forward pass: the features that each edge gathers from its source, its index and biases, and
    the results of each node."""
    graph, batch, size = round.graph, round.batch.numel(), round.value.element_size()
    value, source = round.value.shape[-2:].numel(), 0
    for name, role in () if round.score is None else round.score.roles.items():
        if role.of == "src":
            source += getattr(round.score, name).shape[-role.trailing :].numel()
    biases = sum(x.shape[-1] * 4 for x in round.bias if isinstance(x, Tensor))
    edges = graph.num_edges * batch * ((value + source) * size + biases + 8)
    nodes = graph.num_dst * batch * round.heads * (2 * round.value.shape[-1] * size + 4)
    return {"byte": float(edges + nodes), "number": float(graph.num_edges * batch * (value + source)), "launch": 3.0}


def estimate(round: Round) -> Estimate:
    """The backward pass gathers the same bytes once by destination and once by source."""
    operations, passes = counts(round), 3 if round.needs_grad else 1
    # on ordinary cores, for features of any dtype
    arithmetic = torch.float64 if round.accumulate_dtype == torch.float64 else torch.float32
    seconds = on_gpu(
        4 * passes * operations["number"], passes * operations["byte"], arithmetic, passes * operations["launch"]
    )
    saved = round.graph.num_dst * round.batch.numel() * round.heads * 4.0 * passes
    weights = round.graph.num_edges * round.batch.numel() * round.heads * 4.0
    return Estimate(seconds, saved + weights * (round.return_weights + bool(round.bias) * round.needs_grad))


def run(round: Round) -> Result:
    from mpnn.kernels.cuda import row_attention

    graph, batch, heads = round.graph, round.batch, round.heads
    features, options = _score(round)
    bias = on_device.biases(round)
    if bias is not None:
        features["bias"] = on_device.per_edge(bias, heads, round)
    if round.edge_value is not None:
        features["edge_value"], options["value_types"] = _vectors(round.edge_value, round)
    spec = row_attention.Spec(
        on_device.rows(graph),
        on_device.columns(graph),
        heads,
        normalize=NORMALIZERS[round.normalize if round.weighted else "none"],
        dropout_keys=round.dropout_keys(),
        dropout=round.dropout if round.weighted else 0.0,
        return_weights=round.return_weights,
        **options,
    )
    out, weights = row_attention.attend(spec, row_attention.Tensors(**features))
    if type(round.reduce) is Mean:
        dtype = round.accumulate_dtype
        inverse = graph.cached(("device inverse degree", dtype), lambda: spec.rows.inverse_degree(dtype))
        out = (out * inverse).to(out.dtype)
    out = out.view(*batch, *out.shape[1:])
    return Result(out, None if weights is None else weights.view(*batch, *weights.shape[1:]).to(out.dtype))


def _score(round: Round) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tensors of nodes and of the score as fields of `Tensors`, and options of the score as fields of `Spec`."""
    value, heads = _entries(round.value, round), round.heads
    score: Any = round.score
    options: dict[str, Any] = {}
    kind, vector = attention.KINDS[type(score)], None
    match score:
        case Dot(query, key, scale, edge, softcap):
            options = {"scale": scale, "softcap": softcap or 0.0}
        case AdditiveScore(query, key, activation, edge):
            query, key, slope = query[..., None], key[..., None], slope_of(activation)
            options = {"slope": 0.0 if slope == "tanh" else slope, "tanh": slope == "tanh"}
        case AdditiveV2Score(query, key, vector, activation, edge):  # type: ignore[misc]
            slope = slope_of(activation)
            options = {"slope": 0.0 if slope == "tanh" else slope, "tanh": slope == "tanh"}
        case _:
            return {"value": value}, {"kind": kind, "scale": 0.0 if round.weighted else 1.0}
    query, key, options["kind"] = _entries(query, round), _entries(key, round), kind
    if key.shape[2] != value.shape[2]:  # the kernel groups both or neither
        key, value = _repeat(key, heads), _repeat(value, heads)
    features = {"value": value, "query": query, "key": key, "vector": vector}
    if edge is not None and isinstance(round.score, AdditiveScore):
        features["edge_key"] = on_device.per_edge(on_device.numbers(edge, round), heads, round)
    elif edge is not None:
        features["edge_key"], options["key_types"] = _vectors(edge, round)
    return features, options


def _vectors(data: PerEdge, round: Round) -> tuple[Tensor, Any]:
    """Vectors per edge or per edge type, [B, E or edge types, H, D], and the edge types, None for vectors per edge."""
    from mpnn.kernels.cuda.row_attention import EdgeTypes, Ends

    if isinstance(data, Tensor):
        return on_device.per_edge(data, round.heads, round, trailing=2), None
    graph = round.graph
    src, dst = graph.ends
    types = EdgeTypes(on_device.ids(data, graph), on_device.by_type(data, graph), Ends(dst, src))
    return on_device.per_edge(data.table, round.heads, round, trailing=2), types


def _entries(x: Tensor, round: Round) -> Tensor:
    """Features of nodes as [B, N, H, D]."""
    return x.reshape(round.batch.numel(), *x.shape[-3:])


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Repeats each shared head of x [..., H_kv, D] to [..., heads, D]."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)
