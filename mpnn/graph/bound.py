"""BoundGraph: what layers and the engine read of any graph that has a size: a `Graph`, or a `StackedGraph`."""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from mpnn.graph.csr import built
from mpnn.graph.exchange import LOCAL, Exchange
from mpnn.graph.handles import HasToken
from mpnn.graph.relations import Relation
from mpnn.kernels.parts import Parts

B = TypeVar("B", bound="BoundGraph")
T = TypeVar("T")
P = ParamSpec("P")
_ABSENT: Any = object()
_MOST_VALUES = 256  # of a graph, built by this library, whose keys have parameters


class Values(dict[Hashable, Any]):
    """Values cached on a graph, by key. `added` counts all that were ever added."""

    added = 0

    def keep(self, key: Hashable, build: Callable[[], T], is_limited: bool = True) -> T:
        """Returns `build()`, or the value that another thread has built meanwhile: all threads get the first one.

        `is_limited`: drop the oldest values under tuples, as far as there are too many.
        """
        value: T = self.setdefault(key, built(build))
        self.added += 1
        if is_limited and type(key) is tuple and len(self) > _MOST_VALUES:
            # A list of the keys is made in one step, in which no other thread adds one.
            parametrized = [key for key in list(self) if type(key) is tuple]
            for key in parametrized[:-_MOST_VALUES]:
                self.pop(key, None)
        return value


class BoundGraph(HasToken):
    """Edges between `num_dst` destinations and `num_src` sources, which layers take. `Graph` is one set of edges,
    `StackedGraph` one for each item of a batch and each head."""

    exchange: Exchange = LOCAL  # of the class, so that whole graphs neither store nor pickle it
    parts: Parts | None = None
    is_scattered: bool = False
    stack: tuple[int, ...] = ()
    """The numbers of items and heads of a `StackedGraph`, whose edges differ by item and head."""

    num_dst: int
    num_src: int
    name: str
    device: torch.device
    relation: Relation | None
    shift: int
    positions: tuple[Tensor, Tensor] | None
    edge_attr: Tensor | None
    degrees: tuple[Tensor, Tensor] | None
    node_ids: tuple[Tensor, Tensor] | None
    _edge_type: Tensor | None = None
    _moved: dict[torch.device, Any]
    _memo: Values
    _of_users: Values

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Returns `build()`, computed once per graph and key. Layers cache what they derive from the graph here.

        What functions of this library build lies in a table of its own, so a key of yours never finds it. That table
        keeps all values whose keys are names, and the last 256 of those whose keys are tuples: a tuple holds sizes and
        options, of which a long run meets any number. All threads receive the same value."""
        of_library = str(getattr(build, "__module__", None)).startswith("mpnn.")
        table = self._memo if of_library else self._of_users
        value = table.get(key, _ABSENT)
        return table.keep(key, build, of_library) if value is _ABSENT else value

    def derive(self, build: Callable[..., B], *arguments: Hashable, num_dst: int, num_src: int | None = None) -> B:
        """Returns `build(graph, *arguments)`, computed once: a graph of `num_dst` destinations and `num_src` sources.

        `num_src` defaults to this graph's. A program traced by `torch.compile` does not build the graph while tracing,
        but when it runs.
        """
        return self.cached((build, arguments), lambda: build(self, *arguments))

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute, and drops what was derived from the others: it may depend on this one."""
        object.__setattr__(self, name, value)
        attributes = self.__dict__
        for table in ("_memo", "_of_users", "_moved"):
            if attributes.get(table):
                attributes[table].clear()

    def node_positions(self) -> tuple[Tensor, Tensor]:
        """The positions of destinations and sources, int64 [num_dst] and [num_src]."""
        if self.positions is not None:
            return self.positions
        dst, src = (torch.arange(n, device=self.device) for n in (self.num_dst, self.num_src))
        return dst + self.shift, src

    @property
    def edge_type_rule(self) -> Relation | None:
        """The rule that gives edges their types; None if the types are data or edges have no types."""
        return self.relation if self._edge_type is None else None

    @property
    def has_edge_types(self) -> bool:
        return self._edge_type is not None or self.relation is not None

    @property
    def num_edge_types(self) -> int:
        """The number of edge types; 0 if edges have no types."""
        if self._edge_type is not None:
            return int(self._edge_type.max()) + 1 if len(self._edge_type) else 0
        return 0 if self.relation is None else self.relation.count

    def __bool__(self) -> NoReturn:
        refuse_truth(self)


def cached_on_graph(build: Callable[Concatenate[B, P], T]) -> Callable[Concatenate[B, P], T]:
    """Decorates a function of a graph, and of hashable arguments by position: its result is computed once per graph.
    See `BoundGraph.cached`."""

    @wraps(build)
    def cached(graph: B, *arguments: P.args, **_: P.kwargs) -> T:
        return graph.cached((build, arguments) if arguments else build, lambda: build(graph, *arguments, **_))

    return cached


def refuse_truth(edges: object) -> NoReturn:
    """Raises TypeError, because Python evaluates `a and b` to `b` if `a` is true."""
    raise TypeError(
        f"{edges} is a set of edges, which is neither true nor false: write a & b, a | b or ~a instead of `and`, `or` "
        "or `not`, and test for a missing graph with `is None`"
    )
