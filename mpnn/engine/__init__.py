"""The engine: plans each round once, and runs it on the chosen backend, eagerly or in a traced program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.topology import Topology
from mpnn.round import Round

if TYPE_CHECKING:
    from mpnn.engine import steps

T = TypeVar("T")
_listeners: list[Callable[[Round, str], None]] = []
_unheard: list[int] = []  # threads
layer_listeners: list[Callable[[nn.Module, Tensor], None]] = []
"""Called with each layer of another library that one compiled call computes in place, and its features."""


@contextmanager
def listening(
    listener: Callable[[Round, str], None], of_layers: Callable[[nn.Module, Tensor], None] | None = None
) -> Iterator[None]:
    """Calls `listener(round, backend)` before each round that `run` runs in the block, in any thread, and
    `of_layers(layer, x)` before each layer of another library that one compiled call computes."""
    _listeners.append(listener)
    layers = [] if of_layers is None else [of_layers]
    layer_listeners.extend(layers)
    try:
        yield
    finally:
        _listeners.remove(listener)
        for each in layers:
            layer_listeners.remove(each)


@contextmanager
def unheard() -> Iterator[None]:
    """Keeps the rounds that this thread runs in the block from listeners: a kernel is tried."""
    thread = get_ident()
    _unheard.append(thread)
    try:
        yield
    finally:
        _unheard.remove(thread)


def run(round: Round, backend: str = "auto") -> tuple[Tensor, Tensor | None]:
    """Validates, plans and runs a round.

    The dtype of the features decides the arithmetic. Autocast acts on linear maps, and not on rounds.

    Args:
        backend: "auto", or the name of a backend. A named backend runs, or raises an error that states the reason.

    Returns:
        out [..., N_dst, H, D], and the other results that the round asks for: the weights [..., E, H], the lse [...,
        N_dst, H], the state [..., H, D, D_v], or None.

    Raises:
        ValueError, TypeError: the parts of the round do not fit together, or no backend (or not the named one) serves
            all its needs.
    """
    if torch.compiler.is_compiling():
        from mpnn.engine.compile.operator import run as traced  # imports torch's compiler, which takes a second

        return traced(round, backend)
    for listener in _listeners:
        if get_ident() not in _unheard:
            listener(round, backend)
    if "steps" not in globals():
        # It imports all backends, a third of this library, and becomes an attribute of this package.
        import_module("mpnn.engine.steps")
    out, weights, lse, state = steps.run(round, backend)
    return out, weights if lse is None and state is None else lse if state is None else state


def traced_graph(graph: Topology | Graph, num_dst: int, num_src: int, device: torch.device) -> Graph:
    """Returns a stand-in for a graph of this size in a program that `torch.compile` traces."""
    from mpnn.engine.compile.traced_graph import traced_graph

    return traced_graph(graph, num_dst, num_src, device)


def listed(edges: Tensor, num_dst: int, num_src: int, edge_attr: Tensor | None) -> Any:
    """Returns a stand-in for a graph whose edges are an input of a program that `torch.export` traces."""
    from mpnn.engine.compile.traced_graph import EdgeListGraph

    return EdgeListGraph(edges, num_dst, num_src, edge_attr)


FUNCTIONS["listed"] = listed


def build_once(build: Callable[..., T], *arguments: Any) -> T:
    """Returns `build(*arguments)`, as a constant of the program that `torch.compile` traces. A model uses this to build
    topologies that depend on the size of its input."""
    if torch.compiler.is_compiling():
        from mpnn.engine.compile.traced_graph import build_once

        return build_once(build, *arguments)
    return build(*arguments)
