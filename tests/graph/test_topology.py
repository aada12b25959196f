"""Topologies: rules without a size, what they are equal to, how they bind, compose and print."""

import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from drawings import drawn
from well_formed import check_well_formed

from mpnn import Graph, Topology, graphs
from mpnn.graph.relations import Flipped, GridOffset, KernelOffset, Offset, Table
from tests.fuzz.cases import draw_rule
from tests.fuzz.project import topology_of
from tests.fuzz.topologies import matrix_of

SAMPLES = [
    graphs.complete(),
    graphs.causal(),
    graphs.identity(),
    graphs.window(3),
    graphs.window(2, dilation=3),
    graphs.strided(4),
    graphs.global_nodes(2),
    graphs.global_nodes([1, 3]),
    graphs.prefix(3),
    graphs.documents([4, 0, 8]),
    graphs.documents([4, 8], inner=graphs.prefix(2) | graphs.window(1)),
    graphs.documents([4, 8], src_lengths=[3, 2]),
    graphs.permutation([2, 0, 1]),
    graphs.memory(3),
    graphs.random(4),
    graphs.random(4, block=2, seed=7),
    graphs.longformer(4, globals=1),
    graphs.longformer(4, globals=[0, 5]),
    graphs.bigbird(),
    graphs.bigbird(block=2, window=1, random=1, globals=0, seed=3),
    graphs.grid(3, 4),
    graphs.grid(3, 4, connectivity=8),
    graphs.neighborhood(3, 4, 1),
    graphs.neighborhood(12, kernel_size=4, stride=2, dilation=3, causal=True, border="natten"),
    graphs.windows(4, 4, size=2, shift=1),
]


# ------------------------------------------------------------------------------------------------ identity


@pytest.mark.parametrize("topology", SAMPLES, ids=str)
def test_a_topology_prints_as_the_text_that_gives_it_back(topology: Topology) -> None:
    again = graphs.parse(repr(topology))
    assert again == topology
    assert hash(again) == hash(topology)


def test_expressions_print_with_the_parentheses_they_need() -> None:
    causal, window = graphs.causal(), graphs.window(2)
    assert str(causal & window) == "causal() & window(2)"
    assert str(~(causal | window) - graphs.identity()) == "~(causal() | window(2)) - identity()"
    assert str(causal - (window - graphs.identity())) == "causal() - (window(2) - identity())"
    for expression in (causal - window - graphs.identity(), causal - (window - graphs.identity()), ~(causal & window)):
        assert graphs.parse(repr(expression)) == expression


def test_long_lists_are_written_in_full_and_cut_short_for_people() -> None:
    long = graphs.documents([1] * 100)
    for topology in (long, graphs.global_nodes(range(7)) | ~graphs.permutation(range(1000))):
        assert graphs.parse(repr(topology)) == topology
    assert repr(graphs.documents(range(7))) == "documents([0, 1, 2, 3, 4, 5, 6])"
    assert str(long - graphs.global_nodes([0, 2])) == "documents(<100 values>) - global_nodes([0, 2])"
    assert str(graphs.documents([1] * 6)) == "documents([1, 1, 1, 1, 1, 1])"
    assert long.bind(100).name == "documents(<100 values>)"
    with pytest.raises(ValueError, match=r"the lengths of the documents add up to 100, but") as error:
        long.bind(3)
    assert len(str(error.value)) < 200


RELATED = [
    graphs.window(1).with_relation(Offset(1)),
    (graphs.window(1) | graphs.causal()).with_relation(GridOffset(4, 1, 2)),
    (~graphs.window(1)).with_relation(Offset(2)),
    ~graphs.window(1).with_relation(Offset(2)),
    graphs.window(1).with_relation(Offset(2)) - graphs.identity(),
    graphs.complete().with_relation(Flipped(KernelOffset(4, 2, (1, 2), padding=(0, 1)))),
    graphs.convolution(4, 6, [1, 3], padding=[0, 1], dilation=2),
    graphs.pooling(4, 6, [2, 3]),
]


@pytest.mark.parametrize("topology", RELATED, ids=str)
def test_relations_are_part_of_the_text(topology: Topology) -> None:
    assert graphs.parse(repr(topology)) == topology


def test_equal_arguments_make_equal_topologies() -> None:
    assert graphs.window(3) == graphs.window(np.int64(3)) == graphs.window(radius=3, dilation=1)
    assert graphs.documents([2, 3]) == graphs.documents((2, 3)) == graphs.documents(torch.tensor([2, 3]))
    assert graphs.causal() & graphs.window(3) == graphs.causal() & graphs.window(3)
    distinct = [
        *SAMPLES,
        *(~t for t in SAMPLES),
        graphs.causal() | graphs.window(1),
        graphs.causal() & graphs.window(1),
    ]
    assert len(set(distinct)) == len(distinct)


# ------------------------------------------------------------------------------------------------ binding


def test_binding_is_cached() -> None:
    graph = graphs.window(3).bind(100)
    assert graphs.window(3).bind(100) is graph
    assert graphs.window(3).bind(100, 100) is graph
    assert graphs.window(3).bind(np.int64(100)) is graph
    assert graphs.window(3).bind(101) is not graph
    assert (graphs.causal() & graphs.window(3)).bind(100) is (graphs.causal() & graphs.window(3)).bind(100)


def test_memory_puts_cached_sources_first() -> None:
    graph = graphs.memory(2).bind(3)
    expected = drawn("""
        ###..
        ####.
        #####
    """)
    assert (graph.num_dst, graph.num_src, graph.shift) == (3, 5, 2)
    assert torch.equal(graph.dense(), expected)
    assert graphs.memory(2).bind(3, 5) is graph
    assert torch.equal(graphs.memory(0).bind(3).dense(), graphs.causal().bind(3).dense())


def test_memory_counts_within_expressions() -> None:
    for topology, expected in (
        (graphs.memory(2) & graphs.window(1), """
            .##..
            ..##.
            ...##
        """),
        (graphs.window(1) & (graphs.memory(2) | graphs.complete()), """
            .###.
            ..###
            ...##
        """),
    ):  # fmt: skip
        graph = topology.bind(3)
        assert (graph.num_src, graph.shift) == (5, 2)
        assert torch.equal(graph.dense(), drawn(expected))


POSITIONAL = [
    graphs.causal(),
    graphs.identity(),
    graphs.window(2),
    graphs.window(1, dilation=2),
    graphs.strided(2),
    graphs.fixed(2),
    graphs.prefix(2),
    graphs.global_nodes(1),
    graphs.longformer(2, globals=1),
    graphs.bigbird(block=1, window=1, random=0, globals=1),
    graphs.memory(0),
    graphs.complete() - graphs.identity(),
    ~graphs.causal(),
    graphs.causal().with_relation(Offset(1)),
]


@pytest.mark.parametrize("topology", POSITIONAL, ids=str)
def test_fewer_destinations_than_sources_can_stand_in_two_ways(topology: Topology) -> None:
    advice = r"the last 2 of 5 nodes.*bind\(5\)\.rows\(3, 5\).*the first 2.*bind\(5\)\.rows\(0, 2\)"
    with pytest.raises(ValueError, match=advice):
        topology.bind(2, 5)
    assert topology.bind(0, 5).num_edges == 0
    last, first = topology.bind(5).rows(3, 5), topology.bind(5).rows(0, 2)
    assert torch.equal(last.dense(), topology.bind(5).dense()[3:])
    assert torch.equal(first.dense(), topology.bind(5).dense()[:2])
    assert (last.shift, first.shift) == (3, 0)


def test_a_topology_joined_with_rows_stands_where_they_stand() -> None:
    rows = graphs.causal().bind(6).rows(3, 5)
    expected = (graphs.causal() & graphs.window(1)).bind(6).rows(3, 5)
    for graph in (rows & graphs.window(1), graphs.window(1) & rows):
        assert torch.equal(graph.dense(), expected.dense())
        assert graph.shift == 3
    with pytest.raises(ValueError, match=r"rows\(0, 2\)"):
        graphs.from_edges([[4], [0]], num_src=5, num_dst=2) & graphs.window(1)  # these rows have no positions


@pytest.mark.parametrize("size", [None, 2.0, "4", True])
def test_a_size_is_an_integer(size: Any) -> None:
    with pytest.raises(TypeError, match="num_dst must be an integer; got"):
        graphs.causal().bind(size)


def test_bad_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="num_dst must be at least 0; got -1"):
        graphs.causal().bind(-1)
    with pytest.raises(ValueError, match="num_src must be at least 0; got -3"):
        graphs.causal().bind(2, -3)
    with pytest.raises(ValueError, match=r"memory\(2\) are 2 memory nodes.*num_src must be 5; got 4"):
        graphs.memory(2).bind(3, 4)
    with pytest.raises(ValueError, match=r"memory\(2\).*num_src must be 5; got 6"):
        (graphs.memory(2) | graphs.memory(3)).bind(3)
    with pytest.raises(ValueError, match=r"documents\(\[2, 2\]\) needs as many sources as destinations; got 4 x 5"):
        graphs.documents([2, 2]).bind(4, 5)
    with pytest.raises(ValueError, match="add up to 4, but the graph has 5 nodes"):
        graphs.documents([2, 2]).bind(5)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda i, n: (i, i + 1), r"must return a list of pairs \[\(start, stop\), ...\], even for a single pair"),
        (lambda i, n: (0, n), "even for a single pair; got int for a pair"),
        (lambda i, n: [(0, i, n)], "got tuple for a pair"),
        (lambda i, n: None, r"must return a list of pairs \[\(start, stop\), ...\]; got None"),
        (lambda i, n: [(i / 2, i + 1)], "must be integers; got float64: divide with // instead of /"),
    ],
    ids=["a pair of arrays", "a pair of numbers", "three", "nothing", "floats"],
)
@pytest.mark.parametrize("n", [2, 5])
def test_a_rule_that_returns_no_pairs_of_integers_is_refused(rule: Any, message: str, n: int) -> None:
    with pytest.raises(TypeError, match=message):
        Topology.of(rule).bind(n)


def test_a_rule_whose_numbers_are_not_of_the_destinations_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must have a number for each of the 5 destinations.* of shape \[2\]"):
        Topology.of(lambda i, n: [(i[:2], n)]).bind(5)
    assert Topology.of(lambda i, n: [(np.zeros((2, 1), int), i)]).bind(5).num_edges == 10


@pytest.mark.parametrize(("num_dst", "num_src"), [(2**62, None), (8, 2**61)])
def test_sizes_whose_pairs_cannot_be_counted_are_refused(num_dst: int, num_src: int | None) -> None:
    with pytest.raises(ValueError, match=f"a graph of {num_dst} x .* is too large"):
        graphs.complete().bind(num_dst, num_src)


@pytest.mark.parametrize("name", ["num_edges", "edge_index", "num_dst", "dense"])
def test_a_rule_has_nothing_of_a_graph_and_says_so(name: str) -> None:
    topology = graphs.causal() & graphs.window(2)
    with pytest.raises(
        AttributeError, match=rf"causal\(\) & window\(2\) is a rule without a size and has no {name}; bind"
    ):
        getattr(topology, name)
    with pytest.raises(AttributeError, match="'_Algebra' object has no attribute 'edges'"):
        topology.edges  # noqa: B018


@pytest.mark.parametrize("graph", [graphs.causal(), graphs.causal().bind(3)], ids=["topology", "graph"])
def test_neither_and_nor_or_nor_not_can_join_sets_of_edges(graph: Any) -> None:
    for join in (lambda: graph and graph, lambda: graph or graph, lambda: not graph):
        with pytest.raises(TypeError, match=r"true nor false: write a & b, a \| b or ~a.* with `is None`"):
            join()


# ------------------------------------------------------------------------------------------------ the user's own


def _parity(i: np.ndarray, num_src: int, offset: int = 0) -> Iterable[tuple[Any, Any]]:
    """Even rows attend to all nodes, odd ones to the first `1 + offset`; one pair of plain integers, one of arrays."""
    return [(0, 1 + offset), (0, np.where(i % 2 == 0, num_src, 0))]


def test_a_topology_is_a_rule_of_runs() -> None:
    topology = Topology.of(_parity, 1)
    assert str(topology) == "parity(1)"
    assert str(Topology.of(_parity, 0)) == "parity()"
    expected = drawn("""
        ####
        ##..
        ####
    """)
    assert torch.equal(topology.bind(3, 4).dense(), expected)
    both = (topology & graphs.causal()).bind(4).rows(0, 3)
    assert torch.equal(both.dense(), expected & torch.ones(3, 4).tril().bool())


def test_rows_that_are_alike_are_given_once() -> None:
    def first_of_block(i: np.ndarray, num_src: int) -> Iterable[tuple[Any, Any]]:
        assert i.tolist() == [0, 2, 4]
        return [(i, i + 2)]

    graph = Topology.of(first_of_block, alike=2).bind(5)
    assert torch.equal(graph.dense(), graphs.documents([2, 2, 1]).bind(5).dense())


def test_labels_make_cliques() -> None:
    def parity(n: int) -> np.ndarray:
        return np.arange(n) % 2

    graph = Topology.cliques(parity).bind(3)
    assert torch.equal(graph.dense(), drawn("#.# .#. #.#"))
    assert [c.tolist() for c in graph.cliques] == [[[1]], [[0, 2]]]


def test_arguments_are_the_identity_and_so_hashable() -> None:
    with pytest.raises(TypeError, match=r"must be hashable; got \(\[1, 2\],\): unhashable type: 'list'"):
        Topology.of(_parity, [1, 2])


# ------------------------------------------------------------------------------------------------ algebra


def test_a_topology_takes_the_size_of_the_graph_it_meets() -> None:
    graph = graphs.from_edges([[0, 1, 2, 2], [1, 1, 0, 2]])
    for together, expected in (
        (graph - graphs.identity(), "..# #.. ..."),
        (graphs.identity() - graph, "#.. ... ..."),
        (graph & graphs.causal(), "... ##. ..#"),
        (graphs.causal() & graph, "... ##. ..#"),
        (graph | graphs.identity(), "#.# ##. ..#"),
        (graphs.identity() | graph, "#.# ##. ..#"),
    ):
        assert isinstance(together, Graph)
        assert torch.equal(together.dense(), drawn(expected))


@pytest.mark.parametrize("other", [3, None, "causal"])
def test_only_topologies_and_graphs_combine(other: Any) -> None:
    for combine in (lambda a, b: a | b, lambda a, b: a & b, lambda a, b: a - b):
        with pytest.raises(TypeError, match="unsupported operand"):
            combine(graphs.causal(), other)
        with pytest.raises(TypeError, match="unsupported operand"):
            combine(other, graphs.causal())
        with pytest.raises(TypeError, match="unsupported operand"):
            combine(graphs.causal().bind(3), other)


def test_relations_ride_along() -> None:
    near = graphs.window(1).with_relation(Offset(1))
    assert str(near & graphs.causal()) == "window(1).with_relation(Offset(clip=1)) & causal()"
    graph = (near & graphs.causal()).bind(3)
    assert graph.edge_index.tolist() == [[0, 0, 1, 1, 2], [0, 1, 1, 2, 2]]
    assert graph.edge_type.tolist() == [1, 0, 1, 0, 1]
    assert graph.num_edge_types == 3
    distances = torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]])
    assert graphs.causal().with_relation(distances).bind(3).edge_type.tolist() == [0, 1, 0, 2, 1, 0]


def test_a_table_of_classes_must_fit() -> None:
    table = torch.zeros(3, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"Table\(3 x 3, 1 edge types\) does not fit a graph of 4 x 4"):
        graphs.causal().with_relation(table).bind(4)
    with pytest.raises(ValueError, match="memory nodes"):
        graphs.memory(2).with_relation(Table(torch.zeros(3, 5, dtype=torch.int64))).bind(3)


# ------------------------------------------------------------------------------------------------ random expressions


@pytest.mark.parametrize("first", range(0, 400, 50))
@pytest.mark.sample(3)
def test_any_expression_is_its_boolean_mask(first: int) -> None:
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        n = draw.choice([0, 1, 2, 3, 5, 8, 11, 13])
        rule = draw_rule(draw, n, n, None, depth=draw.choice([1, 2, 3]))
        topology, expected = topology_of(rule), matrix_of(rule, n, n)[0]
        graph = topology.bind(n)
        check_well_formed(graph.runs)
        assert (graph.dense().numpy() == expected).all(), topology
        assert graph.num_edges == expected.sum()
        assert graph.degree().tolist() == expected.sum(1).tolist()
        assert graph.edge_index.flip(0).tolist() == [ends.tolist() for ends in np.nonzero(expected)]
        assert (graph.rows(n // 3, n).dense().numpy() == expected[n // 3 :]).all(), topology
        assert (graph.reverse().dense().numpy() == expected.T).all(), topology
        assert (graph.reverse().reverse().dense().numpy() == expected).all(), topology
        assert graphs.parse(repr(topology)) == topology
        if graph.labels is not None:
            check_cliques(graph)


def check_cliques(graph: Graph) -> None:
    """Nodes have one label if they attend to each other, and each is in one clique of this label."""
    assert (graph.dense().numpy() == (graph.labels[:, None] == graph.labels)).all()
    members = [row for same_size in graph.cliques for row in same_size.tolist()]
    assert sorted(node for row in members for node in row) == list(range(graph.num_dst))
    assert all(len({int(graph.labels[node]) for node in row}) == 1 for row in members)


def test_documents_have_labels() -> None:
    check_cliques(graphs.documents([3, 0, 4]).bind(7))
    check_cliques((graphs.documents([3, 4]) & graphs.documents([2, 5])).bind(7))


def test_a_rule_of_another_signature_is_refused_with_its_arguments() -> None:
    with pytest.raises(TypeError, match=r"called as rule\(i, num_src, \*args\).*lambda does not fit: too many"):
        Topology.of(lambda i: [(i, i + 1)]).bind(5)  # type: ignore[arg-type, misc]

    def fails_itself(i: Any, num_src: int) -> Any:
        return [(i, i + None)]

    with pytest.raises(TypeError, match="unsupported operand"):
        Topology.of(fails_itself).bind(5)


def test_a_rule_of_one_destination_is_told_that_it_gets_all() -> None:
    def of_one(i: Any, num_src: int) -> list[tuple[Any, Any]]:
        return [(0, 1 if i > 2 else 2)]

    def other(i: Any, num_src: int) -> list[tuple[Any, Any]]:
        raise ValueError("no such size")

    with pytest.raises(TypeError, match=r"the rule of_one gets all destinations at once, as the array i.*np.where"):
        Topology.of(of_one).bind(5)
    with pytest.raises(ValueError, match="no such size"):
        Topology.of(other).bind(5)
