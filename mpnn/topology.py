"""Topology: a rule for who hears whom, without a size; the declarative half of a model.

Topologies are immutable and hashable and compose as sets of edges: `causal() & window(256)`, `window(64) |
global_nodes(4)`, `permutation(order) - identity()`, `~causal()`. `bind(n)` gives the `Graph`; binding is cached, so
every layer and every step that asks for the same topology at the same size shares one graph and all derived from it.
"""

from __future__ import annotations

import inspect
import operator
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mpnn.bind_cache import cached_graph
from mpnn.graph import Graph
from mpnn.graph.algebra import refuse_truth
from mpnn.handles import Handled
from mpnn.relation import Relation, as_relation
from mpnn.runs import Runs, check_line

RunsRule = Callable[..., Iterable[tuple[ArrayLike, ArrayLike]] | Runs]
LabelRule = Callable[..., NDArray[np.int64]]

_ALGEBRA: dict[str, Callable[[Graph, Graph], Graph]] = {
    "|": operator.or_,
    "&": operator.and_,
    "-": operator.sub,
}

_LONG_LIST = re.compile(r"\[([^][,]*,){6,}[^][,]*\]")  # of more than six values
_MOST_NESTED = 100

_OF_GRAPHS = {name for name in dir(Graph) if not name.startswith("_")} | {"num_dst", "num_src", "edge_attr", "device"}


class Topology(Handled, ABC):
    """A rule without a size; `bind` makes it a graph."""

    @staticmethod
    def of(
        rule: RunsRule,
        *args: Any,
        memory: int = 0,
        relation: Relation | None = None,
        alike: int = 1,
        positional: bool = False,
    ) -> Topology:
        """A topology from a runs rule: everything a new topology needs.

        `rule(i, num_src, *args)` is given all destinations `i`, int64 [num_dst], and returns pairs `(start, stop)` of
        integer arrays [num_dst] (or plain integers): destination i hears `start[i] <= j < stop[i]` of each pair. Pairs
        may overlap, be empty or reach outside; they are clipped and merged. A rule whose rows have thousands of runs
        may return `mpnn.runs.Runs` instead, which are used as they are. `args` must be hashable: together with the rule
        they are the topology's identity. A rule that fits some sizes only raises `ValueError` on others.

        `memory`: the sources are that many remembered nodes followed by the destinations themselves.
        `relation`: the class of each edge, see `mpnn.relation`.
        `alike`: rows come in blocks of so many that hear the same sources, and `i` holds the first of each block.
        `positional`: the rule compares positions, destination i being source i of one sequence; see `bind`.
        """
        _check_hashable(args)
        return _Rule(rule, args, memory, relation, alike, positional)

    @staticmethod
    def cliques(labels: LabelRule, *args: Any, relation: Relation | None = None) -> Topology:
        """i hears j when their labels agree: disjoint cliques, which run as batched dense attention.

        `labels(num_nodes, *args)` returns int64 [num_nodes]; `args` as in `of`.
        """
        _check_hashable(args)
        return _Cliques(labels, args, relation)

    def bind(self, num_dst: int, num_src: int | None = None) -> Graph:
        """The graph of this topology over `num_dst` destinations and `num_src` sources (default: as many, plus the
        remembered ones of `memory(m)`). Cached, with everything that is derived from it, see `mpnn.graphs.cache`.

        Rules that compare positions (`causal`, `window`, ...) are about one sequence: destination i is source i. They
        refuse fewer destinations than sources, because these may be the first nodes or the last. `rows` says which:
        `causal().bind(50).rows(49, 50)` is the last of 50 nodes, a cached query, which attends to all of them.

        Raises:
            TypeError: a size is not an integer.
            ValueError: a size is negative or too large, or the topology does not exist at this size, or it compares
                positions and there are fewer destinations than sources.
        """
        _check_size("num_dst", num_dst)
        num_src = num_dst + self.memory if num_src is None else num_src
        _check_size("num_src", num_src)
        check_line(int(num_dst), int(num_src))
        if self.positional and not self.memory and 0 < num_dst < num_src:
            raise ValueError(
                f"{self} compares positions, and {num_dst} destinations among {num_src} sources can stand in two ways: "
                f"for the last {num_dst} of {num_src} nodes, as cached queries are, write "
                f".bind({num_src}).rows({num_src - num_dst}, {num_src}); for the first {num_dst}, "
                f".bind({num_src}).rows(0, {num_dst})"
            )
        return _bind(self, int(num_dst), int(num_src))

    depth = 0
    """How deep an expression is nested."""

    @property
    def memory(self) -> int:
        return 0

    @property
    def positional(self) -> bool:
        """Whether the rule compares positions of destinations and sources, as nodes of one sequence."""
        return False

    @abstractmethod
    def _graph(self, num_dst: int, num_src: int) -> Graph:
        """`bind` without its cache: what an expression is made of need not outlive it."""

    def related(self, relation: Relation | Tensor) -> Topology:
        """The same edges, each with a class: a `Relation`, or an integer matrix [num_dst, num_src]."""
        return _Related(self, as_relation(relation))

    def __or__(self, other: Topology | Graph) -> Any:
        return _combine("|", self, other)

    def __and__(self, other: Topology | Graph) -> Any:
        return _combine("&", self, other)

    def __sub__(self, other: Topology | Graph) -> Any:
        return _combine("-", self, other)

    def __ror__(self, other: Graph) -> Graph:
        return other | _like(self, other) if isinstance(other, Graph) else NotImplemented

    def __rand__(self, other: Graph) -> Graph:
        return other & _like(self, other) if isinstance(other, Graph) else NotImplemented

    def __rsub__(self, other: Graph) -> Graph:
        return other - _like(self, other) if isinstance(other, Graph) else NotImplemented

    def __invert__(self) -> Topology:
        return _Complement(self)

    def __bool__(self) -> NoReturn:
        refuse_truth(self)

    def __str__(self) -> str:
        """For people: long lists are cut short. `repr` writes every number, and `graphs.parse` reads it back."""
        return _LONG_LIST.sub(lambda found: f"<{found[0].count(',') + 1} values>", repr(self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold the text where it gives the topology back, so that `torch.load(weights_only=True)`
        reads them; others refer to the rule by its import path."""
        from mpnn.graphs.parse import parse

        try:
            if parse(repr(self)) == self:
                return parse, (repr(self),)
        except ValueError:
            pass
        return super().__reduce_ex__(protocol)

    if not TYPE_CHECKING:  # which would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            if name in _OF_GRAPHS:
                raise AttributeError(
                    f"{self} is a rule without a size and has no {name}; bind it first: .bind(num_nodes)"
                )
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


@cached_graph
def _bind(topology: Topology, num_dst: int, num_src: int) -> Graph:
    graph = topology._graph(num_dst, num_src)
    graph.name = str(topology)
    return graph


def _like(topology: Topology, graph: Graph) -> Graph:
    """The topology over the nodes of a graph; rules that compare positions heed where its destinations stand."""
    first, last = graph.shift, graph.shift + graph.num_dst
    if first > 0 and last <= graph.num_src and topology.positional and not topology.memory and graph.places is None:
        return topology.bind(graph.num_src).rows(first, last).to(graph.device)
    return topology.bind(graph.num_dst, graph.num_src).to(graph.device)


def _check_size(name: str, n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
        raise TypeError(f"{name} must be an integer; got {n!r}")
    if n < 0:
        raise ValueError(f"{name} must not be negative; got {n}")


def _check_hashable(args: tuple[Any, ...]) -> None:
    try:
        hash(args)
    except TypeError as error:
        raise TypeError(f"a topology's arguments are its identity and must be hashable; got {args}: {error}") from None


def _combine(symbol: str, left: Topology, right: Topology | Graph) -> Topology | Graph:
    if isinstance(right, Graph):
        return _ALGEBRA[symbol](_like(left, right), right)
    if not isinstance(right, Topology):
        return NotImplemented
    first = left.operands if _joins(left, symbol) else (left,)
    last = right.operands if _joins(right, symbol) and symbol != "-" else (right,)
    return _Algebra(symbol, (*first, *last))


def _joins(topology: Topology, symbol: str) -> TypeGuard[_Algebra]:
    return isinstance(topology, _Algebra) and topology.symbol == symbol


def _check_depth(*operands: Topology) -> int:
    """How deep an expression over these is nested."""
    depth = 1 + max(operand.depth for operand in operands)
    if depth > _MOST_NESTED:
        raise ValueError(
            f"a topology can be nested {_MOST_NESTED} deep; a | b | c and a & b & c count once, however many they join"
        )
    return depth


@dataclass(frozen=True, repr=False)
class _Rule(Topology):
    rule: RunsRule
    args: tuple[Any, ...]
    remembered: int
    relation: Relation | None
    alike: int
    compares: bool

    @property
    def memory(self) -> int:
        return self.remembered

    @property
    def positional(self) -> bool:
        return self.compares

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        if self.remembered and num_src != num_dst + self.remembered:
            raise ValueError(
                f"{self} has {self.remembered} remembered sources and then the {num_dst} destinations themselves, "
                f"so num_src must be {num_dst + self.remembered}; got {num_src}"
            )
        i = np.arange(0, num_dst, self.alike)
        row = np.arange(len(i))
        pairs = self.rule(i, num_src, *self.args)
        if isinstance(pairs, Runs):
            runs = pairs
        else:
            runs = Runs.of(len(i), num_src, ((row, start, stop) for start, stop in self._checked(pairs)))
        runs = runs if self.alike == 1 else runs.take(np.arange(num_dst) // self.alike)
        return Graph.from_runs(runs, relation=self.relation, shift=self.remembered)

    def _checked(self, pairs: Any) -> Iterable[tuple[ArrayLike, ArrayLike]]:
        """What the rule returned, as soon as it is known to be pairs of integers."""
        if not isinstance(pairs, Iterable):
            raise TypeError(f"the rule of {self} must return a list of pairs [(start, stop), ...]; got {pairs!r}")
        for pair in pairs:
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                raise TypeError(
                    f"the rule of {self} must return a list of pairs [(start, stop), ...], also where there is one; "
                    f"got {type(pair).__name__} for a pair"
                )
            for end in map(np.asarray, pair):
                if end.size and end.dtype.kind not in "iu":
                    raise TypeError(
                        f"starts and stops of the rule of {self} must be integers; got {end.dtype}: divide by // "
                        "instead of /"
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


class _Expression(Topology):
    """A topology made of others, its operands."""

    if TYPE_CHECKING:

        @property
        def operands(self) -> tuple[Topology, ...]: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", _check_depth(*self.operands))

    @property
    def memory(self) -> int:
        return max(operand.memory for operand in self.operands)

    @property
    def positional(self) -> bool:
        return any(operand.positional for operand in self.operands)


@dataclass(frozen=True, repr=False)
class _Algebra(_Expression):
    """`a | b | c`, `a & b & c` or `a - b - c`, of any number of operands."""

    symbol: str
    operands: tuple[Topology, ...]

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        if self.symbol == "-":
            first, *rest = self.operands
            return self._part(first, num_dst, num_src) - self._merged("|", rest, num_dst, num_src)
        return self._merged(self.symbol, self.operands, num_dst, num_src)

    def _merged(self, symbol: str, parts: Sequence[Topology], num_dst: int, num_src: int) -> Graph:
        """Halves are merged first, so that thousands of operands take little longer than their runs."""
        if len(parts) == 1:
            return self._part(parts[0], num_dst, num_src)
        middle = len(parts) // 2
        halves = (self._merged(symbol, half, num_dst, num_src) for half in (parts[:middle], parts[middle:]))
        return _ALGEBRA[symbol](*halves)

    def _part(self, part: Topology, num_dst: int, num_src: int) -> Graph:
        """One operand. Beside remembered nodes, destinations are the last of all nodes, and so they are to rules that
        compare positions."""
        if not self.memory or part.memory or not part.positional:
            return part._graph(num_dst, num_src)
        nodes = self.memory + num_dst
        return part._graph(nodes, nodes).rows(self.memory, nodes)

    def __repr__(self) -> str:
        return f" {self.symbol} ".join(map(_nested, self.operands))


@dataclass(frozen=True, repr=False)
class _Complement(_Expression):
    inner: Topology

    @property
    def operands(self) -> tuple[Topology, ...]:
        return (self.inner,)

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        return ~self.inner._graph(num_dst, num_src)

    def __repr__(self) -> str:
        return f"~{_nested(self.inner)}"


@dataclass(frozen=True, repr=False)
class _Related(_Expression):
    inner: Topology
    relation: Relation

    @property
    def operands(self) -> tuple[Topology, ...]:
        return (self.inner,)

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        return self.inner._graph(num_dst, num_src).related(self.relation)

    def __repr__(self) -> str:
        inner = f"({self.inner!r})" if isinstance(self.inner, _Complement) else _nested(self.inner)
        return f"{inner}.related({self.relation!r})"


def _nested(topology: Topology) -> str:
    return f"({topology!r})" if isinstance(topology, _Algebra) else repr(topology)


def _call(rule: Callable[..., Any], args: tuple[Any, ...], skip: int) -> str:
    """`window(256)`: the rule's name and its arguments, those left at their defaults not repeated."""
    parameters = list(inspect.signature(rule).parameters.values())[skip:]
    shown = list(args)
    while shown and len(shown) <= len(parameters) and parameters[len(shown) - 1].default == shown[-1]:
        shown.pop()
    name = getattr(rule, "__name__", type(rule).__name__).strip("_<>")
    return f"{name}({', '.join(map(_argument, shown))})"


def _argument(value: Any) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
