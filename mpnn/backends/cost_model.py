"""The cost model: a backend's estimate of time and memory for a round.

A backend counts its operations (`counts(round)`: pairs, edges, numbers, calls). `costs.json` holds the measured
nanoseconds of each operation on one processor core; `python -m benchmarks fit` measures them again. `mpnn tune` adjusts
them to a user's machine. For CUDA it holds those on one GPU, fitted to what `python -m benchmarks gpu` measured.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import torch

from mpnn.backends import tuned
from mpnn.backends.tuned import Prices
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge

Counts = Mapping[str, float]
_BACK = ", back"


class Estimate(NamedTuple):
    """Expected seconds on the threads that torch uses, and bytes of working memory beyond inputs and outputs."""

    seconds: float
    bytes: float


def priced(device: torch.device, backend: str, counts: Counts, size: float) -> Estimate:
    """The estimate for these counts: on a CPU with the threads that torch uses, on a GPU with the prices of the one
    that `costs.json` names."""
    threads = torch.get_num_threads()
    is_gpu = device.type == "cuda"
    of_gpu: Prices = tuned.shipped()["cuda"]["nanoseconds"]
    costs = (of_gpu if is_gpu else prices(threads))[backend]
    counts = counts if is_gpu else per_thread(counts, threads)
    return Estimate(1e-9 * sum(costs[what] * n for what, n in counts.items()), size)


def per_thread(counts: Counts, threads: int) -> Counts:
    """The counts of the busiest thread: one thread does what is done once per call, all share the rest."""
    if threads == 1:
        return counts
    return {what: n if is_once(what) else n / threads for what, n in counts.items()}


def is_once(what: str) -> bool:
    """Whether one thread does this operation, once per call."""
    return what.removesuffix(_BACK).endswith("call")


def kind_of(dtype: torch.dtype) -> str:
    """Returns the prefix of operations whose price depends on the dtype of the features: empty for float32."""
    return {2: "narrow ", 8: "double "}.get(dtype.itemsize, "")


def both_ways(counts: Counts, needs_grad: bool, back: Counts | None = None) -> dict[str, float]:
    """The counts; if gradients are needed also those of the backward pass (default: the same), under its names."""
    back = counts if back is None else back
    return {**counts, **{f"{what}{_BACK}": n for what, n in back.items()}} if needs_grad else dict(counts)


def of_biases(biases: Iterable[PerEdge], over: str, entries: float) -> dict[str, float]:
    """The counts of laying biases out over so many entries ("edge" or "pair"): numbers that are copied from tensors,
    and those that are looked up in tables."""
    operations = {"bias call": 1.0}
    for bias in biases:
        if isinstance(bias, EmbeddingTable):
            numbers = bias.table
            what = f"looked up {over}"
        else:
            numbers = bias
            what = f"laid out {over}"
        columns = numbers.shape[:-2].numel() * numbers.shape[-1]  # a head of one batch entry each
        operations[what] = operations.get(what, 0.0) + entries * columns
    return operations


@cache
def prices(threads: int) -> Prices:
    """Nanoseconds by backend and operation: the shipped ones, replaced by those that `mpnn tune` measured here."""
    own = tuned.read(threads)
    return {name: costs | own.get(name, {}) for name, costs in tuned.shipped()["nanoseconds"].items()}


@cache
def map_prices(threads: int) -> Prices | None:
    """Nanoseconds of linear maps (`update/maps.py`): those that `mpnn tune` measured here; else the shipped ones, on a
    processor of the family that they were measured on; else None."""
    shipped = tuned.shipped()["maps"]
    own = tuned.read(threads)
    names: Prices = shipped["nanoseconds"]
    if own.keys() >= names.keys():
        return {name: costs | own[name] for name, costs in names.items()}
    return names if tuned.family() == shipped["family"] else None
