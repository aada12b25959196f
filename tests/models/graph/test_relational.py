"""The relational graph view of an MLP: over a complete graph it is nn.Linear, over any other nn.Linear with holes."""

from __future__ import annotations

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, graphs
from mpnn.models.graph.relational import OwnMaps, RelationalMLP

SYSTEM = "relational graph view of an MLP"
NODES, IN, OUT = 5, 3, 2
BOUND = error_bound(3, NODES * OUT)


def ring() -> Graph:
    """Each node attends to itself and both neighbors, in no particular order."""
    i = torch.arange(NODES)
    edges = torch.cat([torch.stack([(i + d) % NODES, i]) for d in (1, 0, -1)], 1)
    return graphs.from_edges(edges[:, torch.randperm(3 * NODES)], NODES)


def masked(maps: OwnMaps, graph: Graph) -> nn.Linear:
    """nn.Linear with each edge's map as the block [destination, source], and zeros elsewhere."""
    linear = nn.Linear(NODES * IN, NODES * OUT).to(maps.weight.dtype)
    blocks = torch.zeros(NODES, OUT, NODES, IN, dtype=maps.weight.dtype)
    slot = [0] * NODES
    for src, dst in graph.edge_index.T.tolist():
        blocks[dst, :, src] += maps.weight[dst, slot[dst]].detach().T
        slot[dst] += 1
    linear.weight.data = blocks.reshape(NODES * OUT, NODES * IN)
    linear.bias.data = maps.bias.detach().flatten()
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "graph",
    [graphs.complete().bind(NODES), graphs.identity().bind(NODES), ring(), graphs.random(2, seed=1).bind(NODES)],
)
def test_a_round_is_a_masked_linear_layer(graph: Graph, dtype: torch.dtype, measured) -> None:
    maps = OwnMaps(graph, IN, OUT).to(dtype)
    linear = masked(maps, graph)
    x = torch.randn(7, NODES * IN, dtype=dtype)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    found = MessagePassing(graph, attention=maps)(ours.unflatten(-1, (NODES, IN))).flatten(-2)
    expected = linear(theirs)
    found.square().sum().backward(), expected.square().sum().backward()
    error = (found - expected).abs().max().item()
    if dtype is torch.float64:
        assert error < error_bound(1, NODES * IN, dtype)
    elif graph.num_edges == NODES**2:
        measured(SYSTEM, "torch.nn.Linear", error, BOUND)
    else:
        measured(SYSTEM, "torch.nn.Linear, masked", error, BOUND)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for i in range(NODES):
        sources = graph.csr.col[graph.csr.ptr[i] : graph.csr.ptr[i + 1]]
        grad = linear.weight.grad.view(NODES, OUT, NODES, IN)[i][:, sources]  # [OUT, degree, IN]
        torch.testing.assert_close(maps.weight.grad[i, : len(sources)], grad.permute(1, 2, 0))


def test_it_begins_as_large_as_a_linear_layer_of_its_reach() -> None:
    graph = graphs.window(2).bind(40)
    weight = OwnMaps(graph, 30, 20).weight
    reach = 1 / (graph.degree() * 30).sqrt()  # nn.Linear is uniform within 1 / sqrt(inputs)
    for i in (0, 1, 20):
        assert 0.95 * reach[i] < weight[i].abs().max() <= reach[i]


def test_a_whole_network_equals_linear_layers(measured) -> None:
    net = RelationalMLP(NODES * IN, 4, NODES * OUT, 2, nodes=NODES).eval()
    layers = [net.layers[0].attention, net.layers[1].attention]
    x = torch.randn(6, NODES * IN)

    def linear(maps: OwnMaps, h: Tensor) -> Tensor:
        weight = maps.weight.permute(0, 3, 1, 2).reshape(NODES * OUT, -1)  # rows: (i, out); columns: (j, in)
        return h @ weight.T + maps.bias.flatten()

    h = x
    for layer, maps in zip(net.layers, layers, strict=True):
        h = layer.update.activation.norm(linear(maps, h)).relu()
    measured(SYSTEM, "torch.nn.Linear", (net(x) - net.head(h)).abs().max().item(), BOUND)


def test_refusals_name_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="5 groups of neurons cannot share in_dim=12 evenly"):
        RelationalMLP(12, 2, 10, nodes=5)
    layer = MessagePassing(None, attention=OwnMaps(ring(), IN, OUT))
    with pytest.raises(ValueError, match=r"OwnMaps has maps for 15 edges into 5 nodes; the graph is .*25 edges"):
        layer(torch.randn(NODES, IN), graphs.complete())
