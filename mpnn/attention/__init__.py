"""Attention specs: how destinations weight their sources, and which values the sources send."""

from mpnn.attention.additive import Additive as Additive, AdditiveV2 as AdditiveV2
from mpnn.attention.degree import Degree as Degree, degree_weights as degree_weights
from mpnn.attention.dot_product import DotProduct as DotProduct
from mpnn.attention.gaussian import Gaussian as Gaussian, Near as Near
from mpnn.attention.kernel import Kernel as Kernel
from mpnn.attention.messages import (
    EdgeFilter as EdgeFilter,
    EdgeMessage as EdgeMessage,
    EdgeWeight as EdgeWeight,
    Mapped as Mapped,
    Message as Message,
)
from mpnn.attention.recurrent import (
    DeltaRule as DeltaRule,
    GatedLinear as GatedLinear,
    Recurrent as Recurrent,
    Retention as Retention,
    ShortConvolution as ShortConvolution,
    StateSpace as StateSpace,
)
from mpnn.attention.spec import Attention as Attention, KeyValue as KeyValue
from mpnn.attention.topk import BlockTopK as BlockTopK, TopK as TopK
from mpnn.attention.typed import Typed as Typed, TypedAdditive as TypedAdditive
