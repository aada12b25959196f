"""The fused rows of `csr`, where they go beyond what all backends share: other scores, vectors on edges, hubs, memory.

Everything is compared with `edge_list`, the specification.
"""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import engine, graphs, ops
from mpnn.aggregate import Max, Mean
from mpnn.backends import csr, edge_list
from mpnn.backends.csr import edges as edge_orders
from mpnn.edge_tables import BiasTable, EmbeddingTable
from mpnn.engine import plan
from mpnn.engine.plan import refusal as why_not
from mpnn.graph import Graph
from mpnn.graph.relations import Offset, Relation
from mpnn.kernels import row_attention
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

SEED = torch.tensor(2**60 + 7)
# Sums of at most 60 float64 terms of size about 10, twice over (softmax, then values): 60 * 10 * 2 * 1.1e-16 < 2e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def scattered(nodes: int = 9, edges: int = 40) -> Graph:
    """Edges in no order, some of them repeated, with classes; node 0 has no in-neighbors, node 1 no
    out-neighbors."""
    generator = torch.Generator().manual_seed(5)
    src, dst = torch.randint(1, nodes, (2, edges), generator=generator)
    src = src + (src == 1)
    return graphs.from_edges(torch.stack([src, dst]), nodes + 1, edge_type=torch.arange(edges) % 3)


def dot(graph: Graph, batch: tuple[int, ...] = (), heads: int = 3, width: int = 5, shared: int = 3) -> Round:
    query, key = leaf(*batch, graph.num_dst, heads, width), leaf(*batch, graph.num_src, shared, width)
    return Round(graph, leaf(*batch, graph.num_src, shared, width + 2), Dot(query, key, 0.6))


def additive(
    graph: Graph, activation: Callable[[Tensor], Tensor], batch: tuple[int, ...] = (), heads: int = 3
) -> Round:
    ends = [leaf(*batch, n, heads) for n in (graph.num_dst, graph.num_src)]
    edge = leaf(graph.num_edges, heads)
    return Round(graph, leaf(*batch, graph.num_src, heads, 4), AdditiveScore(*ends, activation, edge))


def additive_v2(graph: Graph, activation: Callable[[Tensor], Tensor], edge_heads: int = 3) -> Round:
    ends = [leaf(n, 3, 5) for n in (graph.num_dst, graph.num_src)]
    edge = leaf(graph.num_edges, edge_heads, 5)
    return Round(graph, leaf(graph.num_src, 3, 4), AdditiveV2Score(*ends, leaf(3, 5), activation, edge))


REQUESTS: dict[str, Callable[[Graph], Round]] = {
    "additive": lambda g: additive(g, LeakyReLU(0.3), (2,)),
    "additive, torch's leaky_relu": lambda g: additive(g, F.leaky_relu, heads=8),
    "additive, tanh": lambda g: replace(additive(g, torch.tanh), bias=(leaf(g.num_edges, 3), BiasTable(leaf(3, 1)))),
    "additive v2": lambda g: additive_v2(g, LeakyReLU()),
    "additive v2, tanh": lambda g: additive_v2(g, torch.tanh, edge_heads=1),
    "additive v2 without edges": lambda g: replace(
        (r := additive_v2(g, torch.tanh)), score=replace(r.score, edge=None), bias=(BiasTable(leaf(3, 3)),)
    ),
    "vectors on edges": lambda g: with_vectors(g, leaf(g.num_edges, 3, 5), leaf(g.num_edges, 3, 7)),
    "vectors on edges, one for all heads": lambda g: with_vectors(g, leaf(g.num_edges, 1, 5), leaf(g.num_edges, 1, 7)),
    "vectors by class": lambda g: with_vectors(g, EmbeddingTable(leaf(3, 3, 5)), EmbeddingTable(leaf(3, 1, 7))),
    "vectors by rule": lambda g: with_vectors(
        g, EmbeddingTable(leaf(7, 1, 5), Offset(3)), EmbeddingTable(leaf(7, 3, 7), Offset(3))
    ),
    "vectors by class, batched": lambda g: replace(
        (r := dot(g, (2,))),
        score=replace(r.score, edge_key=EmbeddingTable(leaf(3, 3, 5))),
        edge_value=leaf(g.num_edges, 3, 7),
    ),
    "softcap, tables and biases": lambda g: replace(
        (r := dot(g, (2,))),
        score=replace(r.score, softcap=0.7),
        bias=(leaf(g.num_edges, 1), leaf(2, g.num_edges, 3), BiasTable(leaf(3, 3)), BiasTable(leaf(3, 1), Offset(1))),
    ),
    "mean": lambda g: replace(dot(g), reduce=Mean()),
    "weights by bias alone": lambda g: replace(dot(g), score=None, bias=(leaf(g.num_edges, 3),), normalize="sigmoid"),
    "grouped heads": lambda g: dot(g, heads=12, shared=4),
    "twelve heads, dropout": lambda g: replace(dot(g, heads=12, shared=12), dropout=0.5, seed=SEED),
    "wide heads": lambda g: dot(g, heads=2, width=70, shared=1),
}


def with_vectors(graph: Graph, edge_key: Tensor | EmbeddingTable, edge_value: Tensor | EmbeddingTable) -> Round:
    given = dot(graph)
    return replace(given, score=replace(given.score, edge_key=edge_key), edge_value=edge_value)


def check(given: Round, close: dict[str, float] = CLOSE, what: str = "") -> None:
    """Output and gradients are those of the specification."""
    assert why_not(csr, given) is None
    leaves = [t for t in given.tensors if t.requires_grad]
    found = []
    for backend in (csr, edge_list):
        out, _ = backend.run(given)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, direction)])
    for k, (ours, expected) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(ours, expected, **close, msg=lambda m, k=k: f"{what}, {k}: {m}")


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_agrees_with_the_specification(make: Callable[[Graph], Round]) -> None:
    empty = graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 3, edge_type=torch.zeros(0, dtype=torch.int64))
    for graph in (scattered(), empty):
        check(make(graph), what=str(graph))


def test_nothing_at_all_is_fine() -> None:
    graph = scattered()
    for given in (
        dot(graph, (0,)),
        dot(graph, (2, 0)),
        replace(dot(graph), score=Dot(leaf(10, 3, 0), leaf(10, 3, 0), 1.0)),
    ):
        check(given)
    wide = replace(dot(graph), value=leaf(10, 3, 0))
    assert csr.run(wide)[0].shape == (10, 3, 0)


@pytest.mark.parametrize("kind", ["additive, tanh", "additive v2", "vectors on edges", "softcap, tables and biases"])
def test_gradients_are_those_of_finite_differences(kind: str) -> None:
    given = REQUESTS[kind](scattered(4, 9))
    leaves = [t for t in given.tensors if t.requires_grad]
    assert torch.autograd.gradcheck(lambda *_: csr.run(given)[0], leaves)


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
def test_weights_come_back_in_the_callers_order_and_differentiate(normalize: str) -> None:
    graph = scattered()
    given = replace(dot(graph, (2,)), normalize=normalize, dropout=0.4, seed=SEED, return_weights=True)
    leaves, found = [t for t in given.tensors if t.requires_grad], []
    for backend in (csr, edge_list):
        out, weights = backend.run(given)
        alone = torch.autograd.grad(weights.square().sum(), leaves[1:], retain_graph=True)
        both = torch.autograd.grad(out.square().sum() + weights.sin().sum(), leaves)
        found.append([out, weights, *alone, *both])
    assert found[0][1].shape == (2, graph.num_edges, 3)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


# ---------------------------------------------------------------------------------------- rows


def hubs() -> Graph:
    """Node 0 has 3,000 in-edges, node 1 3,000 out-edges; 1,000 other edges are at random."""
    generator = torch.Generator().manual_seed(7)
    src, dst = torch.randint(0, 300, (2, 7000), generator=generator)
    dst[:3000], src[3000:6000] = 0, 1
    order = torch.randperm(7000, generator=generator)
    return graphs.from_edges(torch.stack([src, dst])[:, order], 300, edge_type=torch.arange(7000) % 2)


@pytest.fixture
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts as small as if the graph were large: 32 of 219 edges."""
    monkeypatch.setattr(row_attention, "_LEAST", 1)


@pytest.mark.usefixtures("several_parts")
@pytest.mark.parametrize("kind", ["dot", "additive", "additive v2", "by class", "sigmoid"])
def test_hubs_are_split_and_put_together_again(kind: str) -> None:
    graph = hubs()
    given = {
        "dot": lambda: replace(dot(graph), dropout=0.3, seed=SEED),
        "additive": lambda: additive(graph, LeakyReLU()),
        "additive v2": lambda: additive_v2(graph, LeakyReLU()),
        "by class": lambda: with_vectors(graph, EmbeddingTable(leaf(2, 3, 5)), EmbeddingTable(leaf(2, 3, 7))),
        "sigmoid": lambda: replace(dot(graph), normalize="sigmoid"),
    }[kind]()
    parts = row_attention.num_parts(edge_orders.by_destination(graph), 1)
    assert parts == 32
    assert int(graph.degree()[0]) > 10 * graph.num_edges / parts  # a hub lies in more than ten of them
    # 3,000 terms instead of 60: 50 times what CLOSE allows
    check(given, {"rtol": 5e-11, "atol": 5e-11})
    leaves, found = [t for t in given.tensors if t.requires_grad], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            out, _ = csr.run(given)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
        finally:
            torch.set_num_threads(1)
    assert all(one.equal(two) for one, two in zip(*found, strict=True))


@pytest.mark.usefixtures("several_parts")
def test_a_split_row_of_which_a_part_weighs_nothing() -> None:
    graph = hubs()
    bias = torch.zeros(graph.num_edges, 1, dtype=torch.float64)
    in_edges = (graph.edge_index[1] == 0).nonzero().squeeze(1)
    bias[in_edges[:1500]] = -torch.inf
    bias[in_edges[1500:]] = -1000.0
    bias[graph.edge_index[1] == 2] = -torch.inf
    given = replace(dot(graph), bias=(bias,))
    check(given, {"rtol": 5e-11, "atol": 5e-11})
    bias[in_edges] = -torch.inf
    check(given, {"rtol": 5e-11, "atol": 5e-11})
    assert csr.run(given)[0][[0, 2]].eq(0).all()


def test_large_scores_do_not_overflow() -> None:
    graph = scattered()
    given = dot(graph)
    check(replace(given, score=replace(given.score, scale=1e4)), {"rtol": 1e-9, "atol": 1e-9})


def test_nan_reaches_who_hears_it_and_nobody_else() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 3]]), 4)
    for part in ("value", "key"):
        given = dot(graph)
        with torch.no_grad():
            (given.value if part == "value" else given.score.key)[1] = torch.nan
        out, _ = csr.run(given)
        assert out[2].isnan().all()
        assert out[[0, 1, 3]].isfinite().all()


# ---------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_narrow_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    graph, unit = hubs(), torch.finfo(dtype).eps / 2
    for make in (dot, lambda g: additive(g, LeakyReLU()), lambda g: additive_v2(g, torch.tanh)):
        exact = make(graph)
        names = {"value": exact.value, **vars(exact.score)}
        given = {k: v.detach().to(dtype).requires_grad_() for k, v in names.items() if isinstance(v, Tensor)}
        wide = {k: v.detach().double().requires_grad_() for k, v in given.items()}
        narrow, double = (
            replace(exact, value=x["value"], score=replace(exact.score, **{k: v for k, v in x.items() if k != "value"}))
            for x in (given, wide)
        )
        out, expected = csr.run(narrow)[0], edge_list.run(double)[0]
        assert out.dtype == dtype
        # The result is rounded once. Before, float32: scores up to 30 are right to 30 * 15 * 2^-24, weights to as much
        # relatively, and positive sums of 3,000 weights lose 3,000 * 2^-24.
        largest = float(wide["value"].detach().abs().max())
        bound = unit * expected.abs() + (450 + 3000) * 2**-24 * largest
        assert ((out.double() - expected).abs() <= bound).all()
        for name, gradient in zip(given, torch.autograd.grad(out.sum(), list(given.values())), strict=True):
            assert gradient.dtype == dtype, name
            assert gradient.isfinite().all(), name


# ---------------------------------------------------------------------------------------- what is asked for alone


@pytest.mark.parametrize("name", ["dst", "src", "vector", "edge", "value"])
@pytest.mark.usefixtures("several_parts")
def test_each_gradient_alone(name: str) -> None:
    graph = hubs()
    given = additive_v2(graph, LeakyReLU())
    numbers = {"value": given.value, **vars(given.score)}
    alone = {k: v.detach().requires_grad_(k == name) for k, v in numbers.items() if isinstance(v, Tensor)}
    value = alone.pop("value")
    check(replace(given, value=value, score=replace(given.score, **alone)), {"rtol": 5e-11, "atol": 5e-11})


@pytest.mark.usefixtures("several_parts")
def test_biases_alone_are_scores() -> None:
    graph = hubs()
    check(Round(graph, leaf(300, 3, 4), None, (leaf(graph.num_edges, 3),)), {"rtol": 5e-11, "atol": 5e-11})


# ---------------------------------------------------------------------------------------- memory


def test_a_graph_without_references_is_freed_at_once() -> None:
    gc.disable()
    try:
        graph = hubs()
        given = with_vectors(graph, EmbeddingTable(leaf(2, 3, 5)), EmbeddingTable(leaf(2, 3, 7)))
        csr.run(given)[0].sum().backward()
        gone = weakref.ref(graph)
        del graph, given
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["dot", "additive", "additive v2"])
def test_nothing_of_edges_times_width_is_made(kind: str) -> None:
    nodes, edges, heads, width = 40, 4000, 2, 32
    graph = graphs.from_edges(torch.randint(0, nodes, (2, edges)), nodes)
    x, y, z = (leaf(nodes, heads, width) for _ in range(3))
    score = {
        "dot": Dot(x, y, 0.3),
        "additive": AdditiveScore(leaf(nodes, heads), leaf(nodes, heads), LeakyReLU()),
        "additive v2": AdditiveV2Score(x, y, leaf(heads, width), LeakyReLU()),
    }[kind]
    given = Round(graph, z, score)
    csr.run(given)[0].sum().backward()  # what the graph keeps is made here
    with torch.profiler.profile(profile_memory=True) as profile:
        csr.run(given)[0].sum().backward()
    taken = [e.self_cpu_memory_usage for e in profile.events()]
    assert max(taken) < 8 * edges * heads * width / 2


# ---------------------------------------------------------------------------------------- refusals


def test_what_it_cannot_do_is_refused_in_a_sentence() -> None:
    graph = scattered()
    given = dot(graph)
    refused = {
        "LeakyReLU and tanh, and not elu": replace(given, score=replace(additive(graph, F.elu).score)),
        "it cannot aggregate messages by max": replace(given, reduce=Max()),
        "edge_value is 1 wide, and the features": replace(given, edge_value=leaf(graph.num_edges, 3, 1)),
    }
    for sentence, request in refused.items():
        assert sentence in why_not(csr, request)
        with pytest.raises(plan.Refused, match=sentence):
            engine.run(request, "csr")


@pytest.mark.parametrize(
    "edge_type", [torch.tensor([3]).expand(4), torch.tensor([[0, 9], [1, 9], [2, 9], [3, 9]])[:, 0]]
)
def test_edge_types_may_have_any_strides(edge_type: Tensor) -> None:
    graph = Graph.from_edges(torch.tensor([[0, 1, 2, 2], [0, 0, 1, 2]]), 3, 3, edge_type=edge_type)
    x, table = leaf(3, 1, 8), leaf(4, 1)
    ours, exact = (ops.attend(graph, x, x, x, bias=BiasTable(table), backend=name) for name in ("csr", "edge_list"))
    torch.testing.assert_close(ours, exact, **CLOSE)
    gradients = (torch.autograd.grad(out.sin().sum(), (x, table)) for out in (ours, exact))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_a_rule_that_gives_types_beyond_its_count_is_refused() -> None:
    class Distance(Relation):
        count = 3

        def ids(self, dst: Tensor, src: Tensor) -> Tensor:
            return (dst - src).abs()

    x = leaf(5, 1, 8)
    with pytest.raises(IndexError, match=r"edge types from 0 to 4, and its count is 3: its ids must lie in \[0, 3\)"):
        ops.attend(graphs.causal().bind(5), x, x, x, bias=BiasTable(leaf(3, 1), Distance()), backend="csr")
