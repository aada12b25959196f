"""Which part of a graph this process computes, if several processes share the work.

`mpnn.distributed.sharded` says so here, and the operator asks. Without it every process computes whole graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpnn.graph.graph import Graph
    from mpnn.graph.topology import Topology


class Layer(NamedTuple):
    """What decides which transports can serve a round, and what all processes must have alike."""

    attention: Any
    aggregate: Any
    return_weights: bool
    mixes_values: bool  # by hops or teleport
    drops_edges: bool
    dtype: torch.dtype | None = None
    batch: tuple[int, ...] = ()


class Exchange:
    """The transport of a round: how a process that has some of the nodes gets what it needs of the others. A subclass
    overrides what differs from a process that needs nothing. Attentions and rounds are objects of the operator,
    of which graphs know nothing.

    Attributes:
        transport: its name.
        rows: the numbers of destinations and of sources whose features the process has.
        own: which sources of the graph are the process's own nodes, int64.
        received: the bytes that have arrived so far from other processes, in forward passes.
    """

    transport = "halo"
    rows: tuple[int, int]
    own: Tensor
    received = 0

    def refusal(self, layer: Layer) -> str | None:
        """Why it cannot serve a layer, or None if it can."""
        return None

    def __call__(self, x: Tensor, dim: int = -2) -> Tensor:
        """x with the own nodes along `dim` -> the same with all sources of the graph along it."""
        return x

    def rounds(
        self, attention: Any, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None
    ) -> tuple[Any, ...]:
        """The rounds of an attention that this process runs, for features of the own nodes."""
        return (attention(dst, self(src), graph, edge_attr),)

    def run(self, rounds: tuple[Any, ...], run: Callable[[Any], Any]) -> tuple[Tensor, Tensor | None]:
        """The result for the own destinations, [..., own, H, D], and weights if they are returned; `run` runs a round
        on this process."""
        return run(rounds[0])


LOCAL = Exchange()
"""The exchange of a whole graph, which does nothing."""


class Sharding(Protocol):
    """How the nodes of graphs are divided over processes."""

    def part(self, graph: Topology | Graph, num_dst: int, num_src: int, layer: Layer | None = None) -> Graph:
        """This process's part of a graph, where it has `num_dst` destinations and `num_src` sources. `layer`: what it
        is for, if that is known."""
        ...

    def numbers(self, count: int) -> Tensor:
        """The numbers, in the whole graph, of this process's `count` nodes: int64 [count], ascending."""
        ...


_active: list[Sharding] = []


def active() -> Sharding | None:
    """The sharding of the innermost `mpnn.distributed.sharded`, or None."""
    return _active[-1] if _active else None


def enter(sharding: Sharding) -> None:
    """Begins a sharding. It is of the process, not of a thread: the backward pass may run in threads of its own."""
    _active.append(sharding)


def leave() -> None:
    """Ends the innermost sharding."""
    _active.pop()


def bind(graph: Topology | Graph, num_dst: int, num_src: int) -> Graph:
    """The graph of a call with so many destinations and sources: bound, and this process's part while sharded."""
    whole = getattr(graph, "exchange", LOCAL) is LOCAL
    if whole and (sharding := active()) is not None:
        return sharding.part(graph, num_dst, num_src)
    return graph.bind(num_dst, num_src) if hasattr(graph, "bind") else graph


def node_numbers(count: int, device: torch.device | None = None) -> Tensor:
    """The numbers of `count` nodes in a row, int64 [count]: from 0, or those of this process's nodes while sharded."""
    sharding = active()
    return torch.arange(count, device=device) if sharding is None else sharding.numbers(count).to(device)
