"""Results in the dtype of the arithmetic, of backends that round them to the dtype of the features: 16-bit features are
read as float32."""

from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.engine.rewrites.rewrite import Finish, Rewrite, Runner, work
from mpnn.round import Round
from mpnn.round.needs import AGGREGATES, ANYWHERE, DROPS, NORMALIZED, VALUES_OF_EDGES, WEIGHED
from mpnn.scores import Role


class WideFeatures(Rewrite):
    NAME = "features in float32"
    SERVES = ANYWHERE | WEIGHED | VALUES_OF_EDGES | DROPS | NORMALIZED | AGGREGATES
    SERVES |= {"softmax_dst", "sinks", "own aggregate", "aggregate of parts", "return_weights", "return_lse"}
    SERVES |= {"weights and lse", "keep_accumulate_dtype"}
    same_work = True

    def applies(self, round: Round) -> bool:
        return round.keep_accumulate_dtype and round.value.dtype != round.accumulate_dtype

    def estimate(self, round: Round) -> Estimate:
        numbers = float(sum(x.numel() for x in round.tensors))
        return work({"call": 1.0, "copied number": numbers}, round, numbers * round.accumulate_dtype.itemsize)

    def apply(self, round: Round, run: Runner) -> tuple[Round, Finish]:
        def wide(x: Tensor, name: str, role: Role) -> Tensor:
            # Integers are seeds and numbers of types.
            return x.to(round.accumulate_dtype) if x.is_floating_point() else x

        return round.map(wide), lambda result: result
