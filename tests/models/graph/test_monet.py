"""MoNet: where edges lie without coordinates, and what is asked for."""

from __future__ import annotations

import pytest
import torch

from mpnn import MessagePassing, graphs
from mpnn.attention import Gaussian
from mpnn.models import MoNet

IN, CLASSES = 5, 3


def test_without_coordinates_edges_lie_where_the_degrees_of_their_ends_say() -> None:
    model, graph = MoNet(IN, CLASSES).eval(), graphs.from_edges([[0, 1, 2, 0], [2, 2, 0, 1]], 4)
    placed = MoNet(IN, CLASSES, coordinates=2).eval()
    placed.load_state_dict(model.state_dict())
    x = torch.randn(4, IN)
    u = torch.tensor([[2.0, 1], [2, 1], [1, 2], [1, 1]]).rsqrt()  # degrees: 2 of node 2, 1 of the others
    torch.testing.assert_close(model(x, graph), placed(x, graph, u))


def test_what_is_missing_is_asked_for() -> None:
    x, graph = torch.randn(13, IN), graphs.window(1)
    with pytest.raises(ValueError, match="MoNet with coordinates needs edge features: pass edge_attr"):
        MoNet(IN, CLASSES, coordinates=2)(x, graph)
    with pytest.raises(ValueError, match=r"pseudo-coordinates as edge_attr, \[37, 2\]; got \[37, 3\]"):
        MessagePassing(graph, "sum", None, Gaussian(IN, 2, 2, 2))(x, edge_attr=torch.rand(37, 3))
