"""mpnn: message passing where transformers are graphs.

A network layer is one round of message passing over a graph, and the choice of graph is the choice of model:

    MessagePassing(graph, aggregate, update, attention)
"""

import sys
from importlib import import_module
from os.path import basename, splitext
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "MessagePassing",
    "Plan",
    "Topology",
    "aggregate",
    "attention",
    "backends",
    "encodings",
    "explain",
    "graphs",
    "models",
    "ops",
    "position",
    "update",
]


_HOMES = {
    "Graph": "graph",
    "MessagePassing": "message_passing",
    "Plan": "engine.plan",
    "Topology": "graph.topology",
    "explain": "engine.plan",
}


def _is_command() -> bool:
    """Whether this process is the command `mpnn` or `python -m mpnn`."""
    program = (getattr(sys, "argv", None) or [""])[0]
    return splitext(basename(program))[0] == "mpnn" or (program == "-m" and "mpnn" in sys.orig_argv)


if TYPE_CHECKING:
    from mpnn import models
if TYPE_CHECKING or not _is_command():  # `mpnn --help` does not wait for torch
    from mpnn import aggregate, attention, backends, encodings, graphs, ops, position, update
    from mpnn.engine import compile as compile  # registers torch.ops.mpnn, which saved programs call
    from mpnn.engine.plan import Plan, explain
    from mpnn.graph import Graph
    from mpnn.graph.topology import Topology
    from mpnn.message_passing import MessagePassing


def __getattr__(name: str) -> Any:
    """Names imported when they are first used: `models`, whose hundred files take as long as everything else here, and
    all names in the process of the command."""
    if name in _HOMES:
        return getattr(import_module(f"mpnn.{_HOMES[name]}"), name)
    if name in __all__:
        return import_module(f"mpnn.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
