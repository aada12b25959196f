"""Mends faults of Triton's interpreter, so that tests run there."""

from typing import Any

import numpy as np
import triton


def mend() -> None:
    """Products read bfloat16 as numbers, not as bits. In Triton 3.6 numbers of one entry become integers again."""
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

    if tuple(map(int, triton.__version__.split(".")[:2])) == (3, 6):
        interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_dot = numeric
