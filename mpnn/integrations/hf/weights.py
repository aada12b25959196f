"""Helpers of the conversions: checks of the configuration, and transfer of weights under our names."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mpnn.models.layers.blocks import ACTIVATIONS

M = TypeVar("M", bound=nn.Module)

Copies = dict[int, Any]
"""`copy.deepcopy`'s memo: which copy stands for which weight, so that weights that are shared stay shared."""


def check_class(hf_model: Any, *supported: str) -> None:
    name = type(hf_model).__name__
    if name not in supported:
        raise ValueError(
            f"from_hf takes {' or '.join(supported)} of the family {hf_model.config.model_type!r}; got {name}"
        )


def check_config(config: Any, **supported: Any) -> None:
    """Refuses a configuration whose field has another value than the one supported; an absent field is fine."""
    for name, value in supported.items():
        given = getattr(config, name, value)
        if given != value:
            raise ValueError(f"from_hf does not support config.{name} = {given!r}, only {value!r}")


_SAME_ACTIVATIONS = {
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_fast": "gelu_new",
    "gelu_accurate": "gelu_new",
    "gelu_python_tanh": "gelu_new",
}
"""Names of transformers for activations that go by another name too."""


def activation(config: Any, field: str) -> str:
    """Our name of an activation."""
    given = getattr(config, field)
    name = _SAME_ACTIVATIONS.get(given, given)
    if name not in ACTIVATIONS:
        known = ", ".join([*ACTIVATIONS, *_SAME_ACTIVATIONS])
        raise ValueError(f"from_hf does not support config.{field} = {given!r}, only {known}")
    return name


def with_weights(
    build: Callable[[], M],
    hf_model: Any,
    names: Iterable[tuple[str, str]],
    copies: Copies,
    change: Callable[[str, Tensor], dict[str, Tensor]] | None = None,
) -> M:
    """The result of `build`, with copies of the parameters of `hf_model`, renamed.

    Built on the meta device, to avoid random initialisation of weights that are replaced. So our models must not
    have buffers, which would stay on that device.

    Args:
        names: pairs (old, new), replaced in this order in every name.
        change: for weights that differ in more than their name: (our name, weight) -> weights by name, any number. A
            weight that it returns as it is stays shared with whatever else refers to it.

    Raises:
        ValueError: two weights for one that our model shares, such as embeddings that are not tied; or not the
            weights that the configuration says, as in models that are quantised or have adapters.
    """
    weights: dict[str, Tensor] = {}
    for name, weight in hf_model.named_parameters(remove_duplicate=False):
        for old, new in names:
            name = name.replace(old, new)
        weights |= {name: weight} if change is None else change(name, weight)
    with torch.device("meta"):
        model = build().requires_grad_(False)  # so that weights may be integers, which `to_hf` follows
    _check_names(model, weights)
    found = {name: _copied(weight, copies) for name, weight in weights.items()}
    model.load_state_dict(found, assign=True)
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight is not found[name]:
            raise ValueError(
                f"from_hf does not support weights untied (config.tie_word_embeddings) that ours ties: {name}"
            )
        weight.requires_grad_(weights[name].requires_grad)
    return model


def _check_names(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    own = model.state_dict()
    lacking, odd = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if lacking or odd:
        both = (("lacks", lacking), ("adds", odd))
        which = [f"{what} {len(names)}, such as {names[0]}" for what, names in both if names]
        raise ValueError(
            "from_hf takes the weights that the configuration says, under our names; this model "
            f"{' and '.join(which)}. Merge adapters, dequantise, and put replaced modules back before"
        )
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise ValueError(
                f"from_hf takes the weights that the configuration says, which {name} is not: "
                f"{list(weight.shape)} instead of {list(own[name].shape)}"
            )


def _copied(weight: Tensor, copies: Copies) -> Tensor:
    if isinstance(weight, nn.Parameter):
        return copy.deepcopy(weight, copies)
    return nn.Parameter(weight.detach().clone(), weight.requires_grad)
