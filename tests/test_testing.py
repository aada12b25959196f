"""The check for parts of one's own: it passes the library's, and names the law that each wrong one breaks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing
from mpnn.aggregate import segment_sum
from mpnn.attention import Additive, DotProduct
from mpnn.graphs import from_edges
from mpnn.testing import check_operator
from mpnn.update import Concat


def test_parts_of_the_library_pass() -> None:
    assert check_operator(MessagePassing(None, "max"), 8) == ["csr", "edge_list"]
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
        (Unguarded(), "results or gradients over .* are not finite"),
        (Detached(), "the gradient with respect to x is not that of finite differences"),
        (PlusOne(), "a node without in-neighbors does not get zeros"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_wrong_aggregator_breaks_a_law_by_name(aggregate: Any, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_operator(MessagePassing(None, aggregate), 8)


def test_a_wrong_kernel_is_found() -> None:
    pytest.importorskip("numba")
    with pytest.raises(AssertionError, match="backend csr differs from edge_list"):
        check_operator(MessagePassing(None, WrongGradient()), 8)


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
