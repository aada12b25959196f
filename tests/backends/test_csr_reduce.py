"""Aggregation in fused rows (backend csr) against the specification: hubs, a user's own aggregators, memory, numbers
of threads. What all backends share is in `test_backends.py` and `tests/fuzz`."""

import math
import tracemalloc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from capabilities import GRAPHS, supported
from live_memory import LiveMemory
from row_cases import (  # noqa: F401 - fixtures
    BOTH,
    CPU,
    TRITON,
    Kernels,
    check,
    halves,
    hubs,
    leaf,
    moved,
    on_triton,
    poisoned,
    rounding,
    run,
    scattered,
    small_pieces,
    without_edges,
)
from threads import same_bits
from torch import Tensor

from mpnn import MessagePassing, engine, graphs, ops
from mpnn.aggregate import PNA, Aggregator, Composed, Index, Max, Mean, Median, Min, Std, Sum, Var, segment_sum
from mpnn.attention import Degree
from mpnn.backends import csr, edge_list, edge_orders
from mpnn.engine import steps
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.kernels.rows import reduce as row_reduce
from mpnn.round import Round
from mpnn.scores import Dot

AGGREGATORS = (Sum(), Mean(), Max(), Min(), Var(), Std(), PNA())
# Sums of at most 500 float64 terms of size about 10, squared at most, and twice over: 500 * 100 * 2 * 1.1e-16 = 1e-11.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class LogSumExp:
    """`log sum_j exp(m_j)`, zero for a node without in-neighbors."""

    identity = -math.inf

    @staticmethod
    def combine(a: float, b: float) -> float:
        high, low = max(a, b), min(a, b)
        if low == -math.inf or high == math.inf:
            return high
        return high + math.log1p(math.exp(low - high))

    @staticmethod
    def gradient(message: float, out: float) -> float:
        return math.exp(message - out)

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        sums = segment_sum(messages.exp(), index)
        return torch.where(sums > 0, sums, torch.ones_like(sums)).log()


class Product:
    """`prod_j m_j`, forward only."""

    identity = 1.0

    @staticmethod
    def combine(a: float, b: float) -> float:
        return a * b

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        rows = index.plain.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)
        out = messages.new_ones(index.num_dst, *messages.shape[1:])
        out = out.scatter_reduce(0, rows, messages, "prod")
        return torch.where((index.degree > 0).view(-1, *[1] * (messages.dim() - 1)), out, torch.zeros_like(out))


class Squares:
    """`sum_j m_j^2`."""

    identity = 0.0
    combine = staticmethod(lambda a, b: a + b)
    lift = staticmethod(lambda m: m * m)
    gradient = staticmethod(lambda m, out: 2 * m)

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return segment_sum(messages.square(), index)


class Farthest:
    """`max_j |m_j|`, whose equal messages share the gradient."""

    identity = 0.0
    combine = staticmethod(lambda a, b: max(a, b))
    lift = staticmethod(lambda m: abs(m))
    gradient = staticmethod(lambda m, out: (1.0 if m > 0 else -1.0 if m < 0 else 0.0) * (abs(m) == out))
    shares_ties = True

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return Max().reduce(messages.abs(), index)


class MeanOfSquares(Composed):
    parts = (Squares(),)

    def compose(self, results: Sequence[Tensor], degree: Tensor) -> Tensor:
        return results[0] / degree.clamp(min=1).view(-1, *[1] * (results[0].dim() - 1))


OWN = (LogSumExp(), Squares(), Farthest(), MeanOfSquares())


def random_graph(num_dst: int, num_src: int, num_edges: int) -> Graph:
    """Half of the edges lead to destination 0, many come from source 0, and some run twice."""
    edges = torch.stack([torch.randint(0, max(n, 1), (num_edges,)) for n in (num_src, num_dst)])
    edges[1, : num_edges // 2] = 0
    edges[0, num_edges // 3 : num_edges // 2] = 0
    return graphs.from_edges(edges, num_dst=num_dst, num_src=num_src)


def weights(graph: Graph, heads: int, batch: tuple[int, ...] = ()) -> Tensor:
    return torch.randint(-2, 3, (*batch, graph.num_edges, heads)).double().requires_grad_()


@pytest.mark.parametrize("aggregator", [*AGGREGATORS, *OWN], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("width", [1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 33, 64, 71, 130])
@pytest.mark.covering
def test_every_width(width: int, aggregator: Aggregator) -> None:
    graph = random_graph(20, 20, 150)
    request = Round(graph, halves(20, 1, width), normalize="none", reduce=aggregator)
    check(CPU, request, CLOSE)
    check(CPU, replace(request, bias=(weights(graph, 1),)), CLOSE)


@pytest.mark.parametrize("name", [name for name in GRAPHS if supported(csr, "aggregation: sum", name)])
def test_an_aggregator_of_ones_own_over_every_graph(name: str) -> None:
    graph = GRAPHS[name]
    plain = Round(graph, halves(2, graph.num_src, 2, 5), normalize="none", reduce=LogSumExp())
    check(CPU, plain, CLOSE)
    check(CPU, replace(plain, bias=(weights(graph, 2),)), CLOSE)


@pytest.mark.parametrize("aggregator", [Sum(), Max(), Var()], ids=lambda a: type(a).__name__)
def test_every_form_of_weights(aggregator: Aggregator) -> None:
    graph = random_graph(9, 9, 60).with_relation(torch.randint(0, 4, (9, 9)))
    table = torch.randint(-2, 3, (4, 3)).double().requires_grad_()
    for given in (
        (weights(graph, 1),),
        (weights(graph, 3, (2,)),),
        (weights(graph, 3), weights(graph, 1)),
        (BiasTable(table, graph.relation),),
        (BiasTable(table, graph.relation), weights(graph, 1, (2,))),
    ):
        check(CPU, Round(graph, halves(2, 9, 3, 4), bias=given, normalize="none", reduce=aggregator), CLOSE)
    shared = Round(graph, halves(2, 9, 1, 4), bias=(weights(graph, 3),), normalize="none", reduce=aggregator)
    check(CPU, shared, CLOSE)


@pytest.mark.parametrize("aggregator", [*AGGREGATORS, *OWN], ids=lambda a: type(a).__name__)
def test_hubs_are_split_and_threads_change_no_bit(aggregator: Aggregator) -> None:
    graph = random_graph(40, 30, 60_000)
    value, weight = halves(30, 1, 24), weights(graph, 1)
    assert len(row_reduce.chunks_of(edge_orders.by_destination(graph), 24)) > 4
    request = Round(graph, value, bias=(weight,), normalize="none", reduce=aggregator)

    def results() -> list[Tensor]:
        out, _ = engine.run(request, "csr")
        return [out, *torch.autograd.grad(out.square().sum(), (value, weight))]

    assert same_bits(results, 1, 2)
    torch.testing.assert_close(results()[0], engine.run(request, "edge_list")[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("aggregator", "edges"), [(Sum(), 1), (Sum(), 3), (Max(), 3), (Min(), 15), (LogSumExp(), 1), (Product(), 15)]
)
@pytest.mark.sample(2)
def test_a_part_for_each_edge(aggregator: Aggregator, edges: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpnn.kernels.rows.rows.MIN_PIECE", 1)
    graph = graphs.from_edges([list(range(edges)), [0] * edges], edges)
    width = 4 * 2**18 // edges + 1  # so many numbers that each of 16 chunks would be worth a thread
    monkeypatch.setattr(row_reduce, "_MIN_COMPONENTS", width // 2)
    request = Round(graph, -1 - torch.rand(edges, 1, width), normalize="none", reduce=aggregator)
    torch.testing.assert_close(engine.run(request, "csr")[0], engine.run(request, "edge_list")[0], rtol=1e-5, atol=1e-5)
    assert len(row_reduce.chunks_of(edge_orders.by_destination(graph), width)) == edges


@pytest.mark.parametrize("reduce", [Sum(), Mean(), Max(), Min(), Var()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.covering
def test_bfloat16_and_its_gradients_are_rounded_once(reduce: Aggregator, weighted: bool) -> None:
    """Degrees up to 100,000 in few rows, so that chunks share them; widths with and without a rest of a vector."""
    for graph, width in ((random_graph(3, 20_000, 100_000), 21), (random_graph(400, 300, 5_000), 64)):
        narrow = torch.rand(graph.num_src, 1, width).bfloat16().requires_grad_()
        weight = torch.randint(1, 256, (graph.num_edges, 1)) / 256  # products are exact, so extremes are the same
        weight = weight.requires_grad_() if weighted else None
        wide, exact_weight = (None if x is None else x.detach().double().requires_grad_() for x in (narrow, weight))
        direction = torch.rand(graph.num_dst, 1, width).bfloat16()
        results = []
        for x, w, backend in ((narrow, weight, csr), (wide, exact_weight, edge_list)):
            bias = () if w is None else (w,)
            out, _ = engine.run(Round(graph, x, bias=bias, normalize="none", reduce=reduce), backend.NAME)
            leaves = [x for x in (x, w) if x is not None]
            results.append([out, *torch.autograd.grad((out * direction.to(out.dtype)).sum(), leaves)])
        for ours, exact in zip(*results, strict=True):
            size = exact.detach().abs()
            # The last rounding; before that n positive float32 terms, whose roundings are a random walk, 5 sqrt(n)
            # units; and those of var and of weights are differences of numbers up to the largest.
            more = 5 * math.sqrt(graph.num_edges) * 2**-24 * (size if isinstance(reduce, Sum | Mean) else size.max())
            assert ((ours.detach().double() - exact).abs() <= 2**-8 * size + more).all(), ours.shape


def test_equal_extremes_share_the_gradient_in_one_row_and_across_parts() -> None:
    for count in (3, 70_000):  # the latter is cut into several chunks
        graph = graphs.complete().bind(1, count)
        x = torch.zeros(count, 8)
        x[::2] = 1.0
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(ops.aggregate(graph, x, "max", backend="csr").sum(), x)
        expected = torch.where(x > 0, 1 / (x > 0).sum(0), 0.0)
        torch.testing.assert_close(gradient, expected)


def test_nan_and_infinity_reach_those_who_hear_them_and_nobody_else() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3, 4], [0, 0, 1, 1, 2]]), 5)
    for name in ("sum", "mean", "max", "min", "var", "std"):
        x = torch.ones(5, 11)
        x[1, 3], x[2, 10] = torch.nan, torch.inf
        out = ops.aggregate(graph, x, name, backend="csr")
        expected = ops.aggregate(graph, x, name, backend="edge_list")
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_nothing_of_edges_times_width_is_allocated() -> None:
    graph = random_graph(200, 200, 100_000)
    value, weight = torch.randn(200, 1, 64, requires_grad=True), torch.rand(100_000, 1, requires_grad=True)
    for aggregator in AGGREGATORS:
        request = Round(graph, value, bias=(weight,), normalize="none", reduce=aggregator)

        def both(request: Round = request) -> None:
            engine.run(request, "csr")[0].sum().backward()

        both()  # the graph's own tables, and the compiler
        tracemalloc.start()  # sees what numpy allocates
        both()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            both()
        largest = max(abs(event.cpu_memory_usage) for event in profile.events())
        # What is there for each edge is its weight and gradients of it, a few numbers, not 64.
        assert peak + largest < 8 * 100_000 * 4


def test_unsupported_requests_are_refused_with_a_reason() -> None:
    graph, x = random_graph(4, 4, 9), torch.randn(4, 3, requires_grad=True)

    class Bound(Product):
        def combine(self, a: float, b: float) -> float:  # type: ignore[override]
            return a * b

    class Nameless:
        combine = staticmethod(Product.combine)
        reduce = Product.reduce

    for aggregator, reason in (
        (Median(), "Median has no combine"),
        (Product(), "Product has no gradient"),
        (Bound(), "combine of Bound must be a function of two numbers: make it a staticmethod"),
        (Nameless(), "Nameless has combine.*no identity"),
        (PNA(["mean", Median()]), "Median has no combine"),
    ):
        with pytest.raises(ValueError, match=f"backend 'csr' cannot run this: .*{reason}"):
            ops.aggregate(graph, x, aggregator, backend="csr")


# ---------------------------------------------------------------------------------------- the user's own


def test_a_combine_without_gradient_runs_forward() -> None:
    graph, x = random_graph(30, 20, 200), 1 + 0.1 * torch.randn(20, 7, dtype=torch.float64)
    ours = ops.aggregate(graph, x, Product(), backend="csr")
    torch.testing.assert_close(ours, ops.aggregate(graph, x, Product(), backend="edge_list"))
    trained = x.clone().requires_grad_()
    chosen = ops.aggregate(graph, trained, Product())  # auto trains it by the plain reduce
    assert torch.autograd.grad(chosen.sum(), trained)[0].isfinite().all()


def test_a_combine_with_a_number_of_its_own() -> None:
    class Soft:
        """`log(sum_j exp(t m_j)) / t`."""

        identity = -math.inf

        def __init__(self, t: float) -> None:
            self.combine = lambda a, b: (
                a + math.log(2.0) / t if a == b else max(a, b) + math.log1p(math.exp(-t * abs(a - b))) / t
            )
            self.gradient = lambda message, out: math.exp(t * (message - out))
            self.t = t

        def reduce(self, messages: Tensor, index: Index) -> Tensor:
            return LogSumExp().reduce(self.t * messages, index) / self.t

    for t in (0.5, 3.0):
        check(CPU, Round(random_graph(6, 6, 20), halves(6, 1, 3), normalize="none", reduce=Soft(t)), CLOSE)


def test_a_composition_of_ones_own_is_run_by_its_parts() -> None:
    class Range(Composed):
        """Largest minus smallest."""

        parts = (Max(), Min())

        def compose(self, found: list[Tensor], degree: Tensor) -> Tensor:
            return found[0] - found[1]

    check(CPU, Round(random_graph(9, 9, 50), halves(2, 9, 1, 5), normalize="none", reduce=Range()), CLOSE)


def test_a_function_that_numba_cannot_compile_is_named() -> None:
    class Odd(Product):
        @staticmethod
        def combine(a: float, b: float) -> float:
            return torch.tensor([a, b]).prod().item()

    with pytest.raises(TypeError, match="combine must be a function of two numbers that numba can compile"):
        ops.aggregate(random_graph(4, 4, 9), torch.randn(4, 3), Odd(), backend="csr")


@pytest.mark.parametrize("kernels", BOTH)
def test_gradients_of_deviations_that_are_small_beside_their_mean(kernels: Kernels) -> None:
    ends = torch.tensor([(j, i) for i in range(9) for j in range(2 + i % 4)]).t()
    graph = graphs.from_edges(ends, 9)
    # Exact numbers, and weights that are powers of 2, so that no message is rounded.
    value = 1 + torch.rand(1, 1, 40) / 4 + torch.randint(-9, 10, (9, 1, 40)) * 2.0**-22
    weight = torch.tensor([0.5, 2.0])[ends[1] % 2, None]
    d_out = torch.randn(9, 1, 40)
    gradients = []
    for dtype, by in ((torch.float32, kernels), (torch.float64, CPU)):
        round = Round(graph, value.to(dtype), bias=(weight.to(dtype),), normalize="none", reduce=Std())
        there = moved(round, by.device)
        there.value.requires_grad_()
        out = run(by, there)[0]
        gradients.append(torch.autograd.grad(out, there.value, d_out.to(out))[0].cpu().double())
    # At most nine rows add terms of size 10 at most, each after 16 roundings: 9 * 10 * 16 * 6e-8
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------------------------- by Triton


@on_triton
@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda a: type(a).__name__)
def test_aggregation_agrees_with_the_specification(aggregator: Aggregator) -> None:
    # Squares of up to 10, 60 of them, and a root: unless such messages are equal, their variance is at least
    # .25 * 59 / 60^2, where the derivative of a root is 8. 60 * 100 * 8 * 1e-16
    close = {"rtol": 1e-10, "atol": 1e-10}
    for graph, batch, heads, width in (
        (scattered(), (2, 1), 3, 5),
        (without_edges(), (), 2, 1),
        (graphs.window(1).bind(5), (), 1, 1),
    ):
        plain = Round(graph, halves(*batch, graph.num_src, heads, width), normalize="none", reduce=aggregator)
        check(TRITON, plain, close, str(graph))
        weight = torch.randint(-2, 3, (*batch, graph.num_edges, heads)).double().requires_grad_()
        check(TRITON, replace(plain, bias=(weight,)), close, f"{graph}, weighted")


@on_triton
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_equal_messages_have_no_variance(weighted: bool) -> None:
    graph = hubs()
    value = torch.full((9, 1, 5), 0.1, requires_grad=True)
    weight = torch.full((graph.num_edges, 1), 0.37)
    round = Round(graph, value, bias=(weight,) if weighted else (), normalize="none", reduce=Std())
    out = run(TRITON, moved(round, TRITON.device))[0]
    assert out.eq(0).all()
    assert torch.autograd.grad(out.sum(), value)[0].eq(0).all()


@on_triton
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("aggregator", [Mean(), Max(), Var()], ids=lambda a: type(a).__name__)
def test_aggregation_divides_hubs(aggregator: Aggregator) -> None:
    graph = hubs()
    for width in (1, 40):
        plain = Round(graph, halves(9, 1, width), normalize="none", reduce=aggregator)
        check(TRITON, plain, {"rtol": 1e-10, "atol": 1e-10})
    weight = torch.randint(-2, 3, (graph.num_edges, 1)).double().requires_grad_()
    check(TRITON, replace(plain, bias=(weight, BiasTable(leaf(2, 1)))), {"rtol": 1e-9, "atol": 1e-9})


@on_triton
def test_one_weight_for_all_heads_and_one_head_for_all_weights() -> None:
    graph = scattered()
    plain = Round(graph, halves(2, 10, 3, 4), bias=(halves(graph.num_edges, 1),), normalize="none")
    check(TRITON, plain)
    check(TRITON, replace(plain, value=halves(2, 10, 1, 4), bias=(halves(graph.num_edges, 3),), reduce=Max()))


@on_triton
def test_extremes_hand_on_nan() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 1, 3, 3]]), 4)
    value = halves(4, 1, 3)
    with torch.no_grad():
        value[0] = torch.nan
    for aggregator in (Max(), Min(), Sum()):
        request = moved(Round(graph, value, normalize="none", reduce=aggregator), TRITON.device)
        out, _ = run(TRITON, request)
        assert out[1].isnan().all()
        assert out[[0, 2, 3]].isfinite().all()
        gradients = (torch.autograd.grad(o.sum(), request.value)[0] for o in (out, engine.run(request, "edge_list")[0]))
        torch.testing.assert_close(*gradients, equal_nan=True)


@on_triton
@pytest.mark.usefixtures("small_pieces")
def test_narrow_sums_are_rounded_once() -> None:
    graph = hubs()
    value = torch.randn(9, 1, 8).bfloat16()
    out = run(TRITON, moved(Round(graph, value, normalize="none"), TRITON.device))[0].cpu()
    expected = engine.run(Round(graph, value.double(), normalize="none"), "edge_list")[0]
    # 60 terms of up to 4 in float32, and one rounding
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= rounding(TRITON, out.dtype) * expected.abs() + 60 * 240 * 2**-24).all()


@pytest.mark.parametrize("shape", [(131,), (3, 8), (2, 1, 5)], ids=str)
@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "var"])
def test_a_weight_for_each_feature(reduce: str, shape: tuple[int, ...]) -> None:
    """Against the formula in plain torch, over a graph with repeated edges and nodes without edges. Weights are of the
    whole batch or of each of its items."""
    *batch, width = shape
    src, dst = torch.randint(0, 11, (60,)), torch.randint(0, 4, (60,))
    graph = graphs.from_edges(torch.stack([src, dst]), 11)
    how = {"sum": Sum(), "mean": Mean(), "max": Max(), "min": Min(), "var": Var()}[reduce]
    for of_batch in {(), tuple(batch)}:
        x, weight = leaf(*batch, 11, width), leaf(*of_batch, 60, width)
        order = dst.argsort(stable=True)
        messages = (x[..., src, :] * weight)[..., order, :].movedim(-2, 0)
        plain = how.reduce(messages, Index.of(dst[order], graph.csr.ptr)).movedim(0, -2)
        d_out = torch.randn_like(plain)
        for backend in ("csr", "edge_list", "auto"):
            out = ops.aggregate(graph, x, reduce, weight=weight, backend=backend)
            torch.testing.assert_close(out, plain, **CLOSE)
            pairs = (torch.autograd.grad(y, (x, weight), d_out, retain_graph=True) for y in (out, plain))
            for found, expected in zip(*pairs, strict=True):
                torch.testing.assert_close(found, expected, **CLOSE)


def test_a_weight_for_each_feature_writes_no_products_of_edges() -> None:
    """Beside the gradient of the weights, nothing has their size."""
    graph = graphs.from_edges(torch.randint(0, 50, (2, 4000)), 50)
    x, weight = torch.randn(50, 128, requires_grad=True), torch.randn(4000, 128, requires_grad=True)
    ops.aggregate(graph, x, weight=weight, backend="csr").sum().backward()  # sorts the edges
    x.grad = weight.grad = None
    with LiveMemory() as memory:
        out = ops.aggregate(graph, x, weight=weight, backend="csr")
        out.sum().backward()
    assert memory.peak < 1.2 * weight.nbytes


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "min", "var"])
@pytest.mark.parametrize("shape", [(23, 13), (2, 23, 8)])
@pytest.mark.parametrize("attention", [False, True])
def test_calls_over_a_known_kind_of_graph_plan_nothing(
    aggregate: str, shape: tuple[int, ...], attention: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    edges, x = torch.randint(23, (2, 70)), torch.randn(shape)
    degree = Degree(shape[-1], 5) if attention else None
    quick, planned = (MessagePassing(None, aggregate, None, degree, backend=b) for b in ("auto", "csr"))

    def results(layer: MessagePassing, graph: Graph) -> list[Tensor]:
        h = x.clone().requires_grad_()
        out = layer(h, graph)
        out.square().sum().backward()
        return [layer(x, graph), out.detach(), h.grad]

    expected = results(planned, graphs.from_edges(edges, 23))
    results(quick, graphs.from_edges(edges[:, 1:], 23))
    monkeypatch.setattr(steps, "planned", None)
    graph = graphs.from_edges(edges, 23)
    for _ in range(3 + row_reduce._FIRST_CALLS // 3):  # then its edges are sorted
        assert all(map(torch.equal, results(quick, graph), expected))


@pytest.mark.parametrize("aggregate", ["sum", "mean"])
@pytest.mark.parametrize("attention", [None, Degree(3, 2).double()])
def test_derivatives_of_any_order(aggregate: str, attention: Degree | None) -> None:
    layer = MessagePassing(graphs.from_edges(torch.randint(5, (2, 9)), 5), aggregate, None, attention)
    x = leaf(5, 3)
    assert torch.autograd.gradcheck(layer, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: layer(x).sin(), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("width", [1, 8, 13, 64, 200])
def test_sums_along_listed_edges_have_the_bits_of_sorted_ones(width: int, dtype: torch.dtype) -> None:
    for nodes, count in ((1, 0), (7, 30), (100, 500)):
        graph = graphs.from_edges(torch.randint(nodes, (2, count)), nodes)
        x, weight = torch.randn(nodes, 1, width, dtype=dtype), torch.randn(1, count, 1, dtype=dtype)
        listed = row_reduce.EdgeList(graph.ends.T.contiguous().T, nodes, nodes)  # both ends of an edge lie side by side
        rows, columns = (edge_orders.in_order(graph, transposed) for transposed in (False, True))
        for given in (None, weight):
            for kind in ("sum", "mean"):
                assert torch.equal(listed.summed(x, given, kind), row_reduce.summed(x, given, rows, kind))
            back = listed.summed(x, given, "sum", transposed=True)
            assert torch.equal(back, row_reduce.summed(x, given, columns, "sum"))
        assert torch.equal(listed.share(dtype)[:, 0], rows.share(dtype))


def test_threads_that_share_a_new_graph_get_the_bits_of_one() -> None:
    x = torch.randn(3000, 8)
    for _ in range(3):
        layer = MessagePassing(graphs.from_edges(torch.randint(3000, (2, 9000)), 3000), "mean")
        expected = MessagePassing(graphs.from_edges(layer.graph.edge_index, 3000), "mean")(x)  # type: ignore[union-attr]
        with ThreadPoolExecutor(4) as threads:
            assert all(threads.map(lambda _: torch.equal(layer(x), expected), range(60)))  # noqa: B023


def test_what_an_operator_has_of_its_own_runs() -> None:
    layer, x = MessagePassing(graphs.from_edges([[0, 1], [1, 2]], 3)), torch.randn(3, 2)
    seen = []
    layer._run = lambda round: (seen.append(round), MessagePassing._run(layer, round))[1]  # type: ignore[method-assign]
    layer(x)
    assert len(seen) == 1


@pytest.mark.parametrize("sources", [2**31 - 1, 2**31])
def test_nodes_are_numbered_with_32_bits(sources: int) -> None:
    value = torch.zeros(1).expand(sources, 1, 1)
    refusal = csr.refusal(Round(graphs.complete().bind(1, sources), value, normalize="none"))
    assert refusal == ("it numbers nodes with 32 bits" if sources == 2**31 else None)


def test_what_is_counted_of_an_aggregation() -> None:
    graph = graphs.from_edges(torch.randint(20, (2, 70)), num_dst=20, num_src=30)
    for dtype, size in ((torch.float32, 4), (torch.float64, 8), (torch.bfloat16, 4)):
        value = torch.randn(3, 2, 30, 2, 10).to(dtype)
        given = Round(graph, value, normalize="none")
        components = 70.0 * 6 * 20
        plain = {
            "reduced edge": 70.0 * 6,
            "sum call": 1.0,
            "sum number": components,
            "node number": 50.0 * 6 * 20,
            "far number": components * (30 * 20 * size / 40e6),
        }
        assert csr.counts(given) == pytest.approx(plain)
        for batch, columns, heads in (((), 1, 0), ((), 2, 2), ((3, 2), 1, 0), ((2,), 2, 2)):
            bias = (torch.randn(*batch, 70, columns).to(dtype), torch.randn(70, 1).to(dtype))
            weighted = {"weights call": 1.0, "weighed edge": 70.0 * 6, "weighed head": 70.0 * 6 * heads}
            assert csr.counts(given.with_fields(bias=bias)) == pytest.approx(plain | weighted)
    far = torch.zeros(1).expand(30, 1, 10**7)
    assert csr.counts(Round(graph, far, normalize="none"))["far number"] == 70.0 * 10**7


def test_which_sums_run_along_listed_edges() -> None:
    edges = torch.randint(9, (2, 30))
    graph = graphs.from_edges(edges, 9)
    value, weight = torch.randn(9, 1, 4), torch.randn(30, 1)
    given = Round(graph, value, normalize="none", bias=(weight,))
    assert csr._is_row_sum(given)
    for same in (
        {"reduce": Mean()},
        {"bias": ()},
        {"value": value.double(), "bias": (weight.double(),)},
        {"value": value.transpose(0, 2).contiguous().transpose(0, 2)},
    ):
        assert csr._is_row_sum(given.with_fields(**same))
    others: list[dict[str, object]] = [
        {"reduce": Max()},
        {"graph": graphs.complete().bind(9), "bias": ()},
        {"value": value.bfloat16()},
        {"value": value[None]},
        {"value": value.expand(9, 2, 4)},
        {"value": value[..., :0]},
        {"value": torch._neg_view(value)},
        {"score": Dot(value, value, 1.0), "bias": ()},
        {"keep_accumulate_dtype": True},
        {"bias": (weight, weight)},
        *(
            {"bias": (x,)}
            for x in (
                weight.double(),
                torch._neg_view(weight),
                weight[None],
                weight.expand(30, 2),
                weight.clone().requires_grad_(),
                torch.nn.Parameter(weight, requires_grad=False),
                BiasTable(torch.randn(2, 1)),
            )
        ),
    ]
    for fields in others:
        assert not csr._is_row_sum(given.with_fields(**fields)), fields
