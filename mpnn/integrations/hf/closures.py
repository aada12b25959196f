"""The mask functions of transformers as topologies.

transformers describes a mask by a function of (batch, head, query, key) made of closures. `read` recognises those of
transformers by their names, and tries on two rows whether they compute what the names say. Other functions are
evaluated, in blocks of rows.
"""

import random
from collections.abc import Callable, Iterable
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpnn import Topology, graphs
from mpnn.graph.runs import Runs
from mpnn.integrations.hf import compat
from mpnn.integrations.hf.builders import band, chunked, evaluated, labels, packed, placed, tree, window_of

Band = tuple[int | None, int | None]

_BLOCK = 1 << 22  # pairs that are evaluated at once
_SAMPLED = 1 << 14  # tokens over which a function without tensors is tried: more than most windows

_AGREES: dict[str, bool] = {}
"""Whether mask functions of a form compute what their names and closures say. Each form is tried once a process."""


class Sizes(NamedTuple):
    """Queries first_query ... first_query + queries - 1, and keys likewise, by position in the whole sequence."""

    queries: int
    keys: int
    first_query: int = 0
    first_key: int = 0


IRREPLACEABLE = (
    "this model's mask has a part of its own (blocks of image tokens, a mask function or a 4-D mask that was passed), "
    "which a topology cannot replace; call mpnn.hf.use(model) without graph"
)


class Rule(NamedTuple):
    """The topology of the tokens of one sequence.

    is_causal: no edges from later tokens. is_special: it has a part that no topology can replace. positions: of packed
    sequences, int64 by token, within which the topology is. parents: of the tokens of a tree, likewise.
    """

    topology: Topology
    is_causal: bool = False
    is_special: bool = False
    positions: bytes | None = None
    parents: bytes | None = None

    def join(self, other: "Rule") -> "Rule":
        """Both rules."""
        return Rule(
            self.topology & other.topology,
            self.is_causal or other.is_causal,
            self.is_special or other.is_special,
            self.positions or other.positions,
        )

    def within(self, positions: bytes) -> "Rule":
        """The rule within packed sequences, unless it is so already."""
        if self.parents:
            raise ValueError("a tree of texts has no cu_seq_lens: tokens without a parent begin a text")
        if self.positions:
            return self
        if self.is_special:  # it was evaluated, and counts from the start of the row
            texts = np.cumsum(np.diff(np.frombuffer(positions, np.int64), prepend=-1) != 1)
            return self._replace(topology=self.topology & labels(torch.from_numpy(texts)))
        return Rule(packed(positions, self.topology), self.is_causal, positions=positions)

    def along(self, parents: bytes) -> "Rule":
        """The rule along the paths of a tree of texts."""
        if self.is_special or self.positions or not self.is_causal:
            raise ValueError(
                "this model's mask is not causal, or has a part of its own (blocks of image tokens, a mask function "
                "that was passed), which does not say what the texts of a tree attend to; compute separate texts"
            )
        return Rule(tree(parents, self.topology), is_causal=True, parents=parents)

    def replaced(self, topology: Topology, first: int, first_key: int, causal: bool) -> Topology:
        """A user's topology instead of this one, with the first token after the padding. `causal`: it must have no
        edges from later tokens if this one has none."""
        if self.is_special:
            raise ValueError(IRREPLACEABLE)
        if self.parents:
            return tree(self.parents, placed(topology, 0, 0, causal))
        if self.positions:
            return packed(self.positions, placed(topology, 0, 0, causal and self.is_causal), True)
        return placed(topology, first, first_key, causal and self.is_causal)


parse = lru_cache(maxsize=256)(graphs.parse)


class Described(NamedTuple):
    """A mask function, and what it is evaluated with."""

    function: Callable[..., Any]
    batch: int
    sizes: Sizes
    use_vmap: bool = False
    device: torch.device | None = None

    def rules(self) -> list[Rule]:
        """The rule of each entry of the batch: read in the closures if the function agrees, evaluated if not."""
        rules = [_read(self.function, b) for b in range(self.batch)]
        known = [rule for rule in rules if rule is not None]
        return known if len(known) == self.batch and self.agrees(known) else self._evaluated()

    def agrees(self, rules: list[Rule]) -> bool:
        """Whether the function allows, in two rows drawn at random, what the rules allow."""
        form = _form(self.function)
        queries = self.sizes.queries
        if form in _AGREES or queries == 1:
            return _AGREES.get(form, True)
        expected = [window_of(rule.topology, *self.sizes) for rule in rules]
        agree = True
        for row in random.Random(form).sample(range(queries), min(queries, 2)):
            allowed = self._allowed(row, 1)
            if type(allowed) is not Tensor:  # a program is traced, and tensors have no numbers
                return True
            rows = [Runs.from_dense(entry[0].numpy()) for entry in allowed]
            agree &= all(one.same_as(runs.take(np.array([row]))) for one, runs in zip(rows, expected, strict=True))
        _AGREES[form] = agree
        return agree

    def _evaluated(self) -> list[Rule]:
        step = max(1, _BLOCK // max(self.sizes.keys * self.batch, 1))
        blocks = [
            [Runs.from_dense(entry[0].numpy()) for entry in self._allowed(start, min(step, self.sizes.queries - start))]
            for start in range(0, self.sizes.queries, step)
        ]
        return [special(_below(entry), *self.sizes[2:]) for entry in zip(*blocks, strict=True)]

    def _allowed(self, start: int, count: int) -> Tensor:
        """Returns the pairs that the function allows in some rows, bool [B, 1, count, keys]."""
        _, keys, first_query, first_key = self.sizes
        sizes = (count, keys, first_query + start, first_key)
        return compat.dense_mask(self.batch, sizes, self.function, use_vmap=self.use_vmap, device=self.device).cpu()


def special(runs: Runs, first_query: int = 0, first_key: int = 0) -> Rule:
    """The rule of a mask that was evaluated or passed."""
    return Rule(evaluated(runs, first_query, first_key), is_special=True)


@torch.compiler.assume_constant_result
def as_band(function: Callable[..., Any]) -> Band | None:
    """The band of a mask function that contains no tensors, if the function agrees, or None."""
    ends = band_of(function)
    if ends is None or not Described(function, 1, Sizes(_SAMPLED, _SAMPLED)).agrees([banded(*ends)]):
        return None
    return ends


@lru_cache(maxsize=256)
def banded(left: int | None, right: int | None) -> Rule:
    """j - i is in [-left, right]; None means no limit."""
    return Rule(band(left, right), is_causal=right == 0)


def band_of(function: Any) -> Band | None:
    """The ends of the band of a mask function (causal, bidirectional, a window, all of several), or None."""
    if function is compat.causal_mask_function:
        return None, 0
    if function is compat.bidirectional_mask_function:
        return None, None
    free = _closure(function)
    match _maker(function):
        case "sliding_window_overlay":
            return int(free["sliding_window"]) - 1, None
        case "sliding_window_bidirectional_overlay":
            return int(free["sliding_window"]), int(free["sliding_window"])
        case "and_masks":
            bands = [ends for part in free["mask_functions"] if (ends := band_of(part)) is not None]
            if len(bands) == len(free["mask_functions"]):
                return _nearest(left for left, _ in bands), _nearest(right for _, right in bands)
    return None


def _nearest(ends: Iterable[int | None]) -> int | None:
    return min((end for end in ends if end is not None), default=None)


def is_combined(function: Any) -> bool:
    """Whether the function was combined with packed sequences or blocks, for which transformers skips no mask."""
    free = _closure(function)
    names = {"packed_sequence_mask", "block_sequence_ids"}
    return not names.isdisjoint(free) or any(map(is_combined, free.get("mask_functions", ())))


def _read(function: Any, b: int) -> Rule | None:
    """The rule of an entry of the batch, None if the function is unknown."""
    if (ends := band_of(function)) is not None:
        return banded(*ends)
    free = _closure(function)
    match _maker(function):
        case "and_masks" | "or_masks" as maker:
            parts = [part for f in free["mask_functions"] if (part := _read(f, b)) is not None]
            if len(parts) < len(free["mask_functions"]):
                return None
            if maker == "and_masks":
                return reduce(Rule.join, parts)
            return Rule(reduce(or_, (part.topology for part in parts)), is_special=True)
        case "chunked_overlay":
            return Rule(chunked(int(free["chunk_size"]), int(free["left_padding"][b])))
        case "blockwise_overlay":
            return Rule(labels(free["block_sequence_ids"][b]), is_special=True)
        case "packed_sequence_mask_function":
            return Rule(labels(free["packed_sequence_mask"][b]))
        case "remap_positions_for_packed_sequence" if inner := _read(free["mask_function"], b):
            return inner.within(free["position_ids"][b].cpu().to(torch.int64).numpy().tobytes())
    return None


def _maker(function: Any) -> str:
    """The function of transformers that made a mask function, or ""."""
    return function.__qualname__.split(".")[0] if getattr(function, "__module__", "") == compat.MASKS else ""


def _closure(function: Any) -> dict[str, Any]:
    """Returns the variables that a function has from the one that made it."""
    if not getattr(function, "__closure__", None):
        return {}
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, function.__closure__, strict=True)}


def _form(function: Any) -> str:
    """A mask function without its numbers: "and_masks.<locals>.and_mask(sliding_window_overlay...)"."""
    free = _closure(function)
    inner = [*free.get("mask_functions", ()), *filter(callable, [free.get("mask_function")])]
    return f"{getattr(function, '__qualname__', '')}({', '.join(map(_form, inner))})"


def _below(parts: tuple[Runs, ...]) -> Runs:
    """The rows of all parts, one part below the other, over the same columns."""
    first = np.cumsum([0, *(part.num_dst for part in parts)])
    rows = [(part.row + row, part.start, part.stop) for part, row in zip(parts, first[:-1], strict=True)]
    return Runs.of(int(first[-1]), parts[0].num_src, rows)
