"""`mpnn.deterministic_batches`: results that keep their bits in any batch, also where torch computes them.

This library's kernels add up each row in an order that does not depend on the rows next to it. Two kinds of torch's
operations do not:

- A product of fewer than 16 rows may run another loop than one of many rows (on AMD fewer than 12), and a product with
  one column does. With up to 8 columns, it depends on where a row lies in memory, unless its length is a multiple of 4.
- Some functions of single numbers (silu, softplus, mish, sigmoid, gelu, exp2) compute the last numbers of a tensor,
  which fill no whole vector, by other code.

The switch pads both. It watches each call of torch for this, as `torch.overrides.TorchFunctionMode` does.
"""

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode

_MANY = 16  # rows and columns from which on products have the bits of any larger one, measured with MKL
NARROW = 8  # columns up to which products depend on where rows lie, if the length of rows is no multiple of 4
_VECTORS = 32  # numbers that torch computes at once, or a multiple
_MOST_THREADS = 8  # among which torch's loops are divided here


class _State(threading.local):
    padding: TorchFunctionMode | None = None


STATE = _State()
"""`STATE.padding` is this thread's mode that pads, None where the switch is off."""


class deterministic_batches:
    """Makes the results of an item independent, bit for bit, of the items that it is batched with: from this call on,
    or within a `with` block.

    This holds for eager calls on a CPU in this thread: for layers and models of this library, and for those of others
    whose layers treat each item by itself. `docs/limits.md` says what keeps its bits without the switch, and what does
    not with it.

        with mpnn.deterministic_batches():
            vectors = model(batch)

    Args:
        mode: False switches it off.

    Raises:
        RuntimeError: if it ends inside of a function mode of torch that began later.
    """

    def __init__(self, mode: bool = True) -> None:
        self._before = is_on()
        _switch(mode)

    def __enter__(self) -> None:
        """It is on since it was created."""

    def __exit__(self, *_: object) -> None:
        _switch(self._before)


def is_on() -> bool:
    return STATE.padding is not None


def _switch(mode: bool) -> None:
    if mode == is_on():
        return
    if mode:
        STATE.padding = _Padding()
        STATE.padding.__enter__()
    else:
        # Modes of torch are a stack: to leave another one than the last would leave that one instead.
        if STATE.padding is None or _get_current_function_mode() is not STATE.padding:
            raise RuntimeError("deterministic_batches ends where it began: leave the other modes of torch first")
        STATE.padding.__exit__(None, None, None)
        STATE.padding = None


class _Padding(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        padded = _PADDED.get(func)
        # A compiled program has chosen its loops before, and a call without positional arguments is no layer's.
        if padded is None or not args or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        return padded(func, *args, **kwargs)


def _is_on_cpu(*tensors: Any) -> bool:
    return all(isinstance(x, Tensor) and x.is_cpu and x.layout is torch.strided for x in tensors)


def needs_padding(x: Tensor, weight: Any) -> bool:
    """Whether products of many rows with a plain weight [N, K] do not keep their bits on a CPU."""
    if type(weight) not in (Tensor, nn.Parameter) or weight.dim() != 2 or weight.shape[0] > NARROW:
        return False
    if not _is_on_cpu(x, weight):
        return False
    # Subclasses and modes below torch may give the product another meaning, or refuse padding.
    if type(x) is not Tensor or x.shape[-1:] != weight.shape[1:] or torch._C._len_torch_dispatch_stack():
        return False
    return _is_narrow(weight)


def _is_narrow(weight: Tensor) -> bool:
    """Whether a product with a weight [N, K] is padded to more columns."""
    width, depth = weight.shape
    return width == 1 or (width <= NARROW and depth % 4 > 0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, least: int = _MANY) -> Tensor:
    """`F.linear` with padding: to `least` rows, and narrow products to more columns. Zeros never change the sums of
    others. They only select the loop that many rows and columns have."""
    width = len(weight)
    is_narrow = _is_narrow(weight) and (bias is None or bias.shape == (width,))  # else torch has the error
    if is_narrow:
        weight = F.pad(weight, (0, 0, 0, _MANY - width))
        bias = None if bias is None else F.pad(bias, (0, _MANY - width))
    rows = x.shape[:-1].numel()
    if 0 < rows < least:
        flat = F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, least - rows))
        out = F.linear(flat, weight, bias)[:rows].view(*x.shape[:-1], -1)
    else:
        out = F.linear(x, weight, bias)
    return out[..., :width].contiguous() if is_narrow else out


def _linear(func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _is_on_cpu(input, weight) or weight.dim() != 2:
        return func(input, weight, bias)
    return linear(input, weight, bias)


def _matmul(func: Any, input: Tensor, other: Tensor, **options: Any) -> Tensor:
    if options or not _is_on_cpu(input, other) or other.dim() != 2 or not input.dim():
        return func(input, other, **options)
    return linear(input, other.t())


def _addmm(func: Any, input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    if options or not _is_on_cpu(input, mat1, mat2) or input.dim() != 1 or len(input) != mat2.shape[1]:
        return func(input, mat1, mat2, **options)
    return linear(mat1, mat2.t(), input)


def _of_numbers(func: Any, input: Tensor, *args: Any, **options: Any) -> Tensor:
    """A function of single numbers, over a whole number of vectors on each thread."""
    threads = torch.get_num_threads()
    if not _is_on_cpu(input) or options.get("inplace") or "out" in options or threads > _MOST_THREADS:
        return func(input, *args, **options)
    # torch gives each thread an equal share, so that every share must be made of whole vectors.
    whole = _VECTORS * math.lcm(*range(1, threads + 1))
    if input.is_contiguous() and input.numel() % whole == 0:
        return func(input, *args, **options)
    flat = input.reshape(-1)
    out: Tensor = func(F.pad(flat, (0, -len(flat) % whole)), *args, **options)
    return out[: len(flat)].view(input.shape)


_PADDED: dict[Any, Callable[..., Any]] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm), _matmul),
    **dict.fromkeys((torch.addmm, Tensor.addmm), _addmm),
    **dict.fromkeys((F.silu, F.softplus, F.mish, F.gelu, torch.sigmoid, Tensor.sigmoid, F.sigmoid), _of_numbers),
    **dict.fromkeys((torch.exp2, Tensor.exp2, torch.special.exp2, torch.special.expit), _of_numbers),
}
