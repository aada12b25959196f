"""Links from tables in files: between nodes of one set or of two, of several relations, in time; and their split."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.data.columns import Missing, Preparation, described, listed
from mpnn.data.errors import DamagedFile
from mpnn.data.links import LinkSplit, divided_links, stated_links, with_absent_destinations, with_absent_pairs
from mpnn.data.tables import (
    PARTS,
    SPLIT,
    EdgeFile,
    File,
    as_list,
    check_order,
    edge_table,
    feature_names,
    has_header,
    ids_of,
    numbers_of,
    refuse_unused,
    unused,
)
from mpnn.graphs import from_edges
from mpnn.graphs.tables import Columns, Table, read_table

Sets = Literal["one", "two"]
Form = Literal["undirected", "directed", "two sets"]
"""Of links: see `mpnn.models.LinkRanker`."""
VALIDATION = 0.05
TEST = 0.1
_NODES = "the table of nodes"
_UNKNOWN = (
    "has the {what} {name!r} in column {column!r}, which no link of {file} has; a model scores the {what}s that it was "
    "trained with: leave the row out, or train again with links of it"
)
_FEWEST = 20  # links, so that a part of 5% has one
_DIRECTIONS = (
    "from to source target src dst dest destination head tail start end sender receiver citing cited parent child left "
    "right subject object in out"
)
_NAMES = "id ids name key token no num number index code node vertex entity"
_NO_NOUNS = {*_DIRECTIONS.split(), *_NAMES.split()}
_STEM = 4  # letters that two forms of a noun share: user and users, follower and followee


@dataclass(frozen=True, eq=False)
class LinkTables:
    """Links from a file, split into parts.

    Args:
        split: see `mpnn.data.split_links`. Its graph is of two sets of nodes if `dst_ids` is not None. Absent pairs of
            directed links and of two sets keep the source and the type of the held-out link with the same index.
        form: "undirected", "directed" or "two sets".
        ids: the names of the nodes, or of the sources. dst_ids: those of the destinations, of two sets.
        relations: the names of the types of links; empty without.
        ends: the names of the two columns. relation: that of the column of relations.
        x: features of the nodes, float32 [N, F], or None. inputs: their columns. With two sets, the destinations
            follow the sources, and their columns follow those of the sources; each set has zeros in the columns of the
            other.
        times: the time of each link of training, validation and test, float64 [L], or None.
        understood: for each file, a text that says how it was read.
    """

    split: LinkSplit
    form: Form
    ids: tuple[str, ...]
    dst_ids: tuple[str, ...] | None
    relations: tuple[str, ...]
    ends: tuple[str, str]
    relation: str | None
    x: Tensor | None
    inputs: tuple[str, ...]
    times: tuple[Tensor, Tensor, Tensor] | None
    understood: tuple[tuple[str, str], ...]


def link_tables(
    edges: File,
    *,
    columns: Columns | None = None,
    relation: str | None = None,
    time: str | None = None,
    sets: Sets | None = None,
    directed: bool = False,
    nodes: File | None = None,
    dst_nodes: File | None = None,
    ignore: str | Sequence[str] = (),
    categories: str | Sequence[str] = (),
    missing: Missing = "refuse",
    scale: bool = False,
    seed: int = 0,
    encoding: str | None = None,
) -> LinkTables:
    """Reads links and splits them: the earliest for training and the last tenth for the test by `time`, by a column
    `split` (train, val, test) if the file has one, or else at random. 5% are for validation.

    A repeated link counts once, at its first time. Self-loops are left out.

    Args:
        edges: a table with a row for each link, see `node_tables`. Names of nodes are text or numbers.
        columns: the columns of the two ends, by name or by number from 0, if there are others besides `relation`,
            `time` and `split`.
        relation: the column of the types of links, as in a knowledge graph. Links then are directed.
        time: the column of times: numbers, or dates such as 2026-11-28 or 2026-11-28 14:05:00.
        sets: whether the two columns name nodes of "one" set or of "two", such as users and items. Default: two, if no
            name is in both columns, or if names are numbers and the columns have different names (user_id, item_id).
        directed: whether a link and its reverse are two links.
        nodes: a table of features of the nodes by `id`; with two sets, of the sources. It may have nodes without links.
        dst_nodes: a table of features of the destinations, for two sets.
        ignore, categories, missing, scale, encoding: as of `node_tables`, for both tables.
        seed: of the random split and of the absent pairs.

    Raises:
        DamagedFile: a file is not such a table. The message names the row.
        ImportError, OSError: as for `node_tables`.
    """
    try:
        how = Preparation(as_list(categories) or (), missing, scale)
        if nodes is None and dst_nodes is None and (ignore or how != Preparation()):
            raise ValueError("features are those of nodes, which are missing: name their table (--nodes)")
        of_nodes = _features((nodes, dst_nodes), as_list(ignore) or (), how, encoding)
        file = EdgeFile(Path(edges), columns, directed=directed)
        return _read(file, relation, time, sets, of_nodes, seed, encoding)
    except ValueError as error:
        raise DamagedFile(str(error)) from None


class Pairs(NamedTuple):
    """Pairs in a file: names [P, 2] of the nodes and [P] of relations; pairs int64 [2, P] and types [P] by number."""

    names: NDArray[np.object_]
    relations: NDArray[np.object_] | None
    pairs: Tensor
    types: Tensor | None


def read_pairs(path: File, known: LinkTables, edges: Path, encoding: str | None = None) -> Pairs:
    """The pairs in a table with the columns of the links that a model was trained on.

    Args:
        edges: the file of these links, for messages.

    Raises:
        DamagedFile: the table lacks a column, or names a node or a relation that the links have not.
    """
    try:
        return _pairs(Path(path), known, edges.name, encoding)
    except ValueError as error:
        raise DamagedFile(str(error)) from None


# -------------------------------------------------------------------------------------------------------------- reading


class _Nodes(NamedTuple):
    """The names of nodes in a file, their features, and how the file was read."""

    ids: tuple[str, ...]
    x: Tensor
    inputs: tuple[str, ...]
    understood: tuple[str, str]


class _Named(NamedTuple):
    """The rows of a table by number: sources, destinations and types [E]; the names of the numbers; and how it is known
    that there are two sets of nodes."""

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    types: NDArray[np.int64]
    ids: tuple[str, ...]
    dst_ids: tuple[str, ...] | None
    relations: tuple[str, ...]
    why: str


def _read(
    file: EdgeFile,
    relation: str | None,
    time: str | None,
    sets: Sets | None,
    nodes: "_BothNodes",
    seed: int,
    encoding: str | None,
) -> LinkTables:
    table, (src_name, dst_name), stated = _table(file, relation, time, encoding)
    named = _named(table, src_name, dst_name, relation, sets, nodes)
    form: Form = "two sets" if named.dst_ids is not None else "directed" if file.directed or relation else "undirected"
    times = None if time is None else _times(table, time)
    parts = _parts(table) if stated else None
    src, dst = named.src, named.dst
    if form == "undirected":
        src, dst = np.minimum(src, dst), np.maximum(src, dst)
    is_loop = (src == dst) if form != "two sets" else np.zeros(len(table), bool)
    sizes = len(named.ids), len(named.dst_ids or named.ids)
    key = (src * max(len(named.relations), 1) + named.types) * sizes[1] + dst
    kept = _first_of_each(table, key, is_loop, times, parts)
    if len(kept) < _FEWEST:
        raise ValueError(
            f"{table.path} has {len(kept)} different links; training, validation and test need {_FEWEST} at least, and "
            "more to mean anything"
        )
    links = torch.from_numpy(np.stack([src, dst])[:, kept])
    types, of_time, of_part = (
        None if values is None else torch.from_numpy(values[kept])
        for values in (named.types if relation else None, times, parts)
    )
    try:
        split = _split(links, types, of_time, of_part, form, sizes, seed)
    except ValueError as error:
        hint = "" if of_time is None else f"; column {time!r} has {len(of_time.unique()):,} different times"
        raise ValueError(f"the links of {table.path} cannot be split: {error}{hint}") from None
    loops = int(is_loop.sum())
    repeats = len(table) - loops - len(kept)
    counted = f"{sizes[0]:,} nodes" if named.dst_ids is None else f"{sizes[0]:,} {src_name}, {sizes[1]:,} {dst_name}"
    note = [
        f"{len(kept):,} links, {table.form}",
        f"{src_name} {'and' if form == 'undirected' else 'to'} {dst_name}: {counted}{named.why}",
        f"column {relation} has {len(named.relations):,} relations, {listed(named.relations)}" if relation else "",
        f"{loops:,} self-loops left out" if loops else "",
        f"{repeats:,} repeats left out" if repeats else "",
        unused(table, [src_name, dst_name, relation, time, SPLIT if stated else None]),
    ]
    return LinkTables(
        split,
        form,
        named.ids,
        named.dst_ids,
        named.relations,
        (src_name, dst_name),
        relation,
        _features_of_all(nodes, None if named.dst_ids is None else sizes),
        tuple(name for one in nodes if one is not None for name in one.inputs),
        None if of_time is None else _times_of_parts(split, links, types, of_time),
        (
            (table.path.name, ", ".join(filter(None, note))),
            *(one.understood for one in nodes if one is not None),
            (table.path.name, _split_note(split, form, "as stated" if stated else time and f"by time, column {time}")),
        ),
    )


def _table(
    file: EdgeFile, relation: str | None, time: str | None, encoding: str | None
) -> tuple[Table, list[str], bool]:
    """The table, the columns of the two ends, and whether a column states the split."""
    used = [name for name in (relation, time) if name is not None]
    columns = file.columns
    table = read_table(file.path, of_edges=True, header=has_header([*used, *(columns or ())]), encoding=encoding)
    stated = SPLIT in table.names and SPLIT not in used and SPLIT not in (columns or ())
    if stated and time is not None:
        raise ValueError(
            f"{file.path} states the split in column {SPLIT!r}, and column {time!r} would decide it by time: leave "
            "--time or that column out"
        )
    used += [SPLIT] if stated else []
    table, ends = edge_table(EdgeFile(file.path, columns, features=used), (), encoding=encoding)
    if not len(table):
        raise ValueError(f"{file.path} has no link: write a row with two nodes for each")
    return table, ends, stated


def _named(
    table: Table, src_name: str, dst_name: str, relation: str | None, sets: Sets | None, nodes: "_BothNodes"
) -> _Named:
    src = _filled(table, src_name, "a link without a node")
    dst = _filled(table, dst_name, "a link without a node")
    types = None if relation is None else _filled(table, relation, "a link without a relation")
    are_two, why = _sets(table, src_name, dst_name, src, dst, relation, sets)
    of_src, of_dst = nodes
    is_disjoint = not ({*src} & {*dst})  # else the names of the columns say that there are two sets
    if sets is None and are_two and is_disjoint and of_dst is None and of_src is not None and {*dst} <= {*of_src.ids}:
        are_two, why = False, " (one set: the table of nodes has both)"
    if not are_two and of_dst is not None:
        raise ValueError(
            f"{of_dst.understood[0]} describes destinations of two sets; {table.path} links nodes of one: name all "
            "in one table of nodes, or say that they are two sets (--sets two)"
        )
    ids = of_src.ids if of_src is not None else _names([*src] if are_two else [*src, *dst])
    dst_ids = (of_dst.ids if of_dst is not None else _names([*dst])) if are_two else None
    relations = () if types is None else _names([*types])
    return _Named(
        numbers_of(table, src_name, ids, _NODES),
        numbers_of(table, dst_name, dst_ids or ids, _NODES),
        np.zeros(len(table), np.int64) if relation is None else numbers_of(table, relation, relations, _NODES),
        ids,
        dst_ids,
        relations,
        why,
    )


def _filled(table: Table, name: str, what: str) -> NDArray[np.object_]:
    """A column as text, without a missing cell."""
    cells = table.text(name)
    table.refuse(cells == None, f"has {what}: column {name!r} is empty, NA or the like")  # noqa: E711
    return cells


def _names(cells: Iterable[str]) -> tuple[str, ...]:
    """The different names, whole numbers first and in their order."""
    return tuple(sorted({*cells}, key=lambda name: (0, len(name), name) if name.isdecimal() else (1, 0, name)))


def _sets(
    table: Table,
    src_name: str,
    dst_name: str,
    src_text: NDArray[np.object_],
    dst_text: NDArray[np.object_],
    relation: str | None,
    sets: Sets | None,
) -> tuple[bool, str]:
    """Whether the columns name nodes of two sets, and how that is known, for people."""
    if sets not in (None, *get_args(Sets)):
        raise ValueError(f"sets must be 'one' or 'two'; got {sets!r}")
    if sets is not None:
        return sets == "two", ""
    src, dst = {*src_text}, {*dst_text}
    both = src & dst
    if not both:
        return min(len(src), len(dst)) > 1, " (two sets: no name is in both columns)"
    if not all(name.isdecimal() for name in both):
        return False, ""
    if not (table.has_names or table.has_ends):
        if relation is None and len(table.names) > 2:
            raise ValueError(
                f"columns {src_name} and {dst_name} of {table.path} both have the number {min(both, key=int)}: say "
                "whether that is one node (--sets one) or two, such as a user and an item (--sets two)"
            )
        return False, ""
    if table.has_ends or _is_same_noun(src_name, dst_name):
        return False, ""
    return True, " (two sets, as the columns are named; --sets one if they are one)"


def _is_same_noun(first: str, second: str) -> bool:
    """Whether the names of two columns call nodes the same, as from_user and to_user do, or from and to."""
    nouns = []
    for name in (first, second):
        words = re.findall(r"[a-z]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).lower())
        nouns.append({word[:_STEM] for word in words if word not in _NO_NOUNS and len(word) > 1})
    return nouns[0] == nouns[1] or not (nouns[0] and nouns[1])


_BothNodes = tuple[_Nodes | None, _Nodes | None]
"""Of the nodes of one set, or of the sources; and of the destinations of two sets."""


def _features(
    files: tuple[File | None, File | None], ignore: Sequence[str], how: Preparation, encoding: str | None
) -> _BothNodes:
    """The features in both tables. A column that is ignored, or of categories, is in one of them at least."""
    tables = [None if file is None else read_table(Path(file), encoding=encoding) for file in files]
    names = {name for table in tables if table is not None for name in table.names}
    inputs: list[list[str]] = []
    for table in tables:
        drop = [name for name in ignore if table is not None and (name in table.names or name not in names)]
        inputs.append([] if table is None else feature_names(table, drop))
    refuse_unused(how.categories, [*inputs[0], *inputs[1]])
    of_src, of_dst = (
        None if table is None else _of_table(table, of, how) for table, of in zip(tables, inputs, strict=True)
    )
    return of_src, of_dst


def _features_of_all(nodes: _BothNodes, sizes: tuple[int, int] | None) -> Tensor | None:
    """The features of all nodes; of two sets of these sizes side by side. None without any."""
    of_src, of_dst = nodes
    if sizes is None or (of_src is None and of_dst is None):
        return None if of_src is None else of_src.x
    parts = [torch.zeros(size, 0) if one is None else one.x for one, size in zip(nodes, sizes, strict=True)]
    return torch.block_diag(*parts)


def _of_table(table: Table, inputs: Sequence[str], how: Preparation) -> _Nodes:
    made = how.features(table, inputs, np.ones(len(table), bool))
    ids = tuple(map(str, range(len(table)))) if table.id is None else ids_of(table, table.id)
    if table.id is None:
        check_order(table)
    note = f"{len(table):,} nodes, {table.form}, features {described(inputs, made.columns)}"
    return _Nodes(ids, torch.from_numpy(made.x), tuple(inputs), (table.path.name, ", ".join([note, *made.notes])))


def _first_of_each(
    table: Table,
    key: NDArray[np.int64],
    is_loop: NDArray[np.bool_],
    moments: NDArray[np.float64] | None,
    parts: NDArray[np.int64] | None,
) -> NDArray[np.int64]:
    """The row of each link that is its first, in order of rows, without self-loops."""
    row = np.arange(len(key))
    order = np.lexsort((row, row if moments is None else moments, key))
    order = order[~is_loop[order]]
    is_first = np.ones(len(order), bool)
    is_first[1:] = key[order[1:]] != key[order[:-1]]
    if parts is not None and len(order):
        first_part = parts[order[is_first]][np.cumsum(is_first) - 1]
        differs = np.zeros(len(key), bool)
        differs[order] = parts[order] != first_part
        table.refuse(differs, "repeats a link of another part of the split; each link is in one part")
    return np.sort(order[is_first])


# ------------------------------------------------------------------------------------------------------ times and parts


def _times(table: Table, name: str) -> NDArray[np.float64]:
    """A column of times: numbers, or days since 1970 of dates."""
    times, kind = table.quantities(name, "; a time is a number, or a date such as 2026-11-28 or 2026-11-28 14:05:00")
    if kind == "truth":
        raise ValueError(f"column {name!r} of {table.path} holds true and false; a time is a number or a date")
    table.refuse(~np.isfinite(times), f"has no time in column {name!r} (it is empty, NaN, infinite or the like)")
    return times


def _parts(table: Table) -> NDArray[np.int64]:
    """The part of each row: 0 for training, 1 for validation, 2 for test."""
    cells = np.array([(cell or "").lower() for cell in table.text(SPLIT)])
    table.refuse(~np.isin(cells, PARTS), f"has no part in column {SPLIT!r}: a link is of {', '.join(PARTS)}")
    return np.array([PARTS.index(cell) for cell in cells.tolist()], np.int64)


def _split(
    links: Tensor,
    types: Tensor | None,
    times: Tensor | None,
    parts: Tensor | None,
    form: Form,
    sizes: tuple[int, int],
    seed: int,
) -> LinkSplit:
    """The split of links [2, L]."""
    both = form == "undirected"
    times, parts = (values.repeat(2) if both and values is not None else values for values in (times, parts))
    edges = torch.cat([links, links.flip(0)], 1) if both else links
    num_src, num_dst = sizes
    graph = from_edges(edges, num_src=num_src, num_dst=num_dst, edge_type=types)  # undirected links have no types
    generator = torch.Generator().manual_seed(seed)
    of_nodes = {"directed": not both, "one_set": form != "two sets"}
    if parts is None:
        split = divided_links(graph, VALIDATION, TEST, generator, times=times, **of_nodes)
    else:
        split = stated_links(graph, parts, **of_nodes)
    if both:
        return with_absent_pairs(split, graph, generator)
    grouped = times is None and parts is None
    return with_absent_destinations(split, grouped=grouped, seed=seed)


def _times_of_parts(
    split: LinkSplit, links: Tensor, types: Tensor | None, times: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The times of the links of each part."""
    size = int(links.max()) + 1
    types = torch.zeros_like(links[0]) if types is None else types
    relations = int(types.max()) + 1

    def key(pairs: Tensor, of: Tensor) -> Tensor:
        return (pairs[0] * size + pairs[1]) * relations + of

    known, order = key(links, types).sort()
    keys = (
        key(split.train, split.types("train")),
        key(split.val, split.types("val")),
        key(split.test, split.types("test")),
    )
    train, val, test = (times[order[torch.searchsorted(known, of_part)]] for of_part in keys)
    return train, val, test


# -------------------------------------------------------------------------------------------------- what was understood


def _split_note(split: LinkSplit, form: Form, how: str | None) -> str:
    sizes = ", ".join(f"{getattr(split, part).shape[1]:,} {part}" for part in PARTS)
    new = unseen(split, form)
    rest = f", {new:.0%} of the test links have a node without a link in training" if new else ""
    return f"{sizes} ({how or 'at random'}){rest}"


def unseen(split: LinkSplit, form: Form) -> float:
    """The share of the test links of which a node has no link for training."""
    src, dst = split.train if form == "two sets" else (split.train, split.train)
    seen = torch.isin(split.test[0], src) & torch.isin(split.test[1], dst)
    return 1 - seen.double().mean().item()


# ---------------------------------------------------------------------------------------------------------------- pairs


def _pairs(path: Path, known: LinkTables, edges: str, encoding: str | None) -> Pairs:
    wanted = [*known.ends, *([known.relation] if known.relation is not None else [])]
    table = read_table(path, of_edges=True, header=has_header(wanted), encoding=encoding)
    if absent := [name for name in wanted if name not in table.names]:
        raise ValueError(
            f"{path} has no column {absent[0]!r}; pairs have the columns of {edges}, {', '.join(wanted)}, and it has "
            f"{', '.join(map(repr, table.names))}"
        )
    names = np.stack([_filled(table, name, "a pair without a node") for name in known.ends], 1)
    src = numbers_of(table, known.ends[0], known.ids, edges, "node", _UNKNOWN)
    dst = numbers_of(table, known.ends[1], known.dst_ids or known.ids, edges, "node", _UNKNOWN)
    if known.form != "two sets":
        table.refuse(src == dst, "pairs a node with itself, and self-loops are no links; leave the row out")
    relations = None
    types = None
    if known.relation is not None:
        relations = _filled(table, known.relation, "a pair without a relation")
        types = torch.from_numpy(numbers_of(table, known.relation, known.relations, edges, "relation", _UNKNOWN))
    return Pairs(names, relations, torch.from_numpy(np.stack([src, dst])), types)
