"""Graphs of one's own, from tables in files: nodes with names, their targets and split, edges with weights."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.data.columns import Column, Missing, Preparation, check_names, described, listed
from mpnn.data.errors import DamagedFile
from mpnn.data.planetoid import NodeClassification
from mpnn.graphs.tables import (
    ID,
    Columns,
    Table,
    are_ends,
    counted_from,
    doubtful_header,
    edge_columns,
    is_graph,
    numbered_ends,
    read_table,
)

Problem = Literal["classes", "multilabel", "regression"]
Repeats = Literal["refuse", "first", "sum"]
PARTS = ("train", "val", "test")
SPLIT = "split"
MASKS = tuple(f"{part}_mask" for part in PARTS)
_RESERVED = (ID, SPLIT, *MASKS)
_YES = ("1", "1.0", "true")
_NO = ("0", "0.0", "false")
_TRAIN = 0.6
_VALIDATION = 0.2
_FEWEST = 4  # rows with a target, so that no part of the split is empty
Tables = Callable[[Path], Table]
Known = Mapping[str, Mapping[str, Column]]
"""How the columns of the tables "nodes", "edges" and "graphs" became features of a trained model."""
File = Path | str


@dataclass(frozen=True, eq=False)
class Outputs:
    """The meaning of the outputs of a model.

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
        repeats: of rows that are one edge, as both directions of an undirected one are, "first" keeps the first, and
            "sum" adds up weights and features; without either, the weight of an edge is the number of its rows.
            "refuse" keeps one of equal rows, and refuses others.
    """

    path: Path
    columns: Columns | None = None
    weights: str | None = None
    directed: bool = False
    first: int | None = None
    features: Sequence[str] = ()
    repeats: Repeats = "refuse"

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @staticmethod
    def of(edges: "File | EdgeFile | None") -> "EdgeFile | None":
        """The table in a file with default settings, unless it is one already."""
        return EdgeFile(Path(edges)) if isinstance(edges, (str, Path)) else edges


@dataclass(frozen=True, eq=False)
class NodeInputs:
    """Nodes with their features, and their edges.

    Args:
        x: float32 [N, F]. inputs: the columns of features. ids: the names of the nodes; None: their numbers.
        edge_index: int64 [2, E], ordered by dst, then src; no duplicates, no self-loops.
        edge_weight: float32 [E], or None. edge_features: float32 [E, K], or None.
        understood: for each file how it was read, for people.
        columns: how the columns of each table became features.
    """

    x: Tensor
    inputs: tuple[str, ...]
    ids: tuple[str, ...] | None
    edge_index: Tensor
    edge_weight: Tensor | None
    edge_features: Tensor | None
    understood: tuple[tuple[str, str], ...]
    columns: Known


@dataclass(frozen=True, eq=False)
class NodeTables(NodeClassification):
    """A graph from files: `NodeClassification` with the fields of `NodeInputs`, and what outputs mean.

    y: int64 [N] for classes, -1 where it is unknown; bool [N, C] for several labels, False there; float32 [N, C] for
        numbers (standardized), NaN there. is_known: bool [N], which nodes have a target.
    """

    edge_weight: Tensor | None
    edge_features: Tensor | None
    inputs: tuple[str, ...]
    columns: Known
    ids: tuple[str, ...] | None
    outputs: Outputs
    is_known: Tensor
    understood: tuple[tuple[str, str], ...] = ()


def node_tables(
    nodes: File,
    labels: File | None = None,
    edges: File | EdgeFile | None = None,
    seed: int = 0,
    *,
    target: str | Sequence[str] | None = None,
    problem: Problem = "classes",
    split: File | None = None,
    ignore: str | Sequence[str] = (),
    categories: str | Sequence[str] = (),
    missing: Missing = "refuse",
    scale: bool = False,
    encoding: str | None = None,
) -> NodeTables:
    """Reads a graph.

    A file is text with cells separated by commas, semicolons, tabs, bars or blanks, Parquet, or a NumPy array (`.npy`).
    Or it holds a graph, GraphML, GEXF, GML, DOT or JSON, whose nodes have attributes; `edges` then are in it, too.
    The first line may be a header. A column `id` names the nodes: `edges`, `labels` and `split` then use these names.
    Without it, nodes are numbered from 0. Rows of tables without `id` are in the order of nodes. Empty lines between
    them are refused. Empty cells, NA, nan, None, null and the like are missing values.

    Features are numbers, true and false (1 and 0), or dates such as 2020-01-31 (days since 1970).

    Args:
        nodes: a row for each node: its features.
        labels: a table of targets; None: they are columns of `nodes`.
        edges: source and destination of each link, which counts in both directions; None for no links, or for those in
            the file of `nodes`.
        seed: of the split without `split`: 60% of the nodes with targets are for training, 20% for validation.
        target: the columns to learn; needed without `labels`. Default: all of `labels`.
        problem: "classes": one column of names or of whole numbers; missing, or -1 among numbers, where it is unknown.
            Classes are at most half as many as the nodes that have one. "multilabel": columns of 0 and 1. "regression":
            columns of numbers.
        split: a table with a column `split` (train, val, test or empty), or with `train_mask`, `val_mask` and
            `test_mask` (0 or 1). These columns may also be in `nodes`. A row without a target is in no part.
        ignore: columns of `nodes` that are not features.
        categories: features, of `nodes` or of edges, that are categories: words, or whole numbers that only name
            something. Each of their values in rows for training becomes a column of ones and zeros, so that the first
            linear map of a model looks up a vector for each value, and adds those of several columns.
        missing, scale: as of `mpnn.data.columns.Preparation`: whether gaps in features are refused or filled, and
            whether numbers are scaled, by rows for training.
        encoding: of text, such as latin-1. Default: UTF-8, or UTF-16 with its mark.

    Raises:
        DamagedFile: if a file is not such a table, or the tables do not fit together. The message names the row.
        ImportError: text and Parquet need pyarrow (the extra `tables`), graphs networkx (the extra `files`).
        OSError: if a file cannot be read.
    """
    path = Path(nodes)
    targets = as_list(target)
    of_labels, of_split = (None if file is None else Path(file) for file in (labels, split))
    read = cache(partial(read_table, encoding=encoding))
    how = Preparation(as_list(categories) or (), missing, scale)
    try:
        links = edges_of(path, edges, encoding)
        drop = [*(as_list(ignore) or ()), *(targets or () if of_labels is None else ())]
        table = read(path)
        inputs = feature_names(table, drop)
        refuse_unused(how.categories, [*inputs, *(links.features if links else ())])
        ids = None if table.id is None else ids_of(table, table.id)
        learned = learn(read, path, of_labels, of_split, targets, problem, seed, len(table), ids)
        train, val, test = learned.masks
        given = _inputs(table, links, how, how, inputs, train.numpy(), encoding)
    except ValueError as error:
        raise DamagedFile(str(error)) from None
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
        given.columns,
        given.ids,
        learned.outputs,
        torch.from_numpy(learned.known),
        (*given.understood, *learned.understood("nodes")),
    )


def node_inputs(nodes: File, edges: File | EdgeFile | None, columns: Known, encoding: str | None = None) -> NodeInputs:
    """The nodes and edges in files, whose features are those of a trained model, `columns`.

    Raises:
        DamagedFile, ImportError, OSError: as for `node_tables`.
    """
    try:
        table = read_table(Path(nodes), encoding=encoding)
        links = edges_of(Path(nodes), edges, encoding)
        how, of_edges = (Preparation(known=columns.get(name, {})) for name in ("nodes", "edges"))
        every = np.ones(len(table), bool)
        return _inputs(table, links, how, of_edges, [*columns["nodes"]], every, encoding)
    except ValueError as error:
        raise DamagedFile(str(error)) from None


def edges_of(nodes: Path, edges: "File | EdgeFile | None", encoding: str | None) -> EdgeFile | None:
    """The table of edges: as asked for, or in the file of nodes if that holds a graph."""
    return EdgeFile(nodes) if edges is None and is_graph(nodes, encoding) else EdgeFile.of(edges)


def as_list(names: str | Sequence[str] | None) -> list[str] | None:
    """Names, of which one may stand alone."""
    return None if names is None else [names] if isinstance(names, str) else [*names]


# ---------------------------------------------------------------------------------------------------------- inputs


def _inputs(
    table: Table,
    edges: EdgeFile | None,
    how: Preparation,
    of_edges: Preparation,
    inputs: Sequence[str],
    rows: NDArray[np.bool_],
    encoding: str | None,
) -> NodeInputs:
    """The nodes of a table, whose columns `inputs` become features, and their edges. `rows`: those for training."""
    if not inputs:
        raise ValueError(f"{table.path} has no column of features besides {', '.join(table.names)}")
    made = how.features(table, inputs, rows)
    ids = None if table.id is None else ids_of(table, table.id)
    if ids is None:
        check_order(table)
    links = no_edges() if edges is None else _edges(edges, table.path, ids, of_edges, rows, encoding)
    named = "numbered from 0" if table.id is None else f"named by column {table.id}"
    note = f"{len(table):,} nodes, {named}, {table.form}, features {described(inputs, made.columns)}"
    said = (table.path.name, ", ".join([note, *made.notes]))
    return NodeInputs(
        torch.from_numpy(made.x),
        tuple(inputs),
        ids,
        links.index,
        links.weight,
        links.features,
        (said, *links.understood),
        {"nodes": made.columns, "edges": links.columns},
    )


def feature_names(table: Table, drop: Sequence[str], besides: Iterable[str] = ()) -> list[str]:
    """The columns of features: all but `drop`, which must be there, `besides`, and those of ids and splits."""
    names = check_names(table, drop)
    if "" in names:
        raise ValueError(f"column {names.index('')} of {table.path} has no name; name it, or leave it out")
    left_out = {*_RESERVED, *drop, *besides}
    return [name for name in names if name not in left_out and name != table.id]


def refuse_unused(asked: Iterable[str], used: Sequence[str]) -> None:
    """Refuses columns of categories that are not features of a table."""
    if unused := [name for name in asked if name not in used]:
        raise ValueError(
            f"no column of features is named {unused[0]!r}, which --categories names; there are {listed(used)}"
        )


def check_order(table: Table) -> None:
    """Refuses rows without names whose numbers say that they are not all of them, or in another order."""
    if not table.is_ordered:
        raise ValueError(
            f"the row numbers that pandas wrote to {table.path} are not 0, 1, 2, ...: call them id if they name the "
            "nodes, or drop them with reset_index(drop=True)"
        )


def ids_of(table: Table, name: str) -> tuple[str, ...]:
    """The names in a column; each row has one of its own."""
    ids = table.text(name)
    table.refuse(ids == None, "has no id (NA, nan, None and null stand for a missing one)")  # noqa: E711
    first = np.unique(ids, return_index=True)[1]
    is_first = np.zeros(len(ids), bool)
    is_first[first] = True
    table.refuse(~is_first, "has the id of a row above; ids are unique")
    return tuple(ids.tolist())


def numbers_of(
    table: Table,
    column: str,
    ids: Sequence[str],
    file: Path | str,
    what: str = "node",
    message: str = "has a {what} in column {column!r} that is no id of {file}: {name!r}",
) -> NDArray[np.int64]:
    """The numbers of the nodes, graphs or relations that a column names; `message` refuses another name."""
    number = {name: k for k, name in enumerate(ids)}
    names = table.text(column).tolist()
    numbers = np.array([number.get(name, -1) for name in names], np.int64)
    unknown = next((name for name in names if name not in number), "")
    table.refuse(numbers < 0, message.format(what=what, column=column, file=file, name=unknown))
    return numbers


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of a file: `edge_index`, `edge_weight` and `edge_features` of `NodeInputs`, how the file was read, and
    how its columns became features."""

    index: Tensor
    weight: Tensor | None
    features: Tensor | None
    understood: tuple[tuple[str, str], ...]
    columns: dict[str, Column]


def no_edges() -> Edges:
    """Returns an empty table of edges."""
    return Edges(torch.empty(2, 0, dtype=torch.int64), None, None, (), {})


def _edges(
    edges: EdgeFile,
    nodes: Path,
    ids: Sequence[str] | None,
    how: Preparation,
    rows: NDArray[np.bool_],
    encoding: str | None,
) -> Edges:
    table, ends = edge_table(edges, ids, encoding=encoding)
    edges = replace(edges, directed=edges.directed or table.is_directed)
    size = len(rows)
    if ids is not None:
        links = np.stack([numbers_of(table, end, ids, nodes) for end in ends])
    else:
        links = counted_ends(edges, table, ends)
    table.refuse(((links < 0) | (links >= size)).any(0), f"has no two of the {size} nodes of {nodes}, numbered from 0")
    return merged_edges(edges, table, ends, links, how, rows, "numbers" if ids is None else "text")


def counted_ends(edges: EdgeFile, table: Table, ends: Sequence[str]) -> NDArray[np.int64]:
    """The numbers of nodes in two columns, int64 [2, E], counted from 0."""
    links = numbered_ends(table, ends, "; number the nodes from 0, or name them in a column id")
    least = int(links.min()) if links.size else 0
    return links - counted_from(edges.first, least, edges.path, table.first)


def merged_edges(
    edges: EdgeFile,
    table: Table,
    ends: Sequence[str],
    links: NDArray[np.int64],
    how: Preparation,
    rows: NDArray[np.bool_],
    ids: str,
    of_graph: str | None = None,
) -> Edges:
    """Each of the links [2, E] once, with its weight or features, and in both directions unless edges are directed.
    `rows` [N]: the nodes for training; rows of edges for training have one of them as an end."""
    columns: dict[str, Column] = {}
    notes: list[str] = []
    attributes: NDArray[Any] = np.empty((len(table), 0), np.float32)
    if edges.weights is not None:
        weight = table.numbers(edges.weights)
        table.refuse(np.isnan(weight), f"has no number in column {edges.weights!r}")
        table.refuse(~np.isfinite(weight), "has a weight that is not finite")
        attributes = weight[:, None]
    elif edges.features:
        of_training = np.any(rows[links], axis=0)
        used = of_training if of_training.any() else np.ones(len(table), bool)
        attributes, columns, notes = how.features(table, edges.features, used)
    merged = _merged(edges, table, links, attributes)
    loops = int((links[0] == links[1]).sum())
    note = [
        f"{len(table):,} edges, ids as {ids}, {table.form}",
        f"{ends[0]} {'to' if edges.directed else 'and'} {ends[1]}",
        f"column {edges.weights} is a weight" if edges.weights else "",
        f"features {described(edges.features, columns)}" if edges.features else "",
        *notes,
        f"{loops:,} self-loops left out" if loops else "",
        *merged.notes,
        f"of the graph in column {of_graph}" if of_graph else "",
        unused(table, [*ends, edges.weights, *edges.features, of_graph]),
    ]
    attr = torch.from_numpy(merged.attributes).float()
    has_weights = edges.weights is not None or (edges.repeats == "sum" and not edges.features)
    return Edges(
        torch.from_numpy(merged.links),
        attr[:, 0] if has_weights else None,
        attr if edges.features else None,
        ((edges.path.name, ", ".join(filter(None, note))),),
        columns,
    )


class _Merged(NamedTuple):
    """Links [2, E], each once, their attributes [E, K], and what people should know of rows that are one link."""

    links: NDArray[np.int64]
    attributes: NDArray[Any]
    notes: list[str]


def _merged(edges: EdgeFile, table: Table, links: NDArray[np.int64], attributes: NDArray[Any]) -> _Merged:
    """The links of a file, ordered by dst, then src; undirected ones in both directions."""
    row = np.arange(len(table))
    if not edges.directed:
        links, row = np.concatenate([links, links[::-1]], 1), np.concatenate([row, row])
    proper = np.flatnonzero(links[0] != links[1])
    order = proper[np.lexsort((row[proper], links[0, proper], links[1, proper]))]
    links, row = links[:, order], row[order]
    is_first = np.ones(len(row), bool)
    is_first[1:] = (links[:, 1:] != links[:, :-1]).any(0)
    link = np.cumsum(is_first) - 1
    first = row[is_first]
    differs = np.zeros(len(table), bool)
    differs[row] = (attributes[row] != attributes[first[link]]).any(1)
    if edges.repeats == "refuse":
        other = "another weight" if edges.weights else "other features"
        table.refuse(
            differs, f"repeats an edge with {other}; keep the first (--repeats first) or add them up (--repeats sum)"
        )
    stated = np.zeros(len(first), bool)  # links that a row states in this direction
    stated[link[order < len(table)]] = True
    repeats = int((order < len(table)).sum() - stated.sum())
    others = 0 if edges.directed else int(stated.sum()) - len(first) // 2
    what = [f"{repeats:,} repeats"] * (repeats > 0) + [f"{others:,} rows of the other direction"] * (others > 0)
    if edges.repeats != "sum":
        notes = [f"{' and '.join(what)} left out"] if what else []
        return _Merged(links[:, is_first], attributes[first], notes)
    if not attributes.shape[1]:
        attributes = np.ones((len(table), 1))
    sums = np.zeros((len(first), attributes.shape[1]))
    np.add.at(sums, link, attributes[row])
    notes = [] if edges.weights or edges.features else ["the weight of an edge is the number of its rows"]
    notes += [f"{' and '.join(what)} added up"] if what else []
    return _Merged(links[:, is_first], sums, notes)


def edge_table(
    edges: EdgeFile, ids: Collection[str] | None, *, of_graphs: bool = False, encoding: str | None = None
) -> tuple[Table, list[str]]:
    """The table, and the names of the columns of the two ends. `of_graphs`: a column may name the graph of an edge."""
    if edges.weights is not None and edges.features:
        raise ValueError("edges have weights, or features: name the column of weights among the features instead")
    is_named = edges.columns or edges.weights or edges.features
    names = [*(edges.columns or ()), *filter(None, [edges.weights]), *edges.features]
    read = partial(read_table, edges.path, of_edges=True, notes=ids is None, encoding=encoding)
    table = read(header=has_header(names))
    ends = _end_names(table, edges, of_graphs)
    if not (len(table) or is_named or are_ends(",".join(ends))):
        raise doubtful_header(edges.path, ends) if table.header else ValueError(f"{edges.path} has no edge")
    if ids is None or not table.header:
        return table, ends
    if {*ends} & {*ids} and is_named:
        raise ValueError(f"the first line of {edges.path} links {ends[0]!r} and {ends[1]!r}; write a header above it")
    if {*ends} & {*ids}:
        table = read(header=False)
        return table, _end_names(table, edges, of_graphs)
    if not (table.is_sure or is_named or (of_graphs and table.of_graph) or are_ends(",".join(ends))):
        raise doubtful_header(edges.path, ends)
    return table, ends


def has_header(names: Iterable[str | int]) -> bool | None:
    """Whether a table whose columns have these names has a header; None if they are numbers, as without one."""
    return True if any(not str(name).isdecimal() for name in names) else None


def _end_names(table: Table, edges: EdgeFile, of_graphs: bool) -> list[str]:
    used = [*([] if edges.weights is None else [edges.weights]), *edges.features]
    names = check_names(table, used)
    used += [table.of_graph] if of_graphs and table.of_graph else []
    free = None if table.has_ends or not used else [k for k, name in enumerate(names) if name not in used]
    columns = edges.columns or free
    return [names[k] for k in edge_columns(table, columns)]


# --------------------------------------------------------------------------------------------------------- targets


@dataclass(frozen=True, eq=False)
class Learned:
    """The targets y of rows, which rows have them, what they mean, the masks of the parts, the files of both, and how
    many rows of a part have no target."""

    y: Tensor
    known: NDArray[np.bool_]
    outputs: Outputs
    masks: list[Tensor]
    of_targets: Path
    of_split: Path | None
    left_out: int

    def understood(self, rows: str) -> tuple[tuple[str, str], ...]:
        """For each file how it was read."""
        names = listed(self.outputs.names)
        problem = self.outputs.problem
        what = f"{len(self.outputs.names)} classes, {names}" if problem == "classes" else f"{problem}, {names}"
        sizes = ", ".join(f"{int(mask.sum()):,} {part}" for mask, part in zip(self.masks, PARTS, strict=True))
        parts = f"{sizes} ({'at random' if self.of_split is None else 'as stated'})"
        if self.left_out:
            parts += f", {self.left_out:,} not used (a split without a target)"
        return (
            (self.of_targets.name, f"{what}, for {self.known.sum():,} of {len(self.known):,} {rows}"),
            ((self.of_split or self.of_targets).name, parts),
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
    """Returns the targets of `size` rows, nodes or graphs, named `ids`."""
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
    masks, left_out = (_random_split(known, seed), 0) if split is None else _split(read(split), known, ids, rows)
    if problem == "regression":
        y, outputs = _standardized(y, known, masks[0], outputs)
    return Learned(y, known, outputs, masks, source, split, left_out)


def _rows_of(table: Table, columns: Sequence[str] | None, size: int, ids: Sequence[str] | None, nodes: Path) -> Table:
    """Columns of a table, a row for each node: by its `id` (of nodes without names: their numbers), or by the order.
    Default: all columns. Cells of nodes without a row are missing."""
    names = check_names(table, columns or ())
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
    hint = f"; {problem} needs {'0 and 1, or true and false,' if problem == 'multilabel' else 'numbers'} as targets"
    y = np.stack([table.quantities(name, hint)[0] for name in names], 1)
    known = ~np.any(np.isnan(y), axis=1)
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
    target = np.full(len(values), -1, np.int64)
    target[known] = y
    return torch.from_numpy(target), known, Outputs("classes", tuple(map(str, names.tolist())))


def _standardized(y: Tensor, known: NDArray[np.bool_], train: Tensor, outputs: Outputs) -> tuple[Tensor, Outputs]:
    """Targets as float32, NaN where they are unknown. Until then they are float64: those of a time stamp differ in
    digits that float32 has not."""
    mean = y[train].mean(0)
    std = y[train].std(0, correction=0)
    std = torch.where(std > 0, std, 1.0)
    standardized = ((y - mean) / std).float()
    standardized[torch.from_numpy(~known)] = torch.nan
    return standardized, replace(outputs, mean=tuple(mean.tolist()), std=tuple(std.tolist()))


# ----------------------------------------------------------------------------------------------------------- split


def _random_split(known: NDArray[np.bool_], seed: int) -> list[Tensor]:
    nodes = torch.from_numpy(known).nonzero().squeeze(1)
    order = nodes[torch.randperm(len(nodes), generator=torch.Generator().manual_seed(seed))]
    train, val = round(_TRAIN * len(nodes)), round(_VALIDATION * len(nodes))
    none = torch.zeros(len(known), dtype=torch.bool)
    return [none.index_fill(0, part, True) for part in order.split([train, val, len(nodes) - train - val])]


def _split(table: Table, known: NDArray[np.bool_], ids: Sequence[str] | None, nodes: Path) -> tuple[list[Tensor], int]:
    """The masks of the parts that a table states, and how many of its rows are left out, because they have no
    target."""
    columns = [SPLIT] if SPLIT in table.names else MASKS
    table = _rows_of(table, columns, len(known), ids, nodes)
    words = PARTS if columns == [SPLIT] else (*_YES, *_NO)
    cells = [np.array([(cell or "").lower() for cell in table.text(name)]) for name in columns]
    for column in cells:
        table.refuse(~np.isin(column, (*words, "")), f"has a split other than {', '.join(words)} and nothing")
    masks = [cells[0] == part for part in PARTS] if columns == [SPLIT] else [np.isin(column, _YES) for column in cells]
    table.refuse(np.sum(masks, axis=0) > 1, "puts a row into two parts")
    left_out = int((np.any(masks, axis=0) & ~known).sum())
    masks = [mask & known for mask in masks]
    if not all(mask.any() for mask in masks):
        raise ValueError(f"{table.path} leaves a part empty; training needs rows with a target in {', '.join(PARTS)}")
    return [torch.from_numpy(mask) for mask in masks], left_out


# ------------------------------------------------------------------------------------------------ what was understood


def unused(table: Table, used: Iterable[str | None]) -> str:
    """Text that lists the columns that are not used, or ""."""
    others = [name for name in table.names if name not in {*used}]
    return f"not used: {listed(others)}" if others else ""
