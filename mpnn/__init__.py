"""mpnn: message passing where transformers are graphs.

A network layer is one round of message passing over a graph, and the choice of graph is the choice of model:

    MessagePassing(graph, aggregate, update, attention)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.serialization import add_safe_globals

from mpnn import aggregate, attention, backends, encodings, graphs, ops, position, update
from mpnn.engine import compile as compile  # registers torch.ops.mpnn, which saved programs call
from mpnn.engine.plan import Plan, explain
from mpnn.graph import Graph
from mpnn.graph.relations import Flipped, GridOffset, Offset, Table, Taps
from mpnn.graph.runs import Runs
from mpnn.graph.topology import Topology
from mpnn.message_passing import MessagePassing

if TYPE_CHECKING:
    from mpnn import models

__version__ = "0.1.0"

# What pickles of topologies and graphs name. Each checks what it reads, so `torch.load(weights_only=True)` may call it.
add_safe_globals([graphs.parse, Graph, Runs, Offset, GridOffset, Taps, Flipped, Table])

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


def __getattr__(name: str) -> Any:
    """`mpnn.models`, imported when it is first used: its hundred files take as long as everything else here."""
    if name == "models":
        return import_module("mpnn.models")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
