"""XLNet (Yang et al. 2019): predicts each token from those before it in a random order, so that it learns bidirectional
context.

topology   permutation(order)                      content stream h: the tokens up to i in the order
           permutation(order) - identity()         query stream g: the same without i; sources are h
           complete()                              at inference, content stream only
attention  RelativeDotProduct(dim, heads, segments=True)
aggregate  "sum"                                   m_i = W_O || _h sum_j w_ij W_V h_j
update     PostNorm(dim, FeedForward(dim))         z   = norm(x + m),  y = norm'(z + ffn(z))
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.graphs import batch, complete, identity, permutation
from mpnn.models.layers.blocks import embed, require_batch, transformer_update
from mpnn.models.layers.losses import token_loss
from mpnn.models.layers.relative import PositionOffset, RelativeDotProduct
from mpnn.models.saving import Model
from mpnn.update import PostNorm
from mpnn.update.dropout import Dropout
from mpnn.update.maps import linear


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
        return self.streams(self.embed(tokens), content)

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
        queries = self.dropout(self.unknown.expand(*tokens.shape, -1))
        predicted = self.streams(self.embed(tokens), content, queries, query)
        return linear(self.dropout(predicted), self.token.weight, self.bias)

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

    def streams(self, h: Tensor, content: Graph, g: Tensor | None = None, query: Graph | None = None) -> Tensor:
        """Runs both streams through all layers and returns the last output of the query stream, [B, P, dim], or of the
        content stream, [B, N, dim], without a query stream.

        Each graph is over one sentence and shared by the batch, or over the concatenated nodes of all sentences.

        Args:
            h: initial content stream, [B, N, dim].
            content: graph of the content stream.
            g: initial query stream, [B, P, dim], or None.
            query: graph of the query stream, P destinations and N sources; needed with g.
        """
        for layer in self.layers:
            if g is not None and query is not None:
                g = _round(layer, g, h, query)
            h = _round(layer, h, h, content)
        return h if g is None else g

    def _bind(self, graph: Topology, tokens: Tensor, types: Tensor | None) -> Graph:
        """Returns the graph of one sentence. With `types`, returns that of all sentences, with relations by segment."""
        require_batch(tokens)
        bound = graph.bind(tokens.shape[1]).to(tokens.device)
        if types is None:
            return bound
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(types)
        nodes = torch.stack([positions, types]).flatten(1)
        return batch([bound] * len(tokens)).with_relation(PositionOffset(tokens.shape[1] - 1, nodes, nodes))


def _round(layer: nn.Module, x: Tensor, source: Tensor, graph: Graph) -> Tensor:
    """Returns the output of a layer for x [B, P, dim] and sources [B, N, dim]."""
    if graph.num_dst == x.shape[0] * x.shape[1]:
        return layer(x.flatten(0, 1), graph, source.flatten(0, 1)).view_as(x)
    return layer(x, graph, source)
