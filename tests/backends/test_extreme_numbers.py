"""Numbers at the edge: scores to 1e38, NaN and infinities, rows of 10^6 edges, more than 2^31 edges and elements."""

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, Topology, engine, explain, graphs, ops
from mpnn.attention import DotProduct
from mpnn.backends import csr, dense, edge_list, scan, tiles
from mpnn.engine.plan import refusal as why_not
from mpnn.round import Round
from mpnn.scores import AdditiveScore, Dot, LeakyReLU

HUGE = 1e38  # the largest float32 is 3.4e38


# ------------------------------------------------------------------------------------------------ large scores


@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal(), graphs.window(3)], ids=str)
@pytest.mark.parametrize("backend", [edge_list, dense, tiles, csr], ids=lambda b: b.NAME)
def test_scores_to_1e38(backend: ModuleType, topology: Topology) -> None:
    graph = topology.bind(40)
    signs = torch.randint(0, 2, (40, 2, 1)) * 2 - 1.0
    query, key, value = 1e19 * torch.ones(40, 2, 1), 1e19 * signs, torch.randn(40, 2, 8)
    leaves = [x.requires_grad_() for x in (query, key, value)]
    request = Round(graph, value, Dot(query, key, 1.0))
    assert why_not(backend, request) is None
    out, _ = engine.run(request, backend.NAME)
    # A score is 1e38 or -1e38. The largest share the weight alike, and the others get none.
    edges = graph.dense()[..., None] * torch.ones(2)
    best = edges * (signs[None, ..., 0] > 0)
    best = torch.where(best.any(1, keepdim=True), best, edges)
    expected = torch.einsum("ijh,jhd->ihd", (best / best.sum(1, keepdim=True)).double(), value.double())
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)  # 40 float32 terms of size 4
    (gradient,) = torch.autograd.grad(out.sum(), leaves[2])
    assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", [edge_list, csr], ids=lambda b: b.NAME)
def test_additive_scores_and_biases_to_1e38(backend: ModuleType) -> None:
    graph = graphs.from_edges(torch.randint(0, 20, (2, 100)), 20)
    value, size = torch.randn(20, 2, 8), torch.linspace(-HUGE, HUGE, 20)[:, None].expand(20, 2)
    bias = torch.linspace(HUGE, -HUGE, 100)[:, None]
    for score, more in ((AdditiveScore(size, size, LeakyReLU()), ()), (None, (bias,))):
        request = Round(graph, value, score, more)
        exact = Round(
            graph,
            value.double(),
            None if score is None else AdditiveScore(size.double(), size.double(), LeakyReLU()),
            tuple(b.double() for b in more),
        )
        out, expected = engine.run(request, backend.NAME)[0], engine.run(exact, "edge_list")[0]
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("low", ["finfo.min", -1e31], ids=str)
@pytest.mark.parametrize("backend", ["edge_list", "tiles", "csr"])
def test_a_row_of_biases_that_are_low_but_finite_keeps_its_messages(
    dtype: torch.dtype, low: object, backend: str
) -> None:
    """Very low biases are how others write masks."""
    graph = graphs.causal().bind(40)
    bias = torch.zeros(graph.num_edges, 1, dtype=dtype)
    bias[graph.edge_index[1] == 37] = torch.finfo(dtype).min if low == "finfo.min" else low
    features, value = torch.zeros(40, 1, 8, dtype=dtype), torch.randn(40, 1, 8, dtype=dtype)
    out = ops.attend(graph, features, features, value, bias=bias, backend=backend)
    torch.testing.assert_close(out[37], value[:38].mean(0))


# ------------------------------------------------------------------------------------------------ NaN and infinities


@pytest.mark.parametrize("backend", [edge_list, csr], ids=lambda b: b.NAME)
def test_gradients_of_what_is_not_finite_go_along_edges_alone(backend: ModuleType) -> None:
    graph = graphs.window(3).bind(100)
    query, key, value = (torch.rand(100, 2, 8) for _ in range(3))
    value[50] = torch.nan
    leaves = [x.requires_grad_() for x in (query, key, value)]
    out, _ = engine.run(Round(graph, value, Dot(query, key, 0.3)), backend.NAME)
    d_query, d_key, _ = torch.autograd.grad(out.sum(), leaves)
    reached = graph.dense()[:, 50]
    assert d_query[~reached].isfinite().all()
    assert d_query[reached].isnan().all()
    shares_a_row = graph.dense()[reached].any(0)
    assert d_key[~shares_a_row].isfinite().all()


@pytest.mark.parametrize("reduce", ["max", "min"])
def test_the_gradient_of_an_extreme_of_nan_is_nan(reduce: str) -> None:
    graph, x = graphs.window(1).bind(9), torch.rand(9, 3)
    x[4, 1] = torch.nan
    gradients = []
    for backend in ("edge_list", "csr"):
        leaf = x.clone().requires_grad_()
        gradients += torch.autograd.grad(ops.aggregate(graph, leaf, reduce, backend=backend).sum(), leaf)
    assert gradients[0][2:7, 1].isnan().all()  # the sources of the rows that receive it
    torch.testing.assert_close(gradients[1], gradients[0], equal_nan=True)


# ------------------------------------------------------------------------------------------------ a million edges a row

DEGREE = 1_000_000


@pytest.mark.parametrize("backend", [edge_list, dense, tiles, csr], ids=lambda b: b.NAME)
def test_attention_over_a_million_sources(backend: ModuleType) -> None:
    graph = graphs.complete().bind(1, DEGREE)
    query, key, value = torch.randn(1, 1, 2), torch.randn(DEGREE, 1, 2), 1 + torch.rand(DEGREE, 1, 1)
    out, _ = engine.run(Round(graph, value, Dot(query, key, 0.5)), backend.NAME)
    weights = (0.5 * key.double() @ query[0, 0].double()).softmax(0)
    exact = (weights * value[..., 0].double()).sum()
    # At most a million roundings of 2^-24 in a row, which go either way: a random walk of 1,000 units, for the sum of
    # weights and for that of values; allowed are twice as many.
    assert abs(out.item() - exact.item()) <= 2**-24 * 4000 * exact.item()


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "var"])
def test_aggregation_over_a_million_sources(reduce: str) -> None:
    edges = torch.stack([torch.arange(DEGREE), torch.zeros(DEGREE, dtype=torch.int64)])
    graph = graphs.from_edges(edges, num_src=DEGREE, num_dst=2)
    x = torch.rand(DEGREE, 1)
    exact = {"sum": x.double().sum(), "mean": x.double().mean(), "max": x.max(), "var": x.double().var(correction=0)}
    for backend in ("csr", "edge_list"):
        out = ops.aggregate(graph, x, reduce, backend=backend)
        # Sums: a random walk as above. A million roundings lose 2^-24 * 10^6 = 6 % at most, for the variance too, whose
        # small terms are rounded to one side more often than to the other: a tenth of the worst.
        units = DEGREE / 10 if reduce == "var" else 4000
        assert abs(out[0].item() - float(exact[reduce])) <= 2**-24 * units * float(exact[reduce]), backend
        assert out[1].item() == 0


# ------------------------------------------------------------------------------------------------ beyond 2^31


def test_graphs_of_more_than_2_to_the_31_edges() -> None:
    n = 100_000
    causal = graphs.causal().bind(n)
    assert causal.num_edges == n * (n + 1) // 2 > 2**32
    assert torch.equal(causal.degree(), torch.arange(1, n + 1))
    assert causal.reverse().degree()[0] == n
    assert (~causal).num_edges == n * n - causal.num_edges
    assert (causal & graphs.window(10)).degree().max() == 11
    assert (causal | graphs.window(10)).num_edges == causal.num_edges + 10 * n - 55
    assert causal.rows(n - 1, n).num_edges == n
    assert graphs.complete().bind(2**20).num_edges == 2**40
    assert "edge_index" not in vars(causal)


def test_plans_count_more_than_2_to_the_31_edges(capsys: pytest.CaptureFixture[str]) -> None:
    n = 100_000
    plan = explain(MessagePassing(graphs.causal(), "sum", None, DotProduct(8, 1)), torch.zeros(n, 8))
    assert graphs.causal().bind(n).num_edges == 5_000_050_000
    assert "5 G edges" in capsys.readouterr().out
    assert all(c.seconds > 0.1 for c in plan.candidates if c.reason is None)  # 5e9 edges: no count wrapped around


def test_running_sums_over_more_than_2_to_the_31_edges() -> None:
    n = 100_000
    query, value = torch.ones(n, 1, 1, dtype=torch.float64), torch.ones(n, 1, 1, dtype=torch.float64)
    request = Round(graphs.causal().bind(n), value, Dot(query, query, 1.0), normalize="none")
    assert why_not(scan, request) is None
    out, _ = engine.run(request, "scan")
    assert torch.equal(out[:, 0, 0], torch.arange(1, n + 1, dtype=torch.float64))


@pytest.fixture
def wide() -> Tensor:
    """[70,000, 32,768] of zeros: 9.2 GB of addresses, of which memory holds only what is written or read."""
    try:
        return torch.from_numpy(np.zeros((70_000, 32_768), np.float32))
    except MemoryError:
        pytest.skip("this system lends no memory beyond what it has")


@pytest.mark.parametrize("backend", ["csr", "edge_list"])
def test_features_of_more_than_2_to_the_31_elements(backend: str, wide: Tensor) -> None:
    assert wide.numel() > 2**31
    last = len(wide) - 1
    wide[last], wide[0, 0] = 3.0, 1.0
    graph = graphs.from_edges([[last, 0, last - 1], [0, 0, 1]], num_src=len(wide), num_dst=2)
    for reduce, expected in (("sum", 4.0), ("max", 3.0)):
        out = ops.aggregate(graph, wide, reduce, backend=backend)
        assert (out[0, 0].item(), out[0, -1].item(), out[1].abs().max().item()) == (expected, 3.0, 0.0)
    feature = wide.unsqueeze(1)
    out = ops.attend(graph, feature[:2], feature, feature, scale=1.0, backend=backend)
    assert out[0, 0, -1].item() == pytest.approx(3 / (1 + np.exp(-2.0)))  # scores 3 and 1: the first query is e_0
    assert out[1].abs().max().item() == 0
