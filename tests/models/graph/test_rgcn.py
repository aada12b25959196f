"""R-GCN: maps that are combinations of a few."""

from __future__ import annotations

import pytest
import torch

from mpnn import graphs
from mpnn.models import RGCN

IN, HIDDEN, RELATIONS = 6, 8, 4


def test_a_graph_of_more_classes_is_refused() -> None:
    graph = graphs.from_edges([[0, 1], [1, 0]], N, edge_type=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="the graph has 5 edge types, but this layer has 4 maps"):
        RGCN(IN, CLASSES, RELATIONS)(torch.randn(N, IN), graph)
