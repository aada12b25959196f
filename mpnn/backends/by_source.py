"""The softmax over the destinations of each source, by two passes of kernels that compute it over sources.

    w_ij = exp(l_ij - lse_j)    lse_j = log sum_i exp(l_ij)       the lse of the reversed graph
         = softmax_j(l_ij - lse_j) exp(lse'_i)                    lse' of the logits l_ij - lse_j

So -lse_j is a bias of sources. Its gradient is that of lse, which kernels have.
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


def over_sources(round: Round, run: Run) -> Round:
    """The round of the softmax over sources, after a first pass. Its results times `sums(lse)` are those of `round`."""
    lse = run(_reversed(round)).lse
    assert lse is not None
    lse = lse.masked_fill(lse.isinf(), 0.0)  # sources without edges, or with biases of -inf only
    return replace(round, normalize="softmax", src_bias=-lse if round.src_bias is None else round.src_bias - lse)


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
