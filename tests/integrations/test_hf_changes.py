"""A used model computes what an unused one does after the same change, whatever changed between two calls."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

transformers = pytest.importorskip("transformers")

import mpnn.hf  # noqa: E402
from mpnn.attention import whole_layer  # noqa: E402
from mpnn.integrations.hf import encoder_layers, interface  # noqa: E402
from mpnn.kernels.cpu import library  # noqa: E402
from mpnn.kernels.layers.encoder_layer import EncoderLayer  # noqa: E402

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="there are no compiled kernels")

SIZES = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
LLAMA = SIZES | {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": None}
GPT2 = {"vocab_size": 60, "n_embd": 64, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": None}
FAMILIES: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "gpt2": lambda: transformers.GPT2Model(transformers.GPT2Config(**GPT2)),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)),
}
IDS = torch.randint(3, 60, (2, 11), generator=torch.Generator().manual_seed(1))


def unused(family: str) -> Any:
    """A model with large weights, so that a change shows."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    for name, weight in model.named_parameters():
        is_map = weight.dim() == 2 and "emb" not in name and "wte" not in name
        nn.init.normal_(weight, 0.0 if weight.dim() == 2 else float(weight.detach().mean()), 0.2 if is_map else 0.3)
    return model


def pair(family: str) -> tuple[Any, Any]:
    """An unused model, and a copy of it in place that was called."""
    hf_model = unused(family)
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours)
    states(ours)
    return hf_model, ours


def states(model: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS).last_hidden_state


def assert_same(found: Tensor, expected: Tensor) -> None:
    """To the rounding of sums whose largest number is that of the states."""
    assert (found - expected).abs().max() <= 1e-5 * max(1, float(expected.abs().max()))


def layers(model: Any) -> Any:
    return model.encoder.layer if hasattr(model, "encoder") else model.h if hasattr(model, "h") else model.layers


class Parts:
    """The parts of the first layer of a model."""

    def __init__(self, model: Any) -> None:
        self.layer = layers(model)[0]
        family = model.config.model_type
        names = {
            "bert": "attention.self attention.output.LayerNorm output.dense intermediate",
            "gpt2": "attn ln_1 mlp.c_proj mlp",
            "llama": "self_attn input_layernorm mlp.down_proj mlp",
        }[family].split()
        self.attention, self.norm, self.map, self.network = map(self.layer.get_submodule, names)
        self.activation = {"bert": "intermediate_act_fn", "gpt2": "act", "llama": "act_fn"}[family]
        self.eps = "variance_epsilon" if family == "llama" else "eps"


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


# ------------------------------------------------------------------------------------------------ changes of a layer


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def _scale(parts: Parts) -> None:
    parts.attention.scaling = 0.7


def _eps(parts: Parts) -> None:
    setattr(parts.norm, parts.eps, 0.5)


def _clip(parts: Parts) -> None:
    old = getattr(parts.network, parts.activation)
    setattr(parts.network, parts.activation, nn.Sequential(old, nn.Hardtanh(-0.1, 0.3)))


def _class(parts: Parts) -> None:
    kind = type(parts.network)
    forward: Any = lambda self, x: -kind.forward(self, x)  # noqa: E731
    parts.network.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _class_of_the_layer(parts: Parts) -> None:
    kind = type(parts.layer)
    forward: Any = lambda self, *args, **options: 2 * kind.forward(self, *args, **options)  # noqa: E731
    parts.layer.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def _own_forward(parts: Parts) -> None:
    kind = type(parts.map)
    parts.map.forward = lambda x: 2 * kind.forward(parts.map, x)


def _own_method(parts: Parts) -> None:
    kind = type(parts.network)
    vars(parts.network)["forward"] = lambda x: -kind.forward(parts.network, x)


def _hook(parts: Parts) -> None:
    parts.network.register_forward_hook(lambda module, inputs, out: out * 1.5)


def _hook_in_place(parts: Parts) -> None:
    parts.network.register_forward_hook(lambda module, inputs, out: (out.mul_(1.5), None)[1])


def _hook_before(parts: Parts) -> None:
    parts.map.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))


def _hook_written(parts: Parts) -> None:
    parts.map._forward_hooks[9] = lambda module, inputs, out: out * 1.5


def _hook_in_new_hooks(parts: Parts) -> None:
    parts.map._forward_hooks = type(parts.map._forward_hooks)()
    parts.map.register_forward_hook(lambda module, inputs, out: out * 1.5)


def _hook_of_the_layer(parts: Parts) -> None:
    parts.layer.register_forward_hook(lambda module, inputs, out: out * 1.5)


def _replaced(parts: Parts) -> None:
    parts.map.weight = nn.Parameter(parts.map.weight * 2)


def _no_parameter(parts: Parts) -> None:
    weight = parts.map.weight.detach() * 2
    del parts.map.weight
    parts.map.weight = weight


def _frozen(parts: Parts) -> None:
    parts.layer.requires_grad_(False)
    parts.map.weight.mul_(2)


def _in_place(parts: Parts) -> None:
    parts.map.weight.mul_(2)


def _by_data(parts: Parts) -> None:
    parts.map.weight.data[5] = 3.0


def _by_numpy(parts: Parts) -> None:
    parts.map.weight.detach().numpy()[3] *= 4


def _other_memory(parts: Parts) -> None:
    parts.map.weight.data = parts.map.weight.data * 2


def _transposed(parts: Parts) -> None:
    parts.map.weight.data = (parts.map.weight.data * 2).mT.contiguous().mT


def _half_and_back(parts: Parts) -> None:
    parts.layer.bfloat16()
    parts.layer.float()


def _no_bias(parts: Parts) -> None:
    if getattr(parts.map, "bias", None) is not None and isinstance(parts.map, nn.Linear):
        parts.map.register_parameter("bias", None)
    else:
        parts.map.weight.mul_(2)


def _assigned(parts: Parts) -> None:
    parts.layer.load_state_dict({k: v * 1.1 for k, v in parts.layer.state_dict().items()}, assign=True)


def _parametrized(parts: Parts) -> None:
    parametrize.register_parametrization(parts.map, "weight", Halved())


def _weight_norm(parts: Parts) -> None:
    parametrizations.weight_norm(parts.map)
    parts.map.parametrizations.weight.original0.mul_(2)


def _pruned(parts: Parts) -> None:
    prune.l1_unstructured(parts.map, "weight", 0.5)


def _submodule(parts: Parts) -> None:
    if not isinstance(parts.map, nn.Linear):
        parts.map.weight.mul_(2)
        return
    new = Doubled(parts.map.in_features, parts.map.out_features, bias=parts.map.bias is not None)
    new.load_state_dict(parts.map.state_dict())
    owner = next(part for part in parts.layer.modules() if parts.map in part.children())
    name = next(name for name, child in owner.named_children() if child is parts.map)
    setattr(owner, name, new)


def _compiled(parts: Parts) -> None:
    parts.map._compiled_call_impl = lambda x: 2 * type(parts.map).forward(parts.map, x)


CHANGES = [
    _scale, _eps, _clip, _class, _class_of_the_layer, _own_forward, _own_method, _hook, _hook_in_place, _hook_before,
    _hook_written, _hook_in_new_hooks, _hook_of_the_layer, _replaced, _no_parameter, _frozen, _in_place, _by_data,
    _by_numpy, _other_memory, _transposed, _half_and_back, _no_bias, _assigned, _parametrized, _weight_norm, _pruned,
    _submodule, _compiled,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_a_layer(family: str, change: Callable[[Parts], None]) -> None:
    hf_model, ours = pair(family)
    before = states(ours)
    with torch.no_grad():
        for model in (hf_model, ours):
            change(Parts(model))
    expected = states(hf_model)
    assert not torch.allclose(expected, before, atol=1e-3), "the change shows"
    for _ in range(2):
        assert_same(states(ours), expected)


# ------------------------------------------------------------------------------------------------ changes of code


def _negative_network(model: Any) -> AbstractContextManager[Any]:
    kind: Any = type(Parts(model).network)
    forward = kind.forward
    return mock.patch.object(kind, "forward", lambda self, x: -forward(self, x))


def _other_linear(model: Any) -> AbstractContextManager[Any]:
    linear = nn.functional.linear
    return mock.patch.object(nn.functional, "linear", lambda *args: 1.5 * linear(*args))


def _other_norm(model: Any) -> AbstractContextManager[Any]:
    kind: Any = type(Parts(model).norm)
    forward = kind.forward
    return mock.patch.object(kind, "forward", lambda self, x: 2 * forward(self, x))


def _other_call(model: Any) -> AbstractContextManager[Any]:
    kind: Any = type(Parts(model).network)
    return mock.patch.object(kind, "__call__", lambda self, x: -self.forward(x), create=True)


def _new_property(model: Any) -> AbstractContextManager[Any]:
    kind: Any = type(Parts(model).attention)
    return mock.patch.object(kind, "scaling", property(lambda self: 0.7), create=True)


def _other_code(model: Any) -> AbstractContextManager[Any]:
    forward = type(Parts(model).network).forward
    other = (lambda self, x: x.mean(-1, keepdim=True)).__code__

    @contextmanager
    def patched() -> Iterator[None]:
        code = forward.__code__
        if forward.__closure__ or model.config.model_type == "bert":  # whose network changes widths
            yield
            return
        forward.__code__ = other
        try:
            yield
        finally:
            forward.__code__ = code

    return patched()


def _other_rotary(model: Any) -> AbstractContextManager[Any]:
    if model.config.model_type != "llama":
        return nullcontext()
    from transformers.models.llama import modeling_llama

    return mock.patch.object(modeling_llama, "apply_rotary_pos_emb", lambda q, k, *others, **options: (2 * q, k))


PATCHES = [_negative_network, _other_linear, _other_norm, _other_call, _new_property, _other_code, _other_rotary]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.__name__.strip("_"))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_change_of_code(family: str, patch: Callable[[Any], AbstractContextManager[Any]], calls: list[int]) -> None:
    hf_model, ours = pair(family)
    before = states(ours)
    with patch(ours):
        assert_same(states(ours), states(hf_model))
    calls.clear()
    for _ in range(2):
        assert_same(states(ours), before)
    assert calls, "the kernel runs again when the code is as it was"


def test_an_attention_function_that_is_registered_anew_is_called() -> None:
    _, ours = pair("llama")
    before = states(ours)
    seen = []

    def attend(module: nn.Module, *args: Any, **options: Any) -> Any:
        seen.append(module)
        return interface.attend(module, *args, **options)

    functions = transformers.AttentionInterface
    functions.register("mpnn", attend)
    try:
        assert_same(states(ours), before)
        assert len(seen) == 2
    finally:
        functions.register("mpnn", interface.attend)
    states(ours)
    assert len(seen) == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_another_attention_implementation(family: str, calls: list[int]) -> None:
    hf_model, ours = pair(family)
    calls.clear()
    ours.set_attn_implementation("eager")
    assert_same(states(ours), states(hf_model))
    assert not calls
    ours.set_attn_implementation("mpnn")
    states(ours)
    assert len(calls) == 2


# ------------------------------------------------------------------------------------------------ what is read


@pytest.mark.parametrize("family", FAMILIES)
def test_each_attribute_of_each_module_inside_is_watched(family: str) -> None:
    """Generated from the modules, not from a list of names."""
    _, ours = pair(family)
    layer = layers(ours)[0]
    known = layer.forward._known
    assert known.layer is not None
    assert known.witness.holds()
    for part in layer.modules():
        for name, value in [*vars(part).items()]:
            vars(part)[name] = object()
            assert not known.witness.holds(), (type(part), name)
            vars(part)[name] = value
    for name, value in [*vars(ours.config).items()]:
        vars(ours.config)[name] = object()
        assert not known.witness.holds(), name
        vars(ours.config)[name] = value
    assert known.witness.holds()


def test_a_layer_is_asked_again_after_it_was_refused(calls: list[int]) -> None:
    _, ours = pair("bert")
    network = Parts(ours).network
    handle = network.register_forward_hook(lambda module, inputs, out: None)
    calls.clear()
    states(ours)
    assert len(calls) == 1
    handle.remove()
    for _ in range(4):
        states(ours)
    calls.clear()
    states(ours)
    assert len(calls) == 2


def test_a_layer_that_changes_in_each_call_is_not_learned_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    hf_model, ours = pair("bert")
    learned = []
    learn = encoder_layers._learn

    def counted(module: nn.Module, names: Any) -> Any:
        learned.append(module)
        return learn(module, names)

    monkeypatch.setattr(encoder_layers, "_learn", counted)
    for number in range(40):
        for model in (hf_model, ours):
            Parts(model).attention.scaling = 0.1 + number / 40
        assert_same(states(ours), states(hf_model))
    assert 1 <= len(learned) <= 7


@pytest.mark.parametrize("act", ["gelu_10", "gelu", "gelu_new", "relu", "silu", "quick_gelu", "gelu_fast", "relu2"])
def test_activations_are_told_apart_by_large_numbers_too(act: str) -> None:
    torch.manual_seed(0)
    hf_model = transformers.BertModel(transformers.BertConfig(**SIZES, hidden_act=act)).eval()
    with torch.no_grad():
        for layer in layers(hf_model):
            layer.intermediate.dense.weight.mul_(300)
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours)
    assert_same(states(ours), states(hf_model))


def test_a_default_dtype_of_16_bits() -> None:
    """It decides nothing here, and is not remembered."""
    hf_model = unused("bert")
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert_same(states(ours), states(hf_model))
    finally:
        torch.set_default_dtype(torch.float32)


def test_weights_that_were_replaced_are_not_kept() -> None:
    _, ours = pair("gpt2")
    weights = Parts(ours).map
    gone = weakref.ref(weights.weight)
    weights.weight = nn.Parameter(weights.weight.detach().clone())
    gc.collect()
    assert gone() is None


def test_weights_can_be_swapped() -> None:
    hf_model, ours = pair("gpt2")
    other = Parts(unused("gpt2")).map.weight
    other.data.mul_(2)
    torch.utils.swap_tensors(Parts(ours).map.weight, other)
    with torch.no_grad():
        Parts(hf_model).map.weight.mul_(2)
    assert_same(states(ours), states(hf_model))


def test_memory_of_a_weight_that_was_freed_is_not_read() -> None:
    _, ours = pair("llama")
    weight = Parts(ours).map.weight
    weight.untyped_storage().resize_(0)
    layer = layers(ours)[0].forward._known.layer
    with torch.no_grad():
        assert layer.locate() == whole_layer.OTHER_WEIGHTS


@pytest.mark.parametrize("family", FAMILIES)
def test_functional_call(family: str) -> None:
    hf_model, ours = pair(family)
    weights = {name: 1.1 * weight.detach() for name, weight in hf_model.named_parameters()}
    for model in (hf_model, ours):
        with torch.no_grad():
            found = torch.func.functional_call(model, weights, (IDS,)).last_hidden_state
        if model is hf_model:
            expected = found
    assert_same(found, expected)
    assert_same(states(ours), states(hf_model))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_promise_that_weights_stay_keeps_no_copy(family: str) -> None:
    hf_model = unused(family)
    ours = copy.deepcopy(hf_model)
    mpnn.hf.use(ours, frozen=True)
    states(ours)
    for model in (hf_model, ours):
        Parts(model).map.weight.data[3] = 2.0
    assert_same(states(ours), states(hf_model))


# ------------------------------------------------------------------------------------------------ quantized weights


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_weights_quantized_by_torchao(family: str, order: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    hf_model = unused(family)
    ours = copy.deepcopy(hf_model)
    quantization.quantize_(hf_model, quantization.Int8WeightOnlyConfig())
    if order == "before":
        quantization.quantize_(ours, quantization.Int8WeightOnlyConfig())
    mpnn.hf.use(ours)
    if order == "after":
        states(ours)
        quantization.quantize_(ours, quantization.Int8WeightOnlyConfig())
    assert_same(states(ours), states(hf_model))


# ------------------------------------------------------------------------------------------------ shallow copies


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shallow_copy_of_a_layer_computes_with_what_it_has(family: str) -> None:
    found = []
    for used in (False, True):
        model = pair(family)[used]
        layer = layers(model)[0]
        x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
        options = {}
        if family == "llama":
            options["position_embeddings"] = model.rotary_emb(x, torch.arange(5)[None])
        with torch.no_grad():
            before = layer(x, **options)
            other = copy.copy(layer)
            other._modules = dict(other._modules)
            name = {"bert": "attention", "gpt2": "attn", "llama": "self_attn"}[family]
            other._modules[name] = copy.deepcopy(other._modules[name])
            for weight in other._modules[name].parameters():
                weight.mul_(2)
            outs = [other(x, **options) for _ in range(2)]
            again = layer(x, **options)
        outs = [out[0] if isinstance(out, tuple) else out for out in (before, *outs, again)]
        assert not torch.allclose(outs[0], outs[1], atol=1e-3)
        found.append(outs)
    for ours, expected in zip(*reversed(found), strict=True):
        assert_same(ours, expected)


@pytest.mark.parametrize("unpad", [False, True])
def test_a_shallow_copy_of_a_model_computes_with_what_it_has(unpad: bool) -> None:
    found = []
    for used in (False, True):
        model = unused("bert")
        if used:
            mpnn.hf.use(model, unpad=unpad)
        before = states(model)
        other = copy.copy(model)
        other._modules = dict(other._modules)
        other.encoder = copy.deepcopy(model.encoder)
        with torch.no_grad():
            for weight in other.encoder.parameters():
                weight.mul_(1.5)
        found.append([before, states(other), states(other), states(model)])
    for ours, expected in zip(*reversed(found), strict=True):
        assert_same(ours, expected)
    assert not torch.allclose(found[0][0], found[0][1], atol=1e-3)
