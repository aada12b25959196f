"""The plain graph network: its layers are PyTorch Geometric's GraphConv, for sums and for maxima."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound

from mpnn import graphs
from mpnn.models import GNN

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
N, IN, HIDDEN, CLASSES = 13, 6, 8, 3
BOUND = error_bound(3, 2 * HIDDEN)


@pytest.mark.parametrize("aggregate", ["sum", "max", "mean"])
def test_layers_are_those_of_pyg(aggregate: str, measured: Callable[..., None]) -> None:
    """Over a graph with repeated edges and loops, whose nodes 0 and 1 have no in-neighbors."""
    model = GNN(IN, CLASSES, HIDDEN, layers=3, aggregate=aggregate)
    edge_index = torch.randint(0, N, (2, 40))
    edge_index[1] = edge_index[1].clamp(min=2)
    h = x = torch.randn(N, IN)
    for k, layer in enumerate(model.layers):
        linear, width = layer.update.linear, h.shape[1]
        conv = pyg.GraphConv(width, linear.out_features, aggr=aggregate)
        own, neighbors = linear.weight.split(width, 1)
        conv.load_state_dict({"lin_root.weight": own, "lin_rel.weight": neighbors, "lin_rel.bias": linear.bias})
        h = conv(h, edge_index)
        h = h.relu() if k < 2 else h
    error = (model(x, graphs.from_edges(edge_index, N)) - h).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric GraphConv", error, BOUND)
