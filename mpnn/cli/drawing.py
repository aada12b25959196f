"""Draws a graph in the terminal: each line of text shows two rows of cells as half-block characters."""

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.style import Style
from rich.text import Text

from mpnn.graph.blocks import density
from mpnn.graph.runs import Runs
from mpnn.view.plot import EMPTY, SEQUENTIAL

_MAX_CELLS = 64
_SMALL = 32

# Bayer matrix for ordered dithering: without colors, a density becomes a share of filled cells.
_DITHER = (np.array([[0, 8, 2, 10], [12, 4, 14, 6], [3, 11, 1, 9], [15, 7, 13, 5]]) + 0.5) / 16
_HALVES = {(False, False): " ", (True, False): "▀", (False, True): "▄", (True, True): "█"}
_BLOCKS = str.maketrans("▀▄█─│┌┐└┘", "'.#-|++++")
"""What stands for the block characters where the encoding of the terminal has none."""


def matrix(runs: Runs, plain: bool, width: int = _MAX_CELLS + 2, ascii_only: bool = False) -> Text:
    """Draws destinations as rows and sources as columns, at most `width` characters wide. Darker cells contain more
    edges. `plain`: without colors, in a frame. `ascii_only`: plain, and without block characters."""
    plain = plain or ascii_only
    cells = _cells(runs, max(1, min(_MAX_CELLS, width - 2 * plain)))
    if len(cells) % 2:
        cells = np.vstack([cells, np.full_like(cells[:1], np.nan)])
    if ascii_only:
        return Text(_plain(cells).plain.translate(_BLOCKS))
    return _plain(cells) if plain else _colored(cells)


def _cells(runs: Runs, most: int) -> NDArray[np.float64]:
    """Square roots of densities, so that sparse tiles remain visible. Small graphs are enlarged."""
    longest = max(runs.num_dst, runs.num_src)
    shrink = min(1.0, most / longest)
    rows, columns = (max(1, round(n * shrink)) for n in (runs.num_dst, runs.num_src))
    cells = np.sqrt(density(runs, rows, columns))
    enlarge = max(1, min(_SMALL, most) // longest)
    return cells.repeat(enlarge, 0).repeat(enlarge, 1)


def _plain(cells: NDArray[np.float64]) -> Text:
    rows, columns = cells.shape
    level = np.tile(_DITHER, (-(-rows // 4), -(-columns // 4)))[:rows, :columns]
    on = np.nan_to_num(cells) > level
    lines = [
        "".join(_HALVES[bool(top), bool(bottom)] for top, bottom in zip(*pair, strict=True))
        for pair in zip(on[::2], on[1::2], strict=True)
    ]
    border = "─" * columns
    return Text("\n".join([f"┌{border}┐", *(f"│{line}│" for line in lines), f"└{border}┘"]))


def _colored(cells: NDArray[np.float64]) -> Text:
    text = Text()
    for top, bottom in zip(cells[::2], cells[1::2], strict=True):
        for a, b in zip(top, bottom, strict=True):
            text.append("▀", Style(color=_color(a), bgcolor=_color(b)))
        text.append("\n")
    text.right_crop()
    return text


def _color(level: float) -> Color | None:
    if np.isnan(level):
        return None
    stops = np.array([Color.parse(stop).get_truecolor() for stop in SEQUENTIAL])
    red, green, blue = (np.interp(level, np.linspace(0, 1, len(stops)), channel) for channel in stops.T)
    return Color.from_rgb(red, green, blue) if level > 0 else Color.parse(EMPTY)
