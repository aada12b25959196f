"""Pictures of graphs, of attention on them and of training, in one look that the colour-blind can read too.

Everything is drawn on matplotlib Axes that are given or made, and returned; no global setting of matplotlib is
touched. Matrices have destinations down and sources across, like `Graph.dense()`. Large graphs are drawn as tiles
whose density comes from the rows of runs, so that no N x N matrix is ever made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mpnn.graph import Graph
from mpnn.runs import Ints, Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.ticker import Locator

INK, MUTED, FRAME, EMPTY = "#1f2933", "#5f6b7a", "#c3cad3", "#f2f4f7"
# Okabe & Ito 2008, "Color universal design", without its black and yellow, which ink and white paper hide.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Tol 2021, "Colour schemes", the muted scheme, for more classes than SERIES has colours.
CLASSES = (
    *("#332288", "#88ccee", "#44aa99", "#117733", "#999933"),
    *("#ddcc77", "#cc6677", "#882255", "#aa4499", "#888888"),
)
_EDGE = "#12588f"
SEQUENTIAL = ("#d3e4f3", "#84b9dc", "#3487c0", "#12588f", "#062a52")

_TILES = 256
_SEPARATE_CELLS = 32
_MOST_ARROWS = 400
_LONGEST_SHAPE = 8
_LONGEST_NAME = 26
_TITLE, _NAME = 11, 9  # sizes in points


def adjacency(graph: Graph, ax: Axes | None = None, *, title: str | None = None, tiles: int = _TILES) -> Axes:
    """Who hears whom: a coloured cell (row i, column j) for each edge j -> i.

    Up to `tiles` nodes a side every edge is a cell of its own; beyond, a cell stands for a tile of pairs, and is the
    darker the more of its pairs are edges.

    Args:
        title: default: the graph's name.
        tiles: the most cells a side.
    """
    ax = ax or _new_axes(_width_of_matrix(graph))
    rows, columns = min(graph.num_dst, tiles), min(graph.num_src, tiles)
    exact = (rows, columns) == (graph.num_dst, graph.num_src)
    share = density(graph.runs, rows, columns)
    colours, norm = _solid(), None
    if not exact:
        colours, norm = _sequential(), _power(0.5, vmax=1.0)
    image = ax.imshow(
        np.ma.masked_equal(share, 0.0), cmap=colours, norm=norm, extent=_extent(graph), interpolation="nearest"
    )
    _matrix_axes(ax, graph, graph.name if title is None else title)
    if not exact:
        bar = _bar([ax], image, "share of a tile's pairs that are edges")
        bar.set_ticks([0.01, 0.1, 0.25, 0.5, 1.0], labels=["1%", "10%", "25%", "50%", "100%"])
        bar.ax.minorticks_off()
    pairs = max(graph.num_dst * graph.num_src, 1)
    _note_below(ax, f"{graph.num_edges:,} edges, {graph.runs.num_edges / pairs:.2%} of all pairs")
    return ax


def attention(
    graph: Graph,
    weights: Tensor,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    bar: bool = True,
    tiles: int = _TILES,
) -> Axes:
    """How much each destination listens to each source: the weight of every edge, pale where there is no edge.

    The scale of colours is that of the square root, so that weights of one in a hundred still show.

    Args:
        weights: [E] or [E, H] in the graph's edge order, as `return_weights=True` gives them; heads are averaged.
        title: default: the graph's name.
        labels: one for each node (characters, words), in place of its number.
        bar: whether to explain the colours.
        tiles: the most cells a side; beyond, a cell is the mean over the edges in it.

    Raises:
        ValueError: not one row of weights for each edge, or not one label for each node.
    """
    if weights.dim() not in (1, 2) or len(weights) != graph.num_edges:
        raise ValueError(f"weights must be [E] or [E, H] with E = {graph.num_edges}; got {list(weights.shape)}")
    of_heads = weights.detach().float().cpu()
    per_edge = (of_heads if weights.dim() == 1 else of_heads.mean(1)).numpy()
    rows, columns = min(graph.num_dst, tiles), min(graph.num_src, tiles)
    src, dst = graph.edge_index.cpu().numpy()
    cell = dst * rows // max(graph.num_dst, 1) * columns + src * columns // max(graph.num_src, 1)
    total, count = (np.bincount(cell, w, minlength=rows * columns) for w in (per_edge, np.ones_like(per_edge)))
    mean = np.ma.masked_array(total / np.maximum(count, 1), count == 0).reshape(rows, columns)
    ax = ax or _new_axes(_width_of_matrix(graph))
    ax.imshow(mean, cmap=_sequential(), norm=_power(0.5, vmax=1.0), extent=_extent(graph), interpolation="nearest")
    _matrix_axes(ax, graph, graph.name if title is None else title)
    if labels is not None:
        _label_nodes(ax, graph, labels)
    if bar:
        weight_bar([ax])
    return ax


def weight_bar(axes: Sequence[Axes]) -> None:
    """Explains the colours of one or several drawings by `attention`, at their right."""
    bar = _bar(axes, axes[0].images[0], "attention weight")
    bar.set_ticks([0.01, 0.1, 0.25, 0.5, 1.0], labels=["0.01", "0.1", "0.25", "0.5", "1"])


def curves(
    history: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    ax: Axes | None = None,
    *,
    title: str = "",
    xlabel: str = "step",
    ylabel: str = "loss",
) -> Axes:
    """Learning curves: `history` has, for each name, where it was measured and what. Names stand at the lines' ends."""
    ax = ax or _new_axes((6.4, 4.0))
    ends = []
    for k, (name, (at, values)) in enumerate(history.items()):
        colour = SERIES[k % len(SERIES)]
        ax.plot(at, values, color=colour, linewidth=1.8, marker="o" if len(values) < 30 else None, markersize=3.5)
        if len(values):
            ends.append((float(at[-1]), float(values[-1]), name, colour))
    _plain_axes(ax, title)
    if all(float(x).is_integer() for at, _ in history.values() for x in at):
        ax.xaxis.set_major_locator(_whole_ticks())
    ax.set_xlabel(xlabel, color=MUTED, fontsize=9)
    ax.set_ylabel(ylabel, color=MUTED, fontsize=9)
    _label_ends(ax, ends)
    return ax


def network(
    graph: Graph,
    ax: Axes | None = None,
    *,
    positions: ArrayLike | None = None,
    classes: Tensor | None = None,
    title: str | None = None,
) -> Axes:
    """Nodes and links, for graphs small enough to be seen so; arrows point at who hears.

    Args:
        positions: [N, 2], where the nodes stand; default: explicit graphs as `springs` puts them, structured ones
            in a circle, clockwise from the top.
        classes: integers [N]: the nodes' colours, each class named at its middle.

    Raises:
        ValueError: sources are other nodes than destinations, or positions or classes do not match the nodes.
    """
    if graph.num_dst != graph.num_src:
        raise ValueError(f"network draws one set of nodes; the graph is {graph.num_dst} x {graph.num_src}")
    if positions is None:
        at = springs(graph) if graph.is_explicit else _circle(graph.num_dst)
    else:
        at = np.asarray(positions).astype(float)
    if at.shape != (graph.num_dst, 2):
        raise ValueError(f"positions must be [{graph.num_dst}, 2], one row for each node; got {list(at.shape)}")
    if classes is not None and classes.shape != (graph.num_dst,):
        raise ValueError(f"classes must be [{graph.num_dst}], one for each node; got {list(classes.shape)}")
    ax = ax or _new_axes((6.4, 6.4))
    size = float(np.clip(2400 / max(graph.num_dst, 1), 7, 120))
    _links(ax, graph, at, size)
    _dots(ax, at, size, None if classes is None else classes.cpu().numpy())
    _title(ax, graph.name if title is None else title, 6, 1.0)
    ax.set_aspect("equal")
    ax.margins(0.04)
    ax.axis("off")
    return ax


def springs(graph: Graph, start: ArrayLike | None = None, rounds: int = 60) -> NDArray[np.float64]:
    """Where the nodes come to stand, [N, 2], when all push each other apart and edges pull (Fruchterman & Reingold
    1991). O(N^2) a round; `start` [N, 2] defaults to a circle, and is best given for more than some hundred nodes.
    """
    n = graph.num_dst
    at = _circle(n) if start is None else np.asarray(start).astype(float)
    dst, src = graph.runs.edges()
    length = 1 / max(n, 1) ** 0.5
    at = at + np.random.default_rng(0).normal(0.0, 0.01 * length, (n, 2))  # equal forces would hold symmetric starts
    for heat in np.linspace(0.1, 0.0, rounds, endpoint=False):
        square = (at**2).sum(1)
        away = length**2 / np.maximum(square[:, None] + square - 2 * at @ at.T, 1e-4 * length**2)
        move = at * away.sum(1)[:, None] - away @ at
        link = at[src] - at[dst]
        pull = link * np.linalg.norm(link, axis=1)[:, None] / length
        for axis in (0, 1):
            move[:, axis] += np.bincount(dst, pull[:, axis], minlength=n) - np.bincount(src, pull[:, axis], minlength=n)
        at = at + heat * move / np.maximum(np.linalg.norm(move, axis=1), 0.01 * length)[:, None]
    return at


def density(runs: Runs, rows: int, columns: int) -> NDArray[np.float64]:
    """The share of pairs that are edges in each of `rows` x `columns` tiles of a graph, [rows, columns].

    O(runs + tiles). Down a row of tiles, the number of rows that hear source j is a step function of j, up at the
    start of each run and down at its stop; a step counts for the rest of its own tile and for all of those after it.
    """
    edges, height = _bounds(runs.num_src, columns), np.diff(_bounds(runs.num_dst, rows))
    width = np.diff(edges)
    tile_row = runs.row * rows // max(runs.num_dst, 1)
    rest, whole = (np.zeros(rows * (columns + 1)) for _ in range(2))
    for ends, sign in ((runs.start, 1.0), (runs.stop, -1.0)):
        tile = np.searchsorted(edges, ends, side="right") - 1
        cell = tile_row * (columns + 1) + tile
        size = len(rest)
        rest += sign * np.bincount(cell, edges[np.minimum(tile + 1, columns)] - ends, minlength=size)
        whole += sign * np.bincount(cell, minlength=size)
    rest, whole = (x.reshape(rows, columns + 1)[:, :columns] for x in (rest, whole))
    after = np.cumsum(whole, axis=1) - whole
    return (rest + after * width) / np.maximum(height[:, None] * width, 1)


def _bounds(n: int, parts: int) -> Ints:
    """Where the parts of 0..n begin and end, so that i lies in part `i * parts // n`."""
    return -(-np.arange(parts + 1) * n // max(parts, 1))


# ---------------------------------------------------------------------------------------------------- colours and axes


def _new_axes(size: tuple[float, float]) -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError('pictures need matplotlib; run: pip install "mpnn[viz]"') from error
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _sequential() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("mpnn", SEQUENTIAL).with_extremes(bad=EMPTY)


def _solid() -> Colormap:
    from matplotlib.colors import ListedColormap

    return ListedColormap([_EDGE]).with_extremes(bad=EMPTY)


def _power(gamma: float, vmax: float) -> Normalize:
    from matplotlib.colors import PowerNorm

    return PowerNorm(gamma, vmin=0.0, vmax=vmax)


def _width_of_matrix(graph: Graph) -> tuple[float, float]:
    shape = float(np.clip(graph.num_src / max(graph.num_dst, 1), 1 / 3, 3))
    return (5.4 * max(shape, 0.7), 5.0 / min(shape, 1.0)) if shape <= 1 else (4.6 + 2.0 * shape, 4.6)


def _extent(graph: Graph) -> tuple[float, float, float, float]:
    return (-0.5, max(graph.num_src, 1) - 0.5, max(graph.num_dst, 1) - 0.5, -0.5)


def _matrix_axes(ax: Axes, graph: Graph, title: str) -> None:
    longest, shortest = max(graph.num_src, graph.num_dst), max(min(graph.num_src, graph.num_dst), 1)
    shape = graph.num_src / graph.num_dst if graph.num_dst else None
    if longest > _LONGEST_SHAPE * shortest:
        ax.set_aspect("auto")
        shape = None
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("source (is heard)", color=MUTED, fontsize=9)
    ax.set_ylabel("destination (hears)", color=MUTED, fontsize=9)
    _title(ax, title, 8, shape)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(_whole_ticks())
    ax.tick_params(colors=MUTED, labelsize=8, length=2.5, width=0.6)
    if longest <= _SEPARATE_CELLS:
        ax.set_xticks(np.arange(0.5, graph.num_src), minor=True)
        ax.set_yticks(np.arange(0.5, graph.num_dst), minor=True)
        ax.grid(which="minor", color="white", linewidth=1.2)
        ax.tick_params(which="minor", length=0)
    for spine in ax.spines.values():
        spine.set(color=FRAME, linewidth=0.8)


def _plain_axes(ax: Axes, title: str) -> None:
    _title(ax, title, 10)
    ax.tick_params(colors=MUTED, labelsize=8.5, length=3, width=0.6)
    ax.grid(axis="y", color="#e4e8ed", linewidth=0.8)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set(color=FRAME, linewidth=0.8, visible=side in ("left", "bottom"))


def _title(ax: Axes, text: str, pad: float, shape: float | None = None) -> None:
    """At the left, in as many lines as the width takes: a bold letter is some 0.62 of its size wide.

    `shape`: width by height of what is drawn in the middle of the axes, where that is fixed.
    """
    width, height = _inches(ax)
    if shape is not None:
        width = (width + min(width, height * shape)) / 2
    letters = max(int(72 * width / (0.62 * _TITLE)), 12)
    ax.set_title(_wrapped(text, letters), loc="left", color=INK, fontsize=_TITLE, fontweight="bold", pad=pad)


def _wrapped(text: str, letters: int) -> str:
    return "\n".join(line for given in text.splitlines() for line in wrap(given, letters) or [""])


def _inches(ax: Axes) -> tuple[float, float]:
    """Width and height of the axes."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    place = ax.get_position(original=True)
    return width * place.width, height * place.height


def _whole_ticks() -> Locator:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 8, 10])


def _bar(axes: Sequence[Axes], image: Any, label: str) -> Any:
    bar = axes[0].figure.colorbar(image, ax=list(axes), shrink=0.72, aspect=28, pad=0.03)
    bar.set_label(label, color=MUTED, fontsize=8.5)
    bar.ax.tick_params(colors=MUTED, labelsize=8, length=2.5, width=0.6)
    bar.outline.set(edgecolor=FRAME, linewidth=0.6)
    return bar


def _note_below(ax: Axes, text: str) -> None:
    ax.annotate(text, (0, 0), (0, -7), "axes fraction", "offset points", color=MUTED, fontsize=8.5, va="top")


def _label_nodes(ax: Axes, graph: Graph, labels: Sequence[str]) -> None:
    for axis, n in ((ax.xaxis, graph.num_src), (ax.yaxis, graph.num_dst)):
        if len(labels) != n:
            raise ValueError(f"labels must be one for each of the {n} nodes; got {len(labels)}")
        axis.set_ticks(range(n), labels=list(labels), family="monospace", fontsize=min(9.0, 300 / max(n, 1)))
    ax.tick_params(length=0, pad=1.5, labelcolor=INK)


def _label_ends(ax: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Names to the right of their lines, moved apart where lines end together."""
    low, high = ax.get_ylim()
    ends = [
        (x, y, _wrapped(name, _LONGEST_NAME), colour) for x, y, name, colour in sorted(ends, key=lambda end: end[1])
    ]
    points = [1.3 * _NAME * (1 + name.count("\n")) + 2 for _, _, name, _ in ends]
    room = np.array(points) * (high - low) / (72 * _inches(ax)[1])
    at = _apart(np.array([y for _, y, *_ in ends]), room, low)
    style: dict[str, Any] = {"textcoords": "offset points", "fontsize": _NAME, "va": "center"}
    for (x, _, name, colour), y in zip(ends, at, strict=True):  # which may lie above the axes, and must still be seen
        ax.annotate(name, (x, y), (7, 0), color=colour, annotation_clip=False, **style)


def _apart(wanted: NDArray[np.float64], room: NDArray[np.float64], low: float = -np.inf) -> NDArray[np.float64]:
    """The middles closest to ascending wanted ones, by least squares, with room for each above `low` and between them:
    those that would overlap stand together around their mean (isotonic regression)."""
    stacked = np.cumsum(room) - room / 2
    groups: list[tuple[float, int]] = []
    for lowest in wanted - stacked:
        mean, count = float(lowest), 1
        while groups and groups[-1][0] > mean:
            below, many = groups.pop()
            mean, count = (below * many + mean * count) / (many + count), many + count
        groups.append((mean, count))
    return stacked + np.repeat([max(mean, low) for mean, _ in groups], [count for _, count in groups])


# ---------------------------------------------------------------------------------------------------- nodes and links


def _circle(n: int) -> NDArray[np.float64]:
    """Clockwise from the top."""
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / max(n, 1)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def _links(ax: Axes, graph: Graph, at: NDArray[np.float64], size: float) -> None:
    """Arrows where there are few and they tell something, else lines; self-loops are left out."""
    from matplotlib.collections import LineCollection

    dst, src = graph.runs.edges()
    dst, src = dst[dst != src], src[dst != src]
    if len(dst) <= _MOST_ARROWS and not graph.runs.same_as(graph.runs.transpose()):
        _arrows(ax, at[src], at[dst], size)
    else:
        width = float(np.clip(300 / max(len(dst), 1), 0.25, 1.2))
        ax.add_collection(LineCollection(np.stack([at[src], at[dst]], 1).tolist(), colors=FRAME, linewidths=width))


def _dots(ax: Axes, at: NDArray[np.float64], size: float, classes: Ints | None) -> None:
    """The nodes, numbered when they are few, or coloured by class."""
    colours = SERIES[0] if classes is None else np.array(CLASSES)[classes % len(CLASSES)]
    ax.scatter(at[:, 0], at[:, 1], s=size, c=colours, edgecolors="white", linewidths=size / 60, zorder=3)
    if classes is not None:
        for kind in np.unique(classes):
            _name_at(ax, np.median(at[classes == kind], axis=0), str(kind))
    elif len(at) <= _SEPARATE_CELLS:
        for node, (x, y) in enumerate(at):
            ax.annotate(str(node), (x, y), color="white", fontsize=6.5, ha="center", va="center", zorder=4)


def _arrows(ax: Axes, tails: NDArray[np.float64], heads: NDArray[np.float64], size: float) -> None:
    radius = size**0.5 / 2
    for tail, head in zip(tails, heads, strict=True):
        style = {
            "arrowstyle": "-|>,head_length=0.35,head_width=0.16",
            "connectionstyle": "arc3,rad=0.12",
            "color": MUTED,
            "linewidth": 0.7,
            "shrinkA": radius,
            "shrinkB": radius,
        }
        ax.annotate("", xy=tuple(head), xytext=tuple(tail), arrowprops=style)


def _name_at(ax: Axes, at: NDArray[np.float64], name: str) -> None:
    from matplotlib.patheffects import withStroke

    outline = [withStroke(linewidth=3.0, foreground="white")]
    ax.annotate(
        name,
        tuple(at),
        color=INK,
        fontsize=13,
        fontweight="bold",
        ha="center",
        va="center",
        path_effects=outline,
        zorder=5,
    )
