"""Checks of the arguments of adapters, with errors that name the argument."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.models.layers.packing import require_eager


def tokens_or_vectors(input_ids: Tensor | None, inputs_embeds: Tensor | None, dim: int, prefix: str = "") -> Tensor:
    ids, embeds = f"{prefix}input_ids", f"{prefix}inputs_embeds"
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"give either {ids} or {embeds}; got {'neither' if input_ids is None else 'both'}")
    if input_ids is not None:
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError(f"{ids} must be integers [batch, length]; got {describe(input_ids)}")
        return input_ids
    assert inputs_embeds is not None
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != dim or not inputs_embeds.is_floating_point():
        raise ValueError(f"{embeds} must be floating point [batch, length, {dim}]; got {describe(inputs_embeds)}")
    return inputs_embeds


def as_token_mask(mask: Tensor, shape: tuple[int, int], name: str = "attention_mask") -> Tensor:
    """A mask of zeros and ones [B, N] as bool."""
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"{name} must have shape [batch, length] = {list(shape)}, 1 where there is a token; got "
            f"{list(mask.shape)}. To change the attention graph, pass a topology: from_hf(model, graph=...)"
        )
    require_eager(f"{name} decides the sizes", f"Leave {name} out where it is 1 throughout")
    keep = mask == 1
    if not bool((keep | (mask == 0)).all()):
        bad = mask[~keep & (mask != 0)][0].item()
        raise ValueError(f"{name} must hold 0 and 1 only; got {bad}")
    return keep


def expanded_ids(name: str, ids: Tensor, shape: tuple[int, int]) -> Tensor:
    if ids.dim() != 2 or ids.shape[0] not in (1, shape[0]) or ids.shape[1] != shape[1] or ids.is_floating_point():
        raise ValueError(f"{name} must be integers [batch, length] = {list(shape)}; got {describe(ids)}")
    return ids.expand(shape)


def describe(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"


def option(config: Any, name: str, given: bool | None) -> bool:
    """The value of an option of a call; None stands for that of the configuration."""
    option = getattr(config, name) if given is None else given
    if not isinstance(option, bool):
        raise TypeError(f"{name} must be True or False; got {option!r}")
    return option


def refuse(**arguments: Any) -> None:
    """Raises ValueError for an argument of transformers that has no meaning here. `num_items_in_batch` is
    allowed, because trainers pass it through the model to the head."""
    for name, value in arguments.items():
        if name == "num_items_in_batch":
            continue
        if value is not None and (value is not False or name == "is_causal"):
            raise ValueError(f"this model does not take {name}; got {type(value).__name__}")
