"""Edges with a state, `MessagePassing(..., edges=EdgeUpdate(...))`, against the formula and its derivatives."""

from collections.abc import Callable

import pytest
import torch
from live_memory import LiveMemory
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, graphs
from mpnn.aggregate import Sum, segment_sum
from mpnn.attention import DotProduct
from mpnn.kernels.rows import edge_sum
from mpnn.update import MLP, EdgeUpdate, PreNorm


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def bipartite(num_dst: int, num_src: int, num_edges: int) -> Graph:
    edges = [torch.randint(n, (num_edges,)) for n in (num_src, num_dst)]
    return graphs.from_edges(torch.stack(edges), num_src=num_src, num_dst=num_dst)


def formula(edges: EdgeUpdate, e: Tensor, dst: Tensor, src: Tensor, graph: Graph) -> Tensor:
    """`e + relu(W [e || x_i || x_j] + b)`: with one matrix, and a tensor of all ends."""
    j, i = graph.edge_index
    ends = torch.cat([e, dst[..., i, :], src[..., j, :]], -1)
    weight = torch.cat([edges.of_edge.weight, edges.of_dst.weight, edges.of_src.weight], 1)
    return e + (ends @ weight.T + edges.of_dst.bias).relu()


def derivatives(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """First derivatives of a function of the outputs, and derivatives of a function of these."""
    first = torch.autograd.grad(sum(y.sin().sum() for y in outputs), inputs, create_graph=True)
    return *first, *torch.autograd.grad(sum(x.square().sum() for x in first), inputs)


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize(
    "graph",
    [
        bipartite(5, 9, 40),
        bipartite(4, 4, 0),
        graphs.from_edges(torch.tensor([[0, 2, 2, 1], [1, 1, 0, 1]]), 4),
        (graphs.causal() & graphs.window(2)).bind(6),
    ],
    ids=["two sets", "no edges", "repeated edges", "structured"],
)
def test_the_formula_and_its_derivatives(graph: Graph, batch: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_sum, "BLOCK", 7 * 5)  # seven edges in a block
    op = MessagePassing(graph, "sum", edges=EdgeUpdate(6, 5, residual=True, src_dim=4)).double()
    x, source, e = leaf(*batch, graph.num_dst, 6), leaf(*batch, graph.num_src, 4), leaf(*batch, graph.num_edges, 5)
    y, new = op(x, source=source, edge_attr=e)
    states = formula(op.edges, e, x, source, graph)
    message = x.new_zeros(*batch, graph.num_dst, 5).index_add(-2, graph.edge_index[1], states)
    inputs = [x, source, e, *op.parameters()]
    found, expected = (
        (y, new, *derivatives((y, new), inputs)),
        (message, states, *derivatives((message, states), inputs)),
    )
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_an_attention_reads_the_new_states() -> None:
    graph, x, e = bipartite(6, 6, 20), leaf(6, 8), leaf(20, 3)
    attention = DotProduct(8, 2, edge_dim=3)
    update = PreNorm(8)
    op = MessagePassing(graph, "sum", update, attention, edges=EdgeUpdate(8, 3)).double()
    y, states = op(x, edge_attr=e)
    h = update.prepare(x)
    torch.testing.assert_close(states, op.edges(e, h, h, graph)[0])
    torch.testing.assert_close(y, MessagePassing(graph, "sum", update, attention).double()(x, edge_attr=states))


def test_states_default_to_the_attributes_of_the_graph_and_serve_a_whole_batch() -> None:
    graph, x = bipartite(6, 6, 20), leaf(2, 6, 8)
    op = MessagePassing(None, "mean", edges=EdgeUpdate(8, 3)).double()
    attributed = graphs.from_edges(graph.edge_index, 6, edge_attr=leaf(20, 3))
    for a, b in zip(op(x, attributed), op(x, graph, edge_attr=attributed.edge_attr.expand(2, 20, 3)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "change",
    [
        lambda op: op.edges.of_edge.register_forward_hook(lambda module, inputs, out: out),  # not a plain map
        lambda op: setattr(op, "gradient_checkpointing", True),
        lambda op: op.compile(backend="eager", fullgraph=True),
    ],
    ids=["a hook", "gradient checkpointing", "compiled"],
)
def test_other_ways_compute_the_same(change: Callable[[MessagePassing], object]) -> None:
    graph, x, e = bipartite(6, 6, 20), leaf(6, 8), leaf(20, 3)
    op = MessagePassing(graph, "sum", edges=EdgeUpdate(8, 3, f=nn.SiLU())).double()
    inputs = [x, e, *op.parameters()]

    def outputs() -> tuple[Tensor, ...]:
        y, states = op(x, edge_attr=e)
        return y, states, *torch.autograd.grad(y.sin().sum() + states.cos().sum(), inputs)

    plain = outputs()
    change(op)
    for a, b in zip(outputs(), plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_reduce_of_the_object_aggregates_the_states() -> None:
    op = MessagePassing(bipartite(6, 6, 20), "sum", edges=EdgeUpdate(8, 3))
    x, e = torch.randn(6, 8), torch.randn(20, 3)
    with torch.no_grad():
        plain = op(x, edge_attr=e)[0]
        own = Sum()
        own.reduce = lambda messages, index: 2 * segment_sum(messages, index)  # type: ignore[method-assign]
        op.aggregate = own
        torch.testing.assert_close(op(x, edge_attr=e)[0], 2 * plain)


def test_no_tensor_holds_the_ends_of_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new states and the gradient of the old ones have their size: nothing between the steps of f, and no ends."""
    monkeypatch.setattr(edge_sum, "BLOCK", 64 * 100)
    graph, x, e = (
        bipartite(50, 50, 15_000),
        torch.randn(50, 64, requires_grad=True),
        torch.randn(15_000, 64, requires_grad=True),
    )
    edges = EdgeUpdate(64, 64, f=nn.Sequential(nn.SiLU(), nn.Linear(64, 64), nn.LayerNorm(64)))
    edges(e, x, x, graph)[0].sum().backward()  # sorts the edges
    x.grad = None
    edges.zero_grad()
    with LiveMemory() as memory:
        edges(e, x, x, graph)[0].sum().backward()
    assert memory.peak < 2.5 * e.nbytes


def test_states_are_not_divided_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpnn.message_passing.active", lambda: object())
    op = MessagePassing(bipartite(6, 6, 20), "sum", edges=EdgeUpdate(8, 3))
    with pytest.raises(ValueError, match="states of edges are not divided over processes"):
        op(torch.randn(6, 8), edge_attr=torch.randn(20, 3))


def test_mistakes() -> None:
    graph, x, e = bipartite(6, 6, 20), torch.randn(6, 8), torch.randn(20, 3)
    op = MessagePassing(graph, "sum", edges=EdgeUpdate(8, 3))
    with pytest.raises(ValueError, match="needs edge features: pass edge_attr"):
        op(x)
    with pytest.raises(ValueError, match=r"a state for each edge, \[20, 3\]; got \[3, 3\]"):
        op.edges(e[:3], x, x, graph)
    with pytest.raises(ValueError, match=r"edge_attr .* 3"):
        op(x, edge_attr=torch.randn(20, 4))
    with pytest.raises(ValueError, match="takes no cache, return_weights or edge_dropout"):
        op(x, edge_attr=e, return_weights=True)
    op.edge_dropout = 0.5
    with pytest.raises(ValueError, match="takes no cache, return_weights or edge_dropout"):
        op(x, edge_attr=e)
    with pytest.raises(TypeError, match="edges must be an EdgeUpdate or None; got MLP"):
        MessagePassing(graph, "sum", edges=MLP(3, 3))


def test_parameters_of_f_have_gradients_without_edges() -> None:
    op = MessagePassing(bipartite(4, 4, 0), "sum", edges=EdgeUpdate(6, 5, f=nn.Linear(5, 5)))
    y, _ = op(torch.randn(4, 6), edge_attr=torch.randn(0, 5))
    assert not any(x.any() for x in torch.autograd.grad(y.sum(), list(op.parameters())))
