"""MAE by itself: which patches its loss covers, and which it sees."""

import torch
from error_bound import error_bound, largest

from mpnn.models import MAE, MAEConfig
from mpnn.models.layers.images import patchify
from mpnn.models.vision.mae import visible_patches

EXACT = error_bound(4, 48, torch.float64)
TINY = MAEConfig(
    image=12,
    patch=4,
    dim=16,
    layers=1,
    heads=2,
    hidden=32,
    decoder_dim=8,
    decoder_layers=1,
    decoder_heads=2,
    decoder_hidden=16,
)


def test_the_loss_covers_masked_patches_only():
    model, x = MAE(TINY).double(), torch.randn(2, 3, 12, 12, dtype=torch.float64)
    noise = torch.rand(2, 9)
    painted = model(x, noise)
    assert painted.seen.sum(1).tolist() == [2, 2]
    error = (painted.pixels - patchify(x, 4)).square().mean(-1)
    expected = torch.stack([error[b, n] for b in range(2) for n in range(9) if not painted.seen[b, n]]).mean()
    assert largest(model.loss(x, noise) - expected) < EXACT


def test_patches_that_are_not_seen_do_not_tell():
    model, x, noise = MAE(TINY).double(), torch.randn(1, 3, 12, 12, dtype=torch.float64), torch.rand(1, 9)
    seen = visible_patches(noise, 0.75)[0].view(3, 3).repeat_interleave(4, 0).repeat_interleave(4, 1)
    assert torch.equal(model(x, noise).pixels, model(torch.where(seen, x, 5.0), noise).pixels)
