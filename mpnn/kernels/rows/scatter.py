"""Sums and extremes of rows by target, rows by index, and matchings of nodes, as functions of tensors. All but
matchings can be differentiated any number of times.

On a CPU they run in the order in which the rows are given, so that nothing is sorted: `edge_sum` in
`mpnn/kernels/cpu/row_reduce.cpp`, and `mpnn/kernels/cpu/scatter.cpp`. Anywhere else, and within transforms of torch,
they are torch's operations. Kernels do not check targets.
"""

from ctypes import Structure, addressof, c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address, fields
from mpnn.kernels.derivatives import are_batches
from mpnn.kernels.linear_map import linear_map
from mpnn.kernels.memory import empty, plain, zeros
from mpnn.kernels.rows.reduce import EdgeSumStruct

_MIN_WIDTH = 4  # of rows: torch adds up single numbers as fast
_MIN_NUMBERS = 1 << 18  # of a part
_LANES = 8


class RowExtremeStruct(Structure):
    """The parameters of `row_extreme`, as `RowExtreme` in `mpnn/kernels/cpu/scatter.cpp`."""

    _fields_ = (
        ("to", c_void_p),
        *fields(c_int64, "num_edges num_rows size"),
        ("sign", c_double),
        *fields(c_void_p, "x out arg"),
    )


class MatchStruct(Structure):
    """The parameters of `match`, as `Match` in `mpnn/kernels/cpu/scatter.cpp`."""

    _fields_ = (
        *fields(c_void_p, "ptr col order"),
        ("num_nodes", c_int64),
        *fields(c_void_p, "weight cluster"),
    )


def serves(x: Tensor) -> bool:
    """Whether kernels read this tensor in the modes of torch that are on."""
    return (
        type(x) in (Tensor, nn.Parameter)
        and x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and x.layout is torch.strided
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and not are_batches((x,))
        and library.why_missing() is None
    )


def row_sums(x: Tensor, to: Tensor, num_rows: int) -> Tensor:
    """The sums of the rows of x [E, D] at their targets `to`, int64 [E]: [num_rows, D]. Integers and numbers of 32
    bits or more."""
    if x.shape[1] >= _MIN_WIDTH and serves(x):
        return linear_map(x, lambda x: _sums(x, to, num_rows), lambda d_out: rows_at(d_out, to))
    if x.shape[1] == 1:  # torch adds up a vector twice as fast as a column
        return x.new_zeros(num_rows).index_add(0, to, x.squeeze(1))[:, None]
    return x.new_zeros(num_rows, x.shape[1]).index_add(0, to, x)


def rows_at(x: Tensor, to: Tensor) -> Tensor:
    """The rows `to` of x [N, D]: [E, D]."""
    if x.shape[1] == 1:
        return x.squeeze(1).index_select(0, to)[:, None]
    if x.shape[1] < _MIN_WIDTH or not serves(x):
        return x.index_select(0, to)
    num_rows, size = x.shape
    return linear_map(
        x,
        lambda x: torch.index_select(x, 0, to, out=empty(x, len(to), size)),
        lambda d_out: row_sums(d_out, to, num_rows),
    )


def _sums(x: Tensor, to: Tensor, num_rows: int) -> Tensor:
    """`row_sums` by the kernel."""
    x = plain(x)
    size = x.shape[1]
    out = empty(x, num_rows, size)
    p = EdgeSumStruct(address(to), None, len(x), num_rows, size, address(x), None, address(out), None)
    library.run("edge_sum", x.dtype, p)
    return out


def row_squares(x: Tensor, to: Tensor, num_rows: int, count: Tensor) -> Tensor:
    """The sums of the squared distances of the rows of x [E, D] from the mean of their target: [num_rows, D].

    Args:
        count: [num_rows, 1], the number of rows of each target.
    """
    # The mean of equal numbers is rounded, and that of their distances from one of them is 0.
    row = torch.arange(len(x), device=x.device)
    one = to.new_zeros(num_rows).scatter(0, to, row).index_select(0, to)
    count = count.clamp(min=1)
    if serves(x):
        squares: Tensor = _RowSquares.apply(x, to, num_rows, one, count)[0]
        return squares
    apart = _centered(x - rows_at(x.detach(), one), to, num_rows, count)
    return row_sums(apart.square(), to, num_rows)


def _centered(x: Tensor, to: Tensor, num_rows: int, count: Tensor) -> Tensor:
    """Rows [E, D] minus the mean of their target."""
    return x - rows_at(row_sums(x, to, num_rows) / count, to)


def row_products(x: Tensor, to: Tensor, num_rows: int) -> Tensor:
    """The products of the rows of x [E, D] at their targets, [num_rows, D]; 1 for targets without rows."""
    if x.requires_grad and torch.is_grad_enabled() and serves(x) and not bool((x == 0).any()):
        product: Tensor = _RowProducts.apply(x, to, num_rows)
        return product
    if forward_ad._current_level >= 0:
        return _products_of_pairs(x, to, num_rows)
    return x.new_ones(num_rows, x.shape[1]).scatter_reduce(0, to[:, None].expand_as(x), x, "prod")


def _products_of_pairs(x: Tensor, to: Tensor, num_rows: int) -> Tensor:
    """`row_products` in forward mode, where torch's products have wrong tangents: the products of pairs of rows of the
    same target, and again of these, until each target has one row."""
    to, order = to.sort(stable=True)
    x = x.index_select(0, order)
    while bool((to[1:] == to[:-1]).any()):
        place = torch.arange(len(to), device=to.device)
        is_first = (place - torch.searchsorted(to, to)) % 2 == 0
        first = place[is_first]
        has_second = (first + 1 < len(to)) & (to[(first + 1).clamp(max=len(to) - 1)] == to[first])
        second = torch.where(has_second, first + 1, len(to))
        x = x.index_select(0, first) * torch.cat([x, torch.ones_like(x[:1])]).index_select(0, second)
        to = to[first]
    return x.new_ones(num_rows, x.shape[1]).index_copy(0, to, x)


def row_extremes(x: Tensor, to: Tensor, num_rows: int, smallest: bool) -> tuple[Tensor, Tensor]:
    """The largest or smallest row of x [E, D] at each target, number by number, and the first row that it is from,
    int64: both [num_rows, D]; 0 and E for targets without rows. NaN exceeds any number. The gradient goes to that row
    alone."""
    num_edges = len(x)
    if num_edges < 2**31 and x.shape[1] >= 1 and serves(x):
        return _RowExtremes.apply(x, to, num_rows, smallest)
    index = to[:, None].expand_as(x)
    known = x.detach()
    how = "amin" if smallest else "amax"
    best = known.new_zeros(num_rows, x.shape[1]).scatter_reduce(0, index, known, how, include_self=False)
    is_best = (known == best.index_select(0, to)) | (known != known)
    row = torch.arange(num_edges, device=x.device)[:, None]
    none = torch.full_like(best, num_edges, dtype=torch.int64)
    arg = none.scatter_reduce(0, index, torch.where(is_best, row, num_edges), "amin")
    return _picked(x, arg), arg


def _picked(x: Tensor, arg: Tensor) -> Tensor:
    """The numbers of the rows `arg` [N, D] of x [E, D], 0 where this is E."""
    num_edges = len(x)
    if not num_edges:
        return x.new_zeros(arg.shape)
    return x.gather(0, arg.clamp(max=num_edges - 1)).masked_fill(arg == num_edges, 0)


class _RowSquares(torch.autograd.Function):
    """`row_squares`, and the rows minus the mean of their target, which its derivative is made of."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, to: Tensor, num_rows: int, one: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        apart = rows_at(x, one)
        torch.sub(x, apart, out=apart)
        apart.sub_(rows_at(row_sums(apart, to, num_rows) / count, to))
        ctx.of_rows = to, num_rows, count
        ctx.save_for_backward(apart)
        ctx.set_materialize_grads(False)
        return row_sums(apart.square(), to, num_rows), apart

    @staticmethod
    def backward(ctx, d_squares: Tensor | None, d_apart: Tensor | None) -> Any:  # type: ignore[no-untyped-def]
        (apart,) = ctx.saved_tensors
        parts = [] if d_squares is None else [2 * rows_at(d_squares, ctx.of_rows[0]) * apart]
        parts += [] if d_apart is None else [_centered(d_apart, *ctx.of_rows)]
        return sum(parts) if parts else None, None, None, None, None


class _RowProducts(torch.autograd.Function):
    """`row_products` of numbers other than 0, each of which divides its product in the derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, to: Tensor, num_rows: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.to = to
        out = row_products(x.detach(), to, num_rows)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        x, out = ctx.saved_tensors
        return rows_at(d_out * out, ctx.to) / x, None, None


class _RowExtremes(torch.autograd.Function):
    """`row_extremes`."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, x: Tensor, to: Tensor, num_rows: int, smallest: bool
    ) -> tuple[Tensor, Tensor]:
        x = plain(x)
        num_edges, size = x.shape
        out = empty(x, num_rows, size)
        arg = torch.empty(num_rows, size, dtype=torch.int32, device="cpu")
        sign = -1.0 if smallest else 1.0
        p = RowExtremeStruct(address(to), num_edges, num_rows, size, sign, address(x), address(out), address(arg))
        parts = min(torch.get_num_threads(), -(-size // _LANES), x.numel() // _MIN_NUMBERS)
        library.run("row_extreme", x.dtype, p, parts=max(1, parts))
        arg = arg.long()
        ctx.num_edges = num_edges
        ctx.save_for_backward(arg)
        ctx.mark_non_differentiable(arg)
        return out, arg

    @staticmethod
    def backward(ctx, d_out: Tensor, _: Any) -> Any:  # type: ignore[no-untyped-def]
        (arg,) = ctx.saved_tensors
        shape = ctx.num_edges + 1, arg.shape[1]  # the last row is that of targets without rows
        if serves(d_out):
            rows = zeros(d_out, *shape).scatter_(0, arg, d_out)
        else:
            rows = d_out.new_zeros(shape).scatter(0, arg, d_out)
        return rows[:-1], None, None, None


def match(ptr: Tensor, col: Tensor, order: Tensor, weight: Tensor | None) -> Tensor:
    """The clusters of a greedy matching, int64 [N]: each node in `order`, if it has no partner yet, takes the neighbor
    without one whose weight is largest and at least 0, or its first; a pair has the lower number of its nodes.

    Args:
        ptr, col, order: int64 [N + 1], [E] and [N]; the neighbors of node u are `col[ptr[u]:ptr[u + 1]]`.
        weight: float64 [E] or None.

    Raises:
        RuntimeError: the kernels are not compiled.
    """
    if (why := library.why_missing()) is not None:
        raise RuntimeError(f"a matching needs the compiled kernels, and {why}")
    cluster = torch.empty_like(order)
    of_graph = address(ptr), address(col), address(order)
    p = MatchStruct(*of_graph, len(order), address(weight), address(cluster))
    library.function("match")(addressof(p))
    return cluster
