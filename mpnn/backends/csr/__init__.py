"""Fused rows: everything a sparse graph asks for in one pass along each row, on CPU, without a tensor of E x D."""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from mpnn.backends.csr import attention, reduce
from mpnn.backends.estimate import Estimate
from mpnn.scores import Request

NAME = "csr"


def supports(request: Request) -> str | None:
    return _half(request).supports(request)


def counts(request: Request) -> dict[str, float]:
    found: dict[str, float] = _half(request).counts(request)
    return found


def estimate(request: Request) -> Estimate:
    return _half(request).estimate(request)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    return _half(request).run(request)


def _half(request: Request) -> ModuleType:
    return reduce if reduce.is_plain(request) else attention
