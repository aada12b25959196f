"""Shared code of the demonstrations of docs/results.md: options, a record that is written after each point, resume.

A demonstration measures independent points, such as one training for each graph and depth, and draws one figure of
them. A killed script resumes: recorded points are not measured again, so a finished script only draws.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

from experiment import command_line, console, machine
from matplotlib.figure import Figure
from rich.progress import Progress

from mpnn.graph.files import write_atomically
from mpnn.train.checkpoint import differences


def parser(description: str | None) -> argparse.ArgumentParser:
    """A parser of the options that all demonstrations have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("results/demonstrations"), help="folder of record and figure")
    options.add_argument("--force", action="store_true", help="delete the record, and start over")
    return options


def measure(
    name: str, points: Mapping[str, Callable[[], Any]], options: argparse.Namespace, settings: dict[str, Any]
) -> dict[str, Any]:
    """Calls those of `points` that are not recorded, and writes OUT/NAME.json after each.

    Args:
        points: functions that return what json can write, by their names in the record.
        settings: what decides the result of a point. A record with other settings is not overwritten.

    Returns:
        The value of each point, in the order of `points`.
    """
    path, where = options.out / f"{name}.json", machine()
    options.out.mkdir(parents=True, exist_ok=True)
    record = _read(path, settings, options.force)
    with Progress(console=console, transient=True) as bars:
        bar = bars.add_task(name, total=len(points), completed=sum(key in record["points"] for key in points))
        for key, value in points.items():
            if key in record["points"]:
                continue
            bars.update(bar, description=key)
            start = perf_counter()
            try:
                record["points"][key] = value()
            except KeyboardInterrupt:
                console.print("stopped; the same command continues")
                sys.exit(130)
            record["seconds"] = round(record["seconds"] + perf_counter() - start, 1)
            record |= where
            text = json.dumps(record, indent=1) + "\n"
            write_atomically(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
            bars.advance(bar)
    return {key: record["points"][key] for key in points}


def save(figure: Figure, name: str, options: argparse.Namespace) -> None:
    """Writes the figure to OUT/NAME.png."""
    path = options.out / f"{name}.png"
    figure.savefig(path, dpi=130)
    console.print(f"drawn in {path}", soft_wrap=True)


def _read(path: Path, settings: dict[str, Any], force: bool) -> dict[str, Any]:
    """The record of earlier points, or a new one."""
    if force or not path.exists():
        return {"settings": settings, "command": command_line(), "seconds": 0.0, "points": {}}
    record = json.loads(path.read_text(encoding="utf-8"))
    if changes := differences(record["settings"], settings):
        sys.exit(f"{path} records other settings: {changes}; --force replaces it, --out names another folder")
    return record
