"""`from_pyg`: on the same weights, the operator says what the convolution of PyTorch Geometric says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, graphs
from mpnn.models import from_pyg

pyg = pytest.importorskip("torch_geometric.nn")

N, IN, OUT, EDGE, CLASSES = 13, 6, 4, 3, 3
GNNS = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
ATTENTION = "GAT, GATv2, MoNet, VAIN"
TRANSFORMER = "Graph Transformer (1 hop, edge features)"
SYSTEM = {"GATConv": ATTENTION, "GATv2Conv": ATTENTION, "TransformerConv": TRANSFORMER}


def edges() -> Tensor:
    """Forty edges: node 0 has two self-loops and node 1 one, some edges are there twice, and the last nodes have
    no neighbors."""
    found = torch.randint(0, N - 2, (2, 40), generator=torch.Generator().manual_seed(1))
    found[:, :3] = torch.tensor([[0, 0, 1], [0, 0, 1]])
    found[:, 5:7] = found[:, 3:5]
    return found


EDGES = edges()
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=N))
ALL = ["mean", "max", "min", "std", "var", "sum"]
SCALED = ["identity", "amplification", "attenuation"]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(IN, 8), nn.ReLU(), nn.Linear(8, OUT))


def attributes(kind: str | None) -> Tensor | None:
    """What edges bring: nothing, a positive weight, a vector, one as wide as a node's, or their classes."""
    shapes = {"vector": (40, EDGE), "wide": (40, IN)}
    if kind is None:
        return None
    if kind == "class":
        return torch.randint(0, CLASSES, (40,))
    return torch.rand(40, dtype=torch.float64) if kind == "weight" else torch.randn(shapes[kind], dtype=torch.float64)


def drawn(conv: nn.Module) -> nn.Module:
    """In float64, with weights as large as make attention choose, and nothing left at zero."""
    conv.double().eval()
    for parameter in conv.parameters():
        nn.init.normal_(parameter, std=0.5)
    return conv


Case = tuple[Callable[[], Any], str | None]
CASES: dict[str, Case] = {
    "GCN": (lambda: pyg.GCNConv(IN, OUT), None),
    "GCN, weights": (lambda: pyg.GCNConv(IN, OUT), "weight"),
    "GCN, improved": (lambda: pyg.GCNConv(IN, OUT, improved=True), "weight"),
    "GCN, no loops, no bias": (lambda: pyg.GCNConv(IN, OUT, add_self_loops=False, bias=False), "weight"),
    "GCN, weights as they are": (lambda: pyg.GCNConv(IN, OUT, normalize=False), "weight"),
    "SAGE": (lambda: pyg.SAGEConv(IN, OUT), None),
    "SAGE, max, unit length": (lambda: pyg.SAGEConv(IN, OUT, aggr="max", normalize=True), None),
    "SAGE, projected, no root": (lambda: pyg.SAGEConv(IN, OUT, aggr="sum", project=True, root_weight=False), None),
    "SAGE, no root, unit": (lambda: pyg.SAGEConv(IN, OUT, normalize=True, root_weight=False, bias=False), None),
    "GAT": (lambda: pyg.GATConv(IN, OUT, heads=3), None),
    "GAT, mean of heads, residual": (lambda: pyg.GATConv(IN, OUT, heads=2, concat=False, residual=True), None),
    "GAT, edges": (lambda: pyg.GATConv(IN, OUT, heads=2, edge_dim=EDGE), "vector"),
    "GAT, one number an edge": (lambda: pyg.GATConv(IN, OUT, edge_dim=1, fill_value=0.5), "weight"),
    "GAT, loops filled by sums": (lambda: pyg.GATConv(IN, OUT, edge_dim=EDGE, fill_value="add"), "vector"),
    "GAT, loops filled by a row": (lambda: pyg.GATConv(IN, OUT, edge_dim=EDGE, fill_value=torch.ones(EDGE)), "vector"),
    "GAT, no loops": (lambda: pyg.GATConv(IN, OUT, edge_dim=EDGE, add_self_loops=False, bias=False), "vector"),
    "GATv2": (lambda: pyg.GATv2Conv(IN, OUT, heads=3), None),
    "GATv2, one map": (lambda: pyg.GATv2Conv(IN, OUT, heads=2, share_weights=True), None),
    "GATv2, edges, mean of heads": (lambda: pyg.GATv2Conv(IN, OUT, heads=2, edge_dim=EDGE, concat=False), "vector"),
    "GATv2, no loops, residual": (
        lambda: pyg.GATv2Conv(IN, OUT, edge_dim=EDGE, add_self_loops=False, residual=True, bias=False),
        "vector",
    ),
    "Transformer": (lambda: pyg.TransformerConv(IN, OUT, heads=3), None),
    "Transformer, edges, gated": (lambda: pyg.TransformerConv(IN, OUT, heads=2, edge_dim=EDGE, beta=True), "vector"),
    "Transformer, mean of heads, gated": (lambda: pyg.TransformerConv(IN, OUT, 2, concat=False, beta=True), None),
    "Transformer, no root": (lambda: pyg.TransformerConv(IN, OUT, root_weight=False, bias=False), None),
    "GIN": (lambda: pyg.GINConv(mlp(), eps=0.3), None),
    "GIN, learned eps": (lambda: pyg.GINConv(mlp(), train_eps=True), None),
    "GINE": (lambda: pyg.GINEConv(mlp(), edge_dim=EDGE, eps=0.1), "vector"),
    "GINE, edges as wide as nodes": (lambda: pyg.GINEConv(mlp(), train_eps=True), "wide"),
    "Graph, sum": (lambda: pyg.GraphConv(IN, OUT), None),
    "Graph, max": (lambda: pyg.GraphConv(IN, OUT, aggr="max"), None),
    "Graph, weighted mean": (lambda: pyg.GraphConv(IN, OUT, aggr="mean"), "weight"),
    "RGCN": (lambda: pyg.RGCNConv(IN, OUT, CLASSES), "class"),
    "RGCN, bases": (lambda: pyg.RGCNConv(IN, OUT, CLASSES, num_bases=2), "class"),
    "RGCN, blocks": (lambda: pyg.RGCNConv(IN, OUT, CLASSES, num_blocks=2), "class"),
    "RGCN, sum, no root": (lambda: pyg.RGCNConv(IN, OUT, CLASSES, aggr="add", root_weight=False), "class"),
    "PNA": (lambda: pyg.PNAConv(IN, OUT, ALL, SCALED, DEGREES), None),
    "PNA, towers of all": (
        lambda: pyg.PNAConv(IN, OUT, ALL, SCALED, DEGREES, EDGE, towers=2, pre_layers=2, post_layers=2),
        "vector",
    ),
    "PNA, towers of parts": (
        lambda: pyg.PNAConv(IN, OUT, ["mean", "max"], SCALED[:1], DEGREES, towers=2, divide_input=True),
        None,
    ),
    "GatedGraph": (lambda: pyg.GatedGraphConv(8, num_layers=3), None),
    "GatedGraph, weighted mean": (lambda: pyg.GatedGraphConv(IN, num_layers=2, aggr="mean"), "weight"),
}


def both(conv: nn.Module, op: nn.Module, x: Tensor, attr: Tensor | None, kind: str | None) -> tuple[Tensor, Tensor]:
    """What the two say."""
    if kind == "class":
        return conv(x, EDGES, attr), op(x, graph=graphs.from_edges(EDGES, N, edge_type=attr))
    if attr is None:
        return conv(x, EDGES), op(x, graph=graphs.from_edges(EDGES, N))
    return conv(x, EDGES, attr), op(x, graph=graphs.from_edges(EDGES, N), edge_attr=attr)


@pytest.mark.parametrize("name", CASES)
def test_operator_and_convolution_agree(name: str, measured: Callable[..., None]) -> None:
    make, kind = CASES[name]
    conv = drawn(make())
    op = from_pyg(conv)
    x, attr = torch.randn(N, IN, dtype=torch.float64), attributes(kind)
    expected, found = both(conv, op, x, attr, kind)
    torch.testing.assert_close(found, expected)
    rough = attr.float() if attr is not None and attr.is_floating_point() else attr
    expected, found = both(conv.float(), op.float(), x.float(), rough, kind)
    peer = f"PyTorch Geometric {type(conv).__name__}"
    bound = error_bound(1, 32, scale=max(1, expected.abs().max().item()))  # PNA multiplies sums by log-degrees
    measured(SYSTEM.get(type(conv).__name__, GNNS), peer, (found - expected).abs().max().item(), bound)


@pytest.mark.parametrize("name", ["GCN, improved", "GAT, edges", "GATv2, edges, mean of heads", "GINE", "PNA", "RGCN"])
def test_gradients_agree(name: str) -> None:
    """Those of the features and of what edges bring; self-loops whose attributes are means of these included.

    Edge 0 is left out: of two loops at a node the last one counts, but PyTorch Geometric gives the gradient to both.
    """
    make, kind = CASES[name]
    conv = drawn(make())
    op = from_pyg(conv)
    x, attr = torch.randn(N, IN, dtype=torch.float64, requires_grad=True), attributes(kind)
    given = [x]
    if attr is not None and attr.is_floating_point():
        given.append(attr.requires_grad_())
    weight = torch.randn(N, conv(x, EDGES, attr).shape[1] if attr is not None else OUT, dtype=torch.float64)
    expected, found = both(conv, op, x, attr, kind)
    for a, b in zip(
        torch.autograd.grad((found * weight).sum(), given),
        torch.autograd.grad((expected * weight).sum(), given),
        strict=True,
    ):
        torch.testing.assert_close(a[1:], b[1:]) if len(a) == len(EDGES[0]) else torch.testing.assert_close(a, b)


BIPARTITE: dict[str, Callable[[], Any]] = {
    "SAGE": lambda: pyg.SAGEConv((IN, 5), OUT, project=True),
    "GAT": lambda: pyg.GATConv((IN, 5), OUT, heads=2, residual=True, add_self_loops=False),
    "GAT with loops": lambda: pyg.GATConv((IN, 5), OUT, heads=2),
    "GATv2": lambda: pyg.GATv2Conv((IN, 5), OUT, heads=2, add_self_loops=False),
    "Transformer": lambda: pyg.TransformerConv((IN, 5), OUT, heads=2, beta=True),
    "Graph": lambda: pyg.GraphConv((IN, 5), OUT),
    "RGCN": lambda: pyg.RGCNConv((IN, 5), OUT, CLASSES),
}


@pytest.mark.parametrize("name", BIPARTITE)
def test_two_sets_of_nodes(name: str) -> None:
    """What PyTorch Geometric calls with (x_src, x_dst) is called with x_dst and source=x_src."""
    conv = drawn(BIPARTITE[name]())
    x_src, x_dst = torch.randn(9, IN, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    edge_index = torch.stack([torch.randint(0, 9, (20,)), torch.randint(1, 6, (20,))])
    kind = torch.randint(0, CLASSES, (20,)) if name == "RGCN" else None
    graph = graphs.from_edges(edge_index, num_src=9, num_dst=6, edge_type=kind)
    expected = conv((x_src, x_dst), edge_index) if kind is None else conv((x_src, x_dst), edge_index, kind)
    torch.testing.assert_close(from_pyg(conv)(x_dst, source=x_src, graph=graph), expected)


def test_one_graph_serves_a_batch_of_features() -> None:
    x, graph = torch.randn(2, 3, N, IN, dtype=torch.float64), graphs.from_edges(EDGES, N)
    for name in ("GCN", "GAT", "GINE", "PNA, towers of all", "GatedGraph"):
        make, kind = CASES[name]
        op, attr = from_pyg(drawn(make())), attributes(kind)
        alone = torch.stack([op(each, graph=graph, edge_attr=attr) for each in x.flatten(0, 1)])
        torch.testing.assert_close(op(x, graph=graph, edge_attr=attr).flatten(0, 1), alone)


def test_weights_that_are_returned_are_those_of_the_edges_and_then_of_the_loops() -> None:
    conv = drawn(pyg.GATConv(IN, OUT, heads=2))
    x = torch.randn(N, IN, dtype=torch.float64)
    _, (edge_index, expected) = conv(x, EDGES, return_attention_weights=True)
    _, weights = from_pyg(conv)(x, graph=graphs.from_edges(EDGES, N), return_weights=True)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(edge_index[:, -N:], torch.arange(N).expand(2, -1))


def test_graphs_of_loops_alone_and_of_no_edges() -> None:
    x = torch.randn(3, IN, dtype=torch.float64)
    for edge_index in (torch.zeros(2, 0, dtype=torch.int64), torch.tensor([[1, 1], [1, 1]])):
        graph, count = graphs.from_edges(edge_index, 3), edge_index.shape[1]
        conv, attr = drawn(pyg.GCNConv(IN, OUT)), torch.rand(count, dtype=torch.float64)
        torch.testing.assert_close(from_pyg(conv)(x, graph=graph, edge_attr=attr), conv(x, edge_index, attr))
        conv, attr = drawn(pyg.GATConv(IN, OUT, edge_dim=EDGE)), torch.rand(count, EDGE, dtype=torch.float64)
        torch.testing.assert_close(from_pyg(conv)(x, graph=graph, edge_attr=attr), conv(x, edge_index, attr))


def test_a_topology_may_stand_where_edges_do() -> None:
    conv = drawn(pyg.GCNConv(IN, OUT))
    x, band = torch.randn(N, IN, dtype=torch.float64), graphs.window(2)
    torch.testing.assert_close(from_pyg(conv)(x, graph=band), conv(x, band.bind(N).edge_index))


def test_the_graph_with_loops_is_built_once() -> None:
    op, graph = from_pyg(pyg.GCNConv(IN, OUT)), graphs.from_edges(EDGES, N)
    x = torch.randn(N, IN)
    assert op.rounds(x, graph)[0].graph is op.rounds(x, graph)[0].graph


def test_it_can_be_compiled_whole() -> None:
    """Once for each graph, as which edges are loops cannot be traced."""
    torch._dynamo.reset()
    conv, x, attr = (
        drawn(pyg.GATConv(IN, OUT, edge_dim=EDGE)),
        torch.randn(N, IN, dtype=torch.float64),
        attributes("vector"),
    )
    compiled = torch.compile(from_pyg(conv), fullgraph=True, backend="aot_eager")
    for edge_index in (EDGES, EDGES[:, :39].flip(1)):
        found = compiled(x, graph=graphs.from_edges(edge_index, N), edge_attr=attr[: edge_index.shape[1]])
        torch.testing.assert_close(found, conv(x, edge_index, attr[: edge_index.shape[1]]))


def test_the_weights_are_copies_that_can_be_trained() -> None:
    conv = pyg.GATConv(IN, OUT).train()
    conv.att_src.requires_grad_(False)
    op = from_pyg(conv)
    assert isinstance(op, MessagePassing)
    assert op.training
    learned = {name for name, weight in op.named_parameters() if weight.requires_grad}
    assert learned == {"attention.to_value.weight", "attention.by_dst", "attention.bias"}
    before = conv.lin.weight.clone()
    with torch.no_grad():
        op.attention.to_value.weight.zero_()
    assert torch.equal(conv.lin.weight, before)


def test_shared_maps_stay_shared() -> None:
    op = from_pyg(pyg.GATv2Conv(IN, OUT, share_weights=True))
    assert op.attention.to_query.weight is op.attention.to_value.weight
    cells = [layer.update.cell.weight_ih for layer in from_pyg(pyg.GatedGraphConv(OUT, num_layers=2)).rounds]
    assert cells[0] is cells[1]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "another direction": (lambda: pyg.GCNConv(2, 2, flow="target_to_source"), ValueError, "GCNConv with flow = 'targ"),
    "an aggregator": (lambda: pyg.SAGEConv(2, 2, aggr="lstm"), ValueError, "SAGEConv with aggr = 'lstm'"),
    "several aggregators": (lambda: pyg.SAGEConv(2, 2, aggr=["mean", "max"]), ValueError, "SAGEConv with aggr = "),
    "a fill": (lambda: pyg.GATConv(2, 2, fill_value="mul"), ValueError, "GATConv with fill_value = 'mul'"),
    "a scaler": (
        lambda: pyg.PNAConv(2, 2, ["mean"], ["linear"], DEGREES),
        ValueError,
        "PNAConv with scaler 'linear', only identity",
    ),
    "a learned scaler": (
        lambda: pyg.PNAConv(2, 2, ["mean"], ["identity"], DEGREES, train_norm=True),
        ValueError,
        "PNAConv with train_norm = True",
    ),
    "an aggregator of PNA": (
        lambda: pyg.PNAConv(2, 2, ["median"], ["identity"], DEGREES),
        ValueError,
        "PNAConv with the aggregator MedianAggregation",
    ),
    "a width that is not known yet": (lambda: pyg.SAGEConv(-1, 2), ValueError, "a SAGEConv with known in_channels"),
    "a class": (lambda: pyg.ChebConv(2, 2, 3), ValueError, "from_pyg has no ChebConv; it has GATConv, "),
    "no convolution": (lambda: nn.Linear(2, 2), TypeError, "from_pyg takes a convolution of torch_geometric.nn"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    make, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        from_pyg(make())


def test_without_torch_geometric_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = pyg.GCNConv(2, 2)
    monkeypatch.setitem(__import__("sys").modules, "torch_geometric.nn", None)
    with pytest.raises(ImportError, match=r"pip install torch_geometric"):
        from_pyg(conv)


def test_attributes_that_do_not_fit_are_refused() -> None:
    graph: Graph = graphs.from_edges(EDGES, N)
    x = torch.randn(N, IN)
    for conv, attr, message in (
        (pyg.GCNConv(IN, OUT), torch.rand(7), "one row for each of 40 edges; got 7"),
        (pyg.GraphConv(IN, OUT), torch.rand(40, 2), r"one weight for each of 40 edges; got \[40, 2\]"),
        (pyg.GINEConv(mlp()), None, "pass edge_attr, or a graph that has edge_attr"),
        (pyg.PNAConv(IN, OUT, ALL, SCALED, DEGREES, EDGE), None, "created with edge_dim"),
    ):
        with pytest.raises(ValueError, match=message):
            from_pyg(conv)(x, graph=graph, edge_attr=attr)


def test_gradients_that_are_not_those_of_the_numbers_are_refused():
    with pytest.raises(ValueError, match=r"SAGEConv with aggr_kwargs semi_grad = True"):
        from_pyg(pyg.SAGEConv(4, 3, aggr="var", aggr_kwargs={"semi_grad": True}))


def test_weights_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match="GCNConv are on the meta device"):
        from_pyg(pyg.GCNConv(4, 3).to("meta"))
