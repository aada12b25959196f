"""Topologies as text: `parse("causal & window(256)")`, for command lines and configuration files.

The text is read with `ast` and never run: names of builders, numbers, lists of numbers and the set operators are all
it can hold. A topology made of them prints as the text that gives it back (long lists are cut short).
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import reduce
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
        sequence.fixed,
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
        image.convolution,
        image.pooling,
        image.windows,
    )
}

_OPERATORS: dict[type[ast.operator], Callable[[Topology, Topology], Topology]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Sub: operator.sub,
}

_MOST = 10_000  # operands
_JOIN = {"|": operator.or_, "&": operator.and_, "-": operator.sub}


def parse(text: str) -> Topology:
    """The topology that the text describes.

    `|` unites, `&` intersects, `-` takes away, `~` complements; `-` binds tighter than `&`, and `&` than `|`, as in
    Python. A builder without arguments may leave its parentheses out.

    Raises:
        ValueError: the text is no such expression; the sentence says where.
    """
    if not isinstance(text, str):
        raise TypeError(f"a topology is written as text; got {type(text).__name__}")
    text = " ".join(text.split())
    try:
        return _topology(ast.parse(text, mode="eval").body, text)
    except SyntaxError as error:
        raise ValueError(f"cannot read {_cut(text)} at column {error.offset or len(text) + 1}: {error.msg}") from None
    except (RecursionError, MemoryError):
        pass
    try:
        return _part_by_part(text)
    except RecursionError:
        raise ValueError(f"cannot read an expression nested this deeply: {_cut(text)}") from None


def _part_by_part(text: str) -> Topology:
    """The topology of a text that has too many operands for `ast`: each operand is parsed alone."""
    depth, cuts = 0, {"|": [0], "&": [0], "-": [0]}
    for at, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if depth == 0 and letter in cuts:
            cuts[letter].append(at + 1)
    for symbol, starts in cuts.items():
        if len(starts) > _MOST:
            raise ValueError(f"cannot read {_cut(text)}: it has more than {_MOST:,} operands")
        if len(starts) > 1:
            stops = [start - 1 for start in starts[1:]] + [len(text)]
            operands = [parse(text[start:stop]) for start, stop in zip(starts, stops, strict=True)]
            return reduce(_JOIN[symbol], operands)
    if text.startswith("~("):
        return ~parse(text[1:])
    if text.startswith("(") and text.endswith(")"):
        return parse(text[1:-1])
    raise RecursionError


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
            if len(named) < len(keywords):
                raise _error(node, text, "an argument is named twice")
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
    column = len(text.encode()[: node.col_offset].decode()) + 1  # ast counts bytes
    return ValueError(f"cannot read {_cut(text)} at column {column} ({_cut(part)}): {why}")


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
