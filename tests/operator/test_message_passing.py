"""The one operator: models said with it, batches, what a call may replace, edge dropout, diffusion."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import MessagePassing, graphs
from mpnn.aggregate import Sum, segment_sum
from mpnn.attention import Additive, AdditiveV2, Attention, Degree, DotProduct, Typed
from mpnn.graph import Graph
from mpnn.models.layers.propagation import Propagation
from mpnn.position import EdgeBias, Table
from mpnn.round import Round
from mpnn.update import GRU, MLP, Activate, Add, Concat, FeedForward, PreNorm

N = 12


def layer(graph: object, dim: int = 8, heads: int = 2, **more: object) -> MessagePassing:
    return MessagePassing(graph, "sum", PreNorm(dim, FeedForward(dim)), DotProduct(dim, heads, **more))


def cora(n: int = N, attr: bool = False) -> Graph:
    edges = torch.randint(0, n - 1, (2, 40))  # the last node is no destination
    return graphs.from_edges(
        edges, n, edge_attr=torch.randn(40, 3) if attr else None, edge_type=torch.randint(0, 4, (40,))
    )


# ---------------------------------------------------------------------------------------- models


def median(messages: Tensor, index: Tensor) -> Tensor:
    rows = [messages[index == i] for i in range(index.num_dst)]
    return torch.stack([m.median(0).values if len(m) else messages.new_zeros(messages.shape[1:]) for m in rows])


def swin() -> MessagePassing:
    windows = graphs.windows(4, 3, size=2, shift=1)
    return layer(windows, position=Table(2, windows.bind(N).relation))


MODELS: dict[str, Callable[[], MessagePassing]] = {
    "bert": lambda: layer(graphs.complete()),
    "mistral": lambda: layer(graphs.causal() & graphs.window(4)),
    "swin": swin,
    "xlnet, query": lambda: layer(graphs.permutation(range(N - 1, -1, -1)) - graphs.identity()),
    "gcn": lambda: MessagePassing(cora(), "sum", None, Degree(8, 16)),
    "gat": lambda: MessagePassing(cora(), "sum", Activate(F.elu), Additive(8, 8, heads=8)),
    "sage": lambda: MessagePassing(cora(), "mean", Concat(8, 256), None),
    "gin": lambda: MessagePassing(cora(), "sum", Add(MLP(8, 64), eps=0.0), None),
    "ggnn": lambda: MessagePassing(cora(), "sum", GRU(8), Typed(8, 8, relations=4)),
    "convolution": lambda: MessagePassing(graphs.neighborhood(4, 3, 1), "sum", None, Typed(8, 64, relations=9)),
    "magna": lambda: Propagation(cora(), "sum", PreNorm(8, FeedForward(8)), DotProduct(8, 2), hops=6, teleport=0.1),
    "robust": lambda: MessagePassing(cora(), median, Concat(8, 8), None),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_model_runs_trains_and_takes_batches(make: Callable[[], MessagePassing]) -> None:
    op = make()
    x = torch.randn(2, 3, N, 8)
    out = op(x)
    assert out.shape[:-1] == x.shape[:-1]
    torch.testing.assert_close(out, torch.stack([torch.stack([op(one) for one in some]) for some in x]))
    out.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in op.parameters() if p.requires_grad)
    assert str(op).startswith(("MessagePassing(", "Propagation("))


# ---------------------------------------------------------------------------------------- what a call may give


def test_the_graph_of_a_call_takes_the_place_of_the_operators() -> None:
    x = torch.randn(N, 8)
    op = layer(graphs.complete())
    causal = MessagePassing(graphs.causal(), "sum", op.update, op.attention)
    assert op(x, graphs.causal()).equal(causal(x))
    assert op(x, graphs.causal().bind(N)).equal(causal(x))
    with pytest.raises(ValueError, match=r"has no graph; pass one with the call: op\(x, graph=...\)"):
        layer(None)(x)


def test_a_topology_is_bound_to_the_length_of_each_input() -> None:
    op = layer(graphs.causal() & graphs.window(2))
    for n in (1, 2, 7, 0):
        assert op(torch.randn(n, 8)).shape == (n, 8)


def test_edge_attributes_of_the_graph_or_of_the_call_in_the_callers_order() -> None:
    graph, x = cora(attr=True), torch.randn(N, 8)
    op = MessagePassing(graph, "sum", None, DotProduct(8, 2, edge_dim=3, position=EdgeBias(3, 2)))
    bare = graphs.from_edges(graph.edge_index, N)
    assert op(x, bare, edge_attr=graph.edge_attr).equal(op(x))
    order = torch.randperm(graph.num_edges)
    shuffled = graphs.from_edges(graph.edge_index[:, order], N, edge_attr=graph.edge_attr[order])
    torch.testing.assert_close(op(x, shuffled), op(x))
    with pytest.raises(ValueError, match="the graph or the call must provide edge_attr"):
        op(x, bare)


@pytest.mark.parametrize("attention", [DotProduct(8, 2), Additive(8, 4, 2), AdditiveV2(8, 4, 2)], ids=type)
def test_returned_weights_belong_to_the_callers_edges(attention: Attention) -> None:
    graph, x = cora(), torch.randn(2, N, 8)
    op = MessagePassing(graph, "sum", None, attention)
    out, weights = op(x, return_weights=True)
    torch.testing.assert_close(out, op(x))
    assert weights.shape == (2, graph.num_edges, 2)
    order = torch.randperm(graph.num_edges)
    _, shuffled = op(x, graphs.from_edges(graph.edge_index[:, order], N), return_weights=True)
    torch.testing.assert_close(shuffled, weights[:, order])
    rows = torch.zeros(2, N, 2).index_add(1, graph.edge_index[1], weights)
    torch.testing.assert_close(rows, (graph.degree() > 0).float()[None, :, None].expand_as(rows))


def test_weights_of_fixed_and_of_no_attention() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 0, 1], [1, 2, 0]]), 3)
    x = torch.randn(2, 3, 8)
    _, weights = MessagePassing(graph, "sum", None, Degree(8, 4))(x, return_weights=True)
    assert weights.shape == (2, 3, 1)
    torch.testing.assert_close(weights[0, :, 0], torch.tensor([1.0, 1.0, 1.0]))
    _, ones = MessagePassing(graph, "mean", None, None)(x, return_weights=True)
    assert ones.equal(torch.ones(2, 3, 1))


def test_a_node_without_in_neighbors_gets_a_message_of_zeros() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1], [1, 0]]), 3)
    x = torch.randn(3, 8, requires_grad=True)
    for attention in (None, DotProduct(8, 2, bias=False), Additive(8, 4, 2), Degree(8, 4), Typed(8, 4, 1)):
        given = graphs.from_edges(graph.edge_index, 3, edge_type=torch.zeros(2, dtype=torch.int64))
        out = MessagePassing(given, "sum", None, attention)(x)
        assert out[2].eq(0).all()
        assert torch.autograd.grad(out.sum(), x)[0].isfinite().all()


def test_inference_mode_leaves_nothing_behind_that_training_cannot_use() -> None:
    for topology in (graphs.window(1), graphs.documents([5, 6]), graphs.complete()):
        for attention in (DotProduct(8, 2), Degree(8, 8), Additive(8, 4, 2)):
            op, x = MessagePassing(topology, "sum", None, attention), torch.randn(11, 8)
            with torch.inference_mode():
                expected = op(x)
            out = op(x)
            out.sum().backward()
            torch.testing.assert_close(out, expected)


# ---------------------------------------------------------------------------------------- dropout of edges


def test_dropped_edges_follow_the_seed_and_stay_in_evaluation() -> None:
    op = MessagePassing(graphs.complete(), "mean", None, None, edge_dropout=0.5)
    x = torch.randn(30, 4)
    assert not op(x).equal(op(x))
    torch.manual_seed(1)
    first = op(x)
    torch.manual_seed(1)
    assert op(x).equal(first)
    exact = MessagePassing(graphs.complete(), "mean", None, None)(x)
    assert op.eval()(x).equal(exact)


def test_a_reduce_of_the_object_is_not_scaled_where_edges_are_dropped() -> None:
    """As that of an own class: only of a sum it is known that it grows with the number of edges."""
    own = Sum()
    own.reduce = lambda messages, index: torch.ones(index.num_dst, *messages.shape[1:])  # type: ignore[method-assign]
    op = MessagePassing(graphs.complete(), own, None, None, edge_dropout=0.5)
    assert op(torch.randn(30, 4)).equal(torch.ones(30, 4))


def test_heads_that_an_aggregator_returns_are_joined() -> None:
    x, graph = torch.randn(5, 3), graphs.from_edges(torch.randint(5, (2, 12)), 5)
    twice = MessagePassing(graph, lambda messages, index: segment_sum(messages, index).repeat_interleave(2, -2))
    torch.testing.assert_close(twice(x), MessagePassing(graph)(x).repeat(1, 2))


class Unweighted(Attention):
    """Has no scores for its softmax to be taken of."""

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, src.unsqueeze(-2))


@pytest.mark.parametrize(
    "attention", [None, DotProduct(4, 2, normalize="none"), Typed(4, 4, 1), Unweighted()], ids=type
)
@pytest.mark.sample(2)
def test_sums_over_the_edges_left_are_right_on_average(attention: Attention | None) -> None:
    edges = torch.tensor([[0, 1, 2, 3, 0], [1, 0, 0, 0, 0]])
    graph = graphs.from_edges(edges, 4, edge_type=torch.zeros(5, dtype=torch.int64))
    op, x = MessagePassing(graph, "sum", None, attention, edge_dropout=0.4), torch.randn(4, 4)
    with torch.no_grad():
        drawn = torch.stack([op(x) for _ in range(400)])
        exact = op.eval()(x)
    error = (drawn.mean(0) - exact).abs()
    assert (error <= 5 * drawn.std(0) / 400**0.5 + 1e-6).all()
    assert drawn.std(0)[0].min() > 0


def test_softmax_is_taken_over_the_edges_left() -> None:
    op = MessagePassing(graphs.complete(), "sum", None, DotProduct(4, 2), edge_dropout=0.5)
    nn.init.zeros_(op.attention.to_query.weight)  # so that every edge left weighs alike
    nn.init.zeros_(op.attention.to_query.bias)
    op.attention.to_out = nn.Identity()
    op.attention.to_value = nn.Identity()
    x = torch.eye(4).repeat(5, 1)
    out = op(x).sum(-1)
    assert ((out - 1).abs() < 1e-6).all()


class Echo(Attention):
    """Weighs each source by the attribute of its edge."""

    normalize = "none"

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, src.unsqueeze(-2), bias=(edge_attr[:, None],))


def test_edge_attributes_stay_with_the_edges_left() -> None:
    number = torch.arange(1.0, 101)
    everybody_itself = graphs.from_edges(torch.arange(100).expand(2, 100), edge_attr=number)
    op = MessagePassing(everybody_itself, "sum", None, Echo(), edge_dropout=0.5)
    out = op(torch.ones(100, 1)).squeeze(1)
    assert ((out == 0) | (out == 2 * number)).all()
    assert 20 < int((out == 0).sum()) < 80
    with pytest.raises(ValueError, match="no weights to return"):
        op(torch.ones(100, 1), return_weights=True)


def test_a_function_computes_the_sources_from_prepared_features() -> None:
    op = MessagePassing(graphs.causal(), "sum", PreNorm(8), DotProduct(8, 2))
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(op(x, source=lambda h: h.flip(1)), op(x, source=op.update.prepare(x).flip(1)))


# ---------------------------------------------------------------------------------------- hops


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_diffusion_is_its_formula(kv_heads: int) -> None:
    hops, alpha = 4, 0.3
    graph, x = cora(), torch.randn(2, N, 8, dtype=torch.float64)
    spec = DotProduct(8, 2, kv_heads=kv_heads).double()
    out, weights = Propagation(graph, "sum", None, spec, hops=hops, teleport=alpha)(x, return_weights=True)
    src, dst = graph.edge_index
    matrix = torch.zeros(2, 2, N, N, dtype=torch.float64)
    for e in range(graph.num_edges):
        matrix[:, :, dst[e], src[e]] += weights[:, e]
    value = spec.to_value(x).unflatten(-1, (kv_heads, 4)).repeat_interleave(2 // kv_heads, -2).transpose(1, 2)
    z = value
    for _ in range(hops):
        z = (1 - alpha) * matrix @ z + alpha * value
    torch.testing.assert_close(out, spec.to_out(z.transpose(1, 2).flatten(-2)))


def test_diffusion_of_fixed_weights() -> None:
    """APPNP (Gasteiger et al. 2019) propagates with GCN's weights."""
    graph, x = cora(), torch.randn(N, 8)
    spec = Degree(8, 4, bias=False)
    one_hop = MessagePassing(graph, "sum", None, spec)(x)
    out = Propagation(graph, "sum", None, spec, teleport=0.2)(x)
    torch.testing.assert_close(out, 0.8 * one_hop + 0.2 * spec.to_value(x))


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max"])
def test_hops_without_attention_repeat_the_aggregation(aggregate: str) -> None:
    graph, x = cora(), torch.randn(2, N, 8)
    one_hop = MessagePassing(graph, aggregate)
    out = Propagation(graph, aggregate, hops=2, teleport=0.25)(x)
    first = 0.75 * one_hop(x) + 0.25 * x
    torch.testing.assert_close(out, 0.75 * one_hop(first) + 0.25 * x)


def test_every_hop_restores_the_expectation_of_dropped_edges() -> None:
    op = Propagation(graphs.complete().bind(400), edge_dropout=0.5, hops=2)
    out = op(torch.full((400, 1), 1 / 400))
    torch.testing.assert_close(out.mean(), torch.tensor(400.0), rtol=0.02, atol=0)


def test_hops_refuse_two_sets_of_nodes() -> None:
    with pytest.raises(ValueError, match="hops must be an integer of at least 1; got 0"):
        Propagation(graphs.complete(), hops=0)
    with pytest.raises(ValueError, match=r"teleport must lie in \[0, 1\]; got 2"):
        Propagation(graphs.complete(), teleport=2)
    op = Propagation(graphs.complete(), "sum", None, DotProduct(8, 2), hops=2, teleport=0.5)
    with pytest.raises(ValueError, match="one set of nodes; the graph is 3 x 5"):
        op(torch.randn(3, 8), source=torch.randn(5, 8))
