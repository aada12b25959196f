"""Layers with states or weights of edges, compared with the same written in torch: one of GraphCast over its
multi-mesh, and one of SchNet, forward and backward with their MLPs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.contest import BOTH, OURS, Bar, Case, Contest, Entry
from benchmarks.sizes import Sizes
from benchmarks.truth import Agreement
from mpnn import graphs
from mpnn.models.graph.schnet import SchNet
from mpnn.models.layers.interaction import interaction

TORCH = "plain torch"
WIDTH = 128


def cases(sizes: Sizes) -> Iterator[Case]:
    level, atoms, edges = (6, 5000, 120_000) if sizes.layers > 1 else (3, 500, 12_000)
    name = f"a layer of GraphCast, {10 * 4**level + 2:,} mesh nodes, width {WIDTH}"
    yield Case("physics", name, partial(_graph_cast, level), (BOTH,))
    name = f"a layer of SchNet, {atoms:,} atoms, {edges:,} edges x {WIDTH}"
    yield Case("physics", name, partial(_schnet, atoms, edges), (BOTH,))


def _bars() -> list[Bar]:
    return [
        Bar(f"at least twice as fast as {TORCH}", 2, "at least", BOTH, TORCH),
        Bar(f"at most half of {TORCH}'s memory", 2, "less memory", BOTH, TORCH),
    ]


def _graph_cast(level: int) -> Contest:
    graph, layer = graphs.icosphere(level), interaction(WIDTH, activation=torch.nn.SiLU)
    src, dst = graph.edge_index
    x, e = (torch.randn(n, WIDTH).requires_grad_() for n in (graph.num_dst, graph.num_edges))
    edges, update = layer.edges, layer.update
    maps = torch.cat([edges.of_edge.weight, edges.of_dst.weight, edges.of_src.weight], 1).detach().requires_grad_()

    def ours() -> Tensor:
        y, states = layer(x, graph, edge_attr=e)
        return torch.cat([y, states])

    def plain() -> Tensor:
        states = e + edges.f(F.linear(torch.cat([e, x[dst], x[src]], 1), maps, edges.of_dst.bias))
        message = torch.zeros_like(x).index_add(0, dst, states)
        y = x + update.f(F.linear(torch.cat([x, message], 1), update.linear.weight, update.linear.bias))
        return torch.cat([y, states])

    shared = [x, e, *edges.f.parameters(), *update.parameters(), edges.of_dst.bias]
    own = [m.weight for m in (edges.of_edge, edges.of_dst, edges.of_src)]
    entries = [Entry(OURS, ours, (*shared, *own)), Entry(TORCH, plain, (*shared, maps))]
    return _contest(entries, len(shared), graph.num_dst, graph.num_edges)


def _schnet(atoms: int, num_edges: int) -> Contest:
    model = SchNet(WIDTH, WIDTH, 1)
    layer, graph = model.layers[0], graphs.from_edges(torch.randint(atoms, (2, num_edges)), atoms)
    src, dst = graph.edge_index
    x, basis = torch.randn(atoms, WIDTH).requires_grad_(), model.basis(10 * torch.rand(num_edges))
    attention = layer.attention

    def plain() -> Tensor:
        messages = F.linear(x, attention.value.weight)[src] * attention.filter(basis)
        summed = torch.zeros(atoms, WIDTH).index_add(0, dst, messages)
        return layer.update(x, attention.out(summed))

    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    entries = [Entry(OURS, lambda: layer(x, graph, edge_attr=basis), leaves), Entry(TORCH, plain, leaves)]
    return _contest(entries, len(leaves), atoms, num_edges)


class Shared(Agreement):
    """Compares results and the gradients of the first leaves: plain torch has one matrix for three maps."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def __call__(self, entry: Entry, direction: str) -> float:
        return super().__call__(replace(entry, leaves=entry.leaves[: self.count]), direction)


def _contest(entries: list[Entry], shared: int, nodes: int, edges: int) -> Contest:
    described = "each other's results and gradients of features and shared weights"
    return Contest(entries, Shared(shared), described, _bars(), {"nodes": nodes, "edges": edges})
