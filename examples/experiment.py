"""Shared code of the scripts of the tables: options, seeds, records, checkpoints, a results line, learning curves.

A script trains each of its models with several seeds, and writes results/NAME.json after each seed. A killed script
resumes: recorded seeds are skipped, and the seed that was running continues from its checkpoint, or from those of its
stages (`stage`). The table in docs/results.md is made of these files by docs/results.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.progress import Progress as Bars

import mpnn
from mpnn.backends.tuned import processor
from mpnn.graph.files import write_atomically
from mpnn.train.checkpoint import Checkpoint, CheckpointError, differences
from mpnn.train.loop import History, Progress, TrainingDiverged

console = Console(highlight=False)


@dataclass(frozen=True)
class Row:
    """A row of the table: a model on a task, and the number of its paper.

    name: of the files of the row. metric: what is measured, with its unit. published: the paper's number, or "none".
    source: where it stands.
    """

    name: str
    task: str
    model: str
    metric: str
    published: str
    source: str


@dataclass(frozen=True)
class Outcome:
    """The result of a seed: the measured value, or a value after each validation (`curve`), whose common best
    counts."""

    history: History
    value: float | None = None
    curve: list[float] | None = None


Train = Callable[[int, Progress, Checkpoint], Outcome]
"""Trains with a seed: `train(seed, progress, checkpoint)`."""


def parser(description: str | None, seeds: int, models: Iterable[str]) -> argparse.ArgumentParser:
    """A parser of the options that all scripts have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", choices=list(models), default=list(models), metavar="MODEL",
                         help=f"which of: {', '.join(models)}")  # fmt: skip
    options.add_argument("--seeds", type=int, default=seeds, help="number of random seeds (or folds)")
    options.add_argument("--steps", type=int, help="number of training steps; default: as published")
    options.add_argument("--out", type=Path, default=Path("results"), help="folder of records, checkpoints and plots")
    options.add_argument("--force", action="store_true", help="delete records and checkpoints, and start over")
    return options


def measure(row: Row, train: Train, options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """Trains with each seed that is not recorded yet, and prints the results line. Returns the record.

    Args:
        settings: what decides the result, besides the seed. A record with other settings is not overwritten.
    """
    path = options.out / f"{row.name}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    record, where = _read(path, row, settings, options.force), machine()
    with Bars(console=console, transient=True) as bars:
        for seed in range(options.seeds):
            checkpoint = Checkpoint(options.out / f"{row.name}-{seed}.pt", run={"row": row.name, "seed": seed})
            if options.force:
                _delete(checkpoint)
            if str(seed) in record["seeds"]:
                continue
            bar = bars.add_task(f"{row.name}, seed {seed}", total=None)
            torch.manual_seed(seed)
            before = _seconds(checkpoint)
            start = perf_counter()
            try:
                outcome = train(seed, lambda step, history, bar=bar: bars.update(bar, completed=step), checkpoint)
            except (TrainingDiverged, CheckpointError) as error:
                sys.exit(f"{row.name}, seed {seed}: {error}")
            except KeyboardInterrupt:
                console.print("stopped; the same command continues")
                sys.exit(130)
            record["seeds"][str(seed)] = {
                "value": outcome.value,
                "curve": outcome.curve,
                "seconds": round(before + perf_counter() - start, 1),
                "steps": len(outcome.history.train_loss),
                "ms_per_step": round(1e3 * outcome.history.seconds_per_step, 2),
            }
            record |= where
            text = json.dumps(record, indent=1) + "\n"
            write_atomically(path, lambda temporary, text=text: temporary.write_text(text, encoding="utf-8"))
            _delete(checkpoint)
            draw_curves(outcome.history, row, options.out / f"{row.name}.png")
            bars.remove_task(bar)
    console.print(line(record), soft_wrap=True, markup=False)
    return record


def stage(checkpoint: Checkpoint, name: str) -> Checkpoint:
    """The checkpoint of an earlier stage of a seed, such as pre-training. The file remains until the seed is recorded,
    so a resumed script does not repeat a finished stage."""
    return Checkpoint(checkpoint.path.with_suffix(f".{name}.pt"), run=checkpoint.run | {"stage": name})


def values(record: dict[str, Any]) -> list[float]:
    """One value for each seed. Where each has a curve, that of the validation that is best on average over the seeds,
    which is the protocol of Xu et al. 2019 for folds."""
    seeds = record["seeds"].values()
    curves = [seed["curve"] for seed in seeds]
    if None in curves:
        return [seed["value"] for seed in seeds]
    means = [mean(column) for column in zip(*curves, strict=True)]
    best = means.index(max(means))
    return [curve[best] for curve in curves]


def summary(record: dict[str, Any]) -> str:
    """Mean ± standard deviation of the seeds."""
    numbers = values(record)
    spread = f" ± {stdev(numbers):.{_digits(numbers)}f}" if len(numbers) > 1 else ""
    return f"{mean(numbers):.{_digits(numbers)}f}{spread}"


def line(record: dict[str, Any]) -> str:
    """The results line, the same for all scripts."""
    row, seeds = record["row"], record["seeds"].values()
    return (
        f"{row['task']}, {row['model']}: {summary(record)} {row['metric']} ({len(seeds)} seeds; published "
        f"{row['published']}); {mean(seed['seconds'] for seed in seeds):.0f} s a seed"
    )


def draw_curves(history: History, row: Row, path: Path) -> None:
    """Draws the training loss and every validation measure of a run over its steps."""
    figure, axes = plt.subplots(1, 1 + len(history.val), figsize=(4 + 4 * len(history.val), 3), layout="constrained")
    first, *others = [axes] if not history.val else axes
    first.plot(range(1, len(history.train_loss) + 1), history.train_loss, linewidth=0.8)
    first.set(title=f"{row.model}: training loss", xlabel="step")
    for ax, (name, measures) in zip(others, history.val.items(), strict=True):
        ax.plot(history.val_step, measures)
        ax.set(title=f"validation {name}", xlabel="step")
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _digits(numbers: list[float]) -> int:
    return 1 if max(numbers) >= 10 else 3


def _read(path: Path, row: Row, settings: dict[str, Any], force: bool) -> dict[str, Any]:
    """The record of earlier seeds, or a new one."""
    new = {"row": asdict(row), "settings": settings, "command": command_line(), "seeds": {}}
    if force or not path.exists():
        return new
    record = json.loads(path.read_text(encoding="utf-8"))
    if changes := differences(record["settings"], settings):
        sys.exit(f"{path} records other settings: {changes}; --force replaces it, --out names another folder")
    return record | {"row": asdict(row), "command": command_line()}


def _files(checkpoint: Checkpoint) -> list[Path]:
    """The checkpoint files of a seed: of all its stages."""
    return list(checkpoint.path.parent.glob(f"{checkpoint.path.stem}.*pt"))


def _delete(checkpoint: Checkpoint) -> None:
    for path in [checkpoint.path, *_files(checkpoint)]:
        Checkpoint(path).delete()


def _seconds(checkpoint: Checkpoint) -> float:
    """The training time in the checkpoints of a seed, of a script that was killed."""
    states = (torch.load(path, weights_only=True)["state"] for path in _files(checkpoint))
    return sum(sum(state["history"]["seconds"]) for state in states)


def command_line() -> str:
    """The command that runs this script with these options."""
    return shlex.join(["python", os.path.relpath(sys.argv[0]), *(word for word in sys.argv[1:] if word != "--force")])


def machine() -> dict[str, Any]:
    """Machine, versions and commit."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    return {
        "hardware": f"{processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores",
        "versions": f"mpnn {mpnn.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "commit": commit,
    }
