"""Reads tables from files: edges, features and labels. Every reader of tables in this library is this one.

Text is UTF-8, one row a line, with commas, semicolons, tabs or blanks between cells; the first row decides which. Text
after `#` is a comment; in tables with columns of text, only lines that begin with `#` are. A first row is a header if
it has no number, or a cell `id`. What is not understood is refused, not skipped.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import isnan, nan
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Columns = Sequence[str | int]
ID = "id"  # the column that names the rows
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
        for rows, head in _text(path, min(size, _CHUNK), gaps=True, comments=True):
            picked = edge_columns(path, head.cells if head.is_header else [], len(head.cells), columns)
            hint = "; number the nodes from 0 first, for example with pandas.factorize"
            yield whole_numbers(_numbers(path, rows, head, picked, hint), path, [number for number, _ in rows]).T


@dataclass(frozen=True, eq=False)
class Table:
    """Columns of a file, by name: numbers [N], or text [N] without the blanks around it.

    lines: the line of each row, from 1; None if the file has none.
    """

    path: Path
    columns: dict[str, NDArray[Any]]
    lines: Sequence[int] | None

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"row {row + 1} of {self.path}" if self.lines is None else f"line {self.lines[row]} of {self.path}"

    def refuse(self, wrong: Any, why: str) -> None:
        """Raises ValueError, which names the first row where `wrong` [N], if there is one."""
        if np.any(wrong):
            raise ValueError(f"{self.where(int(np.argmax(wrong)))} {why}")


def column_names(path: Path) -> list[str]:
    """The names of the columns in the header; without a header, their numbers from 0 as text.

    Raises:
        ValueError: the file is not a table, or two columns have one name.
    """
    if path.suffix == ".npy":
        names = [*map(str, range(_numeric(path).shape[1]))]
    elif path.suffix == ".parquet":
        names = _parquet_file(path).schema_arrow.names
    else:
        with _open(path) as file:
            row = next(_rows(file, path, gaps=True, comments=False), None)
        if row is None:
            raise _empty(path)
        names = _Head.of(row[1]).columns
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ValueError(f"{path} has {len(names)} columns, and two are named {twice[0]!r}; rename one of them")
    return names


def read_columns(
    path: Path, numbers: Sequence[str] = (), text: Sequence[str] = (), hint: str = "", gaps: bool = False
) -> Table:
    """These columns of a file: text, `.parquet` (needs pyarrow) or `.npy`, whose numbers stay numbers.

    Args:
        numbers: columns to read as float64. text: columns to read as they are. Names are those of `column_names`.
        hint: ends the message about text in place of a number. gaps: whether empty lines are allowed.

    Raises:
        ValueError: a cell of `numbers` is none, or an empty line stands between rows: a row of its own, or none?
    """
    if path.suffix == ".npy":
        table = _numeric(path)
        return Table(path, {name: table[:, int(name)] for name in (*numbers, *text)}, None)
    if path.suffix == ".parquet":
        return _parquet_columns(path, numbers, text)
    lines: list[int] = []
    parts: list[list[NDArray[Any]]] = []
    for rows, head in _text(path, _CHUNK, gaps, comments=not text):
        of_numbers, of_text = ([head.columns.index(name) for name in names] for names in (numbers, text))
        values = _numbers(path, rows, head, of_numbers, hint).T if numbers else ()
        parts.append([*values, *(_strings(path, rows, head, of_text) if text else ())])
        lines += [number for number, _ in rows]
    columns = (np.concatenate(pieces) for pieces in zip(*parts, strict=True))
    return Table(path, dict(zip((*numbers, *text), columns, strict=True)), lines)


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


@dataclass(frozen=True)
class _Head:
    """What the first row says: the separator (None: blanks), its cells, and whether they are names."""

    separator: str | None
    cells: list[str]
    is_header: bool

    @staticmethod
    def of(line: str) -> "_Head":
        separator = next((mark for mark in ";,\t" if mark in line), None)
        cells = [cell.strip() for cell in _cells(line, separator)]
        return _Head(separator, cells, ID in cells or not any(map(_is_number, cells)))

    @property
    def columns(self) -> list[str]:
        return self.cells if self.is_header else [*map(str, range(len(self.cells)))]


def _text(path: Path, size: int, gaps: bool, comments: bool) -> Iterator[tuple[list[tuple[int, str]], _Head]]:
    """The rows of text in chunks, with their numbers. `gaps` allows empty lines, `comments` text after `#`."""
    head, is_empty = None, True
    with _open(path) as file:
        for lines in _chunks(_rows(file, path, gaps, comments), size):
            if head is None:
                head = _Head.of(lines[0][1])
                lines = lines[1:] if head.is_header else lines
            if lines:
                is_empty = False
                yield lines, head
    if is_empty:
        raise _empty(path)


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    try:
        with path.open(encoding="utf-8-sig") as file:
            yield file
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a table of numbers: it is not UTF-8 text") from None


def _empty(path: Path) -> ValueError:
    return ValueError(f"{path} must be a table of numbers with at least one row")


def _rows(file: Iterable[str], path: Path, gaps: bool, comments: bool) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, without their comments, and their numbers from 1."""
    begun = empty = 0
    for number, line in enumerate(file, 1):
        begins = line.lstrip().startswith("#")
        if begins and begun and not comments and any(mark in line for mark in ",;\t"):
            raise ValueError(
                f"line {number} of {path} begins with #, and may be a comment or a row: put its first cell in quotes, "
                "or delete the line"
            )
        content = (line.partition("#")[0] if comments or begins else line).strip(" \r\n")
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
    path: Path, lines: Sequence[tuple[int, str]], head: _Head, picked: Sequence[int], hint: str
) -> NDArray[np.float64]:
    """The picked columns of the lines [n, C]; every line must have as many cells as the head."""
    separator, width, wrong = head.separator, len(head.cells), None
    if len(picked) < width:  # NumPy compares the lengths only of rows of which it reads all cells
        wrong = next((number for number, line in lines if len(_cells(line, separator)) != width), None)
    if wrong is None:
        try:
            table = np.loadtxt(
                [line for _, line in lines],
                ndmin=2,
                delimiter=separator,
                usecols=None if [*picked] == [*range(width)] else picked,
                comments=None,
                quotechar='"',
            )
        except ValueError:
            table = np.empty((0, 0))
        if table.shape == (len(lines), len(picked)):
            return table
    raise ValueError(_first_mistake(path, lines, head, picked, hint))


def _strings(
    path: Path, lines: Sequence[tuple[int, str]], head: _Head, picked: Sequence[int]
) -> list[NDArray[np.str_]]:
    """The picked columns of the lines, [n] each; every line must have as many cells as the head."""
    cells = [_cells(line, head.separator) for _, line in lines]
    if any(len(row) != len(head.cells) for row in cells):
        raise ValueError(_first_mistake(path, lines, head))
    return [np.array([row[k].strip() for row in cells]) for k in picked]


def _first_mistake(
    path: Path, lines: Sequence[tuple[int, str]], head: _Head, picked: Sequence[int] = (), hint: str = ""
) -> str:
    for number, line in lines:
        cells = _cells(line, head.separator)
        if len(cells) != len(head.cells):
            return f"line {number} of {path} has {len(cells)} columns, and the first row has {len(head.cells)}"
        for k in picked:
            if not _is_number(cells[k]):
                cell, column = cells[k].strip()[:40], f" in column {head.cells[k]!r}" if head.is_header else ""
                return f"line {number} of {path} has {cell!r} in place of a number{column}{hint if cell else ''}"
    return f"{path} has a number that is written in a way NumPy does not read"


def _cells(line: str, separator: str | None) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator or " ", skipinitialspace=separator is None))
    except csv.Error as error:  # of a cell with more than 131,072 characters
        raise ValueError(f"the row that begins with {line[:40]!r} cannot be read: {error}") from None


def number(cell: str) -> float:
    """The number that a cell holds; NaN if it holds none."""
    try:
        return nan if "_" in cell else float(cell)
    except ValueError:
        return nan


def _is_number(cell: str) -> bool:
    return not isnan(number(cell)) or cell.strip().lower() in ("nan", "+nan", "-nan")


def _chunks(rows: Iterator[tuple[int, str]], size: int) -> Iterator[list[tuple[int, str]]]:
    while chunk := list(islice(rows, size)):
        yield chunk


def edge_columns(path: Path, names: Sequence[str], width: int, columns: Columns | None) -> list[int]:
    """The indices of the two columns of edges, among `width` columns with these names ([] without a header)."""
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


def _edge_array(path: Path, columns: Columns | None) -> NDArray[Any]:
    array = _array(path)
    if columns is not None:
        raise ValueError(f"columns= names columns of text and Parquet; {path} is an array")
    if array.ndim != 2 or 2 not in array.shape:
        raise ValueError(f"{path} must hold edges [2, E] or [E, 2]; got {list(array.shape)}")
    return array if array.shape[0] == 2 else array.T


def _parquet_file(path: Path) -> Any:
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"reading {path.name} needs pyarrow: pip install 'mpnn[parquet]'") from None
    return parquet.ParquetFile(path)


def _parquet(path: Path, size: int, columns: Columns | None) -> Iterator[NDArray[Any]]:
    file = _parquet_file(path)
    names = file.schema_arrow.names
    names = [names[k] for k in edge_columns(path, names, len(names), columns)]
    for batch in file.iter_batches(size, columns=names):
        if any(column.null_count for column in batch.columns):
            raise ValueError(f"{path} has empty cells in columns {names}; every edge needs a source and a destination")
        yield np.stack([batch.column(name).to_numpy() for name in names])


def _parquet_columns(path: Path, numbers: Sequence[str], text: Sequence[str]) -> Table:
    table = _parquet_file(path).read(columns=[*numbers, *text])
    if not len(table):
        raise _empty(path)
    columns = {}
    for name in numbers:
        values = table.column(name).to_numpy()
        if table.column(name).null_count or values.dtype.kind not in "iufb":
            raise ValueError(f"column {name!r} of {path} must hold numbers without gaps; got {table.column(name).type}")
        columns[name] = values.astype(np.float64)
    for name in text:
        cells = ("" if value is None else str(value).strip() for value in table.column(name).to_pylist())
        columns[name] = np.array([*cells])
    return Table(path, columns, None)
