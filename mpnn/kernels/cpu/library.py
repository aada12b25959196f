"""Loads the compiled CPU kernels: C++ that `hatch_build.py` compiles when the package is built or installed.

There is one library for each kind of processor. Its name holds a digest of the sources, so an outdated library is
never loaded.
"""

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from mpnn.kernels.cpu import threads
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


def run(
    name: str, dtype: torch.dtype, parameters: ctypes.Structure, entries: int = 1, parts: int = 1, first_entry: int = 0
) -> None:
    """Runs the kernel `name` for features of this dtype on each part of each of these entries of a batch.

    The parts are shared by as many threads as torch uses. Python's lock is released. Ctrl-C is raised at the end.

    Raises:
        MemoryError: there was no memory for intermediate results.
        TypeError: operations are recorded by `make_fx`.
    """
    if torch._C._len_torch_dispatch_stack():
        _refuse_recording(name)
    kernel = _kernel(name, dtype)
    address = ctypes.addressof(parameters)
    if entries == parts == 1:
        complete = kernel(address, first_entry, 0, 1)
        if not complete:
            raise MemoryError(f"no memory for the intermediate results of {name}")
        return
    count = torch.get_num_threads()
    team = threads.team() if count > 1 and entries * parts > 1 else None
    if team is None and count > 1:

        def part(k: int) -> bool:
            return bool(kernel(address, first_entry + k // parts, k % parts, parts))

        complete = all(threads.each(range(entries * parts), part))
    else:
        complete = _run_parts()(kernel, address, first_entry, entries, parts, *(team or (None, False)), count)
    if not complete:
        raise MemoryError(f"no memory for the intermediate results of {name}")


@cache
def function(name: str) -> Callable[[int], None]:
    """A function of the address of its parameters, for which one thread is enough. Calls release Python's lock."""
    kernel = _load()[name]
    kernel.restype = None
    kernel.argtypes = [ctypes.c_void_p]
    return kernel


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    kernel = _load()[name + _SUFFIXES[dtype]]
    kernel.restype = ctypes.c_bool
    kernel.argtypes = [ctypes.c_void_p] + [ctypes.c_int64] * 3
    return kernel


@cache
def _run_parts() -> Any:
    """`run_parts` of threads.cpp."""
    run_parts = _load().run_parts
    pointer = ctypes.c_void_p
    number = ctypes.c_int64
    run_parts.restype = ctypes.c_bool
    run_parts.argtypes = [pointer, pointer, number, number, number, pointer, ctypes.c_bool, number]
    return run_parts


def fields(kind: Any, names: str) -> list[tuple[str, Any]]:
    """Fields of one type, for the `_fields_` of a `ctypes.Structure`."""
    return [(name, kind) for name in names.split()]


def address(x: torch.Tensor | None) -> int | None:
    """The address of a tensor's numbers: the one way by which a tensor becomes a parameter of a kernel.

    Kernels read and write addresses without a check. So a tensor whose numbers are not in this memory is refused:
    FakeTensors, DTensors and other wrappers, those of the transforms of `torch.func`, meta tensors, other devices,
    sparse layouts, storages that were freed.

    Raises:
        TypeError: for such a tensor; the message names its kind.
    """
    return None if x is None else addresses(x)[0]


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """The addresses of several tensors, 0 for None.

    Raises:
        TypeError: as `address`.
    """
    found = []
    for x in tensors:
        try:
            at = x.data_ptr() if type(x) is torch.Tensor and x.is_cpu else 0
        except RuntimeError:  # a wrapper in a transform, or a sparse layout
            at = 0
        found.append(at or (0 if x is None else _address_of_unusual(x)))
    return found


def _refuse_recording(name: str) -> None:
    """Raises TypeError inside `make_fx`: its program would have the results of one call as constants."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        raise TypeError(
            f"make_fx records operations of torch, and {name} is a compiled kernel: trace with torch.compile or "
            'torch.export, which know it, or name backend="edge_list"'
        )


def _address_of_unusual(x: torch.Tensor) -> int:
    """The address of an empty tensor, a parameter, or a subclass with memory of its own. TypeError for all others."""
    kind = type(x).__name__
    if torch._C._dispatch_keys(x).has(torch._C.DispatchKey.Python):
        why = f"{kind} computes its operations itself, and its memory is not its numbers"
    elif torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
        why = "inside a transform of torch.func, or while a program is traced, a tensor stands for others"
    elif x.layout != torch.strided:
        why = f"the tensor has the layout {x.layout}; call .to_dense()"
    elif not x.is_cpu:
        why = f"the tensor is on {x.device}; move it to the CPU"
    else:
        at = x.data_ptr()
        if at or not x.numel():
            return at
        why = f"the memory of the {kind} {list(x.shape)} was freed"
    raise TypeError(
        f"compiled kernels read memory: {why}. Pass plain tensors, such as to_local() of a DTensor; trace with "
        'torch.compile or torch.export, which know the kernels; or name backend="edge_list"'
    )


def struct_size(name: str) -> int:
    """The size in bytes of a kernel's parameters, as the compiled code has it."""
    return int(_load()[f"{name}_size"]())
