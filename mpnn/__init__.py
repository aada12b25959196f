"""mpnn: message passing where transformers are graphs.

A network layer is one round of message passing over a graph, and the choice of graph is the choice of model:

    MessagePassing(graph, aggregate, update, attention)
"""

from mpnn import aggregate, attention, encodings, graphs, models, ops, position, update
from mpnn import compiled as compiled  # registers torch.ops.mpnn, which saved programs call
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.plan import Plan, explain
from mpnn.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "MessagePassing",
    "Plan",
    "Topology",
    "aggregate",
    "attention",
    "encodings",
    "explain",
    "graphs",
    "models",
    "ops",
    "position",
    "update",
]
