"""Graphs of one's own for node classification, from tables in files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.links import both_directions
from mpnn.data.planetoid import NodeClassification

_TRAIN, _VALIDATION = 0.6, 0.2
_EXACT = 2**53  # text is read as float64, which holds each whole number below


def node_tables(features: Path, labels: Path, edges: Path | None = None, seed: int = 0) -> NodeClassification:
    """Reads a graph whose nodes are numbered from 0.

    A file is a NumPy array (`.npy`) or UTF-8 text with one row a line, its numbers separated by commas, tabs or blanks.
    Empty lines and text after `#` are ignored. A header and empty cells are refused.

    Args:
        features: [N, F], a row for each node.
        labels: integers [N], the classes from 0; -1 for nodes whose class is unknown.
        edges: [E, 2], source and destination of each link, which counts in both directions; None for no links.
        seed: of the split: 60% of the labeled nodes are for training, 20% for validation and the rest for the test.

    Raises:
        DamagedFile: if a file is not a table of numbers, or the tables do not fit together. The message names the row.
        OSError: if a file cannot be read.
    """
    with np.errstate(over="ignore"):  # infinities are refused below
        x, y = _table(features).astype(np.float32), _integers(labels)
    if y.shape[1] != 1 or len(y) != len(x):
        raise DamagedFile(f"{labels} must have one label for each of the {len(x)} rows of {features}; it has {y.shape}")
    wrong = np.flatnonzero(np.any(~np.isfinite(x), axis=1))
    if len(wrong):
        raise DamagedFile(
            f"row {wrong[0] + 1} of {features} has a number that is NaN, infinite or too large for float32"
        )
    if y.min() < -1 or y.max() < 0:
        raise DamagedFile(f"{labels} must have classes from 0, and -1 for unknown ones; got {y.min()} to {y.max()}")
    if y.max() >= len(y):
        raise DamagedFile(f"{labels} has class {y.max()} but only {len(y)} nodes; number the classes 0, 1, 2, ...")
    links = np.empty((0, 2), np.int64) if edges is None else _integers(edges)
    if links.shape[1] != 2:
        raise DamagedFile(f"{edges} must have two numbers in each row, source and destination; got {links.shape[1]}")
    outside = np.flatnonzero(np.any((links < 0) | (links >= len(x)), axis=1))
    if len(outside):
        row = outside[0]
        raise DamagedFile(
            f"row {row + 1} of {edges} links {links[row, 0]} and {links[row, 1]}, but {features} has {len(x)} nodes, "
            "numbered from 0"
        )
    target = torch.from_numpy(y[:, 0])
    train, val, test = _split(target, seed)
    edge_index = both_directions(map(tuple, links.tolist()))
    return NodeClassification(torch.from_numpy(x), edge_index, target.clamp(min=0), train, val, test)


def _split(target: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    known = (target >= 0).nonzero().squeeze(1)
    order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
    train, val = round(_TRAIN * len(known)), round(_VALIDATION * len(known))
    masks = []
    for part in order.split([train, val, len(known) - train - val]):
        mask = torch.zeros(len(target), dtype=torch.bool)
        mask[part] = True
        masks.append(mask)
    return masks[0], masks[1], masks[2]


def _table(path: Path) -> np.ndarray:
    try:
        table = np.load(path, allow_pickle=False) if path.suffix == ".npy" else _text_table(path)
    except UnicodeDecodeError:
        raise DamagedFile(f"{path} is not a table of numbers: it is not UTF-8 text") from None
    except (ValueError, EOFError) as error:
        raise DamagedFile(f"{path} is not a table of numbers: {error}") from None
    table = table[:, None] if table.ndim == 1 else table
    if table.ndim != 2 or not len(table) or table.dtype.kind not in "iufb":
        raise DamagedFile(f"{path} must be a table of numbers with at least one row; got {table.dtype}{table.shape}")
    return table


def _text_table(path: Path) -> np.ndarray:
    """The numbers of a text file. With commas, every cell must hold a number, so that no column moves unnoticed."""
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if content := line.partition("#")[0].strip():
            rows[number] = content
    if not rows:
        return np.empty((0, 1))
    comma = "," if "," in next(iter(rows.values())) else None
    try:
        return np.loadtxt(list(rows.values()), ndmin=2, delimiter=comma)
    except ValueError:
        raise ValueError(_first_mistake(rows, comma)) from None


def _first_mistake(rows: dict[int, str], separator: str | None) -> str:
    first = next(iter(rows))
    columns = len(rows[first].split(separator))
    for number, content in rows.items():
        cells = content.split(separator)
        for cell in cells:
            try:
                float(cell)
            except ValueError:
                hint = "; if this line is a header, delete it" if number == first else ""
                if ";" in cell:
                    hint = "; separate numbers by commas, tabs or blanks"
                return f"line {number} has {cell.strip()!r} in place of a number{hint}"
        if len(cells) != columns:
            return f"line {number} has {len(cells)} columns, line {first} has {columns}"
    return "a number is written in a way that NumPy does not read"


def _integers(path: Path) -> np.ndarray:
    table = _table(path)
    wrong = np.flatnonzero(np.any((table != np.round(table)) | (np.abs(table) >= _EXACT), axis=1))
    if len(wrong):
        raise DamagedFile(
            f"row {wrong[0] + 1} of {path} must have whole numbers below 2^53; got {table[wrong[0]].tolist()}"
        )
    return table.astype(np.int64)
