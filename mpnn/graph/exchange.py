"""Exchanges: how a process that computes some rows of a graph gets what it needs of the others."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Terms = tuple[Tensor, Tensor, Tensor]
"""Queries [..., N_dst, H, D], keys and values [..., N_src, H_kv, D] of an attention, each of one node."""


class AttendCall(NamedTuple):
    """The sizes and options of a call of `ops.attend`, which takes the place of the attention of an operator."""

    heads: int
    kv_heads: int
    head_dim: int
    normalize: str
    sinks: Tensor | None
    depends_on: str = "node"


class Layer(NamedTuple):
    """The facts that decide which transports serve a round, and that all processes must have alike."""

    attention: Any
    aggregate: Any
    return_weights: bool
    mixes_values: bool  # by hops or teleport
    drops_edges: bool
    dtype: torch.dtype | None = None
    batch: tuple[int, ...] = ()
    module: Any = None  # whose weights all processes must have alike


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

    def rounds(self, attention: Any, dst: Tensor, src: Tensor, graph: Any, edge_attr: Tensor | None) -> tuple[Any, ...]:
        """The rounds of an attention that this process runs, for features of the own nodes."""
        return (attention(dst, src, graph, edge_attr),)

    def terms(self, terms: Terms, round: Callable[..., Any], graph: Any) -> tuple[Any, ...]:
        """The rounds of this process, for terms of its own nodes. `round(query, key, value, graph)` builds one."""
        return (round(*terms, graph),)

    def run(self, rounds: tuple[Any, ...], run: Callable[[Any], Any]) -> tuple[Tensor, Tensor | None]:
        """The result for the own destinations, [..., own, H, D], and weights if they are returned; `run` runs a round
        on this process."""
        return run(rounds[0])


LOCAL = Exchange()
"""The exchange of a whole graph, which does nothing."""
