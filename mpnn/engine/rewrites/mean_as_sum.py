"""The mean of weighted messages: their sum over the in-degree. So kernels of attention need no means."""

from mpnn.aggregate import SUM, Mean
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner
from mpnn.round import Result, Round
from mpnn.round.needs import ANYWHERE, DROPS, NORMALIZED, VALUES_OF_EDGES, WEIGHED, class_of


class MeanAsSum(Rewrite):
    NAME = "mean as sum"
    SERVES = ANYWHERE | WEIGHED | VALUES_OF_EDGES | DROPS | NORMALIZED
    SERVES |= {
        "softmax_dst",
        "mean",
        "sinks",
        "return_weights",
        "return_lse",
        "weights and lse",
        "keep_accumulate_dtype",
    }
    same_work = True
    scales = True

    def applies(self, round: Round) -> bool:
        """Plain means, without a score or a normalizer, have kernels of their own."""
        plain = round.score is None and round.normalize == "none"
        is_mean = class_of(round.reduce) is Mean
        return is_mean and round.weighted and not plain

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        graph = round.graph
        dtype = round.accumulate_dtype

        def finish(result: Result) -> Result:
            # A node without in-neighbors has the sum 0, and the mean 0 if it is divided by 1.
            inverse = graph.cached(
                ("inverse degree", dtype), lambda: (1 / graph.degree().clamp(min=1).to(dtype))[:, None, None]
            )
            weights = None if result.weights is None else result.weights.to(round.result_dtype)
            return Result((result.out * inverse).to(round.result_dtype), weights, result.lse)

        # A sum of 16 bits may overflow where the mean does not.
        return round.with_fields(reduce=SUM, keep_accumulate_dtype=True), finish
