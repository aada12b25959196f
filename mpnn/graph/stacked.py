"""StackedGraph: graphs of one size, one for each item of a batch and each head.

Edges that are chosen by content differ by item and head (MoBA, DeepSeek's sparse attention, Reformer). The rows of all
graphs are stored as those of one graph, `flat`, whose destinations are the nodes of the first graph, then those of the
second, and whose sources are those of any of them: no edge can lead from one graph to another. Set algebra works row by
row, so it is that of `flat`. The engine runs a round over a stacked graph as one over `folded`, in which the sources
are numbered graph by graph, too (`mpnn.engine.rewrites.fold_stacked`).

It is no `Graph`, which is one set of edges: `entry` returns those of an item and a head.
"""

import operator
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph.bound import BoundGraph, Values
from mpnn.graph.data import structured
from mpnn.graph.graph import Graph, common, refuse_loss
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.runs import Runs, check_same_size

_SHARED = frozenset({"relation", "shift", "positions"})  # by all graphs of a stack


class StackedGraph(BoundGraph):
    """Graphs of `num_dst` destinations and `num_src` sources: one for each item of a batch, and each head.

    Args:
        flat: the rows of all graphs, one after the other: [items * heads * num_dst] x num_src, without data of edges.
        stack: (items,), (items, heads) or (1, heads). One item: all entries of a batch share the graph.
        shared: `relation`, `shift` and `positions` of each graph.
    """

    is_explicit = False  # not in the order of one list of edges

    def __init__(self, flat: Graph, stack: tuple[int, ...], **shared: Any) -> None:
        count = prod(stack)
        if not 1 <= len(stack) <= 2 or count < 1 or flat.num_dst % count:
            raise ValueError(f"stack must be (items,) or (items, heads), which divide {flat.num_dst} rows; got {stack}")
        if flat.has_edge_types or flat.edge_attr is not None:
            raise ValueError(f"graphs that differ by item and head cannot have data of edges; {flat} has")
        self.flat = flat
        self.stack = stack
        self.name = flat.name
        self.num_dst = flat.num_dst // count
        self.num_src = flat.num_src
        self.device = flat.device
        self.shift = shared.get("shift", 0)
        self.relation, self.positions = shared.get("relation"), shared.get("positions")
        self.edge_attr = self.degrees = self.node_ids = None
        self._memo = Values()
        self._of_users = Values()
        self._moved = {}

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} is not known of graphs that differ by item and head; `entry(item, head)` of it is one of them"
        )

    @property
    def items(self) -> int:
        return self.stack[0]

    @property
    def heads(self) -> int:
        return self.stack[1] if len(self.stack) == 2 else 1

    @property
    def num_edges(self) -> int:
        """The number of edges of all graphs."""
        return self.flat.num_edges

    def entry(self, item: int, head: int = 0) -> Graph:
        """The graph of an item and a head."""
        if not (0 <= item < self.items and 0 <= head < self.heads):
            raise IndexError(f"there are {self.items} items and {self.heads} heads; got {item} and {head}")
        first = (item * self.heads + head) * self.num_dst
        graph = self.flat.rows(first, first + self.num_dst)
        graph.shift = self.shift
        graph.relation = self.relation
        graph.positions = self.positions
        return graph

    def dense(self) -> Tensor:
        """The adjacencies, bool [..., num_dst, num_src], after the dimensions of `stack`."""
        return self.flat.dense().view(*self.stack, self.num_dst, self.num_src)

    def degree(self) -> Tensor:
        """The in-degrees, int64 [..., num_dst], after the dimensions of `stack`."""
        return self.flat.degree().view(*self.stack, self.num_dst)

    def validate(self) -> "StackedGraph":
        self.flat.validate()
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "StackedGraph":
        flat = self.flat.to(device, non_blocking)
        return self if flat is self.flat else self.cached(("to", flat.device), lambda: self._moved_with(flat))

    def _moved_with(self, flat: Graph) -> "StackedGraph":
        positions = self.positions and (self.positions[0].to(flat.device), self.positions[1].to(flat.device))
        return StackedGraph(flat, self.stack, relation=self.relation, shift=self.shift, positions=positions)

    def __or__(self, other: BoundGraph) -> "StackedGraph":
        return self._merged("|", operator.or_, other)

    def __and__(self, other: BoundGraph) -> "StackedGraph":
        return self._merged("&", operator.and_, other)

    def __sub__(self, other: BoundGraph) -> "StackedGraph":
        return self._merged("-", operator.sub, other)

    __ror__ = __or__
    __rand__ = __and__

    def __rsub__(self, other: BoundGraph) -> "StackedGraph":
        return self._merged("-", lambda mine, theirs: theirs - mine, other)

    def __invert__(self) -> "StackedGraph":
        return StackedGraph(~self.flat, self.stack, shift=self.shift, positions=self.positions)

    def _merged(self, symbol: str, merge: Callable[[Any, Any], Graph], other: BoundGraph) -> "StackedGraph":
        if not isinstance(other, (Graph, StackedGraph)):
            return NotImplemented
        check_same_size(self, other)
        if other.stack and other.stack != self.stack:
            raise ValueError(
                f"`{symbol}` needs graphs for the same items and heads; got {self.stack} and {other.stack}"
            )
        if isinstance(other, StackedGraph):
            flat = other.flat
        else:
            refuse_loss(symbol, other)
            flat = repeated(other, prod(self.stack))
        return StackedGraph(merge(self.flat, flat), self.stack, **common(symbol, self, other))

    def folded(self, source_heads: int) -> Graph:
        """The graph of [items * heads * num_dst] x [items * source_heads * num_src] nodes.

        Groups of heads share their sources if `source_heads` is less than `heads`, which it divides.
        """
        return self.cached(("folded", source_heads), lambda: self._folded(source_heads))

    def _folded(self, source_heads: int) -> Graph:
        head = np.arange(self.heads) * source_heads // self.heads
        block = np.arange(self.items)[:, None] * source_heads + head
        first = np.repeat(block.reshape(-1) * self.num_src, self.num_dst)
        num_src = self.items * source_heads * self.num_src
        if self.flat.is_explicit:
            src, dst = self.flat.ends
            src = src + torch.from_numpy(first).to(self.device)[dst]
            graph = Graph.from_edges(torch.stack([src, dst]), self.flat.num_dst, num_src)
        else:
            runs = self.flat.runs
            base = np.repeat(first, np.diff(runs.ptr))
            runs = Runs(runs.num_dst, num_src, runs.ptr, runs.start + base, runs.stop + base)
            graph = structured(self.flat, runs)
        graph.name = f"{self.items} x {self.heads} graphs"
        return graph

    def __repr__(self) -> str:
        size = f"{self.num_dst:,} x {self.num_src:,}"
        return f"StackedGraph({self.items} x {self.heads} graphs of {size}, {self.num_edges:,} edges)"

    def _repr_html_(self) -> str:
        text: str = FUNCTIONS["html"](self)
        return text

    def __getstate__(self) -> dict[str, Any]:
        return {"flat": self.flat, "stack": self.stack, **{name: getattr(self, name) for name in sorted(_SHARED)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Raises ValueError unless the state is that of a stacked graph; `flat` validates itself."""
        is_state = isinstance(state, dict) and state.keys() == {"flat", "stack", *_SHARED}
        if not is_state or type(state["flat"]) is not Graph or type(state["stack"]) is not tuple:
            raise ValueError("a pickle holds a damaged graph; save the graph again")
        self.__init__(**state)  # type: ignore[misc]
        self.entry(0).__getstate__()  # checks what is shared


def repeated(graph: Graph, times: int) -> Graph:
    """The rows of a graph, repeated, over the same sources."""
    rows = np.tile(np.arange(graph.num_dst), times)
    return graph.cached(("repeated", times), lambda: Graph.from_runs(graph.runs.take(rows)).to(graph.device))


def by_edge_type(graph: Graph, heads: int) -> StackedGraph:
    """For each head, the edges whose type is its number. Repeated edges stay.

    Raises:
        ValueError: if there are more edge types than heads.
    """
    if graph.num_edge_types > heads:
        raise ValueError(
            f"edge types are head numbers, so there can be at most {heads}; the graph has {graph.num_edge_types}"
        )
    src, dst = graph.ends
    flat = Graph.from_edges(torch.stack([src, dst + graph.types * graph.num_dst]), graph.num_dst * heads, graph.num_src)
    return StackedGraph(flat, (1, heads), shift=graph.shift, positions=graph.positions)
