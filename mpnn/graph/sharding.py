"""Which part of a graph this process computes, if several processes share the work.

`mpnn.distributed.sharded` says so here, and the operator asks. Without it every process computes whole graphs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graph.exchange import LOCAL, Layer
from mpnn.graph.topology import Topology


class Sharding(Protocol):
    """How the nodes of graphs are divided over processes, of which this is the one of number `rank`."""

    rank: int
    ranks: int

    def part(self, graph: Topology | Graph, num_dst: int, num_src: int, layer: Layer | None = None) -> Graph:
        """This process's part of a graph, where it has `num_dst` destinations and `num_src` sources. `layer`: what it
        is for, if that is known."""

    def numbers(self, count: int) -> Tensor:
        """The numbers, in the whole graph, of this process's `count` nodes: int64 [count], ascending."""

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """x of this process's nodes along `dim` -> that of all nodes, in the order of the whole graph, without
        gradient."""

    def split(self, total: int) -> list[Tensor]:
        """Returns the node numbers of each process: int64, ascending; `total` of them in all processes."""

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every process, of the same shape and dtype, [ranks, *x.shape], without gradient."""

    def broadcast(self, x: Tensor, rank: int) -> Tensor:
        """x of one process, which has the same shape and dtype on all, without gradient."""

    def run_in_rank_order(self, count: int, run: Callable[[Tensor], tuple[Tensor, Tensor]], first: Tensor) -> Tensor:
        """The output of a recurrence `run(state) -> (output, state)` over this process's `count` nodes, from the state
        that the process before it ends with, or `first`."""

    def check(self, module: nn.Module) -> None:
        """Raises ValueError on every process unless all have the same weights."""


ACTIVE: list[Sharding | None] = []
"""The shardings that are in use, the innermost last."""


def active() -> Sharding | None:
    """The sharding of the innermost `mpnn.distributed.sharded`, or None."""
    return ACTIVE[-1] if ACTIVE else None


@contextmanager
def use(sharding: Sharding | None) -> Iterator[None]:
    """Makes a sharding, or none, the active one, of the process and not of a thread: the backward pass may run in
    threads of its own."""
    ACTIVE.append(sharding)
    try:
        yield
    finally:
        ACTIVE.pop()


def bind(graph: Topology | Graph, num_dst: int, num_src: int) -> Graph:
    """The graph of a call with this many destinations and sources: bound, and this process's part while sharded."""
    whole = getattr(graph, "exchange", LOCAL) is LOCAL
    if whole and (sharding := active()) is not None:
        return sharding.part(graph, num_dst, num_src)
    return graph.bind(num_dst, num_src) if hasattr(graph, "bind") else graph


def node_numbers(count: int, device: torch.device | None = None) -> Tensor:
    """The numbers of `count` nodes in a row, int64 [count]: from 0, or those of this process's nodes while sharded."""
    sharding = active()
    return torch.arange(count, device=device) if sharding is None else sharding.numbers(count).to(device)
