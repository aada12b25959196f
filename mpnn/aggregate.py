"""Aggregators: functions that reduce the messages of each destination to one.

An aggregator is any object with a method `reduce(messages, index) -> out`, or a plain function with these arguments:

- `messages`: [E, batch..., H, D], sorted by destination;
- `index`: int64 [E], the destination of each message. It also has `index.ptr` [N + 1] (destination i receives the
  messages `ptr[i]:ptr[i+1]`), `index.num_dst` and `index.degree` [N];
- `out`: [N, batch..., H, D]. Destinations without messages get zeros.

The dimensions of the batch and the heads (H = 1 without attention) are between the edges and the features. An
aggregator that works elementwise (a sum, a median) can ignore them. An aggregator that compares whole messages (by
norm, by a score) must not compare messages of different batch entries or heads: `per_node(aggregator)` calls it with
messages [E, D] of one batch entry and one head at a time.

Fused kernels run an aggregator without a tensor of E messages if it defines more than `reduce`:

- an associative and commutative aggregator may define `combine(a, b)`, a function of two numbers (a staticmethod)
  that numba compiles, and its neutral element `identity`;
- for the backward pass, it may also define `gradient(message, out)`, the derivative of a destination's result with
  respect to one of its messages;
- `lift(message)` is what is combined of a message, if not the message itself. With `shares_ties = True`, the messages
  whose lift equals the result share the gradient evenly, as those of a maximum do;
- an aggregator composed of others subclasses `Composed`, lists them in `parts`, and combines their results in
  `compose`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from math import isclose
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from mpnn.graph.registry import unknown


class Index(Tensor):
    """The destination of each message, ascending, int64 [E]: an ordinary tensor that also stores the row pointers."""

    ptr: Tensor
    plain: Tensor
    num_dst: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(dst: Tensor, ptr: Tensor) -> "Index":
        index = dst.as_subclass(Index)
        index.ptr = ptr
        index.plain = dst
        index.num_dst = len(ptr) - 1
        return index

    @property
    def degree(self) -> Tensor:
        """Number of messages of each destination, int64 [N]."""
        return self.ptr.diff()


@runtime_checkable
class Aggregator(Protocol):
    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        """Reduces messages [E, batch..., H, D] to [N, batch..., H, D]."""
        ...


def segment_sum(messages: Tensor, index: Index) -> Tensor:
    """Returns the sum of the messages of each destination, accumulated in at least float32: [E, ...] -> [N, ...]."""
    upcast = _upcast(messages)
    out = upcast.new_zeros(index.num_dst, *messages.shape[1:])
    out.index_add_(0, index.plain, upcast)
    return out if upcast is messages else out.to(messages.dtype)


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _per_row(numbers: Tensor, like: Tensor) -> Tensor:
    """Reshapes numbers [N] so that they broadcast over rows [N, ...]."""
    return numbers.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


class Sum:
    """`sum_j m_j`."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return segment_sum(messages, index)


class Mean:
    """`sum_j m_j / |N(i)|`."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        sums = segment_sum(messages, index)
        return sums / _per_row(index.degree.clamp(min=1), sums)


class Max:
    """Elementwise maximum of the messages. Equal maxima share the gradient."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return _extreme(messages, index, "amax")


class Min:
    """Elementwise minimum of the messages. Equal minima share the gradient."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return _extreme(messages, index, "amin")


def _extreme(messages: Tensor, index: Index, how: str) -> Tensor:
    # Even with include_self=False, torch gives part of the gradient to an initial value that equals the extremum.
    # NaN never equals it.
    start = messages.new_full((index.num_dst, *messages.shape[1:]), torch.nan)
    out = start.scatter_reduce(0, _rows(index, messages), messages, how, include_self=False)
    nonempty = (index.degree > 0).view(-1, *[1] * (out.dim() - 1))
    return torch.where(nonempty, out, torch.zeros_like(out))


def _rows(index: Index, messages: Tensor) -> Tensor:
    """The destination of each element of the messages, [E, ...]."""
    return index.plain.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)


class Var:
    """Variance of the messages, `mean((m - mean(m))^2)`: never negative, and exactly zero for equal messages."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        apart = messages
        if len(messages):
            # A mean of equal numbers is rounded, and one of equal distances from the first of them is 0.
            first = index.ptr[:-1].clamp(max=len(messages) - 1).index_select(0, index.plain)
            apart = messages - messages.detach().index_select(0, first)
        mean = Mean().reduce(apart, index)
        return Mean().reduce((apart - mean.index_select(0, index.plain)).square(), index)


class Composed:
    """Base class of aggregators that are composed of other aggregators."""

    parts: Sequence[Aggregator]

    def compose(self, results: Sequence[Tensor], degree: Tensor) -> Tensor:
        """Combines the results of the parts, each [N, ...]; `degree` [N] is the number of messages."""
        raise NotImplementedError

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return self.compose([part.reduce(messages, index) for part in self.parts], index.degree)


class Std(Composed):
    """Standard deviation, `sqrt(var)`. For equal messages it is zero, and its gradient is zero, too."""

    parts = (Var(),)

    def compose(self, results: Sequence[Tensor], degree: Tensor) -> Tensor:
        return root(results[0])


def root(x: Tensor) -> Tensor:
    """Returns `sqrt(x)` of x >= 0. All its derivatives are 0 where x is 0, so that equal messages get gradients of 0;
    `torch.sqrt` has an infinite derivative there, which times 0 is NaN."""
    is_zero = x == 0
    return x.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


class Softmax(nn.Module):
    """`sum_j softmax_j(t * m_j) * m_j` per component (Li et al. 2020, GENConv); t -> 0 is the mean, large t the max.

    `temperature` is t; `learn` makes it a parameter.
    """

    def __init__(self, temperature: float = 1.0, learn: bool = False) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(float(temperature)), requires_grad=learn)

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return segment_sum(segment_softmax(messages * self.temperature.to(messages.dtype), index) * messages, index)


class PowerMean(nn.Module):
    """`(mean_j clamp(m_j, eps, limit)^p)^(1/p)` (Li et al. 2020): p = 1 is the mean, large p the max.

    Messages should be positive; `learn` makes p a parameter.
    """

    def __init__(self, p: float = 1.0, learn: bool = False, eps: float = 1e-7, limit: float = 100.0) -> None:
        super().__init__()
        if p == 0:
            raise ValueError("p must not be 0; the limit p -> 0 is the geometric mean")
        self.p = nn.Parameter(torch.tensor(float(p)), requires_grad=learn)
        self.eps = eps
        self.limit = limit

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        p = self.p.to(messages.dtype)
        mean = Mean().reduce(messages.clamp(self.eps, self.limit) ** p, index)
        nonempty = _per_row(index.degree > 0, mean).bool()
        safe = torch.where(nonempty, mean, torch.ones_like(mean))
        return torch.where(nonempty, safe ** (1 / p), torch.zeros_like(mean))


class Quantile:
    """Elementwise quantile q of the messages, NaN where any value is NaN (as `torch.quantile`).

    Of d sorted messages it is the one at (d - 1) q, counted from 0. Between two messages it is interpolated linearly,
    or is the lower one with `lower`. The gradient goes to these messages.
    """

    def __init__(self, q: float, lower: bool = False) -> None:
        if not 0 <= q <= 1:
            raise ValueError(f"q must lie between 0, the minimum, and 1, the maximum; got {q!r}")
        self.q = float(q)
        self.lower = lower

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        out = messages.new_zeros(index.num_dst, *messages.shape[1:]) + 0 * messages[:0].sum(0)
        for nodes, rows in _rows_by_length(index):
            degree = index.degree[nodes]
            place = (degree - 1).double() * self.q
            below = place.floor().long()
            inside = rows >= 0
            padded = messages.index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
            hidden = ~inside.view(*rows.shape, *[1] * (messages.dim() - 1))
            ordered = padded.masked_fill(hidden, torch.inf).sort(1).values  # NaN comes last
            picked = ordered[torch.arange(len(nodes), device=nodes.device), below]
            if not self.lower:
                above = (below + 1).minimum(degree - 1)
                share = _per_row(place - below, picked)
                picked = picked.lerp(ordered[torch.arange(len(nodes), device=nodes.device), above], share)
            nan = (padded.isnan() & ~hidden).any(1)
            out = out.index_copy(0, nodes, picked.masked_fill(nan, torch.nan))
        return out


def _rows_by_length(index: Index) -> list[tuple[Tensor, Tensor]]:
    """The destinations with messages, by length: their numbers [n], and the numbers of their messages [n, length], -1
    after the last. Lengths are powers of 2, so that a row is less than half empty."""
    groups = []
    degree = index.degree
    length = 1
    while bool((degree > length // 2).any()):
        nodes = ((degree > length // 2) & (degree <= length)).nonzero().squeeze(1)
        if len(nodes):
            place = torch.arange(length, device=degree.device)
            rows = index.ptr[nodes, None] + place
            groups.append((nodes, rows.masked_fill(place >= degree[nodes, None], -1)))
        length *= 2
    return groups


class Median(Quantile):
    """Elementwise median, the lower of the two middle values, NaN where any value is NaN (as `torch.median`)."""

    def __init__(self) -> None:
        super().__init__(0.5, lower=True)


class PNA(Composed, nn.Module):
    """Concatenation of several aggregators, each scaled by several functions of the in-degree: [N, ..., A * S * F].

    Scalers (Corso et al. 2020, eq. 5): "identity", "amplification" `log(d + 1) / delta`, "attenuation"
    `delta / log(d + 1)`. `average_log_degree` is delta, the mean of `log(d + 1)` over the training graphs; default:
    the mean over the current graph.
    """

    def __init__(
        self,
        aggregators: Sequence[str | Aggregator] = ("mean", "max", "min", "std"),
        scalers: Sequence[str] = ("identity", "amplification", "attenuation"),
        average_log_degree: float | None = None,
    ) -> None:
        super().__init__()
        known = ("identity", "amplification", "attenuation")
        for name in scalers:
            if name not in known:
                raise ValueError(f"there is no degree scaler {name!r}; there are {', '.join(known)}")
        self.parts = [aggregator(a) for a in aggregators]
        self.learned = nn.ModuleList(a for a in self.parts if isinstance(a, nn.Module))
        if average_log_degree is not None and average_log_degree <= 0:
            raise ValueError(f"average_log_degree must be positive; got {average_log_degree}")
        self.scalers = tuple(scalers)
        self.average_log_degree = average_log_degree

    def compose(self, results: Sequence[Tensor], degree: Tensor) -> Tensor:
        side_by_side = torch.cat(list(results), -1)
        log_degree = (degree + 1).to(side_by_side.dtype).log()
        mean = log_degree.mean()  # zero without edges, NaN without nodes
        average = self.average_log_degree
        delta = torch.where(mean > 0, mean, torch.ones_like(mean)) if average is None else average
        factors = {
            "identity": torch.ones_like(log_degree),
            "amplification": log_degree / delta,
            "attenuation": delta / log_degree.clamp(min=0.6931471805599453),
        }
        return torch.cat([side_by_side * _per_row(factors[name], side_by_side) for name in self.scalers], -1)


class Function(nn.Module):
    """Wraps a plain function or a module as an aggregator."""

    def __init__(self, function: Callable[[Tensor, Index], Tensor]) -> None:
        super().__init__()
        self.function = function

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return self.function(messages, index)


class PerNode(nn.Module):
    """Wraps an aggregator to call it with messages [E, D] of one batch entry and one head at a time."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        if messages.dim() == 2:
            return self.inner.reduce(messages, index)
        slices = messages.flatten(1, -2).unbind(1)
        if not slices:  # an empty batch
            out = self.inner.reduce(messages.new_zeros(len(messages), messages.shape[-1]), index)
            return out.new_zeros(len(out), *messages.shape[1:-1], out.shape[-1])
        out = torch.stack([self.inner.reduce(x, index) for x in slices], 1)
        return out.view(len(out), *messages.shape[1:-1], out.shape[-1])


def per_node(aggregate: Aggregator | Callable[[Tensor, Index], Tensor]) -> Aggregator:
    """Calls an aggregator with messages [E, D] of one batch entry and one head at a time; `out` is [N, D'].

    Use it for aggregators that compare whole messages, such as a selection of the longest ones. The result for a batch
    then equals a loop over its entries. Can be used as a decorator.

    ::

        @per_node
        def longest(messages, index):  # [E, D] -> [N, D]
            ...
    """
    return PerNode(aggregator(aggregate))


Name = Literal["sum", "mean", "max", "min", "var", "std", "softmax", "powermean", "median", "pna"]
"""The names of the library's own aggregators."""

SUM: Aggregator = Sum()


def plain_sum() -> Aggregator:
    """Returns the sum, one object for all rounds. A traced program makes one of its own: to `torch.compile` an object
    of a module that is also a global is only the global, and it would not notice that the module has another one now.
    """
    return Sum() if torch.compiler.is_compiling() else SUM


NAMED: dict[str, Callable[[], Aggregator]] = {
    "sum": lambda: SUM,
    "mean": Mean,
    "max": Max,
    "min": Min,
    "var": Var,
    "std": Std,
    "softmax": Softmax,
    "powermean": PowerMean,
    "median": Median,
    "pna": PNA,
}


def aggregator(spec: str | Aggregator | Callable[[Tensor, Index], Tensor]) -> Any:
    """Returns the aggregator with this name, or the user's own object or function as an aggregator.

    Raises:
        ValueError: if no aggregator has this name (the message lists the names), or if `combine(identity, m)` is not m.
        TypeError: if `spec` is neither a name, nor an object with `reduce`, nor a function of (messages, index), or if
            its `parts` are not aggregators.
    """
    if isinstance(spec, str):
        if spec not in NAMED:
            raise ValueError(f"{unknown('aggregator', spec, NAMED)}, or pass your own")
        return NAMED[spec]()
    if isinstance(spec, type):
        raise TypeError(f"an aggregator is an object, but {spec.__name__} is a class; pass {spec.__name__}()")
    if hasattr(spec, "reduce") and not isinstance(spec, Tensor):
        _check(spec)
        return spec
    if callable(spec):
        _check_function("an aggregator", spec)
        return Function(spec)
    raise TypeError(
        f"an aggregator is a name ({', '.join(NAMED)}), an object with reduce(messages, index), or a function of "
        f"(messages, index); got {spec!r}"
    )


def _check(obj: Any) -> None:
    """Raises ValueError or TypeError if the members of an aggregator are invalid; checks each `combine` only once."""
    name = type(obj).__name__
    if any(kind.__module__.startswith("torch_geometric") for kind in type(obj).__mro__):
        raise TypeError(
            f"an aggregator has reduce(messages, index), but {name} is a class of torch_geometric with another reduce; "
            "pass one of mpnn.aggregate, or a function: lambda messages, index: "
            "aggregation(messages, index.plain, dim_size=index.num_dst, dim=0)"
        )
    _check_function(f"reduce of {name}", obj.reduce)
    if isinstance(obj, Composed):
        for part in _parts_of(obj):
            _check(part)
    combine, identity = getattr(obj, "combine", None), getattr(obj, "identity", None)
    if callable(combine) and identity is not None:
        _check_identity(name, combine, identity)


def _parts_of(composed: Composed) -> Sequence[Any]:
    name = type(composed).__name__
    parts = getattr(composed, "parts", None)
    if not isinstance(parts, (tuple, list)):
        raise TypeError(f"parts of {name} must be a tuple of aggregators, such as (Max(), Min()); got {parts!r}")
    for part in parts:
        if isinstance(part, type) or not hasattr(part, "reduce"):
            hint = f"use aggregator({part!r})" if isinstance(part, str) else "use an object such as Max()"
            raise TypeError(f"parts of {name} must be aggregators; got {part!r}: {hint}")
    return parts


_NUMBERS = (0.0, 1.0, -2.5, float("inf"), float("-inf"))


@lru_cache(maxsize=256)
def _check_identity(name: str, combine: Callable[[float, float], float], identity: Any) -> None:
    """Raises ValueError with the number unless `combine(identity, m)` and `combine(m, identity)` are m."""
    if not hasattr(identity, "__float__"):
        raise TypeError(f"identity of {name} must be a number; got {identity!r}")
    for m in _NUMBERS:
        for pair in ((float(identity), m), (m, float(identity))):
            try:
                out = combine(*pair)
                same = isclose(out, m, rel_tol=1e-3, abs_tol=1e-6)
            except (TypeError, ValueError, ArithmeticError):
                continue  # Python cannot run it: numba compiles it or reports why not
            if not same:
                raise ValueError(
                    f"combine(identity, m) of {name} must be m, with identity {identity}, but combine{pair} is {out}; "
                    "let combine return the other number where one is the identity"
                )


def _check_function(name: str, function: Any) -> None:
    """Raises TypeError unless the function takes (messages, index). Torch's functions, such as `torch.sum`, would
    interpret the index as a dimension."""
    builtin = isinstance(function, (BuiltinFunctionType, MethodDescriptorType))
    if not builtin and not str(getattr(function, "__module__", "")).startswith("torch."):
        try:
            signature(function.forward if isinstance(function, nn.Module) else function).bind(None, None)
        except TypeError:
            pass
        except ValueError:  # a function without a signature
            return
        else:
            return
    raise TypeError(
        f"{name} must be a function of (messages, index), which reduces the messages of each destination; got "
        f"{getattr(function, '__name__', function)!r}: pass a name such as 'sum', or your own function"
    )


def segment_logsumexp(scores: Tensor, index: Index) -> Tensor:
    """Returns the logarithm of the sum of exp(s) over the edges of each destination, over dim 0: [num_dst, ...], -inf
    without edges; computed in at least float32."""
    _, sums, row_max = _exponentials(scores, index)
    some = sums > 0
    return torch.where(some, row_max + torch.where(some, sums, torch.ones_like(sums)).log(), -torch.inf)


def segment_softmax(scores: Tensor, index: Index) -> Tensor:
    """Returns `exp(s_e) / sum of exp(s) over the edges of the same destination`, over dim 0; computed in at least
    float32."""
    exp, sums, _ = _exponentials(scores, index)
    sums = sums.masked_fill(sums == 0, 1.0)
    return (exp / sums.index_select(0, index.plain)).to(scores.dtype)


def segment_sparsemax(scores: Tensor, index: Index) -> Tensor:
    """Returns the projection of the scores of each destination on the simplex, over dim 0 (Martins and Astudillo 2016,
    arXiv:1602.02068): `max(s_e - t, 0)`, where t makes the sum 1."""
    wide = _upcast(scores)
    inside = _support(wide, index, _sparsemax_support)
    count = segment_sum(inside.to(wide.dtype), index).clamp(min=1.0)
    kept = wide.masked_fill(~inside, 0.0)
    threshold = (segment_sum(kept, index) - 1.0) / count
    return (kept - threshold.index_select(0, index.plain)).masked_fill(~inside, 0.0).to(scores.dtype)


def segment_entmax15(scores: Tensor, index: Index) -> Tensor:
    """Returns the 1.5-entmax of the scores of each destination, over dim 0 (Peters et al. 2019, arXiv:1905.05702):
    `max(s_e / 2 - t, 0)^2`, where t makes the sum 1. Between softmax and sparsemax."""
    wide = _upcast(scores) / 2
    inside = _support(wide, index, _entmax_support)
    count = segment_sum(inside.to(wide.dtype), index).clamp(min=1.0)
    kept = wide.masked_fill(~inside, 0.0)
    mean = segment_sum(kept, index) / count
    centered = (kept - mean.index_select(0, index.plain)).masked_fill(~inside, 0.0)
    spread = segment_sum(centered.square(), index)
    below = ((1.0 - spread) / count).clamp(min=torch.finfo(wide.dtype).tiny).sqrt()
    return (centered + below.index_select(0, index.plain)).masked_fill(~inside, 0.0).square().to(scores.dtype)


@torch.no_grad()
def _support(scores: Tensor, index: Index, of_sorted: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Which edges have a weight above 0. `of_sorted(z, k)`: whether the k-th of the sorted scores z has."""
    inside = torch.zeros_like(scores, dtype=torch.bool)
    for _, rows in _rows_by_length(index):
        padded = scores.index_select(0, rows.clamp(min=0).flatten()).unflatten(0, rows.shape)
        shape = *rows.shape, *[1] * (scores.dim() - 1)
        padded = padded.masked_fill((rows < 0).view(shape), -torch.inf)
        ordered, order = padded.sort(1, descending=True)
        shifted = ordered - ordered[:, :1]  # the result does not depend on what all have in common
        k = torch.arange(1, rows.shape[1] + 1, dtype=scores.dtype, device=scores.device)
        k = k.view(1, -1, *[1] * (scores.dim() - 1))
        support = of_sorted(shifted.masked_fill(shifted.isinf(), torch.finfo(scores.dtype).min / 1e6), k)
        support = torch.zeros_like(support).scatter(1, order, support & ordered.isfinite())
        inside[rows[rows >= 0]] = support[rows >= 0]
    return inside


def _sparsemax_support(z: Tensor, k: Tensor) -> Tensor:
    return 1 + k * z > z.cumsum(1)


def _entmax_support(z: Tensor, k: Tensor) -> Tensor:
    near = z.clamp(min=-2.0)  # farther ones are outside, and their squares would overflow
    mean = near.cumsum(1) / k
    squares = near.square().cumsum(1) / k
    threshold = mean - ((1 - k * (squares - mean.square())) / k).clamp(min=0.0).sqrt()
    # A prefix of the sorted scores: from the first one on that is outside, all are.
    return ((near >= threshold) & (z > -2.0)).to(torch.int8).cummin(1).values.bool()


def _exponentials(scores: Tensor, index: Index) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s - row maximum) of each edge; their sums, and the row maxima without gradient, of each destination."""
    upcast = _upcast(scores)
    row_max = upcast.new_zeros(index.num_dst, *scores.shape[1:])
    row_max.scatter_reduce_(0, _rows(index, upcast), upcast.detach(), "amax", include_self=False)
    row_max.masked_fill_(row_max.isinf(), 0.0)  # a row that contains only -inf gets weight zero
    exp = (upcast - row_max.index_select(0, index.plain)).exp()
    return exp, segment_sum(exp, index), row_max
