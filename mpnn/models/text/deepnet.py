"""DeepNet (Wang et al. 2022): transformers of hundreds of layers, stable by scaled residuals and small initial weights.

topology   causal()
attention  DotProduct(dim, heads)                          initial W_V and W_O are scaled by beta
aggregate  "sum"
update     DeepNorm(dim, FeedForward(dim), alpha=alpha)    z = norm(alpha x + m),  y = norm'(alpha z + ffn(z))
"""

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from mpnn import MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.models.layers.blocks import AnyGraph, transformer_update
from mpnn.models.text.gpt import CAUSAL, CausalTransformer, GPTConfig
from mpnn.update import MLP, DeepNorm


class Scales(NamedTuple):
    """alpha: factor of the residual connection, `norm(alpha x + m)`. beta: gain of the initial weights."""

    alpha: float
    beta: float


def scales(layers: int) -> Scales:
    """Returns alpha = (2 N)^(1/4) and beta = (8 N)^(-1/4) of an encoder or a decoder of N layers (Wang et al. 2022,
    figure 2)."""
    return Scales((2 * layers) ** 0.25, (8 * layers) ** -0.25)


def initialize(layer: MessagePassing, beta: float) -> None:
    """Initializes a layer with Xavier-normal weights and zero biases (figure 2 of the paper).

    The gain is beta for the value map, the output map and the feed-forward network, and 1 for queries and keys.
    """
    assert isinstance(layer.attention, DotProduct)
    ffn = getattr(layer.update, "ffn", None)
    scaled: list[nn.Linear] = [layer.attention.to_value, layer.attention.to_out]
    scaled += [part for part in ffn if isinstance(part, nn.Linear)] if isinstance(ffn, MLP) else []
    for maps, gain in ((scaled, beta), ([layer.attention.to_query, layer.attention.to_key], 1.0)):
        for linear in maps:
            nn.init.xavier_normal_(linear.weight, gain)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class DeepNet(CausalTransformer):
    """Deep decoder-only language model (Wang et al. 2022): GPT with DeepNorm and its initial weights.

    Args:
        config: sizes and options. `norm_first` is ignored.
        graph: as for `CausalTransformer`.
    """

    def __init__(self, config: GPTConfig, graph: AnyGraph = CAUSAL) -> None:
        super().__init__(replace(config, norm_first=False), graph)

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        update = transformer_update(DeepNorm, config, alpha=scales(config.layers).alpha)
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update, attention)

    def _initialize(self) -> None:
        super()._initialize()
        for layer in self.layers:
            assert isinstance(layer, MessagePassing)
            initialize(layer, scales(len(self.layers)).beta)
