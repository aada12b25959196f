"""What a call returns, and how far two results may be apart."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from changes import mapped
from error_bound import error_bound
from things import Thing, dtype_of
from torch import Tensor, nn
from torch.nn.modules import module as hooks

import mpnn

Results = dict[str, Any]


def outcome(thing: Thing, module: Any, mode: Any) -> Results | Exception:
    """The outputs of a call, whether they need gradients, and the gradients; or the error that it raises."""
    torch.random.default_generator.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _outcome(thing, module, mode)
        except Exception as error:
            return error


def _outcome(thing: Thing, module: Any, mode: Any) -> Results:
    with mode():
        inputs = [_as_input(x, dtype_of(module)) for x in thing.inputs]
        out = thing.call(module, *inputs)
        outputs = out if isinstance(out, dict) else {"output": out}
        results: Results = {name: x.detach().clone() for name, x in outputs.items()}
    needs = {name: x for name, x in outputs.items() if x.requires_grad}
    results |= {f"{name} needs gradients": name in needs for name in outputs}
    if needs:
        leaves = {f"input {k}": x for k, x in enumerate(inputs) if x.is_floating_point()} | _leaves(module)
        results |= _gradients(needs, leaves)
    return results


def _as_input(x: Tensor, dtype: torch.dtype) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    return x.to(dtype, copy=True).requires_grad_(torch.is_grad_enabled())


def _gradients(outputs: dict[str, Tensor], leaves: dict[str, Tensor]) -> Results:
    """The gradient of each leaf by `backward`, which calls all hooks."""
    for leaf in leaves.values():
        leaf.grad = None
    torch.autograd.backward([(x.float() * _slope(x)).sum() for x in outputs.values()])
    found = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return {
        f"gradient of {name}": torch.zeros_like(leaves[name]) if x is None else x.clone() for name, x in found.items()
    }


def _slope(x: Tensor) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.float32).cos().view(x.shape)


def _leaves(module: nn.Module) -> dict[str, Tensor]:
    """Each tensor that a gradient may reach, parameter or not."""
    found = {}
    for path, owner in module.named_modules():
        for name, x in (*owner._parameters.items(), *owner._buffers.items(), *vars(owner).items()):
            if isinstance(x, Tensor) and x.requires_grad and x.is_leaf:
                found[f"{path}.{name}"] = x
    return found


def must_equal(
    found: Results | Exception,
    expected: Results,
    name: str,
    thing: Thing,
    dtype: torch.dtype,
    rounded: Callable[[], Iterable[Results]],
) -> None:
    """Raises AssertionError unless the results are those expected, up to roundings.

    Where they are further apart than the roundings of sums explain, what computes may amplify roundings, and by how
    much depends on its weights. This is then measured: `rounded` returns what is expected, with roundings added.
    """
    if isinstance(found, Exception):
        assert is_refusal(found), f"{name} computes, and what was called before raises {found!r}"
        return
    assert found.keys() == expected.keys(), f"{name} has other results: {found.keys() ^ expected.keys()}"
    far: dict[str, float] = {}
    for key, x in found.items():
        y = expected[key]
        if isinstance(y, Tensor) and isinstance(x, Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{name}, {key}: {x.dtype}, {x.shape}"
            far[key] = _distance(key, x, y, thing, _scale(key, expected), dtype)
        else:
            assert x is y or x == y, f"{name}, {key}: {x}, and not {y}"
    if max(far.values(), default=0) <= 1:
        return
    explained = {_kind(key): 1.0 for key in far}
    for other in rounded():
        for key in far:
            distance = _distance(key, other[key], expected[key], thing, _scale(key, expected), dtype)
            explained[_kind(key)] = max(explained[_kind(key)], DEVIATIONS * distance)
    for key, distance in far.items():
        most = explained[_kind(key)]
        assert distance <= most, f"{name}, {key}: {distance:.3g} bounds, and roundings explain {most:.3g}"
        if distance > EFFECT:
            raise Amplified(f"{name}, {key}: {distance:.3g} bounds, which roundings explain, and which hide a change")


class Amplified(AssertionError):
    """What computes amplifies roundings so much that results by other code say nothing."""


DEVIATIONS = 5.0
"""A draw is off by a standard deviation of roundings, and correct results by no more than five, as in `error_bound`."""
EFFECT = 20.0
"""How many times further than roundings a change must move a result to have an effect."""


@contextmanager
def roundings(width: int, dtype: torch.dtype, seed: int) -> Iterator[None]:
    """Adds a rounding error to each output of each module, as the sum of `width` numbers has one.

    This is Monte Carlo arithmetic (Parker 1997): the results of several draws are as far apart as the roundings of
    correct implementations put them. Errors are independent, so that of a sum grows as the square root of its length.
    """
    random = torch.Generator().manual_seed(seed)

    def round_again(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        unit = max(torch.finfo(dtype).eps, torch.finfo(x.dtype).eps) / 2
        noise = torch.randn(x.shape, generator=random, dtype=torch.float32)
        return (x * (1 + unit * math.sqrt(width) * noise)).to(x.dtype)

    handle = hooks.register_module_forward_hook(lambda module, args, out: mapped(round_again, out))
    try:
        yield
    finally:
        handle.remove()


def difference(found: Results, other: Results, thing: Thing) -> float:
    """The largest difference of two results, relative to what roundings explain."""
    if found.keys() != other.keys():
        return float("inf")
    largest = 0.0
    for key, x in found.items():
        y = other[key]
        if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
            largest = largest if x is y or x == y else float("inf")
        elif (x.dtype, x.shape) != (y.dtype, y.shape):
            return float("inf")
        else:
            largest = max(largest, _distance(key, x, y, thing, _scale(key, found)))
    return largest


def _kind(key: str) -> str:
    """The results that are of one size: all gradients."""
    return "gradient of" if key.startswith("gradient of") else key


def _scale(key: str, results: Results) -> float:
    """The size of the numbers that were rounded: a gradient is a sum of gradients that may cancel."""
    tensors = [x for name, x in results.items() if _kind(name) == _kind(key) and isinstance(x, Tensor) and x.numel()]
    return max([1.0, *(float(x.double().nan_to_num(0, 0, 0).abs().max()) for x in tensors)])


def _distance(key: str, x: Tensor, y: Tensor, thing: Thing, scale: float, dtype: torch.dtype = torch.float32) -> float:
    """The largest difference, relative to what roundings explain."""
    if not x.numel():
        return 0.0
    if not x.is_floating_point():
        return 0.0 if x.equal(y) else float("inf")
    finite = y.isfinite()
    if not finite.equal(x.isfinite()):
        return float("inf")
    coarsest = max((dtype, x.dtype), key=lambda dtype: torch.finfo(dtype).eps)  # of double, tables may be float32
    is_gradient = key.startswith("gradient")
    bound = error_bound(thing.depth * (3 if is_gradient else 1), thing.width, coarsest, scale)
    return float(torch.where(finite, x - y, 0).double().abs().max() / bound)


def is_refusal(error: Exception) -> bool:
    """Whether an error is a sentence of this library about what it does not support."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    is_ours = frame is not None and frame.tb_frame.f_code.co_filename.startswith(os.path.dirname(mpnn.__file__))
    return is_ours and isinstance(error, (ValueError, TypeError)) and len(str(error).split()) >= 5
