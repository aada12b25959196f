"""Pictures of series: time against length, density, edges, heads and width, one line for each entry."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpnn.plot import FRAME, INK, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"nodes": "N", "density": "density", "edges": "edges", "heads": "heads (their width shrinks as they grow)"}


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> dict[str, Path]:
    """A picture for each group that has a series, forward beside forward+backward; the paths by group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    paths = {}
    for group in dict.fromkeys(row["group"] for row in rows if row["series"] and "entries" in row):
        members = [row for row in rows if row["group"] == group and row["series"] and "entries" in row]
        names = list(dict.fromkeys(row["series"] for row in members))
        directions = list(dict.fromkeys(row["direction"] for row in members))
        size = (5.2 * len(directions), 3.8 * len(names))
        figure, axes = plt.subplots(len(names), len(directions), figsize=size, layout="constrained", squeeze=False)
        for i, name in enumerate(names):
            for k, direction in enumerate(directions):
                shown = [row for row in members if (row["series"], row["direction"]) == (name, direction)]
                _lines(axes[i, k], shown, f"{name}, {direction}")
        folder.mkdir(parents=True, exist_ok=True)
        paths[group] = folder / f"performance_{group}.png"
        figure.savefig(paths[group], dpi=110)
        plt.close(figure)
    return paths


def _lines(ax: Axes, rows: Sequence[dict[str, Any]], title: str) -> None:
    x = rows[0]["x"]
    entries = list(dict.fromkeys(name for row in rows for name, e in row["entries"].items() if "median" in e))
    for colour, name in zip(SERIES * len(entries), entries, strict=False):
        points = sorted(
            (row["facts"][x], row["entries"][name]["median"] * 1e3)
            for row in rows
            if "median" in row["entries"].get(name, {})
        )
        ours = name == rows[0]["ours"]
        ax.plot(*zip(*points, strict=True), "o-", color=colour, label=name, lw=2.2 if ours else 1.3, ms=4)
    ax.set_xscale("log", base=2 if x in ("nodes", "heads") else 10)
    ax.set_yscale("log")
    low, high = ax.get_ylim()
    narrow = high < 100 * low
    ax.set_title(title, color=INK, fontsize=10)
    ax.set_xlabel(LABELS.get(x, x), color=MUTED)
    ax.set_ylabel("milliseconds", color=MUTED)
    ax.grid(color=FRAME, lw=0.5)
    ax.tick_params(which="both", colors=MUTED, labelsize=8)
    ax.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    ax.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if narrow and round(y / 10 ** floor(log10(y))) in (2, 5) else "")
    if x != "density":
        ax.xaxis.set_major_formatter(lambda v, _: f"{v:g}" if v < 1e6 else f"{v / 1e6:g}M")
    ax.legend(fontsize=8, frameon=False)
