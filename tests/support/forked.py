"""Processes for tests that need some of their own, without the seconds in which each would import torch again.

They are forked from a server that has imported what most of them import, and has run nothing. Each computes on one
thread.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import runpy
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

_IMPORTED = ["mpnn.cli.app", "mpnn.hf", "mpnn.models", "torch._dynamo", "matplotlib.backends.backend_agg"]


def process(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    """A process that is ready to start. `target` is a function of a module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context.Process(target=target, args=arguments)


def redirected(out: str, err: str) -> None:
    """The rest of this process writes to files."""
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_TRUNC, 0o644)
        os.dup2(file, number)


def run(script: Path | str, *arguments: Any, folder: Path, **environment: str) -> CompletedProcess[str]:
    """`python script arguments`, or `python -m script arguments` where it is the name of a module.

    Started in `folder`, with these variables besides those of this process. PYTHONPATH must be one of them.
    """
    (done,) = run_together([environment], script, *arguments, folder=folder)
    return done


def run_ranks(count: int, script: Path | str, *arguments: Any, folder: Path, **environment: str) -> list[str]:
    """The output of each process of a group that must succeed, with the variables that torchrun sets."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    group = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [environment | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    finished = run_together(each, script, *arguments, folder=folder)
    for done in finished:
        assert done.returncode == 0, f"{done.stdout}{done.stderr[-3000:]}"
    return [done.stdout for done in finished]


def run_together(
    environments: Iterable[dict[str, str]], script: Path | str, *arguments: Any, folder: Path
) -> list[CompletedProcess[str]]:
    """As `run`, a process for each environment. When one fails, the others are killed."""
    texts = [str(argument) for argument in arguments]
    with tempfile.TemporaryDirectory() as logs:
        started = []
        for k, environment in enumerate(environments):
            out, err = Path(logs, f"out{k}"), Path(logs, f"err{k}")
            child = process(_script, script, texts, str(folder), {**os.environ, **environment}, str(out), str(err))
            child.start()
            started.append((child, out, err))
        try:
            alive = [child for child, _, _ in started]
            while alive and not any(child.exitcode for child, _, _ in started):
                multiprocessing.connection.wait([child.sentinel for child in alive])
                alive = [child for child in alive if child.is_alive()]
        finally:
            for child, _, _ in started:
                child.kill()
                child.join()
        return [
            CompletedProcess(texts, child.exitcode or 0, out.read_text("utf-8"), err.read_text("utf-8"))
            for child, out, err in started
        ]


def _script(
    script: Path | str, arguments: list[str], folder: str, environment: dict[str, str], out: str, err: str
) -> None:
    import torch

    redirected(out, err)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    beside = [str(script.parent)] if isinstance(script, Path) else [folder]
    sys.path[:] = [*beside, *environment["PYTHONPATH"].split(os.pathsep), *_installed()]
    sys.argv = [str(script), *arguments]
    if isinstance(script, Path):
        left = runpy.run_path(str(script), run_name="__main__")
    else:
        left = runpy.run_module(script, run_name="__main__", alter_sys=True)
    if left and "RANK" in environment:
        # A group of gloo that is freed waits for its threads, which may wait for the interpreter: nothing is freed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _installed() -> list[str]:
    """Where Python itself and installed packages are: no folder that pytest added."""
    prefixes = (sys.prefix, sys.base_prefix)
    return [path for path in sys.path if any(Path(path).is_relative_to(prefix) for prefix in prefixes)]
