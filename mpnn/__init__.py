"""mpnn: message passing where transformers are graphs.

A network layer is one round of message passing over a graph, and the choice of graph is the choice of model:

    MessagePassing(graph, aggregate, update, attention)

Graphs are imported with the package, every other name when it is first used: `mpnn.ops` is the module `mpnn/ops.py`.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from mpnn import graphs  # says which classes torch.load may read
from mpnn.engine import compile as compile  # registers torch.ops.mpnn, which saved programs call
from mpnn.graph import Graph
from mpnn.graph.registry import FUNCTIONS

__version__ = "0.1.0"

__all__ = [
    "Graph",
    "MessagePassing",
    "Plan",
    "Topology",
    "aggregate",
    "attention",
    "backends",
    "deterministic_batches",
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
    "deterministic_batches": "graph.batches",
    "explain": "engine.plan",
}
_MODULES = {"encodings": "graphs.encodings", "plot": "view.plot"}


def _html(*arguments: Any) -> str:
    from mpnn.graph import html

    return html.of_graph(*arguments)


def _plot(*arguments: Any, **options: Any) -> Any:
    from mpnn.view import plot

    return plot.adjacency(*arguments, **options)


if TYPE_CHECKING:
    from mpnn import aggregate, attention, backends, models, ops, position, update
    from mpnn.engine.plan import Plan, explain
    from mpnn.graph.batches import deterministic_batches
    from mpnn.graph.topology import Topology
    from mpnn.graphs import encodings
    from mpnn.message_passing import MessagePassing
    from mpnn.view import plot as plot

FUNCTIONS.update(html=_html, plot=_plot)


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if not TYPE_CHECKING:  # a type checker would take any name for one of this module

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            value = globals()[name] = getattr(import_module(f"mpnn.{_HOMES[name]}"), name)
            return value
        home = _MODULES.get(name, name)
        if name.startswith("_") or find_spec(f"mpnn.{home}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return import_module(f"mpnn.{home}")
