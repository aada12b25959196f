"""MPNN with an edge network: its messages are PyTorch Geometric's NNConv."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound

from mpnn import Graph, graphs
from mpnn.models import MPNN

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
N, IN, EDGE, DIM, CLASSES = 11, 4, 3, 5, 2


@pytest.fixture
def graph() -> Graph:
    """Thirty edges with attributes, repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    edges = torch.randint(0, N, (2, 30))
    edges[1] = edges[1].clamp(min=2)
    return graphs.from_edges(edges, N, edge_attr=torch.randn(30, EDGE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_messages_are_those_of_pyg(graph: Graph, dtype: torch.dtype, measured: Callable[..., None]) -> None:
    model = MPNN(IN, EDGE, CLASSES, DIM, rounds=3).to(dtype)
    network = copy.deepcopy(model.layer.attention.function.network)
    conv = pyg.NNConv(DIM, DIM, network, root_weight=False, bias=False)
    network.load_state_dict(model.layer.attention.function.network.state_dict())  # NNConv draws them anew
    x, attr = torch.randn(N, IN, dtype=dtype, requires_grad=True), graph.edge_attr.to(dtype).requires_grad_()
    h = model.embed(x)
    for _ in range(3):
        h = model.layer.update.cell(conv(h, graph.edge_index, attr), h)
    expected, found = model.readout(h, x), model(x, graph, attr)
    error = (found - expected).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric NNConv", error, error_bound(3, 4 * DIM, dtype))
    if dtype == torch.float64:
        for a, b in zip(
            torch.autograd.grad(found.square().sum(), [x, attr]),
            torch.autograd.grad(expected.square().sum(), [x, attr]),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_features_of_edges_are_asked_for() -> None:
    with pytest.raises(ValueError, match="an edge network needs edge features"):
        MPNN(IN, EDGE, CLASSES, DIM)(torch.randn(N, IN), graphs.window(1))
