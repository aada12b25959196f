"""Draws links of one set of nodes or of two, with relations, times and parts; reads them back by `link_tables`, and
pairs by `read_pairs`."""

from __future__ import annotations

import csv
import datetime
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_files import BROKEN, MARKS, WORDS, Drawn, Rows, expected_features, number_of, write

from mpnn.data import link_tables
from mpnn.data.link_tables import read_pairs

Key = tuple[Any, ...]
PARTS = ("train", "val", "test")
DOUBTS = (
    "cannot be split",
    "say whether that is one node",
    "as many commas",
    "row numbers that pandas",
    "may be a header",
    "seems to name",
    "a thousand or one",
    "float32 rounds",
    "has 3 columns, and edges have two",
)
"""What may be refused without a fault, because the meaning of a file is not certain."""


class LinkDraw(Drawn):
    """Links, the tables of their nodes, and how they are read.

    nodes: the names of the sources and of the destinations, which are the same list for one set.
    rows: a source, a destination and a relation for each row; rows repeat links, in either direction if there is none.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "links")
        one_of = self.random.choice
        self.are_two = one_of([True, False])
        size = self.random.randint(9, 13)
        names = self._names(size)
        self.nodes = names, self._others(names, size) if self.are_two else names
        self.relations = one_of([None, ["likes", "knows"], ["1", "2", "30"]])
        self.is_directed = one_of([True, False])
        self.form = "two sets" if self.are_two else "directed" if self.is_directed or self.relations else "undirected"
        self.rows = self._rows()
        self.times = self._times() if one_of([True, False]) else None
        self.parts = self._parts() if self.times is None and one_of([True, False]) else None
        self.extra = one_of([None, "note"])
        self._draw_features()
        self.draw_options()

    def _names(self, size: int) -> list[str]:
        kinds = [self.random.sample(WORDS, size), [f"user {k}" for k in range(size)], [*map(str, range(3, 3 + size))]]
        return self.random.choice(kinds)

    def _others(self, names: list[str], size: int) -> list[str]:
        """Names of destinations: the same numbers, which are other nodes, or words of their own."""
        return [*names] if names[0].isdecimal() else [f"item {k}" for k in range(size - 1)]

    def _rows(self) -> list[tuple[str, str, str]]:
        src, dst = self.nodes
        kinds = self.relations or [""]
        pairs = [(a, b) for a in src for b in dst if self.are_two or (a < b or (self.form == "directed" and a != b))]
        chosen = self.random.sample(pairs, 32)
        rows = [(a, b, self.random.choice(kinds)) for a, b in chosen]
        if self.form == "undirected":
            rows = [(b, a, kind) if self.random.random() < 0.5 else (a, b, kind) for a, b, kind in rows]
        for a, b, kind in self.random.sample(rows, self.random.choice([0, 0, 1, 4])):
            turned = self.form == "undirected" and self.random.random() < 0.5
            rows.append((b, a, kind) if turned else (a, b, kind))
        if not self.are_two and self.random.random() < 0.3:
            rows.append((src[0], src[0], kinds[0]))
        return rows

    def _times(self) -> list[str]:
        if self.random.random() < 0.5:
            return [f"{self.random.uniform(0, 99):.2f}" for _ in self.rows]
        days = [datetime.date(2020, 1, 1) + datetime.timedelta(self.random.randint(0, 2000)) for _ in self.rows]
        return [day.isoformat() for day in days]

    def _parts(self) -> list[str]:
        """A part for each row: rows of one link are in one part, and no part is empty."""
        of_link: dict[Key, str] = {}
        for k, row in enumerate(self.rows):
            of_link.setdefault(self._key(*row), PARTS[k] if k < 3 else self.random.choice(["train", "train", *PARTS]))
        return [of_link[self._key(*row)] for row in self.rows]

    def _draw_features(self) -> None:
        """Features of one set, of both of two sets, or none: `described` says which tables there are."""
        one_of = self.random.choice
        self.described = [one_of([True, False]), self.are_two and one_of([True, False])]
        for end, prefix in enumerate(("a", "b")):
            if self.described[end]:
                size = len(self.nodes[end])
                self.kind_of[f"{prefix} age"] = "number"
                self.features[f"{prefix} age"] = [f"{self.random.uniform(-9, 9):.2f}" for _ in range(size)]
                self.kind_of[f"{prefix} city"] = "category"
                self.features[f"{prefix} city"] = [one_of(["Rome", "Oslo", "Bern"]) for _ in range(size)]

    def _key(self, src: str, dst: str, kind: str) -> Key:
        """What is the same in all rows of a link."""
        return (*sorted((src, dst)), kind) if self.form == "undirected" else (src, dst, kind)

    # ------------------------------------------------------------------------------------------------------- tables

    def tables(self, mark: str) -> dict[str, Rows]:
        """The rows of links, and of the nodes that are described."""
        numeric = self.nodes[0][0].isdecimal()
        ends = ["user_id", "item_id"] if self.are_two else ["from", "to"] if not numeric else ["source", "target"]
        columns = [[ends[0], *(row[0] for row in self.rows)], [ends[1], *(row[1] for row in self.rows)]]
        columns += [] if self.relations is None else [["kind", *(row[2] for row in self.rows)]]
        columns += [] if self.times is None else [["when", *self.times]]
        columns += [] if self.parts is None else [["split", *self.parts]]
        columns += [] if self.extra is None else [["note", *(self.random.choice(["x y", "z"]) for _ in self.rows)]]
        found = {"links": [list(row) for row in zip(*columns, strict=True)]}
        for end, (name, prefix) in enumerate((("nodes", "a"), ("items", "b"))):
            if self.described[end]:
                columns = [["id", *self.nodes[end]]]
                for feature, cells in self.features.items():
                    if feature.startswith(prefix):
                        columns.append([feature, *(mark if cell is None else cell for cell in cells)])
                found[name] = [list(row) for row in zip(*columns, strict=True)]
        return found

    # -------------------------------------------------------------------------------------------------------- truth

    def check(self, data: Any) -> str:
        """What was read otherwise than it was drawn, or nothing."""
        if data.form != self.form:
            return f"form {data.form} of {self.form}"
        proper = [(k, row) for k, row in enumerate(self.rows) if self.are_two or row[0] != row[1]]
        links = {
            self._key(*row): [k for k, other in proper if self._key(*other) == self._key(*row)] for _, row in proper
        }
        of_src, of_dst = data.ids, data.dst_ids or data.ids
        for end, names in enumerate((of_src, of_dst)):
            if self.described[min(end, int(self.are_two))]:
                if names != tuple(self.nodes[end]):
                    return "names of a table of nodes"
            elif {*names} != {row[e] for row in self.rows for e in ((end,) if self.are_two else (0, 1))}:
                return "names"
        moments = None if self.times is None else [number_of(cell, self._kind_of_times()) for cell in self.times]
        found: list[Key] = []
        ranges = []
        for part in PARTS:
            pairs, kinds = getattr(data.split, part), getattr(data.split, f"{part}_type")
            names = [""] * pairs.shape[1] if kinds is None else [data.relations[k] for k in kinds.tolist()]
            keys = [self._key(of_src[a], of_dst[b], kind) for (a, b), kind in zip(pairs.T.tolist(), names, strict=True)]
            if any(key not in links for key in keys):
                return f"a link of {part}"
            if self.parts is not None and any(self.parts[links[key][0]] != part for key in keys):
                return "parts"
            if moments is not None:
                expected = [min(moments[k] for k in links[key]) for key in keys]
                if not np.allclose(data.times[PARTS.index(part)].numpy(), expected):
                    return "times"
                ranges.append((min(expected), max(expected)))
            found += keys
        if sorted(map(str, found)) != sorted(map(str, links)):
            return "links that are lost or doubled"
        if any(before[1] >= after[0] for before, after in pairwise(ranges)):
            return "the order of parts in time"
        return self._check_absent(data, links) or self._check_features(data)

    def _kind_of_times(self) -> str:
        assert self.times is not None
        return "date" if self.times[0].count("-") == 2 else "number"

    def _check_absent(self, data: Any, links: dict[Key, list[int]]) -> str:
        of_src, of_dst = data.ids, data.dst_ids or data.ids
        for part in ("val", "test"):
            kinds = getattr(data.split, f"{part}_type")
            absent = getattr(data.split, f"{part}_absent").T.tolist()
            names = [""] * len(absent) if kinds is None else [data.relations[k] for k in kinds.tolist()]
            for (a, b), kind in zip(absent, names, strict=True):
                if self._key(of_src[a], of_dst[b], kind) in links:
                    return "an absent pair that is a link"
        return ""

    def _check_features(self, data: Any) -> str:
        blocks = []
        for end, prefix in enumerate("ab"):
            size = len(self.nodes[end])
            every = np.ones(size, bool)
            columns = [
                expected_features(self.kind_of[name], cells, every, self.missing, self.scale)
                for name, cells in self.features.items()
                if name.startswith(prefix)
            ]
            # A set without a table has the nodes of its links.
            known = len((data.ids, data.dst_ids or data.ids)[end])
            blocks.append(np.concatenate(columns, 1) if columns else np.zeros((known, 0)))
        if not any(self.described):
            return "" if data.x is None else "features of nothing"
        expected = torch.block_diag(*map(torch.from_numpy, blocks)) if self.are_two else torch.from_numpy(blocks[0])
        if data.x.shape != expected.shape or not torch.allclose(data.x.double(), expected, rtol=1e-5, atol=2e-6):
            return "features"
        return ""

    def _check_pairs(self, folder: Path, data: Any) -> str:
        """The first rows as pairs, by the names of their columns."""
        rows = [row for row in self.rows if self.are_two or row[0] != row[1]][:4]
        header = [*data.ends, *([] if data.relation is None else [data.relation])]
        path = folder / "pairs.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([header, *(row[: len(header)] for row in rows)])
        pairs = read_pairs(path, data, Path("links"))
        of_src, of_dst = data.ids, data.dst_ids or data.ids
        kinds = [""] * len(rows) if pairs.types is None else [data.relations[k] for k in pairs.types.tolist()]
        found = [(of_src[a], of_dst[b], kind) for (a, b), kind in zip(pairs.pairs.T.tolist(), kinds, strict=True)]
        return "" if found == rows else "pairs"

    # ---------------------------------------------------------------------------------------------------------- run

    def run(self, folder: Path) -> tuple[str, str]:
        """What came out, and what was misread if anything."""
        one_of = self.random.choice
        tables = self.tables(one_of(MARKS))
        fault = one_of([*LINK_FAULTS, *[None] * 16])
        where = "" if fault is None else one_of([*tables]) if fault[0] == "any" else fault[0]
        if fault is not None:
            self.notes.append(f"{fault[2]} in {where}")
            if where not in tables or (fault[1] is not None and not fault[1](self, tables[where])):
                fault = None
        broken = None if fault is None or fault[1] is not None else fault[2]
        paths = {
            name: write(self, folder, name, rows, True, broken if name == where else None)
            for name, rows in tables.items()
        }
        ends = tables["links"][0][:2]
        others = len(tables["links"][0]) - sum(value is not None for value in (self.relations, self.times, self.parts))
        numbers = self.nodes[0][0].isdecimal()
        stated = one_of([True, False])
        sets: Any = ("two" if self.are_two else "one") if stated or (numbers and not self.are_two) else None
        try:
            data = link_tables(
                paths["links"],
                columns=ends if others > 2 else one_of([None, ends]),
                relation=None if self.relations is None else "kind",
                time=None if self.times is None else "when",
                sets=sets,
                directed=self.is_directed,
                nodes=paths.get("nodes"),
                dst_nodes=paths.get("items"),
                categories=self.categories,
                **(self.options if any(self.described) else {"encoding": self.encoding}),
            )
        except ValueError as error:
            outcome, wrong = f"refused: {error}", ""
        else:
            wrong = self.check(data) or self._check_pairs(folder, data)
            outcome = "read" if not wrong else f"misread {wrong}: {data.understood}"
        may_refuse = fault is not None or any(doubt in outcome for doubt in DOUBTS)
        return outcome, self.complaint(wrong, outcome, may_refuse, [*paths.values()])


def _cell(name: str, *cells: str) -> Callable[[LinkDraw, Rows], bool]:
    """A fault that puts another cell into a column, if the table has it."""

    def apply(draw: LinkDraw, rows: Rows) -> bool:
        found = [k for k, column in enumerate(rows[0]) if column in name.split("|")]
        if not found:
            return False
        row = draw.random.choice(rows[1:])
        row[found[0]] = draw.random.choice(cells)
        return True

    return apply


def _another_part(draw: LinkDraw, rows: Rows) -> bool:
    """A row that repeats a link in another part."""
    if draw.parts is None:
        return False
    row = [*rows[1]]
    at = rows[0].index("split")
    row[at] = next(part for part in PARTS if part != row[at])
    rows.append(row)
    return True


def _unknown_node(draw: LinkDraw, rows: Rows) -> bool:
    """An end that the table of nodes does not have."""
    if not draw.described[0]:
        return False
    rows[1][0] = "9999" if draw.nodes[0][0].isdecimal() else "zed"
    return True


LINK_FAULTS = [
    ("links", _cell("user_id|from|source", *MARKS), "a missing end"),
    ("links", _cell("kind", *MARKS), "a missing relation"),
    ("links", _cell("when", *MARKS, "soon", "inf"), "a time that is none"),
    ("links", _cell("split", "valid", "", "4"), "a part that is none"),
    ("links", _another_part, "a link in two parts"),
    ("links", _unknown_node, "an unknown node"),
    ("nodes", _cell("id", *MARKS), "a missing id"),
    ("nodes", _cell("a age", "old", "1e400"), "a feature that is none"),
    *(("any", None, name) for name in BROKEN),
]
