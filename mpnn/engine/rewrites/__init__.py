"""All that the engine knows about rounds that equal others: one ordered list, one file an entry.

`REWRITES` replace a round by others and take part in the plan: each competes by price with the backends that run the
round itself. `PREPARATIONS` (`prepare.py`) write a round in the words of backends and change neither its meaning nor
its graph. Nothing else changes a round on its way to a kernel.
"""

from mpnn.engine.rewrites.aggregator_in_two_rounds import AggregatorInTwoRounds
from mpnn.engine.rewrites.cliques_in_order import CliquesInOrder
from mpnn.engine.rewrites.composed_in_parts import ComposedInParts
from mpnn.engine.rewrites.fold_stacked import FoldStacked
from mpnn.engine.rewrites.mean_as_sum import MeanAsSum
from mpnn.engine.rewrites.rewrite import Rewrite
from mpnn.engine.rewrites.sets_in_one_row import SetsInOneRow
from mpnn.engine.rewrites.sinks_as_lse import SinksAsLse
from mpnn.engine.rewrites.softmax_dst import SoftmaxOverDestinations
from mpnn.engine.rewrites.weights_between import WeightsBetween
from mpnn.engine.rewrites.wide_features import WideFeatures

__all__ = ["IN_ORDER", "REWRITES", "Rewrite"]

IN_ORDER = CliquesInOrder()

REWRITES: tuple[Rewrite, ...] = (
    FoldStacked(), SetsInOneRow(), ComposedInParts(), MeanAsSum(), AggregatorInTwoRounds(), SoftmaxOverDestinations(),
    SinksAsLse(), WeightsBetween(), WideFeatures(), IN_ORDER,
)  # fmt: skip
