"""Whole layers of encoders by one compiled call, in place, against the same models of transformers."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

transformers = pytest.importorskip("transformers")

import mpnn.hf  # noqa: E402
from mpnn.integrations.hf import encoder_layers, interface  # noqa: E402
from mpnn.kernels.cpu import library  # noqa: E402
from mpnn.kernels.layers.encoder_layer import EncoderLayer  # noqa: E402

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="there are no compiled kernels")

TEXT = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "pad_token_id": 0,
}  # fmt: skip
IMAGE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
BART = {
    "vocab_size": 60, "d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip
DISTILBERT = {"vocab_size": 60, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 2}

MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**TEXT)),
    "roberta": lambda: transformers.RobertaModel(transformers.RobertaConfig(**TEXT | {"pad_token_id": 1})),
    "electra": lambda: transformers.ElectraModel(transformers.ElectraConfig(**TEXT, embedding_size=32)),
    "albert": lambda: transformers.AlbertModel(
        transformers.AlbertConfig(**TEXT, embedding_size=32, hidden_act="gelu_new")
    ),
    "distilbert": lambda: transformers.DistilBertModel(transformers.DistilBertConfig(**DISTILBERT)),
    "bart": lambda: transformers.BartModel(transformers.BartConfig(**BART)).encoder,
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGE)),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE)),
    "siglip": lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**IMAGE)),
}

GPT2 = {"vocab_size": 60, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": None}
LLAMA = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 32, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
OPT = {
    "vocab_size": 60, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    "word_embed_proj_dim": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip

DECODERS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "one head": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2 | {"n_head": 1})),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=None)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
}

LENGTHS = torch.tensor([[17], [5], [11], [1]])
RIGHT = (torch.arange(17) < LENGTHS).long()
IDS = torch.randint(3, 60, (4, 17), generator=torch.Generator().manual_seed(1)) * RIGHT
PIXELS = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
INPUTS = {"input_ids": IDS, "attention_mask": RIGHT}


def pair(name: str, **options: Any) -> tuple[Any, Any]:
    """A model of transformers, and a copy of it in place. Weights of norms are not 1, and biases are not 0."""
    torch.manual_seed(0)
    hf_model = (MODELS | DECODERS)[name]().eval()
    for weight in hf_model.parameters():
        if weight.dim() == 1:
            nn.init.normal_(weight, float(weight.detach().mean()), 0.1)
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours, **options)
    return hf_model, ours


def inputs_of(model: Any) -> dict[str, Tensor]:
    return {"pixel_values": PIXELS} if model.main_input_name == "pixel_values" else INPUTS


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of rows for which the kernel ran, but for the few tokens of its own check."""
    rows: list[int] = []
    run = EncoderLayer.__call__

    def counted(self: EncoderLayer, x: Tensor, weights: Any, parts: Any, *others: Any) -> Tensor:
        if parts.num_nodes != encoder_layers.TRIAL_TOKENS:
            rows.append(parts.num_nodes)
        return run(self, x, weights, parts, *others)

    monkeypatch.setattr(EncoderLayer, "__call__", counted)
    return rows


@pytest.mark.parametrize("name", MODELS)
def test_states(name: str, calls: list[int]) -> None:
    hf_model, ours = pair(name)
    inputs = inputs_of(hf_model)
    with torch.no_grad():
        expected, found = (m(**inputs, output_hidden_states=True) for m in (hf_model, ours))
        assert len(calls) == 2
        for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=3e-6)
        again = ours(**inputs)
    assert len(calls) == 4
    assert again[0].equal(found[0])


@pytest.mark.parametrize("tokens", [1, 7, 129])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, tokens: int, calls: list[int]) -> None:
    """Their logits and the cache that they fill, over texts, packed texts and padding on the left."""
    hf_model, ours = pair(name)
    ids = torch.randint(3, 60, (2, tokens), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = (m(ids, use_cache=True, output_hidden_states=True) for m in (hf_model, ours))
        assert calls == [2 * tokens] * 2
        for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=5e-6)
        for a, b in zip(expected.past_key_values.layers, found.past_key_values.layers, strict=True):
            torch.testing.assert_close(b.keys, a.keys, rtol=0, atol=5e-6)
            torch.testing.assert_close(b.values, a.values, rtol=0, atol=5e-6)
        after = [
            m(ids[:, :1], past_key_values=out.past_key_values).logits
            for m, out in ((hf_model, expected), (ours, found))
        ]
        assert len(calls) == 2, "a token behind those of a cache takes the ordinary way"
        torch.testing.assert_close(after[1], after[0], rtol=0, atol=5e-6)
        states = found.hidden_states[1]

        def first(ids: Tensor, **options: Any) -> Tensor:
            """The states behind the first layer; the products of torch around the layers do not keep bits."""
            return ours(ids, use_cache=False, output_hidden_states=True, **options).hidden_states[1]

        assert first(ids[:1]).equal(states[:1])
        half = tokens // 2 + 1
        assert first(ids[:, :half]).equal(states[:, :half]), "a prefix is computed as it is alone"
        assert first(torch.cat([ids[:, :half], 2 * ids[:, half:] % 60], 1))[:, :half].equal(states[:, :half])
        mask = F.pad(torch.ones_like(ids), (3, 0))
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        calls.clear()
        assert first(F.pad(ids, (3, 0)), attention_mask=mask, position_ids=positions)[:, 3:].equal(states)
        assert calls == [2 * (tokens + 3)] * 2
        packed = torch.cat([ids[:1], ids[1:, :1]], 1)
        places = torch.cat([torch.arange(tokens), torch.zeros(1, dtype=torch.long)])[None]
        assert first(packed, position_ids=places)[:, :tokens].equal(states[:1])


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation(name: str, calls: list[int]) -> None:
    hf_model, ours = pair(name)
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    for options in ({}, {"num_beams": 2}, {"cache_implementation": "static"}):
        expected, found = (
            m.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, **options)
            for m in (hf_model, ours)
        )
        assert found.equal(expected)
        assert bool(calls) is (options != {"cache_implementation": "static"})
        calls.clear()


def attend_more(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, inputs, out: out * 1.5)


def test_decoders_with_hooks_gradients_and_other_sizes_run_as_before(calls: list[int]) -> None:
    hf_model, ours = pair("llama")
    for model in (hf_model, ours):
        model(IDS, labels=IDS).loss.backward()
    assert not calls
    for a, b in zip(hf_model.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        attentions = ours(IDS, output_attentions=True).attentions
        assert not calls
        assert attentions[0].shape == (4, 8, 17, 17)
        ours(IDS)
        for model in (hf_model, ours):
            attend_more(model)
        calls.clear()
        expected, found = (m(IDS).logits for m in (hf_model, ours))
        assert len(calls) == 1
        torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)
    partial = transformers.StableLmModel(
        transformers.StableLmConfig(**LLAMA | {"num_attention_heads": 2})
    ).eval()  # which turns parts of heads
    copied = copy.deepcopy(partial)
    mpnn.hf.use(copied)
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(copied(IDS)[0], partial(IDS)[0], rtol=0, atol=5e-6)
    assert not calls
    narrow = transformers.GPT2Model(transformers.GPT2Config(**GPT2 | {"n_embd": 80})).eval()  # heads of 40
    assert not any(map(encoder_layers.runs_here, mpnn.hf.use(narrow).model.modules()))


@pytest.mark.parametrize("unpad", [False, True])
def test_bits_of_a_text_depend_neither_on_padding_nor_on_company(unpad: bool, calls: list[int]) -> None:
    _, ours = pair("bert", unpad=unpad)
    with torch.no_grad():
        states = ours(**INPUTS).last_hidden_state
        left = ours(IDS.flip(1), RIGHT.flip(1), position_ids=torch.arange(17).flip(0).expand(4, -1)).last_hidden_state
        for text, n, padded, mirrored in zip(IDS, LENGTHS.flatten(), states, left.flip(1), strict=True):
            alone = ours(text[None, :n]).last_hidden_state[0]
            assert padded[:n].equal(alone)
            reverse = ours(text[None, :n].flip(1), position_ids=torch.arange(int(n)).flip(0)[None])
            assert mirrored[:n].flip(0).equal(reverse.last_hidden_state[0])
    tokens = int(RIGHT.sum()) if unpad else IDS.numel()
    assert calls[:4] == [tokens] * 4


def layers_of(model: Any) -> Any:
    """The stack of a BERT, a GPT-2 or a Llama."""
    stacks = {"bert": "encoder.layer", "gpt2": "transformer.h", "llama": "model.layers"}
    return model.get_submodule(stacks[model.config.model_type])


def layer_of(model: Any) -> Any:
    return model.encoder.layer[0]


class Twice(nn.Linear):
    """Stands for an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def hook(model: Any) -> None:
    layer_of(model).intermediate.register_forward_hook(lambda module, inputs, out: out * 1.5)


def pre_hook(model: Any) -> None:
    layer_of(model).output.dense.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))


def replace(model: Any) -> None:
    old = layer_of(model).attention.self.value
    new = Twice(64, 64)
    new.load_state_dict(old.state_dict())
    layer_of(model).attention.self.value = new


def wrap(model: Any) -> None:
    dense = layer_of(model).output.dense
    dense.forward = lambda x: 2 * nn.Linear.forward(dense, x)


def activate(model: Any) -> None:
    layer_of(model).intermediate.intermediate_act_fn = nn.Softplus()


def rename(model: Any) -> None:
    value = layer_of(model).attention.self.value
    value.weight = nn.Parameter(value.weight * 2)


def move(model: Any) -> None:
    model.load_state_dict({name: 1.01 * weight for name, weight in model.state_dict().items()}, assign=True)


CHANGES: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "a hook": (hook, False),
    "a hook before": (pre_hook, False),
    "another module": (replace, False),
    "a forward of its own": (wrap, False),
    "another activation": (activate, False),
    "another parameter": (rename, True),
    "weights in place": (lambda model: layer_of(model).intermediate.dense.weight.mul_(2), True),
    "weights by .data": (lambda model: layer_of(model).output.dense.weight.data.mul_(2), True),
    "a bias by .data": (lambda model: layer_of(model).output.LayerNorm.bias.data.add_(1), True),
    "other memory": (move, True),
}


def test_a_forward_that_observes_its_input_is_called() -> None:
    """It computes what its class does, so the comparison of the layer with its class does not show it."""
    _, ours = pair("bert")
    dense = layer_of(ours).output.dense
    seen: list[Tensor] = []

    def observe(x: Tensor) -> Tensor:
        seen.append(x)
        return nn.Linear.forward(dense, x)

    with torch.no_grad():
        dense.forward = observe
        ours(**INPUTS)
        seen.clear()
        ours(**INPUTS)
    assert len(seen) == 1


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changes_after_a_call(change: str, calls: list[int]) -> None:
    """It runs as transformers' does, by the kernel with the new weights, or by its class where it is another layer."""
    models = pair("bert")
    make, is_layer = CHANGES[change]
    with torch.no_grad():
        before = models[1](**INPUTS)[0]
        for model in models:
            make(model)
        calls.clear()
        expected, found = (model(**INPUTS)[0] for model in models)
    assert len(calls) == (2 if is_layer else 1)
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-6)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "a mode of functions": lambda: torch.overrides.BaseTorchFunctionMode(),
    "a record": lambda: interface.record(lambda graph, weights: None),
    "a hook of all modules": lambda: register_module_forward_hook(lambda module, inputs, out: None),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_modes_run_as_before(context: str, calls: list[int]) -> None:
    hf_model, ours = pair("bert")
    entered = CONTEXTS[context]()
    with torch.no_grad():
        with entered if hasattr(entered, "__enter__") else nullcontext():
            expected, found = (m(**INPUTS)[0] for m in (hf_model, ours))
        if hasattr(entered, "remove"):
            entered.remove()
    assert not calls
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2 if context == "autocast" else 3e-6)


def test_gradients_training_and_attentions_run_as_before(calls: list[int]) -> None:
    hf_model, ours = pair("bert")
    for model in (hf_model, ours):
        (model(**INPUTS).last_hidden_state * RIGHT[..., None]).square().sum().backward()
    for a, b in zip(hf_model.parameters(), ours.parameters(), strict=True):
        if a.grad is not None:
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        ours.train()
        assert not ours(**INPUTS)[0].equal(ours(**INPUTS)[0])
        ours.eval()
        assert ours(**INPUTS, output_attentions=True).attentions[0].shape == (4, 2, 17, 17)
        assert not calls
        ours(**INPUTS)
        assert len(calls) == 2, "the hooks that collected attentions stay, and do nothing"
        expected = ours.double()(**INPUTS)[0]
        torch.testing.assert_close(expected, hf_model.double()(**INPUTS)[0], rtol=0, atol=1e-12)
    assert len(calls) == 2


@pytest.mark.parametrize("options", [{"graph": "window(2)"}, {"layers": False}], ids=str)
def test_topologies_and_the_switch(options: dict[str, Any], calls: list[int]) -> None:
    _, ours = pair("bert", **options)
    with torch.no_grad():
        ours(**INPUTS)
    assert not calls


@pytest.mark.parametrize("options", [{"layers": False}, {"graph": {1: "causal() & window(3)"}}])
def test_a_later_call_turns_whole_layers_off_and_says_so(options: dict[str, Any], calls: list[int]) -> None:
    _, ours = pair("gpt2")
    first = mpnn.hf.use(ours)
    with torch.no_grad():
        ours(**INPUTS)
        assert len(calls) == 2
        assert "whole layers by one compiled call each: 2" in repr(first)
        later = mpnn.hf.use(ours, **options)
        ours(**INPUTS)
        assert len(calls) == 2
        assert not any("whole layers" in repr(handle) for handle in (first, later))
        later.restore()
        ours(**INPUTS)
    assert len(calls) == 4
    assert "whole layers by one compiled call each: 2" in repr(first)
    assert "nothing is changed" in repr(later)


def test_masks_that_are_no_documents_run_as_before(calls: list[int]) -> None:
    hf_model, ours = pair("bert")
    between, empty = RIGHT.clone(), RIGHT.clone()
    between[0, 5] = empty[3] = 0
    for mask in (between, empty):
        with torch.no_grad():
            expected, found = (m(IDS, mask)[0] for m in (hf_model, ours))
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], rtol=0, atol=3e-6)
    assert not calls


def test_copies_pickles_and_restore(calls: list[int]) -> None:
    hf_model, ours = pair("bert")
    with torch.no_grad():
        out = ours(**INPUTS)[0]
        assert len(pickle.dumps(ours)) < 1.1 * len(pickle.dumps(hf_model)) + 20_000, "nothing of the layers is saved"
        for model in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            calls.clear()
            assert model(**INPUTS)[0].equal(out)
            assert len(calls) == 2
            layer_of(model).output.dense.weight.zero_()
            assert not model(**INPUTS)[0].equal(out)
            assert ours(**INPUTS)[0].equal(out)
        handle = mpnn.hf.use(copy.deepcopy(hf_model))
        assert "whole layers by one compiled call each: 2" in repr(handle)
        restored = handle.restore()
        assert not any("forward" in vars(module) for module in restored.modules())
        assert restored(**INPUTS)[0].equal(hf_model(**INPUTS)[0])


def halve(layer: nn.Module, inputs: Any, out: Tensor) -> None:
    out.mul_(0.5)


INFERENCE = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", INFERENCE)
@pytest.mark.parametrize("function", [lambda layer, inputs, out: out * 0.5, halve], ids=["new", "in place"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
def test_states_that_change_between_layers(
    name: str, function: Callable[..., Any], mode: Callable[[], Any], calls: list[int]
) -> None:
    """A hook on a layer changes what the next one gets, with a new tensor and in the memory of the old one."""
    hf_model, ours = pair(name)
    with mode():
        expected = hf_model(IDS)[0]
        handles = [layers_of(model)[0].register_forward_hook(function) for model in (hf_model, ours)]
        hooked, found = (model(IDS)[0] for model in (hf_model, ours))
        torch.testing.assert_close(found, hooked, rtol=0, atol=5e-6)
        assert not torch.allclose(hooked, expected, atol=1e-3)
        for handle in handles:
            handle.remove()
        torch.testing.assert_close(ours(IDS)[0], expected, rtol=0, atol=5e-6)
    assert len(calls) == 4


def test_a_loop_over_layers_that_edits_states() -> None:
    hf_model, ours = pair("bert")
    with torch.inference_mode():
        states = [model.embeddings(IDS) for model in (hf_model, ours)]
        for layers in zip(hf_model.encoder.layer, ours.encoder.layer, strict=True):
            states = [layer(x) for layer, x in zip(layers, states, strict=True)]
            for x in states:
                x[:, 0] += 1
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=3e-6)


def test_one_layer_computes_itself_alone(calls: list[int]) -> None:
    _, ours = pair("bert")
    with torch.no_grad():
        ours.encoder.layer[0](ours.embeddings(IDS))
    assert len(calls) == 1


def test_gradients_behind_layers_without() -> None:
    hf_model, ours = pair("bert")
    gradients = []
    for model in (hf_model, ours):
        first, second = model.encoder.layer
        with torch.no_grad():
            between = first(model.embeddings(IDS))
        out = second(between)
        out = out[0] if isinstance(out, tuple) else out
        weights = [weight for weight in second.parameters() if weight.requires_grad]
        gradients.append(torch.autograd.grad(out.square().sum(), weights))
    for found, expected in zip(*reversed(gradients), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_inference_mode() -> None:
    hf_model, ours = pair("vit")
    with torch.inference_mode():
        expected, found = (model(PIXELS)[0] for model in (hf_model, ours))
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)


def test_a_weight_that_is_computed_when_it_is_read_is_left_to_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is free again before the kernel would read it."""
    model, plain = MODELS["bert"]().eval(), MODELS["bert"]().eval()
    plain.load_state_dict(model.state_dict())
    mpnn.hf.use(model)
    ids = torch.randint(1, 60, (2, 7))
    get = nn.Module.__getattr__

    def scaled(self: nn.Module, name: str) -> Any:
        value = get(self, name)
        return value * 1.2 if isinstance(value, nn.Parameter) else value

    monkeypatch.setattr(nn.Module, "__getattr__", scaled)
    places: list[Any] = []
    locate = encoder_layers.Places.read
    monkeypatch.setattr(encoder_layers.Places, "read", lambda *args: places.append(args) or locate(*args))
    with torch.no_grad():
        found, expected = (net(ids).last_hidden_state for net in (model, plain))
    torch.testing.assert_close(found, expected)
    assert not places
