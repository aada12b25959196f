"""Constructors of derived graphs: they change the edges and inherit relation, positions and device."""

from typing import Any

import torch
from torch import Tensor

from mpnn.graph.csr import narrow
from mpnn.graph.data import G, GraphData
from mpnn.graph.runs import Runs


def structured(graph: G, runs: Runs, **changes: Any) -> G:
    """A graph with these rows of runs. `changes` override arguments of `Graph`."""
    sizes = {"num_dst": runs.num_dst, "num_src": runs.num_src}
    return type(graph)(**{**_inherited(graph), **sizes, "runs": runs, **changes})


def selected(graph: G, which: Tensor, **changes: Any) -> G:
    """A graph with the edges `which` and their data; `which` indexes `edge_index`, int64 or bool."""
    data = {name: None if old is None else old[which] for name, old in graph.edge_data.items()}
    edges = {} if "edges" in changes else {"edges": graph.stored_edges[:, which]}
    return _explicit(graph, **{**edges, **data, **changes})


def renumbered(graph: G, edges: Tensor, **changes: Any) -> G:
    """A graph with the same edge data and renumbered edges, int32 or int64 [2, E]."""
    return _explicit(graph, **{**graph.edge_data, "edges": edges, **changes})


def extended(graph: G, new_edges: Tensor, **new_data: Any) -> G:
    """A graph with new edges, int64 [2, E'], and their data appended to its edges."""
    if new_edges.shape[1] == 0:
        return graph
    old_data = graph.edge_data
    if old_data["edge_type"] is not None and new_data.get("edge_type") is None:
        raise ValueError(
            f"the {new_edges.shape[1]} new edges would have no edge_type; add them with their edge types through "
            "graphs.from_edges"
        )
    data: Any = {name: None if old is None else torch.cat([old, new_data[name]]) for name, old in old_data.items()}
    return _explicit(graph, edges=torch.cat([graph.stored_edges, new_edges], 1), **data)


def _explicit(graph: G, **changes: Any) -> G:
    arguments = {**_inherited(graph), **changes}
    edges = narrow(arguments.pop("edges"), arguments["num_dst"], arguments["num_src"])
    return type(graph)(**arguments, edges=edges)


def _inherited(graph: GraphData) -> dict[str, Any]:
    return {
        name: getattr(graph, name)
        for name in ("num_dst", "num_src", "relation", "shift", "positions", "periodic", "device")
    }
