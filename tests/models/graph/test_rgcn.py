"""R-GCN: its layers are those of PyTorch Geometric, with free maps, and with combinations of a few."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound

from mpnn import graphs
from mpnn.models import RGCN
from mpnn.models.graph.rgcn import BasisTyped, BlockTyped

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
N, IN, HIDDEN, CLASSES, RELATIONS = 13, 6, 8, 3, 4


@pytest.mark.parametrize("bases", [None, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_are_those_of_pyg(bases: int | None, dtype: torch.dtype, measured: Callable[..., None]) -> None:
    """Class 3 has no edge, some edges are there twice, and nodes 0 and 1 have no in-neighbors."""
    model = RGCN(IN, CLASSES, RELATIONS, HIDDEN, bases=bases).to(dtype)
    edge_index, kind = torch.randint(0, N, (2, 60)), torch.randint(0, 3, (60,))
    edge_index[1] = edge_index[1].clamp(min=2)
    h = x = torch.randn(N, IN, dtype=dtype)
    for k, layer in enumerate(model.layers):
        spec, own = layer.attention, layer.update.linear
        torch.nn.init.normal_(spec.bias)
        conv = pyg.RGCNConv(h.shape[1], own.out_features, RELATIONS, num_bases=bases).to(dtype)
        weights = {"weight": spec.weight, "bias": spec.bias, "root": own.weight.T}
        conv.load_state_dict(weights if bases is None else {**weights, "comp": spec.coefficients})
        h = conv(h, edge_index, kind)
        h = h.relu() if k == 0 else h
    error = (model(x, graphs.from_edges(edge_index, N, edge_type=kind)) - h).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric RGCNConv", error, error_bound(2, HIDDEN * RELATIONS, dtype))


def test_maps_of_few_bases_are_of_low_rank_together() -> None:
    maps = BasisTyped(IN, HIDDEN, RELATIONS, bases=2).maps()
    assert maps.shape == (RELATIONS, IN, HIDDEN)
    assert torch.linalg.matrix_rank(maps.flatten(1)) == 2


def test_maps_of_blocks_are_zero_beside_them() -> None:
    maps = BlockTyped(IN, HIDDEN, RELATIONS, blocks=2).maps()
    inside = torch.block_diag(torch.ones(3, 4), torch.ones(3, 4)).bool()
    assert maps.shape == (RELATIONS, IN, HIDDEN)
    assert (maps[:, ~inside] == 0).all()
    assert (maps[:, inside] != 0).all()
    with pytest.raises(ValueError, match="4 blocks do not divide widths of 6 and 8"):
        BlockTyped(IN, HIDDEN, RELATIONS, blocks=4)


def test_a_graph_of_more_classes_is_refused() -> None:
    graph = graphs.from_edges([[0, 1], [1, 0]], N, edge_type=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="the graph has 5 edge types, but this layer has 4 maps"):
        RGCN(IN, CLASSES, RELATIONS)(torch.randn(N, IN), graph)
