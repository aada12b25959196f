"""Plots of graphs, attention weights and training curves, in one style that is safe for color-blind readers.

Each function draws on the matplotlib Axes `ax`, or on new Axes, and returns them. No global setting of matplotlib is
changed. In matrices, rows are destinations and columns sources, like `Graph.dense()`. Large graphs are drawn as tiles
whose density is computed from runs, without an N x N matrix.
"""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import FLOATS, REAL, check_form, one_set
from mpnn.graph.blocks import density
from mpnn.graph.runs import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.ticker import Locator

INK = "#1f2933"
MUTED = "#5f6b7a"
FRAME = "#c3cad3"
EMPTY = "#f2f4f7"
# Okabe & Ito 2008, "Color universal design", without black and yellow, which do not stand out from text and background.
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Tol 2021, "Colour schemes", the muted scheme, for more classes than SERIES has colors.
CLASSES = (
    *("#332288", "#88ccee", "#44aa99", "#117733", "#999933"),
    *("#ddcc77", "#cc6677", "#882255", "#aa4499", "#888888"),
)
_EDGE = "#12588f"
SEQUENTIAL = ("#d3e4f3", "#84b9dc", "#3487c0", "#12588f", "#062a52")

_TILES = 256
_SEPARATE_CELLS = 32
_MAX_ARROWS = 400
_LONGEST_SHAPE = 8
_LONGEST_NAME = 26
# sizes in points
_TITLE = 11
_NAME = 9


def adjacency(graph: Graph, ax: "Axes | None" = None, *, title: str | None = None, tiles: int = _TILES) -> "Axes":
    """Adjacency matrix of a graph: a colored cell (row i, column j) for each edge j -> i.

    With at most `tiles` nodes on a side, each edge is one cell. Otherwise a cell is a tile of pairs, and darker cells
    contain more edges.

    Args:
        title: default: the graph's name.
        tiles: the maximum number of cells on a side.
    """
    rows, columns = min(graph.num_dst, tiles), min(graph.num_src, tiles)
    exact = (rows, columns) == (graph.num_dst, graph.num_src)
    share = np.ma.masked_equal(density(graph.runs, rows, columns), 0.0)
    ax, image = _matrix(graph, share, ax, title, solid=exact)
    if not exact:
        bar = _bar(image, "share of a tile's pairs that are edges", ["1%", "10%", "25%", "50%", "100%"])
        bar.ax.minorticks_off()
    note = f"{graph.num_edges:,} edges, {graph.runs.num_edges / max(graph.num_dst * graph.num_src, 1):.2%} of all pairs"
    ax.annotate(note, (0, 0), (0, -7), "axes fraction", "offset points", color=MUTED, fontsize=8.5, va="top")
    return ax


def attention(
    graph: Graph,
    weights: Tensor,
    ax: "Axes | None" = None,
    *,
    title: str | None = None,
    labels: Sequence[str] | None = None,
) -> "Axes":
    """Matrix of attention weights: a cell for each edge, pale where there is no edge; in graphs of more than 256 nodes
    on a side, a cell is the mean over its edges.

    The color scale is a square root, so that weights of 0.01 remain visible.

    Args:
        weights: [E] or [E, H] in the graph's edge order, as `return_weights=True` gives them; heads are averaged.
        title: default: the graph's name.
        labels: one label for each node (characters, words), instead of its number.

    Raises:
        ValueError: if the number of weights is not the number of edges, or there is not one label for each node.
    """
    if weights.dim() not in (1, 2) or len(weights) != graph.num_edges:
        raise ValueError(f"weights must be [E] or [E, H] with E = {graph.num_edges}; got {list(weights.shape)}")
    of_heads = weights.detach().float().cpu()
    per_edge = (of_heads if weights.dim() == 1 else of_heads.mean(1)).numpy()
    rows, columns = min(graph.num_dst, _TILES), min(graph.num_src, _TILES)
    src, dst = graph.edge_index.cpu().numpy()
    cell = dst * rows // max(graph.num_dst, 1) * columns + src * columns // max(graph.num_src, 1)
    total, count = (np.bincount(cell, w, minlength=rows * columns) for w in (per_edge, np.ones_like(per_edge)))
    mean = np.ma.masked_array(total / np.maximum(count, 1), count == 0).reshape(rows, columns)
    ax, image = _matrix(graph, mean, ax, title)
    if labels is not None:
        _label_nodes(ax, graph, labels)
    _bar(image, "attention weight", ["0.01", "0.1", "0.25", "0.5", "1"])
    return ax


def curves(
    history: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    ax: "Axes | None" = None,
    *,
    title: str = "",
    xlabel: str = "step",
    ylabel: str = "loss",
) -> "Axes":
    """Learning curves: `history` maps each name to (steps, values). Names are next to the axes in the colors of the
    lines, and in the order of their ends."""
    ax = ax or _new_axes((6.4, 4.0))
    ends: list[tuple[float, Any]] = []
    for k, (name, (at, values)) in enumerate(history.items()):
        style: dict[str, Any] = {"color": SERIES[k % len(SERIES)], "marker": "o" if len(values) < 30 else None}
        lines = ax.plot(at, values, label=_wrap_text(name, _LONGEST_NAME), linewidth=1.8, markersize=3.5, **style)
        if name and len(values):
            ends.append((-float(values[-1]), lines[0]))
    _title(ax, title, 10)
    style_axes(ax, xlabel, ylabel)
    if all(float(x).is_integer() for at, _ in history.values() for x in at):
        ax.xaxis.set_major_locator(_whole_ticks())
    if ends:
        handles = [line for _, line in sorted(ends, key=lambda end: end[0])]
        place: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "handlelength": 0.8}
        ax.legend(handles=handles, labelcolor="linecolor", frameon=False, fontsize=_NAME, **place)
    return ax


def style_axes(ax: "Axes", xlabel: str, ylabel: str) -> None:
    """Draws the axes of a chart at the left and below, with labels, and lines under the curves."""
    ax.tick_params(colors=MUTED, labelsize=8.5, length=3, width=0.6)
    ax.grid(axis="y", color="#e4e8ed", linewidth=0.8)
    ax.set_axisbelow(True)
    for side, spine in ax.spines.items():
        spine.set(color=FRAME, linewidth=0.8, visible=side in ("left", "bottom"))
    ax.set_xlabel(xlabel, color=MUTED, fontsize=9)
    ax.set_ylabel(ylabel, color=MUTED, fontsize=9)


def network(
    graph: Graph,
    ax: "Axes | None" = None,
    *,
    positions: ArrayLike | None = None,
    classes: Tensor | None = None,
    title: str | None = None,
) -> "Axes":
    """Node-link diagram of a small graph; arrows point from source to destination.

    Args:
        positions: [N, 2], the coordinates of the nodes; default: `springs` for explicit graphs, and a circle, clockwise
            from the top, for structured ones.
        classes: integers [N] that select the nodes' colors; each class is labeled at its median position.

    Raises:
        ValueError: if sources and destinations are different sets, or positions or classes do not match the nodes.
    """
    one_set("network", graph)
    if positions is None:
        at = springs(graph) if graph.is_explicit else _circle(graph.num_dst)
    else:
        at = np.asarray(positions).astype(float)
    check_form(f"positions must be [{graph.num_dst}, 2], one row for each node", at, FLOATS, (graph.num_dst, 2))
    if classes is not None:
        check_form(f"classes must be [{graph.num_dst}], one for each node", classes, REAL, (graph.num_dst,))
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
    """Force-directed layout [N, 2] by networkx: all nodes repel each other, and edges attract (Fruchterman & Reingold
    1991). `start` [N, 2] defaults to a circle."""
    import networkx

    n = graph.num_dst
    at = _circle(n) if start is None else np.asarray(start).astype(float)
    at = at + np.random.default_rng(0).normal(0.0, 0.01 / max(n, 1) ** 0.5, (n, 2))  # breaks the symmetry of the start
    dst, src = graph.runs.edges()
    links = networkx.empty_graph(n)
    links.add_edges_from(zip(src.tolist(), dst.tolist(), strict=True))
    places = networkx.spring_layout(links, pos=dict(enumerate(at)), iterations=rounds, seed=0)
    return np.array([places[node] for node in range(n)]).reshape(n, 2)


def _new_axes(size: tuple[float, float]) -> "Axes":
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("pictures need matplotlib; run: pip install matplotlib") from error
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def _width_of_matrix(graph: Graph) -> tuple[float, float]:
    shape = float(np.clip(graph.num_src / max(graph.num_dst, 1), 1 / 3, 3))
    return (5.4 * max(shape, 0.7), 5.0 / min(shape, 1.0)) if shape <= 1 else (4.6 + 2.0 * shape, 4.6)


def _matrix(
    graph: Graph, shares: NDArray[np.float64], ax: "Axes | None", title: str | None, solid: bool = False
) -> "tuple[Axes, Any]":
    """Draws the cells of a matrix that are not masked: `solid`, or darker the nearer to 1. The image comes second."""
    ax = ax or _new_axes(_width_of_matrix(graph))
    from matplotlib.colors import LinearSegmentedColormap, ListedColormap, PowerNorm

    colors = ListedColormap([_EDGE]) if solid else LinearSegmentedColormap.from_list("mpnn", SEQUENTIAL)
    image = ax.imshow(
        shares,
        cmap=colors.with_extremes(bad=EMPTY),
        norm=None if solid else PowerNorm(0.5, vmin=0.0, vmax=1.0),
        extent=(-0.5, max(graph.num_src, 1) - 0.5, max(graph.num_dst, 1) - 0.5, -0.5),
        interpolation="nearest",
    )
    longest, shortest = max(graph.num_src, graph.num_dst), max(min(graph.num_src, graph.num_dst), 1)
    shape = graph.num_src / graph.num_dst if graph.num_dst else None
    if longest > _LONGEST_SHAPE * shortest:
        ax.set_aspect("auto")
        shape = None
    ax.xaxis.tick_top()
    ax.xaxis.set_label_position("top")
    ax.set_xlabel("source (sends)", color=MUTED, fontsize=9)
    ax.set_ylabel("destination (receives)", color=MUTED, fontsize=9)
    _title(ax, graph.name if title is None else title, 8, shape)
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
    return ax, image


def _title(ax: "Axes", text: str, pad: float, shape: float | None = None) -> None:
    """Draws the title at the left, wrapped to the width: the average bold letter is about 0.62 of its size wide.

    `shape`: the aspect ratio (width / height) of the drawing, if it is fixed.
    """
    width, height = _size_in_inches(ax)
    if shape is not None:
        width = (width + min(width, height * shape)) / 2
    letters = max(int(72 * width / (0.62 * _TITLE)), 12)
    ax.set_title(_wrap_text(text, letters), loc="left", color=INK, fontsize=_TITLE, fontweight="bold", pad=pad)


def _wrap_text(text: str, letters: int) -> str:
    return "\n".join(line for paragraph in text.splitlines() for line in wrap(paragraph, letters) or [""])


def _size_in_inches(ax: "Axes") -> tuple[float, float]:
    """Width and height of the axes."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches()
    box = ax.get_position(original=True)
    return width * box.width, height * box.height


def _whole_ticks() -> "Locator":
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(8, integer=True, steps=[1, 2, 4, 5, 8, 10])


def _bar(image: Any, label: str, ticks: list[str]) -> Any:
    bar = image.figure.colorbar(image, ax=image.axes, shrink=0.72, aspect=28, pad=0.03)
    bar.set_ticks([0.01, 0.1, 0.25, 0.5, 1.0], labels=ticks)
    bar.set_label(label, color=MUTED, fontsize=8.5)
    bar.ax.tick_params(colors=MUTED, labelsize=8, length=2.5, width=0.6)
    bar.outline.set(edgecolor=FRAME, linewidth=0.6)
    return bar


def _label_nodes(ax: "Axes", graph: Graph, labels: Sequence[str]) -> None:
    for axis, n in ((ax.xaxis, graph.num_src), (ax.yaxis, graph.num_dst)):
        if len(labels) != n:
            raise ValueError(f"labels must be one for each of the {n} nodes; got {len(labels)}")
        axis.set_ticks(range(n), labels=list(labels), family="monospace", fontsize=min(9.0, 300 / max(n, 1)))
    ax.tick_params(length=0, pad=1.5, labelcolor=INK)


def _circle(n: int) -> NDArray[np.float64]:
    """Points on a circle, clockwise from the top."""
    angle = np.pi / 2 - 2 * np.pi * np.arange(n) / max(n, 1)
    return np.stack([np.cos(angle), np.sin(angle)], 1)


def _links(ax: "Axes", graph: Graph, at: NDArray[np.float64], size: float) -> None:
    """Draws arrows if there are few edges and the graph is directed, else lines. Self-loops are omitted."""
    from matplotlib.collections import LineCollection

    dst, src = graph.runs.edges()
    dst, src = dst[dst != src], src[dst != src]
    if len(dst) <= _MAX_ARROWS and not graph.runs.same_as(graph.runs.transpose()):
        _arrows(ax, at[src], at[dst], size)
    else:
        width = float(np.clip(300 / max(len(dst), 1), 0.25, 1.2))
        ax.add_collection(LineCollection(np.stack([at[src], at[dst]], 1).tolist(), colors=FRAME, linewidths=width))


def _dots(ax: "Axes", at: NDArray[np.float64], size: float, classes: Ints | None) -> None:
    """Draws the nodes: colored by class, or numbered if there are few."""
    colors = SERIES[0] if classes is None else np.array(CLASSES)[classes % len(CLASSES)]
    ax.scatter(at[:, 0], at[:, 1], s=size, c=colors, edgecolors="white", linewidths=size / 60, zorder=3)
    if classes is not None:
        for kind in np.unique(classes):
            _name_at(ax, np.median(at[classes == kind], axis=0), str(kind))
    elif len(at) <= _SEPARATE_CELLS:
        for node, (x, y) in enumerate(at):
            ax.annotate(str(node), (x, y), color="white", fontsize=6.5, ha="center", va="center", zorder=4)


def _arrows(ax: "Axes", tails: NDArray[np.float64], heads: NDArray[np.float64], size: float) -> None:
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


def _name_at(ax: "Axes", at: NDArray[np.float64], name: str) -> None:
    from matplotlib.patheffects import withStroke

    style: dict[str, Any] = {"color": INK, "fontsize": 13, "fontweight": "bold", "ha": "center", "va": "center"}
    ax.annotate(name, tuple(at), path_effects=[withStroke(linewidth=3.0, foreground="white")], zorder=5, **style)
