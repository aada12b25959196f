"""Arguments of graph models that do not fit: the message names the argument, and says what to pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mpnn import MessagePassing, graphs
from mpnn.attention import EdgeFilter
from mpnn.data import neighbor_batches
from mpnn.models import (
    GAT,
    GCN,
    GIN,
    GNN,
    HGT,
    PNA,
    DimeNet,
    GATv2,
    GraphSAGE,
    GraphTransformer,
    PaiNN,
    SchNet,
)
from mpnn.models.layers.hetero import Hetero

X = torch.randn(2, 3)
LINK = [[0, 1], [1, 0]]
WITH_EDGES: dict[str, Callable[[], Any]] = {
    "GAT": lambda: GAT(3, 2, edge_dim=1),
    "GATv2": lambda: GATv2(3, 2, edge_dim=1),
    "GraphTransformer": lambda: GraphTransformer(3, 2, edge_dim=1),
    "GIN": lambda: GIN(3, 2, edge_dim=1),
    "PNA": lambda: PNA(3, 2, edge_dim=1),
    "EdgeFilter": lambda: MessagePassing(None, "sum", None, EdgeFilter(nn.Linear(1, 3))),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("name", WITH_EDGES)
def test_edge_attributes_of_another_dtype_are_named(name: str, dtype: torch.dtype) -> None:
    graph = graphs.from_edges(LINK, edge_attr=torch.ones(2, 1, dtype=dtype))
    with pytest.raises(
        TypeError, match=rf"edge_attr is {dtype} and the weights of .*call \.to\(torch.float32\) on edge_"
    ):
        WITH_EDGES[name]()(X, graph)


@pytest.mark.parametrize("make", [GAT, GATv2, GCN, GIN, GNN, GraphSAGE, GraphTransformer, PNA])
def test_integer_features_are_named(make: Any) -> None:
    with pytest.raises(TypeError, match=r"x must be floating point; got torch.int64: pass x.float\(\)"):
        make(3, 2)(torch.ones(2, 3).long(), graphs.from_edges(LINK))


@pytest.mark.parametrize("make", [SchNet, PaiNN, DimeNet])
def test_types_of_atoms_that_have_no_vector_are_named(make: Any) -> None:
    at = torch.randn(2, 3)
    model, near = make(types=3), graphs.radius(at, 9.0)
    with pytest.raises(
        ValueError, match="types must be from 0 to 2; got 1 to 5: a model with types=6 has a vector for"
    ):
        model(torch.tensor([5, 1]), at, near)
    with pytest.raises(TypeError, match="types must be int64"):
        model(torch.ones(2), at, near)


def test_kinds_of_nodes_are_named() -> None:
    graph = graphs.HeteroGraph({("a", "r", "b"): graphs.from_edges([[0, 1], [0, 0]], num_src=2, num_dst=1)})
    model = HGT({"a": 5, "b": 6}, 2, list(graph), 8, 2, 1)
    with pytest.raises(ValueError, match=r"x\['a'\] is 4 wide .* but HGT was made for a width of 5"):
        model({"a": torch.randn(2, 4), "b": torch.randn(1, 6)}, graph)
    with pytest.raises(TypeError, match=r"x\['b'\] must be floating point"):
        model({"a": torch.randn(2, 5), "b": torch.ones(1, 6).long()}, graph)
    layer = Hetero({("a", "r", "b"): GraphSAGE(5, 3).layers[0]})
    with pytest.raises(ValueError, match=r"the layer of \('a', 'r', 'b'\), x of 'b' and source of 'a': .* got 5 and 4"):
        layer({"a": torch.randn(2, 4), "b": torch.randn(1, 5)}, graph)
    with pytest.raises(TypeError, match=r"hetero_batches\(graph, \(kind, nodes\), fanouts\)"):
        neighbor_batches(graph, torch.arange(1), [2], batch_size=1)


def test_loops_over_two_sets_of_nodes_are_refused() -> None:
    graph = graphs.from_edges([[0, 1], [0, 0]], num_src=2, num_dst=1)
    with pytest.raises(ValueError, match="self-loops need one set of nodes; the graph is 1 x 2: its sources are other"):
        graph.with_self_loops()
