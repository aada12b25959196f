"""Link prediction: an encoder of nodes and a decoder that scores pairs of them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, Topology
from mpnn.graphs import HeteroGraph, absent_edges
from mpnn.models.saving import Model
from mpnn.update.maps import Linear

Features = Tensor | Mapping[str, Tensor]


class LinkPredictor(Model):
    """An encoder of nodes and a decoder of pairs (Kipf & Welling 2016, "Variational graph auto-encoders").

        z = encoder(x, graph),   p(j -> i) = sigmoid( decoder(z_j, z_i) )

    Args:
        encoder: any graph network of this library that maps [N, in_dim] to [N, d]. With `kinds`, one over a
            `HeteroGraph` that maps {kind: [N_kind, in_dim]} to {kind: [N_kind, d]}, such as HGT.
        decoder: `Inner()`, `DistMult(d, relations)`, `ComplEx(d, relations)` or `PairMLP(d)`.
        kinds: of the sources and the destinations of links, such as ("user", "item"); None: links of one set of nodes.
    """

    def __init__(self, encoder: Model, decoder: Model, kinds: tuple[str, str] | None = None) -> None:
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        self.kinds = None if kinds is None else (kinds[0], kinds[1])

    def forward(
        self,
        x: Features,
        pairs: Tensor,
        graph: Topology | Graph | HeteroGraph | None = None,
        relation: Tensor | None = None,
    ) -> Tensor:
        """Returns logits [P] of the probability that each link exists.

        Args:
            x: [N, in_dim]; with `kinds`, {kind: [N_kind, in_dim]}.
            pairs: int64 [2, P], sources in the first row, destinations in the second.
            graph: the known links.
            relation: int64 [P], the type of each link to score, for decoders with edge types.
        """
        return self.score(self.encoder(x, graph), pairs, relation)

    def score(self, z: Features, pairs: Tensor, relation: Tensor | None = None) -> Tensor:
        """Returns logits [P] of pairs [2, P] from encoded nodes z [N, d], or {kind: [N_kind, d]}."""
        if pairs.dim() != 2 or len(pairs) != 2:
            raise ValueError(f"pairs must be int64 [2, P], sources then destinations; got {list(pairs.shape)}")
        of_src, of_dst = self._ends(z)
        src, dst = of_src.index_select(0, pairs[0]), of_dst.index_select(0, pairs[1])
        return self.decoder(src, dst) if relation is None else self.decoder(src, dst, relation)

    def _ends(self, z: Features) -> tuple[Tensor, Tensor]:
        """The encoded sources and destinations."""
        if isinstance(z, Tensor) and self.kinds is None:
            return z, z
        if isinstance(z, Tensor) or self.kinds is None:
            got = "a tensor" if isinstance(z, Tensor) else f"kinds {', '.join(map(repr, z))}"
            raise ValueError(
                f"kinds={self.kinds} and an encoder whose result is {got}: name the kinds of sources and destinations, "
                'kinds=("user", "item"), of an encoder over a HeteroGraph only'
            )
        for kind in self.kinds:
            if kind not in z:
                raise ValueError(f"links are from {self.kinds[0]!r} to {self.kinds[1]!r}; the encoder has no {kind!r}")
        return z[self.kinds[0]], z[self.kinds[1]]

    def _links(self, graph: Graph | HeteroGraph) -> Graph:
        """The links of a graph: of several kinds, those of the only relation between the two kinds."""
        if isinstance(graph, Graph):
            return graph
        between = [one for name, one in graph.items() if (name[0], name[2]) == self.kinds]
        if len(between) != 1:
            raise ValueError(f"{len(between)} relations lead from {self.kinds}: pass positive and negative pairs")
        return between[0]

    def loss(
        self,
        x: Features,
        graph: Graph | HeteroGraph,
        positive: Tensor | None = None,
        negative: Tensor | None = None,
        *,
        relation: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats over positive links, plus that over negative pairs.

        Args:
            x: as of `forward`.
            graph: the links that the encoder passes messages along.
            positive: int64 [2, P], links that exist; default: the edges of `graph`, of several kinds those of the only
                relation between the two kinds.
            negative: pairs without a link; default: P pairs that are not edges of `graph`, sampled with `generator`. If
                all positive links run from the lower number to the higher, so do they, and neither has an edge in the
                other direction: the order does not distinguish them.
            relation: int64 [P], the types of the positive links. The negative pairs are scored with the same types, so
                there must be P of them.
        """
        positive = self._links(graph).edge_index if positive is None else positive
        if negative is None:
            links = self._links(graph)
            one_set = self.kinds is None or self.kinds[0] == self.kinds[1]
            one_way = one_set and bool((positive[0] < positive[1]).all())
            negative = absent_edges(links, positive.shape[1], generator, undirected=one_way, one_set=one_set)
        z = self.encoder(x, graph)
        positive_logits, negative_logits = self.score(z, positive, relation), self.score(z, negative, relation)
        return F.softplus(-positive_logits).mean() + F.softplus(negative_logits).mean()


class Inner(Model):
    """`<z_j, z_i>`, which is symmetric in source and destination."""

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        return (src * dst).sum(-1)

    def query(self, given: Tensor, relation: Tensor | None = None, *, of_src: bool = False) -> Tensor:
        """Returns the vectors [Q, d] whose inner products with the nodes at the other end are the scores; see
        `DistMult`."""
        return given


class DistMult(Model):
    """`<z_j, r, z_i>` with a vector r for each edge type (Yang et al. 2015)."""

    def __init__(self, dim: int, relations: int) -> None:
        super().__init__()
        self.relation = nn.Parameter(torch.empty(relations, dim))
        nn.init.xavier_uniform_(self.relation)

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor | None = None) -> Tensor:
        return (self.query(src, relation) * dst).sum(-1)

    def query(self, given: Tensor, relation: Tensor | None = None, *, of_src: bool = False) -> Tensor:
        """Returns the vectors [Q, d] whose inner products with the nodes at the other end are the scores.

        Args:
            given: [Q, d], the sources; with `of_src`, the destinations, whose sources are scored.
            relation: int64 [Q].
        """
        return given * _of_types(self, self.relation, relation)


class ComplEx(Model):
    """`Re <z_j, r, conj(z_i)>` with a complex vector r for each edge type (Trouillon et al. 2016). The first half of a
    vector holds real parts, the second imaginary ones. A link and its reverse can have different scores."""

    def __init__(self, dim: int, relations: int) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"ComplEx divides a width into real and imaginary parts, so it is even; got {dim}")
        self.relation = nn.Parameter(torch.empty(relations, dim))
        nn.init.xavier_uniform_(self.relation)

    def forward(self, src: Tensor, dst: Tensor, relation: Tensor | None = None) -> Tensor:
        return (self.query(src, relation) * dst).sum(-1)

    def query(self, given: Tensor, relation: Tensor | None = None, *, of_src: bool = False) -> Tensor:
        """Returns the vectors of `DistMult.query` for this decoder."""
        a, b = given.chunk(2, -1)
        c, d = _of_types(self, self.relation, relation).chunk(2, -1)
        if of_src:
            d = -d
        return torch.cat([a * c - b * d, a * d + b * c], -1)


def _of_types(decoder: Model, vectors: Tensor, relation: Tensor | None) -> Tensor:
    """The vectors [Q, d] of edge types [Q]."""
    if relation is None:
        raise ValueError(f"{type(decoder).__name__} scores {len(vectors)} edge types: pass relation, int64 [P]")
    return vectors.index_select(0, relation)


class PairMLP(Model):
    """`w . relu( W [z_j || z_i] )`. A link and its reverse can have different scores."""

    def __init__(self, dim: int, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(Linear(2 * dim, hidden), nn.ReLU(), Linear(hidden, 1))

    def forward(self, src: Tensor, dst: Tensor) -> Tensor:
        return self.layers(torch.cat([src, dst], -1)).squeeze(-1)
