"""BERT (Devlin et al. 2019): every token attends to all tokens of its sentence.

topology   complete()                              or any other: causal(), window(16), longformer(32, globals=1), ...
attention  DotProduct(dim, heads)                  w_ij = softmax_j( <W_Q x_i, W_K x_j> / sqrt(D) )
aggregate  "sum"                                   m_i  = W_O || _h sum_j w_ij W_V x_j
update     PostNorm(dim, FeedForward(dim))         z    = norm(x + m),  y = norm'(z + ffn(z))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpnn import MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.graph.sharding import active, node_numbers
from mpnn.graphs import complete
from mpnn.models.layers.blocks import (
    AnyGraph,
    Embeddings,
    init_bert_weights,
    run_layers,
    topology_per_layer,
    transformer_update,
)
from mpnn.models.layers.packing import Packing, token_mask
from mpnn.models.saving import Model
from mpnn.update import PostNorm
from mpnn.update.maps import Linear


@dataclass(frozen=True)
class BertConfig:
    """Configuration of a BERT. The defaults are those of BERT-base.

    vocabulary, types: numbers of tokens and of token types. dim, hidden: widths of the model and of its feed-forward
    network. context: number of learned positions, which is the maximum sentence length. pad: the token whose embedding
    is not trained, or None. after_pad: positions skip pad tokens and start at pad + 1 (RoBERTa, Liu et al. 2019).
    activation: a name in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm.
    """

    vocabulary: int = 30522
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    context: int = 512
    types: int = 2
    pad: int | None = 0
    activation: str = "gelu"
    eps: float = 1e-12
    dropout: float = 0.1
    attention_dropout: float = 0.1
    after_pad: bool = False

    @property
    def first_position(self) -> int:
        """The row of the position table that the first token uses."""
        if self.after_pad and self.pad is None:
            raise ValueError("after_pad starts positions at pad + 1, so the configuration needs a pad")
        return self.pad + 1 if self.after_pad and self.pad is not None else 0


@dataclass(frozen=True, eq=False)
class EncoderOutput:
    """Output of an encoder for a batch of sentences; zeros at padding.

    last: output of the last layer, [B, N, dim]. pooled: output of the pooler, [B, dim]; None without a pooler, and in
    `mpnn.distributed.sharded` on processes that do not have the first token. weights: attention weights of each layer,
    [B, H, N, N].
    """

    last: Tensor
    pooled: Tensor | None
    weights: tuple[Tensor, ...] | None


class Bert(Model):
    """BERT over any topology. Subclasses with a different attention override `layer` and `graphs`.

    Args:
        config: sizes and options.
        graph: topology of the attention, or a `Graph` of tokens: one for all layers, or one per layer; default:
            complete().
        pooler: whether to add a linear map and tanh on the first token of each sentence.
    """

    def __init__(
        self, config: BertConfig, graph: AnyGraph | Sequence[AnyGraph] | None = None, *, pooler: bool = True
    ) -> None:
        super().__init__()
        dim = config.dim
        norm = partial(nn.LayerNorm, eps=config.eps)
        self.config = config
        self.embeddings = Embeddings(
            config.vocabulary,
            config.context,
            config.types,
            dim,
            pad=config.pad,
            norm=norm,
            dropout=config.dropout,
            first=config.first_position,
        )
        topologies = topology_per_layer(complete() if graph is None else graph, config.layers)
        self.layers = nn.ModuleList(self.layer(config, topology) for topology in topologies)
        self.pooler = nn.Sequential(Linear(dim, dim), nn.Tanh()) if pooler else None
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                init_bert_weights(part)

    @staticmethod
    def layer(config: BertConfig, graph: Topology) -> nn.Module:
        """Returns one layer. It is called with x and its entry of `graphs`."""
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update(config), attention)

    def packing(self, token_mask: Tensor) -> Packing:
        """Returns the packing of a padded batch. token_mask: bool [B, N], True at tokens."""
        return Packing.of(token_mask)

    def graphs(self, packing: Packing) -> list[Any]:
        """Returns the graph of each layer over the packed tokens."""
        return [packing.bind(layer.graph) for layer in self.layers if isinstance(layer, MessagePassing)]

    def forward(
        self,
        tokens: Tensor,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        graph: AnyGraph | Sequence[AnyGraph] | None = None,
        lengths: Sequence[int] | None = None,
        return_weights: bool = False,
    ) -> EncoderOutput:
        """Encodes a batch of sentences.

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] that replace the token embeddings.
            types: int64 [B, N]; default: 0.
            positions: int64 [B, N], rows of the position table; default: counted from `config.first_position`.
            padding_mask: bool [B, N], True at padding; default: no padding. Padding is not computed and not attended
                to.
            graph: replaces the topology of every layer in this call: a topology or a graph for all sentences, or a list
                with one for each sentence. Node k of a graph is the k-th token of its sentence.
            lengths: lengths of the documents packed in every row; they sum to N. Positions restart in each document,
                and no token attends to another document. `pooled` then has one vector per document,
                [B, documents, dim]. Cannot be combined with `padding_mask`.
            return_weights: also return the attention weights of every layer.

        Raises:
            ValueError: if both `padding_mask` and `lengths` are given, or if nodes are divided over processes
                (`mpnn.distributed`) and `after_pad` needs `positions`.
        """
        each: Any = None
        if isinstance(graph, Sequence):
            if lengths is not None:
                raise ValueError("a list of graphs has one for each sentence, and lengths pack several in a row")
            packing, each = Packing.each(graph, token_mask(tokens, padding_mask))
        elif padding_mask is None or lengths is not None:
            packing = Packing.of_tokens(tokens, padding_mask, lengths)
        else:
            packing = self.packing(token_mask(tokens, padding_mask))
        if positions is None and packing.documents is not None:
            positions = torch.cat([self.positions(part) for part in tokens.split(packing.documents, 1)], 1)
        if graph is None:
            return self.encode(packing, self.graphs(packing), tokens, types, positions, return_weights)
        bound = each if isinstance(graph, Sequence) else packing.bind(graph)
        graphs = [bound] * len(self.layers)
        return self.encode(packing, graphs, tokens, types, positions, return_weights)

    def encode(
        self,
        packing: Packing,
        graphs: Sequence[Any],
        tokens: Tensor,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        return_weights: bool = False,
    ) -> EncoderOutput:
        """Runs `forward` with one graph per layer over the packed tokens."""
        types = torch.zeros_like(packing.token_mask, dtype=torch.int64) if types is None else types
        positions = self.positions(tokens) if positions is None else positions
        x = self.embeddings(packing.pack(tokens), packing.pack(positions), packing.pack(types))
        x, weights = run_layers(self.layers, graphs, x, return_weights=return_weights)
        last = packing.unpack(x)
        has_first = active() is None or 0 in node_numbers(last.shape[1])
        return EncoderOutput(
            last,
            self.pooler(packing.first(last)) if self.pooler is not None and has_first else None,
            tuple(map(packing.unpack_weights, weights, graphs)) if return_weights else None,
        )

    def positions(self, tokens: Tensor) -> Tensor:
        """Returns the row of each token in the position table, int64 [B, N].

        With `after_pad`, positions count only tokens other than pads, and pads use the row before the first position.
        """
        first = self.config.first_position
        shape = tokens.shape[:2]
        if first and not tokens.is_floating_point():
            if active() is not None:
                raise ValueError("positions that skip pads count the tokens of all processes: pass positions")
            not_pad = tokens.ne(first - 1)
            return not_pad.cumsum(1) * not_pad + first - 1
        return (first + node_numbers(shape[1], tokens.device)).expand(shape)


def update(config: BertConfig) -> PostNorm:
    """Returns the update of a BERT layer: PostNorm around a feed-forward network."""
    return transformer_update(PostNorm, config)
