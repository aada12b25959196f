"""`from_pyg`: on the same weights, the operator over a graph returns what PyTorch Geometric returns."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pyg = pytest.importorskip("torch_geometric.nn")

from error_bound import error_bound  # noqa: E402
from pyg_cases import ALL, CASES, DEGREES, EDGE, EDGES, IN, OUT, SCALERS, N, attributes, mlp, random_edges  # noqa: E402

from mpnn import graphs  # noqa: E402
from mpnn.models import from_pyg  # noqa: E402

GNNS = "GNN (sum, max), GraphSAGE, GCN, GIN, PNA, gated (GGNN), R-GCN, MPNN with edge activations"
ATTENTION = "GAT, GATv2, MoNet, VAIN"
TRANSFORMER = "Graph Transformer (1 hop, edge features)"
SYSTEM = {"GATConv": ATTENTION, "GATv2Conv": ATTENTION, "TransformerConv": TRANSFORMER}


def drawn(conv: nn.Module) -> Any:
    """In float64, with weights as large as make attention choose, and nothing left at zero."""
    conv.double().eval()
    for parameter in conv.parameters():
        nn.init.normal_(parameter, std=0.5)
    return conv


def both(conv: Any, op: Any, x: Tensor, attr: Tensor | None, kind: str | None) -> tuple[Tensor, Tensor]:
    """The results of the convolution and of the operator."""
    if kind == "class":
        return conv(x, EDGES, attr), op(x, graph=graphs.from_edges(EDGES, N, edge_type=attr))
    if attr is None:
        return conv(x, EDGES), op(x, graph=graphs.from_edges(EDGES, N))
    return conv(x, EDGES, attr), op(x, graph=graphs.from_edges(EDGES, N), edge_attr=attr)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(3)
def test_operator_and_convolution_agree(name: str, measured: Callable[..., None]) -> None:
    make, kind = CASES[name]
    conv = drawn(make())
    op = from_pyg(conv)
    x, attr = torch.randn(N, IN, dtype=torch.float64, requires_grad=True), attributes(kind, EDGES.shape[1])
    expected, found = both(conv, op, x, attr, kind)
    torch.testing.assert_close(found, expected)
    leaves = [x] if attr is None or kind == "class" else [x, attr]
    slope = torch.randn_like(expected)
    grads = [torch.autograd.grad((out * slope).sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*grads)
    rough = attr.float() if attr is not None and kind != "class" else attr
    conv = copy.deepcopy(conv).float() if "cached" not in name else make().eval()
    expected, found = both(conv, from_pyg(conv), x.float(), rough, kind)
    bound = error_bound(1, 32, scale=max(1, expected.abs().max().item()))  # PNA multiplies sums by log-degrees
    peer, error = f"PyTorch Geometric {type(conv).__name__}", (found - expected).abs().max().item()
    measured(SYSTEM.get(type(conv).__name__, GNNS), peer, error, bound)


def test_two_sets_of_nodes() -> None:
    """The operator takes x_dst and source=x_src for (x_src, x_dst) of PyTorch Geometric."""
    conv, edges = drawn(pyg.GATConv((IN, 5), OUT, heads=2)), random_edges(9, 6, 20)
    x_src, x_dst = torch.randn(9, IN, dtype=torch.float64), torch.randn(6, 5, dtype=torch.float64)
    found = from_pyg(conv)(x_dst, source=x_src, graph=graphs.from_edges(edges, num_src=9, num_dst=6))
    torch.testing.assert_close(found, conv((x_src, x_dst), edges))


def test_one_graph_serves_a_batch_of_features() -> None:
    x, graph = torch.randn(2, 3, N, IN, dtype=torch.float64), graphs.from_edges(EDGES, N)
    for name in ("GCN", "GAT", "PNA, towers"):
        make, kind = CASES[name]
        op, attr = from_pyg(drawn(make())), attributes(kind, 40)
        alone = torch.stack([op(each, graph=graph, edge_attr=attr) for each in x.flatten(0, 1)])
        torch.testing.assert_close(op(x, graph=graph, edge_attr=attr).flatten(0, 1), alone)
    y, weights = from_pyg(drawn(pyg.GATConv(IN, OUT)))(x, graph, return_weights=True)
    assert (y.shape, weights.shape[:2]) == ((2, 3, N, OUT), (2, 3))


def test_returned_weights_are_those_of_the_edges_and_then_of_the_loops() -> None:
    conv = drawn(pyg.GATConv(IN, OUT, heads=2))
    x = torch.randn(N, IN, dtype=torch.float64)
    _, (edge_index, expected) = conv(x, EDGES, return_attention_weights=True)
    _, weights = from_pyg(conv)(x, graph=graphs.from_edges(EDGES, N), return_weights=True)
    torch.testing.assert_close(weights, expected)
    assert torch.equal(edge_index[:, -N:], torch.arange(N).expand(2, -1))


def test_a_graph_brings_its_own_attributes() -> None:
    x, attr = torch.randn(N, IN, dtype=torch.float64), torch.rand(40, dtype=torch.float64)
    graph = graphs.from_edges(EDGES, N, edge_attr=attr)
    gcn, gat, sage = (drawn(conv) for conv in (pyg.GCNConv(IN, OUT), pyg.GATConv(IN, OUT), pyg.SAGEConv(IN, OUT)))
    torch.testing.assert_close(from_pyg(gcn)(x, graph), gcn(x, EDGES, attr))
    for conv in (gat, sage):  # without edge_dim, without edge weights
        torch.testing.assert_close(from_pyg(conv)(x, graph), conv(x, EDGES))


@pytest.mark.parametrize("make", [pyg.GCNConv, pyg.GATConv, pyg.SAGEConv, pyg.TransformerConv])
def test_a_topology_may_stand_where_edges_do(make: Any) -> None:
    conv, band = drawn(make(IN, OUT)), graphs.window(2)
    x = torch.randn(N, IN, dtype=torch.float64)
    torch.testing.assert_close(from_pyg(conv)(x, graph=band), conv(x, band.bind(N).edge_index))


@pytest.mark.parametrize("name", ["GAT, edges", "GCN", "SAGE"])
@pytest.mark.slow
def test_it_can_be_compiled_whole(name: str) -> None:
    make, kind = CASES[name]
    torch._dynamo.reset()
    conv, x, attr = drawn(make()), torch.randn(N, IN, dtype=torch.float64), attributes(kind, 40)
    compiled = torch.compile(from_pyg(conv), fullgraph=True, backend="aot_eager")
    for edge_index in (EDGES, EDGES[:, :39].flip(1)):
        some = None if attr is None else attr.detach()[: edge_index.shape[1]]
        found = compiled(x, graph=graphs.from_edges(edge_index, N), edge_attr=some)
        torch.testing.assert_close(found, conv(x, edge_index, *(() if some is None else (some,))))


def test_it_is_a_copy_of_the_convolution() -> None:
    conv = pyg.GATConv(IN, OUT).train()
    conv.att_src.requires_grad_(False)
    op = pickle.loads(pickle.dumps(from_pyg(conv)))
    assert op.training
    assert type(conv) is pyg.GATConv
    assert {name for name, weight in op.named_parameters() if weight.requires_grad} == {
        *("conv.lin.weight", "conv.att_dst", "conv.bias")
    }
    before = conv.lin.weight.clone()
    with torch.no_grad():
        op.conv.lin.weight.zero_()
    assert torch.equal(conv.lin.weight, before)


def test_conversions_that_are_refused() -> None:
    """With the reasons of `mpnn.pyg.use`, in parts of layers too."""
    refused = {
        "GCNConv with flow = 'targ": pyg.GCNConv(2, 2, flow="target_to_source"),
        "this SAGEConv: aggr = 'lstm'": pyg.SAGEConv(2, 2, aggr="lstm"),
        "this SAGEConv: aggr = 'var'": pyg.SAGEConv(4, 3, aggr="var", aggr_kwargs={"semi_grad": True}),
        "HGTConv, which takes dicts by kind": pyg.HGTConv(4, 4, (["u"], [("u", "to", "u")])),
        "RGATConv with edge_dim: its edges have types, too": pyg.RGATConv(4, 4, 2, edge_dim=3),
        "FeaStConv is not supported": pyg.GPSConv(4, pyg.FeaStConv(4, 4), 2),
    }
    for message, conv in refused.items():
        with pytest.raises(ValueError, match=message):
            from_pyg(conv)
    with pytest.raises(TypeError, match=r"from_pyg takes a convolution of torch_geometric\.nn"):
        from_pyg(nn.Linear(2, 2))


def test_without_torch_geometric_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = pyg.GCNConv(2, 2)
    monkeypatch.setitem(__import__("sys").modules, "torch_geometric.nn", None)
    with pytest.raises(ImportError, match=r"pip install torch_geometric"):
        from_pyg(conv)


@pytest.mark.parametrize(
    ("conv", "call", "message"),
    [
        (pyg.GCNConv(IN, OUT), {"edge_attr": torch.rand(7)}, "one weight for each of 40 edges; got"),
        (pyg.GraphConv(IN, OUT), {"edge_attr": torch.rand(40, 2)}, r"one weight for each of 40 edges; got \[40, 2\]"),
        (pyg.GINEConv(mlp()), {}, "this GINEConv needs edge features: pass edge_attr, or a graph that has edge_attr"),
        (pyg.PNAConv(IN, OUT, ALL, SCALERS, DEGREES, EDGE), {}, "this PNAConv needs edge features"),
        (pyg.GATConv(IN, OUT), {"edge_attr": torch.rand(40, 2)}, "this GATConv does not take edge_attr"),
        (pyg.RGCNConv(IN, OUT, 2), {}, "^RGCNConv needs a graph with edge types"),
        (pyg.GCNConv(IN, OUT), {"source": torch.rand(N, IN)}, "GCNConv does not take source"),
        (pyg.GCNConv(IN, OUT), {"return_weights": True}, "GCNConv does not take return_weights"),
        (pyg.GCNConv(IN, OUT), {"graph": graphs.from_edges(EDGES, 20)}, "the graph has 20 destinations and 20 sources"),
        (pyg.GPSConv(IN, None, 2), {"among": graphs.window(2)}, "among must be graphs of consecutive nodes"),
    ],
)
def test_calls_that_are_refused(conv: Any, call: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_pyg(conv)(torch.randn(N, IN), **{"graph": graphs.from_edges(EDGES, N), **call})
