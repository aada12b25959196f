"""Conversion from and to other libraries: scipy, networkx, PyTorch Geometric, torch, torch_sparse.

Matrices are adjacency matrices `A[dst, src]`: row i holds the in-neighbors of node i. Values are edge attributes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import one_set
from mpnn.graph.registry import install
from mpnn.graphs.compressed import TemporalGraph
from mpnn.graphs.explicit import from_edges
from mpnn.graphs.kinds import HeteroGraph
from mpnn.round import validation


def from_scipy(matrix: Any) -> Graph:
    """Creates a graph from a scipy sparse matrix or array [num_dst, num_src]; its stored values become `edge_attr` [E].

    ::

        from_scipy(scipy.sparse.csr_array([[0, 1, 0], [0, 0, 2]]))   .#.
                                                                     ..#
    """
    if not hasattr(matrix, "tocoo"):
        raise TypeError(f"from_scipy needs a scipy sparse matrix or array; got {type(matrix).__name__}")
    _check_matrix("from_scipy", matrix.shape)
    coo = matrix.tocoo()
    edges = torch.from_numpy(np.stack([coo.col, coo.row]).astype(np.int64))
    values = torch.from_numpy(np.array(coo.data))
    return from_edges(edges, num_dst=coo.shape[0], num_src=coo.shape[1], edge_attr=values)


def to_scipy(graph: Graph) -> Any:
    """Returns a scipy `csr_array` [num_dst, num_src] with one-dimensional edge attributes as values, otherwise ones.

    Repeated edges are summed, as in scipy.
    """
    from scipy import sparse

    validation.graph(graph)
    src, dst = graph.edge_index.cpu().numpy()
    return sparse.csr_array((_values(graph).detach().cpu().numpy(), (dst, src)), shape=(graph.num_dst, graph.num_src))


def from_networkx(graph: Any, weight: str | None = None) -> Graph:
    """Creates a graph from a networkx graph. Nodes are numbered in its order, and undirected edges go both ways.

    v receives from u along an edge u -> v. `weight` is the name of the edge attribute to use as `edge_attr`.

    ::

        from_networkx(networkx.path_graph(4))   .#..
                                                #.#.
                                                .#.#
                                                ..#.
    """
    if not hasattr(graph, "nodes"):
        raise TypeError(f"from_networkx needs a networkx graph; got {type(graph).__name__}")
    number = {node: k for k, node in enumerate(graph.nodes)}
    edges = []
    values = []
    for u, v, data in graph.edges(data=True):
        ends = [(number[u], number[v])]
        if not graph.is_directed() and u != v:
            ends.append((number[v], number[u]))
        edges += ends
        if weight is not None:
            if weight not in data:
                raise ValueError(f"edge {u!r} -> {v!r} has no attribute {weight!r}")
            values += [data[weight]] * len(ends)
    index = torch.tensor(edges, dtype=torch.int64).reshape(-1, 2).T.contiguous()
    try:
        attributes = None if weight is None else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"weight must be the name of a numeric edge attribute; {weight!r} is not: {error}") from None
    return from_edges(index, len(number), edge_attr=attributes)


def to_networkx(graph: Graph) -> Any:
    """Returns a networkx `MultiDiGraph` over 0..N-1 (bipartite: ("src", j) and ("dst", i)) with edges from
    source to destination.

    One-dimensional edge attributes become `weight`, edge types `edge_type`.
    """
    import networkx

    validation.graph(graph)
    square = graph.num_dst == graph.num_src
    out = networkx.MultiDiGraph()
    sources = [j if square else ("src", j) for j in range(graph.num_src)]
    destinations = [i if square else ("dst", i) for i in range(graph.num_dst)]
    out.add_nodes_from(sources)
    out.add_nodes_from(destinations)
    attr = graph.edge_attr if graph.edge_attr is not None and graph.edge_attr.dim() == 1 else None
    named = {"weight": attr, "edge_type": graph.edge_type}
    columns = {name: column.tolist() for name, column in named.items() if column is not None}
    for e, (j, i) in enumerate(graph.edge_index.T.tolist()):
        out.add_edge(sources[j], destinations[i], **{name: column[e] for name, column in columns.items()})
    return out


def from_pyg(data: Any) -> Any:
    """Creates a graph from a PyTorch Geometric `Data`: `edge_index`, and if present `edge_type` and `edge_attr` or
    `edge_weight`, which become the types and attributes of the edges. Or from `adj_t`, the matrix of ToSparseTensor; if
    all of its values are 1, they are not attributes. Other attributes of the data are ignored.

    A `HeteroData` becomes a `HeteroGraph`, with the `time` of its nodes, and one relation of it,
    `data["author", "writes", "paper"]`, a graph from its sources to its destinations. A `TemporalData` becomes a
    `TemporalGraph` with `t` as times and `msg` as edge_attr. Use `from_edges` for an `edge_index` tensor.

    ::

        from_pyg(Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3))   ...
                                                                                 #..
                                                                                 .#.
    """
    name = type(data).__name__
    if isinstance(data, Tensor):
        raise TypeError("from_pyg needs data with an edge_index; got Tensor: use from_edges for an edge_index")
    if hasattr(data, "edge_types"):
        sizes = {kind: data[kind].num_nodes for kind in data.node_types}
        times = {kind: data[kind].time for kind in data.node_types if "time" in data[kind]}
        return HeteroGraph({relation: from_pyg(data[relation]) for relation in data.edge_types}, sizes, times)
    if hasattr(data, "src") and hasattr(data, "t"):
        ends = torch.stack([data.src, data.dst])
        return TemporalGraph(from_edges(ends, num_nodes=data.num_nodes, edge_attr=data.get("msg")), data.t)
    edge_index, values = edges_of_pyg(data)
    if edge_index is None:
        raise ValueError(f"from_pyg needs data with an edge_index or an adj_t; got {data!r}")
    attributes = [name for name in ("edge_attr", "edge_weight") if getattr(data, name, None) is not None]
    if len(attributes) > 1:
        raise ValueError(
            f"from_pyg needs one of edge_attr and edge_weight, and this {name} has both: delete one, as in "
            "del data.edge_attr, or join them"
        )
    if hasattr(data, "num_nodes"):
        sizes = {"num_nodes": data.num_nodes}
    else:  # one relation of heterogeneous data, between two sets of nodes
        num_src, num_dst = data.size()
        sizes = {"num_src": num_src, "num_dst": num_dst}
    return from_edges(
        edge_index,
        **sizes,
        edge_attr=getattr(data, attributes[0]) if attributes else values,
        edge_type=getattr(data, "edge_type", None),
    )


def edges_of_pyg(data: Any) -> tuple[Tensor | None, Tensor | None]:
    """The `edge_index` of a `Data`, and the values of the matrix `adj_t` if it has that instead; None where there is
    neither."""
    if getattr(data, "edge_index", None) is not None:
        return data.edge_index, None
    matrix = getattr(data, "adj_t", None)
    if matrix is None:
        return None, None
    graph = from_torch_sparse(matrix) if isinstance(matrix, Tensor) else from_sparse_tensor(matrix)
    values = graph.edge_attr
    return graph.edge_index, None if values is None or bool((values == 1).all()) else values


def from_dgl(g: Any, *, edge_attr: str | None = None, edge_type: str | None = None) -> Graph:
    """Creates a graph from a DGL graph: its edges in the order of their ids, as `g.edges(order="eid")`.

    A bipartite graph or a block becomes a graph from its source nodes to its destination nodes. Edge types are those
    of `edge_type`, or those that `dgl.to_homogeneous` stores (`dgl.ETYPE`).

    Args:
        g: a `DGLGraph` with one edge type.
        edge_attr: the name of the feature in `g.edata`, [E, ...], that becomes `edge_attr`.
        edge_type: the name of the feature in `g.edata`, int64 [E], that becomes `edge_type`.

    Raises:
        TypeError: if `g` is not a DGL graph. ValueError: if it has several edge types. KeyError: if a feature is
        missing.
    """
    if not hasattr(g, "canonical_etypes"):
        raise TypeError(f"from_dgl needs a DGLGraph; got {type(g).__name__}")
    if len(g.canonical_etypes) != 1:
        raise ValueError(
            f"from_dgl needs a graph with one edge type; got {g.canonical_etypes}. Pass one relation, as in "
            'from_dgl(g["writes"]), or all of them with their types, from_dgl(dgl.to_homogeneous(g))'
        )
    for name in (edge_attr, edge_type):
        if name is not None and name not in g.edata:
            raise KeyError(f"g.edata has no {name!r}; it has {sorted(g.edata)}")
    if edge_type is None and "_TYPE" in g.edata:  # dgl.ETYPE
        edge_type = "_TYPE"
    src, dst = g.edges(order="eid")
    return from_edges(
        torch.stack([src, dst]).long(),
        num_src=g.num_src_nodes(),
        num_dst=g.num_dst_nodes(),
        edge_attr=None if edge_attr is None else g.edata[edge_attr],
        edge_type=None if edge_type is None else g.edata[edge_type],
    )


def to_pyg(graph: Graph | HeteroGraph, **features: Any) -> Any:
    """Returns a PyTorch Geometric `Data` with a copy of this graph's edges, and the given features (`x=...`, `y=...`).
    A `HeteroGraph` becomes a `HeteroData`; its features are dicts by kind, `x={"author": ..., "paper": ...}`."""
    try:
        from torch_geometric.data import Data, HeteroData
    except ImportError:
        raise ImportError(f"to_pyg needs PyTorch Geometric: {install('pyg')}") from None

    if isinstance(graph, HeteroGraph):
        for name, by_kind in features.items():
            if not isinstance(by_kind, Mapping) or by_kind.keys() - graph.num_nodes.keys():
                raise ValueError(f"{name} must be a dict by kind of node, of {', '.join(graph.num_nodes)}")
        hetero = HeteroData()
        for kind, n in graph.num_nodes.items():
            hetero[kind].num_nodes = n
            if kind in graph.times:
                hetero[kind].time = graph.times[kind].clone()
            for name, by_kind in features.items():
                if kind in by_kind:
                    hetero[kind][name] = by_kind[kind]
        for relation, one in graph.items():
            hetero[relation].update(_of_edges(one))
        return hetero
    validation.graph(graph)
    one_set("Data of PyTorch Geometric", graph)
    return Data(num_nodes=graph.num_dst, **_of_edges(graph), **features)


def _of_edges(graph: Graph) -> dict[str, Tensor]:
    """Copies of the edges, and of their attributes and types if there are any."""
    attr = None if graph.edge_attr is None else graph.edge_attr.clone()
    data = {"edge_index": graph.edge_index, "edge_attr": attr, "edge_type": graph.edge_type}
    return {name: value for name, value in data.items() if value is not None}


def from_torch_sparse(matrix: Tensor) -> Graph:
    """Creates a graph from a torch sparse tensor (COO, CSR or CSC) [num_dst, num_src]; its values become
    `edge_attr`."""
    if not isinstance(matrix, Tensor):
        raise TypeError(f"from_torch_sparse needs a torch tensor; got {type(matrix).__name__}")
    coo = matrix.to_sparse_coo()
    _check_matrix("from_torch_sparse", coo.shape[: coo.sparse_dim()])
    coo = coo if coo.is_coalesced() else coo.coalesce()
    dst, src = coo.indices()
    return from_edges(torch.stack([src, dst]), num_dst=coo.shape[0], num_src=coo.shape[1], edge_attr=coo.values())


def to_torch_sparse(graph: Graph) -> Tensor:
    """Returns a torch sparse COO tensor [num_dst, num_src] with edge attributes as values, otherwise ones.

    Repeated edges are summed.
    """
    validation.graph(graph)
    values = _values(graph) if graph.edge_attr is None else graph.edge_attr
    shape = (graph.num_dst, graph.num_src, *values.shape[1:])
    return torch.sparse_coo_tensor(graph.edge_index.flip(0), values, shape, check_invariants=True).coalesce()


def from_sparse_tensor(matrix: Any) -> Graph:
    """Creates a graph from a `torch_sparse.SparseTensor` [num_dst, num_src] (the extra `mpnn[scatter]`)."""
    if not hasattr(matrix, "coo"):
        raise TypeError(f"from_sparse_tensor needs a torch_sparse.SparseTensor; got {type(matrix).__name__}")
    dst, src, values = matrix.coo()
    num_dst, num_src = matrix.sizes()[:2]
    return from_edges(torch.stack([src, dst]), num_dst=num_dst, num_src=num_src, edge_attr=values)


def to_sparse_tensor(graph: Graph) -> Any:
    """Returns a `torch_sparse.SparseTensor` [num_dst, num_src], PyTorch Geometric's `adj_t` (the extra
    `mpnn[scatter]`)."""
    validation.graph(graph)
    from torch_sparse import SparseTensor

    src, dst = graph.edge_index
    return SparseTensor(row=dst, col=src, value=graph.edge_attr, sparse_sizes=(graph.num_dst, graph.num_src))


def _check_matrix(name: str, shape: Sequence[int]) -> None:
    if len(shape) != 2:
        raise ValueError(f"{name} needs a matrix [num_dst, num_src]; got shape {list(shape)}")


def _values(graph: Graph) -> Tensor:
    if graph.edge_attr is not None and graph.edge_attr.dim() == 1:
        return graph.edge_attr
    return torch.ones(graph.num_edges, device=graph.device)
