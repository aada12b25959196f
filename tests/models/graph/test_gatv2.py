"""GATv2: PyTorch Geometric's layers, and a ranking of neighbours that depends on who listens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
    """Over a graph with repeated edges, whose nodes 0 and 1 hear only themselves."""
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


def most_heard(model: GAT) -> int:
    """How many different sources are the most heard one of some node, where all hear all, in the first layer."""
    x = 3 * torch.randn(40, IN, generator=torch.Generator().manual_seed(0))
    _, weights = model.eval().layers[0](x, return_weights=True)
    return len(weights.view(40, 40, -1)[..., 0].argmax(1).unique())


def test_whom_a_node_hears_most_depends_on_the_node() -> None:
    """In GAT all have the same favourite (Brody et al. 2022, theorem 1)."""
    assert most_heard(GAT(IN, CLASSES, graph=graphs.complete())) == 1
    assert most_heard(GATv2(IN, CLASSES, graph=graphs.complete())) > 1


def test_it_can_be_kept(tmp_path: Path) -> None:
    model = GATv2(IN, CLASSES, graph=graphs.window(2)).eval()
    model.save_pretrained(tmp_path)
    x = torch.randn(N, IN)
    assert torch.equal(GATv2.from_pretrained(tmp_path)(x), model(x))
