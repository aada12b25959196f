"""Reads tables from files: edges, features and labels. Every reader of tables in this library is this one.

pyarrow reads Parquet and the cells of text, NumPy reads arrays, scipy MatrixMarket, networkx GraphML, GEXF, GML, DOT
and JSON. A format is recognized by its content, and a file of another kind than asked for is refused.

Text is UTF-8 (or UTF-16 with its mark, or as named), with commas, semicolons, tabs, bars or blanks between cells. It
may be packed by gzip, bzip2, xz or zip. Lines that begin with `#` or `%` are comments.
"""

import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from mpnn.graph.registry import install
from mpnn.graphs.graph_files import format_of, table_of_graph
from mpnn.graphs.table import EXACT, ID as ID, OF_GRAPH as OF_GRAPH, Table as Table
from mpnn.graphs.text_table import opened, text_tables

Columns = Sequence[str | int]
_CHUNK = 1 << 18  # rows
_HEAD = 1 << 12  # characters that say what kind of text a file is
_FACTORIZE = "; number the nodes from 0 first, or let names number them (--names)"
_BANNER = re.compile(r"\s*%+\s*MatrixMarket\b[ \t]*", re.IGNORECASE)
_WORDS = (
    "((from|to|source|target|src|dst|dest|destination|head|tail|start|end|sender|receiver|citing|cited|parent|child|left|"
    "right|subject|object|node|vertex|id|user|item|author|paper)[ _.]?)+|[abuvij]"
)
are_ends = re.compile(rf"(?i)({_WORDS}),({_WORDS})|(?P<stem>[a-z_]+)(1,(?P=stem)2|0,(?P=stem)1)").fullmatch
"""Whether two words, joined by a comma, name the ends of edges."""


def read_table(
    path: Path,
    *,
    of_edges: bool = False,
    notes: bool = False,
    header: bool | None = None,
    encoding: str | None = None,
) -> Table:
    """The table in a file: text, Parquet or a NumPy array [N, C] or [N]; of edges also MatrixMarket. The nodes, or the
    edges, of a graph in GraphML, GEXF, GML, DOT or JSON.

    Args:
        of_edges: whether rows are edges. Empty lines may be between them, a header may be the only line, and an array
            is [2, E] or [E, 2].
        notes: whether text after a blank and `#` is a comment.
        header: whether the first row of text is a header. Default: what the rows say.
        encoding: of text, such as latin-1. Default: UTF-8.

    Raises:
        ValueError: the file is not a table, or two columns have one name.
        ImportError: text and Parquet need pyarrow, graphs networkx.
    """
    if path.suffix == ".npy":
        array = _edge_array(path).T if of_edges else _numeric(path)
        names = [*map(str, range(array.shape[1]))]
        return Table(path, names, len(array), lambda name: np.asarray(array[:, int(name)]), "an array")
    if _is_parquet(path):
        table = _parquet_table(path, of_edges)
    else:
        table = next(_tables_of_text(path, of_edges, notes, header, encoding))
    _refuse_twins(table, table.names)
    return table


def _tables_of_text(
    path: Path,
    of_edges: bool,
    notes: bool,
    header: bool | None = None,
    encoding: str | None = None,
    size: int | None = None,
) -> Iterator[Table]:
    """The table in a text, of whatever format: all of it, or in parts of at most `size` rows."""
    with opened(path, encoding) as file:
        head = file.read(_HEAD)
        file.seek(0)
        if _BANNER.match(head):
            yield _matrix_market(path, file, of_edges)
            return
        if re.search(r"(?i)\.mtx($|\.)", path.name):
            raise ValueError(
                f"{path} is named as a MatrixMarket file, and does not begin as one, with %%MatrixMarket matrix "
                "coordinate; write this line, or rename a table"
            )
        _pyarrow(path)
        if form := format_of(path, head):
            yield table_of_graph(path, file.read(), form, of_edges)
            return
        yield from text_tables(path, file, of_edges=of_edges, notes=notes, header=header, size=size)


def _matrix_market(path: Path, file: IO[str], of_edges: bool) -> Table:
    """A matrix, whose entry in row i and column j is an edge from i to j. Of a symmetric matrix, which the file holds
    by half, both halves."""
    from scipy.io import mmread
    from scipy.sparse import issparse

    if not of_edges:
        raise ValueError(
            f"{path} is a MatrixMarket file, which holds edges: pass it as edges, and nodes in another file"
        )
    first, _, rest = file.read().partition("\n")
    banner = _BANNER.sub("", first).lower()
    try:
        matrix = mmread(io.BytesIO(f"%%MatrixMarket {banner}\n{rest}".encode()))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path} begins as a MatrixMarket file, and is not one: {error}") from None
    if not issparse(matrix) or matrix.dtype.kind == "c":
        kind = "complex numbers" if matrix.dtype.kind == "c" else "a dense matrix"
        raise ValueError(f"{path} is a MatrixMarket file of {kind}; edges are a matrix of coordinates, real or pattern")
    ends = {"row": matrix.row.astype(np.int64) + 1, "column": matrix.col.astype(np.int64) + 1}
    columns = ends if " pattern " in f" {banner} " else {**ends, "value": matrix.data}
    read = columns.__getitem__
    return Table(path, [*columns], matrix.nnz, read, "MatrixMarket", has_ends=True, first=1)


def is_graph(path: Path, encoding: str | None = None) -> bool:
    """Whether a file holds a graph, nodes and edges: GraphML, GEXF, GML, DOT or JSON."""
    if path.suffix == ".npy" or _is_parquet(path):
        return False
    with opened(path, encoding) as file:
        return format_of(path, file.read(_HEAD)) is not None


def stated_sizes(path: Path, encoding: str | None = None) -> tuple[int, int] | None:
    """The numbers of sources and destinations that a MatrixMarket file states; None of other files."""
    if path.suffix == ".npy" or _is_parquet(path):
        return None
    with opened(path, encoding) as file:
        if not _BANNER.match(file.read(_HEAD)):
            return None
        file.seek(0)
        sizes = next((line.split() for line in file if line.strip() and not line.lstrip().startswith("%")), [])
    if len(sizes) < 2 or not all(map(str.isdecimal, sizes[:2])):
        raise ValueError(f"{path} begins as a MatrixMarket file, and has no line of sizes")
    return int(sizes[0]), int(sizes[1])


def _refuse_twins(table: Table, names: Iterable[str]) -> None:
    """Refuses names that two columns have."""
    if twice := [name for name in names if table.names.count(name) > 1]:
        raise ValueError(
            f"{table.path} has {len(table.names)} columns, and two are named {twice[0]!r}; rename one of them"
        )


def edge_chunks(
    path: Path,
    size: int = _CHUNK,
    columns: Columns | None = None,
    *,
    first: int | None = None,
    encoding: str | None = None,
    names: "tuple[Names, Names] | None" = None,
) -> Iterator[NDArray[np.int64]]:
    """The edges in a file, in chunks [2, n] of at most `size`: sources, then destinations, counted from 0.

    Args:
        path: text, Parquet, MatrixMarket, or `.npy` with integers [2, E], or [E, 2] for E other than 2.
        columns: the source's and the destination's column, by name or by number from 0. Needed if there are more than
            two, not counting the row numbers that pandas writes.
        first: the number of the first node. Default: 0, or what the format says; a file in which no edge has node 0 is
            then refused, because it may count from 1.
        encoding: of text. Default: UTF-8.
        names: those of sources and of destinations, one object twice for one set of nodes. Ends are then text.

    Raises:
        ValueError: the file is not a table of two columns of whole numbers, or of names. The message names the line.
        ImportError: text and Parquet need pyarrow.
    """
    if names is not None:
        if first is not None:
            raise ValueError(f"first is the number of the first node, and names number the nodes; got first={first}")
        for table, ends in _end_columns(path, min(size, _CHUNK), columns, encoding, names):
            yield numbered_names(table, ends, names)
        return
    least: int | None = None
    for chunk, stated in _stored_edges(path, min(size, _CHUNK), columns, encoding):
        first = _first_node(first, stated, path)
        if chunk.size:
            least = int(chunk.min() if least is None else min(chunk.min(), least))
        yield chunk.astype(np.int64) - (first or 0)
    counted_from(first, least or 0, path)


def _stored_edges(
    path: Path, size: int, columns: Columns | None, encoding: str | None
) -> Iterator[tuple[NDArray[Any], int | None]]:
    """The edges in a file as it numbers them, in chunks [2, n], and the number of the first node if the format says."""
    if path.suffix == ".npy":
        if columns is not None:
            raise ValueError(f"columns= names columns of text and Parquet; {path} is an array")
        array = _edge_array(path)
        if array.size and array.dtype.kind not in "iu":
            raise TypeError(f"edges must be integers; {path} holds {array.dtype}")
        yield from ((array[:, at : at + size], None) for at in range(0, array.shape[1], size))
        return
    for table, ends in _end_columns(path, size, columns, encoding, None):
        yield numbered_ends(table, ends), table.first


def _end_columns(
    path: Path, size: int, columns: Columns | None, encoding: str | None, names: "tuple[Names, Names] | None"
) -> Iterator[tuple[Table, list[str]]]:
    """The parts of a table, of at most `size` rows, and the names of the columns of the two ends."""
    if path.suffix == ".npy":
        raise ValueError(f"names are text, and {path} is an array of numbers")
    if _is_parquet(path):
        tables = _parquet_chunks(path, size, columns)
    else:
        tables = _tables_of_text(path, True, names is None, _has_header(path, columns, encoding, names), encoding, size)
    for table in tables:
        ends = [table.names[k] for k in edge_columns(table, columns)]
        if not len(table) and not (columns or table.has_ends or are_ends(",".join(ends))):
            raise doubtful_header(path, ends) if table.header else ValueError(f"{path} has no edge")
        yield table, ends


def _has_header(
    path: Path, columns: Columns | None, encoding: str | None, names: "tuple[Names, Names] | None"
) -> bool | None:
    """Whether the first row of a text of names is a header; None if its rows say so, or if ends are numbers."""
    if names is None or any(isinstance(column, str) for column in columns or ()):
        return None
    table = next(_tables_of_text(path, True, False, None, encoding, _CHUNK))
    ends = [table.names[k] for k in edge_columns(table, columns)]
    first = ends if table.header else [table.text(end)[0] for end in ends] if len(table) else ends
    if any(word in known.number for word, known in zip(first, names, strict=True)):
        return False
    are_words = all(len(word or "") > 1 for word in first) and are_ends(",".join(first)) is not None
    is_clear = (bool(table.header) or not are_words) if table.is_sure else are_words
    if not (is_clear or table.has_ends):
        raise doubtful_header(path, first)
    return None


def doubtful_header(path: Path, ends: Sequence[str]) -> ValueError:
    """The error about a first row of words that may be a header."""
    return ValueError(
        f"the first line of {path} may be a header or an edge of {ends[0]!r} and {ends[1]!r}: name the columns, as in "
        f"--columns {quote(','.join(ends))}, if it is a header; write a header above it if it is an edge"
    )


class Names:
    """The numbers of nodes with names: in the order in which they first appear, or of `known` in its order."""

    def __init__(self, known: Sequence[str] | None = None) -> None:
        self.is_open = known is None
        self.number = {name: k for k, name in enumerate(known or ())}
        if len(self.number) < len(known or ()):
            twice = next(name for name, count in Counter(known).items() if count > 1)
            raise ValueError(f"names must be distinct; {twice!r} is there twice")

    def __len__(self) -> int:
        return len(self.number)

    def number_of(self, words: Sequence[str]) -> NDArray[np.int64]:
        """The numbers of words, int64; of unknown ones -1, or new ones."""
        if self.is_open:
            for word in words:
                self.number.setdefault(word, len(self.number))
        return np.array([self.number.get(word, -1) for word in words], np.int64)


def numbered_names(table: Table, ends: Sequence[str], names: tuple[Names, Names]) -> NDArray[np.int64]:
    """The sources and destinations that two columns name, int64 [2, E]."""
    import pyarrow

    words = np.stack([table.text(end) for end in ends], 1)
    table.refuse((words == None).any(1), "has an edge without a source or a destination")  # noqa: E711
    encoded = pyarrow.array(words.ravel(), pyarrow.string()).dictionary_encode()  # in the order of rows
    place = np.asarray(encoded.indices).reshape(-1, 2)
    distinct = encoded.dictionary.to_pylist()
    if names[0] is names[1]:
        numbers = names[0].number_of(distinct)[place]
    else:
        numbers = np.stack([_of_one_end(end, distinct, own) for end, own in zip(place.T, names, strict=True)], 1)
    if (numbers < 0).any():
        row, end = np.argwhere(numbers < 0)[0]
        what = f"has a node {words[row, end]!r} in column {ends[end]!r}, which is none of the {len(names[end]):,} names"
        table.refuse(np.arange(len(table)) == row, what)
    return numbers.T


def _of_one_end(place: NDArray[Any], distinct: Sequence[str], names: Names) -> NDArray[np.int64]:
    """The numbers of the names of one end, whose places among distinct words are given."""
    used = [*dict.fromkeys(place.tolist())]
    number = np.full(len(distinct), -1)
    number[used] = names.number_of([distinct[k] for k in used])
    return number[place]


def _first_node(first: int | None, stated: int | None, path: Path) -> int | None:
    """The number of the first node: as asked for, or as the format says."""
    if None not in (first, stated) and first != stated:
        raise ValueError(f"{path} counts nodes from {stated}, as its format says; leave out first={first}")
    return stated if first is None else first


def numbered_ends(table: Table, ends: Sequence[str], hint: str = _FACTORIZE) -> NDArray[np.int64]:
    """The sources and destinations in two columns, int64 [2, E]."""
    numbers = np.stack([table.numbers(end, hint) for end in ends], 1)
    table.refuse(np.isnan(numbers).any(1), "has an edge without a source or a destination")
    wrong = np.any((numbers != np.round(numbers)) | (np.abs(numbers) >= EXACT), axis=1)
    if wrong.any():
        table.refuse(wrong, f"must have whole numbers below 2^53; got {numbers[wrong.argmax()].tolist()}")
    return numbers.T.astype(np.int64)


def edge_columns(table: Table, columns: Columns | None) -> list[int]:
    """The indices of the two columns of edges among those of a table."""
    names = table.names if table.has_names else []
    width = len(table.names)
    listed = f" ({', '.join(map(repr, names))})" if names else ""
    if columns is None:
        if width != 2 and not table.has_ends:
            raise ValueError(
                f"{table.path} has {width} columns{listed}, and edges have two, source and destination"
                + ("; name two as columns (--columns src,dst), by name or by number from 0" if width > 2 else "")
                + (", or one as weights" if width == 3 else "")
            )
        columns = (0, 1)
    places = [names.index(str(column)) if names.count(str(column)) == 1 else column for column in columns]
    if len(places) != 2 or not all(isinstance(k, int) and 0 <= k < width for k in places) or places[0] == places[1]:
        raise ValueError(
            f"columns must be two different columns of the {width} of {table.path}{listed}, by name or by number from "
            f"0; got {tuple(columns)}"
        )
    _refuse_twins(table, [table.names[int(k)] for k in places])
    return [int(k) for k in places]


def counted_from(first: int | None, least: int, path: Path, stated: int | None = None) -> int:
    """The number of the first node in a file of edges whose smallest number is `least`. `stated`: what its format says.

    Raises:
        ValueError: no edge has node 0, so that the file may count from 1, and `first` does not say it.
    """
    first = _first_node(first, stated, path)
    if first is None and least > 0:
        raise ValueError(
            f"no edge of {path} has node 0: set first to 1 (--first 1) if the file counts nodes from 1, and to 0 if "
            "node 0 has no edges"
        )
    return first or 0


def named(columns: str | None) -> list[str | int] | None:
    """The columns in text such as "src,dst" or "1,2"; numbers count from 0."""
    return None if columns is None else [int(c) if c.isdecimal() else c for c in map(str.strip, columns.split(","))]


# -------------------------------------------------------------------------------------------------- arrays, Parquet


def _numeric(path: Path) -> NDArray[Any]:
    """The numbers in an array [N, C] or [N], as [N, C]."""
    table = _array(path)
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not len(table) or table.dtype.kind not in "iufb":
        raise ValueError(f"{path} must be a table of numbers with at least one row; got {table.dtype}{table.shape}")
    return table


def _array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a table of numbers: {error}") from None


def _edge_array(path: Path) -> NDArray[Any]:
    array = _array(path)
    if array.ndim != 2 or 2 not in array.shape:
        raise ValueError(f"{path} must hold edges [2, E] or [E, 2]; got {list(array.shape)}")
    return array if array.shape[0] == 2 else array.T


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
    except ImportError:
        raise ImportError(f"reading {path.name} needs pyarrow: {install('tables')}") from None
    return pyarrow


def _is_parquet(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix == ".parquet" or file.read(4) == b"PAR1"


def _parquet_file(path: Path) -> tuple[Any, list[str], list[Any]]:
    """A file, the names of its columns, and what pandas says about the row numbers in it."""
    arrow = _pyarrow(path)
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is not Parquet: {error}") from None
    written = json.loads((file.schema_arrow.metadata or {}).get(b"pandas", b"{}"))
    index = [one for one in written.get("index_columns", []) if not isinstance(one, str) or one.lower() != ID]
    return file, [name for name in file.schema_arrow.names if name not in index], index


def _parquet_table(path: Path, of_edges: bool) -> Table:
    file, names, index = _parquet_file(path)
    size = file.metadata.num_rows
    if not names or not (size or of_edges):
        raise ValueError(f"{path} must be a table with at least one row")
    table = Table(path, names, size, lambda name: file.read(columns=[name]).column(0), "Parquet")
    if not index:
        return table
    first = index[0]
    if isinstance(first, str):
        is_ordered = len(index) == 1 and table.text(first).tolist() == [*map(str, range(size))]
    else:
        is_ordered = (first.get("start"), first.get("step")) == (0, 1)
    return replace(table, form="Parquet, row numbers left out", is_ordered=is_ordered)


def _parquet_chunks(path: Path, size: int, columns: Columns | None) -> Iterator[Table]:
    file, names, _ = _parquet_file(path)
    whole = Table(path, names, file.metadata.num_rows, lambda name: None, "Parquet")
    picked = [names[k] for k in edge_columns(whole, columns)]
    for batch in file.iter_batches(size, columns=picked):
        yield replace(whole, size=batch.num_rows, read=batch.column)
