"""DeepNet: transformers of hundreds of layers, by how much a layer keeps and how small it begins.

topology   causal()
attention  DotProduct(dim, heads)                          W_V and W_O begin smaller, by beta
aggregate  "sum"
update     DeepNorm(dim, FeedForward(dim), alpha=alpha)    z = norm(alpha x + m),  y = norm'(alpha z + ffn(z))
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from torch import nn

from mpnn.attention import DotProduct
from mpnn.message_passing import MessagePassing
from mpnn.models.gpt import CAUSAL, GPT2, GPTConfig
from mpnn.models.parts.blocks import updated_by
from mpnn.topology import Topology
from mpnn.update import MLP, DeepNorm


class Scales(NamedTuple):
    """alpha: how much of itself a node keeps, `norm(alpha x + m)`. beta: the gain of the initial weights."""

    alpha: float
    beta: float


def scales(layers: int) -> Scales:
    """Those of an encoder or a decoder alone (Wang et al. 2022, figure 2): (2 N)^(1/4) and (8 N)^(-1/4)."""
    return Scales((2 * layers) ** 0.25, (8 * layers) ** -0.25)


def scales_of_both(encoder: int, decoder: int) -> tuple[Scales, Scales]:
    """Those of an encoder of N and a decoder of M layers that hears it (figure 2): 0.81 (N^4 M)^(1/16) and
    0.87 (N^4 M)^(-1/16); (3 M)^(1/4) and (12 M)^(-1/4)."""
    product = encoder**4 * decoder
    ours = Scales(0.81 * product ** (1 / 16), 0.87 * product ** (-1 / 16))
    return ours, Scales((3 * decoder) ** 0.25, (12 * decoder) ** -0.25)


def initialize(layer: MessagePassing, beta: float) -> None:
    """Xavier's normal weights (the paper's figure 2), those that the residual stream is added from smaller by beta:
    values, the output map and the feed-forward network. Biases begin at zero."""
    assert isinstance(layer.attention, DotProduct)
    ffn = getattr(layer.update, "ffn", None)
    small = [layer.attention.to_value, layer.attention.to_out]
    small += [part for part in ffn if isinstance(part, nn.Linear)] if isinstance(ffn, MLP) else []
    for maps, gain in ((small, beta), ([layer.attention.to_query, layer.attention.to_key], 1.0)):
        for linear in maps:
            nn.init.xavier_normal_(linear.weight, gain)
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)


class DeepNet(GPT2):
    """A language model of many layers (Wang et al. 2022): GPT, with DeepNorm and its initial weights.

    Args:
        config: its sizes; `norm_first` does not matter. graph: as for `GPT2`.
    """

    def __init__(self, config: GPTConfig, graph: Topology = CAUSAL) -> None:
        super().__init__(replace(config, norm_first=False), graph)

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        update = updated_by(DeepNorm, config, alpha=scales(config.layers).alpha)
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update, attention)

    def _initialize(self) -> None:
        super()._initialize()
        for layer in self.layers:
            assert isinstance(layer, MessagePassing)
            initialize(layer, scales(len(self.layers)).beta)
