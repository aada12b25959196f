"""Llama (Touvron et al. 2023) and Mistral (Jiang et al. 2023): GPT with rotary positions and shared keys and values.

topology   causal()                                             Mistral: causal() & window(4095), itself and 4095 before
attention  DotProduct(dim, heads, kv_heads=, position=Rotary)   w_ij = softmax_j( <R_i W_Q h_i, R_j W_K h_j> / sqrt(D) )
aggregate  "sum"                                                m_i  = W_O || _h sum_j w_ij W_V h_j
update     PreNorm(dim, GatedFeedForward, norm=RMSNorm)         h = norm(x),  z = x + m,  y = z + ffn(norm'(z))
           ffn(x) = W_out ( silu(W_gate x) * W_in x )
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn.attention import DotProduct
from mpnn.dropout import Dropout
from mpnn.graphs import causal
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import ACTIVATIONS, one_each
from mpnn.models.parts.decoder import Decoder
from mpnn.models.parts.generation import refuse_the_future
from mpnn.position import Llama3Rotary, Rotary
from mpnn.topology import Topology
from mpnn.update import GatedFeedForward, PreNorm

CAUSAL = causal()


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama; the defaults are those of Llama 2 with 7 billion weights.

    vocabulary: number of tokens. dim, hidden: widths of the model and of its feed-forward network. kv_heads: heads of
    keys and values, as many as `heads` where it is None. head_dim: dim / heads where it is None. context: the longest
    sequence. base: of the rotary positions. factor: how many times their reach is stretched; when they were trained on
    `trained_context` tokens, as Llama 3.1 does with `slow` and `fast`, see `Llama3Rotary`; else all alike. activation:
    a name in `blocks.ACTIVATIONS`. eps: added to mean squares by RMSNorm. bias, ffn_bias: whether the maps of attention
    and of the feed-forward network have biases. tied: whether the output's map is the token embedding.
    """

    vocabulary: int = 32000
    dim: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None
    head_dim: int | None = None
    hidden: int = 11008
    context: int = 4096
    base: float = 10000.0
    factor: float = 1.0
    trained_context: int | None = None
    slow: float = 1.0
    fast: float = 4.0
    activation: str = "silu"
    eps: float = 1e-5
    bias: bool = False
    ffn_bias: bool = False
    attention_dropout: float = 0.0
    tied: bool = False

    def rotary(self) -> Rotary:
        """The positions of a layer."""
        head_dim = self.dim // self.heads if self.head_dim is None else self.head_dim
        if self.trained_context is None:
            return Rotary(head_dim, self.base, self.factor)
        return Llama3Rotary(head_dim, self.base, self.factor, self.slow, self.fast, self.trained_context)


class Llama(Decoder):
    """A decoder-only language model over rotary positions.

    `Llama(config, causal() & window(4095))` is Mistral, whose tokens hear themselves and the 4,095 before them.

    Args:
        graph: who hears whom, for every length up to the context; one for all layers, or one for each.

    Raises:
        ValueError: over that many nodes, a node of the graph hears a later one.
    """

    def __init__(self, config: LlamaConfig, graph: Topology | Sequence[Topology] = CAUSAL) -> None:
        super().__init__()
        graphs = one_each(graph, config.layers)
        for topology in set(graphs):
            refuse_the_future(topology, config.context)
        dim, norm = config.dim, partial(nn.RMSNorm, eps=config.eps)
        self.context = config.context
        self.token = nn.Embedding(config.vocabulary, dim)
        self.position = None
        self.dropout = Dropout(0.0)

        def layer(topology: Topology) -> MessagePassing:
            ffn = GatedFeedForward(dim, config.hidden, ACTIVATIONS[config.activation], bias=config.ffn_bias)
            attention = DotProduct(
                dim,
                config.heads,
                kv_heads=config.kv_heads,
                head_dim=config.head_dim,
                position=config.rotary(),
                bias=config.bias,
                dropout=config.attention_dropout,
            )
            return MessagePassing(topology, "sum", PreNorm(dim, ffn, norm=norm), attention)

        self.layers = nn.ModuleList(layer(topology) for topology in graphs)
        self.norm = norm(dim)
        self.head = None if config.tied else nn.Linear(dim, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
