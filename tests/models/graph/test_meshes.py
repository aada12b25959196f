"""Graph networks with states of edges against PyTorch Geometric's MetaLayer and the formulas written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, graphs
from mpnn.models import GraphBlock, GraphCast, MeshGraphNet
from mpnn.update import EdgeUpdate

SYSTEM = "Graph networks with globals, MeshGraphNets, GraphCast"
N, E, DIM, EDGE = 9, 30, 6, 3
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def random_graph(dtype: torch.dtype, num_src: int = N, num_dst: int = N) -> Graph:
    edges = torch.stack([torch.randint(num_src, (E,)), torch.randint(num_dst, (E,))])
    return graphs.from_edges(edges, num_src=num_src, num_dst=num_dst, edge_attr=torch.randn(E, EDGE, dtype=dtype))


def agree(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> float:
    """The largest difference of outputs; gradients agree in float64."""
    if found.dtype == torch.float64:
        pairs = (torch.autograd.grad(y.square().sum(), inputs, retain_graph=True) for y in (found, expected))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    return (found - expected).abs().max().item()


def matrix(edges: EdgeUpdate) -> Tensor:
    """W of [e || x_i || x_j]."""
    return torch.cat([edges.of_edge.weight, edges.of_dst.weight, edges.of_src.weight], 1)


@DTYPES
def test_a_block_is_pyg_meta_layer(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    """Two graphs with global features. Node 8 has no edges."""
    pyg = pytest.importorskip("torch_geometric.nn")
    from torch_geometric.utils import scatter

    of_node = torch.tensor([0] * 5 + [1] * 4)
    src, dst = torch.cat([torch.randint(0, 5, (2, 15)), torch.randint(5, 8, (2, 10))], 1)
    block = GraphBlock(DIM, EDGE, 4, hidden=7).to(dtype)
    x, e, u = (torch.randn(n, d, dtype=dtype, requires_grad=True) for n, d in ((N, DIM), (25, EDGE), (2, 4)))

    class Edges(nn.Module):
        def forward(self, src: Tensor, dst: Tensor, edge: Tensor, u: Tensor, batch: Tensor) -> Tensor:
            edges = block.nodes.edges
            both = torch.cat([edge, dst, u[batch], src], 1)
            return edges.f(F.linear(both, matrix(edges), edges.of_dst.bias))

    class Nodes(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor, u: Tensor, batch: Tensor) -> Tensor:
            received = scatter(edge, edge_index[1], dim_size=len(x))
            return block.rest_of_nodes(block.nodes.update.linear(torch.cat([x, u[batch], received], 1)))

    class Globals(nn.Module):
        def forward(self, x: Tensor, edge_index: Tensor, edge: Tensor, u: Tensor, batch: Tensor) -> Tensor:
            of_edges = scatter(edge, batch[edge_index[1]], dim_size=2, reduce="mean")
            return block.globals(torch.cat([u, scatter(x, batch, reduce="mean"), of_edges], 1))

    pool = graphs.from_edges(torch.stack([torch.arange(N), of_node]), num_src=N, num_dst=2)
    found = block(x, e, u, graphs.from_edges(torch.stack([src, dst]), N), pool)
    expected = pyg.MetaLayer(Edges(), Nodes(), Globals())(x, torch.stack([src, dst]), e, u, of_node)
    for a, b in zip(found, expected, strict=True):
        measured(SYSTEM, "PyTorch Geometric MetaLayer", agree(a, b, [x, e, u]), error_bound(1, 40, dtype))


def step(layer: Any, x: Tensor, source: Tensor, e: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """A layer with one matrix for each MLP, and tensors of all ends."""
    src, dst = graph.edge_index
    edges, update = layer.edges, layer.update
    e = e + edges.f(F.linear(torch.cat([e, x[dst], source[src]], -1), matrix(edges), edges.of_dst.bias))
    message = torch.zeros_like(x).index_add(0, dst, e)
    return x + update.f(update.linear(torch.cat([x, message], -1))), e


@DTYPES
def test_mesh_graph_net_is_its_formula(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    model, graph = MeshGraphNet(DIM, EDGE, 2, 8, 3).to(dtype), random_graph(dtype)
    x = torch.randn(N, DIM, dtype=dtype, requires_grad=True)
    h, e = model.embed(x), model.embed_edge(graph.edge_attr)
    for layer in model.layers:
        h, e = step(layer, h, h, e, graph)
    error = agree(model(x, graph), model.head(h), [x, *model.parameters()])
    measured(SYSTEM, "formula", error, error_bound(12, 40, dtype))


@DTYPES
def test_graph_cast_is_its_formula(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    model = GraphCast(DIM, 3, EDGE, 2, 8, 2).to(dtype)
    to_mesh, to_grid = random_graph(dtype, N, 5), random_graph(dtype, 5, N)
    within = random_graph(dtype, 5, 5)
    grid, mesh = torch.randn(N, DIM, dtype=dtype, requires_grad=True), torch.randn(5, 3, dtype=dtype)
    enter, along, leave = (
        embed(g.edge_attr) for embed, g in zip(model.embed_edges, (to_mesh, within, to_grid), strict=True)
    )
    x, h = model.embed_grid(grid), model.embed_mesh(mesh)
    h, _ = step(model.encode, h, x, enter, to_mesh)
    x = x + model.grid(x)
    for layer in model.process:
        h, along = step(layer, h, h, along, within)
    x, _ = step(model.decode, x, h, leave, to_grid)
    error = agree(model(grid, mesh, to_mesh, within, to_grid), model.head(x), [grid, *model.parameters()])
    measured(SYSTEM, "formula", error, error_bound(12, 40, dtype))


def test_models_of_meshes_need_features_of_edges() -> None:
    bare = graphs.from_edges(torch.randint(N, (2, E)), N)
    with pytest.raises(ValueError, match="MeshGraphNet needs edge features"):
        MeshGraphNet(DIM, EDGE, 2, 8, 1)(torch.randn(N, DIM), bare)
    with pytest.raises(ValueError, match="GraphCast needs edge features"):
        GraphCast(DIM, 3, EDGE, 2, 8, 1)(torch.randn(N, DIM), torch.randn(N, 3), bare, bare, bare)
