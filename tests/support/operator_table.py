"""The table of docs/performance.md: aggregators under attention, by the plan and by plain torch on edge lists."""

import os
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpnn import Graph, engine, graphs
from mpnn.aggregate import aggregator
from mpnn.round import Round
from mpnn.scores import AdditiveScore, Dot, LeakyReLU

NODES, WIDTH, HEADS = 4096, 64, 4
PAGE = Path(__file__).resolve().parents[2] / "docs/performance.md"
AGGREGATES = ("sum", "mean", "max", "std")
ATTENTIONS: dict[str, Callable[[Tensor], Any]] = {
    "none": lambda x: None,
    "dot product": lambda x: Dot(x, x, 0.25),
    "GAT": lambda x: AdditiveScore(x[..., 0], x[..., 1], LeakyReLU()),
}
"""The score of features [N, H, D]."""
KINDS = ("forward", "gradient", "second")


def made_graphs() -> dict[str, Any]:
    edges = torch.randint(0, NODES, (2, 16 * NODES), generator=torch.Generator().manual_seed(0))
    return {"window(8)": graphs.window(8).bind(NODES), "65,536 edges": graphs.from_edges(edges, NODES)}


class Row(NamedTuple):
    """The times of plain torch on edge lists / the times of the plan, by kind."""

    aggregate: str
    attention: str
    graph: str
    ratios: dict[str, float]


def _seconds(run: Callable[[Tensor], Tensor], x: Tensor, kind: str) -> float:
    began = time.process_time()
    if kind == "forward":
        with torch.no_grad():
            run(x)
    elif kind == "gradient":
        torch.autograd.grad(run(x).sin().sum(), x)
    else:
        (first,) = torch.autograd.grad(run(x).sin().sum(), x, create_graph=True)
        torch.autograd.grad(first.square().sum(), x)
    return time.process_time() - began


def _run(graph: Graph, score: Callable[[Tensor], Any], reduce: str, backend: str, x: Tensor) -> Tensor:
    scored = score(x)
    normalize = "none" if scored is None else "softmax"
    out, _ = engine.run(Round(graph, x, scored, normalize=normalize, reduce=aggregator(reduce)), backend)
    return out


def measured(aggregates: tuple[str, ...] = AGGREGATES, repeats: int = 2) -> Iterator[Row]:
    """Minima of runs that alternate in one process."""
    x = torch.randn(NODES, HEADS, WIDTH // HEADS, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for name, graph in made_graphs().items():
        for attention, score in ATTENTIONS.items():
            for aggregate in aggregates:
                best: dict[tuple[str, str], float] = {}
                for _ in range(repeats):
                    for backend in ("auto", "edge_list"):
                        run = partial(_run, graph, score, aggregate, backend)
                        for kind in KINDS:
                            key = backend, kind
                            best[key] = min(best.get(key, float("inf")), _seconds(run, x, kind))
                ratios = {kind: best["edge_list", kind] / best["auto", kind] for kind in KINDS}
                yield Row(aggregate, attention, name, ratios)


def table(rows: list[Row]) -> str:
    lines = ["| aggregate | attention | graph | forward | gradient | second derivative |", "|---" * 6 + "|"]
    lines += [
        f"| {row.aggregate} | {row.attention} | {row.graph} | "
        + " | ".join(f"{row.ratios[k]:.1f}" for k in KINDS)
        + " |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    text = PAGE.read_text()
    found = table(list(measured()))
    pattern = r"(?<=<!-- aggregators -->\n).*?(?=<!-- end -->)"
    PAGE.write_text(re.sub(pattern, lambda _: found, text, flags=re.S))
