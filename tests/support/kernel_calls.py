"""Calls of compiled kernels, recorded with all that they read and write, so that they can run again elsewhere.

`recording()` collects the calls that the library makes. `write` writes them to a file from which
`tests/kernels/replay.cpp` runs them on another processor, and `read_results` reads what it leaves.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mpnn.kernels.cpu import library


@dataclass
class Region:
    """Memory of one object: its numbers, as one dimension of its dtype, before and after the call."""

    before: Tensor
    after: Tensor


@dataclass
class Call:
    """`pointers`: (offset in the parameters, number of the region, offset in it). `items`: first entry, entries and
    parts."""

    name: str
    parameters: bytes
    regions: list[Region]
    pointers: list[tuple[int, int, int]]
    items: tuple[int, int, int]


class _Memory:
    """The memory of tensors, arrays and ctypes arrays by address. Objects are kept alive, so that none shares it."""

    def __init__(self) -> None:
        self.known: dict[int, Tensor] = {}
        self.kept: list[Any] = []

    def add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in self.known:
            self.known[storage.data_ptr()] = torch.empty(0, dtype=x.dtype).set_(storage)  # type: ignore[call-overload]
            self.kept.append(storage)

    def at(self, address: int) -> tuple[int, Tensor]:
        """Where the object that holds this address begins, and its numbers."""
        for _ in range(2):
            for start, x in self.known.items():
                if start <= address < start + x.numel() * x.element_size():
                    return start, x
            self._search()
        raise LookupError(f"no object holds the address {address:#x}")

    def _search(self) -> None:
        """Adds the arrays of numpy and ctypes that local variables of the callers in `mpnn` refer to."""
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_globals.get("__name__", "").startswith("mpnn."):
                for x in _within(list(frame.f_locals.values()), depth=12):
                    numbers = (
                        torch.from_numpy(x) if isinstance(x, np.ndarray) else torch.frombuffer(x, dtype=torch.int64)
                    )
                    self.known[numbers.data_ptr()] = numbers.flatten()
                    self.kept.append(x)
            frame = frame.f_back


def _within(x: Any, depth: int) -> Iterator[Any]:
    """The arrays in a container or an object of `mpnn`."""
    if isinstance(x, np.ndarray | ctypes.Array):
        yield x
    elif depth and isinstance(x, tuple | list):
        for item in x:
            yield from _within(item, depth - 1)
    elif depth and isinstance(x, dict):
        yield from _within(list(x.values()), depth - 1)
    elif depth and type(x).__module__.startswith("mpnn.kernels"):
        yield from _within(vars(x), depth - 1)


def _pointers(kind: Any, start: int = 0) -> Iterator[int]:
    """The offsets of all pointers in a structure."""
    for name, field, *_ in kind._fields_:
        offset = start + getattr(kind, name).offset
        if field is ctypes.c_void_p:
            yield offset
        elif issubclass(field, ctypes.Structure):
            yield from _pointers(field, offset)


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Collects the calls of kernels that run with parts, of this thread."""
    calls: list[Call] = []
    memory, run, data_ptr = _Memory(), library.run, torch.Tensor.data_ptr

    def record(
        name: str, dtype: torch.dtype, p: ctypes.Structure, entries: int = 1, parts: int = 1, first_entry: int = 0
    ) -> None:
        image, objects, pointers = bytes(p), {}, []
        for offset in _pointers(type(p)):
            address = int.from_bytes(image[offset : offset + 8], sys.byteorder)
            if address:
                start, x = memory.at(address)
                objects.setdefault(start, x)
                pointers.append((offset, list(objects).index(start), address - start))
        before = [x.clone() for x in objects.values()]
        run(name, dtype, p, entries, parts, first_entry)
        regions = [Region(x, y.clone()) for x, y in zip(before, objects.values(), strict=True)]
        name += library._SUFFIXES[dtype]
        calls.append(Call(name, image, regions, pointers, (first_entry, entries, parts)))

    def address(x: Tensor) -> int:
        memory.add(x)
        return data_ptr(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "run", record)
        patch.setattr(torch.Tensor, "data_ptr", address)
        yield calls


def write(calls: Iterable[Call], path: Path) -> None:
    with path.open("wb") as file:
        for call in calls:
            numbers = len(call.parameters), len(call.regions), len(call.pointers), *call.items
            file.write(struct.pack("<64s6q", call.name.encode(), *numbers))
            file.write(call.parameters)
            images = [_bytes(region.before) for region in call.regions]
            file.write(struct.pack(f"<{len(images)}q", *map(len, images)))
            for pointer in call.pointers:
                file.write(struct.pack("<3q", *pointer))
            file.writelines(images)


def read_results(calls: Iterable[Call], path: Path) -> list[list[Tensor]]:
    """The memory of each call after it ran elsewhere."""
    data, at, results = bytearray(path.read_bytes()), 0, []
    for call in calls:
        results.append([])
        for region in call.regions:
            results[-1].append(torch.frombuffer(data, dtype=region.after.dtype, count=region.after.numel(), offset=at))
            at += region.after.numel() * region.after.element_size()
    assert at == len(data)
    return results


def _bytes(x: Tensor) -> bytes:
    return x.view(torch.uint8).numpy().tobytes()
