"""The operator in programs that torch traces (`torch.compile`, `torch.export`). One custom operator represents a whole
round, for all backends.

While a program is traced, sizes may be symbols, so graphs cannot be bound and rounds cannot be planned. A round is
therefore flattened to its tensors, its sizes and a string that describes the rest (`form`). When the program runs, the
operator `torch.ops.mpnn.run` unflattens it with real sizes, binds the graph and plans (`operator`). Eager calls do not
use this package.

The operators are registered here, so that a process can load a saved program after `import mpnn`. Their implementations
import torch's compiler, so they are imported at the first call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode

CALL = "Tensor token, SymInt[] sizes, Tensor[] tensors, str form, float[] numbers, bool[] needs"
"""The schema of `form.Call`, the arguments of `torch.ops.mpnn.run`."""


def _deferred(name: str) -> Callable[..., Any]:
    """The function `name` of `mpnn.engine.compile.operator`, imported at its first call."""

    def call(*arguments: Any, **options: Any) -> Any:
        from mpnn.engine.compile import operator

        return getattr(operator, name)(*arguments, **options)

    return call


torch.library.define("mpnn::run", f"({CALL}) -> (Tensor out, Tensor weights, Tensor record_key)")
torch.library.define("mpnn::run_backward", f"(Tensor[] grads, Tensor[] outputs, Tensor record_key, {CALL}) -> Tensor[]")
torch.library.impl("mpnn::run", "default", _deferred("forward"))
torch.library.register_fake("mpnn::run", _deferred("forward_fake"))
torch.library.register_torch_dispatch("mpnn::run", ProxyTorchDispatchMode, _deferred("run_in_trace"))
torch.library.register_autograd("mpnn::run", _deferred("backward"), setup_context=_deferred("save_for_backward"))
torch.library.impl("mpnn::run_backward", "default", _deferred("run_backward"))
torch.library.register_fake("mpnn::run_backward", _deferred("run_backward_fake"))
