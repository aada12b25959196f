"""What a backend says about a request before running it: how often it does what, priced by measured costs.

A backend counts its work (`counts(request)`: pairs, edges, numbers, calls), and `costs.json` says how many nanoseconds
of one processor core each of these takes. `python -m benchmarks fit` measures them anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch

Counts = Mapping[str, float]
# kinds of work that one thread does, once a call or a step
ONCE = {
    *("call", "softmax", "sum", "reduce", "attention"),
    *("clique size", "step", "running step", "compiled", "own compiled"),
}
_BACK = ", back"


class Estimate(NamedTuple):
    """Expected seconds on the threads that torch uses, and bytes of working memory beyond inputs and outputs."""

    seconds: float
    bytes: float


def priced(backend: str, counts: Counts, size: float) -> Estimate:
    """The estimate of work so counted: what is done once a call is done by one thread, and all else is shared out."""
    costs, threads = table()["nanoseconds"][backend], torch.get_num_threads()
    shares = (costs[what] * n / (1 if what.removesuffix(_BACK) in ONCE else threads) for what, n in counts.items())
    return Estimate(1e-9 * sum(shares), size)


def on_gpu(flops: float, size: float, dtype: torch.dtype, launches: float) -> float:
    """Seconds of work on a GPU of today: whichever takes longer of arithmetic and memory, and the launches. Not
    measured: an H100's published rates (dense, without sparsity), taking it that kernels reach half of them."""
    per_second = {torch.float64: 34e12, torch.float32: 67e12}.get(dtype, 990e12)
    return 2 * max(flops / per_second, size / 3.35e12) + 5e-6 * launches


def both_ways(counts: Counts, needs_grad: bool) -> dict[str, float]:
    """The same work again, under names of its own, for the backward pass."""
    return {**counts, **{f"{what}{_BACK}": n for what, n in counts.items()}} if needs_grad else dict(counts)


@cache
def table() -> dict[str, Any]:
    """Nanoseconds by backend and kind of work, and what they were measured on."""
    found: dict[str, Any] = json.loads((files("mpnn.backends") / "costs.json").read_text())
    return found
