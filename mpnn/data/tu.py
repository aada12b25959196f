"""MUTAG and PROTEINS: small labeled graphs, in the text format of the GIN paper.

The format: the number of graphs; then for each graph a line "n label" followed by one line per node,
"tag degree neighbor neighbor ...".
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.from_pyg import node_types, one_class, tensors
from mpnn.data.links import both_directions
from mpnn.data.locate import locate
from mpnn.data.read import read_bytes

NAMES = ("MUTAG", "PROTEINS")


@dataclass(frozen=True, eq=False)
class SmallGraph:
    """One graph of a collection.

    Args:
        edge_index: int64 `[2, E]`, both directions of every link, no duplicates, no self-loops,
            ordered by dst, then src.
        tags: the type of every node (an atom, a secondary structure), int64 `[N]`, from 0.
        label: the class of the graph, from 0.
    """

    edge_index: Tensor
    tags: Tensor
    label: int

    @property
    def num_nodes(self) -> int:
        return self.tags.shape[0]


@dataclass(frozen=True, eq=False)
class GraphClassification:
    """A collection of small graphs for graph classification.

    Args:
        graphs: the graphs, in the order of the file.
        num_tags: number of node types.
        num_classes: number of graph classes.
    """

    graphs: tuple[SmallGraph, ...]
    num_tags: int
    num_classes: int

    @classmethod
    def from_pyg(cls, dataset: Any) -> GraphClassification:
        """From PyTorch Geometric: a dataset or list of `Data`, each with one class `y`. Edges stay as they are there.

        The tags are the columns of ones in one-hot `x` (TUDataset), the integers in `x` [N, 1] (ZINC, OGB's first
        column: pass `x[:, :1]`), or 0 if there is no `x`.

        Raises:
            TypeError, ValueError: if `y` is not one class, or `x` holds no types of nodes.
        """
        graphs = tuple(
            SmallGraph(tensors(data, "edge_index")[0], node_types(data), int(one_class(data))) for data in dataset
        )
        if not graphs:
            raise ValueError("the dataset has no graphs")
        num_tags = int(torch.cat([graph.tags for graph in graphs]).max()) + 1
        return cls(graphs, num_tags, max(graph.label for graph in graphs) + 1)


def tu(name: str) -> GraphClassification:
    """MUTAG (188 molecules, mutagenic or not) or PROTEINS (1,113 proteins, enzymes or not).

    A link that is listed for one of its nodes only counts in both directions, as in the reader of the GIN paper. MUTAG
    has 7 tags and PROTEINS 3. Another copy of MUTAG has 9 tags, because the first nine lines of its first graph contain
    an extra number.

    Raises:
        ValueError: if there is no such collection.
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    if name not in NAMES:
        raise ValueError(f"there is no TU dataset {name!r} here; there are {' and '.join(NAMES)}")
    return read_tu(locate(name) / f"{name}.txt")


def read_tu(path: Path) -> GraphClassification:
    """Reads a file in this format; tags and labels are renumbered from 0 in increasing order."""
    lines = _Lines(path)
    (count,) = lines.numbers("the number of graphs", 1)
    if count < 1:
        raise lines.error(f"a collection of {count} graphs")
    raw = [_read_graph(lines) for _ in range(count)]
    lines.expect_end()
    tag_of = {tag: i for i, tag in enumerate(sorted({tag for _, tags, _ in raw for tag in tags}))}
    class_of = {label: i for i, label in enumerate(sorted({label for _, _, label in raw}))}
    graphs = tuple(
        SmallGraph(
            edge_index=both_directions(links),
            tags=torch.tensor([tag_of[tag] for tag in tags], dtype=torch.int64),
            label=class_of[label],
        )
        for links, tags, label in raw
    )
    return GraphClassification(graphs, len(tag_of), len(class_of))


def _read_graph(lines: _Lines) -> tuple[list[tuple[int, int]], list[int], int]:
    num_nodes, label = lines.numbers('"n label"', 2)
    if num_nodes < 1:
        raise lines.error(f"a graph of {num_nodes} nodes")
    tags: list[int] = []
    links: list[tuple[int, int]] = []
    for node in range(num_nodes):
        tag, degree, *neighbors = lines.numbers('"tag degree neighbors..."')
        if degree != len(neighbors):
            raise lines.error(f"node {node} announces {degree} neighbors and lists {len(neighbors)}")
        for other in neighbors:
            if not 0 <= other < num_nodes:
                raise lines.error(f"node {node} has the neighbor {other}, but its graph has {num_nodes} nodes")
        tags.append(tag)
        links += [(node, other) for other in neighbors]
    return links, tags, label


class _Lines:
    """An iterator over the lines of a file, whose errors name the line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Bytes that are not ASCII become words that are not numbers, so that the error names their line.
        self._lines = read_bytes(path).decode("ascii", errors="replace").splitlines()
        self._read = 0

    def numbers(self, what: str, count: int | None = None) -> list[int]:
        """The integers of the next line: exactly `count`, or at least two."""
        if self._read == len(self._lines):
            self._read += 1
            raise self.error(f"the file ends where {what} should follow; it is truncated")
        line = self._lines[self._read]
        self._read += 1
        try:
            numbers = [int(word) for word in line.split()]
        except ValueError:
            numbers = []
        if any(number.bit_length() > 63 for number in numbers):
            raise self.error(f"expected {what} in 64 bits, found {line[:40]!r}")
        if len(numbers) != count if count is not None else len(numbers) < 2:
            raise self.error(f"expected {what} in whole numbers, found {line[:40]!r}")
        return numbers

    def expect_end(self) -> None:
        for line in self._lines[self._read :]:
            self._read += 1
            if line.strip():
                raise self.error(f"expected the end of the file, found {line[:40]!r}")

    def error(self, what: str) -> DamagedFile:
        return DamagedFile(f"{self._path}, line {self._read}: {what}; delete the file and fetch it again")
