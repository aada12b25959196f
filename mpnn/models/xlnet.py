"""XLNet: each token is predicted from those before it in an order, any order; so it learns to hear both ways.

topology   permutation(order)                      content stream h: the tokens up to oneself in the order
           permutation(order) - identity()         query stream g: the same without oneself; sources are h
           complete()                              when it is trained and only reads
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
from mpnn.graphs import batch, complete, identity, permutation
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import embedded, refuse_alone, updated_by
from mpnn.models.parts.losses import token_loss
from mpnn.models.parts.relative import Placed, RelativeDotProduct
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import PostNorm


@dataclass(frozen=True)
class XLNetConfig:
    """Sizes of an XLNet; the defaults are XLNet-large's.

    vocabulary: number of tokens. dim, hidden: widths of the model and of its feed-forward network. activation: a name
    in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm. furthest: offsets beyond it count as it; None: none.
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
    """What the two streams of an XLNet make of a batch of sentences.

    content: the embeddings and each layer's output, [B, N, dim]. query: the same of the query stream [B, P, dim]; empty
    without one. weights: each layer's attention weights, [B, H, N, S] of the content stream over S sources and, where
    there is one, [B, H, P, S] of the query stream; empty unless asked for.
    """

    content: tuple[Tensor, ...]
    query: tuple[Tensor, ...]
    weights: tuple[tuple[Tensor, ...], ...]

    @property
    def last(self) -> Tensor:
        return (self.query or self.content)[-1]


class XLNet(Model):
    """XLNet (Yang et al. 2019, sections 2.2 to 2.5). Both streams run through the same layers:

        h_i <- layer(x = h_i, over permutation(order), source = h)                    h_i = W_token[token_i] at first
        g_i <- layer(x = g_i, over permutation(order) - identity(), source = h)       g_i = w, the same for all
        p(token_i | tokens before it in the order) = softmax(g_i W_token^T + b)

    so that g_i knows where its token stands, and all that h knows of the tokens before it, but not which token it is.

    Args:
        config: its sizes. head: whether there is the bias b that predictions need.
    """

    def __init__(self, config: XLNetConfig, *, head: bool = True) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.token = nn.Embedding(config.vocabulary, dim)
        self.unknown = nn.Parameter(torch.empty(dim))
        self.dropout = Dropout(config.dropout)

        def layer() -> MessagePassing:
            update = updated_by(PostNorm, config, ffn_dropout=config.dropout)
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
        """What a trained model makes of each token, [B, N, dim], hearing all others or over another graph.

        tokens: int64 [B, N]. types: int64 [B, N], the segment of each token; default: segments are not told apart.
        """
        content = self._over(complete() if graph is None else graph, tokens, types)
        return self.streams(self.embedded(tokens), content).last

    def predict(self, tokens: Tensor, order: Sequence[int] | Tensor, types: Tensor | None = None) -> Tensor:
        """Logits [B, N, vocabulary] of each token from those before it in the order, which holds 0 to N - 1 once each;
        the first in the order is predicted from nothing. tokens, types: as in `forward`."""
        if self.bias is None:
            raise ValueError("predictions need the bias of the head; make the model with head=True")
        hears = permutation(order)
        content, query = (self._over(graph, tokens, types) for graph in (hears, hears - identity()))
        found = self.streams(self.embedded(tokens), content, self.queries(*tokens.shape), query)
        return F.linear(self.dropout(found.last), self.token.weight, self.bias)

    def loss(
        self,
        tokens: Tensor,
        order: Sequence[int] | Tensor | None = None,
        types: Tensor | None = None,
        *,
        last: int | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats of the `last` tokens in the order (the paper's partial prediction, section 2.3;
        default: all), in an order drawn at random unless it is given."""
        order = torch.randperm(tokens.shape[1]) if order is None else torch.as_tensor(order)
        which = order[max(0, len(order) - (len(order) if last is None else last)) :].to(tokens.device)
        logits = self.predict(tokens, order, types)
        return token_loss(logits[:, which], tokens[:, which])

    def embedded(self, tokens: Tensor) -> Tensor:
        """Where the content stream begins, [B, N, dim], from tokens int64 [B, N] or vectors in their place."""
        return self.dropout(embedded(self.token, tokens))

    def queries(self, sentences: int, each: int) -> Tensor:
        """Where the query stream begins, [sentences, each, dim]."""
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
        """Both streams through all layers; graphs are over one sentence, or over the nodes of all, one after the other.

        Args:
            h: where the content stream begins, [B, N, dim]. content: who hears whom, S sources for N destinations.
            g: where the query stream begins, [B, P, dim], or None. query: whom it hears, S sources for P destinations.
            memory: for each layer, remembered states [B, S - N, dim] that come before h among its sources.
        """
        contents, queries, weights = [h], [] if g is None else [g], []
        for k, layer in enumerate(self.layers):
            assert isinstance(layer, MessagePassing)
            source = h if memory is None else torch.cat([memory[k], h], 1)
            found = []
            if g is not None:
                g, heard = _round(layer, g, source, query, return_weights)
                queries.append(g)
                found.append(heard)
            h, heard = _round(layer, h, source, content, return_weights)
            contents.append(h)
            weights.append((heard, *found))
        return Streams(tuple(contents), tuple(queries), tuple(weights) if return_weights else ())

    def _over(self, graph: Topology, tokens: Tensor, types: Tensor | None) -> Graph:
        """The graph of one sentence or, where nodes have segments of their own, of all sentences."""
        refuse_alone(tokens)
        bound = graph.bind(tokens.shape[1]).to(tokens.device)
        if types is None:
            return bound
        places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(types)
        nodes = torch.stack([places, types]).flatten(1)
        return batch([bound] * len(tokens)).related(Placed(tokens.shape[1] - 1, nodes, nodes))


def _round(
    layer: MessagePassing, x: Tensor, source: Tensor, graph: Graph | None, return_weights: bool
) -> tuple[Tensor, Tensor]:
    """What a layer makes of x [B, P, dim] and sources [B, S, dim], and the weights [B, H, P, S], if asked for."""
    assert graph is not None
    over_all = graph.num_dst == x.shape[0] * x.shape[1]
    nodes, sources = (x.flatten(0, 1), source.flatten(0, 1)) if over_all else (x, source)
    if not return_weights:
        return layer(nodes, graph, sources).view_as(x), x.new_empty(0)
    y, weights = layer(nodes, graph, sources, return_weights=True)
    src, dst = graph.edge_index
    matrix = weights.new_zeros(*nodes.shape[:-1], source.shape[1], weights.shape[-1])
    matrix[..., dst, src % source.shape[1], :] = weights
    return y.view_as(x), matrix.view(*x.shape[:2], *matrix.shape[-2:]).movedim(-1, 1)
