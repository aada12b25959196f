"""Linear maps of other libraries' models by the faster product (`mpnn/update/maps.py`), in place.

A map keeps its class, so that whatever looks for `nn.Linear` finds it: its instance gets another `forward`. This is an
object, not a closure: copies of the map compute with their own weights, and a process that unpickles the map imports
this module.
"""

import sys
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from mpnn.graph.witness import Constant
from mpnn.integrations.callers import CALLS, put, take
from mpnn.update import maps


class Forward(Constant):
    """`forward` of one map: oneDNN's product, or what its class computes."""

    computes_the_same = True

    def __init__(self, module: Any) -> None:
        self.module = module
        kind: Any = type(module)
        weight = module._parameters["weight"]
        is_known = not isinstance(weight, UninitializedParameter)
        depth = weight.shape[0 if _is_transposed(kind) else 1] if is_known else 0
        self.least = maps.MIN_ROWS * depth
        """The numbers of an input below which torch computes the map: so a new token asks nothing else."""

    def __call__(self, input: Tensor) -> Any:
        if torch.compiler.is_compiling():
            return type(self.module).forward(self.module, input)
        frame = sys._getframe(1)
        module: Any = frame.f_locals["self"] if frame.f_code in CALLS else self.module  # as `calling`, a call fewer
        kind: Any = type(module)
        if type(input) is Tensor and input.numel() < self.least:
            return kind.forward(module, input)
        # What is computed (parametrized, pruned) is no parameter of the map, and left to its class.
        parameters = module._parameters
        out = None
        if "weight" in parameters and "bias" in parameters:
            out = maps.by_onednn(input, parameters["weight"], parameters["bias"], _is_transposed(kind))
        return kind.forward(module, input) if out is None else out


def use(model: nn.Module) -> list[Callable[[], None]]:
    """Lets the linear maps of a model run by the faster product: `nn.Linear`, transformers' `Conv1D` and PyTorch
    Geometric's `Linear`. Left are their subclasses, maps in another dtype than float32, and maps whose weight is
    computed (parametrized, pruned, quantized). Nothing changes on processors where torch's product is always faster.

    Returns:
        For each map, a function that restores it.
    """
    if not maps.is_useful():
        return []
    # A shallow copy of a map has the `forward` of its original, which a direct call, `map.forward(x)`, does not show.
    called = {map for module in model.modules() if _calls_forward(module) for map in _parts(module)}
    taken = [module for module in model.modules() if module not in called and _can_take(module)]
    return [put(module, "forward", Forward(module)) for module in taken]


def drop(model: nn.Module) -> list[Callable[[], None]]:
    """Lets the linear maps of a model run by their classes; returns what undoes it, for each map."""
    return [take(module, "forward") for module in model.modules() if runs_here(module)]


def runs_here(module: nn.Module) -> bool:
    """Whether a map may run by the faster product."""
    return isinstance(vars(module).get("forward"), Forward)


def _calls_forward(module: nn.Module) -> bool:
    """Whether the code of a module names `forward` of others, and is not a call of its base class."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and "forward" in code.co_names and "super" not in code.co_names


def _parts(module: nn.Module) -> list[nn.Module]:
    """The modules that a module holds itself, or in lists and dictionaries."""
    lists = nn.ModuleList, nn.ModuleDict
    parts = (part.children() if isinstance(part, lists) else [part] for part in module.children())
    return [*chain.from_iterable(parts)]


def _can_take(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return (
        _is_map(type(module))
        and "forward" not in vars(module)
        and type(weight) in (nn.Parameter, UninitializedParameter)
        and weight is not None
        and weight.dtype is torch.float32
    )


def _is_map(kind: type) -> bool:
    return kind is nn.Linear or _is_transposed(kind) or kind is _imported("torch_geometric.nn.dense.linear", "Linear")


@cache
def _is_transposed(kind: type) -> bool:
    """Whether the weight is [in, out]: GPT-2's maps."""
    return kind is _imported("transformers.pytorch_utils", "Conv1D")


def _imported(module: str, name: str) -> Any:
    """A class of a module that was imported before; None if it was not, and no model has such maps."""
    return getattr(sys.modules.get(module), name, None)
