"""Graph networks with the weights of PyTorch Geometric's layers give their outputs and gradients: one row for each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import graphs
from mpnn.models import (
    GAT,
    GCN,
    GGNN,
    GIN,
    GNN,
    MPNN,
    PNA,
    RGCN,
    GATv2,
    GraphNetwork,
    GraphSAGE,
    GraphTransformer,
    MoNet,
)

pyg = pytest.importorskip("torch_geometric.nn")

SUMS = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
WEIGHTED = "GAT, GATv2, MoNet, VAIN"
N, E, IN, EDGE, DIM, CLASSES, RELATIONS = 13, 40, 6, 3, 8, 3, 4
AGGREGATORS, SCALERS = ["mean", "max", "min", "var"], ["identity", "amplification", "attenuation"]


class World:
    """Forty edges with features and classes, repeated ones too; nodes 0 and 1 have no in-neighbors, class 3 no edge."""

    def __init__(self, dtype: torch.dtype) -> None:
        src, dst = torch.randint(0, N, (E,)), torch.randint(2, N, (E,))
        self.edges = torch.stack([src, dst])
        self.apart = self.edges[:, src != dst]
        self.kind = torch.randint(0, RELATIONS - 1, (E,))
        self.x = torch.randn(N, IN, dtype=dtype, requires_grad=True)
        self.attr = torch.randn(E, EDGE, dtype=dtype, requires_grad=True)
        self.plain = graphs.from_edges(self.edges, N)
        self.classed = graphs.from_edges(self.edges, N, edge_type=self.kind)
        self.loops = graphs.from_edges(self.apart, N).with_self_loops()


def copied(conv: nn.Module, **weights: Tensor | None) -> nn.Module:
    """`conv` with these weights."""
    given = {name.replace("__", "."): w.detach() for name, w in weights.items() if w is not None}
    own = conv.to(next(iter(given.values())).dtype).state_dict()
    assert given.keys() <= own.keys()
    conv.load_state_dict({name: given[name].reshape(w.shape) if name in given else w for name, w in own.items()})
    return conv


def gcn(model: Any, w: World) -> Tensor:
    h = w.x
    for k, layer in enumerate(model.layers):
        to = layer.attention.to_value
        h = copied(pyg.GCNConv(*to.weight.T.shape, bias=False), lin__weight=to.weight)(h, w.apart)
        h = h.relu() if k == 0 else h
    return h


def gat(model: Any, w: World) -> Tensor:
    h = w.x
    for k, layer in enumerate(model.layers):
        a, heads = layer.attention, layer.attention.heads
        conv = pyg.GATConv(h.shape[1], a.to_value.out_features // heads, heads, concat=k == 0)
        copied(conv, lin__weight=a.to_value.weight, att_src=a.by_src, att_dst=a.by_dst, bias=a.bias)
        h = conv(h, w.apart)
        h = F.elu(h) if k == 0 else h
    return h


def gatv2(model: Any, w: World) -> Tensor:
    h = w.x
    for k, layer in enumerate(model.layers):
        a, heads = layer.attention, layer.attention.heads
        conv = pyg.GATv2Conv(h.shape[1], a.to_value.out_features // heads, heads, concat=k == 0).to(h.dtype)
        conv.lin_l.load_state_dict(a.to_value.state_dict())
        conv.lin_r.load_state_dict(a.to_query.state_dict())
        h = copied(conv, att=a.vector, bias=a.bias)(h, w.apart)
        h = F.elu(h) if k == 0 else h
    return h


def sage(model: Any, w: World, aggr: str = "mean") -> Tensor:
    h = w.x
    for layer in model.layers:
        linear = layer.update.linear
        conv = pyg.SAGEConv(h.shape[1], DIM, aggr=aggr)
        own, neighbors = linear.weight.split(h.shape[1], 1)
        copied(conv, lin_r__weight=own, lin_l__weight=neighbors, lin_l__bias=linear.bias)
        h = F.normalize(conv(h, w.edges).relu(), dim=-1)
    return model.head(h)


def gin(model: Any, w: World) -> Tensor:
    h, logits = w.x, model.heads[0](w.x)
    for layer, head in zip(model.layers, model.heads[1:], strict=True):
        h = copied(pyg.GINConv(layer.update.f), eps=layer.update.eps)(h, w.edges)
        logits = logits + head(h)
    return logits


def gine(model: Any, w: World) -> Tensor:
    h, logits = w.x, model.heads[0](w.x)
    for layer, head in zip(model.layers, model.heads[1:], strict=True):
        conv = pyg.GINEConv(layer.update.f, edge_dim=EDGE).to(h.dtype)
        conv.lin.load_state_dict(layer.attention.function.edge.state_dict())
        h = copied(conv, eps=layer.update.eps)(h, w.edges, w.attr)
        logits = logits + head(h)
    return logits


def gnn(model: Any, w: World, aggr: str = "sum") -> Tensor:
    h = w.x
    for k, layer in enumerate(model.layers):
        linear = layer.update.linear
        conv = pyg.GraphConv(h.shape[1], linear.out_features, aggr=aggr)
        own, neighbors = linear.weight.split(h.shape[1], 1)
        h = copied(conv, lin_root__weight=own, lin_rel__weight=neighbors, lin_rel__bias=linear.bias)(h, w.edges)
        h = h.relu() if k < 2 else h
    return h


def ggnn(model: Any, w: World) -> Tensor:
    conv = copied(pyg.GatedGraphConv(DIM, num_layers=4), weight=model.layer.attention.weight.expand(4, -1, -1))
    conv.rnn.load_state_dict(model.layer.update.cell.state_dict())
    return model.readout(conv(w.x, w.edges), w.x)


def rgcn(model: Any, w: World) -> Tensor:
    h = w.x
    for k, layer in enumerate(model.layers):
        a, own = layer.attention, layer.update.linear
        bases = getattr(a, "coefficients", None)
        conv = pyg.RGCNConv(h.shape[1], own.out_features, RELATIONS, num_bases=None if bases is None else 2)
        h = copied(conv, weight=a.weight, bias=a.bias, root=own.weight.T, comp=bases)(h, w.edges, w.kind)
        h = h.relu() if k == 0 else h
    return h


def monet(model: Any, w: World) -> Tensor:
    h = w.x
    for k, (layer, place) in enumerate(zip(model.layers, model.places, strict=True)):
        a, out = layer.attention, layer.attention.bias.shape[0]
        conv = pyg.GMMConv(h.shape[1], out, EDGE, a.mu.shape[0])
        copied(
            conv, g=a.to_value.weight.T, mu=a.mu, sigma=a.sigma, bias=a.bias, root__weight=torch.zeros(out, h.shape[1])
        )
        h = conv.to(h.dtype)(h, w.edges, place(w.attr))
        h = h.relu() if k == 0 else h
    return h


def pna(model: Any, w: World) -> Tensor:
    h, degrees = model.embed(w.x), torch.bincount(w.plain.degree())
    for layer in model.layers:
        message, update = layer.attention.function, layer.update
        towers = {"towers": len(message.mlps), "divide_input": True}
        conv = pyg.PNAConv(DIM, DIM, AGGREGATORS, SCALERS, degrees, EDGE, **towers)
        for ours, peer in (
            *zip(message.mlps, (mlp[0] for mlp in conv.pre_nns), strict=True),
            *zip(update.mlps, (mlp[0] for mlp in conv.post_nns), strict=True),
            *((message.edge, conv.edge_encoder), (update.out, conv.lin)),
        ):
            peer.load_state_dict(ours.state_dict())
        h = h + conv.to(h.dtype)(h, w.edges, w.attr).relu()
    return model.head(h)


def mpnn(model: Any, w: World) -> Tensor:
    network = model.layer.attention.function.network
    weights = {name: weight.clone() for name, weight in network.state_dict().items()}
    conv = pyg.NNConv(DIM, DIM, network, root_weight=False, bias=False)
    network.load_state_dict(weights)  # NNConv draws them anew
    h = model.embed(w.x)
    for _ in range(model.rounds):
        h = model.layer.update.cell(conv(h, w.edges, w.attr), h)
    return model.readout(h, w.x)


def graph_network(model: Any, w: World) -> Tensor:
    """`e + V relu( W_1 h_src + W_2 h_dst + W_3 e )`, then `h + V relu( W [h || sum of e] )`."""
    h, e = model.embed(w.x), model.embed_edge(w.attr)
    for layer in model.layers:
        edges, first, last = layer.edges, layer.update.linear, layer.update.f[1]

        def edge_model(src, dst, e, u, batch, edges=edges):
            return e + edges.f[1]((edges.of_src(src) + edges.of_dst(dst) + edges.of_edge(e)).relu())

        def node_model(x, edges, e, u, batch, first=first, last=last):
            message = torch.zeros_like(x).index_add(0, edges[1], e)
            return x + last(first(torch.cat([x, message], 1)).relu())

        h, e, _ = pyg.MetaLayer(edge_model, node_model)(h, w.edges, e)
    return torch.cat([model.head(h), model.edge_head(e)])


def graph_transformer(model: Any, w: World) -> Tensor:
    h = w.x
    for layer in model.layers:
        a, last = layer.attention, not layer.attention.concat
        width = a.to_query.out_features // a.heads
        conv = pyg.TransformerConv(h.shape[1], width, a.heads, concat=not last, beta=True, edge_dim=EDGE).to(h.dtype)
        maps = {"query": a.to_query, "key": a.to_key, "value": a.to_value, "edge": a.to_edge}
        for name, linear in {**maps, "skip": layer.update.own, "beta": layer.update.gate}.items():
            getattr(conv, f"lin_{name}").load_state_dict(linear.state_dict())
        h = conv(h, w.edges, w.attr)
        h = h if layer.update.f is None else layer.update.f(h)
    return h


class Row(NamedTuple):
    """`ours` calls the model, `theirs` calls PyTorch Geometric's layers with its weights."""

    system: str
    peer: str
    make: Callable[[], nn.Module]
    theirs: Callable[[Any, World], Tensor]
    ours: Callable[[Any, World], Tensor] = lambda m, w: m(w.x, w.plain)


def with_loops(model: Any, w: World) -> Tensor:
    return model(w.x, w.loops)


def of_classes(model: Any, w: World) -> Tensor:
    return model(w.x, w.classed)


def of_features(model: Any, w: World) -> Tensor:
    return model(w.x, w.plain, w.attr)


def of_attributes(model: Any, w: World) -> Tensor:
    return model(w.x, graphs.from_edges(w.edges, N, edge_attr=w.attr))


ROWS = {
    "GCN": Row(SUMS, "GCNConv", lambda: GCN(IN, CLASSES), gcn, with_loops),
    "GAT": Row(WEIGHTED, "GATConv", lambda: GAT(IN, CLASSES, 4, 3), gat, with_loops),
    "GAT, heads": Row(WEIGHTED, "GATConv", lambda: GAT(IN, CLASSES, 4, 3, out_heads=3), gat, with_loops),
    "GATv2": Row(WEIGHTED, "GATv2Conv", lambda: GATv2(IN, CLASSES, 4, 3, out_heads=2), gatv2, with_loops),
    "SAGE": Row(SUMS, "SAGEConv", lambda: GraphSAGE(IN, CLASSES, DIM), sage),
    "SAGE, max": Row(SUMS, "SAGEConv", lambda: GraphSAGE(IN, CLASSES, DIM, aggregate="max"), partial(sage, aggr="max")),
    "GIN": Row(SUMS, "GINConv", lambda: GIN(IN, CLASSES, DIM, 3), gin),
    "GIN, eps": Row(SUMS, "GINConv", lambda: GIN(IN, CLASSES, DIM, 3, learn_eps=True), gin),
    "GINE": Row(SUMS, "GINEConv", lambda: GIN(IN, CLASSES, DIM, 3, edge_dim=EDGE), gine, of_attributes),
    "GNN": Row(SUMS, "GraphConv", lambda: GNN(IN, CLASSES, DIM, 3), gnn),
    "GNN, max": Row(SUMS, "GraphConv", lambda: GNN(IN, CLASSES, DIM, 3, aggregate="max"), partial(gnn, aggr="max")),
    "GNN, mean": Row(SUMS, "GraphConv", lambda: GNN(IN, CLASSES, DIM, 3, aggregate="mean"), partial(gnn, aggr="mean")),
    "GGNN": Row(SUMS, "GatedGraphConv", lambda: without_bias(GGNN(IN, CLASSES, DIM, 4)), ggnn),
    "RGCN": Row(SUMS, "RGCNConv", lambda: RGCN(IN, CLASSES, RELATIONS, DIM), rgcn, of_classes),
    "RGCN, bases": Row(SUMS, "RGCNConv", lambda: RGCN(IN, CLASSES, RELATIONS, DIM, bases=2), rgcn, of_classes),
    "MoNet": Row(WEIGHTED, "GMMConv", lambda: MoNet(IN, CLASSES, DIM, 4, coordinates=EDGE), monet, of_features),
    "PNA": Row(SUMS, "PNAConv", lambda: PNA(IN, CLASSES, DIM, 2, **PNAS), pna, of_features),
    "PNA, towers": Row(SUMS, "PNAConv", lambda: PNA(IN, CLASSES, DIM, 2, towers=2, **PNAS), pna, of_features),
    "MPNN": Row(SUMS, "NNConv", lambda: MPNN(IN, EDGE, CLASSES, DIM), mpnn, of_features),
    "GraphNetwork": Row(
        SUMS,
        "MetaLayer",
        lambda: GraphNetwork(IN, EDGE, CLASSES, CLASSES, DIM, layers=2),
        graph_network,
        lambda m, w: torch.cat(of_features(m, w)),
    ),
    "GraphTransformer": Row(
        "Graph Transformer (1 hop, edge features)",
        "TransformerConv",
        lambda: GraphTransformer(IN, CLASSES, 4, 2, edge_dim=EDGE),
        graph_transformer,
        of_features,
    ),
}
PNAS: dict[str, Any] = {"aggregators": AGGREGATORS, "edge_dim": EDGE}


def without_bias(model: Any) -> Any:
    """A GatedGraphConv adds no bias to its sum."""
    model.layer.attention.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ROWS)
@pytest.mark.covering
def test_outputs_and_gradients_are_those_of_pyg(name: str, dtype: torch.dtype, measured: Callable[..., None]) -> None:
    row, w = ROWS[name], World(dtype)
    model = row.make().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # none stays at a special value such as zero
            parameter.add_(0.2 * torch.randn_like(parameter) * parameter.requires_grad)
    expected = row.theirs(model, w)  # first, because some of its layers draw the weights of modules that they take
    found = row.ours(model, w)
    exact = torch.float32 if row.peer == "PNAConv" else dtype  # whose mean of log(d + 1) is a float32 number
    measured(
        row.system,
        f"PyTorch Geometric {row.peer}",
        (found - expected).abs().max().item(),
        error_bound(2, 12 * DIM, exact),
    )
    if exact == torch.float64:
        gradients = (
            torch.autograd.grad(y.square().sum(), [w.x, w.attr], materialize_grads=True) for y in (found, expected)
        )
        for a, b in zip(*gradients, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("kind", [GCN, GAT])
def test_features_may_be_sparse(kind: type[nn.Module]) -> None:
    w, model = World(torch.float64), kind(IN, CLASSES).double().eval()
    torch.testing.assert_close(model(w.x.detach().to_sparse(), w.loops), model(w.x, w.loops))
