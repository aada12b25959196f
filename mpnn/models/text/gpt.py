"""GPT and GPT-2: transformers over a causal graph that predict the next token.

topology   causal()                                      or any without edges from later nodes: causal() & window(64)
attention  DotProduct(dim, heads)                        w_ij = softmax_j( <W_Q h_i, W_K h_j> / sqrt(D) )
aggregate  "sum"                                         m_i  = W_O || _h sum_j w_ij W_V h_j
update     GPT-2: PreNorm(dim, FeedForward(dim))         h = norm(x),  z = x + m,  y = z + ffn(norm'(z))
           GPT: PostNorm(dim, FeedForward(dim))          h = x,  z = norm(x + m),  y = norm'(z + ffn(z))
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from mpnn import MessagePassing, Topology
from mpnn.aggregate import Name as Aggregate
from mpnn.attention import AdditiveV2, Attention, DeltaRule, DotProduct, GatedLinear, Kernel, Retention, StateSpace
from mpnn.graph.registry import unknown
from mpnn.graphs import causal
from mpnn.models.layers.blocks import AnyGraph, transformer_update
from mpnn.models.layers.decoder import Decoder, causal_topologies
from mpnn.update import PostNorm, PreNorm, Update
from mpnn.update.dropout import Dropout

CAUSAL = causal()


@dataclass(frozen=True)
class GPTConfig:
    """Configuration of a GPT. The defaults are those of the small GPT-2.

    vocabulary: number of tokens. dim: width of the model. hidden: width of the feed-forward network; None: 4 * dim.
    context: number of learned positions, which is the maximum sequence length. activation: a name in
    `blocks.ACTIVATIONS`. norm_first: True for pre-norm layers and a final LayerNorm (GPT-2), False for post-norm layers
    (GPT). eps: added to variances by LayerNorm. dropout: of the outputs of attention and feed-forward network.
    embedding_dropout, attention_dropout: of embeddings and of attention weights.
    """

    vocabulary: int = 50257
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int | None = None
    context: int = 1024
    activation: str = "gelu_new"
    norm_first: bool = True
    eps: float = 1e-5
    dropout: float = 0.1
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1


class CausalTransformer(Decoder):
    """Decoder-only language model with learned positions: GPT (Radford et al. 2018) if `config.norm_first` is False,
    GPT-2 (Radford et al. 2019) if it is True. The output layer shares its weight with the token embedding.

    Args:
        config: sizes and options.
        graph: topology of the attention, for every length up to `config.context`, or a `Graph` of that many nodes or
            fewer: one for all layers, or one per layer. A prefix of the nodes of a graph has the edges among them.

    Raises:
        ValueError: if a node attends to a later one when a topology is bound to `config.context` nodes.
    """

    def __init__(self, config: GPTConfig, graph: AnyGraph | Sequence[AnyGraph] = CAUSAL) -> None:
        super().__init__()
        graphs = causal_topologies(graph, config.layers, config.context)
        dim = config.dim
        norm = partial(nn.LayerNorm, eps=config.eps)
        self.context = config.context
        self.token = nn.Embedding(config.vocabulary, dim)
        self.position = nn.Embedding(config.context, dim)
        self.dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(self.layer(config, topology) for topology in graphs)
        self.norm = norm(dim) if config.norm_first else nn.Identity()
        self.head = None
        self._initialize()

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        """Returns one layer. Subclasses with a different attention override this."""
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update(config), attention)

    def _initialize(self) -> None:
        """Initializes as GPT-2. Weights are normal with std 0.02, or 0.02 / sqrt(2 * layers) for maps that write to
        the residual stream. Biases are zero."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                residual = name.endswith(("attention.to_out.weight", "update.ffn.3.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * len(self.layers)) ** 0.5 if residual else 0.02)


class GPT2(CausalTransformer):
    """A model with a published configuration: `GPT2(GPTConfig())` is the small GPT-2."""


class GPT(CausalTransformer):
    """A GPT described by its sizes: pre-norm layers, GELU, one dropout rate.

    `GPT(..., graph=causal() & window(64))` is the same model with sliding-window attention. Its weights are compatible.

    Args:
        vocabulary: number of tokens.
        dim: width of the model.
        heads: number of heads; must divide `dim`.
        layers: number of layers.
        graph: topology of the attention, for every length up to `context`, or a `Graph`: one, or one per layer.
        context: number of learned positions, which is the maximum sequence length.
        dropout: of embeddings, attention weights, and the outputs of attention and feed-forward network.
        attention: a name in `ATTENTIONS`. Only "dot" and "additive" have dropout of attention weights: the others
            compute none. Recurrences ("retention", "gated", "state_space", "delta") need the graph `causal()`.
        aggregate: how the weighted messages of a node are combined: "sum" or the name of any other aggregator.

    Raises:
        ValueError: if a node attends to a later one when `graph` is bound to `context` nodes, or there is no such
            attention.
    """

    def __init__(
        self,
        vocabulary: int,
        dim: int,
        heads: int,
        layers: int,
        graph: AnyGraph | Sequence[AnyGraph] = CAUSAL,
        *,
        context: int = 256,
        dropout: float = 0.0,
        attention: str = "dot",
        aggregate: Aggregate = "sum",
    ) -> None:
        if attention not in ATTENTIONS:
            raise ValueError(unknown("attention of GPT", attention, ATTENTIONS))
        config = _Config(
            vocabulary,
            dim,
            layers,
            heads,
            context=context,
            activation="gelu",
            dropout=dropout,
            embedding_dropout=dropout,
            attention_dropout=dropout,
            attention=attention,
            aggregate=aggregate,
        )
        super().__init__(config, graph)

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        assert isinstance(config, _Config)
        return MessagePassing(graph, config.aggregate, update(config), ATTENTIONS[config.attention](config))


@dataclass(frozen=True)
class _Config(GPTConfig):
    attention: str = "dot"
    aggregate: Aggregate = "sum"


ATTENTIONS: dict[str, Callable[[GPTConfig], Attention]] = {
    "dot": lambda config: DotProduct(config.dim, config.heads, dropout=config.attention_dropout),
    "additive": lambda config: AdditiveV2(
        config.dim, config.dim // config.heads, config.heads, dropout=config.attention_dropout
    ),
    "linear": lambda config: Kernel(config.dim, config.heads, features="elu"),
    "retention": lambda config: Retention(config.dim, config.heads),
    "gated": lambda config: GatedLinear(config.dim, config.heads),
    "state_space": lambda config: StateSpace(config.dim, config.heads, state=config.dim // config.heads),
    "delta": lambda config: DeltaRule(config.dim, config.heads),
}
"""Attention of `GPT` by name: Vaswani et al. 2017; Brody et al. 2022; Katharopoulos et al. 2020; and recurrences (Sun
et al. 2023; Yang et al. 2023; Dao and Gu 2024; Yang et al. 2024)."""


def update(config: GPTConfig) -> Update:
    """Returns the update of a layer: PreNorm (GPT-2) or PostNorm (GPT) around a feed-forward network."""
    return transformer_update(PreNorm if config.norm_first else PostNorm, config)
