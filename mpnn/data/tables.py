"""Graphs of one's own, from tables in files: nodes with names, their targets and split, edges with weights."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.planetoid import NodeClassification
from mpnn.graphs.tables import ID, Columns, Table, counted_from, edge_columns, numbered_ends, read_table

Problem = Literal["classes", "multilabel", "regression"]
PARTS = ("train", "val", "test")
SPLIT = "split"
MASKS = tuple(f"{part}_mask" for part in PARTS)
_RESERVED = (ID, SPLIT, *MASKS)
_YES = ("1", "1.0", "true")
_NO = ("0", "0.0", "false")
_TRAIN = 0.6
_VALIDATION = 0.2
_FEWEST = 4  # rows with a target, so that no part of the split is empty
_MOST_CATEGORIES = 1000  # each is a column of ones and zeros
_ROUNDING = 1e-4  # of the range of a feature: what float32 may take from it
_WORDS = (
    "((from|to|source|target|src|dst|dest|destination|head|tail|start|end|sender|receiver|citing|cited|parent|child|left|"
    "right|subject|object|node|vertex|id|user|item|author|paper)[ _.]?)+|[abuvij]"
)
_ARE_ENDS = re.compile(rf"(?i)({_WORDS}),({_WORDS})|(?P<stem>[a-z_]+)(1,(?P=stem)2|0,(?P=stem)1)").fullmatch
Tables = Callable[[Path], Table]
Categories = Mapping[str, Sequence[str] | None]
"""The values of each column of categories; None: those in the file."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What the outputs of a model mean.

    Args:
        problem: "classes": one of several; "multilabel": each of several, or not; "regression": numbers.
        names: of the classes, the labels or the numbers.
        mean, std: of the numbers among the nodes for training; a model computes (number - mean) / std.
    """

    problem: Problem
    names: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


@dataclass(frozen=True)
class EdgeFile:
    """A table of edges.

    Args:
        path: source and destination of each edge, and other columns.
        columns: the two columns, by name or by number from 0, if there are more.
        weights: the column of weights.
        features: the columns of features, instead of weights.
        directed: whether an edge counts from its source to its destination only.
        first: the number of the first node, 0 or 1, of nodes without names. Default: 0, and edges of which none has
            node 0 are refused.
    """

    path: Path
    columns: Columns | None = None
    weights: str | None = None
    directed: bool = False
    first: int | None = None
    features: Sequence[str] = ()


@dataclass(frozen=True, eq=False)
class NodeInputs:
    """Nodes with their features, and their edges.

    Args:
        x: float32 [N, F]. inputs: the columns of features. ids: the names of the nodes; None: their numbers.
        edge_index: int64 [2, E], ordered by dst, then src; no duplicates, no self-loops.
        edge_weight: float32 [E], or None. edge_features: float32 [E, K], or None.
        understood: for each file how it was read, for people.
        categories: the values of each column of categories, in the order of their columns of ones and zeros.
    """

    x: Tensor
    inputs: tuple[str, ...]
    ids: tuple[str, ...] | None
    edge_index: Tensor
    edge_weight: Tensor | None
    edge_features: Tensor | None
    understood: tuple[tuple[str, str], ...]
    categories: dict[str, Sequence[str]]


@dataclass(frozen=True, eq=False)
class NodeTables(NodeClassification):
    """A graph from files: `NodeClassification` with the fields of `NodeInputs`, and what outputs mean.

    y: int64 [N] for classes, bool [N, C] for several labels, float32 [N, C] for numbers (standardized).
    """

    edge_weight: Tensor | None
    edge_features: Tensor | None
    inputs: tuple[str, ...]
    categories: dict[str, Sequence[str]]
    ids: tuple[str, ...] | None
    outputs: Outputs
    understood: tuple[tuple[str, str], ...] = ()


def node_tables(
    nodes: Path,
    labels: Path | None = None,
    edges: Path | EdgeFile | None = None,
    seed: int = 0,
    *,
    target: Sequence[str] | None = None,
    problem: Problem = "classes",
    split: Path | None = None,
    ignore: Sequence[str] = (),
    categories: Sequence[str] = (),
) -> NodeTables:
    """Reads a graph.

    A file is text with one row a line, its cells separated by commas, semicolons, tabs, bars or blanks, Parquet, or a
    NumPy array (`.npy`). The first line may be a header. A column `id` names the nodes: `edges`, `labels` and `split`
    then use these names. Without it, nodes are numbered from 0. Rows of tables without `id` are in the order of nodes.
    Empty lines between them are refused. Empty cells, NA, nan, None, null and the like are missing values.

    Args:
        nodes: a row of numbers for each node: its features.
        labels: a table of targets; None: they are columns of `nodes`.
        edges: source and destination of each link, which counts in both directions; None for no links.
        seed: of the split without `split`: 60% of the nodes with targets are for training, 20% for validation.
        target: the columns to learn; needed without `labels`. Default: all of `labels`.
        problem: "classes": one column of names or of whole numbers; missing, or -1 among numbers, where it is unknown.
            Classes are at most half as many as the nodes that have one. "multilabel": columns of 0 and 1. "regression":
            columns of numbers.
        split: a table with a column `split` (train, val, test or empty), or with `train_mask`, `val_mask` and
            `test_mask` (0 or 1). These columns may also be in `nodes`.
        ignore: columns of `nodes` that are no features.
        categories: features, of `nodes` or of edges, that are categories: words, or whole numbers that only name
            something. Each of their values becomes a column of ones and zeros, so that the first linear map of a model
            looks up a vector for each value, and adds those of several columns.

    Raises:
        DamagedFile: if a file is not such a table, or the tables do not fit together. The message names the row.
        ImportError: text and Parquet need pyarrow (the extra `tables`).
        OSError: if a file cannot be read.
    """
    read = cache(read_table)
    try:
        drop = (*ignore, *(target or ())) if labels is None else ignore
        kinds = dict.fromkeys(categories)
        given = _inputs(read, nodes, EdgeFile(edges) if isinstance(edges, Path) else edges, drop, categories=kinds)
        refuse_unused(kinds, given.categories)
        learned = learn(read, nodes, labels, split, target, problem, seed, len(given.x), given.ids)
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    train, val, test = learned.masks
    table = read(nodes)
    ids = "numbered from 0" if table.id is None else f"named by column {table.id}"
    note = f"{len(table):,} nodes, {ids}, {table.form}, features {described(given.inputs, given.categories)}"
    understood = ((nodes.name, note), *given.understood, *learned.understood("nodes"))
    return NodeTables(
        given.x,
        learned.y,
        train,
        val,
        test,
        given.edge_index,
        given.edge_weight,
        given.edge_features,
        given.inputs,
        given.categories,
        given.ids,
        learned.outputs,
        understood,
    )


def node_inputs(
    nodes: Path, edges: EdgeFile | None, inputs: Sequence[str], categories: Categories = MappingProxyType({})
) -> NodeInputs:
    """The nodes and edges in files, of which the columns `inputs` are the features, and have these `categories`.

    Raises:
        DamagedFile, ImportError, OSError: as for `node_tables`.
    """
    try:
        return _inputs(read_table, nodes, edges, inputs=inputs, categories=categories)
    except ValueError as error:
        raise DamagedFile(str(error)) from None


# ---------------------------------------------------------------------------------------------------------- inputs


def _inputs(
    read: Tables,
    nodes: Path,
    edges: EdgeFile | None,
    drop: Sequence[str] = (),
    inputs: Sequence[str] | None = None,
    categories: Categories = MappingProxyType({}),
) -> NodeInputs:
    """`drop`: the columns that are no features; or `inputs`: those that are, in this order."""
    table = read(nodes)
    inputs = inputs or feature_names(table, drop)
    if not inputs:
        raise ValueError(f"{nodes} has no column of features besides {', '.join(table.names)}")
    x, values = features(table, inputs, categories)
    ids = None if table.id is None else ids_of(table, table.id)
    if ids is None:
        check_order(table)
    links = no_edges() if edges is None else _edges(edges, nodes, len(x), ids, categories)
    index, weight, of_edges, understood, more = links
    return NodeInputs(torch.from_numpy(x), tuple(inputs), ids, index, weight, of_edges, understood, {**values, **more})


def feature_names(table: Table, drop: Sequence[str], besides: Iterable[str] = ()) -> list[str]:
    """The columns of features: all but `drop`, which must be there, `besides`, and those of ids and splits."""
    names = _names(table, drop)
    if "" in names:
        raise ValueError(f"column {names.index('')} of {table.path} has no name; name it, or leave it out")
    left_out = {*_RESERVED, *drop, *besides}
    return [name for name in names if name not in left_out and name != table.id]


def features(
    table: Table, inputs: Sequence[str], categories: Categories
) -> tuple[NDArray[np.float32], dict[str, Sequence[str]]]:
    """The columns `inputs` as float32 [N, F], and the values of those that are categories."""
    _names(table, inputs)
    hint = "; features are numbers: write numbers, name the column in categories, or ignore the column"
    if table.id is None:
        hint += "; if it names the nodes, call it id"
    columns: list[Any] = []
    values = {}
    for name in inputs:
        if name in categories:
            ones, values[name] = _one_hot(table, name, categories[name])
            columns.append(ones)
        else:
            columns.append(_feature(table, name, table.numbers(name, hint))[:, None])
    x = np.concatenate(columns, 1) if columns else np.empty((len(table), 0), np.float32)
    if table.lines is not None and len(inputs) > 2 and [*inputs] == [*map(str, x[0].astype(int))]:
        raise ValueError(f"{table.where(0)} counts the columns, as pandas' to_csv does without names: give them names")
    return x, values


def _one_hot(table: Table, name: str, known: Sequence[str] | None) -> tuple[NDArray[np.float32], Sequence[str]]:
    """A column of categories as ones and zeros [N, C], and their values. `known`: the values of a trained model."""
    cells = table.values(name)
    if cells.dtype.kind == "f":
        gaps = np.isnan(cells)
        wrong = ~gaps & ~((cells == np.round(cells)) & (np.abs(cells) < 2**53))
        table.refuse(wrong, f"has no category in column {name!r}: categories are words, or whole numbers below 2^53")
        cells = np.array([None if gap else str(int(cell)) for cell, gap in zip(cells, gaps, strict=True)], "O")
    table.refuse(cells == None, f"has no category in column {name!r} (it is empty, NaN or the like); fill it")  # noqa: E711
    if known is None:
        known = sorted({*cells}, key=lambda value: (len(value), value) if value.lstrip("-").isdecimal() else (0, value))
    if len(known) > _MOST_CATEGORIES:
        raise ValueError(
            f"column {name!r} of {table.path} has {len(known):,} categories, and {_MOST_CATEGORIES:,} are the most: "
            "join the rare ones, or ignore the column"
        )
    number = {value: k for k, value in enumerate(known)}
    found = np.array([number.get(cell, -1) for cell in cells])
    new = str(cells[(found < 0).argmax()])[:40]
    table.refuse(found < 0, f"has the category {new!r} in column {name!r}, which no row had in training")
    return (found[:, None] == np.arange(len(known))).astype(np.float32), tuple(known)


def refuse_unused(asked: Iterable[str], used: Iterable[str]) -> None:
    """Refuses columns of categories that no table has among its features."""
    if unused := [name for name in asked if name not in used]:
        raise ValueError(f"no column of features is named {unused[0]!r}, which --categories names")


def _feature(table: Table, name: str, numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """A column of features as float32; one that float32 does not hold is refused."""
    table.refuse(
        np.isnan(numbers),
        f"has no number in column {name!r} (it is empty, NaN or the like); fill it, or ignore the column",
    )
    with np.errstate(over="ignore"):  # infinities are refused
        column = numbers.astype(np.float32)
    table.refuse(~np.isfinite(column), f"has a number in column {name!r} that is infinite or too large for float32")
    wrong = np.abs(column - numbers) > _ROUNDING * np.ptp(numbers)
    if np.ptp(numbers):
        row = int(wrong.argmax())
        table.refuse(
            wrong,
            f"has {numbers[row]:.17g} in column {name!r}, whose differences float32 rounds away; subtract the mean",
        )
    is_name = re.search("(?i)(^|[^a-z])id$|^index$", name) or name.endswith("Id")
    if is_name and len(np.unique(numbers)) == len(numbers) > 1 and (numbers % 1 == 0).all():
        raise ValueError(
            f"column {name!r} of {table.path} seems to name the nodes; call it id, ignore it, or rename it"
        )
    return column


def check_order(table: Table) -> None:
    """Refuses rows without names whose numbers say that they are not all of them, or in another order."""
    if not table.is_ordered:
        raise ValueError(
            f"the row numbers that pandas wrote to {table.path} are not 0, 1, 2, ...: call them id if they name the "
            "nodes, or drop them with reset_index(drop=True)"
        )


def _names(table: Table, used: Iterable[str]) -> Sequence[str]:
    """The names of the columns of a table, `used` among them."""
    if absent := [name for name in used if name not in table.names]:
        raise ValueError(f"{table.path} has no column {absent[0]!r}; it has {', '.join(map(repr, table.names))}")
    return table.names


def ids_of(table: Table, name: str) -> tuple[str, ...]:
    """The names in a column; each row has one of its own."""
    ids = table.text(name)
    table.refuse(ids == None, "has no id (NA, nan, None and null stand for a missing one)")  # noqa: E711
    first = np.unique(ids, return_index=True)[1]
    is_first = np.zeros(len(ids), bool)
    is_first[first] = True
    table.refuse(~is_first, "has the id of a row above; ids are unique")
    return tuple(ids.tolist())


def numbers_of(table: Table, column: str, ids: Sequence[str], file: Path, what: str = "node") -> NDArray[np.int64]:
    """The numbers of the nodes, or graphs, that a column names."""
    number = {name: k for k, name in enumerate(ids)}
    names = table.text(column).tolist()
    found = np.array([number.get(name, -1) for name in names])
    unknown = next((name for name in names if name not in number), "")
    table.refuse(found < 0, f"has a {what} in column {column!r} that is no id of {file}: {unknown!r}")
    return found


Edges = tuple[Tensor, Tensor | None, Tensor | None, tuple[tuple[str, str], ...], dict[str, Sequence[str]]]
"""`edge_index`, `edge_weight`, `edge_features`, how the file was read, and values of categories; see `NodeInputs`."""


def no_edges() -> Edges:
    """What stands for a table of edges that is not there."""
    return torch.empty(2, 0, dtype=torch.int64), None, None, (), {}


def _edges(edges: EdgeFile, nodes: Path, size: int, ids: Sequence[str] | None, categories: Categories) -> Edges:
    table, ends = edge_table(edges, ids)
    if ids is not None:
        links = np.stack([numbers_of(table, end, ids, nodes) for end in ends])
    else:
        links = numbered_ends(table, ends, "; number the nodes from 0, or name them in a column id")
        links -= counted_from(edges.first, int(links.min()), edges.path)
    table.refuse(((links < 0) | (links >= size)).any(0), f"has no two of the {size} nodes of {nodes}, numbered from 0")
    return merged_edges(edges, table, ends, links, categories, "numbers" if ids is None else "text")


def merged_edges(
    edges: EdgeFile,
    table: Table,
    ends: Sequence[str],
    links: NDArray[np.int64],
    categories: Categories,
    ids: str,
    of_graph: str | None = None,
) -> Edges:
    """Each of the links [2, E] once, with its weight or features, and in both directions unless edges are directed."""
    attributes: NDArray[Any] = np.empty((len(table), 0), np.float32)
    values: dict[str, Sequence[str]] = {}
    if edges.weights is not None:
        weight = table.numbers(edges.weights)
        table.refuse(np.isnan(weight), f"has no number in column {edges.weights!r}")
        table.refuse(~(np.isfinite(weight) & (weight >= 0)), "has a weight that is negative or not finite")
        attributes = weight[:, None]
    elif edges.features:
        attributes, values = features(table, edges.features, categories)
    kind = (
        np.unique(attributes, axis=0, return_inverse=True)[1].reshape(-1) if attributes.size else np.zeros(len(table))
    )
    row = np.arange(len(table))
    if not edges.directed:
        links, row = np.concatenate([links, links[::-1]], 1), np.concatenate([row, row])
    kind = kind[row]
    proper = np.flatnonzero(links[0] != links[1])
    order = proper[np.lexsort((kind[proper], links[0, proper], links[1, proper]))]
    repeats = np.zeros(len(order), bool)
    repeats[1:] = (links[:, order[1:]] == links[:, order[:-1]]).all(0)
    clash = np.zeros(len(links[0]), bool)
    clash[order[1:]] = repeats[1:] & (np.diff(kind[order]) != 0)
    remedy = "add them up to one" if edges.directed else "keep one of the two, or make edges directed"
    other = "another weight" if edges.weights else "other features"
    table.refuse(clash.reshape(-1, len(table)).any(0), f"repeats an edge with {other}; {remedy}")
    kept = order[~repeats]
    loops = int((links[0, : len(table)] == links[1, : len(table)]).sum())
    note = [
        f"{len(table):,} edges, ids as {ids}, {table.form}",
        f"{ends[0]} {'to' if edges.directed else 'and'} {ends[1]}",
        f"column {edges.weights} is a weight" if edges.weights else "",
        f"features {described(edges.features, values)}" if edges.features else "",
        f"{loops:,} self-loops left out" if loops else "",
        f"{repeats.sum():,} repeats left out" if edges.directed and repeats.any() else "",
        f"of the graph in column {of_graph}" if of_graph else "",
        _unused(table, [*ends, edges.weights or "", *edges.features, of_graph or ""]),
    ]
    attr = torch.from_numpy(attributes[row[kept]]).float()
    index = torch.from_numpy(links[:, kept])
    weights = attr[:, 0] if edges.weights is not None else None
    understood = ((edges.path.name, ", ".join(filter(None, note))),)
    return index, weights, attr if edges.features else None, understood, values


def edge_table(edges: EdgeFile, ids: Collection[str] | None, *, of_graphs: bool = False) -> tuple[Table, list[str]]:
    """The table, and the names of the columns of the two ends. `of_graphs`: a column may name the graph of an edge."""
    if edges.weights is not None and edges.features:
        raise ValueError("edges have weights, or features: name the column of weights among the features instead")
    read = partial(read_table, edges.path, of_edges=True, notes=ids is None)
    table = read()
    ends = _end_names(table, edges, of_graphs)
    if ids is None or not table.header:
        return table, ends
    is_named = edges.columns or edges.weights or edges.features
    if {*ends} & {*ids} and is_named:
        raise ValueError(f"the first line of {edges.path} links {ends[0]!r} and {ends[1]!r}; write a header above it")
    if {*ends} & {*ids}:
        table = read(header=False)
        return table, _end_names(table, edges, of_graphs)
    if not (table.is_sure or is_named or (of_graphs and table.of_graph) or _ARE_ENDS(",".join(ends))):
        raise ValueError(
            f"the first line of {edges.path} may be a header or an edge of {ends[0]!r} and {ends[1]!r}: name the "
            "columns (--columns) if it is a header, and write a header above it if it is an edge"
        )
    return table, ends


def _end_names(table: Table, edges: EdgeFile, of_graphs: bool) -> list[str]:
    used = [*([] if edges.weights is None else [edges.weights]), *edges.features]
    names = _names(table, used)
    used += [table.of_graph] if of_graphs and table.of_graph else []
    columns = edges.columns or ([name for name in names if name not in used] if used else None)
    return [names[k] for k in edge_columns(table, columns)]


# --------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, eq=False)
class Learned:
    """The targets y of rows, which rows have them, what they mean, the masks of the parts, and the files of both."""

    y: Tensor
    known: NDArray[np.bool_]
    outputs: Outputs
    masks: list[Tensor]
    of_targets: Path
    of_split: Path | None

    def understood(self, rows: str) -> tuple[tuple[str, str], ...]:
        """For each file how it was read."""
        names = listed(self.outputs.names)
        problem = self.outputs.problem
        what = f"{len(self.outputs.names)} classes, {names}" if problem == "classes" else f"{problem}, {names}"
        sizes = ", ".join(f"{int(mask.sum()):,} {part}" for mask, part in zip(self.masks, PARTS, strict=True))
        return (
            (self.of_targets.name, f"{what}, for {self.known.sum():,} of {len(self.known):,} {rows}"),
            (
                (self.of_split or self.of_targets).name,
                f"{sizes} ({'at random' if self.of_split is None else 'as stated'})",
            ),
        )


def learn(
    read: Tables,
    rows: Path,
    labels: Path | None,
    split: Path | None,
    target: Sequence[str] | None,
    problem: Problem,
    seed: int,
    size: int,
    ids: Sequence[str] | None,
) -> Learned:
    """What to learn of `size` rows, nodes or graphs, named `ids`."""
    if labels is None and not target:
        raise ValueError(f"name the columns of {rows} to learn as the target, or another file as labels")
    source = labels or rows
    y, known, outputs = _targets(_rows_of(read(source), target, size, ids, rows), problem)
    if known.sum() < _FEWEST:
        raise ValueError(
            f"{source} has {known.sum()} rows with a target; training, validation and test need {_FEWEST} at least, "
            "and more to mean anything"
        )
    if split is None and {SPLIT, *MASKS} & {*read(rows).names}:
        split = rows
    masks = _random_split(known, seed) if split is None else _split(read(split), known, ids, rows)
    if problem == "regression":
        y, outputs = _standardized(y, masks[0], outputs)
    return Learned(y, known, outputs, masks, source, split)


def _rows_of(table: Table, columns: Sequence[str] | None, size: int, ids: Sequence[str] | None, nodes: Path) -> Table:
    """Columns of a table, a row for each node: by its `id` (of nodes without names: their numbers), or by the order.
    Default: all columns. Cells of nodes without a row are missing."""
    names = _names(table, columns or ())
    columns = columns or [name for name in names if name not in _RESERVED and name != table.id]
    if table.id is None:
        check_order(table)
        if len(table) != size:
            raise ValueError(
                f"{table.path} must have one row for each of the {size} rows of {nodes}; it has {len(table)}"
            )
        return replace(table, names=columns)
    ids_of(table, table.id)
    row = np.full(size, -1)
    row[numbers_of(table, table.id, ids or [*map(str, range(size))], nodes)] = np.arange(len(table))

    def placed(name: str) -> Any:
        from pyarrow import array

        return table.read(name).take(array(row, mask=row < 0))

    return replace(
        table, names=columns, size=size, read=placed, lines=None if table.lines is None else table.lines[row]
    )


def _targets(table: Table, problem: Problem) -> tuple[Tensor, NDArray[np.bool_], Outputs]:
    """The targets, which nodes have them, and what they mean."""
    names = tuple(table.names)
    if problem == "classes":
        if len(names) > 1:
            raise ValueError(
                f"{table.path} has {len(names)} columns to learn, {', '.join(names)}, and classes are one: name it as "
                "the target, or set the problem to multilabel or regression"
            )
        return _classes(table, names[0])
    columns = [table.values(name) for name in names]
    if any(column.dtype.kind == "O" for column in columns):
        raise ValueError(f"{problem} needs numbers as targets; {table.path} has words in {', '.join(names)}")
    y = np.stack(columns, 1)
    known = ~np.isnan(y).any(1)
    table.refuse(~known & ~np.isnan(y).all(1), "has some of the targets; fill all of them, or none")
    y[~known] = 0
    if problem == "regression":
        table.refuse(~(np.abs(y) < 1e100).all(1), "has a target that is not finite, or too large to be squared")
        return torch.from_numpy(y), known, Outputs(problem, names)
    table.refuse(((y != 0) & (y != 1)).any(1), "has a label other than 0 and 1")
    return torch.from_numpy(y == 1), known, Outputs(problem, names)


def _classes(table: Table, name: str) -> tuple[Tensor, NDArray[np.bool_], Outputs]:
    values = table.values(name)
    if values.dtype.kind == "O":
        known = np.array([value is not None for value in values])
    else:
        known = ~np.isnan(values) & (values != -1)
        table.refuse(
            known & ~((values == np.round(values)) & (values >= 0) & (values < 2**53)),
            "has a number that is no class: classes are words, or whole numbers from 0 with -1 for unknown ones; set "
            "the problem to regression to learn numbers",
        )
        values = np.where(known, values, -1).astype(np.int64)
    names, y = np.unique(values[known], return_inverse=True)
    if len(names) == 1:
        raise ValueError(f"{table.path} has one class only, {names[0]}; there is nothing to learn")
    if len(names) > known.sum() // 2 >= _FEWEST // 2:
        raise ValueError(
            f"column {name!r} of {table.path} has {len(names):,} classes for {known.sum():,} rows, and a class needs "
            "two at least: names are no classes, and the problem regression learns numbers"
        )
    target = np.zeros(len(values), np.int64)
    target[known] = y
    return torch.from_numpy(target), known, Outputs("classes", tuple(map(str, names.tolist())))


def _standardized(y: Tensor, train: Tensor, outputs: Outputs) -> tuple[Tensor, Outputs]:
    """Targets as float32. Until then they are float64: those of a time stamp differ in digits that float32 has not."""
    mean = y[train].mean(0)
    std = y[train].std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    return ((y - mean) / std).float(), replace(outputs, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


# ----------------------------------------------------------------------------------------------------------- split


def _random_split(known: NDArray[np.bool_], seed: int) -> list[Tensor]:
    nodes = torch.from_numpy(known).nonzero().squeeze(1)
    order = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed))]
    train, val = round(_TRAIN * len(nodes)), round(_VALIDATION * len(nodes))
    none = torch.zeros(len(known), dtype=torch.bool)
    return [none.index_fill(0, part, True) for part in order.split([train, val, len(nodes) - train - val])]


def _split(table: Table, known: NDArray[np.bool_], ids: Sequence[str] | None, nodes: Path) -> list[Tensor]:
    """The masks of the parts that a table states."""
    columns = [SPLIT] if SPLIT in table.names else MASKS
    table = _rows_of(table, columns, len(known), ids, nodes)
    words = PARTS if columns == [SPLIT] else (*_YES, *_NO)
    cells = [np.array([(cell or "").lower() for cell in table.text(name)]) for name in columns]
    for column in cells:
        table.refuse(~np.isin(column, (*words, "")), f"has a split other than {', '.join(words)} and nothing")
    masks = [cells[0] == part for part in PARTS] if columns == [SPLIT] else [np.isin(column, _YES) for column in cells]
    table.refuse(np.sum(masks, axis=0) > 1, "puts a row into two parts")
    table.refuse(np.any(masks, axis=0) & ~known, "puts a row into a part, and its target is unknown")
    if not all(mask.any() for mask in masks):
        raise ValueError(f"{table.path} leaves a part empty; training needs rows in {', '.join(PARTS)}")
    return [torch.from_numpy(mask) for mask in masks]


# ------------------------------------------------------------------------------------------------ what was understood


def _unused(table: Table, used: Iterable[str]) -> str:
    unused = [name for name in table.names if name not in {*used}]
    return f"not used: {listed(unused)}" if unused else ""


def listed(names: Sequence[str]) -> str:
    """The first names, for people."""
    return ", ".join(names[:8]) + (f" and {len(names) - 8:,} more" if len(names) > 8 else "")


def described(inputs: Sequence[str], categories: Mapping[str, Sequence[str]]) -> str:
    """Names of features, for people."""
    return listed([f"{name} ({len(categories[name])} categories)" if name in categories else name for name in inputs])
