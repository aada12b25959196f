"""Parts of nodes that attend within themselves: packed texts, documents, the items of a batch, windows of an image.

nodes     0 1 2 3 4 5 6 7          lengths 3, 5: one part after the other; `order` is None
parts     a a a b b b b b
nodes     0 1 2 3 4 5 6 7          lengths 4, 4 and the order 0 2 4 6 1 3 5 7
parts     a b a b a b a b
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = ["Parts"]

Ints = NDArray[np.int64]


class Parts:
    """Parts of nodes, each of which receives from its own nodes only: from all of them, or from those up to itself.

    Args:
        lengths: the number of nodes of each part, int64 [P], none of them 0.
        is_causal: each node receives from the nodes of its part up to itself. Parts of one node are of both kinds.
        order: the nodes part by part, int64 [N]; None if each part follows the one before.
        keys: the first source of each part, counted from its first node, and the number of its sources, int64 [P] each;
            None if they are all of its nodes. Other nodes are padding, which is received by none.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        is_causal: bool = False,
        order: Ints | None = None,
        keys: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        self.lengths: Ints = np.asarray(lengths, np.int64)
        self.is_causal = is_causal
        self.order = order
        self.keys = keys
        self.count = len(self.lengths)
        self.num_nodes = int(self.lengths.sum())

    @staticmethod
    def of_labels(labels: Ints) -> "Parts":
        """The parts of nodes with the same label, int64 [N]."""
        lengths = np.unique(labels, return_counts=True)[1]
        alone = len(lengths) == len(labels)
        in_order = alone or bool((np.diff(labels) >= 0).all())
        return Parts(lengths, is_causal=alone, order=None if in_order else np.argsort(labels, kind="stable"))

    @staticmethod
    def of_rows(start: Ints, stop: Ints) -> "Parts | None":
        """The parts of a graph in which node i receives from the nodes `start[i]` to `stop[i]`, int64 [N] each; None if
        it does not fall into complete or causal parts."""
        node = np.arange(len(start))
        begins = start == node
        if not (begins[:1].all() and (begins[1:] | (start[1:] == start[:-1])).all()):
            return None
        first = np.flatnonzero(begins)
        lengths = np.diff(first, append=len(start))
        is_causal = bool((stop == node + 1).all())
        is_complete = is_causal or bool((stop == np.repeat(first + lengths, lengths)).all())
        return Parts(lengths, is_causal) if is_complete else None

    @property
    def is_complete(self) -> bool:
        """Whether each node receives from all nodes of its part."""
        return not self.is_causal or int(self.lengths.max(initial=0)) <= 1

    @property
    def num_edges(self) -> int:
        pairs = self.lengths**2
        return int(((pairs + self.lengths) // 2 if self.is_causal else pairs).sum())

    @cached_property
    def sizes(self) -> tuple[Ints, Ints]:
        """The distinct lengths, ascending, and the number of parts of each."""
        sizes, counts = np.unique(self.lengths, return_counts=True)
        return sizes, counts

    @cached_property
    def labels(self) -> Ints:
        """The number of each node's part, int64 [N]."""
        numbers = np.repeat(np.arange(self.count), self.lengths)
        if self.order is None:
            return numbers
        labels = np.empty_like(numbers)
        labels[self.order] = numbers
        return labels

    @property
    def members(self) -> list[Ints]:
        """The nodes of the parts, an array [number of parts, size] for each of `sizes`."""
        nodes = np.arange(self.num_nodes) if self.order is None else self.order
        size = np.repeat(self.lengths, self.lengths)
        return [nodes[size == n].reshape(-1, n) for n in self.sizes[0]]

    def repeated(self, count: int) -> "Parts":
        """The parts of `count` items of a batch, one after the other; their nodes must be in order."""
        assert self.order is None
        return Parts(np.tile(self.lengths, count), self.is_causal)

    @cached_property
    def table(self) -> Ints:
        """Returns the numbers of each part for kernels: its first node, its length, its first source and the number of
        its sources, int64 [P, 4].

        Raises:
            ValueError: if a part has no sources, or sources that are not among its nodes.
        """
        first = np.cumsum(self.lengths) - self.lengths
        keys = (np.zeros_like(first), self.lengths) if self.keys is None else self.keys
        table = np.stack([first, self.lengths, *(np.asarray(x, np.int64) for x in keys)], 1)
        if (table[:, 2:].sum(1) > self.lengths).any():
            raise ValueError("the keys of a part must be among its nodes")
        if (table[:, 3] < 1).any():
            raise ValueError("a part must have at least one key")
        return table

    @cached_property
    def address(self) -> int:
        """Where `table` lies in memory."""
        return int(self.table.ctypes.data)
