"""Whole layers of encoders and decoders by one compiled call each, in place (`mpnn/kernels/layers/encoder_layer.py`).

A layer keeps its class: its instance gets another `forward`, an object that runs the kernel where this computes what
the class would, and the class's own code in all other calls. A layer is recognized by the names of its maps and norms,
and is taken only if both ways give the same numbers for a few tokens. A decoder's layer runs so over whole texts; it
fills an empty cache, and tokens after those of a cache take the ordinary way.

What the kernel replaces may change between two calls: modules, hooks, numbers such as `eps`, the configuration, the
code of the classes. When a layer is learned, a witness (`mpnn/graph/witness.py`) reads all of it, and it reads it again
before each call. After a change the layer is learned again, and compared with its class again. Weights are read where
they lie in each call. Where something cannot be watched or read, the class's own code runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from mpnn.attention.whole_layer import OTHER_WEIGHTS, RECORDS, parts_of, why_not_now
from mpnn.engine import listeners
from mpnn.graph import guard
from mpnn.graph.witness import Constant, Unwatchable, Witness
from mpnn.integrations.callers import calling, put, take
from mpnn.integrations.hf import compat, interface, packing
from mpnn.integrations.hf.closures import Sizes
from mpnn.integrations.hf.masks import Mask
from mpnn.kernels.layers import (
    MAPS,
    EncoderLayer,
    Form,
    Located,
    Places,
    Weights,
    are_plain,
    refusal,
)
from mpnn.kernels.parts import Parts

_CACHE = "past_key_values"
_COS_SIN = "position_embeddings"
_MASK = "attention_mask"
_READ = interface.HARMLESS.union(packing.NAMES, (_CACHE, _MASK))
"""What any layer may be given."""
TRIAL_TOKENS = 7  # tokens for which a layer is compared with its class
_CLOSE = 1e-4  # of the largest number
_SETTLED = 8  # calls after which a change of a layer is none of those that follow one another
_AT_ONCE = 3  # changes that follow one another, after each of which a layer is learned again at once
_PATIENCE = 255  # calls that a layer leaves to its class at most before it is learned again
_MOST_FORMS = 4  # of weights
_TOPOLOGY = (
    "the model has a topology, use(model, graph=...), and the compiled call computes layers over their own masks"
)


class _Names(NamedTuple):
    """Where a layer has its parts."""

    attention: str  # the module that dispatches
    maps: tuple[str, ...]  # queries, keys, values (one for all three), output, to hidden columns, back, and of gates
    activation: str
    norms: tuple[str, str]  # of attention, of the feed-forward network


def _names(attention: str, maps: str, hidden: str, norms: str) -> _Names:
    """`maps`: queries, keys, values and output; `hidden`: the map, the activation, the map back and the map of gates of
    the network."""
    up, activation, *others = hidden.split()
    of_attention, of_network = norms.split()
    return _Names(attention, (*maps.split(), up, *others), activation, (of_attention, of_network))


_FAMILIES = (
    # BERT, RoBERTa, XLM-RoBERTa, ELECTRA, ...
    _names(
        "attention.self",
        "attention.self.query attention.self.key attention.self.value attention.output.dense",
        "intermediate.dense intermediate.intermediate_act_fn output.dense",
        "attention.output.LayerNorm output.LayerNorm",
    ),
    # DistilBERT
    _names(
        "attention",
        "attention.q_lin attention.k_lin attention.v_lin attention.out_lin",
        "ffn.lin1 ffn.activation ffn.lin2",
        "sa_layer_norm output_layer_norm",
    ),
    # ALBERT
    _names(
        "attention",
        "attention.query attention.key attention.value attention.dense",
        "ffn activation ffn_output",
        "attention.LayerNorm full_layer_layer_norm",
    ),
    # ViT, DeiT
    _names(
        "attention",
        "attention.q_proj attention.k_proj attention.v_proj attention.o_proj",
        "mlp.fc1 mlp.activation_fn mlp.fc2",
        "layernorm_before layernorm_after",
    ),
    # CLIP, SigLIP
    _names(
        "self_attn",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
        "mlp.fc1 mlp.activation_fn mlp.fc2",
        "layer_norm1 layer_norm2",
    ),
    # the encoders of BART and Whisper, OPT
    _names(
        "self_attn",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
        "fc1 activation_fn fc2",
        "self_attn_layer_norm final_layer_norm",
    ),
    # GPT-2
    _names("attn", "attn.c_attn attn.c_proj", "mlp.c_fc mlp.act mlp.c_proj", "ln_1 ln_2"),
    # Llama, Mistral, Qwen2, ...
    _names(
        "self_attn",
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
        "mlp.up_proj mlp.act_fn mlp.down_proj mlp.gate_proj",
        "input_layernorm post_attention_layernorm",
    ),
)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


def use(model: nn.Module) -> list[Callable[[], None]]:
    """Lets the layers of encoders in a model run by the kernel; returns what undoes it, for each layer."""
    found = [(module, names) for module in model.modules() if (names := _find(module)) is not None]
    return [put(module, "forward", Forward(module, names)) for module, names in found]


def drop(model: nn.Module) -> list[Callable[[], None]]:
    """Lets the layers of a model run by their classes; returns what undoes it, for each layer."""
    return [take(module, "forward") for module in model.modules() if isinstance(_forward_of(module), Forward)]


def runs_here(module: nn.Module) -> bool:
    """Whether the kernel may run this layer."""
    forward = _forward_of(module)
    return isinstance(forward, Forward) and forward.why_never() is None


def _forward_of(module: nn.Module) -> Any:
    return vars(module).get("forward")


def _find(module: nn.Module) -> _Names | None:
    """Where a layer has its parts; None if it is not such a layer, or has a `forward` of its own."""
    if "forward" in vars(module):
        return None
    return next((names for names in _FAMILIES if _matches(module, names)), None)


def _matches(module: nn.Module, names: _Names) -> bool:
    """Whether a layer has these maps, norms and attention, and no other weights."""
    parts = [_get(module, name) for name in (*names.maps, *names.norms)]
    maps, norms = parts[: len(names.maps)], parts[len(names.maps) :]
    if {type(part) for part in maps} not in ({nn.Linear}, {Conv1D}) or not all(map(_is_norm, norms)):
        return False
    if type(norms[0]) is not type(norms[1]) or not compat.dispatches(_get(module, names.attention)):
        return False
    owned = {id(parameter) for part in parts for parameter in part.parameters()}
    return owned == {id(parameter) for parameter in module.parameters()}


def _is_norm(module: Any) -> bool:
    """Whether this is a LayerNorm, or has the parts of a norm of root mean squares."""
    if type(module) is nn.LayerNorm:
        return True
    return list(getattr(module, "_parameters", ())) == ["weight"] and hasattr(module, "variance_epsilon")


def _get(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


class Forward(Constant):
    """`forward` of one layer: the kernel's, or its class's. It is an object, not a closure, so that copies of the layer
    compute with their own weights, and a process that unpickles the layer imports this module."""

    computes_the_same = True

    def __init__(self, module: nn.Module, names: _Names) -> None:
        self.module = module
        self.names = names
        self._parameters = _parameters_of(module)
        self._refusal = refusal(_Submodules(module, names).form("identity", False))
        self._known: _Known | None = None
        self._served = 0  # calls since it was learned
        self._changes = 0  # that followed one another
        self._left = 0  # calls that are left to the class before it is learned again

    def __getstate__(self) -> dict[str, Any]:
        """Returns no state: the compiled layer is neither copied nor saved."""
        return vars(self) | {"_known": None}

    def __call__(self, *args: Any, **options: Any) -> Any:
        module = self.module
        if not torch.compiler.is_compiling():
            caller = calling(module)
            if caller is not module:  # a shallow copy
                caller.forward = Forward(caller, self.names)
                return caller.forward(*args, **options)
            out = self._by_kernel(args, options)
            if not isinstance(out, str):
                return out
            for listener in listeners.of_layers:
                listener(module, None, out)
        return type(module).forward(module, *args, **options)

    def why_never(self) -> str | None:
        """Returns why the kernel computes no call of this layer as it is, a clause; None if it may compute some."""
        if self._refusal is None and interface.graph_of(_get(self.module, self.names.attention)) is not None:
            return _TOPOLOGY
        return self._refusal

    def _by_kernel(self, args: tuple[Any, ...], options: dict[str, Any]) -> Tensor | str:
        """The states; or why the class computes them, a clause."""
        given = dict(zip(self._parameters, args, strict=False)) | options
        x = given.pop(self._parameters[0], None)
        why = self.why_never() or self._why_not(x, given)
        if why is not None:
            return why
        layer = self._layer()
        located = layer if isinstance(layer, str) else layer.locate()
        if isinstance(layer, str) or isinstance(located, str):
            return str(located)
        kernel, weights = located
        parts = layer.parts
        shape = (x.shape[0], x.shape[1])
        texts = _parts_within(parts.is_causal, given, shape)
        cos_sin = _cos_sin_of(given.get(_COS_SIN), shape, parts.head_width) if layer.has_cos_sin else None
        if texts is None:
            return "the attention mask is not that of whole texts, each complete or causal"
        if layer.has_cos_sin and cos_sin is None:
            return f"{_COS_SIN} are not plain angles of these tokens, without gradients"
        for listener in listeners.of_layers:
            listener(self.module, x, "")
        cache = given.get(_CACHE)
        if cache is None:
            return kernel(x.contiguous(), weights, texts, cos_sin)
        keys, values = x.new_empty(2, shape[0], parts.kv_heads, shape[1], parts.head_width)
        out = kernel(x.contiguous(), weights, texts, cos_sin, (keys, values))
        cache.update(keys, values, parts.attention.layer_idx)
        return out

    def _why_not(self, x: Any, given: dict[str, Any]) -> str | None:
        """Why the kernel does not compute what a call asks for, in the modes that are on, a clause; None if it may."""
        cache = given.get(_CACHE)
        if cache is not None and not compat.is_empty(
            cache, getattr(_get(self.module, self.names.attention), "layer_idx", None)
        ):
            return "the cache already has tokens"
        if (why := why_not_now(x, self.module.training)) is not None:
            return why
        if x.dim() != 3 or interface.is_recorded():
            return "the compiled call takes features [texts, tokens, width], and returns no weights of edges"
        for name, value in given.items():
            is_read = name in _READ or name == _COS_SIN
            if value is not None and value is not False and not is_read:
                return f"the compiled call takes no {name}"
        return None if compat.collects_only("hidden_states") else "the compiled call returns hidden states only"

    def _layer(self) -> _Layer | str:
        """The layer as it is now; or why its class computes it: it may change all the time, or have other parameters
        than those by which this call was read."""
        known = self._known
        if known is None or not known.witness.holds():
            if self._left:
                self._left -= 1
                return "the layer has changed in each of the latest calls"
            # To learn takes as long as some calls, so a layer that changes in each call is learned ever more rarely.
            self._changes = 0 if self._served >= _SETTLED else self._changes + 1
            self._left = min(2 ** max(self._changes - _AT_ONCE, 0) - 1, _PATIENCE)
            self._served = 0
            self._known = known = _learn(self.module, self.names)
            before = self._parameters
            self._parameters = _parameters_of(self.module)
            if self._parameters != before:
                return "the layer has had other parameters until this call"
        self._served += 1
        return known.layer


def _parameters_of(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of the forward pass of a module's class."""
    return tuple(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]


# ------------------------------------------------------------------------------------------------ what is learned


class _Submodules:
    """The parts of a layer, and what the kernel has to know of them."""

    def __init__(self, module: nn.Module, names: _Names) -> None:
        self.attention = _get(module, names.attention)
        self.activation = _get(module, names.activation)
        self.maps = [_get(module, name) for name in names.maps]
        self.norms = [_get(module, name) for name in names.norms]
        widths = [_width_of(map) for map in self.maps]
        sizes = "attention_head_size", "head_dim"
        width = next((size for name in sizes if (size := getattr(self.attention, name, None))), widths[0][1])
        self.head_width = int(width)
        self.is_fused = len(widths) == 4  # one map for queries, keys and values
        self.shapes = [(widths[0][0] // 3, widths[0][1])] * 3 + widths[1:] if self.is_fused else widths
        self.kv_heads = self.shapes[1][0] // self.head_width
        self.is_causal = bool(getattr(self.attention, "is_causal", True))

    def form(self, activation: str, pre_norm: bool) -> Form:
        scale = getattr(self.attention, "scaling", None)
        epsilons = [getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0)) for norm in self.norms]
        return Form(
            width=self.shapes[0][1],
            heads=self.shapes[0][0] // self.head_width,
            hidden=self.shapes[4][0],
            activation=activation,
            pre_norm=pre_norm,
            epsilons=(epsilons[0], epsilons[1]),
            scale=self.head_width**-0.5 if scale is None else float(scale),
            kv_heads=self.kv_heads,
            head_width=self.head_width,
            rms_norm=type(self.norms[0]) is not nn.LayerNorm,
            gated=len(self.shapes) == 7,
        )

    def weights(self) -> Weights:
        maps = [part for map in self.maps for part in _split(map, 3 if self.is_fused and map is self.maps[0] else 1)]
        return Weights(
            tuple(weight for weight, _ in maps),
            tuple(bias for _, bias in maps),
            tuple(norm.weight for norm in self.norms),
            tuple(getattr(norm, "bias", None) for norm in self.norms),
        )


def _width_of(map: Any) -> tuple[int, int]:
    """The sizes [out, in] of a map."""
    return (map.nf, map.nx) if type(map) is Conv1D else (map.out_features, map.in_features)


def _split(map: Any, parts: int) -> list[tuple[Tensor, Tensor | None]]:
    """The weights [out, in] and the biases of the maps that this one is, nn.Linear or GPT-2's."""
    weight = map.weight.detach()
    bias = None if map.bias is None else map.bias.detach()
    weight = weight.mT if type(map) is Conv1D else weight
    biases = [None] * parts if bias is None else bias.chunk(parts)
    return list(zip(weight.chunk(parts), biases, strict=True))


class _Parameters:
    """Where a layer has its weights: in the dictionaries of parameters of its maps and norms, which each call reads.

    `sources`: for each weight of the kernel, the number of its tensor, as `Places` takes them.
    """

    def __init__(self, parts: _Submodules, witness: Witness) -> None:
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._absent: list[tuple[dict[str, Any], str]] = []
        maps = [parts.maps[0]] * 2 + parts.maps if parts.is_fused else parts.maps
        numbers = {map: [self._number(map, name) for name in ("weight", "bias")] for map in parts.maps}
        of_maps = [numbers[map] for map in maps] + [[0, 0]] * (len(MAPS) - len(maps))
        of_norms = [[self._number(norm, name) for name in ("weight", "bias")] for norm in parts.norms]
        weighted = (*parts.maps, *parts.norms)
        witness.of_calls += [(part._parameters, name) for part in weighted for name in ("weight", "bias")]
        self.sources = [pair[k] for group in (of_maps, of_norms) for k in (0, 1) for pair in group]

    def _number(self, part: nn.Module, name: str) -> int:
        """The number of a tensor, from 1 on; 0 if there is none."""
        if part._parameters.get(name) is None:
            self._absent.append((part._parameters, name))
            return 0
        self._owners.append(part._parameters)
        self._names.append(name)
        return len(self._owners)

    def read(self) -> list[Tensor] | None:
        """The tensors of this call; None if one has gone, or is where none was."""
        try:
            tensors: list[Tensor] = [*map(getitem, self._owners, self._names)]
        except KeyError:
            return None
        for owner, name in self._absent:
            if owner.get(name) is not None:
                return None
        return tensors


class _Form(NamedTuple):
    """A form of weights that was met: its guard, whether gradients are recorded for it, and its places."""

    fits: Callable[..., bool]
    learns: bool
    places: Places


class _Known(NamedTuple):
    """The compiled layer, or why the layer has none, a clause; valid while the witness holds."""

    witness: Witness
    layer: _Layer | str


def _learn(module: nn.Module, names: _Names) -> _Known:
    """Reads all that a call of the kernel would replace."""
    witness = Witness()
    weighted = [part for name in (*names.maps, *names.norms) if isinstance(part := _get(module, name), nn.Module)]
    witness.skip(*(part._parameters for part in weighted))
    # A call of the layer runs its own hooks before and after `forward`, and idle hooks inside it do nothing.
    witness.skip(*(value for name, value in vars(module).items() if "hooks" in name))
    for part in module.modules():
        if compat.has_only_idle_hooks(part):
            witness.skip(*part._forward_hooks.values(), *part._forward_pre_hooks.values())
    try:
        witness.module(module)
    except Unwatchable as error:
        return _Known(witness, f"{error}, so that a call could not know when it is outdated")
    if witness.unread:
        return _Known(witness, "the layer has tensors that are not weights of its maps and norms")
    if not _matches(module, names):
        return _Known(witness, "the parts of the layer have changed")
    if not _runs_its_classes(module):
        return _Known(witness, "a part of the layer is in training, or has a hook or a forward of its own")
    parts = _Submodules(module, names)
    activation = _activation(parts.activation)
    if activation is None:
        return _Known(witness, f"the compiled call has no activation {type(parts.activation).__name__}")
    if not _attends(parts.attention, witness):
        return _Known(witness, "the attention of the layer is not by mpnn")
    return _Known(witness, _Layer(module, parts, activation, witness))


def _runs_its_classes(module: nn.Module) -> bool:
    """Whether the modules inside a layer do what their classes do, in inference."""
    for part in list(module.modules())[1:]:
        forward = _forward_of(part)
        if forward is not None and not getattr(forward, "computes_the_same", False):
            return False
        if part.training or not compat.has_only_idle_hooks(part):
            return False
    return not module.training


def _attends(attention: nn.Module, witness: Witness) -> bool:
    """Whether this library computes the attention of a layer, over the whole text."""
    if attention.config.__dict__.get(compat.INTERNAL) != interface.NAME or interface.graph_of(attention) is not None:
        return False
    functions = compat.functions(attention)
    witness.entry(type(functions)._global_mapping, interface.NAME)
    return functions.get_interface(interface.NAME, None) is interface.attend


class _Layer:
    """A layer that its kernel computes if it gives the numbers of the class, as long as a witness holds."""

    def __init__(self, module: nn.Module, parts: _Submodules, activation: str, witness: Witness) -> None:
        self.parts = parts
        self.has_cos_sin = _COS_SIN in _parameters_of(module)
        self._module = module
        self._activation = activation
        self._parameters = _Parameters(parts, witness)
        self._kernel: EncoderLayer | str | None = None  # a text says why there is none
        self._forms: tuple[_Form, ...] = ()

    def locate(self) -> tuple[EncoderLayer, Located] | str:
        """The kernel, and the weights as they are now; or a clause: it cannot read them, or gradients are recorded, or
        it does not compute what the class does."""
        tensors = self._parameters.read()
        if tensors is None:
            return OTHER_WEIGHTS
        form: _Form | None = None
        for known in self._forms:
            if known.fits(*tensors):
                form = known
                break
        if form is None:
            form = self._form_of(tensors)
        if isinstance(self._kernel, str):
            return self._kernel
        if form is None or self._kernel is None:
            return OTHER_WEIGHTS
        if form.learns and torch.is_grad_enabled():
            return RECORDS
        weights = form.places.read(tensors)
        return OTHER_WEIGHTS if weights is None else (self._kernel, weights)

    def _form_of(self, tensors: list[Tensor]) -> _Form | None:
        """The form of weights that were not met before; None if the kernel cannot read them."""
        if isinstance(self._kernel, str) or not are_plain(tensors):
            return None
        weights = self.parts.weights()
        if self._kernel is None:
            self._kernel = self._find_kernel(weights)
        if isinstance(self._kernel, str) or not self._kernel.reads(weights):
            return None
        try:
            places = Places(self._kernel, weights, tensors, self._parameters.sources)
        except TypeError:  # weights are computed from those that the layer holds
            return None
        form = _Form(guard.of_all(tensors), any(x.requires_grad for x in tensors), places)
        # The tuple is replaced and never changed, because another thread may go over it.
        self._forms = (form, *self._forms[: _MOST_FORMS - 1])
        return form

    def _find_kernel(self, weights: Weights) -> EncoderLayer | str:
        """The kernel that computes what the class does, for a few tokens; or why there is none, a clause."""
        parts = self.parts
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
        x = torch.randn(1, TRIAL_TOKENS, parts.shapes[0][1], **options)
        is_causal = bool(getattr(parts.attention, "is_causal", False))
        given: dict[str, Any] = {_MASK: Mask(1, Sizes(TRIAL_TOKENS, TRIAL_TOKENS), (None, 0 if is_causal else None))}
        cos_sin = None
        if self.has_cos_sin:
            angles = torch.randn(1, TRIAL_TOKENS, parts.head_width // 2, **options).repeat(1, 1, 2)
            cos_sin = angles.cos(), angles.sin()
            given[_COS_SIN] = cos_sin
        try:
            with torch.no_grad(), packing.within(None), listeners.unheard():
                expected = type(self._module).forward(self._module, x, **given)
        except Exception:  # a layer that needs more than these arguments
            return "the layer needs more arguments than states, a mask and positions"
        if not isinstance(expected, Tensor):
            return "the layer returns more than states"
        texts = Parts([TRIAL_TOKENS], is_causal)
        for pre_norm in (False, True):
            form = parts.form(self._activation, pre_norm)
            if (why := refusal(form)) is not None:
                return why
            kernel = EncoderLayer(form)
            if not kernel.reads(weights):
                return OTHER_WEIGHTS
            difference = (kernel(x, weights, texts, cos_sin) - expected).abs().max()
            if difference <= _CLOSE * expected.abs().max():
                return kernel
        return "the compiled call gives other numbers than the class of the layer"


def _activation(function: Any) -> str | None:
    """The name of an activation, by its values; None if the kernel does not have it."""
    powers = torch.exp2(torch.arange(-30.0, 40.0, device="cpu"))
    x = torch.cat([torch.linspace(-9, 9, 181, device="cpu"), powers, -powers]).float()
    with torch.no_grad():
        values = function(x)
        return next((name for name, known in _ACTIVATIONS.items() if _are_close(values, known(x))), None)


def _are_close(values: Any, expected: Tensor) -> bool:
    if not isinstance(values, Tensor) or values.shape != expected.shape:
        return False
    return bool(((values - expected).abs() <= 1e-6 * (1 + expected.abs())).all())


# ------------------------------------------------------------------------------------------------ what a call gives


def _parts_within(is_causal: bool, given: dict[str, Any], shape: tuple[int, int]) -> Parts | None:
    """The texts within which a layer attends; None if it attends otherwise. `is_causal`: without a mask."""
    mask = given.get(_MASK)
    if mask is not None and type(mask) is not Mask:
        return None
    texts = interface.texts_of(mask, given, shape)
    if mask is None:
        return _whole(*shape, is_causal) if texts is None else texts.parts(is_causal)
    if texts is None:
        return mask.parts(*shape)
    if given.get(_CACHE) is not None:
        return None
    whole = mask.is_causal_or_complete()
    if whole is not None:
        return texts.parts(whole)
    graph, _ = mask.graph(None, shape[0], shape[1], torch.device("cpu"), flat=True)
    return parts_of(graph, 1)


@lru_cache(maxsize=64)
def _whole(rows: int, tokens: int, is_causal: bool) -> Parts:
    return Parts([tokens] * rows, is_causal)


def _cos_sin_of(given: Any, shape: tuple[int, int], width: int) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of the angles of each token, [rows, width of a head]; None for others."""
    if not isinstance(given, tuple) or len(given) != 2 or not are_plain(given):
        return None
    cos, sin = given
    sizes = [shape[0], shape[1], width]
    for each in given:
        if (
            each.requires_grad
            or each.dim() != 3
            or each.shape[0] not in (1, shape[0])
            or [*each.shape[1:]] != sizes[1:]
        ):
            return None
    if cos.shape[0] != shape[0] or sin.shape[0] != shape[0]:
        cos, sin = cos.expand(sizes), sin.expand(sizes)
    return cos.contiguous(), sin.contiguous()
