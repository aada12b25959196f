"""`njit` with a cache on disk that may be missing or damaged: kernels are then compiled again, and never fail for it.

Numba's own cache raises where no folder is writable and at every call once a file is damaged, runs whatever machine
code a file holds, and two processes that compile one function for different types may give both results one name.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

_DIGEST = hashlib.sha256().digest_size


def njit(*, cache: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit(**options)`; `cache=True` keeps compiled code on disk where a folder is writable."""

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        if cache:
            with suppress(RuntimeError):  # no folder is writable: compile in each process
                dispatcher._cache = _Cache(function)
        return dispatcher

    return decorate


class _Cache(FunctionCache):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        file = self._cache_file
        self._cache_file = _CheckedFile(file._cache_path, self._impl.filename_base, file._source_stamp)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # damaged bytes raise nearly anything when they are unpickled
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk, or a folder that has become read-only
            super().save_overload(sig, data)


class _CheckedFile(IndexDataCacheFile):
    """Each entry is stored with its key and the SHA-256 of its bytes."""

    def save(self, key: Any, data: Any) -> None:
        super().save(key, (key, data))

    def load(self, key: Any) -> Any:
        stored_key, data = super().load(key) or (None, None)
        return data if stored_key == key else None

    def _save_data(self, name: str, data: Any) -> None:
        content = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(hashlib.sha256(content).digest() + content)

    def _load_data(self, name: str) -> Any:
        content = Path(self._data_path(name)).read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() != content[:_DIGEST]:
            raise ValueError(f"{self._data_path(name)} is damaged")
        return pickle.loads(content[_DIGEST:])
