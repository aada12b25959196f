"""The cost model: a backend's estimate of time and memory for a request.

A backend counts its operations (`counts(request)`: pairs, edges, numbers, calls). `costs.json` holds the measured
nanoseconds of each operation on one processor core; `python -m benchmarks fit` measures them again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import torch

Counts = Mapping[str, float]
# operations that one thread does, once per call or step
ONCE = {
    *("call", "softmax", "sum", "reduce", "attention"),
    *("clique size", "own compiled"),
}
_BACK = ", back"


class Estimate(NamedTuple):
    """Expected seconds on the threads that torch uses, and bytes of working memory beyond inputs and outputs."""

    seconds: float
    bytes: float


def priced(backend: str, counts: Counts, size: float) -> Estimate:
    """The estimate for these counts. Operations in ONCE run on one thread, all others on all threads."""
    costs, threads = table()["nanoseconds"][backend], torch.get_num_threads()
    shares = (costs[what] * n / (1 if what.removesuffix(_BACK) in ONCE else threads) for what, n in counts.items())
    return Estimate(1e-9 * sum(shares), size)


def on_gpu(flops: float, size: float, dtype: torch.dtype, launches: float) -> float:
    """Seconds on a GPU: the maximum of arithmetic and memory time, plus the launches. Not measured: assumes half of
    an H100's published rates (dense, without sparsity)."""
    per_second = {torch.float64: 34e12, torch.float32: 67e12}.get(dtype, 990e12)
    return 2 * max(flops / per_second, size / 3.35e12) + 5e-6 * launches


def both_ways(counts: Counts, needs_grad: bool) -> dict[str, float]:
    """The counts, with a copy of each under the name of its backward pass if gradients are needed."""
    return {**counts, **{f"{what}{_BACK}": n for what, n in counts.items()}} if needs_grad else dict(counts)


@cache
def table() -> dict[str, Any]:
    """Nanoseconds by backend and operation, and the hardware they were measured on."""
    costs: dict[str, Any] = json.loads((files("mpnn.backends") / "costs.json").read_text())
    return costs
