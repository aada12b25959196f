"""Every backend against the specification: the same numbers, gradients and dropped edges, or a sentence why not."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mpnn import graphs, ops
from mpnn.aggregate import Max
from mpnn.backends import BACKENDS, csr, dense, edge_list, tiles
from mpnn.engine import plan
from mpnn.graph import Graph
from mpnn.graph.relations import Offset, Relation
from mpnn.request.request import Request
from mpnn.request.scores import AdditiveScore, Dot, LeakyReLU
from mpnn.request.tables import BiasTable, EmbeddingTable

HEADS, WIDTH = 4, 3


@dataclass(frozen=True)
class Classes(Relation):
    """Classes that no offset tells."""

    count: int

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (dst * 5 + src * src) % self.count


SEED = torch.tensor(2**60 + 7)
# Sums of at most 60 float64 terms of size about 10, twice over (softmax, then values): 60 * 10 * 2 * 1.1e-16 < 2e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
OTHERS = [b for b in BACKENDS if b is not edge_list]
ATTENDING = [edge_list, dense, tiles, csr]  # those that run dot-product attention over most graphs


def shuffled(graph: Graph) -> Graph:
    order = torch.randperm(graph.num_edges, generator=torch.Generator().manual_seed(3))
    return graphs.from_edges(graph.edge_index[:, order], num_dst=graph.num_dst, num_src=graph.num_src)


GRAPHS: dict[str, Graph] = {
    "complete": graphs.complete().bind(7),
    "complete, more sources": graphs.complete().bind(3, 5),
    "complete, more destinations": graphs.complete().bind(5, 3),
    "complete, edges shuffled": shuffled(graphs.complete().bind(4)),
    "causal": graphs.causal().bind(13),
    "causal, more sources": graphs.causal().bind(7).rows(0, 3),
    "causal, more destinations": graphs.causal().bind(7, 3),
    "causal, edges shuffled": shuffled(graphs.causal().bind(5)),
    "strictly causal: an empty row": (graphs.causal() - graphs.identity()).bind(6),
    "causal, cached queries": graphs.causal().bind(7).rows(4, 7),
    "memory": graphs.memory(3).bind(4),
    "window": graphs.window(2).bind(11),
    "dilated window, causal": (graphs.window(2, dilation=3) & graphs.causal()).bind(17),
    "documents of unequal lengths": graphs.documents([3, 1, 4, 3]).bind(11),
    "causal documents": (graphs.causal() & graphs.documents([3, 1, 4])).bind(8),
    "swin, shifted": graphs.windows(4, 6, size=3, shift=1).bind(24),
    "longformer": graphs.longformer(4, globals=2).bind(13),
    "bigbird": graphs.bigbird(block=2, window=3, random=1, globals=1).bind(19),
    "permutation": graphs.permutation([2, 0, 4, 1, 3]).bind(5),
    "knn": graphs.knn(torch.arange(12.0).view(6, 2) ** 2, 2),
    "hashing": graphs.lsh(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), buckets=4),
    "one node": graphs.complete().bind(1),
    "one node that hears nobody": (graphs.complete() - graphs.identity()).bind(1),
    "no edge": graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 3),
    "no node": graphs.complete().bind(0),
    "no source": graphs.complete().bind(3, 0),
    "no destination": graphs.complete().bind(0, 3),
}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def request(graph: Graph, batch: tuple[int, ...] = (), key_heads: int = HEADS, value_heads: int = HEADS) -> Request:
    query = leaf(*batch, graph.num_dst, HEADS, WIDTH)
    key = leaf(*batch, graph.num_src, key_heads, WIDTH)
    return Request(graph, leaf(*batch, graph.num_src, value_heads, WIDTH + 2), Dot(query, key, 0.7))


def vectors(relation: Relation, heads: int, width: int) -> EmbeddingTable:
    return EmbeddingTable(leaf(relation.count, heads, width), relation)


def on_keys(given: Request, relation: Relation, heads: int = HEADS) -> Request:
    """The same with a vector for each class on the keys (Shaw, Transformer-XL)."""
    return replace(given, score=replace(given.score, edge_key=vectors(relation, heads, WIDTH)))


def on_both(given: Request, relation: Relation, heads: int = HEADS) -> Request:
    """The same with vectors on keys and on values."""
    return replace(on_keys(given, relation, heads), edge_value=vectors(relation, heads, WIDTH + 2))


def with_spare_rows(given: Request) -> Request:
    """The same with tables of different lengths, each with more rows than its rule has classes."""
    rule = Offset(1)
    tables = [BiasTable(leaf(rule.count + spare, HEADS), rule) for spare in (4, 1)]
    edge_key, edge_value = (leaf(rule.count + 2, HEADS, width) for width in (WIDTH, WIDTH + 2))
    score = replace(given.score, edge_key=EmbeddingTable(edge_key, rule))
    return replace(given, score=score, edge_value=EmbeddingTable(edge_value, rule), bias=tuple(tables))


def numbered(given: Request) -> Request:
    """The same with numbers by the same classes as the vectors on keys, beside others."""
    rule = given.score.edge_key.relation
    return replace(
        given, bias=(BiasTable(leaf(rule.count, HEADS), rule), BiasTable(leaf(rule.count, 1), rule), table(given.graph))
    )


def table(graph: Graph, heads: int = HEADS) -> BiasTable:
    """A number for each class of the graph's own relation (Swin's table), or for each clipped offset."""
    relation = graph.relation or Offset(2)
    return BiasTable(leaf(relation.count, heads), relation)


REQUESTS: dict[str, Callable[[Graph], Request]] = {
    "plain": request,
    "batched": lambda g: request(g, (2,)),
    "batched twice": lambda g: request(g, (2, 1)),
    "grouped heads": lambda g: request(g, (2,), 2, 2),
    "grouped keys and values, not alike": lambda g: request(g, (2,), 1, 2),
    "bias per edge": lambda g: replace(request(g, (2,)), bias=(leaf(g.num_edges, HEADS),)),
    "bias per batch and edge": lambda g: replace(request(g, (2,)), bias=(leaf(2, g.num_edges, 1),)),
    "bias by rule": lambda g: replace(request(g), bias=(table(g),)),
    "bias by rule, batched": lambda g: replace(request(g, (2,)), bias=(table(g),)),
    "several biases": lambda g: replace(request(g, (2,)), bias=(table(g, 1), table(g), leaf(g.num_edges, HEADS))),
    "softcap": lambda g: replace(
        request(g), score=Dot(leaf(g.num_dst, HEADS, WIDTH), leaf(g.num_src, HEADS, WIDTH), 2.0, softcap=1.5)
    ),
    "sigmoid": lambda g: replace(request(g, (2,)), normalize="sigmoid", bias=(table(g),)),
    "vectors on keys": lambda g: on_keys(request(g, (2,), 2, 1), Offset(2)),
    "vectors on keys for all heads alike": lambda g: on_keys(request(g), Offset(3), 1),
    "a vector for each offset": lambda g: numbered(on_keys(request(g, (2, 1)), Offset(40))),
    "one vector": lambda g: on_keys(request(g), Offset(0)),
    "vectors by a matrix of classes": lambda g: numbered(on_both(request(g, (2,)), Classes(3))),
    "vectors on keys and values": lambda g: on_both(request(g, (2,), 2, 1), Offset(2), 1),
    "tables with spare rows": lambda g: with_spare_rows(request(g, (2,))),
    "a bias table with spare rows": lambda g: replace(request(g), bias=(BiasTable(leaf(9, HEADS), Offset(1)),)),
    "vectors on keys and values, dropout": lambda g: numbered(
        on_both(replace(request(g, (2,)), dropout=0.4, seed=SEED), Offset(4))
    ),
    "vectors on values, sigmoid": lambda g: replace(
        request(g, (2,)), normalize="sigmoid", edge_value=vectors(Offset(2), HEADS, WIDTH + 2)
    ),
    "unnormalised": lambda g: replace(request(g, (2,)), normalize="none"),
    "dropout": lambda g: replace(request(g, (2,)), dropout=0.4, seed=SEED),
    "dropout, grouped heads and biases": lambda g: replace(
        request(g, (2,), 2, 2), dropout=0.4, seed=SEED, bias=(table(g),)
    ),
}


def both(graph: Graph, make: Callable[[Graph], Request], backend: ModuleType) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients, from the backend and from the specification."""
    given = make(graph)
    leaves = [t for t in given.tensors if t.requires_grad]
    found = []
    for b in (backend, edge_list):
        out, _ = b.run(given)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, direction, materialize_grads=True)])
    return found[0], found[1]


@pytest.mark.parametrize("backend", OTHERS, ids=lambda b: b.NAME)
@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_agrees_with_the_specification(make: Callable[[Graph], Request], backend: ModuleType) -> None:
    for name, graph in GRAPHS.items():
        if backend.supports(make(graph)) is None:
            ours, expected = both(graph, make, backend)
            for what, a, b in zip(("output", *["gradient"] * 9), ours, expected, strict=False):
                torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, n=name, w=what: f"{w} over {n}: {m}")


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_dense_takes_every_dot_product(make: Callable[[Graph], Request]) -> None:
    for name, graph in GRAPHS.items():
        assert dense.supports(make(graph)) is None, name


@pytest.mark.parametrize("backend", ["auto", "edge_list", "dense", "csr"])
def test_spare_rows_of_tables_change_nothing_and_get_zero_gradients(backend: str) -> None:
    rule, spare = Offset(1), 2
    given = request(graphs.complete().bind(7))
    shapes = ((HEADS, WIDTH), (HEADS, WIDTH + 2), (HEADS,))
    long = [leaf(rule.count + spare, *shape) for shape in shapes]
    short = [table.detach()[: rule.count].requires_grad_() for table in long]
    found = []
    for tables in (long, short):
        key, value, bias = (EmbeddingTable(table, rule) for table in tables)
        asked = replace(given, score=replace(given.score, edge_key=key), edge_value=value, bias=(bias,))
        out, _ = ops.run(asked, backend)
        found.append((out, torch.autograd.grad(out.square().sum(), tables)))
    (out, gradients), (expected, narrow) = found
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for gradient, exact in zip(gradients, narrow, strict=True):
        torch.testing.assert_close(gradient[: rule.count], exact, **CLOSE)
        assert gradient.shape[0] == rule.count + spare
        assert gradient[rule.count :].eq(0).all()


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
def test_weights_come_back_aligned_to_the_callers_edges(normalize: str) -> None:
    for name, graph in GRAPHS.items():
        given = replace(request(graph, (2,), 2, 2), normalize=normalize, dropout=0.3, seed=SEED, bias=(table(graph),))
        asking = replace(given, return_weights=True)
        assert dense.supports(asking) is None, name
        expected = edge_list.run(asking)[1]
        out, weights = dense.run(asking)
        assert weights.shape == (2, graph.num_edges, HEADS), name
        torch.testing.assert_close(weights, expected, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(out, dense.run(given)[0], **CLOSE, msg=lambda m, n=name: f"asking, {n}: {m}")
        if normalize == "softmax":
            rows = torch.zeros(2, graph.num_dst, HEADS, dtype=torch.float64)
            rows = rows.index_add(1, graph.edge_index[1], weights.detach())
            torch.testing.assert_close(rows, (graph.degree() > 0).double()[None, :, None].expand_as(rows), **CLOSE)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.NAME)
def test_who_hears_nobody_gets_zeros_and_finite_gradients(backend: ModuleType) -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 1], [1, 1, 3]]), 4)
    for make in REQUESTS.values():
        given = make(graph)
        if backend.supports(given) is None:
            out, _ = backend.run(given)
            assert out[..., [0, 2], :, :].eq(0).all()
            gradients = torch.autograd.grad(out.sum(), [t for t in given.tensors if t.requires_grad])
            assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
def test_a_row_whose_biases_are_all_minus_infinity_hears_nobody(backend: ModuleType) -> None:
    for graph in (graphs.complete().bind(4), graphs.window(1).bind(4)):
        bias = torch.zeros(graph.num_edges, 1, dtype=torch.float64)
        bias[graph.edge_index[1] == 2] = -torch.inf
        given = replace(request(graph), bias=(bias,))
        for one in (given, replace(given, return_weights=True)):
            if backend.supports(one) is not None:
                continue
            out, _ = backend.run(one)
            assert out[2].eq(0).all()
            assert out[[0, 1, 3]].ne(0).all()
            gradients = torch.autograd.grad(out.sum(), [t for t in given.tensors if t.requires_grad])
            assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
@pytest.mark.parametrize("where", ["query", "key", "value"])
def test_nan_reaches_everybody_who_hears_it(where: str, backend: ModuleType) -> None:
    for name, graph in GRAPHS.items():
        if graph.num_dst < 2 or graph.num_src < 2:
            continue
        given = request(graph)
        if backend.supports(given) is not None:
            continue
        spoilt = {"query": given.score.query, "key": given.score.key, "value": given.value}[where]
        with torch.no_grad():
            spoilt[1] = torch.nan
        out, _ = backend.run(given)
        reached = graph.dense()[:, 1] if where != "query" else graph.dense().any(1) & (torch.arange(graph.num_dst) == 1)
        assert out[reached].isnan().all(), name
        if backend is not dense:
            assert out[~reached].isfinite().all(), name


@pytest.mark.parametrize("backend", [edge_list, tiles, csr], ids=lambda b: b.NAME)
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_reaches_only_those_who_attend_to_it(bad: float, where: str, backend: ModuleType) -> None:
    node, size = 75, 150  # several tiles of 32 x 96, some of them full
    topologies = ["causal()", "window(3)", "longformer(8, globals=2)", "documents([50, 40, 60])", "strided(20)"]
    for topology in [*map(graphs.parse, topologies), graphs.complete() - graphs.identity()]:
        graph = topology.bind(size)
        for more in ({}, {"dropout": 0.4, "seed": SEED}, {"bias": (leaf(graph.num_edges, 1),)}):
            given = replace(request(graph, (2,), 2, 2), **more)
            expected, _ = backend.run(given)
            spoilt = {"query": given.score.query, "key": given.score.key, "value": given.value}[where]
            with torch.no_grad():
                spoilt[1, node] = bad
            out, _ = backend.run(given)
            reached = graph.dense()[:, node] if where != "query" else torch.arange(size) == node
            assert out[0].equal(expected[0]), topology
            torch.testing.assert_close(out[1, ~reached], expected[1, ~reached], **CLOSE)
            if where != "key":  # a key may give a score of -inf, and then weighs nothing
                assert not out[1, reached].isfinite().all(), topology


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
@pytest.mark.parametrize("topology", [graphs.documents([5, 6]), graphs.causal() & graphs.documents([5, 6])], ids=str)
def test_packed_documents_do_not_leak_a_bit(topology: object, backend: ModuleType) -> None:
    graph = topology.bind(11)
    given = request(graph, (2,))
    before, _ = backend.run(given)
    with torch.no_grad():
        for x in (given.score.query, given.score.key, given.value):
            x[:, :5] = 100 * torch.randn_like(x[:, :5])
    after, _ = backend.run(given)
    assert not after[:, :5].equal(before[:, :5])
    assert after[:, 5:].equal(before[:, 5:])


# ---------------------------------------------------------------------------------------- 16 bits


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_features_are_summed_in_float32_at_degree_100_000(dtype: torch.dtype, backend: ModuleType) -> None:
    n, unit = 100_000, torch.finfo(dtype).eps / 2
    graph = graphs.complete().bind(2, n)
    query, key = torch.randn(2, 1, 4).to(dtype), torch.randn(n, 1, 4).to(dtype)
    value = (1 + torch.rand(n, 1, 4)).to(dtype)
    given = Request(graph, value, Dot(query, key, 0.5))
    wide = Request(graph, value.double(), Dot(query.double(), key.double(), 0.5))
    out, exact = backend.run(given)[0], edge_list.run(wide)[0]
    assert out.dtype == dtype
    # Weights and output are each rounded once to 16 bits; n float32 additions of positive terms lose n units at most.
    assert ((out.double() - exact).abs() <= (2.5 * unit + n * 2**-24) * exact).all()


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
def test_large_biases_keep_their_precision_beside_16_bit_features(backend: ModuleType) -> None:
    graph = graphs.complete().bind(1, 500)
    penalty = (torch.arange(-499, 500) + 4000) / 16  # 250 and more, where bfloat16 knows integers only
    features = torch.zeros(500, 1, 8, dtype=torch.bfloat16)
    value = torch.randn(500, 1, 8).bfloat16()
    given = Request(graph, value, Dot(features[:1], features, 1.0), (BiasTable(-penalty[:, None], Offset(499)),))
    exact = (torch.arange(500).double() / -16).softmax(0) @ value[:, 0].double()
    bound = 2.5 * 2**-8 * value.abs().max()  # weights and output are each rounded once
    assert ((backend.run(given)[0][0, 0].double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_narrow_types_on_every_graph(dtype: torch.dtype, backend: ModuleType) -> None:
    unit = torch.finfo(dtype).eps / 2
    for name, graph in GRAPHS.items():
        for kind in ("batched", "grouped heads", "bias by rule, batched", "bias per edge", "dropout"):
            exact = REQUESTS[kind](graph)
            leaves = [t.detach().to(dtype).requires_grad_() for t in (exact.score.query, exact.score.key, exact.value)]
            given = replace(exact, value=leaves[2], score=Dot(leaves[0], leaves[1], 0.7))
            again = replace(exact, value=leaves[2].double(), score=Dot(leaves[0].double(), leaves[1].double(), 0.7))
            if backend.supports(given) is not None:
                continue
            out, expected = backend.run(given)[0], edge_list.run(again)[0]
            assert out.dtype == dtype
            largest = max(float(x.detach().abs().max()) if x.numel() else 0.0 for x in leaves)
            # The specification computes in float32 and rounds once. Elsewhere a score of WIDTH products, of size s, is
            # off by s units at most, and so is its weight, relatively.
            size = 0.7 * WIDTH * largest**2 + 10
            loose = 2 * size * unit * largest / (1 - given.dropout)
            bound = unit * expected.abs() + 1e-5 * largest if backend is edge_list else loose
            assert ((out.double() - expected).abs() <= bound).all(), (name, kind)
            gradients = torch.autograd.grad(out.sum(), leaves)
            assert all(g.dtype == dtype and g.isfinite().all() for g in gradients), (name, kind)


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
@pytest.mark.parametrize("more", [{}, {"normalize": "sigmoid"}, {"return_weights": True}], ids=str)
def test_autocast_does_not_reach_into_backends(more: dict[str, object], backend: str) -> None:
    graph = graphs.window(2).bind(9)
    features = [torch.randn(9, 2, 4) for _ in range(3)]
    exact = ops.attend(graph, *features, backend=backend, **more)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.attend(graph, *features, backend=backend, **more)
    torch.testing.assert_close(out, exact, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------- refusals


def unusual(graph: Graph) -> dict[str, Request]:
    """Requests that not every backend takes."""
    given = request(graph)
    vectors = leaf(graph.num_edges, HEADS, WIDTH)
    additive = AdditiveScore(leaf(graph.num_dst, HEADS), leaf(graph.num_src, HEADS), LeakyReLU())
    return {
        "additive": replace(given, score=additive),
        "max": replace(given, reduce=Max()),
        "vectors on keys": replace(given, score=replace(given.score, edge_key=vectors)),
        "aggregation": Request(graph, given.value, normalize="none"),
        "dropout": replace(given, dropout=0.5, seed=SEED),
    }


def test_refusals_are_sentences_and_nothing_falls_back() -> None:
    graph = graphs.window(1).bind(5)
    refused = set()
    for given in unusual(graph).values():
        for backend in BACKENDS:
            reason = backend.supports(given)
            if reason is None:
                continue
            refused.add(backend.NAME)
            assert len(reason.split()) >= 4, reason
            assert "\n" not in reason
            assert not reason.endswith(".")
            with pytest.raises(plan.Refused) as failure:
                ops.run(given, backend.NAME)
            assert str(failure.value) == f"backend {backend.NAME!r} cannot run this: {reason}"
    assert refused == {b.NAME for b in OTHERS}


def test_repeated_edges_are_refused_by_dense_alone() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 0, 1], [1, 1, 0]]), 2)
    given = request(graph)
    assert "repeated edges" in dense.supports(given)
    assert edge_list.supports(given) is None


def test_too_large_a_mask_is_refused() -> None:
    graph = graphs.window(1).bind(10_000)
    given = Request(graph, torch.zeros(10_000, 1, 1), Dot(torch.zeros(10_000, 1, 1), torch.zeros(10_000, 1, 1), 1.0))
    assert dense.supports(given) == "a mask of 10,000 x 10,000 pairs is too large"
    assert "800,000,000 logits" in dense.supports(
        replace(given, graph=graphs.complete().bind(10_000), return_weights=True, value=torch.zeros(8, 10_000, 1, 1))
    )


@pytest.mark.parametrize("backend", ATTENDING, ids=lambda b: b.NAME)
def test_asked_for_by_name_it_is_that_one_that_runs(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    for b in BACKENDS:
        monkeypatch.setattr(b, "run", lambda request, name=b.NAME: (ran.append(name), None))
    for graph in GRAPHS.values():
        if backend.supports(request(graph)) is None:
            ops.run(request(graph), backend.NAME)
    assert set(ran) == {backend.NAME}


# ---------------------------------------------------------------------------------------- the scatter extra


@pytest.mark.scatter
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("weighted", [True, False])
def test_scatter_agrees_with_the_specification(reduce: str, weighted: bool) -> None:
    for name, graph in GRAPHS.items():
        if graph.num_edges == 0:
            with pytest.raises(plan.Refused, match="no edge"):
                ops.aggregate(graph, leaf(graph.num_src, 5), reduce, backend="scatter")
            continue
        x = leaf(2, graph.num_src, 5)
        weight = leaf(graph.num_edges) if weighted else None
        if reduce in ("max", "min"):
            with pytest.raises(plan.Refused, match="equal extremes"):
                ops.aggregate(graph, x, reduce, weight=weight, backend="scatter")
            with torch.no_grad():
                outs = [ops.aggregate(graph, x, reduce, weight=weight, backend=b) for b in ("scatter", "edge_list")]
            torch.testing.assert_close(*outs, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
            continue
        found = []
        for backend in ("scatter", "edge_list"):
            out = ops.aggregate(graph, x, reduce, weight=weight, backend=backend)
            leaves = [x] if weight is None else [x, weight]
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, **CLOSE, msg=lambda m, n=name: f"{n}: {m}")
