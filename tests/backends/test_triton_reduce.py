"""Aggregation by `csr`'s kernels for GPUs, against the specification `edge_list`, forward and backward."""

from dataclasses import replace

import pytest
import torch
from row_cases import (  # noqa: F401 - fixtures
    MARKS,
    TRITON,
    check,
    halves,
    hubs,
    leaf,
    moved,
    poisoned,
    rounding,
    run,
    scattered,
    small_pieces,
    without_edges,
)

from mpnn import graphs
from mpnn.aggregate import PNA, Aggregator, Max, Mean, Min, Std, Sum, Var
from mpnn.backends import edge_list
from mpnn.edge_tables import BiasTable
from mpnn.round import Round

pytestmark = MARKS

AGGREGATORS = (Sum(), Mean(), Max(), Min(), Var(), Std(), PNA())


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda a: type(a).__name__)
def test_aggregation_agrees_with_the_specification(aggregator: Aggregator) -> None:
    # squares of up to 10, 60 of them, and a root whose derivative is up to 1 / (2 * sqrt(1e-5)): 60 * 100 * 160 * 1e-16
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


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("aggregator", [Mean(), Max(), Var()], ids=lambda a: type(a).__name__)
def test_aggregation_divides_hubs(aggregator: Aggregator) -> None:
    graph = hubs()
    for width in (1, 40):
        plain = Round(graph, halves(9, 1, width), normalize="none", reduce=aggregator)
        check(TRITON, plain, {"rtol": 1e-10, "atol": 1e-10})
    weight = torch.randint(-2, 3, (graph.num_edges, 1)).double().requires_grad_()
    check(TRITON, replace(plain, bias=(weight, BiasTable(leaf(2, 1)))), {"rtol": 1e-9, "atol": 1e-9})


def test_one_weight_for_all_heads_and_one_head_for_all_weights() -> None:
    graph = scattered()
    plain = Round(graph, halves(2, 10, 3, 4), bias=(halves(graph.num_edges, 1),), normalize="none")
    check(TRITON, plain)
    check(TRITON, replace(plain, value=halves(2, 10, 1, 4), bias=(halves(graph.num_edges, 3),), reduce=Max()))


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
        gradients = (torch.autograd.grad(o.sum(), request.value)[0] for o in (out, edge_list.run(request)[0]))
        torch.testing.assert_close(*gradients, equal_nan=True)


@pytest.mark.usefixtures("small_pieces")
def test_narrow_sums_are_rounded_once() -> None:
    graph = hubs()
    value = torch.randn(9, 1, 8).bfloat16()
    out = run(TRITON, moved(Round(graph, value, normalize="none"), TRITON.device))[0].cpu()
    expected = edge_list.run(Round(graph, value.double(), normalize="none"))[0]
    # 60 terms of up to 4 in float32, and one rounding
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= rounding(TRITON, out.dtype) * expected.abs() + 60 * 240 * 2**-24).all()
