"""Fused row kernels for sparse graphs, on CPU and GPU: one pass along each row, without an E x D tensor."""

from collections.abc import Callable
from types import ModuleType

from mpnn.backends.cost_model import Estimate
from mpnn.backends.csr import attention, cuda_attention, cuda_reduce, reduce
from mpnn.round import Result, Round

NAME = "csr"
ANY_EDGES = True
SERVES = reduce.SERVES | attention.SERVES | {"cuda"}  # on some device and in one of its halves; `serves` is exact

# for each type of device: plain aggregation, attention
_HALVES: dict[str, tuple[ModuleType, ModuleType]] = {
    "cpu": (reduce, attention),
    "cuda": (cuda_reduce, cuda_attention),
}


def serves(round: Round) -> tuple[frozenset[str], dict[str, str]]:
    if round.value.device.type not in _HALVES:
        return frozenset(), {}
    half = _half(round)
    return half.SERVES, getattr(half, "REASONS", {})


def refusal(round: Round) -> str | None:
    reason: str | None = _half(round).refusal(round)
    return reason


def counts(round: Round) -> dict[str, float]:
    operations: dict[str, float] = _half(round).counts(round)
    return operations


def estimate(round: Round) -> Estimate:
    return _half(round).estimate(round)


def bind(round: Round) -> Callable[[Round], Result]:
    half = _half(round)
    return half.bind(round) if hasattr(half, "bind") else half.run


def run(round: Round) -> Result:
    return _half(round).run(round)


def _half(round: Round) -> ModuleType:
    plain, attend = _HALVES["cpu" if round.value.is_cpu else "cuda"]
    return plain if reduce.is_plain(round) else attend
