"""Graphs of one's own for node classification, from tables in files."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.links import both_directions
from mpnn.data.planetoid import NodeClassification
from mpnn.tables import Columns, edge_chunks, read_numbers, whole_numbers

_TRAIN, _VALIDATION = 0.6, 0.2
_FEWEST = 4  # labeled nodes, so that no part of the split is empty


def node_tables(
    features: Path, labels: Path, edges: Path | None = None, seed: int = 0, columns: Columns | None = None
) -> NodeClassification:
    """Reads a graph whose nodes are numbered from 0.

    A file is a NumPy array (`.npy`) or UTF-8 text with one row a line, its numbers separated by commas, semicolons,
    tabs or blanks. The first line may be a header. Text after `#` is a comment. Empty cells are refused, and so are
    empty lines between the rows of nodes.

    Args:
        features: [N, F], a row for each node.
        labels: integers [N], the classes from 0, each of which occurs; -1 for nodes whose class is unknown.
        edges: [E, 2], source and destination of each link, which counts in both directions; also Parquet; None for no
            links.
        seed: of the split: 60% of the labeled nodes are for training, 20% for validation and the rest for the test.
        columns: the two columns of `edges`, by name or by number from 0, if it has more.

    Raises:
        DamagedFile: if a file is not a table of numbers, or the tables do not fit together. The message names the row.
        OSError: if a file cannot be read.
    """
    try:
        with np.errstate(over="ignore"):  # infinities are refused below
            x = read_numbers(features).astype(np.float32)
        y = whole_numbers(read_numbers(labels), labels)
        none = np.empty((2, 0), np.int64)
        links = none if edges is None else np.concatenate([none, *edge_chunks(edges, columns=columns)], axis=1)
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    if y.shape[1] != 1 or len(y) != len(x):
        raise DamagedFile(f"{labels} must have one label for each of the {len(x)} rows of {features}; it has {y.shape}")
    wrong = np.flatnonzero(np.any(~np.isfinite(x), axis=1))
    if len(wrong):
        raise DamagedFile(
            f"row {wrong[0] + 1} of {features} has a number that is NaN, infinite or too large for float32"
        )
    if y.min() < -1 or y.max() < 0:
        raise DamagedFile(f"{labels} must have classes from 0, and -1 for unknown ones; got {y.min()} to {y.max()}")
    missing = np.setdiff1d(np.arange(min(y.max(), len(y))), y)
    if len(missing):
        raise DamagedFile(
            f"{labels} has class {y.max()} but no class {missing[0]}; number the classes 0, 1, 2, ... without gaps"
        )
    outside = np.flatnonzero(np.any((links < 0) | (links >= len(x)), axis=0))
    if len(outside):
        row = outside[0]
        raise DamagedFile(
            f"row {row + 1} of {edges} links {links[0, row]} and {links[1, row]}, but {features} has {len(x)} nodes, "
            "numbered from 0"
        )
    target = torch.from_numpy(y[:, 0])
    if (known := int((target >= 0).sum())) < _FEWEST:
        raise DamagedFile(
            f"{labels} has {known} labeled nodes; training, validation and test need {_FEWEST} at least, and more to "
            "mean anything"
        )
    train, val, test = _split(target, seed)
    edge_index = both_directions(zip(*links.tolist(), strict=True))
    return NodeClassification(torch.from_numpy(x), target.clamp(min=0), train, val, test, edge_index)


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
