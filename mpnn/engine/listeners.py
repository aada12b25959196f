"""Functions that are called before each round, and before each layer of another library that one compiled call
computes: `mpnn.explain` and the laws read by them what a call runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

from torch import Tensor, nn

from mpnn.round import Round

of_rounds: list[Callable[[Round, str], None]] = []
of_layers: list[Callable[[nn.Module, Tensor], None]] = []
"""Called with each layer of another library that one compiled call computes in place, and its features."""

_unheard: list[int] = []  # threads


@contextmanager
def listening(
    listener: Callable[[Round, str], None], of_layer: Callable[[nn.Module, Tensor], None] | None = None
) -> Iterator[None]:
    """Calls `listener(round, backend)` before each round that `mpnn.engine.run` runs in the block, in any thread, and
    `of_layer(layer, x)` before each layer of another library that one compiled call computes."""
    of_rounds.append(listener)
    layers = [] if of_layer is None else [of_layer]
    of_layers.extend(layers)
    try:
        yield
    finally:
        of_rounds.remove(listener)
        for each in layers:
            of_layers.remove(each)


@contextmanager
def unheard() -> Iterator[None]:
    """Keeps the rounds that this thread runs in the block from listeners: a kernel is tried."""
    thread = get_ident()
    _unheard.append(thread)
    try:
        yield
    finally:
        _unheard.remove(thread)


def notify(round: Round, backend: str) -> None:
    """Calls the listeners of rounds, unless this thread is unheard."""
    if get_ident() not in _unheard:
        for listener in of_rounds:
            listener(round, backend)
