"""The softmax over the destinations of each source, by two passes of kernels that compute it over sources.

    w_ij = exp(l_ij - lse_j)    lse_j = log sum_i exp(l_ij)       the lse of the reversed graph
         = softmax_j(l_ij - lse_j) exp(lse'_i)                    lse' of the logits l_ij - lse_j

So -lse_j is a bias of sources. Its gradient is that of lse, which kernels have.

The lse of large logits is rounded: at 1e6 in float32 by 0.03, so that the weights of a source would add up to 1.03. One
more pass computes how far they are off, r_j = log sum_i exp(l_ij - lse_j), and values are multiplied by exp(-r_j). Then
lse_j only shifts the logits, as the maximum does in a softmax over rows, and has no gradient.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mpnn.edge_tables import PerEdge, per_edge
from mpnn.round import Result, Round
from mpnn.scores import Dot

Run = Callable[[Round], Result]


def over_sources(round: Round, run: Run) -> tuple[Round, Tensor | None]:
    """The round of the softmax over sources, after passes that compute lse. Its results times `sums(lse)` are those of
    `round`, and its weights, too, after they were multiplied by a factor of each source [..., N_src, H] if there is
    one."""
    if (own := round.src_bias) is not None:  # it moves all logits of a source alike: only -inf makes a difference
        round = replace(round, src_bias=own.masked_fill(own.isfinite(), 0.0))
    lse = _lse(round, run)
    if not lse.numel() or float(lse.detach().abs().amax()) * torch.finfo(lse.dtype).eps <= _ROUNDED:
        return _shifted(round, lse), None
    shifted = _shifted(_alike_both_ways(round), lse.detach())
    factor = _lse(shifted, run).neg().exp()
    value = shifted.value.repeat_interleave(round.heads // shifted.value.shape[-2], -2)
    shifted = replace(shifted, value=(value * factor[..., None]).to(value.dtype))
    if round.edge_value is not None:
        of_edges = factor.index_select(-2, round.graph.ends[0])[..., None]
        shifted = replace(shifted, edge_value=per_edge(round.edge_value, round.graph, factor.dtype) * of_edges)
    return shifted, factor


_ROUNDED = 2.0**-13
"""The relative error of a weight from which on its sum is computed once more."""


def _lse(round: Round, run: Run) -> Tensor:
    """The log-sum-exp of the logits of each source, [..., N_src, H]; 0 for sources without edges, or with biases of
    -inf only."""
    lse = run(_reversed(round)).lse
    assert lse is not None
    return lse.masked_fill(lse.isinf(), 0.0)


def _shifted(round: Round, lse: Tensor) -> Round:
    return replace(round, normalize="softmax", src_bias=-lse if round.src_bias is None else round.src_bias - lse)


def _alike_both_ways(round: Round) -> Round:
    """The round with dot products that kernels round in the same way over the reversed graph: without a scale, which
    some multiply queries by, and without heads that share keys."""
    score = round.score
    if not isinstance(score, Dot):
        return round
    key = score.key.repeat_interleave(round.heads // score.key.shape[-2], -2)
    return replace(round, score=replace(score, query=score.query * score.scale, key=key, scale=1.0))


def sums(lse: Tensor) -> Tensor:
    """exp(lse) of kernels, whose lse is +inf for a row without edges."""
    return lse.masked_fill(lse == torch.inf, -torch.inf).exp()


def refusal(round: Round) -> str | None:
    """Why the reversed graph has no such score, or None if it has."""
    if round.normalize == "softmax_dst" and isinstance(round.score, Dot) and round.score.edge_key is not None:
        return "a softmax over destinations reverses the graph, where edge_key would be added to queries"
    return None


def passes(round: Round) -> int:
    """How often the logits are computed."""
    return 2 if round.normalize == "softmax_dst" else 1


def _reversed(round: Round) -> Round:
    """The round that computes lse_j: destinations are sources."""
    graph = round.graph
    score: Any = round.score

    def reordered(data: PerEdge | None, trailing: int = 1) -> Tensor | None:
        """Data of edges in the caller's order of the reversed graph, which for runs is by source."""
        if data is None:
            return None
        x = per_edge(data, graph, round.accumulate_dtype)
        return x if graph.is_explicit else graph.csc.from_caller(x, -1 - trailing)

    match score:
        case Dot(query, key, scale, _, softcap):
            score = Dot(key.repeat_interleave(round.heads // key.shape[-2], -2), query, scale, softcap=softcap)
        case None:
            pass
        case _:
            edge = reordered(score.edge, score.roles["edge"].trailing)
            score = replace(score, dst=score.src, src=score.dst, edge=edge)
    return Round(
        graph.cached("reversed", graph.reverse),
        round.value.new_zeros(*round.batch, graph.num_dst, 1, 1),
        score,
        bias=tuple(x for x in map(reordered, round.bias) if x is not None),
        dst_bias=round.src_bias,
        src_bias=round.dst_bias,
        return_lse=True,
    )
