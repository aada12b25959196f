"""When do fewer edges take less time? It depends on how many there are, and on how irregular they are.

One training step (forward and backward) of dot-product attention, 4 heads of width 32, over four kinds of graphs with
the same number of edges, from all pairs down to one in 256:

    window            the sources of a node are one run
    random blocks     blocks of 64 x 64 edges
    random edges      as many for each pair of nodes
    power law         random edges, most of them at few nodes: probabilities are proportional to 1 / rank

Each backend that supports a graph runs it, interleaved with the others, on one thread, after their results were
compared. The figure has the time of computing all pairs with a mask over that of the fastest backend, and what the plan
chose.

    python examples/sparse_or_dense.py                             seven minutes on a shared core
    python examples/sparse_or_dense.py --nodes 128 --seconds 0     a quick test
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor

from mpnn import Graph, graphs, ops
from mpnn.engine.plan import plan
from mpnn.round import Round
from mpnn.scores import Dot

NAME = "sparse_or_dense"
HEADS, WIDTH, BLOCK = 4, 32, 64
DENSITIES = [2.0**-k for k in range(9)]
HOPELESS = 5.0  # times the lowest estimate: not run, because it would take most of the time


def window(nodes: int, density: float) -> Graph:
    """The narrowest window with at least this share of all pairs."""
    radius = next(r for r in range(nodes) if nodes * (2 * r + 1) - r * (r + 1) >= density * nodes**2)
    return graphs.window(radius).bind(nodes)


def random_blocks(nodes: int, density: float) -> Graph:
    return graphs.random(max(round(density * nodes / BLOCK), 1) * BLOCK, BLOCK).bind(nodes)


def random_edges(nodes: int, density: float, exponent: float = 0.0) -> Graph:
    """Distinct edges drawn with probabilities proportional to (rank of dst * rank of src)^-exponent. The largest of
    log-probabilities plus Gumbel noise are such a draw."""
    generator = torch.Generator().manual_seed(0)
    logs = [-exponent * (torch.randperm(nodes, generator=generator) + 1).double().log() for _ in range(2)]
    gumbel = -torch.empty(nodes, nodes, dtype=torch.float64).exponential_(generator=generator).log()
    edges = (logs[0][:, None] + logs[1] + gumbel).flatten().topk(round(density * nodes**2)).indices.sort().values
    return graphs.from_edges(torch.stack([edges % nodes, edges // nodes]), nodes)


KINDS: dict[str, Callable[[int, float], Graph]] = {
    "window": window,
    "random blocks": random_blocks,
    "random edges": random_edges,
    "power law": partial(random_edges, exponent=1.0),
}


def race(kind: str, nodes: int, density: float, seconds: float) -> dict[str, Any]:
    """The milliseconds of each backend, and the plan's choice."""
    torch.manual_seed(0)
    graph = KINDS[kind](nodes, density)
    query, key, value = (torch.randn(nodes, HEADS, WIDTH, requires_grad=True) for _ in range(3))
    planned = plan(Round(graph, value, Dot(query, key, WIDTH**-0.5)))
    least = planned.candidates[0].seconds
    names = [c.name for c in planned.candidates if c.name == "dense" or c.seconds < HOPELESS * least]
    direction = torch.randn(nodes, HEADS, WIDTH)

    def step(backend: str) -> tuple[Tensor, ...]:
        out = ops.attend(graph, query, key, value, backend=backend)
        return out, *torch.autograd.grad(out, (query, key, value), direction)

    truth = step("dense")
    for name in names:
        torch.testing.assert_close(step(name), truth, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    times = dict.fromkeys(names, float("inf"))
    ends, rounds = time.process_time() + seconds * len(names), 0
    while rounds < 3 or time.process_time() < ends:
        rounds += 1
        for name in names:
            if rounds > 2 and times[name] > 3 * min(times.values()):
                continue
            began = time.process_time()
            step(name)
            times[name] = min(times[name], time.process_time() - began)
    return {
        "density": round(graph.num_edges / nodes**2, 5),
        "plan": planned.backend,
        "ms": {name: round(1e3 * t, 4) for name, t in times.items()},
    }


def break_even(points: list[dict[str, Any]]) -> float | None:
    """The density below which another backend is faster than `dense`: the largest measured one from which on this is
    so. None if there is none."""
    best = None
    for point in sorted(points, key=lambda point: point["density"]):
        if min(point["ms"], key=point["ms"].get) == "dense":
            break
        best = point["density"]
    return best


def loss(point: dict[str, Any]) -> float:
    """The time of the plan's choice divided by the lowest, minus one."""
    return point["ms"][point["plan"]] / min(point["ms"].values()) - 1


def draw(values: dict[tuple[int, str], list[dict[str, Any]]], sizes: list[int]) -> plt.Figure:
    figure, axes = plt.subplots(
        1, len(sizes), figsize=(1 + 4.4 * len(sizes), 4.9), sharey=True, layout="constrained", squeeze=False
    )
    figure.suptitle(
        "Edges in runs and blocks pay from half of all pairs on, scattered edges below a quarter",
        fontsize=14,
    )
    for ax, nodes in zip(axes[0], sizes, strict=True):
        for color, kind in enumerate(KINDS):
            points = values[nodes, kind]
            x = [100 * p["density"] for p in points]
            ax.plot(x, [p["ms"]["dense"] / min(p["ms"].values()) for p in points], "-", color=f"C{color}", label=kind)
            chosen = [p["ms"]["dense"] / p["ms"][p["plan"]] for p in points]
            ax.plot(x, chosen, "o", color=f"C{color}", markersize=5)
        ax.axhline(1, color="black", linewidth=1)
        ax.set(xscale="log", yscale="log", xlabel="edges, % of all pairs", title=f"{nodes:,} nodes")
        ax.set_xticks([0.5, 1, 2, 5, 10, 20, 50, 100])
        ax.xaxis.set_major_formatter("{x:g}")
        ax.yaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter("")
        ax.invert_xaxis()
        ax.grid(alpha=0.3)
    axes[0][0].set_ylabel("times as fast as all pairs with a mask")
    axes[0][0].legend(title="line: fastest backend\npoint: the plan's choice", fontsize=9, title_fontsize=9)
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--nodes", type=int, nargs="+", default=[128, 512, 2048], help="sizes of the graphs")
    command.add_argument("--seconds", type=float, default=0.5, help="processor time for each backend and graph")
    options = command.parse_args()
    torch.set_num_threads(1)  # times are of the processor, so other work on the machine disturbs them little
    grid = [(nodes, kind, d) for nodes in options.nodes for kind in KINDS for d in DENSITIES if d * nodes >= 2]
    grid = [(nodes, kind, d) for nodes, kind, d in grid if kind != "random blocks" or d * nodes >= BLOCK]
    jobs = {f"{n} nodes, {kind}, {d:.2%}": partial(race, kind, n, d, options.seconds) for n, kind, d in grid}
    measured = measure(NAME, jobs, options, {"heads": HEADS, "width": WIDTH, "seconds": options.seconds})
    values: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for (nodes, kind, _), value in zip(grid, measured.values(), strict=True):
        values.setdefault((nodes, kind), []).append(value)
    for (nodes, kind), points in values.items():
        even = break_even(points)
        sparse = "nowhere" if even is None else f"up to {even:.0%} of all pairs"
        last = points[-1]
        console.print(
            f"{nodes} nodes, {kind}: faster than dense {sparse}; {last['ms']['dense'] / min(last['ms'].values()):.1f} "
            f"times at {last['density']:.1%}, by {min(last['ms'], key=last['ms'].get)}",
            soft_wrap=True,
        )
    losses = [loss(point) for points in values.values() for point in points]
    console.print(
        f"the plan chose the fastest in {sum(x == 0 for x in losses)} of {len(losses)}; it loses "
        f"{sum(losses) / len(losses):.1%} on average, {max(losses):.0%} at worst",
        soft_wrap=True,
    )
    save(draw(values, options.nodes), NAME, options)


if __name__ == "__main__":
    main()
