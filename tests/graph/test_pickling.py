"""`torch.load(weights_only=True)` gives topologies and graphs back, and checks what it reads."""

import io
import pickle
import sys
from typing import Any

import numpy as np
import pytest
import torch

from mpnn import Graph, Topology, graphs
from mpnn.graph.relations import GridOffset, KernelOffset, Offset, Table
from mpnn.graph.runs import Runs
from mpnn.graph.state import FIELDS


def loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "topology",
    [
        graphs.causal() & graphs.window(3),
        graphs.permutation(range(9)) - graphs.identity(),
        graphs.window(2).with_relation(Offset(1)),
    ],
    ids=str,
)
def test_topologies(topology: Topology) -> None:
    assert loaded(topology) == topology


EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 0]])


@pytest.mark.parametrize(
    "graph",
    [
        graphs.window(2).bind(5),
        graphs.documents([2, 3]).bind(5),
        graphs.grid(2, 3).bind(6),
        graphs.memory(2).bind(3),
        graphs.causal().bind(0),
        graphs.from_edges(EDGES, 3, edge_attr=torch.rand(4, 2), edge_type=torch.tensor([0, 1, 0, 2])),
        graphs.from_edges(EDGES, 3).reordered(),
        graphs.from_edges(EDGES, 3).with_positions(torch.arange(3) + 7, torch.arange(3) + 7).with_relation(Offset(1)),
        graphs.causal().bind(3).with_relation(torch.arange(9).view(3, 3)),
    ],
    ids=str,
)
def test_graphs(graph: Graph) -> None:
    _ = graph.csr, graph.runs  # what is derived is not part of it
    again = loaded(graph)
    assert repr(again) == repr(graph)
    assert torch.equal(again.edge_index, graph.edge_index)
    for name in ("edge_attr", "edge_type", "order"):
        ours, theirs = getattr(graph, name), getattr(again, name)
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    assert all(map(torch.equal, again.node_positions(), graph.node_positions()))


RUNS = {
    "num_dst": 2,
    "num_src": 3,
    "ptr": torch.tensor([0, 1, 2]),
    "start": torch.tensor([0, 1]),
    "stop": torch.tensor([1, 3]),
}


@pytest.mark.parametrize(
    "change",
    [
        {"num_dst": 3},
        {"num_dst": -1},
        {"num_src": 2},
        {"num_src": 2**62},
        {"num_src": "3"},
        {"ptr": torch.tensor([0, 5, 2])},
        {"ptr": torch.tensor([0, 1, 9])},
        {"ptr": torch.tensor([1, 1, 2])},
        {"ptr": torch.tensor([0.0, 1.0, 2.0])},
        {"start": torch.tensor([-1, 1])},
        {"start": torch.tensor([0])},
        {"stop": torch.tensor([0, 3])},
        {"stop": torch.tensor([1, 2**62])},
        {"ptr": torch.tensor([0, 0, 2])},
        {"ptr": None},
    ],
    ids=str,
)
def test_runs_that_kernels_could_not_trust_are_refused(change: dict[str, Any]) -> None:
    Runs.__new__(Runs).__setstate__(RUNS)
    with pytest.raises(ValueError, match="runs"):
        Runs.__new__(Runs).__setstate__({**RUNS, **change})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"_edges": torch.tensor([[0, 9], [1, 0]])}, IndexError),
        ({"_edges": torch.tensor([[0, 1], [1, 5]])}, IndexError),
        ({"_edges": torch.full((2, 2), 0.5)}, TypeError),
        ({"_edges": torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)}, TypeError),
        ({"num_src": 1}, IndexError),
        ({"num_dst": -1}, ValueError),
        ({"num_dst": "3"}, ValueError),
        ({"order": torch.tensor([0, 1, 7])}, ValueError),
        ({"order": torch.tensor([0, 1])}, ValueError),
        ({"order": "x"}, ValueError),
        ({"name": 5}, ValueError),
        ({"shift": "a"}, ValueError),
        ({"shift": None}, ValueError),
        ({"shift": 2**62}, ValueError),
        ({"relation": 5}, ValueError),
        ({"exchange": 7}, ValueError),
        ({"device": "cpu"}, ValueError),
        ({"edge_attr": [1, 2, 3, 4]}, ValueError),
        ({"edge_ids": torch.tensor([0])}, ValueError),
        ({"node_ids": "ab"}, ValueError),
        ({"node_ids": (torch.zeros(1, dtype=torch.int32),) * 2}, ValueError),
        ({"node_ids": (torch.zeros(3, dtype=torch.int64),) * 2}, ValueError),
        ({"node_ids": (torch.zeros(1, dtype=torch.int32).expand(3),) * 2}, ValueError),
        ({"_edge_type": torch.tensor([0, -1, 0, 0])}, ValueError),
        ({"_edges": None, "_labels": torch.tensor([0, 1])}, ValueError),
        ({"_edges": None, "_labels": None}, ValueError),
        ({"_edges": None, "_given_runs": graphs.causal().bind(4).runs}, ValueError),
        ({"positions": (torch.arange(2), torch.arange(3))}, ValueError),
        ({"positions": (torch.full((3,), 0.5), torch.full((3,), 0.5))}, ValueError),
        ({"positions": (torch.arange(3), torch.full((3,), 2**62))}, ValueError),
        ({"csr": "a cached value"}, ValueError),
    ],
    ids=str,
)
def test_graphs_that_kernels_could_not_trust_are_refused(change: dict[str, Any], error: type[Exception]) -> None:
    graph = graphs.from_edges(EDGES, 3)
    with pytest.raises(error):
        Graph.__new__(Graph).__setstate__({**graph.__getstate__(), **change})


def test_a_graph_is_loaded_onto_another_device() -> None:
    """As `torch.load(map_location=)` does: it moves every tensor, and the graph follows."""
    state = graphs.causal().bind(3).__getstate__()
    graph = Graph.__new__(Graph)
    graph.__setstate__({**state, "device": state["device"].to("meta")})
    assert graph.device == torch.device("meta")
    assert graph.to("cpu").edge_index.tolist() == graphs.causal().bind(3).edge_index.tolist()


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_state_without_a_field_is_refused(field: str) -> None:
    state = graphs.from_edges(EDGES, 3).__getstate__()
    assert state.keys() == FIELDS
    with pytest.raises(ValueError, match=f"missing, or unknown to this version: {field}$"):
        Graph.__new__(Graph).__setstate__({name: state[name] for name in FIELDS - {field}})


def test_a_part_of_one_process_is_not_saved() -> None:
    part = graphs.from_edges(EDGES, 3).alias()
    part.exchange = object()
    with pytest.raises(ValueError, match=r"Graph\(3 nodes, 4 edges\) cannot be copied or pickled: it has an exchange"):
        pickle.dumps(part)


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (Offset, {"clip": -1}),
        (Offset, {"clip": 0.5}),
        (GridOffset, {"width": 0, "rows": 1, "columns": 1}),
        (KernelOffset, {"width": 4, "dst_width": 4, "kernel": (3, 0)}),
        (Table, {"classes": torch.tensor([[9]]), "count": 1}),
    ],
)
def test_relations_that_kernels_could_not_trust_are_refused(kind: type[Any], state: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        kind.__new__(kind).__setstate__(state)


def test_a_registered_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["mpnn.graphs.parse"], "_REGISTERED", {})
    topology = before(2)
    with pytest.raises(Exception, match="weights_only"):
        loaded(topology)
    graphs.register(before)
    assert loaded(topology) == topology


def before(count: int) -> Topology:
    return Topology.of(_before, count)


def _before(i: Any, num_src: int, count: int) -> list[tuple[Any, Any]]:
    return [(np.maximum(i - count, 0), i)]
