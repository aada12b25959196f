"""Heads that attend over their own graphs."""

from dataclasses import replace

import pytest
import torch

from mpnn import MessagePassing, engine, graphs
from mpnn.attention import DotProduct
from mpnn.models.layers.per_head import PerHead
from mpnn.position import ALiBi


def test_each_head_attends_over_its_own_graph():
    op, x = PerHead(8, 2), torch.randn(3, 5, 8)
    one, two = graphs.causal().bind(5), graphs.window(1).bind(5)
    edges = torch.cat([one.edge_index, two.edge_index], 1)
    heads = torch.tensor([0] * one.num_edges + [1] * two.num_edges)
    layer = MessagePassing(graphs.from_edges(edges, 5, edge_type=heads), "sum", None, op)
    found = layer(x)
    alone = [MessagePassing(graph, "sum", None, op)(x) for graph in (one, two)]
    with torch.no_grad():  # each head's part of the message, by the columns of W_O that it owns
        inverse = torch.linalg.inv(op.to_out.weight)
        parts = [(y - op.to_out.bias) @ inverse.T for y in (found, *alone)]
    assert torch.allclose(parts[0][..., :4], parts[1][..., :4], atol=1e-5)
    assert torch.allclose(parts[0][..., 4:], parts[2][..., 4:], atol=1e-5)
    with pytest.raises(ValueError, match="at most 2; the graph has 3"):
        layer(x, graphs.from_edges(edges, 5, edge_type=heads + 1))


@pytest.mark.parametrize("options", [{"kv_heads": 1}, {"kv_heads": 2}, {"position": ALiBi(4)}, {"softcap": 2.0}])
def test_heads_of_their_own_graphs_share_keys_and_know_positions(options):
    one, two = graphs.causal().bind(5), graphs.window(1).bind(5)
    edges, op, x = torch.cat([one.edge_index, two.edge_index], 1), PerHead(8, 4, **options), torch.randn(5, 8)
    heads = torch.tensor([1] * one.num_edges + [3] * two.num_edges)
    typed = graphs.from_edges(edges, 5, edge_type=heads)
    out = MessagePassing(typed, "sum", None, op).rounds(x)[0]
    found = engine.run(out)[0]
    assert not found[:, [0, 2]].any()  # heads without edges
    for head, graph in ((1, one), (3, two)):
        alone = engine.run(replace(DotProduct.round(op, *op.project(x, x, graph), graph), reduce=out.reduce))[0]
        torch.testing.assert_close(found[:, head], alone[:, head])


@pytest.mark.parametrize("sources", [4, 6])
@pytest.mark.sample(2)
def test_each_head_attends_over_its_own_graph_when_compiled(sources):
    edges = torch.tensor([[0, 1, 2, 3, 3, 2], [0, 0, 1, 2, 3, 3]])
    graph = graphs.from_edges(edges, num_src=sources, num_dst=4, edge_type=torch.tensor([0, 1, 0, 1, 0, 1]))
    layer, x, source = MessagePassing(graph, "sum", None, PerHead(8, 2)), torch.randn(4, 8), torch.randn(sources, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    layer(x, source=source).square().sum().backward()
    expected = layer.attention.to_query.weight.grad.clone()
    layer.zero_grad()
    out = compiled(x, source=source)
    out.square().sum().backward()
    assert torch.allclose(out, layer(x, source=source), atol=1e-6)
    assert torch.allclose(layer.attention.to_query.weight.grad, expected, atol=1e-5)


def test_heads_attend_over_one_topology_when_compiled():
    layer, x = MessagePassing(graphs.causal(), "sum", None, PerHead(8, 2)), torch.randn(5, 8)
    assert torch.allclose(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x), atol=1e-6)
