"""MoNet: its layers are PyTorch Geometric's GMMConv, over degrees or over coordinates that edges bring."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.attention import Gaussian
from mpnn.models import MoNet

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GAT, GATv2, MoNet, VAIN"
N, IN, HIDDEN, CLASSES, KERNELS = 13, 5, 6, 3, 4


def edges() -> Tensor:
    """Repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    found = torch.randint(0, N, (2, 40))
    found[1] = found[1].clamp(min=2)
    return found


def theirs(spec: Gaussian, in_dim: int, out_dim: int, dim: int) -> nn.Module:
    conv = pyg.GMMConv(in_dim, out_dim, dim, KERNELS).to(spec.mu.dtype)
    weights = {"g": spec.to_value.weight.T, "mu": spec.mu, "sigma": spec.sigma, "bias": spec.bias}
    conv.load_state_dict({**weights, "root.weight": torch.zeros(out_dim, in_dim)})
    return conv


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_are_those_of_pyg(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    model = MoNet(IN, CLASSES, HIDDEN, KERNELS, coordinates=3).to(dtype).eval()
    edge_index, place = edges(), torch.randn(40, 3, dtype=dtype, requires_grad=True)
    for layer in model.layers:
        nn.init.normal_(layer.attention.bias)
    x = torch.randn(N, IN, dtype=dtype, requires_grad=True)
    first = theirs(model.layers[0].attention, IN, HIDDEN, 3)(x, edge_index, model.places[0](place)).relu()
    expected = theirs(model.layers[1].attention, HIDDEN, CLASSES, 3)(first, edge_index, model.places[1](place))
    found = model(x, graphs.from_edges(edge_index, N), place)
    error = (found - expected).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric GMMConv", error, error_bound(2, HIDDEN * KERNELS, dtype))
    if dtype == torch.float64:
        for a, b in zip(
            torch.autograd.grad(found.square().sum(), [x, place]),
            torch.autograd.grad(expected.square().sum(), [x, place]),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_weights_are_gaussians_of_the_coordinates() -> None:
    """exp(-1/2 (u - mu)^T Sigma^-1 (u - mu)) with the whole matrix written out."""
    op = MessagePassing(None, "sum", None, Gaussian(IN, HIDDEN, KERNELS, 2)).double()
    place, graph = torch.randn(40, 2, dtype=torch.float64), graphs.from_edges(edges(), N)
    _, weights = op(torch.randn(N, IN, dtype=torch.float64), graph, edge_attr=place, return_weights=True)
    for k in range(KERNELS):
        precision = torch.diag(op.attention.sigma[k] ** 2).inverse()
        apart = place - op.attention.mu[k]
        torch.testing.assert_close(weights[:, k], (-0.5 * (apart @ precision * apart).sum(1)).exp())


def test_without_coordinates_edges_lie_where_the_degrees_of_their_ends_say() -> None:
    model, graph = MoNet(IN, CLASSES).eval(), graphs.from_edges([[0, 1, 2, 0], [2, 2, 0, 1]], 4)
    placed = MoNet(IN, CLASSES, coordinates=2).eval()
    placed.load_state_dict(model.state_dict())
    x = torch.randn(4, IN)
    u = torch.tensor([[2.0, 1], [2, 1], [1, 2], [1, 1]]).rsqrt()  # degrees: 2 of node 2, 1 of the others
    torch.testing.assert_close(model(x, graph), placed(x, graph, u))


def test_what_is_missing_is_asked_for() -> None:
    x = torch.randn(N, IN)
    with pytest.raises(ValueError, match="this model has no graph; pass one with the call"):
        MoNet(IN, CLASSES)(x)
    with pytest.raises(ValueError, match="this model needs coordinates: pass edge_attr, or a graph that has edge_attr"):
        MoNet(IN, CLASSES, coordinates=2)(x, graphs.window(1))
    with pytest.raises(ValueError, match=r"pseudo-coordinates as edge_attr, \[40, 2\]; got \[40, 3\]"):
        MessagePassing(None, "sum", None, Gaussian(IN, 2, 2, 2))(
            x, graphs.from_edges(edges(), N), None, torch.rand(40, 3)
        )
