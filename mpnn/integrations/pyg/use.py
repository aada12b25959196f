"""`use`: a model of PyTorch Geometric runs on mpnn's kernels, in place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

from mpnn.backends import registered
from mpnn.integrations import maps as linear_maps
from mpnn.integrations.pyg.convolutions import REPLACEMENTS, Replacement, unknown_option


@dataclass
class Report:
    """The convolutions that `use` replaced.

    Attributes:
        replaced: name of the module -> class of the convolution.
        left: name of the module -> why it stays PyTorch Geometric's.
        maps: number of the linear maps that run by the faster product.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    maps: int = 0
    _originals: list[tuple[MessagePassing, type]] = field(default_factory=list, repr=False)
    _undo_maps: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Makes all replaced convolutions and maps PyTorch Geometric's again. Weights keep their values."""
        for conv, original in self._originals:
            conv.__class__ = original
            vars(conv).pop("mpnn_backend", None)
        self._originals.clear()
        while self._undo_maps:
            self._undo_maps.pop()()
        self.maps = 0

    def __str__(self) -> str:
        lines = [f"{name} ({kind}): replaced" for name, kind in self.replaced.items()]
        lines += [f"{name}: left, {reason}" for name, reason in self.left.items()]
        return "\n".join(
            [*lines, *([f"{self.maps} linear maps by the faster of torch and oneDNN"] if self.maps else [])]
        )


def use(model: nn.Module, *, backend: str = "auto", maps: bool = True) -> Report:
    """Runs the convolutions of a PyTorch Geometric model on mpnn's kernels, and its linear maps by the faster product,
    in place.

    A replaced convolution stays the same object: it gets a subclass of its class. Its parameters, `state_dict`, hooks,
    call signature and results stay. Convolutions that are not supported stay as they were, and the report lists them
    with the reason: other classes, subclasses, options that are not known, methods set on the instance.

    Some calls of a replaced convolution run in PyTorch Geometric's own code: those with `return_attention_weights`,
    explainers, hooks on the propagation, `decomposed_layers`, `torch.compile` and `torch.jit.trace`, features that are
    integers or on the meta device, COO matrices that are not coalesced, CSC matrices, and any matrix for convolutions
    with attention or edge features. `torch.jit.script` is refused. Dropout draws other random numbers than PyTorch
    Geometric, and drops all copies of a repeated edge together.

    Graphs are cached in `mpnn.graphs.cache`, by the identity and version of `edge_index`. In-place changes build the
    graph again; changes that torch does not count (through `.data` or numpy) are not seen.

    Args:
        model: a model, or a single convolution.
        backend: "auto", or the name of a backend, for all its replaced convolutions, those of an earlier call included.
            A named backend runs, or raises an error that states the reason.
        maps: whether linear maps (`nn.Linear` and PyTorch Geometric's `Linear`, not their subclasses) run by oneDNN
            where this is faster than torch's product (`mpnn/update/maps.py`). They stay the same objects.

    Returns:
        A report with `replaced`, `left`, `maps` and `restore()`.

    Raises:
        TypeError: if `model` is not an `nn.Module`.
        ValueError: if it contains no convolution of PyTorch Geometric, or no backend has this name.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"use takes a model of PyTorch Geometric, an nn.Module; got {_described(model)}")
    if not any(isinstance(module, MessagePassing) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} contains no convolution of PyTorch Geometric (torch_geometric.nn.conv)"
        )
    if backend not in (names := ["auto", *(b.NAME for b in registered())]):
        raise ValueError(f"there is no backend {backend!r}; there are {', '.join(names)}")
    report = Report()
    for name, module in model.named_modules():
        if isinstance(module, MessagePassing) and not isinstance(module, Replacement):
            kind = type(module)
            reason = _refusal(module)
            if reason is not None:
                report.left[name] = reason
                continue
            report.replaced[name] = kind.__name__
            report._originals.append((module, kind))
            module.__class__ = REPLACEMENTS[kind]
        if isinstance(module, Replacement):
            module.mpnn_backend = backend
    if maps:
        report._undo_maps = [*linear_maps.use(model)]
        report.maps = len(report._undo_maps)
    return report


def _refusal(conv: MessagePassing) -> str | None:
    """Why a convolution stays PyTorch Geometric's, or None if it can be replaced."""
    kind = type(conv)
    if kind not in REPLACEMENTS:
        return f"{kind.__name__} is not supported"
    if (option := unknown_option(conv)) is not None:
        return f"the option {option} is not known"
    return REPLACEMENTS[kind].refusal(conv)


def _described(other: Any) -> str:
    return f"the class {other.__name__}; pass a model" if isinstance(other, type) else type(other).__name__
