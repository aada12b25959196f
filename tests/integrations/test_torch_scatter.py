"""torch_scatter's functions against a loop in float64, and against torch_scatter itself (marker `scatter`)."""

import inspect
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn.integrations import torch_scatter as ours

# What each function computes of the numbers of one target, [n] with n at least 1; the composite ones with their eps.
FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda m: m.sum(),
    "add": lambda m: m.sum(),
    "mul": lambda m: m.prod(),
    "mean": lambda m: m.mean(),
    "min": lambda m: m.min(),
    "max": lambda m: m.max(),
    "std": lambda m: (
        ((m - m.mean()).square().sum() / (max(len(m) - 1, 1) + 1e-6)).sqrt() if len(m) > 1 else 0 * m.sum()
    ),
    "logsumexp": lambda m: m.logsumexp(0) + 1e-12,
}
# [src, index, dim], and the targets: one number for a column of all, one for each number, or for leading dimensions.
SHAPES: dict[str, tuple[list[int], list[int], int]] = {
    "rows": ([9, 5], [9], 0),
    "columns": ([3, 9], [9], -1),
    "numbers": ([9], [9], 0),
    "middle": ([2, 9, 3, 2], [9], 1),
    "own targets": ([4, 9, 3], [4, 9, 3], 1),
    "leading dimensions": ([2, 9, 6], [2, 9], 1),
    "sizes of 1": ([4, 9, 3], [1, 9, 1], -2),
}


def looped(
    src: Tensor, index: Tensor, dim: int, count: int, formula: Callable[[Tensor], Tensor], empty: float
) -> Tensor:
    """The formula of the numbers of each target along a dimension."""
    index = ours.broadcast(index, src, dim).movedim(dim, -1)
    lines = src.movedim(dim, -1)
    rows = []
    for at in itertools.product(*map(range, lines.shape[:-1])):
        line, to = lines[at], index[at]
        rows.append(
            torch.stack([formula(line[to == i]) if (to == i).any() else line.sum() * 0 + empty for i in range(count)])
        )
    return torch.stack(rows).view(*lines.shape[:-1], count).movedim(-1, dim)


def drawn(shape: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, int]:
    sizes, targets, dim = SHAPES[shape]
    return torch.randn(sizes, dtype=dtype), torch.randint(0, 4, targets), dim


def of(found: Any) -> Tensor:
    """The values of a function that may also return where they are from."""
    return found[0] if isinstance(found, tuple) else found


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_derivatives_are_those_of_the_formula(shape: str, name: str) -> None:
    src, index, dim = drawn(shape)
    src.requires_grad_()
    count = 5  # the last target has no numbers

    def function(x: Tensor) -> Tensor:
        return of(getattr(ours, f"scatter_{name}")(x, index, dim, dim_size=count))

    def formula(x: Tensor) -> Tensor:
        return looped(x, index, dim, count, FORMULAS[name], float(name == "mul"))

    torch.testing.assert_close(function(src), formula(src), rtol=1e-11, atol=1e-11)
    upstream = torch.randn_like(function(src))
    both = [torch.autograd.grad(f(src), src, upstream, create_graph=True)[0] for f in (function, formula)]
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-10)
    again = [torch.autograd.grad(g.square().sum(), src, allow_unused=True)[0] for g in both if g.requires_grad]
    if again and again[-1] is not None:
        torch.testing.assert_close(*(torch.zeros_like(src) if g is None else g for g in again), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_softmax_is_that_of_each_target(shape: str) -> None:
    src, index, dim = drawn(shape)
    src.requires_grad_()

    def formula(x: Tensor) -> Tensor:
        sums = looped(x, index, dim, 4, lambda m: m.logsumexp(0), 0.0)
        return x - sums.gather(dim, ours.broadcast(index, x, dim))

    for function, exact in (
        (ours.scatter_softmax, lambda x: formula(x).exp()),
        (ours.scatter_log_softmax, formula),
    ):
        found, expected = function(src, index, dim), exact(src)
        assert found.shape == src.shape
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        upstream = torch.randn_like(src)
        both = [torch.autograd.grad(y, src, upstream, create_graph=True)[0] for y in (found, expected)]
        torch.testing.assert_close(*both, rtol=1e-9, atol=1e-9)
        again = [torch.autograd.grad(g.square().sum(), src)[0] for g in both]
        torch.testing.assert_close(*again, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_extremes_say_where_they_are_from(shape: str) -> None:
    src, index, dim = drawn(shape)
    src = src.round()  # with equal numbers, of which the first counts
    length = src.shape[dim]
    for smallest in (False, True):
        out, arg = (ours.scatter_min if smallest else ours.scatter_max)(src, index, dim, dim_size=5)
        padded = torch.cat([src, src.new_zeros(src.shape).narrow(dim, 0, 1)], dim)
        assert padded.gather(dim, arg).equal(out)
        row = torch.arange(length).view([-1 if d == dim % src.dim() else 1 for d in range(src.dim())]).expand(src.shape)
        is_best = src == out.gather(dim, ours.broadcast(index, src, dim))
        first = torch.full(out.shape, length).scatter_reduce(
            dim, ours.broadcast(index, src, dim), torch.where(is_best, row, length), "amin"
        )
        assert arg.equal(first)


def test_equal_extremes_give_their_gradient_to_the_first() -> None:
    src = torch.tensor([[1.0], [2.0], [2.0]], requires_grad=True)
    out, arg = ours.scatter_max(src, torch.tensor([0, 0, 0]), 0)
    assert arg.tolist() == [[1]]
    assert torch.autograd.grad(out.sum(), src)[0].flatten().tolist() == [0, 1, 0]


# ---------------------------------------------------------------------------------------------- options


def test_what_out_holds_takes_part() -> None:
    src, index = torch.tensor([1.0, 5.0, 2.0, 7.0]), torch.tensor([0, 0, 1, 3])
    start = torch.tensor([4.0, 1.0, 6.0, 8.0])

    def into(function: Callable[..., Any], *args: Any, **options: Any) -> list[float]:
        out = start.clone()
        found = of(function(src, index, *args, out=out, **options))
        assert found is out or function is ours.scatter_std
        return found.tolist()

    assert into(ours.scatter_sum) == [10, 3, 6, 15]
    assert into(ours.scatter_mul) == [20, 2, 6, 56]
    assert into(ours.scatter_mean) == [5, 3, 6, 15]
    assert into(ours.scatter_max) == [5, 2, 6, 8]
    assert into(ours.scatter_min) == [1, 1, 6, 7]
    assert into(ours.scatter, reduce="max") == [5, 2, 6, 8]
    assert into(ours.segment_coo, reduce="mean") == [5, 3, 6, 15]
    expected = torch.tensor([torch.tensor(x).logsumexp(0) for x in ([4.0, 1, 5], [1.0, 2], [6.0], [8.0, 7])])
    torch.testing.assert_close(torch.tensor(into(ours.scatter_logsumexp)), expected)
    torch.testing.assert_close(
        torch.tensor(into(ours.scatter_std)), torch.tensor([4 + 8.0, 1, 6, 8]).sqrt(), rtol=1e-6, atol=0
    )
    _, arg = ours.scatter_max(src, index, out=start.clone())
    assert arg.tolist() == [1, 2, 4, 4]
    ptr = torch.tensor([0, 2, 3, 3, 4])
    out = start.clone()
    assert ours.segment_csr(src, ptr, out) is out  # which is overwritten
    assert out.tolist() == [6, 2, 0, 7]
    assert ours.gather_csr(out, ptr, torch.zeros(4)).tolist() == [6, 6, 2, 7]
    assert ours.gather_coo(out, torch.tensor([0, 0, 3]), torch.zeros(3)).tolist() == [6, 6, 7]


def test_out_is_differentiated() -> None:
    src, index = torch.randn(6, 5, dtype=torch.float64, requires_grad=True), torch.tensor([0, 1, 1, 3, 0, 1])
    start = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    for function in (ours.scatter_sum, ours.scatter_mean, ours.scatter_max, ours.scatter_min, ours.scatter_logsumexp):
        assert torch.autograd.gradcheck(lambda x, y, f=function: of(f(x, index, 0, out=y * 1)), (src, start))


def test_integers() -> None:
    src, index = torch.tensor([-7, 2, 5, 3, -4]), torch.tensor([0, 0, 0, 2, 2])
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        x = src.to(dtype)
        for name, expected in {"sum": [0, 0, -1], "mul": [-70, 1, -12], "min": [-7, 0, -4], "max": [5, 0, 3]}.items():
            found = ours.scatter(x, index, reduce=name)
            assert found.dtype == dtype
            assert found.tolist() == expected
        assert ours.scatter_mean(x, index).tolist() == [0, 0, -1]
        assert ours.segment_csr(x, torch.tensor([0, 3, 3, 5]), reduce="mean").tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match="`scatter_softmax` can only be computed over tensors with floating point"):
        ours.scatter_softmax(src, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bits_are_added_up_in_32(dtype: torch.dtype) -> None:
    src = torch.ones(3000, 8, dtype=dtype)
    index = torch.zeros(3000, dtype=torch.int64)
    assert ours.scatter_sum(src, index, 0)[0, 0] == torch.tensor(3000.0).to(dtype)
    assert ours.scatter_mean(src, index, 0).eq(1).all()
    assert ours.scatter_std(src, index, 0).eq(0).all()
    for found in (
        ours.scatter_max(src, index, 0)[0],
        ours.scatter_softmax(src, index, 0),
        ours.segment_csr(src, index[:2]),
    ):
        assert found.dtype == dtype


def test_empty_inputs() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for name in ("sum", "mean", "mul", "min", "max"):
        assert ours.scatter(torch.zeros(0, 3), none, 0, reduce=name).shape == (0, 3)
        assert ours.scatter(torch.zeros(0, 3), none, 0, dim_size=2, reduce=name).equal(torch.zeros(2, 3))
        assert ours.scatter(torch.zeros(4, 0), torch.tensor([0, 2, 2, 1]), 0, reduce=name).shape == (3, 0)
        assert ours.scatter(torch.zeros(0, 4, 2), torch.tensor([0, 2, 2, 1]), 1, reduce=name).shape == (0, 3, 2)
    assert ours.scatter_max(torch.zeros(0, 3), none, 0, dim_size=2)[1].equal(torch.zeros(2, 3, dtype=torch.int64))
    assert ours.scatter_logsumexp(torch.zeros(0, 3), none, 0, dim_size=2).equal(torch.zeros(2, 3))
    assert ours.scatter_softmax(torch.zeros(0, 3), none, 0).shape == (0, 3)
    assert ours.segment_csr(torch.zeros(0, 3), torch.tensor([0, 0, 0])).equal(torch.zeros(2, 3))
    assert ours.segment_csr(torch.zeros(0, 3), torch.tensor([0]), reduce="max").shape == (0, 3)
    assert ours.gather_csr(torch.zeros(0, 3), torch.tensor([0])).shape == (0, 3)
    assert ours.gather_coo(torch.ones(2, 3), none).shape == (0, 3)
    x = torch.zeros(0, 3, requires_grad=True)
    ours.scatter(x, none, 0, dim_size=2).sum().backward()
    assert x.grad is not None


def test_nan_and_infinities_pass() -> None:
    inf, nan = torch.inf, torch.nan
    src, index = torch.tensor([nan, 1.0, -inf, -inf, inf, 2.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    expected = {"sum": [nan, -inf, inf], "mean": [nan, -inf, inf], "max": [nan, -inf, inf], "min": [nan, -inf, 2.0]}
    for name, numbers in expected.items():
        torch.testing.assert_close(ours.scatter(src, index, reduce=name), torch.tensor(numbers), equal_nan=True)
    # a row of -inf alone, as of masked logits
    assert ours.scatter_softmax(src[2:4], index[2:4]).eq(0).all()
    assert ours.scatter_logsumexp(src[2:4], index[:2]).eq(0).all()
    torch.testing.assert_close(ours.scatter_softmax(torch.tensor([-inf, 1.0]), index[:2]), torch.tensor([0.0, 1.0]))


def test_a_factor_of_0_and_equal_numbers_have_the_right_gradient() -> None:
    src = torch.tensor([0.0, 2.0, 3.0], requires_grad=True)
    index = torch.zeros(3, dtype=torch.int64)
    assert torch.autograd.grad(ours.scatter_mul(src, index).sum(), src)[0].tolist() == [6, 0, 0]
    for width in (1, 5, 40):
        src = torch.full((7, width), 0.1, requires_grad=True)
        out = ours.scatter_std(src, torch.tensor([0, 0, 0, 1, 1, 1, 1]), 0)
        assert out.eq(0).all()
        assert torch.autograd.grad(out.sum(), src)[0].eq(0).all()


@pytest.mark.parametrize("width", [1, 6, 40])
def test_deviations(width: int) -> None:
    src = torch.randn(30, width, dtype=torch.float64, requires_grad=True)
    index = torch.randint(0, 4, (30,))
    for unbiased in (False, True):
        found = ours.scatter_std(src, index, 0, unbiased=unbiased)
        rows = [src[index == i] for i in range(4)]
        counts = [len(m) - unbiased for m in rows]
        expected = torch.stack(
            [((m - m.mean(0)).square().sum(0) / (n + 1e-6)).sqrt() for m, n in zip(rows, counts, strict=True)]
        )
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        both = [torch.autograd.grad(y.sum(), src, retain_graph=True)[0] for y in (found, expected)]
        torch.testing.assert_close(*both)


def test_the_gradient_of_near_numbers_is_not_lost_to_the_rounding_of_their_mean() -> None:
    near = 1 + torch.rand(2, 40) * 1e-4
    upstream = torch.randn(1, 40, dtype=torch.float64)
    found = []
    for src in (near.requires_grad_(), near.detach().double().requires_grad_()):
        out = ours.scatter_std(src, torch.zeros(2, dtype=torch.int64), 0)
        (gradient,) = torch.autograd.grad(out, src, upstream.to(src.dtype))
        found.append(gradient.double())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------------------------------- segments


@pytest.mark.parametrize("name", ["sum", "add", "mean", "min", "max"])
@pytest.mark.parametrize("leading", [(), (1,), (3,)], ids=str)
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "part"])
def test_segments_are_those_of_scatter(whole: bool, leading: tuple[int, ...], name: str) -> None:
    """Where segments begin behind the first row or end before the last one, too."""
    lead = (3,) * len(leading)
    src = torch.randn(*lead, 10, 6, dtype=torch.float64, requires_grad=True)
    ptr = torch.randint(0, 11, (*leading, 6)).sort(-1).values
    if whole:
        ptr[..., 0], ptr[..., -1] = 0, 10
    found = ours.segment_csr(src, ptr, reduce=name)
    row = torch.arange(10)
    starts = ptr.expand(*lead, 6)
    target = torch.searchsorted(starts.contiguous(), row.expand(*lead, 10).contiguous(), right=True) - 1
    target = torch.where((target < 0) | (target > 4), 5, target)  # rows outside go to one more target
    expected = ours.scatter(src, target, len(lead), dim_size=6, reduce=name).narrow(len(lead), 0, 5)
    torch.testing.assert_close(found, expected)
    both = [torch.autograd.grad(y.square().sum(), src)[0] for y in (found, expected)]
    torch.testing.assert_close(*both)
    if name in ("min", "max"):
        function = getattr(ours, f"segment_{name}_csr")
        _, arg = function(src, ptr)
        _, by_scatter = getattr(ours, f"scatter_{name}")(src, target, len(lead), dim_size=6)
        assert arg.equal(by_scatter.narrow(len(lead), 0, 5))
    by_index = ours.segment_coo(src, target[:1] if leading == (1,) else target, dim_size=6, reduce=name)
    if leading != (1,):
        torch.testing.assert_close(by_index.narrow(len(lead), 0, 5), expected)


def test_gathered_rows() -> None:
    src = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    ptr = torch.tensor([[0, 2, 2, 5], [0, 1, 4, 5]])
    index = torch.tensor([[0, 0, 2, 2, 2], [0, 1, 1, 1, 2]])
    expected = src.gather(1, index[..., None].expand(-1, -1, 4))
    for found in (ours.gather_csr(src, ptr), ours.gather_coo(src, index)):
        assert found.equal(expected)
        both = [torch.autograd.grad(y.pow(3).sum(), src, retain_graph=True)[0] for y in (found, expected)]
        torch.testing.assert_close(*both)
    one = ours.gather_csr(src, ptr[:1])
    assert one.equal(src[:, index[0]])
    assert torch.autograd.gradgradcheck(lambda x: ours.gather_csr(x, ptr).tanh(), src)


# ---------------------------------------------------------------------------------------------- ways to run


@pytest.mark.parametrize("name", ["sum", "mean", "max", "std", "softmax", "logsumexp"])
def test_transforms_of_torch(name: str) -> None:
    src, index = torch.randn(8, 5, dtype=torch.float64), torch.tensor([0, 1, 1, 3, 0, 1, 3, 3])
    function = getattr(ours, f"scatter_{name}")

    def total(x: Tensor) -> Tensor:
        return of(function(x, index, 0, dim_size=4)).pow(3).sum()

    leaf = src.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(total)(src), torch.autograd.grad(total(leaf), leaf)[0])
    hessian = torch.autograd.functional.hessian(total, src)
    torch.testing.assert_close(torch.func.hessian(total)(src), hessian)
    vectorized = torch.autograd.functional.hessian(total, src, vectorize=True)
    torch.testing.assert_close(vectorized, hessian)
    _, slope = torch.func.jvp(total, (src,), (torch.ones_like(src),))
    torch.testing.assert_close(slope, torch.func.grad(total)(src).sum())
    batch = torch.stack([src, -src])
    expected = torch.stack([of(function(x, index, 0, dim_size=4)) for x in batch])
    torch.testing.assert_close(torch.func.vmap(lambda x: of(function(x, index, 0, dim_size=4)))(batch), expected)


def test_compiled_programs() -> None:
    index = torch.tensor([0, 1, 1, 3, 0, 1])

    def program(x: Tensor) -> Tensor:
        weights = ours.scatter_softmax(x, index, 0, dim_size=4)
        return ours.scatter(weights * x, index, 0, dim_size=4) + ours.scatter_max(x, index, 0, dim_size=4)[0]

    x = torch.randn(6, 8)
    compiled = torch.compile(program, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), program(x))


def test_errors() -> None:
    src, index = torch.randn(4, 5), torch.tensor([0, 1, 3, 1])
    with pytest.raises(TypeError, match=r"index must be int64; got torch\.int32"):
        ours.scatter(src, index.int(), 0)
    with pytest.raises(ValueError, match="index must lie between 0 and 2; it holds 3"):
        ours.scatter(src, index, 0, dim_size=3)
    with pytest.raises(ValueError, match="index must lie between 0 and 2; it holds 3"):
        ours.scatter_max(src, index, 0, out=torch.zeros(3, 5))
    with pytest.raises(ValueError, match="it holds -1"):
        ours.scatter(src, index - 1, 0)
    with pytest.raises(ValueError, match="reduce must be one of sum, add, mul, mean, min, max; got 'median'"):
        ours.scatter(src, index, 0, reduce="median")
    with pytest.raises(ValueError, match="reduce must be one of sum, add, mean, min, max; got 'mul'"):
        ours.segment_csr(src, index, reduce="mul")
    with pytest.raises(ValueError, match="indptr must lie between 0 and 4; it holds 5"):
        ours.segment_csr(src, torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="indptr must have one number at least"):
        ours.segment_csr(src, torch.zeros(0, dtype=torch.int64))
    with pytest.raises(TypeError, match="indptr must be int64"):
        ours.gather_csr(src, torch.tensor([0, 1, 2, 3, 4]).int())
    with pytest.raises(ValueError, match="must agree before dimension 1"):
        ours.gather_coo(src, torch.zeros(3, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="unexpected keyword"):
        ours.scatter(src, index, 0, mode="sum")  # type: ignore[call-arg]


# ---------------------------------------------------------------------------------------------- torch_scatter itself


@pytest.mark.scatter
def test_signatures_are_torch_scatters() -> None:
    import torch_scatter as theirs

    for name in theirs.__all__:
        function = getattr(theirs, name, None)
        if inspect.isfunction(function):
            parameters = inspect.signature(function).parameters.values()
            mine = inspect.signature(getattr(ours, name)).parameters.values()
            assert [(p.name, p.default) for p in mine] == [(p.name, p.default) for p in parameters], name


def equal(found: Any, expected: Any, dtype: torch.dtype, what: object) -> None:
    """Numbers, dtypes and shapes; numbers of 16 bits are added up in them there."""
    if isinstance(expected, tuple):
        for a, b in zip(found, expected, strict=True):
            equal(a, b, dtype, what)
        return
    assert found.dtype == expected.dtype, what
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}.get(dtype, 0.0)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}")


NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8)


def numbers(shape: list[int], dtype: torch.dtype) -> Tensor:
    return (3 * torch.randn(shape)).to(dtype) if dtype.is_floating_point else torch.randint(-5, 6, shape).to(dtype)


@pytest.mark.scatter
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_scatter_is_torch_scatters(first: int) -> None:
    """Any shape, dtype, index, `dim_size` and `out`, with gradients in float64."""
    import torch_scatter as theirs

    names = ("sum", "add", "mul", "mean", "min", "max", "std", "softmax", "log_softmax", "logsumexp")
    for seed, name in itertools.product(range(first, first + 50), names):
        r = random.Random(f"{seed} {name}")
        torch.manual_seed(seed)
        dtype = r.choice(NUMBERS if names.index(name) < 6 else NUMBERS[:4])
        shape = [r.choice([1, 2, 3, 5, 9]) for _ in range(r.randint(1, 4))]
        dim = r.randrange(-len(shape), len(shape))
        place = dim % len(shape)
        targets = r.choice([shape[place : place + 1], shape, shape[: place + 1]])
        src, index = numbers(shape, dtype), torch.randint(0, 4, targets)
        options: dict[str, Any] = {"dim_size": r.choice([None, 4, 6])}
        start = None
        if "softmax" not in name and name != "logsumexp" and r.random() < 0.3:  # theirs forgets what `out` holds
            start = numbers([*shape[:place], 5, *shape[place + 1 :]], dtype)
            start = start.abs() if name == "std" else start
            options = {}
        found = []
        for library in (ours, theirs):
            x = src.clone().requires_grad_(dtype == torch.float64)
            out = {} if start is None else {"out": start.clone()}
            result = getattr(library, f"scatter_{name}")(x, index, dim, **options, **out)
            gradient = None
            if x.requires_grad and name != "std":  # theirs is NaN where a target has one number
                torch.manual_seed(seed)
                (gradient,) = torch.autograd.grad(of(result), x, torch.randn_like(of(result)))
            found.append((result, *(g for g in (gradient, out.get("out")) if g is not None)))
        equal(*found, dtype, (seed, name, shape, dim, targets, options, start is not None))


@pytest.mark.scatter
@pytest.mark.parametrize("first", range(0, 400, 100))
def test_segments_are_torch_scatters(first: int) -> None:
    import torch_scatter as theirs

    for seed in range(first, first + 100):
        r = random.Random(seed)
        torch.manual_seed(seed)
        dtype = r.choice(NUMBERS[:-1])
        shape = [r.choice([1, 2, 3, 5, 9]) for _ in range(r.randint(1, 3))]
        dim = r.randrange(len(shape))
        leading = [r.choice([1, size]) for size in shape[:dim]]
        rows = [*shape[:dim], 4, *shape[dim + 1 :]]
        src, few = numbers(shape, dtype), numbers(rows, dtype)
        ptr = torch.randint(0, shape[dim] + 1, (*leading, 5)).sort(-1).values
        if r.random() < 0.5:
            ptr[..., 0], ptr[..., -1] = 0, shape[dim]
        index = torch.randint(0, 4, (*leading, shape[dim])).sort(-1).values
        calls: list[tuple[str, tuple[Tensor, ...], dict[str, Any]]] = [
            *((f"segment_{name}_csr", (src, ptr), {}) for name in ("sum", "add", "mean", "min", "max")),
            *((f"segment_{name}_coo", (src, index), {"dim_size": 6}) for name in ("sum", "add", "mean", "min", "max")),
            ("segment_csr", (src, ptr, few.clone()), {"reduce": r.choice(["sum", "mean", "min", "max"])}),
            ("segment_coo", (src, index), {"reduce": r.choice(["sum", "mean", "min", "max"])}),
        ]
        if bool((ptr[..., 0] == 0).all()) and bool((ptr[..., -1] == shape[dim]).all()):
            calls.append(("gather_csr", (few, ptr), {}))
        if leading == shape[:dim]:
            calls.append(("gather_coo", (few, index), {}))
        for name, arguments, options in calls:
            both = [getattr(library, name)(*(x.clone() for x in arguments), **options) for library in (ours, theirs)]
            equal(*both, dtype, (seed, name, shape, dim, leading, options))
