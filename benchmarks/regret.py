"""How far plans are from the fastest backend: regret is the time of the chosen backend over the minimum of all.

All backends that support a request run it, interleaved, after their results were compared. Times are minima. On one
thread they are of the processor's time, so that other work on the machine disturbs them little. On several threads they
are of the clock, because waiting threads use processor time too, and the machine must be idle. A request whose choice
seems more than `DOUBTFUL` times as slow as the fastest is measured again, these two alone and for longer: noise only
adds regret.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.requests import KINDS, draw
from mpnn.backends import BACKENDS
from mpnn.backends.__init__ import Backend
from mpnn.engine.choice import own_refusal as why_not
from mpnn.round import Round

DOUBTFUL = 1.1
LIMIT = 1.3
_HOPELESS = 20.0  # times the lowest estimate: not run, because it would take most of the time of the benchmark
_SLOW = 3.0  # times the fastest: run twice only


@dataclass(frozen=True)
class Times:
    """The seconds that each backend took for the request number `index` of a seed."""

    seed: int
    index: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Regret:
    """The choice of the plan for a request, and its time over the minimum time."""

    kind: str
    text: str
    chosen: str
    fastest: str
    ratio: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f}  {self.chosen} instead of {self.fastest}: {self.kind}, {self.text}"


def measure(seed: int, index: int, seconds: float) -> Times:
    """The times of request `index` of a seed, each backend for about `seconds`."""
    return Times(seed, index, times(draw(seed, index).request, seconds))


def times(request: Round, seconds: float) -> dict[str, float]:
    """The seconds that each backend takes for a request, after their results were compared."""
    able = candidates(request)
    check(request, able)
    works = {b.NAME: work(request, b.run) for b in able}
    found = least(works, seconds)
    chosen, fastest = choice(request, found), min(found, key=found.__getitem__)
    if found[chosen] > DOUBTFUL * found[fastest]:
        again = least({name: works[name] for name in (chosen, fastest)}, 4 * seconds)
        found |= {name: min(found[name], again[name]) for name in again}
    return found


def regret(measured: Times) -> Regret:
    """The regret of what the plan chooses now, by times that were measured before."""
    drawn, seconds = draw(measured.seed, measured.index), measured.seconds
    chosen, fastest = choice(drawn.request, seconds), min(seconds, key=seconds.__getitem__)
    return Regret(drawn.kind, drawn.text, chosen, fastest, seconds[chosen] / seconds[fastest])


def choice(request: Round, names: Iterable[str]) -> str:
    """The backend of least estimated time among those named."""
    return min((b for b in BACKENDS if b.NAME in names), key=lambda b: b.estimate(request).seconds).NAME


def candidates(request: Round) -> list[Backend]:
    """All backends that support the request, but those estimated to be `_HOPELESS`."""
    estimates = {b.NAME: b.estimate(request).seconds for b in BACKENDS if why_not(b, request) is None}
    return [b for b in BACKENDS if estimates.get(b.NAME, float("inf")) < _HOPELESS * min(estimates.values())]


def check(request: Round, backends: list[Backend]) -> None:
    """Raises AssertionError if results differ between the backends."""
    outs = [b.run(request)[0] for b in backends]
    close = torch.finfo(request.value.dtype).eps ** 0.5
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=close, atol=close)


def work(request: Round, run: Callable[[Round], tuple[torch.Tensor, ...]]) -> Callable[[], None]:
    """One round: forward, and backward if gradients are needed."""
    leaves = [t for t in request.tensors if t.requires_grad]
    direction = torch.randn_like(run(request)[0])

    def once() -> None:
        out = run(request)[0]
        if leaves:
            torch.autograd.grad(out, leaves, direction)

    return once


def least(works: dict[str, Callable[[], None]], seconds: float) -> dict[str, float]:
    """The minimum time of each, interleaved, for about `seconds` each. Slow ones drop out after two rounds."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times = dict.fromkeys(works, float("inf"))
    ends, rounds = time.perf_counter() + seconds * len(works), 0
    while rounds < 3 or time.perf_counter() < ends:
        rounds += 1
        for name, once in works.items():
            if rounds > 2 and times[name] > _SLOW * min(times.values()):
                continue
            began = clock()
            once()
            times[name] = min(times[name], clock() - began)
    return times


# ------------------------------------------------------------------------------------------------ files and reports


def read(path: Path) -> Iterator[Times]:
    for line in path.read_text().splitlines():
        yield Times(**json.loads(line))


def append(path: Path, times: Times) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(times)) + "\n")


def summary(regrets: list[Regret], worst: int = 10) -> dict[str, Any]:
    """The mean regret, the share over `LIMIT` and the largest, by kind of graph and in all; and the worst cases."""
    rows = []
    for kind in (*KINDS, "all"):
        ratios = [r.ratio for r in regrets if kind in (r.kind, "all")]
        if ratios:
            share = sum(ratio > LIMIT for ratio in ratios) / len(ratios)
            rows.append(
                {"kind": kind, "requests": len(ratios), "mean": fmean(ratios), "share": share, "largest": max(ratios)}
            )
    cases = sorted((r for r in regrets if r.ratio > 1), key=lambda r: -r.ratio)[:worst]
    return {"rows": rows, "worst": [str(r) for r in cases]}


def report(summary: dict[str, Any]) -> Iterator[str]:
    """The lines of a summary, as they are printed."""
    yield f"{'':<20} requests  mean  over {LIMIT}  worst"
    for row in summary["rows"]:
        yield (f"{row['kind']:<20} {row['requests']:>8}  {row['mean']:.3f}  {row['share']:>7.1%}  {row['largest']:.2f}")
    yield from summary["worst"]
