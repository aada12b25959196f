"""What stands for a graph while a program is traced."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from mpnn.graph import Graph
from mpnn.relation import Relation
from mpnn.topology import Topology

F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """A decorator: while a program is traced, the function runs at once, on real tensors, and its result is a constant
    of the program."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():  # those of torch.export, which fake tensors
            return function(*arguments)

    return cast(F, torch.compiler.assume_constant_result(run))


class Outline:
    """What is known of a graph while a program is traced: its sizes, which may be symbols, and its number.

    It takes a `Graph`'s place in specs and requests. The edges of explicit graphs are there too; those of structured
    ones only at sizes that the program is then compiled for.
    """

    def __init__(self, given: Topology | Graph, num_dst: int, num_src: int, device: torch.device) -> None:
        self.given, self.token = given, given.token
        self.num_dst, self.num_src, self.device = num_dst, num_src, device
        self.base = num_dst, num_src
        self.recipe: tuple[Any, ...] = ()
        self.shift: int = given.memory if isinstance(given, Topology) else given.shift
        self.places = None if isinstance(given, Topology) else given.places
        self.edge_attr: Tensor | None = None if isinstance(given, Topology) else given.edge_attr

    where, ends = Graph.where, Graph.ends
    class_rule: Relation | None = None  # looked up in the graph itself, when sizes are known

    @property
    def relation(self) -> Relation | None:
        """The rule of classes that the graph or the topology was given with."""
        return None if self.recipe else getattr(self.given, "relation", None)

    @property
    def is_explicit(self) -> bool:
        return isinstance(self.given, Graph) and self.given._edges is not None

    @property
    def edge_index(self) -> Tensor:
        if self.recipe:
            return self.__getattr__("edge_index")
        if isinstance(self.given, Graph) and self.given._edges is not None:
            return self.given._edges
        size = operator.index(self.num_dst), operator.index(self.num_src)
        return _edges(self.given, *size).to(self.device)

    @property
    def num_edges(self) -> int:
        if self.recipe:
            return self.__getattr__("num_edges")
        if isinstance(self.given, Graph) and self.given._edges is not None:
            return self.given._edges.shape[1]
        return _number_of_edges(self.given, operator.index(self.num_dst), operator.index(self.num_src))

    @property
    def has_classes(self) -> bool:
        if self.recipe:
            return self.__getattr__("has_classes")
        if isinstance(self.given, Graph):
            return self.given.has_classes
        return _has_classes(self.given, operator.index(self.num_dst), operator.index(self.num_src))

    def derived(
        self, build: Callable[..., Graph], *arguments: Any, num_dst: int, num_src: int | None = None
    ) -> Outline:
        """As `Graph.derived`; made when sizes are known."""
        graph = Outline(self.given, num_dst, self.num_src if num_src is None else num_src, self.device)
        graph.base, graph.recipe = (self.num_dst, self.num_src), (build, *arguments)
        return graph

    def memo(self, key: Any, build: Callable[[], Any]) -> Any:
        """Compiled programs compute anew what graphs remember."""
        return build()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of a graph is not known while torch.compile traces; known are num_dst, num_src, shift, places, "
            "device, edge_attr, edge_index, num_edges, has_classes. Compute it outside, or leave this layer uncompiled"
        )


def outline(given: Topology | Graph | Outline, num_dst: int, num_src: int, device: torch.device) -> Graph:
    """What stands for a graph of this size in a program that is traced."""
    return cast(Graph, given if isinstance(given, Outline) else Outline(given, num_dst, num_src, device))


def bound(given: Topology | Graph, num_dst: int, num_src: int) -> Graph:
    """The graph itself, when sizes are known."""
    return given.bind(num_dst, num_src) if isinstance(given, Topology) else given


@constant
def built(build: Callable[..., Any], *arguments: Any) -> Any:
    """`build(*arguments)`, once for the program."""
    return build(*arguments)


@constant
def _number_of_edges(given: Topology | Graph, num_dst: int, num_src: int) -> int:
    return bound(given, num_dst, num_src).num_edges


@constant
def _has_classes(given: Topology, num_dst: int, num_src: int) -> bool:
    return given.bind(num_dst, num_src).has_classes


@constant
def _edges(given: Topology | Graph, num_dst: int, num_src: int) -> Tensor:
    return bound(given, num_dst, num_src).edge_index
