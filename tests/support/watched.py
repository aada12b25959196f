"""Operators through which Python looks at the numbers of a tensor: on a GPU that waits for all work before it."""

import traceback
from collections.abc import Collection
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A number read, and results whose size depends on numbers.
LOOKS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "unique_consecutive"}
# Tensors made of numbers of Python, which are copied to the device.
COPIES = {"lift_fresh"}


class Watched(TorchDispatchMode):
    def __init__(self, names: Collection[str] = frozenset(LOOKS)) -> None:
        super().__init__()
        self.names = names
        self.looks: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        masked = name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in self.names or masked:
            here = [frame for frame in traceback.extract_stack() if "/mpnn/" in frame.filename][-1:]
            self.looks.append(f"{name} in {here[0].filename}:{here[0].lineno}" if here else name)
        return func(*args, **(kwargs or {}))
