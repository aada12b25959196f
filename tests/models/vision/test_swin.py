"""The parts of Swin: merged patches, shifted windows as cliques, and layers that are left out."""

from dataclasses import replace

import pytest
import torch
from error_bound import error_bound, largest
from torch import nn

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.graph.relations import GridOffset
from mpnn.models import Swin, SwinConfig
from mpnn.models.vision.swin import PatchMerging
from mpnn.position import Table

EXACT = error_bound(4, 64, torch.float64)
TINY = SwinConfig(image=16, patch=4, dim=8, depths=(2, 1), heads=(2, 2), window=2)


@pytest.mark.parametrize("size", [(4, 6), (5, 3), (1, 1)])
def test_merging_is_a_linear_map_of_four_patches_side_by_side(size):
    merging, (h, w) = PatchMerging(3).double(), size
    x = torch.randn(2, h * w, 3, dtype=torch.float64)
    cells = torch.zeros(2, h + h % 2, w + w % 2, 3, dtype=torch.float64)
    cells[:, :h, :w] = x.unflatten(1, size)
    side_by_side = torch.cat([cells[:, a::2, b::2] for a in (0, 1) for b in (0, 1)], -1).flatten(1, 2)
    attention = merging.round.attention
    expected = attention.norm(side_by_side) @ attention.weight.flatten(0, 1)
    found, halved = merging(x, size)
    assert halved == ((h + 1) // 2, (w + 1) // 2)
    assert largest(found - expected) < EXACT


def test_windows_run_as_cliques_with_their_table():
    """A table without a rule of its own goes by the graph's, so that windows of any grid run as batches."""
    attention = DotProduct(8, 2, position=Table(2, relations=9))
    op = MessagePassing(graphs.windows(4, 6, size=2, shift=1), "sum", None, attention, backend="dense")
    nn.init.normal_(attention.positions[0].table)
    x = torch.randn(1, 24, 8)
    assert op.rounds(x)[0].bias[0].relation == GridOffset(6, 1, 1)
    expected = op(x)
    op.backend = "edge_list"
    assert largest(op(x) - expected) < 1e-5


def test_a_grid_smaller_than_its_windows_is_one_window():
    small = SwinConfig(image=8, patch=4, dim=8, depths=(2,), heads=(2,), window=7)
    images, whole = torch.randn(1, 3, 8, 8), graphs.complete()
    over_all = Swin(small, whole).eval()
    over_all.load_state_dict((own := Swin(small).eval()).state_dict())
    assert largest(own(images).last - over_all(images).last) < EXACT


def test_drop_path_leaves_out_whole_images_in_training():
    torch.manual_seed(0)
    config = SwinConfig(image=8, patch=4, dim=8, depths=(2,), heads=(2,), window=2, drop_path=0.5)
    layer = Swin(config).stages[0].layers[1].train()
    assert layer.round.update.drop_path.p == 0.5
    x = torch.randn(64, 4, 8)
    same = (layer(x, (2, 2)) == x).flatten(1).all(1).float().mean()
    assert 0.05 < same < 0.5  # both of its branches left out: one image in four, give or take three deviations
    assert largest(layer.eval()(x, (2, 2)) - x) > 0


@pytest.mark.slow
def test_it_compiles_whole():
    """Over a grid that windows do not divide, and then one that they do."""
    model, x = Swin(replace(TINY, image=12, depths=(1, 1))).eval(), torch.randn(1, 3, 12, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert largest(compiled(x).last - model(x).last) < 1e-5
