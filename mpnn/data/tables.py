"""Graphs of one's own, from tables in files: nodes with names, their targets and split, edges with weights."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.planetoid import NodeClassification
from mpnn.graphs.tables import (
    ID,
    Columns,
    Table,
    column_names,
    edge_chunks,
    edge_columns,
    number,
    read_columns,
    whole_numbers,
)

Problem = Literal["classes", "multilabel", "regression"]
PARTS = ("train", "val", "test")
SPLIT, MASKS = "split", tuple(f"{part}_mask" for part in PARTS)
_RESERVED = (ID, SPLIT, *MASKS)
_YES, _NO = ("1", "1.0", "true"), ("0", "0.0", "false", "")
_TRAIN, _VALIDATION = 0.6, 0.2
_FEWEST = 4  # labeled nodes, so that no part of the split is empty


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
        directed: whether an edge counts from its source to its destination only.
    """

    path: Path
    columns: Columns | None = None
    weights: str | None = None
    directed: bool = False


@dataclass(frozen=True, eq=False)
class NodeInputs:
    """Nodes with their features, and their edges.

    Args:
        x: float32 [N, F]. inputs: the names of the features. ids: the names of the nodes; None: their numbers.
        edge_index: int64 [2, E], ordered by dst, then src; no duplicates, no self-loops.
        edge_weight: float32 [E], or None.
    """

    x: Tensor
    inputs: tuple[str, ...]
    ids: tuple[str, ...] | None
    edge_index: Tensor
    edge_weight: Tensor | None


@dataclass(frozen=True, eq=False)
class NodeTables(NodeClassification):
    """A graph from files: `NodeClassification` with the fields of `NodeInputs`, and what outputs mean.

    y: int64 [N] for classes, bool [N, C] for several labels, float32 [N, C] for numbers (standardized).
    """

    edge_weight: Tensor | None
    inputs: tuple[str, ...]
    ids: tuple[str, ...] | None
    outputs: Outputs


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
) -> NodeTables:
    """Reads a graph.

    A file is UTF-8 text with one row a line, its cells separated by commas, semicolons, tabs or blanks, a NumPy array
    (`.npy`) or Parquet. The first line may be a header. A column `id` names the nodes: `edges`, `labels` and `split`
    then use these names. Without it, nodes are numbered from 0. Rows of tables without `id` are in the order of nodes.
    Empty lines between them are refused.

    Args:
        nodes: a row of numbers for each node: its features.
        labels: a table of targets; None: they are columns of `nodes`.
        edges: source and destination of each link, which counts in both directions; None for no links.
        seed: of the split without `split`: 60% of the nodes with targets are for training, 20% for validation.
        target: the columns to learn; needed without `labels`. Default: all of `labels`.
        problem: "classes": one column of names or of whole numbers; empty, or -1 among numbers, where it is unknown.
            "multilabel": columns of 0 and 1. "regression": columns of numbers.
        split: a table with a column `split` (train, val, test or empty), or with `train_mask`, `val_mask` and
            `test_mask` (0 or 1). These columns may also be in `nodes`.
        ignore: columns of `nodes` that are no features.

    Raises:
        DamagedFile: if a file is not such a table, or the tables do not fit together. The message names the row.
        OSError: if a file cannot be read.
    """
    try:
        drop = (*ignore, *(target or ())) if labels is None else ignore
        given = _inputs(nodes, EdgeFile(edges) if isinstance(edges, Path) else edges, drop)
        if labels is None and not target:
            raise ValueError(f"name the columns of {nodes} to learn as the target, or another file as labels")
        y, known, outputs = _targets(_rows_of(labels or nodes, target, given, nodes), problem)
        if known.sum() < _FEWEST:
            raise ValueError(
                f"{labels or nodes} has {known.sum()} labeled nodes; training, validation and test need {_FEWEST} at "
                "least, and more to mean anything"
            )
        if split is None and {SPLIT, *MASKS} & {*column_names(nodes)}:
            split = nodes
        masks = _random_split(known, seed) if split is None else _split(split, known, given, nodes)
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    if problem == "regression":
        y, outputs = _standardized(y, masks[0], outputs)
    train, val, test = masks
    return NodeTables(
        given.x, y, train, val, test, given.edge_index, given.edge_weight, given.inputs, given.ids, outputs
    )


def node_inputs(nodes: Path, edges: EdgeFile | None, inputs: Sequence[str]) -> NodeInputs:
    """The nodes and edges in files, of which the columns `inputs` are the features.

    Raises:
        DamagedFile, OSError: as for `node_tables`.
    """
    try:
        return _inputs(nodes, edges, inputs=inputs)
    except ValueError as error:
        raise DamagedFile(str(error)) from None


# ---------------------------------------------------------------------------------------------------------- inputs


def _inputs(
    nodes: Path, edges: EdgeFile | None, drop: Sequence[str] = (), inputs: Sequence[str] | None = None
) -> NodeInputs:
    """`drop`: the columns that are no features; or `inputs`: those that are, in this order."""
    names = _names(nodes, inputs or drop)
    if "" in names:
        raise ValueError(
            f"column {names.index('')} of {nodes} has no name; pandas' to_csv writes row numbers there: use "
            "index=False, or name the column id if it names the nodes"
        )
    inputs = inputs or [name for name in names if name not in (*_RESERVED, *drop)]
    if not inputs:
        raise ValueError(f"{nodes} has no column of features besides {', '.join(names)}")
    hint = "; features are numbers: write numbers, or ignore the column"
    table = read_columns(nodes, inputs, [ID] if ID in names else [], hint)
    with np.errstate(over="ignore"):  # infinities are refused
        x = np.stack([table.columns[name] for name in inputs], 1).astype(np.float32)
    table.refuse(~np.isfinite(x).all(1), "has a number that is NaN, infinite or too large for float32")
    if table.lines is not None and len(inputs) > 2 and [*inputs] == [*map(str, x[0].astype(int))]:
        raise ValueError(f"{table.where(0)} counts the columns, as pandas' to_csv does without names: give them names")
    ids = _ids(table) if ID in names else None
    edge_index, weight = (
        (torch.empty(2, 0, dtype=torch.int64), None) if edges is None else _edges(edges, nodes, len(x), ids)
    )
    return NodeInputs(torch.from_numpy(x), tuple(inputs), ids, edge_index, weight)


def _names(path: Path, used: Iterable[str]) -> list[str]:
    """The names of the columns of a file, `used` among them."""
    names = column_names(path)
    if absent := [name for name in used if name not in names]:
        raise ValueError(f"{path} has no column {absent[0]!r}; it has {', '.join(map(repr, names))}")
    return names


def _ids(table: Table) -> tuple[str, ...]:
    ids = table.columns[ID]
    table.refuse(ids == "", "has no id")
    first = np.unique(ids, return_index=True)[1]
    is_first = np.zeros(len(ids), bool)
    is_first[first] = True
    table.refuse(~is_first, "has the id of a row above; ids are unique")
    return tuple(ids.tolist())


def _numbers_of(table: Table, column: str, ids: Sequence[str], nodes: Path) -> NDArray[np.int64]:
    """The numbers of the nodes that a column names."""
    number = {name: k for k, name in enumerate(ids)}
    found = np.array([number.get(name, -1) for name in table.columns[column].tolist()])
    table.refuse(found < 0, f"has a node in column {column!r} that is no id of {nodes}")
    return found


def _edges(edges: EdgeFile, nodes: Path, size: int, ids: Sequence[str] | None) -> tuple[Tensor, Tensor | None]:
    """The edges and weights as in `NodeInputs`."""
    table, links, weight = _links(edges, nodes, ids)
    table.refuse(((links < 0) | (links >= size)).any(0), f"has no two of the {size} nodes of {nodes}, numbered from 0")
    table.refuse(~(np.isfinite(weight) & (weight >= 0)), "has a weight that is negative or not finite")
    if not edges.directed:
        links, weight = np.concatenate([links, links[::-1]], 1), np.concatenate([weight, weight])
    proper = np.flatnonzero(links[0] != links[1])
    order = proper[np.lexsort((weight[proper], links[0, proper], links[1, proper]))]
    repeats = np.zeros(len(order), bool)
    repeats[1:] = (links[:, order[1:]] == links[:, order[:-1]]).all(0)
    clash = np.zeros(len(links[0]), bool)
    clash[order[1:]] = repeats[1:] & (np.diff(weight[order]) != 0)
    table.refuse(clash, "repeats an edge with another weight; keep one of the two, or make edges directed")
    kept = order[~repeats]
    edge_index = torch.from_numpy(links[:, kept])
    return edge_index, None if edges.weights is None else torch.from_numpy(weight[kept]).float()


def _links(edges: EdgeFile, nodes: Path, ids: Sequence[str] | None) -> tuple[Table, NDArray[np.int64], NDArray[Any]]:
    """The table, the numbers of the two nodes of each row [2, E], and the weights [E]."""
    path, weights = edges.path, [] if edges.weights is None else [edges.weights]
    names = _names(path, weights)
    if path.suffix == ".npy":
        links = whole_numbers(np.concatenate([*edge_chunks(path, columns=edges.columns)], axis=1).T, path).T
        if ids is not None or weights:
            raise ValueError(
                f"{path} is an array of node numbers; nodes with ids, and weights, need a table with a header"
            )
        return Table(path, {"": links[0]}, None), links, np.ones(links.shape[1])
    columns = edges.columns or ([name for name in names if name not in weights] if weights else None)
    ends = [names[k] for k in edge_columns(path, names, len(names), columns)]
    if ids is None:
        hint = "; number the nodes from 0, or name them in a column id"
        table = read_columns(path, [*ends, *weights], hint=hint, gaps=True)
        links = whole_numbers(np.stack([table.columns[end] for end in ends], 1), path, table.lines).T
    else:
        table = read_columns(path, weights, ends, gaps=True)
        if {*ends} <= {*ids}:
            raise ValueError(f"the first line of {path} links {ends[0]!r} and {ends[1]!r}; write a header above it")
        links = np.stack([_numbers_of(table, end, ids, nodes) for end in ends])
    return table, links, table.columns[weights[0]] if weights else np.ones(len(table))


# --------------------------------------------------------------------------------------------------------- targets


def _rows_of(path: Path, columns: Sequence[str] | None, given: NodeInputs, nodes: Path) -> Table:
    """Columns of a table, a row for each node: by its `id` (of nodes without names: their numbers), or by the order.
    Default: all columns. Nodes without a row get empty cells."""
    names = _names(path, columns or ())
    columns = columns or [name for name in names if name not in _RESERVED]
    table = read_columns(path, text=[*columns, *([ID] if ID in names else [])])
    row = np.arange(len(table))
    if ID in names:
        _ids(table)
        row = np.full(len(given.x), -1)
        ids = given.ids or [*map(str, range(len(given.x)))]
        row[_numbers_of(table, ID, ids, nodes)] = np.arange(len(table))
    if len(row) != len(given.x):
        raise ValueError(f"{path} must have one row for each of the {len(given.x)} rows of {nodes}; it has {len(row)}")
    cells = {name: np.where(row < 0, "", table.columns[name].astype(str)[row]) for name in columns}
    return Table(path, cells, None if table.lines is None else np.array(table.lines)[row].tolist())


def _targets(table: Table, problem: Problem) -> tuple[Tensor, NDArray[np.bool_], Outputs]:
    """The targets, which nodes have them, and what they mean."""
    names, columns = tuple(table.columns), [_values(table, name) for name in table.columns]
    if problem == "classes":
        if len(names) > 1:
            raise ValueError(
                f"{table.path} has {len(names)} columns to learn, {', '.join(names)}, and classes are one: name it as "
                "the target, or set the problem to multilabel or regression"
            )
        return _classes(table, columns[0])
    if any(column.dtype.kind == "U" for column in columns):
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


def _values(table: Table, name: str) -> NDArray[Any]:
    """A column as float64, NaN where it is empty; or as text, if it has no number."""
    cells = table.columns[name]
    numbers = np.array([number(cell) for cell in cells.tolist()])
    is_word = np.isnan(numbers) & (cells != "")
    if is_word.sum() == (cells != "").sum():
        return cells
    table.refuse(is_word, f"has a word in column {name!r} among numbers")
    return numbers


def _classes(table: Table, values: NDArray[Any]) -> tuple[Tensor, NDArray[np.bool_], Outputs]:
    if values.dtype.kind == "U":
        known = values != ""
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
    target = np.zeros(len(values), np.int64)
    target[known] = y
    return torch.from_numpy(target), known, Outputs("classes", tuple(map(str, names.tolist())))


def _standardized(y: Tensor, train: Tensor, outputs: Outputs) -> tuple[Tensor, Outputs]:
    """Targets as float32. Until then they are float64: those of a time stamp differ in digits that float32 has not."""
    mean, std = y[train].mean(0), y[train].std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    return ((y - mean) / std).float(), replace(outputs, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


# ----------------------------------------------------------------------------------------------------------- split


def _random_split(known: NDArray[np.bool_], seed: int) -> list[Tensor]:
    nodes = torch.from_numpy(known).nonzero().squeeze(1)
    order = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed))]
    train, val = round(_TRAIN * len(nodes)), round(_VALIDATION * len(nodes))
    none = torch.zeros(len(known), dtype=torch.bool)
    return [none.index_fill(0, part, True) for part in order.split([train, val, len(nodes) - train - val])]


def _split(path: Path, known: NDArray[np.bool_], given: NodeInputs, nodes: Path) -> list[Tensor]:
    """The masks of the parts that a table states."""
    columns = [SPLIT] if SPLIT in column_names(path) else MASKS
    table = _rows_of(path, columns, given, nodes)
    cells = [np.char.lower(table.columns[name]) for name in columns]
    for column, words in zip(cells, [(*PARTS, "")] if columns == [SPLIT] else [(*_YES, *_NO)] * 3, strict=True):
        table.refuse(~np.isin(column, words), f"has a split other than {', '.join(words[:-1])} and nothing")
    masks = [cells[0] == part for part in PARTS] if columns == [SPLIT] else [np.isin(column, _YES) for column in cells]
    table.refuse(np.sum(masks, axis=0) > 1, "puts a node into two parts")
    table.refuse(np.any(masks, axis=0) & ~known, "puts a node into a part, and its target is unknown")
    if not all(mask.any() for mask in masks):
        raise ValueError(f"{path} leaves a part empty; training needs nodes in {', '.join(PARTS)}")
    return [torch.from_numpy(mask) for mask in masks]
