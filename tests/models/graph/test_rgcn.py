"""R-GCN: maps of blocks."""

from __future__ import annotations

import pytest
import torch

from mpnn.models.graph.rgcn import BlockTyped

IN, HIDDEN, RELATIONS = 6, 8, 4


def test_maps_of_blocks_are_zero_beside_them() -> None:
    maps = BlockTyped(IN, HIDDEN, RELATIONS, blocks=2).maps()
    inside = torch.block_diag(torch.ones(3, 4), torch.ones(3, 4)).bool()
    assert maps.shape == (RELATIONS, IN, HIDDEN)
    assert (maps[:, ~inside] == 0).all()
    assert (maps[:, inside] != 0).all()
    with pytest.raises(ValueError, match="4 blocks do not divide widths of 6 and 8"):
        BlockTyped(IN, HIDDEN, RELATIONS, blocks=4)
