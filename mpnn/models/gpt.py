"""GPT and GPT-2: transformers over a causal graph that predict the next token.

topology   causal()                                      or any in which nobody hears the future: causal() & window(64)
attention  DotProduct(dim, heads)                        w_ij = softmax_j( <W_Q h_i, W_K h_j> / sqrt(D) )
aggregate  "sum"                                         m_i  = W_O || _h sum_j w_ij W_V h_j
update     GPT-2: PreNorm(dim, FeedForward(dim))         h = norm(x),  z = x + m,  y = z + ffn(norm'(z))
           GPT: PostNorm(dim, FeedForward(dim))          h = x,  z = norm(x + m),  y = norm'(z + ffn(z))
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
from mpnn.models.parts.blocks import one_each, updated_by
from mpnn.models.parts.decoder import Decoder
from mpnn.models.parts.generation import refuse_the_future
from mpnn.topology import Topology
from mpnn.update import PostNorm, PreNorm, Update

CAUSAL = causal()


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults are those of the small GPT-2.

    vocabulary: number of tokens. dim, hidden: widths of the model and of its feed-forward network, 4 * dim where it is
    None. context: number of learned positions, the longest sequence. activation: a name in `blocks.ACTIVATIONS`.
    norm_first: GPT-2's layers, whose last output is normed too; else GPT's. eps: added to variances by LayerNorm.
    scaled: whether scores are divided by sqrt(D); scaled_by_depth: whether also by the layer's number, the first's 1.
    dropout: of what the layers add; and of embeddings and attention weights, in training.
    """

    vocabulary: int = 50257
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int | None = None
    context: int = 1024
    activation: str = "gelu_new"
    norm_first: bool = True
    scaled: bool = True
    scaled_by_depth: bool = False
    eps: float = 1e-5
    dropout: float = 0.1
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1


class GPT2(Decoder):
    """A decoder-only language model over learned positions (Radford et al. 2018, GPT; 2019, GPT-2); the output's map
    is the token embedding.

    Args:
        graph: who hears whom, for every length up to the context; one for all layers, or one for each.

    Raises:
        ValueError: over that many nodes, a node of the graph hears a later one.
    """

    def __init__(self, config: GPTConfig, graph: Topology | Sequence[Topology] = CAUSAL) -> None:
        super().__init__()
        graphs = one_each(graph, config.layers)
        for topology in set(graphs):
            refuse_the_future(topology, config.context)
        dim, norm = config.dim, partial(nn.LayerNorm, eps=config.eps)
        self.context = config.context
        self.token = nn.Embedding(config.vocabulary, dim)
        self.position = nn.Embedding(config.context, dim)
        self.dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(self.layer(config, topology) for topology in graphs)
        for depth, layer in enumerate(self.layers, 1):
            if config.scaled_by_depth and isinstance(layer.attention, DotProduct):
                layer.attention.scale /= depth
        self.norm = norm(dim) if config.norm_first else nn.Identity()
        self.head = None
        self._initialize()

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        """One round; what differs in how a layer hears overrides it."""
        scale = None if config.scaled else 1.0
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout, scale=scale)
        return MessagePassing(graph, "sum", update(config), attention)

    def _initialize(self) -> None:
        """GPT-2's: small normal weights, smaller still where a layer adds to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                adds = name.endswith(("attention.to_out.weight", "update.ffn.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.layers)) ** 0.5 if adds else 0.02)


class GPT(GPT2):
    """GPT-2 of any size over any graph in which nobody hears the future.

    `GPT(..., graph=causal() & window(64))` is the same model with a sliding window, and with the same weights.

    Args:
        vocabulary: number of tokens. dim: width. heads: they divide `dim`. layers: their number.
        graph: who hears whom, for every length up to `context`.
        context: number of learned positions, the longest sequence.
        dropout: of embeddings, attention weights and what the layers add, in training.

    Raises:
        ValueError: over `context` nodes, a node of the graph hears a later one.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int,
        graph: Topology = CAUSAL,
        *,
        context: int = 256,
        dropout: float = 0.0,
    ) -> None:
        config = GPTConfig(
            vocabulary,
            dim,
            layers,
            heads,
            context=context,
            activation="gelu",
            dropout=dropout,
            embedding_dropout=dropout,
            attention_dropout=dropout,
        )
        super().__init__(config, graph)


def update(config: GPTConfig) -> Update:
    """What a token makes of its message: the second half of a layer."""
    return updated_by(PreNorm if config.norm_first else PostNorm, config)
