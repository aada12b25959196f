"""Aggregators against a loop over destinations, each written as its formula."""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, engine, graphs, ops
from mpnn.aggregate import (
    NAMED,
    PNA,
    Aggregator,
    Composed,
    Index,
    Max,
    Median,
    PowerMean,
    Quantile,
    Softmax,
    Sum,
    aggregator,
    per_node,
    segment_sum,
)
from mpnn.attention import DotProduct
from mpnn.graph import Graph

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda m: m.sum(0),
    "mean": lambda m: m.mean(0),
    "max": lambda m: m.amax(0),
    "min": lambda m: m.amin(0),
    "var": lambda m: m.var(0, correction=0),
    "std": lambda m: m.std(0, correction=0),
    "softmax": lambda m: (m.softmax(0) * m).sum(0),
    "powermean": lambda m: m.clamp(1e-7, 100).mean(0),
    "median": lambda m: m.median(0).values,
}


def example() -> Graph:
    """In-degrees 4 (one source twice), 0, 1, 3."""
    edges = [(4, 3), (1, 0), (2, 0), (1, 0), (0, 2), (3, 0), (1, 3), (2, 3)]
    return graphs.from_edges(torch.tensor(edges).T, num_dst=4, num_src=5)


def looped(graph: Graph, x: Tensor, formula: Callable[[Tensor], Tensor], weight: Tensor | None = None) -> Tensor:
    """x [..., N_src, F] -> [..., N_dst, F], zeros where there are no in-neighbors."""
    src, dst = graph.edge_index
    rows = []
    for i in range(graph.num_dst):
        messages = x[..., src[dst == i], :]
        if weight is not None:
            messages = messages * weight[dst == i, None]
        messages = messages.movedim(-2, 0)
        rows.append(formula(messages) if len(messages) else x.new_zeros(*x.shape[:-2], x.shape[-1]))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.covering(times=2)
def test_against_the_loop(batch: tuple[int, ...], name: str, weighted: bool) -> None:
    graph = example()
    x = torch.randn(*batch, 5, 3, dtype=torch.float64)
    weight = torch.rand(graph.num_edges, dtype=torch.float64) if weighted else None
    out = ops.aggregate(graph, x, name, weight=weight)
    torch.testing.assert_close(out, looped(graph, x, FORMULAS[name], weight))
    assert out[..., 1, :].eq(0).all()


def test_there_is_a_formula_for_every_name() -> None:
    assert set(NAMED) == {*FORMULAS, "pna"}


@pytest.mark.parametrize("name", NAMED)
def test_nan_reaches_out_neighbors_alone(name: str) -> None:
    x = torch.randn(5, 2)
    x[4, 0] = torch.nan
    out = ops.aggregate(example(), x, name).unflatten(-1, (-1, 2))
    assert out[3, :, 0].isnan().all()
    assert out[3, :, 1].isfinite().all()
    assert out[:3].isfinite().all()


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_median_is_torchs(n: int) -> None:
    x = torch.randint(0, 4, (n, 50)).double().requires_grad_()  # many equal ones
    out = ops.aggregate(graphs.complete().bind(1, n), x, Median())
    torch.testing.assert_close(out[0], x.median(0).values)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert gradient.sum(0).eq(1).all()
    assert (gradient * (x - x.median(0).values)).eq(0).all()


@pytest.mark.parametrize("backend", ["csr", "edge_list"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("n", [1, 3, 7, 40_000])
@pytest.mark.covering(times=2)
def test_equal_messages_have_no_spread_and_no_gradient(
    n: int, weighted: bool, dtype: torch.dtype, backend: str
) -> None:
    """However the mean of n numbers is rounded."""
    src = torch.arange(n) % 5
    graph = graphs.from_edges(torch.stack([src, torch.zeros(n, dtype=torch.int64)]), num_dst=1, num_src=5)
    x = torch.full((5, 9), 0.1, dtype=dtype, requires_grad=True)
    weight = torch.full((n,), 0.37, dtype=dtype, requires_grad=True) if weighted else None
    leaves = [leaf for leaf in (x, weight) if leaf is not None]
    for reduce in ("var", "std"):
        out = ops.aggregate(graph, x, reduce, weight=weight, backend=backend)
        assert out.eq(0).all()
    first = torch.autograd.grad(out.float().square().sum() + out.float().sum(), leaves, create_graph=True)
    assert all(g.eq(0).all() for g in first)
    again = [g for g in first if g.requires_grad]
    second = torch.autograd.grad([g.sum() for g in again], leaves, allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in second)


@pytest.mark.parametrize("spread", [2.0, 0.01, 1e-6, 1e-15])
def test_the_deviation_of_two_numbers_is_half_their_distance(spread: float) -> None:
    graph = graphs.from_edges([[0, 1], [0, 0]], num_src=2, num_dst=1)
    x = torch.tensor([[0.0], [spread]], requires_grad=True)
    for backend in ("csr", "edge_list"):
        out = ops.aggregate(graph, x, "std", backend=backend)
        torch.testing.assert_close(out.detach(), torch.tensor([[spread / 2]]), rtol=2e-7, atol=0.0)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        torch.testing.assert_close(gradient, torch.tensor([[-0.5], [0.5]]))
    out = ops.aggregate(graph, x.half(), "std")
    torch.testing.assert_close(out, (x.half()[1:] / 2).detach(), rtol=1e-3, atol=0.0, check_stride=False)


@pytest.mark.parametrize("attends", [False, True], ids=["", "attention"])
def test_second_derivatives_of_a_deviation(attends: bool) -> None:
    attention = DotProduct(6, 2) if attends else None
    layer = MessagePassing(example(), "std", None, attention).double()
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    own = x[:4].detach()
    upstream = torch.randn(4, 6, dtype=torch.float64)
    src, dst = example().ends

    def ours(source: Tensor) -> Tensor:
        return (layer(own, source=source) * upstream).sum()

    def formula(source: Tensor) -> Tensor:
        rows = []
        for i in range(4):
            value, weight = source[src[dst == i]].unflatten(-1, (2, 3)), torch.ones(1, 1, dtype=torch.float64)
            if attention is not None:
                query, key, value = attention.project(own[i], source[src[dst == i]], example())
                weight = ((query * key).sum(-1) / 3**0.5).softmax(0)
            # torch's deviation of one number has no derivative.
            one = value.new_zeros(2, 3)
            rows.append((weight[..., None] * value).std(0, correction=0) if len(value) > 1 else one)
        merged = torch.stack(rows)
        return ((merged.flatten(1) if attention is None else attention.merge(merged)) * upstream).sum()

    torch.testing.assert_close(ours(x), formula(x))
    torch.testing.assert_close(torch.func.grad(ours)(x), torch.autograd.grad(formula(x), x)[0])
    hessian = torch.autograd.functional.hessian(formula, x)
    torch.testing.assert_close(torch.autograd.functional.hessian(ours, x), hessian)
    torch.testing.assert_close(torch.func.hessian(ours)(x), hessian)


def test_variance_of_large_numbers_does_not_cancel() -> None:
    x = 1e6 + torch.arange(8.0)[:, None]
    out = ops.aggregate(graphs.complete().bind(8), x, "var")
    torch.testing.assert_close(out, torch.full_like(out, 5.25))


def test_softmax_runs_from_mean_to_max_with_the_temperature() -> None:
    graph, x = example(), torch.randn(5, 3, dtype=torch.float64)
    torch.testing.assert_close(ops.aggregate(graph, x, Softmax(0.0)), ops.aggregate(graph, x, "mean"))
    torch.testing.assert_close(ops.aggregate(graph, x, Softmax(1e4)), ops.aggregate(graph, x, "max"))
    torch.testing.assert_close(ops.aggregate(graph, x, Softmax(-1e4)), ops.aggregate(graph, x, "min"))


def test_power_mean_runs_from_mean_to_max_with_the_power() -> None:
    graph, x = example(), 0.5 + torch.rand(5, 3, dtype=torch.float64)
    torch.testing.assert_close(ops.aggregate(graph, x, PowerMean(1.0)), ops.aggregate(graph, x, "mean"))
    harmonic = looped(graph, x, lambda m: 1 / (1 / m).mean(0))
    torch.testing.assert_close(ops.aggregate(graph, x, PowerMean(-1.0)), harmonic)
    # n messages of at most M have a power mean within M * n^(-1/p) and M.
    found, largest = ops.aggregate(graph, x, PowerMean(500.0)), ops.aggregate(graph, x, "max")
    assert (found <= largest * (1 + 1e-12)).all()
    assert (found >= largest * 4 ** (-1 / 500)).all()


def test_power_mean_refuses_the_power_zero() -> None:
    with pytest.raises(ValueError, match="geometric mean"):
        PowerMean(0.0)


def test_pna_is_every_aggregator_under_every_scaler() -> None:
    graph, x = example(), torch.randn(5, 2, dtype=torch.float64)
    names, degree = ("mean", "max", "min", "std"), (4, 0, 1, 3)
    logs = torch.tensor([math.log(d + 1) for d in degree], dtype=torch.float64)[:, None]
    delta = logs.mean()
    found = torch.cat([looped(graph, x, FORMULAS[name]) for name in names], -1)
    attenuation = torch.where(logs > 0, delta / logs, torch.zeros_like(logs))
    expected = torch.cat([found, found * logs / delta, found * attenuation], -1)
    torch.testing.assert_close(ops.aggregate(graph, x, PNA()), expected)
    amplified = ops.aggregate(graph, x, PNA(["max"], ["amplification"], average_log_degree=0.5))
    torch.testing.assert_close(amplified, looped(graph, x, FORMULAS["max"]) * logs / 0.5)


def test_pna_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"no degree scaler 'linear'.*identity, amplification, attenuation"):
        PNA(scalers=["linear"])
    with pytest.raises(ValueError, match="must be positive; got 0"):
        PNA(average_log_degree=0)


# ---------------------------------------------------------------------------------------- the user's own


def first(messages: Tensor, index: Index) -> Tensor:
    """The message of the lowest edge at each destination."""
    out = messages.new_zeros(index.num_dst, *messages.shape[1:])
    some = index.degree > 0
    out[some] = messages[index.ptr[:-1][some]]
    return out


class First:
    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return first(messages, index)


@pytest.mark.parametrize("own", [first, First()], ids=["function", "object"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_a_function_or_an_object_of_ones_own(batch: tuple[int, ...], own: object) -> None:
    x = torch.randn(*batch, 5, 3)
    expected = looped(example(), x, lambda m: m[0])
    assert ops.aggregate(example(), x, own).equal(expected)
    assert MessagePassing(None, own)(x, graphs.identity()).equal(x)


def test_the_index_is_a_tensor_that_knows_its_rows() -> None:
    seen = []

    def spy(messages: Tensor, index: Index) -> Tensor:
        seen.append(index)
        return torch.zeros(index.num_dst, *messages.shape[1:]).index_add(0, index, messages)

    ops.aggregate(example(), torch.ones(5, 1), spy)
    (index,) = seen
    assert isinstance(index, Tensor)
    assert index.tolist() == [0, 0, 0, 0, 2, 3, 3, 3]
    assert index.ptr.tolist() == [0, 4, 4, 5, 8]
    assert index.degree.tolist() == [4, 0, 1, 3]
    assert index.num_dst == 4


class Scaled(nn.Module):
    """A module called like a function, with something to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, messages: Tensor, index: Index) -> Tensor:
        return self.scale * Sum().reduce(messages, index)


@pytest.mark.parametrize("own", [Scaled(), Softmax(learn=True), PNA(["mean", Softmax(learn=True)])], ids=type)
def test_what_an_aggregator_learns_belongs_to_the_operator(own: Aggregator) -> None:
    op = MessagePassing(graphs.complete(), own)
    assert [p.requires_grad for p in op.parameters()] == [True]
    op(torch.randn(3, 2)).sum().backward()
    assert all(p.grad is not None for p in op.parameters())


def test_a_class_in_place_of_its_object_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Softmax is a class; pass Softmax\(\)"):
        aggregator(Softmax)


@pytest.mark.parametrize(
    "wrong", [lambda messages, index: messages, lambda messages, index: None], ids=["rows", "None"]
)
def test_an_aggregator_that_gives_the_wrong_rows_is_named(wrong: Callable[..., object]) -> None:
    with pytest.raises(ValueError, match="to one row for each of 4 destinations; it returned"):
        ops.aggregate(example(), torch.ones(5, 1), wrong)


# ---------------------------------------------------------------------------------------- what an aggregator states


def combining(function: Any, identity: Any) -> Any:
    """An aggregator that states these."""
    sums = type("Own", (), {"reduce": lambda self, messages, index: segment_sum(messages, index)})()
    sums.combine, sums.identity = function, identity
    return sums


@pytest.mark.parametrize(
    ("function", "identity", "broken"),
    [
        (lambda a, b: max(a, b) + math.log1p(math.exp(min(a, b) - max(a, b))), -math.inf, r"\(-inf, -inf\) is nan"),
        (lambda a, b: max(a, b), 0.0, r"\(0.0, -2.5\) is 0.0"),
        (lambda a, b: max(a, b), -1e30, r"\(-1e\+30, -inf\) is -1e\+30"),
        (lambda a, b: a + b, 1, r"\(1.0, 0.0\) is 1.0"),
        (lambda a, b: a + b - a * b, 0.0, r"\(0.0, inf\) is nan"),
        (lambda a, b: a, 0.0, r"\(0.0, 1.0\) is 0.0"),
    ],
)
def test_a_combine_that_changes_a_number_is_refused(function, identity, broken: str) -> None:
    own = combining(function, identity)
    sentence = rf"combine\(identity, m\) of Own must be m, with identity .*, but combine{broken}; let combine return"
    graph = graphs.window(1).bind(4)
    for use in (
        lambda: ops.aggregate(graph, torch.rand(4, 2), own),
        lambda: ops.aggregate(graph, torch.rand(4, 2), own, backend="edge_list"),
        lambda: MessagePassing(graph, own),
        lambda: MessagePassing(graph, PNA(["sum", own])),
    ):
        with pytest.raises(ValueError, match=sentence):
            use()


def test_a_combine_is_checked_when_it_is_first_used_and_not_again() -> None:
    asked = []

    def plus(a: float, b: float) -> float:
        asked.append((a, b))
        return a + b

    own = combining(plus, 0)
    ops.aggregate(graphs.window(1).bind(4), torch.rand(4, 2), own, backend="edge_list")
    first = list(asked)
    assert {(0.0, math.inf), (-math.inf, 0.0)} <= set(first)
    ops.aggregate(graphs.window(1).bind(4), torch.rand(4, 2), own, backend="edge_list")
    assert asked == first


@pytest.mark.parametrize(
    ("function", "identity"),
    [
        (lambda a, b: a + b, 0),
        (lambda a, b: a * b, 1.0),
        (max, -math.inf),
        (min, torch.tensor(math.inf)),
        (lambda a, b: math.log(math.exp(a) + math.exp(b)), -math.inf),  # Python has no log(0): left to numba
    ],
)
def test_combines_that_change_nothing_pass(function, identity) -> None:
    ops.aggregate(graphs.window(1).bind(4), torch.rand(4, 2), combining(function, identity), backend="edge_list")


WRONG: dict[str, tuple[Any, str]] = {
    "an identity in words": (combining(max, "-inf"), "identity of Own must be a number; got '-inf'"),
    "torch's sum": (torch.sum, "an aggregator must be a function of (messages, index), which reduces .*'sum'"),
    "a function of messages": (lambda m: m.sum(0), "an aggregator must be a function of (messages, index)"),
    "a linear layer": (torch.nn.Linear(2, 2), "an aggregator must be a function of (messages, index)"),
    "a reduce of messages": (
        type("Half", (), {"reduce": lambda self, messages: messages})(),
        "reduce of Half must be a function of (messages, index)",
    ),
    "a reduce that is a name": (
        type("Half", (), {"reduce": "sum"})(),
        "reduce of Half must be a function of (messages, index)",
    ),
    "no parts": (type("Half", (Composed,), {})(), "parts of Half must be a tuple of aggregators"),
    "a name for parts": (type("Half", (Composed,), {"parts": "sum"})(), "parts of Half must be a tuple of aggregators"),
    "names as parts": (
        type("Half", (Composed,), {"parts": ("sum", "max")})(),
        "parts of Half must be aggregators; got 'sum': use aggregator('sum')",
    ),
    "classes as parts": (
        type("Half", (Composed,), {"parts": (Max,)})(),
        "parts of Half must be aggregators; got <class 'mpnn.aggregate.Max'>: use an object such as Max()",
    ),
    "a number": (3, "an aggregator is a name .*, an object with reduce(messages, index), or a function"),
}


@pytest.mark.parametrize(("given", "sentence"), WRONG.values(), ids=WRONG)
def test_each_mistake_with_an_aggregator_is_named(given: Any, sentence: str) -> None:
    pattern = re.escape(sentence).replace(r"\.\*", ".*")
    with pytest.raises(TypeError, match=pattern):
        ops.aggregate(graphs.window(1).bind(4), torch.rand(4, 2), given)
    with pytest.raises(TypeError, match=pattern):
        MessagePassing(graphs.window(1), given)


def test_aggregations_of_pyg_are_refused_with_what_to_write() -> None:
    geometric = pytest.importorskip("torch_geometric.nn")
    graph, x = graphs.window(1).bind(4), torch.rand(3, 4, 2)
    aggregation = geometric.SoftmaxAggregation(t=0.5)
    with pytest.raises(TypeError, match=r"SoftmaxAggregation is a class of torch_geometric.*lambda messages, index: "):
        ops.aggregate(graph, x, aggregation)
    own = ops.aggregate(
        graph, x, lambda messages, index: aggregation(messages, index.plain, dim_size=index.num_dst, dim=0)
    )
    torch.testing.assert_close(own, ops.aggregate(graph, x, Softmax(0.5)))


# ---------------------------------------------------------------------------------------- messages of a batch


def longest(messages: Tensor, index: Index) -> Tensor:
    """The longest message [D] that reaches each node, zeros where none does; messages [E, D]."""
    assert messages.dim() == 2
    out = messages.new_zeros(index.num_dst, messages.shape[1])
    for i in range(index.num_dst):
        mine = messages[index.ptr[i] : index.ptr[i + 1]]
        if len(mine):
            out[i] = mine[mine.norm(dim=1).argmax()]
    return out


class Longest(torch.nn.Module):
    """The same, times a learned number, which doubles the width too."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(2.0))

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        found = self.factor * longest(messages, index)
        return torch.cat([found, -found], -1)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3), (0,)], ids=str)
def test_a_ranking_of_messages_never_mixes_sentences(batch: tuple[int, ...]) -> None:
    graph = graphs.from_edges(torch.randint(0, 7, (2, 20)), 8)
    x = torch.randn(*batch, 8, 5)
    for ranking, width in ((per_node(longest), 5), (per_node(Longest()), 10)):
        out = ops.aggregate(graph, x, ranking)
        assert out.shape == (*batch, 8, width)
        for one, alone in zip(out.reshape(-1, 8, width), x.reshape(-1, 8, 5), strict=True):
            assert torch.equal(one, ops.aggregate(graph, alone, ranking))


def test_a_ranking_of_messages_never_mixes_heads() -> None:
    attention = DotProduct(8, 2)
    op, x = MessagePassing(graphs.window(2), per_node(longest), None, attention), torch.randn(3, 9, 8)
    request = op.rounds(x)[0]
    out, _ = engine.run(request)
    for head in range(2):
        score = replace(request.score, query=request.score.query[..., [head], :], key=request.score.key[..., [head], :])
        alone, _ = engine.run(replace(request, score=score, value=request.value[..., [head], :]))
        torch.testing.assert_close(out[..., [head], :], alone)
    (gradient,) = torch.autograd.grad(op(x).sum(), attention.to_value.weight)
    assert gradient.abs().sum() > 0


def test_messages_have_the_shape_that_is_documented() -> None:
    shapes = []

    def own(messages: Tensor, index: Index) -> Tensor:
        shapes.append(tuple(messages.shape))
        return segment_sum(messages, index)

    graph = graphs.window(1).bind(5)
    ops.aggregate(graph, torch.rand(5, 7), own)
    ops.aggregate(graph, torch.rand(2, 3, 5, 7), own)
    MessagePassing(graph, own, None, DotProduct(8, 2))(torch.rand(3, 5, 8))
    assert shapes == [(13, 1, 7), (13, 2, 3, 1, 7), (13, 3, 2, 4)]


@pytest.mark.parametrize("q", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_quantiles_are_those_of_torch(q: float) -> None:
    graph = graphs.from_edges(torch.randint(0, 9, (2, 60)), 9)
    x = torch.randn(2, 9, 3, dtype=torch.float64, requires_grad=True)
    src, dst = graph.edge_index
    out = ops.aggregate(graph, x, Quantile(q))
    for i in range(9):
        messages = x[:, src[dst == i]]
        expected = messages.quantile(q, 1) if messages.shape[1] else torch.zeros(2, 3, dtype=x.dtype)
        torch.testing.assert_close(out[:, i], expected)
    assert torch.autograd.gradcheck(lambda x: ops.aggregate(graph, x, Quantile(q)), x)


def test_a_quantile_lies_between_the_extremes() -> None:
    with pytest.raises(ValueError, match="between 0, the minimum, and 1"):
        Quantile(1.5)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_weights_whose_negation_is_pending(reduce: str) -> None:
    """Their memory has the other sign."""
    graph = graphs.from_edges(torch.randint(20, (2, 60)), 20)
    x, weight = torch.randn(20, 8), torch.randn(60, 1)
    for given in (weight, torch._neg_view(weight), weight):
        expected = ops.aggregate(graph, x, reduce, weight=given.clone().resolve_neg(), backend="edge_list")
        torch.testing.assert_close(ops.aggregate(graph, x, reduce, weight=given), expected)


@pytest.mark.parametrize("name", ["sum", "mean", "max", "var", "std", "pna"])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_reduce_of_the_object_takes_the_place_of_its_class_s(name: str, is_known: bool) -> None:
    graph = graphs.from_edges(torch.randint(20, (2, 60)), 20)
    x, own = torch.randn(20, 8), copy.copy(aggregator(name))
    if is_known:
        ops.aggregate(graph, x, own)
        ops.aggregate(graph, x, own, weight=torch.ones(60))
    own.reduce = lambda messages, index: 2 * segment_sum(messages, index)
    for _ in range(2):
        torch.testing.assert_close(ops.aggregate(graph, x, own), 2 * ops.aggregate(graph, x, "sum"))
        weighted = ops.aggregate(graph, x, own, weight=torch.ones(60))
        torch.testing.assert_close(weighted, 2 * ops.aggregate(graph, x, "sum"))
