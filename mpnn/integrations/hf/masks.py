"""The masks of transformers as graphs, in O(runs).

transformers describes a mask by a function of (batch, head, query, key) made of closures (`and_masks`, `or_masks`,
causal, sliding windows, chunks, packed sequences) and a padding mask. `Mask` keeps the description. `rules` reads the
closures as nested tuples, one for each entry of the batch, and `runs_of` builds the rows of runs of one. An unknown
function is evaluated, in blocks of rows.

Rules, where positions count from the start of a packed sequence:

    ("band", left, right)        j - i in [-left, right]; None is no limit
    ("chunks", size, first)      (j - first) // size == (i - first) // size
    ("sources", bytes)           j is one of these (bool by j): padding
    ("labels", bytes)            i and j have one label (int64 by position), not -1
    ("packed", bytes, rule)      the rule within each packed sequence (position_ids, int64, that restart)
    ("&", ...), ("|", ...)       of rules
    ("runs", ptr, start, stop)   evaluated
    ("topology", topology, causal)   a topology, over each sequence; causal: it must have no edges from later tokens
    ("cross", topology, first)       a topology from encoder to decoder, whose first query has the position `first`
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.decoding.generation import check_causal
from mpnn.graph import Graph
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.runs import Runs
from mpnn.graph.topology import Topology
from mpnn.integrations.hf import compat

Rule = tuple[Any, ...]
Ints = NDArray[np.int64]

_BLOCK = 1 << 22  # pairs that are evaluated at once
_SAMPLED = 1 << 14  # tokens of a mask over which a function without tensors is tried: more than most windows
_DRAWS = 4096  # tokens up to which a topology is compared with itself over twice as many
_COMPUTES = (
    "this model computes with its mask, and with attn_implementation='mpnn' the mask is a graph, not a tensor; keep "
    "attn_implementation='sdpa' or 'eager' for it"
)


class Sizes(NamedTuple):
    """Queries first_query ... first_query + queries - 1, and keys likewise, by position in the whole sequence."""

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0


class Mask:
    """A mask of transformers that becomes a graph when an attention layer asks for it."""

    def __init__(
        self,
        batch: int,
        sizes: Sizes,
        function: Callable[..., Any] | Rule = compat.bidirectional_mask_function,
        padding: Tensor | None = None,
        use_vmap: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.batch, self.sizes, self.function, self.padding = batch, sizes, function, padding
        self.use_vmap, self.device = use_vmap, device
        self._graphs: dict[Any, tuple[Graph, bool]] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, 1, self.sizes.queries, self.sizes.keys

    @property
    def ndim(self) -> int:
        return 4

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`torch.where(mask, ...)` selects by the pairs, bool [B, 1, queries, keys] (Doge, one token at a time)."""
        if function is not torch.where or not isinstance(args[0], Mask):
            raise TypeError(f"torch.{function.__name__}: {_COMPUTES}")
        tensors = [x for x in args[1:] if isinstance(x, Tensor)]
        return torch.where(args[0].dense().to(tensors[0].device), *args[1:], **kwargs or {})

    def dense(self) -> Tensor:
        """The pairs, bool [B, 1, queries, keys]."""
        graph, _ = self.graph(None, self.batch, self.sizes.keys, torch.device("cpu"), flat=True)
        src, dst = graph.edge_index
        pairs = torch.zeros(self.batch, 1, self.sizes.queries, self.sizes.keys, dtype=torch.bool)
        pairs.view(-1)[dst * self.sizes.keys + src % self.sizes.keys] = True
        return pairs

    def __add__(self, other: Any) -> Any:
        raise TypeError(_COMPUTES)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = __add__

    def __invert__(self) -> Any:
        raise TypeError(_COMPUTES)

    def contiguous(self) -> Mask:
        return self

    def __repr__(self) -> str:
        return f"Mask{self.shape}"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_COMPUTES}")

    def __getitem__(self, index: Any) -> Any:
        return self.__getattr__("[...]")

    @cached_property
    def rules(self) -> list[Rule]:
        """The rule of each entry of the batch."""
        padding = self.padding
        if padding is not None:
            keys = slice(self.sizes.first_key, self.sizes.first_key + self.sizes.keys)
            padding = None if bool(padding[:, keys].all()) else padding.cpu()
        rules = _read(self)
        if padding is None:
            return rules
        return [("&", rule, ("sources", padding[b].numpy().tobytes())) for b, rule in enumerate(rules)]

    def graph(
        self, instead: Rule | None, batch: int, keys: int, device: torch.device, flat: bool = False
    ) -> tuple[Graph, bool]:
        """The graph, and whether it is over the nodes of all entries of the batch, one after the other.

        instead: a "topology" or "cross" that replaces what the mask says, except for padding and packed sequences.
        keys: number of keys that the layer has; fewer than the mask has if its cache is shorter.
        flat: whether it is over all nodes even if all entries have the same graph.
        """
        key = instead, batch, keys, device, flat
        if key not in self._graphs:
            rules = self.rules if instead is None else [_replaced(rule, instead) for rule in self.rules]
            if self.batch == 1:
                rules = rules * batch
            if len(rules) != batch or keys > self.sizes.keys:
                raise ValueError(
                    f"the mask is of the shape {list(self.shape)}, and the layer has {batch} x {keys} keys"
                )
            same = not flat and rules[1:] == rules[:-1]
            graph = _graph(tuple(rules[:1] if same else rules), self.sizes._replace(keys=keys))
            self._graphs[key] = graph.to(device), not same
        return self._graphs[key]

    def within(self, cu_seqlens: Tensor) -> Mask:
        """The mask within the packed sequences that begin at these cumulative lengths, for a batch of one."""
        lengths = cu_seqlens.diff().cpu().numpy()
        labels = np.repeat(np.arange(len(lengths)), lengths)
        if self.batch != 1 or len(labels) != self.sizes.keys or self.sizes.queries != self.sizes.keys:
            raise ValueError(
                f"cu_seq_lens adds up to {len(labels)} tokens, and the mask is of the shape {list(self.shape)}: packed "
                "sequences take a batch of one, without a cache"
            )
        packed = Mask(1, self.sizes, device=self.device)
        positions = np.arange(len(labels)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        packed.rules = [_within(rule, positions.astype(np.int64)) for rule in self.rules]
        return packed


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **options: Any
) -> Mask | Tensor:
    """What transformers calls to create a mask; see `transformers.AttentionMaskInterface`.

    Returns a tensor of bools if the model demands one, to compute with: it allows no skip of a mask that needs none.
    """
    build = _traced if torch.compiler.is_compiling() else _mask
    return build(batch_size, q_length, kv_length, q_offset, kv_offset, **options)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    mask_function: Callable[..., Any] = compat.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = None,
    **_: Any,
) -> Mask | Tensor:
    if isinstance(attention_mask, Mask):  # created before, by `generate`
        return attention_mask
    sizes = Sizes(int(q_length), int(kv_length), int(q_offset), int(kv_offset))
    padding = _padding(attention_mask, sizes)
    skips = allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap or sizes.queries == 1
    if not skips and not _is_combined(mask_function):
        dense = compat.sdpa_mask(
            batch_size, *sizes, mask_function, attention_mask, allow_is_causal_skip=False, device=device or "cpu"
        )
        assert dense is not None
        return dense
    return Mask(batch_size, sizes, mask_function, padding, use_vmap, device)


def _padding(attention_mask: Tensor | None, sizes: Sizes) -> Tensor | None:
    """The mask that a model is called with as bools [B, keys or more], False at padding."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [B, keys], or [B, 1, queries, keys] for pairs; got {list(attention_mask.shape)}: "
            "for pairs, write attention_mask[:, None].bool()"
        )
    padding = compat.prepare_padding_mask(attention_mask, sizes.keys, sizes.first_key)
    return None if padding is None else padding.to(torch.bool)


_uncompiled = torch.compiler.disable(_mask, reason="numbers decide this mask; pass an attention_mask if there is none")


def _traced(batch: int, *sizes: Any, **options: Any) -> Mask | Tensor:
    """The mask while a program is traced: its sizes may be symbols, and the numbers of its padding are unknown. A
    program breaks where numbers decide more than the padding."""
    attention_mask = options.get("attention_mask")
    if isinstance(attention_mask, Mask):
        return attention_mask
    rule = None if _has_tensors(**options) else _static_rule(options["mask_function"])
    if rule is not None:
        placed = Sizes(*sizes)
        return Mask(batch, placed, rule, _padding(attention_mask, placed))
    if torch.compiler.is_exporting():
        raise ValueError(
            "torch.export cannot save a mask that numbers decide (position_ids, blocks of tokens, chunks); if the "
            "call has no attention_mask, pass one, so that transformers does not search position_ids for packed "
            "sequences; else export with attn_implementation='sdpa'"
        )
    return _uncompiled(batch, *sizes, **options)


def _has_tensors(
    config: Any = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_: Any,
) -> bool:
    """Whether the mask function may contain tensors: packed sequences, blocks and a model's own functions, for which
    transformers skips no mask; and chunks, which begin behind the padding. A traced program cannot look inside."""
    is_chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    return is_chunked or not (allow_is_causal_skip or allow_is_bidirectional_skip)


@torch.compiler.assume_constant_result
def _static_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule of a mask function that contains no tensors, if the function agrees with it, or None."""
    rule = static_rule(function)
    return rule if rule is not None and _agrees(Mask(1, Sizes(_SAMPLED, _SAMPLED), function), [rule]) else None


def static_rule(function: Callable[..., Any]) -> Rule | None:
    """The rule of a mask function that contains no tensors (causal, bidirectional, windows, their combinations), or
    None."""
    if function is compat.causal_mask_function:
        return "band", None, 0
    if function is compat.bidirectional_mask_function:
        return "band", None, None
    maker, free = _maker(function), _closure(function)
    match maker:
        case "and_masks" | "or_masks":
            parts = tuple(map(static_rule, free["mask_functions"]))
            return None if None in parts else ("&" if maker == "and_masks" else "|", *parts)
        case "sliding_window_overlay":
            return "band", int(free["sliding_window"]) - 1, None
        case "sliding_window_bidirectional_overlay":
            return "band", int(free["sliding_window"]), int(free["sliding_window"])
    return None


def from_dense(allowed: Tensor) -> Mask:
    """A mask from bools [B, 1, queries, keys]."""
    result = Mask(allowed.shape[0], Sizes(*allowed.shape[-2:]))
    result.rules = [_evaluated(entry[0]) for entry in allowed.cpu()]
    return result


def _is_combined(function: Any) -> bool:
    """Whether the function was combined with packed sequences or blocks, for which transformers skips no mask."""
    free = _closure(function)
    if "packed_sequence_mask" in free or "block_sequence_ids" in free:
        return True
    return any(map(_is_combined, free.get("mask_functions", ())))


# ---------------------------------------------------------------------------------------------------- reading closures


_AGREES: dict[str, bool] = {}
"""Whether mask functions of a form compute what their names and closures say. Each form is tried once a process."""


def _read(mask: Mask) -> list[Rule]:
    """The rule of each entry of the batch: read in the closures if the function agrees, evaluated if not."""
    reader = _Reader(mask)
    rules = [reader.read(mask.function, b) for b in range(mask.batch)]
    if isinstance(mask.function, tuple) or _agrees(mask, rules):
        return rules
    return reader.evaluate(mask.function)


def _agrees(mask: Mask, rules: list[Rule]) -> bool:
    """Whether the mask's function allows, in two rows drawn at random, what its rules allow."""
    form, queries = _form(mask.function), mask.sizes.queries
    if form in _AGREES or queries == 1:
        return _AGREES.get(form, True)
    runs = [runs_of(rule, mask.sizes) for rule in rules]
    agree = True
    for row in random.Random(form).sample(range(queries), min(queries, 2)):
        allowed = _evaluated_rows(mask, mask.function, row, 1)
        if type(allowed) is not Tensor:  # a program is traced, and tensors have no numbers
            return True
        agree &= all(_same(_runs(allowed[b, 0]), entry.take(np.array([row]))) for b, entry in enumerate(runs))
    _AGREES[form] = agree
    return agree


def _form(function: Any) -> str:
    """A mask function without its numbers: "and_masks.<locals>.and_mask(sliding_window_overlay...)"."""
    free = _closure(function)
    inner = [*free.get("mask_functions", ()), *filter(callable, [free.get("mask_function")])]
    return f"{getattr(function, '__qualname__', '')}({', '.join(map(_form, inner))})"


def _same(one: Runs, other: Runs) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("ptr", "start", "stop"))


def _evaluated_rows(mask: Mask, function: Any, start: int, count: int) -> Tensor:
    """What a mask function allows in rows of the mask, bool [B, 1, count, keys]."""
    _, keys, first_query, first_key = mask.sizes
    allowed = compat.sdpa_mask(
        mask.batch,
        count,
        keys,
        first_query + start,
        first_key,
        function,
        allow_is_causal_skip=False,
        use_vmap=mask.use_vmap,
        device=mask.device or "cpu",
    )
    assert allowed is not None  # None would be a mask that transformers skips
    return allowed.cpu()


class _Reader:
    """Reads the mask functions of a mask. Unknown functions are evaluated once for the whole batch."""

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.evaluated: dict[Any, list[Rule]] = {}

    def read(self, function: Any, b: int) -> Rule:
        if isinstance(function, tuple):  # read while a program was traced
            return function
        if (rule := static_rule(function)) is not None:
            return rule
        free = _closure(function)
        match _maker(function):
            case "and_masks":
                parts = tuple(self.read(f, b) for f in free["mask_functions"])
                return _joined_packing(parts)
            case "or_masks":
                return ("|", *(self.read(f, b) for f in free["mask_functions"]))
            case "chunked_overlay":
                return "chunks", int(free["chunk_size"]), int(free["left_padding"][b])
            case "blockwise_overlay":
                return "labels", _bytes(free["block_sequence_ids"][b])
            case "packed_sequence_mask_function":
                return "sequences", _bytes(free["packed_sequence_mask"][b])
            case "remap_positions_for_packed_sequence":
                return "packed", _bytes(free["position_ids"][b]), self.read(free["mask_function"], b)
        return self.evaluate(function)[b]

    def evaluate(self, function: Callable[..., Any]) -> list[Rule]:
        if function not in self.evaluated:
            batch, queries = self.mask.batch, self.mask.sizes.queries
            step = max(1, _BLOCK // max(self.mask.sizes.keys * batch, 1))
            parts: list[list[Runs]] = [[] for _ in range(batch)]
            for start in range(0, queries, step):
                allowed = _evaluated_rows(self.mask, function, start, min(step, queries - start))
                for b in range(batch):
                    parts[b].append(_runs(allowed[b, 0]))
            self.evaluated[function] = [_stored(_below(entry)) for entry in parts]
        return self.evaluated[function]


def _maker(function: Any) -> str:
    """The function of transformers that made a mask function, or ""."""
    return function.__qualname__.split(".")[0] if getattr(function, "__module__", "") == compat.MASKS else ""


def _closure(function: Any) -> dict[str, Any]:
    """What a function has from the one that made it."""
    if not getattr(function, "__closure__", None):
        return {}
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)}


def _joined_packing(parts: tuple[Rule, ...]) -> Rule:
    """`and_masks(packed_sequence_mask_function, remap_positions_for_packed_sequence)` is one rule."""
    if len(parts) == 2 and parts[0][0] == "sequences" and parts[1][0] == "packed":
        return parts[1]
    return ("&", *(("labels", part[1]) if part[0] == "sequences" else part for part in parts))


def _bytes(x: Tensor) -> bytes:
    return x.cpu().to(torch.int64).numpy().tobytes()


def _runs(allowed: Tensor) -> Runs:
    """The runs of bools [rows, keys]."""
    edge = torch.nn.functional.pad(allowed.to(torch.int8), (1, 1)).diff()
    row, start = (edge == 1).nonzero(as_tuple=True)
    stop = (edge == -1).nonzero(as_tuple=True)[1]
    return Runs.of(len(allowed), allowed.shape[1], [(row.numpy(), start.numpy(), stop.numpy())])


def _below(parts: list[Runs]) -> Runs:
    """The rows of all parts, one part below the other, over the same columns."""
    intervals, first = [], 0
    for part in parts:
        intervals.append((part.row + first, part.start, part.stop))
        first += part.num_dst
    return Runs.of(first, parts[0].num_src if parts else 0, intervals)


def _stored(runs: Runs) -> Rule:
    return "runs", *(x.astype(np.int64).tobytes() for x in (runs.ptr, runs.start, runs.stop))


def _evaluated(allowed: Tensor) -> Rule:
    return _stored(_runs(allowed.to(torch.bool)))


# ---------------------------------------------------------------------------------------------------- changing rules


def _replaced(rule: Rule, instead: Rule) -> Rule:
    """The rule with a topology instead of bands and chunks. Padding and packed sequences stay."""
    if instead[0] == "topology":  # no edges from later tokens where the model's own mask has none
        instead = (*instead[:2], instead[2] and _is_causal(rule))
    match rule:
        case ("band" | "chunks", *_):
            return instead
        case ("&", *parts):
            return ("&", *dict.fromkeys(_replaced(part, instead) for part in parts))  # the topology once
        case ("packed", positions, inner):
            return "packed", positions, _replaced(inner, instead)
        case ("sources", _):
            return rule
    raise ValueError(
        "this model's mask has a part of its own (blocks of image tokens, a mask function or a 4-D mask that was "
        "passed), which a topology cannot replace; call mpnn.hf.use(model) without graph"
    )


def _is_causal(rule: Rule) -> bool:
    match rule:
        case ("band", _, right):
            return right == 0
        case ("&", *parts):
            return any(map(_is_causal, parts))
        case ("packed", _, inner):
            return _is_causal(inner)
    return False


def _within(rule: Rule, positions: Ints) -> Rule:
    """The rule within packed sequences, unless it is so already."""
    return rule if rule[0] == "packed" else ("packed", positions.tobytes(), rule)


# ---------------------------------------------------------------------------------------------------- runs of rules


@cached_graph
def _graph(rules: tuple[Rule, ...], sizes: Sizes) -> Graph:
    """The graph of one rule, or of several over separate nodes."""
    parts = [runs_of(rule, sizes) for rule in rules]
    return Graph.from_runs(parts[0] if len(parts) == 1 else Runs.stack(parts))


def runs_of(rule: Rule, sizes: Sizes) -> Runs:
    """The runs of a rule, [queries, keys]."""
    first = _first_token(rule)
    return _build(rule, sizes, first)


def _first_token(rule: Rule) -> int:
    """The number of padding tokens on the left."""
    if rule[0] == "&":
        return max(_first_token(part) for part in rule[1:])
    if rule[0] != "sources":
        return 0
    allowed = np.frombuffer(rule[1], np.bool_)
    return int(allowed.argmax()) if allowed.any() else 0


def _build(rule: Rule, sizes: Sizes, first: int) -> Runs:
    queries, keys, first_query, first_key = sizes
    rows = np.arange(queries)
    i = rows + first_query

    def intervals(start: Any, stop: Any) -> Runs:
        return Runs.of(queries, keys, [(rows, start - first_key, stop - first_key)])

    match rule:
        case ("band", left, right):
            return intervals(
                first_key if left is None else i - left, first_key + keys if right is None else i + right + 1
            )
        case ("chunks", size, padding):
            start = (i - padding) // size * size + padding
            return intervals(start, start + size)
        case ("sources", allowed):
            selected = _runs(torch.from_numpy(np.frombuffer(allowed, np.bool_)[None].copy()))
            return Runs.of(
                queries, keys, [(rows[:, None], selected.start[None] - first_key, selected.stop[None] - first_key)]
            )
        case ("labels", labels):
            return _same_label(np.frombuffer(labels, np.int64), sizes)
        case ("packed", positions, inner):
            return _packed(np.frombuffer(positions, np.int64), inner, sizes)
        case ("runs", *arrays):
            ptr, start, stop = (np.frombuffer(x, np.int64) for x in arrays)
            return _crop(Runs(queries, _columns(stop, keys), ptr, start, stop), Sizes(queries, keys))
        case ("topology", topology, causal):
            return _of_topology(topology, sizes, first, causal)
        case ("cross", topology, row):
            selected = bound(topology, max(row + queries, keys - first)).take(rows + row)
            return Runs.of(queries, keys, [(selected.row, selected.start + first, selected.stop + first)])
        case ("&", *parts):
            built = [_build(part, sizes, first) for part in parts]
            result = built[0]
            for more in built[1:]:
                result = result & more
            return result
        case ("|", *parts):
            built = [_build(part, sizes, first) for part in parts]
            result = built[0]
            for more in built[1:]:
                result = result | more
            return result
    raise AssertionError(rule[0])


def _columns(stop: Ints, keys: int) -> int:
    return max(int(stop.max(initial=0)), keys)


def _crop(runs: Runs, sizes: Sizes) -> Runs:
    """The rows and columns of `sizes`, of runs over the whole sequence."""
    queries, keys, first_query, first_key = sizes
    selected = runs.take(np.arange(first_query, first_query + queries))
    return Runs.of(queries, keys, [(selected.row, selected.start - first_key, selected.stop - first_key)])


def _same_label(labels: Ints, sizes: Sizes) -> Runs:
    length = max(sizes.first_query + sizes.queries, sizes.first_key + sizes.keys)
    labels = np.append(labels, np.full(max(length - len(labels), 0), -1))
    runs = Runs.from_labels(labels)
    labeled = Runs.of(len(labels), len(labels), [(np.flatnonzero(labels >= 0), 0, len(labels))])
    return _crop(runs & labeled, sizes)


def _packed(positions: Ints, inner: Rule, sizes: Sizes) -> Runs:
    """The rule within each packed sequence. Sequences begin where positions do not go up by one."""
    starts = np.append(0, np.flatnonzero(np.diff(positions) != 1) + 1)
    stops = np.append(starts[1:], len(positions))
    parts = []
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        length, base = stop - start, int(positions[start])
        parts.append(_build(inner, Sizes(length, length, base, base), base))
    runs = Runs.stack(parts)
    assert (runs.num_dst, runs.num_src) == sizes[:2]
    return runs


def bound(topology: Topology, tokens: int, causal: bool = False) -> Runs:
    """The runs of a topology over so many tokens.

    Raises:
        ValueError: if its edges depend on the number of tokens, or it has edges from later tokens and must not.
    """
    runs = topology.bind(tokens).runs
    if not _is_stable(topology, min(1 << max(tokens - 1, 1).bit_length(), _DRAWS)):
        raise ValueError(
            f"{topology} has other edges for other lengths, so padding, prefixes and caches would change what a token "
            "attends to; use a topology that does not depend on the length, as window, strided or longformer"
        )
    if causal:
        try:
            check_causal(topology, tokens)
        except ValueError as error:
            raise ValueError(f"{error}, or, if that is intended, mpnn.hf.use(model, graph, causal=False)") from None
    return runs


@lru_cache(maxsize=256)
def _is_stable(topology: Topology, tokens: int) -> bool:
    """Whether a topology over twice as many tokens has the same edges among the first ones."""
    try:
        short, long = topology.bind(tokens).runs, topology.bind(2 * tokens).runs
    except ValueError:  # it takes one length only
        return True
    rows = long.take(np.arange(tokens))
    return _same(short, Runs.of(tokens, tokens, [(rows.row, rows.start, rows.stop)]))


def _of_topology(topology: Topology, sizes: Sizes, first: int, causal: bool) -> Runs:
    """The runs of a topology over the tokens from `first` on."""
    queries, keys, first_query, first_key = sizes
    stop = max(first_query + queries, first_key + keys)
    runs = bound(topology, max(stop - first, 0), causal)
    rows = np.arange(first_query - first, first_query - first + queries)
    if first_query > 0:
        _check_cached(topology, runs, rows, first_key - first)
    valid = np.flatnonzero(rows >= 0)
    selected = runs.take(rows[valid])
    row = valid[selected.row]
    return Runs.of(queries, keys, [(row, selected.start + first - first_key, selected.stop + first - first_key)])


def _check_cached(topology: Topology, runs: Runs, rows: Ints, first_key: int) -> None:
    """Raises ValueError if tokens in a cache would attend to new ones, or new ones to tokens no longer in the cache."""
    begin = max(int(rows[0]), 0)
    earlier, now = slice(0, runs.ptr[begin]), slice(runs.ptr[begin], None)
    if (runs.stop[earlier] > begin).any():
        raise ValueError(
            f"in {topology}, earlier tokens attend to later ones, so their keys and values in the cache are not those "
            "of the longer text; use a causal topology, such as causal() & ..., or call with use_cache=False"
        )
    if first_key > 0 and (runs.start[now] < first_key).any():
        raise ValueError(
            f"{topology} attends to tokens that this layer's sliding cache no longer has; use a topology within the "
            "layer's window, or config.layer_types without sliding layers"
        )
