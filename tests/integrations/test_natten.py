"""mpnn.integrations.natten against the formula over all pairs, and against NATTEN itself where it is installed."""

import inspect
import random
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import graphs
from mpnn.integrations import natten

CASES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "a line": ((17,), {"kernel_size": 5}),
    "causal, dilated": ((17,), {"kernel_size": (4,), "dilation": 4, "is_causal": True}),
    "a line of blocks": ((16,), {"kernel_size": 4, "stride": 4}),
    "an image": ((7, 9), {"kernel_size": (3, 5), "scale": 0.3}),
    "a strided image": ((8, 6), {"kernel_size": 4, "stride": (2, 3), "dilation": (2, 1)}),
    "causal rows": ((5, 6), {"kernel_size": 3, "is_causal": (True, False)}),
    "all of an image": ((4, 5), {"kernel_size": (4, 5)}),
    "a volume": ((4, 5, 6), {"kernel_size": (2, 3, 3), "is_causal": (True, False, False), "dilation": (1, 1, 2)}),
}
H, HK, D, DV = 4, 2, 8, 6


def features(shape: tuple[int, ...], extra: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = [(*shape, H, D), (*shape, HK, D), (*shape, HK, DV), (extra, HK, D), (extra, HK, DV)]
    return [torch.randn(2, *size, dtype=dtype, requires_grad=True) for size in sizes]


def by_pairs(mask: Tensor, scale: float | None, tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    query, key, value, more_keys, more_values = tensors
    shape = query.shape[1:-2]
    key, value = torch.cat([key.flatten(1, -3), more_keys], 1), torch.cat([value.flatten(1, -3), more_values], 1)
    key, value = (x.repeat_interleave(H // HK, 2) for x in (key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query.flatten(1, -3), key) * (D**-0.5 if scale is None else scale)
    mask = torch.cat([mask, mask.new_ones(len(mask), more_keys.shape[1])], 1)
    scores = scores.masked_fill(~mask, -torch.inf)
    out = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)
    return out.unflatten(1, shape), scores.logsumexp(-1).transpose(1, 2).unflatten(1, shape)


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_neighborhood_attention(name: str, extra: int) -> None:
    shape, options = CASES[name]
    tensors = features(shape, extra)
    function = getattr(natten, f"na{len(shape)}d")
    more = {"additional_keys": tensors[3], "additional_values": tensors[4]} if extra else {}
    found = function(*tensors[:3], **options, **more, return_lse=True)
    names = {"kernel_size": "kernel_size", "stride": "stride", "dilation": "dilation", "is_causal": "causal"}
    chosen = {names[k]: list(x) if isinstance(x, tuple) else x for k, x in options.items() if k in names}
    mask = graphs.neighborhood(*shape, border="natten", **chosen).bind(prod(shape)).dense()
    right = by_pairs(mask, options.get("scale"), tensors)
    used = tensors if extra else tensors[:3]
    for x, y in zip(found, right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(right[0])
    gradients = (torch.autograd.grad((pair[0] * direction).sum(), used) for pair in (found, right))
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(function(*tensors[:3], **options, **more), found[0])


def test_attention_and_merge() -> None:
    query, key, value = (torch.randn(2, 9, h, D, dtype=torch.float64) for h in (H, HK, HK))
    parts = [natten.attention(query, key[:, s], value[:, s], return_lse=True) for s in (slice(4), slice(4, 9))]
    merged = natten.merge_attentions(*(list(x) for x in zip(*parts, strict=True)))
    whole = natten.attention(query, key, value, return_lse=True)
    torch.testing.assert_close(merged, whole)
    one = [x[:1] for x in (query, key, value)]
    lengths = torch.tensor([4, 5])
    packed = natten.attention(*one, is_causal=True, seqlens_Q=lengths, seqlens_KV=lengths)
    ends = torch.tensor([0, 4, 9])
    assert torch.equal(packed, natten.attention(*one, True, cumulative_seqlen_Q=ends, cumulative_seqlen_KV=ends))
    alone = [natten.attention(*(x[:, s] for x in one), is_causal=True) for s in (slice(4), slice(4, 9))]
    torch.testing.assert_close(packed, torch.cat(alone, 1))


def test_modules() -> None:
    layer = natten.NeighborhoodAttention2D(16, 4, kernel_size=3, dilation=2, qkv_bias=False)
    assert [*layer.state_dict()] == ["qkv.weight", "proj.weight", "proj.bias"]
    x = torch.randn(2, 7, 6, 16)
    query, key, value = layer.qkv(x).view(2, 7, 6, 3, 4, 4).unbind(3)
    torch.testing.assert_close(layer(x), layer.proj(natten.na2d(query, key, value, 3, 1, 2).flatten(-2)))
    with pytest.raises(ValueError, match=r"NeighborhoodAttention2D expected \[batch, 2 axes, 16\]"):
        layer(x[:, 0])


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "kernel": ({"kernel_size": 1}, "Invalid value for `kernel_size`; expected an integer or iterable of 2 integers"),
    "axes": ({"kernel_size": (3, 3, 3)}, "Invalid value for `kernel_size`"),
    "dilation": ({"dilation": 3}, "The product of kernel size and dilation cannot be larger than input size"),
    "stride": ({"stride": 4}, "stride must not exceed the kernel"),
    "rank": ({"query": torch.randn(1, 6, H, D)}, "Expected 5-D tensors as inputs to na2d"),
    "layouts": ({"key": torch.randn(2, 6, 5, HK, D)}, "Q, K, and V to match in their token layouts"),
    "one of two": ({"additional_keys": torch.randn(2, 1, HK, D)}, "must be either both Tensors or None"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_those_of_natten(name: str) -> None:
    query, key, value, *_ = features((6, 6), 0, torch.float32)
    arguments = {"query": query, "key": key, "value": value, "kernel_size": 3, **ERRORS[name][0]}
    with pytest.raises(ValueError, match=ERRORS[name][1]):
        natten.na2d(**arguments)


@pytest.mark.filterwarnings("ignore")  # torch's, of FlexAttention without compilation
def test_the_library_itself() -> None:
    theirs = pytest.importorskip("natten", "0.21")
    for name in ("na1d", "na2d", "na3d", "attention", "merge_attentions"):
        ours = inspect.signature(getattr(natten, name)).parameters.values()
        for mine, other in zip(ours, inspect.signature(getattr(theirs, name)).parameters.values(), strict=True):
            assert (mine.name, mine.default) == (other.name, other.default)
    r = random.Random(0)
    for _ in range(60):
        shape = [r.randint(4, most) for most in r.choice([(40,), (9, 9), (6, 5, 6)])]
        dilation = [r.randint(1, n // 2) for n in shape]
        kernels = [r.randint(2, n // d) for n, d in zip(shape, dilation, strict=True)]
        options = {
            "kernel_size": tuple(kernels),
            "stride": tuple(r.randint(1, k) for k in kernels),
            "dilation": tuple(dilation),
            "is_causal": tuple(r.random() < 0.3 for _ in shape),
        }
        query, key, value = (torch.randn(2, *shape, 2, 16) for _ in range(3))
        found, right = (
            getattr(module, f"na{len(shape)}d")(query, key, value, **options, return_lse=True, backend="flex-fna")
            for module in (natten, theirs)
        )
        torch.testing.assert_close(found, tuple(right))
