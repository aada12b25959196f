"""Images as nodes: patches, positions on a grid, and a class token that all patches attend to."""

import pytest
import torch
from torch import nn

from mpnn import graphs
from mpnn.models import ViT, ViTConfig
from mpnn.models.layers.images import GridPositions, as_image, patchify, sinusoidal_2d, with_class_token


def test_patches_in_reading_order_and_pixels_within_them():
    images = torch.arange(2 * 4 * 6).view(1, 2, 4, 6).float()
    patches = patchify(images, [2, 3])
    assert patches.shape == (1, 4, 2 * 3 * 2)
    second = images[0, :, 0:2, 3:6]  # rows 0 and 1, columns 3 to 5
    assert torch.equal(patches[0, 1].view(2, 3, 2), second.permute(1, 2, 0))


def test_pixels_are_patches_of_one():
    images = torch.randn(2, 3, 4, 5)
    assert torch.equal(patchify(images), images.flatten(2).mT)
    assert torch.equal(as_image(patchify(images), 4, 5), images)


def test_sinusoids_equal_hugging_face():
    modeling = pytest.importorskip("transformers.models.vit_mae.modeling_vit_mae")
    theirs = modeling.build_2d_sinusoidal_position_embedding(4, 6, 16)  # down and then across
    assert torch.allclose(sinusoidal_2d(4, 6, 16), theirs.roll(8, 1), atol=1e-6)


def test_fixed_positions_are_not_trained():
    positions = GridPositions((2, 3), 8, extra=1, sinusoidal=True)
    assert not positions.weight.requires_grad
    assert torch.equal(positions((2, 3)), torch.cat([torch.zeros(1, 8), sinusoidal_2d(2, 3, 8)]))


def test_positions_are_stretched_on_request_only():
    positions = GridPositions((2, 2), 4, extra=1)
    with pytest.raises(ValueError, match="for 2 x 2 patches, and the image has 2 x 3"):
        positions((2, 3))
    assert positions((2, 3), stretch=True).shape == (7, 4)
    assert torch.equal(positions((2, 3), stretch=True)[0], positions.weight[0])


def test_waves_need_a_width_of_four():
    with pytest.raises(ValueError, match="a multiple of 4; got 6"):
        sinusoidal_2d(2, 2, 6)


def test_a_class_token_is_connected_with_all_both_ways():
    graph = with_class_token(graphs.grid(2, 2)).bind(5)
    assert graph.dense().int().tolist() == [
        [1, 1, 1, 1, 1],
        [1, 0, 1, 1, 0],
        [1, 1, 0, 0, 1],
        [1, 1, 0, 0, 1],
        [1, 0, 1, 1, 0],
    ]


def test_over_a_complete_graph_it_is_one_node_more():
    assert with_class_token(graphs.complete()).bind(7).runs.is_complete


def test_over_longformer_rows_of_many_runs():
    inner = graphs.longformer(4, globals=[0, 9]) | graphs.random(2, seed=1)
    graph, patches = with_class_token(inner).bind(16), inner.bind(15)
    assert torch.equal(graph.dense()[1:, 1:], patches.dense())
    assert graph.dense()[0].all()
    assert graph.dense()[:, 0].all()


def test_all_norms_of_a_vision_transformer_have_its_eps():
    config = ViTConfig(image=8, patch=4, channels=1, dim=8, heads=2, layers=1, hidden=8, eps=0.25)
    norms = [module for module in ViT(config).modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == 3
    assert {norm.eps for norm in norms} == {0.25}
