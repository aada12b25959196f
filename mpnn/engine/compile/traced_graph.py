"""The stand-in for a graph while a program is traced."""

import operator
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpnn.graph import Graph
from mpnn.graph.exchange import LOCAL
from mpnn.graph.relations import Relation
from mpnn.graph.topology import Topology

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """Decorator: while a program is traced, the function runs immediately on real tensors, and its result is a constant
    of the program."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # torch.export's modes, which fake tensors
            return function(*arguments)

    return cast(F, torch.compiler.assume_constant_result(run))


_NO_DATA = SimpleNamespace(shift=0, positions=None, edge_attr=None, degrees=None, stack=())
"""The attributes of a graph that a topology, or a graph which is not built yet, has not."""


class TracedGraph:
    """The properties of a graph that are known while a program is traced: its sizes, which may be symbols, and its
    number.

    It replaces a `Graph` in specs and rounds. Edges of explicit graphs are available. Reading the edges of a
    structured graph specializes the program to its sizes.
    """

    def __init__(self, original: Topology | Graph | None, num_dst: int, num_src: int, device: torch.device) -> None:
        data: Any = original if isinstance(original, Graph) else _NO_DATA
        self.original: Any = original
        self.token: Any = None if original is None else original.token
        self.num_dst = num_dst
        self.num_src = num_src
        self.device = device
        self.base = num_dst, num_src
        self.recipe: tuple[Any, ...] = ()
        self.shift: int = original.memory if isinstance(original, Topology) else data.shift
        self.positions = data.positions
        self.edge_attr: Tensor | None = data.edge_attr
        self.degrees = data.degrees
        self.stack = data.stack

    # These methods read only attributes that a stand-in has, too.
    node_positions = Graph.node_positions
    edge_positions = Graph.edge_positions
    edge_type_rule: Relation | None = None  # looked up in the graph when sizes are known
    # parts of graphs are not traced
    exchange = LOCAL
    node_ids = None

    @property
    def relation(self) -> Relation | None:
        """The relation of the graph or topology."""
        return None if self.recipe else getattr(self.original, "relation", None)

    @property
    def is_explicit(self) -> bool:
        return isinstance(self.original, Graph) and self.original._edges is not None

    @property
    def edge_index(self) -> Tensor:
        return self._read("edge_index").to(self.device) if self._listed is None else self._listed

    @property
    def ends(self) -> Tensor:
        return self.edge_index

    stored_edges = ends

    @property
    def num_edges(self) -> int:
        return self._read("num_edges") if self._listed is None else self._listed.shape[1]

    @property
    def has_edge_types(self) -> bool:
        if not self.recipe and isinstance(self.original, Graph):
            return self.original.has_edge_types
        return self._read("has_edge_types")

    @property
    def _listed(self) -> Tensor | None:
        """The edges of a graph that lists them: an input of the program, whose number may differ in each call."""
        return self.original._edges if not self.recipe and isinstance(self.original, Graph) else None

    def _read(self, name: str) -> Any:
        """An attribute of the graph. The program is specialized to the sizes of a topology."""
        if self.recipe:
            return self.__getattr__(name)
        # `bound` needs no sizes for a Graph, and to read a symbol as a number would specialize the program for nothing.
        is_rule = isinstance(self.original, Topology)
        sizes = (operator.index(self.num_dst), operator.index(self.num_src)) if is_rule else (0, 0)
        return _attribute(self.original, *sizes, name)

    def derive(
        self, build: Callable[..., Graph], *arguments: Any, num_dst: int, num_src: int | None = None
    ) -> "TracedGraph":
        """As `Graph.derive`; runs when sizes are known."""
        graph = self._of_sizes(num_dst, self.num_src if num_src is None else num_src)
        graph.base = (self.num_dst, self.num_src)
        graph.recipe = (build, *arguments)
        return graph

    def _of_sizes(self, num_dst: int, num_src: int) -> "TracedGraph":
        return TracedGraph(self.original, num_dst, num_src, self.device)

    def cached(self, key: Any, build: Callable[[], Any]) -> Any:
        """Calls `build`: compiled programs do not cache values on graphs."""
        return build()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a graph is not known while torch.compile traces; known are num_dst, num_src, shift, "
            "positions, device, edge_attr, edge_index, num_edges, has_edge_types. Compute it outside, or leave this "
            "layer uncompiled"
        )


class Built(TracedGraph):
    """A graph that the program builds when it runs. `token`, a tensor of the program, is its number."""

    def __init__(self, token: Tensor, num_dst: int, num_src: int, device: torch.device) -> None:
        super().__init__(None, num_dst, num_src, device)
        self.token = token


class EdgeListGraph(Built):
    """A graph whose edges are an input of an exported program: `token` is its `edge_index`, int64 [2, E]."""

    def __init__(self, edges: Tensor, num_dst: int, num_src: int, edge_attr: Tensor | None = None) -> None:
        super().__init__(edges, num_dst, num_src, edges.device)
        self.edge_attr = edge_attr

    @property
    def _listed(self) -> Tensor | None:
        return None if self.recipe else self.token

    @property
    def has_edge_types(self) -> bool:
        return False

    def _of_sizes(self, num_dst: int, num_src: int) -> TracedGraph:
        return EdgeListGraph(self.token, num_dst, num_src)


def traced_graph(graph: Topology | Graph | TracedGraph, num_dst: int, num_src: int, device: torch.device) -> Graph:
    """A stand-in for a graph of this size in a traced program."""
    return cast(Graph, graph if isinstance(graph, TracedGraph) else TracedGraph(graph, num_dst, num_src, device))


def bound(graph: Topology | Graph, num_dst: int, num_src: int) -> Graph:
    """The graph, or the topology bound to these sizes."""
    return graph.bind(num_dst, num_src) if isinstance(graph, Topology) else graph


@constant
def build_once(build: Callable[..., Any], *arguments: Any) -> Any:
    """`build(*arguments)`, computed once per program."""
    return build(*arguments)


@constant
def _attribute(graph: Topology | Graph, num_dst: int, num_src: int, name: str) -> Any:
    return getattr(bound(graph, num_dst, num_src), name)
