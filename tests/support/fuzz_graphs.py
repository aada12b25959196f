"""Draws many small graphs in three tables, and reads them back by `graph_tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fuzz_files import BROKEN, MARKS, WORDS, Drawn, Rows, expected_features, write

from mpnn.data import graph_tables
from mpnn.data.tables import EdgeFile


class GraphDraw(Drawn):
    """Many small graphs in three tables."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, "graphs")
        one_of = self.random.choice
        self.size = self.random.randint(6, 9)
        words = [[f"m{k}" for k in range(self.size)], [*map(str, self.random.sample(range(100), self.size))]]
        self.ids = one_of([*words, self.random.sample(WORDS, self.size)])
        self.sizes = [self.random.randint(1, 4) for _ in range(self.size)]
        # The graph of each row of nodes; its rows are its nodes 0, 1, ...
        self.of_row = [g for g, size in enumerate(self.sizes) for _ in range(size)]
        if one_of([True, False]):
            self.random.shuffle(self.of_row)
        self.local = [self.of_row[:row].count(g) for row, g in enumerate(self.of_row)]
        self.features = {name: [] for name in self.random.sample(["age", "charge", "w"], one_of([1, 2]))}
        for name in self.features:
            self.features[name] = [one_of(["0.5", "1.25", "-3", "7"]) for _ in self.of_row]
        self.kind_of = dict.fromkeys(self.features, "number")
        self.category = one_of([None, ["C", "N", "O"], ["1", "6", "8"]])
        if self.category:
            self.features["kind"] = [one_of(self.category) for _ in self.of_row]
            self.kind_of["kind"] = "category"
        self.draw_options()
        self.of_graph = [one_of(["1.5", "2", "-4"]) for _ in self.ids] if one_of([True, False]) else None
        self.problem = one_of(["classes", "regression"])
        targets = ["0.5", "1.5", "-2.25", "10"] if self.problem == "regression" else ["x", "y"]
        self.classes = [targets[k % len(targets)] for k in range(self.size)]
        if one_of([True, False]):
            self.classes[self.random.randrange(self.size)] = None
        pairs = [(a, b) for a, g in enumerate(self.of_row) for b, h in enumerate(self.of_row) if g == h and a < b]
        pairs = self.random.sample(pairs, max(1, 2 * len(pairs) // 3)) if pairs else []
        self.edges = [pair if one_of([True, False]) else pair[::-1] for pair in pairs]
        self.weights = [one_of(["0.5", "1.25", "3"]) for _ in self.edges] if one_of([True, False]) else None
        self.as_features = one_of([True, False])
        # How edges name nodes: of their graph, or of the file; by name, or by number.
        self.naming = one_of(["names", "own names", "numbers", "all numbers"])
        self.extra, self.first = None, one_of([0, 0, 1])

    def check(self, data: Any) -> str:
        order = sorted(range(len(self.of_row)), key=lambda row: (self.of_row[row], self.local[row]))
        if data.ids != tuple(self.ids) or data.graph.tolist() != sorted(self.of_row):
            return "graphs"
        train = data.train_mask.numpy()
        columns = [
            expected_features(self.kind_of[name], cells, train[self.of_row], self.missing, self.scale)[order]
            for name, cells in self.features.items()
        ]
        if self.of_graph is not None:
            of_graph = expected_features("number", self.of_graph, train, self.missing, self.scale)
            columns.append(of_graph[[self.of_row[row] for row in order]])
        expected_x = np.concatenate(columns, 1)
        if data.x.shape != expected_x.shape or not np.allclose(data.x.numpy(), expected_x, rtol=1e-5, atol=2e-6):
            return "features"
        place = {row: k for k, row in enumerate(order)}
        weights = np.ones(len(self.edges)) if self.weights is None else np.array([*map(float, self.weights)])
        if data.edge_features is not None:
            of_training = train[[self.of_row[a] for a, _ in self.edges]]
            used = of_training if of_training.any() else ~of_training
            weights = expected_features("number", self.weights, used, self.missing, self.scale)[:, 0].astype(np.float32)
        expected = {}
        for k, (a, b) in enumerate(self.edges):
            for pair in ((a, b), (b, a)):
                expected[place[pair[0]], place[pair[1]]] = pytest.approx(weights[k], rel=1e-5, abs=1e-6)
        attr = data.edge_weight if data.edge_features is None else data.edge_features[:, 0]
        cells = [1.0] * data.edge_index.shape[1] if attr is None else attr.tolist()
        if dict(zip(map(tuple, data.edge_index.T.tolist()), cells, strict=True)) != expected:
            return "edges"
        known = (data.train_mask | data.val_mask | data.test_mask).tolist()
        if known != [cell is not None for cell in self.classes]:
            return "which graphs have a target"
        if self.problem == "classes":
            found = [data.outputs.names[k] for k in data.y.tolist()]
        else:
            found = (data.y[:, 0].double() * data.outputs.std[0] + data.outputs.mean[0]).tolist()
        for cell, one in zip(self.classes, found, strict=True):
            if cell is not None and (one != cell if self.problem == "classes" else abs(one - float(cell)) > 1e-5):
                return "targets"
        return ""

    def tables(self, mark: str) -> list[Rows]:
        """The rows of graphs, nodes and edges."""
        one_of = self.random.choice
        columns = [[one_of(["id", "graph", "graph_id"]), *self.ids]]
        columns.append(["y", *(mark if cell is None else cell for cell in self.classes)])
        columns += [] if self.of_graph is None else [["size", *self.of_graph]]
        self.random.shuffle(columns)
        graphs = [list(row) for row in zip(*columns, strict=True)]
        names = [f"n{self.local[row] if self.naming == 'own names' else row}" for row in range(len(self.of_row))]
        columns = [[name, *(mark if c is None else c for c in cells)] for name, cells in self.features.items()]
        columns.insert(0, [one_of(["graph", "Graph_ID"]), *(self.ids[g] for g in self.of_row)])
        columns += [[one_of(["id", "node_id"]), *names]] if self.naming.endswith("names") else []
        nodes = [list(row) for row in zip(*columns, strict=True)]
        if self.naming == "numbers":
            names = [str(k + self.first) for k in self.local]
        elif self.naming == "all numbers":
            names = [str(k + self.first) for k in range(len(names))]
        edges = [one_of([["source", "target"], ["from", "to"]]), *([names[a], names[b]] for a, b in self.edges)]
        if self.naming in ("own names", "numbers") or (self.naming == "names" and one_of([True, False])):
            of = ["graph", *(self.ids[self.of_row[a]] for a, _ in self.edges)]
            edges = [[cell, *row] for cell, row in zip(of, edges, strict=True)]
        if self.weights is not None:
            edges = [[*row, cell] for row, cell in zip(edges, ["hours", *self.weights], strict=True)]
        return [graphs, nodes, edges]

    def run(self, folder: Path) -> tuple[str, str]:
        one_of = self.random.choice
        tables = dict(zip(("graphs", "nodes", "edges"), self.tables(one_of(MARKS)), strict=True))
        has_edges = len(tables["edges"]) > 1
        fault = one_of([*GRAPH_FAULTS, *[None] * 12])
        where = "" if fault is None else one_of([*tables]) if fault[0] == "any" else fault[0]
        if fault is not None:
            self.notes.append(f"{fault[2]} in {where}")
            if fault[1] is not None and not fault[1](self, tables):
                fault = None
        broken = None if fault is None or fault[1] is not None else fault[2]
        paths = {
            name: write(self, folder, name, rows, True, broken if name == where else None)
            for name, rows in tables.items()
            if name != "edges" or has_edges
        }
        is_feature = self.weights is not None and self.as_features
        first = self.first if one_of([True, True, False]) else None
        ends = tables["edges"][0][-2:] if self.weights is None else tables["edges"][0][-3:-1]
        weights = "hours" if self.weights is not None and not is_feature else None
        file = EdgeFile(
            paths.get("edges", folder), ends, weights, first=first, features=("hours",) if is_feature else ()
        )
        options: dict[str, Any] = {
            "target": ["y"],
            "problem": self.problem,
            "categories": self.categories,
            **self.options,
        }
        try:
            data = graph_tables(paths["graphs"], paths["nodes"], file if has_edges else None, **options)
        except ValueError as error:
            outcome, wrong = f"refused: {error}", ""
        else:
            wrong = self.check(data)
            outcome = "read" if not wrong else f"misread {wrong}: {data.understood}"
        doubts = (
            "no edge",
            "as many commas",
            "row numbers that pandas",
            "classes for",
            "a thousand or one",
            "has node 0",
        )
        doubts += "seems to name", "rows with a target", "one class only", "for training"
        may_refuse = fault is not None or any(doubt in outcome for doubt in doubts)
        return outcome, self.complaint(wrong, outcome, may_refuse, [*paths.values()])


def _in(name: str, column: str, *cells: str) -> Any:
    """A fault that puts another cell into a column of one of three tables, if it is there."""

    def apply(draw: GraphDraw, tables: dict[str, Rows]) -> bool:
        rows = tables[name]
        found = [k for k, one in enumerate(rows[0]) if one.lower() in column.split("|")]
        if not found or len(rows) < 2:
            return False
        is_feature = column in ("size", "kind", "age|charge|w") or (column == "hours" and draw.as_features)
        if "" in cells and is_feature and draw.missing != "refuse":
            return False
        row = draw.random.choice(rows[1:])
        row[found[0]] = draw.random.choice([cell for cell in cells if cell != row[found[0]]])
        return True

    return apply


def _without_nodes(draw: GraphDraw, tables: dict[str, Rows]) -> bool:
    tables["graphs"].append(["zed" if name in ("id", "graph", "graph_id") else "1" for name in tables["graphs"][0]])
    return True


def _repeated(draw: GraphDraw, tables: dict[str, Rows]) -> bool:
    name = draw.random.choice(["graphs", "nodes"] if draw.naming.endswith("names") else ["graphs"])
    tables[name].append([*tables[name][1]])
    return True


def _across(draw: GraphDraw, tables: dict[str, Rows]) -> bool:
    rows, names = tables["edges"], tables["edges"][0]
    others = [row for row, g in enumerate(draw.of_row) if draw.edges and g != draw.of_row[draw.edges[0][0]]]
    if draw.naming in ("own names", "numbers") or not others:
        return False
    other = draw.random.choice(others)
    end = next(k for k, name in enumerate(names) if name in ("target", "to"))
    rows[1][end] = f"n{other}" if draw.naming == "names" else str(other + draw.first)
    return True


GRAPH_FAULTS = [
    ("graphs", _in("graphs", "id|graph|graph_id", *MARKS), "a missing id"),
    ("graphs", _in("graphs", "size", *MARKS, "many", "inf"), "a feature that is none"),
    ("graphs", _in("graphs", "y", "1e400"), "a target that is none"),
    ("graphs", _without_nodes, "a graph without nodes"),
    ("both", _repeated, "a repeated row"),
    ("nodes", _in("nodes", "graph|graph_id", *MARKS, "zed"), "an unknown graph"),
    ("nodes", _in("nodes", "id|node_id", *MARKS), "a missing id"),
    ("nodes", _in("nodes", "kind", *MARKS), "a missing category"),
    ("nodes", _in("nodes", "age|charge|w", *MARKS, "old"), "a feature that is none"),
    ("edges", _in("edges", "graph", *MARKS, "zed"), "an unknown graph"),
    ("edges", _in("edges", "source|from", *MARKS, "n99", "1.5", "-1", "99"), "an end that is none"),
    ("edges", _in("edges", "hours", *MARKS, "inf", "many"), "a weight that is none"),
    ("edges", _across, "an edge across graphs"),
    *(("any", None, name) for name in BROKEN),
]
