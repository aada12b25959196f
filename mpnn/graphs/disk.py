"""Graphs larger than memory: a folder of memory-mapped columns, written by an external sort in bounded memory.

header.json    format, version, sizes, and a SHA-256 of each of the other files
offsets.npy    int64 [num_dst + 1]
columns.npy    int32 [E]: the sources of each row, ascending
edge_ids.npy   int64 [E], if asked for: the index of each edge in the input
names.json     the names of the nodes, [nodes] or [sources, destinations], if the input names them
"""

import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mpnn.graph.arguments import at_least
from mpnn.graph.files import atomic_path
from mpnn.graphs.compressed import CompressedGraph

Ints = NDArray[np.int64]
_FORMAT = "mpnn csr"
_VERSION = 1
_DTYPES = {"offsets": np.int64, "columns": np.int32, "edge_ids": np.int64}
_NAMES = "names.json"
_SAMPLES = 1 << 14  # keys of each sorted piece that decide where pieces are cut


def open_csr(folder: str | os.PathLike[str], *, verify: bool = False) -> CompressedGraph:
    """Opens a graph that `write_csr` wrote, as memory maps: no edge is read.

    Args:
        verify: also compare all bytes with the digests of the header, which reads every file once.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: the folder is not such a graph, is damaged or was not written completely.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}; graphs.write_csr writes one")
    try:
        header = json.loads((folder / "header.json").read_text())
        if header["format"] != _FORMAT:
            raise ValueError(f"the format is {header['format']!r}")
        num_dst, num_src, num_edges = (int(header[name]) for name in ("num_dst", "num_src", "num_edges"))
        digests = dict(header["sha256"])
        version = int(header["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is not a graph of graphs.write_csr: its header.json cannot be read: {error}"
        ) from None
    if version != _VERSION:
        raise ValueError(
            f"{folder} has version {version} of the format and this library reads {_VERSION}; write it again"
        )
    sizes = {"offsets": num_dst + 1, "columns": num_edges, "edge_ids": num_edges}
    arrays = {name: _open(folder / f"{name}.npy", sizes[name], _DTYPES[name]) for name in _DTYPES if name in digests}
    if set(arrays) < {"offsets", "columns"}:
        raise ValueError(f"{folder} is damaged: its header.json names only {sorted(arrays)}; write it again")
    offsets, columns = arrays["offsets"], arrays["columns"]
    if offsets[0] != 0 or offsets[-1] != num_edges:
        raise ValueError(f"{folder / 'offsets.npy'} is damaged: it must go from 0 to {num_edges}; write it again")
    files = {name: folder / name if name == _NAMES else folder / f"{name}.npy" for name in digests}
    for name, file in files.items() if verify else ():
        if _digest(file) != digests[name]:
            raise ValueError(f"{file} is damaged: its bytes differ from the header's digest; write it again")
    return CompressedGraph(offsets, columns, num_src, arrays.get("edge_ids"), names_file=files.get(_NAMES))


def write_csr(
    folder: str | os.PathLike[str],
    edges: Any,
    num_nodes: int | None = None,
    *,
    num_src: int | None = None,
    num_dst: int | None = None,
    columns: Sequence[str | int] | None = None,
    first: int | None = None,
    encoding: str | None = None,
    names: Literal["one", "two"] | Sequence[str] | None = None,
    edge_ids: bool = False,
    memory: int = 1 << 30,
) -> CompressedGraph:
    """Writes edges to a folder that `open_csr` maps, and opens it. Neither input nor output has to fit into memory.

    Edges are sorted by an external sort: pieces are sorted in memory and written next to the result (8 bytes an edge,
    16 with ids), then cut at common keys and merged. The folder gets its name after all of it is on the disk.

    Args:
        edges: a path, or integers [2, E], sources in row 0, or an iterable of chunks [2, n]. Paths are

            - `.npy`: integers [2, E], or [E, 2] for E other than 2;
            - Parquet: two columns, source and destination;
            - MatrixMarket: an entry in row i and column j is an edge from i to j, and both edges of a symmetric matrix.
              It is read at once, and states the number of nodes;
            - anything else: text, one pair a line, separated by commas, semicolons, tabs, bars or blanks, with comments
              after `#`. The first line may be a header. It may be packed (gzip, bzip2, xz, zip).

            Text and Parquet need pyarrow (the extra `tables`).
        num_nodes: the number of nodes, if sources and destinations are one set. Default: the largest index plus 1.
        num_src, num_dst: the sizes of two sets of nodes, instead of `num_nodes`.
        columns: the columns of sources and destinations in a file, by name or by number from 0; needed if it has more
            than two.
        first: the number of the first node in a file, 0 or 1. Default: 0; a file in which no edge has node 0 is then
            refused, because it may count from 1.
        encoding: of text, such as latin-1. Default: UTF-8.
        names: whether the ends of a file's edges are names. "one": of one set of nodes, "two": of sources and of
            destinations, numbered as they first appear; or a sequence of the names of one set in the order of their
            numbers, such as `node_tables(...).ids`. `names` of the result holds them. They are kept in memory.
        edge_ids: also store the index of each edge in the input.
        memory: bytes that sorting may take.

    Raises:
        FileExistsError: the folder exists.
        IndexError: an edge refers to a node that does not exist. The message names the edge.
        ValueError: the input has another form, or an index of 2^31 or more. The message names the line of a file.
    """
    if num_nodes is not None and (num_src is not None or num_dst is not None):
        raise ValueError("pass num_nodes for one set of nodes, or num_src and num_dst for two sets, not both")
    if (num_src is None) != (num_dst is None):
        raise ValueError("pass both num_src and num_dst, or neither")
    at_least("memory", memory, 1 << 16)
    numbering = _numbering(names, edges)
    piece = memory // (96 if edge_ids else 64)  # edges sorted at once: read, joined, turned into keys, sorted
    with atomic_path(folder, folder=True) as temporary:
        if num_nodes is not None:
            num_src = num_dst = num_nodes
        elif num_src is None and numbering is None and isinstance(edges, (str, os.PathLike)):
            from mpnn.graphs.tables import stated_sizes

            num_src, num_dst = stated_sizes(Path(edges), encoding) or (None, None)
        elif num_src is None and not (numbering is None or numbering[0].is_open):
            num_src = num_dst = len(numbering[0])
        chunks = chunks_of(edges, piece, columns, first=first, encoding=encoding, names=numbering)
        pieces, most = _sorted_pieces(temporary, chunks, num_src, num_dst, edge_ids)
        if num_src is None or num_dst is None:
            num_src = num_dst = max(most) + 1
            if numbering is not None:
                num_src, num_dst = map(len, numbering)
        num_edges = sum(len(keys) for keys, _ in pieces)
        _merge(temporary, pieces, num_dst, num_edges, piece, edge_ids)
        written = [f"{name}.npy" for name in _DTYPES if name != "edge_ids" or edge_ids]
        if numbering is not None:
            written.append(_NAMES)
            _write_names(temporary / _NAMES, numbering)
        header = {
            "format": _FORMAT,
            "version": _VERSION,
            "num_dst": num_dst,
            "num_src": num_src,
            "num_edges": num_edges,
            "sha256": {name.removesuffix(".npy"): _digest(temporary / name) for name in written},
        }
        del pieces
        for file in temporary.glob("piece*"):
            file.unlink()
        (temporary / "header.json").write_text(json.dumps(header, indent=1))
    return open_csr(folder)


def _numbering(names: Any, edges: Any) -> Any:
    """The `mpnn.graphs.tables.Names` of sources and of destinations; None if ends are numbers."""
    if names is None:
        return None
    from mpnn.graphs.tables import Names

    if not isinstance(edges, (str, os.PathLike)):
        raise ValueError("names are those in a file of edges, and edges are no path")
    if isinstance(names, str) and names not in ("one", "two"):
        raise ValueError(f'names must be "one", "two" or the names of all nodes; got {names!r}')
    own = Names(None if isinstance(names, str) else [*names])
    return own, Names() if names == "two" else own


def _write_names(path: Path, numbering: Any) -> None:
    sets = numbering[:1] if numbering[0] is numbering[1] else numbering
    path.write_text(json.dumps([[*one.number] for one in sets], ensure_ascii=False), encoding="utf-8")


def chunks_of(
    edges: Any,
    size: int,
    columns: Sequence[str | int] | None = None,
    *,
    first: int | None = None,
    encoding: str | None = None,
    names: Any = None,
) -> Iterator[Ints]:
    """The edges in chunks of at most `size`, int64 [2, n], in their order. See `write_csr`."""
    parts: Iterable[Any]
    if isinstance(edges, (str, os.PathLike)):
        from mpnn.graphs.tables import edge_chunks

        parts = edge_chunks(Path(edges), size, columns, first=first, encoding=encoding, names=names)
    elif columns is not None:
        raise ValueError("columns= names columns of a file, and edges are no path")
    elif isinstance(edges, (Tensor, np.ndarray, list, tuple)):
        parts = [edges]
    elif isinstance(edges, Iterable):
        parts = edges
    else:
        raise TypeError(f"edges must be a path, integers [2, E] or an iterable of them; got {type(edges).__name__}")
    waiting = []
    count = 0
    for part in parts:
        array = _checked(np.asarray(part))
        for start in range(0, array.shape[1], size):
            waiting.append(array[:, start : start + size])
            count += waiting[-1].shape[1]
            if count > size:
                yield np.concatenate(waiting[:-1], 1, dtype=np.int64)
                waiting, count = waiting[-1:], waiting[-1].shape[1]
    if waiting:
        yield np.concatenate(waiting, 1, dtype=np.int64)


def _checked(edges: NDArray[Any]) -> NDArray[Any]:
    if edges.ndim != 2 or edges.shape[0] != 2:
        hint = "; pass its transpose" if edges.ndim == 2 and edges.shape[1] == 2 else ""
        raise ValueError(f"edges must have shape [2, E], sources above destinations; got {list(edges.shape)}{hint}")
    if edges.size and edges.dtype.kind not in "iu":
        raise TypeError(f"edges must be integers; got {edges.dtype}")
    return edges if edges.size else edges.astype(np.int64)


def _sorted_pieces(
    folder: Path, chunks: Iterator[Ints], num_src: int | None, num_dst: int | None, with_ids: bool
) -> tuple[list[tuple[Ints, Ints | None]], list[int]]:
    """Memory maps of sorted keys (destination, source) and of edge ids; the largest source and destination."""
    pieces: list[tuple[Ints, Ints | None]] = []
    most = [-1, -1]
    done = 0
    for k, chunk in enumerate(chunks):
        for end, (role, n) in enumerate((("source", num_src), ("destination", num_dst))):
            _check_ends(chunk, chunk[end], role, 2**31 - 1 if n is None else n, n is None, done)
            most[end] = max(most[end], int(chunk[end].max(initial=-1)))
        keys = chunk[1] << 32 | chunk[0]
        ids = None
        if with_ids:
            order = np.argsort(keys, kind="stable")
            keys = keys[order]
            ids = order + done
        else:
            keys.sort()
        pieces.append(
            (_spill(folder / f"piece{k}.keys", keys), None if ids is None else _spill(folder / f"piece{k}.ids", ids))
        )
        done += chunk.shape[1]
    return pieces, most


def _check_ends(chunk: Ints, ends: Ints, role: str, n: int, is_limit: bool, done: int) -> None:
    if not len(ends) or (ends.min() >= 0 and ends.max() < n):
        return
    e = int(np.flatnonzero((ends < 0) | (ends >= n))[0])
    limit = "indices must be from 0 to 2^31 - 2" if is_limit else f"there are {n} {role}s, counted from 0"
    raise IndexError(f"edge {done + e} ({chunk[0, e]} -> {chunk[1, e]}) has {role} {ends[e]}, but {limit}")


def _spill(path: Path, values: Ints) -> Ints:
    """Writes an array to a file and returns a memory map of it."""
    values.tofile(path)
    return np.memmap(path, np.int64, "r") if len(values) else values


def _merge(
    folder: Path, pieces: list[tuple[Ints, Ints | None]], num_dst: int, num_edges: int, piece: int, with_ids: bool
) -> None:
    """Merges sorted pieces range of keys by range, and writes offsets, columns and ids."""
    create = np.lib.format.open_memmap
    offsets = create(folder / "offsets.npy", "w+", np.int64, (num_dst + 1,))
    columns = create(folder / "columns.npy", "w+", np.int32, (num_edges,))
    edge_ids = create(folder / "edge_ids.npy", "w+", np.int64, (num_edges,)) if with_ids else None
    cuts = _cuts([keys for keys, _ in pieces], piece)
    start = 0
    for k in range(len(cuts[0]) - 1 if cuts else 0):
        keys = np.concatenate([p[c[k] : c[k + 1]] for (p, _), c in zip(pieces, cuts, strict=True)])
        stop = start + len(keys)
        if edge_ids is None:
            keys.sort()
        else:
            ids = np.concatenate([p[c[k] : c[k + 1]] for (_, p), c in zip(pieces, cuts, strict=True) if p is not None])
            order = np.argsort(keys, kind="stable")
            keys, edge_ids[start:stop] = keys[order], ids[order]
        columns[start:stop] = keys & 0xFFFFFFFF
        _count_rows(offsets, keys >> 32)
        start = stop
    total = 0
    for at in range(0, num_dst + 1, piece):  # in place, and block by block: the offsets may exceed memory
        block = np.cumsum(offsets[at : at + piece]) + total
        offsets[at : at + piece], total = block, int(block[-1])
    for array in (offsets, columns, edge_ids):
        if array is not None:
            array.flush()


def _cuts(pieces: list[Ints], size: int) -> list[Ints]:
    """Where to cut each sorted piece, so that cuts of all pieces are at the same keys and about `size` edges lie
    between two of them."""
    total = sum(map(len, pieces))
    if not total:
        return []
    samples = np.sort(np.concatenate([p[:: max(1, len(p) // _SAMPLES)] for p in pieces]))
    ranges = -(-total // size)
    at = np.unique(samples[np.arange(1, ranges) * len(samples) // ranges])
    return [np.concatenate([[0], np.searchsorted(p, at), [len(p)]]).astype(np.int64) for p in pieces]


def _count_rows(offsets: Ints, rows: Ints) -> None:
    """Adds the number of edges of each row to `offsets[row + 1]`, for ascending rows."""
    if len(rows):
        first = np.flatnonzero(np.append(True, rows[1:] != rows[:-1]))
        offsets[rows[first] + 1] += np.diff(np.append(first, len(rows)))


def _open(path: Path, size: int, dtype: Any) -> NDArray[Any]:
    try:
        array = np.load(path, mmap_mode="r") if size else np.load(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged or missing; write the graph again: {error}") from None
    if array.shape != (size,) or array.dtype != dtype:
        raise ValueError(
            f"{path} is damaged: its header.json says {np.dtype(dtype)} [{size}], and it holds {array.dtype} "
            f"{list(array.shape)}; write the graph again"
        )
    if isinstance(array, np.memmap) and hasattr(mmap, "MADV_RANDOM"):
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]  # rows are read in any order: no read-ahead
    return array


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()
