"""mpnn.kernels.rows.reduce: aggregation along rows and along listed edges, next to a loop over the rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn import graphs
from mpnn.backends import edge_orders
from mpnn.kernels.cpu import library
from mpnn.kernels.rows import reduce
from mpnn.kernels.rows.rows import Rows

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")

# Row 1 has no edges. The edges of the caller are in another order.
PTR = torch.tensor([0, 3, 3, 8, 9, 12])
COLUMNS = torch.tensor([1, 0, 2, 3, 3, 1, 0, 2, 3, 1, 1, 2], dtype=torch.int32)
ORDER = torch.tensor([4, 0, 11, 2, 1, 3, 7, 10, 6, 5, 9, 8])
SOURCES, HEADS, WIDTH = 4, 2, 3
OF_ROW: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "var": lambda x: x.var(0, correction=0),
}


def rows() -> Rows:
    return Rows(PTR, COLUMNS, ORDER)


def loop(value: Tensor, weight: Tensor | None, kind: str) -> Tensor:
    """[B, rows, H * D] of value [B, sources, H * D] and weight [1 or B, E, H]: row after row, in float64."""
    out = []
    for first, last in zip(PTR[:-1].tolist(), PTR[1:].tolist(), strict=True):
        messages = value.double()[:, COLUMNS[first:last].long()]
        if weight is not None:
            by_head = messages.unflatten(-1, (HEADS, WIDTH))
            messages = (weight.double()[:, ORDER[first:last], :, None] * by_head).flatten(2)
        empty = messages.new_zeros(len(value), HEADS * WIDTH)
        out.append(OF_ROW[kind](messages.transpose(0, 1)) if last > first else empty)
    return torch.stack(out, 1)


def spoiled() -> None:
    """Leaves NaN in the memory that torch hands out next, so that numbers that nobody writes show."""
    for size in range(1, 300):
        torch.full((size,), torch.nan)


@pytest.fixture(params=[1, 2, 3, 12], ids="{} chunks".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The edges are divided into about so many chunks."""
    count = int(request.param)
    monkeypatch.setattr(reduce, "_MIN_COMPONENTS", len(COLUMNS) * HEADS * WIDTH // count)
    monkeypatch.setattr("mpnn.kernels.rows.rows.MIN_PIECE", 2)
    return count


@pytest.mark.parametrize("kind", OF_ROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_calls_again_and_again_with_other_numbers(kind: str, dtype: torch.dtype, chunks: int) -> None:
    """Parameters of calls of the same form are kept, except for addresses."""
    edges = rows()
    close = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 2**-7}[dtype]
    for _ in range(3):
        for batch, entries in ((1, None), (1, 1), (2, None), (2, 1), (2, 2)):
            value = torch.randn(batch, SOURCES, HEADS * WIDTH).to(dtype)
            wide = reduce._wide(dtype)
            weight = None if entries is None else torch.randn(entries, len(ORDER), HEADS, dtype=wide)
            spoiled()
            found = reduce.reduced(value, weight, edges, kind)
            assert found.dtype == dtype
            torch.testing.assert_close(found.double(), loop(value, weight, kind), rtol=close, atol=close)
    assert chunks > 1 or dtype == torch.bfloat16 or edges.repeated or kind == "var"


def test_calls_of_other_widths_over_the_same_rows() -> None:
    """Also where there is no source, so that tensors of any width have no numbers."""
    for edges, sources in ((rows(), SOURCES), (Rows(torch.zeros(4, dtype=torch.int64), COLUMNS[:0]), 0)):
        for width in (6, 2, 9, 6):
            value = torch.randn(1, sources, width)
            expected = torch.zeros(edges.num_rows, sources).index_put(
                edges.ends[:2], torch.ones(edges.num_edges), accumulate=True
            )
            torch.testing.assert_close(reduce.reduced(value, None, edges, "sum")[0], expected @ value[0])
            apart = reduce.summed(value[0][:, None].clone(), None, edges, "sum")
            torch.testing.assert_close(apart[:, 0], expected @ value[0])


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_first_calls_and_those_that_follow(
    kind: str, weighted: bool, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Edges are sorted after some calls, which changes no bit."""
    monkeypatch.setattr(reduce, "_FIRST_CALLS", 2)
    edges = torch.tensor([[0, 2, 2, 1, 3, 3, 0, 2], [1, 1, 0, 1, 0, 0, 2, 1]])  # of 4 sources and 3 destinations
    listed = reduce.EdgeList(edges, 3, 4)
    sorts: list[bool] = []

    def sort(transposed: bool) -> Rows:
        sorts.append(transposed)
        row, column = edges if transposed else edges.flip(0)
        order = row.argsort(stable=True)
        ptr = torch.searchsorted(row[order], torch.arange((4 if transposed else 3) + 1))
        return Rows(ptr, column[order].int(), order)

    source, to = edges.flip(0) if transposed else edges
    weight = torch.randn(1, 8, 1) if weighted else None
    for call in range(5):
        x = torch.randn(3 if transposed else 4, 1, 5)
        messages = x[source] if weight is None else weight[0, :, None] * x[source]
        expected = x.new_zeros(4 if transposed else 3, 1, 5).index_add(0, to, messages)
        if kind == "mean":
            expected = expected / to.bincount(minlength=len(expected)).clamp(min=1)[:, None, None]
        spoiled()
        found = reduce.row_sum(x, weight, sort, listed, kind, transposed)
        torch.testing.assert_close(found, expected)
        assert sorts == [transposed] * (call >= 2)


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True), (True, None)], ids=str)
@pytest.mark.parametrize("entries", [1, 2], ids="weights for {} entries".format)
def test_derivatives_of_sums_by_values_and_by_weights(kind: str, needs: tuple[bool, bool | None], entries: int) -> None:
    """Of first and second order, in reverse and forward mode, one by one and in batches."""
    edges = torch.tensor([[0, 2, 2, 1, 3], [1, 1, 0, 1, 0]])
    graph = graphs.from_edges(edges, num_dst=3, num_src=4)
    by_destination, by_source = (edge_orders.in_order(graph, transposed) for transposed in (False, True))
    value = torch.randn(2, 4, 4, dtype=torch.float64, requires_grad=needs[0])
    weight = None
    if needs[1] is not None:
        weight = torch.randn(entries, 5, 2, dtype=torch.float64, requires_grad=needs[1])

    def aggregate(value: Tensor, weight: Tensor | None) -> Tensor:
        out: Tensor = reduce.LinearReduce.apply(value, weight, by_destination, by_source, kind)
        return out

    weights = torch.ones(1, 5, 2, dtype=torch.float64) if weight is None else weight
    messages = (weights[..., None] * value[:, edges[0]].unflatten(-1, (2, 2))).flatten(2)
    expected = messages.new_zeros(2, 3, 4).index_add(1, edges[1], messages)
    if kind == "mean":
        expected = expected / torch.tensor([2.0, 3.0, 1.0])[:, None]
    torch.testing.assert_close(aggregate(value, weight), expected)
    options = {"check_batched_grad": True, "check_forward_ad": True}
    assert torch.autograd.gradcheck(aggregate, (value, weight), **options)
    assert torch.autograd.gradgradcheck(aggregate, (value, weight), check_batched_grad=True, check_fwd_over_rev=True)
    if weight is None:
        return
    moved = torch.randn_like(value), torch.randn_like(weight)
    with forward_ad.dual_level():
        dual = aggregate(*(forward_ad.make_dual(x, d) for x, d in zip((value, weight), moved, strict=True)))
        tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    by_parts = aggregate(moved[0], weight) + aggregate(value, moved[1])
    torch.testing.assert_close(tangent, by_parts)
    leaves = [x for x in (value, weight) if x.requires_grad]
    of_both = (torch.autograd.grad(x.square().sum(), leaves, materialize_grads=True) for x in (tangent, by_parts))
    torch.testing.assert_close(*of_both)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sums_and_their_gradients_have_the_dtype_of_the_value(dtype: torch.dtype) -> None:
    value = torch.randn(2, SOURCES, HEADS * WIDTH).to(dtype).requires_grad_()
    by_source = Rows(*_transposed())
    for kind in ("sum", "mean"):
        out = reduce.LinearReduce.apply(value, None, rows(), by_source, kind)
        assert out.dtype == dtype
        close = 2**-7 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(out.double(), loop(value, None, kind), rtol=close, atol=close)
        (gradient,) = torch.autograd.grad(out, value, torch.ones_like(out))
        assert gradient.dtype == dtype
        (expected,) = torch.autograd.grad(loop(value, None, kind).sum(), value)
        torch.testing.assert_close(gradient, expected, rtol=close, atol=close)


def _transposed() -> tuple[Tensor, Tensor, Tensor]:
    """The edges by source."""
    row, col, edge = rows().ends
    order = col.argsort(stable=True)
    ptr = torch.searchsorted(col[order], torch.arange(SOURCES + 1))
    return ptr, row[order].int(), edge[order]


@pytest.mark.parametrize("kind", ["sum", "mean"])
@pytest.mark.parametrize(("least", "sorts"), [(12 * 5 // 2, [False, True]), (12 * 5 // 2 + 1, [])])
def test_many_numbers_are_sorted_at_once(
    kind: str, least: int, sorts: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where several parts sum them, in both directions."""
    monkeypatch.setattr(reduce, "_MIN_COMPONENTS", least)
    row, col, _ = rows().ends
    listed = reduce.EdgeList(torch.stack([col, row]), 5, SOURCES)
    calls: list[bool] = []

    def sort(transposed: bool) -> Rows:
        calls.append(transposed)
        return Rows(*_transposed()) if transposed else Rows(PTR, COLUMNS)

    x = torch.randn(SOURCES, 1, 5, dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(5, 1, 5, dtype=torch.float64).index_add(0, row, x[col])
    if kind == "mean":
        expected = expected / PTR.diff().clamp(min=1)[:, None, None]
    found = reduce.RowSum.apply(x, None, sort, listed, kind)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, upstream) for out in (found, expected)))
    assert calls == sorts


@pytest.mark.parametrize("reordered", [False, True], ids=["", "reordered"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.usefixtures("chunks")
def test_a_combine_of_ones_own_over_rows_that_chunks_share(
    reordered: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maxima, and their gradients by value and weight, by the loops that numba compiles, which run as Python here."""
    pytest.importorskip("numba")
    monkeypatch.setattr("numba.njit", lambda **options: lambda function: function)
    monkeypatch.setattr(reduce.combine, "_scalar", lambda name, function, single, numbers=2: function)
    gradient = lambda message, out: 1.0 if message == out else 0.0  # noqa: E731
    largest = reduce.Associative(lambda a, b: max(a, b), -torch.inf, gradient, None, shares_ties=True)
    order = torch.tensor([3, 0, 4, 1, 2]) if reordered else None
    edges = Rows(PTR, COLUMNS, ORDER, node=order)
    row, col, edge = edges.ends
    value = torch.randn(2, SOURCES, HEADS * WIDTH, dtype=torch.float64)
    weight = torch.rand(2, len(ORDER), HEADS, dtype=torch.float64) if weighted else None
    expected = loop(value, weight, "max")
    if order is not None:
        expected = torch.empty_like(expected).index_copy(1, order, expected)
    found = reduce.reduced(value, weight, edges, largest)
    torch.testing.assert_close(found, expected)
    by_source = col.argsort(stable=True)
    ptr = torch.searchsorted(col[by_source], torch.arange(SOURCES + 1))
    columns = Rows(ptr, row[by_source].int(), edge[by_source])
    d_out = torch.randn_like(found)
    options = reduce.Reduction(edges, lambda: columns, largest, value.dtype, value.dtype)
    needs = (True, weighted)
    saved = reduce.KERNEL.forward(options, needs, value, weight)[1]
    gradients = reduce.KERNEL.gradients(options, needs, (value, weight), saved, d_out)
    leaves = [x.clone().requires_grad_() for x in (value, weight) if x is not None]
    out = loop(*leaves, *([] if weighted else [None]), "max")
    upstream = d_out if order is None else d_out[:, order]
    for got, wanted in zip(gradients, torch.autograd.grad(out, leaves, upstream), strict=False):
        torch.testing.assert_close(got, wanted)
