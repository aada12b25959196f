"""The pictures of `mpnn demo` and `mpnn train`, one file each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def heads(graph: Graph, weights: Sequence[Tensor], characters: str, path: Path) -> None:
    """One attention matrix over the characters for each layer (row) and head (column); `weights` has [E, H] for each
    layer."""
    titles = [[f"layer {layer}, head {head + 1}" for head in range(w.shape[1])] for layer, w in enumerate(weights, 1)]
    maps = [[(graph, of_layer[:, head]) for head in range(of_layer.shape[1])] for of_layer in weights]
    _save(_attention_maps(maps, titles, characters), path)


def layers_of_graphs(
    graphs: Mapping[str, tuple[Graph, Sequence[Tensor]]], characters: str, asked: int, path: Path
) -> None:
    """One attention matrix for each layer (row) and graph (column): the mean over heads of the weights [E, H] of each
    layer. The character `asked` is printed in another colour."""
    layers = range(len(next(iter(graphs.values()))[1]))
    titles = [
        [f"{name}\nlayer {layer + 1}" if not layer else f"layer {layer + 1}" for name in graphs] for layer in layers
    ]
    maps = [[(graph, weights[layer].mean(1)) for graph, weights in graphs.values()] for layer in layers]
    figure = _attention_maps(maps, titles, characters)
    for ax in figure.axes:
        for label in (*ax.get_xticklabels()[asked : asked + 1], *ax.get_yticklabels()[asked : asked + 1]):
            if label.get_text() == characters[asked]:
                label.set(color=plot.SERIES[1], fontweight="bold")
    _save(figure, path)


def _attention_maps(
    maps: Sequence[Sequence[tuple[Graph, Tensor]]], titles: Sequence[Sequence[str]], characters: str
) -> Figure:
    """A figure with the attention of each graph, [E], in rows and columns. Blanks and line ends of the characters get a
    sign."""
    labels = [{" ": "\u2423", "\n": "\u21b5"}.get(c, c) for c in characters]
    columns, size = len(maps[0]), 8.5 if len(maps[0]) < 4 else 7.0
    figure = Figure(figsize=(11.0, 10.0 / columns * len(maps) + 0.5))
    margins = {"left": 0.02, "right": 1.09, "top": 0.92, "bottom": 0.01, "wspace": 0.04, "hspace": 0.1}
    axes = figure.subplots(len(maps), columns, squeeze=False, gridspec_kw=margins)
    for k, (row, names, in_row) in enumerate(zip(axes, titles, maps, strict=True)):
        for j, (ax, name, (graph, weights)) in enumerate(zip(row, names, in_row, strict=True)):
            plot.attention(graph, weights, ax, title="", bar=False)
            ax.set_title(name, loc="left", color=plot.INK, fontsize=9.5, pad=4)
            ax.set(xlabel="", ylabel="", xticks=[], yticks=[])
            ax.tick_params(length=0, pad=1, labelcolor=plot.INK)
            if not k:  # labels on every map would take longer to draw than the model to train
                ax.set_xticks(range(len(labels)), labels, family="monospace", fontsize=size)
            if not j:
                ax.set_yticks(range(len(labels)), labels, family="monospace", fontsize=size)
    plot.weight_bar(list(axes.flat))
    return figure


def step_times(lengths: Sequence[int], seconds: Mapping[str, Sequence[float]], path: Path) -> None:
    """Milliseconds of a training step against the length of the text, a line for each graph."""
    figure = Figure(figsize=(7.4, 4.2), layout="constrained")
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
    ax.set_xlabel("characters", color=plot.MUTED, fontsize=9)
    ax.set_ylabel("milliseconds of a training step", color=plot.MUTED, fontsize=9)
    ax.tick_params(colors=plot.MUTED, labelsize=9)
    ax.grid(axis="y", color="#e4e8ed", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(plot.FRAME)
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
