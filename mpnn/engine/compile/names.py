"""Aggregators and relations as text that any process can read back, for saved programs.

Text is parsed with `ast` and never executed. It can contain the types in `_FIELDS`, torch's activations, and nothing
else.
"""

import ast
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from mpnn.aggregate import PNA, Max, Mean, Median, Min, PowerMean, Softmax, Std, Sum, Var
from mpnn.graph.relations import Flipped, GridOffset, KernelOffset, Offset

_FIELDS: dict[type, dict[str, str]] = {
    **{kind: {} for kind in (Sum, Mean, Max, Min, Var, Std, Median, Softmax)},
    PowerMean: {"eps": "eps", "limit": "limit"},
    PNA: {"aggregators": "parts", "scalers": "scalers", "average_log_degree": "average_log_degree"},
    **{
        kind: {name: name for name in kind.__dataclass_fields__} for kind in (Offset, GridOffset, KernelOffset, Flipped)
    },
}
"""For each type, the constructor's arguments and the attributes that hold them. Parameters are not included; they are
tensors of a call."""

_KINDS = {kind.__name__: kind for kind in _FIELDS}
_ACTIVATIONS = frozenset(nn.modules.activation.__all__)
_FUNCTIONS = {"torch": torch, "F": F}


def describe(value: Any) -> str | None:
    """The text of an object, or None if another process could not construct it."""
    try:
        return _text(value)
    except TypeError:
        return None


def restore(text: str) -> Any:
    """A new object from the text that `describe` returned.

    Raises:
        ValueError: if the text describes anything else.
    """
    return _value(ast.parse(text, mode="eval").body, text)


def _text(value: Any) -> str:
    kind = type(value)
    if kind in _FIELDS:
        arguments = (f"{name}={_text(getattr(value, attribute))}" for name, attribute in _FIELDS[kind].items())
        return f"{kind.__name__}({', '.join(arguments)})"
    if value is None or kind in (bool, int, float, str):
        return repr(value)
    if kind in (list, tuple):
        return f"({''.join(_text(part) + ', ' for part in value)})"
    if kind is getattr(nn, kind.__name__, None) and kind.__name__ in _ACTIVATIONS:
        # The repr of an activation usually is its constructor. Only one that reads back as the same is taken.
        text = f"nn.{value!r}"
        if repr(restore(text)) == repr(value):
            return text
    # A name alone proves nothing: torch must hold this very object under it.
    name = getattr(value, "__name__", "")
    for module, functions in _FUNCTIONS.items():
        if name and getattr(functions, name, None) is value:
            return f"{module}.{name}"
    raise TypeError(f"{value!r} has no text")


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.Tuple(parts):
            return tuple(_value(part, text) for part in parts)
        # Python's grammar knows no negative numbers: -1 is an operator and a 1.
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Attribute(ast.Name(module), name) if module in _FUNCTIONS and hasattr(_FUNCTIONS[module], name):
            return getattr(_FUNCTIONS[module], name)
        case ast.Call(ast.Name(name), args, keywords) if name in _KINDS:
            make: Any = _KINDS[name]
        case ast.Call(ast.Attribute(ast.Name("nn"), name), args, keywords) if name in _ACTIVATIONS:
            make = getattr(nn, name)
        case _:
            raise ValueError(f"this program contains {text!r}, which is not a supported object; export it again")
    named = {str(keyword.arg): _value(keyword.value, text) for keyword in keywords}
    return make(*(_value(arg, text) for arg in args), **named)
