"""GATv2: a ranking of sources that depends on the destination."""

from __future__ import annotations

import torch

from mpnn import graphs
from mpnn.models import GAT, GATv2

IN, CLASSES = 6, 3


def highest_weighted_sources(model: GAT) -> int:
    """How many sources have the highest weight at some destination of a complete graph, in the first layer."""
    x = 3 * torch.randn(40, IN, generator=torch.Generator().manual_seed(0))
    _, weights = model.eval().layers[0](x, return_weights=True)
    return len(weights.view(40, 40, -1)[..., 0].argmax(1).unique())


def test_the_highest_weighted_source_depends_on_the_destination() -> None:
    """In GAT all destinations rank sources alike (Brody et al. 2022, theorem 1)."""
    assert highest_weighted_sources(GAT(IN, CLASSES, graph=graphs.complete())) == 1
    assert highest_weighted_sources(GATv2(IN, CLASSES, graph=graphs.complete())) > 1
