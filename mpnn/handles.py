"""Numbers by which compiled programs speak of graphs, which they cannot hold.

`torch.compile` turns a call into operations on tensors. A graph comes into them as a tensor with its number, which is
neither a constant of the program nor a size: other graphs run through the same program without compiling it again.
"""

from __future__ import annotations

from itertools import count
from os import urandom
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_NUMBERS = count(int.from_bytes(urandom(7), "big"))  # so that a number of another process means nothing here
_KNOWN: WeakValueDictionary[int, Handled] = WeakValueDictionary()


class Handled:
    """Base of what compiled programs may speak of: `token` is its number, int64 scalar on the CPU.

    Copies and what is unpickled have numbers of their own.
    """

    token: Tensor

    def __new__(cls, *args: Any, **options: Any) -> Any:
        self = super().__new__(cls)
        number = next(_NUMBERS)
        with torch.inference_mode(False):
            object.__setattr__(self, "token", torch.tensor(number, device="cpu"))  # also where attributes are frozen
        _KNOWN[number] = self
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "token"}


def held(token: Tensor) -> Any:
    """The object with this number.

    Raises:
        RuntimeError: it is gone.
    """
    found = _KNOWN.get(int(token))
    if found is None:
        raise RuntimeError("a compiled program was run with a graph that is gone; keep the graph while it runs")
    return found
