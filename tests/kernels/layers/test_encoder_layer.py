"""Whole layers by one compiled call, against the same layers by torch in float64."""

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from threads import same_bits, threads
from torch import Tensor
from torch.nn import functional as F

from mpnn.kernels.cpu import library
from mpnn.kernels.layers.encoder_layer import ACTIVATIONS, EncoderLayer, Form, Located, Places, Weights
from mpnn.kernels.parts import Parts

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
    maps = tuple(torch.randn(shape) * shape[1] ** -0.5 for shape in form.shapes)
    biases = tuple(torch.randn(rows) if with_biases else None for rows, _ in form.shapes)
    norm_biases = tuple(torch.randn(form.width) if with_biases else None for _ in range(2))
    return Weights(maps, biases, tuple(torch.rand(form.width) + 0.5 for _ in range(2)), norm_biases)


def decoder(width: int, heads: int, kv_heads: int, head_width: int, hidden: int) -> Form:
    """A layer as Llama's."""
    scale = head_width**-0.5
    return Form(
        width, heads, hidden, "silu", True, (1e-6, 1e-5), scale, kv_heads, head_width, rms_norm=True, gated=True
    )


def cos_sin_of(lengths: list[int], head_width: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angles that restart in each document, [rows, width of a head]."""
    positions = torch.cat([torch.arange(n) for n in lengths])
    angles = positions[:, None] * 100.0 ** -(torch.arange(head_width // 2) / head_width)
    return angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)


def reference(
    form: Form,
    weights: Weights,
    x: Tensor,
    lengths: list[int],
    first: list[int],
    keys: list[int],
    is_causal: bool = False,
    cos_sin: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The layer in float64, one document after the other."""
    maps, biases, norm_weights, norm_biases = ([None if t is None else t.double() for t in part] for part in weights)
    heads, kv_heads = form.heads, form.kv_heads or form.heads

    def norm(x: Tensor, which: int) -> Tensor:
        if form.rms_norm:
            out = F.rms_norm(x, (form.width,), norm_weights[which], form.epsilons[which])
            return out if norm_biases[which] is None else out + norm_biases[which]
        return F.layer_norm(x, (form.width,), norm_weights[which], norm_biases[which], form.epsilons[which])

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def layer(x: Tensor, first: int, keys: int, *cos_sin: Tensor) -> Tensor:
        read = norm(x, 0) if form.pre_norm else x
        of_map = (heads, kv_heads, kv_heads)
        q, k, v = (F.linear(read, maps[i], biases[i]).unflatten(1, (of_map[i], -1)).transpose(0, 1) for i in range(3))
        if cos_sin:
            q, k = turned(q, *cos_sin), turned(k, *cos_sin)
        k, v = (t[:, first : first + keys].repeat_interleave(heads // kv_heads, 0) for t in (k, v))
        later = torch.arange(first, first + keys) > torch.arange(len(x))[:, None]
        logits = (form.scale * q @ k.mT).masked_fill(later & is_causal, -torch.inf)
        message = logits.softmax(-1).nan_to_num() @ v  # rows without keys get zeros
        z = x + F.linear(message.transpose(0, 1).flatten(1), maps[3], biases[3])
        z = z if form.pre_norm else norm(z, 0)
        read = norm(z, 1) if form.pre_norm else z
        hidden = F.linear(read, maps[4], biases[4])
        if form.gated:
            hidden = hidden * FUNCTIONS[form.activation](F.linear(read, maps[6], biases[6]))
        else:
            hidden = FUNCTIONS[form.activation](hidden)
        y = z + F.linear(hidden, maps[5], biases[5])
        return y if form.pre_norm else norm(y, 1)

    parts = [x.double().split(lengths), first, keys]
    parts += [] if cos_sin is None else [each.double().split(lengths) for each in cos_sin]
    return torch.cat([layer(*part) for part in zip(*parts, strict=True)])


def tolerance(form: Form, expected: Tensor) -> float:
    """A sum of `depth` products is rounded `depth` times, at random, at the size of what the layer adds up."""
    depth = max(form.width, form.hidden)
    return 4 * depth**0.5 * torch.finfo(torch.float32).eps * float(expected.abs().max())


def run(layer: EncoderLayer, weights: Weights, x: Tensor, *others: Any) -> Tensor:
    return layer(x, weights, *others)


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
    out = EncoderLayer(shape)(x, w, Parts(LENGTHS, keys=(first, keys)))
    expected = reference(shape, w, x, LENGTHS, first, keys)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance(shape, expected))


DECODERS = {
    "GPT-2": form(128, 4, 512, "gelu_tanh", pre_norm=True),
    "one head": form(64, 1, 64, "relu", pre_norm=False),
    "Llama": decoder(128, 4, 4, 32, 256),
    "grouped": decoder(256, 8, 2, 64, 192),
    "wide heads": decoder(64, 4, 1, 64, 128),
}


@pytest.mark.parametrize("with_biases", [True, False])
@pytest.mark.parametrize("name", DECODERS)
def test_a_causal_layer(name: str, with_biases: bool) -> None:
    shape, lengths = DECODERS[name], [7, 1, 129, 20, 20]
    w, x = weights(shape, with_biases), torch.randn(sum(lengths), shape.width)
    first, keys = [0, 0, 0, 13, 0], [7, 1, 129, 7, 4]
    kv_heads, head_width = shape.kv_heads or shape.heads, shape.head_width or shape.width // shape.heads
    cos_sin = cos_sin_of(lengths, head_width) if shape.gated else None
    expected = reference(shape, w, x, lengths, first, keys, True, cos_sin)
    parts = Parts(lengths, is_causal=True, keys=(first, keys))
    states = torch.full((2, sum(lengths) * kv_heads * head_width), torch.nan)
    out = EncoderLayer(shape)(x, w, parts, cos_sin, (states[0], states[1]))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance(shape, expected))
    transposed = w._replace(maps=tuple(map.T.contiguous().T for map in w.maps))
    assert EncoderLayer(shape)(x, transposed, parts, cos_sin).equal(out)
    read = x if not shape.pre_norm else norm_of(shape, w, x)
    values = F.linear(read, w.maps[2], w.biases[2])
    sizes = [n * kv_heads * head_width for n in lengths]
    for value, found in zip(values.split(lengths), states[1].split(sizes), strict=True):
        by_head = value.unflatten(1, (kv_heads, -1)).transpose(0, 1)
        torch.testing.assert_close(found.view(by_head.shape), by_head, rtol=1e-4, atol=1e-4)
    assert states[0].isfinite().all()


def norm_of(form: Form, weights: Weights, x: Tensor) -> Tensor:
    bias = weights.norm_biases[0]
    if not form.rms_norm:
        return F.layer_norm(x, (form.width,), weights.norm_weights[0], bias, form.epsilons[0])
    out = F.rms_norm(x, (form.width,), weights.norm_weights[0], form.epsilons[0])
    return out if bias is None else out + bias


@pytest.mark.parametrize("name", ["GPT-2", "grouped"])
def test_no_later_node_moves_a_bit_of_a_causal_layer(name: str) -> None:
    shape = DECODERS[name]
    layer, x = partial(run, EncoderLayer(shape), weights(shape)), torch.randn(129, shape.width)
    cos_sin = cos_sin_of([129], 64 if shape.gated else 32)
    whole = layer(x, Parts([129], is_causal=True), cos_sin)
    assert same_bits(lambda: [layer(x, Parts([129], is_causal=True), cos_sin)], 1, 2, 3)
    for n in (1, 7, 32, 100):
        alone = layer(x[:n], Parts([n], is_causal=True), (cos_sin[0][:n], cos_sin[1][:n]))
        assert alone.equal(whole[:n]), "a prefix is computed as it is alone"
        changed = x.clone()
        changed[n:] = torch.nan
        assert layer(changed, Parts([129], is_causal=True), cos_sin)[:n].equal(whole[:n])
        padded = torch.cat([torch.randn(n, shape.width), x[:7], torch.randn(3, shape.width)])
        places = [F.pad(each[:7], (0, 0, n, 3)) for each in cos_sin]
        found = layer(padded, Parts([n + 10], is_causal=True, keys=([n], [7])), (places[0], places[1]))
        assert found[n : n + 7].equal(whole[:7])


@pytest.mark.parametrize("pre_norm", [True, False])
def test_bits_depend_neither_on_company_nor_on_threads(pre_norm: bool) -> None:
    shape, lengths = form(128, 4, 512, pre_norm=pre_norm), [*LENGTHS, 600, 12, 3]
    layer, x = partial(run, EncoderLayer(shape), weights(shape)), torch.randn(sum(lengths), 128)
    assert same_bits(lambda: [layer(x, Parts(lengths)), layer(x[:17], Parts([9, 8]))], 1, 2, 3)
    together = layer(x, Parts(lengths)).split(lengths)
    for document, states in zip(x.split(lengths), together, strict=True):
        assert layer(document, Parts([len(document)])).equal(states)
    padded = torch.cat([torch.randn(4, 128), x[:5], torch.randn(8, 128)])
    assert layer(padded, Parts([17], keys=([4], [5])))[4:9].equal(together[0])


def test_no_number_of_another_document_counts() -> None:
    shape = form()
    layer, x = partial(run, EncoderLayer(shape), weights(shape)), torch.randn(sum(LENGTHS), 64)
    out = layer(x, Parts(LENGTHS))
    x[:6] = torch.nan
    again = layer(x, Parts(LENGTHS))
    assert again[:6].isnan().all()
    assert again[6:].equal(out[6:])


def test_weights_that_change_are_read_again() -> None:
    shape = form()
    w, x = weights(shape), torch.randn(9, 64)
    layer = EncoderLayer(shape)
    before = layer(x, w, Parts([9]))
    w.maps[4].data[50, 20] += 1
    w.biases[1].numpy()[7] = 3
    after = layer(x, w, Parts([9]))
    expected = reference(shape, w, x, [9], [0], [9])
    assert not after.equal(before)
    torch.testing.assert_close(after.double(), expected, rtol=0, atol=tolerance(shape, expected))


LAYOUTS = {
    "rows": lambda map: map,
    "columns": lambda map: map.T.contiguous().T,
    "part of a larger one": lambda map: torch.cat([map, map], 1)[:, : map.shape[1]],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", DECODERS)
def test_bits_of_a_row_depend_neither_on_the_number_of_rows_nor_on_the_layout(name: str, layout: str) -> None:
    """Each number of rows has tiles of its own: few rows, one vector of rows, two, and what is left of them."""
    shape, kernel = DECODERS[name], EncoderLayer(DECODERS[name])
    contiguous = weights(shape)
    w = contiguous._replace(maps=tuple(map(LAYOUTS[layout], contiguous.maps)))
    x = torch.randn(101, shape.width)
    cos_sin = cos_sin_of([1] * 101, shape.head_width or shape.width // shape.heads) if shape.gated else None
    expected = kernel(x, contiguous, Parts([1] * 101), cos_sin)
    for rows in (*range(1, 50), 64, 65, 96, 97, 101):
        part = None if cos_sin is None else (cos_sin[0][:rows], cos_sin[1][:rows])
        parts = Parts([1] * rows)
        assert same_bits(lambda part=part, rows=rows, parts=parts: [kernel(x[:rows], w, parts, part)], 1, 2)
        assert kernel(x[:rows], w, parts, part).equal(expected[:rows]), rows


def test_mixed_layouts() -> None:
    for number in range(7):
        shape = DECODERS["grouped"]
        w = weights(shape)
        maps = tuple(map if i == number else map.T.contiguous().T for i, map in enumerate(w.maps))
        x, parts, cos_sin = torch.randn(37, shape.width), Parts([37]), cos_sin_of([37], 64)
        expected = EncoderLayer(shape)(x, w, parts, cos_sin)
        assert EncoderLayer(shape)(x, w._replace(maps=maps), parts, cos_sin).equal(expected)


@pytest.mark.parametrize("size", [1e3, 1e6, 1e9])
def test_large_logits(size: float) -> None:
    """A row attends to its largest logit alone, however large it is."""
    shape = form()
    w, x = weights(shape, with_biases=False), size * torch.randn(9, 64)
    expected = reference(shape, w, x, [9], [0], [9])
    out = EncoderLayer(shape)(x, w, Parts([9]))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


def test_rows_whose_logits_are_all_minus_infinity() -> None:
    shape = form(pre_norm=True)
    w, x = weights(shape), torch.randn(9, 64)
    for i, size in ((0, 1e25), (1, -1e25)):
        w.maps[i].zero_()
        bias = w.biases[i]
        assert bias is not None
        bias.fill_(size)
    out = EncoderLayer(shape)(x, w, Parts([9]))
    for part in (w.maps[:3], w.biases[:3]):
        for tensor in part:
            assert tensor is not None
            tensor.zero_()
    assert out.equal(EncoderLayer(shape)(x, w, Parts([9]))), "such a row gets nothing"


def test_another_default_dtype() -> None:
    shape = form()
    w, x = weights(shape), torch.randn(40, 64)
    expected = EncoderLayer(shape)(x, w, Parts([40]))
    torch.set_default_dtype(torch.bfloat16)
    try:
        out = EncoderLayer(shape)(x, w, Parts([40]))
    finally:
        torch.set_default_dtype(torch.float32)
    assert out.dtype is torch.float32
    assert out.equal(expected)


def test_a_profiler_sees_a_layer() -> None:
    shape = form()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        EncoderLayer(shape)(torch.randn(9, 64), weights(shape), Parts([9]))
    assert "mpnn::layer" in {event.key for event in profile.key_averages()}


UNREADABLE = {
    "bfloat16": (lambda t: t.bfloat16(), TypeError, "must be float32; got torch.bfloat16"),
    "float64": (lambda t: t.double(), TypeError, "must be float32; got torch.float64"),
    "a wrapper": (lambda t: t.as_subclass(Wrapped), TypeError, "must be a plain tensor; got a Wrapped"),
    "meta": (lambda t: t.to("meta"), TypeError, "meta"),
    "sparse": (lambda t: t.to_sparse(), TypeError, "layout"),
    "negated": (lambda t: t._neg_view(), ValueError, "resolve_neg"),
    "with gaps": (lambda t: t.repeat_interleave(2, -1)[..., ::2], ValueError, "must be contiguous"),
}


class Wrapped(Tensor):
    pass


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_the_kernel_cannot_read_is_refused(name: str) -> None:
    change, error, sentence = UNREADABLE[name]
    shape = form()
    layer, w, x, parts = EncoderLayer(shape), weights(shape), torch.randn(9, 64), Parts([9])
    with pytest.raises(error, match=sentence):
        layer(change(x), w, parts)
    for number in range(6):
        maps = tuple(change(map) if i == number else map for i, map in enumerate(w.maps))
        with pytest.raises(error, match=sentence):
            layer(x, w._replace(maps=maps), parts)
    with pytest.raises(error, match=sentence):
        layer(x, w._replace(norm_biases=(w.norm_biases[0], change(w.norm_biases[1]))), parts)


def test_weights_of_other_sizes_are_refused() -> None:
    shape = form()
    layer, w, x = EncoderLayer(shape), weights(shape), torch.randn(9, 64)
    maps = (*w.maps[:4], w.maps[4][:128], w.maps[5])
    with pytest.raises(ValueError, match=r"the weight of the map hidden columns must be \[192, 64\]; got \[128, 64\]"):
        layer(x, w._replace(maps=maps), Parts([9]))
    with pytest.raises(ValueError, match=r"the bias of the map values must be \[64\]; got \[63\]"):
        layer(x, w._replace(biases=(*w.biases[:2], torch.ones(63), *w.biases[3:])), Parts([9]))
    freed = torch.randn(64, 64)
    freed.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match="was freed"):
        layer(x, w._replace(maps=(freed, *w.maps[1:])), Parts([9]))


def test_each_weight_whose_memory_was_freed_is_noticed() -> None:
    shape = form()
    layer, w = EncoderLayer(shape), weights(shape)
    tensors = [x for part in w for x in part]
    maps = len(w.maps)
    numbers = [*range(1, maps + 1), 0, *range(maps + 1, 2 * maps + 1), 0, *range(2 * maps + 1, len(tensors) + 1)]
    places = Places(layer, w, tensors, numbers)
    assert isinstance(places.read(tensors), Located)
    for k, x in enumerate(tensors):
        freed = x.clone()
        freed.untyped_storage().resize_(0)
        assert places.read([*tensors[:k], freed, *tensors[k + 1 :]]) is None


@pytest.mark.parametrize("name", DECODERS)
def test_weights_are_read_in_other_tensors(name: str) -> None:
    """Some weights lie in a larger tensor, and some are not there."""
    shape = DECODERS[name]
    layer, x = EncoderLayer(shape), torch.randn(9, shape.width)
    cos_sin = cos_sin_of([9], shape.head_width or 0) if shape.gated else None

    def draw() -> tuple[Weights, list[Tensor]]:
        w = weights(shape)
        both = torch.randn(2, *w.maps[1].shape)
        maps = w.maps[0], both[0], both[1], *(map.T.contiguous().T for map in w.maps[3:])
        biases = (None, *w.biases[1:])
        norm_biases = w.norm_biases[0], None
        tensors = [maps[0], both, *maps[3:], *biases[1:], *w.norm_weights, norm_biases[0]]
        return Weights(maps, biases, w.norm_weights, norm_biases), tensors

    w, tensors = draw()
    at = {id(x): k for k, x in enumerate(tensors, 1)}
    numbers = [at.get(id(x), 2) for x in w.maps] + [0] * (7 - len(w.maps))
    numbers += [0 if x is None else at[id(x)] for x in w.biases] + [0] * (7 - len(w.biases))
    numbers += [0 if x is None else at[id(x)] for x in (*w.norm_weights, *w.norm_biases)]
    places = Places(layer, w, tensors, numbers)
    for given, held in ((w, tensors), draw()):
        found = places.read(held)
        assert isinstance(found, Located)
        assert layer(x, found, Parts([9]), cos_sin).equal(layer(x, given, Parts([9]), cos_sin))


def test_which_weights_a_layer_reads() -> None:
    shape = form()
    layer, w, x = EncoderLayer(shape), weights(shape), torch.randn(9, 64)
    assert layer.reads(w)
    assert layer.reads(weights(shape, with_biases=False))
    for part in w._fields:
        tensors = getattr(w, part)
        for change in (lambda t: t.double(), lambda t: t.repeat_interleave(2, -1)[..., ::2]):
            assert not layer.reads(w._replace(**{part: tuple(map(change, tensors))}))
    with pytest.raises(ValueError, match="the map queries must be contiguous or transposed; its strides are"):
        layer(x, w._replace(maps=tuple(map.repeat_interleave(2, -1)[..., ::2] for map in w.maps)), Parts([9]))
    with pytest.raises(ValueError, match="the map queries must be contiguous; its strides are"):
        layer(x, w._replace(biases=tuple(torch.randn(2 * rows)[::2] for rows, _ in shape.shapes)), Parts([9]))


def test_texts_in_a_batch() -> None:
    shape = form()
    layer, w, x = EncoderLayer(shape), weights(shape), torch.randn(3, 9, 64)
    assert layer(x, w, Parts([9] * 3)).equal(layer(x.view(27, 64), w, Parts([9] * 3)).view(3, 9, 64))


def test_errors() -> None:
    shape = form()
    layer = partial(run, EncoderLayer(shape), weights(shape))
    with pytest.raises(ValueError, match="9 rows of 64 numbers; got \\[8, 64\\]"):
        layer(torch.randn(8, 64), Parts([9]))
    turn = torch.ones(9, 16)
    with pytest.raises(ValueError, match="cos_sin must be \\[9, 32\\]; got \\[9, 16\\]"):
        layer(torch.randn(9, 64), Parts([9]), (turn, turn))
    with pytest.raises(
        ValueError, match=r"the compiled call takes heads of (16|32) numbers or a multiple; these have 30"
    ):
        EncoderLayer(form(60, 2, 120))
    with pytest.raises(ValueError, match="there is no kernel for these sizes"):
        EncoderLayer(form(62, 4, 120))
    with pytest.raises(ValueError, match="must be among its nodes"):
        _ = Parts([3], keys=([1], [3])).table
    with pytest.raises(ValueError, match="at least one key"):
        _ = Parts([3], keys=([1], [0])).table
    with threads(2):
        assert layer(torch.randn(0, 64), Parts([])).shape == (0, 64)
