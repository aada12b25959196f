"""Checks of what a model is called with, for models that are called as those of transformers are."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.models.layers.packing import require_eager


def one_of(input_ids: Tensor | None, inputs_embeds: Tensor | None, dim: int, prefix: str = "") -> Tensor:
    ids, embeds = f"{prefix}input_ids", f"{prefix}inputs_embeds"
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError(f"give either {ids} or {embeds}; got {'neither' if input_ids is None else 'both'}")
    if input_ids is not None:
        if input_ids.dim() != 2 or input_ids.is_floating_point():
            raise ValueError(f"{ids} must be integers [batch, length]; got {described(input_ids)}")
        return input_ids
    assert inputs_embeds is not None
    if inputs_embeds.dim() != 3 or inputs_embeds.shape[2] != dim or not inputs_embeds.is_floating_point():
        raise ValueError(f"{embeds} must be floating point [batch, length, {dim}]; got {described(inputs_embeds)}")
    return inputs_embeds


def kept(mask: Tensor, shape: tuple[int, int], name: str = "attention_mask") -> Tensor:
    """The attention mask, or another of its kind, as bool [B, N]."""
    if tuple(mask.shape) != shape:
        raise ValueError(
            f"{name} must have shape [batch, length] = {list(shape)}, 1 where there is a token; got "
            f"{list(mask.shape)}. Who hears whom within a sentence is the topology's to say: from_hf(model, graph=...)"
        )
    require_eager(f"{name} decides the sizes", f"Leave {name} out where it is 1 throughout")
    keep = mask == 1
    if not bool((keep | (mask == 0)).all()):
        bad = mask[~keep & (mask != 0)][0].item()
        raise ValueError(f"{name} must hold 0 and 1 only; got {bad}")
    return keep


def per_token(name: str, ids: Tensor, shape: tuple[int, int]) -> Tensor:
    if ids.dim() != 2 or ids.shape[0] not in (1, shape[0]) or ids.shape[1] != shape[1] or ids.is_floating_point():
        raise ValueError(f"{name} must be integers [batch, length] = {list(shape)}; got {described(ids)}")
    return ids.expand(shape)


def described(x: Tensor) -> str:
    return f"{x.dtype} of shape {list(x.shape)}"


def wanted(config: Any, name: str, given: bool | None) -> bool:
    """An option of a call, or what the configuration says where it is not given."""
    wanted = getattr(config, name) if given is None else given
    if not isinstance(wanted, bool):
        raise TypeError(f"{name} must be True or False; got {wanted!r}")
    return wanted


def refuse(**arguments: Any) -> None:
    """Raises for an argument of transformers that is given and means nothing here; `num_items_in_batch`, which trainers
    give, means something to heads only, and they hand it on."""
    for name, value in arguments.items():
        if name == "num_items_in_batch":
            continue
        if value is not None and (value is not False or name == "is_causal"):
            raise ValueError(f"this model does not take {name}; got {type(value).__name__}")
