"""Tables of a database as one graph: rows are nodes, foreign keys are edges."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph.runs import Ints
from mpnn.graphs.explicit import from_edges
from mpnn.graphs.kinds import EdgeKind, HeteroGraph

_IS_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([ T][0-9]{2}:[0-9]{2}(:[0-9]{2}(\.[0-9]{1,9})?)?)?").fullmatch
_EXACT = 2**53  # up to which a float holds every integer


def from_tables(
    tables: Mapping[str, Any],
    foreign: Mapping[tuple[str, str], tuple[str, str]],
    *,
    times: Mapping[str, str] | None = None,
) -> HeteroGraph:
    """Creates a `HeteroGraph` of tables (Fey et al. 2024, arXiv:2312.04615). Each row is a node, whose kind is its
    table. A foreign key gives two relations: its row receives from the row that it names, and that row from it.

    With `foreign={("orders", "user"): ("users", "id")}` they are ("users", "user", "orders") and ("orders", "rev_user",
    "users").

    Args:
        tables: {name: a DataFrame, a table of pyarrow, or {column: values}}.
        foreign: {(table, column of keys): (table, column that the keys name)}. A missing key (None, NaN) is not an
        edge. times: {table: column of times}, numbers, or datetimes, dates and their text (2020-01-31), which become
        int64
            nanoseconds; for `graphs.sample`.

    Raises:
        KeyError: a table or a column does not exist.
        ValueError: a key names no row or several, or a time is missing.
    """
    sizes = {name: _num_rows(name, table) for name, table in tables.items()}
    relations: dict[EdgeKind, Any] = {}
    for (child, column), (parent, key) in foreign.items():
        rows, named = _join(tables, child, column, parent, key)
        down = from_edges(torch.from_numpy(np.stack([named, rows])), num_src=sizes[parent], num_dst=sizes[child])
        relations[parent, column, child] = down
        relations[child, f"rev_{column}", parent] = down.reverse()
    return HeteroGraph(relations, sizes, {name: _times(tables, name, column) for name, column in (times or {}).items()})


def _join(tables: Mapping[str, Any], child: str, column: str, parent: str, key: str) -> tuple[Ints, Ints]:
    """The rows of `child` that have a key, and the rows of `parent` that they name."""
    keys, names = _column(tables, child, column), _column(tables, parent, key)
    if keys.dtype.kind == "f" and (np.abs(keys) > _EXACT).any():
        raise ValueError(f"{child}.{column} holds floats above 2**53, which are not exact: read it as integers or text")
    row_of: dict[Any, int] = {}
    for row, name in enumerate(names.tolist()):
        if row_of.setdefault(name, row) != row:
            raise ValueError(f"{parent}.{key} must name each row once; {name!r} is in rows {row_of[name]} and {row}")
    rows = np.flatnonzero(~_is_missing(keys))
    named = [row_of.get(one, -1) for one in keys[rows].tolist()]
    if -1 in named:
        row = int(rows[named.index(-1)])
        raise ValueError(f"{child}.{column} row {row} is {keys[row]!r}, which no row of {parent} has as {key}")
    return rows, np.array(named, np.int64)


def _times(tables: Mapping[str, Any], name: str, column: str) -> Tensor:
    values = _column(tables, name, column)
    if values.dtype.kind in "OU":
        values = np.array([_datetime(name, column, row, one) for row, one in enumerate(values.tolist())], "M8[ns]")
    if _is_missing(values).any():
        raise ValueError(f"{name}.{column} has no time in row {int(_is_missing(values).argmax())}")
    if values.dtype.kind == "M":
        values = values.astype("datetime64[ns]").astype(np.int64)
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{name}.{column} must hold numbers or datetimes; got {values.dtype}")
    return torch.from_numpy(values.astype(np.float64 if values.dtype.kind == "f" else np.int64))


def _column(tables: Mapping[str, Any], name: str, column: str) -> np.ndarray:
    if name not in tables:
        raise KeyError(f"there is no table {name!r}; the tables are {', '.join(tables)}")
    columns = _columns(name, tables[name])
    if column not in columns:
        raise KeyError(f"table {name!r} has no column {column!r}; it has {', '.join(map(str, columns))}")
    return np.asarray(tables[name][column])


def _columns(name: str, table: Any) -> list[Any]:
    """The names of the columns of a DataFrame, a table of pyarrow or a mapping."""
    if hasattr(table, "column_names"):
        return list(table.column_names)
    if hasattr(table, "columns"):
        return list(table.columns)
    if isinstance(table, Mapping):
        return list(table)
    raise TypeError(
        f"table {name!r} must be a DataFrame, a table of pyarrow, or {{column: values}}; got {type(table).__name__}"
    )


def _datetime(name: str, column: str, row: int, value: Any) -> Any:
    """A moment; a missing one is NaT."""
    if value is None or not _equals_itself(value):
        return np.datetime64("NaT")
    try:
        if isinstance(value, str) and not _IS_DATE(value):
            raise ValueError("numpy would read other words, such as now, as times")
        return np.datetime64(value, "ns")
    except (ValueError, TypeError):
        raise ValueError(
            f"{name}.{column} row {row} is {value!r}, which is no time: times are numbers, datetimes, or text such as "
            "2020-01-31 12:30"
        ) from None


def _num_rows(name: str, table: Any) -> int:
    lengths = {len(table[column]) for column in _columns(name, table)}
    if len(lengths) != 1:
        raise ValueError(f"the columns of table {name!r} must be of one length; got {sorted(lengths) or 'no column'}")
    return lengths.pop()


def _is_missing(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "fM":
        return np.isnan(values) if values.dtype.kind == "f" else np.isnat(values)
    if values.dtype != object:
        return np.zeros(len(values), bool)
    return np.array([one is None or not _equals_itself(one) for one in values.tolist()], bool)


def _equals_itself(value: Any) -> bool:
    """False for NaN, NaT and pandas' NA, whose comparisons have no truth."""
    try:
        return bool(value == value)
    except (TypeError, ValueError):
        return False
