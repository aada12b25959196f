"""The check for parts of one's own: it passes the library's, and names the law that each wrong one breaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing
from mpnn.aggregate import Max, segment_sum
from mpnn.attention import Additive, Attention, Degree, DotProduct
from mpnn.graph import Graph
from mpnn.graphs import from_edges
from mpnn.round import Round
from mpnn.scores import Role
from mpnn.testing import check_operator
from mpnn.update import Concat


def test_parts_of_the_library_pass() -> None:
    assert set(check_operator(MessagePassing(None, "max"), 8)) - {"scatter"} == {"csr", "edge_list"}
    attends = MessagePassing(None, "sum", Concat(8, 8), DotProduct(8, 2, dropout=0.5))
    assert set(check_operator(attends, 8)) == {"dense", "tiles", "csr", "edge_list"}
    assert attends.backend == "auto"
    assert attends.training, "a copy is checked"
    assert "csr" in check_operator(MessagePassing(None, "sum", None, Additive(8, 4, 2, edge_dim=3)), 8, 3)


class Last:
    """The last message, in the order of edges."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return messages.new_zeros(index.num_dst, *messages.shape[1:]).index_copy(0, index.plain, messages)


class OfBatch:
    """Sums of messages, from which the mean of all is subtracted."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages - messages.mean(), index)


class OfGraph:
    """Sums of messages, from which the mean over all edges is subtracted."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages - messages.mean(0), index)


class Unguarded:
    """A mean that divides by zero."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages, index) / index.degree.view(-1, *[1] * (messages.dim() - 1))


class Detached:
    """Sums of squares, with half of their gradient."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages.detach() * messages, index)


class Longest:
    """The largest of all messages, of which a graph without edges has none."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages, index).clamp(max=messages.max())


class Indexed:
    """The first message of each node, also of a node without messages."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return torch.stack([messages[index.plain == node][0] for node in range(index.num_dst)])


class Narrow:
    """A sum over the numbers of a message, too."""

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages, index).sum(-1, keepdim=True)


class PlusOne:
    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages, index) + 1


class WrongGradient:
    """A sum whose `gradient` is that of twice the sum."""

    identity = 0.0
    combine = staticmethod(lambda a, b: a + b)
    gradient = staticmethod(lambda message, out: 2.0)

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages, index)


@pytest.mark.parametrize(
    ("aggregate", "law"),
    [
        (Last(), "another order of the edges gives another result"),
        (OfBatch(), "two texts in a batch give another result than each alone"),
        (OfGraph(), "two graphs side by side give another result than each alone"),
        (Unguarded(), "no in-neighbors, the result is not finite in row 0, 1$"),
        (Detached(), "the gradient with respect to x is not that of finite differences"),
        (Longest(), "the operator over a graph without edges raises RuntimeError"),
        (Indexed(), "the operator over a graph in which nodes 0 and 1 have no in-neighbors raises IndexError"),
        (Narrow(), r"the aggregator returns a result of shape \[9, 1, 1\] .* expected \[9, 1, 8\]"),
        (PlusOne(), "a node without in-neighbors does not get zeros"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_wrong_aggregator_breaks_a_law_by_name(aggregate: Any, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_operator(MessagePassing(None, aggregate), 8)


def test_a_wrong_kernel_is_found() -> None:
    pytest.importorskip("numba")
    with pytest.raises(AssertionError, match=r"backend csr differs from edge_list \(gradient with respect to x, "):
        check_operator(MessagePassing(None, WrongGradient()), 8)


@dataclass
class Swapped:
    """A product of two vectors of the numbers of each head, of which each has the role of the other."""

    query: Tensor
    key: Tensor
    roles: ClassVar = {"query": Role("src"), "key": Role("dst")}

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * key).sum(-1)


class WithSwappedRoles(Attention):
    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, src.unsqueeze(-2), Swapped(dst.unsqueeze(-2), 2 * src.unsqueeze(-2)))


def test_swapped_roles_of_a_score_are_found() -> None:
    over = "the operator over a graph from 7 sources to 9 destinations raises ValueError: .* has 9 nodes"
    with pytest.raises(AssertionError, match=over):
        check_operator(MessagePassing(None, "sum", None, WithSwappedRoles()), 8)


def test_an_operator_may_be_for_one_set_of_nodes() -> None:
    degree = MessagePassing(None, "sum", None, Degree(8, 8))
    assert "csr" in check_operator(degree, 8, two_sets=False)
    with pytest.raises(AssertionError, match=r"Degree needs one set of nodes.*pass two_sets=False"):
        check_operator(degree, 8)


def test_a_part_that_is_a_module_is_replaced_by_one_that_is_none() -> None:
    layer = MessagePassing(None, "softmax", lambda x, message: message)
    before = [*layer.state_dict()]
    x = torch.rand(3, 4)
    graph = from_edges([[0, 1], [1, 2]], 3)
    layer.aggregate = "sum"
    assert [*layer.state_dict()] == [] != before
    torch.testing.assert_close(layer(x, graph), MessagePassing(None)(x, graph))
    layer.aggregate = "softmax"
    assert [*layer.state_dict()] == before
    with pytest.raises(TypeError, match="an aggregator is a name"):
        layer.aggregate = 3
    assert [*layer.state_dict()] == before, "what is refused changes nothing"


def test_an_aggregator_that_gives_numbers_to_silent_nodes_is_found_under_attention() -> None:
    def one_more(messages: Tensor, index: Any) -> Tensor:
        return segment_sum(messages, index) + 1.0

    with pytest.raises(AssertionError, match="does not get zeros"):
        check_operator(MessagePassing(None, one_more, None, DotProduct(8, 2)), width=8)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Max(), r"got an object of Max: write check_operator\(MessagePassing\(None, Max\(\)\), width\)"),
        (Max, r"got the class Max: write check_operator\(MessagePassing\(None, Max\(\)\), width\)"),
        (DotProduct(8, 2), r"got an object of DotProduct: write .*, update, attention\), width\) with your part"),
        (MessagePassing, r"got the class MessagePassing: write"),
        ("max", r"got an object of str: write"),
    ],
)
def test_a_part_in_place_of_an_operator_is_refused_with_what_to_write(given: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_operator(given, 8)  # type: ignore[arg-type]
