"""Llama (Touvron et al. 2023) and Mistral (Jiang et al. 2023): GPT with rotary positions and grouped-query attention.

topology   causal()                                             Mistral: causal() & window(4095)
attention  DotProduct(dim, heads, kv_heads=, position=Rotary)   w_ij = softmax_j( <R_i W_Q h_i, R_j W_K h_j> / sqrt(D) )
aggregate  "sum"                                                m_i  = W_O || _h sum_j w_ij W_V h_j
update     PreNorm(dim, GatedFeedForward, norm=RMSNorm)         h = norm(x),  z = x + m,  y = z + ffn(norm'(z))
           ffn(x) = W_out ( silu(W_gate x) * W_in x )
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn import MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.graphs import causal
from mpnn.models.layers.blocks import ACTIVATIONS, AnyGraph
from mpnn.models.layers.decoder import PlainDecoder, causal_topologies
from mpnn.position import Llama3Rotary, Rotary
from mpnn.update import GatedFeedForward, PreNorm

CAUSAL = causal()


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a Llama. The defaults are those of Llama 2 7B.

    vocabulary: number of tokens. dim, hidden: widths of the model and of its feed-forward network. kv_heads: number of
    key and value heads; None: `heads`. head_dim: None: dim / heads. context: maximum sequence length. base: base of the
    rotary frequencies. factor: positions are divided by it; with `trained_context`, only those of low frequencies, as
    in Llama 3.1 (see `Llama3Rotary`). trained_context, slow, fast: arguments of `Llama3Rotary`. activation: a name in
    `blocks.ACTIVATIONS`. eps: added to mean squares by RMSNorm. bias: whether attention has biases. tied: whether the
    output layer shares its weight with the token embedding.
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
    attention_dropout: float = 0.0
    tied: bool = False

    def rotary(self) -> Rotary:
        """Returns the rotary positions of a layer."""
        head_dim = self.dim // self.heads if self.head_dim is None else self.head_dim
        if self.trained_context is None:
            return Rotary(head_dim, self.base, self.factor)
        return Llama3Rotary(head_dim, self.base, self.factor, self.slow, self.fast, self.trained_context)


class Llama(PlainDecoder):
    """Decoder-only language model with rotary positions.

    `Llama(config, causal() & window(4095))` is Mistral: each token attends to itself and to the 4,095 tokens before it.

    Args:
        config: sizes and options.
        graph: topology of the attention, for every length up to `config.context`: one for all layers, or one per layer.

    Raises:
        ValueError: if a node attends to a later one when a topology is bound to `config.context` nodes.
    """

    def __init__(self, config: LlamaConfig, graph: AnyGraph | Sequence[AnyGraph] = CAUSAL) -> None:
        dim = config.dim
        norm = partial(nn.RMSNorm, eps=config.eps)

        def layer(topology: Topology) -> MessagePassing:
            ffn = GatedFeedForward(dim, config.hidden, ACTIVATIONS[config.activation])
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

        graphs = causal_topologies(graph, config.layers, config.context)
        super().__init__(config, map(layer, graphs), norm)
