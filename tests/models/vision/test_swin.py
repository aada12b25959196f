"""Swin as message passing against Hugging Face's own, on the same weights."""

from dataclasses import replace

import pytest
import torch
from error_bound import error_bound, largest
from torch import nn

from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.graph.relations import GridOffset
from mpnn.models import ImageClassifier, Swin, SwinConfig, from_hf
from mpnn.models.vision.swin import PatchMerging
from mpnn.position import Table

transformers = pytest.importorskip("transformers")

EXACT = error_bound(4, 64, torch.float64)
BOUND = error_bound(4, 64)
PEER = "Hugging Face Swin"
SIZES = {  # the grids of patches that two stages have, and their windows
    "8 x 8 and 4 x 4 patches, windows of 4": {"image_size": 32, "window_size": 4},
    "7 x 7 and 4 x 4 patches, windows of 4: filled up": {"image_size": 28, "window_size": 4},
    "6 x 6 and 3 x 3 patches, windows of 3": {"image_size": 24, "window_size": 3},
    "5 x 7 and 3 x 4 patches, windows of 2: filled up": {"image_size": [20, 28], "window_size": 2},
    "5 x 5 patches, the last cut short": {"image_size": 18, "window_size": 2},
    "own positions": {"image_size": 16, "window_size": 2, "use_absolute_embeddings": True},
}
TINY = SwinConfig(image=16, patch=4, dim=8, depths=(2, 1), heads=(2, 2), window=2)


def hugging_face(kind="SwinModel", attention="sdpa", dtype=torch.float64, **changes):
    """Eager attention gives weights but takes its softmax in float32; "sdpa" is as precise as its numbers."""
    settings = {
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "image_size": 16,
        "patch_size": 4,
        "window_size": 2,
        "encoder_stride": 8,
        "num_labels": 5,
        "initializer_range": 0.2,  # large enough for attention to choose
        "attn_implementation": attention,
    }
    model = getattr(transformers, kind)(transformers.SwinConfig(**(settings | changes))).to(dtype).eval()
    for name, weight in model.named_parameters():  # transformers leaves these at zero, or at one
        if "relative_position" in name or "norm" in name or "mask_token" in name or "position_embeddings" in name:
            nn.init.normal_(weight)
    return model


def images(size=16, dtype=torch.float64):
    return torch.randn(2, 3, *([size, size] if isinstance(size, int) else size), dtype=dtype)


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_hugging_face(sizes, measured):
    theirs, x = hugging_face(**sizes), images(sizes["image_size"])
    expected, found = theirs(x), from_hf(theirs)(x)
    assert largest(expected.last_hidden_state - found.last_hidden_state) < EXACT
    assert largest(expected.pooler_output - found.pooler_output) < EXACT
    theirs, x = theirs.float(), x.float()
    expected, found = theirs(x), from_hf(theirs)(x)
    measured("Swin", PEER, largest(expected.last_hidden_state - found.last_hidden_state), BOUND)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_states_and_weights_equal_hugging_face(sizes):
    theirs, x = hugging_face(attention="eager", dtype=torch.float32, **sizes), images(sizes["image_size"]).float()
    options = {"output_hidden_states": True, "output_attentions": True}
    expected, found = theirs(x, **options), from_hf(theirs)(x, **options)
    for name in ("hidden_states", "reshaped_hidden_states"):
        for a, b in zip(expected[name], found[name], strict=True):
            assert a.shape == b.shape
            assert largest(a - b) < BOUND
    for a, b in zip(expected.attentions, found.attentions, strict=True):
        assert a.shape == b.shape
        patch = b.sum(-1) > 0.5  # rows of padding, which here are zero
        assert patch.any()
        assert largest((a - b)[patch]) < BOUND


def test_images_of_other_sizes():
    theirs = hugging_face(window_size=2, use_absolute_embeddings=True)
    x = images((24, 20))
    options = {"interpolate_pos_encoding": True}
    assert largest(theirs(x, **options).last_hidden_state - from_hf(theirs)(x, **options).last_hidden_state) < EXACT


# ------------------------------------------------------------------------------------------------ its parts


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
    weights = Swin(small)(torch.randn(1, 3, 8, 8), return_weights=True).weights
    assert weights[0].shape == (1, 1, 2, 4, 4)
    assert largest(weights[0].sum(-1) - 1) < 1e-6


def test_drop_path_leaves_out_whole_images_in_training():
    torch.manual_seed(0)
    config = SwinConfig(image=8, patch=4, dim=8, depths=(2,), heads=(2,), window=2, drop_path=0.5)
    layer = Swin(config).stages[0].layers[1].train()
    assert layer.round.update.drop_path.p == 0.5
    x = torch.randn(64, 4, 8)
    same = (layer(x, (2, 2))[0] == x).flatten(1).all(1).float().mean()
    assert 0.05 < same < 0.5  # both of its branches left out: one image in four, give or take three deviations
    assert largest(layer.eval()(x, (2, 2))[0] - x) > 0


# ------------------------------------------------------------------------------------------------ by itself


def test_a_classifier_learns_and_is_saved(tmp_path):
    model = ImageClassifier(Swin(TINY), classes=2)
    x, targets = torch.randn(8, 3, 16, 16), torch.tensor([0, 1] * 4)
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


# ------------------------------------------------------------------------------------------------ compiled


def test_it_compiles_whole():
    """Over a grid that windows do not divide, and then one that they do."""
    model, x = Swin(replace(TINY, image=12, depths=(1, 1))).eval(), torch.randn(1, 3, 12, 12)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert largest(compiled(x).last - model(x).last) < 1e-5
