"""Requests of many kinds: by hand, one line each, and drawn at random by a seed.

`draw(seed, index)` returns the same request in every process, so that times measured once can be compared with
estimates made later.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from mpnn import graphs
from mpnn.aggregate import aggregator
from mpnn.graph import Graph, rng
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable, PerEdge
from mpnn.graph.relations import Offset, Relation
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU


def dot(graph: Graph, batch: int = 1, heads: int = 4, width: int = 32, kv_heads: int | None = None) -> Round:
    kv_heads = kv_heads or heads
    query = torch.randn(batch, graph.num_dst, heads, width)
    key, value = (torch.randn(batch, graph.num_src, kv_heads, width) for _ in range(2))
    return Round(graph, value, Dot(query, key, width**-0.5))


def biased(given: Round) -> Round:
    return replace(given, bias=(BiasTable(torch.randn(65, given.heads), Offset(32)),))


def per_edge(given: Round, *batch: int, heads: int | None = None) -> Round:
    """With a number for each edge and head, shared by the batch or not."""
    return replace(given, bias=(torch.randn(*batch, given.graph.num_edges, heads or given.heads),))


def by_class(given: Round) -> Round:
    """With a number for each of five classes of pairs and each head, by a rule that is no offset."""
    return replace(given, bias=(BiasTable(torch.randn(5, given.heads), Classes(5)),))


@dataclass(frozen=True)
class Classes(Relation):
    """Classes of pairs by the sum of their positions."""

    count: int

    def ids(self, dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        return (dst + src) % self.count


def placed(given: Round) -> Round:
    """With a vector for each offset on keys, as Transformer-XL has them."""
    relation = Offset(given.graph.num_src - 1)
    vectors = EmbeddingTable(torch.randn(relation.count, given.heads, given.score.query.shape[-1]), relation)
    return replace(given, score=replace(given.score, edge_key=vectors))


def softcapped(given: Round) -> Round:
    return replace(given, score=replace(given.score, softcap=20.0))


def cast(given: Round, dtype: torch.dtype) -> Round:
    score = given.score
    return replace(
        given, value=given.value.to(dtype), score=replace(score, query=score.query.to(dtype), key=score.key.to(dtype))
    )


def dropped(given: Round) -> Round:
    return replace(given, dropout=0.1, seed=rng.new_seed(torch.device("cpu")))


def additive(graph: Graph, heads: int = 8, width: int = 8) -> Round:
    score = AdditiveScore(torch.randn(graph.num_dst, heads), torch.randn(graph.num_src, heads), LeakyReLU())
    return Round(graph, torch.randn(graph.num_src, heads, width), score)


def additive_v2(graph: Graph, heads: int = 4, width: int = 16) -> Round:
    dst, src = (torch.randn(n, heads, width) for n in (graph.num_dst, graph.num_src))
    return Round(graph, src, AdditiveV2Score(dst, src, torch.randn(heads, width), LeakyReLU()))


def aggregated(graph: Graph, reduce: str, width: int = 64) -> Round:
    return Round(graph, torch.randn(graph.num_src, 1, width), normalize="none", reduce=aggregator(reduce))


def weighed(given: Round) -> Round:
    return replace(given, bias=(torch.randn(given.graph.num_edges, 1),))


def alone(given: Round) -> Round:
    """With logits that are biases only."""
    return replace(given, score=None)


def linear(given: Round) -> Round:
    return replace(given, normalize="none")


def scattered(nodes: int, degree: int) -> Graph:
    edges = torch.randint(0, nodes, (2, nodes * degree))
    return graphs.from_edges(edges, nodes)


def with_gradients(given: Round, biases: bool = False) -> Round:
    """With gradients of the features, and of the biases where these are learned too."""
    leaves = {id(t): t.clone().requires_grad_() for t in given.tensors}
    score = given.score
    match score:
        case Dot(query, key):
            score = replace(score, query=leaves[id(query)], key=leaves[id(key)])
        case AdditiveScore(dst, src) | AdditiveV2Score(dst, src):
            score = replace(score, dst=leaves[id(dst)], src=leaves[id(src)])
    bias = tuple(map(_learned, given.bias)) if biases else given.bias
    return replace(given, value=leaves[id(given.value)], score=score, bias=bias)


def _learned(bias: PerEdge) -> PerEdge:
    if isinstance(bias, EmbeddingTable):
        return replace(bias, table=bias.table.clone().requires_grad_())
    return bias.clone().requires_grad_()


# ------------------------------------------------------------------------------------------------ requests at random

LARGEST = 1.5e8
"""Multiplications of a drawn request per pass at most: some tens of milliseconds on one core by a good backend."""


@dataclass(frozen=True)
class Drawn:
    """One request, the kind of its graph, and a line that describes it."""

    kind: str
    text: str
    request: Round


def draw(seed: int, index: int) -> Drawn:
    """The request number `index` of a seed."""
    random_ = random.Random(f"{seed}:{index}")
    torch.manual_seed(random_.getrandbits(40))
    kind = random_.choice(list(KINDS))
    while True:
        graph = KINDS[kind](random_)
        what, given = _work(random_, graph)
        heads = given.batch.numel() * given.heads
        if graph.num_edges * heads * (given.value.shape[-1] + 4) <= LARGEST:
            break
    if random_.random() < 0.5:
        learned = bool(given.bias) and random_.random() < 0.6
        given, what = with_gradients(given, learned), f"{what}, backward{' to biases' * learned}"
    return Drawn(kind, f"{graph.num_dst:,} x {graph.num_src:,}, {graph.num_edges:,} edges: {what}", given)


def _size(random_: random.Random, least: int = 32, most: int = 6000) -> int:
    """A number of nodes, its logarithm uniform."""
    return round(math.exp(random_.uniform(math.log(least), math.log(most))))


def _window(random_: random.Random) -> Graph:
    radius = _size(random_, 1, 512)
    topology = graphs.window(radius, dilation=random_.choice((1, 1, 1, 2, 4)))
    return (topology & graphs.causal() if random_.random() < 0.4 else topology).bind(_size(random_))


def _documents(random_: random.Random) -> Graph:
    mean, nodes, lengths = _size(random_, 4, 512), _size(random_), [0]
    while sum(lengths) < nodes:
        lengths.append(mean if random_.random() < 0.3 else random_.randint(1, 2 * mean))
    topology = graphs.documents(lengths[1:])
    return (topology & graphs.causal() if random_.random() < 0.3 else topology).bind(sum(lengths))


def _image(random_: random.Random) -> Graph:
    size = random_.choice((4, 7, 8))
    height, width = (size * random_.randint(1, 8) for _ in range(2))
    topology = random_.choice(
        (
            graphs.windows(height, width, size=size, shift=random_.choice((0, size // 2))),
            graphs.neighborhood(height, width, random_.randint(1, 4)),
            graphs.grid(height, width, connectivity=random_.choice((4, 8))),
        )
    )
    return topology.bind(height * width)


def _molecules(random_: random.Random) -> Graph:
    """A batch of small connected graphs: a random tree with bonds to recent atoms, and some rings."""
    ends, nodes = [], 0
    for _ in range(_size(random_, 1, 256)):
        atoms = random_.randint(5, 40)
        bonds = [(nodes + k, nodes + max(0, k - random_.randint(1, 3))) for k in range(1, atoms)]
        bonds += [(nodes + a, nodes + a - 5) for a in range(5, atoms, 6)]
        ends += bonds + [(b, a) for a, b in bonds]
        nodes += atoms
    return graphs.from_edges(torch.tensor(ends).T, nodes)


def _power_law(random_: random.Random) -> Graph:
    """Edges whose ends are drawn in proportion to rank ** -exponent, in both directions."""
    nodes, exponent = _size(random_), random_.uniform(0.4, 1.0)
    weight = torch.arange(1, nodes + 1, dtype=torch.float64) ** -exponent
    ends = weight.multinomial(2 * nodes * random_.randint(1, 16), replacement=True).view(2, -1)
    ends = torch.randperm(nodes)[ends]
    return graphs.from_edges(torch.cat([ends, ends.flip(0)], 1), nodes)


def _uniform(random_: random.Random) -> Graph:
    return scattered(_size(random_), random_.randint(1, 32))


def _bipartite(random_: random.Random) -> Graph:
    num_src, num_dst = _size(random_), _size(random_)
    count = max(num_src, num_dst) * random_.randint(1, 16)
    ends = torch.stack([torch.randint(0, num_src, (count,)), torch.randint(0, num_dst, (count,))])
    return graphs.from_edges(ends, num_src=num_src, num_dst=num_dst)


KINDS: dict[str, Callable[[random.Random], Graph]] = {
    "complete": lambda r: graphs.complete().bind(_size(r, most=2048)),
    "causal": lambda r: graphs.causal().bind(_size(r, most=2048)),
    "cross attention": lambda r: graphs.complete().bind(_size(r, most=2048), _size(r, most=2048)),
    "window": _window,
    "longformer": lambda r: graphs.longformer(2 * _size(r, 2, 256), globals=r.randint(1, 8)).bind(_size(r)),
    "bigbird": lambda r: graphs.bigbird(block=r.choice((8, 16, 32, 64)), seed=r.randint(0, 9)).bind(_size(r, 64)),
    "documents": _documents,
    "image": _image,
    "molecules": _molecules,
    "power law": _power_law,
    "random": _uniform,
    "neighbors in space": lambda r: graphs.knn(torch.randn(_size(r, most=4000), 3), r.randint(2, 24)),
    "bipartite": _bipartite,
}


def _work(random_: random.Random, graph: Graph) -> tuple[str, Round]:
    """Draws the work over a graph: dot products most often where edges form runs, any kind where they are a list."""
    what = random_.choice(("dot", "gat", "gatv2", "sum", "mean", "max") if graph.is_explicit else _ON_RUNS)
    if what in ("sum", "mean", "max"):
        width = random_.choice((8, 16, 32, 64, 128, 256))
        given = aggregated(graph, what, width)
        if what == "sum" and graph.is_explicit and random_.random() < 0.3:
            return f"weighted sum, {width}", weighed(given)
        return f"{what}, {width}", given
    heads, width = random_.choice(((1, 16), (1, 64), (2, 32), (4, 8), (4, 16), (4, 32), (8, 8), (8, 64), (12, 64)))
    if what == "gat":
        return f"GAT {heads} x {width}", additive(graph, heads, width)
    if what == "gatv2":
        return f"GATv2 {heads} x {width}", additive_v2(graph, heads, width)
    batch = random_.choice((1, 1, 1, 2, 4, 8, 32)) if graph.num_dst <= 1024 else 1
    given, text = dot(graph, batch, heads, width), f"dot {heads} x {width}, batch {batch}"
    extra = random_.random()
    if extra < 0.25:
        named = random_.choice(("bias by offset", *_BIASED) if not graph.is_explicit else tuple(_BIASED))
        return f"{text}, {named}", _BIASED.get(named, biased)(given)
    if extra < 0.35:
        return f"{text}, dropout", dropped(given)
    return text, given


_BIASED: dict[str, Callable[[Round], Round]] = {
    "bias by class": by_class,
    "bias per edge": per_edge,
    "bias per edge for all heads": lambda given: per_edge(given, heads=1),
    "bias per edge and batch entry": lambda given: per_edge(given, *given.batch),
}
_ON_RUNS = (*["dot"] * 8, "gat", "gatv2", "sum", "max")
