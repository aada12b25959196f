"""Graphs of edges that somebody already has, in every form they come in, and several graphs as one."""

import numpy as np
import pytest
import torch
from drawings import ATTR, EDGES, KIND, MASK, listed
from torch import Tensor

from mpnn import Graph, graphs, ops
from mpnn.graph.relations import Offset


@pytest.fixture
def graph() -> Graph:
    return graphs.from_edges(EDGES, 4, edge_attr=ATTR)


# ------------------------------------------------------------------------------------------------ what is given


@pytest.mark.parametrize(
    "edges",
    [
        EDGES,
        EDGES.int(),
        EDGES.to(torch.uint8),
        EDGES.tolist(),
        tuple(map(tuple, EDGES.tolist())),
        EDGES.numpy(),
        EDGES.numpy().astype(np.int32),
        np.asfortranarray(EDGES.numpy()),
        np.broadcast_to(EDGES.numpy(), (2, 6)),  # read-only
        EDGES.T.contiguous().T,
    ],
    ids=["int64", "int32", "uint8", "lists", "tuples", "numpy", "numpy32", "fortran", "read-only", "strided"],
)
def test_edges_come_in_many_forms(edges: object) -> None:
    graph = graphs.from_edges(edges, 4)
    assert graph.edge_index.dtype == torch.int64
    assert torch.equal(graph.edge_index, EDGES)
    assert torch.equal(graph.dense(), MASK)


@pytest.mark.parametrize("form", ["tensor", "numpy", "strided"])
def test_a_graph_owns_its_edges(form: str) -> None:
    array = np.array([[0, 1, 2], [1, 2, 0]])
    kind = torch.tensor([0, 1, 2])
    edges = {"tensor": torch.from_numpy(array), "numpy": array, "strided": torch.from_numpy(array.T.copy()).T}[form]
    graph = graphs.from_edges(edges, 3, edge_type=kind)
    edges[:] = 2**40  # a kernel that read this would crash the process
    kind[:] = 2**40
    assert graph.edge_index.tolist() == [[0, 1, 2], [1, 2, 0]]
    assert graph.edge_type.tolist() == [0, 1, 2]
    assert graph.csr.col.tolist() == [2, 0, 1]
    x = torch.eye(3)
    assert torch.equal(ops.aggregate(graph, x, backend="csr"), x.roll(1, 0))


def test_a_graph_made_in_inference_mode_can_be_trained_on() -> None:
    with torch.inference_mode():
        graph = graphs.from_edges(EDGES, 4, edge_type=KIND)
    assert not graph.edge_index.is_inference()
    assert not graph.edge_type.is_inference()


@pytest.mark.parametrize("empty", [[[], []], torch.zeros(2, 0), np.zeros((2, 0)), torch.zeros(2, 0, dtype=torch.int64)])
def test_no_edges(empty: object) -> None:
    for graph, size in ((graphs.from_edges(empty), 0), (graphs.from_edges(empty, 3), 3)):
        assert (graph.num_dst, graph.num_src, graph.num_edges) == (size, size, 0)
        assert graph.edge_index.shape == (2, 0)
        assert graph.edge_index.dtype == torch.int64
        assert graph.dense().shape == (size, size)
        assert graph.degree().tolist() == [0] * size
        assert graph.csr.ptr.tolist() == graph.csc.ptr.tolist() == [0] * (size + 1)
        for derived in (graph.reverse(), graph.undirected(), graph.power(2), graph.drop_edges(0.5), graph & graph):
            assert derived.num_edges == 0
        assert graph.with_self_loops().num_edges == size


def test_sizes_are_counted_from_the_edges_unless_given() -> None:
    def size(**given: int) -> tuple[int, int]:
        graph = graphs.from_edges([[4, 0], [1, 2]], **given)
        return graph.num_dst, graph.num_src

    assert size() == (5, 5)
    assert size(num_nodes=9) == (9, 9)
    assert size(num_src=6) == (3, 6)
    assert size(num_dst=6) == (6, 5)
    assert size(num_src=7, num_dst=8) == (8, 7)


# ------------------------------------------------------------------------------------------------ batches


def blocks(*masks: Tensor) -> Tensor:
    return torch.block_diag(*(mask.int() for mask in masks)).bool()


def test_a_batch_of_structured_graphs_is_structured() -> None:
    parts = [
        graphs.causal().bind(3),
        graphs.window(1).bind(4).rows(0, 2),
        graphs.complete().bind(0),
        graphs.complete().bind(1),
    ]
    graph = graphs.batch(parts)
    assert not graph.is_explicit
    assert torch.equal(graph.dense(), blocks(*(part.dense() for part in parts)))
    assert graph.labels is None


def test_a_batch_of_cliques_is_cliques() -> None:
    graph = graphs.batch([graphs.documents([2, 1]).bind(3), graphs.complete().bind(2)])
    assert torch.equal(graph.dense(), graphs.documents([2, 1, 2]).bind(5).dense())
    assert sorted(tuple(members.shape) for members in graph.cliques) == [(1, 1), (2, 2)]


def test_a_batch_keeps_edge_order_and_data(graph: Graph) -> None:
    other = graphs.from_edges([[0], [2]], num_src=2, num_dst=3, edge_attr=torch.tensor([7.0]))
    both = graphs.batch([graph, other, graph])
    assert (both.num_dst, both.num_src) == (11, 10)
    assert torch.equal(both.edge_index[:, :6], EDGES)
    assert listed(both)[6] == (4, 6)
    assert torch.equal(both.edge_index[:, 7:], EDGES + torch.tensor([[6], [7]]))
    assert torch.equal(both.edge_attr, torch.cat([ATTR, torch.tensor([7.0]), ATTR]))
    mixed = graphs.batch([graphs.from_edges(EDGES, 4), graphs.causal().bind(2)])
    assert listed(mixed)[6:] == [(4, 4), (4, 5), (5, 5)]


@pytest.mark.parametrize(
    ("parts", "structured"),
    [
        ([graphs.window(2).with_relation(Offset(1)).bind(n) for n in (3, 4)], True),
        ([graphs.windows(4, 4, size=2).bind(16)] * 2, True),
        ([graphs.grid(2, 3).bind(6), graphs.grid(4, 3).bind(12)], True),
        ([graphs.grid(2, 3).bind(6), graphs.grid(3, 2).bind(6)], False),
        (
            [graphs.window(2).with_relation(Offset(1)).bind(n + 1).rows(0, n) for n in (3, 4)],
            False,
        ),  # offsets change between parts
        ([graphs.window(2).with_relation(torch.arange(9).view(3, 3)).bind(3) for _ in range(2)], False),
        ([graphs.causal().with_relation(Offset(1)).bind(3), graphs.from_edges(EDGES, edge_type=KIND)], False),
        ([graphs.from_edges(EDGES, edge_type=KIND), graphs.from_edges(EDGES, edge_type=KIND + 1)], False),
    ],
    ids=["offsets", "windows", "grids", "unlike grids", "rectangular", "tables", "rule and data", "data"],
)
def test_a_batch_keeps_the_classes_of_edges(parts: list[Graph], structured: bool) -> None:
    graph = graphs.batch(parts)
    assert graph.is_explicit is not structured
    assert torch.equal(graph.edge_type, torch.cat([part.edge_type for part in parts]))
    back = dict(zip(listed(graph.reverse()), graph.reverse().edge_type.tolist(), strict=True))
    assert back == {(d, s): kind for (s, d), kind in zip(listed(graph), graph.edge_type.tolist(), strict=True)}


def test_a_batch_of_one_is_that_graph() -> None:
    graph = graphs.memory(2).bind(3)
    assert graphs.batch([graph]) is graph


def test_batches_that_cannot_be_are_refused(graph: Graph) -> None:
    with pytest.raises(ValueError, match="at least one graph"):
        graphs.batch([])
    with pytest.raises(TypeError, match=r"graph 0 of the batch is causal\(\); a batch needs graphs"):
        graphs.batch([graphs.causal()])
    wide = graphs.from_edges([[0], [1]], edge_attr=torch.ones(1, 3))
    with pytest.raises(
        ValueError, match=r"edge_attr of graph 1 is \[1, 3\] and that of graph 0 \[1\]; all dimensions but"
    ):
        graphs.batch([graphs.from_edges([[0], [1]], edge_attr=torch.ones(1)), wide])
    with pytest.raises(ValueError, match="graph 1 has edge_attr and graph 0 has none"):
        graphs.batch([graphs.causal().bind(2), graph])
    with pytest.raises(ValueError, match="graph 0 has edge_type and graph 1 has none"):
        graphs.batch([graphs.from_edges(EDGES, edge_type=KIND), graphs.causal().bind(2)])
    with pytest.raises(ValueError, match="memory nodes"):
        graphs.batch([graphs.memory(2).bind(3)] * 2)
    with pytest.raises(ValueError, match="are on cpu and meta; move them to one"):
        graphs.batch([graphs.causal().bind(2), graphs.causal().bind(2).to("meta")])


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("edges", "given", "error", "sentence"),
    [
        ([[0, 1], [1, 4]], {"num_nodes": 4}, IndexError, r"edge 1 \(1 -> 4\) has destination 4, but there are 4 dest"),
        ([[0, 5], [1, 1]], {"num_src": 5}, IndexError, r"edge 1 \(5 -> 1\) has source 5, but there are 5 sources"),
        ([[0, -1], [1, 1]], {}, IndexError, r"edge 1 \(-1 -> 1\) has source -1, but there are 2 sources"),
        ([[0, 0], [0, -2]], {}, IndexError, r"edge 1 \(0 -> -2\) has destination -2"),
        ([[0.0], [1.0]], {}, TypeError, "edge_index must hold integers; got torch.float32"),
        ([[float("nan")], [1.0]], {}, TypeError, "edge_index must hold integers; got torch.float32"),
        ([[True], [False]], {}, TypeError, "edge_index must hold integers; got torch.bool"),
        (torch.zeros(2, 1, dtype=torch.complex64), {}, TypeError, "edge_index must hold integers; got torch.complex64"),
        ([[0, 1], [1, 2], [2, 0]], {}, ValueError, r"shape \[2, E\], sources above destinations; got \[3, 2\]"),
        (None, {}, TypeError, "edge_index must be a tensor, or data that torch.as_tensor accepts"),
        ([[0, 1], [1]], {}, TypeError, "edge_index must be a tensor, .*: expected sequence of length 2"),
        ([[0, 1], [1, 2], [2, 0]], {}, ValueError, r"got \[3, 2\]; pass edge_index.T"),
        ([0, 1], {}, ValueError, r"shape \[2, E\], sources above destinations; got \[2\]"),
        ([], {}, ValueError, r"shape \[2, E\], sources above destinations; got \[0\]"),
        ([[0], [1]], {"num_nodes": -1}, ValueError, "num_nodes must be at least 0; got -1"),
        ([[0], [1]], {"num_src": -1}, ValueError, "num_src must be at least 0; got -1"),
        ([[0], [1]], {"num_nodes": 2.0}, TypeError, "num_nodes must be an integer; got 2.0"),
        ([[0], [1]], {"num_nodes": 2, "num_src": 2}, ValueError, "not both"),
        ([[0], [1]], {"edge_attr": torch.ones(2)}, ValueError, r"edge_attr must have one row .* 1 edges; got \[2\]"),
        ([[0], [1]], {"edge_attr": torch.ones(())}, ValueError, r"edge_attr must have one row .* 1 edges; got \[\]"),
        ([[0], [1]], {"edge_type": [0, 1]}, ValueError, r"edge_type must have one row .* 1 edges; got \[2\]"),
        ([[0], [1]], {"edge_type": [[0]]}, TypeError, r"integers \[E\]; got torch.int64 of shape \[1, 1\]"),
        ([[0], [1]], {"edge_type": [0.5]}, TypeError, r"edge_type must be integers \[E\]; got torch.float32"),
        ([[0, 1], [1, 0]], {"edge_type": [0, -3]}, ValueError, "edge 1 has edge_type -3; edge types count from 0"),
        (
            [[0], [1]],
            {"edge_attr": torch.ones(1, device="meta")},
            ValueError,
            "edge_attr is on meta and the edges on",
        ),
    ],
)
def test_bad_edges_are_named(edges: object, given: dict[str, object], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        graphs.from_edges(edges, **given)  # type: ignore[arg-type]


def test_blocks_attend_to_blocks_and_repeated_blocks_count_twice():
    graph = graphs.from_blocks([[0, 1, 1], [1, 0, 0]], size=2)
    assert graph.dense().int().tolist() == [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert graph.degree().tolist() == [4, 4, 2, 2]
    classes = graphs.from_blocks([[0, 1], [0, 0]], 2, 3, edge_type=torch.tensor([1, 0]))
    assert (classes.num_dst, classes.edge_type.tolist()) == (6, [1] * 4 + [0] * 4)
