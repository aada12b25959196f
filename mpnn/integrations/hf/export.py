"""The way back: what `from_hf` gave, as a model of transformers with the weights that it has now.

Families say how weights come here and nothing else. As that moves numbers and does not reckon with them, doing it to
weights that are made of their own places tells where each of our numbers came from, and there it goes back.
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
    """What `from_hf` gives: called as the original is, and saved as the original is."""

    supports_gradient_checkpointing = True  # transformers asks the class of a model with a head

    def save_pretrained(
        self, folder: str | os.PathLike[str], *, state_dict: Mapping[str, Tensor] | None = None, **options: Any
    ) -> None:
        """Writes a checkpoint of transformers, for its own `from_pretrained`: `to_hf(self).save_pretrained(folder)`.

        Who hears whom is no part of it; give a swapped topology again: `from_hf(again, graph=...)`.

        Args:
            state_dict: weights under the names they have here, in the place of those of this model.
            options: as in transformers.
        """
        model = self
        if state_dict is not None:
            model = copy.deepcopy(self)
            model.load_state_dict(state_dict)
        to_hf(model).save_pretrained(folder, **options)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Weights under the names they have here, or under those of `to_hf(self).state_dict()`, as in checkpoints that
        trainers go on from."""
        if unknown := state_dict.keys() - self.state_dict().keys():
            theirs = to_hf(self)
            if unknown & theirs.state_dict().keys():
                found = theirs.load_state_dict(state_dict, strict)
                super().load_state_dict(_as_ours(theirs, self).state_dict(), strict=True, assign=assign)
                return found
        return super().load_state_dict(state_dict, strict, assign)

    def tie_weights(self, *given: Any, **options: Any) -> None:
        """Does nothing: weights that are tied are one weight here, and stay so."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by the class that can be imported."""
        made: Any = super().__reduce_ex__(protocol)
        _, (kind, *arguments), *state = made
        return _new, (_original_class(kind), *arguments), *state


@dataclass(frozen=True, eq=False)
class Original:
    """What a converted module was in transformers: `model`, kept without its weights, and what `build` makes of such a
    model and `copies`, a memo."""

    model: Any
    build: Callable[..., nn.Module]


def converted(model: nn.Module) -> Converted:
    """The model itself, to which its class now adds what `Converted` has."""
    kind: Any = type(model)
    model.__class__ = _with_converted(kind)
    assert isinstance(model, Converted)
    return model


def remember(ours: nn.Module, theirs: Any, build: Callable[..., nn.Module]) -> nn.Module:
    """`ours`, which then knows the way back to the module of transformers that `build` made it of."""
    empty = _as_parameters(theirs.parameters(), (weight.detach().to("meta") for weight in theirs.parameters()))
    vars(ours)["_original"] = Original(copy.deepcopy(theirs, empty), build)
    return ours


def to_hf(model: nn.Module) -> Any:
    """What `from_hf` gave, as a model of transformers with the weights it has now: `from_hf` the other way round.

    The result is a copy, of the class that was converted, on the same device, in the same precision and mode. Positions
    that were stretched to a `context` stay so. A topology is no part of transformers' models: where
    `from_hf(model, graph=...)` swapped it, the result hears over the graph of its family again, and
    `from_hf(result, graph=...)` is the model given. Numbers of which we have no use, such as rows of positions that
    are never looked up, are zeros.

    Raises:
        TypeError: not a model that `from_hf` gave.
        ValueError: weights were added to it, taken away or given another shape; the sentence names them.
    """
    if not isinstance(model, Converted):
        raise TypeError(f"to_hf takes what from_hf gave; got a {type(model).__name__}")
    copies: Copies = {}
    for part in model.modules():
        if "_original" in vars(part):
            copies[id(part)] = _part_as_theirs(part, copies)
    theirs: Any = copy.deepcopy(model, copies)  # which finds modules and weights of theirs in the place of ours
    theirs.__class__ = _original_class(type(theirs))
    return theirs


def _as_ours(theirs: nn.Module, like: nn.Module) -> nn.Module:
    """What `to_hf` gave of a model with the modules of `like`, as such a model again."""
    copies: Copies = {}
    for name, part in like.named_modules():
        if "_original" in vars(part):
            module = theirs.get_submodule(name)
            copies[id(module)] = vars(part)["_original"].build(module, copies=copies)
    return copy.deepcopy(theirs, copies)


# ---------------------------------------------------------------------------------------------------- numbers


def _part_as_theirs(ours: Any, copies: Copies) -> Any:
    """The module of transformers that this one is; `copies` gets its configuration, and those of its weights that are
    ours as they are, because heads may share them."""
    original: Original = vars(ours)["_original"]
    if hasattr(ours, "config"):  # heads have the same one
        copies[id(original.model.config)] = copy.deepcopy(ours.config, copies)
    empty = copy.deepcopy(original.model, copies)
    _stretch(empty, original.model.config)
    weights, numbers = list(empty.parameters()), dict(ours.named_parameters())
    places = _places(original.build, empty, weights)
    if odd := _shapes(numbers) ^ _shapes({name: at for name, (_, at) in places.items()}):
        names = ", ".join(sorted({name for name, _ in odd}))
        raise ValueError(
            f"to_hf takes the weights that from_hf made; added, taken away or of another shape are: {names}"
        )
    device = next(iter(numbers.values())).device
    filled = []
    for which, weight in enumerate(weights):
        parts = [(numbers[name], at) for name, (of, at) in places.items() if of == which]
        filled.append(_filled(weight, parts, device))
        if parts:
            weight.requires_grad_(any(number.requires_grad for number, _ in parts))
    parameters = _as_parameters(weights, filled)
    for name, (which, at) in places.items():
        if torch.equal(at, _counted(weights[which].shape)):
            copies[id(numbers[name])] = parameters[id(weights[which])]
    parameters[id(empty.config)] = empty.config
    return copy.deepcopy(empty, parameters).to(device).train(ours.training)


def _places(build: Callable[..., nn.Module], theirs: Any, weights: list[nn.Parameter]) -> dict[str, tuple[int, Tensor]]:
    """For each of our weights, which of `weights` it came from and, in its own shape, the places in that one."""
    own_number = [torch.full(weight.shape, k, dtype=torch.int16) for k, weight in enumerate(weights)]
    which = {name: int(w.flatten()[0]) for name, w in _followed(build, theirs, weights, own_number).items()}
    del own_number  # models may be large
    at = _followed(build, theirs, weights, [_counted(weight.shape) for weight in weights])
    return {name: (which[name], at[name]) for name in at}


def _followed(
    build: Callable[..., nn.Module], theirs: Any, weights: list[nn.Parameter], values: list[Tensor]
) -> dict[str, Tensor]:
    """What our weights are if theirs have these values, which are integers."""
    ours = build(copy.deepcopy(theirs, _as_parameters(weights, values)), copies={})
    found = {name: weight.detach() for name, weight in ours.named_parameters()}
    for name, weight in found.items():
        if weight.dtype != values[0].dtype:
            raise ValueError(f"to_hf does not know where the numbers of {name} came from: from_hf reckons with them")
    return found


def _counted(shape: torch.Size) -> Tensor:
    return torch.arange(shape.numel(), dtype=torch.int32).view(shape)


def _filled(weight: Tensor, parts: list[tuple[nn.Parameter, Tensor]], device: torch.device) -> Tensor:
    """A weight of theirs, of our weights and their places in it."""
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


def _stretch(theirs: Any, before: Any) -> None:
    """Makes room for the positions that the configuration now has, and the one `before` had not."""
    more = getattr(theirs.config, "max_position_embeddings", 0) - getattr(before, "max_position_embeddings", 0)
    if not more:
        return
    for name, part in theirs.named_modules():
        if isinstance(part, nn.Embedding) and name.endswith(("position_embeddings", "embed_positions")):
            part.num_embeddings += more
            part.weight = nn.Parameter(part.weight.new_empty(part.num_embeddings, part.embedding_dim))
        if hasattr(part, "max_seqlen"):
            part.max_seqlen += more
        for which in {"position_ids", "token_type_ids"} & part._buffers.keys():
            rows = torch.arange(theirs.config.max_position_embeddings)[None]
            part._buffers[which] = rows if which == "position_ids" else torch.zeros_like(rows)


def _as_parameters(weights: Iterable[Tensor], values: Iterable[Tensor]) -> Copies:
    """A memo by which copies have these values for weights."""
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
    return converted(kind.__new__(kind, *arguments))
