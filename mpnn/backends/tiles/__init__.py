"""Tiled attention for structured graphs: exact, at a cost proportional to the edges, forward and backward.

The graph's runs determine which tiles of (destinations, sources) are empty and which are full, for any length, without
visiting pairs. The kernels are written in C++ for CPU, and in Triton for CUDA.

On CPU, NaN and infinities of a node reach only the rows that attend to it: a query tile with sums that are not finite
runs again, edge by edge in partial tiles. On CUDA, and in gradients, they can reach other rows of the same tiles,
because a weight of zero times NaN is NaN.
"""

from collections.abc import Callable
from types import ModuleType

from mpnn.backends.cost_model import Counts, Estimate
from mpnn.backends.tiles import cpu, cuda
from mpnn.round import Result, Round

NAME = "tiles"

SERVES = cpu.SERVES | cuda.SERVES  # on some device; `serves` is exact
_BY_DEVICE: dict[str, ModuleType] = {"cpu": cpu, "cuda": cuda}


def serves(round: Round) -> tuple[frozenset[str], dict[str, str]]:
    half = _BY_DEVICE.get(round.value.device.type)
    return (half.SERVES, half.REASONS) if half else (frozenset(), {})


def refusal(round: Round) -> str | None:
    return _BY_DEVICE[round.value.device.type].refusal(round)


def counts(round: Round) -> Counts:
    return _BY_DEVICE[round.value.device.type].counts(round)


def estimate(round: Round) -> Estimate:
    return _BY_DEVICE[round.value.device.type].estimate(round)


def bind(round: Round) -> Callable[[Round], Result]:
    return cpu.bind(round) if round.value.is_cpu else cuda.run


def run(round: Round) -> Result:
    return (cpu if round.value.is_cpu else cuda).run(round)
