"""Sinks: the softmax with one more source of value 0, from the softmax without it.

    exp(l_ij) / (exp(s) + sum_j exp(l_ij)) = softmax_j(l_ij) * sigmoid(lse_i - s)        lse_i = log sum_j exp(l_ij)

So kernels need no sinks, and only return lse (Xiao et al. 2023, arXiv:2309.17453; gpt-oss).
"""

from typing import Any

from torch import Tensor

from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner
from mpnn.round import Result, Round
from mpnn.round.needs import ANYWHERE, DROPS, VALUES_OF_EDGES, WEIGHED


class SinksAsLse(Rewrite):
    NAME = "sinks by lse"
    SERVES = ANYWHERE | WEIGHED | VALUES_OF_EDGES | DROPS | {"softmax", "sum", "mean", "sinks", "return_weights"}
    SERVES |= {"stacked graph", "keep_accumulate_dtype"}
    same_work = True
    scales = True

    def applies(self, round: Round) -> bool:
        return round.sinks is not None

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        sinks: Any = round.sinks

        def finish(result: Result) -> Result:
            lse: Any = result.lse
            # The lse of a row without edges is -inf, whose share is 0: the sink takes all of the weight.
            share = (lse - sinks.to(lse.dtype)).sigmoid()
            out = (result.out * share[..., None]).to(round.result_dtype)
            return Result(out, scale_rows(result.weights, share, round))

        return round.with_fields(sinks=None, return_lse=True, keep_accumulate_dtype=True), finish


def scale_rows(weights: Tensor | None, scale: Tensor, round: Round) -> Tensor | None:
    """The weights [..., E, H] of each destination times its number of `scale` [..., N_dst, H]."""
    if weights is None:
        return None
    return (weights * scale.index_select(-2, round.graph.ends[1])).to(round.result_dtype)
