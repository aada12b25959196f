"""Handles: numbers by which compiled programs refer to graphs.

`torch.compile` turns a call into operations on tensors. A graph enters them as a tensor with its number, which is
neither a constant nor a size of the program. The same program therefore runs other graphs without recompilation.
"""

from functools import partial
from itertools import count
from os import urandom
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from mpnn.graph.modes import outside_modes
from mpnn.graph.witness import Constant

_NUMBERS = count(int.from_bytes(urandom(7), "big"))  # random start, so that numbers of another process are invalid here
_KNOWN: "WeakValueDictionary[int, HasToken]" = WeakValueDictionary()


class HasToken(Constant):
    """Base class of objects that compiled programs refer to: `token` is the number, an int64 scalar on the CPU.

    Copies and unpickled objects get new numbers.
    """

    token: Tensor

    def __new__(cls, *args: Any, **options: Any) -> Any:
        self = super().__new__(cls)
        number = next(_NUMBERS)
        object.__setattr__(self, "token", _scalar(number))  # works for frozen dataclasses too
        _KNOWN[number] = self
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "token"}


def _scalar(number: int) -> Tensor:
    """An int64 scalar on the CPU, usable in every mode; `torch.tensor` takes three times as long."""
    return outside_modes(partial(torch.scalar_tensor, number, dtype=torch.int64, device="cpu"))


def resolve(token: Tensor) -> Any:
    """Returns the object with this number.

    Raises:
        RuntimeError: if the object no longer exists.
    """
    handled = _KNOWN.get(int(token))
    if handled is None:
        raise RuntimeError(
            "a compiled program was run with a graph that no longer exists; keep a reference to the graph"
        )
    return handled
