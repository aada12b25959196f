"""Objects in the place of methods of modules, such as `forward`: how they are put there, and for which module they are
called.

An object among the attributes of an instance is not bound to it. So a shallow copy of a module (`copy.copy`, the
replicas of `nn.DataParallel`) has the object of its original, which would compute with the original's weights. Who
calls it knows: `nn.Module.__call__`.
"""

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

from torch import nn

CALLS = (
    nn.Module._call_impl.__code__,
    *(code for code in nn.Module._call_impl.__code__.co_consts if isinstance(code, CodeType)),
    nn.Module._slow_forward.__code__,
)
"""The code by which torch calls the `forward` of a module, which is `self` there."""


def calling(module: nn.Module) -> nn.Module:
    """Returns the module whose `__call__` has called the function that calls this one; else `module`."""
    frame = sys._getframe(2)
    caller: nn.Module = frame.f_locals["self"] if frame.f_code in CALLS else module
    return caller


def put(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Gives an object an attribute of its own. Returns what gives back the one that it had, unless another library has
    replaced it since."""
    before = {name: vars(owner)[name]} if name in vars(owner) else {}
    setattr(owner, name, value)
    return partial(_put_back, owner, name, value, before)


def take(owner: Any, name: str) -> Callable[[], None]:
    """Takes from an object an attribute of its own, so that it has that of its class. Returns what gives it back,
    unless another one was put there since."""
    value = vars(owner)[name]
    delattr(owner, name)
    return partial(vars(owner).setdefault, name, value)


def _put_back(owner: Any, name: str, value: Any, before: dict[str, Any]) -> None:
    if vars(owner).get(name) is value:
        delattr(owner, name)
        vars(owner).update(before)
