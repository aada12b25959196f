"""Collections of small graphs of one's own, from three tables: graphs with their targets, nodes, and edges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.data.columns import Features, Missing, Preparation, described
from mpnn.data.errors import DamagedFile
from mpnn.data.tables import (
    EdgeFile,
    Edges,
    File,
    Known,
    NodeInputs,
    Outputs,
    Problem,
    as_list,
    check_order,
    counted_ends,
    edge_table,
    feature_names,
    ids_of,
    learn,
    merged_edges,
    no_edges,
    numbers_of,
    refuse_unused,
)
from mpnn.graphs.tables import ID, OF_GRAPH, Table, read_table

TABLES = ("graphs", "nodes", "edges")


@dataclass(frozen=True, eq=False)
class GraphInputs(NodeInputs):
    """Graphs with their nodes, which are numbered graph by graph, and edges.

    Args:
        x: float32 [N, F]: the features `inputs` of nodes, then the features `graph_inputs` of their graphs. Without
            either, one feature that is 1.
        ids: the names of the graphs. graph: int64 [N], ascending, the number of the graph of each node.
    """

    graph: Tensor
    graph_inputs: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class GraphTables(GraphInputs):
    """`GraphInputs` with a target for each graph, the masks [G] of the parts, what outputs mean, and which graphs have
    a target, as in `NodeTables`."""

    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    outputs: Outputs
    is_known: Tensor


def graph_tables(
    graphs: File,
    nodes: File,
    edges: File | EdgeFile | None = None,
    seed: int = 0,
    *,
    labels: File | None = None,
    target: str | Sequence[str] | None = None,
    problem: Problem = "classes",
    split: File | None = None,
    ignore: str | Sequence[str] = (),
    categories: str | Sequence[str] = (),
    missing: Missing = "refuse",
    scale: bool = False,
    encoding: str | None = None,
) -> GraphTables:
    """Reads graphs, each with a class, labels or numbers to learn. Files are read as `node_tables` reads them.

    Args:
        graphs: a row for each graph: its `id` (or `graph`, `graph_id`), the target, and numbers that describe it, which
            become features of each of its nodes.
        nodes: a row for each node: a column `graph` (or `graph_id`) names its graph; numbers are its features, and a
            column `id` its name, unique in the graph.
        edges: source and destination of each edge. With a column `graph`, they are nodes of that graph, by name or by
            number from 0 in the order of its rows. Without it, names are unique in the file, and numbers count all
            rows of `nodes`.
        labels, split: as for `node_tables`, by the `id` of graphs. seed, target, problem: as for `node_tables`.
        ignore: columns of `graphs` and `nodes` that are not features.
        categories: features of `graphs`, `nodes` or edges that are categories, as for `node_tables`.
        missing, scale, encoding: as for `node_tables`. Rows for training are those of graphs for training.

    Raises:
        DamagedFile: if a file is not such a table, or the tables do not fit together. The message names the row.
        ImportError, OSError: as for `node_tables`.
    """
    path = Path(graphs)
    of_labels, of_split = (None if file is None else Path(file) for file in (labels, split))
    targets = as_list(target)
    ignored = as_list(ignore) or []
    links = EdgeFile.of(edges)
    how = Preparation(as_list(categories) or (), missing, scale)
    read = cache(partial(_of_graphs, encoding=encoding))
    try:
        tables = [read(path), _of_nodes(Path(nodes), encoding)]
        if unknown := [name for name in ignored if not any(name in table.names for table in tables)]:
            raise ValueError(f"neither {graphs} nor {nodes} has a column {unknown[0]!r} to ignore")
        drops = [[name for name in ignored if name in table.names] for table in tables]
        drops[0] += targets or () if of_labels is None else ()
        names = [
            feature_names(table, drop, filter(None, [table.of_graph]))
            for table, drop in zip(tables, drops, strict=True)
        ]
        refuse_unused(how.categories, [*names[0], *names[1], *(links.features if links else ())])
        ids = ids_of(tables[0], ID)
        learned = learn(read, path, of_labels, of_split, targets, problem, seed, len(tables[0]), ids)
        train, val, test = learned.masks
        every = dict.fromkeys(TABLES, how)
        given = _inputs(tables[0], tables[1], links, names[0], names[1], every, train.numpy(), encoding)
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    fields = {**vars(given), "understood": (*given.understood, *learned.understood("graphs"))}
    return GraphTables(
        **fields,
        y=learned.y,
        train_mask=train,
        val_mask=val,
        test_mask=test,
        outputs=learned.outputs,
        is_known=torch.from_numpy(learned.known),
    )


def graph_inputs(
    graphs: File, nodes: File, edges: File | EdgeFile | None, columns: Known, encoding: str | None = None
) -> GraphInputs:
    """The graphs in files, whose features are those of a trained model, `columns`.

    Raises:
        DamagedFile, ImportError, OSError: as for `graph_tables`.
    """
    try:
        tables = _of_graphs(Path(graphs), encoding), _of_nodes(Path(nodes), encoding)
        how = {name: Preparation(known=columns.get(name, {})) for name in TABLES}
        every = np.ones(len(tables[0]), bool)
        of_graphs, of_nodes = [*columns["graphs"]], [*columns["nodes"]]
        return _inputs(*tables, EdgeFile.of(edges), of_graphs, of_nodes, how, every, encoding)
    except ValueError as error:
        raise DamagedFile(str(error)) from None


def _of_graphs(path: Path, encoding: str | None) -> Table:
    """A table with a row for each graph, whose name is in the column `id`."""
    table = read_table(path, header=True, encoding=encoding)
    name = table.first_of((ID, *OF_GRAPH))
    if name is None:
        raise ValueError(f"{path} has no column id or graph, which names each graph; it has {_quoted(table)}")
    names = [ID if column == name else column for column in table.names]
    return replace(table, names=names, read=lambda column: table.read(name if column == ID else column))


def _of_nodes(path: Path, encoding: str | None) -> Table:
    table = read_table(path, header=True, encoding=encoding)
    if table.of_graph is None:
        raise ValueError(
            f"{path} has no column graph (or graph_id), which names the graph of each node; it has {_quoted(table)}"
        )
    return table


def _quoted(table: Table) -> str:
    return ", ".join(map(repr, table.names))


def _inputs(
    graphs: Table,
    nodes: Table,
    edges: EdgeFile | None,
    of_graphs: Sequence[str],
    of_nodes: Sequence[str],
    how: Mapping[str, Preparation],
    rows: NDArray[np.bool_],
    encoding: str | None,
) -> GraphInputs:
    """The graphs in tables, whose columns `of_graphs` and `of_nodes` become features. `rows`: those for training."""
    ids = ids_of(graphs, ID)
    assert nodes.of_graph is not None
    of_row = numbers_of(nodes, nodes.of_graph, ids, graphs.path, "graph")
    sizes = np.bincount(of_row, minlength=len(ids))
    graphs.refuse(sizes == 0, f"has a graph that no row of {nodes.path} belongs to; a graph has one node at least")
    order = np.argsort(of_row, kind="stable")
    of_graph = how["graphs"].features(graphs, of_graphs, rows)
    of_node = how["nodes"].features(nodes, of_nodes, rows[of_row])
    graph = of_row[order]
    x = np.concatenate([of_node.x[order], of_graph.x[graph]], 1)
    x = x if x.shape[1] else np.ones((len(x), 1), np.float32)
    names = None if nodes.id is None else nodes.text(nodes.id)
    if names is not None:
        nodes.refuse(names == None, "has no id (NA, nan, None and null stand for a missing one)")  # noqa: E711
        pairs = [*zip(of_row.tolist(), names.tolist(), strict=True)]
        first = dict(zip(reversed(pairs), reversed(range(len(pairs))), strict=True))
        repeats = np.array([first[pair] != row for row, pair in enumerate(pairs)])
        nodes.refuse(repeats, "has the id of a row above, which is a node of the same graph")
    else:
        check_order(nodes)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    links = no_edges()
    if edges is not None:
        in_place = rows[graph]
        links = _edges(edges, graphs.path, nodes, ids, of_row, names, place, how["edges"], in_place, encoding)
    second_name = f", not used: {graphs.of_graph}" if graphs.of_graph else ""
    no_features = "" if of_graphs else ", no features: each node has a 1"
    said = (
        (graphs.path.name, f"{len(ids):,} graphs, {graphs.form}{_features(of_graphs, of_graph)}{second_name}"),
        (
            nodes.path.name,
            f"{len(x):,} nodes, {sizes.min()} to {sizes.max()} a graph, {nodes.form}"
            f"{_features(of_nodes, of_node) or no_features}",
        ),
    )
    return GraphInputs(
        torch.from_numpy(x),
        tuple(of_nodes),
        ids,
        links.index,
        links.weight,
        links.features,
        (*said, *links.understood),
        {"graphs": of_graph.columns, "nodes": of_node.columns, "edges": links.columns},
        torch.from_numpy(graph),
        tuple(of_graphs),
    )


def _features(names: Sequence[str], made: Features) -> str:
    return "".join(f", {note}" for note in [f"features {described(names, made.columns)}", *made.notes]) if names else ""


def _edges(
    edges: EdgeFile,
    graphs: Path,
    nodes: Table,
    ids: Sequence[str],
    of_row: NDArray[np.int64],
    names: NDArray[np.object_] | None,
    place: NDArray[np.int64],
    how: Preparation,
    rows: NDArray[np.bool_],
    encoding: str | None,
) -> Edges:
    """As `mpnn.data.tables._edges`. of_row: the graph of each row of `nodes`; place: its number among sorted nodes."""
    table, ends = edge_table(edges, None if names is None else {*names.tolist()}, of_graphs=True, encoding=encoding)
    column = None if table.of_graph in ends else table.of_graph
    graph = None if column is None else numbers_of(table, column, ids, graphs, "graph")
    if names is None:
        links = counted_ends(edges, table, ends)
        sizes = np.bincount(of_row)
        limit = len(place) if graph is None else sizes[graph]
        what = f"the {len(place)} rows of {nodes.path}" if graph is None else f"the nodes of its graph in {nodes.path}"
        table.refuse(((links < 0) | (links >= limit)).any(0), f"has no two of {what}, numbered from 0")
        links = place[links] if graph is None else links + (np.cumsum(sizes) - sizes)[graph]
    else:
        links = np.stack([_named(table, end, graph, nodes, ids, of_row, names) for end in ends])
        links = place[links]
    of_place = np.sort(of_row)
    apart = of_place[links[0]] != of_place[links[1]]
    if apart.any():
        one, other = (repr(ids[of_place[end]]) for end in links[:, apart.argmax()])
        table.refuse(apart, f"has an edge from graph {one} to graph {other}; edges connect nodes of one graph")
    return merged_edges(edges, table, ends, links, how, rows, "numbers" if names is None else "text", column)


def _named(
    table: Table,
    end: str,
    graph: NDArray[np.int64] | None,
    nodes: Table,
    ids: Sequence[str],
    of_row: NDArray[np.int64],
    names: NDArray[np.object_],
) -> NDArray[np.int64]:
    """The rows of the nodes in a column of edges, whose graphs are known or not."""
    cells = table.text(end).tolist()
    if graph is None:
        row = {name: k for k, name in enumerate(names.tolist())}
        if len(row) < len(names):
            raise ValueError(
                f"{nodes.path} has nodes of one id in several graphs, so that {table.path} needs a column graph"
            )
        return numbers_of(table, end, names.tolist(), nodes.path)
    key = dict(zip(zip(of_row.tolist(), names.tolist(), strict=True), range(len(names)), strict=True))
    numbers = np.array([key.get(pair, -1) for pair in zip(graph.tolist(), cells, strict=True)], np.int64)
    if (numbers < 0).any():
        at = int((numbers < 0).argmax())
        where = [ids[of_row[k]] for k in np.flatnonzero(names == cells[at])[:1]] if cells[at] is not None else []
        also = f"; graph {where[0]!r} has one" if where else ""
        table.refuse(
            numbers < 0, f"has a node {cells[at]!r} in column {end!r} that graph {ids[graph[at]]!r} does not have{also}"
        )
    return numbers
