"""Vectors of edges under a softmax, and gates of edges that are normalized per feature, against their formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mpnn import graphs, ops

N, E, H, D = 12, 40, 2, 3
F64 = torch.float64


@pytest.fixture
def edges() -> Tensor:
    """Repeated edges and self-loops; node 11 has no in-neighbors."""
    return torch.randint(0, N - 1, (2, E), generator=torch.Generator().manual_seed(0))


def summed(messages: Tensor, dst: Tensor) -> Tensor:
    return messages.new_zeros(N, *messages.shape[1:]).index_add(0, dst, messages)


@pytest.mark.parametrize("backend", ["auto", "csr", "edge_list"])
@pytest.mark.parametrize("alone", [False, True], ids=["beside sources", "alone"])
def test_edges_have_values_under_a_softmax(edges: Tensor, backend: str, alone: bool) -> None:
    graph = graphs.from_edges(edges, N)
    query, key = (torch.randn(N, H, 4, dtype=F64, requires_grad=True) for _ in range(2))
    value = torch.zeros(N, H, D, dtype=F64) if alone else torch.randn(N, H, D, dtype=F64)
    of_edge = torch.randn(E, H, D, dtype=F64, requires_grad=True)
    found = ops.attend(graph, query, key, value, edge_value=of_edge, backend=backend)
    src, dst = edges
    score = ((query[dst] * key[src]).sum(-1) / 2).exp()
    weight = score / summed(score, dst)[dst]
    expected = summed(weight[..., None] * (value[src] + of_edge), dst)
    torch.testing.assert_close(found, expected)
    leaves = (query, key, of_edge)
    grads = [torch.autograd.grad(out.square().sum(), leaves) for out in (found, expected)]
    torch.testing.assert_close(*grads)
    assert found[-1].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(E,), (E, 1), (E, 5)])
def test_gates_are_normalized_for_each_feature(edges: Tensor, shape: tuple[int, ...]) -> None:
    graph = graphs.from_edges(edges, N)
    x = torch.randn(N, 5, dtype=F64, requires_grad=True)
    gate = torch.rand(shape, dtype=F64).requires_grad_()
    found = ops.aggregate(graph, x, weight=gate, normalized=True)
    src, dst = edges
    of_edge = gate.view(E, -1).expand(E, 5)
    total = summed(of_edge, dst)
    expected = summed(of_edge * x[src], dst) / torch.where(total > 0, total, 1)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.square().sum(), (x, gate)) for out in (found, expected)]
    torch.testing.assert_close(*grads)
    assert torch.autograd.gradgradcheck(lambda x, w: ops.aggregate(graph, x, weight=w, normalized=True), (x, gate))


def test_gates_of_a_batch_are_those_of_its_items(edges: Tensor) -> None:
    graph = graphs.from_edges(edges, N)
    x, gate = torch.randn(3, N, 5), torch.rand(3, E, 5)
    whole = ops.aggregate(graph, x, weight=gate, normalized=True)
    for k in range(3):
        torch.testing.assert_close(whole[k], ops.aggregate(graph, x[k], weight=gate[k], normalized=True))


def test_what_cannot_be_normalized_is_refused(edges: Tensor) -> None:
    graph, x = graphs.from_edges(edges, N), torch.randn(N, 5)
    with pytest.raises(ValueError, match="normalized divides by the sums of weights: pass weight"):
        ops.aggregate(graph, x, normalized=True)
    with pytest.raises(ValueError, match="and reduce=\"sum\"; got 'mean'"):
        ops.aggregate(graph, x, "mean", weight=torch.rand(E), normalized=True)


def test_sequences_of_several_lengths_take_all_options() -> None:
    """Options that are no defaults were ignored for jagged features."""
    parts = [torch.randn(n, H, 4) for n in (3, 5)]
    x = torch.nested.nested_tensor(parts, layout=torch.jagged)
    mix = torch.randn(H, H)
    for options in ({"reduce": "max"}, {"mix_logits": mix}, {"mix_weights": mix}):
        found = ops.attend(graphs.causal(), x, x, x, **options).unbind()
        for part, out in zip(parts, found, strict=True):
            alone = ops.attend(graphs.causal().bind(len(part)), part, part, part, **options)
            torch.testing.assert_close(out, alone)
