"""One round after the other: what the layers of a model make of features, and what is to be seen on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def through(
    layers: Iterable[nn.Module],
    graphs: Iterable[Any],
    x: Tensor,
    *,
    return_states: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x through all layers, each called with its graph and the options.

    Returns:
        x after the last layer. With `return_states`, also x before the first layer and after each, and with
        `return_weights` the attention weights of each layer, [..., E, H]; else these are empty.
    """
    states, weights = [x] if return_states else [], []
    for layer, graph in zip(layers, graphs, strict=True):
        if return_weights:
            x, heard = layer(x, graph, return_weights=True, **options)
            weights.append(heard)
        else:
            x = layer(x, graph, **options)
        if return_states:
            states.append(x)
    return x, states, weights
