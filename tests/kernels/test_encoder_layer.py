"""Whole layers by one compiled call, against the same layers by torch in float64."""

import itertools

import pytest
import torch
from threads import same_bits, threads
from torch import Tensor
from torch.nn import functional as F

from mpnn.kernels.cpu import library
from mpnn.kernels.encoder_layer import ACTIVATIONS, Documents, EncoderLayer, Form, Weights

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="there are no compiled kernels")

LENGTHS = [5, 1, 130, 37]
FUNCTIONS = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def form(width: int = 64, heads: int = 2, hidden: int = 192, activation: str = "gelu", pre_norm: bool = False) -> Form:
    return Form(width, heads, hidden, activation, pre_norm, (1e-12, 1e-3), 0.8 * (width // heads) ** -0.5)


def weights(form: Form, with_biases: bool = True) -> Weights:
    width, hidden = form.width, form.hidden
    shapes = [(width, width)] * 4 + [(hidden, width), (width, hidden)]
    maps = tuple(torch.randn(shape) * shape[1] ** -0.5 for shape in shapes)
    biases = tuple(torch.randn(rows) if with_biases else None for rows, _ in shapes)
    norm_biases = tuple(torch.randn(width) if with_biases else None for _ in range(2))
    return Weights(maps, biases, tuple(torch.rand(width) + 0.5 for _ in range(2)), norm_biases)


def reference(form: Form, weights: Weights, x: Tensor, lengths: list[int], first: list[int], keys: list[int]) -> Tensor:
    """The layer in float64, one document after the other."""
    maps, biases, norm_weights, norm_biases = ([None if t is None else t.double() for t in part] for part in weights)

    def norm(x: Tensor, which: int) -> Tensor:
        return F.layer_norm(x, (form.width,), norm_weights[which], norm_biases[which], form.epsilons[which])

    def layer(x: Tensor, first: int, keys: int) -> Tensor:
        read = norm(x, 0) if form.pre_norm else x
        q, k, v = (F.linear(read, maps[i], biases[i]).unflatten(1, (form.heads, -1)).transpose(0, 1) for i in range(3))
        k, v = k[:, first : first + keys], v[:, first : first + keys]
        message = (form.scale * q @ k.mT).softmax(-1) @ v
        z = x + F.linear(message.transpose(0, 1).flatten(1), maps[3], biases[3])
        z = z if form.pre_norm else norm(z, 0)
        hidden = FUNCTIONS[form.activation](F.linear(norm(z, 1) if form.pre_norm else z, maps[4], biases[4]))
        y = z + F.linear(hidden, maps[5], biases[5])
        return y if form.pre_norm else norm(y, 1)

    return torch.cat([layer(*part) for part in zip(x.double().split(lengths), first, keys, strict=True)])


@pytest.mark.parametrize("with_biases", [True, False])
@pytest.mark.parametrize("pre_norm", [True, False])
@pytest.mark.parametrize(
    ("sizes", "activation"),
    [*itertools.product([(64, 2, 192)], ACTIVATIONS), ((384, 12, 1536), "gelu"), ((256, 4, 64), "gelu")],
    ids=str,
)
@pytest.mark.covering(times=2)
def test_a_layer(sizes: tuple[int, int, int], activation: str, pre_norm: bool, with_biases: bool) -> None:
    shape = form(*sizes, activation, pre_norm)
    w, x = weights(shape, with_biases), torch.randn(sum(LENGTHS), shape.width)
    first, keys = [2, 0, 0, 30], [3, 1, 130, 7]
    out = EncoderLayer(shape, w)(x, Documents(LENGTHS, first, keys))
    expected = reference(shape, w, x, LENGTHS, first, keys)
    # A sum of `depth` products is rounded `depth` times, at random, at the size of what the layer adds up.
    depth = max(shape.width, shape.hidden)
    tolerance = 4 * depth**0.5 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("pre_norm", [True, False])
def test_bits_depend_neither_on_company_nor_on_threads(pre_norm: bool) -> None:
    shape, lengths = form(128, 4, 512, pre_norm=pre_norm), [*LENGTHS, 600, 12, 3]
    layer, x = EncoderLayer(shape, weights(shape)), torch.randn(sum(lengths), 128)
    assert same_bits(lambda: [layer(x, Documents(lengths)), layer(x[:17], Documents([9, 8]))], 1, 2, 3)
    together = layer(x, Documents(lengths)).split(lengths)
    for document, states in zip(x.split(lengths), together, strict=True):
        assert layer(document, Documents([len(document)])).equal(states)
    padded = torch.cat([torch.randn(4, 128), x[:5], torch.randn(8, 128)])
    assert layer(padded, Documents([17], [4], [5]))[4:9].equal(together[0])


def test_no_number_of_another_document_counts() -> None:
    shape = form()
    layer, x = EncoderLayer(shape, weights(shape)), torch.randn(sum(LENGTHS), 64)
    out = layer(x, Documents(LENGTHS))
    x[:6] = torch.nan
    again = layer(x, Documents(LENGTHS))
    assert again[:6].isnan().all()
    assert again[6:].equal(out[6:])


def test_weights_that_change_are_packed_again() -> None:
    shape = form()
    w, x = weights(shape), torch.randn(9, 64)
    layer = EncoderLayer(shape, w)
    layer(x, Documents([9]))
    for number in range(6):
        w.maps[number].data.mul_(1.5)  # which torch does not count
        expected = EncoderLayer(shape, w)(x, Documents([9]))
        assert layer(x, Documents([9])).equal(expected)
    w.maps[4].data[50, 20] += 1
    expected = EncoderLayer(shape, w)(x, Documents([9]))
    assert any(layer(x, Documents([9])).equal(expected) for _ in range(200)), "one number is compared in its turn"
    w.maps[1].data[7, 9] += 1
    rows = torch.randn(4096, 64)
    assert layer(rows, Documents([64] * 64)).equal(EncoderLayer(shape, w)(rows, Documents([64] * 64)))


def test_errors() -> None:
    shape = form()
    layer = EncoderLayer(shape, weights(shape))
    with pytest.raises(ValueError, match="9 rows of 64 numbers; got \\[8, 64\\]"):
        layer(torch.randn(8, 64), Documents([9]))
    with pytest.raises(ValueError, match="no kernel for a layer of these sizes"):
        EncoderLayer(form(60, 2, 120), weights(form(60, 2, 120)))
    with pytest.raises(ValueError, match="must be among its rows"):
        Documents([3], [1], [3])
    with pytest.raises(ValueError, match="at least one key"):
        Documents([3], [1], [0])
    with threads(2):
        assert layer(torch.randn(0, 64), Documents([])).shape == (0, 64)
