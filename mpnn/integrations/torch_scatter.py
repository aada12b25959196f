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

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn.aggregate import root
from mpnn.kernels.rows import row_extremes, row_products, row_squares, row_sums, rows_at

_NARROW = (torch.float16, torch.bfloat16)


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
        out: [..., N, ...]: what the numbers are added to, multiplied with or compared with, in place.
        dim_size: N. Default: the size of `out`, or the largest index plus 1.
        reduce: "sum" or "add", "mul", "mean", "min" or "max".

    Returns:
        [..., N, ...], or `out`. Targets without numbers get 0, or 1 for "mul".
    """
    if reduce in ("min", "max"):
        return _scatter_extremes(src, index, dim, out, dim_size, reduce == "min")[0]
    return _of_name(reduce, _SCATTERS)(src, index, dim, out, dim_size)


def scatter_sum(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Returns `scatter` with reduce="sum"."""
    flat = _flat(src, index, dim, out, dim_size)
    total = flat.result(_sums(flat)).to(src.dtype)
    return total if out is None else out.add_(total)


def scatter_add(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Returns `scatter_sum`."""
    return scatter_sum(src, index, dim, out, dim_size)


def scatter_mean(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Returns `scatter` with reduce="mean". What `out` holds is added to the sum and not counted. Means of integers are
    rounded down."""
    return _mean(src, index, dim, out, dim_size, "floor")


def _mean(src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None, rounding: str) -> Tensor:
    flat = _flat(src, index, dim, out, dim_size)
    total = _sums(flat)
    if out is None:
        return flat.result(_divided(total, _counts(flat), rounding)).to(src.dtype)
    count = flat.result(_counts(flat).clamp(min=1).expand_as(total))
    return out.add_(flat.result(total)).div_(count, rounding_mode=None if out.is_floating_point() else rounding)


def scatter_mul(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> Tensor:
    """Returns `scatter` with reduce="mul"."""
    flat = _flat(src, index, dim, out, dim_size)
    if not src.numel():  # as torch_scatter: no product, but zeros
        return src.new_zeros(flat.shape) if out is None else out
    product = flat.result(row_products(_wide(flat.x), flat.to, flat.num_rows)).to(src.dtype)
    return product if out is None else out.mul_(product)


def scatter_min(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `scatter` with reduce="min", and the first index along `dim` that each minimum is from; the size of `src`
    where it is from none, but from `out`, or a target has no numbers."""
    return _scatter_extremes(src, index, dim, out, dim_size, True)


def scatter_max(
    src: Tensor, index: Tensor, dim: int = -1, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `scatter` with reduce="max", and the first index along `dim` that each maximum is from; as
    `scatter_min`."""
    return _scatter_extremes(src, index, dim, out, dim_size, False)


def _scatter_extremes(
    src: Tensor, index: Tensor, dim: int, out: Tensor | None, dim_size: int | None, smallest: bool
) -> tuple[Tensor, Tensor]:
    flat = _flat(src, index, dim, out, dim_size)
    extremes, arg = _extremes(flat, smallest)
    if out is None:
        return extremes, arg
    beats = extremes < out if smallest else extremes > out
    beats = (arg < flat.length) & (beats | extremes.isnan())
    out.copy_(torch.where(beats, extremes, out))
    return out, torch.where(beats, arg, flat.length)


_SCATTERS = {"sum": scatter_sum, "add": scatter_sum, "mul": scatter_mul, "mean": scatter_mean}


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
        reduce: "sum" or "add", "mean", "min" or "max".

    Returns:
        [..., N, ...], or `out`; 0 for empty segments.
    """
    if reduce in ("min", "max"):
        return _segment_extremes_csr(src, indptr, out, reduce == "min")[0]
    return _of_name(reduce, _SEGMENTS_CSR)(src, indptr, out)


def segment_sum_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `segment_csr` with reduce="sum"."""
    flat = _flat_of_ptr(src, indptr)
    return _written(flat.result(_sums(flat)), src, out)


def segment_add_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `segment_sum_csr`."""
    return segment_sum_csr(src, indptr, out)


def segment_mean_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns `segment_csr` with reduce="mean". Means of integers are rounded towards 0."""
    flat = _flat_of_ptr(src, indptr)
    count = _expanded_ptr(src, indptr).diff().reshape(-1, 1)
    return _written(flat.result(_divided(_sums(flat), count, "trunc")), src, out)


def segment_min_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns `segment_csr` with reduce="min", and the first index that each minimum is from; the size of `src` if
    none."""
    return _segment_extremes_csr(src, indptr, out, True)


def segment_max_csr(src: Tensor, indptr: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns `segment_csr` with reduce="max", and the first index that each maximum is from; the size of `src` if
    none."""
    return _segment_extremes_csr(src, indptr, out, False)


def _segment_extremes_csr(src: Tensor, indptr: Tensor, out: Tensor | None, smallest: bool) -> tuple[Tensor, Tensor]:
    flat = _flat_of_ptr(src, indptr)
    extremes, arg = _extremes(flat, smallest)
    return _written(extremes, src, out), arg


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
    not.

    Args:
        index: int64 [..., E]; leading dimensions of size 1 are repeated.
    """
    if reduce == "mean":
        return segment_mean_coo(src, index, out, dim_size)
    return scatter(src, _expanded_index(src, index), index.dim() - 1, out, dim_size, reduce)


def segment_sum_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """Returns `segment_coo` with reduce="sum"."""
    return scatter_sum(src, _expanded_index(src, index), index.dim() - 1, out, dim_size)


def segment_add_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """Returns `segment_sum_coo`."""
    return segment_sum_coo(src, index, out, dim_size)


def segment_mean_coo(src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None) -> Tensor:
    """Returns `segment_coo` with reduce="mean". Means of integers are rounded towards 0."""
    return _mean(src, _expanded_index(src, index), index.dim() - 1, out, dim_size, "trunc")


def segment_min_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `segment_coo` with reduce="min", and the first index that each minimum is from, as `scatter_min`."""
    return scatter_min(src, _expanded_index(src, index), index.dim() - 1, out, dim_size)


def segment_max_coo(
    src: Tensor, index: Tensor, out: Tensor | None = None, dim_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns `segment_coo` with reduce="max", and the first index that each maximum is from, as `scatter_max`."""
    return scatter_max(src, _expanded_index(src, index), index.dim() - 1, out, dim_size)


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


_SEGMENTS_CSR = {"sum": segment_sum_csr, "add": segment_sum_csr, "mean": segment_mean_csr}


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


def _expanded_index(src: Tensor, index: Tensor) -> Tensor:
    return index.expand(src.shape[: index.dim()])


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


def _divided(total: Tensor, count: Tensor, rounding: str = "") -> Tensor:
    """Means; those of integers are rounded as `rounding` says."""
    count = count.clamp(min=1).to(total.dtype)
    return total / count if total.is_floating_point() else total.div(count, rounding_mode=rounding)


def _extremes(flat: _Flat, smallest: bool) -> tuple[Tensor, Tensor]:
    """Extremes, and the index along the dimension that each is from, both in the shape of the result."""
    extremes, row = row_extremes(_wide(flat.x), flat.to, flat.num_rows, smallest)
    count = len(flat.x)
    if count != flat.length or flat.taken is not None:
        is_none = row == count
        row = row.clamp(max=max(count - 1, 0))
        if flat.taken is not None and count:
            row = flat.taken.index_select(0, row.flatten()).view(row.shape)
        row = (row // flat.depth % max(flat.length, 1)).masked_fill(is_none, flat.length)
    return flat.result(extremes).to(flat.x.dtype), flat.result(row)


def _written(extremes: Tensor, src: Tensor, out: Tensor | None) -> Tensor:
    return extremes.to(src.dtype) if out is None else out.copy_(extremes)


def _floating(name: str, src: Tensor) -> Tensor:
    if not src.is_floating_point():
        raise ValueError(f"`scatter_{name}` can only be computed over tensors with floating point data types.")
    return src


def _of_name(reduce: str, functions: dict[str, Any]) -> Any:
    if reduce not in functions:
        raise ValueError(f"reduce must be one of {', '.join((*functions, 'min', 'max'))}; got {reduce!r}")
    return functions[reduce]
