"""Writes the tables of docs/distributed.md, and its figure: `python -m docs.scale`, a minute.

Everything is computed: plans of `partition`, and `docs/simulate.py` with the rates of data sheets.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.figure import Figure

from docs.simulate import H100_INFINIBAND, H100_NVLINK, Forecast, Work, sage, simulate, transformer
from mpnn import Graph, graphs
from mpnn.distributed import partition
from mpnn.view.plot import FRAME, INK, MUTED, SERIES

HERE = Path(__file__).parent
PAGE, FIGURE = HERE / "distributed.md", HERE / "img" / "scale.png"
TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end -->)", re.S)
RANKS = (8, 64, 1024)
HEADINGS = ("layers over a graph", "ranks", "fetched a layer", "memory", "computing", "exchange", "efficiency")


class Case(NamedTuple):
    name: str
    graph: Callable[[], Graph]
    work: Work
    layers: int
    scale: float = 1.0
    transport: str = "halo"
    ranks: tuple[int, ...] = RANKS


def random_edges() -> Graph:
    """A hundredth of 100 million nodes and a billion edges."""
    draw = torch.Generator().manual_seed(0)
    return graphs.from_edges(torch.randint(1_000_000, (2, 10_000_000), generator=draw), 1_000_000)


TOKENS = 1 << 20
LLAMA = transformer(4096, heads=32, kv_heads=8, hidden=14_336)
WINDOW = graphs.causal() & graphs.window(4096)
HUBS = graphs.longformer(4096, globals=16)
CASES = (
    Case("window of 4,096, by halo", lambda: WINDOW.bind(TOKENS), LLAMA, 32),
    Case("window of 4,096, by stream", lambda: WINDOW.bind(TOKENS), LLAMA, 32, 1, "stream"),
    Case("causal, by heads", lambda: graphs.causal().bind(TOKENS), LLAMA, 32, 1, "heads", (8, 32)),
    Case("causal, by halo", lambda: graphs.causal().bind(TOKENS), LLAMA, 32, 1, "halo", (8, 64)),
    Case("causal, by stream", lambda: graphs.causal().bind(TOKENS), LLAMA, 32, 1, "stream", (8, 64)),
    Case("Longformer with 16 hubs, by halo", lambda: HUBS.bind(TOKENS), LLAMA, 32, 1, "halo", (8, 64)),
    Case("Longformer with 16 hubs, by queries", lambda: HUBS.bind(TOKENS), LLAMA, 32, 1, "queries", (8, 64)),
    Case("GraphSAGE, random edges, by halo", random_edges, sage(256), 3, 100),
)


def forecasts() -> Iterator[tuple[Case, Forecast]]:
    for case in CASES:
        graph = case.graph()
        balance = "zigzag" if case.name.startswith("causal") else "edges"
        cost = (case.work.dst_flops + case.work.src_flops) / case.work.edge_flops  # in edges
        for ranks in case.ranks:
            machine = H100_NVLINK if ranks <= 8 else H100_INFINIBAND
            part = partition(graph, ranks, balance="nodes" if graph.is_explicit else balance, node_cost=cost)
            options = {"layers": case.layers, "scale": case.scale, "transport": case.transport}
            yield case, simulate(part, case.work, machine, **options)


def row(case: Case, forecast: Forecast) -> str:
    cells = (
        case.name,
        f"{forecast.ranks:,}",
        bytes_of(forecast.fetched),
        bytes_of(forecast.memory),
        time_of(forecast.compute),
        time_of(forecast.exchange),
        f"{forecast.efficiency:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def bytes_of(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def time_of(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{seconds * 1e3:,.1f} ms"


def figure(found: list[tuple[Case, Forecast]]) -> Figure:
    """Seconds of a step by ranks; dashed: the first number of ranks, divided perfectly."""
    drawn = Figure(figsize=(6.4, 4.2), layout="constrained")
    ax = drawn.subplots()
    drawn_cases = [case for case in CASES if case.transport != "stream"]  # which lie a little above the halo
    for case, color in zip(drawn_cases, SERIES, strict=True):
        points = [(forecast.ranks, forecast.seconds) for one, forecast in found if one is case]
        ax.plot(*zip(*points, strict=True), "o-", color=color, lw=1.8, ms=4, label=case.name)
        first, seconds = points[0]
        ax.plot([first, RANKS[-1]], [seconds, seconds * first / RANKS[-1]], "--", color=color, lw=0.8)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    ax.set_xlabel("ranks", color=MUTED)
    ax.set_ylabel("seconds of a training step, computed", color=INK)
    ax.grid(color=FRAME, lw=0.5)
    ax.tick_params(which="both", colors=MUTED, labelsize=8)
    ax.legend(fontsize=8, frameon=False)
    return drawn


def updated(text: str, found: list[tuple[Case, Forecast]]) -> str:
    """The page with these rows in its table."""
    lines = [f"| {' | '.join(HEADINGS)} |", "|---" * len(HEADINGS) + "|", *(row(*one) for one in found)]
    return TABLE.sub(lambda _: "\n".join(lines) + "\n", text)


if __name__ == "__main__":
    computed = list(forecasts())
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8"), computed), encoding="utf-8")
    figure(computed).savefig(FIGURE, dpi=110)
