"""The threads that share a kernel's work: as many as torch uses.

Compiled kernels run on torch's own threads, those of its OpenMP runtime. torch's threads wait busily for milliseconds
after each of its operations, and other threads would compete with them for the cores. Functions in Python, and
compiled kernels in a forked process or beside a torch with another runtime, run on plain Python threads.
"""

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_PROCESS = os.getpid()


def team() -> int | None:
    """The address of `GOMP_parallel`, which runs a function on torch's own threads, or None.

    It is None if torch's runtime has no such function (macOS, Windows), and in a forked process, where the runtime's
    threads no longer exist and calling it can hang.
    """
    return _team() if os.getpid() == _PROCESS else None


@cache
def _team() -> int | None:
    try:  # a handle finds what its library depends on: torch's runtime, even if others are loaded in this process
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(torch_cpu.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


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
        try:
            for k in numbers:
                done[k] = run(parts[k])
        finally:
            for _ in numbers:  # empty by now, unless a part failed or was interrupted: then no thread begins another
                pass

    pool = _pool(threads - 1, os.getpid())
    helpers = [pool.submit(work) for _ in range(threads - 1)]
    try:
        work()
    finally:
        running = [helper for helper in helpers if not helper.cancel()]  # one that never began has nothing left to do
        wait(running)
    for helper in running:
        helper.result()  # raises what its part raised
    return [done[k] for k in range(len(parts))]


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """One pool for each process: threads do not survive a fork."""
    return ThreadPoolExecutor(threads, thread_name_prefix="mpnn")
