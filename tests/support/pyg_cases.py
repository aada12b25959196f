"""Convolutions of PyTorch Geometric, each with what its edges bring, and edges to run them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

N, IN, OUT, EDGE, CLASSES = 13, 6, 4, 3, 3


def random_edges(num_src: int = N - 2, num_dst: int = N - 2, count: int = 40, seed: int = 1) -> Tensor:
    """Random edges with self-loops (two at node 0) and repeated edges; the last nodes have no in-neighbors."""
    generator = torch.Generator().manual_seed(seed)
    src = torch.randint(0, num_src, (count,), generator=generator)
    edges = torch.stack([src, torch.randint(0, num_dst, (count,), generator=generator)])
    if count >= 7:
        edges[:, :3] = torch.tensor([[0, 0, 1], [0, 0, 1]])
        edges[:, 5:7] = edges[:, 3:5]
    return edges


EDGES = random_edges()
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=N))
ALL = ["mean", "max", "min", "std", "var", "sum"]
SCALERS = ["identity", "amplification", "attenuation", "linear", "inverse_linear"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, OUT))


Case = tuple[Callable[..., Any], str | None]
CASES: dict[str, Case] = {
    "GCN": (lambda **o: pyg.GCNConv(IN, OUT, **o), None),
    "GCN, weights": (lambda **o: pyg.GCNConv(IN, OUT, **o), "weight"),
    "GCN, improved, cached": (lambda **o: pyg.GCNConv(IN, OUT, improved=True, cached=True, **o), None),
    "GCN, improved, weights": (lambda **o: pyg.GCNConv(IN, OUT, improved=True, **o), "weight"),
    "GCN, no loops": (lambda **o: pyg.GCNConv(IN, OUT, add_self_loops=False, bias=False, **o), "weight"),
    "GCN, not normalized": (lambda **o: pyg.GCNConv(IN, OUT, normalize=False, **o), "weight"),
    "SAGE": (lambda **o: pyg.SAGEConv(IN, OUT, **o), None),
    "SAGE, max": (lambda **o: pyg.SAGEConv(IN, OUT, aggr="max", normalize=True, **o), None),
    "SAGE, no root": (lambda **o: pyg.SAGEConv(IN, OUT, aggr="sum", root_weight=False, bias=False, **o), None),
    "SAGE, several": (lambda **o: pyg.SAGEConv(IN, OUT, aggr=["mean", "max", "std"], project=True, **o), None),
    "GIN": (lambda **o: pyg.GINConv(mlp(), train_eps=True, **o), None),
    "GINE": (lambda **o: pyg.GINEConv(mlp(), edge_dim=EDGE, **o), "vector"),
    "Graph": (lambda **o: pyg.GraphConv(IN, OUT, **o), "weight"),
    "Graph, mean": (lambda **o: pyg.GraphConv(IN, OUT, aggr="mean", **o), "weight"),
    "Graph, min": (lambda **o: pyg.GraphConv(IN, OUT, aggr="min", **o), None),
    "Simple": (lambda **o: pyg.SimpleConv(aggr="mean", combine_root="cat", **o), "weight"),
    "GatedGraph": (lambda **o: pyg.GatedGraphConv(8, num_layers=2, **o), "weight"),
    "GAT": (lambda **o: pyg.GATConv(IN, OUT, heads=3, **o), None),
    "GAT, mean of heads": (lambda **o: pyg.GATConv(IN, OUT, heads=2, concat=False, residual=True, **o), None),
    "GAT, edges": (lambda **o: pyg.GATConv(IN, OUT, heads=2, edge_dim=EDGE, **o), "vector"),
    "GAT, edge weights": (lambda **o: pyg.GATConv(IN, OUT, edge_dim=1, fill_value=0.5, **o), "weight"),
    "GAT, fill add": (lambda **o: pyg.GATConv(IN, OUT, edge_dim=EDGE, fill_value="add", **o), "vector"),
    "GAT, fill row": (lambda **o: pyg.GATConv(IN, OUT, edge_dim=EDGE, fill_value=torch.ones(EDGE), **o), "vector"),
    "GAT, no loops": (lambda **o: pyg.GATConv(IN, OUT, heads=2, add_self_loops=False, bias=False, **o), None),
    "GATv2": (lambda **o: pyg.GATv2Conv(IN, OUT, heads=3, residual=True, **o), None),
    "GATv2, shared, edges": (
        lambda **o: pyg.GATv2Conv(IN, OUT, heads=2, edge_dim=EDGE, share_weights=True, concat=False, **o),
        "vector",
    ),
    "GATv2, no loops": (lambda **o: pyg.GATv2Conv(IN, OUT, add_self_loops=False, **o), None),
    "Transformer": (lambda **o: pyg.TransformerConv(IN, OUT, heads=3, **o), None),
    "Transformer, edges": (lambda **o: pyg.TransformerConv(IN, OUT, heads=2, edge_dim=EDGE, beta=True, **o), "vector"),
    "Transformer, no root": (lambda **o: pyg.TransformerConv(IN, OUT, 2, concat=False, root_weight=False, **o), None),
    "RGCN": (lambda **o: pyg.RGCNConv(IN, OUT, CLASSES + 1, **o), "class"),
    "RGCN, bases": (lambda **o: pyg.RGCNConv(IN, OUT, CLASSES, num_bases=2, **o), "class"),
    "RGCN, blocks": (lambda **o: pyg.RGCNConv(IN, OUT, CLASSES, num_blocks=2, aggr="add", **o), "class"),
    "FastRGCN": (lambda **o: pyg.FastRGCNConv(IN, OUT, CLASSES + 1, **o), "class"),
    "FastRGCN, blocks": (lambda **o: pyg.FastRGCNConv(IN, OUT, CLASSES, num_blocks=2, aggr="add", **o), "class"),
    "RGAT": (lambda **o: pyg.RGATConv(IN, OUT, CLASSES + 1, heads=2, **o), "class"),
    "RGAT, within": (
        lambda **o: pyg.RGATConv(
            IN, OUT, CLASSES, num_bases=2, heads=2, concat=False, attention_mechanism="within-relation", **o
        ),
        "class",
    ),
    "SAGE, softmax": (lambda **o: pyg.SAGEConv(IN, OUT, aggr="softmax", **o), None),
    "LG": (lambda **o: pyg.LGConv(**o), "weight"),
    "APPNP": (lambda **o: pyg.APPNP(3, 0.1, **o), "weight"),
    "SG": (lambda **o: pyg.SGConv(IN, OUT, 2, **o), None),
    "TAG": (lambda **o: pyg.TAGConv(IN, OUT, 2, **o), "weight"),
    "ClusterGCN": (lambda **o: pyg.ClusterGCNConv(IN, OUT, diag_lambda=0.2, **o), None),
    "Cheb": (lambda **o: pyg.ChebConv(IN, OUT, 3, **o), "weight"),
    "Edge": (lambda **o: pyg.EdgeConv(nn.Linear(2 * IN, OUT), **o), None),
    "Edge, sum": (lambda **o: pyg.EdgeConv(nn.Linear(2 * IN, OUT), aggr="sum", **o), None),
    "Edge, mean": (lambda **o: pyg.EdgeConv(of_pairs(nn.SiLU(), nn.Linear(5, OUT)), aggr="mean", **o), None),
    "Edge, plain": (
        lambda **o: pyg.EdgeConv(of_pairs(nn.ReLU(), nn.Linear(5, OUT, False)), aggr="sum", **o),
        None,
    ),
    "Edge, no map": (lambda **o: pyg.EdgeConv(nn.Softplus(), aggr="sum", **o), None),
    "Edge, last": (lambda **o: pyg.EdgeConv(of_pairs(nn.LayerNorm(5)), aggr="sum", **o), None),
    "GEN, max": (lambda **o: pyg.GENConv(IN, OUT, aggr="max", edge_dim=EDGE, **o), "vector"),
    "GEN": (lambda **o: pyg.GENConv(IN, OUT, learn_t=True, **o), None),
    "GEN, edges": (lambda **o: pyg.GENConv(IN, OUT, edge_dim=EDGE, **o), "vector"),
    "ResGated": (lambda **o: pyg.ResGatedGraphConv(IN, OUT, edge_dim=EDGE, **o), "vector"),
    "PNA": (lambda **o: pyg.PNAConv(IN, OUT, ALL, SCALERS, DEGREES, **o), None),
    "PNA, towers": (
        lambda **o: pyg.PNAConv(IN, OUT, ALL[:3], SCALERS[:3], DEGREES, EDGE, towers=2, pre_layers=2, **o),
        "vector",
    ),
}


def of_pairs(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(2 * IN, 5), *layers)


def compile_fused() -> None:
    """Makes one convolution of each class whose aggregator PyTorch Geometric can fuse.

    It compiles `propagate` of a class for the first instance: after `SAGEConv(aggr="lstm")`, no SAGEConv of the process
    takes a sparse matrix. So which tests pass would depend on which test of the process runs first.
    """
    with torch.random.fork_rng():
        for make in (
            lambda: pyg.SAGEConv(IN, OUT),
            lambda: pyg.GraphConv(IN, OUT),
            lambda: pyg.GINConv(mlp()),
            lambda: pyg.SimpleConv(),
            lambda: pyg.ClusterGCNConv(IN, OUT),
            lambda: pyg.LGConv(),
        ):
            make()


compile_fused()


def attributes(kind: str | None, count: int) -> Tensor | None:
    if kind is None:
        return None
    if kind == "class":
        return torch.arange(count) % CLASSES
    shape = (count,) if kind == "weight" else (count, EDGE)
    return torch.rand(shape, dtype=torch.float64).requires_grad_()
