"""A model of links between known nodes: what it learns of each node, of the links around it, and how popular it is."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from mpnn import Graph
from mpnn.graphs import from_edges
from mpnn.models.graph.link_prediction import ComplEx, DistMult, Inner
from mpnn.models.saving import Model
from mpnn.update.maps import Linear

Form = Literal["undirected", "directed", "two sets"]
"""Of links between nodes of one set: whether a link and its reverse are one; or between two sets, such as users and
items, whose links are directed."""


class LinkRanker(Model):
    """Scores links between known nodes, and ranks the destinations of a source.

        z          = h + encoder(h, graph),   h = own vectors + W x
        score(j, r, i) = decoder(z_j, r, z_i) + b_ri + b'_rj

    A node without links in the graph has the own vector zero. b_ri says how popular the destination i is in links
    of type r, and b'_rj the source j; they are initialized with the logarithm of 1 + the number of links for
    training, see `set_popularity`. An untrained model thus ranks by popularity. Between two sets there is no b',
    because sources are not ranked.

    Nodes are numbered from 0 in their set. In `graph` and in z, the destinations of two sets follow the sources.

    Args:
        form: of the links.
        decoder: `Inner()`, `DistMult(dim, relations)` or `ComplEx(dim, relations)`.
        encoder: a graph network that maps [N, dim] to [N, dim], or None.
        num_src, num_dst: the number of nodes of one set, or of two. 0: no own vectors, features only.
        dim: width of z.
        relations: the number of types of links.
        in_dim: the number of features of nodes; 0: none.
        popular: the number of pairs of a node and a type that have a popularity; see `count_popular`.
        dropout: of h before the encoder and of the queries of `answers`.
    """

    calibration: Tensor

    def __init__(
        self,
        form: Form,
        decoder: Inner | DistMult | ComplEx,
        encoder: Model | None = None,
        *,
        num_src: int = 0,
        num_dst: int = 0,
        dim: int = 64,
        relations: int = 1,
        in_dim: int = 0,
        popular: int = 0,
        dropout: float = 0.3,
    ) -> None:
        super().__init__()
        if form not in get_args(Form):
            raise ValueError(f"form must be one of {', '.join(map(repr, get_args(Form)))}; got {form!r}")
        if form != "two sets" and num_dst not in (0, num_src):
            raise ValueError(f"{form} links have one set of nodes; got num_src={num_src} and num_dst={num_dst}")
        self.form: Form = form
        self.relations = relations
        self.num_src = num_src
        self.first_dst = num_src if form == "two sets" else 0
        self.num_dst = num_dst or num_src
        self.encoder = encoder
        self.decoder = decoder
        self.own = nn.Parameter(torch.empty(self.first_dst + self.num_dst, dim))
        nn.init.normal_(self.own, std=0.1)
        self.features = Linear(in_dim, dim) if in_dim else None
        self.popularity = Popularity(form, relations, max(self.num_src, self.num_dst), popular)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calibration", torch.tensor([1.0, 0.0]))

    def graph(self, pairs: Tensor, relation: Tensor | None = None, num_nodes: int | None = None) -> Graph:
        """Returns the links as a graph over all nodes, along which messages pass in both directions. Of directed links,
        and of two sets, the type of an edge is that of its link, and of its reverse that plus `relations`.

        Args:
            pairs: int64 [2, L], sources in the first row.
            relation: int64 [L].
            num_nodes: default: the number of own vectors.
        """
        src, dst = pairs[0], pairs[1] + self.first_dst
        if relation is None:
            relation = torch.zeros_like(src)
        back = relation if self.form == "undirected" else relation + self.relations
        ends = torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])
        nodes = len(self.own) if num_nodes is None else num_nodes
        return from_edges(ends, nodes, edge_type=torch.cat([relation, back]))

    def encode(self, graph: Graph, x: Tensor | None = None) -> Tensor:
        """Returns z [N, dim] of all nodes, from the known links (a graph of `self.graph`) and features x [N,
        in_dim]."""
        h = self._states(x, self.own, graph.degree())
        return h if self.encoder is None else h + self.encoder(self.dropout(h), graph)

    def encode_sampled(self, graphs: Sequence[Graph], sources: Tensor, x: Tensor | None = None) -> Tensor:
        """Returns z [n, dim] of the nodes of a `mpnn.data.NeighborBatch`, from its graphs, sources [m] and features x
        [m, in_dim]. A model without an encoder has no use for a sample.

        Raises:
            ValueError: there are more or fewer graphs than layers of the encoder.
        """
        assert self.encoder is not None
        degrees = graphs[0].degrees
        assert degrees is not None
        own = self.own.index_select(0, sources) if len(self.own) else self.own
        h = self._states(x, own, degrees[1])
        return h[: graphs[-1].num_dst] + self.encoder(self.dropout(h), graphs)

    def _states(self, x: Tensor | None, own: Tensor, degree: Tensor) -> Tensor:
        """The states of nodes before the encoder: a node of degree 0 has no own vector."""
        if (self.features is None) != (x is None):
            expected = "no features" if self.features is None else f"features [N, {self.features.in_features}]"
            raise ValueError(f"this model takes {expected} as x; got {None if x is None else list(x.shape)}")
        h = self.features(x) if self.features is not None and x is not None else own.new_zeros(())
        return h + own * (degree > 0).to(own.dtype)[:, None] if len(own) else h

    def forward(self, x: Tensor | None, pairs: Tensor, graph: Graph, relation: Tensor | None = None) -> Tensor:
        """Returns scores [P] of pairs [2, P] from the known links, as `LinkPredictor` does."""
        return self.score(self.encode(graph, x), pairs, relation)

    def score(self, z: Tensor, pairs: Tensor, relation: Tensor | None = None) -> Tensor:
        """Returns scores [P] of pairs [2, P], of types [P], from z [N, dim]."""
        relation = torch.zeros_like(pairs[0]) if relation is None else relation
        query = self.query(z, pairs[0], relation)
        dst = z.index_select(0, pairs[1] + self.first_dst)
        return (query * dst).sum(-1) + self.popularity.score(pairs, relation)

    def query(self, z: Tensor, given: Tensor, relation: Tensor, *, of_src: bool = False) -> Tensor:
        """Returns the vectors [Q, dim] whose inner products with z are what the decoder scores; see
        `DistMult.query`."""
        nodes = given + self.first_dst if of_src else given
        return self.dropout(self.decoder.query(z.index_select(0, nodes), relation, of_src=of_src))

    def answers(
        self,
        z: Tensor,
        given: Tensor,
        relation: Tensor | None = None,
        *,
        of_src: bool = False,
        others: Tensor | None = None,
    ) -> Tensor:
        """Returns scores [Q, C] of the links of each given source with each destination.

        Args:
            z: [N, dim].
            given: int64 [Q], the sources; with `of_src`, the destinations, whose sources are scored.
            relation: int64 [Q].
            others: int64 [C], the nodes to score; default: all.
        """
        relation = torch.zeros_like(given) if relation is None else relation
        ends = z[: self.num_src] if of_src else z[self.first_dst :]
        ends = ends if others is None else ends.index_select(0, others)
        if others is None:
            others = torch.arange(len(ends), device=z.device)
        scores = self.query(z, given, relation, of_src=of_src) @ ends.T
        return scores + self.popularity.answers(given, relation, others, of_src=of_src)

    def probability(self, scores: Tensor) -> Tensor:
        """Returns the probability that scores are those of links, if links and absent pairs are equally frequent. It
        needs `calibrate`."""
        scale, shift = self.calibration
        return (scores * scale + shift).sigmoid()

    def calibrate(self, scale: float, shift: float) -> None:
        """Sets the logistic map of `probability`."""
        self.calibration.copy_(torch.tensor([scale, shift]))

    def set_popularity(self, pairs: Tensor, relation: Tensor | None = None) -> None:
        """Counts the links for training, int64 [2, L] of types [L]."""
        self.popularity.count(pairs, torch.zeros_like(pairs[0]) if relation is None else relation)


class Popularity(nn.Module):
    """b_ri and b'_rj of `LinkRanker`: a number for each node and type of links, 0 for those without a link."""

    keys: Tensor

    def __init__(self, form: Form, relations: int, num_nodes: int, popular: int) -> None:
        super().__init__()
        self.form = form
        self.relations = relations
        self.num_nodes = num_nodes
        self.weight = nn.Parameter(torch.zeros(popular))
        self.register_buffer("keys", torch.arange(popular))

    def score(self, pairs: Tensor, relation: Tensor) -> Tensor:
        """The sum [P] of the popularities of both ends."""
        of_dst = self._of(pairs[1], relation, of_src=False)
        return of_dst if self.form == "two sets" else of_dst + self._of(pairs[0], relation, of_src=True)

    def answers(self, given: Tensor, relation: Tensor, others: Tensor, *, of_src: bool = False) -> Tensor:
        """`score` of each given node [Q], of types [Q], with each other one [C]: [Q, C]."""
        types, of_query = relation.unique(return_inverse=True)
        table = self._of(others.expand(len(types), -1), types[:, None], of_src=of_src)
        scores = table.index_select(0, of_query)
        if self.form == "two sets":
            return scores
        return scores + self._of(given, relation, of_src=not of_src)[:, None]

    def count(self, pairs: Tensor, relation: Tensor) -> None:
        """Sets each popularity to the logarithm of one more than the number of its links."""
        keys, counts = popular_keys(self.form, pairs, relation, self.relations, self.num_nodes)
        if len(keys) != len(self.weight):
            raise ValueError(
                f"the links have {len(keys)} popular pairs of a node and a type; popular={len(self.weight)}"
            )
        with torch.no_grad():
            self.keys.copy_(keys)
            self.weight.copy_(counts.to(self.weight.dtype).log1p())

    def _of(self, nodes: Tensor, relation: Tensor, *, of_src: bool) -> Tensor:
        """The popularity of nodes, which broadcast with types."""
        if not len(self.weight):
            return self.weight.new_zeros(torch.broadcast_shapes(nodes.shape, relation.shape))
        side = relation + self.relations if of_src and self.form == "directed" else relation
        key = side * self.num_nodes + nodes
        place = torch.searchsorted(self.keys, key).clamp(max=len(self.keys) - 1)
        values = self.weight.index_select(0, place.flatten()).view(place.shape)
        return torch.where(self.keys[place] == key, values, 0.0)


def popular_keys(
    form: Form, pairs: Tensor, relation: Tensor | None, relations: int, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """The pairs of a type and a node that have links, as ascending numbers, and how many links each has: int64 [K].

    Args:
        form, relations: as of `LinkRanker`. num_nodes: the larger number of nodes of its sets.
        pairs: the links, int64 [2, L]. relation: their types [L].
    """
    relation = torch.zeros_like(pairs[0]) if relation is None else relation
    keys = [relation * num_nodes + pairs[1]]
    if form != "two sets":
        side = relation + relations if form == "directed" else relation
        keys.append(side * num_nodes + pairs[0])
    distinct, counts = torch.cat(keys).unique(return_counts=True)
    return distinct, counts
