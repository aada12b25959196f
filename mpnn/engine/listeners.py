"""Functions that are called before each round, and before each layer of another library that one compiled call may
compute: `mpnn.explain` and the laws read by them what a call runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident

from torch import Tensor, nn

from mpnn.round import Round

of_rounds: list[Callable[[Round, str], None]] = []
OfLayer = Callable[[nn.Module, Tensor | None, str], None]
of_layers: list[OfLayer] = []
"""Called with each layer of another library that one compiled call may compute in place: with its features if the call
does, and else with None and a clause that says why not."""

_unheard: list[int] = []  # threads


@contextmanager
def listening(listener: Callable[[Round, str], None], of_layer: OfLayer | None = None) -> Iterator[None]:
    """Calls `listener(round, backend)` before each round that `mpnn.engine.run` runs in the block, in any thread, and
    `of_layer(layer, x, why)` before each layer of another library, as `of_layers` are called."""
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
