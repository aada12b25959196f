"""The least time that a kernel could take on a machine: that of its multiplications, or of the bytes that it must move.

A row's facts count both for a forward pass. `flops` are multiplications and additions, two for each FMA. `stream` are
bytes that are read or written in order, once each; `gather` are bytes of rows that edges read in an order that no cache
foresees, once for each edge.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contest import BOTH
from benchmarks.machine import multiply_in_cache
from benchmarks.units import duration

BACKWARD = {"flops": 2.5, "stream": 1.5, "gather": 2.0}
"""What a backward pass of attention adds, in forward passes: products for three gradients and the logits again; the
gradient of the output and of its inputs; queries and gradients of the output for each edge besides keys and values."""
BACKWARD_OF_SUM = {"flops": 1.0, "stream": 1.0, "gather": 1.0}
MOST = 1.1
"""Times its roof within which a kernel needs no reason."""

REASONS = {
    "dense": "the exponentials of the softmax take time and are not in the roof, and tiles on a causal diagonal also "
    "compute pairs that are not edges",
    "sparse": "as for dense. Also, the rows of a head lie apart in memory, and a tile with few keys has less work over "
    "which its start is spread",
    "length": "as for sparse",
    "density": "as for sparse",
    "shape": "as for sparse. Also, with heads narrower than 64, a logit and its exponential belong to fewer products",
    "irregular": "the weights of edges are computed, kept for the softmax, and read again",
    "reduce": "rows narrower than 512 bytes are read at a lower rate. Maxima and minima also compare and count the "
    "numbers that they read",
    "edges": "as for irregular. Also, below 100,000 edges, the Python code of a call matters, some 30 us",
}
"""Why the kernels of a group are above that."""


def rates(rounds: int = 50) -> dict[str, float]:
    """Returns the most that one thread of this machine does in a second: flops in the nearest cache, and bytes of
    memory in order and in rows of 512 bytes in random order."""
    numbers = torch.ones(1 << 26)
    rows = torch.ones(170_000, 128)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    parts = [(part, torch.empty(len(part), 128)) for part in order.split(1024)]

    def gather() -> None:
        for part, out in parts:
            torch.index_select(rows, 0, part, out=out)

    work = 4e8
    return {
        "flops": work / _least(lambda: multiply_in_cache(work, 64), rounds),
        "stream": numbers.nbytes / _least(numbers.sum, rounds),
        "gather": 512 * len(order) / _least(gather, rounds),
    }


def _least(work: Callable[[], object], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def of_attention(nodes: int, edges: int, heads: int, width: int, is_gathered: bool) -> dict[str, float]:
    """Returns the minimum work of a forward pass: two products an edge; queries, keys, values and the output in order,
    or keys and values for each edge, whose number is read too."""
    row = 4.0 * heads * width
    gathered = {"gather": 2 * row * edges, "stream": 2 * row * nodes + 4.0 * edges}
    return {"flops": 4.0 * edges * heads * width} | (gathered if is_gathered else {"stream": 4 * row * nodes})


def of_sum(nodes: int, edges: int, width: int) -> dict[str, float]:
    """Returns the minimum work of a forward pass: a row for each edge, whose number is read too, and the output."""
    return {"flops": 1.0 * edges * width, "gather": 4.0 * edges * width, "stream": 4.0 * nodes * width + 4.0 * edges}


def seconds(row: dict[str, Any], machine: dict[str, float]) -> float | None:
    """The roof of a row: the longest of its parts, as they can overlap. None where the facts do not count them."""
    needs = {name: row["facts"][name] for name in BACKWARD if name in row.get("facts", {})}
    if "stream" not in needs:
        return None
    backward = BACKWARD_OF_SUM if row["group"] == "reduce" else BACKWARD
    passes = {name: 1 + (backward[name] if row["direction"] == BOTH else 0) for name in needs}
    parts = {name: passes[name] * needs[name] / machine[name] for name in needs}
    moved = parts["stream"] + parts.get("gather", 0.0)
    return max(parts["flops"], moved)


def section(results: dict[str, Any]) -> list[str]:
    """The part of the page: a line for each row whose facts have a roof; nothing for results without rates."""
    machine = results.get("rates")
    if machine is None:
        return []
    lines = [
        "## How near kernels are to their roofs",
        "",
        "The roof of a row is the time that its work takes at the highest rates of this machine: its multiplications "
        f"at {machine['flops'] / 1e9:.0f} GFLOP/s, the rate of products of matrices in the nearest cache, or its bytes "
        f"at the rate of memory, whichever takes longer. Memory is read at {machine['stream'] / 1e9:.1f} GB/s in "
        f"order, and at {machine['gather'] / 1e9:.1f} GB/s in rows of 512 bytes in random order, as along edges. Rows "
        "in a cache are read faster than memory, so a kernel can take less than its roof. FMAs are multiplications "
        "with an addition.",
        "",
        "| case | direction | FMAs | bytes | roof | time | times its roof |",
        "|---|---|---|---|---|---|---|",
    ]
    above: dict[str, None] = {}
    for row in results["rows"]:
        roof = seconds(row, machine) if "entries" in row else None
        if roof is not None:
            lines.append(_line(row, roof))
            if row["entries"][row["ours"]]["least"] > MOST * roof:
                above.setdefault(row["group"])
    reasons = [f"- {group}: {REASONS[group]}." for group in above if REASONS.get(group)]
    if not reasons:
        return [*lines, ""]
    summary = f"<summary>Why kernels take more than {MOST} times their roof</summary>"
    return [*lines, "", "<details>", summary, "", *reasons, "", "</details>", ""]


def _line(row: dict[str, Any], roof: float) -> str:
    facts = row["facts"]
    taken = row["entries"][row["ours"]]["least"]
    moved = facts["stream"] + facts.get("gather", 0.0)
    counts = f"{facts['flops'] / 2e9:.3g}G | {moved / 1e6:.3g} MB"
    return (
        f"| {row['case']} | {row['direction']} | {counts} | {duration(roof)} | {duration(taken)} | {taken / roof:.2f} |"
    )
