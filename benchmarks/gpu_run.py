"""One run on a GPU, within a number of seconds: compiles and checks in many processes, then times case after case."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu
from benchmarks.cases import select
from benchmarks.contest import Case
from benchmarks.machine import about
from benchmarks.run import Row, Unusable, run

_UNTIL = "MPNN_BENCHMARK_UNTIL"  # of a run that starts again: when it ends, by the clock


def measure(
    out: Path,
    seconds: float = 290.0,
    each: float = 0.05,
    only: Sequence[str] = (),
    small: bool = False,
    device: str = "cuda",
    processes: int | None = None,
    commit: str = "",
    resume: bool = False,
    say: Callable[[float, Row], None] = lambda at, row: None,
) -> dict[str, Any]:
    """The results, which are in the file `out` after every row.

    Args:
        seconds: of the whole run. each: for timing each entry of each row. only: texts in the titles of cases.
        processes: that compile beforehand. commit: of the code, where there is no repository.
        resume: go on after the cases that the file has. say: called with each row and the seconds until then.

    Raises:
        RuntimeError: torch finds no GPU.
        ValueError: no case has such a title.
    """
    began = time.monotonic()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # the check leaves the driver alone: processes are forked
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here")
    if device == "cpu":
        torch.set_num_threads(1)
    if _UNTIL in os.environ:
        resume, seconds = True, float(os.environ[_UNTIL]) - time.time()
    cases = select(gpu.cases(gpu.SMALL if small else gpu.DEFAULT, device), list(only))
    rows: list[Row] = json.loads(out.read_text())["rows"] if resume and out.is_file() else []
    begun = out.with_suffix(".begun")
    if resume and begun.is_file():  # the process died in this case, or was ended in it
        stopped = [case for case in _without(cases, rows) if case.title == begun.read_text()]
        rows += [row for case in stopped for row in gpu.unfinished(case)]
    cases = _without(cases, rows)
    until = began + seconds - 4.0  # a case takes a second or two
    if not resume:
        count = (gpu.processes() if device == "cuda" else 0) if processes is None else processes
        rows = gpu.prepare(cases, count, 0.25 * seconds) if count else gpu.rows_of_exact(cases)
        print(f"compiled and checked {len(rows)} rows after {time.monotonic() - began:.0f} s", flush=True)
    options = [*(f"--only {text!r}" for text in only), *["--small"] * small]
    name = {"gpu": torch.cuda.get_device_name()} if device == "cuda" else {}
    lead = about(("triton", "flash-linear-attention")) | {"cuda": torch.version.cuda}
    lead = {"command": " ".join(["python -m benchmarks gpu", *options]), **name, **lead}
    lead |= {"commit": commit} if commit else {}
    # those of "exact" that were not checked beforehand come last
    timed = sorted(_without(cases, rows), key=lambda case: case.group == gpu.EXACT)
    gc.freeze()  # what is imported is not looked through after each row

    def begin(case: Case) -> None:
        begun.write_text(case.title)
        # ends the process, also where it waits for a kernel that does not end; --resume continues after this case
        faulthandler.dump_traceback_later(gpu.LONGEST * (3 if case.group == gpu.PEERS else 1), exit=True)

    try:
        results = run(timed, each, lead, out, False, lambda row: say(time.monotonic() - began, row), until, rows, begin)
        faulthandler.cancel_dump_traceback_later()
        begun.unlink(missing_ok=True)
        return results
    except Unusable:
        faulthandler.cancel_dump_traceback_later()
        os.environ[_UNTIL] = str(time.time() + until + 4.0 - time.monotonic())
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _without(cases: Sequence[Case], rows: Sequence[Row]) -> list[Case]:
    done = {f"{row['group']}: {row['case']}" for row in rows}
    return [case for case in cases if case.title not in done]
