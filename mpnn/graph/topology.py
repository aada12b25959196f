"""Topology: a rule for the edges of a graph of any size; the declarative half of a model.

Topologies are immutable and hashable and compose as sets of edges: `causal() & window(256)`, `window(64) |
global_nodes(4)`, `permutation(order) - identity()`, `~causal()`. `bind(n)` returns the `Graph`. Bound graphs are
cached: layers and steps that bind the same topology at the same size share one graph and its cached values.
"""

import inspect
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.arguments import at_least, integer
from mpnn.graph.bind_cache import CACHE
from mpnn.graph.bound import B, BoundGraph, refuse_truth
from mpnn.graph.handles import HasToken
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.relations import Relation, as_relation
from mpnn.graph.runs import Ints, Runs, check_line, require_room

Other = TypeVar("Other", bound="Topology | BoundGraph")
Pairs = Iterable[tuple[ArrayLike, ArrayLike]]
RunsRule = Callable[..., Pairs | Runs]
LabelRule = Callable[..., NDArray[np.int64]]

_ALGEBRA: dict[str, Callable[[Any, Any], Any]] = {
    "|": operator.or_,
    "&": operator.and_,
    "-": operator.sub,
}

_LONG_LIST = re.compile(r"\[([^][,]*,){6,}[^][,]*\]")  # lists of more than six values
_MAX_NESTED = 100

_OF_GRAPHS = {name for name in dir(Graph) if not name.startswith("_")} | {"num_dst", "num_src", "edge_attr", "device"}


class Topology(HasToken, ABC):
    """A rule for edges that is independent of the graph's size; `bind(n)` returns the `Graph`."""

    @staticmethod
    def of(
        rule: RunsRule,
        *args: Any,
        memory: int = 0,
        relation: Relation | None = None,
        alike: int = 1,
        positional: bool = False,
    ) -> "Topology":
        """Creates a topology from a runs rule.

        `rule(i, num_src, *args)` receives all destinations `i`, int64 [num_dst], and returns pairs `(start, stop)` of
        integer arrays [num_dst] (or plain integers). For each pair, destination i receives from the sources
        `start[i] <= j < stop[i]`. Pairs may overlap, be empty or exceed the range of sources; they are clipped and
        merged. A rule with thousands of runs per row may return `mpnn.graph.runs.Runs` instead, which are used
        unchanged. A rule raises `ValueError` for sizes that it does not support.

        Args:
            args: hashable arguments of the rule, tuples instead of tensors. Two topologies are equal if their rules and
                arguments are equal, and their graphs are cached: a rule must not capture values that change.
            memory: the number of memory nodes. They are the first sources, followed by the destinations themselves.
            relation: gives each edge its type, see `mpnn.graph.relations`.
            alike: the block size of rows: all rows of a block have the same sources, and `i` holds the first row of
                each block.
            positional: whether the rule compares positions, so that destination i is source i of one sequence; see
                `bind`.
        """
        _check_constant(rule, args)
        return _Rule(rule, args, relation, alike, memory, positional)

    @staticmethod
    def cliques(labels: LabelRule, *args: Any, relation: Relation | None = None) -> "Topology":
        """i receives from j if their labels are equal. These disjoint cliques run as batched dense attention.

        `labels(num_nodes, *args)` returns int64 [num_nodes]; `args` as in `of`.
        """
        _check_constant(labels, args)
        return _Cliques(labels, args, relation)

    def bind(self, num_dst: int, num_src: int | None = None) -> Graph:
        """Returns the graph of this topology over `num_dst` destinations and `num_src` sources.

        `num_src` defaults to `num_dst`, plus m for `memory(m)`. The graph and its cached values stay in
        `mpnn.graphs.cache`.

        Rules that compare positions (`causal`, `window`, ...) describe one sequence: destination i is source i. They
        do not accept fewer destinations than sources, because the destinations could be the first nodes or the last.
        Select them with `rows`: `causal().bind(50).rows(49, 50)` is the last of 50 nodes, a query with cached keys,
        which attends to all of them.

        Raises:
            TypeError: if a size is not an integer.
            ValueError: if a size is negative, too large or not supported by the topology, or if the topology compares
                positions and there are fewer destinations than sources.
        """
        if type(num_dst) is not int or type(num_src) is not int:
            num_dst = integer("num_dst", num_dst)
            num_src = num_dst + self.memory if num_src is None else integer("num_src", num_src)
        return CACHE.keep((_bind, self, num_dst, num_src), partial(_bind, self, num_dst, num_src))

    def take(self, rows: Ints, num_nodes: int) -> Runs:
        """Returns the runs of the ascending rows `rows` of `bind(num_nodes)`. A rule that compares positions is
        evaluated for these rows only."""
        return self.bind(num_nodes).runs.take(rows)

    def _repr_html_(self) -> str:
        text: str = FUNCTIONS["html"](self)
        return text

    depth: int = 0
    """The nesting depth of an expression."""

    memory: int = 0
    """The number of memory nodes."""

    positional: bool = False
    """Whether the rule compares the positions of destinations and sources in one sequence."""

    @abstractmethod
    def _graph(self, num_dst: int, num_src: int) -> Graph:
        """`bind` without the cache, so that the operands of an expression are not cached."""

    def with_relation(self, relation: Relation | Tensor) -> "Topology":
        """Returns a topology of the same edges, with edge types from a `Relation` or an integer matrix [num_dst,
        num_src]."""
        return _WithRelation((self,), as_relation(relation))

    def __or__(self, other: Other) -> Other:
        return _combine("|", self, other)

    def __and__(self, other: Other) -> Other:
        return _combine("&", self, other)

    def __sub__(self, other: Other) -> Other:
        return _combine("-", self, other)

    def __ror__(self, other: B) -> B:
        return _ALGEBRA["|"](other, _like(self, other)) if isinstance(other, BoundGraph) else NotImplemented

    def __rand__(self, other: B) -> B:
        return _ALGEBRA["&"](other, _like(self, other)) if isinstance(other, BoundGraph) else NotImplemented

    def __rsub__(self, other: B) -> B:
        return _ALGEBRA["-"](other, _like(self, other)) if isinstance(other, BoundGraph) else NotImplemented

    def __invert__(self) -> "Topology":
        return _Complement((self,))

    def __bool__(self) -> NoReturn:
        refuse_truth(self)

    def __str__(self) -> str:
        """A short form in which long lists are abbreviated. `repr` is complete, and `graphs.parse` reads it back."""
        return _LONG_LIST.sub(lambda match: f"<{match[0].count(',') + 1} values>", repr(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the text if `parse` restores the topology from it, so that `torch.load(weights_only=True)` works.

        Otherwise the pickle refers to the rule by its import path.
        """
        text = FUNCTIONS["text_of"](self) if "text_of" in FUNCTIONS else None
        return super().__reduce_ex__(protocol) if text is None else (FUNCTIONS["parse"], (text,))

    if not TYPE_CHECKING:  # type checkers would accept any attribute name

        def __getattr__(self, name: str) -> Any:
            if name in _OF_GRAPHS:
                raise AttributeError(
                    f"{self} is a rule without a size and has no {name}; bind it first: .bind(num_nodes)"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _bind(topology: Topology, num_dst: int, num_src: int) -> Graph:
    check_line(num_dst, num_src)
    at_least("num_dst", num_dst, 0)
    at_least("num_src", num_src, 0)
    if topology.positional and not topology.memory and 0 < num_dst < num_src:
        raise ValueError(
            f"{topology} compares positions, and the positions of {num_dst} destinations among {num_src} sources are "
            f"ambiguous: for the last {num_dst} of {num_src} nodes, as in decoding with cached keys, write "
            f".bind({num_src}).rows({num_src - num_dst}, {num_src}); for the first {num_dst}, "
            f".bind({num_src}).rows(0, {num_dst})"
        )
    graph = topology._graph(num_dst, num_src)
    if graph._given_runs is not None:
        graph._given_runs.make_rows()
    graph.name = str(topology)
    vars(graph)["is_shared"] = True  # from now on it refuses changes: the cache returns it to others, too
    return graph


def _like(topology: Topology, graph: BoundGraph) -> Graph:
    """Binds the topology to the nodes of a graph. Rules that compare positions use the positions of its rows."""
    first = graph.shift
    last = graph.shift + graph.num_dst
    if first > 0 and last <= graph.num_src and topology.positional and not topology.memory and graph.positions is None:
        return topology.bind(graph.num_src).rows(first, last).to(graph.device)
    return topology.bind(graph.num_dst, graph.num_src).to(graph.device)


def _check_constant(rule: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Raises TypeError unless the arguments are hashable, and neither they nor what the rule closes over can change:
    the graph of a topology is kept under its rule and its arguments."""
    try:
        hash(args)
    except TypeError as error:
        raise TypeError(f"a topology's arguments must be hashable; got {args}: {error}") from None
    for k, x in enumerate(args):
        if isinstance(x, Tensor):
            raise TypeError(
                f"argument {k} of a topology is a tensor, whose numbers may change while the graph of the topology is "
                "kept; pass tuple(x.tolist())"
            )
    names = getattr(getattr(rule, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(rule, "__closure__", None) or (), strict=False):
        try:
            held = cell.cell_contents
        except ValueError:  # it is not set yet
            continue
        if isinstance(held, _CHANGEABLE):
            raise TypeError(
                f"the rule of a topology closes over {name}, a {type(held).__name__}, which may change while the graph "
                "of the topology is kept; make it an argument of the rule, as a tuple: Topology.of(rule, tuple(...))"
            )


_CHANGEABLE = (Tensor, np.ndarray, list, dict, set, bytearray)


def _combine(symbol: str, left: Topology, right: Any) -> Any:
    if isinstance(right, BoundGraph):
        return _ALGEBRA[symbol](_like(left, right), right)
    if not isinstance(right, Topology):
        return NotImplemented
    first = left.operands if _joins(left, symbol) else (left,)
    last = right.operands if _joins(right, symbol) and symbol != "-" else (right,)
    return _Algebra((*first, *last), symbol)


def _joins(topology: Topology, symbol: str) -> "TypeGuard[_Algebra]":
    return isinstance(topology, _Algebra) and topology.symbol == symbol


@dataclass(frozen=True, repr=False)
class _Rule(Topology):
    rule: RunsRule
    args: tuple[Any, ...]
    relation: Relation | None
    alike: int
    memory: int
    positional: bool

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        if self.memory and num_src != num_dst + self.memory:
            raise ValueError(
                f"the sources of {self} are {self.memory} memory nodes followed by the {num_dst} destinations, "
                f"so num_src must be {num_dst + self.memory}; got {num_src}"
            )
        require_room(num_dst, num_src, num_dst // self.alike)
        runs = self._runs(np.arange(0, num_dst, self.alike), num_src)
        runs = runs if self.alike == 1 else runs.take(np.arange(num_dst) // self.alike)
        return Graph.from_runs(runs, relation=self.relation, shift=self.memory)

    def take(self, rows: Ints, num_nodes: int) -> Runs:
        by_row = self.positional and self.alike == 1 and not self.memory
        return self._runs(rows, num_nodes) if by_row else super().take(rows, num_nodes)

    def _runs(self, i: Ints, num_src: int) -> Runs:
        """The runs that the rule returns for the rows i, clipped and merged."""
        try:
            pairs = self.rule(i, num_src, *self.args)
        except TypeError as error:
            if (why := _why_not_called(self.rule, (i, num_src, *self.args))) is None:
                raise
            name = self.rule.__name__.strip("<>")
            raise TypeError(
                f"a rule is called as rule(i, num_src, *args), with the array i of all destinations, the number of "
                f"sources, and what Topology.of got after the rule, here {self.args}; {name} does not fit: {why}"
            ) from error
        except ValueError as error:
            if "truth value of an array" not in str(error):
                raise
            raise TypeError(
                f"the rule {self.rule.__name__} gets all destinations at once, as the array i, which has no truth "
                "value: write np.where(condition, a, b) in place of `a if condition else b`"
            ) from error
        if isinstance(pairs, Runs):
            return pairs
        row = np.arange(len(i))
        return Runs.of(len(i), num_src, ((row, start, stop) for start, stop in self._checked(pairs, len(i))))

    def _checked(self, pairs: Any, num_dst: int) -> Pairs:
        """Yields the pairs that the rule returned and checks that they are pairs of integers, for each destination."""
        if not isinstance(pairs, Iterable):
            raise TypeError(f"the rule of {self} must return a list of pairs [(start, stop), ...]; got {pairs!r}")
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(
                    f"the rule of {self} must return a list of pairs [(start, stop), ...], even for a single pair; "
                    f"got {type(pair).__name__} for a pair"
                )
            for end in map(np.asarray, pair):
                if end.size and end.dtype.kind not in "iu":
                    raise TypeError(
                        f"starts and stops of the rule of {self} must be integers; got {end.dtype}: divide with // "
                        "instead of /"
                    )
                if end.ndim and end.shape[-1] not in (1, num_dst):
                    raise ValueError(
                        f"starts and stops of the rule of {self} must have a number for each of the {num_dst} "
                        f"destinations, or be one number; got numbers of shape {list(end.shape)}"
                    )
            yield pair[0], pair[1]

    def __repr__(self) -> str:
        return _call(self.rule, self.args, skip=2)


@dataclass(frozen=True, repr=False)
class _Cliques(Topology):
    labels: LabelRule
    args: tuple[Any, ...]
    relation: Relation | None

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        if num_dst != num_src:
            raise ValueError(f"{self} needs as many sources as destinations; got {num_dst} x {num_src}")
        labels = np.asarray(self.labels(num_dst, *self.args), np.int64)
        return Graph.from_labels(labels, relation=self.relation)

    def __repr__(self) -> str:
        return _call(self.labels, self.args, skip=1)


@dataclass(frozen=True, repr=False)
class _Expression(Topology):
    """A topology composed of other topologies, its operands."""

    operands: tuple[Topology, ...]

    def __post_init__(self) -> None:
        depth = 1 + max(operand.depth for operand in self.operands)
        if depth > _MAX_NESTED:
            raise ValueError(f"a topology can be nested {_MAX_NESTED} deep; a | b | c and a & b & c count as one level")
        memory = max(operand.memory for operand in self.operands)
        positional = any(operand.positional for operand in self.operands)
        vars(self).update(depth=depth, memory=memory, positional=positional)


@dataclass(frozen=True, repr=False)
class _Algebra(_Expression):
    """`a | b | c`, `a & b & c` or `a - b - c`, with any number of operands."""

    symbol: str

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        if self.symbol == "-":
            first, *rest = self.operands
            return self._part(first, num_dst, num_src) - self._merged("|", rest, num_dst, num_src)
        return self._merged(self.symbol, self.operands, num_dst, num_src)

    def take(self, rows: Ints, num_nodes: int) -> Runs:
        if self.memory:
            return super().take(rows, num_nodes)
        return reduce(_ALGEBRA[self.symbol], (operand.take(rows, num_nodes) for operand in self.operands))

    def _merged(self, symbol: str, parts: Sequence[Topology], num_dst: int, num_src: int) -> Graph:
        """Merges recursively by halves, so that the cost for thousands of operands is near linear in their runs."""
        if len(parts) == 1:
            return self._part(parts[0], num_dst, num_src)
        middle = len(parts) // 2
        halves = (self._merged(symbol, half, num_dst, num_src) for half in (parts[:middle], parts[middle:]))
        return _ALGEBRA[symbol](*halves)

    def _part(self, part: Topology, num_dst: int, num_src: int) -> Graph:
        """The graph of one operand. With memory nodes, the destinations are the last of all nodes, so an operand that
        compares positions is bound to all nodes and cut to its last rows."""
        if not self.memory or part.memory or not part.positional:
            return part._graph(num_dst, num_src)
        nodes = self.memory + num_dst
        return part._graph(nodes, nodes).rows(self.memory, nodes)

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(map(_nested, self.operands))


class _Complement(_Expression):
    def _graph(self, num_dst: int, num_src: int) -> Graph:
        return ~self.operands[0]._graph(num_dst, num_src)

    def __repr__(self) -> str:
        return f"~{_nested(self.operands[0])}"


@dataclass(frozen=True, repr=False)
class _WithRelation(_Expression):
    relation: Relation

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        return self.operands[0]._graph(num_dst, num_src).with_relation(self.relation)

    def __repr__(self) -> str:
        inner = self.operands[0]
        text = f"({inner!r})" if isinstance(inner, _Complement) else _nested(inner)
        return f"{text}.with_relation({self.relation!r})"


def _nested(topology: Topology) -> str:
    return f"({topology!r})" if isinstance(topology, _Algebra) else repr(topology)


def _why_not_called(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str | None:
    """Why the signature of a function does not take these arguments, or None if it does."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        return str(error)
    return None


def _call(rule: Callable[..., Any], args: tuple[Any, ...], skip: int) -> str:
    """Formats a call such as `window(256)`. Trailing arguments with default values are omitted."""
    parameters = list(inspect.signature(rule).parameters.values())[skip:]
    shown = list(args)
    while shown and len(shown) <= len(parameters) and parameters[len(shown) - 1].default == shown[-1]:
        shown.pop()
    name = getattr(rule, "__name__", type(rule).__name__).strip("_<>")
    return f"{name}({', '.join(repr(list(x)) if isinstance(x, tuple) else repr(x) for x in shown)})"
