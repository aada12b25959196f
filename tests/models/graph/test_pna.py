"""PNA: its layers are those of PyTorch Geometric."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import Graph, graphs
from mpnn.models import PNA

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
N, IN, EDGE, DIM, CLASSES = 11, 5, 3, 8, 3
AGGREGATORS, SCALERS = ["mean", "max", "min", "var"], ["identity", "amplification", "attenuation"]


@pytest.fixture
def graph() -> Graph:
    """Thirty edges with attributes, repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    edges = torch.randint(0, N, (2, 30))
    edges[1] = edges[1].clamp(min=2)
    return graphs.from_edges(edges, N, edge_attr=torch.randn(30, EDGE))


def theirs(layer: nn.Module, graph: Graph, towers: int) -> nn.Module:
    degrees = torch.bincount(graph.degree())
    conv = pyg.PNAConv(DIM, DIM, AGGREGATORS, SCALERS, degrees, EDGE, towers=towers, divide_input=True)
    message, update = layer.attention.function, layer.update
    for ours, peer in (
        *zip(message.mlps, (mlp[0] for mlp in conv.pre_nns), strict=True),
        *zip(update.mlps, (mlp[0] for mlp in conv.post_nns), strict=True),
        *((message.edge, conv.edge_encoder), (update.out, conv.lin)),
    ):
        peer.load_state_dict(ours.state_dict())
    return conv.to(update.out.weight.dtype)


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_are_those_of_pyg(graph: Graph, towers: int, dtype: torch.dtype, measured: Callable[..., None]) -> None:
    model = PNA(IN, CLASSES, DIM, 2, towers=towers, aggregators=AGGREGATORS, edge_dim=EDGE).to(dtype)
    x, attr = torch.randn(N, IN, dtype=dtype), graph.edge_attr.to(dtype)
    h = model.embed(x)
    for layer in model.layers:
        h = h + theirs(layer, graph, towers)(h, graph.edge_index, attr).relu()
    error = (model(x, graph, attr) - model.head(h)).abs().max().item()
    # The mean of log(d + 1) is a float32 number with PyTorch Geometric.
    measured(SYSTEM, "PyTorch Geometric PNAConv", error, error_bound(2, 12 * DIM))


def test_it_predicts_for_whole_graphs(graph: Graph) -> None:
    model = PNA(IN, CLASSES, DIM, 2).double()
    x: Tensor = torch.randn(N, IN, dtype=torch.float64)
    pool = graphs.from_edges(torch.stack([torch.arange(N), (torch.arange(N) > 3).long()]), num_src=N, num_dst=2)
    nodes = model(x, graph)
    torch.testing.assert_close(model(x, graph, pool=pool), torch.stack([nodes[:4].mean(0), nodes[4:].mean(0)]))


def test_features_of_edges_are_asked_for(graph: Graph) -> None:
    with pytest.raises(ValueError, match="created with edge_dim: pass edge_attr, or a graph that has edge_attr"):
        PNA(IN, CLASSES, DIM, edge_dim=EDGE)(torch.randn(N, IN), graphs.window(1))
