"""Reads tables from text. Which separator and which header a text has is decided here; pyarrow reads its cells.

What would be read wrongly without a word is refused: a quote too many, rows of several widths, an empty line between
nodes, a comment that may be a row. The message names the line.
"""

import bz2
import csv
import gzip
import io
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

from mpnn.graphs.table import DECIMAL_COMMA, ID, MISSING, NUMBER, Table, filled, matches

_BYTES = 1 << 24  # of text that are read at once
_SAMPLE = 1000  # rows that decide separator and header
_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas", " ": "blanks"}
_ONE_COLUMN = "\x1f"  # occurs in no text
_IS_NUMBER, _IS_DECIMAL_COMMA = re.compile(NUMBER).fullmatch, re.compile(DECIMAL_COMMA).fullmatch
_PACKED: dict[bytes, Callable[..., Any]] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ": lzma.open}
_IS_COMMENT = re.compile(r"\s*[#%]").match
_EMPTY_LINE = re.compile(r"\n[ \t]*\n")
_QUOTED = r'"[^"]*(?:""[^"]*)*"'
_QUOTES = 'has a quote too few or too many; a cell in quotes ends before a separator, and "" is a quote in it'


@contextmanager
def opened(path: Path, encoding: str | None = None) -> Iterator[IO[str]]:
    """The text in a file, unpacked. Default: UTF-8. UTF-8 and UTF-16 with their mark need no name.

    Raises:
        ValueError: the file cannot be unpacked or decoded, or there is no such encoding.
    """
    with path.open("rb") as raw:
        begin = raw.read(6)
    unpack = next((opener for mark, opener in _PACKED.items() if begin.startswith(mark)), io.open)
    name = encoding or "UTF-8"
    try:
        with ExitStack() as stack:
            if begin.startswith(b"PK\3\4"):
                file: Any = stack.enter_context(_zipped(stack.enter_context(zipfile.ZipFile(path)), path))
            else:
                file = stack.enter_context(unpack(path, "rb"))
            binary = io.BufferedReader(file)
            mark = binary.peek(3)[:3]
            marked = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16", b"\xef\xbb": "utf-8-sig"}
            yield io.TextIOWrapper(binary, encoding=marked.get(mark[:2], name))
    except LookupError:
        raise ValueError(f"there is no encoding {encoding!r}; such are utf-8, utf-16, latin-1 and cp1252") from None
    except UnicodeError:
        raise ValueError(
            f"{path} is not a table: it is not {name} text; save it as UTF-8, or name its encoding, such as latin-1 or "
            "cp1252 (--encoding)"
        ) from None
    except (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, gzip.BadGzipFile, RuntimeError) as error:
        raise ValueError(f"{path} cannot be unpacked: {error}") from None


def _zipped(archive: zipfile.ZipFile, path: Path) -> IO[bytes]:
    names = [name for name in archive.namelist() if not name.endswith("/") and not name.startswith("__MACOSX/")]
    if "[Content_Types].xml" in names:
        raise ValueError(f"{path} is a workbook; save its sheet as CSV")
    if len(names) != 1:
        raise ValueError(f"{path} must hold one table; it holds {len(names)} files, {', '.join(names[:5])}")
    return archive.open(names[0])


def text_tables(
    path: Path,
    file: IO[str],
    *,
    of_edges: bool = False,
    notes: bool = False,
    header: bool | None = None,
    size: int | None = None,
) -> Iterator[Table]:
    """The table in a text: all of it, or in parts of at most `size` rows. A header alone is a table of no edges.

    Args:
        of_edges, notes, header: as of `mpnn.graphs.tables.read_table`.
    """
    layout: _Layout | None = None
    is_empty = True
    for numbers, rows in _pieces(path, file, of_edges, notes, size is None):
        if layout is None and rows:
            layout = _Layout.of(path, rows[:_SAMPLE], header)
            numbers = numbers[layout.is_header :]
            rows = rows[layout.is_header :]
        for at in range(0, len(rows), size or len(rows) or 1):
            part = slice(at, at + (size or len(rows)))
            assert layout is not None
            yield _table(path, numbers[part], rows[part], layout)
            is_empty = False
    if not is_empty:
        return
    if layout is None or not of_edges:
        raise ValueError(f"{path} must be a table with at least one row")
    yield _table(path, np.zeros(0, np.int64), [], layout)


def _pieces(
    path: Path, file: IO[str], gaps: bool, notes: bool, at_once: bool
) -> Iterator[tuple[NDArray[np.int64], list[str]]]:
    """The rows of a text, piece by piece, and the number of the first line of each."""
    begun = 0
    rest = ""
    while part := file.read() if at_once else file.read(_BYTES) + file.readline():
        text = rest + part
        numbers, rows, rest = _whole_rows(path, text, begun)
        numbers, rows = _content(path, numbers, rows, gaps, notes)
        begun += text.count("\n") - rest.count("\n")
        if rest and at_once:
            break
        if rows:
            yield numbers, rows
    if rest:
        raise ValueError(f"line {begun + 1} of {path} {_QUOTES}")


def _whole_rows(path: Path, text: str, begun: int) -> tuple[NDArray[np.int64], list[str], str]:
    """The number of the first line of each row, and the rows: a line each, or several where a cell in quotes holds line
    breaks. Also the text of a last row whose quotes are open. `begun` lines precede the text."""
    if "\0" in text:
        number = begun + 1 + text[: text.index("\0")].count("\n")
        raise ValueError(f"line {number} of {path} has a zero byte: the file is not text")
    lines = text.removesuffix("\n").split("\n")
    if '"' not in text:
        return np.arange(begun + 1, begun + len(lines) + 1), lines, ""
    numbers = []
    rows = []
    held: list[str] = []  # the lines of a row whose quotes are open
    for number, line in enumerate(lines, begun + 1):
        if not held:
            numbers.append(number)
        is_odd = line.count('"') % 2 == 1 and (bool(held) or not _IS_COMMENT(line))
        if is_odd == bool(held):
            rows.append("\n".join([*held, line]))
            held = []
        else:
            held.append(line)
    if not held:
        return np.array(numbers), rows, ""
    return np.array(numbers[:-1], np.int64), rows, "\n".join(held) + "\n"


def _content(
    path: Path, numbers: NDArray[np.int64], lines: list[str], gaps: bool, notes: bool
) -> tuple[NDArray[np.int64], list[str]]:
    """The rows without comments and empty ones, and the numbers of their lines."""
    at = next((k for k, line in enumerate(lines) if line.strip() and not _IS_COMMENT(line)), len(lines))
    is_begin = len(numbers) > 0 and numbers[0] == 1
    if 0 < at < len(lines) and is_begin and re.match(r"#[^\s#]", lines[at - 1]):
        at -= any(0 < lines[at].count(mark) == lines[at - 1].count(mark) for mark in ",;\t|")  # a header, not a comment
    rest = "\n".join(lines[at + 1 :])
    if not any(mark in rest for mark in "#%") and not _EMPTY_LINE.search(f"\n{rest}\n" if rest else ""):
        return numbers[at:], lines[at:]
    rows = lines[at : at + 1]
    kept = [*range(at, at + len(rows))]
    empty = 0
    for k, line in enumerate(lines[at + 1 :], at + 1):
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
        first, *rest = ([cell.strip() for cell in row or ()] for row in _cells(sample, separator))
        if not first:
            raise ValueError(f"the first row of {path} {_QUOTES}")
        guessed = _is_header(first, rest) if header is None else header
        return _Layout(separator, first, guessed is not False, guessed is not None)


def _cells(rows: Sequence[str], separator: str) -> Iterator[list[str] | None]:
    """The cells of each row; None for a row with a quote too few or too many."""
    for row in rows:
        try:
            row = row.strip() if separator == " " else row
            yield next(csv.reader([row], delimiter=separator, skipinitialspace=True, strict=True))
        except csv.Error:
            yield None


def _separator(path: Path, sample: Sequence[str]) -> str:
    """The mark that divides all rows into the same number of cells."""
    rows = {mark: [*_cells(sample, mark)] for mark in _SEPARATORS if any(mark in row for row in sample)}
    widths = {mark: {0 if row is None else len(row) for row in cells} for mark, cells in rows.items()}
    fits = [mark for mark, counts in widths.items() if len(counts) == 1 and max(counts) > 1]

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


def _table(path: Path, lines: NDArray[np.int64], rows: Sequence[str], layout: _Layout) -> Table:
    keys = [*map(str, range(len(layout.first)))]
    columns = _columns(path, lines, rows, layout, keys)
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


def _columns(
    path: Path, lines: NDArray[np.int64], rows: Sequence[str], layout: _Layout, keys: Sequence[str]
) -> Sequence[Any]:
    """The columns as Arrow text."""
    import pyarrow
    from pyarrow import csv as arrow_csv

    if not rows:
        return [pyarrow.array([], pyarrow.string()) for _ in keys]
    text = "\n".join(rows)
    if layout.separator == " ":
        text = _with_single_blanks(text)
    has_quotes = '"' in text
    try:
        table = arrow_csv.read_csv(
            pyarrow.BufferReader((_with_bare_quotes(text, layout.separator) if has_quotes else text).encode()),
            arrow_csv.ReadOptions(column_names=keys, block_size=max(_BYTES, 4 * len(max(rows, key=len)))),
            arrow_csv.ParseOptions(
                delimiter=layout.separator,
                quote_char='"' if has_quotes else False,
                newlines_in_values=has_quotes,
                ignore_empty_lines=False,
            ),
            arrow_csv.ConvertOptions(column_types=dict.fromkeys(keys, pyarrow.string())),
        )
    except (pyarrow.ArrowInvalid, ValueError):
        raise ValueError(_first_mistake(path, lines, rows, layout)) from None
    if len(table) != len(rows):
        raise ValueError(_first_mistake(path, lines, rows, layout))
    columns: Sequence[Any] = table.columns
    return columns


def _with_single_blanks(text: str) -> str:
    """Text with one blank for several outside of quotes, and none at the ends of lines."""
    if not any(blanks in f"\n{text}\n" for blanks in ("  ", "\t", " \n", "\n ")):
        return text
    text = re.sub(rf"({_QUOTED})|[ \t]+", lambda match: match[1] or " ", text)
    return re.sub(rf"({_QUOTED})|[ ]*\n[ ]*", lambda match: match[1] or "\n", text).strip(" ")


def _with_bare_quotes(text: str, separator: str) -> str:
    """Text whose quotes are next to separators: without the blanks around them, which pyarrow takes for text.

    Raises:
        ValueError: a quote is elsewhere.
    """
    blank = "[ \t]*" if separator not in " \t" else "[ ]*" if separator == "\t" else ""
    mark = re.escape(separator)
    cell = re.compile(rf"(^|[\n{mark}]){blank}({_QUOTED}){blank}(?=[\n{mark}]|\Z)")
    if '"' in cell.sub(r"\1", text):
        raise ValueError(_QUOTES)
    return cell.sub(r"\1\2", text)


def _first_mistake(path: Path, lines: NDArray[np.int64], rows: Sequence[str], layout: _Layout) -> str:
    width = len(layout.first)
    for line, row, cells in zip(lines, rows, _cells(rows, layout.separator), strict=True):
        try:
            _with_bare_quotes(_with_single_blanks(row) if layout.separator == " " else row, layout.separator)
        except ValueError:
            return f"line {line} of {path} {_QUOTES}"
        if cells is not None and len(cells) != width:
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
        cells = filled(column)
        if compute.all(matches(cells, DECIMAL_COMMA)).as_py():
            thousands = matches(cells.filter(has_comma), r"[+-]?[1-9][0-9]{0,2},[0-9]{3}")
            marks.add("?" if compute.all(thousands).as_py() else ",")
    return next(mark for mark in ",?." if mark in marks)
