"""Second derivatives: there, or refused with a sentence, whatever the first ones were multiplied with."""

import pytest
import torch
from torch.autograd import forward_ad

from mpnn import graphs, ops
from mpnn.dropout import Dropout
from mpnn.kernels.feature_dropout import FeatureDropout
from mpnn.kernels.once_differentiable import once_differentiable

GRAPH = graphs.causal().bind(5)


def leaf() -> torch.Tensor:
    return torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("backend", ["tiles", "csr", "dense", "auto"])
@pytest.mark.parametrize("linear", [True, False], ids=["a plain sum", "a square"])
def test_forces_that_are_trained_on_are_refused_and_not_forgotten(linear: bool, backend: str) -> None:
    positions, key, value = leaf(), leaf().detach(), leaf().detach()

    def loss(backend: str) -> torch.Tensor:
        out = ops.attend(GRAPH, positions, key, value, backend=backend)
        energy = out.sum() if linear else out.square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy + forces.square().sum()

    for differentiate in (torch.Tensor.backward, lambda x: torch.autograd.grad(x, positions)):
        with pytest.raises(RuntimeError, match='for second derivatives name backend="edge_list"'):
            differentiate(loss(backend))
    assert torch.autograd.grad(loss("edge_list"), positions)[0].isfinite().all()


@pytest.mark.parametrize("width", [None, 1, 3], ids=["plain", "a weight an edge", "a weight an edge and feature"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_sums_and_means_differentiate_for_ever(reduce: str, width: int | None) -> None:
    graph = graphs.from_edges(torch.tensor([[0, 2, 2, 1, 3, 3, 0], [1, 1, 0, 1, 0, 0, 2]]), 4)
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    weight = () if width is None else (torch.randn(7, width, dtype=torch.float64, requires_grad=True),)

    def aggregate(x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
        return ops.aggregate(graph, x, reduce, weight=weight[0] if weight else None, backend="csr")

    assert torch.autograd.gradgradcheck(aggregate, (x, *weight))
    for frozen in (x, *weight):
        if weight:  # one of the two is a constant
            inputs = [y.detach().requires_grad_(y is not frozen) for y in (x, *weight)]
            assert torch.autograd.gradgradcheck(aggregate, inputs)

    def third(backend: str) -> tuple[torch.Tensor, ...]:
        """The third derivative by x, and its derivatives by x and by the weight, which no step before asked for."""
        derivative = x
        for _ in range(3):
            y = ops.aggregate(graph, derivative * x, reduce, weight=weight[0] if weight else None, backend=backend)
            (derivative,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return derivative, *torch.autograd.grad(derivative.sum(), (x, *weight))

    torch.testing.assert_close(third("csr"), third("edge_list"))


@pytest.mark.parametrize("reduce", ["max", "var"])
def test_second_derivatives_of_what_is_not_linear_are_refused(reduce: str) -> None:
    x, weight = leaf().flatten(1), torch.rand(GRAPH.num_edges, dtype=torch.float64, requires_grad=True)
    out = ops.aggregate(GRAPH, x, reduce, weight=weight, backend="csr")
    (found,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again"):
        found.square().sum().backward()


def test_batches_of_gradients_of_sums_are_refused() -> None:
    x = leaf().flatten(1)
    out = ops.aggregate(GRAPH, x, backend="csr")
    with pytest.raises(RuntimeError, match="one gradient at a time"):
        torch.autograd.grad(out, x, torch.randn(3, *out.shape, dtype=out.dtype), is_grads_batched=True)


def test_first_derivatives_come_with_create_graph_too() -> None:
    given = [leaf() for _ in range(3)]
    out = ops.attend(GRAPH, *given, backend="tiles").square().sum()
    plain = torch.autograd.grad(out, given, retain_graph=True)
    again = torch.autograd.grad(out, given, create_graph=True)
    assert all(a.equal(b) and b.requires_grad for a, b in zip(plain, again, strict=True))


def test_a_gradient_that_depends_on_nothing_is_a_constant() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        @once_differentiable
        def backward(ctx, d_out):
            return (2 * d_out,)

    x = leaf()
    (found,) = torch.autograd.grad(Double.apply(x).sum(), x, create_graph=True)
    assert not found.requires_grad


def test_dropout_of_features_is_linear_and_differentiates_for_ever() -> None:
    x = leaf()
    assert torch.autograd.gradgradcheck(lambda x: FeatureDropout.apply(x, 7, 0.4), x)
    big, dropout = torch.randn(2**14, 2, requires_grad=True), Dropout(0.5)
    (found,) = torch.autograd.grad(dropout(big).square().sum(), big, create_graph=True)
    (twice,) = torch.autograd.grad(found.sum(), big)
    assert twice.unique().tolist() == [0.0, 8.0]  # of (2 x)^2 where x is kept


def test_linear_attention_refuses_forward_mode_which_torch_would_take_for_zero() -> None:
    query, key, value = (leaf().detach() for _ in range(3))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, torch.ones_like(query))
        with pytest.raises(NotImplementedError, match='name backend="edge_list"'):
            ops.attend(GRAPH, dual, key, value, normalize="none", backend="scan")


@pytest.mark.parametrize("backend", ["tiles", "csr"])
def test_batches_of_gradients_are_refused_by_kernels(backend: str) -> None:
    def run(backend: str) -> torch.Tensor:
        x = leaf()
        out = ops.attend(GRAPH, x, x, x, backend=backend)
        return torch.autograd.grad(out, x, torch.randn(3, *out.shape, dtype=out.dtype), is_grads_batched=True)[0]

    with pytest.raises(RuntimeError, match=r'one gradient at a time.*backend="edge_list"'):
        run(backend)
    assert run("edge_list").shape == (3, 5, 2, 8)
