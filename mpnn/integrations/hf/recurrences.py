"""Recurrent layers of transformers' models (Mamba, Mamba-2, Gated DeltaNet, KDA, short convolutions), in place.

Their forward passes call functions of their module, such as `mamba2_chunk_scan`, which are torch code on CPU. `adapt`
gives each layer a class whose forward pass is the same code with this library's functions under those names, so that
the model keeps its weights, caches, padding and `save_pretrained`. A function is replaced only if it has the parameters
that are known here and gives the same numbers on a small example.

Packed sequences (`seq_idx`, `cu_seq_lens_q`) are documents of the graph `causal() & documents(lengths)`: gates and
convolutions begin anew in each. transformers refuses them without its CUDA packages. Some of its models drop
these keywords before they reach the layers; a hook of the model keeps them for the layers until the pass ends.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, partial, update_wrapper
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from mpnn.graph.sharding import active
from mpnn.graphs import causal, window
from mpnn.integrations.hf import compat
from mpnn.kernels.cpu import library
from mpnn.kernels.scan import recurrence
from mpnn.kernels.selective_scan import selective_scan
from mpnn.kernels.short_convolution import short_convolution
from mpnn.kernels.state_update import state_update

PACKED = "seq_idx", "cu_seq_lens_q", "cu_seqlens"
"""The keywords that say where packed sequences begin."""


# ------------------------------------------------------------------------------------------- transformers' functions


def causal_conv1d_fn(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **options: Any,
) -> Tensor:
    """`hidden_states` [B, channels, N], `weight` [channels, K]."""
    x = hidden_states.mT.to(weight.dtype)
    lengths = _lengths(options, x)
    taps, before = weight.mT.flip(0), 0
    if (sharding := active()) is not None:  # the tokens before those of this process
        near = sharding.part(causal() & window(len(taps) - 1), x.shape[1], x.shape[1]).exchange(x)
        x, before = near, near.shape[1] - x.shape[1]
    out = short_convolution(_one_sequence(x, lengths), taps, lengths).view(x.shape)[:, before:]
    out = out if bias is None else out + bias
    if activation is not None:
        out = ACT2FN[activation](out)
    return out.to(hidden_states.dtype).mT


def mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """`hidden_states` [B, N, H, D], `dt` [B, N, H], `A` [H], `B` and `C` [B, N, groups, S]; the state [B, H, D, S]."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
    x = hidden_states.float()
    lengths = _lengths(options, dt, initial_states, return_final_states)
    query, key, value = (_one_sequence(y, lengths) for y in (C.float(), B.float(), x * dt[..., None]))
    log_gate, state = _one_sequence(A.float() * dt, lengths), None if initial_states is None else initial_states.mT
    run = partial(recurrence, query, key, value, log_gate, documents=lengths)
    if (sharding := active()) is not None:
        zeros = value.new_zeros(len(value), value.shape[2], B.shape[-1], value.shape[-1])
        first = zeros + 0 * value[:, 0, :, :1, None]  # which needs a gradient if the values do
        out, last = sharding.along(value.shape[1], lambda state: run(state=state), first), first
    else:
        out, last = run(state=state)
    out = out.view(x.shape)
    if D is not None:
        out = torch.addcmul(out, x, D[..., None])
    return (out, last.mT.contiguous()) if return_final_states else out  # as the update of a token needs it


def mamba2_selective_state_update(
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **options: Any,
) -> Any:
    """One token: `hidden_states` [B, H, D], with `dt` [B, H, D] and `A` [H, D, S] expanded from numbers of heads. The
    state changes in place, so nothing may need a gradient."""
    _lengths(options, hidden_states, state)
    inputs = (state, hidden_states, dt, A, B, C, D, dt_bias, z)
    if (
        any(A.stride()[1:])
        or any(x.stride(-1) for x in (dt, dt_bias, D) if x is not None)
        or not (state.dtype == torch.float32 and state.is_contiguous())
        or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs))
    ):
        return NotImplemented
    step, rate, (bias, skip) = dt[..., 0], A[:, 0, 0], (None if x is None else x[:, 0] for x in (dt_bias, D))
    out = state_update(state, hidden_states, step, rate, B, C, softplus=dt_softplus, bias=bias, D=skip, z=z)
    return out.to(hidden_states.dtype)


def mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    use_mambapy: bool = False,
    use_associative_scan: bool = False,
    **options: Any,
) -> Any:
    """`hidden_states` and `dt` [B, channels, N], `A` [channels, S], `B` and `C` [B, S, N]."""
    lengths = _lengths(options, dt.mT, None, return_last_state)
    x, dt, B, C = (_one_sequence(y.mT, lengths) for y in (hidden_states, dt, B, C))
    gate = None if z is None else _one_sequence(z.mT, lengths)
    y, last = selective_scan(x, dt, A, B, C, documents=lengths, softplus=delta_softplus, bias=delta_bias, D=D, z=gate)
    out = y.view(hidden_states.mT.shape).mT
    return (out, last.to(hidden_states.dtype)) if return_last_state else out


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`query`, `key` [B, N, H or fewer, F], `value` [B, N, H, D], `g` [B, N, H] or [B, N, H, F], `beta` [B, N, H]."""
    lengths = _lengths(options, beta, initial_state, output_final_state)
    q, k, v, gate, share = (_one_sequence(x.float(), lengths) for x in (query, key, value, g, beta))
    scale, unit = query.shape[-1] ** -0.5, use_qk_l2norm_in_kernel
    out, last = recurrence(q, k, v, gate, share, initial_state, scale=scale, documents=lengths, unit=unit)
    return out.view(*value.shape).to(query.dtype), last if output_final_state else None


def lightning_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass of MiniMax's recurrence, whose gate is a number of each head (arXiv:2501.08313)."""
    heads, width, dtype = layer.num_attention_heads, layer.head_dim, hidden_states.dtype
    features = layer.act_fn(layer.qkv_proj(hidden_states))
    if attention_mask is not None:
        features = (features * attention_mask[..., None]).to(dtype)
    state = None if past_key_values is None else past_key_values.get_linear_cache(layer.layer_idx)
    lengths = _lengths(options, hidden_states, state, past_key_values is not None)
    log_gate = -layer.slope_rate.flatten().expand(*hidden_states.shape[:2], heads)
    split = features.unflatten(-1, (heads, -1)).split(width, -1)
    query, key, value, log_gate = (_one_sequence(x, lengths) for x in (*split, log_gate))
    out, last = recurrence(query, key, value, log_gate, state=state, documents=lengths)
    out = layer.norm(out.view(*hidden_states.shape[:2], heads * width).to(dtype))
    out = layer.out_proj(layer.output_gate(hidden_states).sigmoid() * out)
    last = last.to(dtype)
    if past_key_values is not None:
        past_key_values.set_linear_cache(layer.layer_idx, last)
    return out, last


# ---------------------------------------------------------------------------------------------------- packed sequences


_NO_CACHE = "packed sequences have no cache here; call the model with use_cache=False"


class _Pass(threading.local):
    """The packing of the model's forward pass that runs in this thread, for layers that are not given it."""

    model: nn.Module | None = None
    packing: Mapping[str, Tensor] = {}
    is_recomputed = False


_PASS = _Pass()


def is_packed() -> bool:
    """Whether the forward pass that runs in this thread is over packed sequences."""
    return bool(_PASS.packing)


def _lengths(
    options: Mapping[str, Any], x: Tensor, state: Tensor | None = None, returns_state: bool = False
) -> list[int] | None:
    """The lengths of the packed sequences of a batch x [B, N, ...], row after row; None if nothing is packed."""
    packing = {name: options[name] for name in PACKED if options.get(name) is not None}
    if not packing and _PASS.packing:
        if _PASS.is_recomputed:
            raise ValueError(
                "this model does not pass seq_idx to its layers, and gradient checkpointing runs them again without "
                "it; train on packed sequences without gradient checkpointing"
            )
        packing = dict(_PASS.packing)
    if not packing:
        return None
    if state is not None or returns_state:
        raise ValueError(_NO_CACHE)
    if (ids := packing.get("seq_idx")) is not None:
        return _runs(ids, x)
    ends = next(iter(packing.values()))
    lengths: list[int] = ends.diff().tolist()
    if int(ends[0]) or int(ends[-1]) != x.shape[:2].numel() or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to the {x.shape[:2].numel()} tokens of the batch; got {ends.tolist()}"
        )
    return lengths


def _runs(ids: Tensor, x: Tensor) -> list[int]:
    if ids.shape != x.shape[:2]:
        raise ValueError(f"seq_idx must have shape {list(x.shape[:2])}, the tokens; got {list(ids.shape)}")
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    lengths: list[int] = torch.diff(starts, append=starts.new_tensor([ids.numel()])).tolist()
    return lengths


def _one_sequence(x: Tensor, lengths: list[int] | None) -> Tensor:
    """A batch [B, N, ...] of packed sequences as one sequence [1, B * N, ...]."""
    return x if lengths is None else x.reshape(1, -1, *x.shape[2:])


def _packing(model: Any, args: Any, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The keywords of a call that say where packed sequences begin; or, as for attention in transformers, the sequences
    whose `position_ids` do not go on, in a call without a mask and a cache."""
    options = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **options}
    packing = {name: options[name] for name in PACKED if options.get(name) is not None}
    positions, others = options.get("position_ids"), ("attention_mask", "past_key_values", "cache_params")
    if packing or not isinstance(positions, Tensor) or any(options.get(name) is not None for name in others):
        return packing
    if positions.dim() != 2 or positions.device.type != "cpu" or torch.compiler.is_compiling():
        return {}
    breaks = positions.diff(dim=-1) != 1
    if not breaks.any():
        return {}
    use_cache = options.get("use_cache")
    if getattr(model.config, "use_cache", False) if use_cache is None else use_cache:
        raise ValueError(_NO_CACHE)
    x = options["input_ids"] if options.get("input_ids") is not None else options["inputs_embeds"]
    return {"seq_idx": F.pad(breaks, (1, 0)).cumsum(-1).expand(len(x), -1)}


def _enter(model: nn.Module, args: Any, options: Mapping[str, Any]) -> None:
    packing = _packing(model, args, options)
    if packing:
        if compat.IS_OLDER:
            raise ValueError(
                f"some recurrent layers of transformers {compat.VERSION} do not see where packed sequences "
                f"begin; install transformers {compat.TESTED}, or pass the sequences as a batch, padded"
            )
        _PASS.model, _PASS.packing = model, packing
        trained = (module for module in model.modules() if module.training)
        _PASS.is_recomputed = any(getattr(module, "gradient_checkpointing", False) for module in trained)


def _leave(model: nn.Module, args: Any, options: Mapping[str, Any], output: Any) -> None:
    if _PASS.model is model:
        _PASS.model, _PASS.packing, _PASS.is_recomputed = None, {}, False


# ------------------------------------------------------------------------------------------------ layers of a model


class _Known(NamedTuple):
    """A function that replaces one of transformers, unless it returns `NotImplemented`. `example` returns arguments for
    both, on which they must agree."""

    function: Callable[..., Any]
    example: Callable[[], dict[str, Any]]


def _random(*shape: int) -> Tensor:
    """Numbers in [-1, 1] without a pattern, the same in each call."""
    return (17.0 * torch.arange(1.0, torch.Size(shape).numel() + 1).sqrt()).sin().view(shape)


def _convolution() -> dict[str, Any]:
    x = {"hidden_states": _random(2, 3, 7), "weight": _random(3, 4)}
    return x | {"bias": _random(3), "activation": "silu"}


def _mamba2() -> dict[str, Any]:
    x = {"hidden_states": _random(2, 7, 4, 3), "dt": _random(2, 7, 4), "A": -_random(4).abs(), "D": _random(4)}
    x |= {"B": _random(2, 7, 2, 5), "C": _random(2, 7, 2, 5), "initial_states": _random(2, 4, 3, 5)}
    return x | {"chunk_size": 4, "dt_bias": _random(4), "dt_softplus": True, "return_final_states": True}


def _mamba2_token() -> dict[str, Any]:
    x = {"hidden_states": _random(2, 4, 3), "dt": _random(2, 4, 1).expand(-1, -1, 3), "state": _random(2, 4, 3, 5)}
    x |= {"A": (-_random(4, 1, 1).abs()).expand(-1, 3, 5), "B": _random(2, 2, 5), "C": _random(2, 2, 5)}
    return x | {"D": _random(4, 1).expand(-1, 3), "dt_bias": _random(4, 1).expand(-1, 3), "dt_softplus": True}


def _mamba() -> dict[str, Any]:
    x = {"hidden_states": _random(2, 3, 7), "dt": _random(2, 3, 7), "A": -_random(3, 5).abs(), "D": _random(3)}
    x |= {"B": _random(2, 5, 7), "C": _random(2, 5, 7), "z": _random(2, 3, 7), "delta_bias": _random(3)}
    return x | {"delta_softplus": True, "return_last_state": True}


def _delta(features: bool, shared: int) -> dict[str, Any]:
    x = {"query": _random(2, 7, 4 // shared, 5), "key": _random(2, 7, 4 // shared, 5), "value": _random(2, 7, 4, 3)}
    x |= {"g": -(_random(2, 7, 4, 5) if features else _random(2, 7, 4)).abs(), "beta": _random(2, 7, 4).sigmoid()}
    return x | {"initial_state": _random(2, 4, 5, 3), "output_final_state": True, "use_qk_l2norm_in_kernel": True}


_KNOWN: dict[str, _Known] = {
    "causal_conv1d_fn": _Known(causal_conv1d_fn, _convolution),
    "mamba2_chunk_scan": _Known(mamba2_chunk_scan, _mamba2),
    "mamba2_selective_state_update": _Known(mamba2_selective_state_update, _mamba2_token),
    "mamba_selective_scan": _Known(mamba_selective_scan, _mamba),
    "torch_chunk_gated_delta_rule": _Known(gated_delta_rule, partial(_delta, False, 2)),
    "torch_recurrent_gated_delta_rule": _Known(gated_delta_rule, partial(_delta, False, 2)),
    "chunk_kimi_delta_attention": _Known(gated_delta_rule, partial(_delta, True, 1)),
    "recurrent_kimi_delta_attention": _Known(gated_delta_rule, partial(_delta, True, 1)),
}
"""By the name of the function in transformers' modules."""


_LAYERS = {"transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention": lightning_attention}
"""The forward passes of layers that call no such function, by the name of the class."""


def is_recurrent(layer: nn.Module) -> bool:
    """Whether this is a layer of transformers whose recurrence this library has. A layer with a `forward` of its own,
    as accelerate's hooks give it, stays as it is: that one calls transformers' code."""
    if is_adapted(layer) or "forward" in vars(layer):
        return False
    return bool(_names(layer.forward)) or _path(type(layer)) in _LAYERS


def is_foreign(layer: nn.Module) -> bool:
    """Whether this is a recurrent layer that runs transformers' code."""
    ours = is_adapted(layer) and "forward" not in vars(layer)
    return not ours and (is_adapted(layer) or bool(_names(cast(Any, type(layer)))) or _path(type(layer)) in _LAYERS)


def is_adapted(layer: nn.Module) -> bool:
    return type(layer) in _ORIGINALS


def adapt(model: nn.Module) -> list[Callable[[], Any]]:
    """Gives the recurrent layers of a model classes that call this library; returns what changes them back.

    Raises:
        ValueError: if a function of the model differs from the one known here.
    """
    layers = [module for module in model.modules() if is_recurrent(module)]
    if not layers or library.why_missing() is not None:
        return []
    kinds: dict[Any, Any] = {
        kind: _adapted(kind) for kind in {cast(Any, type(layer)) for layer in layers}
    }  # before any layer is changed
    for layer in layers:
        layer.__class__ = kinds[type(layer)]
    hooks = [
        model.register_forward_pre_hook(_enter, with_kwargs=True, prepend=True),
        model.register_forward_hook(_leave, with_kwargs=True, always_call=True),
    ]
    return [*(hook.remove for hook in hooks), partial(_restore, model)]


def _restore(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) in _ORIGINALS:
            module.__class__ = _ORIGINALS[type(module)]


_ORIGINALS: dict[type, Any] = {}
"""The class of transformers for each class of layers that call this library."""


@cache
def _adapted(kind: Any) -> Any:
    """A subclass with the same forward pass, which calls this library. Pickles and copies know it by `kind`."""
    for name in _names(kind.forward):
        _check(name, inspect.unwrap(kind.forward).__globals__[name])
    own = _LAYERS.get(_path(kind))
    forward = _rebound(kind.forward) if own is None else _instead_of(kind.forward, own)
    methods = {"forward": forward, "__reduce_ex__": _reduce, "__module__": kind.__module__}
    ours = type(kind.__name__, (kind,), methods)
    _ORIGINALS[ours] = kind
    return ours


def _reduce(self: Any, protocol: Any) -> Any:
    _, _, *state = cast(Any, nn.Module.__reduce_ex__(self, protocol))
    return _empty, (_ORIGINALS[type(self)],), *state


def _empty(kind: Any) -> Any:
    ours = _adapted(kind)
    return ours.__new__(ours)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _instead_of(original: Any, ours: Callable[..., Any]) -> Any:
    """This library's forward pass of a layer of the same parameters, on CPU and outside of traced programs."""
    known, found = (list(inspect.signature(f).parameters)[1:-1] for f in (ours, original))
    if known != found:
        raise ValueError(f"{original.__qualname__} takes {found}, and {known} are known here")

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        plain = torch.compiler.is_compiling() or hidden_states.device.type != "cpu"
        return (original if plain else ours)(layer, hidden_states, *args, **options)

    return update_wrapper(forward, original)


def _names(forward: Any) -> list[str]:
    """The functions known here that a forward pass of transformers calls, behind its decorators."""
    forward = inspect.unwrap(forward)
    if not isinstance(forward, FunctionType) or not forward.__module__.startswith("transformers."):
        return []
    return [name for name in forward.__code__.co_names if name in _KNOWN and name in forward.__globals__]


def _rebound(function: Any) -> Any:
    """The forward pass with this library's functions among its globals, behind the same decorators."""
    if not hasattr(function, "__wrapped__"):
        shadow = _shadow(function.__module__, _names(function))
        return update_wrapper(_copy(function, shadow, function.__closure__), function)
    inner, cells = function.__wrapped__, function.__closure__ or ()
    if not any(cell.cell_contents is inner for cell in cells):
        raise ValueError(f"{function.__qualname__} has a decorator that is not known here")
    rebound = _rebound(inner)
    closure = tuple(CellType(rebound) if cell.cell_contents is inner else cell for cell in cells)
    outer = update_wrapper(_copy(function, function.__globals__, closure), function)
    outer.__wrapped__ = rebound
    return outer


def _copy(function: Any, names: dict[str, Any], closure: Any) -> Any:
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _shadow(module: str, names: list[str]) -> dict[str, Any]:
    """The globals of a module with this library's functions. It is in `sys.modules`, where torch.compile looks."""
    shadow = ModuleType(f"mpnn_{module.replace('.', '_')}")
    original = vars(sys.modules[module])
    ours = {name: _chosen(_KNOWN[name], original[name]) for name in names}
    vars(shadow).update(original, __name__=shadow.__name__, **ours)
    sys.modules[shadow.__name__] = shadow
    return vars(shadow)


def _chosen(known: _Known, original: Callable[..., Any]) -> Callable[..., Any]:
    """This library's function where it serves the call; else transformers' own."""

    def run(*args: Any, **options: Any) -> Any:
        x = args[0] if args else next(iter(options.values()))
        result: Any = NotImplemented
        if not torch.compiler.is_compiling() and x.device.type == "cpu":
            with torch.autocast("cpu", enabled=False):
                result = known.function(*args, **options)
        if result is not NotImplemented:
            return result
        if active() is not None:
            raise ValueError(
                "a recurrence passes its state from process to process on CPU, and not in a compiled program"
            )
        return original(*args, **options)

    return run


_CHECKED: set[Any] = set()


def _check(name: str, original: Callable[..., Any]) -> None:
    """Raises ValueError unless a function of transformers has the parameters and the numbers that are known here."""
    plain: Any = inspect.unwrap(original)
    if plain.__code__ in _CHECKED:
        return
    ours, example = _KNOWN[name].function, _KNOWN[name].example
    known, found = (
        {p.name for p in inspect.signature(f).parameters.values() if p.kind is not p.VAR_KEYWORD} for f in (ours, plain)
    )
    if unknown := found - known:
        raise ValueError(f"{name} of {plain.__module__} has parameters that are not known here: {sorted(unknown)}")
    with torch.no_grad():
        results = (f(**example()) for f in (plain, ours))
        a, b = ([x for x in (y if isinstance(y, tuple) else (y,)) if isinstance(x, Tensor)] for y in results)
    pairs = list(zip(a, b, strict=False))
    if len(a) != len(b) or any(x.shape != y.shape or not torch.allclose(x, y, 1e-4, 1e-4) for x, y in pairs):
        raise ValueError(f"{name} of {plain.__module__} computes other numbers than the recurrence known here")
    _CHECKED.add(plain.__code__)
