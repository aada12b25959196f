"""Nodes of several kinds: HGT and R-GAT with the weights of PyTorch Geometric, a layer for each relation, and
heterogeneous data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import MessagePassing, graphs, models
from mpnn.attention import DotProduct, TypedAdditive
from mpnn.graphs import HeteroGraph
from mpnn.models.graph.hgt import HGTLayer

SYSTEM = "Kinds of nodes: HGT, R-GAT"
RELATIONS = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "by", "author")]
SIZES = {"author": 5, "paper": 7, "venue": 2}
DIM, HEADS = 8, 2
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def edge_lists() -> dict[tuple[str, str, str], Tensor]:
    """Twelve random edges of each relation; the last author and the last paper receive nothing."""
    return {
        (s, name, d): torch.stack([torch.randint(SIZES[s], (12,)), torch.randint(SIZES[d] - 1, (12,))])
        for s, name, d in RELATIONS
    }


def graph_of(edges: dict[tuple[str, str, str], Tensor]) -> HeteroGraph:
    parts = {r: graphs.from_edges(e, num_src=SIZES[r[0]], num_dst=SIZES[r[2]]) for r, e in edges.items()}
    return HeteroGraph(parts, SIZES)


def features(dtype: torch.dtype) -> dict[str, Tensor]:
    return {kind: torch.randn(n, DIM, dtype=dtype, requires_grad=True) for kind, n in SIZES.items()}


def hgt_of_pyg(theirs: Any, dtype: torch.dtype) -> HGTLayer:
    ours = HGTLayer(DIM, HEADS, [*SIZES], RELATIONS).to(dtype)
    width = DIM // HEADS
    with torch.no_grad():
        for kind in SIZES:
            ours.project[kind].load_state_dict(theirs.kqv_lin.lins[kind].state_dict())
            ours.out[kind].load_state_dict(theirs.out_lin.lins[kind].state_dict())
            ours.gate[kind].copy_(theirs.skip[kind][0])
        for mine, own in ((ours.of_key, theirs.k_rel), (ours.of_value, theirs.v_rel)):
            mine.copy_(own.weight.view(HEADS, len(RELATIONS), width, width).transpose(0, 1))
        ours.prior.copy_(torch.cat([theirs.p_rel["__".join(r)] for r in RELATIONS]))
    return ours


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], leaves: list[Tensor], dtype: torch.dtype) -> float:
    """The largest difference; in float64 also checks the gradients."""
    assert found.keys() == expected.keys()
    if dtype == torch.float64:
        grads = [
            torch.autograd.grad(
                sum(y.square().sum() for y in out.values()), leaves, materialize_grads=True, retain_graph=True
            )
            for out in (found, expected)
        ]
        torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-10)
    return max((found[kind] - expected[kind]).abs().max().item() for kind in found)


@DTYPES
def test_hgt_is_pygs(dtype: torch.dtype, measured: Callable[..., None]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs = pyg.HGTConv(DIM, DIM, ([*SIZES], RELATIONS), HEADS).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    edges, x = edge_lists(), features(dtype)
    found, expected = hgt_of_pyg(theirs, dtype)(x, graph_of(edges)), theirs(x, edges)
    assert found["venue"] is x["venue"]  # receives from no relation
    received = {kind: found[kind] for kind in expected}
    error = compare(received, expected, [x["author"], x["paper"]], dtype)
    measured(SYSTEM, "PyTorch Geometric HGTConv", error, error_bound(4, 32, dtype, scale=4))


@pytest.mark.parametrize("subset", [RELATIONS, RELATIONS[1:]])
def test_hgt_runs_in_place(subset: list[tuple[str, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    import mpnn.pyg
    from mpnn.integrations.pyg import convolutions

    theirs = pyg.HGTConv(DIM, DIM, ([*SIZES], RELATIONS), HEADS).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = copy.deepcopy(theirs)
    assert list(mpnn.pyg.use(ours).replaced.values()) == ["HGTConv"]
    edges, x = {r: e for r, e in edge_lists().items() if r in subset}, features(torch.float64)
    ran, run = [], convolutions.engine.run
    monkeypatch.setattr(
        convolutions.engine, "run", lambda round, backend: ran.append(round.graph) or run(round, backend)
    )
    for _ in range(2):
        found, expected = ours(x, edges), theirs(x, edges)
        assert compare(found, expected, [*x.values()], torch.float64) < 1e-12
        grads = [torch.autograd.grad(sum(y.sum() for y in out.values()), [*m.parameters()], materialize_grads=True)
                 for m, out in ((ours, found), (theirs, expected))]  # fmt: skip
        torch.testing.assert_close(*grads)
    assert len(ran) == 2
    assert ran[0] is ran[1]  # kept with the edge lists
    edges[RELATIONS[1]][0, 0] = 6 - edges[RELATIONS[1]][0, 0]  # counted by torch
    assert compare(ours(x, edges), theirs(x, edges), [*x.values()], torch.float64) < 1e-12


@pytest.mark.parametrize("within", [False, True])
@DTYPES
def test_rgat_is_pygs(within: bool, dtype: torch.dtype, measured: Callable[..., None]) -> None:
    """With one head. With several, PyTorch Geometric's logits mix them, and the paper's do not."""
    pyg = pytest.importorskip("torch_geometric.nn")
    n, relations = 9, 4
    edges, kind = torch.randint(n - 1, (2, 40)), torch.randint(relations - 1, (40,))  # no edge has the last type
    theirs = pyg.RGATConv(DIM, 5, relations, attention_mechanism=("across", "within")[within] + "-relation").to(dtype)
    ours = TypedAdditive(DIM, 5, relations, within=within).to(dtype)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.5)
        ours.weight.copy_(theirs.weight[:, :, None])
        ours.by_dst.copy_(theirs.q.T.expand(relations, 1, -1))
        ours.by_src.copy_(theirs.k.T.expand(relations, 1, -1))
        ours.bias.copy_(theirs.bias)
    x = torch.randn(n, DIM, dtype=dtype, requires_grad=True)
    found = MessagePassing(graphs.from_edges(edges, n, edge_type=kind), "sum", None, ours)(x)
    error = compare({"x": found}, {"x": theirs(x, edges, kind)}, [x], dtype)
    measured(SYSTEM, "PyTorch Geometric RGATConv", error, error_bound(4, 32, dtype, scale=4))


@pytest.mark.parametrize("within", [False, True])
def test_rgat_is_its_formula(within: bool, measured: Callable[..., None]) -> None:
    """Two heads and a batch, edge by edge."""
    n, relations = 6, 3
    edges, kind = torch.randint(n - 1, (2, 25)), torch.randint(relations, (25,))
    spec = TypedAdditive(4, 3, relations, 2, within=within).double()
    x = torch.randn(2, n, 4, dtype=torch.float64)
    found = MessagePassing(graphs.from_edges(edges, n, edge_type=kind), "sum", None, spec)(x)
    for backend in ("edge_list", "csr"):
        op = MessagePassing(graphs.from_edges(edges, n, edge_type=kind), "sum", None, spec, backend=backend)
        torch.testing.assert_close(op(x), found, rtol=1e-12, atol=1e-12)
    expected = torch.zeros(2, n, 2, 3, dtype=torch.float64)
    for b in range(2):
        for i in range(n):
            for types in [[r] for r in range(relations)] if within else [[*range(relations)]]:
                rows = [e for e in range(25) if edges[1, e] == i and int(kind[e]) in types]
                if not rows:
                    continue
                mapped = [torch.einsum("i,ihd->hd", x[b, edges[0, e]], spec.weight[kind[e]]) for e in rows]
                own = [torch.einsum("i,ihd->hd", x[b, i], spec.weight[kind[e]]) for e in rows]
                logits = torch.stack([
                    nn.functional.leaky_relu((o * spec.by_dst[kind[e]] + m * spec.by_src[kind[e]]).sum(-1), 0.2)
                    for e, o, m in zip(rows, own, mapped, strict=True)
                ])  # fmt: skip
                expected[b, i] += (logits.softmax(0)[..., None] * torch.stack(mapped)).sum(0)
    error = (found - expected.flatten(-2)).abs().max().item()
    measured(SYSTEM, "formula", error, error_bound(4, 32, torch.float64, scale=4))


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min"])
def test_a_layer_for_each_relation_is_pygs_hetero_conv(reduce: str, measured: Callable[..., None]) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs = pyg.HeteroConv({r: pyg.SAGEConv((DIM, DIM), 5) for r in RELATIONS}, reduce).double()
    layers = {}
    for r in RELATIONS:
        conv = theirs.convs[r]
        layers[r] = MessagePassing(None, "mean", Sage(conv.lin_l, conv.lin_r))
    edges, x = edge_lists(), features(torch.float64)
    found, expected = models.Hetero(layers, reduce)(x, graph_of(edges)), theirs(x, edges)
    error = compare(found, expected, [x["author"], x["paper"]], torch.float64)
    measured(SYSTEM, "PyTorch Geometric HeteroConv", error, error_bound(2, 16, torch.float64))


class Sage(nn.Module):
    def __init__(self, of_message: nn.Module, of_node: nn.Module) -> None:
        super().__init__()
        self.of_message, self.of_node = of_message, of_node

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.of_message(message) + self.of_node(x)


def test_heterogeneous_data_there_and_back() -> None:
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    edges, x = edge_lists(), features(torch.float32)
    for kind in SIZES:
        data[kind].x = x[kind]
    for r, ends in edges.items():
        data[r].edge_index = ends
    data[RELATIONS[0]].edge_attr = torch.randn(12, 3)
    graph = graphs.from_pyg(data)
    assert graph.num_nodes == SIZES
    assert [*graph] == RELATIONS
    assert repr(graph) == "HeteroGraph(5 author, 7 paper, 2 venue; 12 writes, 12 cites, 12 by)"
    again = graphs.to_pyg(graph, x=x)
    assert again.metadata() == data.metadata()
    for r in RELATIONS:
        assert torch.equal(again[r].edge_index, edges[r])
    assert torch.equal(again[RELATIONS[0]].edge_attr, data[RELATIONS[0]].edge_attr)
    assert all(torch.equal(again[kind].x, x[kind]) for kind in SIZES)


def test_stacked_relations() -> None:
    writes = graphs.from_edges([[0, 1], [0, 0]], num_src=2, num_dst=2)
    cites = graphs.from_edges([[1], [0]], 2)
    both = HeteroGraph({("a", "writes", "p"): writes, ("p", "cites", "p"): cites}).stacked
    assert both.edge_index.tolist() == [[0, 1, 3], [2, 2, 2]]
    assert both.edge_type.tolist() == [0, 0, 1]
    assert (both.num_dst, both.num_src) == (4, 4)


def test_mistakes_are_named() -> None:
    graph, x = graph_of(edge_lists()), features(torch.float32)
    cites = graph["paper", "cites", "paper"]
    with pytest.raises(ValueError, match="7 nodes of kind 'paper'; before it were 3"):
        HeteroGraph({("paper", "cites", "paper"): cites}, {"paper": 3})
    with pytest.raises(TypeError, match="a relation is"):
        HeteroGraph({"cites": cites})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="must be a Graph; got"):
        HeteroGraph({("paper", "cites", "paper"): graphs.window(1)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="without relations"):
        _ = HeteroGraph({}, {"paper": 3}).stacked
    layer = MessagePassing(None, "sum", None, DotProduct(DIM, 2))
    with pytest.raises(ValueError, match=r"layer for \('paper', 'likes', 'paper'\), which HeteroGraph"):
        models.Hetero({("paper", "likes", "paper"): layer})(x, graph)
    with pytest.raises(ValueError, match="at least one layer"):
        models.Hetero({})
    with pytest.raises(ValueError, match="reduce must be one of sum, mean, max, min; got 'cat'"):
        models.Hetero({("paper", "cites", "paper"): layer}, "cat")
    del x["author"]
    with pytest.raises(ValueError, match="features of 'author' nodes; it has those of 'paper', 'venue'"):
        models.Hetero({RELATIONS[0]: layer})(x, graph)
    with pytest.raises(ValueError, match="no maps for the relation"):
        models.HGT({"paper": DIM}, 2, [("paper", "likes", "paper")], DIM)({"paper": x["paper"]}, graph)
    with pytest.raises(ValueError, match=r"relations have nodes of \['author'\]; pass their widths"):
        models.HGT({"paper": DIM}, 2, [("author", "writes", "paper")], DIM)
    for wrong in ({"papers": x["paper"]}, x["paper"]):
        with pytest.raises(ValueError, match="x must be a dict by kind of node, of author, paper, venue"):
            graphs.to_pyg(graph, x=wrong)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8"):
        models.HGT({"paper": DIM}, 2, RELATIONS, DIM, 3)


def test_a_batch_of_graphs_of_kinds_is_each_graph_alone() -> None:
    """Also of a graph that lacks a relation, and of one that lacks a kind."""
    first, second = graph_of(edge_lists()), graph_of(edge_lists())
    second = HeteroGraph({name: graph for name, graph in second.items() if name[1] != "cites"}, SIZES)
    third = HeteroGraph({("author", "knows", "author"): graphs.from_edges([[0, 1], [1, 2]], 3)})
    model = models.HGT(dict.fromkeys(SIZES, DIM), 4, [*RELATIONS, ("author", "knows", "author")], DIM, HEADS).eval()
    members = [first, second, third]
    x = [{kind: torch.randn(n, DIM) for kind, n in one.num_nodes.items()} for one in members]
    whole = {**{kind: torch.zeros(0, DIM) for kind in SIZES}, **x[2]}
    both = graphs.batch(members)
    assert both.num_nodes == {"author": 13, "paper": 14, "venue": 4}
    assert both.batch_sizes == {"author": (5, 5, 3), "paper": (7, 7, 0), "venue": (2, 2, 0)}
    assert both.to("cpu").batch_sizes == both.batch_sizes
    together = model({kind: torch.cat([x[0][kind], x[1][kind], whole[kind]]) for kind in SIZES}, both)
    for k, one in enumerate(members[:2]):
        for kind, found in model(x[k], one).items():
            start = sum(both.batch_sizes[kind][:k])
            torch.testing.assert_close(together[kind][start : start + len(found)], found)
    assert graphs.batch([first]) is first


def test_batches_of_kinds_keep_edges_data_and_times() -> None:
    one = graphs.from_edges(
        [[0, 1], [0, 0]], num_src=2, num_dst=1, edge_attr=torch.tensor([[1.0], [2.0]]), edge_type=[0, 1]
    )
    relation = ("user", "buys", "item")
    a = HeteroGraph({relation: one}, times={"item": torch.tensor([5])})
    b = HeteroGraph(
        {("item", "near", "item"): graphs.from_edges([[0, 1], [1, 0]], 2)}, times={"item": torch.tensor([6, 7])}
    )
    both = graphs.batch([b, a])
    assert both.times["item"].tolist() == [6, 7, 5]
    assert both[relation].edge_index.tolist() == [[0, 1], [2, 2]]
    assert both[relation].edge_attr.tolist() == [[1.0], [2.0]]
    assert both[relation].edge_type.tolist() == [0, 1]
    assert both["item", "near", "item"].edge_index.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ValueError, match="some graphs of the batch have times of kind 'item', and others have none"):
        graphs.batch([a, HeteroGraph({relation: one})])
    plain = graphs.from_edges([[0, 1], [0, 0]], num_src=2, num_dst=1)
    with pytest.raises(ValueError, match=r"\('user', 'buys', 'item'\): graph 0 has edge_attr and graph 1 has none"):
        graphs.batch([HeteroGraph({relation: one}), HeteroGraph({relation: plain})])
    with pytest.raises(TypeError, match="graph 1 of the batch is of several kinds of nodes, and others are not"):
        graphs.batch([plain, a])
