"""Pictures of measurements: time against length, density, edges, heads and width, a line for each entry; and the times
of peers divided by mpnn's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import floor, log10
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mpnn.view.plot import FRAME, INK, MUTED, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {"nodes": "N", "density": "density", "edges": "edges", "heads": "heads (their width shrinks as they grow)"}


def name_of(group: str) -> str:
    """The file of a group's picture."""
    return f"performance_{group}.png"


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draws a picture for each group that has a series, forward next to forward+backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

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
        figure.savefig(folder / name_of(group), dpi=110)
        plt.close(figure)


def draw_peers(ratios: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """A row for each peer: lines from the lowest to the highest ratio, and points at the medians."""
    from matplotlib.figure import Figure

    names = sorted(ratios, key=lambda name: max(map(median, ratios[name].values())))
    directions = list(dict.fromkeys(direction for found in ratios.values() for direction in found))
    figure = Figure(figsize=(7.5, 1 + 0.3 * len(names)), layout="constrained")
    ax = figure.subplots()
    ax.axvline(1, color=MUTED, lw=1, ls="--")
    for k, (direction, color) in enumerate(zip(directions, SERIES, strict=False)):
        for y, name in enumerate(names):
            found = ratios[name].get(direction, ())
            if found:
                height = y + 0.15 - 0.3 * k
                ax.plot([min(found), max(found)], [height] * 2, color=color, lw=1.5)
                ax.plot(
                    [median(found)], [height], "o", color=color, ms=5, label=direction if name == names[-1] else None
                )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    ax.set_yticks(range(len(names)), names, fontsize=8, color=INK)
    ax.set_xlabel("peer's time / mpnn's time (median, lowest and highest of all cases)", color=MUTED)
    ax.grid(axis="x", color=FRAME, lw=0.5)
    ax.tick_params(axis="x", colors=MUTED, labelsize=8)
    ax.legend(fontsize=8, frameon=False, loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _lines(ax: Axes, rows: Sequence[dict[str, Any]], title: str) -> None:
    x = rows[0]["x"]
    entries = list(dict.fromkeys(name for row in rows for name, e in row["entries"].items() if "least" in e))
    for color, name in zip(SERIES * len(entries), entries, strict=False):
        points = sorted(
            (row["facts"][x], row["entries"][name]["least"] * 1e3)
            for row in rows
            if "least" in row["entries"].get(name, {})
        )
        ours = name == rows[0]["ours"]
        ax.plot(*zip(*points, strict=True), "o-", color=color, label=name, lw=2.2 if ours else 1.3, ms=4)
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
