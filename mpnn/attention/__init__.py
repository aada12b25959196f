"""Attention specs: how destinations weight their sources, and which values the sources send."""

from mpnn.attention.additive import Additive, AdditiveV2
from mpnn.attention.choice import BlockTopK, TopK
from mpnn.attention.degree import Degree, degree_weights
from mpnn.attention.dot_product import DotProduct
from mpnn.attention.gaussian import Gaussian, Near
from mpnn.attention.kernel import Kernel
from mpnn.attention.messages import EdgeFilter, EdgeMessage, EdgeWeight, Mapped, Message
from mpnn.attention.recurrent import DeltaRule, GatedLinear, Recurrent, Retention, ShortConvolution, StateSpace
from mpnn.attention.spec import Attention, KeyValue
from mpnn.attention.typed import Typed, TypedAdditive

__all__ = [
    "Additive",
    "AdditiveV2",
    "Attention",
    "BlockTopK",
    "Degree",
    "DeltaRule",
    "DotProduct",
    "EdgeFilter",
    "EdgeMessage",
    "EdgeWeight",
    "GatedLinear",
    "Gaussian",
    "Kernel",
    "KeyValue",
    "Mapped",
    "Message",
    "Near",
    "Recurrent",
    "Retention",
    "ShortConvolution",
    "StateSpace",
    "TopK",
    "Typed",
    "TypedAdditive",
    "degree_weights",
]
