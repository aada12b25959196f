"""Starts Triton's kernels with little work on the host.

Triton's own launch, `kernel[grid](...)`, derives the types, divisibility and constants of all arguments in each call,
in Python. A compiled kernel depends on nothing else, so `Launches` keeps it with its grid and its constants, and looks
it up by the same facts:

    of a tensor              dtype, device, the address modulo 16; its shape and strides are in the key of the caller
    of None and of numbers   the value: Triton compiles None, 1 and multiples of 16 differently
    of all other arguments   the key of the caller

A kept launch goes to the stream that is current at the call, by the public interface of a compiled kernel,
`compiled[grid](...)`. Where `kernel[grid](...)` returns something else, as Triton's interpreter does, nothing is kept,
and each call goes through Triton.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_MOST = 256  # kept launches: a loop over ever other shapes must not fill the memory
_ALIGNMENT = 16  # bytes; Triton compiles other loads for addresses that are multiples of it


class Arguments(NamedTuple):
    """The arguments that follow the operands in the call of a kernel: `numbers` by position and `constants`, all of the
    others, by name. `programs` and `warps`: how many, and how many each has. `stages`: of loads in a loop.
    `registers`: the most of a thread, None for no limit."""

    programs: int
    numbers: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    registers: int | None = None


class Launches:
    """The launches that are kept: of one graph, or of kernels that need no graph."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def start(self, key: Hashable, kernel: Any, operands: Sequence[Any], arguments: Callable[[], Arguments]) -> None:
        """Starts a kernel on the current stream.

        Args:
            key: all that `arguments` depends on besides the kernel and the facts of operands named above.
            operands: the first arguments of the kernel: tensors, None, numbers, and tuples of these.
            arguments: returns the arguments that follow; called where no launch is kept.
        """
        form: list[Any] = [id(kernel), key]
        passed = _read(operands, form)
        name = tuple(form)
        kept = self._kept.get(name)
        if kept is not None:
            run, rest = kept
            run(*passed, *rest)
            return
        programs, numbers, constants, warps, stages, registers = arguments()
        compiled = kernel[(programs,)](
            *operands, *numbers, **constants, num_warps=warps, num_stages=stages, maxnreg=registers
        )
        if not (hasattr(compiled, "asm") and hasattr(compiled, "__getitem__")):
            return
        if len(self._kept) >= _MOST:
            self._kept.clear()
        by_name = kernel.arg_names[len(operands) + len(numbers) :]
        self._kept[name] = compiled[programs, 1, 1], (*numbers, *(constants[each] for each in by_name))


_WITHOUT_GRAPH = Launches()


def start(
    kernel: Any, programs: int, operands: Sequence[Any], constants: dict[str, Any], warps: int = 4, stages: int = 3
) -> None:
    """Starts a kernel that belongs to no graph, and whose numbers are all among the operands; see `Launches.start`."""
    key = programs, warps, stages, *constants.values()
    _WITHOUT_GRAPH.start(key, kernel, operands, lambda: Arguments(programs, (), constants, warps, stages))


def _read(operands: Sequence[Any], form: list[Any]) -> list[Any]:
    """Returns operands as a compiled kernel takes them, with addresses for tensors, and adds what Triton specializes on
    to `form`."""
    passed: list[Any] = []
    for x in operands:
        if isinstance(x, Tensor):
            address = x.data_ptr()
            form += x.dtype, x.get_device(), address % _ALIGNMENT
            passed.append(address)
        elif isinstance(x, tuple):
            form.append(len(x))
            passed.append(tuple(_read(x, form)))
        else:
            form += type(x), x
            passed.append(x)
    return passed


def layout(x: Tensor) -> Hashable:
    """The facts of a tensor from which numbers and constants of launches are derived."""
    return x.dtype, x.shape, x.stride()
