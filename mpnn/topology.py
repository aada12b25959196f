"""Topology: a rule for who hears whom, without a size; the declarative half of a model.

Topologies are immutable and hashable and compose as sets of edges: `causal() & window(256)`, `window(64) |
global_nodes(4)`, `permutation(order) - identity()`, `~causal()`. `bind(n)` gives the `Graph`; binding is cached, so
every layer and every step that asks for the same topology at the same size shares one graph and all derived from it.
"""

from __future__ import annotations

import inspect
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from mpnn.bind_cache import cached_graph
from mpnn.graph import Graph
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

T = TypeVar("T")
Steps = Generator["Topology", T, T]

_OF_GRAPHS = {name for name in dir(Graph) if not name.startswith("_")} | {"num_dst", "num_src", "edge_attr", "device"}


class Topology(Handled, ABC):
    """A rule without a size; `bind` makes it a graph."""

    @staticmethod
    def of(rule: RunsRule, *args: Any, memory: int = 0, relation: Relation | None = None, alike: int = 1) -> Topology:
        """A topology from a runs rule: everything a new topology needs.

        `rule(i, num_src, *args)` is given all destinations `i`, int64 [num_dst], and returns pairs `(start, stop)` of
        integer arrays [num_dst] (or plain integers): destination i hears `start[i] <= j < stop[i]` of each pair. Pairs
        may overlap, be empty or reach outside; they are clipped and merged. A rule whose rows have thousands of runs
        may return `mpnn.runs.Runs` instead, which are used as they are. `args` must be hashable: together with the rule
        they are the topology's identity. A rule that fits some sizes only raises `ValueError` on others.

        `memory`: the sources are that many remembered nodes followed by the destinations themselves.
        `relation`: the class of each edge, see `mpnn.relation`.
        `alike`: rows come in blocks of so many that hear the same sources, and `i` holds the first of each block.
        """
        _check_hashable(args)
        return _Rule(rule, args, memory, relation, alike)

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

        Raises:
            TypeError: a size is not an integer.
            ValueError: a size is negative or too large, or the topology does not exist at this size.
        """
        _check_size("num_dst", num_dst)
        num_src = num_dst + self.memory if num_src is None else num_src
        _check_size("num_src", num_src)
        check_line(int(num_dst), int(num_src))
        return _bind(self, int(num_dst), int(num_src))

    @property
    def memory(self) -> int:
        return 0

    @abstractmethod
    def _graph(self, num_dst: int, num_src: int) -> Graph:
        """`bind` without its cache: what an expression is made of need not outlive it."""

    def related(self, relation: Relation | Tensor) -> Topology:
        """The same edges, each with a class: a `Relation`, or an integer matrix [num_dst, num_src]."""
        return _Related((self,), as_relation(relation), self.memory)

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
        return _Complement((self,), "~", self.memory)

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
    first = left.operands if _is_algebra(left, symbol) else (left,)
    last = right.operands if _is_algebra(right, symbol) and symbol != "-" else (right,)
    return _Algebra((*first, *last), symbol, max(left.memory, right.memory))


def _is_algebra(topology: Topology, symbol: str) -> TypeGuard[_Algebra]:
    return isinstance(topology, _Algebra) and topology.sign == symbol


@dataclass(frozen=True, repr=False)
class _Rule(Topology):
    rule: RunsRule
    args: tuple[Any, ...]
    remembered: int
    relation: Relation | None
    alike: int

    @property
    def memory(self) -> int:
        return self.remembered

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


@dataclass(frozen=True, eq=False, repr=False)
class _Expression(Topology):
    """A topology made of others.

    Expressions may have thousands of operands or be nested thousands deep, so nothing that walks them recurses. A step
    of a walk is a generator: it yields each operand and receives what was computed for it (`_walk`).
    """

    operands: tuple[Topology, ...]
    sign: Any
    remembered: int

    @property
    def memory(self) -> int:
        return self.remembered

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        return _walk(self, lambda e: e._graph_steps(), lambda t: t._graph(num_dst, num_src))

    def __repr__(self) -> str:
        return _walk(self, lambda e: e._text_steps(), str)

    def __hash__(self) -> int:
        return _walk(self, lambda e: e._hash_steps(), hash)

    def __eq__(self, other: object) -> bool:
        pairs: list[tuple[Any, Any]] = [(self, other)]
        while pairs:
            one, two = pairs.pop()
            if one is two:
                continue
            if isinstance(one, _Expression) and type(one) is type(two):
                if one.sign != two.sign or len(one.operands) != len(two.operands):
                    return False
                pairs += zip(one.operands, two.operands, strict=True)
            elif isinstance(one, _Expression) or isinstance(two, _Expression) or one != two:
                return False
        return True

    @abstractmethod
    def _graph_steps(self) -> Steps[Graph]: ...

    @abstractmethod
    def _text_steps(self) -> Steps[str]: ...

    def _hash_steps(self) -> Steps[int]:
        if "_hash" not in self.__dict__:
            operands: list[int] = yield from _each(self.operands)
            object.__setattr__(self, "_hash", hash((type(self).__name__, self.sign, tuple(operands))))
        return self.__dict__["_hash"]

    def __getstate__(self) -> dict[str, Any]:
        """The expression operands first, as a list, so that pickles do not recurse."""
        parts: list[Any] = []
        _walk(self, lambda e: e._part_steps(parts), parts.append)
        return {"parts": parts}

    def _part_steps(self, parts: list[Any]) -> Steps[None]:
        yield from self.operands
        parts.append((type(self), self.sign, self.remembered, len(self.operands)))

    def __setstate__(self, state: dict[str, Any]) -> None:
        built: list[Topology] = []
        for part in state["parts"]:
            if isinstance(part, Topology):
                built.append(part)
            else:
                kind, sign, remembered, count = part
                built[-count:] = [kind(tuple(built[-count:]), sign, remembered)]
        self.__dict__.update({name: getattr(built[0], name) for name in ("operands", "sign", "remembered")})


class _Algebra(_Expression):
    """`a | b | c`, `a & b & c` or `a - b - c`: the sign is the symbol between the operands."""

    def _graph_steps(self) -> Steps[Graph]:
        subtracts = self.sign == "-"
        merged = _Balanced(_ALGEBRA["|" if subtracts else self.sign])
        first = yield self.operands[0]
        if not subtracts:
            merged.add(first)
        for operand in self.operands[1:]:
            merged.add((yield operand))
        return first - merged.total() if subtracts else merged.total()

    def _text_steps(self) -> Steps[str]:
        texts: list[str] = yield from _each(self.operands)
        return f" {self.sign} ".join(map(_nested, self.operands, texts))


class _Complement(_Expression):
    """`~a`."""

    def _graph_steps(self) -> Steps[Graph]:
        return ~(yield self.operands[0])

    def _text_steps(self) -> Steps[str]:
        return f"~{_nested(self.operands[0], (yield self.operands[0]))}"


class _Related(_Expression):
    """`a.related(relation)`: the sign is the relation."""

    def _graph_steps(self) -> Steps[Graph]:
        return (yield self.operands[0]).related(self.sign)

    def _text_steps(self) -> Steps[str]:
        return f"{_nested(self.operands[0], (yield self.operands[0]))}.related({self.sign!r})"


def _each(operands: Iterable[Topology]) -> Generator[Topology, T, list[T]]:
    """A walk's step over all operands: what was computed for each of them."""
    values = []
    for operand in operands:
        values.append((yield operand))
    return values


def _walk(root: _Expression, steps: Callable[[Any], Steps[T]], leaf: Callable[[Topology], T]) -> T:
    """What `steps(root)` returns, where each operand that it yields is walked the same way; `leaf` computes those that
    are no expressions."""
    walks, value = [steps(root)], None
    while True:
        try:
            operand = walks[-1].send(value)  # type: ignore[arg-type]
        except StopIteration as done:
            value = done.value
            walks.pop()
            if not walks:
                return value
        else:
            value = None if isinstance(operand, _Expression) else leaf(operand)
            if isinstance(operand, _Expression):
                walks.append(steps(operand))


class _Balanced:
    """The union (or the intersection) of many graphs, of which few exist at a time, merged with others as large."""

    def __init__(self, merge: Callable[[Graph, Graph], Graph]) -> None:
        self._merge = merge
        self._merged: list[tuple[int, Graph]] = []  # the logarithm of how many graphs, their union

    def add(self, graph: Graph) -> None:
        level = 0
        while self._merged and self._merged[-1][0] == level:
            graph, level = self._merge(self._merged.pop()[1], graph), level + 1
        self._merged.append((level, graph))

    def total(self) -> Graph:
        graph = self._merged.pop()[1]
        while self._merged:
            graph = self._merge(self._merged.pop()[1], graph)
        return graph


def _nested(operand: Topology, text: str) -> str:
    return f"({text})" if isinstance(operand, _Algebra) else text


def _call(rule: Callable[..., Any], args: tuple[Any, ...], skip: int) -> str:
    """`window(256)`: the rule's name and its arguments, those left at their defaults not repeated."""
    parameters = list(inspect.signature(rule).parameters.values())[skip:]
    shown = list(args)
    while shown and len(shown) <= len(parameters) and parameters[len(shown) - 1].default == shown[-1]:
        shown.pop()
    name = getattr(rule, "__name__", type(rule).__name__).strip("_<>")
    return f"{name}({', '.join(_short(a) for a in shown)})"


def _short(argument: Any) -> str:
    if isinstance(argument, tuple) and len(argument) > 6:
        return f"<{len(argument)} values>"
    return repr(list(argument)) if isinstance(argument, tuple) else repr(argument)
