"""flash-attn's functions and torch's varlen_attn against the formula over all pairs of each sequence, in float64."""

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import flex_attention, varlen as of_torch

from mpnn import graphs, varlen
from mpnn.integrations import bert_padding
from mpnn.kernels.cpu import library

H, HK, D, DV = 4, 2, 8, 6
LENGTHS = [5, 30, 1, 0, 77], [9, 30, 1, 4, 60]
SLOPES = torch.rand(H, dtype=torch.float64)

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"softmax_scale": 0.7},
    "causal": {"causal": True},
    "window": {"window_size": (7, 3)},
    "left": {"window_size": (7, -1)},
    "causal window": {"causal": True, "window_size": (16, 5)},
    "softcap": {"softcap": 0.9, "causal": True},
    "alibi": {"alibi_slopes": SLOPES},
    "causal alibi window": {"alibi_slopes": SLOPES, "causal": True, "window_size": (20, 20)},
    "alibi of sequences": {"alibi_slopes": torch.rand(5, H, dtype=torch.float64), "softcap": 2.0},
}


def by_pairs(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor | None, causal: bool, window: Any, softcap: float, scale: Any
) -> tuple[Tensor, Tensor]:
    """One sequence, [M, H, D]: the result, and the log-sum-exp [H, M]."""
    (m, heads, width), n = q.shape, len(k)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    logits = torch.einsum("ihd,jhd->hij", q, k) * (width**-0.5 if scale is None else scale)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(m)[:, None] + n - m - torch.arange(n)
    if slopes is not None:
        logits = logits - slopes[:, None, None] * distance.abs()
    left, right = window[0], 0 if causal else window[1]
    absent = torch.zeros(m, n, dtype=torch.bool)
    absent = absent if left < 0 else absent | (distance > left)
    absent = absent if right < 0 else absent | (-distance > right)
    logits = logits.masked_fill(absent, -math.inf)
    lse = logits.logsumexp(-1) if n else logits.new_full((heads, m), -math.inf)
    return torch.einsum("hij,jhd->ihd", logits.softmax(-1).nan_to_num(0.0), v), lse


def expected(qkv: Any, lengths: Any, **options: Any) -> tuple[Tensor, Tensor]:
    slopes = options.get("alibi_slopes")
    parts = []
    for b, (q, k, v) in enumerate(zip(*(x.split(n) for x, n in zip(qkv, lengths, strict=True)), strict=True)):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        rest = (options.get("causal", False), options.get("window_size", (-1, -1)), options.get("softcap", 0.0))
        parts.append(by_pairs(q, k, v, own, *rest, options.get("softmax_scale")))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)


def features(lengths: Any = LENGTHS, kv_heads: int = HK) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (sum(lengths[0]), H, D), (sum(lengths[1]), kv_heads, D), (sum(lengths[1]), kv_heads, DV)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def cumulative(lengths: list[int]) -> Tensor:
    return F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def assert_same(found: Tensor, right: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9)
    direction = torch.randn_like(right)
    pairs = (torch.autograd.grad((x * direction).sum(), inputs, retain_graph=True) for x in (found, right))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_sequences_of_different_lengths(name: str) -> None:
    qkv, options = features(), OPTIONS[name]
    cu = [cumulative(n) for n in LENGTHS]
    out, lse, probs = varlen.flash_attn_varlen_func(*qkv, *cu, 77, 60, return_attn_probs=True, **options)
    right, sums = expected(qkv, (*LENGTHS, LENGTHS[1]), **options)
    torch.testing.assert_close(lse, sums)
    assert probs is None
    assert_same(out, right, qkv)
    torch.testing.assert_close(varlen.flash_attn_varlen_func(*qkv, *cu, 77, 60, 0.0, **options), right)


@pytest.mark.parametrize(("m", "n"), [(6, 6), (3, 9), (9, 3)])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.covering
def test_sequences_of_one_length(name: str, m: int, n: int) -> None:
    batch = 5
    flat, options = features(([m] * batch, [n] * batch)), OPTIONS[name]
    q, k, v = (x.unflatten(0, (batch, -1)) for x in flat)
    out, lse, _ = varlen.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    right, sums = expected(flat, ([m] * batch, [n] * batch, [n] * batch), **options)
    torch.testing.assert_close(lse, sums.unflatten(1, (batch, -1)).transpose(0, 1))
    assert_same(out.flatten(0, 1), right, flat)


def test_packed_variants() -> None:
    lengths = [4, 0, 7]
    (qkv,) = (torch.randn(11, 3, H, D, dtype=torch.float64, requires_grad=True),)
    cu, options = cumulative(lengths), {"causal": True, "softcap": 3.0}
    plain = varlen.flash_attn_varlen_func(*qkv.unbind(1), cu, cu, 7, 7, **options)
    q, kv = qkv[:, 0], qkv[:, 1:]
    assert_same(varlen.flash_attn_varlen_qkvpacked_func(qkv, cu, 7, 0.0, None, **options), plain, [qkv])
    assert_same(varlen.flash_attn_varlen_kvpacked_func(q, kv, cu, cu, 7, 7, **options), plain, [qkv])
    rows = qkv.view(1, *qkv.shape)
    plain = varlen.flash_attn_func(*rows.unbind(2), **options)
    assert_same(varlen.flash_attn_qkvpacked_func(rows, **options), plain, [qkv])
    assert_same(varlen.flash_attn_kvpacked_func(rows[:, :, 0], rows[:, :, 1:], **options), plain, [qkv])
    with pytest.raises(ValueError, match=r"qkv must have shape \[..., 3, H, D\]"):
        varlen.flash_attn_qkvpacked_func(rows[:, :, 1:])


COMMON = "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs"
SIGNATURES = {  # of flash-attn 2.8.4
    "flash_attn_func": f"q k v {COMMON}",
    "flash_attn_kvpacked_func": f"q kv {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv {COMMON}",
    "flash_attn_varlen_func": f"q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON} block_table",
    "flash_attn_varlen_kvpacked_func": f"q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {COMMON}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    ),
}


def test_signatures() -> None:
    for name, parameters in SIGNATURES.items():
        assert " ".join(inspect.signature(getattr(varlen, name)).parameters) == parameters
    ours, theirs = (inspect.signature(x.varlen_attn).parameters for x in (varlen, of_torch))
    assert [(x.name, x.default) for x in ours.values()] == [(x.name, x.default) for x in theirs.values()]
    assert [x.kind for x in ours.values()] == [x.kind for x in theirs.values()]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (6, 0), (3, 4)])
def test_varlen_attn(window: tuple[int, int]) -> None:
    qkv, cu = features(), [cumulative(n) for n in LENGTHS]
    options = {"window_size": window, "scale": 0.5, "enable_gqa": True}
    right, sums = expected(qkv, (*LENGTHS, LENGTHS[1]), window_size=window, softmax_scale=0.5)
    out, lse = varlen.varlen_attn(*qkv, *cu, 77, 60, return_aux=of_torch.AuxRequest(lse=True), **options)
    torch.testing.assert_close(lse, sums)
    assert_same(out, right, qkv)
    with pytest.raises(ValueError, match="varlen_attn returns the log-sum-exp, lse, and no max_scores"):
        varlen.varlen_attn(*qkv, *cu, 77, 60, return_aux=flex_attention.AuxRequest(max_scores=True), **options)
    # a prefix of the keys of each sequence, also where they lie in pages of another order
    used = torch.tensor([3, 30, 0, 4, 17])
    firsts = [n[:m] for n, m in zip(torch.arange(sum(LENGTHS[1])).split(LENGTHS[1]), used, strict=True)]
    k, v = (x[torch.cat(firsts)] for x in qkv[1:])
    lengths = LENGTHS[0], used.tolist(), used.tolist()
    right, _ = expected((qkv[0], k, v), lengths, window_size=window, softmax_scale=0.5)
    assert_same(varlen.varlen_attn(*qkv, *cu, 77, 60, seqused_k=used, **options), right, qkv)
    size, table = 4, torch.randperm(5 * 8).view(5, 8).int()
    pools = [torch.randn(40, size, HK, width, dtype=torch.float64) for width in (D, DV)]
    for pool, x in zip(pools, (k, v), strict=True):
        for pages, rows in zip(table, x.detach().split(used.tolist()), strict=True):
            padded = F.pad(rows, (0, 0, 0, 0, 0, 8 * size - len(rows)), value=math.nan)
            pool[pages.long()] = padded.unflatten(0, (8, size))
    paged = varlen.varlen_attn(qkv[0], *pools, cu[0], None, 77, 60, seqused_k=used, block_table=table, **options)
    torch.testing.assert_close(paged, right)
    flash = varlen.flash_attn_varlen_func(
        qkv[0], *pools, cu[0], cumulative(used.tolist()), 77, 60, 0.0, 0.5, window_size=window, block_table=table
    )
    torch.testing.assert_close(flash, right)


def test_a_cache_is_filled_and_read() -> None:
    caches = [torch.randn(4, 20, HK, D, dtype=torch.float64) for _ in range(2)]
    q, k, v = (torch.randn(3, 2, heads, D, dtype=torch.float64) for heads in (H, HK, HK))
    rows, counts, firsts = [2, 0, 3], [5, 18, 0], [1, 4, 0]
    right = [x.clone() for x in caches]
    for x, new in zip(right, (k, v), strict=True):
        for b, row in enumerate(rows):
            x[row, counts[b] : counts[b] + 2] = new[b]
    out, lse = varlen.flash_attn_with_kvcache(
        *(q, *caches, k, v),
        cache_seqlens=torch.tensor(counts),
        cache_batch_idx=torch.tensor(rows),
        cache_leftpad=torch.tensor(firsts),
        causal=True,
        return_softmax_lse=True,
    )
    torch.testing.assert_close(caches, right)
    for b, row in enumerate(rows):
        held = [x[row, firsts[b] : counts[b] + 2] for x in right]
        alone, sums = by_pairs(q[b], *held, None, True, (-1, -1), 0.0, None)
        torch.testing.assert_close(out[b], alone)
        torch.testing.assert_close(lse[b], sums)
    with pytest.raises(ValueError, match="2 new tokens after 19 exceed the cache of 20"):
        varlen.flash_attn_with_kvcache(q, *(x[:3] for x in caches), k, v, cache_seqlens=19)


def test_dropout_and_16_bits() -> None:
    q, k, v = (x.detach().bfloat16() for x in features())
    cu = [cumulative(n) for n in LENGTHS]
    out, lse, _ = varlen.flash_attn_varlen_func(q, k, v, *cu, 77, 60, causal=True, return_attn_probs=True)
    right, _ = expected((q.double(), k.double(), v.double()), (*LENGTHS, LENGTHS[1]), causal=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), right, rtol=2e-2, atol=2e-2)
    whole, once, again = (varlen.flash_attn_varlen_func(q, k, v, *cu, 77, 60, rate) for rate in (0.0, 0.5, 0.5))
    assert not torch.equal(once, whole)
    assert not torch.equal(once, again)


def test_other_sequences_change_nothing() -> None:
    q, k, v = features()
    cu = [cumulative(n) for n in LENGTHS]
    out = varlen.flash_attn_varlen_func(q, k, v, *cu, 77, 60, causal=True)
    others = [x.detach().clone() for x in (q, k, v)]
    # Without kernels a product of all pairs runs, which multiplies NaN by a weight of 0 (docs/reliability.md).
    first, last = (torch.nan, torch.inf) if library.why_missing() is None else (1e4, -1e4)
    for x, bounds in zip(others, (cu[0], cu[1], cu[1]), strict=True):
        x[: bounds[1]], x[bounds[2] :] = first, last
    changed = varlen.flash_attn_varlen_func(*others, *cu, 77, 60, causal=True)
    assert torch.equal(out[cu[0][1] : cu[0][2]], changed[cu[0][1] : cu[0][2]])


def test_long_sequences() -> None:
    """Rows are not written out where a window moves by one key a query."""
    lengths, sources = [5000, 3, 7001], [4000, 9, 7001]
    for left, right in ((-1, -1), (100, 0), (100, 20), (-1, 5)):
        shifts = [n - m for m, n in zip(lengths, sources, strict=True)]
        graph = varlen.spans(lengths, sources, shifts, left, right).bind(sum(lengths), sum(sources))
        rows = torch.tensor([0, 99, 100, 999, 1000, 1001, 1101, 4979, 4999, 5000, 5002, 5003, 5103, 5104, 12003])
        document = torch.tensor([0] * 10 + [1] + [2] * 4)
        document[9] = 1
        begins, from_ = torch.tensor([0, 5000, 5003])[document], torch.tensor([0, 4000, 4009])[document]
        at = rows - begins + torch.tensor(shifts)[document]
        count = torch.tensor(sources)[document]
        first = at * 0 if left < 0 else (at - left).clamp(min=0)
        last = count if right < 0 else torch.minimum((at + right + 1).clamp(min=0), count)
        runs = graph.runs
        for row, a, b in zip(rows.tolist(), (from_ + first).tolist(), (from_ + last).tolist(), strict=True):
            own = slice(runs.ptr[row], runs.ptr[row + 1])
            held = list(zip(runs.start[own], runs.stop[own], strict=True))
            assert held == ([(a, b)] if a < b else [])
    equal = varlen.spans([30, 7], [30, 7], [0, 0], -1, 0).bind(37)
    assert torch.equal(equal.dense(), (graphs.causal() & graphs.documents([30, 7])).bind(37).dense())


ERRORS: dict[str, tuple[Any, str]] = {
    "floats": ({"cu_seqlens_q": torch.tensor([0.0, 3.0])}, "cu_seqlens_q must be a tensor of integers"),
    "a list": ({"cu_seqlens_k": [0, 3]}, "cu_seqlens_k must be a tensor of integers"),
    "lengths": ({"cu_seqlens_q": torch.tensor([3])}, "cu_seqlens_q must begin with 0"),
    "down": ({"cu_seqlens_q": torch.tensor([0, 4, 3])}, "sequence 1 would begin at 4 and end at 3"),
    "too few": ({"cu_seqlens_k": torch.tensor([0, 2])}, "cu_seqlens_k ends at 2, but k has 3 tokens"),
    "other numbers": ({"cu_seqlens_k": torch.tensor([0, 1, 3])}, "queries and keys must be of as many sequences"),
    "slopes": ({"alibi_slopes": torch.rand(3)}, r"alibi_slopes must have shape \[4\] or \[1, 4\]; got \[3\]"),
    "a batch": ({"q": torch.randn(1, 3, H, D)}, r"q must have shape \[T, H, D\]"),
    "pages": ({"block_table": torch.tensor([[0]])}, r"k must have shape \[pages, size, H, D\]"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(name: str) -> None:
    q, k, v = features(([3], [3]))
    cu = torch.tensor([0, 3])
    good = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 3}
    with pytest.raises((ValueError, TypeError), match=ERRORS[name][1]):
        varlen.flash_attn_varlen_func(**{**good, **ERRORS[name][0]})


def test_errors_of_torchs_function() -> None:
    q, k, v = features(([3], [3]))
    with pytest.raises(ValueError, match="Try setting enable_gqa=True"):
        varlen.varlen_attn(q, k, v, torch.tensor([0, 3]), torch.tensor([0, 3]), 3, 3)
    with pytest.raises(ValueError, match="block_table needs seqused_k"):
        varlen.varlen_attn(q, k, v, torch.tensor([0, 3]), None, 3, 3, block_table=torch.tensor([[0]]), enable_gqa=True)
    cu, used = torch.tensor([0, 3]), torch.tensor([4])
    with pytest.raises(ValueError, match=r"up to the lengths of the sequences, \[3\]; got \[4\]"):
        varlen.varlen_attn(q, k, v, cu, cu, 3, 3, seqused_k=used, enable_gqa=True)


def test_errors_of_batches() -> None:
    q, k = torch.randn(2, 3, H, D), torch.randn(1, 3, H, D)
    with pytest.raises(ValueError, match="the same batch size; got 2, 1 and 1"):
        varlen.flash_attn_func(q, k, k)
    with pytest.raises(TypeError, match=r"q must be a tensor \[B, N, H, D\]; got list"):
        varlen.flash_attn_func([q], k, k)
    with pytest.raises(NotImplementedError, match="takes no rotary_cos, rotary_sin or block_table"):
        varlen.flash_attn_with_kvcache(q, k, k, rotary_cos=q)


def test_padding_is_removed_and_restored() -> None:
    x = torch.randn(3, 5, 2, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5, [0, 0, 1, 0, 0]])
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask)
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 8, 9], 5, [3, 5, 1])
    assert torch.equal(tokens, x[mask.bool()])
    assert torch.equal(bert_padding.pad_input(tokens, indices, 3, 5), x * mask[..., None])
    unused = torch.tensor([[0, 0, 0, 1, 0], [0] * 5, [0] * 5])
    _, _, cu_seqlens, _, used = bert_padding.unpad_input(x, mask, unused)
    assert (cu_seqlens.tolist(), used.tolist()) == ([0, 4, 9, 10], [3, 5, 1])
