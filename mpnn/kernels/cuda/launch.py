"""Starts kernels with little work on the host.

Triton's own launch derives type, divisibility and constants of every argument in each call, in Python. Between two
calls with tensors of the same types, shapes and strides only addresses change. So the first such call goes through
Triton; later ones start the kernel that it compiled, with other addresses.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_MOST = 256  # kept launches: a loop over ever other shapes must not fill the memory


class Arguments(NamedTuple):
    """The arguments that follow the tensors in the call of a kernel: `numbers` by position and `constants` by name, in
    the order of its parameters. `programs` and `warps`: how many, and how many each has. `stages`: of loads in a loop.
    `registers`: the most of a thread, None for no limit."""

    programs: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    registers: int | None = None


class Launches:
    """The launches of one graph, which has one device."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def start(
        self, key: Hashable, kernel: Any, tensors: Sequence[Tensor | None], arguments: Callable[[], Arguments]
    ) -> None:
        """Starts a kernel on tensors. `key` holds all that `arguments` and the types, shapes and strides of the tensors
        depend on, and the kernel."""
        if (kept := self._kept.get(key)) is not None:
            run, rest = kept
            run(*[None if x is None else x.data_ptr() for x in tensors], *rest)
            return
        programs, numbers, constants, warps, stages, registers = arguments()
        compiled = kernel[(programs,)](
            *tensors, *numbers, **constants, num_warps=warps, num_stages=stages, maxnreg=registers
        )
        if not hasattr(compiled, "asm"):  # by the interpreter, which compiles nothing
            return
        if len(self._kept) >= _MOST:
            self._kept.clear()
        self._kept[key] = compiled[programs, 1, 1], (*numbers, *constants.values())


def layout(x: Tensor) -> Hashable:
    """All that a compiled kernel depends on of a tensor, but its address; and its device, so that Triton sees, and
    refuses, tensors of another one."""
    return x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.get_device()
