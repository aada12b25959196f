"""A composed aggregator: a round for each part.

    reduce(m) = compose([part(m) for part in parts], degree)

So kernels run no compositions, and each part may be rewritten in its turn.
"""

from typing import cast

from mpnn.aggregate import Composed
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, is_composed, on_edges


class ComposedInParts(Rewrite):
    """Under attention the weights are computed once for all parts, so this is about plain aggregation alone."""

    NAME = "parts one by one"
    SERVES = ANYWHERE | AGGREGATES | on_edges("bias") | {"no score", "unnormalized", "aggregate of parts"}
    SERVES |= {"own aggregate", "keep_accumulate_dtype"}
    same_work = True

    def applies(self, round: Round) -> bool:
        reduce = round.reduce
        return is_composed(reduce) and bool(cast(Composed, reduce).parts) and round.normalize == "none"

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        reduce = cast(Composed, round.reduce)
        graph = round.graph
        # A composition may subtract, as variances do, and 16 bits would lose the difference.
        *before, last = (round.with_fields(reduce=part, keep_accumulate_dtype=True) for part in reduce.parts)
        results = [run(part).out for part in before]

        def finish(result: Result) -> Result:
            degree = graph.cached("degree", graph.degree)
            # Aggregators take nodes in the first dimension, rounds have the batch before them.
            parts = [x.movedim(-3, 0) for x in (*results, result.out)]
            return Result(reduce.compose(parts, degree).movedim(0, -3).to(round.result_dtype))

        return last, finish
