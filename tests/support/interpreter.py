"""Mends faults of Triton's interpreter, so that tests run there, and sooner."""

from typing import Any

import numpy as np


def mend() -> None:
    """Products read bfloat16 as numbers, not as bits. In Triton 3.6 numbers of one entry become integers again. What
    the interpreter replaces in Triton's language in each call of a function is looked for once."""
    import triton
    from triton.runtime import interpreter

    patch, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.squeeze()))

    def as_numbers(x: Any) -> Any:
        if x.data.dtype != np.uint16:
            return x
        numbers = (x.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, triton.language.float32)

    def numeric(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, as_numbers(a), as_numbers(b), *rest)

    def scan_of_rows(self: Any, inputs: Any) -> Any:
        """A scan whose function takes rows, where the interpreter takes numbers one by one."""
        rows = [np.moveaxis(x.handle.data, self.axis, 0) for x in inputs]
        outs = [np.empty_like(x.handle.data) for x in inputs]
        state = None
        for i in range(len(rows[0])):
            row = tuple(self.to_tensor(x[i], y.dtype) for x, y in zip(rows, inputs, strict=True))
            state = row if state is None else self.combine_fn.fn(*state, *row)
            for out, x in zip(outs, state, strict=True):
                np.moveaxis(out, self.axis, 0)[i] = x.handle.data
        return [self.to_tensor(out, x.dtype) for out, x in zip(outs, inputs, strict=True)]

    is_builtin = triton.language.core.is_builtin
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name in dir(package) if is_builtin(getattr(package, name))]
        for name in names[package]:
            if is_builtin(member := getattr(package, name)):  # not replaced by an outer call
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_builtin = patch_builtin
    if tuple(map(int, triton.__version__.split(".")[:2])) == (3, 6):
        interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = numeric
    interpreter.ScanOps.generic_scan = scan_of_rows
