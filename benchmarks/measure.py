"""Taking turns: every entry of a contest is timed in the same rounds, so that a busy moment favors no entry."""

from __future__ import annotations

import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import BOTH, STEP, Entry

MIN_ROUNDS, MAX_ROUNDS = 3, 200
CACHE = 256 << 20  # bytes; five times the second-level cache of an H100
CLOCK = 2e9  # cycles a second of a GPU, at most
SLOW = 1.0  # seconds; what takes longer is timed once
clock = time.perf_counter  # what `on_threads` sets


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Runs a block on this many threads of torch and our kernels, with a seed. One thread is timed by the processor's
    clock, which other programs do not add to; several by the clock on the wall."""
    global clock
    clock = time.process_time if threads == 1 else time.perf_counter
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    try:
        yield
    finally:
        clock = time.perf_counter
        torch.set_num_threads(before)


def work(entry: Entry, direction: str) -> Callable[[], object]:
    """One round of an entry: forward alone without a tape, forward and backward, or a step as it is."""
    if direction == STEP:
        return entry.call
    if direction != BOTH:

        def forward() -> object:
            with torch.no_grad():
                return entry.call()

        return forward
    ones: list[torch.Tensor] = []

    def both() -> object:
        with torch.enable_grad():
            out = entry.call()
        if not ones:
            ones.append(torch.randn_like(out))
        return torch.autograd.grad(out, list(entry.leaves), ones[0])

    return both


def interleaved(works: Sequence[Callable[[], object]], seconds: float) -> list[list[float]]:
    """The times of each, in interleaved rounds, each for about `seconds` but for some rounds at least.

    All must have run before. The first round only says how long each takes, except for what is slow: that is enough.
    """
    trial = [timed(once) for once in works]
    rounds = [0 if t > SLOW else min(max(int(seconds / t), MIN_ROUNDS), MAX_ROUNDS) for t in trial]
    times = [[t] if r == 0 else [] for t, r in zip(trial, rounds, strict=True)]
    for turn in range(max(rounds, default=0)):
        for k, once in enumerate(works):
            if turn < rounds[k]:
                times[k].append(timed(once))
    return times


def timed(once: Callable[[], object]) -> float:
    """Seconds until the work is done, on a GPU too."""
    _finish()
    began = clock()
    once()
    _finish()
    return clock() - began


def on_gpu(once: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of each round by the events of the GPU, for about `seconds` in all.

    Before each round the GPU's cache is overwritten, so that no round finds its inputs there. Rounds are queued without
    waiting: a round that the GPU finishes sooner than the processor launches it takes the processor's time.
    """
    first = timed(once)
    rounds = min(max(int(seconds / first), MIN_ROUNDS), 50)
    in_cache = _cache(torch.cuda.current_device())
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for begin, end in marks:
        in_cache.zero_()
        begin.record()
        once()
        end.record()
    _finish()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def on_device_alone(once: Callable[[], object], host: float) -> float:
    """Seconds of a call's work on the GPU, without the time that the processor takes to launch it: all is queued while
    the GPU is kept busy. `host`: seconds that launching takes. A call that waits for the GPU takes both times."""
    in_cache = _cache(torch.cuda.current_device())
    cycles = int(2 * host * CLOCK)
    times = []
    for _ in range(MIN_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(cycles)
        in_cache.zero_()
        begin.record()
        once()
        end.record()
        _finish()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


@cache
def _cache(device: int) -> torch.Tensor:
    return torch.empty(CACHE // 4, dtype=torch.int32, device=device)


def launched(once: Callable[[], object], seconds: float) -> float:
    """Seconds that the processor takes to launch a call whose work takes this many seconds on a GPU."""
    rounds = 10 if seconds < 0.01 else 2
    _finish()
    began = time.perf_counter()
    for _ in range(rounds):
        once()
    taken = time.perf_counter() - began
    _finish()
    return taken / rounds


def usable() -> bool:
    """Whether this process can still use the GPU, if it did: not after an illegal access, nor while its random numbers
    count for a CUDA graph whose capture failed."""
    if not torch.cuda.is_initialized():
        return True
    try:
        torch.cuda.synchronize()
        torch.randn(1, device="cuda")
    except RuntimeError:
        return False
    return True


def _finish() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def summary(times: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(times), "least": min(times), "rounds": len(times)}


def peak(once: Callable[[], object]) -> int | None:
    """How far one call raises the process's memory above what it holds before, in bytes; None where the kernel does not
    report it (it is read from Linux' /proc). With a GPU in use, the memory of the GPU."""
    if torch.cuda.is_initialized():
        _finish()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        once()
        _finish()
        return torch.cuda.max_memory_allocated() - held
    if not Path("/proc/self/clear_refs").exists():
        return None
    gc.collect()
    _trim()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the highest mark is where memory is now
    except OSError:
        return None
    before = _status("VmRSS")
    once()
    return max(_status("VmHWM") - before, 0)


def _trim() -> None:
    """Gives freed memory back to the system, so that a call that takes it again is seen to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    return 0
