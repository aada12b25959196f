"""MUTAG and PROTEINS: small labeled graphs, in the text format of the GIN paper.

The format: the number of graphs; then for each graph a line "n label" followed by one line per node,
"tag degree neighbor neighbor ...".
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpnn.data.from_pyg import node_types, one_class, tensors
from mpnn.data.links import both_directions
from mpnn.data.read import read

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
    def from_pyg(cls, dataset: Any) -> "GraphClassification":
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
    has 7 tags and PROTEINS 3. In the file of the GIN paper's authors the first graph of MUTAG is damaged: its first
    nine nodes are numbered in place of their tags, which makes nine.

    Raises:
        ValueError: if there is no such collection.
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    if name not in NAMES:
        raise ValueError(f"there is no TU dataset {name!r} here; there are {' and '.join(NAMES)}")
    return read_tu(read(name, f"{name}.txt").decode())


def read_tu(text: str) -> GraphClassification:
    """Reads a text in this format; tags and labels are renumbered from 0 in increasing order."""
    lines = iter([[int(word) for word in line.split()] for line in text.splitlines()])
    (count,) = next(lines)
    raw = []
    for _ in range(count):
        num_nodes, label = next(lines)
        nodes = [next(lines) for _ in range(num_nodes)]
        links = [(node, other) for node, (_, _, *neighbors) in enumerate(nodes) for other in neighbors]
        raw.append((links, [tag for tag, *_ in nodes], label))
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
