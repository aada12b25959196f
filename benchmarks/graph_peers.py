"""Other libraries' layers and sums over explicit graphs, with the weights of the layer that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contest import Entry, Missing
from benchmarks.peers import unless_missing
from mpnn import Graph
from mpnn.attention import DotProduct

Peer = Callable[[Graph, Any, Tensor], Entry | Missing]


class Unmixed(DotProduct):
    """Dot-product attention without its last linear map, as PyTorch Geometric's TransformerConv is."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.to_out = nn.Identity()


def gat(graph: Graph, op: Any, x: Tensor) -> Entry | Missing:
    def make() -> Entry:
        from torch_geometric.nn import GATConv

        heads, width = op.attention.by_src.shape
        conv = GATConv(x.shape[1], width, heads=heads, add_self_loops=False).to(x.detach())
        places = {
            "attention.by_src": conv.att_src,
            "attention.by_dst": conv.att_dst,
            "attention.bias": conv.bias,
            "attention.to_value.weight": conv.lin.weight,
        }
        return _twin("PyG GATConv", lambda: conv(x, graph.edge_index), op, x, places)

    return unless_missing("PyG GATConv", "torch_geometric", make)


def gatv2(graph: Graph, op: Any, x: Tensor) -> Entry | Missing:
    def make() -> Entry:
        from torch_geometric.nn import GATv2Conv

        heads, width = op.attention.vector.shape
        conv = GATv2Conv(x.shape[1], width, heads=heads, add_self_loops=False).to(x.detach())
        places = {
            "attention.vector": conv.att,
            "attention.bias": conv.bias,
            "attention.to_value.weight": conv.lin_l.weight,
            "attention.to_value.bias": conv.lin_l.bias,
            "attention.to_query.weight": conv.lin_r.weight,
            "attention.to_query.bias": conv.lin_r.bias,
        }
        return _twin("PyG GATv2Conv", lambda: conv(x, graph.edge_index), op, x, places)

    return unless_missing("PyG GATv2Conv", "torch_geometric", make)


def transformer(graph: Graph, op: Any, x: Tensor) -> Entry | Missing:
    def make() -> Entry:
        from torch_geometric.nn import TransformerConv

        heads = op.attention.heads
        conv = TransformerConv(x.shape[1], x.shape[1] // heads, heads=heads, root_weight=False).to(x.detach())
        maps = {"to_query": conv.lin_query, "to_key": conv.lin_key, "to_value": conv.lin_value}
        places = {
            f"attention.{to}.{what}": getattr(lin, what) for to, lin in maps.items() for what in ("weight", "bias")
        }
        return _twin("PyG TransformerConv", lambda: conv(x, graph.edge_index), op, x, places)

    return unless_missing("PyG TransformerConv", "torch_geometric", make)


def gcn(graph: Graph, op: Any, x: Tensor) -> Entry | Missing:
    def make() -> Entry:
        from torch_geometric.nn import GCNConv

        conv = GCNConv(x.shape[1], x.shape[1], cached=True, add_self_loops=False).to(x.detach())
        places = {"attention.to_value.weight": conv.lin.weight, "attention.bias": conv.bias}
        return _twin("PyG GCNConv", lambda: conv(x, graph.edge_index), op, x, places)

    return unless_missing("PyG GCNConv", "torch_geometric", make)


def _twin(name: str, call: Callable[[], Tensor], op: Any, x: Tensor, places: dict[str, Tensor]) -> Entry:
    """A peer's layer, given our layer's weights: `places` has the place of each of them in the peer, by name."""
    ours = dict(op.named_parameters())
    with torch.no_grad():
        for own, place in places.items():
            place.copy_(ours[own].view_as(place))
    return Entry(name, call, (x, *(places[own] for own in ours)), _without_a_leading_one)


def _without_a_leading_one(x: Tensor) -> Tensor:
    return x[0] if x.dim() == 3 and x.shape[0] == 1 else x


# ------------------------------------------------------------------------------------------------ sums, means, maxima


def reducers(graph: Graph, x: Tensor, reduce: str) -> list[Entry | Missing]:
    """Sums, means or maxima ("sum", "mean", "max") of x [N, F] along the edges."""
    found = [
        _sparse_mm(graph, x, reduce),
        unless_missing("PyG SimpleConv", "torch_geometric", lambda: _pyg(graph, x, reduce)),
        unless_missing("torch_scatter", "torch_scatter", lambda: _torch_scatter(graph, x, reduce)),
        unless_missing("torch_sparse", "torch_sparse", lambda: _torch_sparse(graph, x, reduce)),
        unless_missing("DGL", "dgl", lambda: _dgl(graph, x, reduce)),
    ]
    return [_csr_product(graph, x), *found] if reduce == "sum" else found


def _matrix(graph: Graph, x: Tensor) -> Tensor:
    csr = graph.csr
    ones = x.new_ones(graph.num_edges)
    return torch.sparse_csr_tensor(csr.ptr, csr.col, ones, (graph.num_dst, graph.num_src), check_invariants=False)


def _csr_product(graph: Graph, x: Tensor) -> Entry:
    matrix = _matrix(graph, x.detach())
    return Entry("torch CSR product", lambda: matrix @ x, (x,))


def _sparse_mm(graph: Graph, x: Tensor, reduce: str) -> Entry:
    matrix, name = _matrix(graph, x.detach()), {"max": "amax"}.get(reduce, reduce)
    return Entry("torch.sparse.mm reduce", lambda: torch.sparse.mm(matrix, x, name), (x,))


def _pyg(graph: Graph, x: Tensor, reduce: str) -> Entry:
    from torch_geometric.nn import SimpleConv

    conv = SimpleConv(aggr=reduce)
    return Entry("PyG SimpleConv", lambda: conv(x, graph.edge_index), (x,))


def _torch_scatter(graph: Graph, x: Tensor, reduce: str) -> Entry:
    from torch_scatter import segment_csr

    csr = graph.csr
    return Entry("torch_scatter", lambda: segment_csr(x.index_select(0, csr.col), csr.ptr, reduce=reduce), (x,))


def _torch_sparse(graph: Graph, x: Tensor, reduce: str) -> Entry:
    from torch_sparse import SparseTensor, matmul

    csr = graph.csr
    matrix = SparseTensor(rowptr=csr.ptr, col=csr.col, sparse_sizes=(graph.num_dst, graph.num_src), is_sorted=True)
    return Entry("torch_sparse", lambda: matmul(matrix, x, reduce=reduce), (x,))


def _dgl(graph: Graph, x: Tensor, reduce: str) -> Entry:
    import dgl

    given = dgl.graph(tuple(graph.edge_index), num_nodes=graph.num_dst)
    given.create_formats_()
    run = {"sum": dgl.ops.copy_u_sum, "mean": dgl.ops.copy_u_mean, "max": dgl.ops.copy_u_max}[reduce]
    return Entry("DGL", lambda: run(given, x), (x,))
