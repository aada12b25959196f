"""`past_key_values`: the KV cache of a decoder, with the methods that `generate` of transformers calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import from_edges
from mpnn.models.layers.decoder import Decoder, DecoderOutput
from mpnn.models.layers.packing import Packing, require_eager

Text = tuple[Tensor, Tensor, Tensor]
"""Tokens, integers [B, n] or vectors [B, n, dim]; the padding mask, bool [B, n]; their positions, [B, n]."""


def pack_text(model: Decoder, text: Text) -> Packing:
    """The packing of texts that have padding or their own positions."""
    _, keep, positions = text
    return Packing.of(keep, separate=model.position is None and not counts_up(keep, positions))


def read(
    model: Decoder, text: Text, packing: Packing, return_states: bool, return_weights: bool
) -> tuple[DecoderOutput, Callable[[Topology], Topology | Graph]]:
    """One pass over texts from their beginning: its output, and the function that bound its graphs."""
    tokens, _, positions = text
    at = packing.pack(positions)
    graphs: dict[Topology, Graph] = {}

    def bind(topology: Topology) -> Topology | Graph:
        if not packing.separate:
            return packing.bind(topology)
        if topology not in graphs:
            graphs[topology] = cast(Graph, packing.bind(topology)).with_positions(at, at)
        return graphs[topology]

    tokens = packing.pack(tokens)
    return model.decode(tokens, at, bind=bind, return_states=return_states, return_weights=return_weights), bind


def counts_up(keep: Tensor, positions: Tensor) -> bool:
    """Whether the positions of the tokens of each text go up by one, so that indices can stand for them."""
    require_eager("position_ids decide the graph", "Leave position_ids out where they count up")
    sentence, _ = keep.nonzero(as_tuple=True)
    at = positions[keep]
    return bool(((at.diff() == 1) | (sentence.diff() != 0)).all())


def check_empty(given: Any) -> None:
    """Raises ValueError for a `past_key_values` of transformers, except the empty one that `generate` begins with."""
    if type(getattr(given, "self_attention_cache", given)).__name__ == "StaticCache":
        raise ValueError(
            "past_key_values must come from this model; got a StaticCache. Generate without cache_implementation"
        )
    if given.get_seq_length():
        raise ValueError(f"past_key_values must come from this model; got a {type(given).__name__} that is not empty")


class PastKeyValues:
    """Cached keys and values of a batch of texts, `get_seq_length` tokens each, padding included.

    Texts without padding are rows of one tensor. Texts with padding are nodes of one graph that grows: each new token
    is a node, and its sources are the nodes of its own text.
    """

    is_compileable = False

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self._cache = KVCache(64)
        self._later: Text | None = None
        self._places = 0
        self._nodes: Tensor | None = None  # the node of each token of each text, [B, most]; None without padding
        self._at: Tensor | None = None  # the position of each node, [nodes]
        self._keep: Tensor | None = None  # the padding mask so far, [B, tokens]; only with padding
        self._lengths = np.zeros(0, np.int64)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._places

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces text b by text `beam_idx[b]`."""
        if self._later is not None:
            self._later = _each(lambda part: part.index_select(0, beam_idx), self._later)
        elif self._nodes is None:
            self._cache.select(beam_idx)
        else:
            self._nodes, self._keep = (_not_none(x).index_select(0, beam_idx) for x in (self._nodes, self._keep))
            self._lengths = self._lengths[beam_idx.cpu().numpy()]

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens, as assisted generation does."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to forget, as a negative one; got {tokens_to_remove}")
        places = max(self._places + tokens_to_remove, 0)
        if self._later is not None:
            self.defer(_each(lambda part: part[:, :places], self._later))
            return
        self._places = places
        if self._nodes is None:
            self._cache.crop(places)
            return
        self._keep = keep = _not_none(self._keep)[:, :places]
        remain = keep.sum(1)
        self._lengths = remain.cpu().numpy()
        self._nodes = self._nodes[:, : int(self._lengths.max(initial=0))]
        # removed nodes between nodes of other texts stay in the cache, without out-neighbors
        behind = torch.arange(self._nodes.shape[1], device=keep.device) < remain[:, None]
        count = int(torch.where(behind, self._nodes, -1).max()) + 1 if behind.any() else 0
        self._at = _not_none(self._at)[:count]
        self._cache.crop(count)

    def defer(self, text: Text) -> None:
        """Stores texts that were read without a cache; `decode_next` reads them again."""
        self._later, self._places = text, text[1].shape[1]

    def decode_next(self, text: Text, return_states: bool = False) -> tuple[DecoderOutput, Packing | None]:
        """One pass over the next tokens; returns its output and the packing of it, None without padding."""
        if self._later is not None:
            earlier, self._later, self._places = self._later, None, 0
            self.decode_next(earlier)
        tokens, keep, positions = text
        start, self._places = self._places, self._places + keep.shape[1]
        whole = bool(keep.all()) and (self._model.position is not None or counts_up(keep, positions))
        if start == 0:
            self._nodes = None if whole else torch.zeros(len(keep), 0, dtype=torch.int64, device=keep.device)
            self._at, self._keep = positions.new_zeros(0), keep[:, :0]
            self._lengths = np.zeros(len(keep), np.int64)
        if self._nodes is None:
            if not whole:
                raise ValueError("texts that began without padding go on without; got an attention_mask with zeros")
            self._cache.length = _room(self._places)
            found = self._model.decode(
                tokens, positions, bind=with_fixed_rows, cache=self._cache, return_states=return_states
            )
            return found, None
        return self._decode_ragged(text, self._nodes, start == 0, return_states)

    def _decode_ragged(
        self, text: Text, nodes: Tensor, first: bool, return_states: bool
    ) -> tuple[DecoderOutput, Packing]:
        tokens, keep, positions = text
        packing = Packing.of(keep, separate=True)
        at = packing.pack(positions)
        begin, lengths = self._lengths, self._lengths + np.asarray(packing.lengths)
        count = self._cache.count
        longer = nodes.new_zeros(len(keep), int(lengths.max(initial=0)))
        longer[:, : nodes.shape[1]] = nodes
        sentence, _ = keep.nonzero(as_tuple=True)
        behind = _ranges(begin, lengths)
        new = torch.arange(count, count + len(at), device=at.device)
        longer[sentence, torch.from_numpy(behind).to(at.device)] = new
        self._nodes, self._lengths, self._keep = longer, lengths, torch.cat([_not_none(self._keep), keep], 1)
        self._at = everywhere = torch.cat([_not_none(self._at), at])
        self._cache.length = _room(len(everywhere))

        @cache
        def bind(topology: Topology) -> Graph:
            if first:
                graph = cast(Graph, packing.bind(with_fixed_rows(topology)))
                return graph if self._model.position is not None else graph.with_positions(at, at)
            rows = with_fixed_rows(topology).bind(_room(longer.shape[1])).runs.take(behind)
            row, src = (torch.from_numpy(ends).to(at.device) for ends in rows.edges())
            edges = torch.stack([longer[sentence[row], src], row])
            return from_edges(edges, num_dst=len(at), num_src=count + len(at)).with_positions(at, everywhere)

        tokens = packing.pack(tokens)
        found = self._model.decode(tokens, at, bind=bind, cache=self._cache, return_states=return_states)
        return found, packing


def _each(change: Callable[[Tensor], Tensor], text: Text) -> Text:
    tokens, keep, positions = map(change, text)
    return tokens, keep, positions


@lru_cache(maxsize=64)
def with_fixed_rows(topology: Topology) -> Topology:
    """The topology, if its rows do not depend on the number of nodes.

    Raises:
        ValueError: they do, so that every token would have to be computed again at each step.
    """
    try:
        short, long = topology.bind(1024).runs, topology.bind(2048).runs.take(np.arange(1024))
    except ValueError:
        same = False
    else:
        same = all(np.array_equal(getattr(short, part), getattr(long, part)) for part in ("ptr", "start", "stop"))
    if not same:
        raise ValueError(
            f"rows of {topology} depend on the length, so keys cannot be cached; generate with use_cache=False"
        )
    return topology


def _room(count: int) -> int:
    """A power of two, so that topologies are bound to few sizes, with equal rows in all (`with_fixed_rows`)."""
    return 1 << max(count - 1, 63).bit_length()


def _ranges(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in zip(start, stop, strict=True)] or [np.zeros(0, np.int64)])


def _not_none(x: Tensor | None) -> Tensor:
    assert x is not None
    return x
