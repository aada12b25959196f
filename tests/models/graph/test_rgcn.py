"""R-GCN: maps that are combinations of a few."""

from __future__ import annotations

import pytest
import torch

from mpnn import graphs
from mpnn.models import RGCN
from mpnn.models.graph.rgcn import BasisTyped

N, IN, HIDDEN, CLASSES, RELATIONS = 13, 6, 8, 3, 4


def test_maps_of_few_bases_are_of_low_rank_together() -> None:
    maps = BasisTyped(IN, HIDDEN, RELATIONS, bases=2).maps()
    assert maps.shape == (RELATIONS, IN, HIDDEN)
    assert torch.linalg.matrix_rank(maps.flatten(1)) == 2


def test_a_graph_of_more_classes_is_refused() -> None:
    graph = graphs.from_edges([[0, 1], [1, 0]], N, edge_type=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="the graph has 5 edge types, but this layer has 4 maps"):
        RGCN(IN, CLASSES, RELATIONS)(torch.randn(N, IN), graph)
