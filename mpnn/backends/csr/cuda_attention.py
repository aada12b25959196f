"""Attention along the rows of any graph on a GPU: converts a round for `mpnn.kernels.rows.cuda.attention`.

Features of any width and any supported dtype are passed without a copy, except that heads are repeated if keys and
values have different numbers of heads.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpnn.backends import reference as again
from mpnn.backends.cost_model import Counts, Estimate, both_ways, kind_of, of_biases, priced
from mpnn.backends.csr import attention, on_device, operands
from mpnn.graph.edge_tables import PerEdge
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.kernels.rows.spec import ADDITIVE
from mpnn.round import Result, Round
from mpnn.scores import AdditiveScore

SERVES = (attention.SERVES | {"cuda"}) - {"cpu", "node_ids", "bias by nodes"}
REASONS = {
    "bias by nodes": "on CUDA it does not add biases of nodes",
    "node_ids": "on CUDA its dropout hashes the numbers of nodes in the part, not in the whole graph"}  # fmt: skip


def refusal(round: Round) -> str | None:
    return attention.unsupported(round) or unavailable(round.value, round.tensors)


def counts(round: Round) -> Counts:
    """Edges, heads on edges, the numbers that edges gather from their sources, and those of nodes. The backward pass
    gathers by destination and by source."""
    graph = round.graph
    batch = round.batch.numel()
    what = attention.COSTS[operands.KINDS[type(round.score)]]
    kind = kind_of(round.value.dtype)
    gathered = round.value.shape[-2:].numel()
    for name, role in () if round.score is None else round.score.roles.items():
        if role.of == "src":
            gathered += getattr(round.score, name).shape[-role.trailing :].numel()
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


def estimate(round: Round) -> Estimate:
    saved = round.graph.num_dst * round.batch.numel() * round.heads * (12.0 if round.needs_grad else 4.0)
    weights = round.graph.num_edges * round.batch.numel() * round.heads * 4.0
    size = saved + weights * (round.return_weights + bool(round.bias) * round.needs_grad)
    return priced(round.value.device, "csr", counts(round), size)


def run(round: Round) -> Result:
    from mpnn.kernels.rows.cuda import attention as row_attention

    graph = round.graph
    batch = round.batch
    heads = round.heads
    own = operands.of(round)
    kind = operands.KINDS[type(round.score)]
    value = _entries(round.value, round)
    query = own.query
    key = own.key
    if kind == ADDITIVE:
        query, key = query[..., None], key[..., None]  # type: ignore[index]
    query, key = (None if x is None else _entries(x, round) for x in (query, key))
    if key is not None and key.shape[2] != value.shape[2]:  # the kernel groups both or neither
        key, value = _repeat(key, heads), _repeat(value, heads)
    edge_key, key_types = _edge_keys(own.edge, round)
    edge_value, value_types = _vectors(round.edge_value, round)
    bias = on_device.biases(round)
    score = row_attention.Score(
        heads,
        kind,
        operands.normalizer(round),
        own.scale,
        own.softcap,
        own.slope,
        own.tanh,
        round.dropout if round.weighted else 0.0,
        *(round.head_ids or (0, heads)),
    )
    rows = on_device.rows(graph)
    columns = on_device.columns(graph)
    spec = row_attention.Spec(
        rows,
        columns,
        score,
        round.result_dtype,
        _seed(round) if score.dropout else None,
        round.return_weights,
        key_types,
        value_types,
    )
    tensors = row_attention.Tensors(
        value,
        query,
        key,
        own.vector,
        edge_key,
        edge_value,
        None if bias is None else on_device.per_edge(bias, heads, round),
    )
    lse: Any  # None without a softmax, and then nothing below reads it
    form = again.form(round).with_fields(seed=spec.seed, keep_accumulate_dtype=True)
    types = {name: x.ids for name, x in (("edge_key", key_types), ("edge_value", value_types)) if x is not None}
    out, weights, lse = row_attention.attend(spec, tensors, partial(_reference, form, types))
    out = out.view(*batch, *out.shape[1:])
    weights = None if weights is None else weights.view(*batch, *weights.shape[1:]).to(out.dtype)
    if not round.return_lse or lse is None:
        return Result(out, weights)
    return Result(out, weights, lse.masked_fill(lse == torch.inf, -torch.inf).view(out.shape[:-1]))


def _reference(form: Round, types: dict[str, Tensor], *tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    value, query, key, vector, edge_key, edge_value, bias = tensors
    of = {"value": value, "vector": vector, "edge_value": edge_value, "bias": bias}
    if isinstance(form.score, AdditiveScore):
        of |= {"query": query.squeeze(-1), "key": key.squeeze(-1), "edge_term": edge_key}
    else:
        of |= {"query": query, "key": key, "edge_key": edge_key}
    return operands.reference(form, types, of)


def _edge_keys(data: PerEdge | None, round: Round) -> tuple[Tensor | None, Any]:
    """Returns the terms that edges add to keys: numbers [B, E, H] of an additive score, else as `_vectors`."""
    if data is not None and isinstance(round.score, AdditiveScore):
        return on_device.per_edge(on_device.numbers(data, round), round.heads, round), None
    return _vectors(data, round)


def _vectors(data: PerEdge | None, round: Round) -> tuple[Tensor | None, Any]:
    """Vectors per edge or per edge type, [B, E or edge types, H, D], and the edge types, None for vectors per edge."""
    from mpnn.kernels.rows.cuda.attention import EdgeTypes, Ends

    if data is None:
        return None, None
    if isinstance(data, Tensor):
        return on_device.per_edge(data, round.heads, round, trailing=2), None
    graph = round.graph
    src, dst = graph.ends
    types = EdgeTypes(on_device.ids(data, graph), on_device.by_type(data, graph), Ends(dst, src))
    return on_device.per_edge(data.table, round.heads, round, trailing=2), types


def _seed(round: Round) -> Tensor | None:
    """The seed on the device of the features."""
    return None if round.seed is None else round.seed.to(round.value.device)


def _entries(x: Tensor, round: Round) -> Tensor:
    """Features of nodes as [B, N, H, D]."""
    return x.reshape(round.batch.numel(), *x.shape[-3:])


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Repeats each shared head of x [..., H_kv, D] to [..., heads, D]."""
    return x if x.shape[-2] == heads else x.repeat_interleave(heads // x.shape[-2], -2)
