"""GraphGPS: on the same weights a layer says what PyTorch Geometric's GPSConv says."""

from __future__ import annotations

import pytest
import torch
from error_bound import error_bound
from parity import moved
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.attention import Additive
from mpnn.graphs import encodings
from mpnn.models import from_pyg
from mpnn.models.graph.gps import GPS, GPSLayer
from mpnn.update import MLP, Add

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "GraphGPS"
DIM, HEADS, SIZES = 12, 3, [7, 1, 5]
N = sum(SIZES)


@pytest.fixture
def edge_index() -> Tensor:
    """Three graphs of different sizes, the second without edges; some nodes have no in-neighbors."""
    first, third = torch.randint(0, 7, (2, 15)), torch.randint(8, N, (2, 9))
    return torch.cat([first, third], 1).unique(dim=1)


def gin_of(conv: nn.Module) -> MessagePassing:
    return MessagePassing(None, "sum", Add(conv.nn))


def gat_of(conv: nn.Module) -> MessagePassing:
    attention = Additive(DIM, DIM // HEADS, HEADS)
    ours = (attention.to_value.weight, attention.by_src, attention.by_dst, attention.bias)
    for to, values in zip(ours, (conv.lin.weight, conv.att_src, conv.att_dst, conv.bias), strict=True):
        to.data.copy_(values.reshape(to.shape))
    return MessagePassing(None, "sum", None, attention)


def ours_of(theirs: nn.Module, local: MessagePassing | None) -> GPSLayer:
    """Our layer with their weights."""
    activation, norm = type(theirs.mlp[1]), nn.Identity if theirs.norm3 is None else nn.BatchNorm1d
    layer = GPSLayer(local, DIM, HEADS, activation=activation, norm=norm)
    attention = layer.everybody.attention
    maps = (attention.to_query, attention.to_key, attention.to_value)
    for to, weight, bias in zip(
        maps, theirs.attn.in_proj_weight.chunk(3), theirs.attn.in_proj_bias.chunk(3), strict=True
    ):
        to.load_state_dict({"weight": weight, "bias": bias})
    attention.to_out.load_state_dict(theirs.attn.out_proj.state_dict())
    layer.mlp[0][0].load_state_dict(theirs.mlp[0].state_dict())
    layer.mlp[0][3].load_state_dict(theirs.mlp[3].state_dict())
    if theirs.norm3 is not None:
        layer.everybody.update.norm.load_state_dict(theirs.norm2.module.state_dict())
        layer.keep_both.norm.load_state_dict(theirs.norm3.module.state_dict())
        if local is not None:
            layer.keep_local.norm.load_state_dict(theirs.norm1.module.state_dict())
    return layer


def gin() -> nn.Module:
    return pyg.GINConv(MLP(DIM, DIM))


def gat() -> nn.Module:
    return pyg.GATConv(DIM, DIM // HEADS, HEADS, add_self_loops=False)


@pytest.mark.parametrize(
    ("conv", "edge_dim"),
    [(gin, 0), (lambda: pyg.GATConv(DIM, DIM, edge_dim=3), 3), (lambda: pyg.TransformerConv(DIM, DIM, edge_dim=3), 3)],
)
def test_from_pyg_takes_the_layer_with_any_convolution(conv, edge_dim: int, edge_index: Tensor) -> None:
    theirs = moved(pyg.GPSConv(DIM, conv(), HEADS, dropout=0.1, act="elu"))
    attr = torch.randn(edge_index.shape[1], edge_dim) if edge_dim else None
    graph = graphs.from_edges(edge_index, N, edge_attr=attr)
    options = {"edge_attr": attr} if edge_dim else {}
    x, batch = torch.randn(N, DIM), torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    ours = from_pyg(theirs)
    torch.testing.assert_close(ours(x, graph, among=graphs.documents(SIZES)), theirs(x, edge_index, batch, **options))
    torch.testing.assert_close(ours(x, graph), theirs(x, edge_index, **options))
    assert not ours.training


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("conv", "convert", "act", "norm"),
    [
        (gin, gin_of, "relu", "batch_norm"),
        (gat, gat_of, "gelu", "batch_norm"),
        (gin, gin_of, "relu", None),
        (lambda: None, lambda conv: None, "relu", "batch_norm"),
    ],
    ids=["gin", "gat", "no norm", "no local round"],
)
def test_a_layer_equals_pyg(conv, convert, act, norm, training: bool, edge_index: Tensor, measured) -> None:
    theirs = moved(pyg.GPSConv(DIM, conv(), HEADS, act=act, norm=norm))
    layer = ours_of(theirs, convert(theirs.conv))
    layer.train(training), theirs.train(training)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    x = torch.randn(N, DIM)
    for dtype in (torch.float32, torch.float64):
        layer.to(dtype), theirs.to(dtype)
        leaves = [x.to(dtype).requires_grad_() for _ in range(2)]
        graph = graphs.from_edges(edge_index, N)
        outs = layer(leaves[0], graph, graphs.documents(SIZES)), theirs(leaves[1], edge_index, batch)
        error, bound = (outs[0] - outs[1]).abs().max().item(), error_bound(2, 4 * DIM, dtype)
        measured(SYSTEM, "PyTorch Geometric GPSConv", error, bound)
        probe = torch.randn_like(outs[0])
        grads = [torch.autograd.grad((out * probe).sum(), leaf)[0] for out, leaf in zip(outs, leaves, strict=True)]
        scale = 1 + grads[1].abs().max()
        torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=bound * scale)


@pytest.mark.parametrize("walk", [0, 3])
def test_a_random_walk_takes_a_quarter_of_the_width(walk: int, edge_index: Tensor) -> None:
    model = GPS(5, 2, DIM, HEADS, layers=2, walk=walk).eval()
    graph, x = graphs.from_edges(edge_index, N), torch.randn(N, 5)
    h = model.embed(x)
    assert h.shape[1] == (DIM - DIM // 4 if walk else DIM)
    if walk:
        h = torch.cat([h, model.embed_walk(encodings.random_walk(graph, walk))], -1)
    of_all, of_each = h, h
    for layer in model.layers:
        of_all = layer(of_all, graph)
        of_each = layer(of_each, graph, graphs.documents(SIZES))
    torch.testing.assert_close(model(x, graph), model.head(of_all))
    means = torch.stack([part.mean(0) for part in of_each.split(SIZES)])
    torch.testing.assert_close(model(x, graph, SIZES), model.head(means))
