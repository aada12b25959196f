"""The reference: materializes all edges in plain torch.

It supports every round, works in float64, differentiates twice, and is slow. All other backends are tested against
it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from mpnn.aggregate import (
    Index,
    Mean,
    Sum,
    Var,
    segment_entmax15,
    segment_logsumexp,
    segment_softmax,
    segment_sparsemax,
)
from mpnn.backends.cost_model import Estimate, both_ways, of_biases, priced
from mpnn.graph import rng
from mpnn.graph.csr import CSR
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, total
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, DEVICES, FLOATS, NORMALIZED, class_of, on_edges
from mpnn.scores import Dot, Role, Score

NAME = "edge_list"
ANY_EDGES = True
TRACED = True
_FAMILIES: dict[type, str] = {Sum: "sum", Mean: "mean"}


SERVES = (
    FLOATS | DEVICES | NORMALIZED | AGGREGATES
    | on_edges("bias") | on_edges("edge_key") | on_edges("edge_value") | on_edges("edge")
    | {"no score", "Dot", "AdditiveScore", "AdditiveV2Score", "own score", "own activation", "softcap",
       "softmax_dst", "sparsemax", "entmax15", "mix_logits", "mix_weights",
       "bias by nodes", "log_gate", "beta", "state", "return_state",
       "sinks", "dropout", "head_ids", "node_ids", "return_weights", "return_lse", "weights and lse",
       "keep_accumulate_dtype", "aggregate of parts",
       "own aggregate", "explicit graph", "gradient"}
)  # fmt: skip


def refusal(round: Round) -> str | None:
    return None


def counts(round: Round) -> dict[str, float]:
    """The number of edges, of their components, and of those of the results, by operation."""
    edges = float(round.graph.num_edges * round.batch.numel() * round.heads)
    numbers = edges * round.value.shape[-1]
    family = _FAMILIES.get(class_of(round.reduce), "reduce")
    if not round.weighted:
        operations = {f"{family} call": 1.0, f"{family} edge": edges, f"{family} number": numbers}
    else:
        kind = _kind(round)
        operations = {f"{kind} call": 1.0, "edge": edges, f"{kind} number": numbers}
        if round.biased:
            operations |= of_biases(round.biases, "edge", round.graph.num_edges)
        if round.recurrent:
            states = round.batch.numel() * round.heads * cast(Dot, round.score).key.shape[-1]
            operations |= {"recurrence call": 1.0, "state number": float(states * round.value.shape[-1])}
        if round.normalize in ("softmax", "softmax_dst"):
            operations |= {"softmax call": 1.0, "softmax edge": edges}
        if round.dropout:
            operations |= {"dropout call": 1.0, "dropped edge": edges}
    rows = round.graph.num_dst * round.batch.numel() * round.heads
    operations[f"{family} row number"] = float(rows * round.value.shape[-1])
    if round.value.device.type != "cuda" and numbers * torch.finfo(round.accumulate_dtype).bits / 8 > 1 << 24:
        # Large tensors are allocated by the operating system in each call, at a cost per page.
        operations["fresh number"] = numbers * torch.finfo(round.accumulate_dtype).bits / 32
    return both_ways(operations, round.needs_grad)


def _kind(round: Round) -> str:
    """How edges are weighted: by dot products, by another score per edge and number, or without looking at numbers."""
    if round.score is None:
        return "weighted"
    if isinstance(round.score, Dot):
        return "dot"
    return "activated" if any(role.vectors for role in round.score.roles.values()) else "additive"


def estimate(round: Round) -> Estimate:
    numbers = round.graph.num_edges * round.batch.numel() * round.heads * round.value.shape[-1]
    tensors = (6 if round.needs_grad else 4) if round.weighted else 2
    size = numbers * tensors * torch.finfo(round.accumulate_dtype).bits / 8
    return priced(round.value.device, NAME, counts(round), size)


class Kernels(NamedTuple):
    """Functions that replace steps of this backend where they apply, see `mpnn.backends.reference`.

    Fields:
        logits: the logits of a score, [E, ..., H] in CSR order, or None for a score that it does not compute.
        sums: the sums [N, ..., H, D] of values with weights [E, ..., H] in CSR order.
    """

    logits: Callable[[Round, CSR], Tensor | None]
    sums: Callable[[Tensor, Round, CSR], Tensor]


def run(round: Round, kernels: Kernels | None = None) -> Result:
    csr = round.graph.csr
    if round.recurrent:
        return _recurrence(round, csr)
    index = round.graph.cached("edge list index", lambda: Index.of(csr.row, csr.ptr))
    logits = sum_of_logits(round, csr, kernels)
    weights = None if logits is None else normalized(logits, round, index)
    kept = weights if weights is None or not round.dropout else dropped(weights, round, csr.row, csr.col)
    by_sums = class_of(round.reduce) in (Sum, Var)
    if kernels is not None and by_sums and round.edge_value is None:
        out = _by_sums(kept, round, csr, index, kernels)
    else:
        out = reduced(kept, round, csr, index)
    out = _cast(out.movedim(0, -3) if round.batch else out, round.result_dtype)
    shape = (len(csr.col), *round.batch, round.heads)
    lse = None
    if round.return_lse and logits is not None:
        lse = segment_logsumexp(logits.expand(shape), index).movedim(0, -2)
    if not round.return_weights:
        return Result(out, lse=lse)
    weights = _own(out.new_ones(()) if weights is None else weights, shape, round)
    return Result(out, csr.to_caller(weights).movedim(0, -2).to(round.result_dtype), lse)


def _own(weights: Tensor, shape: tuple[int, ...], round: Round) -> Tensor:
    """Weights of this shape in memory of their own: without a normalizer they may be a bias that the caller passed, and
    an expanded tensor has one number for many edges."""
    is_new = round.normalize != "none" and weights.shape == shape
    return weights if is_new else weights.expand(shape).clone(memory_format=torch.contiguous_format)


def _by_sums(weights: Tensor | None, round: Round, csr: CSR, index: Index, kernels: Kernels) -> Tensor:
    """Sums, or variances as `mean(m^2) - mean(m)^2`, whose derivatives do not cancel, by kernels."""
    value = _cast(round.value, round.accumulate_dtype)
    weights = value.new_ones(len(csr.col), *[1] * (len(round.batch) + 1)) if weights is None else weights
    sums = kernels.sums(weights, round, csr)
    if type(round.reduce) is Sum:
        return sums
    degree = index.degree.clamp(min=1).to(sums.dtype).view(-1, *[1] * (sums.dim() - 1))
    squares = kernels.sums(weights.square(), round.with_fields(value=value.square()), csr)
    return squares / degree - (sums / degree).square()


def reduced(weights: Tensor | None, round: Round, csr: CSR, index: Index) -> Tensor:
    """The aggregated messages, [N, ..., H, D], of weights [E, ..., H] in CSR order, or of unweighted values."""
    messages = _repeat_heads(_nodes_first(round.value, round).index_select(0, csr.col), round)
    if round.edge_value is not None:
        messages = messages + _per_edge(round.edge_value, round, csr, trailing=2)
    if weights is not None:
        messages = weights[..., None] * messages
    out = round.reduce.reduce(messages, index)
    if not isinstance(out, Tensor) or out.dim() != messages.dim() or out.shape[0] != index.num_dst:
        raise ValueError(
            f"the aggregator must reduce messages {list(messages.shape)} to one row for each of {index.num_dst} "
            f"destinations; it returned {list(out.shape) if isinstance(out, Tensor) else out!r}"
        )
    return out


_NO_GATE = -800.0  # its exponential is 0 in float64; with -inf a difference would be NaN


def _recurrence(round: Round, csr: CSR) -> Result:
    """The sum over edges, of which each weighs the gates on its path, with the delta rule as a triangular system. Its
    matrices are dense, [..., H, N, N], so that they show the weight of each edge."""
    score = cast(Dot, round.score)
    graph = round.graph
    beta = round.beta
    query, key, value = (_all_heads(x, round) for x in (score.query, score.key, round.value))  # [..., H, N, D]
    nodes = graph.num_dst
    first = int(cast(Any, graph.parts).lengths[:1].sum())
    L = torch.zeros((), dtype=torch.float64, device=value.device).expand(*round.batch, round.heads, nodes, 1)
    if round.log_gate is not None:
        L = round.log_gate.double().clamp(min=_NO_GATE).cumsum(-3).transpose(-2, -3)
    decay = (L.index_select(-2, csr.row) - L.index_select(-2, csr.col)).exp().to(value.dtype)
    from_state = torch.zeros_like(L).index_fill(-2, torch.arange(first, nodes, device=L.device), -torch.inf) + L
    from_state = from_state.exp().to(value.dtype)  # only the first document sees the state

    def matrix(x: Tensor) -> Tensor:
        """<x_i, k_j> times the gates between, [..., H, N, N], zero where there is no edge."""
        weights = (x.index_select(-2, csr.row) * key.index_select(-2, csr.col) * decay).sum(-1)
        return (
            weights.new_zeros(*weights.shape[:-1], nodes * nodes)
            .index_copy(-1, csr.row * nodes + csr.col, weights)
            .view(*weights.shape[:-1], nodes, nodes)
        )

    state = value.new_zeros(*round.batch, round.heads, key.shape[-1], value.shape[-1])
    state = state if round.state is None else _cast(round.state, value.dtype)
    weights = score.scale * matrix(query)
    if beta is not None:
        beta = _cast(beta, value.dtype).transpose(-1, -2).unsqueeze(-2)
        system = matrix(key).tril(-1) * beta + torch.eye(nodes, dtype=value.dtype, device=value.device)
        stored = torch.linalg.solve_triangular(system, value - key * from_state @ state, upper=False)
        sent = beta.mT * stored
    else:
        sent = value
    out = weights @ sent + score.scale * (query * from_state) @ state
    out = _cast(out.transpose(-2, -3), round.result_dtype)
    if round.return_state:
        last = csr.col[csr.row == nodes - 1]  # the sources of the last node: its document
        to_end = (L[..., -1:, :] - L[..., last, :]).exp().to(value.dtype)
        end = from_state[..., -1:, :].mT if nodes else 1
        return Result(out, state=end * state + (key[..., last, :] * to_end).mT @ sent[..., last, :])
    if not round.return_weights:
        return Result(out)
    if beta is not None:  # of the values themselves
        weights = torch.linalg.solve_triangular(system, weights * beta, upper=False, left=False)
    weights = weights[..., csr.row, csr.col].movedim(-1, 0)
    return Result(out, csr.to_caller(weights).movedim(0, -2).to(round.result_dtype))


def _all_heads(x: Tensor, round: Round) -> Tensor:
    """Features [..., N, H_kv, D] as [..., H, N, D] in the dtype of the arithmetic."""
    return _cast(x, round.accumulate_dtype).repeat_interleave(round.heads // x.shape[-2], -2).transpose(-2, -3)


def sum_of_logits(round: Round, csr: CSR, kernels: Kernels | None) -> Tensor | None:
    """The score with its biases, [E, ..., H] in CSR order; None if edges have no weights."""
    terms = [_per_edge(b, round, csr, trailing=1) for b in round.bias]
    dst_bias, src_bias = round.node_biases()
    if dst_bias is not None and src_bias is not None:  # their sum first: of two large numbers it may be a small one
        dst_bias, src_bias = _nodes_first(dst_bias, round, 1), _nodes_first(src_bias, round, 1)
        terms.append(dst_bias.index_select(0, csr.row) + src_bias.index_select(0, csr.col))
    if round.score is not None:
        logits = None if kernels is None else kernels.logits(round, csr)
        terms.append(_logits(round.score, round, csr) if logits is None else logits)
    return total(terms)


def normalized(logits: Tensor, round: Round, index: Index) -> Tensor:
    """The weights of edges by their logits, both [E, ..., H] in CSR order."""
    if round.mix_logits is not None:
        logits = logits.expand(len(logits), *round.batch, round.heads) @ round.mix_logits.to(logits.dtype).mT
    weights = _weights(logits, round, index)
    if round.mix_weights is None:
        return weights
    return weights.expand(len(logits), *round.batch, round.heads) @ round.mix_weights.to(weights.dtype).mT


def _weights(logits: Tensor, round: Round, index: Index) -> Tensor:
    if round.sinks is not None:
        logits = logits.expand(len(logits), *round.batch, round.heads)
        return _softmax_with_sinks(logits, index, round.sinks)
    if round.normalize == "softmax_dst":
        # The edges are not sorted by source, which a softmax does not need.
        index = Index.of(round.graph.csr.col, round.graph.csc.ptr)
    return _NORMALIZED[round.normalize](logits, index)


_NORMALIZED: dict[str, Callable[[Tensor, Index], Tensor]] = {
    "softmax": segment_softmax,
    "softmax_dst": segment_softmax,
    "sparsemax": segment_sparsemax,
    "entmax15": segment_entmax15,
    "sigmoid": lambda logits, _: logits.sigmoid(),
    "none": lambda logits, _: logits,
}


def _softmax_with_sinks(logits: Tensor, index: Index, sinks: Tensor) -> Tensor:
    """The softmax of logits [E, ..., H] with one more edge for each destination, of the logit sinks [H]."""
    rows = torch.arange(index.num_dst, device=logits.device)
    more = sinks.to(logits.dtype).expand(index.num_dst, *logits.shape[1:])
    with_sinks = Index.of(torch.cat([index.plain, rows]), index.ptr)  # not ascending, which a softmax does not need
    return segment_softmax(torch.cat([logits, more]), with_sinks)[: len(logits)]


def _logits(score: Score, round: Round, csr: CSR) -> Tensor:
    """The score's logits, [E, ..., H] in CSR order."""
    rows = {name: _rows(getattr(score, name), role, round, csr) for name, role in score.roles.items()}
    try:
        logits = score.logits(**rows)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise TypeError(
            f"{type(score).__name__}.logits gets the fields of `roles` by name, {', '.join(rows)}: {error}"
        ) from error
    expected = (csr.col.shape[0], *round.batch, round.heads)
    if not isinstance(logits, Tensor) or logits.shape != expected:
        raise ValueError(
            f"{type(score).__name__}.logits must return one number for each edge and head, {list(expected)}; it "
            f"returned {list(logits.shape) if isinstance(logits, Tensor) else logits!r}"
        )
    return logits


def _rows(data: PerEdge | None, role: Role, round: Round, csr: CSR) -> Tensor | None:
    """The row of each edge, [E, ..., H] or [E, ..., H, D] in CSR order."""
    if data is None or role.of == "edge":
        return None if data is None else _per_edge(data, round, csr, role.trailing)
    index = csr.row if role.of == "dst" else csr.col
    rows = _nodes_first(cast(Tensor, data), round, role.trailing).index_select(0, index)
    return _repeat_heads(rows, round) if role.grouped else rows


def dropped(weights: Tensor, round: Round, dst: Tensor, src: Tensor) -> Tensor:
    """The weights [E, ..., H] of edges between these ends, [E], after dropout."""
    streams = rng.streams(round.batch, round.heads, weights.device, round.head_ids)
    dst, src = (ids.view(-1, *[1] * streams.dim()) for ids in rng.numbers(round.graph, dst, src))
    keep = rng.keep(cast(Tensor, round.seed), streams, dst, src, round.dropout)
    return torch.where(keep, weights / (1 - round.dropout), torch.zeros_like(weights))


def _per_edge(data: PerEdge, round: Round, csr: CSR, trailing: int) -> Tensor:
    """[E, ..., H] or [E, ..., H, D] (`trailing` dimensions after the batch), in CSR order."""
    if isinstance(data, EmbeddingTable):
        rows = data.table.to(round.accumulate_dtype).index_select(0, data.ids(round.graph))
    else:
        rows = csr.from_caller(_nodes_first(data, round, trailing))
    missing = len(round.batch) - (rows.dim() - 1 - trailing)
    return rows.view(rows.shape[0], *[1] * missing, *rows.shape[1:]) if missing else rows


def _repeat_heads(rows: Tensor, round: Round) -> Tensor:
    """Repeats each key/value head of rows [E, ..., H_kv, D] for the heads that share it."""
    heads = rows.shape[-2]
    return rows if heads == 1 or heads == round.heads else rows.repeat_interleave(round.heads // heads, -2)


def _nodes_first(x: Tensor, round: Round, trailing: int = 2) -> Tensor:
    x = _cast(x, round.accumulate_dtype)
    return x if x.dim() == trailing + 1 else x.movedim(-1 - trailing, 0)


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    # On a molecule a no-op `to` takes as long as an operation that computes.
    return x if x.dtype == dtype else x.to(dtype)
