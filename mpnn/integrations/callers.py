"""For which module an object in the place of its `forward` is called.

An object among the attributes of an instance is not bound to it. So a shallow copy of a module (`copy.copy`, the
replicas of `nn.DataParallel`) has the object of its original, which would compute with the original's weights. Who
calls it knows: `nn.Module.__call__`.
"""

import sys
from types import CodeType

from torch import nn

_CALLS = [
    nn.Module._call_impl.__code__,
    *(code for code in nn.Module._call_impl.__code__.co_consts if isinstance(code, CodeType)),
    nn.Module._slow_forward.__code__,
]


def calling(module: nn.Module) -> nn.Module:
    """Returns the module whose `__call__` has called the function that calls this one; else `module`."""
    frame = sys._getframe(2)
    code = frame.f_code
    for known in _CALLS:
        if code is known:
            caller: nn.Module = frame.f_locals["self"]
            return caller
    return module
