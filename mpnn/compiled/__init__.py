"""The operator in programs that torch traces (`torch.compile`, `torch.export`): one custom operator stands for a whole
request, whichever backend runs it.

While a program is traced, sizes may be symbols and nothing can be bound or planned. A request is therefore taken apart
into its tensors, its sizes and a string that says all the rest (`form`), and put together again by the operator,
`torch.ops.mpnn.run`, when the program runs: with real sizes, a bound graph and a plan (`operator`). Eager calls never
come here.

The operators are registered here, so that `import mpnn` is all that a process needs before it loads a saved program.
Their implementations are imported at the first call, as they import torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CALL = "Tensor token, SymInt[] sizes, Tensor[] tensors, str form, float[] numbers, bool[] needs"
"""The schema of `form.Call`, the arguments of `torch.ops.mpnn.run`."""


def _deferred(name: str) -> Callable[..., Any]:
    """The function of this name in `mpnn.compiled.operator`, imported when it is first called."""

    def call(*arguments: Any, **options: Any) -> Any:
        from mpnn.compiled import operator

        return getattr(operator, name)(*arguments, **options)

    return call


torch.library.define("mpnn::run", f"({CALL}) -> (Tensor out, Tensor weights, Tensor ticket)")
torch.library.define("mpnn::run_backward", f"(Tensor[] grads, Tensor[] outputs, Tensor ticket, {CALL}) -> Tensor[]")
torch.library.impl("mpnn::run", "default", _deferred("forward"))
torch.library.register_fake("mpnn::run", _deferred("forward_fake"))
torch.library.register_autograd("mpnn::run", _deferred("backward"), setup_context=_deferred("save_for_backward"))
torch.library.impl("mpnn::run_backward", "default", _deferred("run_backward"))
torch.library.register_fake("mpnn::run_backward", _deferred("run_backward_fake"))
