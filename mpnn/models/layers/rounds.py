"""Runs layers one after the other and collects their attention weights."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn


def run_layers(
    layers: Iterable[nn.Module], graphs: Iterable[Any], x: Tensor, *, return_weights: bool = False, **options: Any
) -> tuple[Tensor, list[Tensor]]:
    """Applies all layers to x. Each layer is called with its graph and the options.

    Returns:
        The output of the last layer, and the attention weights of each layer, [..., E, H], if `return_weights`, else an
        empty list.
    """
    weights = []
    for layer, graph in zip(layers, graphs, strict=True):
        if return_weights:
            x, layer_weights = layer(x, graph, return_weights=True, **options)
            weights.append(layer_weights)
        else:
            x = layer(x, graph, **options)
    return x, weights
