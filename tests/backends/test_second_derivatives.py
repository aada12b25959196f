"""Second derivatives on all backends, transforms of torch.func, and batches of gradients."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from capabilities import GRAPHS, REQUESTS, converted, refusal
from row_cases import Triton, on_triton
from torch.autograd import forward_ad

from mpnn import Graph, MessagePassing, graphs, ops
from mpnn.attention import DotProduct
from mpnn.backends import registered
from mpnn.engine import choice, steps
from mpnn.graph import rng
from mpnn.kernels.dense import drop_features
from mpnn.kernels.derivatives import once_differentiable
from mpnn.round import Result, Round
from mpnn.update.dropout import Dropout

GRAPH = graphs.causal().bind(5)


def leaf() -> torch.Tensor:
    return torch.randn(5, 2, 8, dtype=torch.float64, requires_grad=True)


def grads(backend: str | Callable[[Round], Result], round: Round) -> list[torch.Tensor]:
    """First derivatives of all that a round returns by all its leaves, then second ones; zeros for those without."""
    leaves = [x for x in round.tensors if x.requires_grad]
    result = steps.result(round, backend) if isinstance(backend, str) else backend(round)
    outputs = [x for x in result if x is not None]
    loss = sum(x.nan_to_num(0.0, 0.0, 0.0).sin().sum() for x in outputs)
    first = torch.autograd.grad(loss, leaves, create_graph=True, materialize_grads=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), leaves, materialize_grads=True)
    return [*first, *second]


SOME = (
    "sinks, grouped heads, softcap", "sinks, dropout, bias by edge type", "`edge_key` and `edge_value`, dropout",
    "additive, with edge terms", "additive v2, tanh, with edge terms", "bias by nodes, returned weights",
    "maximum of attended values", "weighted aggregation: max", "aggregation: std",
)  # fmt: skip


def to_double(x: torch.Tensor) -> torch.Tensor:
    return x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOME else pytest.mark.slow) for n in REQUESTS])
def test_derivatives_of_second_order_are_those_of_edge_list(name: str) -> None:
    for graph in (GRAPHS["causal"], GRAPHS["window"], graphs.from_edges(torch.randint(13, (2, 60)), 13)):
        round = converted(REQUESTS[name](graph), to_double)
        if not round.needs_grad:
            continue
        for backend in registered():
            if backend.NAME not in ("edge_list", "scatter") and refusal(backend, round, torch.float64) is None:
                torch.testing.assert_close(
                    grads(backend.NAME, round), grads("edge_list", round), rtol=1e-9, atol=1e-9, msg=backend.NAME
                )


@on_triton
@pytest.mark.parametrize("name", [*SOME, "dot product", "softmax over destinations, batched, dropout"])
def test_derivatives_of_second_order_of_kernels_on_a_gpu(name: str) -> None:
    graph = graphs.from_edges(torch.randint(13, (2, 60)), 13)
    round = converted(REQUESTS[name](graph), to_double)
    found = choice._by(Triton(), round)
    if not isinstance(found, choice.Choice):
        pytest.skip(found)
    torch.testing.assert_close(grads(found.run, round), grads("edge_list", round), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recurrent", [{}, {"log_gate": 1}, {"log_gate": 1, "beta": 1, "state": 1}, {"log_gate": 2}])
def test_recurrences_have_derivatives_of_second_order(recurrent: dict[str, int]) -> None:
    def number(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, dtype=torch.float64, requires_grad=True)

    graph = (graphs.causal() & graphs.documents([70, 3])).bind(73)
    gate = {1: (73, 2), 2: (73, 2, 4)}
    more = {"log_gate": number(*gate[recurrent["log_gate"]])} if recurrent else {}
    more |= {"beta": number(73, 2), "state": number(2, 4, 3)} if "beta" in recurrent else {}
    key_heads = 1 if "beta" in recurrent else 2
    query, key, value = number(73, 2, 4), number(73, key_heads, 4), number(73, key_heads, 3)

    def run(backend: str) -> list[torch.Tensor]:
        options = {k: -x if k == "log_gate" else x for k, x in more.items()}
        out, state = ops.attend(
            graph, query, key / 4, value, normalize="none", backend=backend, return_state=True, **options
        )
        leaves = [query, key, value, *more.values()]
        first = torch.autograd.grad(out.sin().sum() + state.sin().sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(x.square().sum() for x in first), leaves)]

    torch.testing.assert_close(run("scan"), run("edge_list"), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("linear", [True, False], ids=["a plain sum", "a square"])
def test_forces_are_trained_on_whatever_the_first_derivatives_were_multiplied_with(linear: bool) -> None:
    positions, key, value = leaf(), leaf().detach(), leaf().detach()

    def loss(backend: str) -> torch.Tensor:
        out = ops.attend(GRAPH, positions, key, value, backend=backend)
        energy = out.sum() if linear else out.square().sum()
        (forces,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy + forces.square().sum()

    (expected,) = torch.autograd.grad(loss("edge_list"), positions)
    for backend in ("tiles", "csr", "dense", "auto"):
        torch.testing.assert_close(torch.autograd.grad(loss(backend), positions)[0], expected)


@pytest.mark.parametrize("graph", [GRAPH, graphs.from_edges(torch.randint(5, (2, 12)), 5)], ids=["causal", "edges"])
def test_transforms_of_torch_func(graph: Graph) -> None:
    query, key, value = (leaf().detach() for _ in range(3))

    def f(query: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        return ops.attend(graph, query, key, value, backend=backend).sin().sum()

    by_hand = torch.autograd.functional.hessian(partial(f, backend="edge_list"), query)
    for hessian in (
        torch.func.hessian(f), torch.func.jacrev(torch.func.jacfwd(f)), torch.func.jacfwd(torch.func.jacrev(f)),
        partial(torch.autograd.functional.hessian, f), partial(torch.autograd.functional.hessian, f, vectorize=True),
    ):  # fmt: skip
        torch.testing.assert_close(hessian(query), by_hand)
    of_each = torch.vmap(torch.func.grad(f))(torch.stack([query, 2 * query]))
    torch.testing.assert_close(of_each[1], torch.func.grad(partial(f, backend="edge_list"))(2 * query))
    for aggregate in ("max", "std"):
        op = MessagePassing(graph, aggregate, None, DotProduct(8, 2)).double()
        x = torch.randn(5, 8, dtype=torch.float64)
        found = torch.func.hessian(lambda x, op=op: op(x).sin().sum())(x)
        torch.testing.assert_close(found, torch.autograd.functional.hessian(lambda x, op=op: op(x).sin().sum(), x))


@pytest.mark.parametrize("width", [None, 1, 3], ids=["plain", "a weight an edge", "a weight an edge and feature"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.covering
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


def test_first_derivatives_come_with_create_graph_too() -> None:
    given = [leaf() for _ in range(3)]
    out = ops.attend(GRAPH, *given, backend="tiles").square().sum()
    plain = torch.autograd.grad(out, given, retain_graph=True)
    again = torch.autograd.grad(out, given, create_graph=True)
    torch.testing.assert_close(again, plain)
    assert all(x.requires_grad for x in again)


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
    x, keys = leaf(), rng.keys(torch.tensor(7), torch.zeros(1, dtype=torch.int64))
    assert torch.autograd.gradgradcheck(lambda x: drop_features(x, keys, 0.4), x)
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


@pytest.mark.parametrize("backend", ["tiles", "csr", "dense"])
def test_batches_of_gradients(backend: str) -> None:
    x = leaf()
    upstream = torch.randn(3, *x.shape, dtype=x.dtype)

    def run(backend: str) -> torch.Tensor:
        out = ops.attend(GRAPH, x, x, x, backend=backend)
        return torch.autograd.grad(out, x, upstream, is_grads_batched=True)[0]

    torch.testing.assert_close(run(backend), run("edge_list"))
