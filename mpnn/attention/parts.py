"""The parts of an operator and the arguments of its call: what each may be, and the sentence for what it may not be."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mpnn.aggregate import PNA, aggregator
from mpnn.attention.recurrent import Recurrent
from mpnn.attention.spec import Attention
from mpnn.graph import Graph
from mpnn.graph.bound import BoundGraph
from mpnn.graph.exchange import Exchange, Layer
from mpnn.graph.topology import Topology
from mpnn.round import validation
from mpnn.update import EdgeUpdate, Update, as_update


def check_divisible(layer: Layer, exchange: Exchange) -> None:
    """Raises ValueError if a layer needs more of a graph than this process's part."""
    attention = layer.attention
    aggregate = layer.aggregate
    if isinstance(attention, Recurrent):
        raise ValueError(
            f"{type(attention).__name__} passes a state from node to node, and its nodes are not divided over processes"
        )
    if attention is not None and attention.depends_on == "graph":
        raise ValueError(
            f"{type(attention).__name__} does not state what its features depend on, so its nodes are not divided over "
            'processes; if those of a node depend on that node only, write depends_on = "node" in the class'
        )
    validation.transport(exchange, layer)
    if isinstance(aggregate, PNA) and aggregate.average_log_degree is None:
        raise ValueError(
            f"{type(aggregate).__name__} takes the mean of log(degree + 1) over all nodes, and this process has a part "
            "of them; pass average_log_degree=(graph.degree() + 1).log().mean() of the whole graph"
        )


def check_widths(attention: Attention | None, x: Tensor, source: Tensor) -> None:
    """Raises ValueError or TypeError if the attention's maps do not accept the features; called when torch failed."""
    if attention is None:
        return
    owner, (of_dst, of_src) = type(attention).__name__, attention.takes()
    validation.fits(owner, "x", x, of_dst)
    validation.fits(owner, "x" if x is source else "source", source, of_src)
    for name, part in attention.named_modules():
        weight: Any = getattr(part, "weight", None)
        is_other = isinstance(weight, Tensor) and weight.is_floating_point() and weight.dtype != x.dtype
        if is_other and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(
                f"{name}.weight of {owner} is {weight.dtype}, and x is {x.dtype}: they must have one dtype; call "
                f".to({x.dtype}) of the layer"
            )


def check_kind(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be an {kind.__module__}.{kind.__name__}; got {describe(value)}")


def check_graph(graph: Any) -> Topology | Graph:
    if isinstance(graph, (Topology, BoundGraph)) or (torch.compiler.is_exporting() and hasattr(graph, "recipe")):
        return graph  # an exported program has a stand-in for a graph of its inputs
    advice = {
        "torch": "; an edge_index becomes one by graphs.from_edges(edge_index, num_nodes)",
        "builtins": "; text becomes one by graphs.parse(text)" if isinstance(graph, str) else "",
        "networkx": " of networkx; graphs.from_networkx(graph) makes one",
        "scipy": "; graphs.from_scipy(matrix) makes one",
        "torch_geometric": "; graphs.from_pyg(data) makes one",
        "dgl": "; graphs.from_dgl(graph) makes one",
    }.get(type(graph).__module__.partition(".")[0], "")
    raise TypeError(f"graph must be a Topology, a Graph or None; got {describe(graph)}{advice}")


def _graph_or_none(graph: Any) -> Topology | Graph | None:
    return None if graph is None else check_graph(graph)


def _an_or_none(kind: type, name: str, value: Any) -> Any:
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{name} must be an {kind.__name__} or None; got {describe(value)}")
    return value


def _aggregator(aggregate: Any) -> Any:
    _check_order("aggregate", aggregate, Attention, Update)
    return aggregator(aggregate)


def _update(update: Any) -> Update:
    _check_order("update", update, Attention)
    return as_update(update)


def _check_order(name: str, argument: Any, *wrong: type) -> None:
    """Raises TypeError if `argument` has a type that belongs to another argument of MessagePassing."""
    if isinstance(argument, wrong):
        raise TypeError(
            f"{name} is {describe(argument)}; the order is MessagePassing(graph, aggregate, update, attention)"
        )


PARTS: dict[str, Callable[[Any], Any]] = {
    "graph": _graph_or_none,
    "aggregate": _aggregator,
    "update": _update,
    "attention": partial(_an_or_none, Attention, "attention"),
    "edges": partial(_an_or_none, EdgeUpdate, "edges"),
    "edge_dropout": partial(validation.rate, "edge_dropout"),
}
"""For each attribute of an operator, the function that validates and converts it."""


def checked_edges(edge_attr: Tensor, graph: Graph) -> Tensor:
    """Validates attributes passed with the call. While a program is traced, the number of edges is not known."""
    validation.tensor("edge_attr", edge_attr)
    if not torch.compiler.is_compiling() and graph.num_edges not in edge_attr.shape:
        raise ValueError(
            f"edge_attr must have a row for each of the {graph.num_edges} edges; got {list(edge_attr.shape)}"
        )
    return edge_attr


def describe(argument: Any) -> str:
    """The type of a wrong argument, for an error message."""
    if isinstance(argument, type):
        return f"the class {argument.__name__}, not an instance"
    return type(argument).__name__


def check_features(name: str, x: Any) -> None:
    if not isinstance(x, Tensor) or x.is_nested or x.dim() < 2:
        if isinstance(x, Tensor):
            validation.tensor(name, x)
        shown = list(x.shape) if isinstance(x, Tensor) else None if x is None else describe(x)
        advice = "; the order is op(x, graph)" if isinstance(x, (BoundGraph, Topology)) else validation.of_data(x)
        raise ValueError(f"{name} must be a tensor [..., N, d]; got {shown}{advice}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point; got {x.dtype}")
