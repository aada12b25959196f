"""Cuts a graph on the disk into the parts of ranks, which `Part.open` maps: no process ever holds the whole graph.

cut.json             format, version, sizes, and a digest of the graph, owners and data
rank-R/nodes.npy     int32: the nodes of rank R, ascending
rank-R/halo.npy      int32: the sources that it fetches, by owner, then ascending
rank-R/arriving.npy  int64 [ranks]: how many of them each rank owns
rank-R/edges.npy     int32 [2, E]: sources, numbered as nodes.npy and then halo.npy, and destinations, by destination
rank-R/edge_attr.npy, edge_type.npy  of these edges, if they were passed
rank-R/NAME.npy      the rows of the rank's nodes, of data that was passed
owners.npy           int32: the rank of each node
leaving-R.npy        int32: the number of rows that each rank fetches from R, and then these rows of nodes.npy

Memory is O(nodes) and chunks of edges. Each part appears under its name when all of it is on the disk, so a cut that
was killed continues after the last one.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mpnn.graph.arguments import INTEGERS, check_form
from mpnn.graph.files import atomic_path, remove_abandoned
from mpnn.graphs.compressed import CompressedGraph

FORMAT = "mpnn cut"
VERSION = 2
EDGE_DATA = {"edge_attr", "edge_type"}
_CHUNK = 1 << 22  # edges that are read at once
_BLOCK = 4096  # nodes that `ldg` assigns at once, at most
_PASSES = 8  # over a block
_NODE_COST = 16  # edges that count as much as a node, as in `partition`
_SLACK = 1.05  # how much more than the mean a rank may have, by `ldg`

Ints = NDArray[Any]


def cut(
    graph: CompressedGraph,
    folder: str | os.PathLike[str],
    owners: Ints,
    ranks: int,
    *,
    data: Mapping[str, Ints] | None = None,
) -> list[int]:
    """Writes the parts of all ranks; returns the number of sources that each fetches in a layer.

    Args:
        graph: of `graphs.open_csr`, with one set of nodes.
        folder: a new one, or one of the same cut, which was not completed.
        owners: the rank of each node, integers [num_nodes], as METIS and ParMETIS write it (`read_owners`) or `ldg`
            computes it. ranks: their number.
        data: arrays [num_nodes, ...], such as features and labels, whose rows are divided too. "edge_attr" [E, ...] and
            "edge_type", int64 [E], are of the edges in the caller's order; for a graph with `edge_ids`.

    Raises:
        ValueError: if `owners` or `data` do not fit, or the folder holds another cut.
        TypeError: if `graph` is a subclass, such as a `TemporalGraph`.
    """
    folder = Path(folder)
    data = dict(data or {})
    owners = _checked(graph, owners, ranks, data)
    facts: dict[str, Any] = {"format": FORMAT, "version": VERSION, "ranks": ranks, "data": sorted(data)}
    facts |= {"num_nodes": graph.num_dst, "num_edges": graph.num_edges}
    ids = [cast(Ints, graph.edge_ids)] if data.keys() & EDGE_DATA else []
    facts["sha256"] = _digest([graph.offsets, graph.columns, owners, *ids, *(data[name] for name in sorted(data))])
    folder.mkdir(exist_ok=True)
    if (folder / "cut.json").exists():
        if json.loads((folder / "cut.json").read_text()) != facts:
            raise ValueError(f"{folder} holds another cut; delete it, or choose another folder")
    else:
        with atomic_path(folder / "cut.json") as file:
            file.write_text(json.dumps(facts, indent=1))
    for rank in range(ranks):
        if not (part := folder / f"rank-{rank}").exists():
            with atomic_path(part, folder=True) as temporary:
                _write_part(temporary, graph, owners, rank, ranks, data)
        remove_abandoned(part)
    with atomic_path(folder / "owners.npy") as file, file.open("wb") as opened:
        np.save(opened, owners)
    for rank in range(ranks):
        with atomic_path(folder / f"leaving-{rank}.npy") as file:
            _write_leaving(file, folder, rank, ranks)
    return [int(np.load(folder / f"rank-{rank}" / "arriving.npy").sum()) for rank in range(ranks)]


def _digest(arrays: Iterable[Ints]) -> str:
    """A digest of dtypes, shapes and numbers, which reads arrays on the disk in chunks."""
    sha = sha256()
    for x in arrays:
        sha.update(f"{x.dtype} {x.shape}".encode())
        step = max(1, _CHUNK // max(1, x[:1].size))
        for at in range(0, len(x), step):
            sha.update(np.ascontiguousarray(x[at : at + step]).data)
    return sha.hexdigest()


def ldg(graph: CompressedGraph, ranks: int) -> Ints:
    """Linear deterministic greedy (Stanton & Kliot 2012, KDD): in one pass, each node joins the rank that has most of
    its in-neighbors, weighed by the room that it has left:

        argmax_r |neighbors in r| * (1 - load_r / capacity)

    A node counts as its edges and 16 more. Nodes are assigned in blocks of up to 4,096, each looked at eight times, so
    that neighbors within a block count; a node without any joins the rank with most room. O(nodes + edges) time and
    O(nodes) memory.
    """
    owners = np.full(graph.num_dst, -1, np.int32)
    total = graph.num_edges + _NODE_COST * graph.num_dst
    capacity = _SLACK * total / ranks + 1
    load = np.zeros(ranks)
    block = min(_BLOCK, graph.num_dst // (64 * ranks) + 1)
    for first in range(0, graph.num_dst, block):
        stop = min(first + block, graph.num_dst)
        degree = np.diff(graph.offsets[first : stop + 1])
        row = np.repeat(np.arange(stop - first), degree)
        columns = graph.columns[graph.offsets[first] : graph.offsets[stop]]
        for _ in range(_PASSES):
            owner = owners[columns]
            near = owner >= 0
            counts = np.bincount(row[near] * ranks + owner[near], minlength=(stop - first) * ranks)
            score = counts.reshape(-1, ranks) * np.maximum(1 - load / capacity, 0)
            owners[first:stop] = np.where(score.any(1), score.argmax(1), -1)
        owners[first:stop] = np.where(owners[first:stop] < 0, load.argmin(), owners[first:stop])
        load += np.bincount(owners[first:stop], degree + _NODE_COST, minlength=ranks)
    return owners


def read_owners(path: str | os.PathLike[str]) -> Ints:
    """The rank of each node from a file: `.npy`, or text with a number for each node in order, as `gpmetis`, ParMETIS
    and the partitioning tools of DistDGL write it.
    """
    path = Path(path)
    if path.suffix == ".npy":
        return cast(Ints, np.load(path, mmap_mode="r"))
    return np.fromfile(path, np.int32, sep="\n")


def _checked(graph: CompressedGraph, owners: Ints, ranks: int, data: Mapping[str, Ints]) -> Ints:
    n = graph.num_dst
    if type(graph) is not CompressedGraph:
        raise TypeError(f"a cut would lose what a {type(graph).__name__} adds to its rows; pass a CompressedGraph")
    if graph.num_src != n:
        raise ValueError(f"a cut needs one set of nodes; got {graph!r}")
    expected = f"owners must hold the rank of each of the {n} nodes, below {ranks}"
    check_form(expected, owners, INTEGERS, (n,))
    if n and not 0 <= owners.min() <= owners.max() < ranks:
        raise ValueError(f"{expected}; got {owners.min()} to {owners.max()}")
    for name, rows in data.items():
        count, what = (graph.num_edges, "edges") if name in EDGE_DATA else (n, "nodes")
        if len(rows) != count or not name.isidentifier() or name in ("nodes", "halo", "arriving", "edges"):
            raise ValueError(
                f"data must have a row for each of the {count} {what}, under its own name; got {name!r} with "
                f"{len(rows)}"
            )
        if what == "edges" and graph.edge_ids is None:
            raise ValueError(
                f"{name} is in the order of the edges that were passed, which this graph does not know: write it with "
                "edge_ids (mpnn graph convert --edge-ids)"
            )
        if name == "edge_type":
            check_form(f"edge_type must be int64 [{count}]", rows, "int64", (count,))
    return np.ascontiguousarray(owners, np.int32)


def _write_part(
    folder: Path, graph: CompressedGraph, owners: Ints, rank: int, ranks: int, data: Mapping[str, Ints]
) -> None:
    create = np.lib.format.open_memmap
    nodes = np.flatnonzero(owners == rank)
    is_halo = np.zeros(graph.num_src, np.bool_)
    for rows in _chunks(graph, nodes):
        is_halo[graph.columns[_places(graph, rows)[0]]] = True
    is_halo[nodes] = False
    halo = np.flatnonzero(is_halo)
    del is_halo
    halo = halo[np.argsort(owners[halo], kind="stable")]
    local = np.empty(graph.num_src, np.int32)
    local[nodes], local[halo] = np.arange(len(nodes)), np.arange(len(nodes), len(nodes) + len(halo))
    num_edges = int((graph.offsets[nodes + 1] - graph.offsets[nodes]).sum())
    edges = create(folder / "edges.npy", "w+", np.int32, (2, num_edges))
    done = 0
    first = 0
    counts = {name: num_edges if name in EDGE_DATA else len(nodes) for name in data}
    mine = {
        name: create(folder / f"{name}.npy", "w+", x.dtype, (counts[name], *x.shape[1:])) for name, x in data.items()
    }
    for rows in _chunks(graph, nodes):
        places, degree = _places(graph, rows)
        stop = done + int(degree.sum())
        edges[0, done:stop] = local[graph.columns[places]]
        edges[1, done:stop] = np.repeat(np.arange(first, first + len(rows), dtype=np.int32), degree)
        for name in data.keys() & EDGE_DATA:
            _copy(mine[name][done:stop], data[name], cast(Ints, graph.edge_ids)[places])
        done = stop
        first = first + len(rows)
    for name in data.keys() - EDGE_DATA:
        _copy(mine[name], data[name], nodes)
    for written in (edges, *mine.values()):
        written.flush()
    for name, array in (
        ("nodes", nodes.astype(np.int32)),
        ("halo", halo.astype(np.int32)),
        ("arriving", np.bincount(owners[halo], minlength=ranks)),
    ):
        np.save(folder / f"{name}.npy", array)


def _copy(out: Ints, rows: Ints, index: Ints) -> None:
    """Writes `rows[index]`, a chunk of numbers at once."""
    step = max(1, _CHUNK // max(1, rows[:1].size))
    for at in range(0, len(index), step):
        out[at : at + step] = rows[index[at : at + step]]


def _write_leaving(file: Path, folder: Path, rank: int, ranks: int) -> None:
    """Writes the nodes that every other rank fetches from this one, read from their lists."""
    nodes = np.load(folder / f"rank-{rank}" / "nodes.npy")
    sizes = np.zeros(ranks, np.int32)
    leaving = []
    for other in range(ranks):
        until = np.cumsum(np.load(folder / f"rank-{other}" / "arriving.npy"))
        sizes[other] = until[rank] - (until[rank - 1] if rank else 0)
        halo = np.load(folder / f"rank-{other}" / "halo.npy", mmap_mode="r")
        leaving.append(np.searchsorted(nodes, halo[until[rank] - sizes[other] : until[rank]]).astype(np.int32))
    with file.open("wb") as opened:
        np.save(opened, np.concatenate([sizes, *leaving]))


def _chunks(graph: CompressedGraph, nodes: Ints) -> Iterator[Ints]:
    """The nodes in consecutive pieces, of about `_CHUNK` edges each or a single node."""
    total = np.cumsum(graph.offsets[nodes + 1] - graph.offsets[nodes] + 1)
    first = 0
    while first < len(nodes):
        before = total[first - 1] if first else 0
        stop = max(first + 1, int(np.searchsorted(total, before + _CHUNK, side="right")))
        yield nodes[first:stop]
        first = stop


def _places(graph: CompressedGraph, rows: Ints) -> tuple[Ints | slice, Ints]:
    """Where the edges of these rows are in the columns, one row after the other, and their numbers."""
    start, stop = graph.offsets[rows], graph.offsets[rows + 1]
    degree = stop - start
    if len(rows) and rows[-1] - rows[0] == len(rows) - 1:
        return slice(int(start[0]), int(stop[-1])), degree
    return np.repeat(start - (np.cumsum(degree) - degree), degree) + np.arange(degree.sum()), degree
