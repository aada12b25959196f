"""Graphs and topologies serialized to tensors of bytes, for programs that another process will run.

`torch.compile` refers to a graph by its number in this process (`mpnn.graph.handles`). A program that `torch.export`
saves holds the graph itself instead: a topology as its expression, which fits all lengths, and any other graph as its
rows of runs or its edges. The bytes are those of `torch.save`, read with `weights_only=True`, which runs no code.
"""

import io
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from pickle import UnpicklingError
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._guards import tracing
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils.weak import WeakTensorKeyDictionary

from mpnn.engine.compile.traced_graph import TracedGraph, bound, constant
from mpnn.graph import Graph
from mpnn.graph.handles import resolve
from mpnn.graph.topology import Topology
from mpnn.graphs.parse import text_of

ADVICE = "torch.compile, which saves nothing, supports it"


def graph_to_tensor(graph: TracedGraph) -> Tensor:
    """The token of an exported program: the serialized graph, uint8 [bytes] on the CPU.

    Raises:
        ValueError: if the edges cannot be serialized for another process.
    """
    if not graph.recipe and expression(graph.original):
        return _topology(graph.original)
    # Where the length is a symbol there is no graph to save but the rule, and this one has no text.
    if isinstance(graph.original, Topology) and not all(has_static_value(n) for n in graph.base):
        _refuse_any_length(graph.original, bool(graph.recipe))
    return _graph(graph.original, *graph.base, *graph.recipe)


def graph_from_tensor(token: Tensor, num_dst: int = 0, num_src: int = 0) -> Topology | Graph:
    """The graph or topology of a token: its number in this process, its bytes, or its edges, int64 [2, E], between so
    many nodes.

    Raises:
        IndexError: if an edge refers to a node that does not exist.
        RuntimeError: if the token is the number of a graph that was freed.
        UnpicklingError, ValueError: if the bytes hold anything else than a graph or topology.
    """
    # The dimensions distinguish three kinds of tokens: a number, edges [2, E], and bytes.
    if token.dim() == 0:
        return resolve(token)
    if token.dim() == 2:
        # All layers of a call get one tensor. Inference tensors count no changes, so their numbers are compared.
        stamp = num_dst, num_src, None if token.is_inference() else token._version
        held, edges, graph = _LISTED.get(token, (None, None, None))
        if held != stamp or (token.is_inference() and not token.equal(edges)):
            edges = token.clone()
            graph = Graph.from_edges(edges, num_dst, num_src)
            _LISTED[token] = stamp, edges, graph
        return cast(Graph, graph)
    if token not in _OPENED:
        data = token.cpu().numpy().tobytes()
        # Each layer of a loaded program has a constant of its own, so equal graphs come in different tensors.
        digest = sha256(data).digest()
        graph = _EQUAL.get(digest)
        _OPENED[token] = _EQUAL[digest] = _read(data) if graph is None else graph
    return _OPENED[token]


_LISTED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_OPENED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_EQUAL: WeakValueDictionary[bytes, Topology | Graph] = WeakValueDictionary()
"""By digest, so that all layers over one graph share it and its cached values."""


# ---------------------------------------------------------------------------------------------------- writing


@constant
def expression(graph: Topology | Graph) -> str:
    """The text of a topology; empty for a graph, and if there is none."""
    return (text_of(graph) or "") if isinstance(graph, Topology) else ""


@constant
def _refuse_any_length(topology: Topology, derived: bool) -> None:
    why = "its layer derives another graph from it" if derived else "its rule is not a builder of mpnn.graphs"
    raise ValueError(
        f"torch.export cannot save {topology} for every length: {why}. Export it for one length (without dynamic "
        f"shapes for the nodes), which saves the graph of that length; {ADVICE}"
    )


@constant
@lru_cache(maxsize=256)
def _topology(topology: Topology) -> Tensor:
    return _save(topology)


@constant
def _graph(topology: Topology | Graph, num_dst: int, num_src: int, *recipe: Any) -> Tensor:
    graph = bound(topology, num_dst, num_src)
    return graph.cached(("embedded", *recipe), lambda: _save(_derive(graph, *recipe)))


def _derive(graph: Graph, build: Callable[..., Graph] | None = None, *arguments: Any) -> Graph:
    """The graph on the CPU, without edge attributes, which are tensors of the program."""
    derived = (graph if build is None else build(graph, *arguments)).to(torch.device("cpu"))
    if derived.edge_attr is not None:
        # The graph may be the caller's, which keeps its attributes.
        derived = derived.alias()
        derived.edge_attr = None
    return derived


def _save(graph: Topology | Graph) -> Tensor:
    file = io.BytesIO()
    try:
        with tracing(None):  # else torch would save fake tensors
            torch.save(graph, file)
            # What another process could not load is refused here, while its author still watches.
            _read(file.getvalue())
    except UnpicklingError:
        relation = getattr(graph, "relation", None)
        raise ValueError(
            f"torch.export cannot save a graph with edge types from {relation}; pass them as data, edge_type of "
            f"graphs.from_edges. {ADVICE[0].upper()}{ADVICE[1:]}"
        ) from None
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------- reading


def _read(data: bytes) -> Topology | Graph:
    graph: Topology | Graph = torch.load(io.BytesIO(data), weights_only=True)
    return graph
