"""Convolution as message passing against torch's own, on the same weights; and the graphs that it runs over."""

import pytest
import torch
from error_bound import error_bound, largest
from torch import nn

from mpnn import MessagePassing, graphs
from mpnn.attention import Typed
from mpnn.graph.relations import KernelOffset
from mpnn.models import Convolution, from_conv
from mpnn.models.layers.images import Patches, kernel_as_linear, patchify

EXACT = error_bound(1, 75, torch.float64)
BOUND = error_bound(1, 75)

SHAPES = {
    "padding": (nn.Conv2d(3, 5, 3, padding=1), (7, 9)),
    "no padding": (nn.Conv2d(3, 5, 3), (3, 4)),
    "stride": (nn.Conv2d(3, 5, 3, stride=2, padding=1), (7, 8)),
    "dilation": (nn.Conv2d(3, 5, 3, dilation=2, padding=2), (6, 7)),
    "a side of its own": (nn.Conv2d(3, 5, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 3), bias=False), (8, 9)),
    "even kernel, much padding": (nn.Conv2d(3, 5, 4, stride=3, padding=3), (5, 5)),
    "one pixel": (nn.Conv2d(3, 5, 1), (1, 1)),
    "same": (nn.Conv2d(3, 5, (3, 5), padding="same", dilation=(2, 1)), (6, 7)),
    "a sequence": (nn.Conv1d(3, 5, 4, stride=2, padding=3, dilation=2), (11,)),
}


def both(conv, images):
    """What torch and what message passing make of images or of sequences, as images."""
    expected = conv(images)
    return from_conv(conv)(images.unflatten(1, (3, -1)).movedim(2, -2) if images.dim() == 3 else images), (
        expected[:, :, None] if expected.dim() == 3 else expected
    )


@pytest.mark.parametrize(("conv", "size"), SHAPES.values(), ids=SHAPES)
def test_equals_torch(conv, size, measured):
    images = torch.randn(2, 3, *size)
    found, expected = both(conv, images)
    assert found.shape == expected.shape
    measured("convolution", f"torch.nn.{type(conv).__name__}", largest(found - expected), BOUND)
    found, expected = both(conv.double(), images.double())
    conv.float()
    assert largest(found - expected) < EXACT


def test_gradients_equal_torch():
    conv = nn.Conv2d(3, 5, 3, stride=2, padding=1).double()
    ours, images = from_conv(conv), torch.randn(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    (of_images,) = torch.autograd.grad(conv(images).square().sum(), images, retain_graph=True)
    conv(images).square().sum().backward()
    images.grad = None
    ours(images).square().sum().backward()
    weight = ours.layer.attention.weight.grad
    assert largest(images.grad - of_images) < 100 * EXACT
    assert largest(weight - conv.weight.grad.flatten(2).permute(2, 1, 0)) < 100 * EXACT


def test_patches_are_pooled_and_a_convolution_whose_stride_is_its_kernel():
    conv = nn.Conv2d(3, 8, (2, 4), stride=(2, 4)).double()
    patches, attention = Patches(3, 8, [2, 4]).double(), Typed(3, 8, relations=8).double()
    with torch.no_grad():
        patches.to_dim.weight.copy_(kernel_as_linear(conv.weight))
        attention.weight.copy_(conv.weight.flatten(2).permute(2, 1, 0))
        patches.to_dim.bias.copy_(conv.bias)
        attention.bias.copy_(conv.bias)
    images = torch.randn(2, 3, 6, 8, dtype=torch.float64)
    pool = MessagePassing(graphs.pooling(6, 8, [2, 4]), "sum", None, attention)
    hearing = torch.empty(2, 6, 0, dtype=torch.float64)
    expected = conv(images).flatten(2).mT
    assert largest(patches(images) - expected) < EXACT
    assert largest(pool(hearing, source=patchify(images)) - expected) < EXACT


@pytest.mark.parametrize(
    ("conv", "why"),
    [
        (nn.Conv2d(4, 4, 3, groups=2), "does not support groups = 2"),
        (nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), "does not support padding_mode = 'reflect'"),
        (nn.Conv2d(3, 4, 2, padding="same"), "does not support padding = 'same' with kernel_size = \\(2, 2\\)"),
    ],
)
def test_what_is_not_supported_is_named(conv, why):
    with pytest.raises(ValueError, match=why):
        from_conv(conv)


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match=r"takes a torch\.nn.Conv1d or Conv2d; got Linear"):
        from_conv(nn.Linear(3, 4))


def test_an_image_too_small_for_the_kernel_is_refused():
    with pytest.raises(ValueError, match=r"a kernel of 5 x 5 .* does not fit into 4 x 9 pixels"):
        Convolution(3, 4, 5)(torch.randn(1, 3, 4, 9))


def test_neighborhoods_are_convolutions():
    graph, other = graphs.convolution(5, 4, 3, padding=1).bind(20), graphs.neighborhood(5, 4, 1).bind(20)
    assert torch.equal(graph.dense(), other.dense())
    assert torch.equal(graph.edge_type, other.edge_type)


def test_cells_cut_short_by_the_edge():
    graph = graphs.pooling(3, 5, [2, 3]).bind(4, 15)
    assert graph.degree().tolist() == [6, 4, 3, 2]
    src, dst = graph.edge_index
    assert src[dst == 3].tolist() == [13, 14]
    assert graph.edge_type[dst == 3].tolist() == [0, 1]
    assert graph.num_edge_types == 6


def test_they_can_be_written_as_text():
    for topology in (graphs.convolution(5, 7, [3, 1], 2, dilation=2), graphs.pooling(3, 5, 2)):
        assert graphs.parse(str(topology)) == topology


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (lambda: graphs.convolution(5, 5, 0), "kernel must be at least 1; got 0"),
        (lambda: graphs.convolution(5, 5, [3, 3, 3]), r"one integer, or one for each of 2 axes; got \[3, "),
        (lambda: graphs.convolution(5, 5, 3, stride=0), "stride must be at least 1; got 0"),
        (lambda: graphs.convolution(5, 5, 3, padding=-1), "padding must be at least 0; got -1"),
        (lambda: graphs.convolution(2, 5, 3), "a kernel of 3 x 3 with dilation .* does not fit into 2 x 5 pixels"),
        (lambda: graphs.convolution(5, 5, 3).bind(25), "gives 3 x 3, so it binds to 9 x 25 nodes"),
        (lambda: graphs.pooling(4, 4, 2).bind(16), "pooling of 4 x 4 pixels gives 2 x 2, so it binds to 4 x 16 nodes"),
        (lambda: graphs.pooling(4, 4, 1.5), "size must be an integer; got 1.5"),
    ],
)
def test_bad_arguments_are_named(build, why):
    with pytest.raises((ValueError, TypeError), match=why):
        build()


def test_taps_beyond_the_kernel_are_clipped():
    taps = KernelOffset(width=4, dst_width=2, kernel=(2, 2), stride=(2, 2))
    assert taps.count == 4
    assert taps.ids(torch.tensor([0, 0, 3]), torch.tensor([5, 15, 0])).tolist() == [3, 3, 0]


def test_it_compiles_whole():
    model, images = Convolution(3, 4, 3, stride=2), torch.randn(1, 3, 6, 7)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert largest(compiled(images) - model(images)) < 1e-5
