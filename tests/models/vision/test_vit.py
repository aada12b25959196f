"""What a ViT by itself answers with."""

import torch

from mpnn.models import ViT, ViTConfig


def test_the_answer_of_a_vit_by_itself():
    config = ViTConfig(image=12, patch=4, dim=16, layers=2, heads=2, hidden=32)
    seen = ViT(config, mask_token=True)(torch.randn(2, 3, 12, 12), torch.rand(2, 9) < 0.5, return_weights=True)
    assert seen.last.shape == (2, 10, 16)
    assert seen.pooled.shape == (2, 16)
    assert seen.weights[0].shape == (2, 2, 10, 10)
