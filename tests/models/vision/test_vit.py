"""ViT as message passing against Hugging Face's own, on the same weights."""

import pytest
import torch
from error_bound import error_bound, largest

from mpnn import graphs
from mpnn.models import ImageClassifier, ViT, ViTConfig, from_hf

transformers = pytest.importorskip("transformers")

EXACT = error_bound(2, 48, torch.float64)
BOUND = error_bound(2, 48)
PEER = "Hugging Face ViT"
SIZES = {
    "square": {"image_size": 20, "patch_size": 4},
    "wide": {"image_size": [12, 20], "patch_size": 4},
    "patches that are wide": {"image_size": [8, 18], "patch_size": [2, 6]},
    "pixels left over": {"image_size": 22, "patch_size": 4},
}
TINY = ViTConfig(image=12, patch=4, dim=16, layers=2, heads=2, hidden=32)


def hugging_face(kind="ViTModel", attention="sdpa", dtype=torch.float64, **changes):
    """Eager attention gives weights but takes its softmax in float32; "sdpa" is as precise as its numbers."""
    settings = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 20,
        "patch_size": 4,
        "encoder_stride": 4,
        "num_labels": 5,
        "initializer_range": 0.3,  # large enough for attention to choose
        "attn_implementation": attention,
    }
    return getattr(transformers, kind)(transformers.ViTConfig(**(settings | changes))).to(dtype).eval()


def images(height=20, width=20, dtype=torch.float64):
    return torch.randn(3, 3, height, width, dtype=dtype)


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_hugging_face(sizes, measured):
    height, width = [sizes["image_size"]] * 2 if isinstance(sizes["image_size"], int) else sizes["image_size"]
    theirs, x = hugging_face(**sizes), images(height, width)
    expected, found = theirs(x), from_hf(theirs)(x)
    assert largest(expected.last_hidden_state - found.last_hidden_state) < EXACT
    assert largest(expected.pooler_output - found.pooler_output) < EXACT
    theirs, x = theirs.float(), x.float()
    expected, found = theirs(x), from_hf(theirs)(x)
    measured("ViT", PEER, largest(expected.last_hidden_state - found.last_hidden_state), BOUND)


def test_states_and_weights_equal_hugging_face(measured):
    theirs, x = hugging_face(attention="eager", dtype=torch.float32), images(dtype=torch.float32)
    options = {"output_hidden_states": True, "output_attentions": True}
    expected, found = theirs(x, **options), from_hf(theirs)(x, **options)
    for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
        measured("ViT", PEER, largest(a - b), BOUND)
    for a, b in zip(expected.attentions, found.attentions, strict=True):
        assert b.shape == (3, 4, 26, 26)
        measured("ViT", PEER, largest(a - b), BOUND)
    as_tuple = from_hf(theirs)(x, return_dict=False)
    assert largest(as_tuple[0] - found.last_hidden_state) < BOUND


@pytest.mark.parametrize(("height", "width"), [(16, 28), (20, 20), (24, 20)])
def test_positions_stretched_to_other_images(height, width):
    theirs, x = hugging_face(), images(height, width)
    found = from_hf(theirs)(x, interpolate_pos_encoding=True)
    assert largest(theirs(x, interpolate_pos_encoding=True).last_hidden_state - found.last_hidden_state) < EXACT


# ------------------------------------------------------------------------------------------------ by itself


def test_a_classifier_learns_and_is_saved(tmp_path):
    model = ImageClassifier(ViT(TINY, graphs.neighborhood(3, 3, 1), pooler=8), classes=2)
    x, targets = torch.randn(8, 3, 12, 12), torch.tensor([0, 1] * 4)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    first = model.loss(x, targets).item()
    for _ in range(15):
        optimizer.zero_grad()
        loss = model.loss(x, targets)
        loss.backward()
        optimizer.step()
    assert loss.item() < first / 2
    model.eval().save_pretrained(tmp_path)
    assert torch.equal(ImageClassifier.from_pretrained(tmp_path)(x), model(x))


def test_the_answer_of_a_vit_by_itself():
    seen = ViT(TINY)(torch.randn(2, 3, 12, 12), return_weights=True)
    assert seen.last.shape == (2, 10, 16)
    assert seen.pooled.shape == (2, 16)
    assert seen.weights[0].shape == (2, 2, 10, 10)
