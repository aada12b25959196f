"""Recurrent layers of transformers' models on our kernels: the same numbers, gradients, tokens; packed sequences."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any
from unittest import mock

import company
import hf_walk
import pytest
import torch
import torch.utils.checkpoint
import transformers
from hf_families import recompute
from hf_walk import tiny
from row_cases import INTERPRETED, on_triton
from torch import Tensor
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LM,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as WITH_IMAGES,
)
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.minimax import MiniMaxConfig
from transformers.models.minimax.modeling_minimax import MiniMaxLightningAttention

import mpnn.hf
from mpnn.integrations.hf import compat, packing as division, recurrences
from mpnn.kernels.recurrent import scan

EACH = "mamba", "mamba2", "qwen3_next", "kimi_linear", "lfm2"  # one of each recurrence
OTHERS = (
    *("falcon_mamba", "falcon_h1", "bamba", "zamba2", "jamba", "granitemoehybrid", "nemotron_h", "qwen3_5_text"),
    *("qwen3_5_moe_text", "olmo_hybrid", "bailing_hybrid", "minimax", "lfm2_moe", "lfm3"),
    *("glm5_next", "inkling_text", "qwen4_exp_text", "zamba"),
)
families = pytest.mark.parametrize("family", [*EACH, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])

IDS = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
PADDED = torch.ones_like(IDS)
PADDED[1, :4] = 0
LENGTHS = [5, 1, 7]


packs = pytest.mark.skipif(compat.IS_OLDER, reason="older transformers do not tell all layers where sequences begin")


def model(family: str) -> Any:
    if compat.IS_OLDER and family == "qwen3_next":
        pytest.skip("the gated delta rule of transformers 5.20 does not share keys, and is not known here")
    transformers.logging.set_verbosity_error()
    return tiny(getattr(transformers, CAUSAL_LM.get(family) or WITH_IMAGES[family]))


def logits(made: Any, ids: Tensor = IDS, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = made(ids, use_cache=False, **options).logits
    return out


def agree(found: Tensor, expected: Tensor, bar: float = 1e-5) -> bool:
    return bool((found - expected).abs().max() <= bar * max(1.0, float(expected.abs().max())))


def packing() -> dict[str, Any]:
    """What transformers' `DataCollatorWithFlattening` returns beside the tokens."""
    ends = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    documents = {"seq_idx": torch.arange(3).repeat_interleave(torch.tensor(LENGTHS))[None].int()}
    documents["position_ids"] = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    lengths = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": 7, "max_length_k": 7}
    return documents | lengths


@families
def test_logits_with_and_without_padding(family: str) -> None:
    made = model(family)
    expected, padded = logits(made), logits(made, attention_mask=PADDED)
    handle = mpnn.hf.use(made)
    assert "as a recurrence" in repr(handle)
    bar = company.bar(family) / 2
    assert agree(logits(made), expected, bar)
    assert agree(logits(made, attention_mask=PADDED)[PADDED.bool()], padded[PADDED.bool()], bar)
    handle.restore()
    assert torch.equal(logits(made), expected)


def test_lightning_attention_with_and_without_padding() -> None:
    config = MiniMaxConfig(hidden_size=12, num_attention_heads=3, head_dim=4, num_hidden_layers=1, block_size=4)
    layer = MiniMaxLightningAttention(config, 0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 13, 12)
    for mask in (None, PADDED):
        found, state = recurrences.lightning_attention(layer, x, None, mask)
        expected, known = layer(x, None, mask)[:2]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, known, rtol=1e-4, atol=1e-5)


@families
def test_generation_with_a_cache(family: str) -> None:
    made = model(family)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = made.generate(IDS, attention_mask=PADDED, **options)
    mpnn.hf.use(made)
    assert torch.equal(made.generate(IDS, attention_mask=PADDED, **options), expected)


@families
def test_gradients_with_checkpointing(family: str) -> None:
    made = model(family).train()

    def gradients() -> list[Tensor]:
        made.zero_grad()
        made(IDS, labels=IDS, use_cache=False).loss.backward()
        return [p.grad.clone() for p in made.parameters() if p.grad is not None]

    expected = gradients()
    mpnn.hf.use(made)
    recompute(made)
    # both are rounded to float32, and each may be off by a half of this
    bar = company.bar(family) * max(float(known.abs().max()) for known in expected)
    for found, known in zip(gradients(), expected, strict=True):
        assert (found - known).abs().max() <= bar


@families
def test_another_recurrence_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small models depend on their recurrences, so that agreement says something about them."""
    made = model(family)
    mpnn.hf.use(made)
    expected = logits(made)
    convolves = family in ("lfm2", "lfm2_moe", "lfm3", "inkling_text")
    for changed in ["short_convolution"] if convolves else ["recurrence", "selective_scan"]:
        exact = getattr(recurrences, changed)

        def tilted(*inputs: Any, exact: Any = exact, **options: Any) -> Any:  # not scaled, which a norm would undo
            out = exact(*inputs, **options)
            y = out[0] if isinstance(out, tuple) else out
            y = y * torch.linspace(0.5, 1.5, y.shape[-1])
            return (y, out[1]) if isinstance(out, tuple) else y

        monkeypatch.setattr(recurrences, changed, tilted)
    assert (logits(made) - expected).abs().max() > 1e-3 * expected.abs().max()


@packs
@families
def test_packed_sequences_are_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in models that drop `seq_idx` on the way to their layers."""
    if family == "glm5_next":  # its attention chooses pools of the whole row; the recurrent layers alone
        monkeypatch.setitem(hf_walk._OWN["Glm5NextTextConfig"], "layer_types", 2 * ["linear_attention"])
    if family == "qwen4_exp_text":  # as glm5_next
        monkeypatch.setitem(hf_walk._OWN["Qwen4ExpTextConfig"], "layer_types", 2 * ["linear_attention"])
    if family == "inkling_text":  # its full attention scales logits by positions in the row
        monkeypatch.setitem(hf_walk._OWN["InklingTextConfig"], "log_scaling_n_floor", None)
    made = model(family)
    mpnn.hf.use(made)
    ids = IDS[:1]
    alone = torch.cat([logits(made, document) for document in ids.split(LENGTHS, 1)], 1)
    assert agree(logits(made, ids, **packing()), alone)
    assert not agree(logits(made, ids), alone)  # the pass leaves nothing behind


@on_triton
@pytest.mark.skipif(not INTERPRETED, reason="stands for a GPU, on CPU tensors")
@pytest.mark.parametrize("family", ["mamba2", "qwen3_next", "kimi_linear"])
@pytest.mark.parametrize("autocast", [False, True])
def test_on_a_gpu_the_recurrences_are_ours(family: str, autocast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and with gradients, as the interpreter computes them; and the state that leaves, for another token."""
    made = model(family).train(not autocast)
    ids = IDS[:1, :9]

    def results() -> list[Tensor]:
        with torch.autocast("cpu", enabled=autocast):
            out = made(ids, labels=ids, use_cache=autocast)
            if autocast:
                cache = {name: out[name] for name in ("past_key_values", "cache_params") if out.get(name) is not None}
                return [out.logits.detach(), made(IDS[:1, 9:10], **cache).logits.detach()]
        made.zero_grad()
        out.loss.backward()
        return [out.logits.detach(), *(p.grad.clone() for p in made.parameters() if p.grad is not None)]

    expected = results()
    mpnn.hf.use(made)
    for module in (scan, recurrences):
        monkeypatch.setattr(module, "by_triton", lambda x: True)
    monkeypatch.setattr(scan, "_CHUNKED_NODES", 4)
    from mpnn.kernels.recurrent.cuda.chunks import function as chunks

    small = chunks.Launch(columns=8)
    monkeypatch.setattr(chunks, "_LEAST", 8)
    monkeypatch.setattr(chunks, "config", lambda *of: chunks.Config(8, 8, *[small] * 8))
    calls: list[torch.dtype] = []
    run = chunks.run
    monkeypatch.setattr(chunks, "run", lambda *inputs: calls.append(inputs[0].dtype) or run(*inputs))
    bar = 2**-4 if autocast else 2e-5
    for found, known in zip(results(), expected, strict=True):
        assert (found - known).abs().max() <= bar * max(1.0, float(known.abs().max()))
    assert calls


def test_older_transformers_do_not_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("lfm2")
    mpnn.hf.use(made)
    monkeypatch.setattr(compat, "IS_OLDER", True)
    logits(made)
    with pytest.raises(ValueError, match="do not see where packed sequences begin; install transformers"):
        logits(made, IDS[:1], **packing())


@packs
@pytest.mark.parametrize("family", ["glm5_next", "inkling_text"])
@pytest.mark.parametrize("how", ["seq_idx", "position_ids", "cu_seq_lens_k"])
def test_packed_sequences_are_refused_where_pools_or_scales_are_those_of_the_row(family: str, how: str) -> None:
    made, ids = model(family), IDS[:1]
    mpnn.hf.use(made)
    logits(made, ids, position_ids=torch.arange(13)[None])
    given = packing() if how == "cu_seq_lens_k" else {how: packing()[how]}
    with pytest.raises(ValueError, match="in the whole row, so packed sequences would get"):
        logits(made, ids, **given)
    assert division.current() is None


@packs
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_positions_that_restart_are_packed_sequences(family: str) -> None:
    """As for the attention layers of these models, which transformers packs by positions alone."""
    made, ids, positions = model(family), IDS[:1], packing()["position_ids"]
    mpnn.hf.use(made)
    alone = torch.cat([logits(made, document) for document in ids.split(LENGTHS, 1)], 1)
    assert agree(logits(made, ids, position_ids=positions), alone)
    assert agree(logits(made, ids.repeat(2, 1), position_ids=positions), alone)
    with torch.no_grad():
        assert agree(made(ids, None, positions, use_cache=False).logits, alone)
    assert not agree(logits(made, ids, position_ids=positions, attention_mask=torch.ones_like(ids)), alone)
    assert agree(logits(made, ids, position_ids=torch.arange(13)[None]), logits(made, ids))
    with pytest.raises(ValueError, match="packed sequences have no cache here"):
        made(ids, position_ids=positions, use_cache=True)
    assert division.current() is None


def test_what_other_libraries_add_to_modules_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `torch.compile` does to nn.Module. The layers are not computed text by text, by the code of their class."""
    made = model("mamba2")
    mpnn.hf.use(made)
    expected = logits(made, IDS[:1], **packing())
    monkeypatch.setattr(torch.nn.Module, "_of_another_library", True, raising=False)
    texts: list[Any] = []
    monkeypatch.setattr(recurrences, "_each_text", lambda *args: texts.append(args))
    assert torch.equal(logits(made, IDS[:1], **packing()), expected)
    assert not texts


def test_packed_sequences_have_no_cache() -> None:
    made = model("mamba2")
    mpnn.hf.use(made)
    with pytest.raises(ValueError, match="packed sequences have no cache here"), torch.no_grad():
        made(IDS[:1], use_cache=True, **packing())


def test_a_packed_token_that_is_decoded_is_refused() -> None:
    made = model("mamba2")
    mpnn.hf.use(made)
    with torch.no_grad():
        cache = made(IDS[:1], use_cache=True).cache_params
        with pytest.raises(ValueError, match="packed sequences have no cache here"):
            made(IDS[:1, :1], cache_params=cache, use_cache=True, seq_idx=torch.zeros(1, 1).int())


def test_a_second_call_changes_nothing_more() -> None:
    made = model("mamba2")
    expected = logits(made)
    first, second = mpnn.hf.use(made), mpnn.hf.use(made)
    assert agree(logits(made), expected)
    second.restore()
    assert sum(map(recurrences.runs_here, made.modules())) == 2
    first.restore()
    assert torch.equal(logits(made), expected)


def test_a_layer_whose_forward_another_library_has_wrapped_stays() -> None:
    """As accelerate's hooks do: their `forward` calls transformers' code."""
    made = model("mamba2")
    wrapped = made.backbone.layers[0].mixer
    wrapped.forward = wrapped.forward
    handle = mpnn.hf.use(made, maps=False)
    assert repr(handle) == "Handle of Mamba2ForCausalLM: 1 x Mamba2Mixer over causal(), as a recurrence"


@packs
@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"seq_idx": torch.zeros(1, 12).int()}, "must have shape"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "rise from 0"),
    ],
)
def test_wrong_lengths_of_packed_sequences(wrong: dict[str, Tensor], sentence: str) -> None:
    made = model("mamba2")
    mpnn.hf.use(made)
    with pytest.raises(ValueError, match=sentence):
        logits(made, IDS[:1], **wrong)


@packs
def test_a_recomputation_that_gets_a_copy_is_refused() -> None:
    """As where the inputs of checkpointed layers are cast before each call."""
    made = model("mamba2").train()
    mpnn.hf.use(made)
    layer = made.backbone.layers[1]
    forward = layer.forward

    def recomputed(x: Tensor, **options: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(lambda y: forward(y.clone(), **options), x, use_reentrant=False)

    layer.forward = recomputed
    loss = made(IDS[:1], use_cache=False, **packing()).logits.sum()
    with pytest.raises(ValueError, match="cannot know how the texts of its pass were packed"):
        loss.backward()
    assert division.current() is None


def test_copies_pickles_and_saved_models(tmp_path: Any) -> None:
    made = model("mamba2")
    mpnn.hf.use(made)
    expected = logits(made)
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(logits(other), expected)
        assert sum(map(recurrences.runs_here, other.modules())) == 2
    made.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(map(recurrences.runs_here, loaded.modules()))
    assert agree(logits(loaded), expected)


@pytest.mark.slow
def test_a_compiled_model_runs_their_code() -> None:
    made = model("mamba2")
    mpnn.hf.use(made)
    compiled = torch.compile(made, backend="eager")
    assert agree(logits(compiled), logits(made))


def test_a_graph_for_a_model_without_attention_is_refused() -> None:
    made = model("mamba2")
    with pytest.raises(ValueError, match="are recurrences, which read no graph"):
        mpnn.hf.use(made, "causal()")
    assert not any(map(recurrences.runs_here, made.modules()))


def test_a_recurrence_of_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a change in transformers."""

    def doubled(hidden_states: Tensor, weight: Tensor, bias: Any = None, activation: Any = None, **_: Any) -> Tensor:
        return 2 * recurrences.causal_conv1d_fn(hidden_states, weight, bias, activation)

    def renamed(hidden_states: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
        return hidden_states

    recurrences._with_our_functions.cache_clear()
    made = model("mamba2")
    for other, sentence in ((doubled, "computes other numbers"), (renamed, r"not known here: \['dilation'\]")):
        monkeypatch.setattr(modeling_mamba2, "causal_conv1d_fn", other)
        with pytest.raises(ValueError, match=sentence):
            mpnn.hf.use(made)


@pytest.mark.parametrize("packed", [False, True])
def test_functions_and_classes_of_a_file_change_after_use(packed: bool) -> None:
    """As other libraries patch them, the original class among them."""
    made = model("mamba2")
    peer = copy.deepcopy(made)
    mpnn.hf.use(made)
    assert sys.modules[modeling_mamba2.__name__] is modeling_mamba2
    ids = IDS[:1]
    options = (
        {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]} if packed and not compat.IS_OLDER else {}
    )
    logits(made, ids, **options)
    masked = modeling_mamba2.apply_mask_to_padding_states
    forward = modeling_mamba2.Mamba2Mixer.forward
    changes = [
        (modeling_mamba2, "apply_mask_to_padding_states", lambda x, *args: 1.2 * masked(x, *args)),
        (modeling_mamba2.Mamba2Mixer, "forward", lambda *args, **options: 1.2 * forward(*args, **options)),
    ]
    for owner, name, function in changes:
        before = logits(made, ids, **options)
        with mock.patch.object(owner, name, function):
            parts = ids.split(LENGTHS, 1) if options else (ids,)
            expected = torch.cat([logits(peer, part) for part in parts], 1)
            assert agree(logits(made, ids, **options), expected)
        assert not agree(before, expected, 1e-3)
