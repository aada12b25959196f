"""torch_scatter's functions, which has to be compiled against each version of torch; these need no compiler.

    from mpnn.integrations.torch_scatter import scatter      instead of torch_scatter
    python -m mpnn.shim torch_scatter script.py              for code that imports torch_scatter itself

Signatures, shapes, `out`, `dim_size`, broadcast indices, the results of empty targets and the `arg` of extremes are
those of torch_scatter 2.1.2. They run on any device, in any dtype, under `torch.func` and `torch.compile`, and can be
differentiated any number of times. They differ where torch_scatter's results are of no use:

- NaN and infinities are passed on: torch_scatter's extremes skip NaN, and a maximum of -inf alone is 0 there.
- numbers of 16 bits are added up in float32.
- a product has the right gradient where a factor is 0, a softmax over -inf alone is 0, and a standard deviation of
  equal numbers has a gradient of 0.
- an index outside the result raises an error.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn.aggregate import root
from mpnn.kernels.rows import row_extremes, row_products, row_squares, row_sums, rows_at

_NARROW = (torch.float16, torch.bfloat16)
_OF_SEGMENTS = ("sum", "add", "mean", "min", "max")


# ------------------------------------------------------------------------------------------------ scatter


def scatter(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    reduce: str = "sum",
) -> Tensor:
    """Reduces the numbers of `src` along `dim` at the targets `index`.

    Args:
        src: [..., E, ...].
        index: int64: [E], the leading dimensions of src up to `dim`, or its whole shape; sizes of 1 are repeated.
        out: [..., N, ...]: what the numbers are added to, multiplied with or compared with, in place. A mean adds it
            to the sum and does not count it.
        dim_size: N. Default: the size of `out`, or the largest index plus 1.
        reduce: "sum" or "add", "mul", "mean" (of integers: rounded down), "min" or "max".

    Returns:
        [..., N, ...], or `out`. Targets without numbers get 0, or 1 for "mul".
    """
    return _values(_scattered(src, index, dim, out, dim_size, reduce=reduce))


def _scattered(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None, *, reduce: str
) -> Any:
    return _reduction(reduce)(_flat(src, index, dim, out, dim_size), out, "floor")


def _sum(flat: "_Flat", out: Tensor | None, rounding: str) -> Tensor:
    total = flat.result(_sums(flat)).to(flat.x.dtype)
    return total if out is None else out.add_(total)


def _mean(flat: "_Flat", out: Tensor | None, rounding: str) -> Tensor:
    """Means; those of integers are rounded as `rounding` says."""
    total = _sums(flat)
    count = _counts(flat).clamp(min=1)
    mode = None if flat.x.is_floating_point() else rounding
    if out is None:
        return flat.result(total.div(count.to(total.dtype), rounding_mode=mode)).to(flat.x.dtype)
    return out.add_(flat.result(total)).div_(flat.result(count.expand_as(total)), rounding_mode=mode)


def _product(flat: "_Flat", out: Tensor | None, rounding: str) -> Tensor:
    if not flat.x.numel():  # as torch_scatter: no product, but zeros
        return flat.x.new_zeros(flat.shape) if out is None else out
    product = flat.result(row_products(_wide(flat.x), flat.to, flat.num_rows)).to(flat.x.dtype)
    return product if out is None else out.mul_(product)


def _extreme(flat: "_Flat", out: Tensor | None, rounding: str, *, smallest: bool) -> tuple[Tensor, Tensor]:
    """Extremes, and the index along the dimension that each is from, both in the shape of the result."""
    extremes, row = row_extremes(_wide(flat.x), flat.to, flat.num_rows, smallest)
    extremes = flat.result(extremes).to(flat.x.dtype)
    arg = flat.result(flat.index_of(row))
    if out is None:
        return extremes, arg
    beats = extremes < out if smallest else extremes > out
    beats = (arg < flat.length) & (beats | extremes.isnan())
    out.copy_(torch.where(beats, extremes, out))
    return out, torch.where(beats, arg, flat.length)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": _sum,
    "add": _sum,
    "mul": _product,
    "mean": _mean,
    "min": partial(_extreme, smallest=True),
    "max": partial(_extreme, smallest=False),
}
"""By name: a function of rows by target, of what `out` holds, and of how means of integers are rounded."""


def _reduction(name: str, known: Sequence[str] = (*_REDUCTIONS,)) -> Callable[..., Any]:
    if name not in known:
        raise ValueError(f"reduce must be one of {', '.join(known)}; got {name!r}")
    return _REDUCTIONS[name]


def _values(result: Any) -> Tensor:
    """The numbers of a result that may also say where they are from."""
    values: Tensor = result[0] if isinstance(result, tuple) else result
    return values


def _variant(name: str, general: Callable[..., Tensor], results: Callable[..., Any], reduce: str) -> Any:
    """Returns a general function with one reduction: `results` are its numbers, and for extremes where they are
    from."""
    parameters = [*inspect.signature(general).parameters.values()]
    where = (
        ", and the first index along the dimension that each number is from: the size of `src` where it is from none, "
        "but from `out`, or a target has no numbers"
    )

    def function(*args: Any, **options: Any) -> Any:
        return results(*args, reduce=reduce, **options)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f'Returns `{general.__name__}` with reduce="{reduce}"{where * (reduce in ("min", "max"))}.'
    function.__signature__ = inspect.Signature(parameters[:-1])  # type: ignore[attr-defined]  # without `reduce`
    return function


scatter_sum, scatter_add, scatter_mul, scatter_mean, scatter_min, scatter_max = (
    _variant(f"scatter_{reduce}", scatter, _scattered, reduce) for reduce in _REDUCTIONS
)


# ------------------------------------------------------------------------------------------------ compositions


def scatter_std(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    unbiased: bool = True,
) -> Tensor:
    """Returns the standard deviation `sqrt(sum of squared distances from the mean / (n + 1e-6))` at each target; with
    `unbiased`, n is replaced by max(n - 1, 1). The squares are added to `out`."""
    flat = _flat(src, index, dim, out, dim_size)
    x = _wide(flat.x)
    count = _counts(flat)
    squares = flat.result(row_squares(x, flat.to, flat.num_rows, count))
    total = squares if out is None else out.add_(squares)
    degree = (count - 1).clamp(min=1) if unbiased else count
    shares = flat.result(degree.to(x.dtype).expand(flat.num_rows, x.shape[1]))
    return root(total / (shares + 1e-6)).to(src.dtype)


def scatter_softmax(src: Tensor, index: Tensor, dim: int = -1, dim_size: int | None = None) -> Tensor:
    """Returns the softmax of the numbers of each target, in the shape of `src`."""
    flat = _flat(_floating("softmax", src), index, dim, None, dim_size)
    exponentials = _shifted(flat)[0].exp_()
    total = row_sums(exponentials, flat.to, flat.num_rows)
    total = total.masked_fill(total == 0, 1.0)
    return (exponentials / rows_at(total, flat.to)).to(src.dtype).view(src.shape)


def scatter_log_softmax(
    src: Tensor, index: Tensor, dim: int = -1, eps: float = 1e-12, dim_size: int | None = None
) -> Tensor:
    """Returns the logarithm of `scatter_softmax`; `eps` is added to the sums of exponentials."""
    flat = _flat(_floating("log_softmax", src), index, dim, None, dim_size)
    shifted, _ = _shifted(flat)
    total = row_sums(shifted.exp(), flat.to, flat.num_rows)
    return (shifted - rows_at((total + eps).log(), flat.to)).to(src.dtype).view(src.shape)


def scatter_logsumexp(
    src: Tensor,
    index: Tensor,
    dim: int = -1,
    out: Tensor | None = None,
    dim_size: int | None = None,
    eps: float = 1e-12,
) -> Tensor:
    """Returns the logarithm of the sum of the exponentials at each target, 0 without any. `out` holds such a logarithm,
    to which the sum is added. `eps` is added to sums of exponentials."""
    flat = _flat(_floating("logsumexp", src), index, dim, out, dim_size)
    shifted, top = _shifted(flat)
    total = flat.result(row_sums(shifted.exp(), flat.to, flat.num_rows))
    top = flat.result(top)
    if out is not None:
        before = _wide(out)
        largest = torch.maximum(top.masked_fill(total == 0, -torch.inf), before.detach())
        largest = largest.masked_fill(largest.isinf(), 0.0)
        total = total * (top - largest).exp() + (before - largest).exp()
        top = largest
    is_none = total == 0
    result = ((total.masked_fill(is_none, 1.0) + eps).log() + top).masked_fill(is_none, 0.0).to(src.dtype)
    return result if out is None else out.copy_(result)


def _shifted(flat: "_Flat") -> tuple[Tensor, Tensor]:
    """The numbers minus the largest of their target, and the largest of each target, which is 0 for -inf."""
    x = _wide(flat.x)
    top, _ = row_extremes(x.detach(), flat.to, flat.num_rows, smallest=False)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return x - top.index_select(0, flat.to), top


# ------------------------------------------------------------------------------------------------ segments


def segment_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None, reduce: str = "sum") -> Tensor:
    """Reduces the numbers of `src` from `indptr[i]` to `indptr[i + 1]` along the last dimension of `indptr`.

    Args:
        src: [..., E, ...].
        indptr: int64 [..., N + 1], ascending; leading dimensions of size 1 are repeated.
        out: [..., N, ...], which is overwritten.
        reduce: "sum" or "add", "mean" (of integers: rounded towards 0), "min" or "max".

    Returns:
        [..., N, ...], or `out`; 0 for empty segments.
    """
    return _values(_of_ptr(src, indptr, out, reduce=reduce))


def _of_ptr(src: Tensor, indptr: Tensor, out: Tensor | None = None, *, reduce: str) -> Any:
    result = _reduction(reduce, _OF_SEGMENTS)(_flat_of_ptr(src, indptr), None, "trunc")
    values = _written(_values(result), src, out)
    return (values, result[1]) if isinstance(result, tuple) else values


segment_sum_csr, segment_add_csr, segment_mean_csr, segment_min_csr, segment_max_csr = (
    _variant(f"segment_{reduce}_csr", segment_csr, _of_ptr, reduce) for reduce in _OF_SEGMENTS
)


def gather_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Repeats the numbers of `src` [..., N, ...] from `indptr[i]` to `indptr[i + 1]`: [..., E, ...], where E is the
    last number of `indptr`. `out` is overwritten."""
    dim = indptr.dim() - 1
    ptr = _expanded_ptr(src, indptr)
    length = out.shape[dim] if out is not None else int(ptr.flatten()[-1]) if src.numel() else 0
    shape = *src.shape[:dim], length, *src.shape[dim + 1 :]
    if not src.numel():
        return src.new_zeros(shape) if out is None else out
    to, taken = _rows_of_ptr(ptr, length)
    rows = rows_at(src.reshape(ptr[..., 1:].numel(), -1), to)
    if taken is not None:
        rows = rows.new_zeros(ptr[..., 0].numel() * length, rows.shape[1]).index_copy(0, taken, rows)
    return _written(rows.view(shape), src, out)


def segment_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None, reduce: str = "sum"
) -> Tensor:
    """Returns `scatter` along the last dimension of `index`. torch_scatter needs an ascending index; this function does
    not. Means of integers are rounded towards 0.

    Args:
        index: int64 [..., E]; leading dimensions of size 1 are repeated.
    """
    return _values(_of_index(src, index, out, dim_size, reduce=reduce))


def _of_index(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None, *, reduce: str
) -> Any:
    flat = _flat(src, index.expand(src.shape[: index.dim()]), index.dim() - 1, out, dim_size)
    return _reduction(reduce)(flat, out, "trunc")


segment_sum_coo, segment_add_coo, segment_mean_coo, segment_min_coo, segment_max_coo = (
    _variant(f"segment_{reduce}_coo", segment_coo, _of_index, reduce) for reduce in _OF_SEGMENTS
)


def gather_coo(src: Tensor, index: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns the numbers of `src` [..., N, ...] at `index` [..., E] along its last dimension: [..., E, ...]. `out` is
    overwritten."""
    dim = index.dim() - 1
    if src.shape[:dim] != index.shape[:dim]:
        raise ValueError(f"src {list(src.shape)} and index {list(index.shape)} must agree before dimension {dim}")
    shape = *src.shape[:dim], index.shape[dim], *src.shape[dim + 1 :]
    if not src.numel():
        return src.new_zeros(shape) if out is None else out
    _check(index, src.shape[dim])
    to = _in_batch(index, src.shape[dim])
    return _written(rows_at(src.reshape(-1, src.shape[dim + 1 :].numel()), to).view(shape), src, out)


# ------------------------------------------------------------------------------------------------ rows by target


def broadcast(src: Tensor, other: Tensor, dim: int) -> Tensor:
    """Expands an index of dimension `dim` to the shape of `other`, as a view:
    `torch_scatter.utils.broadcast`."""
    dim = other.dim() + dim if dim < 0 else dim
    leading = dim if src.dim() == 1 else 0
    trailing = other.dim() - src.dim() - leading
    return src.view(*[1] * leading, *src.shape, *[1] * trailing).expand(other.shape)


class _Flat(NamedTuple):
    """Rows by target: what any shapes of `src` and `index` come down to.

    Fields:
        x: [M, D] rows of numbers; to: int64 [M], the target of each; num_rows: how many targets there are.
        shape: of the result; length: of `src` along the dimension that is reduced.
        depth: how many rows there are for each index along that dimension, more than 1 if each number has its own
        target. taken: the number of each row among those of `src`; None if they are all.
    """

    x: Tensor
    to: Tensor
    num_rows: int
    shape: tuple[int, ...]
    length: int
    depth: int = 1
    taken: Tensor | None = None

    def result(self, rows: Tensor) -> Tensor:
        """Rows [num_rows, D] in the shape of the result."""
        return rows.reshape(self.shape)

    def index_of(self, row: Tensor) -> Tensor:
        """The index along the dimension that is reduced of rows of x; its length for the number of rows, no row."""
        count = len(self.x)
        if count == self.length and self.taken is None:
            return row
        is_none = row == count
        row = row.clamp(max=max(count - 1, 0))
        if self.taken is not None and count:
            row = self.taken.index_select(0, row.flatten()).view(row.shape)
        return (row // self.depth % max(self.length, 1)).masked_fill(is_none, self.length)


def _flat(src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None) -> _Flat:
    """The rows by target of `scatter`'s arguments."""
    dim = src.dim() + dim if dim < 0 else dim
    count = out.shape[dim] if out is not None else _check(index, dim_size)
    if out is not None:
        _check(index, count)
    before = src.shape[:dim].numel()
    length = src.shape[dim]
    width = src.shape[dim + 1 :].numel()
    shape = (*src.shape[:dim], count, *src.shape[dim + 1 :])
    if not src.numel():
        nothing = src.reshape(before * length, width)[:0]
        return _Flat(nothing, index.new_empty(0), before * count, shape, length)
    targets = index.expand(src.shape[: dim + 1]) if index.dim() == 1 else broadcast(index, src, dim)
    while targets.dim() > dim + 1 and (targets.shape[-1] == 1 or targets.stride(-1) == 0):
        targets = targets.select(-1, 0)
    if targets.dim() == dim + 1:
        return _Flat(src.reshape(-1, width), _in_batch(targets, count), before * count, shape, length)
    targets = broadcast(index, src, dim)
    rows = _in_batch(targets.reshape(*src.shape[: dim + 1], width), count, 2).view(-1, width)
    numbers = rows * width + torch.arange(width, device=index.device)
    return _Flat(src.reshape(-1, 1), numbers.flatten(), before * count * width, shape, length, width)


def _in_batch(index: Tensor, count: int, trailing: int = 1) -> Tensor:
    """Targets below `count` of each entry of a batch, [..., E] or with two `trailing` dimensions [..., E, D], as
    targets of the whole batch, flat."""
    entries = index.shape[: index.dim() - trailing].numel()
    if entries == 1:
        return index.reshape(-1)
    first = torch.arange(entries, device=index.device) * count
    return (index.reshape(entries, -1) + first[:, None]).flatten()


def _check(index: Tensor, count: int | None) -> int:
    """The number of targets, by default the largest index plus 1.

    Raises:
        TypeError: the index is not int64.
        ValueError: it holds a number that is not a target.
    """
    if index.dtype is not torch.int64:
        raise TypeError(f"index must be int64; got {index.dtype}")
    if not index.numel():
        return count or 0
    # To read numbers waits for other devices, breaks a program that is traced, and is impossible within vmap.
    reads = index.is_cpu and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    if count is not None and not reads:
        return count
    low, high = (int(end) for end in index.aminmax())
    count = high + 1 if count is None else count
    if low < 0 or high >= count:
        raise ValueError(f"index must lie between 0 and {count - 1}; it holds {low if low < 0 else high}")
    return count


def _expanded_ptr(src: Tensor, indptr: Tensor) -> Tensor:
    if indptr.dtype is not torch.int64:
        raise TypeError(f"indptr must be int64; got {indptr.dtype}")
    if not 1 <= indptr.dim() <= src.dim() or not indptr.shape[-1]:
        raise ValueError(
            f"indptr must have one number at least, and 1 to {src.dim()} dimensions, as src {list(src.shape)}; got "
            f"{list(indptr.shape)}"
        )
    return indptr.expand(*src.shape[: indptr.dim() - 1], -1)


def _flat_of_ptr(src: Tensor, indptr: Tensor) -> _Flat:
    """The rows by target of `segment_csr`'s arguments."""
    ptr = _expanded_ptr(src, indptr)
    dim = ptr.dim() - 1
    length = src.shape[dim]
    to, taken = _rows_of_ptr(ptr, length)
    x = src.reshape(src.shape[: dim + 1].numel(), src.shape[dim + 1 :].numel())
    x = x if taken is None else x.index_select(0, taken)
    shape = (*src.shape[:dim], ptr.shape[-1] - 1, *src.shape[dim + 1 :])
    return _Flat(x, to, ptr[..., 1:].numel(), shape, length, taken=taken)


def _rows_of_ptr(ptr: Tensor, length: int) -> tuple[Tensor, Tensor | None]:
    """The segment of each row, and the number of each row among those of a batch of `length` rows each; None if they
    are all rows in order."""
    degree = ptr.diff().flatten()
    to = torch.repeat_interleave(degree)  # which refuses what is not ascending
    if not ptr.numel():
        return to, None
    ends = ptr.select(-1, 0), ptr.select(-1, -1)
    low, high = int(ends[0].min()), int(ends[1].max())
    if low < 0 or high > length:
        raise ValueError(f"indptr must lie between 0 and {length}; it holds {low if low < 0 else high}")
    if int(ends[0].max()) == 0 and int(ends[1].min()) == length:
        return to, None
    entry = torch.arange(ptr[..., 0].numel(), device=ptr.device).view(*ptr.shape[:-1], 1)
    start = (ptr[..., :-1] + entry * length).flatten() - (degree.cumsum(0) - degree)
    return to, torch.arange(len(to), device=ptr.device) + start.index_select(0, to)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in _NARROW else x


def _sums(flat: _Flat) -> Tensor:
    return row_sums(_wide(flat.x), flat.to, flat.num_rows)


def _counts(flat: _Flat) -> Tensor:
    """How many numbers each target has, int64 [num_rows, 1]."""
    return flat.to.new_zeros(flat.num_rows).index_add(0, flat.to, torch.ones_like(flat.to))[:, None]


def _written(extremes: Tensor, src: Tensor, out: Tensor | None) -> Tensor:
    return extremes.to(src.dtype) if out is None else out.copy_(extremes)


def _floating(name: str, src: Tensor) -> Tensor:
    if not src.is_floating_point():
        raise ValueError(f"`scatter_{name}` can only be computed over tensors with floating point data types.")
    return src
