"""Weights that no kernel normalizes, sparse ones and those of talking heads, between two rounds that kernels run.

    l_ij = score(i, j) + biases        by a round without a normalizer, which returns its weights
    w_ij = mix( normalize_j( mix(l_ij) ) )        by torch, on E x H numbers
    out_i = reduce_j( w_ij * value_j )            by a round with these weights

So sparsemax, entmax and talking heads take no tensor of E x D numbers.
"""

from typing import cast

from torch import Tensor

from mpnn.aggregate import SUM, Index
from mpnn.backends.cost_model import Estimate
from mpnn.backends.edge_list import normalized
from mpnn.engine.rewrites.aggregator_in_two_rounds import dropped
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner, work
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, DROPS, NORMALIZED, WEIGHED

_SPARSE = ("sparsemax", "entmax15")
_PASSES = 20.0  # over E x H numbers: a sort, running sums, sums of rows


class WeightsBetween(Rewrite):
    NAME = "logits, weights by torch, their aggregate"
    SERVES = ANYWHERE | WEIGHED | DROPS | NORMALIZED | AGGREGATES
    SERVES |= {"sparsemax", "entmax15", "mix_logits", "mix_weights", "aggregate of parts", "own aggregate"}
    SERVES |= {"return_weights", "keep_accumulate_dtype"}

    def applies(self, round: Round) -> bool:
        mixes = round.mix_logits is not None or round.mix_weights is not None
        return round.weighted and (round.normalize in _SPARSE or mixes)

    def estimate(self, round: Round) -> Estimate:
        weights = float(round.graph.num_edges * round.batch.numel() * round.heads)
        counts = {"call": _PASSES, "copied number": _PASSES * weights}
        tensors = _PASSES / 2 * (1 + round.needs_grad)
        return work(counts, round, weights * tensors * round.accumulate_dtype.itemsize)

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        value = round.value
        # The first round is run for its weights. Nobody reads its sums, so its values take no memory.
        narrow = value.new_zeros(()).expand(*value.shape[:-1], 1)
        first = round.with_fields(value=narrow, reduce=SUM, dropout=0.0, normalize="none", return_weights=True)
        first = first.with_fields(mix_logits=None, mix_weights=None, keep_accumulate_dtype=True)
        weights = run.compute(_weights, cast(Tensor, run(first).weights), round)
        kept = run.compute(dropped, weights, round) if round.dropout else weights
        last = Round(round.graph, value, bias=(kept,), normalize="none", reduce=round.reduce)

        def finish(result: Result) -> Result:
            return Result(result.out, weights.to(round.result_dtype) if round.return_weights else None)

        return last.with_fields(keep_accumulate_dtype=round.keep_accumulate_dtype), finish


def _weights(logits: Tensor, round: Round) -> Tensor:
    """The weights [..., E, H] of logits of this shape, both in the caller's order."""
    csr = round.graph.csr
    index = round.graph.cached("edge list index", lambda: Index.of(csr.row, csr.ptr))
    # The specification normalizes along the first dimension, with edges sorted by row.
    weights = normalized(csr.from_caller(logits.movedim(-2, 0)), round, index)
    return csr.to_caller(weights).movedim(0, -2)
