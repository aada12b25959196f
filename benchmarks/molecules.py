"""Small graphs: a batch of molecules or proteins, four layers, and a graph that is built again in each step, as in
training with shuffled batches. What is paid besides arithmetic shows here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.contest import BOTH, FORWARD, OURS, Bar, Case, Contest, Entry
from benchmarks.peers import unless_missing
from benchmarks.truth import Agreement
from mpnn import MessagePassing, graphs
from mpnn.attention import Additive, Degree
from mpnn.data import tu
from mpnn.update import MLP, Add, Concat

LAYERS, WIDTH, HEADS = 4, 64, 8
DIRECTIONS = (FORWARD, BOTH)


def cases(graphs_in_batch: int) -> Iterator[Case]:
    for data in ("MUTAG", "PROTEINS"):
        for model in ("GIN", "GAT", "GCN", "SAGE"):
            name = f"{model}, {LAYERS} layers of {WIDTH}, {graphs_in_batch} graphs of {data}, a new graph in each step"
            yield Case("molecules", name, partial(_contest, model, data, graphs_in_batch), DIRECTIONS)


class FirstLeaf(Agreement):
    """Compares results and the gradients of the features: PyG splits the weights of GraphSAGE in two."""

    description = "each other's results and gradients of the features"

    def __call__(self, entry: Entry, direction: str) -> float:
        return super().__call__(replace(entry, leaves=entry.leaves[:1]), direction)


def _contest(model: str, data: str, count: int) -> Contest:
    return contest(model, f"PyG {model}", *_batch(data, count))


def contest(model: str, peer: str, edges: Tensor, nodes: int) -> Contest:
    """Layers over these edges, of which each call makes a graph, compared with PyTorch Geometric's with the same
    weights."""
    x = torch.randn(nodes, WIDTH).requires_grad_()
    layers = nn.ModuleList(_LAYERS[model]() for _ in range(LAYERS))

    def ours() -> Tensor:
        graph, h = graphs.from_edges(edges, nodes), x
        for layer in layers:
            h = layer(h, graph)
        return h

    def make() -> Entry:
        convs = nn.ModuleList(_TWINS[model](layer) for layer in layers)

        def run_pyg() -> Tensor:
            h = x
            for conv in convs:
                h = conv(h, edges)
            return h

        return Entry(peer, run_pyg, (x, *convs.parameters()))

    entries = [Entry(OURS, ours, (x, *_trained(layers))), unless_missing(peer, "torch_geometric", make)]
    bars = [Bar(f"at most 0.9 of {peer}'s time", 0.9, "at most", direction, peer) for direction in DIRECTIONS]
    return Contest(entries, FirstLeaf(), FirstLeaf.description, bars, {"nodes": nodes, "edges": edges.shape[1]})


def _batch(data: str, count: int) -> tuple[Tensor, int]:
    """The edges of the first `count` graphs, numbered graph by graph, and the number of nodes."""
    edges, nodes = [], 0
    for graph in tu(data).graphs[:count]:
        edges.append(graph.edge_index + nodes)
        nodes += graph.num_nodes
    return torch.cat(edges, 1), nodes


def _trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]


_LAYERS: dict[str, Callable[[], MessagePassing]] = {
    "GIN": lambda: MessagePassing(None, "sum", Add(MLP(WIDTH, WIDTH))),
    "GAT": lambda: MessagePassing(None, "sum", None, Additive(WIDTH, WIDTH // HEADS, HEADS)),
    "GCN": lambda: MessagePassing(None, "sum", None, Degree(WIDTH, WIDTH)),
    "SAGE": lambda: MessagePassing(None, "mean", Concat(WIDTH, WIDTH)),
}


# ------------------------------------------------------------------------------- PyG's layers with the same weights


def _gin(layer: MessagePassing) -> nn.Module:
    from torch_geometric.nn import GINConv

    state = {name: x.clone() for name, x in layer.update.f.state_dict().items()}
    # torch's maps, as users of PyG have them: this library's may run by oneDNN
    conv = GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Identity(), nn.Linear(WIDTH, WIDTH)))
    conv.nn.load_state_dict(state)
    return conv


def _gat(layer: MessagePassing) -> nn.Module:
    from torch_geometric.nn import GATConv

    own, conv = layer.attention, GATConv(WIDTH, WIDTH // HEADS, heads=HEADS, add_self_loops=False)
    return _copied(conv, {conv.att_src: own.by_src, conv.att_dst: own.by_dst, conv.lin.weight: own.to_value.weight})


def _gcn(layer: MessagePassing) -> nn.Module:
    from torch_geometric.nn import GCNConv

    conv = GCNConv(WIDTH, WIDTH, add_self_loops=False)
    return _copied(conv, {conv.lin.weight: layer.attention.to_value.weight})


def _sage(layer: MessagePassing) -> nn.Module:
    from torch_geometric.nn import SAGEConv

    conv, linear = SAGEConv(WIDTH, WIDTH), layer.update.linear
    own, neighbors = linear.weight[:, :WIDTH], linear.weight[:, WIDTH:]
    return _copied(conv, {conv.lin_r.weight: own, conv.lin_l.weight: neighbors, conv.lin_l.bias: linear.bias})


def _copied(conv: nn.Module, weights: dict[nn.Parameter, Tensor]) -> nn.Module:
    with torch.no_grad():
        for weight, own in weights.items():
            weight.copy_(own.view_as(weight) if own.is_contiguous() else own)
    return conv


_TWINS: dict[str, Callable[[MessagePassing], nn.Module]] = {"GIN": _gin, "GAT": _gat, "GCN": _gcn, "SAGE": _sage}
