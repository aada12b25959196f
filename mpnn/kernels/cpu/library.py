"""Loads the compiled CPU kernels: C++ that `hatch_build.py` compiles when the package is built or installed.

There is one library for each kind of processor. Its name holds a digest of the sources, so an outdated library is
never loaded.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache

import torch

from mpnn.kernels.cpu.files import FOLDER, digest, file_name

_SUFFIXES = {torch.float32: "_f32", torch.float64: "_f64", torch.bfloat16: "_bf16", torch.float16: "_f16"}


def processor() -> str | None:
    """The best kind of processor that this machine is and kernels are compiled for; None if there is none.

    As for torch's own kernels, the environment variable ATEN_CPU_CAPABILITY=avx2 leaves AVX-512 unused.
    """
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return "arm64"
    if machine not in ("x86_64", "amd64"):
        return None
    return {"AVX512": "x86_64_v4", "AVX2": "x86_64_v3"}.get(torch.backends.cpu.get_cpu_capability())


@cache
def why_missing() -> str | None:
    """The reason why the compiled kernels cannot be used here, or None if they can."""
    kind = processor()
    if kind is None:
        return f"its kernels need AVX2 or arm64, and this processor ({platform.machine()}) has neither"
    path = FOLDER / file_name(kind, digest())
    if not path.exists():
        fix = "run `python hatch_build.py`" if (FOLDER.parents[2] / "hatch_build.py").exists() else "install mpnn again"
        return f"its compiled kernels ({path.name}) are missing: {fix}"
    try:
        _load()
    except OSError as error:
        return f"its compiled kernels cannot be loaded: {error}"
    return None


@cache
def _load() -> ctypes.CDLL:
    return ctypes.CDLL(str(FOLDER / file_name(processor() or "", digest())))


@cache
def function(name: str, dtype: torch.dtype | None, integers: int) -> Callable[..., None]:
    """The kernel `name` for features of this dtype, or for indices (None), called with the address of its parameters
    and so many integers. Calls release Python's lock."""
    kernel = _load()[name + ("" if dtype is None else _SUFFIXES[dtype])]
    kernel.restype, kernel.argtypes = None, [ctypes.c_void_p] + [ctypes.c_int64] * integers
    return kernel


def struct_size(name: str) -> int:
    """The size in bytes of a kernel's parameters, as the compiled code has it."""
    return int(_load()[f"{name}_size"]())
