"""Helpers of the conversions: checks of options, names of aggregators, and transfer of weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

AGGREGATES = {"add": "sum", "sum": "sum", "mean": "mean", "max": "max", "min": "min", "var": "var"}
"""Names of aggregators in PyTorch Geometric -> names in mpnn."""


def check_options(conv: Any, **supported: Any) -> None:
    """Raises ValueError if an option of a convolution differs from the supported value."""
    for name, value in {"flow": "source_to_target", **supported}.items():
        option = getattr(conv, name, value)
        if option != value:
            raise ValueError(
                f"from_pyg does not support {type(conv).__name__} with {name} = {option!r}, only {value!r}"
            )


def aggregate_of(conv: Any) -> str:
    """The mpnn name of a convolution's aggregator."""
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
    """Widths of the sources' and the destinations' features."""
    channels = conv.in_channels
    pair = (channels, channels) if isinstance(channels, int) else tuple(channels)
    if min(pair) < 1:
        raise ValueError(
            f"from_pyg needs a {type(conv).__name__} with known in_channels; got {channels!r}. Call the convolution "
            "once to initialize them"
        )
    return pair


def with_weights(build: Callable[[], M], weights: dict[str, Tensor | None]) -> M:
    """Calls `build` and sets the named weights of the result to copies of `weights`. Weights that are None are skipped.

    `build` runs on the meta device, to avoid random initialization of weights that are replaced. Modules that `build`
    copies from the convolution keep their weights.
    """
    with torch.device("meta"):
        module = build()
    built = module.state_dict(keep_vars=True)
    state = {name: tensor for name, tensor in built.items() if not tensor.is_meta}
    for name, weight in weights.items():
        if weight is not None:
            copy = weight.detach().clone().reshape(built[name].shape)
            state[name] = nn.Parameter(copy, weight.requires_grad)
    requires_grad = {name: weight.requires_grad for name, weight in state.items()}
    module.load_state_dict(state, assign=True)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(requires_grad[name])  # load_state_dict keeps that of the built parameters
    return module


def linear(name: str, module: nn.Module | None) -> dict[str, Tensor | None]:
    """The weight and bias of a linear module under the name of its counterpart; empty if the module is None."""
    if module is None:
        return {}
    return {f"{name}.weight": module.weight, f"{name}.bias": module.bias}  # type: ignore[dict-item]
