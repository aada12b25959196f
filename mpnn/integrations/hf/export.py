"""`to_hf`: exports a model of `from_hf` as a model of transformers, with its current weights.

A family defines the conversion from transformers only. It moves numbers and does not compute with them. So converting
weights whose values are their own indices shows where each number came from, and the export puts it back there.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.integrations.hf.weights import Copies


class Converted(nn.Module):
    """The result of `from_hf`: it has the call and the checkpoints of the original."""

    supports_gradient_checkpointing = True  # transformers asks the class of a model with a head

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None, **options: Any
    ) -> None:
        """Writes a checkpoint of transformers, for its own `from_pretrained`: `to_hf(self).save_pretrained(folder)`.

        A checkpoint does not contain a topology; pass a replaced one again: `from_hf(model, graph=...)`.

        Args:
            state_dict: weights under the names of this model, to save instead of its own.
            options: as in transformers.
        """
        model = self
        if state_dict is not None:
            model = copy.deepcopy(self)
            model.load_state_dict(state_dict)
        to_hf(model).save_pretrained(folder, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads weights under the names of this model, or under those of `to_hf(self).state_dict()`, as in checkpoints
        of trainers."""
        if unknown := state_dict.keys() - self.state_dict().keys():
            hf_model = to_hf(self)
            if unknown & hf_model.state_dict().keys():
                found = hf_model.load_state_dict(state_dict, strict)
                super().load_state_dict(_rebuild(hf_model, self).state_dict(), strict=True, assign=assign)
                return found
        return super().load_state_dict(state_dict, strict, assign)

    def tie_weights(self, *given: Any, **options: Any) -> None:
        """Does nothing: tied weights are one parameter here."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by the class that can be imported."""
        made: Any = super().__reduce_ex__(protocol)
        _, (kind, *arguments), *state = made
        return _new, (_original_class(kind), *arguments), *state


@dataclass(frozen=True, eq=False)
class Original:
    """The origin of a converted module: `model`, the module of transformers without its weights, and
    `build(model, copies)`, which converts it."""

    model: Any
    build: Callable[..., nn.Module]


def as_converted(model: nn.Module) -> Converted:
    """The model itself, whose class now inherits from `Converted`."""
    kind: Any = type(model)
    model.__class__ = _with_converted(kind)
    assert isinstance(model, Converted)
    return model


def attach_original(ours: nn.Module, hf_model: Any, build: Callable[..., nn.Module]) -> nn.Module:
    """`ours`, with the module of transformers and the conversion that `to_hf` needs."""
    empty = _as_parameters(hf_model.parameters(), (weight.detach().to("meta") for weight in hf_model.parameters()))
    vars(ours)["_original"] = Original(copy.deepcopy(hf_model, empty), build)
    return ours


def to_hf(model: nn.Module) -> Any:
    """Converts a model of `from_hf` back to a model of transformers, with its current weights.

    The result is a copy of the original class, on the same device, in the same precision and mode. Positions that were
    stretched to a `context` stay so. Models of transformers have no topology: if `from_hf(model, graph=...)` replaced
    it, the result attends over the graph of its family again, and `from_hf(result, graph=...)` gives the model back.
    Numbers that are unused here, such as rows of positions that are never looked up, are zeros.

    Raises:
        TypeError: if the model is not a result of `from_hf`.
        ValueError: if weights were added, removed or changed in shape; the message names them.
    """
    if not isinstance(model, Converted):
        raise TypeError(f"to_hf takes what from_hf gave; got a {type(model).__name__}")
    copies: Copies = {}
    for part in model.modules():
        if "_original" in vars(part):
            copies[id(part)] = _part_to_hf(part, copies)
    hf_model: Any = copy.deepcopy(model, copies)  # the memo replaces our modules and weights
    hf_model.__class__ = _original_class(type(hf_model))
    return hf_model


def _rebuild(hf_model: nn.Module, like: nn.Module) -> nn.Module:
    """Converts a result of `to_hf` again, to a model with the modules of `like`."""
    copies: Copies = {}
    for name, part in like.named_modules():
        if "_original" in vars(part):
            module = hf_model.get_submodule(name)
            copies[id(module)] = vars(part)["_original"].build(module, copies=copies)
    return copy.deepcopy(hf_model, copies)


# ---------------------------------------------------------------------------------------------------- numbers


def _part_to_hf(ours: Any, copies: Copies) -> Any:
    """The module of transformers for one of ours. `copies` gets its configuration, and the weights that are the same on
    both sides, because heads may share them."""
    original: Original = vars(ours)["_original"]
    if hasattr(ours, "config"):  # heads have the same one
        copies[id(original.model.config)] = copy.deepcopy(ours.config, copies)
    empty = copy.deepcopy(original.model, copies)
    _stretch(empty, original.model.config)
    weights, numbers = list(empty.parameters()), dict(ours.named_parameters())
    places = _origins(original.build, empty, weights)
    if odd := _shapes(numbers) ^ _shapes({name: at for name, (_, at) in places.items()}):
        names = ", ".join(sorted({name for name, _ in odd}))
        raise ValueError(
            f"to_hf takes the weights that from_hf made; added, taken away or of another shape are: {names}"
        )
    device = next(iter(numbers.values())).device
    filled = []
    for which, weight in enumerate(weights):
        parts = [(numbers[name], at) for name, (of, at) in places.items() if of == which]
        filled.append(_fill(weight, parts, device))
        if parts:
            weight.requires_grad_(any(number.requires_grad for number, _ in parts))
    parameters = _as_parameters(weights, filled)
    for name, (which, at) in places.items():
        if torch.equal(at, _flat_indices(weights[which].shape)):
            copies[id(numbers[name])] = parameters[id(weights[which])]
    parameters[id(empty.config)] = empty.config
    return copy.deepcopy(empty, parameters).to(device).train(ours.training)


def _origins(
    build: Callable[..., nn.Module], hf_model: Any, weights: list[nn.Parameter]
) -> dict[str, tuple[int, Tensor]]:
    """For each of our weights: which of `weights` it came from and, in its own shape, the indices in that one."""
    own_number = [torch.full(weight.shape, k, dtype=torch.int16) for k, weight in enumerate(weights)]
    which = {name: int(w.flatten()[0]) for name, w in _trace(build, hf_model, weights, own_number).items()}
    del own_number  # models may be large
    at = _trace(build, hf_model, weights, [_flat_indices(weight.shape) for weight in weights])
    return {name: (which[name], at[name]) for name in at}


def _trace(
    build: Callable[..., nn.Module], hf_model: Any, weights: list[nn.Parameter], values: list[Tensor]
) -> dict[str, Tensor]:
    """Our weights after a conversion of `hf_model` with these integers as values."""
    ours = build(copy.deepcopy(hf_model, _as_parameters(weights, values)), copies={})
    found = {name: weight.detach() for name, weight in ours.named_parameters()}
    for name, weight in found.items():
        if weight.dtype != values[0].dtype:
            raise ValueError(f"to_hf does not know where the numbers of {name} came from: from_hf computes with them")
    return found


def _flat_indices(shape: torch.Size) -> Tensor:
    return torch.arange(shape.numel(), dtype=torch.int32).view(shape)


def _fill(weight: Tensor, parts: list[tuple[nn.Parameter, Tensor]], device: torch.device) -> Tensor:
    """A weight of transformers, from our weights and their indices in it."""
    if not parts:
        return torch.zeros_like(weight, device=device)
    at = torch.cat([at.flatten() for _, at in parts])
    if int(at.bincount().max()) > 1:
        raise ValueError("to_hf knows no way back for a family that repeats numbers")
    numbers = torch.cat([number.detach().flatten() for number, _ in parts])
    found = numbers.new_zeros(weight.numel())
    found[at.to(device).long()] = numbers
    return found.view(weight.shape)


def _shapes(weights: Mapping[str, Tensor]) -> set[tuple[str, torch.Size]]:
    return {(name, weight.shape) for name, weight in weights.items()}


def _stretch(hf_model: Any, before: Any) -> None:
    """Enlarges the position embeddings to those of the configuration, which `before` had fewer of."""
    more = getattr(hf_model.config, "max_position_embeddings", 0) - getattr(before, "max_position_embeddings", 0)
    if not more:
        return
    for name, part in hf_model.named_modules():
        if isinstance(part, nn.Embedding) and name.endswith(("position_embeddings", "embed_positions")):
            part.num_embeddings += more
            part.weight = nn.Parameter(part.weight.new_empty(part.num_embeddings, part.embedding_dim))
        if hasattr(part, "max_seqlen"):
            part.max_seqlen += more
        for which in {"position_ids", "token_type_ids"} & part._buffers.keys():
            rows = torch.arange(hf_model.config.max_position_embeddings)[None]
            part._buffers[which] = rows if which == "position_ids" else torch.zeros_like(rows)


def _as_parameters(weights: Iterable[Tensor], values: Iterable[Tensor]) -> Copies:
    """A memo of `copy.deepcopy` that replaces weights by these values."""
    pairs = zip(weights, values, strict=True)
    return {id(w): nn.Parameter(v, w.requires_grad and v.is_floating_point()) for w, v in pairs}


# ---------------------------------------------------------------------------------------------------- classes


@cache
def _with_converted(kind: type) -> type:
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (Converted, kind), names)


def _original_class(kind: type[nn.Module]) -> type[nn.Module]:
    return kind.__mro__[2] if kind.__mro__[1] is Converted else kind


def _new(kind: type[nn.Module], *arguments: Any) -> Converted:
    return as_converted(kind.__new__(kind, *arguments))
