"""The engine: plans each round once, and runs it on the chosen backend, eagerly or in a traced program."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mpnn.engine.listeners import listening, unheard
from mpnn.graph import Graph
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.topology import Topology

if TYPE_CHECKING:
    from mpnn.engine.steps import run as run

__all__ = ["build_once", "listed", "listening", "run", "traced_graph", "unheard"]

T = TypeVar("T")


def __getattr__(name: str) -> Any:
    """`run` is `steps.run`, which imports all backends, a third of this library, where it is first needed."""
    if name != "run":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()["run"] = import_module("mpnn.engine.steps").run
    return found


def _run_in_program(round: Any, backend: str) -> Any:
    from mpnn.engine.compile.operator import run  # imports torch's compiler, which takes a second

    return run(round, backend)


FUNCTIONS["run in a program"] = _run_in_program


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
