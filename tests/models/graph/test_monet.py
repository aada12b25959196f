"""MoNet: its weights are Gaussians of coordinates, of degrees or of what edges bring."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, graphs
from mpnn.attention import Gaussian
from mpnn.models import MoNet

N, IN, HIDDEN, CLASSES, KERNELS = 13, 5, 6, 3, 4


def edges() -> Tensor:
    """Repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    found = torch.randint(0, N, (2, 40))
    found[1] = found[1].clamp(min=2)
    return found


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
    with pytest.raises(ValueError, match="this model needs coordinates: pass edge_attr, or a graph that has edge_attr"):
        MoNet(IN, CLASSES, coordinates=2)(x, graphs.window(1))
    with pytest.raises(ValueError, match=r"pseudo-coordinates as edge_attr, \[40, 2\]; got \[40, 3\]"):
        MessagePassing(None, "sum", None, Gaussian(IN, 2, 2, 2))(
            x, graphs.from_edges(edges(), N), None, torch.rand(40, 3)
        )
