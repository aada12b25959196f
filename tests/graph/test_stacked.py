"""Graphs that differ by item and head: their algebra, their copies, and what they refuse."""

import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import Graph, MessagePassing, graphs
from mpnn.graph.bound import BoundGraph
from mpnn.graph.relations import Offset
from mpnn.graph.stacked import StackedGraph, by_edge_type

N = 6


def stacked(*leading: int) -> StackedGraph:
    graph = graphs.chosen(torch.randint(-1, N, (*leading, N, 4)), N)
    assert isinstance(graph, StackedGraph)
    return graph


@pytest.mark.parametrize("leading", [(3,), (2, 2), (1, 4)])
def test_set_algebra_is_that_of_each_graph(leading: tuple[int, ...]) -> None:
    one, two, causal = stacked(*leading), stacked(*leading), graphs.causal()
    a, b, c = one.dense(), two.dense(), causal.bind(N).dense()
    pairs: list[tuple[Any, Tensor]] = [
        (one & causal, a & c), (causal & one, a & c), (one | causal, a | c), (causal | one, a | c),
        (one - causal, a & ~c), (causal - one, c & ~a), (~one, ~a), (one & two, a & b), (one - two, a & ~b),
        (one & causal.bind(N), a & c), (causal.bind(N) - one, c & ~a), (one & (graphs.window(1) | graphs.prefix(2)),
         a & (graphs.window(1) | graphs.prefix(2)).bind(N).dense()),
    ]  # fmt: skip
    for found, expected in pairs:
        assert isinstance(found, StackedGraph)
        assert torch.equal(found.dense(), expected)


def test_queries_behind_cached_keys_are_cut_from_the_bound_topology() -> None:
    chosen = graphs.chosen(torch.randint(0, N, (2, 2, 3)), N)
    graph = chosen & graphs.causal().bind(N).rows(N - 2, N)
    assert graph.shift == N - 2
    assert torch.equal(graph.dense(), chosen.dense() & graphs.causal().bind(N).dense()[-2:])


@pytest.mark.parametrize(("leading", "heads"), [((2,), 1), ((2, 3), 3), ((1, 4), 4)])
def test_items_and_heads(leading: tuple[int, ...], heads: int) -> None:
    graph = stacked(*leading)
    assert (graph.items, graph.heads) == (leading[0], heads)
    assert torch.equal(graph.entry(0, heads - 1).dense(), graph.dense().view(-1, heads, N, N)[0, -1])
    with pytest.raises(IndexError, match=f"there are {leading[0]} items and {heads} heads; got 0 and {heads}"):
        graph.entry(0, heads)


def test_an_entry_is_a_graph_with_the_positions_of_all() -> None:
    graph = stacked(2, 3) & graphs.causal().with_relation(Offset(2))
    entry = graph.entry(1, 2)
    assert type(entry) is Graph
    assert torch.equal(entry.dense(), graph.dense()[1, 2])
    assert entry.shift == 0
    assert entry.relation == Offset(2)
    with pytest.raises(IndexError, match="2 items and 3 heads; got 2 and 0"):
        graph.entry(2)


def test_copies_are_equal() -> None:
    graph = stacked(2, 3) & graphs.causal().bind(N).with_positions(torch.arange(N) * 2, torch.arange(N) * 2)
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    for copy in (pickle.loads(pickle.dumps(graph)), torch.load(file, weights_only=True), graph.to("cpu")):
        assert copy.stack == (2, 3)
        assert torch.equal(copy.dense(), graph.dense())
        assert torch.equal(copy.positions[0], torch.arange(N) * 2)
    assert graph.to("meta").to("meta").device.type == "meta"
    assert graph.validate() is graph


@pytest.mark.parametrize(
    "change", [{"stack": (5,)}, {"stack": [12]}, {"flat": None}, {"positions": (1, 2)}, {"more": 1}]
)
def test_a_damaged_pickle_is_refused(change: dict[str, Any]) -> None:
    graph = stacked(4, 3)
    with pytest.raises(ValueError, match=r"damaged graph|cannot be copied|stack must be"):
        StackedGraph.__new__(StackedGraph).__setstate__(graph.__getstate__() | change)


REFUSED: dict[str, Callable[[StackedGraph], Any]] = {
    "edges": lambda g: g.edge_index, "runs": lambda g: g.runs, "csr": lambda g: g.csr, "csc": lambda g: g.csc,
    "rows": lambda g: g.rows(0, 2), "columns": lambda g: g.columns(torch.tensor([1])), "compact": lambda g: g.compact(),
    "subgraph": lambda g: g.subgraph(torch.arange(N) < 3), "reverse": lambda g: g.reverse(),
    "power": lambda g: g.power(2),
    "loops": lambda g: g.with_self_loops(), "undirected": lambda g: g.undirected(), "drop": lambda g: g.drop_edges(0.5),
    "reordered": lambda g: g.reordered(), "reach": lambda g: g.reach(1), "plot": lambda g: g.plot(),
    "diameter": lambda g: g.diameter(), "components": lambda g: g.components(), "alias": lambda g: g.alias(),
    "positions": lambda g: g.with_positions(torch.arange(N), torch.arange(N)), "labels": lambda g: g.labels,
    "relation": lambda g: g.with_relation(Offset(2)),
    "pin": lambda g: g.pin_memory(),
    "edge positions": lambda g: g.edge_positions(),
    "scipy": graphs.to_scipy, "pyg": graphs.to_pyg, "cliques": lambda g: g.cliques,
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_of_a_stack_is_refused(name: str) -> None:
    with pytest.raises(
        AttributeError, match=r"not known of graphs that differ by item and head; `entry\(item, head\)`"
    ):
        REFUSED[name](stacked(2, 2))


def test_a_stack_is_no_graph_and_has_all_that_layers_take() -> None:
    """What a stack has works, and what it has not, no annotation promises."""
    graph = stacked(2)
    assert isinstance(graph, BoundGraph)
    assert not isinstance(graph, Graph)
    for name in {name for kind in (BoundGraph, StackedGraph) for name in dir(kind) if not name.startswith("_")}:
        getattr(graph, name)
    for name in BoundGraph.__annotations__:
        getattr(graph, name)
    with pytest.raises(TypeError, match="neither true nor false"):
        bool(graph)
    assert "2 x 1 graphs of" in MessagePassing(graph)._repr_html_()  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a batch needs graphs"):
        graphs.batch([graph, graph])


def test_data_of_edges_and_other_stacks_are_refused() -> None:
    graph = stacked(2, 2)
    with pytest.raises(ValueError, match="for the same items and heads"):
        graph & stacked(4)
    with pytest.raises(ValueError, match="of the same size"):
        graph & graphs.causal().bind(N + 1)
    weighted = graphs.from_edges([[0], [1]], N, edge_attr=torch.ones(1, 1))
    with pytest.raises(ValueError, match="cannot have data of edges"):
        StackedGraph(weighted, (3,))
    for merge in (lambda: graph & weighted, lambda: weighted & graph):
        with pytest.raises(ValueError, match="would lose the edge data"):
            merge()


def test_edge_types_become_the_graphs_of_heads() -> None:
    typed = graphs.from_edges([[0, 1, 1, 2], [1, 0, 0, 2]], 3, edge_type=torch.tensor([0, 2, 2, 0]))
    graph = by_edge_type(typed, 3)
    assert graph.stack == (1, 3)
    assert graph.num_edges == 4
    assert graph.degree().tolist() == [[[0, 1, 1], [0, 0, 0], [2, 0, 0]]]  # the repeated edge counts twice
