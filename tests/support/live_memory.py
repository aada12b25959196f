"""The most bytes that tensors held at once while some code ran: deterministic, unlike the memory of a process."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the storages that operations create and that are not freed yet. `peak` is the most bytes so far.

    What existed before is not counted, nor is what kernels allocate by themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._before: dict[int, StorageWeakRef] = {}  # a weak reference keeps the number from being used again

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and (storage := value.untyped_storage())._cdata not in self._live:
                self._before.setdefault(storage._cdata, StorageWeakRef(storage))
        out = function(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor) and (storage := value.untyped_storage())._cdata not in self._before:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self._live = {key: live for key, live in self._live.items() if not live[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._live.values()))
        return out
