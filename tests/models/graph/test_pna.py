"""PNA: predictions for whole graphs."""

from __future__ import annotations

import torch

from mpnn import graphs
from mpnn.models import PNA


def test_it_predicts_for_whole_graphs() -> None:
    model, x, graph = PNA(5, 3, 8, 2).double(), torch.randn(11, 5, dtype=torch.float64), graphs.window(2)
    pool = graphs.from_edges(torch.stack([torch.arange(11), (torch.arange(11) > 3).long()]), num_src=11, num_dst=2)
    nodes = model(x, graph)
    torch.testing.assert_close(model(x, graph, pool=pool), torch.stack([nodes[:4].mean(0), nodes[4:].mean(0)]))
