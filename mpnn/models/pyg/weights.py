"""What turning a convolution into an operator takes: its options checked, its weights under our names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

AGGREGATES = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min", "var": "var"}
"""Aggregators that are the same as ours, by the names that PyTorch Geometric gives them."""


def check_options(conv: Any, **supported: Any) -> None:
    """Refuses a convolution whose option has another value than the one supported."""
    for name, value in {"flow": "source_to_target", **supported}.items():
        given = getattr(conv, name, value)
        if given != value:
            raise ValueError(f"from_pyg does not support {type(conv).__name__} with {name} = {given!r}, only {value!r}")


def aggregate_of(conv: Any) -> str:
    """The name that we have for a convolution's aggregator."""
    if not isinstance(conv.aggr, str) or conv.aggr not in AGGREGATES:
        raise ValueError(
            f"from_pyg does not support {type(conv).__name__} with aggr = {conv.aggr!r}, only {', '.join(AGGREGATES)}"
        )
    if getattr(conv.aggr_module, "semi_grad", False):
        raise ValueError(
            f"from_pyg does not support {type(conv).__name__} with aggr_kwargs semi_grad = True, only False"
        )
    return AGGREGATES[conv.aggr]


def widths(conv: Any) -> tuple[int, int]:
    """Widths of the sources' and of the destinations' features."""
    given = conv.in_channels
    found = (given, given) if isinstance(given, int) else tuple(given)
    if min(found) < 1:
        raise ValueError(
            f"from_pyg needs a {type(conv).__name__} that knows its in_channels, and not {given!r}: call it once before"
        )
    return found


def with_weights(build: Callable[[], M], weights: dict[str, Tensor | None]) -> M:
    """What `build` makes, with copies of these weights under their names (None: there is no such weight).

    Built on the meta device, so that no weights are drawn only to be thrown away; modules that `build` copies from the
    convolution keep the weights they have.
    """
    with torch.device("meta"):
        module = build()
    own = module.state_dict(keep_vars=True)
    copied = {name: given for name, given in own.items() if not given.is_meta}
    for name, weight in weights.items():
        if weight is not None:
            shaped = weight.detach().clone().reshape(own[name].shape)
            copied[name] = nn.Parameter(shaped, weight.requires_grad)
    learned = {name: weight.requires_grad for name, weight in copied.items()}  # loading makes them what build made
    module.load_state_dict(copied, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(learned[name])
    return module


def linear(ours: str, theirs: nn.Module | None) -> dict[str, Tensor | None]:
    """The weights of a linear map of theirs, or of none, as those of one of ours."""
    if theirs is None:
        return {}
    return {f"{ours}.weight": theirs.weight, f"{ours}.bias": theirs.bias}  # type: ignore[dict-item]
