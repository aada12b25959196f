"""Runs layers one after the other and collects their outputs and attention weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def run_layers(
    layers: Iterable[nn.Module],
    graphs: Iterable[Any],
    x: Tensor,
    *,
    return_states: bool = False,
    return_weights: bool = False,
    **options: Any,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Applies all layers to x. Each layer is called with its graph and the options.

    Returns:
        The output of the last layer; x before the first layer and after each, if `return_states`, else an empty list;
        the attention weights of each layer, [..., E, H], if `return_weights`, else an empty list.
    """
    states, weights = [x] if return_states else [], []
    for layer, graph in zip(layers, graphs, strict=True):
        if return_weights:
            x, layer_weights = layer(x, graph, return_weights=True, **options)
            weights.append(layer_weights)
        else:
            x = layer(x, graph, **options)
        if return_states:
            states.append(x)
    return x, states, weights
