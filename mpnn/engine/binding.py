"""The graph of a call: of the sizes of its features, on their device; while nodes are divided, this process's part."""

from collections.abc import Callable

import torch
from torch import Tensor

from mpnn import engine
from mpnn.graph import Graph
from mpnn.graph.bound import BoundGraph
from mpnn.graph.exchange import LOCAL, Layer
from mpnn.graph.sharding import ACTIVE, active
from mpnn.graph.topology import Topology
from mpnn.round import validation


def bind(graph: Topology | Graph, x: Tensor, source: Tensor, layer: Callable[[], Layer]) -> Graph:
    """The graph over which a layer exchanges messages.

    Args:
        graph: a topology, which is bound to the numbers of rows, or a graph, which must have them.
        x: features of the destinations, [..., N_dst, d].
        source: features of the sources, [..., N_src, d_src].
        layer: returns what decides how nodes that are divided over processes reach each other.

    Raises:
        ValueError: the graph has other sizes or lies on another device, or it cannot be divided.
    """
    compiles = torch.compiler.is_compiling()
    if ACTIVE and active() is not None:
        graph = _part(graph, x, source, layer(), compiles)
    num_dst = x.shape[-2]
    num_src = num_dst if source is x else source.shape[-2]
    if not isinstance(graph, BoundGraph) and isinstance(graph, Topology):  # an abstract class, which is asked slowly
        # A traced program binds when it runs: sizes may be symbols while it is traced.
        if compiles:
            return engine.traced_graph(graph, num_dst, num_src, x.device)
        return graph.bind(num_dst, num_src).to(x.device)
    # The comparison stands here to save a call on the way that every layer takes.
    if x.device != graph.device:
        validation.device(graph, x)
    is_part = not compiles and graph.exchange is not LOCAL  # a program checks when it runs that its graph is whole
    expected = graph.exchange.rows if is_part else (graph.num_dst, graph.num_src)
    if expected != (num_dst, num_src):
        whose = "this process's part of the graph has" if is_part else "the graph has"
        raise ValueError(
            f"{whose} {expected[0]} destinations and {expected[1]} sources, but the features have "
            f"{num_dst} and {num_src} (shapes {list(x.shape)} and {list(source.shape)})"
        )
    return engine.traced_graph(graph, num_dst, num_src, x.device) if compiles else graph


def _part(graph: Topology | Graph, x: Tensor, source: Tensor, layer: Layer, compiles: bool) -> Topology | Graph:
    """This process's part of the graph."""
    if compiles:
        raise ValueError("torch.compile does not trace layers over a part of a graph; leave them uncompiled")
    if isinstance(graph, BoundGraph) and graph.stack:
        raise ValueError(f"{graph} differs by item and head, and its nodes are not divided over processes")
    if isinstance(graph, Graph) and graph.exchange is not LOCAL:
        return graph
    return active().part(graph, x.shape[-2], source.shape[-2], layer).to(x.device)  # type: ignore[union-attr]
