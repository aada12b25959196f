"""MUTAG and PROTEINS: small labeled graphs, in the text format of the GIN paper.

The format: the number of graphs; then for each graph a line "n label" followed by one line per node,
"tag degree neighbor neighbor ...".
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mpnn.data.from_pyg import edges, is_one_hot, node_types, target
from mpnn.data.links import both_directions
from mpnn.data.read import read

NAMES = ("MUTAG", "PROTEINS")


@dataclass(frozen=True, eq=False)
class SmallGraph:
    """One graph of a collection.

    Args:
        edge_index: int64 `[2, E]`, both directions of every link, no duplicates, no self-loops,
            ordered by dst, then src.
        tags: the type of every node (an atom, a secondary structure), int64 `[N]`, from 0; `[N, F]` if nodes have
            several, as in OGB.
        label: the class of the graph, from 0; or numbers to learn, float32 `[C]`, NaN where one is unknown.
        edge_attr: attributes of the edges, `[E, ...]`, or None.
    """

    edge_index: Tensor
    tags: Tensor
    label: int | Tensor
    edge_attr: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        return self.tags.shape[0]


@dataclass(frozen=True, eq=False)
class GraphClassification:
    """A collection of small graphs, each with a class, or with numbers to learn.

    Args:
        graphs: the graphs, in the order of the file.
        num_tags: number of node types; those of each column if nodes have several.
        num_classes: number of graph classes; 0 if there are numbers to learn.
    """

    graphs: tuple[SmallGraph, ...]
    num_tags: int | tuple[int, ...]
    num_classes: int

    @property
    def targets(self) -> Tensor:
        """The classes of the graphs, int64 `[G]`, or their numbers, float32 `[G, C]`."""
        labels = [graph.label for graph in self.graphs]
        return torch.stack([torch.as_tensor(label) for label in labels])

    def one_hot(self, tags: Tensor) -> Tensor:
        """Returns one-hot encoded types of nodes, float32 `[N, F]`. Those of several columns are concatenated,
        so that a linear map adds a vector for each."""
        sizes = (self.num_tags,) if isinstance(self.num_tags, int) else self.num_tags
        columns = tags.reshape(len(tags), -1).unbind(1)
        parts = [functional.one_hot(column, size) for column, size in zip(columns, sizes, strict=True)]
        return torch.cat(parts, 1).float()

    @classmethod
    def from_pyg(cls, dataset: Any) -> "GraphClassification":
        """Creates a dataset from PyTorch Geometric: a dataset or list of `Data`, each with one class `y`, or with
        numbers. Edges stay as they are there.

        The tags are the columns of ones in one-hot `x` (TUDataset), the integers in `x` [N, 1] (ZINC) or in all columns
        of `x` [N, F] (OGB), or 0 if there is no `x`.

        Raises:
            TypeError, ValueError: if `y` is neither one class nor numbers, or `x` holds no types of nodes.
        """
        items = list(dataset)
        one_hot = all(map(is_one_hot, items))  # one graph of integers may look so by chance
        graphs = tuple(
            SmallGraph(edges(data), node_types(data, one_hot), target(data), getattr(data, "edge_attr", None))
            for data in items
        )
        if not graphs:
            raise ValueError("the dataset has no graphs")
        kinds = {type(graph.label) if isinstance(graph.label, int) else graph.label.shape for graph in graphs}
        if len(kinds) > 1:
            raise ValueError(f"y must be of one kind for all graphs; got {' and '.join(sorted(map(str, kinds)))}")
        count = torch.cat([graph.tags for graph in graphs]).amax(0) + 1
        num_tags = int(count) if count.dim() == 0 else tuple(count.tolist())
        classes = max(int(graph.label) + 1 if isinstance(graph.label, int) else 0 for graph in graphs)
        return cls(graphs, num_tags, classes)


def tu(name: str) -> GraphClassification:
    """Loads MUTAG (188 molecules, mutagenic or not) or PROTEINS (1,113 proteins, enzymes or not).

    A link that the file lists for only one of its nodes counts in both directions, as in the reader of the GIN paper.
    MUTAG has 7 tags and PROTEINS 3. In the file of the GIN paper's authors, the first nine nodes of MUTAG's first graph
    have their numbers in place of their tags, which makes nine tags.

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
