"""Draws one graph with features, classes and edges; reads it back by `node_tables`, and its edges by `write_csr`."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_files import BROKEN, MARKS, WORDS, Drawn, Rows, expected_features, write

from mpnn.data import node_tables
from mpnn.data.tables import EdgeFile, node_inputs
from mpnn.graphs import write_csr


class NodeDraw(Drawn):
    """A graph, how its files are written, and what is wrong with them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "nodes")
        one_of = self.random.choice
        self.size = self.random.randint(8, 14)
        self.ids = one_of([None, None, *self._ids()])
        for name in self.random.sample(["age", "#friends", "income, EUR", "w"], 2):
            kinds = ["number"] * 4 + ([] if self.ids is None else ["truth", "date", "category"])
            self.kind_of[name] = one_of(kinds)
            self.features[name] = self._feature() if self.kind_of[name] == "number" else self._words(self.kind_of[name])
        self.draw_options()
        kind = one_of([["a", "b"], ["C#", "C", "x y"], ["0", "1"], ["3", "7", "12"]])
        self.classes: list[str | None] = [kind[k % len(kind)] for k in range(self.size)]
        for k in self.random.sample(range(self.size), one_of([0, 0, 1, 2])):
            self.classes[k] = None
        pairs = {tuple(self.random.sample(range(self.size), 2)) for _ in range(2 * self.size)}
        if one_of([True, True, False]):
            pairs |= {(0, 1)}
        edges = {(min(p), max(p)): p for p in pairs}
        self.edges = [*edges.values()] if one_of([True] * 12 + [False]) else []
        self.random.shuffle(self.edges)
        self.weights = [one_of(["0.5", "1.25", "-2", "3"]) for _ in self.edges] if one_of([True, False]) else None
        self.parts: list[str] | None = None
        if self.ids is not None and one_of([True, False, False]):
            self.parts = [one_of(["train", "train", "val", "test", ""]) for _ in range(self.size)]
        self.repeats = one_of(["refuse", "refuse", "refuse", "first", "sum"])
        self._repeat_edges(one_of)
        self.extra = one_of([None, None, "since", "kind"])
        self.first = one_of([None, None, None, 1]) if self.ids is None else None

    def _repeat_edges(self, one_of: Any) -> None:
        """Appends rows that repeat an edge: in either direction, and with another weight if that is not refused."""
        for k in self.random.sample(range(len(self.edges)), min(len(self.edges), one_of([0, 0, 1, 3]))):
            self.edges.append(self.edges[k][:: one_of([1, -1])])
            if self.weights is not None:
                self.weights.append(self.weights[k] if self.repeats == "refuse" else one_of(["4", "0.75"]))

    def _words(self, kind: str) -> list[str]:
        """A column of true and false, of dates, or of categories."""
        if kind == "date":
            days = [datetime.datetime(self.random.randint(1990, 2030), 1 + k % 12, 1 + k) for k in range(self.size)]
            form = self.random.choice(["%Y-%m-%d", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S"])
            return [(day + datetime.timedelta(minutes=self.random.randint(0, 1439))).strftime(form) for day in days]
        truth = [["True", "False"], ["true", "false"], ["TRUE", "FALSE"]]
        words = truth if kind == "truth" else [["Rome", "Oslo", "New, York"], ["1", "6", "17"]]
        values = self.random.choice(words)
        return [values[k] if k < len(values) else self.random.choice(values) for k in range(self.size)]

    def _ids(self) -> list[list[str]]:
        numbers = self.random.sample(range(10**17, 10**18), self.size)
        return [
            self.random.sample(WORDS, self.size),
            [f"{k:03}" for k in range(self.size)],
            [*map(str, numbers)],
            [*map(str, range(1, self.size + 1))],
            [f"user {k}" for k in range(self.size)],
            [f"user,\n{k}" for k in range(self.size)],
        ]

    def _feature(self) -> list[str]:
        kind = self.random.choice(["whole", "parts", "parts", "small", "stamp"])
        if kind == "whole":
            return [str(self.random.randint(-50, 50)) for _ in range(self.size)]
        if kind == "small":
            return [f"{self.random.gauss(0, 1e-3):.3e}" for _ in range(self.size)]
        if kind == "stamp":  # float32 holds their differences, or the column is refused
            return [
                str(self.random.choice([1, 10**8]) * self.random.randint(1, 9) + 1_700_000_000)
                for _ in range(self.size)
            ]
        return [f"{self.random.uniform(-9, 9):.{self.random.choice([1, 2, 3, 12])}f}" for _ in range(self.size)]

    # ------------------------------------------------------------------------------------------------------- truth

    def check(self, data: Any) -> str:
        """What was read otherwise than it was drawn, or nothing."""
        if not self._are_features(data.x, data.train_mask.numpy()):
            return "features"
        if self.ids is not None and data.ids != tuple(self.ids):
            return "ids"
        classes = [None if k < 0 else data.outputs.names[k] for k in data.y.tolist()]
        if classes != self.classes or data.is_known.tolist() != [cell is not None for cell in classes]:
            return "classes"
        masks = {"train": data.train_mask, "val": data.val_mask, "test": data.test_mask}
        if self.parts is None:
            if not (masks["train"] | masks["val"] | masks["test"]).equal(data.is_known):
                return "parts"
        elif any((mask.tolist() != [part == name and cell is not None
                                    for part, cell in zip(self.parts, self.classes, strict=True)])
                 for name, mask in masks.items()):  # fmt: skip
            return "parts"
        weights = [1.0] * data.edge_index.shape[1] if data.edge_weight is None else data.edge_weight.tolist()
        found = dict(zip(map(tuple, data.edge_index.T.tolist()), weights, strict=True))
        return "" if found == self._expected_edges() else "edges"

    def _are_features(self, x: Any, train: np.ndarray) -> bool:
        columns = [
            expected_features(self.kind_of[name], cells, train, self.missing, self.scale)
            for name, cells in self.features.items()
        ]
        expected = np.concatenate(columns, 1)
        return x.shape == expected.shape and np.allclose(x.numpy(), expected, rtol=1e-5, atol=2e-6)

    def _expected_edges(self) -> dict[tuple[int, ...], float]:
        both: dict[tuple[int, ...], float] = {}
        for k, (a, b) in enumerate(self.edges):
            weight = 1.0 if self.weights is None else float(self.weights[k])
            before = both.get((a, b))
            if before is not None and self.repeats == "sum":
                weight += before
            elif before is not None:
                weight = before
            both[a, b] = both[b, a] = weight
        return both

    # ------------------------------------------------------------------------------------------------------ tables

    def node_rows(self, mark: str) -> Rows:
        columns = [[name, *(mark if c is None else c for c in cells)] for name, cells in self.features.items()]
        if self.parts is not None:
            columns.insert(self.random.randint(0, 2), ["split", *self.parts])
        if self.ids is not None:
            columns.insert(self.random.randint(0, 2), [self.random.choice(["id", "ID", "Id"]), *self.ids])
        columns.append(["club", *(mark if cell is None else cell for cell in self.classes)])
        return [list(row) for row in zip(*columns, strict=True)]

    def edge_rows(self) -> Rows:
        names = self.ids or [str(k + (self.first or 0)) for k in range(self.size)]
        ends = self.random.choice([["from", "to"], ["source", "target"], ["paper_id", "cites"], ["id1", "id2"]])
        rows = [ends, *([names[a], names[b]] for a, b in self.edges)]
        if self.weights is not None:
            rows = [[*row, cell] for row, cell in zip(rows, ["hours", *self.weights], strict=True)]
        if self.extra is not None:
            cells = [
                self.random.choice(["2019", "2020-01-31"] if self.extra == "since" else ["a b", "c"]) for _ in rows[1:]
            ]
            rows = [[*row, cell] for row, cell in zip(rows, [self.extra, *cells], strict=True)]
        return rows

    # --------------------------------------------------------------------------------------------------------- run

    def run(self, folder: Path) -> tuple[str, str]:
        """What came out, and what was misread if anything."""
        one_of = self.random.choice
        mark = one_of(MARKS)
        nodes, edges = self.node_rows(mark), self.edge_rows()
        has_header = self.ids is not None or one_of([True, True, False])
        target = "club" if has_header else str(len(nodes[0]) - 1)
        columns: Any = edges[0][:2] if len(edges[0]) > 2 else one_of([None, edges[0][:2]])
        edge_header = one_of([True, True, False]) or self.weights is not None or not self.edges
        if not edge_header:
            columns = (0, 1) if len(edges[0]) > 2 else None
        fault = one_of([*FAULTS, *[None] * 20])
        if fault is not None and fault[1] is None and any("\n" in name for name in self.ids or ()):
            fault = None  # what a damaged line means depends on the quotes around it
        of_nodes = fault is None or fault[0] == "nodes" or (fault[0] == "both" and one_of([True, False]))
        if fault is not None:
            self.notes.append(f"{fault[2]} in {'nodes' if of_nodes else 'edges'}")
            if fault[1] is not None and not fault[1](self, nodes if of_nodes else edges):
                fault = None
        broken = None if fault is None or fault[1] is not None else fault[2]
        first = self.first if one_of([True, True, False]) else None
        is_matrix = self.ids is None and fault is None and one_of([True, *[False] * 4])
        paths = [write(self, folder, "nodes", nodes, has_header, broken if of_nodes else None)]
        weights = None if self.weights is None else "hours"
        if is_matrix:
            paths.append(self._write_matrix(folder))
            columns, weights, first = one_of([None, (0, 1)]), weights and "value", one_of([None, 1])
        else:
            paths.append(write(self, folder, "edges", edges, edge_header, None if of_nodes else broken))
        file = EdgeFile(paths[1], columns, weights, first=first, repeats=self.repeats)
        try:
            data = node_tables(paths[0], edges=file, target=target, categories=self.categories, **self.options)
        except ValueError as error:
            outcome, wrong = f"refused: {error}", ""
        else:
            wrong = self.check(data) or self._check_again(paths[0], data)
            outcome = "read" if not wrong else f"misread {wrong}: {data.understood}"
        if not wrong and self.ids is None:
            of_folder = columns if is_matrix or len(edges[0]) > 2 else None
            wrong = self._check_folder(folder, paths[1], of_folder, first)
        elif not wrong and paths[1].suffix != ".npy" and "to" not in (self.ids or ()):
            wrong = self._check_names(folder, paths[1], columns if len(edges[0]) > 2 else None, fault is not None)
        may_refuse = fault is not None or self._may_refuse(outcome)
        return outcome, self.complaint(wrong, outcome, may_refuse, paths)

    def _check_again(self, path: Path, data: Any) -> str:
        """A trained model reads the same features."""
        again = node_inputs(path, None, data.columns, self.encoding)
        return "" if again.x.equal(data.x) else "features of a trained model"

    def _write_matrix(self, folder: Path) -> Path:
        """The edges in MatrixMarket's format, in one of its spellings."""
        one_of = self.random.choice
        path = folder / one_of(["edges.mtx", "edges.txt", "edges.csv"])
        field = "pattern" if self.weights is None else one_of(["real", "Real"])
        banner = (
            f"{one_of(['%%', '%', '% '])}{one_of(['MatrixMarket', 'matrixmarket'])} matrix coordinate {field} general"
        )
        lines = [banner, *one_of([[], ["% a comment"]]), f"{self.size} {self.size} {len(self.edges)}"]
        for k, (a, b) in enumerate(self.edges):
            lines.append(f"{a + 1} {b + 1}" + ("" if self.weights is None else f" {self.weights[k]}"))
        path.write_text("\n".join(lines) + "\n")
        self.notes.append(f"edges as {banner!r}")
        return path

    def _check_folder(self, folder: Path, path: Path, columns: Any, first: int | None) -> str:
        """The same edges by `write_csr`, which leaves nothing behind where it refuses."""
        try:
            own = {"columns": columns, "first": first, "encoding": self.encoding}
            graph = write_csr(folder / "csr", path, self.size, **own).graph()
        except (ValueError, IndexError):
            return "" if not [*folder.glob(".csr*"), *folder.glob("csr*")] else "a folder is left"
        return "" if {*map(tuple, graph.edge_index.T.tolist())} == {*self.edges} else "edges on the disk"

    def _check_names(self, folder: Path, path: Path, columns: Any, is_damaged: bool) -> str:
        """The same edges by `write_csr`, of nodes whose names it knows, or numbers as they appear."""
        assert self.ids is not None
        one_of = self.random.choice
        names = one_of([self.ids, "one", "two"])
        try:
            graph = write_csr(folder / "csr", path, columns=columns, names=names, encoding=self.encoding)
        except (ValueError, IndexError) as error:
            if [*folder.glob(".csr*"), *folder.glob("csr*")]:
                return "a folder is left"
            said = str(error)
            is_doubt = is_damaged or "may be a header" in said or "as many commas" in said or "at least one row" in said
            return "" if is_doubt else f"names on the disk are refused: {said}"
        if is_damaged:
            return ""  # names of nodes that do not exist are names, too
        assert graph.names is not None
        of_dst, of_src = graph.names
        found = {(of_src[a], of_dst[b]) for a, b in graph.graph().edge_index.T.tolist()}
        if names == self.ids and of_src != self.ids:
            return "names on the disk"
        return "" if found == {(self.ids[a], self.ids[b]) for a, b in self.edges} else "edges of names on the disk"

    def _may_refuse(self, outcome: str) -> bool:
        """Files without a fault that may be refused: what they mean is not certain."""
        doubts = (
            "float32 rounds",
            "has node 0",
            "may be a header",
            "a thousand or one",
            "rows with a target",
            "seems to name",
        )
        doubts += (
            "no edge",
            "as many commas",
            "classes for",
            "row numbers that pandas",
            "one class only",
            "numbers the ",
            "at least one row",
            "for training",
        )
        is_id = (
            self.ids is not None
            and "to" in self.ids
            and any(
                said in outcome
                for said in (
                    "links 'from' and 'to'",
                    "in column '0' that is no id",
                    "has 3 columns",
                    "columns must be two",
                )
            )
        )
        return (
            is_id
            or ("has no column" in outcome and "#friends" in self.features)
            or any(doubt in outcome for doubt in doubts)
        )


# ------------------------------------------------------------------------------------------------------------- faults


def _replace(column: str | int, *cells: str) -> Any:
    """A fault that puts another cell into a column, where the table has it."""

    def apply(draw: NodeDraw, rows: Rows) -> bool:
        k = column if isinstance(column, int) else rows[0].index(column) if column in rows[0] else -1
        if column == "id":
            k = next((k for k, name in enumerate(rows[0]) if name.lower() == "id"), -1)
        if column == "feature":
            of_numbers = [name for name, kind in draw.kind_of.items() if kind != "category"]
            k = rows[0].index(draw.random.choice(of_numbers)) if of_numbers else -1
        if k < 0 or len(rows) < 2 or (column == "feature" and "" in cells and draw.missing != "refuse"):
            return False
        row = draw.random.choice(rows[1:])
        cell = draw.random.choice([cell for cell in cells if cell != row[k]])
        row[k] = cell
        return True

    return apply


def _repeat_id(draw: NodeDraw, rows: Rows) -> bool:
    if draw.ids is None:
        return False
    rows[1] = [*rows[2]]
    return True


def _repeat_name(draw: NodeDraw, rows: Rows) -> bool:
    rows[0][draw.random.randrange(len(rows[0]) - 1)] = rows[0][-1]
    return True


def _unknown_end(draw: NodeDraw, rows: Rows) -> bool:
    if len(rows) < 2:
        return False
    row = rows[1] if draw.random.choice([True, False]) else draw.random.choice(rows[1:])
    ends = [draw.random.choice([0, 1])] if draw.random.choice([True, True, False]) else [0, 1]
    for k, end in enumerate(ends):
        is_number = draw.ids is None or draw.ids[0].isdecimal()
        row[end] = (
            str(10**19 + k) if is_number and draw.ids else str(draw.size + 5 + k) if is_number else ["zed", "zoe"][k]
        )
    return True


def _clash(draw: NodeDraw, rows: Rows) -> bool:
    if draw.weights is None or draw.repeats != "refuse" or len(rows) < 2:
        return False
    rows.append([*rows[1][:2], "9", *rows[1][3:]])
    return True


def _many_classes(draw: NodeDraw, rows: Rows) -> bool:
    for k, row in enumerate(rows[1:]):
        row[-1] = f"name{k}"
    return True


FAULTS = [
    ("nodes", _replace("feature", "old", "1_000", "1 000", "−5", "１２", "5%", "0x10", "1.2.3", "12:30"), "no number"),
    ("nodes", _replace("feature", *MARKS), "a missing feature"),
    ("nodes", _replace("feature", "1e400", "inf", "-inf"), "a number that is too large"),
    ("nodes", _replace("id", *MARKS), "a missing id"),
    ("nodes", _repeat_id, "a repeated id"),
    ("both", _repeat_name, "a repeated name"),
    ("nodes", _many_classes, "names as classes"),
    ("edges", _unknown_end, "an unknown end"),
    ("edges", _replace(0, *MARKS, "1.5", "-1", "9007199254740993", "1e3"), "an end that is none"),
    ("edges", _replace("hours", *MARKS, "inf", "many", "1.5.2"), "a weight that is none"),
    ("edges", _clash, "a repeated edge with another weight"),
    *(("both", None, name) for name in BROKEN),
    ("nodes", None, "a line is empty"),
]
