"""Fused row kernels for sparse graphs, on CPU and GPU: one pass along each row, without an E x D tensor."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mpnn.backends.cost_model import Estimate
from mpnn.backends.csr import attention, cuda_attention, cuda_reduce, reduce
from mpnn.request.request import Request

NAME = "csr"
SERVES = reduce.SERVES | attention.SERVES | {"cuda"}  # on some device and in one of its halves; `serves` is exact

# for each type of device: plain aggregation, attention
_HALVES: dict[str, tuple[ModuleType, ModuleType]] = {
    "cpu": (reduce, attention),
    "cuda": (cuda_reduce, cuda_attention),
}


def serves(request: Request) -> tuple[frozenset[str], dict[str, str]]:
    if request.value.device.type not in _HALVES:
        return frozenset(), {}
    half = _half(request)
    return half.SERVES, getattr(half, "REASONS", {})


def refusal(request: Request) -> str | None:
    reason: str | None = _half(request).refusal(request)
    return reason


def counts(request: Request) -> dict[str, float]:
    operations: dict[str, float] = _half(request).counts(request)
    return operations


def estimate(request: Request) -> Estimate:
    return _half(request).estimate(request)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    return _half(request).run(request)


def _half(request: Request) -> ModuleType:
    plain, attend = _HALVES["cpu" if request.value.is_cpu else "cuda"]
    return plain if reduce.is_plain(request) else attend
