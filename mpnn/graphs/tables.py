"""Reads tables from files: edges, features and labels. Every reader of tables in this library is this one.

pyarrow reads text and Parquet, NumPy reads arrays. Which separator and which header a text has is decided here, and so
is what would be read wrongly without a word: lines whose rows do not fit are refused and named.

Text is UTF-8 (or UTF-16 with its mark), one row a line, with commas, semicolons, tabs, bars or blanks between cells. It
may be packed by gzip, bzip2, xz or zip. Lines that begin with `#` or `%` are comments.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Columns = Sequence[str | int]
ID = "id"  # the column that names the rows, in small or capital letters; without it, one of these
_OTHER_IDS = "node_id", "nodeid"
OF_GRAPH = "graph", "graph_id", "graphid"  # the column that names the graph of a row
MISSING = (
    *("", "NA", "N/A", "n/a", "nan", "NaN", "-nan", "-NaN", "None", "null", "NULL", "<NA>", "#NA", "#N/A"),
    *("#N/A N/A", "1.#IND", "1.#QNAN", "-1.#IND", "-1.#QNAN"),
)
"""Cells without a value, as pandas' `read_csv` has them."""

_BYTES = 1 << 24  # of text that are read at once
_CHUNK = 1 << 18  # rows
_SAMPLE = 1000  # rows that decide separator and header
_EXACT = 2**53  # numbers are float64, which holds each whole number below
_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas", " ": "blanks"}
_ONE_COLUMN = "\x1f"  # stands in no text
_NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
_DECIMAL_COMMA = r"[+-]?([0-9]+|[0-9]*,[0-9]+)([eE][+-]?[0-9]+)?"
_IS_NUMBER, _IS_DECIMAL_COMMA = re.compile(_NUMBER).fullmatch, re.compile(_DECIMAL_COMMA).fullmatch
_PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_IS_COMMENT = re.compile(r"\s*[#%]").match
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")
_QUOTES = 'has a quote too few or too many; a row is one line, and "" is a quote in a cell'
_FACTORIZE = "; number the nodes from 0 first, for example with pandas.factorize"


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file.

    names: of the columns; their numbers from 0 as text if the file has no header. Row numbers of pandas are no column.
    read: the column of a name, a NumPy or an Arrow array.
    form: how the file was read, for people. lines: the line of each row, from 1; None if the file has none.
    header: the cells of the header. is_sure: False if the header may be a row of words.
    decimal: the mark in numbers; "?" if 1,234 may be a thousand or one.
    is_ordered: False if the file numbers its rows, and otherwise than 0, 1, 2, ...
    """

    path: Path
    names: Sequence[str]
    size: int
    read: Callable[[str], Any]
    form: str
    lines: NDArray[np.int64] | None = None
    header: Sequence[str] = ()
    is_sure: bool = True
    decimal: str = "."
    is_ordered: bool = True

    def __len__(self) -> int:
        return self.size

    @property
    def id(self) -> str | None:
        """The column that names the rows."""
        return self.first_of((ID, *_OTHER_IDS))

    @property
    def of_graph(self) -> str | None:
        """The column that names the graph of each row."""
        return self.first_of(OF_GRAPH)

    def first_of(self, words: Iterable[str]) -> str | None:
        """The column named by the first of these words that is there, in small or capital letters."""
        names = {name.lower(): name for name in self.names}
        return next((names[word] for word in words if word in names), None)

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return f"row {row + 1} of {self.path}" if self.lines is None else f"line {self.lines[row]} of {self.path}"

    def refuse(self, wrong: Any, why: str) -> None:
        """Raises ValueError, which names the first row where `wrong` [N], if there is one."""
        if np.any(wrong):
            raise ValueError(f"{self.where(int(np.argmax(wrong)))} {why}")

    def text(self, name: str) -> NDArray[Any]:
        """A column as text without the blanks around it [N]; None where it is missing."""
        cells = self._cells(name)
        if not isinstance(cells, np.ndarray):
            return np.asarray(cells.to_numpy(zero_copy_only=False), "O")
        words = (None if value is None or value != value else _as_text(value) for value in cells.tolist())
        return np.array([*words], "O")

    def numbers(self, name: str, hint: str = "") -> NDArray[np.float64]:
        """A column as float64 [N]; NaN where it is missing. `hint` ends the message about text in place of a number."""
        cells = self._cells(name)
        if isinstance(cells, np.ndarray):
            return cells.astype(np.float64)
        wrong = ~self._is_number(cells, name)
        if wrong.any():
            cell = cells[int(wrong.argmax())].as_py()[:40]
            where = f" in column {name!r}" if self.header or self.lines is None else ""
            hint = "; other numbers of the file have decimal commas" if self.decimal == "," and "." in cell else hint
            self.refuse(wrong, f"has {cell!r} in place of a number{where}{hint}")
        return self._floats(cells)

    def values(self, name: str) -> NDArray[Any]:
        """A column as float64, or as text if none of its cells is a number."""
        cells = self._cells(name)
        if isinstance(cells, np.ndarray):
            return cells.astype(np.float64)
        is_number = self._is_number(cells, name)
        filled = ~_mask(cells.is_null())
        if filled.any() and not is_number[filled].any():
            return self.text(name)
        self.refuse(~is_number, f"has a word in column {name!r} among numbers")
        return self._floats(cells)

    def _is_number(self, cells: Any, name: str) -> NDArray[np.bool_]:
        """Whether each cell is a number or missing."""
        from pyarrow import compute

        if self.decimal == "?":
            doubtful = _mask(compute.and_(compute.match_substring(cells, ","), _match(cells, _DECIMAL_COMMA)))
            self.refuse(
                doubtful,
                f"has a comma in a number of column {name!r}, which may be a thousand or one and a part; write numbers "
                "without commas",
            )
        number = _DECIMAL_COMMA if self.decimal == "," else _NUMBER
        return _mask(_match(cells, f"{number}|[+-]?(?i:inf|infinity)"), True)

    def _floats(self, cells: Any) -> NDArray[np.float64]:
        from pyarrow import compute

        if self.decimal == ",":
            cells = compute.replace_substring(cells, ",", ".")
        return np.array(compute.cast(cells, "float64").to_numpy(zero_copy_only=False), np.float64)

    def _cells(self, name: str) -> Any:
        """A column as numbers of NumPy, or as text of Arrow without blanks around it, whose missing cells are null."""
        column = self.read(name)
        if isinstance(column, np.ndarray):
            return column
        from pyarrow import string, types

        kind = column.type.value_type if types.is_dictionary(column.type) else column.type
        if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
            column = column.cast("float64" if types.is_decimal(kind) else kind)
            if column.null_count:  # objects, because float64 does not hold every int64
                return np.array(column.to_pylist(), "O")
            return np.asarray(column.to_numpy(zero_copy_only=False))
        is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_null(kind)
        if not (is_text or types.is_string_view(kind) or types.is_date(kind) or types.is_timestamp(kind)):
            raise ValueError(f"column {name!r} of {self.path} holds {kind}; cells are numbers or text")
        return _filled(column.cast(string()))


def _match(cells: Any, pattern: str) -> Any:
    """Whether all of each cell matches."""
    from pyarrow import compute

    return compute.match_substring_regex(cells, f"^(?:{pattern})$")


def _mask(flags: Any, missing: bool = False) -> NDArray[np.bool_]:
    """Flags of Arrow as NumPy's; `missing` for those of missing cells."""
    return np.array(flags.fill_null(missing).to_numpy(zero_copy_only=False), bool)


def _filled(cells: Any) -> Any:
    """Text without the blanks around it, null where it stands for a missing value."""
    from pyarrow import array, compute, scalar, string

    cells = compute.utf8_trim_whitespace(cells)
    return compute.if_else(compute.is_in(cells, array(MISSING)), scalar(None, string()), cells)


def _as_text(value: Any) -> str:
    """A whole number has no point: pandas writes one where a column has gaps."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT else str(value)


def read_table(path: Path, *, of_edges: bool = False, notes: bool = False, header: bool | None = None) -> Table:
    """The table in a file: text, Parquet or a NumPy array [N, C] or [N].

    Args:
        of_edges: whether rows are edges. Empty lines may stand between them, and an array is [2, E] or [E, 2].
        notes: whether text after a blank and `#` is a comment.
        header: whether the first row of text is a header. Default: what the rows say.

    Raises:
        ValueError: the file is not a table, or two columns have one name.
        ImportError: text and Parquet need pyarrow.
    """
    if path.suffix == ".npy":
        array = _edge_array(path).T if of_edges else _numeric(path)
        names = [*map(str, range(array.shape[1]))]
        return Table(path, names, len(array), lambda name: np.asarray(array[:, int(name)]), "an array")
    table = _parquet_table(path) if _is_parquet(path) else next(_text(path, of_edges, notes, header))
    _refuse_twins(table, table.names)
    return table


def _refuse_twins(table: Table, names: Iterable[str]) -> None:
    """Refuses names that two columns have."""
    if twice := [name for name in names if table.names.count(name) > 1]:
        raise ValueError(
            f"{table.path} has {len(table.names)} columns, and two are named {twice[0]!r}; rename one of them"
        )


def edge_chunks(path: Path, size: int = _CHUNK, columns: Columns | None = None) -> Iterator[NDArray[Any]]:
    """The edges in a file, in chunks [2, n] of at most `size`: sources, then destinations.

    Args:
        path: text, Parquet, or `.npy` with integers [2, E], or [E, 2] for E other than 2.
        columns: the source's and the destination's column, by name or by number from 0. Needed if there are more than
            two, beside the row numbers that pandas writes.

    Raises:
        ValueError: the file is not a table of two columns of whole numbers. The message names the line.
        ImportError: text and Parquet need pyarrow.
    """
    if path.suffix == ".npy":
        if columns is not None:
            raise ValueError(f"columns= names columns of text and Parquet; {path} is an array")
        yield _edge_array(path)
        return
    size = min(size, _CHUNK)
    for table in _parquet_chunks(path, size, columns) if _is_parquet(path) else _text(path, True, True, None, size):
        yield numbered_ends(table, [table.names[k] for k in edge_columns(table, columns)])


def numbered_ends(table: Table, ends: Sequence[str], hint: str = _FACTORIZE) -> NDArray[np.int64]:
    """The sources and destinations in two columns, int64 [2, E]."""
    numbers = np.stack([table.numbers(end, hint) for end in ends], 1)
    table.refuse(np.isnan(numbers).any(1), "has an edge without a source or a destination")
    wrong = np.any((numbers != np.round(numbers)) | (np.abs(numbers) >= _EXACT), axis=1)
    table.refuse(wrong, f"must have whole numbers below 2^53; got {numbers[wrong.argmax()].tolist()}")
    return numbers.T.astype(np.int64)


def edge_columns(table: Table, columns: Columns | None) -> list[int]:
    """The indices of the two columns of edges among those of a table."""
    names = table.names if table.header or table.lines is None else []
    width = len(table.names)
    listed = f" ({', '.join(map(repr, names))})" if names else ""
    if columns is None:
        if width != 2:
            raise ValueError(
                f"{table.path} has {width} columns{listed}, and edges have two, source and destination"
                + ("; name two as columns (--columns src,dst), by name or by number from 0" if width > 2 else "")
            )
        columns = (0, 1)
    found = [names.index(str(column)) if names.count(str(column)) == 1 else column for column in columns]
    if len(found) != 2 or not all(isinstance(k, int) and 0 <= k < width for k in found) or found[0] == found[1]:
        raise ValueError(
            f"columns must be two different columns of the {width} of {table.path}{listed}, by name or by number from "
            f"0; got {tuple(columns)}"
        )
    _refuse_twins(table, [table.names[int(k)] for k in found])
    return [int(k) for k in found]


def counted_from(first: int | None, least: int, path: Path) -> int:
    """The number of the first node in a file of edges whose smallest number is `least`.

    Raises:
        ValueError: no edge has node 0, so that the file may count from 1, and `first` does not say it.
    """
    if first is None and least > 0:
        raise ValueError(
            f"no edge of {path} has node 0: set first to 1 (--first 1) if the file counts nodes from 1, and to 0 if "
            "node 0 has no edges"
        )
    return first or 0


def named(columns: str | None) -> list[str | int] | None:
    """The columns in text such as "src,dst" or "1,2"; numbers count from 0."""
    return None if columns is None else [int(c) if c.isdecimal() else c for c in map(str.strip, columns.split(","))]


# ------------------------------------------------------------------------------------------------------------ text


@dataclass(frozen=True)
class _Layout:
    """How the rows of a text are divided; `is_sure` is False if the header may be a row."""

    separator: str
    first: list[str]
    is_header: bool
    is_sure: bool

    @staticmethod
    def of(path: Path, sample: Sequence[str], header: bool | None) -> "_Layout":
        separator = _separator(path, sample)
        first, *rest = ([cell.strip() for cell in row or ()] for row in _rows(sample, separator))
        if not first:
            raise ValueError(f"the first row of {path} {_QUOTES}")
        guessed = _is_header(first, rest) if header is None else header
        return _Layout(separator, first, guessed is not False, guessed is not None)


def _rows(lines: Sequence[str], separator: str) -> Iterator[list[str] | None]:
    """The cells of each line; None for a line with a quote too few or too many."""
    for line in lines:
        try:
            line = line.strip() if separator == " " else line
            cells = next(csv.reader([line], delimiter=separator, skipinitialspace=True, strict=True))
            yield None if line.count('"') % 2 else cells
        except csv.Error:
            yield None


def _separator(path: Path, sample: Sequence[str]) -> str:
    """The mark that divides all lines into the same number of cells."""
    rows = {mark: [*_rows(sample, mark)] for mark in _SEPARATORS if any(mark in line for line in sample)}
    widths = {mark: {0 if row is None else len(row) for row in cells} for mark, cells in rows.items()}
    fits = [mark for mark, found in widths.items() if len(found) == 1 and max(found) > 1]

    def cells(mark: str, inside: str) -> list[str]:
        stripped = (cell.strip() for row in rows[mark] for cell in row or ())
        return [cell for cell in stripped if inside in cell]

    if "," in fits and fits[0] in ";|" and not all(map(_IS_DECIMAL_COMMA, cells(fits[0], ","))):
        raise ValueError(
            f"each line of {path} has as many commas as the others, and as many {_SEPARATORS[fits[0]]}: either may "
            "separate its cells; write it with tabs"
        )
    if fits[:1] == [","] and " " in fits and cells(",", " ") and all(map(_IS_DECIMAL_COMMA, cells(" ", ","))):
        return " "
    return fits[0] if fits else next((mark for mark in _SEPARATORS if mark in sample[0]), _ONE_COLUMN)


def _is_header(first: Sequence[str], rest: Sequence[Sequence[str]]) -> bool | None:
    """Whether the first row is a header; None if it may be a row of words."""
    words = [not _is_value(cell) for cell in first]
    if any(cell.lower() == ID for cell in first) or (not words[0] and first[0] == "" and all(words[1:])):
        return True  # pandas leaves the name of its row numbers empty
    if not all(words):
        return False
    below = [[row[k] for row in rest if k < len(row)] for k in range(len(first))]
    if any(any(map(_is_figure, cells)) and all(map(_is_value, cells)) for cells in below):
        return True
    return False if any(cell in cells for cell, cells in zip(first, below, strict=True)) else None


def _is_figure(cell: str) -> bool:
    return (_IS_NUMBER(cell) or _IS_DECIMAL_COMMA(cell)) is not None


def _is_value(cell: str) -> bool:
    """Whether a cell is a number, or stands for one that is missing."""
    return cell in MISSING or _is_figure(cell)


def _text(path: Path, gaps: bool, notes: bool, header: bool | None, size: int | None = None) -> Iterator[Table]:
    """The table in a text: all of it, or in parts of at most `size` rows."""
    layout: _Layout | None = None
    begun = 0
    is_empty = True
    with _open(path) as file:
        while text := file.read() if size is None else file.read(_BYTES) + file.readline():
            numbers, rows = _content(path, text.removesuffix("\n"), begun, gaps, notes)
            begun += text.count("\n")
            if layout is None and rows:
                layout = _Layout.of(path, rows[:_SAMPLE], header)
                numbers = numbers[layout.is_header :]
                rows = rows[layout.is_header :]
            for at in range(0, len(rows), size or len(rows) or 1):
                part = slice(at, at + (size or len(rows)))
                assert layout is not None
                yield _text_table(path, numbers[part], rows[part], layout)
                is_empty = False
    if is_empty:
        raise _empty(path)


def _content(path: Path, text: str, begun: int, gaps: bool, notes: bool) -> tuple[NDArray[np.int64], list[str]]:
    """The lines that are rows, without comments, and their numbers; `begun` lines stand before them."""
    if "\0" in text:
        number = begun + 1 + text[: text.index("\0")].count("\n")
        raise ValueError(f"line {number} of {path} has a zero byte: the file is not text")
    lines = text.split("\n")
    if not begun and text.startswith("%%MatrixMarket"):
        raise ValueError(
            f"{path} is a MatrixMarket file: its first row holds sizes and it counts from 1; "
            "graphs.from_scipy(scipy.io.mmread(path)) reads it"
        )
    at = next((k for k, line in enumerate(lines) if line.strip() and not _IS_COMMENT(line)), len(lines))
    if 0 < at < len(lines) and not begun and re.match(r"#[^\s#]", lines[at - 1]):
        at -= any(0 < lines[at].count(mark) == lines[at - 1].count(mark) for mark in ",;\t|")  # a header, not a comment
    numbers = np.arange(begun + at + 1, begun + len(lines) + 1)
    rest = "\n".join(lines[at + 1 :])
    if not any(mark in rest for mark in "#%") and not _EMPTY_LINE.search(f"\n{rest}\n" if rest else ""):
        return numbers, lines[at:]
    rows = lines[at : at + 1]
    kept = [0]
    empty = 0
    for k, line in enumerate(lines[at + 1 :], 1):
        is_comment = _IS_COMMENT(line)
        if is_comment and not notes and any(mark in line for mark in ",;\t|"):
            raise ValueError(
                f"line {numbers[k]} of {path} begins with {line.lstrip()[0]}, and may be a comment or a row: put its "
                "first cell in quotes, or delete the line"
            )
        if is_comment or not line.strip():
            empty = empty or (0 if is_comment else int(numbers[k]))
            continue
        if empty and not gaps:
            raise ValueError(
                f"line {empty} of {path} is empty, so that it is unclear which node the lines after it mean; "
                "delete the line, or write the missing row"
            )
        kept.append(k)
        rows.append(line)
    if notes:
        rows = [re.sub(r"\s[#%].*", "", row) if "#" in row or "%" in row else row for row in rows]
    return numbers[kept], rows


def _text_table(path: Path, lines: NDArray[np.int64], rows: Sequence[str], layout: _Layout) -> Table:
    arrow = _pyarrow(path)
    from pyarrow import csv as arrow_csv

    keys = [*map(str, range(len(layout.first)))]
    if any('"' in row for row in rows):
        cells = [*_rows(rows, layout.separator)]
        if any(row is None or len(row) != len(keys) for row in cells):
            raise ValueError(_first_mistake(path, lines, rows, layout))
        columns = [arrow.chunked_array([column], arrow.string()) for column in zip(*cells, strict=True)]
    else:
        text = "\n".join(rows)
        if layout.separator == " " and any(blanks in f"\n{text}\n" for blanks in ("  ", "\t", " \n", "\n ")):
            text = re.sub(r"[ \t]+", " ", re.sub(r"[ \t]*\n[ \t]*", "\n", text.strip()))
        try:
            columns = arrow_csv.read_csv(
                arrow.BufferReader(text.encode()),
                arrow_csv.ReadOptions(column_names=keys, block_size=_BYTES),
                arrow_csv.ParseOptions(delimiter=layout.separator, quote_char=False, ignore_empty_lines=False),
                arrow_csv.ConvertOptions(column_types=dict.fromkeys(keys, arrow.string())),
            ).columns
        except arrow.ArrowInvalid:
            raise ValueError(_first_mistake(path, lines, rows, layout)) from None
    header = layout.first if layout.is_header else ()
    read = dict(zip(header or keys, columns, strict=True)).__getitem__
    decimal = _decimal(columns)
    form = [
        "header found" if header else "no header",
        *([_SEPARATORS[layout.separator]] if len(keys) > 1 else []),
        *(["decimal commas"] if decimal == "," else []),
    ]
    table = Table(path, header or keys, len(rows), read, ", ".join(form), lines, header, layout.is_sure, decimal)
    if not header or header[0] != "":
        return table
    try:
        is_ordered = np.array_equal(table.numbers(""), np.arange(len(rows)))
    except ValueError:
        raise ValueError(f"column 0 of {path} has no name: name it id if it names the nodes, or delete it") from None
    return replace(table, names=header[1:], form=f"{table.form}, row numbers left out", is_ordered=is_ordered)


def _first_mistake(path: Path, lines: NDArray[np.int64], rows: Sequence[str], layout: _Layout) -> str:
    width = len(layout.first)
    for line, cells in zip(lines, _rows(rows, layout.separator), strict=True):
        if cells is None:
            return f"line {line} of {path} {_QUOTES}"
        if len(cells) != width:
            return f"line {line} of {path} has {len(cells)} columns, and the first row has {width}"
    return f"{path} is not a table that pyarrow reads"


def _decimal(columns: Iterable[Any]) -> str:
    """The mark in numbers: a comma if the numbers of a column have one; "?" if all may be thousands."""
    from pyarrow import compute

    marks = {"."}
    for column in columns:
        has_comma = compute.match_substring(column, ",")
        if not compute.any(has_comma).as_py():
            continue
        cells = _filled(column)
        if compute.all(_match(cells, _DECIMAL_COMMA)).as_py():
            thousands = _match(cells.filter(has_comma), r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")
            marks.add("?" if compute.all(thousands).as_py() else ",")
    return next(mark for mark in ",?." if mark in marks)


def _empty(path: Path) -> ValueError:
    return ValueError(f"{path} must be a table with at least one row")


@contextmanager
def _open(path: Path) -> Iterator[IO[str]]:
    """The text in a file, unpacked."""
    with path.open("rb") as raw:
        begin = raw.read(6)
    unpack = next((opener for mark, opener in _PACKED.items() if begin.startswith(mark)), io.open)
    try:
        with ExitStack() as stack:
            if begin.startswith(b"PK\3\4"):
                file: Any = stack.enter_context(_zipped(stack.enter_context(zipfile.ZipFile(path)), path))
            else:
                file = stack.enter_context(unpack(path, "rb"))
            binary = io.BufferedReader(file)
            is_utf16 = binary.peek(2)[:2] in (b"\xff\xfe", b"\xfe\xff")
            yield io.TextIOWrapper(binary, encoding="utf-16" if is_utf16 else "utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a table: it is not UTF-8 text; save it as UTF-8") from None
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile, RuntimeError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None


def _zipped(archive: zipfile.ZipFile, path: Path) -> IO[bytes]:
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if "[Content_Types].xml" in names:
        raise ValueError(f"{path} is a workbook; save its sheet as CSV")
    if len(names) != 1:
        raise ValueError(f"{path} must hold one table; it holds {len(names)} files, {', '.join(names[:5])}")
    return archive.open(names[0])


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
        raise ImportError(f"reading {path.name} needs pyarrow: pip install 'mpnn[tables]'") from None
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


def _parquet_table(path: Path) -> Table:
    file, names, index = _parquet_file(path)
    size = file.metadata.num_rows
    if not size or not names:
        raise _empty(path)
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
