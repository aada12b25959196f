"""Graphs and topologies as tensors of bytes, for programs that another process will run.

`torch.compile` speaks of a graph by its number in this process (`mpnn.handles`). A program that `torch.export` saves
holds the graph itself in the place of that number: a topology as its expression, which fits every length, and any other
graph as its rows of runs or its edges. The bytes are arrays in numpy's `.npz` format, which holds no code.
"""

from __future__ import annotations

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

from mpnn.compiled.names import describe, restore
from mpnn.compiled.outline import Outline, bound, constant
from mpnn.graph import Graph
from mpnn.graphs.parse import parse
from mpnn.handles import held
from mpnn.relation import Relation, Table
from mpnn.runs import Runs
from mpnn.topology import Topology

ADVICE = "torch.compile, which saves nothing, takes it"


def embedded(graph: Outline) -> Tensor:
    """The token of a program that is exported: the graph, uint8 [bytes] on the CPU.

    Raises:
        ValueError: nothing that another process could read says which edges there are.
    """
    if not graph.recipe and _is_expression(graph.given):
        return _topology(graph.given)
    if isinstance(graph.given, Topology) and not all(has_static_value(n) for n in graph.base):
        _refuse_any_length(graph.given, bool(graph.recipe))
    return _graph(graph.given, *graph.base, *graph.recipe)


def opened(token: Tensor) -> Topology | Graph:
    """The graph or topology of a token: its number in this process, or its bytes.

    Raises:
        RuntimeError: the number of a graph that is gone.
        ValueError: bytes that `embedded` did not write.
    """
    if token.dim() == 0:
        return held(token)
    if token not in _OPENED:
        data = token.cpu().numpy().tobytes()
        digest = sha256(data).digest()
        found = _EQUAL.get(digest)
        _OPENED[token] = _EQUAL[digest] = _read(data) if found is None else found
    return _OPENED[token]


_OPENED: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_EQUAL: WeakValueDictionary[bytes, Topology | Graph] = WeakValueDictionary()
"""By digest, so that all layers over one graph share it and what is derived from it."""


# ---------------------------------------------------------------------------------------------------- written


@constant
def _is_expression(given: Topology | Graph) -> bool:
    """Whether the topology prints as text that gives it back."""
    if not isinstance(given, Topology):
        return False
    try:
        return parse(repr(given)) == given
    except ValueError:
        return False


@constant
def _refuse_any_length(topology: Topology, derived: bool) -> None:
    why = "its layer derives another graph from it" if derived else "its rule is no builder of mpnn.graphs"
    raise ValueError(
        f"torch.export cannot save {topology} for every length: {why}. Export it for one length (without dynamic "
        f"shapes for the nodes), which saves the graph of that length; {ADVICE}"
    )


@constant
@lru_cache(maxsize=256)
def _topology(topology: Topology) -> Tensor:
    return _written({"topology": np.array(repr(topology))})


@constant
def _graph(given: Topology | Graph, num_dst: int, num_src: int, *recipe: Any) -> Tensor:
    whole = bound(given, num_dst, num_src)
    return whole.memo(("embedded", *recipe), lambda: _written(_arrays(_derived(whole, *recipe))))


def _derived(graph: Graph, build: Callable[..., Graph] | None = None, *arguments: Any) -> Graph:
    return graph if build is None else build(graph, *arguments)


def _arrays(graph: Graph) -> dict[str, Any]:
    """Everything that a request may depend on; attributes of edges are tensors of the program."""
    arrays: dict[str, Any] = {"size": np.array([graph.num_dst, graph.num_src, graph.shift])}
    if graph.is_explicit:
        arrays["edges"] = graph.edge_index
    elif graph.labels is not None:
        arrays["labels"] = graph.labels
    else:
        arrays |= {"row": graph.runs.row, "start": graph.runs.start, "stop": graph.runs.stop}
    if graph.class_rule is not None:
        arrays |= _relation(graph.class_rule)
    elif graph.has_classes:
        arrays["edge_type"] = graph.edge_type
    if graph.places is not None:
        arrays["dst_at"], arrays["src_at"] = graph.places
    if graph.order is not None:
        arrays["order"] = graph.order
    return {name: x.cpu().numpy() if isinstance(x, Tensor) else x for name, x in arrays.items()}


def _relation(relation: Relation) -> dict[str, Any]:
    if type(relation) is Table:
        return {"table": relation.classes}
    text = describe(relation)
    if text is None:
        raise ValueError(
            f"torch.export cannot save a graph whose edges have their classes from {relation}; give them as data, "
            f"edge_type of graphs.from_edges. {ADVICE[0].upper()}{ADVICE[1:]}"
        )
    return {"relation": np.array(text)}


def _written(arrays: dict[str, Any]) -> Tensor:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


# ---------------------------------------------------------------------------------------------------- read


def _read(data: bytes) -> Topology | Graph:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = dict(file)
    if "topology" in arrays:
        return parse(str(arrays["topology"]))
    num_dst, num_src, shift = (int(n) for n in arrays["size"])
    edges, places, relation = arrays.get("edges"), None, None
    if "relation" in arrays:
        relation = restore(str(arrays["relation"]))
    elif "table" in arrays:
        relation = Table(torch.from_numpy(arrays["table"]))
    if "dst_at" in arrays:
        places = torch.from_numpy(arrays["dst_at"]), torch.from_numpy(arrays["src_at"])
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
        places=places,
    )
    if "order" in arrays:
        graph.order = torch.from_numpy(arrays["order"])
    return graph.validate() if edges is not None else graph
