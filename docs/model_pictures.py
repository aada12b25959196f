"""Draws the graphs of models as their fields draw them: sentences as arcs, images as cells, molecules, citations and
roads as nodes and lines. `docs/models.py` calls it for the sections of models.md that have no matrix. The alternative
texts on that page say what a picture shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.patches import Arc, Circle, FancyArrowPatch, Rectangle

from mpnn import graphs
from mpnn.view.plot import FRAME, INK, MUTED, SERIES, springs

Point = tuple[float, float]
Edge = tuple[int, int]  # source, destination
BLUE, ORANGE = SERIES[:2]
WORDS = ("the", "cat", "sat", "on", "the", "mat")


def nodes(ax: Axes, at: Sequence[Point], *, radius: float = 0.09, colors: Sequence[str] | str = BLUE,
          labels: Sequence[str] = ()) -> None:  # fmt: skip
    colors = [colors] * len(at) if isinstance(colors, str) else colors
    for k, (place, color) in enumerate(zip(at, colors, strict=True)):
        ax.add_patch(Circle(place, radius, facecolor=color, edgecolor="white", linewidth=1, zorder=3))
        if labels:
            ax.text(*place, labels[k], ha="center", va="center", fontsize=7, color="white", zorder=4)


def lines(ax: Axes, at: Sequence[Point], edges: Iterable[Edge], *, color: str = MUTED, width: float = 0.8,
          arrows: bool = False, curve: float = 0.0, dashed: bool = False) -> None:  # fmt: skip
    for source, target in edges:
        style = "-|>,head_length=3,head_width=1.6" if arrows else "-"
        ax.add_patch(
            FancyArrowPatch(
                at[source],
                at[target],
                arrowstyle=style,
                color=color,
                linewidth=width,
                shrinkA=5,
                shrinkB=5,
                connectionstyle=f"arc3,rad={curve}",
                linestyle="--" if dashed else "-",
                zorder=1,
            )
        )


def finished(ax: Axes, pad: float = 0.2) -> None:
    ax.set_aspect("equal")
    ax.autoscale_view()
    ax.margins(pad)
    ax.axis("off")


def circle(n: int, radius: float = 1.0, start: float = 90.0) -> list[Point]:
    angles = [math.radians(start - 360 * k / n) for k in range(n)]
    return [(radius * math.cos(a), radius * math.sin(a)) for a in angles]


def all_pairs(members: Sequence[int]) -> list[Edge]:
    return [(a, b) for a in members for b in members if a < b]


def arcs(ax: Axes, words: Sequence[str], edges: Iterable[Edge], highlight: int) -> None:
    """Words in a row, and an arc above from each source to each destination; those of one destination in color."""
    for k, word in enumerate(words):
        ax.text(k, -0.12, word, ha="center", va="top", fontsize=9, color=ORANGE if k == highlight else INK)
    for source, target in edges:
        mine, span = target == highlight, abs(target - source)
        color, width = (ORANGE, 1.8) if mine else (FRAME, 0.9)
        if span:
            middle = (source + target) / 2
            ax.add_patch(Arc((middle, 0), span, 0.9 * span, theta1=0, theta2=180, color=color, linewidth=width,
                             zorder=2 if mine else 1))  # fmt: skip
    nodes(
        ax, [(k, 0) for k in range(len(words))], colors=[ORANGE if k == highlight else BLUE for k in range(len(words))]
    )
    ax.set(xlim=(-0.6, len(words) - 0.4), ylim=(-0.7, 0.5 * len(words)), aspect="equal")
    ax.axis("off")


def cells(ax: Axes, height: int, width: int, colors: dict[int, str], *, outline: int | None = None) -> None:
    """An image of patches or pixels; those in `colors` are filled."""
    for k in range(height * width):
        corner = (k % width, -(k // width) - 1)
        ax.add_patch(Rectangle(corner, 1, 1, facecolor=colors.get(k, "#f1f3f9"), edgecolor="white", linewidth=1.5))
    if outline is not None:
        ax.add_patch(
            Rectangle((outline % width, -(outline // width) - 1), 1, 1, fill=False, edgecolor=INK, linewidth=2)
        )
    finished(ax, 0.05)


def two_rows(ax: Axes, top: Sequence[str], bottom: Sequence[str], weights: dict[Edge, float]) -> None:
    above = [(k * 1.2, 1.6) for k in range(len(top))]
    below = [(k * 1.2 + 0.6 * (len(top) - len(bottom)), 0.0) for k in range(len(bottom))]
    for (source, target), weight in weights.items():
        lines(ax, above + below, [(source, len(top) + target)], color=ORANGE if target == 1 else FRAME, width=weight)
    nodes(
        ax,
        above + below,
        radius=0.12,
        colors=[BLUE] * len(top) + [ORANGE if k == 1 else BLUE for k in range(len(bottom))],
    )
    for (x, y), word in zip(above + below, [*top, *bottom], strict=True):
        ax.text(x, y + (0.28 if y else -0.28), word, ha="center", va="center", fontsize=8, color=INK)
    finished(ax, 0.15)


def seq2seq(ax: Axes) -> None:
    strong = {(0, 0): 2.5, (1, 1): 3.0, (2, 2): 3.0, (0, 1): 1.2, (1, 0): 0.8, (2, 1): 0.8}
    every = {(s, t): strong.get((s, t), 0.5) for s in range(4) for t in range(3)}
    two_rows(ax, ("the", "cat", "sat", "down"), ("die", "Katze", "saß"), every)


def transformer(ax: Axes) -> None:
    """Three graphs in one matrix: encoder, decoder, and from encoder to decoder."""
    n = 6
    for i in range(2 * n):
        for j in range(2 * n):
            edge, color = (i < n and j < n), BLUE
            if i >= n:
                edge, color = (j < n or j <= i), (ORANGE if j < n else INK)
            ax.add_patch(
                Rectangle((j, -i - 1), 1, 1, facecolor=color if edge else "#f1f3f9", edgecolor="white", linewidth=0.8)
            )
    for x, y, text in ((3, -3, "encoder"), (3, -9, "cross"), (8.2, -10.6, "decoder")):
        ax.text(x, y, text, color="white", ha="center", va="center", fontsize=8, weight="bold")
    finished(ax, 0.03)


def gpt(ax: Axes) -> None:
    arcs(ax, WORDS, [(j, i) for i in range(6) for j in range(i)], 4)


def llama(ax: Axes) -> None:
    arcs(ax, [str(k) for k in range(9)], [(j, i) for i in range(9) for j in range(max(0, i - 3), i)], 7)


def bert(ax: Axes) -> None:
    at = circle(8)
    lines(ax, at, all_pairs(range(8)))
    nodes(ax, at, radius=0.13)
    finished(ax)


def linformer(ax: Axes) -> None:
    sources, states, targets = (
        [(float(x), k * 1.0 - (n - 1) / 2) for k in range(n)] for x, n in ((0, 8), (2, 3), (4, 8))
    )
    at = [*sources, *states, *targets]
    lines(ax, at, [(s, 8 + k) for s in range(8) for k in range(3)], color=FRAME)
    lines(ax, at, [(8 + k, 11 + t) for t in range(8) for k in range(3)], color=FRAME)
    nodes(ax, at, radius=0.22, colors=[BLUE] * 8 + [ORANGE] * 3 + [BLUE] * 8)
    finished(ax, 0.08)


def recurrences(ax: Axes) -> None:
    weights = [[0.75 ** (i - j) if j <= i else 0.0 for j in range(12)] for i in range(12)]
    ax.imshow(weights, cmap="Blues", vmin=0.0)
    ax.set(xlabel="source", ylabel="destination")


def deepnet(ax: Axes) -> None:
    depth, n = 6, 5
    at = [(float(i), 0.8 * layer) for layer in range(depth) for i in range(n)]
    below = [(layer * n + j, (layer + 1) * n + i) for layer in range(depth - 1) for i in range(n) for j in range(i + 1)]
    lines(ax, at, below, color=FRAME)
    nodes(ax, at, radius=0.12)
    finished(ax, 0.08)


def vit(ax: Axes) -> None:
    at = [(float(k % 4), -float(k // 4)) for k in range(16)] + [(-1.6, -1.5)]
    lines(ax, at, all_pairs(range(16)), color=FRAME, width=0.3)
    lines(ax, at, [(16, k) for k in range(16)], color=ORANGE, width=0.6)
    for x, y in at[:16]:
        ax.add_patch(Rectangle((x - 0.28, y - 0.28), 0.56, 0.56, facecolor=BLUE, edgecolor="white", zorder=3))
    nodes(ax, at[16:], radius=0.26, colors=ORANGE)
    ax.text(-1.6, -2.05, "class", ha="center", fontsize=8, color=INK)
    finished(ax, 0.06)


def mae(ax: Axes) -> None:
    visible = (1, 6, 8, 15)
    at = [(k % 4 + 0.5, -(k // 4) - 0.5) for k in range(16)]
    cells(ax, 4, 4, dict.fromkeys(visible, BLUE))
    lines(ax, at, all_pairs(visible), color=ORANGE, width=1.6)


def swin(ax: Axes) -> None:
    labels = graphs.windows(8, 8, size=4, shift=2).bind(64)
    hues = [*SERIES, "#8899bb", "#bbaa66", "#779977", "#aa7788"]
    colors: dict[int, str] = {}
    for number, members in enumerate(group for part in labels.cliques or () for group in part.tolist()):
        colors |= dict.fromkeys(members, hues[number % len(hues)])
    cells(ax, 8, 8, colors)


def convolution(ax: Axes) -> None:
    graph = graphs.neighborhood(6, 6, 1).bind(36)
    src, dst = graph.edge_index.tolist()
    cells(ax, 6, 6, {j: BLUE for j, i in zip(src, dst, strict=True) if i == 14} | {14: ORANGE}, outline=14)


def _random_graph(degree: int, seed: int) -> tuple[list[Point], list[Edge]]:
    graph = graphs.random(degree, seed=seed).bind(12)
    explicit = graphs.from_edges(graph.edge_index, 12)
    at = [tuple(point) for point in springs(explicit).tolist()]
    return at, [(j, i) for j, i in zip(*graph.edge_index.tolist(), strict=True) if j != i]  # type: ignore[return-value]


def gnn(ax: Axes) -> None:
    at, edges = _random_graph(2, 1)
    lines(ax, at, edges, arrows=True)
    nodes(ax, at)
    finished(ax)


def gat(ax: Axes) -> None:
    at = [(0.0, 0.0), *circle(6)]
    for k, width in enumerate((4.5, 0.8, 2.5, 0.8, 1.4, 3.2)):
        lines(ax, at, [(k + 1, 0)], color=ORANGE, width=width)
    lines(ax, at, [(1, 2), (3, 4), (5, 6)], color=FRAME)
    nodes(ax, at, radius=0.14, colors=[ORANGE] + [BLUE] * 6)
    finished(ax)


def graph_transformer(ax: Axes) -> None:
    at = [*circle(5, 0.6), *circle(5, 1.25, 126)]
    for k in range(5):
        lines(ax, at, [(k, (k + 1) % 5)], color=SERIES[k % 3], width=2)
        lines(ax, at, [(5 + k, k), (5 + (k + 1) % 5, k)], color=SERIES[(k + 1) % 3], width=2)
    nodes(ax, at, radius=0.12)
    finished(ax)


def magna(ax: Axes) -> None:
    for hop in range(1, 6):
        ax.add_patch(Arc((hop / 2, 0), hop, 0.8 * hop, theta1=0, theta2=180, linewidth=3.2 - 0.5 * hop,
                         color=to_rgba(ORANGE, 1.15 - 0.18 * hop)))  # fmt: skip
    lines(ax, [(float(k), 0.0) for k in range(6)], [(k, k + 1) for k in range(5)], width=1.5)
    nodes(ax, [(float(k), 0.0) for k in range(6)], radius=0.14, colors=[ORANGE] + [BLUE] * 5)
    for k in range(1, 6):
        ax.text(k, -0.4, f"{k} hop{'s' * (k > 1)}", ha="center", fontsize=7, color=INK)
    ax.set(xlim=(-0.4, 5.4), ylim=(-0.8, 2.4), aspect="equal")
    ax.axis("off")


MOLECULE = [*circle(6), (1.73, 1.0), (-1.73, -1.0)]
BONDS = [*((k, (k + 1) % 6) for k in range(6)), (1, 6), (4, 7)]


def graphormer(ax: Axes) -> None:
    at = [*MOLECULE, (0.0, 2.2)]
    lines(ax, at, all_pairs(range(8)), color=FRAME, width=0.5)
    lines(ax, at, [(8, k) for k in range(8)], color=ORANGE, width=0.7)
    lines(ax, at, BONDS, color=INK, width=2.2)
    nodes(ax, at, radius=0.2, colors=[BLUE] * 6 + [INK, INK, ORANGE], labels=["C"] * 6 + ["N", "O", "V"])
    finished(ax, 0.1)


def gps(ax: Axes) -> None:
    for shift, color, edges in ((0.0, INK, BONDS), (4.6, ORANGE, all_pairs(range(8)))):
        at = [(x + shift, y) for x, y in MOLECULE]
        lines(ax, at, edges, color=color, width=2.0 if color == INK else 0.6)
        nodes(ax, at, radius=0.18)
    ax.text(2.3, 0, "+", fontsize=16, ha="center", va="center", color=INK)
    finished(ax, 0.05)


def graph_bert(ax: Axes) -> None:
    at = [(0.0, 0.0), *circle(7)]
    lines(ax, at, all_pairs(range(8)), color=FRAME)
    nodes(ax, at, radius=0.15, colors=[ORANGE] + [BLUE] * 7, labels=["0", *map(str, range(1, 8))])
    finished(ax)


def tsp(ax: Axes) -> None:
    at = [tuple(point) for point in np.random.default_rng(3).uniform(size=(12, 2)).tolist()]
    order = sorted(range(12), key=lambda k: math.atan2(at[k][1] - 0.5, at[k][0] - 0.5))
    here = order[6]
    lines(ax, at, pairwise(order[:7]), color=INK, width=2, arrows=True)  # type: ignore[arg-type]
    lines(ax, at, [(here, k) for k in order[7:]], color=ORANGE, dashed=True)  # type: ignore[arg-type]
    nodes(ax, at, radius=0.03, colors=[ORANGE if k == here else INK if k in order[:6] else BLUE for k in range(12)])  # type: ignore[arg-type]
    finished(ax, 0.08)


def link_prediction(ax: Axes) -> None:
    at, edges = _random_graph(2, 3)
    lines(ax, at, edges[::2])
    missing = next(pair for pair in all_pairs(range(12)) if pair not in edges and pair[::-1] not in edges)
    lines(ax, at, [missing], color=ORANGE, width=2, dashed=True)
    nodes(ax, at, colors=[ORANGE if k in missing else BLUE for k in range(12)])
    finished(ax)


def roads(ax: Axes) -> None:
    at = [(0.5 * k, 0.5 * math.sin(0.9 * k)) for k in range(9)]
    lines(ax, at, [(k, k + 1) for k in range(8)], color=INK, width=2, arrows=True)
    side = [(1.0, -1.1), (2.6, 1.4), (3.4, -1.2)]
    lines(ax, at + side, [(9, 2), (10, 5), (11, 7)], arrows=True)
    nodes(ax, at + side, radius=0.11, colors=[BLUE] * 8 + [ORANGE] + [BLUE] * 3)
    finished(ax, 0.08)


def kinds(ax: Axes) -> None:
    """Three authors, four papers and a venue: who wrote what, what cites what, and where it appeared."""
    authors, papers, venue = [(k, 2.0) for k in range(3)], [(k - 0.5, 1.0) for k in range(4)], [(1.0, 0.0)]
    at = authors + papers + venue
    lines(ax, at, [(0, 3), (0, 4), (1, 4), (1, 5), (2, 5), (2, 6)], color=INK, arrows=True)
    lines(ax, at, [(3, 4), (6, 5)], color=ORANGE, width=1.5, arrows=True)
    lines(ax, at, [(7, k) for k in range(3, 7)], arrows=True, dashed=True)
    nodes(ax, at, radius=0.13, colors=[BLUE] * 3 + [ORANGE] * 4 + [INK])
    finished(ax, 0.1)


def temporal(ax: Axes) -> None:
    """Events of four nodes along lines of time; the query sees those to its left."""
    events = [(0.6, 0, 1), (1.4, 2, 3), (2.2, 1, 2), (3.0, 0, 2), (4.6, 1, 2), (5.2, 0, 3)]
    for node in range(4):
        ax.plot([0, 6], [node, node], color=FRAME, linewidth=1, zorder=0)
    for time, a, b in events:
        color = MUTED if time > 3.8 else ORANGE if 2 in (a, b) else INK
        lines(ax, [(time, a), (time, b)], [(0, 1), (1, 0)], color=color, arrows=True, dashed=time > 3.8)
    nodes(ax, [(3.8, 2.0)], radius=0.2, colors=[BLUE])
    ax.text(3.8, -0.5, "t", ha="center", va="top", fontsize=9, color=INK)
    ax.plot([3.8, 3.8], [-0.4, 3.3], color=BLUE, linewidth=0.8, linestyle=":", zorder=0)
    finished(ax, 0.1)


def mlp(ax: Axes) -> None:
    at = circle(16)
    lines(ax, at, [(k, (k + step) % 16) for k in range(16) for step in (1, 2)], width=1.2)
    nodes(ax, at, radius=0.1)
    finished(ax)


DRAWN: dict[str, Callable[[Axes], None]] = {
    "seq2seq-with-attention": seq2seq,
    "transformer": transformer,
    "gpt": gpt,
    "llama-family": llama,
    "bert": bert,
    "linformer": linformer,
    "recurrences": recurrences,
    "deepnet": deepnet,
    "vit": vit,
    "mae": mae,
    "swin": swin,
    "convolution": convolution,
    "gnn": gnn,
    "gat": gat,
    "kinds": kinds,
    "temporal": temporal,
    "graph-transformer": graph_transformer,
    "multi-hop-attention": magna,
    "graphormer": graphormer,
    "graphgps": gps,
    "graph-bert": graph_bert,
    "travelling-salesman-attention-model": tsp,
    "link-prediction": link_prediction,
    "arrival-time-regression-on-road-graphs": roads,
    "relational-graph-view-of-an-mlp": mlp,
}
