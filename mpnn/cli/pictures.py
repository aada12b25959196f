"""The pictures of `mpnn demo` and `mpnn train`, one file each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mpnn.cli.tasks import Run
from mpnn.graph.files import write_atomically
from mpnn.train.comparison import Comparison
from mpnn.view import plot

_DPI = 180


def topology(trained: Run, path: Path) -> None:
    figure = Figure(figsize=(3.5, 3.66), layout="constrained")
    plot.adjacency(trained.graph, figure.add_subplot(), title=trained.expression)
    _save(figure, path, bbox_inches="tight")


def step_times(lengths: Sequence[int], seconds: Mapping[str, Sequence[float]], path: Path) -> None:
    """Milliseconds of a training step against the length of the text, a line for each graph."""
    figure = Figure(figsize=(5.8, 3.6), layout="constrained")
    ax = figure.add_subplot()
    ax.set(xscale="log", yscale="log")
    for k, (name, of_graph) in enumerate(seconds.items()):
        at = 1e3 * np.array(of_graph)
        ax.plot(lengths, at, color=plot.SERIES[k], linewidth=2.0, marker="o", markersize=4.5)
        for length, y in zip(lengths[-3:], at[-3:], strict=True):
            above = k == int(np.argmax([s[-1] for s in seconds.values()]))
            ax.annotate(f"{y:,.0f} ms", (length, y), (0, 8 if above else -15), textcoords="offset points",
                        color=plot.SERIES[k], fontsize=9, ha="right" if above else "center")  # fmt: skip
        ax.annotate(name, (lengths[-1], at[-1]), (9, 0), textcoords="offset points", color=plot.SERIES[k], fontsize=9.5,
                    va="center", annotation_clip=False)  # fmt: skip
    ax.set_xticks(lengths, labels=[f"{length:,}" for length in lengths])
    ax.minorticks_off()
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    plot.style_axes(ax, "characters", "milliseconds of a training step")
    _save(figure, path)


def losses(results: Sequence[Run], path: Path) -> None:
    """Validation loss (text, graphs), accuracy (nodes) or MRR (links) over the steps. The name of a single result is
    the title."""
    figure = Figure(figsize=(5.8, 3.5), layout="constrained")
    ax = figure.add_subplot()
    first = results[0].history.val
    measure = next((name for name in ("accuracy", "loss") if name in first), next(iter(first)))
    of_nodes = measure == "accuracy"
    single = len(results) == 1
    history = {"" if single else r.expression: (r.history.val_step, r.history.val[measure]) for r in results}
    of_text = measure == "loss" and results[0].history.test_accuracy is None
    ylabel = f"validation {measure}{' (nats a character)' if of_text else ''}"
    title = results[0].expression if single else ""
    plot.curves(history, ax, ylabel=ylabel, xlabel="epoch" if of_nodes else "step", title=title)
    _save(figure, path)


def comparison_curves(comparison: Comparison, path: Path) -> None:
    """Validation error against training time, a line for each graph: the mean over its seeds, in a band of their range.
    Lines of graphs that dropped out end early."""
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    ax = figure.add_subplot()
    lines = {}
    for k, result in enumerate(comparison.results):
        at = np.linspace(0, result.seconds, 60)[1:]
        errors = np.array([result.errors(seconds=seconds) for seconds in at])
        ax.fill_between(at, errors.min(1), errors.max(1), color=plot.SERIES[k % len(plot.SERIES)], alpha=0.15, lw=0)
        lines[result.graph] = at.tolist(), errors.mean(1).tolist()
    plot.curves(
        lines,
        ax,
        xlabel="seconds of training",
        ylabel=f"validation error{comparison.unit and f' ({comparison.unit.strip()})'}",
    )
    finite = [error for _, errors in lines.values() for error in errors[len(errors) // 8 :] if np.isfinite(error)]
    if finite:
        low = min(finite)
        high = max(finite)
        ax.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
    _save(figure, path)


def comparison_costs(comparison: Comparison, path: Path) -> None:
    """Validation error after equal steps against the seconds of a step. Dominated graphs are grey."""
    figure = Figure(figsize=(5.8, 3.8), layout="constrained")
    ax = figure.add_subplot()
    dominated = comparison.dominated
    for k, result in enumerate(comparison.results):
        errors = np.array(result.errors(steps=comparison.steps))
        color = plot.MUTED if result.graph in dominated else plot.SERIES[k % len(plot.SERIES)]
        at = 1e3 * result.seconds_per_step, errors.mean()
        ax.errorbar(*at, yerr=errors.std(ddof=1) if len(errors) > 1 else None, fmt="o", color=color, capsize=3)
        ax.annotate(result.graph, at, xytext=(7, 5), textcoords="offset points", color=color, fontsize=9)
    ax.margins(x=0.25, y=0.15)
    plot.style_axes(ax, "milliseconds a step", f"validation error after {comparison.steps:,} steps")
    _save(figure, path)


def _save(figure: Figure, path: Path, **options: Any) -> None:
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=_DPI, **options))
