"""Reads tables of numbers from files: edges, features and labels. Every reader of tables in this library is this one.

Text is UTF-8, one row a line, with commas, semicolons, tabs or blanks between cells; the first row decides which. Text
after `#` is a comment. A first row without any number is a header. What is not understood is refused, not skipped.
"""

import csv
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Columns = Sequence[str | int]
_CHUNK = 1 << 18  # rows
_EXACT = 2**53  # text is read as float64, which holds each whole number below


def edge_chunks(path: Path, size: int = _CHUNK, columns: Columns | None = None) -> Iterator[NDArray[Any]]:
    """The edges in a file, in chunks [2, n] of at most `size`: sources, then destinations.

    Args:
        path: text, `.parquet` (needs pyarrow), or `.npy` with integers [2, E], or [E, 2] for E other than 2.
        columns: the source's and the destination's column, by name or by number from 0. Needed if there are more than
            two.

    Raises:
        ValueError: the file is not a table of two columns of whole numbers. The message names the line.
    """
    if path.suffix == ".npy":
        yield _edge_array(path, columns)
    elif path.suffix == ".parquet":
        yield from _parquet(path, min(size, _CHUNK), columns)
    else:
        for lines, table in _text(path, min(size, _CHUNK), columns, pairs=True):
            yield whole_numbers(table, path, lines).T


def read_numbers(path: Path) -> NDArray[Any]:
    """The numbers in a file, [N, C]: of text, float64; of `.npy`, as they are. An array [N] is one column.

    Raises:
        ValueError: the file is not such a table, or an empty line stands between rows: a row of its own, or none?
    """
    if path.suffix == ".npy":
        table = _array(path)
    else:
        table = np.concatenate([chunk for _, chunk in _text(path, _CHUNK, None, pairs=False)])
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not len(table) or table.dtype.kind not in "iufb":
        raise ValueError(f"{path} must be a table of numbers with at least one row; got {table.dtype}{table.shape}")
    return table


def whole_numbers(table: NDArray[Any], path: Path, lines: Sequence[int] | None = None) -> NDArray[np.int64]:
    """The rows as int64. Raises ValueError, which names the line or the row, unless all are whole and below 2^53."""
    wrong = np.flatnonzero(np.any((table != np.round(table)) | (np.abs(table) >= _EXACT), axis=1))
    if len(wrong):
        row = f"row {wrong[0] + 1}" if lines is None else f"line {lines[wrong[0]]}"
        raise ValueError(f"{row} of {path} must have whole numbers below 2^53; got {table[wrong[0]].tolist()}")
    return table.astype(np.int64)


def named(columns: str | None) -> list[str | int] | None:
    """The columns in text such as "src,dst" or "1,2"; numbers count from 0."""
    return None if columns is None else [int(c) if c.isdecimal() else c for c in map(str.strip, columns.split(","))]


def _text(
    path: Path, size: int, columns: Columns | None, pairs: bool
) -> Iterator[tuple[list[int], NDArray[np.float64]]]:
    """The numbers of the lines, and the rows, of each chunk. `pairs` takes two columns, and allows empty lines."""
    separator, width, picked, is_empty = None, 0, [0], True
    try:
        with path.open(encoding="utf-8-sig") as file:
            for lines in _chunks(_rows(file, path, gaps=pairs), size):
                if not width:
                    first = lines[0][1]
                    separator = next((mark for mark in ";,\t" if mark in first), None)
                    names = _cells(first, separator)
                    width, is_header = len(names), not any(map(_is_number, names))
                    picked = _two(path, names if is_header else [], width, columns) if pairs else [*range(width)]
                    lines = lines[1:] if is_header else lines
                if lines:
                    is_empty = False
                    yield [number for number, _ in lines], _numbers(path, lines, separator, width, picked)
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a table of numbers: it is not UTF-8 text") from None
    if is_empty:
        raise ValueError(f"{path} must be a table of numbers with at least one row")


def _rows(file: Iterable[str], path: Path, gaps: bool) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, without their comments, and their numbers from 1."""
    begun = empty = 0
    for number, line in enumerate(file, 1):
        content = line.partition("#")[0].strip(" \r\n")
        if number == 1 and content.startswith("%%MatrixMarket"):
            raise ValueError(
                f"{path} is a MatrixMarket file: its first row holds sizes and it counts from 1; "
                "graphs.from_scipy(scipy.io.mmread(path)) reads it"
            )
        if not content.strip():
            empty = empty or (number if begun and not line.strip() else 0)
            continue
        if empty and not gaps:
            raise ValueError(
                f"line {empty} of {path} is empty, so that it is unclear which node the lines after it mean; "
                "delete the line, or write the missing row"
            )
        begun = number
        yield number, content


def _numbers(
    path: Path, lines: Sequence[tuple[int, str]], separator: str | None, width: int, picked: Sequence[int]
) -> NDArray[np.float64]:
    """The picked columns of the lines [n, C]; every line must have `width` cells."""
    wrong = None
    if len(picked) < width:  # NumPy compares the lengths only of rows of which it reads all cells
        wrong = next((number for number, line in lines if len(_cells(line, separator)) != width), None)
    if wrong is None:
        try:
            table = np.loadtxt(
                [line for _, line in lines],
                ndmin=2,
                delimiter=separator,
                usecols=None if len(picked) == width else picked,
                comments=None,
                quotechar='"',
            )
        except ValueError:
            table = np.empty((0, 0))
        if table.shape == (len(lines), len(picked)):
            return table
    raise ValueError(_first_mistake(path, lines, separator, width, picked))


def _first_mistake(
    path: Path, lines: Sequence[tuple[int, str]], separator: str | None, width: int, picked: Sequence[int]
) -> str:
    for number, line in lines:
        cells = _cells(line, separator)
        if len(cells) != width:
            return f"line {number} of {path} has {len(cells)} columns, and the first row has {width}"
        for cell in (cells[k] for k in picked):
            if not _is_number(cell):
                hint = "; number the nodes from 0 first, for example with pandas.factorize" if cell.strip() else ""
                return f"line {number} of {path} has {cell.strip()[:40]!r} in place of a number{hint}"
    return f"{path} has a number that is written in a way NumPy does not read"


def _cells(line: str, separator: str | None) -> list[str]:
    return line.split() if separator is None else next(csv.reader([line], delimiter=separator))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


def _chunks(rows: Iterator[tuple[int, str]], size: int) -> Iterator[list[tuple[int, str]]]:
    while chunk := list(islice(rows, size)):
        yield chunk


def _two(path: Path, names: Sequence[str], width: int, columns: Columns | None) -> list[int]:
    """The indices of the two columns of edges."""
    names = [name.strip() for name in names]
    listed = f" ({', '.join(map(repr, names))})" if names else ""
    if columns is None:
        if width != 2:
            raise ValueError(
                f"{path} has {width} columns{listed}, and edges have two, source and destination"
                + ("; name two of them as columns, by name or by number from 0" if width > 2 else "")
            )
        return [0, 1]
    found = [names.index(str(column)) if names.count(str(column)) == 1 else column for column in columns]
    if len(found) != 2 or not all(isinstance(k, int) and 0 <= k < width for k in found) or found[0] == found[1]:
        raise ValueError(
            f"columns must be two different columns of the {width} of {path}{listed}, by name or by number from 0; "
            f"got {tuple(columns)}"
        )
    return [int(k) for k in found]


def _array(path: Path) -> NDArray[Any]:
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a table of numbers: {error}") from None


def _edge_array(path: Path, columns: Columns | None) -> NDArray[Any]:
    array = _array(path)
    if columns is not None:
        raise ValueError(f"columns= names columns of text and Parquet; {path} is an array")
    if array.ndim != 2 or 2 not in array.shape:
        raise ValueError(f"{path} must hold edges [2, E] or [E, 2]; got {list(array.shape)}")
    return array if array.shape[0] == 2 else array.T


def _parquet(path: Path, size: int, columns: Columns | None) -> Iterator[NDArray[Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"reading {path.name} needs pyarrow: pip install 'mpnn[parquet]'") from None
    file = parquet.ParquetFile(path)
    names = file.schema_arrow.names
    names = [names[k] for k in _two(path, names, len(names), columns)]
    for batch in file.iter_batches(size, columns=names):
        if any(column.null_count for column in batch.columns):
            raise ValueError(f"{path} has empty cells in columns {names}; every edge needs a source and a destination")
        yield np.stack([batch.column(name).to_numpy() for name in names])
