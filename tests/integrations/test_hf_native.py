"""Families whose attention does not dispatch and whose masks transformers makes: each answers as its own eager code."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_bound import error_bound
from torch import Tensor

transformers = pytest.importorskip("transformers")

import mpnn.hf  # noqa: E402
from mpnn import graphs  # noqa: E402
from mpnn.integrations.hf import native  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")  # transformers 6 renames its method

LENGTH = 17
IDS = torch.randint(3, 60, (3, LENGTH), generator=torch.Generator().manual_seed(1))
RIGHT = torch.arange(LENGTH) < torch.tensor([[17], [5], [11]])
MASKS = {
    "no padding": None,
    "right padding": RIGHT,
    "left padding": RIGHT.flip(1),
    "holes": torch.rand(3, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.7,
}
BERT = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 1,
}  # fmt: skip
GPT = {"vocab_size": 60, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
FALCON = {**GPT, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DISENTANGLED = {**BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "MPNet": ("MPNetForMaskedLM", BERT),
    "DeBERTa": ("DebertaForMaskedLM", DISENTANGLED),
    "DeBERTa without positions": ("DebertaForMaskedLM", BERT),
    "DeBERTa, version 3": ("DebertaV2ForMaskedLM", {
        **DISENTANGLED, "position_buckets": 4, "share_att_key": True, "norm_rel_ebd": "layer_norm",
    }),
    "GPT-J": ("GPTJForCausalLM", {**GPT, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "BLOOM": ("BloomForCausalLM", {**GPT, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "MPT": ("MptForCausalLM", {**GPT, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "Falcon": ("FalconForCausalLM", FALCON),
    "Falcon with ALiBi": ("FalconForCausalLM", {**FALCON, "alibi": True, "multi_query": False}),
    "Falcon, grouped": ("FalconForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2}),
}  # fmt: skip
DECODERS = [name for name, (kind, _) in FAMILIES.items() if kind.endswith("CausalLM")]


def made(name: str) -> Any:
    """A model with random weights, whose attention is transformers' eager one."""
    torch.manual_seed(0)
    kind, sizes = FAMILIES[name]
    model_class: Callable[..., Any] = getattr(transformers, kind)
    # The eager attention of transformers' Falcon adds ALiBi twice: in the mask and in the layer.
    attention = "sdpa" if sizes.get("alibi") else "eager"
    model = model_class._from_config(model_class.config_class(**sizes), attn_implementation=attention).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """The model, and a copy of it in place."""
    hf_model = made(name)
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours, **options)
    return hf_model, ours


def logits(model: Any, mask: Tensor | None) -> Tensor:
    """The logits of tokens that are not padding."""
    if mask is None:
        return model(IDS).logits.flatten(0, 1)
    ids = IDS.masked_fill(~mask, model.config.pad_token_id)
    return model(ids, attention_mask=mask.long()).logits[mask]


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.covering(times=2)
def test_logits_and_gradients_equal_those_of_eager_attention(name: str, where: str) -> None:
    bound = 4 * error_bound(2, 32)
    hf_model, ours = pair(name)
    expected = logits(hf_model, MASKS[where])
    found = logits(ours, MASKS[where])
    assert (found - expected).abs().max() < bound
    expected.square().mean().backward()
    found.square().mean().backward()
    for (weight_name, weight), other in zip(hf_model.named_parameters(), ours.parameters(), strict=True):
        if weight.grad is not None:
            assert (weight.grad - other.grad).abs().max() < bound * (1 + weight.grad.abs().max()), weight_name


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"MPT", "Falcon with ALiBi"}))
def test_attention_weights_and_states_are_those_of_eager_attention(name: str) -> None:
    """transformers' Falcon computes weights by its eager attention, which adds ALiBi twice."""
    hf_model, ours = pair(name)
    with torch.no_grad():
        expected, found = (m(IDS, output_attentions=True, output_hidden_states=True) for m in (hf_model, ours))
    assert len(found.attentions) == 2
    for layer_of_ours, layer in zip(
        [*found.attentions, *found.hidden_states], [*expected.attentions, *expected.hidden_states], strict=True
    ):
        torch.testing.assert_close(layer_of_ours, layer, rtol=1e-4, atol=1e-5)


def test_an_mpt_refuses_output_attentions() -> None:
    _, model = pair("MPT")
    with pytest.raises(ValueError, match="MptBlock gives no output_attentions"):
        model(IDS, output_attentions=True)


@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_are_those_of_eager_attention(name: str) -> None:
    hf_model, ours = pair(name)
    prompt = {"input_ids": IDS[:, :6], "attention_mask": RIGHT.flip(1)[:, -6:].long()}
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = hf_model.generate(**prompt, **greedy, output_logits=True, return_dict_in_generate=True)
    found = ours.generate(**prompt, **greedy, output_logits=True, return_dict_in_generate=True)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_topology_changes_the_answer_and_restore_gives_the_layers_back(name: str) -> None:
    hf_model = made(name)
    kinds = [type(part) for part in hf_model.modules()]
    expected = logits(hf_model, None)
    handle = mpnn.hf.use(hf_model, graphs.identity())
    assert sum(type(part).__module__ == native.__name__ for part in hf_model.modules()) >= 2
    found = hf_model(IDS).logits
    assert (found.flatten(0, 1) - expected).abs().max() > 1e-2
    changed = IDS.clone()
    changed[:, 3] = 7
    rest = torch.arange(LENGTH) != 3
    torch.testing.assert_close(hf_model(changed).logits[:, rest], found[:, rest])
    assert torch.equal(pickle.loads(pickle.dumps(hf_model))(IDS).logits, found)
    handle.restore()
    assert [type(part) for part in hf_model.modules()] == kinds
    assert torch.equal(logits(hf_model, None), expected)


@pytest.mark.parametrize("name", DECODERS)
def test_a_decoder_generates_over_a_window_what_its_whole_pass_says(name: str) -> None:
    model = made(name)
    mpnn.hf.use(model, "causal() & window(3)")
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(IDS[:, :6], **greedy, output_logits=True, return_dict_in_generate=True)
    whole = model(out.sequences[:, :-1]).logits[:, 5:]
    torch.testing.assert_close(torch.stack(out.logits, 1), whole, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="must not attend to the tokens"):
        mpnn.hf.use(model, "window(3)")


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_run_again_for_checkpoints(name: str) -> None:
    _, model = pair(name)
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{name} of transformers takes no checkpoints")
    gradients = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        torch.manual_seed(0)
        model.train().zero_grad()
        model(IDS).logits.square().mean().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*gradients)


def test_mpnets_bias_takes_memory_by_offset() -> None:
    """Of 300 tokens, offsets up to 128 have a row each."""
    _, model = pair("MPNet")
    bias = model.mpnet.encoder.compute_position_bias(torch.zeros(1, 300, 32))
    assert bias.table(torch.zeros(())).shape == (257, 4)


def test_a_deberta_with_queries_of_its_own_is_refused() -> None:
    model = made("DeBERTa")
    mpnn.hf.use(model)
    layer = model.deberta.encoder.layer[0].attention.self
    states = torch.zeros(1, 4, 32)
    with pytest.raises(ValueError, match="queries of its own"):
        layer(states, torch.ones(1, 1, 4, 4), query_states=states)
