"""Files of drawn tables: text of every dialect, packed or not, and Parquet; most often with damaged bytes."""

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
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

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
BROKEN = (
    *("a row cut short", "a row too long", "a line break lost", "a quote too many", "a zero byte"),
    *("another separator", "the file ends within a row", "latin-1", "two files in a zip"),
    *("half of a packed file", "a comment among rows"),
)
"""What may happen to the bytes of a file."""


class Drawn:
    """What is drawn for any tables.

    features: the cells of each column of features. kind_of: whether a column holds numbers, truth, dates or categories.
    notes: what was drawn, for people.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        self.notes = [f"{kind}, seed {seed}"]
        self.features: dict[str, Cells] = {}
        self.kind_of: dict[str, str] = {}

    def draw_options(self) -> None:
        """How features are read. Where gaps are filled, some cells become gaps."""
        one_of = self.random.choice
        self.missing = one_of(["refuse", "refuse", "mean", "indicator"])
        self.scale = one_of([True, False])
        self.encoding = one_of([None, None, None, "cp1252", "latin-1"])
        if self.missing != "refuse":
            for cells in self.features.values():
                for k in self.random.sample(range(len(cells)), one_of([0, 1, 2])):
                    cells[k] = None

    @property
    def options(self) -> dict[str, Any]:
        return {"missing": self.missing, "scale": self.scale, "encoding": self.encoding}

    @property
    def categories(self) -> list[str]:
        return [name for name, kind in self.kind_of.items() if kind == "category"]

    def complaint(self, wrong: str, outcome: str, may_refuse: bool, paths: list[Path]) -> str:
        """What a draw has found wrong, with its files, or nothing."""
        if not wrong and (outcome == "read" or may_refuse):
            return ""
        kept = "\n".join(f"{path.name}: {path.read_bytes()[:700]!r}" for path in paths)
        return f"{wrong or 'refused without a fault'}; {'; '.join(self.notes)}\n{outcome}\n{kept}"


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


def write(draw: Drawn, folder: Path, name: str, rows: Rows, header: bool, broken: str | None) -> Path:
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


def _break_text(draw: Drawn, text: str, separator: str, broken: str | None) -> str:
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


def _parquet(draw: Drawn, path: Path, rows: Rows, name: str) -> Path:
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
        elif column in draw.features or column in ("hours", "size", "when"):
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
