"""XLNet (Yang et al. 2019): predicts each token from those before it in a random order, so that it learns bidirectional
context.

topology   permutation(order)                      content stream h: the tokens up to i in the order
           permutation(order) - identity()         query stream g: the same without i; sources are h
           complete()                              at inference, content stream only
attention  RelativeDotProduct(dim, heads, segments=True)
aggregate  "sum"                                   m_i = W_O || _h sum_j w_ij W_V h_j
update     PostNorm(dim, FeedForward(dim))         z   = norm(x + m),  y = norm'(z + ffn(z))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import batch, complete, identity, permutation
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.blocks import embed, require_batch, transformer_update
from mpnn.models.layers.losses import token_loss
from mpnn.models.layers.relative import PositionOffset, RelativeDotProduct
from mpnn.models.saving import Model
from mpnn.update import PostNorm


@dataclass(frozen=True)
class XLNetConfig:
    """Configuration of an XLNet. The defaults are those of XLNet-large.

    vocabulary: number of tokens. dim, hidden: widths of the model and of its feed-forward network. activation: a name
    in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm. furthest: larger offsets are clamped to it; None: no
    limit.
    """

    vocabulary: int = 32000
    dim: int = 1024
    layers: int = 24
    heads: int = 16
    hidden: int = 4096
    activation: str = "gelu"
    eps: float = 1e-12
    dropout: float = 0.1
    furthest: int | None = None


@dataclass(frozen=True, eq=False)
class Streams:
    """Outputs of both streams of an XLNet for a batch of sentences.

    content: embeddings and the output of each layer, [B, N, dim] each. query: the same for the query stream,
    [B, P, dim] each; empty without a query stream. weights: attention weights of each layer, [B, H, N, S] of the
    content stream over S sources, and [B, H, P, S] of the query stream if there is one; empty unless requested.
    """

    content: tuple[Tensor, ...]
    query: tuple[Tensor, ...]
    weights: tuple[tuple[Tensor, ...], ...]

    @property
    def last(self) -> Tensor:
        """The last output of the query stream, or of the content stream without a query stream."""
        return (self.query or self.content)[-1]


class XLNet(Model):
    """XLNet (Yang et al. 2019, sections 2.2 to 2.5). Both streams run through the same layers:

        h_i <- layer(x = h_i, over permutation(order), source = h)                    h_i = W_token[token_i] at first
        g_i <- layer(x = g_i, over permutation(order) - identity(), source = h)       g_i = w, the same for all
        p(token_i | tokens before it in the order) = softmax(g_i W_token^T + b)

    g_i depends on the position of token i and on the tokens before it in the order, but not on token i itself.

    Args:
        config: sizes and options.
        head: whether to add the bias b, which `predict` needs.
    """

    def __init__(self, config: XLNetConfig, *, head: bool = True) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.token = nn.Embedding(config.vocabulary, dim)
        self.unknown = nn.Parameter(torch.empty(dim))
        self.dropout = Dropout(config.dropout)

        def layer() -> MessagePassing:
            update = transformer_update(PostNorm, config, ffn_dropout=config.dropout)
            attention = RelativeDotProduct(
                dim, config.heads, dropout=config.dropout, segments=True, furthest=config.furthest
            )
            return MessagePassing(complete(), "sum", update, attention)

        self.layers = nn.ModuleList(layer() for _ in range(config.layers))
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if head else None
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 or name == "unknown":
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, types: Tensor | None = None, graph: Topology | None = None) -> Tensor:
        """Encodes a batch of sentences with the content stream.

        Args:
            tokens: int64 [B, N].
            types: int64 [B, N], the segment of each token; default: no segments.
            graph: topology of the attention; default: complete().

        Returns:
            float [B, N, dim].
        """
        content = self._bind(complete() if graph is None else graph, tokens, types)
        return self.streams(self.embed(tokens), content).last

    def predict(self, tokens: Tensor, order: Sequence[int] | Tensor, types: Tensor | None = None) -> Tensor:
        """Returns logits [B, N, vocabulary] of each token, given the tokens before it in the order.

        The first token in the order is predicted without context.

        Args:
            tokens, types: as for `forward`.
            order: a permutation of 0 to N - 1.

        Raises:
            ValueError: if the model was created with head=False.
        """
        if self.bias is None:
            raise ValueError("predict needs the bias of the head; create the model with head=True")
        in_order = permutation(order)
        content, query = (self._bind(graph, tokens, types) for graph in (in_order, in_order - identity()))
        streams = self.streams(self.embed(tokens), content, self.queries(*tokens.shape), query)
        return F.linear(self.dropout(streams.last), self.token.weight, self.bias)

    def loss(
        self,
        tokens: Tensor,
        order: Sequence[int] | Tensor | None = None,
        types: Tensor | None = None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats of the `last` tokens in the order.

        Args:
            tokens, types: as for `forward`.
            order: a permutation of 0 to N - 1; default: a random one.
            last: number of predicted tokens (partial prediction, section 2.3 of the paper); default: all.
        """
        order = torch.randperm(tokens.shape[1]) if order is None else torch.as_tensor(order)
        predicted = order[max(0, len(order) - (len(order) if last is None else last)) :].to(tokens.device)
        logits = self.predict(tokens, order, types)
        return token_loss(logits[:, predicted], tokens[:, predicted])

    def embed(self, tokens: Tensor) -> Tensor:
        """Returns the initial content stream [B, N, dim] of tokens int64 [B, N], or of vectors [B, N, dim]."""
        return self.dropout(embed(self.token, tokens))

    def queries(self, sentences: int, each: int) -> Tensor:
        """Returns the initial query stream, [sentences, each, dim]."""
        return self.dropout(self.unknown.expand(sentences, each, -1))

    def streams(
        self,
        h: Tensor,
        content: Graph,
        g: Tensor | None = None,
        query: Graph | None = None,
        memory: Sequence[Tensor] | None = None,
        *,
        return_weights: bool = False,
    ) -> Streams:
        """Runs both streams through all layers.

        Each graph is over one sentence and shared by the batch, or over the concatenated nodes of all sentences.

        Args:
            h: initial content stream, [B, N, dim].
            content: graph of the content stream, N destinations and S sources.
            g: initial query stream, [B, P, dim], or None.
            query: graph of the query stream, P destinations and S sources.
            memory: for each layer, cached states [B, S - N, dim] that precede h among the sources.
            return_weights: also return attention weights.
        """
        contents, queries, weights = [h], [] if g is None else [g], []
        for k, layer in enumerate(self.layers):
            assert isinstance(layer, MessagePassing)
            source = h if memory is None else torch.cat([memory[k], h], 1)
            query_weights = []
            if g is not None:
                g, matrix = _round(layer, g, source, query, return_weights)
                queries.append(g)
                query_weights.append(matrix)
            h, matrix = _round(layer, h, source, content, return_weights)
            contents.append(h)
            weights.append((matrix, *query_weights))
        return Streams(tuple(contents), tuple(queries), tuple(weights) if return_weights else ())

    def _bind(self, graph: Topology, tokens: Tensor, types: Tensor | None) -> Graph:
        """Returns the graph of one sentence. With `types`, returns that of all sentences, with relations by segment."""
        require_batch(tokens)
        bound = graph.bind(tokens.shape[1]).to(tokens.device)
        if types is None:
            return bound
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(types)
        nodes = torch.stack([positions, types]).flatten(1)
        return batch([bound] * len(tokens)).with_relation(PositionOffset(tokens.shape[1] - 1, nodes, nodes))


def _round(
    layer: MessagePassing, x: Tensor, source: Tensor, graph: Graph | None, return_weights: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output of a layer for x [B, P, dim] and sources [B, S, dim], and its attention weights [B, H, P, S].
    Without `return_weights`, these are an empty tensor."""
    assert graph is not None
    concatenated = graph.num_dst == x.shape[0] * x.shape[1]
    nodes, sources = (x.flatten(0, 1), source.flatten(0, 1)) if concatenated else (x, source)
    if not return_weights:
        return layer(nodes, graph, sources).view_as(x), x.new_empty(0)
    y, weights = layer(nodes, graph, sources, return_weights=True)
    src, dst = graph.edge_index
    matrix = weights.new_zeros(*nodes.shape[:-1], source.shape[1], weights.shape[-1])
    matrix[..., dst, src % source.shape[1], :] = weights
    return y.view_as(x), matrix.view(*x.shape[:2], *matrix.shape[-2:]).movedim(-1, 1)
