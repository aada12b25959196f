"""Runs cases one after the other: makes the inputs, checks, measures interleaved rounds, judges, and writes the
results."""

from __future__ import annotations

import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.contest import BOTH, Case, Contest, Entry, Missing
from benchmarks.measure import SLOW, interleaved, launched, on_device_alone, on_gpu, peak, summary, usable, work
from benchmarks.truth import Wrong
from mpnn.data import DatasetNotFound

Row = dict[str, Any]


class Unusable(RuntimeError):
    """A kernel failed in a way after which this process cannot use the GPU."""


def run(
    cases: Sequence[Case],
    seconds: float,
    about: dict[str, Any],
    out: Path,
    judged: bool = True,
    say: Callable[[Row], None] = lambda row: None,
    until: float = float("inf"),
    known: Sequence[Row] = (),
    begin: Callable[[Case], None] = lambda case: None,
) -> dict[str, Any]:
    """Every case in each of its directions; `out` is written again after each, so that nothing is lost when it stops.

    Args:
        seconds: spent on each entry of each row. about: machine, versions and the like, which lead the results.
        judged: whether bars apply. say: called with each row when it is done.
        until: a time of `time.monotonic()` after which no case begins; "not run" names those. known: rows that lead.
        begin: called with each case before it begins.
    """
    results = {**about, "rows": [*known], "not run": []}
    began = time.perf_counter()
    write(results, out)
    for case in cases:
        if time.monotonic() > until:
            results["not run"].append(case.title)
            continue
        begin(case)
        for row in rows_of(case, seconds, judged):
            results["rows"].append(row)
            results["seconds"] = round(time.perf_counter() - began, 1)
            write(results, out)
            say(row)
        if not usable():
            raise Unusable
    write(results, out)
    return results


def write(results: dict[str, Any], out: Path) -> None:
    """Replaces the file at once, a line for each row: who stops the run finds the rows before."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = out.with_suffix(".new")
    lead = json.dumps({**results, "rows": []}, indent=1)
    rows = ",\n".join(map(json.dumps, results["rows"]))
    fresh.write_text(lead.replace('"rows": []', f'"rows": [\n{rows}\n]', 1) + "\n")
    fresh.replace(out)


def rows_of(case: Case, seconds: float, judged: bool = True) -> Iterator[Row]:
    """A row for each direction. What is wrong is refused: its row has an error and no times."""
    try:
        torch.manual_seed(0)
        with _quiet():
            contest = case.make()
    except (DatasetNotFound, ImportError) as problem:
        for direction in case.directions:
            yield _row(case, direction) | {"skipped": _sentence(problem)}
        return
    except Exception as problem:  # one case that cannot be made must not cost the run its other cases
        for direction in case.directions:
            yield _row(case, direction) | {"error": _sentence(problem)}
        return
    for direction in case.directions:
        with _quiet():
            row = measured(case, contest, direction, seconds, judged)
        yield row
        gc.collect()
        if torch.cuda.is_initialized():
            with suppress(RuntimeError):  # of a GPU that can no longer be used
                torch.cuda.empty_cache()


def checked(case: Case) -> list[Row]:
    """A row for each direction with the error of this library's entry alone, and without times."""
    rows = []
    torch.manual_seed(0)
    contest = case.make()
    ours = contest.entries[0]
    assert isinstance(ours, Entry)
    assert contest.verify is not None
    for direction in case.directions:
        row = _row(case, direction) | {"facts": contest.facts}
        try:
            row["checked"] = {"by": contest.verified_by, "errors": {ours.name: contest.verify(ours, direction)}}
        except Exception as problem:  # the other cases go on
            row["error"] = _sentence(problem)
        rows.append(row)
    return rows


@contextmanager
def _quiet() -> Iterator[None]:
    """Peers warn of their own making."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measured(case: Case, contest: Contest, direction: str, seconds: float, judged: bool) -> Row:
    row = _row(case, direction) | {"facts": contest.facts}
    ours = contest.entries[0]
    assert isinstance(ours, Entry)
    notes: dict[str, str] = {}
    errors: dict[str, float] = {}
    able: list[Entry] = []
    for entry in contest.entries:
        if isinstance(entry, Missing):
            notes[entry.name] = entry.why
        elif direction == BOTH and entry.only_forward:
            notes[entry.name] = entry.only_forward
        else:
            able.append(entry)

    def check(entry: Entry) -> None:
        if contest.verify is None or not entry.checked:
            return
        if entry.module is not None:
            entry.module.eval()
        errors[entry.name] = contest.verify(entry, direction)
        if entry.module is not None:
            entry.module.train()

    def warm(entry: Entry) -> None:
        if entry.name not in errors or entry.answer is not None:
            work(entry, direction)()

    # All are checked before any has run: a training step changes what the next would be compared with.
    for attempt in (check, warm):
        for entry in list(able):
            try:
                attempt(entry)
            except Exception as problem:  # peers fail in ways of their own, and are then left out
                if entry is ours:
                    return row | {"error": _sentence(problem)}
                notes[entry.name] = ("left out: " if isinstance(problem, Wrong) else "failed: ") + _sentence(problem)
                able.remove(entry)
    works = [work(entry, direction) for entry in able]
    with_gpu = torch.cuda.is_initialized()
    times = [on_gpu(once, seconds) for once in works] if with_gpu else interleaved(works, seconds)
    entries = {entry.name: summary(found) for entry, found in zip(able, times, strict=True)}
    for entry, once in zip(able, works, strict=True):
        if with_gpu:
            host = launched(once, entries[entry.name]["median"])
            entries[entry.name] |= {"host": host, "device": on_device_alone(once, host)}
        if entry is ours or entries[entry.name]["median"] < SLOW:
            entries[entry.name]["peak_bytes"] = peak(once)
    entries |= {name: {"note": why} for name, why in notes.items()}
    row |= {"ours": ours.name, "entries": entries}
    if errors:
        row["checked"] = {"by": contest.verified_by, "errors": errors}
    bars = [bar for bar in contest.bars if bar.direction == direction] if judged else []
    judged_time = "median" if with_gpu else "least"  # a GPU's events are not disturbed by other programs
    return row | {"bars": [bar.judge(entries, ours.name, judged_time) for bar in bars]}


def _row(case: Case, direction: str) -> Row:
    return {"group": case.group, "case": case.name, "direction": direction, "series": case.series, "x": case.x}


def _sentence(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0] if lines else ''}"[:300]
