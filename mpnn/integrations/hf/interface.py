"""Registers "mpnn" among the attention implementations of transformers.

A model of transformers calls `mask` (masks.py) to create its `attention_mask`, and `attend` for each attention layer,
with that mask and with queries, keys and values after the cache. The mask becomes a graph, over which
`mpnn.ops.attend` runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit._trace import is_tracing
from transformers import AttentionInterface, AttentionMaskInterface

from mpnn import Graph, graphs, ops
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.runs import Runs
from mpnn.graph.sharding import ACTIVE
from mpnn.graph.stacked import StackedGraph
from mpnn.integrations.hf import by_torch, compat, masks, packing, ranks, traced
from mpnn.integrations.hf.closures import IRREPLACEABLE, Sizes, parse
from mpnn.integrations.hf.masks import Instead, Mask, Pairs
from mpnn.integrations.hf.offset_bias import OffsetBias, has_no_bias

NAME = "mpnn"

ROLES = "encoder", "decoder", "cross"

_FIRST_QUERY: ContextVar[int] = ContextVar("first query", default=0)
"""The decoder's position of the first query in the latest call of its self-attention in this thread, which comes before
the cross-attention of each layer. The mask of cross-attention does not say it."""

HARMLESS = frozenset({
    "cache_position", "deterministic", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_ids", "return_dict",
    "shift_labels", "sliding_window", "token_type_ids", "use_cache",
})  # fmt: skip
"""Keywords that reach attention layers and change nothing there: transformers' own eager attention does not read them,
and what they say about sources is in the mask."""

_NEEDS_GRAPH = frozenset({
    "dropout", "softcap", "output_attentions", "s_aux", "sinks", "indices", "block_indices",
})  # fmt: skip
"""Keywords of what torch's kernel for whole texts does not compute."""

_KNOWN = HARMLESS.union(_NEEDS_GRAPH, packing.NAMES, {"scaling", "is_causal", "position_bias"})

_REFUSED = {"cache": "runs over a paged cache", "lengths": "gets the lengths of texts, as models of mpnn do"}
_INSTEAD = {"lengths": "cu_seq_lens_q or seq_idx, which say where the packed texts of a model of transformers begin"}


Visit = Callable[[Graph, Tensor | None], None]

_RECORDER: ContextVar[tuple[Visit, bool] | None] = ContextVar("recorder", default=None)


@contextmanager
def record(visit: Callable[..., None], *, weights: bool = True) -> Iterator[None]:
    """Calls `visit(graph, weights)` for each attention layer that runs in the block, in the order in which they run.

    `weights` are the attention weights of the edges of `graph`, [E, H] or [B, E, H], or None with `weights=False`.
    Unlike `output_attentions`, this materializes no N x N matrix and keeps nothing. Compiled models, and the families
    of `use.NATIVE`, are not recorded.
    """
    token = _RECORDER.set((visit, weights))
    try:
        yield
    finally:
        _RECORDER.reset(token)


def is_recorded() -> bool:
    """Whether a call runs in a block of `record`."""
    return _RECORDER.get() is not None


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Runs an attention layer of transformers; see `transformers.AttentionInterface`.

    query [B, H, queries, D]; key, value [B, H_kv, keys, D]. Returns out [B, queries, H, D], and with output_attentions
    the weights [B, H, queries, keys].

    While a program is traced (`torch.compile`, `torch.export`), the graph is built by an operator of the program. Where
    that is not possible (see `traced.reason`), `torch.compile` breaks the program before and after this function.

    Raises:
        ValueError: if the layer does what mpnn does not support, or `torch.export` cannot save what it does.
    """
    if torch.compiler.is_compiling():
        if _why_not_traced(module, attention_mask, options) is not None:
            return _uncompiled(module, query, key, value, attention_mask, **options)
    elif is_tracing():
        raise ValueError(
            "torch.jit.trace would record the graph of this input for all inputs; use torch.export, or "
            "attn_implementation='sdpa'"
        )
    if not options.keys() <= _KNOWN:
        _check_keywords(module, options)
    if query.is_meta:
        return value.new_empty(*query.transpose(1, 2).shape[:3], value.shape[-1]), None
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = _as_autocast(query, key, value)
    call = _read_call(module, query, key, value, attention_mask, options)
    mask = _own_mask(module, options.get("is_causal"), call.sizes) if attention_mask is None else attention_mask
    out = _without_graph(call, mask)
    return _over_graph(call, mask) if out is None else (out, None)


def _why_not_traced(module: nn.Module, mask: Any, options: dict[str, Any]) -> str | None:
    """Why a layer cannot be part of the program that is traced, or None.

    Raises:
        ValueError: if the program is an exported one, which does not break.
    """
    topology = _setting(module, "mpnn_graph")
    needs_graph = topology is not None or _needs_edges(options)
    reason = traced.reason(mask, options, _is_of_cross(topology), needs_graph)
    if reason is not None and torch.compiler.is_exporting():
        raise ValueError(f"torch.export cannot save {type(module).__name__}: {reason}; export it with 'sdpa' attention")
    return reason


_uncompiled = torch.compiler.disable(attend)


class _Call(NamedTuple):
    """One call of an attention layer: query [B, H, queries, D], key and value [B, H_kv, keys, D], and the keywords.

    sizes: batch, queries and keys, of the whole sequence where it is divided over processes. bias: the position bias of
    the pairs, [B or 1, H or 1, queries, keys]. by_offset: T5's, which is a table by offset. topology: of the layer, as
    `config.mpnn_graph` has it.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    sizes: tuple[int, int, int]
    is_divided: bool
    bias: Tensor | None
    by_offset: OffsetBias | None
    scale: float | None
    topology: Any

    @property
    def features(self) -> list[Tensor]:
        """Query, key and value as [B, N, H, D]."""
        return [self.query.transpose(1, 2), self.key.transpose(1, 2), self.value.transpose(1, 2)]


def _as_autocast(*features: Tensor) -> list[Tensor]:
    """Features in the dtype of autocast, as torch does for its own attention."""
    dtype = torch.get_autocast_dtype(features[0].device.type)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in features]


def _check_keywords(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises ValueError for a keyword that may change the result and is not known here."""
    for name, option in options.items():
        if option is not None and name not in _KNOWN:
            what = _REFUSED.get(name, "gives its attention an option that may change the result")
            raise ValueError(
                f"{type(module).__name__} {what} ({name}=), which mpnn does not support; use "
                + _INSTEAD.get(name, "attn_implementation='eager'")
            )


def _read_call(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: dict[str, Any]
) -> _Call:
    if options.get("output_attentions") is None and not torch.compiler.is_compiling():
        options["output_attentions"] = compat.collects_attentions()
    bias = options.get("position_bias")
    by_offset = bias if isinstance(bias, OffsetBias) else None
    bias = None if bias is by_offset or has_no_bias(module) else bias
    sizes = query.shape[0], query.shape[2], key.shape[2]
    is_divided = bool(ACTIVE)
    if is_divided:
        sizes = query.shape[0], *_whole_lengths(module, mask, options)
    topology = _setting(module, "mpnn_graph")
    scale = options.get("scaling")
    return _Call(module, query, key, value, options, sizes, is_divided, bias, by_offset, scale, topology)


def _whole_lengths(module: nn.Module, mask: Any, options: dict[str, Any]) -> tuple[int, int]:
    """The numbers of queries and keys of the sequence that is divided over processes."""
    unserved = (options.get(name) for name in ("position_bias", "indices", "block_indices", "output_attentions"))
    if not isinstance(mask, Mask) or any(x is not None and x is not False for x in unserved):
        raise ValueError(
            f"{type(module).__name__} has a mask of its own, biases, chosen tokens or returned weights, which are "
            "not divided over processes; call it outside of mpnn.distributed.sharded"
        )
    return mask.sizes.queries, mask.sizes.keys


def _read_mask(call: _Call, mask: Mask | Tensor) -> tuple[Mask, Tensor | None, Tensor | None]:
    """The mask, the indices of chosen sources, and what is added to the logits, [B or 1, H or 1, queries, keys].

    A mask of bools only limits the indices. A float mask is added to the logits.
    """
    module = call.module
    options = call.options
    indices = options.get("indices")
    if indices is not None and isinstance(mask, Tensor) and mask.dtype == torch.bool and text_of(module) is None:
        indices = _allowed(indices, mask[..., : call.sizes[2]])
        mask = _own_mask(module, False, call.sizes)
    chooses = indices is not None or options.get("block_indices") is not None
    texts = texts_of(mask, options, call.sizes[:2])
    if texts is not None and (why := refusal(module, chooses)):
        raise ValueError(f"{why}; pass them as a batch, padded")
    bias = call.bias
    if not isinstance(mask, Mask):
        mask, bias = _of_pairs(call, mask)
    return mask if texts is None else mask.within(texts), indices, bias


def texts_of(mask: Any, options: dict[str, Any], shape: tuple[int, int]) -> packing.Packing | None:
    """The packed texts of a layer: those of its mask, also where checkpointing computes it again, or of the pass."""
    if isinstance(mask, Mask) and mask.texts is not None:
        return mask.texts
    return packing.of(options, shape)


def _without_graph(call: _Call, mask: Any) -> Tensor | None:
    """Attention without the graph of the mask, [B, queries, H, D]; None if the layer needs it.

    A new token makes no graph and no plan: the pairs of the mask say which keys the kernel takes. Texts without padding
    share the graph of their length.
    """
    if call.is_divided or call.bias is not None or call.topology is not None or _needs_edges(call.options):
        return None
    if torch.compiler.is_compiling():
        return _in_program(call, mask)
    if _RECORDER.get() is not None:
        return None
    batch, queries, keys = call.sizes
    texts = texts_of(mask, call.options, (batch, queries))
    if texts is not None:
        return None if isinstance(mask, Tensor) else _packed(call, mask, texts)
    if isinstance(mask, Tensor):
        pairs = None if call.by_offset is not None else by_torch.pairs_of(mask, call.query, keys)
    else:
        pairs = mask.pairs(keys) if type(mask) is Mask and mask.batch in (1, batch) else None
    if pairs is None:
        return None
    out = by_torch.attend(call.query, call.key, call.value, pairs, call.scale, call.by_offset)
    if out is not None or call.by_offset is not None:
        return out
    return _of_text(call.query, call.key, call.value, pairs, call.scale)


def _of_text(query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, scale: float | None) -> Tensor:
    """Attention over all tokens of a text or those before, [B, queries, H, D]. All texts of this length share the
    graph."""
    key, value = pairs.cut(key, value)
    graph = _text_graph(pairs.is_causal, query.shape[2], key.shape[2], query.device)
    return ops.attend(graph, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale)


@cached_graph
def _text_graph(is_causal: bool, queries: int, keys: int, device: torch.device) -> Graph:
    """The complete or causal graph of a text, a document of its own: what it gets among others, it gets alone."""
    topology = graphs.documents([queries]) if queries == keys else graphs.complete()
    return (topology & graphs.causal() if is_causal else topology).bind(queries, keys).to(device)


def _needs_edges(options: dict[str, Any]) -> bool:
    """Whether a layer does what torch's kernel for whole texts does not compute."""
    for name, option in options.items():
        is_set = name in _NEEDS_GRAPH and option is not None and option is not False
        if is_set and (name != "dropout" or option):
            return True
    return False


def _in_program(call: _Call, mask: Any) -> Tensor | None:
    """Attention by torch's kernel in a program that is traced, if the mask needs no graph there."""
    if type(mask) is not Mask or call.by_offset is not None:
        return None
    pairs = mask.pairs_in_program(call.sizes[2], by_torch.is_fastest(call.query))
    return None if pairs is None else by_torch.attend(call.query, call.key, call.value, pairs, call.scale, None)


def _packed(call: _Call, mask: Any, texts: packing.Packing) -> Tensor | None:
    """Attention within packed texts that are complete or causal. If the caller says which is the longest, nothing waits
    for the device."""
    is_causal = mask.is_causal_or_complete() if type(mask) is Mask else None
    if is_causal is None or call.by_offset is not None or refusal(call.module):
        return None
    features = call.query, call.key, call.value
    out = by_torch.attend_packed(*features, is_causal, call.scale, texts, call.options.get("max_length_k"))
    if out is not None:
        return out
    rows = (x.flatten(0, 1) for x in call.features)
    graph = texts.graph(is_causal, call.query.device)
    return ops.attend(graph, *rows, scale=call.scale).unflatten(0, texts.shape)


def _choose_graph(call: _Call, mask: Mask, indices: Tensor | None) -> tuple[Graph, bool]:
    """The graph, and whether it is over the nodes of all entries of the batch, one after the other."""
    module = call.module
    options = call.options
    device = call.query.device
    batch, _, keys = call.sizes
    if torch.compiler.is_compiling():
        return traced.graph(mask, (text_of(module), must_be_causal(module)), batch, keys, device)
    if (blocks := options.get("block_indices")) is not None:
        _check_slots(module, mask, options.get("position_ids"))
        return _of_blocks(module, blocks, mask, _instead(call, mask), keys), False
    if indices is not None:
        within = mask.graph(_instead(call, mask), batch, keys, device, flat=True)[0]
        return _of_indices(indices, keys, within), True
    graph, is_flat = mask.graph(_instead(call, mask), batch, keys, device)
    if call.is_divided and is_flat:
        raise ValueError("sequences of a batch with different padding are not divided over processes")
    return graph, is_flat


def _biases(call: _Call, bias: Tensor | None, graph: Graph, is_flat: bool) -> Any:
    """Returns the biases of the edges, as `mpnn.ops.attend` takes them."""
    per_edge = None if bias is None else _per_edge(bias, graph, is_flat, call.sizes[0])
    if call.by_offset is None:
        return per_edge
    if per_edge is None:
        return call.by_offset.over(graph, is_flat, call.query)
    return per_edge + call.by_offset.on_edges(graph, call.query)


def _over_graph(call: _Call, mask: Mask | Tensor) -> tuple[Tensor, Tensor | None]:
    """Out [B, queries, H, D], and the weights [B, H, queries, keys] if the layer returns them."""
    mask, indices, bias = _read_mask(call, mask)
    graph, is_flat = _choose_graph(call, mask, indices)
    biases = None if bias is None and call.by_offset is None else _biases(call, bias, graph, is_flat)
    options = call.options
    features = call.features
    if is_flat:
        features = [x.flatten(0, 1) for x in features]
    recorder = None if torch.compiler.is_compiling() else _RECORDER.get()
    visit, records_weights = recorder or (None, False)
    returns_weights = bool(options.get("output_attentions"))
    with_weights = returns_weights or records_weights
    terms: dict[str, Any] = {
        "scale": call.scale,
        "softcap": options.get("softcap"),
        "sinks": options.get("s_aux"),
    }
    shares = ranks.shares() if call.is_divided and not with_weights else None
    if shares is not None:
        result = shares.attend(graph, *features, **terms)
    else:
        terms |= {"bias": biases, "dropout": options.get("dropout", 0.0), "return_weights": with_weights}
        result = ops.attend(graph, *features, **terms)
    out, weights = result if with_weights else (result, None)
    if (sinks := options.get("sinks")) is not None:
        if sinks.shape != (*call.query.shape[:3], 1):
            raise ValueError(
                f"{type(call.module).__name__} has sinks of the shape {list(sinks.shape)} (sinks=), which mpnn does "
                "not support; those of tokens are [B, H, queries, 1]"
            )
        share = _share_of_keys(graph, features, sinks, is_flat, terms)
        out = out * share[..., None].to(out.dtype)
        weights = None if weights is None else weights * share[..., graph.edge_index[1], :].to(weights.dtype)
    if visit is not None:
        visit(graph, weights if records_weights else None)
    if is_flat:
        out = out.unflatten(0, call.sizes[:2])
    return out, _dense(weights, graph, is_flat, call.sizes) if weights is not None and returns_weights else None


def _share_of_keys(graph: Graph, features: list[Tensor], sinks: Tensor, is_flat: bool, terms: dict[str, Any]) -> Tensor:
    """How much of the softmax of each query its keys get, [..., queries, H], if a sink of its own, [B, H, queries, 1],
    is among the logits (Inkling 2):

        sum_j exp(s_ij) / (exp(sink_i) + sum_j exp(s_ij)) = sigmoid(lse_i - sink_i)
    """
    _, lse = ops.attend(graph, *features, **terms | {"return_weights": False, "dropout": 0.0}, return_lse=True)
    by_query = sinks[..., 0].transpose(1, 2)
    return torch.sigmoid(lse - (by_query.flatten(0, 1) if is_flat else by_query).to(lse.dtype))


def _of_pairs(call: _Call, mask: Any) -> tuple[Mask, Tensor | None]:
    """A mask that is a tensor, and what is added to the logits, [B or 1, H or 1, queries, keys]. A float mask is added
    too."""
    bias = call.bias
    _, queries, keys = call.sizes
    if not isinstance(mask, Tensor):
        raise ValueError(f"a mask must be one that transformers made with attn_implementation='mpnn'; got {mask!r}")
    if _has_indexer(call.module) and text_of(call.module) is not None:  # the mask is its choice, as in GLM5-Next
        raise ValueError(IRREPLACEABLE)
    if mask.dim() != 4:
        raise ValueError(f"a mask must be of the shape [B, 1, queries, keys]; got {list(mask.shape)}")
    mask = mask[..., :keys]
    if mask.dtype == torch.bool and mask.shape[1] == 1:
        return masks.from_dense(mask.expand(-1, -1, queries, keys)), bias
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)
    elif not mask.is_floating_point():
        raise ValueError(
            f"a mask of pairs is bool, or floating-point numbers that are added to the logits; got {mask.dtype}: "
            "if 1 means that a pair is allowed, pass mask.bool()"
        )
    return _cached_whole(queries, keys), mask if bias is None else bias + mask


def _own_mask(module: nn.Module, is_causal: bool | None, sizes: tuple[int, int, int]) -> Mask:
    """The mask of a layer that gets none."""
    _, queries, keys = sizes
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    build = _whole if torch.compiler.is_compiling() else _cached_whole  # a symbol has no hash
    return build(queries, keys, causal and queries > 1)


def _whole(queries: int, keys: int, is_causal: bool = False) -> Mask:
    return Mask(1, Sizes(queries, keys, keys - queries), (None, 0 if is_causal else None))


_cached_whole = lru_cache(maxsize=64)(_whole)


def _per_edge(bias: Tensor, graph: Graph, is_flat: bool, batch: int) -> Tensor:
    """The numbers of edges, [E, H] or [B, E, H], of numbers of pairs, [B or 1, H or 1, queries, keys]."""
    src, dst = graph.edge_index
    if is_flat:
        queries = graph.num_dst // batch
        keys = graph.num_src // batch
        expanded = bias.expand(batch, -1, queries, keys)
        return expanded[dst // queries, :, dst % queries, src % keys]
    expanded = bias.expand(-1, -1, graph.num_dst, graph.num_src)
    per_edge = expanded[..., dst, src].transpose(1, 2)
    return per_edge[0] if len(per_edge) == 1 else per_edge


def _dense(weights: Tensor, graph: Graph, is_flat: bool, sizes: tuple[int, int, int]) -> Tensor:
    """Weights [..., E, H] as [B, H, queries, keys]."""
    batch, queries, keys = sizes
    src, dst = graph.edge_index
    count = 1 if is_flat else batch
    zeros = weights.new_zeros(count, batch * queries * keys // count, weights.shape[-1])
    pairs = zeros.index_copy(1, dst * keys + src % keys, weights[None] if is_flat else weights)
    return pairs.view(batch, queries, keys, -1).movedim(-1, 1)


def _instead(call: _Call, mask: Mask) -> Instead | None:
    """The topology that `config.mpnn_graph` gives an attention layer, or None for the model's own mask."""
    module = call.module
    text = call.topology if call.topology is None or isinstance(call.topology, str) else text_of(module)
    if _is_of_cross(call.topology):
        if role_of(module) == "decoder":
            _FIRST_QUERY.set(mask.placed.first_query)
        elif role_of(module) == "cross" and text is not None:
            return Instead(parse(text), row=_FIRST_QUERY.get())
    return None if text is None else Instead(parse(text), must_be_causal(module))


def must_be_causal(module: nn.Module) -> bool:
    """Whether a topology may have no edges from later tokens where the model's own mask has none."""
    return getattr(getattr(module, "config", None), "mpnn_causal", True) is not False


def graph_of(module: nn.Module) -> Any:
    """`config.mpnn_graph` of an attention layer, or None."""
    return _setting(module, "mpnn_graph")


def _setting(module: nn.Module, name: str) -> Any:
    """Returns a setting of the configuration of an attention layer, or None."""
    config = getattr(module, "config", None)
    if config is None or torch.compiler.is_compiling():
        return getattr(config, name, None)
    # A configuration looks attributes up in Python code, which takes as long as an operation of torch.
    return object.__getattribute__(config, "__dict__").get(name)


def text_of(module: nn.Module) -> str | None:
    """The topology that `config.mpnn_graph` gives an attention layer, as text, or None for the model's own mask."""
    spec = graph_of(module)
    if spec is None or isinstance(spec, str):
        return spec
    if any(role in spec for role in ROLES):
        return cast("str | None", spec.get(role_of(module)))
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ValueError(
            f"layers of {type(module).__name__} have no numbers (layer_idx); give one topology for all layers in place "
            "of a dictionary by number"
        )
    types = getattr(module.config, "layer_types", None)
    return cast("str | None", spec.get(str(layer), spec.get(types[layer]) if types else None))


def role_of(module: nn.Module) -> str:
    """Which attention of an encoder-decoder this layer is: "encoder", "decoder" or "cross"."""
    is_decoder, is_causal = getattr(module, "is_decoder", None), getattr(module, "is_causal", None)
    if is_decoder is None or is_causal is None:
        raise ValueError(
            f"{type(module).__name__} does not say whether it is the encoder's, the decoder's or cross-attention "
            "(is_decoder, is_causal); call mpnn.hf.use(model) without graph"
        )
    return "encoder" if not is_decoder else "decoder" if is_causal else "cross"


def _is_of_cross(topology: Any) -> bool:
    """Whether `config.mpnn_graph` has a topology for cross-attention."""
    return isinstance(topology, dict) and "cross" in topology


compat.warn_without_attention(NAME)
AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, masks.mask)


def _allowed(indices: Tensor, mask: Tensor) -> Tensor:
    """The indices [B, queries, k] of sources that the mask allows, bool [B, 1, queries, keys]; -1 for others."""
    pairs = mask[:, 0].expand(len(indices), indices.shape[1], -1)
    return indices.where(pairs.gather(-1, indices.long().clamp(min=0)), -1)


def _of_indices(indices: Tensor, keys: int, mask: Graph) -> Graph:
    """The graph over the nodes of all entries of the batch, one after the other, within that of the mask."""
    first = torch.arange(len(indices), device=indices.device)[:, None, None] * keys
    numbered = torch.where(indices >= 0, indices.long() + first, -1)
    return graphs.chosen(numbered.flatten(0, 1), len(indices) * keys) & mask


def _of_blocks(module: nn.Module, chosen: Tensor, mask: Mask, instead: Instead | None, keys: int) -> Graph:
    """A graph for each entry of the batch and each group of heads, of chosen blocks [B, groups, queries, k], -1 for
    none, within the mask.

    Raises:
        ValueError: if the layer does not say how long its blocks are.
    """
    size: Any = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ValueError(f"{type(module).__name__} passes block_indices, and has no indexer.block_size; use 'eager'")
    batch, groups, queries, _ = chosen.shape
    count = -(-keys // size)
    flags = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=chosen.device)
    flags.scatter_(-1, torch.where(chosen >= 0, chosen, count).long(), True)
    by_block = graphs.blocks(flags[..., :count], size, keys, num_dst=queries)
    return by_block & _stacked(mask.graph(instead, batch, keys, chosen.device, flat=True)[0], batch, groups)


def refusal(module: nn.Module, chooses: bool = False) -> str:
    """Why a layer would compute numbers from the whole row of packed texts, or an empty string."""
    does = "chooses sources" if chooses or _has_indexer(module) else ""
    if _setting(module, "log_scaling_n_floor") is not None and not getattr(module, "is_sliding", False):
        does = "scales logits by positions"  # Inkling
    if not does:
        return ""
    return f"{type(module).__name__} {does} in the whole row, so packed sequences would get other numbers than alone"


def _has_indexer(module: nn.Module) -> bool:
    """Whether a layer chooses its sources, by an indexer of its own or of a layer before it, where its own is None."""
    # `hasattr` makes an exception of each module that is missing.
    return "indexer" in module._modules or "indexer" in vars(module)


def _check_slots(module: nn.Module, mask: Mask, positions: Tensor | None) -> None:
    """Raises ValueError unless each token is at the slot of its position, as blocks begin at slots."""
    slots = mask.placed.first_query + torch.arange(mask.sizes.queries)
    real = torch.ones(1, mask.sizes.keys, dtype=torch.bool) if mask.padding is None else mask.padding.cpu()
    moved = torch.zeros_like(slots) if positions is None else positions.cpu() - slots
    if bool((real[:, slots] & (moved != 0)).any()) or bool((real.any(-1) & ~real[:, 0]).any()):
        raise ValueError(
            f"{type(module).__name__} chooses blocks that begin at slots, so a text that does not begin at slot 0 "
            "(after padding on the left, or packed) would get other blocks than alone; pad on the right"
        )


def _stacked(flat: Graph, batch: int, groups: int) -> Graph:
    """The graph of each entry of the batch, for each group of heads, of that over all of their nodes."""
    runs = flat.runs
    keys = flat.num_src // batch
    queries = flat.num_dst // batch
    first = runs.row // queries * keys
    rows = Runs(runs.num_dst, keys, runs.ptr, runs.start - first, runs.stop - first)
    each = np.arange(batch * queries).reshape(batch, 1, queries).repeat(groups, 1).reshape(-1)
    return cast(Graph, StackedGraph(Graph.from_runs(rows.take(each)).to(flat.device), (batch, groups)))
