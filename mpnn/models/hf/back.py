"""The way back: what `from_hf` gave as a model of transformers again, with the weights that it has now.

Families say how weights come here and nothing else. As that moves numbers and does not reckon with them, doing it to
weights that hold the numbers of their own places tells where each of our numbers came from, and there it goes back.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.models.hf.weights import Copies

Build = Callable[..., nn.Module]
"""Makes our module of one of transformers, given `copies=`, a memo."""

_NAME = "_original"


class Original:
    """What a converted module was in transformers: `model`, kept without its weights, and what `build` makes of it."""

    def __init__(self, model: Any, build: Build) -> None:
        weights = list(model.parameters())
        self.model = _holding(model, weights, [weight.detach().to("meta") for weight in weights], {})
        self.build = build


def remember(ours: nn.Module, model: Any, build: Build) -> nn.Module:
    """`ours`, which then knows how to become a module of transformers again."""
    setattr(ours, _NAME, Original(model, build))
    return ours


def to_hf(model: nn.Module) -> Any:
    """What `from_hf` gave, as a model of transformers with the weights it has now: `from_hf` the other way round.

    The result is of the class that was converted, a copy on the same device, in the same precision and mode. A
    topology is no part of transformers' models: where `from_hf(model, graph=...)` swapped it, the result hears over its
    own graph again, and `from_hf(result, graph=...)` is the model given. A `context` that was stretched stays so.
    Numbers of theirs that no model of ours has a use for, such as rows of positions that are never looked up, are
    zeros.

    Raises:
        TypeError: not a model that `from_hf` gave.
        ValueError: weights were added to it or taken away; the sentence names them.
    """
    copies: Copies = {}
    for part in model.modules():
        if _NAME in vars(part):
            copies[id(part)] = _as_theirs(part, copies)
    if not copies:
        raise TypeError(f"to_hf takes a model that from_hf gave; got {type(model).__name__}")
    return copy.deepcopy(model, copies)  # which then finds their modules and weights in the place of ours


def _as_theirs(ours: Any, copies: Copies) -> Any:
    """A module of transformers with the numbers of ours; `copies` gets those of its weights that are ours as they are,
    because what stands on it may share them."""
    original: Original = vars(ours)[_NAME]
    if hasattr(ours, "config"):
        copies[id(original.model.config)] = copy.deepcopy(ours.config, copies)
    theirs = copy.deepcopy(original.model, copies)
    _stretch(theirs, original.model.config)

    weights = list(theirs.parameters())
    places = _places(weights)
    came_from = dict(original.build(_holding(theirs, weights, places, {}), copies={}).named_parameters())
    ours_now = dict(ours.named_parameters())
    if ours_now.keys() != came_from.keys():
        odd = ", ".join(sorted(ours_now.keys() ^ came_from.keys()))
        raise ValueError(f"to_hf takes the weights that from_hf made; added or taken away since: {odd}")
    starts = [int(place.flatten()[0]) for place in places]
    parts: list[list[str]] = [[] for _ in weights]
    for name, place in came_from.items():
        if place.dtype != places[0].dtype or place.shape != ours_now[name].shape:
            raise ValueError(f"to_hf does not know where each number of {name} {[*ours_now[name].shape]} came from")
        parts[bisect_right(starts, int(place.flatten()[0])) - 1].append(name)

    device = next(iter(ours_now.values())).device
    filled = []
    for weight, place, start, names in zip(weights, places, starts, parts, strict=True):
        if not names:
            filled.append(torch.zeros_like(weight, device=device))
            continue
        at = torch.cat([came_from[name].flatten() for name in names]).long() - start
        if int(at.bincount().max()) > 1:
            raise ValueError(f"to_hf finds several numbers of ours for one of transformers' in {', '.join(names)}")
        numbers = torch.cat([ours_now[name].detach().flatten() for name in names])
        flat = numbers.new_zeros(weight.numel())
        flat[at.to(device)] = numbers
        filled.append(flat.view(weight.shape))
        weight.requires_grad_(any(ours_now[name].requires_grad for name in names))
    theirs = _holding(theirs, weights, filled, now := {})
    for weight, place, names in zip(weights, places, parts, strict=True):
        if len(names) == 1 and torch.equal(came_from[names[0]], place):
            copies[id(ours_now[names[0]])] = now[id(weight)]
    return theirs.to(device).train(ours.training)
