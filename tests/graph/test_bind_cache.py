"""What graphs keep: the cache of bound graphs has a limit in bytes, pickles hold definitions, requests that cannot fit
are refused before they are tried."""

from __future__ import annotations

import copy
import functools
import gc
import operator
import pickle
import sys
import tracemalloc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from steps import at_most

from mpnn import MessagePassing, Topology, graphs, ops
from mpnn.attention import DotProduct
from mpnn.graph import Graph, bound, capacity
from mpnn.graph.bind_cache import BindCache, bytes_of
from mpnn.graph.relations import Offset, Table

# ---------------------------------------------------------------------------------------- the cache


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> BindCache:
    """The library's cache, empty, with a limit that the test may change."""
    limit = graphs.cache.limit
    graphs.cache.clear()
    yield graphs.cache
    graphs.cache.limit = limit
    graphs.cache.clear()


def means(n: int) -> None:
    ops.aggregate(graphs.causal().bind(n), torch.ones(n, 2), "mean", backend="edge_list")


def test_the_cache_counts_what_is_derived_from_its_graphs(cache: BindCache) -> None:
    graph = graphs.causal().bind(300)
    assert len(cache) == 1
    empty = cache.nbytes
    edges = graph.num_edges
    means(300)
    assert cache.nbytes - empty >= 24 * edges  # edge_index and the row of each edge, at the least
    assert cache.nbytes - empty <= 64 * edges


def test_the_cache_keeps_to_its_limit_in_bytes(cache: BindCache) -> None:
    cache.limit = 10 << 20
    for n in range(300, 330):
        means(n)
    assert len(cache) < 30
    graphs.causal().bind(7)
    assert cache.nbytes <= cache.limit
    again = graphs.causal().bind(329)
    assert "ends" in vars(again), "the graph that was used last is still there, with what was derived from it"


def test_graphs_that_were_bound_before_anything_was_derived_are_counted(cache: BindCache) -> None:
    held = [graphs.causal().bind(n) for n in range(300, 330)]
    for graph in held:
        ops.aggregate(graph, torch.ones(graph.num_src, 2), "mean", backend="edge_list")
    cache.limit = 10 << 20
    assert cache.nbytes <= cache.limit
    assert 1 < len(cache) < 30


def test_what_hits_derive_counts_too(cache: BindCache) -> None:
    cache.limit = 10 << 20
    for n in range(300, 330):
        graphs.causal().bind(n)
    assert len(cache) == 30
    for n in range(300, 330):
        means(n)
    graphs.causal().bind(329)
    assert len(cache) < 30


def test_graphs_derived_from_graphs_count_too(cache: BindCache) -> None:
    graph = graphs.causal().bind(200)
    before = cache.nbytes
    reverse = graph.cached("reverse", graph.reverse)
    _ = reverse.csr
    assert cache.nbytes - before >= 16 * graph.num_edges


def test_the_graph_in_use_stays_however_large(cache: BindCache) -> None:
    cache.limit = 0
    graph = graphs.causal().bind(100)
    means(100)
    assert graphs.causal().bind(100) is graph
    graphs.causal().bind(101)
    assert len(cache) == 1
    assert graphs.causal().bind(100) is not graph


def test_a_cleared_cache_holds_nothing(cache: BindCache) -> None:
    graph = graphs.causal().bind(100)
    gone = weakref.ref(graph)
    del graph
    assert gone() is not None
    cache.clear()
    gc.collect()
    assert gone() is None
    assert (len(cache), cache.nbytes) == (0, 0)


def test_values_of_a_graph_with_parameters_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bound, "_MOST_VALUES", 3)
    values = bound.Values()
    values.keep("edges", list)
    for number in range(6):
        assert values.keep(("tiles", number), lambda number=number: number) == number
    assert values == {"edges": [], **{("tiles", number): number for number in (3, 4, 5)}}
    values.keep(("weights", 1), list, is_limited=False)
    assert len(values) == 5


def test_the_number_of_graphs_is_limited_too(cache: BindCache) -> None:
    for n in range(1, 300):
        graphs.identity().bind(n)
    assert len(cache) == 256


@pytest.mark.parametrize("limit", [-1, 1.5, True, "1 GB", None])
def test_a_limit_is_a_number_of_bytes(limit: object) -> None:
    with pytest.raises((TypeError, ValueError), match="limit must"):
        graphs.cache.limit = limit  # type: ignore[assignment]


def test_bytes_are_counted_once_however_often_they_are_reached() -> None:
    x, y = torch.zeros(1000), np.zeros(1000)
    assert bytes_of([x, x[:10], {"again": x.view(10, 100)}, y, y[::2], lambda: (x, y)]) == 4000 + 8000
    assert bytes_of(torch.eye(3).to_sparse()) == 3 * 4 + 2 * 3 * 8
    rows = torch.sparse_csr_tensor(torch.arange(4), torch.arange(3), torch.ones(3), (3, 3), check_invariants=True)
    assert bytes_of(rows) == 3 * 4 + 4 * 8 + 3 * 8
    assert bytes_of([torch.zeros(9, device="meta"), None, "text", torch.nn.Linear(9, 9)]) == 0


# ---------------------------------------------------------------------------------------- what a graph remembers


def test_the_cache_of_a_graph_does_not_grow_with_dropout_rates() -> None:
    graph = graphs.causal().bind(8)
    x = torch.rand(8, 1, 4)
    ops.attend(graph, x, x, x, dropout=0.1)
    known = len(graph._memo)
    for rate in np.linspace(0.01, 0.9, 50):
        ops.attend(graph, x, x, x, dropout=float(rate))
    assert len(graph._memo) == known
    for rate in (1.0, -0.5, float("nan"), 1.5):  # what was found valid for one rate says nothing about these
        with pytest.raises(ValueError, match="dropout must lie in"):
            ops.attend(graph, x, x, x, dropout=rate)
    assert (ops.attend(graph, x, x, x, dropout=0.9) == 0).any()
    assert (ops.attend(graph, x, x, x) != 0).all()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
@pytest.mark.parametrize(
    "make",
    [
        lambda: graphs.causal()._graph(200, 200),
        lambda: graphs.documents([150, 50])._graph(200, 200),
        lambda: graphs.from_edges(torch.randint(0, 200, (2, 500)), 200, edge_attr=torch.rand(500, 2)),
        lambda: graphs.causal().with_relation(Offset(3))._graph(200, 200).rows(50, 90),
    ],
    ids=["runs", "labels", "edges", "rows with positions"],
)
def test_copies_and_pickles_hold_the_definition_alone(make, copied) -> None:
    graph = make()
    fresh = len(pickle.dumps(graph))
    _ = graph.csr, graph.csc, graph.edge_type, graph.runs, graph.num_edges, graph.labels, graph.to("meta").edge_index
    ops.aggregate(graph, torch.rand(graph.num_src, 2), "mean")
    assert len(pickle.dumps(graph)) == fresh
    other = copied(graph)
    assert not {"csr", "csc", "ends", "types"} & vars(other).keys()
    assert torch.equal(other.edge_index, graph.edge_index)
    assert other.edge_attr is graph.edge_attr is None or torch.equal(other.edge_attr, graph.edge_attr)
    assert other.num_edge_types == graph.num_edge_types


def test_pickles_are_as_large_as_the_runs() -> None:
    graph = graphs.causal().bind(2000)
    _ = graph.csr, graph.csc
    assert len(pickle.dumps(graph)) < 60_000  # pointers, starts and stops: 48 kB


def test_pickles_hold_no_memory_beyond_a_view() -> None:
    edges = torch.randint(0, 9, (100, 2, 1000))
    assert len(pickle.dumps(graphs.from_edges(edges[3], 9))) < 20_000
    image = graphs.grid(100, 100).bind(10_000).with_positions(torch.arange(10_000), torch.arange(10_000))
    assert len(pickle.dumps(image.rows(0, 2))) < 100_000


def test_a_table_of_classes_is_pickled_once() -> None:
    table = Table(torch.randint(0, 4, (50, 50)))
    size = len(pickle.dumps(table))
    table.ids(torch.arange(50, device="meta"), torch.arange(50, device="meta"))
    assert len(pickle.dumps(table)) == size
    again = pickle.loads(pickle.dumps(table))
    assert torch.equal(again.ids(torch.arange(50), torch.arange(50)), table.ids(torch.arange(50), torch.arange(50)))


# ---------------------------------------------------------------------------------------- what cannot fit


def test_dropping_edges_that_do_not_fit_is_refused_before_numbers_are_drawn() -> None:
    graph = graphs.causal()._graph(100_000, 100_000)
    assert graph.num_edges == 100_000 * 100_001 // 2  # its rows are made
    op = MessagePassing(graph, edge_dropout=0.5)
    with (
        at_most(calls=10_000, megabytes=1),
        pytest.raises(MemoryError, match=r"the edges of Graph\(.*5,000,050,000 edges\).*GiB.* are available"),
    ):
        graph.drop_edges(0.5)
    with at_most(calls=10_000, megabytes=1), pytest.raises(MemoryError, match="do not fit into memory"):
        op(torch.zeros(100_000, 1))


def test_a_matrix_that_does_not_fit_is_refused() -> None:
    with pytest.raises(MemoryError, match=r"the matrix of Graph.* would need about [\d.,]+ GiB"):
        graphs.complete()._graph(10**6, 10**6).dense()


def test_topologies_with_too_many_runs_are_refused_early() -> None:
    with (
        at_most(calls=10_000, megabytes=100),
        pytest.raises(MemoryError, match=r"a graph of 500000 x 500000 .* with 62,499,750,002 or more runs"),
    ):
        graphs.strided(2).bind(500_000)


def test_a_rule_that_gives_runs_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 1 << 29)
    combs = Topology.of(combs_of)
    with pytest.raises(MemoryError, match="or more runs of sources would need about"):
        combs.bind(1 << 20)


def combs_of(i: np.ndarray, num_src: int):
    for k in range(0, num_src, 2):
        yield i * 0 + k, i * 0 + k + 1


def test_small_allocations_are_never_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_bytes", lambda: 0)
    graphs.causal()._graph(1000, 1000).drop_edges(0.5)


def test_the_system_states_how_much_memory_there_is() -> None:
    assert 1 << 20 < capacity.available_bytes() <= 1 << 62


def test_strided_takes_no_memory_but_for_its_runs() -> None:
    tracemalloc.start()
    runs = graphs.strided(2)._graph(2000, 2000).runs
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(runs.start) > 990_000
    assert peak < 1.8 * (runs.start.nbytes + runs.stop.nbytes)  # sorting them took 3.9 times as much


# ---------------------------------------------------------------------------------------- long expressions

COUNT = 1100


def joined(join, count: int = COUNT, reverse: bool = False) -> Topology:
    parts = [graphs.window(k) for k in range(count)]
    return functools.reduce(lambda a, b: join(b, a), parts) if reverse else functools.reduce(join, parts)


@pytest.fixture
def pythons_own_limit() -> Iterator[None]:
    """torch's compiler raises it."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("pythons_own_limit")
@pytest.mark.parametrize("join", [operator.or_, operator.and_, operator.sub], ids="|&-")
@pytest.mark.sample(3)
def test_more_topologies_than_pythons_recursion_limit_are_joined(join) -> None:
    topology = joined(join)
    assert topology == joined(join)
    assert hash(topology) == hash(joined(join))
    assert topology != joined(join, COUNT - 1)
    assert topology.memory == 0
    assert pickle.loads(pickle.dumps(topology)) == topology
    assert topology.bind(3).num_edges == {operator.or_: 9, operator.and_: 3, operator.sub: 0}[join]
    assert topology.with_relation(Offset(1)).bind(3).num_edge_types == 3
    assert graphs.parse(str(topology)) == topology


@pytest.mark.parametrize("join", [operator.or_, operator.and_])
def test_unions_read_the_same_from_both_ends(join) -> None:
    a, b, c = graphs.window(1), graphs.global_nodes(1), graphs.identity()
    assert join(a, join(b, c)) == join(join(a, b), c)
    topology = joined(join, reverse=True)
    assert graphs.parse(str(topology)) == topology


def nested(depth: int) -> Topology:
    topology = graphs.memory(2)
    for k in range(depth):
        topology = ~(topology | graphs.window(k % 3)) if k % 2 else graphs.complete() - topology
    return topology.with_relation(Offset(2))


def test_expressions_are_nested_as_deep_as_a_text_can_be() -> None:
    topology = nested(60)
    assert topology == nested(60) != nested(59)
    assert hash(topology) == hash(nested(60))
    assert pickle.loads(pickle.dumps(topology)) == copy.deepcopy(topology) == topology
    assert graphs.parse(repr(topology)) == topology
    assert topology.memory == 2
    assert topology.bind(3).num_src == 5
    with pytest.raises(ValueError, match="nested 100 deep"):
        nested(100)


@pytest.mark.parametrize("text", ["~({}) & causal()", "({}) - ({})", "window(1) | ({} ) & causal"])
def test_long_texts_are_read_inside_parentheses_too(text: str) -> None:
    part = " | ".join(["window(2)", "global_nodes([1, 2])"] * 150)
    short = "window(2) | global_nodes([1, 2])"
    read = graphs.parse(text.replace("{}", part))
    assert torch.equal(read.bind(9).dense(), graphs.parse(text.replace("{}", short)).bind(9).dense())


def test_a_long_text_with_a_mistake_names_it() -> None:
    with pytest.raises(ValueError, match=r"at column 18001 \('windw\(3\)'\): there is no topology 'windw'"):
        graphs.parse(" | ".join(["window(2)"] * 1500 + ["windw(3)"]))


def test_balanced_unions_keep_what_the_first_operand_says() -> None:
    near = graphs.window(1).with_relation(Offset(1))
    graph = functools.reduce(operator.or_, [graphs.identity(), near, *[graphs.window(2)] * 9]).bind(5)
    assert isinstance(graph, Graph)
    assert graph.num_edge_types == 3
    own = MessagePassing(graphs.causal() | graphs.memory(2), "sum", None, DotProduct(4, 1))
    assert own(torch.rand(3, 4), source=torch.rand(5, 4)).shape == (3, 4)


def test_a_graph_keeps_the_last_forms_of_many() -> None:
    """A held graph meets any number of widths and sizes of batches, as a service does."""
    graph = graphs.documents([3, 6]).bind(9)
    features = torch.randn(9, 2, 700)
    expected = ops.attend(graph, *[features[..., :8]] * 3)
    rows = graph.csr
    for width in range(1, 700):
        narrow = features[..., :width]
        ops.attend(graph, narrow, narrow, narrow)
        ops.attend(graph, *[features[..., :8].expand(width, 9, 2, 8)] * 3)
    assert len(graph._memo) < 300
    assert graph.csr is rows
    assert ops.attend(graph, *[features[..., :8]] * 3).equal(expected)


def test_values_of_users_stay() -> None:
    graph = graphs.causal().bind(9).alias()
    numbers = [graph.cached(("mine", k), lambda k=k: k) for k in range(600)]
    assert [graph.cached(("mine", k), lambda: -1) for k in range(600)] == numbers


def test_what_others_cache_has_names_of_its_own() -> None:
    """A user's key is none of the library's, whatever it is called."""
    graph, x = graphs.window(2).bind(9), torch.randn(9, 1, 4)
    expected = [ops.attend(graph, x, x, x, backend=backend) for backend in ("csr", "tiles", "dense", "edge_list")]
    fresh = graphs.window(2).bind(9).alias()
    for name in graph._memo:
        fresh.cached(name, lambda: "mine")
    found = [ops.attend(fresh, x, x, x, backend=backend) for backend in ("csr", "tiles", "dense", "edge_list")]
    torch.testing.assert_close(found, expected)
    for name in graph._memo:
        assert fresh.cached(name, lambda: "another") == "mine"
    assert graphs.cache.nbytes > 0


def test_bound_graphs_do_not_change() -> None:
    bound = (graphs.causal() & graphs.window(3)).bind(8)
    for name, value in (("shift", 3), ("name", "mine"), ("positions", None), ("anything", 1)):
        with pytest.raises(AttributeError, match=f"shared by all that bind it, so {name} cannot be set; change a copy"):
            setattr(bound, name, value)
    copies = bound.alias(), pickle.loads(pickle.dumps(bound)), bound.with_positions(*bound.node_positions())
    for graph in (*copies, bound.rows(0, 8), bound.reverse(), graphs.from_edges([[0], [1]])):
        graph.name = "mine"
        assert (graphs.causal() & graphs.window(3)).bind(8).name != "mine"
