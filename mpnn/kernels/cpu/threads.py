"""The threads that share a kernel's work: as many as torch uses.

Compiled kernels run on torch's own threads, those of its OpenMP runtime. torch's threads wait busily for milliseconds
after each of its operations, and other threads would compete with them for the cores. Functions in Python, and
compiled kernels in a forked process or with a torch that has another runtime, run on plain Python threads.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")

_PROCESS = os.getpid()
# A handle of torch's library finds what that depends on: torch's runtime, even if others are loaded in this process. On
# Windows handles do not, but torch's wheel holds the one runtime that it loads.
_RUNTIMES = {
    "linux": ("libtorch_cpu.so", "GOMP_parallel"),
    "darwin": ("libtorch_cpu.dylib", "__kmpc_fork_call"),
    "win32": ("libiomp5md.dll", "__kmpc_fork_call"),
}


class Team(NamedTuple):
    """The address of a function that runs another on torch's own threads. `forks`: it is `__kmpc_fork_call` of LLVM's
    and Intel's OpenMP, not `GOMP_parallel` of GNU's (threads.cpp)."""

    address: int
    forks: bool


def team() -> Team | None:
    """torch's threads, or None if its runtime is not known here, and in a forked process, where the runtime's threads
    no longer exist and calling it can hang."""
    return _team(sys.platform, Path(torch.__file__).parent / "lib") if os.getpid() == _PROCESS else None


@cache
def _team(system: str, folder: Path) -> Team | None:
    file, function = _RUNTIMES.get(system, ("", ""))
    try:
        address = ctypes.cast(ctypes.CDLL(str(folder / file))[function], ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None
    return Team(address or 0, function != "GOMP_parallel")


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

    # The caller works, too, so that one thread fewer is needed and a busy pool cannot stop it.
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
