"""Small training runs side by side, one process each, so that a demo uses all cores.

A run's checkpoint is all that a process leaves: the command then finishes each run from its checkpoint, and
trains itself what a process did not. The weights are the same as without processes, as each trains on one thread.
"""

import os
import pickle
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from time import sleep
from typing import Any

import torch

from mpnn.train.checkpoint import Checkpoint
from mpnn.train.loop import History

_MANY = 6  # processes, each with torch and a model
_PAUSE = 0.05  # seconds
_PATIENCE = 30.0  # seconds until a process that was asked to stop is ended


def processes(runs: int) -> int:
    """How many processes train: all of two cores, half of more, as two of them often share one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(runs, _MANY, cores if cores <= 2 else max(2, cores // 2))


def train(
    runs: Sequence[Any],
    checkpoints: Sequence[Checkpoint],
    count: int,
    check: Callable[[], None],
    report: Callable[[int, int, History], None],
) -> None:
    """Trains the runs (`tasks.Run`) in `count` processes, as far as they get.

    `report(run, step, history)` is called here after each step, where the history has the last loss alone, and
    `check()` all the time: what they raise stops the processes after their step, each with its checkpoint written."""
    context = get_context("spawn")  # a fork would inherit locks of torch's threads
    following = context.Value("i", 0)
    stop = context.Event()
    reports = context.SimpleQueue()
    # As bytes: multiprocessing would share the memory of each tensor, by a file that both processes have open.
    shared = pickle.dumps((list(runs), list(checkpoints))), following, stop, reports, os.getpid()
    workers = [context.Process(target=_work, args=shared, daemon=True) for _ in range(count)]
    started = []
    try:
        for worker in workers:
            worker.start()
            started.append(worker)
        while any(worker.is_alive() for worker in started) or not reports.empty():
            while not reports.empty():
                k, step, loss = reports.get()
                report(k, step, History(train_loss=[loss]))
            check()
            sleep(_PAUSE)
    finally:
        stop.set()
        for worker in started:
            worker.join(_PATIENCE)
            worker.kill()


class _Asked(Exception):
    """The command asked this process to stop."""


def _work(packed: bytes, following: Any, stop: Any, reports: Any, command: int) -> None:
    """Trains one run after the other that no process has begun."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the command gets Ctrl-C too, and asks
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    runs, checkpoints = pickle.loads(packed)
    while not stop.is_set():
        with following.get_lock():
            k = following.value
            following.value += 1
        if k >= len(runs):
            return
        with suppress(Exception):  # the command meets the same error, and says it
            runs[k].fit(partial(_after_step, k, stop, reports, command), checkpoints[k])


def _after_step(k: int, stop: Any, reports: Any, command: int, step: int, history: History) -> None:
    if os.getppid() != command:  # it was killed: its next start continues from the last checkpoint
        os._exit(1)
    reports.put((k, step, history.train_loss[-1]))
    if stop.is_set():
        raise _Asked
