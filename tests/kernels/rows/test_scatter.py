"""mpnn.kernels.rows.scatter: rows by target, by kernels and by torch's operations, and matchings."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from mpnn.kernels.cpu import library
from mpnn.kernels.rows import scatter


@pytest.fixture(params=["kernels", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By kernels, also of narrow rows, or by torch's operations."""
    monkeypatch.setattr(scatter, "_MIN_WIDTH", 1)
    if request.param == "torch":
        monkeypatch.setattr(scatter, "serves", lambda x: False)
    return str(request.param)


def loop(x: Tensor, to: Tensor, num_rows: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """A function of the rows of each target, zeros where there are none."""
    return torch.stack([function(x[to == i]) if (to == i).any() else 0 * x.sum(0) for i in range(num_rows)])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("width", [1, 3, 8, 21])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sums_and_extremes_of_rows(width: int, dtype: torch.dtype) -> None:
    x = torch.randint(-9, 9, (40, width)).to(dtype)  # with equal extremes
    to = torch.randint(0, 6, (40,)) * 2
    assert scatter.row_sums(x, to, 12).equal(loop(x, to, 12, lambda rows: rows.sum(0)))
    assert scatter.rows_at(x[:12], to).equal(x[:12][to])
    for smallest, extreme in ((False, Tensor.amax), (True, Tensor.amin)):
        out, arg = scatter.row_extremes(x, to, 12, smallest)
        assert out.equal(loop(x, to, 12, partial(extreme, dim=0)))
        for i, d in itertools.product(range(12), range(width)):
            equal = ((to == i) & (x[:, d] == out[i, d])).nonzero()
            assert int(arg[i, d]) == (int(equal[0]) if len(equal) else 40)
    count = to.bincount(minlength=12)[:, None]
    squares = loop(x, to, 12, lambda rows: (rows - rows.mean(0)).square().sum(0))
    torch.testing.assert_close(scatter.row_squares(x, to, 12, count), squares)
    products = loop(x, to, 12, lambda rows: rows.prod(0)).masked_fill(count == 0, 1.0)
    torch.testing.assert_close(scatter.row_products(x, to, 12), products)
    # a column of a larger tensor, as it lies in memory
    assert scatter.row_sums(x.repeat(1, 2)[:, :width], to, 12).equal(scatter.row_sums(x, to, 12))
    assert scatter.row_extremes(-x.neg(), to, 12, False)[0].equal(scatter.row_extremes(x, to, 12, False)[0])


@pytest.mark.usefixtures("way")
def test_nan_is_the_extreme_and_infinities_are_numbers() -> None:
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[1.0, -inf], [nan, -inf], [3.0, inf], [nan, 0.0], [-inf, 2.0]])
    to = torch.tensor([0, 0, 0, 0, 2])
    out, arg = scatter.row_extremes(x, to, 3, False)
    torch.testing.assert_close(out, torch.tensor([[nan, inf], [0.0, 0.0], [-inf, 2.0]]), equal_nan=True)
    assert arg.tolist() == [[1, 2], [5, 5], [4, 4]]
    out, arg = scatter.row_extremes(x, to, 3, True)
    torch.testing.assert_close(out, torch.tensor([[nan, -inf], [0.0, 0.0], [-inf, 2.0]]), equal_nan=True)
    assert arg.tolist() == [[1, 0], [5, 5], [4, 4]]


@pytest.mark.usefixtures("way")
def test_squares_of_equal_rows_are_zero() -> None:
    """Although their mean is rounded."""
    x = torch.cat([torch.rand(50), torch.tensor([1e20])])[:, None].expand(51, 5).repeat_interleave(7, 0)
    to = torch.randperm(51).repeat_interleave(7)
    assert not scatter.row_squares(x, to, 51, to.bincount()[:, None]).any()


@pytest.mark.usefixtures("way")
def test_products_with_zeros_have_gradients() -> None:
    x = torch.tensor([[2.0, 0.0], [3.0, 5.0], [0.0, 0.0], [4.0, 0.0]], requires_grad=True)
    to = torch.tensor([1, 1, 2, 2])
    out = scatter.row_products(x, to, 4)
    assert out.tolist() == [[1.0, 1.0], [6.0, 0.0], [0.0, 0.0], [1.0, 1.0]]
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[3.0, 5.0], [2.0, 0.0], [4.0, 0.0], [0.0, 0.0]]
    with torch.no_grad():
        tangent = torch.func.jvp(lambda x: scatter.row_products(x, to, 4), (x,), (torch.ones_like(x),))[1]
    assert tangent.tolist() == [[0.0, 0.0], [5.0, 5.0], [4.0, 0.0], [0.0, 0.0]]


@pytest.mark.usefixtures("way")
def test_all_derivatives() -> None:
    x = torch.randn(9, 3, dtype=torch.float64, requires_grad=True)
    to = torch.tensor([0, 3, 3, 1, 0, 3, 1, 5, 5])
    count = to.bincount(minlength=6)[:, None]
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "sums": lambda x: scatter.row_sums(x, to, 6),
        "rows": lambda x: scatter.rows_at(x[:6], to),
        "extremes": lambda x: scatter.row_extremes(x, to, 6, False)[0],
        "squares": lambda x: scatter.row_squares(x, to, 6, count),
        "products": lambda x: scatter.row_products(x, to, 6),
    }
    for function in functions.values():
        assert torch.autograd.gradcheck(function, x, check_batched_grad=True)
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x).tanh(), x, check_batched_grad=True)
        total = lambda x, f=function: f(x).pow(3).sum()  # noqa: E731
        torch.testing.assert_close(torch.func.hessian(total)(x), torch.autograd.functional.hessian(total, x))
        both = torch.func.vmap(function)(torch.stack([x, 2 * x]))
        torch.testing.assert_close(both, torch.stack([function(x), function(2 * x)]))


def test_parts_of_columns_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, to = torch.randn(500, 37), torch.randint(0, 20, (500,))
    expected = scatter.row_extremes(x, to, 20, False)
    monkeypatch.setattr(scatter, "_MIN_NUMBERS", 1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        found = scatter.row_extremes(x, to, 20, False)
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_matchings_leave_no_pair_of_single_neighbors(weighted: bool) -> None:
    row, col = torch.randint(0, 30, (2, 60))
    row, col = torch.cat([row, col]), torch.cat([col, row])
    order = row.argsort(stable=True)
    ptr = torch.searchsorted(row[order], torch.arange(31))
    weight = torch.rand(120, dtype=torch.float64) if weighted else None
    nodes = torch.randperm(30)
    found = scatter.match(ptr, col[order], nodes, weight)
    # step by step
    expected = [-1] * 30
    for u in nodes.tolist():
        if expected[u] >= 0:
            continue
        edges = range(int(ptr[u]), int(ptr[u + 1]))
        free = [e for e in edges if (v := int(col[order[e]])) != u and expected[v] < 0]
        best = u
        if free:
            best = int(col[order[free[0] if weight is None else max(free, key=lambda e: (float(weight[e]), e))]])
        expected[u] = expected[best] = min(u, best)
    assert found.tolist() == expected


def test_without_kernels_a_matching_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "why_missing", lambda: "they are missing")
    none: Any = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a matching needs the compiled kernels, and they are missing"):
        scatter.match(none, none[:0], none[:0], None)
    x, to = torch.randn(5, 8), torch.tensor([0, 1, 1, 0, 2])
    torch.testing.assert_close(scatter.row_sums(x, to, 3), x.new_zeros(3, 8).index_add(0, to, x))


class Own(Tensor):
    """A tensor of another type."""


class Nothing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


@pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")
def test_which_tensors_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3, 2)
    assert all(map(scatter.serves, (x, x.T, x.double(), torch.nn.Parameter(x))))
    others = (x.as_subclass(Own), x.half(), x.long(), x.to("meta"), x.to_sparse())
    assert not any(map(scatter.serves, others))
    with Nothing():
        assert not scatter.serves(x)
    with forward_ad.dual_level():
        assert not scatter.serves(x)
    seen = []
    torch.func.vmap(lambda row: (seen.append(scatter.serves(x)), row)[1])(x)
    torch._vmap_internals._vmap(lambda row: (seen.append(scatter.serves(row)), row)[1])(x)  # of is_grads_batched
    assert seen == [False, False]
    monkeypatch.setattr(library, "why_missing", lambda: "they are missing")
    assert not scatter.serves(x)
