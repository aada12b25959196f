"""Recurrent layers of transformers' models (Mamba, Mamba-2, Gated DeltaNet, KDA, short convolutions), in place.

Their forward passes call functions of their module, such as `mamba2_chunk_scan`, which are torch code. `adapt` gives
each layer a class whose forward pass is the same code with this library's functions under those names, so that the
model keeps its weights, caches, padding and `save_pretrained`. A function is replaced only if it has the parameters
that are known here and gives the same numbers on a small example.

On CUDA the recurrences run by Triton, also under `torch.autocast` and in compiled programs. The update of Mamba-2's
state by a token, and convolutions that are not of packed texts, stay transformers' there.

Packed texts (`packing.py`) are documents of the graph `causal() & documents(lengths)`: gates and convolutions begin
again in each. transformers refuses them without its CUDA packages. Layers that mix tokens by code of their own compute
one text after the other.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache, partial, update_wrapper
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from mpnn.graph.sharding import active
from mpnn.graph.witness import Witness, names_in
from mpnn.graphs import causal, window
from mpnn.integrations.hf import adapted, packing
from mpnn.integrations.hf.adapted import origin
from mpnn.kernels.recurrent import (
    by_triton,
    has_kernel,
    recurrence,
    selective_scan,
    serves,
    short_convolution,
    state_update,
)

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
    if by_triton(x) and lengths is None and active() is None:
        return NotImplemented  # torch's convolution takes one kernel, and this one as many as there are taps
    taps = weight.mT.flip(0)
    before = 0
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
    wide = hidden_states.dtype if by_triton(x) else torch.float32
    lengths = _lengths(options, dt, initial_states, return_final_states)
    query, key, value = (_one_sequence(y.to(wide), lengths) for y in (C, B, x * dt[..., None]))
    log_gate = _one_sequence(A.float() * dt, lengths)
    state = None if initial_states is None else initial_states.mT
    run = partial(recurrence, query, key, value, log_gate, documents=lengths)
    if (sharding := active()) is not None:
        zeros = x.new_zeros(len(value), value.shape[2], B.shape[-1], value.shape[-1])
        first = zeros + 0 * value[:, 0, :, :1, None]  # which needs a gradient if the values do
        out = sharding.run_in_rank_order(value.shape[1], lambda state: run(state=state), first)
        last = first
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
    if by_triton(hidden_states):
        return NotImplemented
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
    inputs = [query, key, value, g, beta]
    inputs = inputs if by_triton(query) else [x.float() for x in inputs]
    q, k, v, gate, share = (_one_sequence(x, lengths) for x in inputs)
    scale = query.shape[-1] ** -0.5
    unit = use_qk_l2norm_in_kernel
    of_call = {"scale": scale, "documents": lengths, "unit": unit, "dtype": query.dtype}
    out, last = recurrence(q, k, v, gate, share, initial_state, **of_call)
    return out.view(*value.shape), last if output_final_state else None


def lightning_attention(
    layer: Any,
    hidden_states: Tensor,
    position_embeddings: Any,
    attention_mask: Tensor | None,
    past_key_values: Any = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The forward pass of MiniMax's recurrence, whose gate is a number of each head (arXiv:2501.08313)."""
    heads = layer.num_attention_heads
    width = layer.head_dim
    dtype = hidden_states.dtype
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


# ---------------------------------------------------------------------------------------------------- packed texts


def _lengths(
    options: Mapping[str, Any], x: Tensor, state: Tensor | None = None, returns_state: bool = False
) -> list[int] | None:
    """The lengths of the packed texts of a batch x [B, N, ...], row after row; None if nothing is packed."""
    texts = packing.of(options, (x.shape[0], x.shape[1]))
    if texts is None:
        return None
    if state is not None or returns_state:
        raise ValueError(packing.NO_CACHE)
    return texts.lengths


def _one_sequence(x: Tensor, lengths: list[int] | None) -> Tensor:
    """A batch [B, N, ...] of packed sequences as one sequence [1, B * N, ...]."""
    return x if lengths is None else x.reshape(1, -1, *x.shape[2:])


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
    return {"hidden_states": _random(2, 3, 7), "weight": _random(3, 4), "bias": _random(3), "activation": "silu"}


def _mamba2() -> dict[str, Any]:
    return {
        "hidden_states": _random(2, 7, 4, 3),
        "dt": _random(2, 7, 4),
        "A": -_random(4).abs(),
        "B": _random(2, 7, 2, 5),
        "C": _random(2, 7, 2, 5),
        "D": _random(4),
        "initial_states": _random(2, 4, 3, 5),
        "chunk_size": 4,
        "dt_bias": _random(4),
        "dt_softplus": True,
        "return_final_states": True,
    }


def _mamba2_token() -> dict[str, Any]:
    return {
        "hidden_states": _random(2, 4, 3),
        "dt": _random(2, 4, 1).expand(-1, -1, 3),
        "state": _random(2, 4, 3, 5),
        "A": (-_random(4, 1, 1).abs()).expand(-1, 3, 5),
        "B": _random(2, 2, 5),
        "C": _random(2, 2, 5),
        "D": _random(4, 1).expand(-1, 3),
        "dt_bias": _random(4, 1).expand(-1, 3),
        "dt_softplus": True,
    }


def _mamba() -> dict[str, Any]:
    return {
        "hidden_states": _random(2, 3, 7),
        "dt": _random(2, 3, 7),
        "A": -_random(3, 5).abs(),
        "B": _random(2, 5, 7),
        "C": _random(2, 5, 7),
        "D": _random(3),
        "z": _random(2, 3, 7),
        "delta_bias": _random(3),
        "delta_softplus": True,
        "return_last_state": True,
    }


def _delta(gates: tuple[int, ...], shared: int) -> dict[str, Any]:
    return {
        "query": _random(2, 7, 4 // shared, 5),
        "key": _random(2, 7, 4 // shared, 5),
        "value": _random(2, 7, 4, 3),
        "g": -_random(2, 7, *gates).abs(),
        "beta": _random(2, 7, 4).sigmoid(),
        "initial_state": _random(2, 4, 5, 3),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }


_KNOWN: dict[str, _Known] = {
    "causal_conv1d_fn": _Known(causal_conv1d_fn, _convolution),
    "mamba2_chunk_scan": _Known(mamba2_chunk_scan, _mamba2),
    "mamba2_selective_state_update": _Known(mamba2_selective_state_update, _mamba2_token),
    "mamba_selective_scan": _Known(mamba_selective_scan, _mamba),
    "torch_chunk_gated_delta_rule": _Known(gated_delta_rule, partial(_delta, (4,), 2)),
    "torch_recurrent_gated_delta_rule": _Known(gated_delta_rule, partial(_delta, (4,), 2)),
    "chunk_kimi_delta_attention": _Known(gated_delta_rule, partial(_delta, (4, 5), 1)),
    "recurrent_kimi_delta_attention": _Known(gated_delta_rule, partial(_delta, (4, 5), 1)),
}
"""By the name of the function in transformers' modules."""


_FUSED = ("mamba2_split_conv1d_scan_combined",)
"""Functions of transformers that compute several of those above at once, or return None where they do not run."""

_LAYERS = {"transformers.models.minimax.modeling_minimax.MiniMaxLightningAttention": lightning_attention}
"""The forward passes of layers that call no such function, by the name of the class."""


_BY_TEXT = frozenset(
    {
        "transformers.models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock",
        "transformers.models.zaya.modeling_zaya.ZayaCCAProjection",
    }
)
"""Layers that mix the tokens of a row by code of their own, and are called once for each packed text."""


def _mixes_tokens(kind: Any) -> bool:
    return bool(adapted.called(kind.forward, _KNOWN)) or _path(kind) in _LAYERS


def runs_here(layer: nn.Module) -> bool:
    """Whether this is a recurrent layer that calls this library."""
    return origin(layer).build is _with_our_functions


def is_foreign(layer: nn.Module) -> bool:
    """Whether this is a recurrent layer that runs transformers' code."""
    return _mixes_tokens(origin(layer).kind) and not (runs_here(layer) and "forward" not in vars(layer))


def keeps_texts_apart(layer: nn.Module) -> bool:
    """Whether this layer mixes the tokens of a row, and those of each packed text alone."""
    return origin(layer).build in (_with_our_functions, _text_by_text)


def refusal(model: nn.Module) -> str:
    """Why packed texts of this model would be mixed, or an empty string."""
    foreign = {type(layer).__name__ for layer in model.modules() if is_foreign(layer)}
    if not foreign:
        return ""
    return f"{', '.join(sorted(foreign))} runs transformers' code, which does not keep packed texts apart"


def adapt(model: nn.Module) -> list[Callable[[], Any]]:
    """Gives the recurrent layers of a model classes that call this library; returns what changes them back.

    Raises:
        ValueError: if a function of the model differs from the one known here.
    """
    plain = [layer for layer in model.modules() if origin(layer).build is None and "forward" not in vars(layer)]
    classes: dict[nn.Module, Any] = {}
    kind: Any
    for layer in plain:
        kind = type(layer)
        if _path(kind) in _BY_TEXT:
            classes[layer] = _text_by_text(kind)
        elif _mixes_tokens(kind) and serves(torch.empty(0, device="cpu")):
            classes[layer] = _with_our_functions(kind)
    around: set[Any] = {type(layer) for layer in model.modules() if _is_around(layer, classes)}
    others = [layer for layer in plain if layer not in classes and type(layer) in around]
    classes |= {layer: _around_recurrences(cast(Any, type(layer))) for layer in others}
    for layer, kind in classes.items():  # after all classes are made, which may fail
        layer.__class__ = kind
    return [partial(undo, list(classes)) for undo in (adapted.restore, packing.forget) if classes]


def _is_around(outer: nn.Module, layers: Mapping[nn.Module, Any]) -> bool:
    """Whether a layer contains one of these, so that checkpointing computes it again as a whole."""
    is_layer = type(outer).__module__.startswith("transformers.") and not isinstance(outer, PreTrainedModel)
    return is_layer and any(inner in layers for inner in outer.modules() if inner is not outer)


@cache
def _with_our_functions(kind: Any) -> Any:
    """A subclass with the same forward pass, which calls this library."""
    own = _LAYERS.get(_path(kind))
    if own is None:
        originals = inspect.unwrap(kind.forward).__globals__
        names = adapted.called(kind.forward, _KNOWN)
        for name in names:
            _check(name, originals[name])
        functions = {name: _chosen(_KNOWN[name].function, originals[name]) for name in names}
        functions |= {name: _without_fusion(originals[name]) for name in adapted.called(kind.forward, _FUSED)}
        forward = adapted.rebound(kind.forward, functions)
    else:
        forward = _instead_of(kind.forward, own)
    forward = _as_long_as_it_is_its_code(kind, forward)
    return adapted.subclass(kind, _again(_padding_first(forward)), _with_our_functions)


@cache
def _around_recurrences(kind: Any) -> Any:
    """A subclass of a layer around recurrences, which finds the texts of its pass if it is computed again."""

    def forward(layer: nn.Module, *args: Any, **options: Any) -> Any:
        return kind.forward(layer, *args, **options)

    return adapted.subclass(kind, _again(update_wrapper(forward, kind.forward)), _around_recurrences)


@cache
def _text_by_text(kind: Any) -> Any:
    """A subclass of a layer that mixes the tokens of a row, which computes packed texts one after the other."""
    return adapted.subclass(kind, _again(_padding_first(_of_each_text(kind))), _text_by_text)


def _of_each_text(kind: Any) -> Callable[..., Any]:
    """The forward pass of a class as it is when it is called, of packed texts one after the other."""

    def forward(layer: nn.Module, *args: Any, **options: Any) -> Any:
        texts = packing.current()
        if texts is None:
            return kind.forward(layer, *args, **options)
        return _each_text(partial(kind.forward, layer), texts, args, options)

    return update_wrapper(forward, kind.forward)


def _watched(kind: Any) -> tuple[Witness, frozenset[Any]]:
    """A witness of the forward pass of a class, and all that it has read, but for attributes of classes that the code
    does not name."""
    witness = Witness()
    witness.method(kind, "forward")
    reads = [*witness.reads()]
    names = {name for read in reads if read.name == "__code__" for name in names_in(read.value)}
    kept = [read for read in reads if read.name in names or not isinstance(read.owner, type)]
    return witness, frozenset((id(read.owner), read.name, id(read.value)) for read in kept)


def _as_long_as_it_is_its_code(kind: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward pass that was made from the code of a class. If this code changes, or functions of its file do, the
    class itself computes, each text on its own."""
    witness, known = _watched(kind)
    changed = _of_each_text(kind)

    def is_same() -> bool:
        nonlocal witness
        if witness.holds():
            return True
        # Others change classes that this one derives from: torch.compile adds attributes to nn.Module.
        again, named = _watched(kind)
        if named == known:
            witness = again
        return named == known

    def run(layer: nn.Module, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling() or is_same():
            return forward(layer, *args, **options)
        if active() is not None:
            raise ValueError(
                f"the code of {kind.__name__} changed after mpnn.hf.use, which does not pass states from process to "
                "process; change it before, or compute in one process"
            )
        return changed(layer, *args, **options)

    return update_wrapper(run, forward)


@torch.compiler.disable
def _each_text(
    forward: Callable[..., Any], texts: packing.Packing, args: tuple[Any, ...], options: Mapping[str, Any]
) -> Any:
    """A layer's forward pass over each packed text, as one row. Tensors [B, N, ...] are cut; others are not."""

    def cut(value: Any) -> list[Any]:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != texts.shape[1]:
            return [value] * len(texts.lengths)
        rows = value.expand(texts.shape[0], *value.shape[1:]).flatten(0, 1)
        return [text[None] for text in rows.split(texts.lengths)]

    each_args = zip(*map(cut, args), strict=True)
    each_options = [dict(zip(options, values, strict=True)) for values in zip(*map(cut, options.values()), strict=True)]
    outs = [
        forward(*values, **named)
        for values, named in zip(each_args, each_options or [{}] * len(texts.lengths), strict=True)
    ]
    if isinstance(outs[0], Tensor):
        return torch.cat(outs, 1).view(*texts.shape, *outs[0].shape[2:])
    joined = (torch.cat(out, 1) if isinstance(out[0], Tensor) else out[0] for out in zip(*outs, strict=True))
    return tuple(x.view(*texts.shape, *x.shape[2:]) if isinstance(x, Tensor) else x for x in joined)


def _again(forward: Any) -> Any:
    """A forward pass that finds the texts of its pass if checkpointing computes it again."""

    def found(layer: nn.Module, *args: Any, **options: Any) -> Any:
        return packing.in_layer(forward, layer, *args, **options)

    return update_wrapper(found, forward)


_CACHES = "cache_params", "past_key_values"
_MASKS = "attention_mask", "conv_mask"


def _padding_first(forward: Any) -> Any:
    """A forward pass whose states are those of the last token of each text, also if padding follows it. With a cache,
    padding moves to the front of its row, where transformers keeps it out of the states."""
    names = list(inspect.signature(forward).parameters)[1:]
    cache_name = next((name for name in _CACHES if name in names), None)
    mask_name = next((name for name in _MASKS if name in names), None)
    if cache_name is None or mask_name is None:
        return forward

    def run(layer: nn.Module, *args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        cache, mask = given.get(cache_name), given.get(mask_name)
        if cache is None or not isinstance(mask, Tensor) or mask.dim() != 2 or torch.compiler.is_exporting():
            return forward(layer, *args, **options)
        return _moved(forward, layer, given, mask, cache)

    return update_wrapper(run, forward)


@torch.compiler.disable(recursive=False)  # numbers decide
def _moved(forward: Any, layer: Any, given: dict[str, Any], mask: Tensor, cache: Any) -> Any:
    order = _order(layer, mask, cache)
    if order is None:
        return forward(layer, **given)
    out = forward(layer, **{name: _permuted(value, order) for name, value in given.items()})
    back = order.argsort(dim=1)
    return _permuted(out, back)


@torch.compiler.disable
def _order(layer: Any, mask: Tensor, cache: Any) -> Tensor | None:
    """The order of tokens, int64 [B, N], in which padding comes first; None if no padding follows a token.

    Raises:
        ValueError: if padding follows tokens that are in the cache.
    """
    keep = mask.long()
    is_begun = _begun(layer, cache, keep)
    if bool((is_begun & (keep == 0).any(1)).any()):
        raise ValueError(
            f"{type(layer).__name__} got a cache and padding after tokens of the same text, which would change the "
            "states; pass each text's tokens without padding between them: a batch of one, or padding on the left"
        )
    if not bool((keep.diff(dim=1) < 0).any()):
        return None
    return keep.argsort(dim=1, stable=True)


def _begun(layer: Any, cache: Any, keep: Tensor) -> Tensor:
    """Which texts have tokens in the cache, bool [B]: their states are not zero."""
    number: int = layer.layer_idx
    states: list[Any] = []
    if hasattr(cache, "get_linear_cache"):
        states = [cache.get_linear_cache(number)]
    elif number < len(getattr(cache, "layers", ())):
        known = (getattr(cache.layers[number], name, None) for name in ("conv_states", "recurrent_states"))
        groups = [group for group in known if isinstance(group, dict)]
        own: Any = getattr(layer, "conv_idx", None)  # Inkling has several convolutions in a layer
        states = [state for group in groups for key, state in group.items() if own in (None, key)]
    begun = torch.zeros(len(keep), dtype=torch.bool, device=keep.device)
    for state in states:
        if isinstance(state, Tensor) and len(state) == len(keep):
            begun |= (state.flatten(1) != 0).any(1)
    return begun


def _permuted(value: Any, order: Tensor) -> Any:
    """Tensors [B or 1, N, ...], alone or in a tuple, with the tokens of each row in another order."""
    if isinstance(value, tuple):
        return tuple(_permuted(part, order) for part in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != order.shape[1]:
        return value
    rows = value.expand(len(order), *value.shape[1:])
    return rows.gather(1, order.view(*order.shape, *[1] * (value.dim() - 2)).expand_as(rows))


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _instead_of(original: Any, ours: Callable[..., Any]) -> Any:
    """This library's forward pass of a layer of the same parameters."""
    known, found = (list(inspect.signature(f).parameters)[1:-1] for f in (ours, original))
    if known != found:
        raise ValueError(f"{original.__qualname__} takes {found}, and {known} are known here")

    choice = _Choice(ours, torch.compiler.disable(ours), original)

    def forward(layer: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        return choice.of(hidden_states, options)(layer, hidden_states, *args, **options)

    return update_wrapper(forward, original)


def _chosen(ours: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """This library's function where it serves the call; else transformers' own."""

    def in_full_precision(*args: Any, **options: Any) -> Any:
        x = args[0] if args else next(iter(options.values()))
        with torch.autocast(x.device.type, enabled=False):
            result = ours(*args, **options)
        return original(*args, **options) if result is NotImplemented else result

    choice = _Choice(in_full_precision, torch.compiler.disable(in_full_precision), original)

    def run(*args: Any, **options: Any) -> Any:
        x = args[0] if args else next(iter(options.values()))
        return choice.of(x, options)(*args, **options)

    return run


def _without_fusion(original: Callable[..., Any]) -> Callable[..., Any]:
    """The fused function, where it is faster than those above and nothing is packed."""

    def run(x: Tensor, *args: Any, **options: Any) -> Any:
        if (serves(x) and not by_triton(x)) or packing.is_packed(options):
            return None
        return original(x, *args, **options)

    return run


class _Choice(NamedTuple):
    """A function of mpnn, the same as a break of a compiled program, and that of transformers."""

    ours: Callable[..., Any]
    uncompiled: Callable[..., Any]
    original: Callable[..., Any]

    def of(self, x: Tensor, options: Mapping[str, Any]) -> Callable[..., Any]:
        """The function for x. A compiled program breaks where texts are packed. Elsewhere it contains our function on
        CUDA, which is an operator, and transformers' on CPU.

        Raises:
            ValueError: if neither keeps packed texts apart, or passes states from process to process.
        """
        is_compiling = torch.compiler.is_compiling()
        is_packed = packing.is_packed(options)
        is_served = has_kernel(x)  # without the library of kernels, no layer was replaced
        if is_served and is_compiling and is_packed:
            return self.uncompiled
        if is_served and (by_triton(x) or not is_compiling):
            return self.ours
        if is_packed:
            raise ValueError(
                f"recurrent layers keep packed texts apart on CPU and by Triton, and this one is on {x.device.type}; "
                "pass the texts as a batch, padded"
            )
        if active() is not None:
            raise ValueError(
                "this recurrence passes its state from process to process on CPU, and not in a compiled program"
            )
        return self.original


_CHECKED: set[Any] = set()


def _check(name: str, original: Callable[..., Any]) -> None:
    """Raises ValueError unless a function of transformers has the parameters and the numbers that are known here."""
    plain: Any = inspect.unwrap(original)
    if plain.__code__ in _CHECKED:
        return
    ours = _KNOWN[name].function
    example = _KNOWN[name].example
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
