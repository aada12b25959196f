"""Topologies as text: `parse("causal & window(256)")`, for command lines and configuration files.

The text is read with `ast` and never run: names of builders, numbers, lists of numbers and the set operators are all
it can hold. Each topology prints as the text that gives it back.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

from mpnn.graphs import image, sequence, sparse
from mpnn.topology import Topology

BUILDERS: dict[str, Callable[..., Topology]] = {
    builder.__name__: builder
    for builder in (
        sequence.complete,
        sequence.causal,
        sequence.identity,
        sequence.window,
        sequence.strided,
        sequence.global_nodes,
        sequence.prefix,
        sequence.documents,
        sequence.permutation,
        sequence.memory,
        sparse.random,
        sparse.longformer,
        sparse.bigbird,
        image.grid,
        image.neighborhood,
        image.windows,
    )
}

_OPERATORS: dict[type[ast.operator], Callable[[Topology, Topology], Topology]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Sub: operator.sub,
}


def parse(text: str) -> Topology:
    """The topology that the text describes.

    `|` unites, `&` intersects, `-` takes away, `~` complements; `-` binds tighter than `&`, and `&` than `|`, as in
    Python. A builder without arguments may leave its parentheses out.

    Raises:
        ValueError: the text is no such expression; the sentence says where.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"cannot read {text!r} at column {error.offset}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"cannot read an expression nested this deeply: {text[:40]!r}...") from None
    try:
        return _topology(tree, text.strip())
    except RecursionError:
        raise ValueError(f"cannot read an expression nested this deeply: {text[:40]!r}...") from None


def _topology(node: ast.expr, text: str) -> Topology:
    match node:
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_topology(left, text), _topology(right, text))
        case ast.UnaryOp(ast.Invert(), inner):
            return ~_topology(inner, text)
        case ast.Name(name):
            return _built(node, text, name, [], {})
        case ast.Call(ast.Name(name), args, keywords):
            named = {str(k.arg): _value(k.value, text) for k in keywords}
            return _built(node, text, name, [_value(a, text) for a in args], named)
    raise _error(node, text, "expected a topology such as window(256), or two joined by | & -")


def _built(node: ast.expr, text: str, name: str, args: list[Any], named: dict[str, Any]) -> Topology:
    if name not in BUILDERS:
        raise _error(node, text, f"there is no topology {name!r}; there are {', '.join(sorted(BUILDERS))}")
    try:
        return BUILDERS[name](*args, **named)
    except (TypeError, ValueError) as error:
        raise _error(node, text, str(error)) from None


def _value(node: ast.expr, text: str) -> Any:
    match node:
        case ast.Constant(int() as value) if not isinstance(value, bool):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() as value)):
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_value(item, text) for item in items]
    raise _error(node, text, "arguments are integers or lists of integers")


def _error(node: ast.expr, text: str, why: str) -> ValueError:
    part = ast.get_source_segment(text, node) or ""
    return ValueError(f"cannot read {text!r} at column {node.col_offset + 1} ({part[:40]!r}): {why}")
