"""Draws the figures of the README, of docs/transformers_are_graphs.md, of the site's first page and of a how-to.

`python docs/figures.py` writes docs/img.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from mpnn import Graph, graphs
from mpnn.view.plot import FRAME, INK, MUTED, SERIES

IMAGES = Path(__file__).parent / "img"
BLUE, ORANGE = SERIES[:2]
Points = Sequence[tuple[float, float]]

# The graph of the page: five nodes, and the edges j -> i in the order of its first block of code.
PLACES: Points = ((0.25, -0.2), (-1.0, 0.6), (-0.75, -0.9), (0.2, 1.0), (1.15, 0.1))
EDGES = ((1, 0), (2, 0), (4, 0), (0, 1), (3, 2), (1, 3), (2, 3), (3, 4))
RADIUS = 0.17

WORDS = ("the", "cat", "sat", "on", "a", "mat")


def five_graphs() -> Figure:
    """The adjacency matrices of five models."""
    models = {
        "BERT\ncomplete()": graphs.complete(),
        "GPT\ncausal()": graphs.causal(),
        "Mistral\ncausal() & window(8)": graphs.causal() & graphs.window(8),
        "Longformer\nlongformer(12, globals=2)": graphs.longformer(12, globals=2),
        "BigBird\nbigbird(4, 3, 2, 1)": graphs.bigbird(block=4, window=3, random=2, globals=1),
    }
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    axes = figure.subplots(1, len(models))
    for ax, (title, topology) in zip(axes, models.items(), strict=True):
        topology.bind(48).plot(ax, title=title)
        if ax is not axes[0]:
            ax.set_ylabel("")
    return figure


def message_passing() -> Figure:
    """One round of message passing, for one node."""
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    graph, messages, updated = figure.subplots(1, 3)
    edges_of_page(graph, dict.fromkeys(EDGES, (1.2, MUTED)))
    nodes_of_page(graph, {})
    to_zero = {edge: (2.4, ORANGE) if edge[1] == 0 else (0.8, FRAME) for edge in EDGES}
    edges_of_page(messages, to_zero)
    nodes_of_page(messages, {1: ORANGE, 2: ORANGE, 4: ORANGE})
    for j, (x, y) in {1: (-0.66, 0.05), 2: (-0.2, -0.74), 4: (0.62, 0.1)}.items():
        messages.text(x, y, f"$x_{j}$", color=ORANGE, fontsize=13)
    edges_of_page(updated, dict.fromkeys(EDGES, (0.8, FRAME)))
    nodes_of_page(updated, {0: ORANGE})
    updated.text(-0.02, -0.62, "$m_0 = x_1 + x_2 + x_4$", color=ORANGE, fontsize=13)
    for ax, title in ((graph, "a graph"), (messages, "node 0 receives"), (updated, "and adds")):
        ax.set_title(title, color=INK, fontsize=12, fontweight="bold")
    return figure


def weights() -> Figure:
    """The same messages with three kinds of weights."""
    kinds: Mapping[str, tuple[float, float, float]] = {
        "sum: every weight is 1": (1.0, 1.0, 1.0),
        "mean: the graph decides": (1 / 3, 1 / 3, 1 / 3),
        "attention: the nodes decide": (0.1, 0.2, 0.7),
    }
    figure = Figure(figsize=(10.5, 3.7), layout="constrained")
    for ax, (title, of_edges) in zip(figure.subplots(1, len(kinds)), kinds.items(), strict=True):
        sizes = dict(zip(((1, 0), (2, 0), (4, 0)), of_edges, strict=True))
        edges_of_page(ax, {e: (0.6 + 6.0 * sizes[e], ORANGE) if e in sizes else (0.8, FRAME) for e in EDGES})
        nodes_of_page(ax, {1: ORANGE, 2: ORANGE, 4: ORANGE})
        for place, weight in zip(((-0.72, 0.03), (-0.2, -0.77), (0.6, 0.13)), of_edges, strict=True):
            ax.text(*place, f"{weight:.2g}", color=ORANGE, fontsize=12)
        ax.set_title(title, color=INK, fontsize=12, fontweight="bold")
    return figure


def six_graphs() -> Figure:
    """The graphs of models as their fields draw them: sentences as arcs, data as nodes and links."""
    figure = Figure(figsize=(11.5, 6.6), layout="constrained")
    axes = figure.subplots(2, 3).flat
    ring = [(np.sin(2 * np.pi * k / 6), np.cos(2 * np.pi * k / 6)) for k in range(6)]
    links(axes[0], graphs.complete().bind(6), ring, WORDS, "BERT: complete()")
    arcs(axes[1], graphs.causal().bind(6), "GPT: causal()")
    arcs(axes[2], graphs.window(1).bind(6), "a band: window(1)")
    arcs(axes[3], (graphs.window(1) | graphs.global_nodes(1)).bind(6), "Longformer: window(1) | global_nodes(1)")
    papers = ((0.0, 0.1), (-0.9, 0.8), (0.8, 0.9), (-1.1, -0.4), (1.1, -0.2), (0.1, -1.0), (-0.2, 1.1), (0.9, -1.0))
    cites = [(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 1), (6, 2), (7, 4), (7, 5)]
    edges = np.array(cites + [(i, j) for j, i in cites]).T
    links(axes[4], graphs.from_edges(edges, 8), papers, [""] * 8, "GAT: citations")
    pixels = [(float(k % 4), -float(k // 4)) for k in range(16)]
    links(axes[5], graphs.grid(4, 4, 8).bind(16), pixels, [""] * 16, "a convolution: neighborhood(4, 4, 1)")
    return figure


def recurrences() -> Figure:
    """The weights of five recurrences, destinations down and sources across."""
    nodes, generator = 24, np.random.default_rng(3)
    gates = np.where(generator.random(nodes) < 0.15, 0.02, generator.uniform(0.85, 1.0, nodes))

    def products(gate: Any) -> Any:
        total = np.cumsum(np.log(gate))
        return np.tril(np.exp(np.minimum(total[:, None] - total[None, :], 0.0)))

    keys = generator.standard_normal((nodes, 6))
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    stored = np.linalg.inv(np.eye(nodes) + 0.8 * np.tril(keys @ keys.T, -1)) * 0.8
    documents = (graphs.causal() & graphs.documents([9, 15])).bind(nodes).dense().numpy()
    panels = {
        "linear attention": products(np.ones(nodes)),
        "RetNet": products(np.full(nodes, 0.85)),
        "Mamba-2": products(gates),
        "two documents": products(np.full(nodes, 0.9)) * documents,
        "the delta rule": np.tril(keys @ keys.T) @ stored,
    }
    figure = Figure(figsize=(15, 3.5), layout="constrained")
    for ax, (title, weights) in zip(figure.subplots(1, len(panels)), panels.items(), strict=True):
        ax.imshow(weights, cmap="RdBu_r", vmin=-1, vmax=1)
        ax.set_title(title, color=INK, fontsize=12, fontweight="bold")
        ax.set_xlabel("source j", color=MUTED)
        ax.set_xticks([])
        ax.set_yticks([])
    figure.axes[0].set_ylabel("destination i", color=MUTED)
    return figure


def edges_of_page(ax: Axes, styles: Mapping[tuple[int, int], tuple[float, str]]) -> None:
    """Arrows of the page's graph; `styles` are the width and the color of each edge."""
    for (j, i), (width, color) in styles.items():
        arrow(ax, PLACES[j], PLACES[i], width, color, bend=0.16 if (i, j) in EDGES else 0.0, gap=RADIUS + 0.02)


def arrow(
    ax: Axes,
    tail: tuple[float, float],
    head: tuple[float, float],
    width: float,
    color: str,
    bend: float = 0.0,
    gap: float = RADIUS,
) -> None:
    """An arrow between two circles of radius `gap`."""
    a, b = np.array(tail), np.array(head)
    step = (b - a) / np.linalg.norm(b - a) * gap
    ax.add_patch(
        FancyArrowPatch(
            tuple(a + step), tuple(b - step), shrinkA=0, shrinkB=0,
            color=color, linewidth=width, zorder=1 + width / 10,
            arrowstyle=f"-|>,head_length={0.35 + width / 10},head_width={0.16 + width / 20}", mutation_scale=11,
            connectionstyle=f"arc3,rad={bend}",
        )
    )  # fmt: skip


def nodes_of_page(ax: Axes, colors: Mapping[int, str]) -> None:
    circles(ax, PLACES, [str(k) for k in range(len(PLACES))], [colors.get(k, BLUE) for k in range(len(PLACES))])
    ax.set_xlim(-1.3, 1.3)
    ax.set_ylim(-1.1, 1.3)


def circles(ax: Axes, places: Points, names: Sequence[str], colors: Sequence[str], size: float = 520) -> None:
    ax.scatter(*np.array(places).T, s=size, c=list(colors), zorder=3, edgecolors="white", linewidths=1.5)
    for name, (x, y) in zip(names, places, strict=True):
        ax.text(x, y, name, color="white", ha="center", va="center", fontsize=11, fontweight="bold", zorder=4)
    ax.set_aspect("equal")
    ax.axis("off")


def links(ax: Axes, graph: Graph, places: Points, names: Sequence[str], title: str) -> None:
    """Nodes and lines: graphs with edges in both directions."""
    for j, i in graph.edge_index.T.tolist():
        if j < i:
            ax.plot(*np.array([places[j], places[i]]).T, color=MUTED, linewidth=1.1, zorder=1)
    named = any(names)
    circles(ax, places, names, [BLUE] * len(places), 900 if named else 190)
    ax.margins(0.16)
    ax.set_title(title, color=INK, fontsize=12, fontweight="bold")


def arcs(ax: Axes, graph: Graph, title: str) -> None:
    """A sentence with an arrow from each source to each destination: forward above the words, backward below."""
    for j, i in graph.edge_index.T.tolist():
        if i != j:
            high = 0.26 if i > j else -0.26
            arrow(ax, (j, high), (i, high), 1.1, ORANGE if i > j else BLUE, bend=-0.42, gap=0.1)
    for k, word in enumerate(WORDS):
        ax.text(k, 0.0, word, ha="center", va="center", fontsize=11, color=INK, fontweight="bold")
    ax.set_xlim(-0.5, 5.5)
    ax.set_ylim(-1.7, 1.7)
    ax.set_aspect("equal")
    ax.axis("off")
    ax.set_title(title, color=INK, fontsize=12, fontweight="bold")


def depth() -> Figure:
    """Draws the accuracy by the number of layers, over four graphs."""
    points = _demonstration("depth_and_diameter")
    figure, ax = _small("layers", "symbols known, %")
    for name, color in zip(("path: window(1)", "ring", "tree", "hub: global_nodes(1)"), SERIES, strict=False):
        known = [100 * value for point, value in points.items() if point.startswith(f"{name}, ")]
        ax.plot(known, "o-", color=color, lw=2, label=name.split(":")[0])
    ax.legend(frameon=False, fontsize=12, loc="lower right")
    return figure


def length() -> Figure:
    """The time of attention over a window by length, compared with torch's with the same mask."""
    rows = json.loads((IMAGES.parent.parent / "benchmarks" / "results" / "cpu.json").read_text())["rows"]
    rows = [row for row in rows if row["series"] == "window(256)" and row["direction"] == "forward"]
    figure, ax = _small("tokens", "milliseconds")
    for name, color in zip(("mpnn", "torch SDPA, masked", "local-attention"), SERIES, strict=False):
        entries = {row["facts"]["nodes"]: row["entries"].get(name, {}) for row in rows}
        points = {nodes: 1e3 * entry["least"] for nodes, entry in entries.items() if "least" in entry}
        ax.plot(list(points), list(points.values()), "o-", color=color, lw=2, label=name)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks([512, 4096, 32768], ["512", "4,096", "32,768"])
    ax.legend(frameon=False, fontsize=12)
    return figure


def fewer_edges() -> Figure:
    """How close MiniLM's embeddings stay to its own when it attends over fewer edges."""
    points = _demonstration("trained_attention")
    figure, ax = _small("edges, % of all", "cosine to its own")
    names = {"window and [CLS] as hub": "window and hub", "window": "window", "random": "random"}
    for (name, label), color in zip(names.items(), SERIES, strict=False):
        chosen = [point for key, point in points.items() if key.startswith(f"{name}: ")]
        ax.plot([100 * p["edges"] for p in chosen], [p["cosine"] for p in chosen], "o-", color=color, lw=2, label=label)
    ax.set_ylim(0, 1.02)
    ax.legend(frameon=False, fontsize=12)
    return figure


def _demonstration(name: str) -> dict[str, Any]:
    record = IMAGES.parent.parent / "benchmarks" / "results" / "examples" / "demonstrations" / f"{name}.json"
    points: dict[str, Any] = json.loads(record.read_text())["points"]
    return points


def _small(x: str, y: str) -> tuple[Figure, Axes]:
    """A figure that can be read at the width of a card."""
    figure = Figure(figsize=(4.6, 3.4), layout="constrained")
    ax = figure.subplots()
    ax.set_xlabel(x, fontsize=13, color=INK)
    ax.set_ylabel(y, fontsize=13, color=INK)
    ax.tick_params(labelsize=12, colors=MUTED)
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


FIGURES = {
    "index/depth.png": depth,
    "index/length.png": length,
    "index/fewer_edges.png": fewer_edges,
    "five_graphs.png": five_graphs,
    "learn/message_passing.png": message_passing,
    "learn/weights.png": weights,
    "learn/graphs.png": six_graphs,
    "learn/recurrences.png": recurrences,
    "howto_plotting.png": lambda: _of_page("plotting.md"),
}


def _of_page(page: str) -> Figure:
    """The picture that the first block of code of a how-to page draws."""
    text = (Path(__file__).parent / "howto" / page).read_text()
    code = text.split("```python\n")[1].split("figure.savefig")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    figure: Figure = names["figure"]
    return figure


def main(names: Sequence[str]) -> None:
    """Draws the figures of these names; all without any."""
    for name in names or FIGURES:
        (IMAGES / name).parent.mkdir(exist_ok=True)
        FIGURES[name]().savefig(IMAGES / name, dpi=110, bbox_inches="tight")


if __name__ == "__main__":
    main(sys.argv[1:])
