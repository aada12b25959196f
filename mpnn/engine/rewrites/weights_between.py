"""Weights that no kernel normalizes, sparse ones and those of talking heads, between two rounds that kernels run.

    l_ij = score(i, j) + biases        by a round without a normalizer, which returns its weights
    w_ij = mix( normalize_j( mix(l_ij) ) )        by torch, on E x H numbers
    out_i = reduce_j( w_ij * value_j )            by a round with these weights

So sparsemax, entmax and talking heads take no tensor of E x D numbers.
"""

from typing import Any, ClassVar

from torch import Tensor

from mpnn.aggregate import Index
from mpnn.backends.cost_model import Estimate
from mpnn.backends.edge_list import normalized
from mpnn.engine.rewrites.aggregator_in_two_rounds import WeightsFirst
from mpnn.engine.rewrites.rewrite import Runner, work
from mpnn.round import Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, DROPS, NORMALIZED, WEIGHED

_SPARSE = ("sparsemax", "entmax15")
_PASSES = 20.0  # over E x H numbers: a sort, running sums, sums of rows


class WeightsBetween(WeightsFirst):
    NAME = "logits, weights by torch, their aggregate"
    SERVES = ANYWHERE | WEIGHED | DROPS | NORMALIZED | AGGREGATES
    SERVES |= {"sparsemax", "entmax15", "mix_logits", "mix_weights", "aggregate of parts", "own aggregate"}
    SERVES |= {"return_weights", "keep_accumulate_dtype"}

    FIRST: ClassVar[dict[str, Any]] = {"normalize": "none", "mix_logits": None, "mix_weights": None}

    def applies(self, round: Round) -> bool:
        mixes = round.mix_logits is not None or round.mix_weights is not None
        return round.weighted and (round.normalize in _SPARSE or mixes)

    def estimate(self, round: Round) -> Estimate:
        weights = float(round.graph.num_edges * round.batch.numel() * round.heads)
        counts = {"call": _PASSES, "copied number": _PASSES * weights}
        tensors = _PASSES / 2 * (1 + round.needs_grad)
        return work(counts, round, weights * tensors * round.accumulate_dtype.itemsize)

    def weights(self, of_first: Tensor, round: Round, run: Runner) -> Tensor:
        return run.compute(_weights, of_first, round)


def _weights(logits: Tensor, round: Round) -> Tensor:
    """The weights [..., E, H] of logits of this shape, both in the caller's order."""
    csr = round.graph.csr
    index = round.graph.cached("edge list index", lambda: Index.of(csr.row, csr.ptr))
    # The specification normalizes along the first dimension, with edges sorted by row.
    weights = normalized(csr.from_caller(logits.movedim(-2, 0)), round, index)
    return csr.to_caller(weights).movedim(0, -2)
