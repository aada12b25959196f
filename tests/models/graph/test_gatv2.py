"""GATv2: PyTorch Geometric's layers, and a ranking of sources that depends on the destination."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch.nn import functional as F

from mpnn import graphs
from mpnn.models import GAT, GATv2

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GAT, GATv2, MoNet, VAIN"
N, IN, CLASSES = 13, 6, 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_are_those_of_pyg(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    """Over a graph with repeated edges, whose nodes 0 and 1 attend to themselves only."""
    model = GATv2(IN, CLASSES, hidden=4, heads=3, out_heads=2).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    convs = [pyg.GATv2Conv(IN, 4, 3), pyg.GATv2Conv(12, CLASSES, 2, concat=False)]
    for layer, conv in zip(model.layers, convs, strict=True):
        spec = layer.attention
        conv.to(dtype)
        conv.lin_l.load_state_dict(spec.to_value.state_dict())
        conv.lin_r.load_state_dict(spec.to_query.state_dict())
        conv.load_state_dict({"att": spec.vector[None], "bias": spec.bias}, strict=False)
    src, dst = torch.randint(0, N, (2, 40))
    edge_index = torch.stack([src, dst.clamp(min=2)])[:, src != dst.clamp(min=2)]
    x, graph = torch.randn(N, IN, dtype=dtype), graphs.from_edges(edge_index, N).with_self_loops()
    expected = convs[1](F.elu(convs[0](x, edge_index)), edge_index)
    error = (model(x, graph) - expected).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric GATv2Conv", error, error_bound(2, 12, dtype))


def highest_weighted_sources(model: GAT) -> int:
    """How many sources have the highest weight at some destination of a complete graph, in the first layer."""
    x = 3 * torch.randn(40, IN, generator=torch.Generator().manual_seed(0))
    _, weights = model.eval().layers[0](x, return_weights=True)
    return len(weights.view(40, 40, -1)[..., 0].argmax(1).unique())


def test_the_highest_weighted_source_depends_on_the_destination() -> None:
    """In GAT all destinations rank sources alike (Brody et al. 2022, theorem 1)."""
    assert highest_weighted_sources(GAT(IN, CLASSES, graph=graphs.complete())) == 1
    assert highest_weighted_sources(GATv2(IN, CLASSES, graph=graphs.complete())) > 1
