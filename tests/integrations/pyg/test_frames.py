"""How few calls of this library a warm call of a convolution in place takes, over known edges and over new ones."""

from typing import Any

import pytest
import torch
from frames import frames
from torch_geometric import nn as pyg

import mpnn.pyg
from mpnn import graphs

MOST: dict[str, tuple[Any, int, int]] = {
    "GAT": (lambda: pyg.GATConv(64, 8, 8), 44, 146),
    "Transformer": (lambda: pyg.TransformerConv(64, 8, 8), 50, 126),
    "GCN": (lambda: pyg.GCNConv(64, 64), 44, 136),
    "SAGE": (lambda: pyg.SAGEConv(64, 64), 50, 110),
    "GIN": (lambda: pyg.GINConv(torch.nn.Sequential(torch.nn.Linear(64, 64))), 45, 105),
}


@pytest.mark.parametrize("name", MOST)
def test_a_warm_call_takes_few_calls_of_this_library(name: str) -> None:
    make, of_known, of_new = MOST[name]
    graphs.cache.clear()  # its accounts go over the graphs of other tests
    conv = make()
    mpnn.pyg.use(conv)
    x = torch.randn(20, 64)
    edges = torch.randint(20, (2, 60))
    with torch.no_grad():
        known = frames(lambda: conv(x, edges))
        # The least of three, because one call in many measures all graphs of the cache.
        new = min((frames(lambda: conv(x, edges.clone())) for _ in range(3)), key=len)
    assert len(known) <= of_known, "\n".join(known)
    assert len(new) <= of_new, "\n".join(new)
