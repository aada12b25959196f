"""Sharing a kernel's work among threads.

Kernels release Python's lock, so plain threads run them side by side: as many as torch uses, without a second runtime
beside torch's that would have to be safe to fork or to call from several threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def each(parts: Sequence[T], run: Callable[[T], R]) -> list[R]:
    """Returns `[run(part) for part in parts]`, run on as many threads as torch uses, the caller's included.

    Each thread takes the next part when it has finished one. An exception of a part, or Ctrl-C, is raised as soon as
    the running parts have finished; no other part begins.
    """
    threads = min(torch.get_num_threads(), len(parts))
    if threads < 2:
        return [run(part) for part in parts]
    done: dict[int, R] = {}
    numbers = iter(range(len(parts)))  # shared: taking the next one is a single step of the interpreter

    def work() -> None:
        for k in numbers:
            done[k] = run(parts[k])

    pool = _pool(threads - 1, os.getpid())
    helpers = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        for _ in numbers:  # empty by now, unless the caller failed or was interrupted: then no thread begins another
            pass
        for helper in helpers:
            if not helper.cancel():  # one that never began has nothing left to do
                helper.result()
    return [done[k] for k in range(len(parts))]


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """One pool for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mpnn")
