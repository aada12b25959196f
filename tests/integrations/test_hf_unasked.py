"""`mpnn.hf.use` changes nothing that it was not asked for, and `restore()` gives back exactly what was."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

hf = pytest.importorskip("transformers")

import hf_walk  # noqa: E402

import mpnn.hf  # noqa: E402

IDS = torch.randint(3, 50, (2, 13), generator=torch.Generator().manual_seed(0))
KEEP = (torch.arange(13) < torch.tensor([[13], [6]])).long()
FAMILIES = (
    "LlamaForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM", "ZayaForCausalLM", "GPT2LMHeadModel",
    "T5ForConditionalGeneration", "BertForMaskedLM", "LongformerForMaskedLM", "XLNetLMHeadModel",
    "OpenAIGPTLMHeadModel", "CLIPModel",
)  # fmt: skip


def state(model: Any) -> dict[str, Any]:
    """The class and the attributes of each module, and each configuration."""
    facts: dict[str, Any] = {}
    for name, module in model.named_modules():
        facts[f"{name}: class"] = type(module)
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                facts[f"{name}.{key}"] = copy.copy(value) if isinstance(value, (dict, list, set)) else value
        if isinstance(config := getattr(module, "config", None), hf.PretrainedConfig):
            facts[f"{name}: config"] = copy.deepcopy(config.__dict__)
    return facts


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if not is_same(before.get(name), after.get(name)))


def is_same(one: Any, other: Any) -> bool:
    return one is other or (not isinstance(one, Tensor) and bool(one == other))


@pytest.mark.parametrize("name", FAMILIES)
def test_restore_gives_back_what_was_and_twice_is_once(name: str) -> None:
    model = hf_walk.tiny(getattr(hf, name))
    before = state(model)
    handle = mpnn.hf.use(model)
    once = state(model)
    assert changes(before, once)
    mpnn.hf.use(model)
    assert changes(once, state(model)) == []
    if model.config.model_type in ("llama", "mamba2", "qwen3_next", "zaya"):
        packed = torch.arange(13)[None] % 5
        model(IDS[:1], position_ids=packed, use_cache=False)  # which layers remember until they are restored
    handle.restore()
    assert changes(before, state(model)) == []


class Tagger(nn.Module):
    """A module of one's own around an encoder: its convolution reads the states at padding."""

    def __init__(self) -> None:
        super().__init__()
        self.bert = hf_walk.tiny(hf.BertModel)
        self.conv = nn.Conv1d(32, 5, 3, padding=1)

    def forward(self, ids: Tensor, keep: Tensor) -> Tensor:
        return self.conv(self.bert(input_ids=ids, attention_mask=keep).last_hidden_state.mT).mT


def test_a_module_of_ones_own_keeps_its_numbers() -> None:
    net = Tagger().eval()
    with torch.no_grad():
        expected = net(IDS, KEEP)
        mpnn.hf.use(net)
        found = net(IDS, KEEP)
    assert (found - expected)[KEEP.bool()].abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_a_peft_model_keeps_its_numbers() -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    encoder = hf_walk.tiny(hf.BertModel)
    wrapped = peft.get_peft_model(encoder, peft.LoraConfig(target_modules=["query"], init_lora_weights=False)).eval()
    with torch.no_grad():
        expected = wrapped(input_ids=IDS, attention_mask=KEEP).last_hidden_state
        mpnn.hf.use(wrapped)
        found = wrapped(input_ids=IDS, attention_mask=KEEP).last_hidden_state
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Mamba2ForCausalLM", "BertForMaskedLM"])
def test_a_saved_model_needs_no_mpnn(name: str, tmp_path: Path) -> None:
    model = hf_walk.tiny(getattr(hf, name))
    with torch.no_grad():
        expected = model(IDS).logits
        mpnn.hf.use(model)
        model.save_pretrained(tmp_path)
        assert "mpnn" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
        loaded = getattr(hf, name).from_pretrained(tmp_path)
        found = loaded(IDS).logits
    assert loaded.config._attn_implementation != "mpnn"
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_model_without_attention_says_so() -> None:
    config = hf_walk._small(hf.Mamba2Config)
    with pytest.warns(UserWarning, match=r"Mamba2\w+ has no attention layers, so"):
        hf.AutoModelForCausalLM.from_config(config, attn_implementation="mpnn")


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Inkling2ForCausalLM"])
def test_sinks_are_not_among_the_weights(name: str) -> None:
    model = hf_walk.tiny(getattr(hf, name))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
        mpnn.hf.use(model)
        found = model(IDS, output_attentions=True).attentions
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
        assert float(x.sum(-1).min()) < 0.999


@pytest.mark.parametrize("name", ["GitForCausalLM", "BigBirdPegasusForConditionalGeneration"])
def test_layers_that_compute_with_masks_are_refused_at_once(name: str) -> None:
    model = hf_walk.tiny(getattr(hf, name))
    before = state(model)
    with pytest.raises(ValueError, match="Attention does not dispatch"):
        mpnn.hf.use(model)
    assert changes(before, state(model)) == []


@pytest.mark.parametrize(
    "name", ["Gemma4ForCausalLM", "T5Gemma2ForConditionalGeneration", "Inkling2ForConditionalGeneration"]
)
def test_families_generate_what_eager_generates(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Gemma4ForCausalLM":  # layers that share keys compute the last tokens only
        shared = {"num_hidden_layers": 4, "layer_types": 2 * hf_walk._MIXED, "num_kv_shared_layers": 2}
        shared["hidden_size_per_layer_input"] = 8
        monkeypatch.setitem(hf_walk._OWN, "Gemma4TextConfig", hf_walk._GEMMA4 | shared)
    model = hf_walk.tiny(getattr(hf, name))
    keep = KEEP if model.config.is_encoder_decoder else KEEP.flip(1)
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.set_attn_implementation("eager")
    expected = model.generate(IDS, attention_mask=keep, **options)
    mpnn.hf.use(model)
    assert model.generate(IDS, attention_mask=keep, **options).equal(expected)


@pytest.mark.parametrize("family", ["Mamba2ForCausalLM", "Qwen3NextForCausalLM", "Lfm2ForCausalLM", "ZayaForCausalLM"])
def test_padding_behind_a_text_leaves_its_state_alone(family: str) -> None:
    model = hf_walk.tiny(getattr(hf, family))
    mpnn.hf.use(model)
    text, new, behind = IDS[:1, :6], IDS[:1, 6:7], torch.zeros(1, 4, dtype=torch.long)
    ones = torch.ones(1, 6, dtype=torch.long)

    def after(ids: Tensor, keep: Tensor) -> Tensor:
        out = model(ids, attention_mask=keep, use_cache=True)
        cache = out.get("past_key_values", out.get("cache_params"))
        name = "cache_params" if "cache_params" in out else "past_key_values"
        step = {"attention_mask": torch.cat([keep, ones[:, :1]], 1), "position_ids": torch.tensor([[6]])}
        return model(new, **{name: cache}, use_cache=True, **step).logits

    with torch.no_grad():
        expected = after(text, ones)
        found = after(torch.cat([text, behind], 1), torch.cat([ones, behind], 1))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
