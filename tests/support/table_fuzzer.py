"""Draws graphs, writes them as files of every dialect, and most often with a fault, and reads them back.

A file must be read as what was drawn, or refused with a sentence; anything else is a silent misreading. Options are
drawn, too: gaps and how they are filled, scaling, categories, dates, repeated edges, encodings. As a program, it draws
more than the tests do: `PYTHONPATH=.:tests/support python tests/support/table_fuzzer.py 20000`.
"""

from __future__ import annotations

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import random
import re
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from mpnn.data import graph_tables, node_tables
from mpnn.data.tables import EdgeFile, node_inputs
from mpnn.graphs import write_csr

WORDS = [
    "ann",
    "bob",
    "Çem",
    "dan",
    "eve",
    "fay",
    "gil",
    "hal",
    "ida",
    "jan",
    "kim",
    "lea",
    "max",
    "nia",
    "to",
    "O'Neil",
]
MARKS = ["", "NA", "nan", "NaN", "None", "null", "<NA>", "n/a"]
Rows = list[list[str]]
Cells = list[str | None]
EPOCH = datetime.datetime(1970, 1, 1)


def number_of(cell: str | None, kind: str) -> float:
    """What a cell means."""
    if cell is None:
        return np.nan
    if kind == "truth":
        return float(cell.lower() == "true")
    if kind == "date":
        return (datetime.datetime.fromisoformat(cell) - EPOCH) / datetime.timedelta(days=1)
    return float(cell)


def expected_features(kind: str, cells: Cells, train: np.ndarray, missing: str, scale: bool) -> np.ndarray:
    """The features [N, k] of a column, by the formulas of the documentation."""
    known = np.array([cell is not None for cell in cells])
    if kind == "category":
        words = [cell for cell, is_one in zip(cells, known & train, strict=True) if is_one]
        values = sorted({*words}, key=lambda v: (len(v), v) if v.isdecimal() else (0, v))
        x = np.array([[float(cell == value) for value in values] for cell in cells]).reshape(len(cells), -1)
        gaps = np.array([cell not in values for cell in cells])
        if missing != "refuse":
            x[gaps] = [words.count(value) / len(words) for value in values]
    else:
        x = np.array([number_of(cell, kind) for cell in cells])
        gaps, own = ~known, x[known & train]
        mean, std = (own.mean(), own.std()) if len(own) else (0.0, 0.0)
        x[gaps] = mean
        if scale and kind != "truth":
            x = (x - mean) / (std if std > 0 else 1)
        x = x[:, None]
    return np.concatenate([x, gaps[:, None]], 1) if missing == "indicator" and gaps.any() else x


class Draw:
    """A graph, how its files are written, and what is wrong with them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        one_of = self.random.choice
        self.size = self.random.randint(8, 14)
        self.notes: list[str] = [f"seed {seed}"]
        self.ids = one_of([None, None, *self._ids()])
        self.features: dict[str, Cells] = {}
        self.kind_of: dict[str, str] = {}
        for name in self.random.sample(["age", "#friends", "income, EUR", "w"], 2):
            kinds = ["number"] * 4 + ([] if self.ids is None else ["truth", "date", "category"])
            self.kind_of[name] = one_of(kinds)
            self.features[name] = self._feature() if self.kind_of[name] == "number" else self._words(self.kind_of[name])
        self._draw_options(one_of)
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

    def _draw_options(self, one_of: Any) -> None:
        self.missing = one_of(["refuse", "refuse", "mean", "indicator"])
        self.scale = one_of([True, False])
        self.encoding = one_of([None, None, None, "cp1252", "latin-1"])
        if self.missing != "refuse":
            for cells in self.features.values():
                for k in self.random.sample(range(len(cells)), one_of([0, 1, 2])):
                    cells[k] = None

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
        categories = [name for name, kind in self.kind_of.items() if kind == "category"]
        options: dict[str, Any] = {"missing": self.missing, "scale": self.scale, "encoding": self.encoding}
        try:
            data = node_tables(paths[0], edges=file, target=target, categories=categories, **options)
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
        if wrong or (outcome != "read" and fault is None and not self._may_refuse(outcome)):
            kept = "\n".join(f"{path.name}: {path.read_bytes()[:600]!r}" for path in paths)
            return (
                outcome,
                f"{wrong or 'refused without a fault'}; {'; '.join(self.notes)}; first={first}\n{outcome}\n{kept}",
            )
        return outcome, ""

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


# -------------------------------------------------------------------------------------------------------------- files


def write(draw: Draw, folder: Path, name: str, rows: Rows, header: bool, broken: str | None) -> Path:
    """Writes the rows in a dialect. `broken`: what happens to the bytes."""
    one_of = draw.random.choice
    is_whole = header and broken is None and len({*rows[0]}) == len(rows[0])
    if is_whole and one_of([True, *[False] * 5]):
        return _parquet(draw, folder / f"{name}.parquet", rows, name)
    rows = [[*row] for row in rows]
    if name == "edges" and not header and "since" not in rows[0] and len({len(row) for row in rows}) == 1:
        ends = [row[:2] for row in rows[1:]]
        if (
            broken is None
            and len(rows[0]) == 2
            and all(re.fullmatch("0|[1-9][0-9]{0,17}", c) for r in ends for c in r)
            and one_of([True, False])
        ):
            path = folder / "edges.npy"
            np.save(path, np.array(ends, int).T)
            draw.notes.append("edges in an array")
            return path
    separator = one_of([",", ",", ";", "\t", "|", " "])
    words = [cell for row in rows for cell in row]
    if separator == " " and any(not cell or " " in cell for cell in words):
        separator = "\t"
    decimal = one_of([".", "."] + ([","] if separator != "," else []))
    if decimal == ",":
        rows = [rows[0], *([_with_comma(cell) for cell in row] for row in rows[1:])]
    if header and one_of([True, *[False] * 4]) and separator != " ":
        numbers = [*range(len(rows) - 1)]
        if one_of([True, False]):
            numbers = [2 * k for k in numbers]
        rows = [["", *rows[0]], *([str(k), *row] for k, row in zip(numbers, rows[1:], strict=True))]
        draw.notes.append(f"row numbers in {name}")
    rows = rows if header else rows[1:]
    out = io.StringIO()
    quoting = one_of([csv.QUOTE_MINIMAL, csv.QUOTE_MINIMAL, csv.QUOTE_ALL])
    for k, row in enumerate(rows):
        if name == "edges" and k and one_of([False] * 20 + [True]):
            out.write("\n")
        writer = csv.writer(out, delimiter=separator, quoting=quoting, lineterminator="\n")
        blanks = separator in ",;" and quoting == csv.QUOTE_MINIMAL and not any('"' in c or separator in c for c in row)
        writer.writerow([f" {cell}" if blanks and k % 3 == 1 else cell for cell in row])
    text = one_of(["", "", "# a comment\n", "#\n# from, to\n"]) + out.getvalue()
    text = _break_text(draw, text, separator, broken)
    if one_of([True, False]):
        text = text.removesuffix("\n")
    text = text.replace("\n", one_of(["\n", "\n", "\r\n", "\r"]))
    encoding = one_of(["utf-8", "utf-8", "utf-8-sig", "utf-16"])
    if draw.encoding is not None:
        is_narrow = text.encode(draw.encoding, "ignore").decode(draw.encoding) == text
        encoding = one_of([*[draw.encoding] * (2 * is_narrow), "utf-8-sig", "utf-16"])
    elif broken == "latin-1":
        encoding, text = "latin-1", text.replace("Ç", "ç").encode("latin-1", "replace").decode("latin-1")
    draw.notes.append(f"{name}: {separator!r} {decimal} {encoding} quoting {quoting}{'' if header else ' no header'}")
    data = text.encode(encoding)
    packed = one_of(["", "", "", "gz", "zip", "bz2", "xz"])
    if broken == "two files in a zip":
        packed = "zip"
    path = folder / f"{name}.csv{'.' if packed else ''}{packed}"
    if packed == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.csv", data)
            if broken == "two files in a zip":
                archive.writestr("b.csv", data)
        return path
    pack = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(packed, bytes)
    data = pack(data)
    path.write_bytes(data[: len(data) // 2] if broken == "half of a packed file" and packed else data)
    return path


def _with_comma(cell: str) -> str:
    head, _, tail = cell.partition(".")
    return f"{head},{tail}" if head.lstrip("-").isdecimal() and tail[:1].isdecimal() else cell


def _break_text(draw: Draw, text: str, separator: str, broken: str | None) -> str:
    lines = text.split("\n")
    at = draw.random.randrange(len(lines) - 1)
    while lines[at].startswith("#"):  # what stands in a comment is lost to every reader
        at += 1
    if broken == "a row cut short":
        lines[at] = lines[at].rpartition(separator)[0]
    elif broken == "a row too long":
        lines[at] += separator + draw.random.choice(["", "1", "x"])
    elif broken == "a line break lost":
        lines[at : at + 2] = ["".join(lines[at : at + 2])]
    elif broken == "a quote too many":
        k = draw.random.randint(0, len(lines[at]))
        lines[at] = lines[at][:k] + '"' + lines[at][k:]
    elif broken == "a zero byte":
        lines[at] += "\0"
    elif broken == "another separator":
        lines[at] = lines[at].replace(separator, ";" if separator == "," else ",")
    elif broken == "the file ends within a row":
        kept = "\n".join(lines).rstrip("\n")
        return kept[: kept.rfind(separator)]
    elif broken == "a line is empty":
        lines.insert(at, "")
    elif broken == "a comment among rows":
        lines.insert(at, "# and now, the rest")
    return "\n".join(lines)


def _parquet(draw: Draw, path: Path, rows: Rows, name: str) -> Path:
    """As pandas writes a DataFrame."""
    columns: dict[str, Any] = {}
    for k, column in enumerate(rows[0]):
        cells = [None if row[k] in MARKS else row[k] for row in rows[1:]]
        numbers = [cell for cell in cells if cell is not None]
        try:
            exact = all(str(int(cell)) == cell and abs(int(cell)) < 2**63 for cell in numbers)
        except ValueError:
            exact = False
        if exact and draw.random.choice([True, False]):
            columns[column] = pyarrow.array([None if cell is None else int(cell) for cell in cells], "int64")
        elif draw.kind_of.get(column) == "truth" and all(cell.lower() in ("true", "false") for cell in numbers):
            columns[column] = pyarrow.array([cell if cell is None else cell.lower() == "true" for cell in cells])
        elif column in draw.features or column in ("hours", "size"):
            are_numbers = all(re.fullmatch(r"-?[0-9.]+(e-?[0-9]+)?", cell) and cell.count(".") < 2 for cell in numbers)
            cells = [None if cell is None else float(cell) for cell in cells] if are_numbers else cells
            columns[column] = pyarrow.array(cells, "float64" if are_numbers else "string")
        else:
            array = pyarrow.array(cells, draw.random.choice(["string", "large_string"]))
            columns[column] = array.dictionary_encode() if draw.random.choice([True, False]) else array
    index: list[Any] = [{"kind": "range", "name": None, "start": 0, "stop": len(rows) - 1, "step": 1}]
    if draw.random.choice([True, False]):
        step = draw.random.choice([1, 2])
        columns["__index_level_0__"] = pyarrow.array([step * k for k in range(len(rows) - 1)], "int64")
        index = ["__index_level_0__"]
    table = pyarrow.table(columns).replace_schema_metadata({"pandas": json.dumps({"index_columns": index})})
    parquet.write_table(table, path)
    draw.notes.append(f"{name} in Parquet with {index}")
    return path


# ------------------------------------------------------------------------------------------------------------- faults


def _replace(column: str | int, *cells: str) -> Any:
    """A fault that puts another cell into a column, where the table has it."""

    def apply(draw: Draw, rows: Rows) -> bool:
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


def _repeat_id(draw: Draw, rows: Rows) -> bool:
    if draw.ids is None:
        return False
    rows[1] = [*rows[2]]
    return True


def _repeat_name(draw: Draw, rows: Rows) -> bool:
    rows[0][draw.random.randrange(len(rows[0]) - 1)] = rows[0][-1]
    return True


def _unknown_end(draw: Draw, rows: Rows) -> bool:
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


def _clash(draw: Draw, rows: Rows) -> bool:
    if draw.weights is None or draw.repeats != "refuse" or len(rows) < 2:
        return False
    rows.append([*rows[1][:2], "9", *rows[1][3:]])
    return True


def _many_classes(draw: Draw, rows: Rows) -> bool:
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
    *(
        ("both", None, name)
        for name in (
            *("a row cut short", "a row too long", "a line break lost", "a quote too many", "a zero byte"),
            *("another separator", "the file ends within a row", "latin-1", "two files in a zip"),
            *("half of a packed file", "a comment among rows"),
        )
    ),
    ("nodes", None, "a line is empty"),
]


class GraphDraw(Draw):
    """Many small graphs in three tables."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        one_of = self.random.choice
        self.notes = [f"graphs, seed {seed}"]
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
        self._draw_options(one_of)
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
        options: dict[str, Any] = {"target": ["y"], "problem": self.problem}
        options |= {"missing": self.missing, "scale": self.scale, "encoding": self.encoding}
        options["categories"] = ["kind"] if self.category else []
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
        is_doubtful = any(doubt in outcome for doubt in doubts)
        if wrong or (outcome != "read" and fault is None and not is_doubtful):
            kept = "\n".join(f"{path.name}: {path.read_bytes()[:700]!r}" for path in paths.values())
            return outcome, f"{wrong or 'refused without a fault'}; {'; '.join(self.notes)}\n{outcome}\n{kept}"
        return outcome, ""


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
    *(("any", None, name) for name in ("a row cut short", "a row too long", "a line break lost", "a quote too many")),
    *(("any", None, name) for name in ("another separator", "the file ends within a row", "two files in a zip")),
    *(("any", None, name) for name in ("half of a packed file", "a comment among rows", "a zero byte", "latin-1")),
]


def misread(seeds: range, say: Any = None) -> list[str]:
    """The draws that are read otherwise than they were drawn, or refused without a reason; every third is of many
    graphs."""
    wrong = []
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            outcome, found = (Draw if seed % 3 else GraphDraw)(seed).run(Path(folder))
        outcomes[outcome.partition(":")[0]] += 1
        if found:
            wrong.append(found)
            if say:
                say(found)
    if say:
        say(f"{dict(outcomes)}, {len(wrong)} misread or refused without a fault")
    return wrong


if __name__ == "__main__":
    sys.exit(bool(misread(range(*map(int, sys.argv[1:])), print)))
