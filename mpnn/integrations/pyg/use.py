"""`use`: a model of PyTorch Geometric runs on mpnn's kernels, in place."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch_geometric.nn import MessagePassing

from mpnn.backends import registered
from mpnn.integrations.pyg.convolutions import REPLACEMENTS, Replacement, unknown_option


@dataclass
class Report:
    """What `use` replaced.

    Attributes:
        replaced: name of the module -> class of the convolution.
        left: name of the module -> why it stays PyTorch Geometric's.
    """

    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    _originals: list[tuple[MessagePassing, type]] = field(default_factory=list, repr=False)

    def restore(self) -> None:
        """Makes all replaced convolutions PyTorch Geometric's again. Weights keep their values."""
        for conv, original in self._originals:
            conv.__class__ = original
            vars(conv).pop("mpnn_backend", None)
        self._originals.clear()

    def __str__(self) -> str:
        lines = [f"{name} ({kind}): replaced" for name, kind in self.replaced.items()]
        return "\n".join([*lines, *(f"{name}: left, {reason}" for name, reason in self.left.items())])


def use(model: nn.Module, *, backend: str = "auto") -> Report:
    """Runs the convolutions of a PyTorch Geometric model on mpnn's kernels, in place.

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
            A named backend runs, or raises an error that states the reason: "edge_list" has second derivatives.

    Returns:
        A report with `replaced`, `left` and `restore()`.

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
            kind, reason = type(module), _refusal(module)
            if reason is not None:
                report.left[name] = reason
                continue
            report.replaced[name] = kind.__name__
            report._originals.append((module, kind))
            module.__class__ = REPLACEMENTS[kind]
        if isinstance(module, Replacement):
            module.mpnn_backend = backend
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
