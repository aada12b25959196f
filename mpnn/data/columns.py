"""How columns of a table become features, and what rows for training decide of it: categories, means and scales."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpnn.graphs.table import EXACT, Table

Missing = Literal["refuse", "mean", "indicator"]
_MOST_CATEGORIES = 1000  # each is a column of ones and zeros
_ROUNDING = 1e-4  # of the range of a feature: what float32 may take from it
_KINDS = {"date": "days since 1970", "truth": "true or false"}


@dataclass(frozen=True)
class Column:
    """How a column becomes features.

    Args:
        kind: "number", "truth" (0 and 1), "date" (days since 1970) or "category".
        values: those of a category that rows for training have, in the order of their columns of ones and zeros.
        untrained: the values of a category that other rows had then. They have no column.
        fill: the value for a missing one, a number for each feature; none if a value must be there.
        mean, std: the number that is subtracted, and the number that the rest is divided by.
        has_indicator: whether a last feature is 1 where the value is missing, and 0 elsewhere.
    """

    kind: str
    values: Sequence[str] = ()
    untrained: Sequence[str] = ()
    fill: Sequence[float] = ()
    mean: float = 0.0
    std: float = 1.0
    has_indicator: bool = False

    def described(self, name: str) -> str:
        """The column, for people."""
        about = [f"{len(self.values)} categories"] if self.kind == "category" else []
        about += [_KINDS[self.kind]] if self.kind in _KINDS else []
        about += ["a column says where it is missing"] if self.has_indicator else []
        return f"{name} ({', '.join(about)})" if about else name


class Features(NamedTuple):
    """Features float32 [N, F], how each of their columns became features, and what people should know of it."""

    x: NDArray[np.float32]
    columns: dict[str, Column]
    notes: list[str]


_LARGE = 100  # the mean size of numbers above which models hardly train without --scale


@dataclass(frozen=True)
class Preparation:
    """How the columns of a table become features.

    Args:
        categories: the columns that are categories, each value of which becomes a column of ones and zeros.
        missing: "refuse" missing values; put the "mean" of rows for training in their place, of a category the share of
            each value; or do this and add an "indicator", a feature that says where a value is missing.
        scale: whether numbers and dates get the mean 0 and the standard deviation 1 over the rows for training.
        known: the columns of a trained model, which decide everything.
    """

    categories: Sequence[str] = ()
    missing: Missing = "refuse"
    scale: bool = False
    known: Mapping[str, Column] | None = None

    def features(self, table: Table, names: Sequence[str], rows: NDArray[np.bool_]) -> Features:
        """The columns `names` of a table as features. `rows`: those for training.

        Raises:
            ValueError: a cell is not a feature. The message names the row.
        """
        check_names(table, names)
        _refuse_counted_columns(table, names)
        made = [self._feature(table, name, rows) for name in names]
        x = np.concatenate([one for one, _, _ in made], 1) if made else np.empty((len(table), 0), np.float32)
        columns = {name: column for name, (_, column, _) in zip(names, made, strict=True)}
        notes = [note for _, _, note in made if note]
        if self.known is None and not self.scale:
            of_numbers = [(name, one[rows, 0]) for name, (one, _, _) in zip(names, made, strict=True)]
            large = [name for name, numbers in of_numbers if len(numbers) and np.abs(numbers).mean() > _LARGE]
            notes += [f"large numbers in {listed(large)}: --scale makes them about 1"] if large else []
        return Features(x, columns, notes)

    @property
    def _advice(self) -> str:
        if self.known is not None:
            return "fill it: the model was trained with --missing refuse"
        return "fill it, ignore the column (--ignore NAME), or let --missing mean or indicator fill it"

    def _feature(self, table: Table, name: str, rows: NDArray[np.bool_]) -> tuple[NDArray[np.float32], Column, str]:
        known = None if self.known is None else self.known[name]
        if known.kind == "category" if known else name in self.categories:
            return self._categories(table, name, rows, known)
        return self._numbers(table, name, rows, known)

    def _numbers(
        self, table: Table, name: str, rows: NDArray[np.bool_], known: Column | None
    ) -> tuple[NDArray[np.float32], Column, str]:
        numbers, kind = table.quantities(name, _hint(table))
        gaps = np.isnan(numbers)
        if known is None:
            column = self._learned(table, name, kind, numbers, rows & ~gaps, gaps)
        elif known.kind != kind and not _means_the_same(known.kind, kind, numbers[~gaps]):
            raise ValueError(
                f"column {name!r} of {table.path} holds {_PLURAL[kind]}; in training it held {_PLURAL[known.kind]}"
            )
        else:
            column = known
        if not column.fill:
            table.refuse(gaps, f"has no number in column {name!r} (it is empty, NaN or the like); {self._advice}")
        if kind == "number":
            _refuse_names(table, name, numbers)
        filled = np.where(gaps, column.fill[0] if column.fill else 0.0, numbers)
        table.refuse(np.isinf(filled), f"has a number in column {name!r} that is infinite or too large for float32")
        x = _as_float32(table, name, (filled - column.mean) / column.std)[:, None]
        note = f"{gaps.sum():,} gaps of {name} filled with the mean" if gaps.any() else ""
        return _with_indicator(x, column, gaps), column, note

    def _learned(
        self,
        table: Table,
        name: str,
        kind: str,
        numbers: NDArray[np.float64],
        rows: NDArray[np.bool_],
        gaps: NDArray[np.bool_],
    ) -> Column:
        """How a column of numbers becomes features. `rows`: those for training that have a number."""
        values = numbers[rows]
        if self.missing != "refuse" and gaps.any() and not len(values):
            raise ValueError(
                f"column {name!r} of {table.path} has no value in a row for training; ignore it (--ignore {name})"
            )
        with np.errstate(invalid="ignore", over="ignore"):  # infinities are refused
            mean = float(values.mean()) if len(values) else 0.0
            std = float(values.std()) if len(values) else 1.0
        is_scaled = self.scale and kind != "truth" and np.isfinite([mean, std]).all()
        return Column(
            kind,
            fill=() if self.missing == "refuse" else (mean,),
            mean=mean if is_scaled else 0.0,
            std=std if is_scaled and std > 0 else 1.0,
            has_indicator=self.missing == "indicator" and bool(gaps.any()),
        )

    def _categories(
        self, table: Table, name: str, rows: NDArray[np.bool_], known: Column | None
    ) -> tuple[NDArray[np.float32], Column, str]:
        cells = _words(table, name)
        gaps = np.array([cell is None for cell in cells], bool)
        column = known or self._learned_categories(table, name, cells, rows & ~gaps, gaps)
        number = {value: k for k, value in enumerate(column.values)}
        numbers = np.array([number.get(cell, -1) for cell in cells], np.int64)
        new = (numbers < 0) & ~gaps
        if not column.fill:
            table.refuse(gaps, f"has no category in column {name!r} (it is empty, NaN or the like); {self._advice}")
        if not column.fill:
            unseen = new & ~np.isin(cells.astype(str), [*column.untrained])
            first = str(cells[unseen.argmax()])[:40] if unseen.any() else ""
            table.refuse(unseen, f"has the category {first!r} in column {name!r}, which occurs in no file of the run")
        x = (numbers[:, None] == np.arange(len(number))).astype(np.float32)
        if column.fill:
            x[numbers < 0] = column.fill
        notes = [f"{gaps.sum():,} gaps of {name} filled with the shares of its categories" if gaps.any() else ""]
        if new.any():
            first = str(cells[new.argmax()])[:40]
            instead = "filled as gaps" if column.fill else "zeros"
            notes.append(
                f"{new.sum():,} rows with a category of {name} that no row for training has ({first}): {instead}"
            )
        return _with_indicator(x, column, numbers < 0), column, ", ".join(filter(None, notes))

    def _learned_categories(
        self, table: Table, name: str, cells: NDArray[Any], rows: NDArray[np.bool_], gaps: NDArray[np.bool_]
    ) -> Column:
        count = Counter(cells[rows].tolist())
        rest = {*cells[~gaps].tolist()} - {*count}
        values = sorted(count, key=lambda value: (len(value), value) if value.lstrip("-").isdecimal() else (0, value))
        if len(values) > _MOST_CATEGORIES:
            raise ValueError(
                f"column {name!r} of {table.path} has {len(values):,} categories, and {_MOST_CATEGORIES:,} are the "
                "most: join the rare ones, or ignore the column (--ignore NAME)"
            )
        if not values:
            raise ValueError(
                f"column {name!r} of {table.path} has no category in a row for training; ignore it (--ignore {name})"
            )
        share = tuple(count[value] / count.total() for value in values)
        return Column(
            "category",
            tuple(values),
            tuple(sorted(rest)) if self.missing == "refuse" else (),
            fill=() if self.missing == "refuse" else share,
            has_indicator=self.missing == "indicator" and bool(gaps.any() or rest),
        )


_PLURAL = {"number": "numbers", "date": "dates", "truth": "true and false", "category": "categories"}


def _means_the_same(known: str, kind: str, numbers: NDArray[np.float64]) -> bool:
    """Whether numbers of one kind may stand for another: 0 and 1 for false and true, and nothing for anything."""
    return not len(numbers) or ({known, kind} == {"number", "truth"} and bool(np.isin(numbers, (0, 1)).all()))


def _hint(table: Table) -> str:
    hint = (
        "; features are numbers, true and false, or dates such as 2020-01-31: write these, name the column in "
        "categories (--categories NAME), or ignore it (--ignore NAME)"
    )
    return hint if table.id is not None else f"{hint}; if it names the nodes, call it id"


def _words(table: Table, name: str) -> NDArray[Any]:
    """A column of categories as text; None where it is missing."""
    cells = table.values(name)
    if cells.dtype.kind != "f":
        return cells
    gaps = np.isnan(cells)
    wrong = ~gaps & ~((cells == np.round(cells)) & (np.abs(cells) < EXACT))
    table.refuse(wrong, f"has no category in column {name!r}: categories are words, or whole numbers below 2^53")
    return np.array([None if gap else str(int(cell)) for cell, gap in zip(cells, gaps, strict=True)], "O")


def _with_indicator(x: NDArray[np.float32], column: Column, gaps: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.concatenate([x, gaps[:, None].astype(np.float32)], 1) if column.has_indicator else x


def _as_float32(table: Table, name: str, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """A column of features as float32; one that float32 does not hold is refused."""
    with np.errstate(over="ignore"):  # infinities are refused
        column = numbers.astype(np.float32)
    table.refuse(~np.isfinite(column), f"has a number in column {name!r} that is infinite or too large for float32")
    if len(numbers) and np.ptp(numbers):
        wrong = np.abs(column - numbers) > _ROUNDING * np.ptp(numbers)
        row = int(wrong.argmax())
        table.refuse(
            wrong,
            f"has {numbers[row]:.17g} in column {name!r}, whose differences float32 rounds away; scale the features "
            "(--scale), or subtract the mean",
        )
    return column


def _refuse_names(table: Table, name: str, numbers: NDArray[np.float64]) -> None:
    is_name = re.search("(?i)(^|[^a-z])id$|^index$", name) or name.endswith("Id")
    if is_name and len(np.unique(numbers)) == len(numbers) > 1 and (numbers % 1 == 0).all():
        raise ValueError(
            f"column {name!r} of {table.path} seems to name the nodes; call it id, ignore it, or rename it"
        )


def _refuse_counted_columns(table: Table, names: Sequence[str]) -> None:
    """Refuses a first row of 0, 1, 2, ..., the numbers of columns, under which pandas writes an array."""
    if table.lines is None or len(names) < 3 or not len(table) or not all(map(str.isdecimal, names)):
        return
    first = [table.text(name)[0] for name in names]
    if first == [*names]:
        raise ValueError(f"{table.where(0)} counts the columns, as pandas' to_csv does without names: give them names")


def check_names(table: Table, used: Iterable[str]) -> Sequence[str]:
    """The names of the columns of a table, `used` among them."""
    if absent := [name for name in used if name not in table.names]:
        raise ValueError(f"{table.path} has no column {absent[0]!r}; it has {', '.join(map(repr, table.names))}")
    return table.names


def listed(names: Sequence[str]) -> str:
    """The first names, for people."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")


def described(names: Sequence[str], columns: Mapping[str, Column]) -> str:
    """Names of features, for people."""
    return listed([columns[name].described(name) for name in names])
