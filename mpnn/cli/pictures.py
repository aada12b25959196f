"""The pictures of `mpnn demo` and `mpnn train`, one file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from mpnn import plot
from mpnn.cli.tasks import Trained
from mpnn.files import write_atomically
from mpnn.graph import Graph
from mpnn.train.comparison import Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DPI = 180
_ROUNDS = 30


def topology(trained: Trained, path: Path) -> None:
    figure = Figure(figsize=(3.5, 3.66), layout="constrained")
    plot.adjacency(trained.graph, figure.add_subplot(), title=trained.expression)
    _save(figure, path, bbox_inches="tight")


def heads(trained: Trained, weights: Sequence[Tensor], path: Path) -> None:
    """One attention matrix for each layer (row) and head (column); `weights` has [E, H] for each layer."""
    columns = weights[0].shape[1]
    figure = Figure(figsize=(1.45 * columns + 0.9, 1.6 * len(weights) + 0.2), layout="constrained")
    axes = figure.subplots(len(weights), columns, squeeze=False)
    for layer, of_layer in enumerate(weights):
        for head, ax in enumerate(axes[layer]):
            plot.attention(trained.graph, of_layer[:, head], ax, title="", bar=False)
            ax.set_title(f"layer {layer + 1}, head {head + 1}", loc="left", color=plot.MUTED, fontsize=9, pad=4)
            ax.set(xlabel="", ylabel="", xticks=[], yticks=[])
    plot.weight_bar(list(axes.flat))
    _save(figure, path)


def losses(results: Sequence[Trained], path: Path) -> None:
    """Validation loss (text) or accuracy (nodes) over the steps. The name of a single result is the title."""
    figure = Figure(figsize=(7.4, 4.0), layout="constrained")
    ax = figure.add_subplot()
    of_nodes = bool(results[0].history.val_accuracy)
    single = len(results) == 1
    history = {
        "" if single else r.expression: (r.history.val_step, r.history.val_accuracy if of_nodes else r.history.val_loss)
        for r in results
    }
    ylabel = "validation accuracy" if of_nodes else "validation loss (nats a character)"
    title = results[0].expression if single else ""
    plot.curves(history, ax, ylabel=ylabel, xlabel="epoch" if of_nodes else "step", title=title)
    _save(figure, path)


def comparison_curves(found: Comparison, path: Path) -> None:
    """Validation error against training time, a line for each graph: the mean over its seeds, in a band of their range.
    Lines of graphs that dropped out end early."""
    figure = Figure(figsize=(7.4, 4.4), layout="constrained")
    ax, lines = figure.add_subplot(), {}
    for k, result in enumerate(found.results):
        at = np.linspace(0, result.seconds, 60)[1:]
        errors = np.array([result.errors(seconds=seconds) for seconds in at])
        ax.fill_between(at, errors.min(1), errors.max(1), color=plot.SERIES[k % len(plot.SERIES)], alpha=0.15, lw=0)
        lines[result.graph] = at.tolist(), errors.mean(1).tolist()
    plot.curves(
        lines, ax, xlabel="seconds of training", ylabel=f"validation error{found.unit and f' ({found.unit.strip()})'}"
    )
    finite = [error for _, errors in lines.values() for error in errors[len(errors) // 8 :] if np.isfinite(error)]
    if finite:
        low, high = min(finite), max(finite)
        ax.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
    _save(figure, path)


def comparison_costs(found: Comparison, path: Path) -> None:
    """Validation error after equal steps against the seconds of a step. Dominated graphs are grey."""
    figure = Figure(figsize=(7.4, 4.4), layout="constrained")
    ax, dominated = figure.add_subplot(), found.dominated
    for k, result in enumerate(found.results):
        errors = np.array(result.errors(steps=found.steps))
        colour = plot.MUTED if result.graph in dominated else plot.SERIES[k % len(plot.SERIES)]
        at = 1e3 * result.seconds_per_step, errors.mean()
        ax.errorbar(*at, yerr=errors.std(ddof=1) if len(errors) > 1 else None, fmt="o", color=colour, capsize=3)
        ax.annotate(result.graph, at, xytext=(7, 5), textcoords="offset points", color=colour, fontsize=9)
    ax.set_xlabel("milliseconds a step", color=plot.MUTED, fontsize=9)
    ax.set_ylabel(f"validation error after {found.steps:,} steps", color=plot.MUTED, fontsize=9)
    ax.margins(x=0.25, y=0.15)
    ax.tick_params(colors=plot.MUTED, labelsize=9)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(plot.FRAME)
    _save(figure, path)


def points(graph: Graph, x: Tensor, classes: Tensor, path: Path) -> None:
    """The graph over points x [N, F]: a force-directed layout that starts at the first two principal components."""
    figure = Figure(figsize=(7.4, 6.4), layout="constrained")
    _, _, directions = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    components = (x - x.mean(0)) @ directions[:2].T
    positions = plot.springs(graph, components / components.abs().max(), _ROUNDS)
    plot.network(graph, figure.add_subplot(), positions=positions, classes=classes, title="")
    _save(figure, path)


def neighbours(graph: Graph, weights: Tensor, images: Tensor, labels: Tensor, nodes: Sequence[int], path: Path) -> None:
    """One row for each of `nodes`: its image, then its in-neighbors with their weights [E], the largest first."""
    src, dst = graph.edge_index
    columns = 9
    figure = Figure(figsize=(7.0, 0.9 * len(nodes)))
    margins = {"left": 0.01, "right": 0.99, "top": 1 - 0.2 / len(nodes), "bottom": 0.01, "hspace": 0.35, "wspace": 0.12}
    axes = figure.subplots(len(nodes), columns + 1, squeeze=False, gridspec_kw=margins)
    for row, node in zip(axes, nodes, strict=True):
        _image(row[0], images[node], f"a {int(labels[node])}", plot.INK)
        edges = (dst == node).nonzero().squeeze(1)
        strongest = edges[weights[edges].argsort(descending=True)][:columns]
        for ax in row[1:]:
            ax.axis("off")
        for ax, edge in zip(row[1:], strongest.tolist(), strict=False):
            source = int(src[edge])
            name = "itself" if source == node else f"a {int(labels[source])}"
            _image(ax, images[source], f"{name}: {weights[edge]:.2f}", plot.MUTED)
    _save(figure, path)


def _save(figure: Figure, path: Path, **options: Any) -> None:
    write_atomically(path, lambda temporary: figure.savefig(temporary, dpi=_DPI, **options))


def _image(ax: Axes, pixels: Tensor, title: str, colour: str) -> None:
    side = round(len(pixels) ** 0.5)
    ax.imshow(pixels.reshape(side, side).numpy(), cmap="gray_r")
    ax.set_title(title, color=colour, fontsize=8.5, pad=3)
    ax.axis("off")
