"""Specs of messages without a choice among sources: given weights, and messages made edge by edge."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.attention import EdgeMessage, EdgeWeight, Mapped

N, IN, OUT = 7, 4, 3


def edges() -> Tensor:
    """Repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    found = torch.randint(0, N, (2, 20))
    found[1] = found[1].clamp(min=2)
    return found


def by_hand(messages: Tensor, edge_index: Tensor, how: str) -> Tensor:
    out = torch.zeros(N, messages.shape[1], dtype=messages.dtype)
    for i in range(N):
        received = messages[edge_index[1] == i]
        if len(received):
            out[i] = received.amax(0) if how == "max" else getattr(received, how)(0)
    return out


@pytest.mark.parametrize(
    ("how", "backend"), [("sum", "edge_list"), ("mean", "edge_list"), ("max", "edge_list"), ("sum", "csr")]
)
def test_messages_may_be_any_function_of_both_ends_and_the_edge(how: str, backend: str) -> None:
    def message(dst: Tensor, src: Tensor, edge: Tensor) -> Tensor:
        return (src - dst) * edge.tanh()

    op = MessagePassing(None, how, None, EdgeMessage(message), backend=backend)
    edge_index, x, edge = edges(), torch.randn(N, IN, dtype=torch.float64), torch.randn(20, IN, dtype=torch.float64)
    expected = by_hand(message(x[edge_index[1]], x[edge_index[0]], edge), edge_index, how)
    torch.testing.assert_close(op(x, graphs.from_edges(edge_index, N), edge_attr=edge), expected)


def test_messages_of_several_heads_are_aggregated_by_themselves() -> None:
    op = MessagePassing(None, "max", None, EdgeMessage(lambda dst, src, edge: torch.stack([src, dst], -2)))
    edge_index, x = edges(), torch.randn(2, N, IN)
    found = op(x, graphs.from_edges(edge_index, N))
    for one, out in zip(x, found, strict=True):
        torch.testing.assert_close(out[:, :IN], by_hand(one[edge_index[0]], edge_index, "max"))
        torch.testing.assert_close(out[:, IN:], by_hand(one[edge_index[1]], edge_index, "max"))


def test_weights_are_those_that_edges_bring() -> None:
    value, out = nn.Linear(IN, OUT), nn.Linear(OUT, 2)
    op = MessagePassing(None, "sum", None, EdgeWeight(value, out))
    edge_index, x, weight = edges(), torch.randn(N, IN), torch.randn(20)
    graph = graphs.from_edges(edge_index, N, edge_attr=weight)
    found, weights = op(x, graph, return_weights=True)
    torch.testing.assert_close(found, out(by_hand(weight[:, None] * value(x)[edge_index[0]], edge_index, "sum")))
    assert torch.equal(weights[:, 0], weight)
    plain = MessagePassing(None, "sum", None, Mapped(value, out))
    bare = graphs.from_edges(edge_index, N)
    torch.testing.assert_close(plain(x, graph), op(x, bare))


def test_normalized_weights_add_up_to_one_and_a_total_of_zero_gives_zero() -> None:
    edge_index, x, weight = edges(), torch.randn(N, IN, requires_grad=True), torch.rand(20)
    weight[edge_index[1] == 3] = 0.0
    op = MessagePassing(None, "sum", None, EdgeWeight(normalized=True))
    found, weights = op(x, graphs.from_edges(edge_index, N), edge_attr=weight, return_weights=True)
    total = torch.zeros(N).index_add(0, edge_index[1], weights[:, 0])
    has_sources = torch.zeros(N).index_add(0, edge_index[1], weight) > 0
    torch.testing.assert_close(total, has_sources.float())
    torch.testing.assert_close(found, by_hand(weights * x[edge_index[0]], edge_index, "sum"))
    assert torch.autograd.grad(found.sum(), x)[0].isfinite().all()
    alike = op(x, graphs.from_edges(edge_index, N))
    torch.testing.assert_close(alike, by_hand(x[edge_index[0]], edge_index, "mean"))


def test_edges_that_are_left_out_make_no_messages() -> None:
    op = MessagePassing(None, "sum", None, EdgeMessage(lambda dst, src, edge: src * edge), edge_dropout=0.5).train()
    graph, x, edge = graphs.from_edges(edges(), N), torch.ones(N, 1), torch.ones(20, 1)
    assert op(x, graph, edge_attr=edge).sum() < 40  # doubled, of about ten that are left
    assert op.eval()(x, graph, edge_attr=edge).sum() == 20


def test_it_can_be_compiled_whole() -> None:
    op = MessagePassing(None, "sum", None, EdgeMessage(lambda dst, src, edge: (src + edge).relu()))
    x, edge, graph = torch.randn(N, IN), torch.randn(20, IN), graphs.from_edges(edges(), N)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, graph, edge_attr=edge), op(x, graph, edge_attr=edge))


def test_what_does_not_fit_is_refused() -> None:
    graph, x = graphs.from_edges(edges(), N), torch.randn(N, IN)
    with pytest.raises(
        ValueError, match=r"must return messages \[20, 'F'\], or \[20, 'H', 'F'\] for several heads; got \[4"
    ):
        MessagePassing(None, "sum", None, EdgeMessage(lambda dst, src, edge: src.T))(x, graph)
    with pytest.raises(ValueError, match=r"one weight for each of 20 edges; got \[20, 2\]"):
        MessagePassing(None, "sum", None, EdgeWeight())(x, graph, edge_attr=torch.rand(20, 2))


def test_normalized_weights_may_be_zero_and_learned() -> None:
    """Weights 0, 2 and 3 of one node, and nothing but a 0 of another; the gradient is that of a_j / sum a."""
    edge_index = torch.tensor([[0, 1, 2, 0], [3, 3, 3, 4]])
    weight = torch.tensor([0.0, 2.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, IN, dtype=torch.float64)
    op = MessagePassing(graphs.from_edges(edge_index, 5), "sum", None, EdgeWeight(normalized=True))
    found = op(x, edge_attr=weight)
    mean = (2 * x[1] + 3 * x[2]) / 5
    torch.testing.assert_close(found[3], mean)
    assert not found[4].any()
    found[3].sum().backward()
    torch.testing.assert_close(weight.grad[:3], torch.stack([(x[j] - mean).sum() / 5 for j in range(3)]))


def test_normalized_weights_are_compared_before_they_are_shortened() -> None:
    """The logarithms of 1,000 and 3,000 visits would say 24% and 76% in bfloat16."""
    visits = graphs.from_edges(torch.tensor([[0, 1], [2, 2]]), 3, edge_attr=torch.tensor([1000, 3000]))
    op = MessagePassing(visits, "sum", None, EdgeWeight(normalized=True))
    shares = op(torch.eye(3, dtype=torch.bfloat16))[2, :2]
    assert torch.equal(shares, torch.tensor([0.25, 0.75], dtype=torch.bfloat16))


def test_normalized_weights_are_shared_out_anew_when_edges_drop() -> None:
    graph = graphs.from_edges(edges(), N, edge_attr=torch.rand(20) + 0.1)
    op = MessagePassing(graph, "sum", None, EdgeWeight(normalized=True), edge_dropout=0.5)
    message = op(torch.ones(N, 1))
    torch.testing.assert_close(message, message.round())  # 1 where any edge is left, 0 where none is
