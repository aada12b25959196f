"""MAE as message passing against Hugging Face's ViTMAE, on the same weights and with the same noise."""

import pytest
import torch
from error_bound import error_bound, largest

from mpnn.models import MAE, MAEConfig, from_hf
from mpnn.models.layers.images import patchify
from mpnn.models.vision.mae import visible_patches

transformers = pytest.importorskip("transformers")

EXACT = error_bound(4, 48, torch.float64)
BOUND = error_bound(4, 48)
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


def hugging_face(kind="ViTMAEForPreTraining", attention="sdpa", dtype=torch.float64, **changes):
    """Eager attention gives weights but takes its softmax in float32; "sdpa" is as precise as its numbers."""
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 20,
        "patch_size": 4,
        "decoder_num_attention_heads": 2,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_intermediate_size": 24,
        "mask_ratio": 0.6,
        "initializer_range": 0.3,  # large enough for attention to choose
        "attn_implementation": attention,
    }
    model = getattr(transformers, kind)(transformers.ViTMAEConfig(**(settings | changes))).to(dtype).eval()
    if kind == "ViTMAEForPreTraining":  # transformers leaves these at zero
        model.decoder.mask_token.data.normal_()
        model.decoder.decoder_pos_embed.data.normal_()
    return model


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("changes", [{}, {"norm_pix_loss": True}, {"mask_ratio": 0.75}, {"mask_ratio": 0.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_hugging_face(changes, dtype, measured):
    theirs, x, noise = hugging_face(dtype=dtype, **changes), torch.randn(3, 3, 20, 20, dtype=dtype), torch.rand(3, 25)
    expected, found = theirs(x, noise=noise), from_hf(theirs)(x, noise=noise)
    assert type(expected) is type(found)
    assert torch.equal(expected.mask, found.mask)
    assert torch.equal(expected.ids_restore, found.ids_restore)
    error = largest(expected.logits - found.logits)
    if changes.get("mask_ratio", 1):  # with no patch left out there is nothing to lose
        error = max(error, largest(expected.loss - found.loss))
    if dtype == torch.float64:
        assert error < EXACT
    else:
        measured("MAE", "Hugging Face ViTMAEForPreTraining", error, BOUND)


def test_states_and_weights_of_the_encoder_equal_hugging_face(measured):
    theirs = hugging_face("ViTMAEModel", attention="eager", dtype=torch.float32)
    x, noise = torch.randn(3, 3, 20, 20), torch.rand(3, 25)
    options = {"noise": noise, "output_hidden_states": True, "output_attentions": True}
    expected, found = theirs(x, **options), from_hf(theirs)(x, **options)
    assert found.last_hidden_state.shape == (3, 11, 32)
    measured("MAE", "Hugging Face ViTMAE", largest(expected.last_hidden_state - found.last_hidden_state), BOUND)
    for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
        measured("MAE", "Hugging Face ViTMAE", largest(a - b), BOUND)
    for a, b in zip(expected.attentions, found.attentions, strict=True):
        measured("MAE", "Hugging Face ViTMAE", largest(a - b), BOUND)


def test_the_same_seed_leaves_out_the_same_patches():
    theirs, x = hugging_face("ViTMAEModel"), torch.randn(3, 3, 20, 20, dtype=torch.float64)
    torch.manual_seed(7)
    expected = theirs(x).mask
    torch.manual_seed(7)
    assert torch.equal(from_hf(theirs)(x).mask, expected)


def test_positions_stretched_to_another_image():
    theirs, x, noise = hugging_face(), torch.randn(2, 3, 16, 28, dtype=torch.float64), torch.rand(2, 28)
    options = {"noise": noise, "interpolate_pos_encoding": True}
    expected, found = theirs(x, **options), from_hf(theirs)(x, **options)
    assert largest(expected.logits - found.logits) < EXACT


# ------------------------------------------------------------------------------------------------ by itself


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


def test_it_learns_and_is_saved(tmp_path):
    model, x, noise = MAE(TINY), torch.rand(4, 3, 12, 12), torch.rand(4, 9)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first = model.loss(x, noise).item()
    for _ in range(15):
        optimizer.zero_grad()
        loss = model.loss(x, noise)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.7 * first
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(MAE.from_pretrained(tmp_path)(x, noise).pixels, model(x, noise).pixels)
