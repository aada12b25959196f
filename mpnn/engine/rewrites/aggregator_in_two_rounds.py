"""Attention with any aggregator: the weights of all edges by a round, then the aggregate of weighted values by another.

    w_ij = normalize_j( score(i, j) )        out_i = reduce_j( w_ij * value_j )

So kernels of attention need only sums, and kernels of aggregation no scores. It takes memory for E x H weights.
"""

from typing import Any, ClassVar, cast

from torch import Tensor

from mpnn.aggregate import SUM, Mean, Sum
from mpnn.backends.cost_model import Estimate
from mpnn.backends.edge_list import dropped
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner, work
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, DROPS, NORMALIZED, WEIGHED, class_of


class WeightsFirst(Rewrite):
    """A rewrite whose first round computes weights, from which the last one aggregates.

    Attributes:
        FIRST: the fields of the first round that differ from those of the round.
    """

    FIRST: ClassVar[dict[str, Any]] = {}

    def weights(self, of_first: Tensor, round: Round, run: Runner) -> Tensor:
        """The weights [..., E, H] before dropout, from those of the first round."""
        return of_first

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        value = round.value
        # The first round computes no sums that somebody reads, so its values are one number a node, without memory.
        narrow = value.new_zeros(()).expand(*value.shape[:-1], 1)
        first = round.with_fields(value=narrow, reduce=SUM, dropout=0.0, return_weights=True, **self.FIRST)
        first = first.with_fields(keep_accumulate_dtype=True)
        weights = self.weights(cast(Tensor, run(first).weights), round, run)
        # Callers get weights before dropout, as from any attention, so that dropout comes between the rounds.
        kept = run.compute(_dropped, weights, round) if round.dropout else weights
        last = Round(round.graph, value, bias=(kept,), normalize="none", reduce=round.reduce)

        def finish(result: Result) -> Result:
            return Result(result.out, weights.to(round.result_dtype) if round.return_weights else None)

        return last.with_fields(keep_accumulate_dtype=round.keep_accumulate_dtype), finish


def _dropped(weights: Tensor, round: Round) -> Tensor:
    """The weights [..., E, H] after dropout, which drops the same edges as kernels do."""
    src, dst = round.graph.ends
    return dropped(weights.movedim(-2, 0), round, dst, src).movedim(0, -2)


class AggregatorInTwoRounds(WeightsFirst):
    NAME = "weights, then their aggregate"
    SERVES = ANYWHERE | WEIGHED | DROPS | NORMALIZED | AGGREGATES
    SERVES |= {"softmax_dst", "sinks", "aggregate of parts", "own aggregate", "return_weights", "keep_accumulate_dtype"}

    def applies(self, round: Round) -> bool:
        """The second round has biases and nothing else, so it is not of this form."""
        of_nodes = round.dst_bias is not None or round.src_bias is not None
        attends = round.score is not None or round.normalize != "none" or bool(round.dropout) or of_nodes
        return round.weighted and attends and class_of(round.reduce) not in (Sum, Mean)

    def estimate(self, round: Round) -> Estimate:
        weights = float(round.graph.num_edges * round.batch.numel() * round.heads)
        counts = {"call": 1.0} | ({"dropped weight": weights} if round.dropout else {})
        # Vectors of the processor hold 8 numbers: narrower heads take as long forward as without kernels.
        counts |= {"narrow weight": weights} if round.value.shape[-1] < 8 else {}
        tensors = 1 + bool(round.dropout) + 2 * round.needs_grad
        return work(counts, round, weights * tensors * round.accumulate_dtype.itemsize)
