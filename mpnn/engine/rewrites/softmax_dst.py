"""The softmax over the destinations of each source, by rounds with a softmax over sources.

    w_ij = exp(l_ij - lse_j)    lse_j = log sum_i exp(l_ij)       the lse of the reversed graph
         = softmax_j(l_ij - lse_j) exp(lse'_i)                    lse' of the logits l_ij - lse_j

So -lse_j is a bias of sources. Its gradient is that of lse, which kernels have.

The lse of large logits is rounded: at 1e6 in float32 by 0.03, so that the weights of a source would add up to 1.03. One
more round computes how far they are off, r_j = log sum_i exp(l_ij - lse_j), and values are multiplied by exp(-r_j).
Then lse_j only shifts the logits, as the maximum does in a softmax over rows, and has no gradient.
"""

from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner
from mpnn.engine.rewrites.sinks_as_lse import scale_rows
from mpnn.graph.edge_tables import PerEdge, per_edge
from mpnn.round import Result, Round
from mpnn.round.needs import ANYWHERE, DROPS, VALUES_OF_EDGES, WEIGHED, on_edges
from mpnn.scores import Dot

_REVERSED = "a softmax over destinations reverses the graph, where edge_key would be added to queries"
_ROUNDED = 2.0**-13
"""The relative error of a weight from which on its sum is computed once more."""


class SoftmaxOverDestinations(Rewrite):
    NAME = "softmax over destinations by two over sources"
    SERVES = (ANYWHERE | WEIGHED | VALUES_OF_EDGES | DROPS) - on_edges("edge_key") - {"own score"}
    SERVES |= {"softmax_dst", "sum", "return_weights", "keep_accumulate_dtype"}
    REASONS: ClassVar = dict.fromkeys(on_edges("edge_key"), _REVERSED)
    same_work = True
    scales = True

    def applies(self, round: Round) -> bool:
        return round.weighted and round.normalize == "softmax_dst"

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        given = round
        if (own := round.src_bias) is not None:
            # It moves all logits of a source alike, so that only -inf makes a difference.
            round = round.with_fields(src_bias=own.masked_fill(own.isfinite(), 0.0))
        lse = _lse(run(_reversed(round)))

        def again() -> Round:
            return _shifted(_alike_both_ways(round), lse.detach())

        rest = run.run_if(lambda: _is_rounded(lse), lambda: _reversed(again()))
        factor = None if rest is None else _lse(rest).neg().exp()
        last = _shifted(round, lse) if factor is None else _times(again(), factor)

        def finish(result: Result) -> Result:
            total = cast(Tensor, result.lse).exp()
            weights = scale_rows(result.weights, total, given)
            if weights is not None and factor is not None:
                weights = (weights * factor.index_select(-2, given.graph.ends[0])).to(weights.dtype)
            return Result((result.out * total[..., None]).to(given.result_dtype), weights)

        return last.with_fields(normalize="softmax", return_lse=True, keep_accumulate_dtype=True), finish


def _lse(result: Result) -> Tensor:
    """The log-sum-exp of the logits of each source, [..., N_src, H]; 0 for sources without edges, or with biases of
    -inf only."""
    lse = cast(Tensor, result.lse)
    return lse.masked_fill(lse.isinf(), 0.0)


def _is_rounded(lse: Tensor) -> bool:
    # A GPU is waited for here: the host decides with this number whether another round runs.
    return bool(lse.numel()) and float(lse.detach().abs().amax()) * torch.finfo(lse.dtype).eps > _ROUNDED


def _shifted(round: Round, lse: Tensor) -> Round:
    return round.with_fields(src_bias=-lse if round.src_bias is None else round.src_bias - lse)


def _alike_both_ways(round: Round) -> Round:
    """The round with dot products that kernels round in the same way over the reversed graph: without a scale, which
    some multiply queries by, and without heads that share keys."""
    score = round.score
    if not isinstance(score, Dot):
        return round
    key = score.key.repeat_interleave(round.heads // score.key.shape[-2], -2)
    return round.with_fields(score=replace(score, query=score.query * score.scale, key=key, scale=1.0))


def _times(round: Round, factor: Tensor) -> Round:
    """The round with the values of each source times its factor, [..., N_src, H]."""
    value = round.value.repeat_interleave(round.heads // round.value.shape[-2], -2)
    round = round.with_fields(value=(value * factor[..., None]).to(value.dtype))
    if round.edge_value is None:
        return round
    of_edges = factor.index_select(-2, round.graph.ends[0])[..., None]
    return round.with_fields(edge_value=per_edge(round.edge_value, round.graph, factor.dtype) * of_edges)


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
            # Additive scores are symmetric in their two ends, so that these only change places.
            edge = reordered(score.edge, score.roles["edge"].trailing)
            score = replace(score, dst=score.src, src=score.dst, edge=edge)
    return Round(
        # Nothing but lse is asked for, so that the values are a single zero for each node.
        graph.cached("reversed", graph.reverse),
        round.value.new_zeros(*round.batch, graph.num_dst, 1, 1),
        score,
        bias=tuple(x for x in map(reordered, round.bias) if x is not None),
        dst_bias=round.src_bias,
        src_bias=round.dst_bias,
        return_lse=True,
    )
