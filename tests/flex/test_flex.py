"""mpnn.flex against torch's FlexAttention, and gradients against the formula over all pairs."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from mpnn import flex, ops
from mpnn.flex import masks, scores
from mpnn.flex.programs import record
from mpnn.graph.edge_tables import BiasTable
from mpnn.ops import NodeBias

B, H, N, D = 2, 4, 90, 8
DOCUMENT = torch.arange(N) // 25
PREFIX = torch.tensor([10, 33])
SLOPES = torch.tensor([2.0 ** -(k + 1) for k in range(H)], dtype=torch.float64)

# The masks and score_mods of torch's tutorials and of attention-gym.
MASKS: dict[str, Callable[..., Tensor]] = {
    "noop": of_torch.noop_mask,
    "causal": lambda b, h, q, kv: q >= kv,
    "sliding window": lambda b, h, q, kv: (q >= kv) & (q - kv <= 20),
    "prefix LM": lambda b, h, q, kv: (kv <= PREFIX[b]) | (q >= kv),
    "documents": of_torch.and_masks(lambda b, h, q, kv: DOCUMENT[q] == DOCUMENT[kv], lambda b, h, q, kv: q >= kv),
    "natten 2d": lambda b, h, q, kv: ((q // 10 - kv // 10).abs() <= 2) & ((q % 10 - kv % 10).abs() <= 2),
    "dilated by head": lambda b, h, q, kv: (q >= kv) & ((q - kv) % (h + 1) == 0),
    "empty rows": lambda b, h, q, kv: (q > kv) & (q % 7 != 3),
}
MODS: dict[str, Callable[..., Tensor]] = {
    "identity": lambda score, b, h, q, kv: score,
    "ALiBi": lambda score, b, h, q, kv: score + (kv - q) * SLOPES[h],
    "relative": lambda score, b, h, q, kv: score + (q - kv),
    "softcap": lambda score, b, h, q, kv: 3 * torch.tanh(score / 3),
    "softcap, then ALiBi": lambda score, b, h, q, kv: torch.tanh(score / -5) * -5.0 - SLOPES[h] * (q - kv).abs(),
    "scale": lambda score, b, h, q, kv: (1 - score) / 2 * SLOPES[h] + 0.5,
    "scale of nodes": lambda score, b, h, q, kv: score * torch.cos(0.1 * q) + torch.sin(kv * 1.0) - b,
    "scale of keys": lambda score, b, h, q, kv: -score * torch.cos(0.1 * kv + h),
    "causal as a score": lambda score, b, h, q, kv: torch.where(q >= kv, score + 0.1 * q, -float("inf")),
    "not the future": lambda score, b, h, q, kv: torch.where(q < kv, -math.inf, score) + 1,
    "causal bias": lambda score, b, h, q, kv: score + torch.where(q >= kv, 0.5 * b, -float("inf")),
    "product of ends": lambda score, b, h, q, kv: score + 0.001 * q * kv * b,
}


def features(kv_heads: int = H, keys: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (H, N), (kv_heads, keys), (kv_heads, keys)
    return [torch.randn(B, *shape, D, dtype=dtype).requires_grad_() for shape in shapes]


def by_pairs(q: Tensor, k: Tensor, v: Tensor, mod: Any, mask: Any = None) -> Tensor:
    """The formula over all pairs. Mods broadcast."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    sizes = *q.shape[:3], k.shape[2]
    at = [torch.arange(n).view([-1 if d == i else 1 for d in range(4)]) for i, n in enumerate(sizes)]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores = scores if mod is None else mod(scores, *at)
    if mask is not None:
        scores = scores.masked_fill(~mask(*at), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def assert_like_pairs(q: Tensor, k: Tensor, v: Tensor, mod: Any, mask: Any, learned: list[Tensor]) -> None:
    block_mask = None if mask is None else flex.create_block_mask(mask, B, H, q.shape[2], k.shape[2])
    found = flex.flex_attention(q, k, v, mod, block_mask, enable_gqa=True)
    right, inputs = by_pairs(q, k, v, mod, mask), [q, k, v, *learned]
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(right)
    pairs = (torch.autograd.grad((x * direction).sum(), inputs) for x in (found, right))
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # torch's: of return_lse, and that it is not compiled
@pytest.mark.parametrize(("mask", "mod"), [*((m, "identity") for m in MASKS), *(("sliding window", m) for m in MODS)])
@pytest.mark.sample(3)
def test_agrees_with_torch(mask: str, mod: str) -> None:
    q, k, v = (x.detach() for x in features(kv_heads=2))
    ours, theirs = (
        make.create_block_mask(MASKS[mask], B, H, N, N, device="cpu", BLOCK_SIZE=32) for make in (flex, of_torch)
    )
    options = {"scale": 0.3, "enable_gqa": True, "return_lse": True}
    right = of_torch.flex_attention(q, k, v, MODS[mod], theirs, **options)
    for block_mask in (ours, theirs):
        found = flex.flex_attention(q, k, v, MODS[mod], block_mask, **options)
        for x, y in zip(found, right, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.filterwarnings("ignore")  # torch's: that it is not compiled
def test_auxiliary_outputs_are_those_of_torch() -> None:
    q, k, v = (x.detach() for x in features())
    for request in (of_torch.AuxRequest(lse=True), of_torch.AuxRequest()):
        (out, aux), (expected, right) = (make.flex_attention(q, k, v, return_aux=request) for make in (flex, of_torch))
        torch.testing.assert_close(out, expected)
        assert type(aux) is of_torch.AuxOutput
        assert (aux.lse is None) == (right.lse is None)
        if aux.lse is not None:
            torch.testing.assert_close(aux.lse, right.lse)
    for options in ({"return_aux": of_torch.AuxRequest(max_scores=True)}, {"return_aux": request, "return_lse": True}):
        with pytest.raises(ValueError, match="return_aux may ask for lse"):
            flex.flex_attention(q, k, v, **options)


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize("mask", [None, "prefix LM", pytest.param("dilated by head", marks=pytest.mark.slow)])
@pytest.mark.covering
def test_gradients(mask: str | None, mod: str) -> None:
    if mod == "product of ends" or mask != "dilated by head" or "scale" in mod:  # a third of the combinations
        mask_mod = mask and MASKS[mask]
        assert_like_pairs(*features(kv_heads=2, keys=70), MODS[mod], mask_mod, [])


def test_captured_tensors_get_gradients() -> None:
    table, slopes, pairs, temperature = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((H, 2 * N), (H,), (B, H, N, N), ())
    )
    assert_like_pairs(*features(), lambda s, b, h, q, kv: s + table[h, q - kv + N], MASKS["causal"], [table])
    assert_like_pairs(
        *features(), lambda s, b, h, q, kv: s * temperature + pairs[b, h, q, kv], None, [pairs, temperature]
    )
    mod = lambda s, b, h, q, kv: 3 * torch.tanh(s * slopes[h])  # noqa: E731  # autograd stores the tanh
    assert_like_pairs(*features(), mod, None, [slopes])
    mod = lambda s, b, h, q, kv: s + (slopes * 2)[h] * kv + slopes[h] * q  # noqa: E731
    assert_like_pairs(*features(), mod, MASKS["prefix LM"], [slopes])
    q, k, v = features()
    chained = flex.flex_attention(q, k, v, lambda s, b, h, q, kv: s + pairs[b][h][q][kv])
    torch.testing.assert_close(chained, by_pairs(q, k, v, lambda s, *at: s + pairs))


def test_numbers_of_a_score_mod_become_the_smallest_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nodes where they depend on one end, a table where they depend on the difference, else per edge."""
    seen: list[Any] = []
    attend = ops.attend
    monkeypatch.setattr(ops, "attend", lambda *a, bias=None, **o: (seen.append(bias), attend(*a, bias=bias, **o))[1])
    q, k, v = features()
    mask = flex.create_block_mask(MASKS["sliding window"], None, None, N, N)

    def kinds(mod: str) -> list[type]:
        flex.flex_attention(q, k, v, MODS[mod], mask)
        return [type(x) for x in seen.pop() or ()]

    assert kinds("identity") == []
    assert kinds("ALiBi") == kinds("relative") == [BiasTable]
    assert kinds("scale of nodes") == [NodeBias, NodeBias]
    assert kinds("product of ends") == [Tensor]
    table = scores._bias(
        record(lambda b, h, q, kv: q - kv), mask.graphs[0][0], torch.arange(1), torch.arange(1), q.dtype
    )
    assert len(table.table) == 41, "offsets of the window, not of all pairs"


def test_blocks_of_torch_that_no_mask_mod_describes_count() -> None:
    q, k, v = (x.detach() for x in features(keys=64))
    q = q[:, :, :64]
    blocks = torch.tensor([[1, 0], [1, 1]]).bool()
    counts, indices = blocks.sum(-1).int(), torch.tensor([[0, 1], [0, 1]]).int()
    mask = of_torch.BlockMask.from_kv_blocks(counts[None, None], indices[None, None], BLOCK_SIZE=32)
    right = by_pairs(q, k, v, None, lambda b, h, i, j: blocks[i // 32, j // 32])
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), right)
    assert mask in masks._OF_TORCH
    gone = weakref.ref(mask)
    del mask
    assert gone() is None


def test_a_mask_of_torch_may_get_another_mask_mod() -> None:
    q, k, v = (x.detach() for x in features())
    mask = of_torch.create_block_mask(MASKS["causal"], None, None, N, N, device="cpu")
    flex.flex_attention(q, k, v, block_mask=mask)
    mask.mask_mod = MASKS["sliding window"]
    right = by_pairs(q, k, v, None, MASKS["sliding window"])
    torch.testing.assert_close(flex.flex_attention(q, k, v, block_mask=mask), right)


def test_16_bit_features_and_no_nodes() -> None:
    q, k, v = (x.detach() for x in features(dtype=torch.bfloat16))
    right = by_pairs(q.double(), k.double(), v.double(), MODS["ALiBi"])
    torch.testing.assert_close(flex.flex_attention(q, k, v, MODS["ALiBi"]).double(), right, rtol=0.02, atol=0.02)
    for some in (q[:, :, :0], q[:0]):
        size = some.shape[0]
        assert flex.flex_attention(some, k[:size], v[:size], MODS["ALiBi"]).shape == some.shape


@pytest.mark.slow
def test_a_compiled_call_runs_it_as_it_is() -> None:
    q, k, v = (x.detach() for x in features())
    compiled = torch.compile(flex.flex_attention, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, MODS["softcap"]), flex.flex_attention(q, k, v, MODS["softcap"]))


LEARNED = torch.ones((), requires_grad=True)
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "exp": (lambda s, b, h, q, kv: s.exp(), r"because of aten\.exp"),
    "square": (lambda s, b, h, q, kv: s * s, r"because of aten\.mul"),
    "bias, then softcap": (lambda s, b, h, q, kv: torch.tanh(s + q), r"because of aten\.tanh"),
    "a number for masked scores": (lambda s, b, h, q, kv: torch.where(q >= kv, s, -1e9), r"because of aten\.where"),
    "a condition on the score": (lambda s, b, h, q, kv: torch.where(s > 0, s, -math.inf), r"because of aten\.gt"),
    "scaling after a mask": (lambda s, b, h, q, kv: -torch.where(q >= kv, s, -math.inf), r"because of aten\.neg"),
    "factor of both ends": (lambda s, b, h, q, kv: s * (q - kv), "multiplies by a function of both q_idx and kv_idx"),
    "no gradient": (lambda s, b, h, q, kv: s.detach(), r"because of aten\.(detach|alias)"),
    "a branch": (lambda s, b, h, q, kv: s if q > kv else -s, r"score_mod must .* \(score, b, h.* reads no numbers"),
    "three arguments": (lambda s, b, h: s, r"score_mod must be a function of \(score, b, h, q_idx, kv_idx\)"),
    "written to": (lambda s, b, h, q, kv: s + (q * 1.0).mul_(2), "must not write to tensors"),
    "drawn": (lambda s, b, h, q, kv: s + torch.rand(()), r"draw random numbers; it does so by aten\.rand"),
    "dropped": (lambda s, b, h, q, kv: q * 1.0, "must return a function of the score"),
    "rounded": (lambda s, b, h, q, kv: torch.div(s, 2, rounding_mode="floor"), r"because of aten\.div"),
    "16 bits": (lambda s, b, h, q, kv: s.bfloat16(), r"because of aten\._to_copy"),
    "learned softcap": (lambda s, b, h, q, kv: LEARNED * torch.tanh(s), "multiply a tanh by one number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_score_mods_are_refused_with_the_operation(name: str) -> None:
    mod, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        flex.flex_attention(*features(), mod)


def test_refusals() -> None:
    q, k, v = features()
    for options, sentence in (
        ({"block_mask": flex.create_block_mask(MASKS["causal"], 1, 1, N, 80)}, r"has the shape \(1, 1, 90, 80\)"),
        ({"block_mask": flex.create_block_mask(MASKS["prefix LM"], None, H, N, N)}, r"depends on b .* needs B and H"),
        ({"block_mask": flex.create_block_mask(MASKS["dilated by head"], B, None, N, N)}, "depends on b or h"),
        ({"block_mask": flex.create_block_mask(MASKS["prefix LM"], 1, H, N, N).graphs}, "create_block_mask; got list"),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            flex.flex_attention(q, k, v, **options)
    with pytest.raises(ValueError, match="query has 4 heads and key 2; pass enable_gqa=True"):
        flex.flex_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(ValueError, match=r"\[B, H, N, D\]"):
        flex.flex_attention(q[0], k, v)
    for key, value in ((k[:1], v[:1]), (k, v[:, :2]), (k, v[:, :, :50])):
        with pytest.raises(ValueError, match=r"key \[B, H_kv, M, D\] and value \[B, H_kv, M, D_v\]; got"):
            flex.flex_attention(q, key, value)
    with pytest.raises(ValueError, match=r"key .* and value"):
        flex.flex_attention(q[:1], k, v)
    with pytest.raises(ValueError, match="runs on a CPU; got cuda"):
        flex.create_block_mask(MASKS["causal"], 1, 1, N, N, device="cuda")
    with pytest.raises(ValueError, match=r"must return a boolean scalar; got torch\.int64"):
        flex.create_block_mask(lambda b, h, q, kv: q - kv, 1, 1, N, N)
    with pytest.raises(ValueError, match=r"mask_mod must be a function of \(b, h, q_idx, kv_idx\) that reads no"):
        flex.create_block_mask(lambda b, h, q, kv: q if q > kv else kv, 1, 1, N, N)


def test_sequences_of_different_lengths() -> None:
    """Jagged tensors: functions count from the beginning of each sequence, and b is its number."""
    lengths, others = [7, 0, 19], [7, 3, 12]
    offsets, other_offsets = (torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()]) for n in (lengths, others))
    leaves = [torch.randn(sum(n), h, D, dtype=torch.float64) for n, h in ((lengths, H), (others, 2), (others, 2))]
    leaves = [x.requires_grad_() for x in leaves]
    ends = (offsets, other_offsets, other_offsets)
    q, k, v = (
        torch.nested.nested_tensor_from_jagged(x, at).transpose(1, 2) for x, at in zip(leaves, ends, strict=True)
    )

    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx - q_idx <= b) & (kv_idx % (h + 1) == 0)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + 0.1 * b * (q_idx - kv_idx) * SLOPES[h]

    block_mask = flex.create_nested_block_mask(mask, None, H, q, k)
    out, lse = flex.flex_attention(q, k, v, mod, block_mask, enable_gqa=True, return_lse=True)
    alone = []
    parts = [x.split(n) for x, n in zip(leaves, (lengths, others, others), strict=True)]
    for number, terms in enumerate(zip(*parts, strict=True)):
        own = [lambda *at, f=f, n=number: f(*at[:-4], at[-4] + n, *at[-3:]) for f in (mod, mask)]
        alone.append(by_pairs(*(x.transpose(0, 1)[None] for x in terms), *own)[0].transpose(0, 1))
    right, found = torch.cat(alone), out.transpose(1, 2).values()
    torch.testing.assert_close(found, right)
    assert out.shape == q.shape
    assert lse.transpose(1, 2).values().shape == (sum(lengths), H)
    for ours, theirs in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (found, right)), strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="need a block_mask of create_nested_block_mask, of 3 sequences"):
        flex.flex_attention(q, k, v, mod, flex.create_block_mask(mask, 3, H, 7, 7), enable_gqa=True)
    with pytest.raises(ValueError, match=r"query must be jagged, \[B, H, j, D\]"):
        flex.flex_attention(*(x.transpose(1, 2) for x in (q, k, v)))
