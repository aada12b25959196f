"""Table: the columns of a file, as numbers or as text. A cell that is none is refused, and its line named."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ID = "id"  # the column that names the rows, in small or capital letters; without it, one of these
_OTHER_IDS = "node_id", "nodeid"
OF_GRAPH = "graph", "graph_id", "graphid"  # the column that names the graph of a row
MISSING = (
    *("", "NA", "N/A", "n/a", "nan", "NaN", "-nan", "-NaN", "None", "null", "NULL", "<NA>", "#NA", "#N/A"),
    *("#N/A N/A", "1.#IND", "1.#QNAN", "-1.#IND", "-1.#QNAN"),
)
"""Cells without a value, as pandas' `read_csv` has them."""

EXACT = 2**53  # numbers are float64, which holds each whole number below
NUMBER = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
DECIMAL_COMMA = r"[+-]?([0-9]+|[0-9]*,[0-9]+)([eE][+-]?[0-9]+)?"
_TRUTH = "(?i:true|false)"
_DATE = "[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}([.][0-9]{1,6})?)?)?"
_ZONE = "(Z|[+-][0-9]{2}:?[0-9]{2})"
_MICROSECONDS = 24 * 3600 * 10**6  # of a day


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of a file.

    names: of the columns; their numbers from 0 as text if the file has no header. Row numbers of pandas are no column.
    read: the column of a name, a NumPy or an Arrow array.
    form: how the file was read, for people. lines: the line of each row, from 1; None if the file has none.
    header: the cells of the header. is_sure: False if the header may be a row of words.
    decimal: the mark in numbers; "?" if 1,234 may be a thousand or one.
    is_ordered: False if the file numbers its rows, and otherwise than 0, 1, 2, ...
    has_ends: whether the first two columns are the ends of edges, whatever follows. first: the number of the first
        node, where the format says it. is_directed: whether the format says that edges are directed.
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
    has_ends: bool = False
    first: int | None = None
    is_directed: bool = False

    def __len__(self) -> int:
        return self.size

    @property
    def has_names(self) -> bool:
        """Whether the columns have names: those of an array, and of text without a header, have numbers."""
        return not all(name.isdecimal() for name in self.names)

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
        words = (None if value is None or value != value else as_text(value) for value in cells.tolist())
        return np.array([*words], "O")

    def numbers(self, name: str, hint: str = "") -> NDArray[np.float64]:
        """A column as float64 [N]; NaN where it is missing. `hint` ends the message about text in place of a number."""
        cells = self._cells(name)
        if isinstance(cells, np.ndarray):
            return cells.astype(np.float64)
        wrong = ~self._is_number(cells, name)
        if wrong.any():
            cell = cells[int(wrong.argmax())].as_py()[:40]
            where = f" in column {name!r}" if self.has_names else ""
            hint = "; other numbers of the file have decimal commas" if self.decimal == "," and "." in cell else hint
            self.refuse(wrong, f"has {cell!r} in place of a number{where}{hint}")
        return self._floats(cells)

    def quantities(self, name: str, hint: str = "") -> tuple[NDArray[np.float64], str]:
        """A column as float64 [N], NaN where it is missing, and what it holds: "number"; "truth", of true and false as
        1 and 0; or "date", as days since 1970. Dates are written 2020-01-31 or 2020-01-31 12:30:00.5, and may end with
        a zone, Z or +01:00. `hint` ends the message about other text."""
        from pyarrow import compute, types

        column = self.read(name)
        kind = None if isinstance(column, np.ndarray) else column.type
        if kind is not None and types.is_boolean(kind):
            return self.numbers(name), "truth"
        if kind is not None and (types.is_date(kind) or types.is_timestamp(kind)):
            return _days(column.cast(_moment(kind.tz if types.is_timestamp(kind) else None), safe=False)), "date"
        cells = self._cells(name)
        if isinstance(cells, np.ndarray):
            return cells.astype(np.float64), "truth" if cells.dtype.kind == "b" else "number"
        filled_cells = cells.drop_null()
        if not len(filled_cells):
            return self.numbers(name, hint), "number"
        if compute.all(matches(filled_cells, _TRUTH)).as_py():
            truth = compute.equal(compute.utf8_lower(cells), "true")
            return np.array(truth.cast("float64").to_numpy(zero_copy_only=False), np.float64), "truth"
        for zone, pattern in ((None, _DATE), ("UTC", _DATE + _ZONE)):
            if compute.all(matches(filled_cells, pattern)).as_py():
                return self._dates(name, cells, zone), "date"
        return self.numbers(name, hint), "number"

    def _dates(self, name: str, cells: Any, zone: str | None) -> NDArray[np.float64]:
        import pyarrow

        try:
            return _days(cells.cast(_moment(zone)))
        except pyarrow.ArrowInvalid:
            for row, cell in enumerate(cells):
                try:
                    cell.cast(_moment(zone))
                except pyarrow.ArrowInvalid:
                    at = np.arange(len(self)) == row
                    self.refuse(at, f"has {cell.as_py()!r} in column {name!r}, which is no date")
            raise

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
            doubtful = _mask(compute.and_(compute.match_substring(cells, ","), matches(cells, DECIMAL_COMMA)))
            self.refuse(
                doubtful,
                f"has a comma in a number of column {name!r}, which may be a thousand or one and a part; write numbers "
                "without commas",
            )
        number = DECIMAL_COMMA if self.decimal == "," else NUMBER
        return _mask(matches(cells, f"{number}|[+-]?(?i:inf|infinity)"), True)

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
        return filled(column.cast(string()))


def _moment(zone: str | None) -> Any:
    import pyarrow

    return pyarrow.timestamp("us", zone)


def _days(moments: Any) -> NDArray[np.float64]:
    """Moments of Arrow as days since 1970."""
    microseconds = moments.cast("int64").to_numpy(zero_copy_only=False)
    return np.asarray(microseconds, np.float64) / _MICROSECONDS


def matches(cells: Any, pattern: str) -> Any:
    """Whether all of each cell matches."""
    from pyarrow import compute

    return compute.match_substring_regex(cells, f"^(?:{pattern})$")


def _mask(flags: Any, missing: bool = False) -> NDArray[np.bool_]:
    """Flags of Arrow as NumPy's; `missing` for those of missing cells."""
    return np.array(flags.fill_null(missing).to_numpy(zero_copy_only=False), bool)


def filled(cells: Any) -> Any:
    """Text without the blanks around it, null where it stands for a missing value."""
    from pyarrow import array, compute, scalar, string

    cells = compute.utf8_trim_whitespace(cells)
    return compute.if_else(compute.is_in(cells, array(MISSING)), scalar(None, string()), cells)


def as_text(value: Any) -> str:
    """A whole number has no point: pandas writes one where a column has gaps."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else str(value)
