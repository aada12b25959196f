"""mpnn.integrations.xformers against the formula over all pairs, and its biases against those of xformers where it is
installed."""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn.integrations import xformers

Q, KV, STARTS = [3, 1, 6], [5, 1, 7], [0, 6, 9, 18]

# Of each bias: how a library builds it, the numbers of queries and keys, and whether query i of m attends to key j of n
# within a sequence.
BIASES: dict[str, tuple[Any, int, int, Any]] = {
    "lower": (lambda x: x.LowerTriangularMask(), 5, 7, lambda i, j, m, n: j <= i),
    "lower, fewer keys": (lambda x: x.LowerTriangularMask(), 7, 5, lambda i, j, m, n: j <= i),
    "bottom right": (lambda x: x.LowerTriangularFromBottomRightMask(), 5, 7, lambda i, j, m, n: j <= i + n - m),
    "local bottom right": (
        lambda x: x.LowerTriangularFromBottomRightMask().make_local_attention(3),
        *(5, 7),
        lambda i, j, m, n: 0 <= i + n - m - j < 3,
    ),
    "local": (
        lambda x: x.LocalAttentionFromBottomRightMask(1, 2),
        *(6, 8),
        lambda i, j, m, n: -2 <= i + n - m - j <= 1,
    ),
    "blocks": (lambda x: x.BlockDiagonalMask.from_seqlens(Q), 10, 10, lambda i, j, m, n: True),
    "blocks of two": (lambda x: x.BlockDiagonalMask.from_seqlens(Q, KV), 10, 13, lambda i, j, m, n: True),
    "causal blocks": (
        lambda x: x.BlockDiagonalMask.from_seqlens(Q, KV).make_causal(),
        *(10, 13),
        lambda i, j, m, n: j <= i,
    ),
    "causal bottom right": (
        lambda x: x.BlockDiagonalCausalFromBottomRightMask.from_seqlens(Q, KV),
        *(10, 13),
        lambda i, j, m, n: j <= i + n - m,
    ),
    "local blocks": (
        lambda x: x.BlockDiagonalMask.from_seqlens(Q, KV).make_local_attention(2),
        *(10, 13),
        lambda i, j, m, n: 0 <= i - j < 2,
    ),
    "local blocks, bottom right": (
        lambda x: x.BlockDiagonalMask.from_seqlens(Q, KV).make_local_attention_from_bottomright(2),
        *(10, 13),
        lambda i, j, m, n: 0 <= i + n - m - j < 2,
    ),
    "padded": (lambda x: x.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 8, KV), 10, 24, lambda i, j, m, n: True),
    "padded, offset": (
        lambda x: x.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(Q, 8, KV),
        *(10, 24),
        lambda i, j, m, n: j <= i + n - m,
    ),
    "padded, local": (
        lambda x: x.BlockDiagonalPaddedKeysMask.from_seqlens(Q, 8, KV).make_local_attention(2, 1),
        *(10, 24),
        lambda i, j, m, n: -1 <= i + n - m - j <= 2,
    ),
    "padded, causal local": (
        lambda x: x.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(Q, 8, KV, 2),
        *(10, 24),
        lambda i, j, m, n: 0 <= i + n - m - j < 2,
    ),
    "gappy": (
        lambda x: x.BlockDiagonalGappyKeysMask.from_seqlens(Q, STARTS, KV),
        *(10, 18),
        lambda i, j, m, n: True,
    ),
    "gappy, offset": (
        lambda x: x.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(Q, STARTS, KV),
        *(10, 18),
        lambda i, j, m, n: j <= i + n - m,
    ),
}


def mask_of(name: str) -> Tensor:
    build, queries, keys, attends = BIASES[name]
    bias = build(xformers)
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    sizes = [(0, queries, 0, keys)]
    if hasattr(bias, "q_seqinfo"):
        own = Q if keys == queries else KV
        begins = {"padded": [0, 8, 16], "gappy": STARTS}.get(name.split(",")[0], [0, own[0], own[0] + own[1]])
        sizes = [(a, m, b, n) for a, m, b, n in zip([0, 3, 4], Q, begins, own, strict=False)]
    for a, m, b, n in sizes:
        for i in range(m):
            for j in range(n):
                mask[a + i, b + j] = attends(i, j, m, n)
    return mask


def by_pairs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float | None = None) -> Tensor:
    """[B, M, H, K] and a bias that broadcasts with [B, H, M, N]."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale) + bias
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1).nan_to_num(0.0), v)


def features(queries: int, keys: int, batch: int = 1) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (queries, 8), (keys, 8), (keys, 6)
    return [torch.randn(batch, n, 2, width, dtype=torch.float64, requires_grad=True) for n, width in shapes]


def assert_same(found: Tensor, right: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(right)
    pairs = (torch.autograd.grad((x * direction).sum(), inputs) for x in (found, right))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", BIASES)
def test_biases(name: str) -> None:
    build, queries, keys, _ = BIASES[name]
    mask, bias = mask_of(name), build(xformers)
    assert torch.equal(bias.materialize((2, queries, keys)) == 0, mask.expand(2, -1, -1))
    qkv = features(queries, keys)
    numbers = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    found = xformers.memory_efficient_attention(*qkv, bias, scale=0.4)
    assert_same(found, by_pairs(*qkv, numbers, 0.4), qkv)
    out, lse = xformers.memory_efficient_attention_forward_requires_grad(*qkv, bias, scale=0.4)
    torch.testing.assert_close(out, found)
    scores = torch.einsum("bihd,bjhd->bhij", *qkv[:2]) * 0.4 + numbers
    torch.testing.assert_close(lse, scores.logsumexp(-1))


def test_biases_of_xformers_itself() -> None:
    spec = find_spec("xformers")
    if spec is None or spec.origin is None:
        pytest.skip("xformers is not installed")
    path = Path(spec.origin).parent / "ops" / "fmha" / "attn_bias.py"  # the package itself needs CUDA's libraries
    module_spec = spec_from_file_location("attn_bias_of_xformers", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    theirs = sys.modules["attn_bias_of_xformers"] = module_from_spec(module_spec)
    module_spec.loader.exec_module(theirs)
    for name, (build, queries, keys, _) in BIASES.items():
        right, found = (build(x).materialize((1, queries, keys)) for x in (theirs, xformers))
        assert torch.equal(right, found), name


def test_tensors_as_biases() -> None:
    q, k, v = qkv = features(5, 7, batch=3)
    bias = torch.randn(1, 2, 5, 7, dtype=torch.float64, requires_grad=True)
    absent = torch.zeros(3, 2, 5, 7, dtype=torch.float64).masked_fill(torch.rand(3, 2, 5, 7) < 0.3, -torch.inf)
    for x in (bias, bias.expand(3, -1, -1, -1), bias[:, :1], bias + absent):
        assert_same(xformers.memory_efficient_attention(*qkv, x), by_pairs(*qkv, x), [*qkv, bias])
    lower = xformers.LowerTriangularMask().add_bias(bias)
    right = by_pairs(*qkv, bias + xformers.LowerTriangularMask().materialize((5, 7), torch.float64))
    assert_same(xformers.memory_efficient_attention(*qkv, lower), right, [*qkv, bias])
    one = xformers.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0], bias[:, 0])
    torch.testing.assert_close(one, by_pairs(q[:, :, :1], k[:, :, :1], v[:, :, :1], bias[:, :1])[:, :, 0])
    groups = [x.unsqueeze(2).expand(-1, -1, 3, -1, -1) for x in qkv]
    found = xformers.memory_efficient_attention(*groups)
    torch.testing.assert_close(found, by_pairs(*qkv, torch.zeros(())).unsqueeze(2).expand_as(found))


def test_lists_of_tensors_are_joined_and_split() -> None:
    lists = [[torch.randn(b, n, 2, 8) for b, n in ((2, 3), (1, 5))] for _ in range(3)]
    bias, q, k, v = xformers.BlockDiagonalMask.from_tensor_lists_qkv(*lists)
    out = bias.split_queries(xformers.memory_efficient_attention(q, k, v, bias))
    for found, *qkv in zip(out, *lists, strict=True):
        torch.testing.assert_close(found, xformers.memory_efficient_attention(*qkv))
    bias, x = xformers.BlockDiagonalCausalMask.from_tensor_list(lists[0])
    assert all(map(torch.equal, bias.split(x), lists[0]))
    assert bias.q_seqinfo.seqstart.tolist() == [0, 3, 6, 11]
    assert (bias.q_seqinfo.max_seqlen, bias.q_seqinfo.min_seqlen) == (5, 3)


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "other sequences": ({"attn_bias": xformers.BlockDiagonalMask.from_seqlens([2, 2])}, "have 4 queries; got 5"),
    "a list": ({"attn_bias": [0.0]}, "or an AttentionBias of mpnn.integrations.xformers; got list"),
    "shape": ({"attn_bias": torch.zeros(2, 3, 5, 7)}, r"attn_bias must expand to \[1, 2, 5, 7\]; got \[2, 3, 5, 7\]"),
    "dims": ({"query": torch.randn(5, 8)}, r"must have shape \[B, M, H, K\], \[B, M, K\] or \[B, M, G, H, K\]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    query, key, value = features(5, 7)
    arguments = {"query": query, "key": key, "value": value, **ERRORS[name][0]}
    with pytest.raises((ValueError, TypeError), match=ERRORS[name][1]):
        xformers.memory_efficient_attention(**arguments)


def test_errors_of_biases() -> None:
    with pytest.raises(ValueError, match=r"Block #1 has num_keys=1 and num_queries=2"):
        xformers.BlockDiagonalCausalFromBottomRightMask.from_seqlens([2, 2], [2, 1])
    with pytest.raises(ValueError, match="Expected `window_size > 0`, but window_size=0"):
        xformers.BlockDiagonalMask.from_seqlens([2]).make_local_attention(0)
    with pytest.raises(ValueError, match="expected `window_left >= 0` but got window_left=-1"):
        xformers.LocalAttentionFromBottomRightMask(-1, 0)
    with pytest.raises(NotImplementedError, match="dropout is not supported on the non-autograd API"):
        xformers.memory_efficient_attention_forward_requires_grad(*features(2, 2), p=0.1)
    with pytest.raises(ImportError, match="PagedBlockDiagonalPaddedKeysMask is not served: gather the pages"):
        from mpnn.integrations.xformers import PagedBlockDiagonalPaddedKeysMask  # noqa: F401
    assert not hasattr(xformers, "NoSuchMask")
