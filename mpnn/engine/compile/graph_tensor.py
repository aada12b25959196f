"""Graphs and topologies serialized to tensors of bytes, for programs that another process will run.

`torch.compile` refers to a graph by its number in this process (`mpnn.graph.handles`). A program that `torch.export`
saves holds the graph itself instead: a topology as its expression, which fits all lengths, and any other graph as its
rows of runs or its edges. The bytes are arrays in numpy's `.npz` format, which holds no code.
"""

import io
from collections.abc import Callable
from functools import lru_cache
from hashlib import sha256
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value
from torch.utils.weak import WeakTensorKeyDictionary

from mpnn.engine.compile.names import describe, restore
from mpnn.engine.compile.outline import Outline, bound, constant
from mpnn.graph import Graph
from mpnn.graph.handles import resolve
from mpnn.graph.relations import Relation, Table
from mpnn.graph.runs import Runs
from mpnn.graph.stacked import StackedGraph
from mpnn.graph.topology import Topology
from mpnn.graphs.parse import parse

ADVICE = "torch.compile, which saves nothing, supports it"


def graph_to_tensor(graph: Outline) -> Tensor:
    """The token of an exported program: the serialized graph, uint8 [bytes] on the CPU.

    Raises:
        ValueError: if the edges cannot be serialized for another process.
    """
    if not graph.recipe and _is_expression(graph.original):
        return _topology(graph.original)
    if isinstance(graph.original, Topology) and not all(has_static_value(n) for n in graph.base):
        _refuse_any_length(graph.original, bool(graph.recipe))
    return _graph(graph.original, *graph.base, *graph.recipe)


def graph_from_tensor(token: Tensor) -> Topology | Graph:
    """The graph or topology of a token: its number in this process, or its bytes.

    Raises:
        RuntimeError: if the token is the number of a graph that was freed.
        ValueError: if the bytes were not written by `graph_to_tensor`.
    """
    if token.dim() == 0:
        return resolve(token)
    if token not in _OPENED:
        data = token.cpu().numpy().tobytes()
        digest = sha256(data).digest()
        graph = _EQUAL.get(digest)
        _OPENED[token] = _EQUAL[digest] = _read(data) if graph is None else graph
    return _OPENED[token]


_OPENED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_EQUAL: WeakValueDictionary[bytes, Topology | Graph] = WeakValueDictionary()
"""By digest, so that all layers over one graph share it and its cached values."""


# ---------------------------------------------------------------------------------------------------- writing


@constant
def _is_expression(graph: Topology | Graph) -> bool:
    """Whether this is a topology whose `repr` can be parsed back."""
    if not isinstance(graph, Topology):
        return False
    try:
        return parse(repr(graph)) == graph
    except ValueError:
        return False


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
    return _save({"topology": np.array(repr(topology))})


@constant
def _graph(topology: Topology | Graph, num_dst: int, num_src: int, *recipe: Any) -> Tensor:
    graph = bound(topology, num_dst, num_src)
    return graph.cached(("embedded", *recipe), lambda: _save(_arrays(_derive(graph, *recipe))))


def _derive(graph: Graph, build: Callable[..., Graph] | None = None, *arguments: Any) -> Graph:
    return graph if build is None else build(graph, *arguments)


def _arrays(graph: Graph) -> dict[str, Any]:
    """All arrays of a graph that a round may depend on, except edge attributes, which are tensors of the program."""
    if isinstance(graph, StackedGraph):
        if graph.shift or graph.relation is not None or graph.positions is not None:
            raise ValueError(f"torch.export cannot save {graph} with positions or edge types; {ADVICE}")
        return {**_arrays(graph.flat), "stack": np.array(graph.stack)}
    arrays: dict[str, Any] = {"size": np.array([graph.num_dst, graph.num_src, graph.shift])}
    if graph.is_explicit:
        arrays["edges"] = graph.edge_index
    elif graph.labels is not None:
        arrays["labels"] = graph.labels
    else:
        arrays |= {"row": graph.runs.row, "start": graph.runs.start, "stop": graph.runs.stop}
    if graph.edge_type_rule is not None:
        arrays |= _relation(graph.edge_type_rule)
    elif graph.has_edge_types:
        arrays["edge_type"] = graph.edge_type
    if graph.positions is not None:
        arrays["dst_at"], arrays["src_at"] = graph.positions
    if graph.order is not None:
        arrays["order"] = graph.order
    return {name: x.cpu().numpy() if isinstance(x, Tensor) else x for name, x in arrays.items()}


def _relation(relation: Relation) -> dict[str, Any]:
    if type(relation) is Table:
        return {"table": relation.classes}
    text = describe(relation)
    if text is None:
        raise ValueError(
            f"torch.export cannot save a graph with edge types from {relation}; pass them as data, "
            f"edge_type of graphs.from_edges. {ADVICE[0].upper()}{ADVICE[1:]}"
        )
    return {"relation": np.array(text)}


def _save(arrays: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------- reading


def _read(data: bytes) -> Topology | Graph:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = dict(file)
    if "topology" in arrays:
        return parse(str(arrays["topology"]))
    num_dst, num_src, shift = (int(n) for n in arrays["size"])
    edges, positions, relation = arrays.get("edges"), None, None
    if "relation" in arrays:
        relation = restore(str(arrays["relation"]))
    elif "table" in arrays:
        relation = Table(torch.from_numpy(arrays["table"]))
    if "dst_at" in arrays:
        positions = torch.from_numpy(arrays["dst_at"]), torch.from_numpy(arrays["src_at"])
    runs = None
    if "row" in arrays:
        runs = Runs.of(num_dst, num_src, [(arrays["row"], arrays["start"], arrays["stop"])])
    graph = Graph(
        num_dst,
        num_src,
        runs=runs,
        labels=arrays.get("labels"),
        edges=None if edges is None else torch.from_numpy(edges),
        edge_type=torch.from_numpy(arrays["edge_type"]) if "edge_type" in arrays else None,
        relation=relation,
        shift=shift,
        positions=positions,
    )
    if "order" in arrays:
        graph.order = torch.from_numpy(arrays["order"])
    graph = graph.validate() if edges is not None else graph
    return StackedGraph(graph, tuple(arrays["stack"].tolist())) if "stack" in arrays else graph
