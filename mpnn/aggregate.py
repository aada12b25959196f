"""Aggregators: how the messages that reach a destination become one.

An aggregator is any object with `reduce(messages, index) -> out`, or a plain function of the same two:
`messages` [E, batch..., H, D] sorted by destination, `index` an int64 tensor [E], the destination of each message,
which also knows `index.ptr` [N + 1] (destination i has the messages `ptr[i]:ptr[i+1]`), `index.num_dst` and
`index.degree` [N]; `out` [N, batch..., H, D]. Destinations without messages get zeros.

The dimensions of the batch and the heads (H = 1 without attention) stand between the edges and the features. An
aggregator that treats every number alone (a sum, a median) need not care. One that compares whole messages with one
another (by their length, by a score) must not compare those of different sentences or heads: `per_node(aggregator)`
calls it with messages [E, D] of one sentence and one head at a time.

Three more ways to say the same let fused kernels run it, without a tensor of E messages:

- an associative and commutative aggregator may give `combine(a, b)`, a function of two numbers (no method: a
  staticmethod) that numba compiles, and `identity`, the number that changes nothing;
- for a backward pass, also `gradient(message, out)`, the derivative of a destination's result by one of its messages;
- one that is made of others, a subclass of `Composed`, says which in `parts`, and puts their results together in
  `compose`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from inspect import signature
from math import isclose
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Index(Tensor):
    """The destination of each message, ascending, int64 [E]: an ordinary tensor that also knows the rows it marks."""

    ptr: Tensor
    plain: Tensor
    num_dst: int
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def of(dst: Tensor, ptr: Tensor) -> Index:
        index = dst.as_subclass(Index)
        index.ptr, index.plain, index.num_dst = ptr, dst, len(ptr) - 1
        return index

    @property
    def degree(self) -> Tensor:
        """How many messages each destination has, int64 [N]."""
        return self.ptr.diff()


@runtime_checkable
class Aggregator(Protocol):
    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        """Messages [E, batch..., H, D] -> [N, batch..., H, D]."""
        ...


def total(messages: Tensor, index: Index) -> Tensor:
    """Sums of the messages at each destination, in float32 at least: [E, ...] -> [N, ...]."""
    wide = messages.float() if messages.dtype in (torch.float16, torch.bfloat16) else messages
    out = wide.new_zeros(index.num_dst, *messages.shape[1:])
    out.index_add_(0, index.plain, wide)
    return out if wide is messages else out.to(messages.dtype)


def _per_row(numbers: Tensor, like: Tensor) -> Tensor:
    """[N] numbers shaped to multiply [N, ...] rows."""
    return numbers.to(like.dtype).view(-1, *[1] * (like.dim() - 1))


class Sum:
    """`sum_j m_j`."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return total(messages, index)


class Mean:
    """`sum_j m_j / |N(i)|`."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        sums = total(messages, index)
        return sums / _per_row(index.degree.clamp(min=1), sums)


class Max:
    """The largest of each component; equal ones share its gradient."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return _extreme(messages, index, "amax")


class Min:
    """The smallest of each component; equal ones share its gradient."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return _extreme(messages, index, "amin")


def _extreme(messages: Tensor, index: Index, how: str) -> Tensor:
    # Even without include_self, torch gives a start that equals the extreme a share of its gradient; NaN never does.
    start = messages.new_full((index.num_dst, *messages.shape[1:]), torch.nan)
    out = start.scatter_reduce(0, _rows(index, messages), messages, how, include_self=False)
    some = (index.degree > 0).view(-1, *[1] * (out.dim() - 1))
    return torch.where(some, out, torch.zeros_like(out))


def _rows(index: Index, messages: Tensor) -> Tensor:
    """The destination of every number of the messages, [E, ...]."""
    return index.plain.view(-1, *[1] * (messages.dim() - 1)).expand_as(messages)


class Var:
    """Variance over the messages, `mean(m^2) - mean(m)^2` written so that it never falls below zero."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        mean = Mean().reduce(messages, index)
        return Mean().reduce((messages - mean.index_select(0, index.plain)).square(), index)


class Composed:
    """Base of aggregators that are made of others."""

    parts: Sequence[Aggregator]

    def compose(self, found: Sequence[Tensor], degree: Tensor) -> Tensor:
        """What the results of the parts, each [N, ...], amount to; `degree` [N] is the number of messages."""
        raise NotImplementedError

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return self.compose([part.reduce(messages, index) for part in self.parts], index.degree)


class Std(Composed):
    """Standard deviation, `sqrt(var + eps) - sqrt(eps)`: zero for equal messages, with a finite gradient there."""

    parts = (Var(),)

    def __init__(self, eps: float = 1e-5) -> None:
        self.eps = eps

    def compose(self, found: Sequence[Tensor], degree: Tensor) -> Tensor:
        return (found[0] + self.eps).sqrt() - self.eps**0.5


class Softmax(nn.Module):
    """`sum_j softmax_j(t * m_j) * m_j` per component (Li et al. 2020, GENConv); t -> 0 is the mean, large t the max.

    `temperature` is t; `learn` makes it a parameter.
    """

    def __init__(self, temperature: float = 1.0, learn: bool = False) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(float(temperature)), requires_grad=learn)

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return total(segment_softmax(messages * self.temperature.to(messages.dtype), index) * messages, index)


class PowerMean(nn.Module):
    """`(mean_j clamp(m_j, eps, limit)^p)^(1/p)` (Li et al. 2020): p = 1 the mean, large p the max. Messages should be
    positive; `learn` makes p a parameter."""

    def __init__(self, p: float = 1.0, learn: bool = False, eps: float = 1e-7, limit: float = 100.0) -> None:
        super().__init__()
        if p == 0:
            raise ValueError("p must not be 0; the limit p -> 0 is the geometric mean")
        self.p = nn.Parameter(torch.tensor(float(p)), requires_grad=learn)
        self.eps, self.limit = eps, limit

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        p = self.p.to(messages.dtype)
        mean = Mean().reduce(messages.clamp(self.eps, self.limit) ** p, index)
        some = _per_row(index.degree > 0, mean).bool()
        return torch.where(some, torch.where(some, mean, torch.ones_like(mean)) ** (1 / p), torch.zeros_like(mean))


class Median:
    """The median of each component, the lower one of two middle messages, NaN where any is NaN (as `torch.median`)."""

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        out = messages.new_zeros(index.num_dst, *messages.shape[1:])
        some = index.degree > 0
        if not bool(some.any()):
            return out + 0 * messages.sum(0)
        by_value = messages.detach().argsort(dim=0, stable=True)
        by_row = index.plain[by_value].argsort(dim=0, stable=True)
        order = by_value.gather(0, by_row)
        middle = (index.ptr[:-1] + (index.degree - 1) // 2)[some]
        out = out.index_put((some.nonzero().squeeze(1),), messages.gather(0, order[middle]))
        nan = total(messages.isnan().to(out.dtype), index) > 0
        return out.masked_fill(nan, torch.nan)


class PNA(Composed, nn.Module):
    """Several aggregators, each scaled by several functions of the degree, side by side: [N, ..., A * S * F].

    Scalers (Corso et al. 2020, eq. 5): "identity", "amplification" `log(d + 1) / delta`, "attenuation"
    `delta / log(d + 1)`. `average_log_degree` is delta, the mean of `log(d + 1)` over the training graphs; default:
    over the graph at hand.
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

    def compose(self, found: Sequence[Tensor], degree: Tensor) -> Tensor:
        side_by_side = torch.cat(list(found), -1)
        log_degree = (degree + 1).to(side_by_side.dtype).log()
        mean = log_degree.mean()  # zero without edges, NaN without nodes
        given = self.average_log_degree
        delta = torch.where(mean > 0, mean, torch.ones_like(mean)) if given is None else given
        factors = {
            "identity": torch.ones_like(log_degree),
            "amplification": log_degree / delta,
            "attenuation": delta / log_degree.clamp(min=0.6931471805599453),
        }
        return torch.cat([side_by_side * _per_row(factors[name], side_by_side) for name in self.scalers], -1)


class Diffusion:
    """Multi-hop attention: the same weights A spread the values over several hops (MAGNA, Wang et al. 2021, eq. 5-7).

    Z_0 = V,   Z_{k+1} = (1 - alpha) A Z_k + alpha V,   out = Z_hops
    """

    def __init__(self, hops: int, alpha: float) -> None:
        if hops < 1:
            raise ValueError(f"hops must be at least 1; got {hops}")
        if not 0.0 < alpha <= 1.0:
            raise ValueError(f"alpha must lie in (0, 1]; got {alpha}")
        self.hops, self.alpha = hops, alpha

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        raise TypeError("Diffusion needs whole graphs, not messages; give it to MessagePassing as the aggregate")


class _Function(nn.Module):
    """A plain function, or a module called like one, as an aggregator."""

    def __init__(self, function: Callable[[Tensor, Index], Tensor]) -> None:
        super().__init__()
        self.function = function

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return self.function(messages, index)


class _PerNode(nn.Module):
    """An aggregator that sees messages [E, D] of one entry of the batch and one head at a time."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        if messages.dim() == 2:
            return self.inner.reduce(messages, index)
        apart = messages.flatten(1, -2).unbind(1)
        if not apart:  # an empty batch
            out = self.inner.reduce(messages.new_zeros(len(messages), messages.shape[-1]), index)
            return out.new_zeros(len(out), *messages.shape[1:-1], out.shape[-1])
        out = torch.stack([self.inner.reduce(x, index) for x in apart], 1)
        return out.view(len(out), *messages.shape[1:-1], out.shape[-1])


def per_node(given: Aggregator | Callable[[Tensor, Index], Tensor]) -> Aggregator:
    """The aggregator, called with messages [E, D] of one entry of the batch and one head at a time; `out` is [N, D'].

    For aggregators that compare whole messages with one another, such as a choice of the largest ones: over a batch
    they give what a loop over its entries gives. May decorate a function.

    ::

        @per_node
        def longest(messages, index):  # [E, D] -> [N, D]
            ...
    """
    return _PerNode(aggregator(given))


SUM: Aggregator = Sum()
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


def aggregator(given: str | Aggregator | Callable[[Tensor, Index], Tensor]) -> Any:
    """The aggregator of that name, or the user's own object or function.

    Raises:
        ValueError: no aggregator has this name; the sentence lists those that there are. Or its `combine` changes a
            number that it combines with `identity`.
        TypeError: neither a name, nor an object with `reduce`, nor a function of (messages, index). Or `parts` that are
            no aggregators.
    """
    if isinstance(given, str):
        if given not in NAMED:
            raise ValueError(f"there is no aggregator {given!r}; there are {', '.join(NAMED)}, or pass your own")
        return NAMED[given]()
    if isinstance(given, type):
        raise TypeError(f"an aggregator is an object, and {given.__name__} is a class; give {given.__name__}()")
    if hasattr(given, "reduce") and not isinstance(given, Tensor):
        _check(given)
        return given
    if callable(given):
        _check_function("an aggregator", given)
        return _Function(given)
    raise TypeError(
        f"an aggregator is a name ({', '.join(NAMED)}), an object with reduce(messages, index), or a function of "
        f"(messages, index); got {given!r}"
    )


def _check(given: Any) -> None:
    """Raises ValueError or TypeError unless what an aggregator states of itself holds; asked once per `combine`."""
    name = type(given).__name__
    if any(kind.__module__.startswith("torch_geometric") for kind in type(given).__mro__):
        raise TypeError(
            f"an aggregator has reduce(messages, index), and {name} is torch_geometric's, whose reduce is another; "
            "give one of mpnn.aggregate, or a function: lambda messages, index: "
            "aggregation(messages, index.plain, dim_size=index.num_dst, dim=0)"
        )
    _check_function(f"reduce of {name}", given.reduce)
    if isinstance(given, Composed):
        for part in _parts_of(given):
            _check(part)
    combine, identity = getattr(given, "combine", None), getattr(given, "identity", None)
    if callable(combine) and identity is not None:
        _check_identity(name, combine, identity)


def _parts_of(given: Composed) -> Sequence[Any]:
    name, parts = type(given).__name__, getattr(given, "parts", None)
    if not isinstance(parts, (tuple, list)):
        raise TypeError(f"parts of {name} must be a tuple of aggregators, such as (Max(), Min()); got {parts!r}")
    for part in parts:
        if isinstance(part, type) or not hasattr(part, "reduce"):
            made = f"aggregator({part!r}) makes one" if isinstance(part, str) else "such as Max()"
            raise TypeError(f"parts of {name} must be aggregators; got {part!r}: {made}")
    return parts


_NUMBERS = (0.0, 1.0, -2.5, float("inf"), float("-inf"))


@lru_cache(maxsize=256)
def _check_identity(name: str, combine: Callable[[float, float], float], identity: Any) -> None:
    """Raises ValueError, naming the number, unless `combine(identity, m)` and `combine(m, identity)` are m."""
    if not hasattr(identity, "__float__"):
        raise TypeError(f"identity of {name} must be a number; got {identity!r}")
    for m in _NUMBERS:
        for pair in ((float(identity), m), (m, float(identity))):
            try:
                out = combine(*pair)
                same = isclose(out, m, rel_tol=1e-3, abs_tol=1e-6)
            except (TypeError, ValueError, ArithmeticError):
                continue  # not Python's to compute: numba compiles it, or says why not
            if not same:
                raise ValueError(
                    f"combine(identity, m) of {name} must be m, with identity {identity}, but combine{pair} is {out}; "
                    "let combine return the other number where one is the identity"
                )


def _check_function(name: str, function: Any) -> None:
    """Raises TypeError unless a function takes messages and their index. Torch's own, such as `torch.sum`, would take
    the index for a dimension."""
    own = isinstance(function, (BuiltinFunctionType, MethodDescriptorType))
    if not own and not str(getattr(function, "__module__", "")).startswith("torch."):
        try:
            signature(function.forward if isinstance(function, nn.Module) else function).bind(None, None)
        except TypeError:
            pass
        except ValueError:  # a function that does not say what it takes
            return
        else:
            return
    raise TypeError(
        f"{name} must be a function of (messages, index), which reduces the messages of each destination; got "
        f"{getattr(function, '__name__', function)!r}: give a name such as 'sum', or a function of your own"
    )


def segment_softmax(scores: Tensor, index: Index) -> Tensor:
    """`exp(s_e) / sum of exp(s) over the edges of the same destination`, over dim 0; float32 inside at least."""
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    highest = wide.new_zeros(index.num_dst, *wide.shape[1:])
    highest.scatter_reduce_(0, _rows(index, wide), wide.detach(), "amax", include_self=False)
    highest.masked_fill_(highest.isinf(), 0.0)  # a row of -inf alone weighs nothing
    exp = (wide - highest.index_select(0, index.plain)).exp()
    sums = total(exp, index)
    sums = sums.masked_fill(sums == 0, 1.0)
    return (exp / sums.index_select(0, index.plain)).to(scores.dtype)
