"""Graph network with edge activations: its layers are PyTorch Geometric's MetaLayer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, graphs
from mpnn.models import GraphNetwork

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
N, IN, EDGE, DIM, CLASSES, EDGE_CLASSES = 11, 4, 3, 6, 3, 2


@pytest.fixture
def graph() -> Graph:
    """Thirty edges with attributes, repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    edges = torch.randint(0, N, (2, 30))
    edges[1] = edges[1].clamp(min=2)
    return graphs.from_edges(edges, N, edge_attr=torch.randn(30, EDGE))


class EdgeModel(nn.Module):
    """`e + V relu( W_1 h_src + W_2 h_dst + W_3 e )`, for PyTorch Geometric's MetaLayer."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, src: Tensor, dst: Tensor, edge_attr: Tensor, u: None, batch: None) -> Tensor:
        (w1, w2), own, out = self.ours.attention.weight, self.ours.update.linear, self.ours.update.f[1]
        inner = src @ w1 + dst @ w2 + F.linear(edge_attr, own.weight, own.bias)
        return edge_attr + F.linear(inner.relu(), out.weight, out.bias)


class NodeModel(nn.Module):
    """`h + V relu( W [h || sum of what its edges know] )`."""

    def __init__(self, ours: nn.Module) -> None:
        super().__init__()
        self.ours = ours

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: None, batch: None) -> Tensor:
        message = torch.zeros_like(x).index_add(0, edge_index[1], edge_attr)
        first, out = self.ours.update.linear, self.ours.update.out
        inner = F.linear(torch.cat([x, message], 1), first.weight, first.bias)
        return x + F.linear(inner.relu(), out.weight, out.bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_are_those_of_pyg(graph: Graph, dtype: torch.dtype, measured: Callable[..., None]) -> None:
    model = GraphNetwork(IN, EDGE, CLASSES, EDGE_CLASSES, DIM, layers=2).to(dtype)
    x, attr = torch.randn(N, IN, dtype=dtype, requires_grad=True), graph.edge_attr.to(dtype).requires_grad_()
    h, e = model.embed(x), model.embed_edge(attr)
    for layer in model.layers:
        h, e, _ = pyg.MetaLayer(EdgeModel(layer.edges), NodeModel(layer.nodes))(h, graph.edge_index, e)
    expected, found = (model.head(h), model.edge_head(e)), model(x, graph, attr)
    error = max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    measured(SYSTEM, "PyTorch Geometric MetaLayer", error, error_bound(2, 4 * DIM, dtype))
    if dtype == torch.float64:
        for a, b in zip(
            torch.autograd.grad(sum(y.square().sum() for y in found), [x, attr]),
            torch.autograd.grad(sum(y.square().sum() for y in expected), [x, attr]),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_features_of_edges_are_asked_for() -> None:
    with pytest.raises(ValueError, match="a graph network needs edge features"):
        GraphNetwork(IN, EDGE, CLASSES)(torch.randn(3, IN), graphs.from_edges([[0], [1]], 3))
