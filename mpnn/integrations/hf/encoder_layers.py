"""Whole layers of encoders and decoders by one compiled call each, in place (`mpnn/kernels/encoder_layer.py`).

A layer keeps its class: its instance gets another `forward`, an object that runs the kernel where this computes what
the class would, and the class's own code in all other calls. A layer is recognized by the names of its maps and norms,
and is taken only if both ways give the same numbers for a few tokens. A decoder's layer runs so over whole texts; it
fills an empty cache, and tokens behind those of a cache take the ordinary way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from mpnn.attention.whole_layer import Parts, documents_of, is_special
from mpnn.integrations.hf import compat, interface, packing
from mpnn.integrations.hf.closures import Sizes
from mpnn.integrations.hf.masks import Mask
from mpnn.kernels.cpu import library
from mpnn.kernels.encoder_layer import Documents, EncoderLayer, Form, has_kernel

_CACHE = "past_key_values"
_TURNS = "position_embeddings"
_MASK = "attention_mask"
_READ = interface.HARMLESS.union(packing.NAMES, (_CACHE, _MASK))
"""What any layer may be given."""
TRIED = 7  # tokens for which a layer is compared with its class
_CLOSE = 1e-4  # of the largest number


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
    if library.why_missing() is not None:
        return []
    found = [(module, names) for module in model.modules() if (names := _find(module)) is not None]
    return [_take(module, names) for module, names in found]


def runs_here(module: nn.Module) -> bool:
    """Whether the kernel may run this layer."""
    return isinstance(vars(module).get("forward"), Forward)


def _find(module: nn.Module) -> _Names | None:
    """Where a layer has its parts; None if it is no such layer, has a `forward` of its own or a topology, or there is
    no kernel for its sizes."""
    if "forward" in vars(module):
        return None
    names = next((names for names in _FAMILIES if _matches(module, names)), None)
    if names is None or interface.graph_of(_get(module, names.attention)) is not None:
        return None
    return names if has_kernel(_Parts(module, names).form("identity", False)) else None


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


def _take(module: nn.Module, names: _Names) -> partial[None]:
    module.forward = Forward(module, names)
    return partial(_restore, module, module.forward)


def _restore(module: nn.Module, forward: Forward) -> None:
    if vars(module).get("forward") is forward:  # else another library has wrapped it
        del module.forward


class Forward:
    """`forward` of one layer: the kernel's, or its class's. It is an object, not a closure, so that copies of the layer
    compute with their own weights, and a process that unpickles the layer imports this module."""

    computes_the_same = True

    def __init__(self, module: nn.Module, names: _Names) -> None:
        self.module = module
        self.names = names
        self._parameters = tuple(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
        self._turns = _TURNS in self._parameters
        self._parts: _Parts | None = None
        self._refused = False

    def __getstate__(self) -> dict[str, Any]:
        """What is known of the layer's parts is neither copied nor saved."""
        return vars(self) | {"_parts": None}

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            given = dict(zip(self._parameters, args, strict=False)) | options
            x = given.pop(self._parameters[0], None)
            if self._may_run(x, given):
                out = self._run(x, given)
                if out is not None:
                    return out
        return type(self.module).forward(self.module, *args, **options)

    def _may_run(self, x: Any, given: dict[str, Any]) -> bool:
        """Whether a call asks for what the kernel computes, in the modes that are on, and its layer is as it was."""
        cache = given.get(_CACHE)
        if cache is not None and not compat.is_empty(
            cache, getattr(_get(self.module, self.names.attention), "layer_idx", None)
        ):
            return False
        if type(x) is not Tensor or x.dtype is not torch.float32 or not x.is_cpu or x.dim() != 3 or not x.numel():
            return False
        if is_special(x) or interface.is_recorded():
            return False
        for name, value in given.items():
            is_read = name in _READ or (name == _TURNS and self._turns)
            if value is not None and value is not False and not is_read:
                return False
        return self._is_ready() and not (torch.is_grad_enabled() and self._needs_gradients(x))

    def _is_ready(self) -> bool:
        if self._refused:
            return False
        if self._parts is None or not self._parts.are_unchanged():
            self._parts = _Parts.of(self.module, self.names)
        return self._parts is not None

    def _needs_gradients(self, x: Tensor) -> bool:
        return self._parts is None or self._parts.need_gradients(x)

    def _run(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        parts = self._parts
        shape = (x.shape[0], x.shape[1])
        assert parts is not None
        documents = _documents(parts.attention, given, shape)
        turns = _turns_of(given.get(_TURNS), shape, parts.head_width) if self._turns else None
        if documents is None or (self._turns and turns is None):
            return None
        kernel = self._kernel()
        if kernel is None:
            return None
        cache = given.get(_CACHE)
        if cache is None:
            return kernel(x.contiguous(), parts.weights(), documents, turns)
        heads = parts.shapes[1][0] // parts.head_width
        keys, values = x.new_empty(2, x.shape[0], heads, x.shape[1], parts.head_width)
        out = kernel(x.contiguous(), parts.weights(), documents, turns, (keys, values))
        cache.update(keys, values, parts.attention.layer_idx)
        return out

    def _kernel(self) -> EncoderLayer | None:
        """The kernel for the layer; None if it does not compute the same."""
        parts = self._parts
        assert parts is not None
        if parts.layer is None:
            parts.layer = self._build(parts)
            self._refused = parts.layer is None
        return parts.layer

    def _build(self, parts: _Parts) -> EncoderLayer | None:
        """The kernel for this layer, if it computes what the class does."""
        activation = _activation(_get(self.module, self.names.activation))
        if activation is None:
            return None
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, TRIED, parts.width, generator=generator)
        is_causal = bool(getattr(parts.attention, "is_causal", False))
        given: dict[str, Any] = {_MASK: Mask(1, Sizes(TRIED, TRIED), (None, 0 if is_causal else None))}
        turns = None
        if self._turns:
            angles = torch.randn(1, TRIED, parts.head_width // 2, generator=generator).repeat(1, 1, 2)
            turns = angles.cos(), angles.sin()
            given[_TURNS] = turns
        try:
            with torch.no_grad(), packing.within(None):
                expected = type(self.module).forward(self.module, x, **given)
        except Exception:  # a layer that needs more than these arguments
            return None
        if not isinstance(expected, Tensor):
            return None
        for pre_norm in (False, True):
            try:
                layer = EncoderLayer(parts.form(activation, pre_norm))
            except ValueError:  # there is no kernel for these sizes
                return None
            documents = Documents([TRIED], is_causal=is_causal)
            difference = (layer(x, parts.weights(), documents, turns) - expected).abs().max()
            if difference <= _CLOSE * expected.abs().max():
                return layer
        return None


class _Parts(Parts):
    """The parts of a layer of transformers."""

    def __init__(self, module: nn.Module, names: _Names) -> None:
        self.module = module
        self.names = names
        self.attention = _get(module, names.attention)
        maps, norms = ([_get(module, name) for name in part] for part in (names.maps, names.norms))
        widths = [(map.nf, map.nx) if type(map) is Conv1D else (map.out_features, map.in_features) for map in maps]
        sizes = "attention_head_size", "head_dim"
        width = next((size for name in sizes if (size := getattr(self.attention, name, None))), widths[0][1])
        self.head_width = int(width)
        super().__init__(module, maps, norms, self._shapes(widths))
        self.activation = _get(module, names.activation)
        self.layer: EncoderLayer | None = None

    @classmethod
    def of(cls, module: nn.Module, names: _Names) -> _Parts | None:
        """None if a part is missing or was replaced, or has weights that the kernel does not read."""
        if not _matches(module, names):
            return None
        parts = cls(module, names)
        return parts if parts.remember() else None

    @staticmethod
    def _shapes(widths: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The shapes of the maps, where one map may be that of queries, keys and values."""
        is_one = len(widths) == 4
        return [(widths[0][0] // 3, widths[0][1])] * 3 + widths[1:] if is_one else widths

    def form(self, activation: str, pre_norm: bool) -> Form:
        scale = getattr(self.attention, "scaling", None)
        epsilons = [getattr(norm, "eps", getattr(norm, "variance_epsilon", 0.0)) for norm in self.norms]
        return Form(
            width=self.width,
            heads=self.shapes[0][0] // self.head_width,
            hidden=self.shapes[4][0],
            activation=activation,
            pre_norm=pre_norm,
            epsilons=(epsilons[0], epsilons[1]),
            scale=self.head_width**-0.5 if scale is None else float(scale),
            kv_heads=self.shapes[1][0] // self.head_width,
            head_width=self.head_width,
            rms_norm=type(self.norms[0]) is not nn.LayerNorm,
            gated=len(self.shapes) == 7,
        )

    def are_unchanged(self) -> bool:
        """`Parts.are_unchanged`, and whether this library computes the attention, of the whole text."""
        if self.module.training or self.attention.config.__dict__.get(compat.INTERNAL) != interface.NAME:
            return False
        if interface.graph_of(self.attention) is not None or not compat.collected() <= {"hidden_states"}:
            return False
        return super().are_unchanged() and _get(self.module, self.names.activation) is self.activation

    def has_only_idle_hooks(self) -> bool:
        return all(map(compat.has_only_idle_hooks, self._inner))


def _activation(function: Any) -> str | None:
    """The name of an activation, by its values; None if the kernel does not have it."""
    x = torch.linspace(-9, 9, 181)
    if isinstance(function, nn.Module) and any(True for _ in chain(function.parameters(), function.buffers())):
        return None
    with torch.no_grad():
        values = function(x)
        return next((name for name, known in _ACTIVATIONS.items() if _are_close(values, known(x))), None)


def _are_close(values: Tensor, expected: Tensor) -> bool:
    return bool(((values - expected).abs() <= 1e-6 * (1 + expected.abs())).all())


def _documents(attention: nn.Module, given: dict[str, Any], shape: tuple[int, int]) -> Documents | None:
    """The texts within which a layer attends; None if it attends otherwise."""
    mask = given.get(_MASK)
    if mask is not None and type(mask) is not Mask:
        return None
    texts = interface.texts_of(mask, given, shape)
    if mask is None:
        is_causal = bool(getattr(attention, "is_causal", True))
        return _whole(*shape, is_causal) if texts is None else texts.documents(is_causal)
    if texts is None:
        return mask.documents(*shape)
    if given.get(_CACHE) is not None:
        return None
    whole = mask.is_causal_or_complete()
    if whole is not None:
        return texts.documents(whole)
    graph, _ = mask.graph(None, shape[0], shape[1], torch.device("cpu"), flat=True)
    return documents_of(graph, 1)


@lru_cache(maxsize=64)
def _whole(rows: int, tokens: int, is_causal: bool) -> Documents:
    return Documents([tokens] * rows, is_causal=is_causal)


def _turns_of(given: Any, shape: tuple[int, int], width: int) -> tuple[Tensor, Tensor] | None:
    """Cosine and sine of the angles of each token, [rows, width of a head]; None for others."""
    if not isinstance(given, tuple) or len(given) != 2:
        return None
    for turn in given:
        if type(turn) is not Tensor or turn.dtype is not torch.float32 or not turn.is_cpu or turn.requires_grad:
            return None
        if turn.dim() != 3 or turn.shape[0] not in (1, shape[0]) or tuple(turn.shape[1:]) != (shape[1], width):
            return None
    cos, sin = (turn.expand(*shape, width).reshape(-1, width).contiguous() for turn in given)
    return cos, sin
