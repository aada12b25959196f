"""The masks of transformers as graphs, in O(runs).

A model of transformers asks for a mask (`mask`) and gives it to its attention layers, each of which asks for a graph.
`closures.py` reads the description of the mask as a topology for each entry of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from mpnn import Graph, Topology
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.runs import Runs
from mpnn.graph.sharding import active
from mpnn.integrations.hf import compat, packing, ranks
from mpnn.integrations.hf.builders import crossed, sources, window_of
from mpnn.integrations.hf.closures import Band, Described, Rule, Sizes, as_band, band_of, banded, is_combined, special
from mpnn.integrations.hf.packing import Packing, once
from mpnn.integrations.hf.trees import TreeMask
from mpnn.kernels.parts import Parts

_MANY = 1 << 24  # pairs of a text, above which a mask of them is not written out in a program
_SHORT = 1024  # keys of a text whose padding a GPU computes in less time than Python makes a graph

_COMPUTES = (
    "this model computes with its mask, and with attn_implementation='mpnn' the mask is a graph, not a tensor; keep "
    "attn_implementation='sdpa' or 'eager' for it"
)


class Instead(NamedTuple):
    """A user's topology instead of what a mask says, except for padding and packed sequences.

    causal: it must have no edges from later tokens where the mask has none. row: for cross-attention, the decoder's
    position of the first query.
    """

    topology: Topology
    causal: bool = True
    row: int | None = None


@dataclass(eq=False)
class Pairs:
    """A mask that torch's kernel takes as it is, so that no graph is made.

    start, stop: the keys that some query attends to; a stop of None is their number. is_causal: each query attends to
    the keys up to its own; otherwise to all, or to those that `allowed`, bool [B or 1, 1, queries or 1, keys], says.
    empty: rows without keys, bool [B or 1, 1, queries or 1, 1], if only a device has the numbers that decide it;
    `allowed` is true there.
    """

    start: int = 0
    stop: int | None = None
    is_causal: bool = False
    allowed: Tensor | None = None
    empty: Tensor | None = None
    _added: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def cut(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, keys, D] of the tokens that some query attends to."""
        if self.stop is None or (self.start, self.stop) == (0, key.shape[2]):
            return key, value
        return key[:, :, self.start : self.stop], value[:, :, self.start : self.stop]

    def added(self, dtype: torch.dtype) -> Tensor:
        """Returns the bias of the logits, 0 or -inf, of the shape of `allowed`. All layers of a forward pass share
        it."""
        return once(self._added, dtype, lambda: self._bias(dtype))

    def _bias(self, dtype: torch.dtype) -> Tensor:
        allowed: Any = self.allowed
        keys = allowed.shape[-1]
        # Torch's kernels on CUDA copy a mask whose rows are not aligned.
        room = keys if allowed.is_cpu else -(-keys // 16) * 16
        zeros: Tensor = allowed.new_zeros((*allowed.shape[:-1], room), dtype=dtype)
        return zeros[..., :keys].masked_fill_(~allowed, -torch.inf)


@dataclass(eq=False, repr=False)
class Mask:
    """A mask of transformers, which is converted to a graph when an attention layer reads it.

    place: the position of the first query, if a static cache holds it on a GPU; `placed` reads it. texts: the packed
    texts to which the mask is restricted. known: the rules of a mask without a function, one for each entry.
    """

    batch: int
    sizes: Sizes
    function: Callable[..., Any] | Band | None = compat.bidirectional_mask_function
    padding: Tensor | None = None
    use_vmap: bool = False
    device: torch.device | None = None
    place: Tensor | None = None
    texts: Packing | None = None
    known: list[Rule] | None = None
    _pairs: dict[int, Pairs | None] = field(default_factory=dict, init=False)
    _results: dict[Any, Any] = field(default_factory=dict, init=False)
    ndim: ClassVar[int] = 4
    dtype: ClassVar[torch.dtype] = torch.bool

    @classmethod
    def of_rules(cls, rules: list[Rule], sizes: Sizes, device: torch.device | None = None) -> "Mask":
        """Returns a mask whose rules are known, one for each entry of the batch."""
        return cls(len(rules), sizes, None, device=device, known=rules)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, 1, self.sizes.queries, self.sizes.keys

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`torch.where(mask, ...)` selects by the pairs, bool [B, 1, queries, keys] (Doge, one token at a time), and
        `torch.cat(masks, -1)` puts the keys of several masks side by side (T5Gemma 2)."""
        if function is torch.cat and all(isinstance(mask, Mask) for mask in args[0]):
            return from_dense(torch.cat([mask.dense() for mask in args[0]], *args[1:], **kwargs or {}))
        if function is not torch.where or not isinstance(args[0], Mask):
            raise TypeError(f"torch.{function.__name__}: {_COMPUTES}")
        tensors = [x for x in args[1:] if isinstance(x, Tensor)]
        return torch.where(args[0].dense().to(tensors[0].device), *args[1:], **kwargs or {})

    def dense(self) -> Tensor:
        """Returns the pairs, bool [B, 1, queries, keys]."""
        graph, _ = self.graph(None, self.batch, self.sizes.keys, torch.device("cpu"), flat=True)
        src, dst = graph.edge_index
        pairs = torch.zeros(self.batch, 1, self.sizes.queries, self.sizes.keys, dtype=torch.bool)
        pairs.view(-1)[dst * self.sizes.keys + src % self.sizes.keys] = True
        return pairs

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(_COMPUTES)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __rand__ = __or__ = __ror__ = __invert__ = _refuse

    def __and__(self, other: Any) -> Any:
        """The pairs of one new token that an indexer leaves (Qwen4-Exp)."""
        return self[:] & other if self.sizes.queries == 1 else self._refuse()

    def contiguous(self) -> "Mask":
        return self

    def to(self, dtype: torch.dtype) -> "Mask":
        """Returns the mask itself, which already is boolean (MPT calls this)."""
        return self if dtype == torch.bool else self.__getattr__("to")

    def __repr__(self) -> str:
        return f"Mask{self.shape}"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_COMPUTES}")

    def __getitem__(self, index: Any) -> Any:
        """The mask of the last queries (Gemma 4), or the pairs of one new token, which indexers of DeepSeek V3.2 and
        others read as those of a prompt."""
        if isinstance(index, tuple) and len(index) == 4 and index[:2] + index[3:] == (slice(None),) * 3:
            return self._last(index[2])
        return self.dense()[index].to(self.device or "cpu") if self.sizes.queries == 1 else self.__getattr__("[...]")

    def _last(self, rows: Any) -> "Mask":
        """The mask of the queries of `slice(-count, None)`."""
        if not isinstance(rows, slice) or rows.stop is not None or rows.step is not None or (rows.start or 0) >= 0:
            return self.__getattr__("[...]")
        count = min(-rows.start, self.sizes.queries)
        sizes = self.sizes._replace(queries=count, first_query=self.sizes.first_query + self.sizes.queries - count)
        return replace(self, sizes=sizes)

    @cached_property
    def rules(self) -> list[Rule]:
        """The rule of each entry of the batch, without padding."""
        if isinstance(self.function, tuple):
            return self._divided([banded(*self.function)] * self.batch)
        return self._divided(self._described.rules() if self.known is None else self.known)

    @property
    def _described(self) -> Described:
        return Described(cast(Any, self.function), self.batch, self.placed, self.use_vmap, self.device)

    @cached_property
    def placed(self) -> Sizes:
        """The sizes with the position of the first query, which a static cache has on its device."""
        if self.place is None:
            return self.sizes
        _check_not_capturing("the position of a token in a static cache")
        return self.sizes._replace(first_query=int(self.place))

    @cached_property
    def _band(self) -> Band | None:
        """The band that this mask is but for its padding; None if it is another mask."""
        ends = self.function if isinstance(self.function, tuple) else band_of(self.function)
        if ends is None or isinstance(self.function, tuple) or self.sizes.queries == 1:
            return ends
        return ends if self._described.agrees([banded(*ends)] * self.batch) else None

    def pairs(self, keys: int) -> Pairs | None:
        """Returns the mask in the form of torch's kernel, for a layer with `keys` keys; None if attention needs
        a graph."""
        if keys not in self._pairs:
            self._pairs[keys] = None if self.texts is not None else self._as_pairs(keys)
        return self._pairs[keys]

    def _as_pairs(self, keys: int) -> Pairs | None:
        if self._is_on_device():
            return self._pairs_on_device() if keys == self.sizes.keys else None
        if self._band is None or keys > self.sizes.keys:
            return None
        if self.sizes.queries == 1:
            return self._of_one_query(keys)
        if self.padding is not None and self._padding is not None:
            return self._of_short_texts(keys)
        return _of_all_tokens(self._band, self.sizes._replace(keys=keys))

    def _of_short_texts(self, keys: int) -> Pairs | None:
        """A complete mask with padding, on a GPU: over short texts, to compute padding takes less time than a graph of
        the texts takes to make."""
        assert self.padding is not None
        if self._band != (None, None) or keys > _SHORT or not self.padding.is_cuda:
            return None
        allowed = self.padding[:, self.sizes.first_key : self.sizes.first_key + keys][:, None, None]
        empty = ~allowed.any(-1, keepdim=True)
        return Pairs(allowed=allowed | empty, empty=empty)

    def _of_one_query(self, keys: int) -> Pairs | None:
        assert self._band is not None
        left, right = self._band
        _, _, query, first_key = self.placed
        row = query - first_key
        start = 0 if left is None else max(row - left, 0)
        stop = keys if right is None else min(row + right + 1, keys)
        if start >= stop:
            return None
        allowed = None if self.padding is None else self.padding[:, first_key + start : first_key + stop]
        if allowed is None or bool(allowed.all()):
            return Pairs(start, stop)
        return Pairs(start, stop, allowed=allowed[:, None, None]) if bool(allowed.any(1).all()) else None

    def _is_on_device(self) -> bool:
        """Whether numbers that decide the mask are on a GPU, and must not be read."""
        return self.place is not None or (self.padding is not None and is_capturing())

    def pairs_in_program(self, keys: int, on_gpu: bool) -> Pairs | None:
        """Returns `pairs` for a traced program, in which no number of a mask can be read. `on_gpu`: the features
        are in 16 bits on a GPU, where torch's kernel is the fastest over all tokens, and CUDA graphs capture it."""
        is_static = self.place is not None
        if not isinstance(self.function, tuple) or self.texts is not None or keys != self.sizes.keys:
            return None
        if not is_static and on_gpu and self.padding is None:
            return _of_all_tokens(self.function, self.sizes)
        if not is_static and (not on_gpu or self.sizes.queries * keys > _MANY):
            return None
        return once(self._pairs, keys, self._pairs_on_device)

    def _pairs_on_device(self) -> Pairs | None:
        """All pairs, computed on the device: nothing waits for it."""
        if self.known is not None or self.texts is not None:
            return None
        if isinstance(self.function, tuple):
            allowed = self._allowed_by(self.function)
        else:
            sizes: Any = self.sizes if self.place is None else self.sizes._replace(first_query=cast(Any, self.place))
            allowed = compat.dense_mask(
                self.batch, sizes, self.function, self.padding, use_vmap=self.use_vmap, device=self.device
            )
        empty = ~allowed.any(-1, keepdim=True)
        return Pairs(allowed=allowed | empty, empty=empty)

    def _allowed_by(self, band: Band) -> Tensor:
        """The pairs of a band that are not padding, bool [B or 1, 1, queries, keys]."""
        (left, right), (queries, keys, first_query, first_key) = band, self.sizes
        device = self.device if self.padding is None else self.padding.device
        key = torch.arange(first_key, first_key + keys, device=device)
        query = torch.arange(queries, device=device)[:, None] + (first_query if self.place is None else self.place)
        allowed = torch.ones(queries, keys, dtype=torch.bool, device=device)
        if left is not None:
            allowed = allowed & (key >= query - left)
        if right is not None:
            allowed = allowed & (key <= query + right)
        if self.padding is None:
            return allowed[None, None]
        return allowed & self.padding[:, None, None, first_key : first_key + keys]

    @cached_property
    def _padding(self) -> list[bytes] | None:
        """The keys of each entry of the batch that are not padding, as bytes of bools."""
        keys = slice(self.sizes.first_key, self.sizes.first_key + self.sizes.keys)
        if self.padding is None:
            return None
        _check_not_capturing("a padding mask")
        padding = self.padding.cpu().numpy()
        if padding[:, keys].all():
            return None
        return [entry.tobytes() for entry in padding]

    def _topology(self, b: int, instead: Instead | None, keys: int) -> Topology:
        """Returns the topology of an entry of the batch."""
        allowed = None if self._padding is None else self._padding[b]
        first = 0 if allowed is None else max(allowed.find(1), 0)
        topology = _replaced(self.rules[b], instead, first, self.sizes.first_key, keys)
        return topology if allowed is None else topology & sources(allowed)

    def graph(
        self, instead: Instead | None, batch: int, keys: int, device: torch.device, flat: bool = False
    ) -> tuple[Graph, bool]:
        """Returns the graph, and whether it is over the nodes of all entries of the batch, one after the other.

        keys: number of keys of the layer; fewer than those of the mask if its cache is shorter.
        flat: whether it is over all nodes even if all entries have the same graph.
        """
        key = instead, batch, keys, device, flat
        if key not in self._results:
            self._results[key] = self._graph(*key)
        known: tuple[Graph, bool] = self._results[key]
        return known

    def _graph(
        self, instead: Instead | None, batch: int, keys: int, device: torch.device, flat: bool
    ) -> tuple[Graph, bool]:
        band = self._band if self.texts is None and self._padding is None else None
        if band is not None and not flat and self.batch in (1, batch) and keys <= self.sizes.keys:
            return _of_band(band, self.placed._replace(keys=keys), instead, device), False
        topologies = [self._topology(b, instead, keys) for b in range(self.batch)]
        topologies = topologies * batch if self.batch == 1 else topologies
        if len(topologies) != batch or keys > self.sizes.keys:
            raise ValueError(
                f"the mask is of the shape {list(self.shape)}, and the layer has {batch} x {keys} keys: it attends to "
                "tokens that are not in its mask; use attn_implementation='eager'"
            )
        same = not flat and topologies[1:] == topologies[:-1]
        graph = _graph(tuple(topologies[:1] if same else topologies), self.placed._replace(keys=keys))
        return graph.to(device), not same

    def within(self, texts: Packing) -> "Mask":
        """Returns the mask within each packed text. All layers of a forward pass get the same one, and so the same
        graph."""
        if self.texts is not None:
            return self
        rows, tokens = texts.shape
        if self.batch not in (1, rows) or self.sizes != Sizes(tokens, tokens):
            raise ValueError(
                f"there are {rows} rows of {tokens} packed tokens, and the mask is of the shape {list(self.shape)}: "
                "packed texts have no cache; call the model with use_cache=False"
            )
        return once(self._results, texts.key, lambda: replace(self, batch=rows, texts=texts))

    def _divided(self, rules: list[Rule]) -> list[Rule]:
        """Returns the rules within each packed text."""
        if self.texts is None:
            return rules
        rows = rules * (self.batch // len(rules))
        return [rule.within(row.tobytes()) for rule, row in zip(rows, self.texts.positions, strict=True)]

    def parts(self, rows: int, tokens: int) -> Parts | None:
        """Returns the rows of a batch as parts, each of which attends to its keys that are not padding; None for
        another mask, for padding between keys, and for a row of padding only."""
        if self.sizes != Sizes(tokens, tokens) or self.batch not in (1, rows) or self.texts is not None:
            return None
        return once(self._results, ("parts", rows), lambda: self._as_parts(rows))

    def _as_parts(self, rows: int) -> Parts | None:
        pairs = None if self._is_on_device() or self._band is None else _of_all_tokens(self._band, self.sizes)
        if pairs is None:
            return None
        lengths = [self.sizes.keys] * rows
        if self._padding is None:
            return Parts(lengths, is_causal=pairs.is_causal)
        entries = self._padding * (rows // self.batch)
        first = [entry.find(1) for entry in entries]
        keys = [entry.rfind(1) + 1 - start for entry, start in zip(entries, first, strict=True)]
        if any(start < 0 or entry.count(1) != n for entry, start, n in zip(entries, first, keys, strict=True)):
            return None
        return Parts(lengths, pairs.is_causal, keys=(first, keys))

    def is_causal_or_complete(self) -> bool | None:
        """Returns True for a causal mask over a whole text, False for a complete one, None for another or with
        padding."""
        return once(self._results, "is causal or complete", self._as_causal_or_complete)

    def _as_causal_or_complete(self) -> bool | None:
        sizes = self.sizes
        is_whole = self.batch == 1 and self.padding is None and sizes == Sizes(sizes.queries, sizes.queries)
        parts = self._as_parts(1) if is_whole else None
        return None if parts is None else parts.is_causal


def _replaced(rule: Rule, instead: Instead | None, first: int, first_key: int, keys: int) -> Topology:
    """The topology of a rule, or the user's instead. first: the first token after the padding."""
    if instead is None:
        return rule.topology
    if instead.row is not None:
        return crossed(instead.topology, first, keys, instead.row)
    return rule.replaced(instead.topology, first, first_key, instead.causal)


@cached_graph
def _of_band(band: Band, sizes: Sizes, instead: Instead | None, device: torch.device) -> Graph:
    """The graph of a mask without padding, which calls of the same size share."""
    topology = _replaced(banded(*band), instead, 0, sizes.first_key, sizes.keys)
    return Graph.from_runs(window_of(topology, *sizes)).to(device)


def _of_all_tokens(band: Band, sizes: Sizes) -> Pairs | None:
    """A mask without padding over several queries: complete or causal."""
    left, right = band
    queries, keys, first_query, first_key = sizes
    reaches_left = left is None or left >= first_query + queries - 1 - first_key
    reaches_right = right is None or right >= first_key + keys - 1 - first_query
    if reaches_left and reaches_right:
        return Pairs()
    if reaches_left and right == 0 and first_query == first_key and keys >= queries:
        return Pairs(0, queries, is_causal=True)
    return None


def is_capturing() -> bool:
    """Whether a CUDA graph is captured, so that nothing may wait for the device."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _check_not_capturing(what: str) -> None:
    """Raises ValueError while a CUDA graph is captured."""
    if is_capturing():
        raise ValueError(
            f"the graph of this layer depends on numbers on the GPU, {what}, which cannot be read while a CUDA graph "
            "is captured: pass no attention_mask if there is no padding, and use neither a topology "
            "(mpnn.hf.use(model) without graph) nor unpad=True in captured calls; or do not capture the model"
        )


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **options: Any
) -> Mask | Tensor:
    """Creates a mask for transformers; see `transformers.AttentionMaskInterface`.

    Returns a tensor of bools if the model demands one, to compute with: it allows no skip of a mask that needs none.
    """
    if not torch.compiler.is_compiling():
        return _mask(batch_size, q_length, kv_length, q_offset, kv_offset, **options)
    build = _traced if active() is None and packing.current() is None else _uncompiled
    return build(batch_size, q_length, kv_length, q_offset, kv_offset, **options)


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any,
    kv_offset: Any,
    mask_function: Callable[..., Any] = compat.causal_mask_function,
    attention_mask: Tensor | Mask | TreeMask | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: Any = None,
    config: compat.PretrainedConfig | None = None,
    **_: Any,
) -> Mask | Tensor:
    if isinstance(attention_mask, Mask):  # created before, by `generate`
        return attention_mask
    if (whole := ranks.current()) is not None:
        kv_length = whole.tokens
        q_length = whole.new
        attention_mask = whole.padding
        q_offset = kv_length - q_length
        kv_offset = 0
    place = q_offset if isinstance(q_offset, Tensor) and _is_unread(q_offset) else None
    sizes = Sizes(int(q_length), int(kv_length), int(q_offset) if place is None else 0, int(kv_offset))
    if isinstance(attention_mask, TreeMask):
        sizes = sizes._replace(first_query=int(q_offset))
        rule = attention_mask.rule(Described(mask_function, batch_size, sizes, use_vmap, device), config)
        return Mask.of_rules([rule] * batch_size, sizes, device)
    padding = _padding(attention_mask, sizes)
    skips = allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap or sizes.queries == 1
    if not skips and place is None and not is_combined(mask_function):
        return compat.dense_mask(batch_size, sizes, mask_function, attention_mask, device=device)
    result = Mask(batch_size, sizes, mask_function, padding, use_vmap, device, place)
    texts = packing.current()
    return result if texts is None else result.within(texts)


def _is_unread(number: Tensor) -> bool:
    """Whether to read a number would wait for a GPU."""
    return number.is_cuda


def _padding(attention_mask: Tensor | None, sizes: Sizes) -> Tensor | None:
    """The mask that a model is called with as bools [B, keys or more], False at padding."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask must be [B, keys], or [B, 1, queries, keys] for pairs; got {list(attention_mask.shape)}: "
            "for pairs, write attention_mask[:, None].bool()"
        )
    padding = compat.prepare_padding_mask(attention_mask, sizes.keys, sizes.first_key)
    return padding if padding is None or padding.dtype == torch.bool else padding.to(torch.bool)


_uncompiled = torch.compiler.disable(_mask, reason="numbers decide this mask; pass an attention_mask if there is none")


def _traced(batch: int, *sizes: Any, **options: Any) -> Mask | Tensor:
    """The mask while a program is traced: its sizes may be symbols, and the numbers of its padding are unknown. A
    program breaks where numbers decide more than the padding."""
    attention_mask = options.get("attention_mask")
    if isinstance(attention_mask, Mask):
        return attention_mask
    queries, keys, first_query, first_key = sizes
    place = first_query if isinstance(first_query, Tensor) else None
    is_static = place is not None and not options.get("use_vmap")
    decided = isinstance(attention_mask, TreeMask) or _has_tensors(**options, is_static=is_static)
    ends = None if decided else as_band(options["mask_function"])
    if ends is not None:
        placed = Sizes(queries, keys, 0 if place is not None else first_query, first_key)
        padding = _padding(attention_mask, placed)
        return Mask(batch, placed, ends, padding, device=options.get("device"), place=place)
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
    is_static: bool = False,
    **_: Any,
) -> bool:
    """Whether the mask function may contain tensors: packed sequences, blocks and a model's own functions, for which
    transformers skips no mask; and chunks, which begin after the padding. A traced program cannot look inside. For a
    static cache, transformers skips no mask either."""
    is_chunked = local_size is not None and getattr(config, "attention_chunk_size", None) is not None
    return is_chunked or not (allow_is_causal_skip or allow_is_bidirectional_skip or is_static)


def from_dense(allowed: Tensor, first_query: int = 0) -> Mask:
    """A mask from bools [B, 1, queries, keys]."""
    rules = [special(Runs.from_dense(entry[0].bool().numpy()), first_query) for entry in allowed.cpu()]
    return Mask.of_rules(rules, Sizes(allowed.shape[-2], allowed.shape[-1], first_query))


@cached_graph
def _graph(topologies: tuple[Topology, ...], sizes: Sizes) -> Graph:
    """The graph of one sequence, or of several over separate nodes."""
    parts = [window_of(topology, *sizes) for topology in topologies]
    return Graph.from_runs(parts[0] if len(parts) == 1 else Runs.stack(parts))
