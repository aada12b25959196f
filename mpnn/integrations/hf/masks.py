"""The masks of transformers as graphs, in O(runs).

A model of transformers asks for a mask (`mask`) and gives it to its attention layers, each of which asks for a graph.
`closures.py` reads the description of the mask as a topology for each entry of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpnn import Graph, Topology
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.runs import Runs
from mpnn.graph.sharding import active
from mpnn.integrations.hf import compat, ranks
from mpnn.integrations.hf.builders import crossed, sources, window_of
from mpnn.integrations.hf.closures import Band, Described, Rule, Sizes, as_band, banded, is_combined, special
from mpnn.integrations.hf.trees import TreeMask

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


@dataclass(eq=False, repr=False)
class Mask:
    """A mask of transformers that becomes a graph when an attention layer asks for it."""

    batch: int
    sizes: Sizes
    function: Callable[..., Any] | Band = compat.bidirectional_mask_function
    padding: Tensor | None = None
    use_vmap: bool = False
    device: torch.device | None = None
    _graphs: dict[Any, tuple[Graph, bool]] = field(default_factory=dict)

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

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __rand__ = __or__ = __ror__ = __add__

    def __and__(self, other: Any) -> Any:
        """The pairs of one new token that an indexer leaves (Qwen4-Exp)."""
        return self[:] & other if self.sizes.queries == 1 else self + other

    def __invert__(self) -> Any:
        raise TypeError(_COMPUTES)

    def contiguous(self) -> "Mask":
        return self

    def __repr__(self) -> str:
        return f"Mask{self.shape}"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r}: {_COMPUTES}")

    def __getitem__(self, index: Any) -> Any:
        """The pairs of one new token, which indexers of DeepSeek V3.2 and others read as those of a prompt."""
        return self.dense()[index].to(self.device or "cpu") if self.sizes.queries == 1 else self.__getattr__("[...]")

    @cached_property
    def rules(self) -> list[Rule]:
        """The rule of each entry of the batch, without padding."""
        if isinstance(self.function, tuple):
            return [banded(*self.function)] * self.batch
        return Described(self.function, self.batch, self.sizes, self.use_vmap, self.device).rules()

    @cached_property
    def _padding(self) -> list[bytes] | None:
        """The keys of each entry of the batch that are not padding, as bytes of bools."""
        keys = slice(self.sizes.first_key, self.sizes.first_key + self.sizes.keys)
        if self.padding is None or bool(self.padding[:, keys].all()):
            return None
        return [entry.tobytes() for entry in self.padding.cpu().numpy()]

    def _topology(self, b: int, instead: Instead | None, keys: int) -> Topology:
        """What an entry of the batch attends to."""
        rule, allowed = self.rules[b], None if self._padding is None else self._padding[b]
        topology, first = rule.topology, 0 if allowed is None else max(allowed.find(1), 0)
        if instead is not None and instead.row is not None:
            topology = crossed(instead.topology, first, keys, instead.row)
        elif instead is not None:
            topology = rule.replaced(instead.topology, first, self.sizes.first_key, instead.causal)
        return topology if allowed is None else topology & sources(allowed)

    def graph(
        self, instead: Instead | None, batch: int, keys: int, device: torch.device, flat: bool = False
    ) -> tuple[Graph, bool]:
        """The graph, and whether it is over the nodes of all entries of the batch, one after the other.

        keys: number of keys that the layer has; fewer than the mask has if its cache is shorter.
        flat: whether it is over all nodes even if all entries have the same graph.
        """
        key = instead, batch, keys, device, flat
        if key not in self._graphs:
            topologies = [self._topology(b, instead, keys) for b in range(self.batch)]
            if self.batch == 1:
                topologies = topologies * batch
            if len(topologies) != batch or keys > self.sizes.keys:
                raise ValueError(
                    f"the mask is of the shape {list(self.shape)}, and the layer has {batch} x {keys} keys"
                )
            same = not flat and topologies[1:] == topologies[:-1]
            graph = _graph(tuple(topologies[:1] if same else topologies), self.sizes._replace(keys=keys))
            self._graphs[key] = graph.to(device), not same
        return self._graphs[key]

    def within(self, cu_seqlens: Tensor) -> "Mask":
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
        packed.rules = [rule.within(positions.astype(np.int64).tobytes()) for rule in self.rules]
        return packed


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: Any = 0, **options: Any
) -> Mask | Tensor:
    """What transformers calls to create a mask; see `transformers.AttentionMaskInterface`.

    Returns a tensor of bools if the model demands one, to compute with: it allows no skip of a mask that needs none.
    """
    build = _mask if not torch.compiler.is_compiling() else _traced if active() is None else _uncompiled
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
        kv_length, q_length, attention_mask = whole.tokens, whole.new, whole.padding
        q_offset, kv_offset = kv_length - q_length, 0
    sizes = Sizes(int(q_length), int(kv_length), int(q_offset), int(kv_offset))
    if isinstance(attention_mask, TreeMask):
        result = Mask(batch_size, sizes, device=device)
        result.rules = [attention_mask.rule(Described(mask_function, batch_size, sizes, use_vmap, device), config)]
        return result
    padding = _padding(attention_mask, sizes)
    skips = allow_is_causal_skip or allow_is_bidirectional_skip or use_vmap or sizes.queries == 1
    if not skips and not is_combined(mask_function):
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
    decided = isinstance(attention_mask, TreeMask) or _has_tensors(**options)
    ends = None if decided else as_band(options["mask_function"])
    if ends is not None:
        placed = Sizes(*sizes)
        return Mask(batch, placed, ends, _padding(attention_mask, placed))
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


def from_dense(allowed: Tensor, first_query: int = 0) -> Mask:
    """A mask from bools [B, 1, queries, keys]."""
    result = Mask(len(allowed), Sizes(allowed.shape[-2], allowed.shape[-1], first_query))
    result.rules = [special(Runs.from_dense(entry[0].bool().numpy()), first_query) for entry in allowed.cpu()]
    return result


@cached_graph
def _graph(topologies: tuple[Topology, ...], sizes: Sizes) -> Graph:
    """The graph of one sequence, or of several over separate nodes."""
    parts = [window_of(topology, *sizes) for topology in topologies]
    return Graph.from_runs(parts[0] if len(parts) == 1 else Runs.stack(parts))
