"""Topologies as text: `parse("causal & window(256)")`, for command lines and configuration files.

The text is parsed with `ast` and never executed. It can contain names of builders, numbers, lists of numbers, the set
operators and `.with_relation(...)`. `parse` reads the `repr` of these topologies.
"""

import ast
import inspect
import keyword
import operator
from collections.abc import Callable
from contextlib import suppress
from types import NoneType
from typing import Any, TypeVar

from mpnn.graph.registry import FUNCTIONS, did_you_mean, unknown
from mpnn.graph.relations import Flipped, GridOffset, KernelOffset, Offset, Relation
from mpnn.graph.topology import Topology
from mpnn.graphs import image, sequence, sparse

B = TypeVar("B", bound=Callable[..., Topology])

BUILDERS: dict[str, Callable[..., Topology]] = {
    name: function
    for module in (sequence, sparse, image)
    for name, function in vars(module).items()
    if not name.startswith("_") and getattr(function, "__annotations__", {}).get("return") is Topology
}
"""The builders of this package: the public functions that return a topology."""

_REGISTERED: dict[str, Callable[..., Topology]] = {}

_RELATIONS: dict[str, Callable[..., Relation]] = {
    kind.__name__: kind for kind in (Offset, GridOffset, KernelOffset, Flipped)
}

_OPERATORS: dict[type[ast.operator], Callable[[Topology, Topology], Topology]] = {
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
    ast.Sub: operator.sub,
}


def register(builder: B) -> B:
    """Registers a builder, so that `graphs.parse`, `save_pretrained` and `torch.save` accept its topologies as text::

        @graphs.register
        def checkerboard(size: int) -> Topology:
            return Topology.of(_checkerboard, size)

        def _checkerboard(i, num_src, size): ...

    The name of the rule is an underscore and the name of the builder, so that the `repr` of the topology is the call
    `checkerboard(4)`. A program that reads such a text must register the builder first: nothing is imported from a
    text. The builder must validate its arguments, because a text can pass any numbers, strings, True, False, None,
    topologies and lists of these.

    Raises:
        ValueError: if the name is not an identifier or belongs to another builder, or if the builder calls
            `Topology.of` with a rule of another name.
    """
    name = getattr(builder, "__name__", "")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"a builder is registered under its name, which must be an identifier; got {name!r}")
    existing = BUILDERS.get(name) or _REGISTERED.get(name) or builder
    if _import_path(existing) != _import_path(builder):  # a reloaded module or notebook cell has the same path
        raise ValueError(f"{name!r} is the name of {_import_path(existing)}; rename one of the two")
    _refuse_other_rules(builder, name)
    if name not in BUILDERS:
        _REGISTERED[name] = builder
    return builder


def _refuse_other_rules(builder: Callable[..., Topology], name: str) -> None:
    """Raises ValueError if the code of a builder calls `Topology.of` and names no rule of a builder: the topology would
    be written under a name that is not known."""
    code = getattr(inspect.unwrap(builder), "__code__", None)
    words = set[str]() if code is None else {*code.co_names, *code.co_freevars, *code.co_varnames, *code.co_cellvars}
    rules = {f"_{known}" for known in (name, *BUILDERS, *_REGISTERED)}
    if "of" in words and not words & rules:
        raise ValueError(
            f"{name} calls Topology.of, and its rule is not named _{name}: rename the rule, so that the text of the "
            f"topology is a call of {name}"
        )


def _import_path(builder: Callable[..., Topology]) -> str:
    return f"{builder.__module__}.{builder.__qualname__}"


def parse(text: str) -> Topology:
    """Returns the topology that the text describes.

    `|` is union, `&` intersection, `-` difference and `~` complement. `-` binds tighter than `&`, and `&` tighter than
    `|`, as in Python. The parentheses of a builder without arguments are optional, and so is `graphs.` or
    `mpnn.graphs.` before its name.

    Raises:
        ValueError: if the text is not such an expression. The message names the column.
    """
    if not isinstance(text, str):
        raise TypeError(f"a topology is written as text; got {type(text).__name__}")
    text = " ".join(text.split())
    try:
        return _topology(ast.parse(text, mode="eval").body, text)
    except SyntaxError as error:
        raise ValueError(f"cannot read {_cut(text)} at column {error.offset or len(text) + 1}: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"cannot read an expression this long or nested this deeply: {_cut(text)}") from None


def text_of(topology: Topology) -> str | None:
    """The text that `parse` reads back as this topology, or None if there is none."""
    text = repr(topology)
    with suppress(ValueError):
        return text if parse(text) == topology else None
    return None


FUNCTIONS["text_of"], FUNCTIONS["parse"] = text_of, parse  # topologies are pickled as texts


def _topology(node: ast.expr, text: str) -> Topology:
    match node:
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _chain(node, text)
        case ast.UnaryOp(ast.Invert(), inner):
            return ~_topology(inner, text)
        case ast.Name() | ast.Attribute() if name := _name(node):
            return _build(node, text, name, [], {})
        case ast.Call(function, args, keywords) if name := _name(function):
            kinds = _LITERALS if name in _REGISTERED or name in _TAKE_LITERALS else _INTEGERS
            named = {str(k.arg): _value(k.value, text, kinds) for k in keywords}
            if len(named) < len(keywords):
                raise _error(node, text, "an argument is named twice")
            return _build(node, text, name, [_value(a, text, kinds) for a in args], named)
        case ast.Call(ast.Attribute(inner, "with_relation"), [relation], []):
            return _topology(inner, text).with_relation(_relation(relation, text))
    words = "; write & for and, | for or, ~ for not" if isinstance(node, ast.BoolOp | ast.UnaryOp) else ""
    raise _error(node, text, f"expected a topology such as window(256), or two joined by | & -{words}")


def _name(node: ast.expr) -> str | None:
    """The name of a builder, written `causal`, `graphs.causal` or `mpnn.graphs.causal`."""
    match node:
        case ast.Name(name) | ast.Attribute(ast.Name("graphs") | ast.Attribute(ast.Name("mpnn"), "graphs"), name):
            return name
    return None


def _chain(node: ast.BinOp, text: str) -> Topology:
    """Evaluates `a | b | c | ...` in a loop, because recursion is too deep for thousands of operands."""
    chain: list[ast.BinOp] = []
    first: ast.expr = node
    while isinstance(first, ast.BinOp) and type(first.op) in _OPERATORS:
        chain.append(first)
        first = first.left
        if len(chain) > 2500:  # about as many as Python's parser reads from 3.11 on; more take minutes
            raise RecursionError
    joined = _topology(first, text)
    for link in reversed(chain):
        joined = _OPERATORS[type(link.op)](joined, _topology(link.right, text))
    return joined


def _build(node: ast.expr, text: str, name: str, args: list[Any], named: dict[str, Any]) -> Topology:
    builder = BUILDERS.get(name) or _REGISTERED.get(name)
    if builder is None:
        names = sorted(BUILDERS | _REGISTERED)
        own = (
            "to use your own, decorate it with graphs.register; import its file first, or name it with --import on "
            "the command line"
        )
        raise _error(node, text, f"{unknown('topology', name, names)}; {own}")
    parameters = inspect.signature(builder).parameters
    if surplus := [k for k in named if k not in parameters]:
        takes = ", ".join(parameters) or "no arguments"
        raise _error(node, text, f"{name} takes {takes}; got {surplus[0]}{did_you_mean(surplus[0], parameters)}")
    try:
        topology = builder(*args, **named)
    except Exception as error:
        if name in BUILDERS and not isinstance(error, (TypeError, ValueError)):
            raise
        raise _error(node, text, str(error)) from None
    if not isinstance(topology, Topology):
        raise _error(node, text, f"{_import_path(builder)} returned {type(topology).__name__}, not a Topology")
    return topology


def _relation(node: ast.expr, text: str) -> Relation:
    """Parses the `repr` of a relation: `Offset(clip=3)`."""
    match node:
        case ast.Call(ast.Name(name), [], keywords) if name in _RELATIONS:
            fields = {}
            for k in keywords:
                value = _relation(k.value, text) if isinstance(k.value, ast.Call) else _value(k.value, text, _INTEGERS)
                fields[str(k.arg)] = tuple(value) if isinstance(value, list) else value
            try:
                return _RELATIONS[name](**fields)
            except TypeError as error:
                raise _error(node, text, str(error)) from None
    raise _error(node, text, f"expected a relation such as Offset(clip=3); there are {', '.join(sorted(_RELATIONS))}")


_INTEGERS = ((int,), "arguments are integers or lists of integers")
_TAKE_LITERALS = {"documents", "neighborhood"}
"""The builders of this package with arguments that are topologies, text or truth values."""

_LITERALS = (
    (int, float, str, bool, NoneType),
    "arguments are numbers, text, True, False, None, topologies or lists of these",
)


def _value(node: ast.expr, text: str, kinds: tuple[tuple[type, ...], str]) -> Any:
    match node:
        case ast.Constant(value) if type(value) in kinds[0]:
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)) if type(value) in kinds[0]:
            return -value
        case ast.List(items) | ast.Tuple(items):
            return [_value(item, text, kinds) for item in items]
        case ast.Name() | ast.Call() | ast.BinOp() | ast.UnaryOp() if kinds is _LITERALS:
            return _topology(node, text)
    raise _error(node, text, kinds[1])


def _error(node: ast.expr, text: str, why: str) -> ValueError:
    part = ast.get_source_segment(text, node) or ""
    column = len(text.encode()[: node.col_offset].decode()) + 1  # ast counts bytes
    return ValueError(f"cannot read {_cut(text)} at column {column} ({_cut(part)}): {why}")


def _cut(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:60]}...")
