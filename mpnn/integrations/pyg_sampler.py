"""The samples of neighbors that PyTorch Geometric's NeighborLoader and LinkNeighborLoader ask of pyg_lib.

`mpnn.integrations.pyg_lib` offers them under pyg_lib's names. What is drawn comes from torch's generator. For code that
is new, `mpnn.data.neighbor_batches`, `hetero_batches` and `link_batches` sample without PyTorch Geometric.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graphs.compressed import Found, search_rows
from mpnn.graphs.kinds import EdgeKind
from mpnn.graphs.kinds_sampling import Step, spread

Ints = NDArray[np.int64]
_ONE: EdgeKind = ("", "", "")
_MOST_NODES = 1 << 40  # of a kind; rows do not say how many nodes the neighbors are of


def neighbor_sample(
    rowptr: Tensor,
    col: Tensor,
    seed: Tensor,
    num_neighbors: Sequence[int],
    node_time: Tensor | None = None,
    edge_time: Tensor | None = None,
    seed_time: Tensor | None = None,
    edge_weight: Tensor | None = None,
    *options: Any,
    **named_options: Any,
) -> tuple[Any, ...]:
    """`hetero_neighbor_sample` for one kind of nodes and edges: tensors and lists in place of dictionaries."""

    def of(key: Any, value: Any) -> Any:
        return None if value is None else {key: value}

    out = hetero_neighbor_sample(
        of(_ONE, rowptr),
        of(_ONE, col),
        of("", seed),
        of(_ONE, num_neighbors),
        of("", node_time),
        of(_ONE, edge_time),
        of("", seed_time),
        of(_ONE, edge_weight),
        *options,
        **named_options,
    )
    return tuple(None if one is None else one.get(_ONE, one.get("")) for one in out)


def hetero_neighbor_sample(
    rowptr_dict: Mapping[EdgeKind, Tensor],
    col_dict: Mapping[EdgeKind, Tensor],
    seed_dict: Mapping[str, Tensor],
    num_neighbors_dict: Mapping[EdgeKind, Sequence[int]],
    node_time_dict: Mapping[str, Tensor] | None = None,
    edge_time_dict: Mapping[EdgeKind, Tensor] | None = None,
    seed_time_dict: Mapping[str, Tensor] | None = None,
    edge_weight_dict: Mapping[EdgeKind, Tensor] | None = None,
    csc: bool = False,
    replace: bool = False,
    directed: bool = True,
    disjoint: bool = False,
    temporal_strategy: str = "uniform",
    return_edge_id: bool = True,
) -> tuple[Any, ...]:
    """Samples neighbors of nodes, of those neighbors, and so on (Hamilton et al. 2017, algorithm 2).

    Args:
        rowptr_dict, col_dict: the neighbors of node u along a relation (kind, name, kind) are
            `col[rowptr[u]:rowptr[u + 1]]`: destinations of edges from u, or with `csc` sources of edges to u.
        seed_dict: {kind: int64 [n]}, the nodes to begin with, which come first among the sampled ones.
        num_neighbors_dict: the number of neighbors along each relation in each step; -1 for all.
        node_time_dict, edge_time_dict: the times of nodes and of edges. A sample has the neighbors whose time is not
            after that of its seed. Each row of `col` ascends in time.
        seed_time_dict: the times of the seeds. Default: those of the nodes.
        replace: whether to draw with replacement.
        disjoint: whether each seed has a sample of its own; needed with times.
        temporal_strategy: "uniform", or "last" for the latest neighbors.

    Returns:
        Six dictionaries: the local indices of sources and of destinations, int64 [E]; the nodes, int64 [n], or with
        `disjoint` [n, 2], the number of the seed before the node; the positions of the edges in `col`, or None; and how
        many nodes and how many edges each step added.

    Raises:
        NotImplementedError: for weights of edges, or with directed=False.
        ValueError: times need disjoint samples, and times of the seeds.
    """
    if edge_weight_dict is not None:
        raise NotImplementedError("mpnn's pyg_lib draws edges with equal probabilities; leave weights of edges out")
    if not directed:
        raise NotImplementedError("mpnn's pyg_lib samples no induced subgraphs; torch_sparse does")
    node_times, edge_times = node_time_dict or {}, edge_time_dict or {}
    has_times = bool(node_times or edge_times)
    if has_times and not disjoint:
        raise ValueError("with times, each seed has a sample of its own; pass disjoint=True")
    times = _times_of(seed_dict, seed_time_dict or {}, node_times) if has_times else None
    # As they spread: from the kind of the neighbors to the kind of the nodes that have rows.
    relations = {kind if csc else kind[::-1]: kind for kind in rowptr_dict}
    found = {end: Found(_MOST_NODES) for kind in relations for end in kind[::2]}
    found |= _seeds(seed_dict, disjoint)
    neighbors = _Neighbors(
        {relation: (rowptr_dict[kind].numpy(), col_dict[kind].numpy()) for relation, kind in relations.items()},
        {kind: time.numpy() for kind, time in node_times.items()},
        {relation: edge_times[kind].numpy() for relation, kind in relations.items() if kind in edge_times},
        times,
        replace,
        temporal_strategy == "last",
    )
    count = max(map(len, num_neighbors_dict.values()), default=0)
    steps = [{one: num_neighbors_dict[kind][k] for one, kind in relations.items()} for k in range(count)]
    sampled = {relations[one]: (one[0], parts) for one, parts in spread(found, steps, neighbors.draw).items()}
    near, far, edges = {}, {}, {}
    for kind, (end, parts) in sampled.items():
        keys, near[kind], edges[kind] = _joined(parts)
        far[kind] = torch.from_numpy(found[end].index(keys.numpy()))
    nodes = {kind: torch.from_numpy(np.stack([one.moment, one.node], 1)) for kind, one in found.items()}
    return (
        *((far, near) if csc else (near, far)),
        nodes if disjoint else {kind: pairs[:, 1].contiguous() for kind, pairs in nodes.items()},
        edges if return_edge_id else None,
        {kind: one.added for kind, one in found.items()},
        {kind: [len(part.position) for part in parts] for kind, (_, parts) in sampled.items()},
    )


def by_text(
    node_types: Sequence[str],
    edge_types: Sequence[EdgeKind],
    rowptr: Mapping[str, Any],
    col: Mapping[str, Any],
    seed: Mapping[str, Tensor],
    num_neighbors: Mapping[str, Any],
    node_time: Mapping[str, Tensor] | None,
    edge_time: Mapping[str, Any] | None,
    seed_time: Mapping[str, Tensor] | None,
    edge_weight: Mapping[str, Any] | None,
    *options: Any,
) -> tuple[Any, ...]:
    """`hetero_neighbor_sample` as an operator of torch: a relation is a text, with `__` between its kinds and its
    name."""
    text = {kind: "__".join(kind) for kind in edge_types}

    def named(of: Mapping[str, Any] | None) -> Any:
        return None if of is None else {kind: of[name] for kind, name in text.items() if name in of}

    out = hetero_neighbor_sample(
        named(rowptr),
        named(col),
        seed,
        named(num_neighbors),
        node_time,
        named(edge_time),
        seed_time,
        named(edge_weight),
        *options,
    )
    return tuple(of and {text.get(key, key): value for key, value in of.items()} for of in out)


@dataclass(frozen=True)
class _Neighbors:
    """Rows of neighbors by relation, and how neighbors are drawn from them. times: of the seeds, or None."""

    rows: Mapping[EdgeKind, tuple[NDArray[Any], NDArray[Any]]]
    node_times: Mapping[str, NDArray[Any]]
    edge_times: Mapping[EdgeKind, NDArray[Any]]
    times: NDArray[Any] | None
    replace: bool
    latest: bool

    def draw(self, relation: EdgeKind, step: int, fanout: int, nodes: Ints, seeds: Ints) -> tuple[Ints, Ints, Ints]:
        """As `spread` needs it."""
        ptr, columns = self.rows[relation]
        first, stop = ptr[nodes].astype(np.int64), ptr[nodes + 1].astype(np.int64)
        if self.times is not None:
            stop = self._until(relation, columns, first, stop, self.times[seeds])
        if self.latest and fanout >= 0:
            first = np.maximum(first, stop - fanout)
        row, position = _drawn(first, stop, fanout, self.replace)
        return row, position, columns[position].astype(np.int64)

    def _until(self, relation: EdgeKind, columns: NDArray[Any], first: Ints, stop: Ints, times: NDArray[Any]) -> Ints:
        """Where the edges of each row end that are not after a time."""
        of_edges, of_nodes = self.edge_times.get(relation), self.node_times.get(relation[0])
        if of_edges is not None:
            return search_rows(of_edges.__getitem__, first, stop, times, "right")
        if of_nodes is not None:
            return search_rows(lambda place: of_nodes[columns[place]], first, stop, times, "right")
        return stop


def _seeds(seeds: Mapping[str, Tensor], disjoint: bool) -> dict[str, Found]:
    """The nodes to begin with, each with its number among all seeds if it has a sample of its own."""
    found = {}
    before = 0
    for kind, nodes in seeds.items():
        numbers = np.arange(before, before + len(nodes)) if disjoint else np.zeros(len(nodes), np.int64)
        found[kind] = Found(_MOST_NODES, nodes.numpy().astype(np.int64), numbers)
        before += len(nodes)
    return found


def _times_of(seeds: Mapping[str, Tensor], times: Mapping[str, Tensor], of_nodes: Mapping[str, Tensor]) -> NDArray[Any]:
    """The time of each seed, kind by kind."""
    if missing := [kind for kind in seeds if kind not in times and kind not in of_nodes]:
        raise ValueError(f"seeds of kind {missing[0]!r} have no times; pass their seed_time")
    found: NDArray[Any] = torch.cat(
        [times[kind] if kind in times else of_nodes[kind][nodes] for kind, nodes in seeds.items()]
    ).numpy()
    return found


def _joined(parts: Sequence[Step]) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(np.concatenate(part)) for part in zip(*parts, strict=True))


def _drawn(first: Ints, stop: Ints, count: int, replace: bool) -> tuple[Ints, Ints]:
    """Draws `count` of the places [first, stop) of each row, -1 for all: the row and the place of each."""
    size = stop - first
    is_whole = (size == 0) | (count < 0) | ((size <= count) & (not replace))
    taken = np.where(is_whole, size, count)
    row = np.repeat(np.arange(len(size)), taken)
    place = np.arange(len(row)) - np.repeat(taken.cumsum() - taken, taken)
    place[~is_whole[row]] = _chosen(size[~is_whole], count, replace).ravel()
    return row, first[row] + place


def _chosen(size: Ints, count: int, replace: bool) -> Ints:
    """`count` numbers below each size, int64 [n, count]; distinct ones by Bentley and Floyd 1987."""
    uniform = torch.rand(len(size), max(count, 0), dtype=torch.float64).numpy()
    if replace:
        repeated: Ints = (uniform * size[:, None]).astype(np.int64)
        return repeated
    chosen = np.zeros(uniform.shape, np.int64)
    for k in range(uniform.shape[1]):
        last = size - count + k
        number = (uniform[:, k] * (last + 1)).astype(np.int64)
        is_taken = (chosen[:, :k] == number[:, None]).any(1)
        chosen[:, k] = np.where(is_taken, last, number)
    return chosen
