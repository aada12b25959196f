"""Topologies that the masks of transformers consist of, in addition to those of `mpnn.graphs`, and a user's topology
over the tokens of such a mask. Positions are those of the padded sequence. Arrays are arguments as bytes, which are
hashable."""

from collections.abc import Callable
from functools import lru_cache, partial, wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn import Topology
from mpnn.decoding.generation import check_causal
from mpnn.graph.runs import Runs
from mpnn.graphs import trees

Ints = NDArray[np.int64]

_LONGEST = 4096  # tokens up to which a topology is compared with itself over twice as many

_of = partial(Topology.of, positional=True)
P = ParamSpec("P")


def _builder(rule: Callable[Concatenate[Ints, int, P], Any]) -> Callable[P, Topology]:
    """Makes a builder of topologies of a rule. Arguments are passed by position."""

    @wraps(rule)
    def build(*args: P.args, **named: P.kwargs) -> Topology:
        assert not named, "equal arguments make equal topologies, so all are passed by position"
        return _of(rule, *args)

    return build


@_builder
def band(i: Ints, num_src: int, left: int | None, right: int | None) -> Any:
    """j - i is in [-left, right]; None means no limit."""
    return [(0 if left is None else i - left, num_src if right is None else i + right + 1)]


@_builder
def chunked(i: Ints, num_src: int, size: int, first: int) -> Any:
    """i and j are in one chunk; the first chunk begins at `first`."""
    start = (i - first) // size * size + first
    return [(start, start + size)]


def labels(labels: Tensor) -> Topology:
    """i and j have one label, int64 [N], and it is not negative."""
    return _of(_labels, labels.cpu().to(torch.int64).numpy().tobytes())


def _labels(i: Ints, num_src: int, data: bytes) -> Runs:
    label = np.frombuffer(data, np.int64)[:num_src]
    label = np.append(label, np.full(num_src - len(label), -1))
    runs = Runs.from_labels(label).take(i)
    kept = label[i][runs.row] >= 0
    return Runs.of(len(i), num_src, [(runs.row[kept], runs.start[kept], runs.stop[kept])])


@_builder
def sources(i: Ints, num_src: int, allowed: bytes) -> Any:
    """j is one of these, bool [N]: not padding."""
    runs = Runs.from_dense(np.frombuffer(allowed, np.bool_)[None])
    return list(zip(runs.start.tolist(), runs.stop.tolist(), strict=True))


def evaluated(runs: Runs, first_query: int, first_key: int) -> Topology:
    """These runs, from the first query and the first key on."""
    arrays = (x.astype(np.int64).tobytes() for x in (runs.ptr, runs.start, runs.stop))
    return _of(_evaluated, first_query, first_key, *arrays)


def _evaluated(i: Ints, num_src: int, first_query: int, first_key: int, *arrays: bytes) -> Runs:
    ptr, start, stop = (np.frombuffer(x, np.int64) for x in arrays)
    runs = Runs(len(ptr) - 1, int(stop.max(initial=0)), ptr, start, stop).take(i - first_query)
    return Runs.of(len(i), num_src, [(runs.row, runs.start + first_key, runs.stop + first_key)])


@_builder
def packed(i: Ints, num_src: int, positions: bytes, inner: Topology, from_start: bool = False) -> Runs:
    """A topology within each packed sequence. Sequences begin where positions, int64 [N], do not go up by one. The
    topology counts from 0 in each, or as the positions do."""
    place = np.frombuffer(positions, np.int64)
    begins = np.append(0, np.flatnonzero(np.diff(place) != 1) + 1)
    parts = []
    for begin, length in zip(begins.tolist(), np.diff(np.append(begins, len(place))).tolist(), strict=True):
        first = 0 if from_start else int(place[begin])
        parts.append(window_of(inner, length, length, first, first))
    return Runs.stack(parts).take(i)


@_builder
def tree(i: Ints, num_src: int, parents: bytes, inner: Topology) -> Runs:
    """A causal topology along the paths of a tree, with the parent of each token, int64 [N]."""
    return trees.along(trees.paths(np.frombuffer(parents, np.int64)), inner).take(i)


@_builder
def placed(i: Ints, num_src: int, topology: Topology, first: int = 0, first_key: int = 0, causal: bool = False) -> Runs:
    """A user's topology over the tokens from `first` on, after the padding; keys before `first_key` are not cached.
    Binding it raises ValueError as `bound` does, and where a cache does not hold what it attends to."""
    runs = bound(topology, max(num_src - first, 0), causal)
    rows = i - first
    if len(i) and i[0] > 0:
        _check_cached(topology, runs, max(int(rows[0]), 0), first_key - first)
    valid = np.flatnonzero(rows >= 0)
    selected = runs.take(rows[valid])
    return Runs.of(len(i), num_src, [(valid[selected.row], selected.start + first, selected.stop + first)])


@_builder
def crossed(i: Ints, num_src: int, topology: Topology, first: int, keys: int, row: int) -> Runs:
    """A user's topology from encoder to decoder: keys from `first` on, and queries from `row` on."""
    runs = bound(topology, max(row + len(i), keys - first)).take(row + np.arange(len(i)))
    return Runs.of(len(i), num_src, [(runs.row, runs.start + first, runs.stop + first)])


def bound(topology: Topology, tokens: int, causal: bool = False) -> Runs:
    """The runs of a user's topology over this many tokens."""
    runs = topology.bind(tokens).runs
    if not _is_stable(topology, min(1 << max(tokens - 1, 1).bit_length(), _LONGEST)):
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
        short, long = topology.bind(tokens), topology.bind(2 * tokens)
    except ValueError:  # it takes one length only
        return True
    runs = long.runs.take(np.arange(tokens))
    return short.runs.same_as(Runs.of(tokens, tokens, [(runs.row, runs.start, runs.stop)]))


def _check_cached(topology: Topology, runs: Runs, begin: int, first_key: int) -> None:
    """Raises ValueError if tokens in a cache would attend to new ones, or new ones to tokens no longer in the cache."""
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


def window_of(topology: Topology, queries: int, keys: int, first_query: int, first_key: int) -> Runs:
    """The runs of a topology over a whole sequence, for these queries and keys of it."""
    rows = np.arange(first_query, first_query + queries)
    runs = topology.take(rows, max(first_query + queries, first_key + keys))
    return Runs.of(queries, keys, [(runs.row, runs.start - first_key, runs.stop - first_key)])
