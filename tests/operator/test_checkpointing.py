"""torch's gradient checkpointing around a layer draws the same dropout when the layer runs again."""

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.position import Rotary
from mpnn.update import FeedForward, PreNorm


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("graph", [graphs.causal() & graphs.window(3), graphs.complete()], ids=str)
def test_torchs_checkpoint_goes_around_a_layer(graph: Any, reentrant: bool) -> None:
    attention = DotProduct(16, 2, dropout=0.25, position=Rotary(8))
    layer = MessagePassing(graph, "sum", PreNorm(16, FeedForward(16), dropout=0.25), attention)
    x, gradients = torch.randn(2, 9, 16, requires_grad=True), []
    for run in (lambda: checkpoint(layer, x, use_reentrant=reentrant), lambda: layer(x)):
        torch.manual_seed(2)
        layer.zero_grad()
        x.grad = None
        run().square().sum().backward()
        gradients.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*gradients)
