"""GraphData: the edges between a fixed number of sources and destinations, as they are stored.

Messages flow along an edge from `src` to `dst`; `edge_index[0]` is src and `edge_index[1]` is dst. A graph stores one
of three forms and computes the others on first use: rows of runs (from a topology), labels (disjoint cliques), or
explicit edges in the caller's order, with repeated edges and edge attributes: in 32 bits if they are many.
"""

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import capacity, csr as edge_lists, state
from mpnn.graph.arguments import INTEGERS, check_form
from mpnn.graph.bound import BoundGraph, Values
from mpnn.graph.csr import CSR, graph_property, sorted_by
from mpnn.graph.exchange import LOCAL
from mpnn.graph.modes import outside_modes
from mpnn.graph.relations import Relation, Table, as_relation
from mpnn.graph.runs import Ints, Runs
from mpnn.kernels.parts import Parts

G = TypeVar("G", bound="GraphData")
T = TypeVar("T")


class GraphData(BoundGraph):
    """The data of a `Graph`, and what follows from them alone. `Graph` adds the methods that make other graphs."""

    _given_runs: Runs | None
    _labels: Ints | None
    _edges: Tensor | None
    _moved_from: "weakref.ref[Any] | None"  # weak, so that a copy does not keep the original alive
    edge_ids: Tensor | None
    order: Tensor | None
    batch_sizes: tuple[int, ...] | None
    periodic: bool

    def __init__(
        self,
        num_dst: int,
        num_src: int,
        *,
        runs: Runs | None = None,
        labels: Ints | None = None,
        edges: Tensor | None = None,
        edge_attr: Tensor | None = None,
        edge_type: Tensor | None = None,
        relation: Relation | None = None,
        shift: int = 0,
        positions: tuple[Tensor, Tensor] | None = None,
        name: str = "",
        periodic: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        vars(self).update(  # in one step: a loader makes a graph for each batch
            num_dst=num_dst,
            num_src=num_src,
            edge_attr=edge_attr,
            relation=relation,
            shift=shift,
            positions=positions,
            name=name,
            periodic=periodic,
            device=torch.device(device),
            _given_runs=runs,
            _labels=labels,
            _edges=edges,
            _edge_type=edge_type,
            _moved={},
            _moved_from=None,
            _memo=Values(),
            _of_users=Values(),
            edge_ids=None,
            degrees=None,
            order=None,
            node_ids=None,
            batch_sizes=None,
        )

    @classmethod
    def from_runs(cls: type[G], runs: Runs, *, relation: Relation | None = None, shift: int = 0) -> G:
        return cls(runs.num_dst, runs.num_src, runs=runs, relation=relation, shift=shift)

    @classmethod
    def from_labels(cls: type[G], labels: Ints, *, relation: Relation | None = None) -> G:
        """Disjoint cliques: i receives from j if `labels[i] == labels[j]`; labels are int64 [num_nodes]."""
        return cls(len(labels), len(labels), labels=labels, relation=relation)

    @classmethod
    def from_edges(cls: type[G], edge_index: Tensor, num_dst: int, num_src: int, **data: Any) -> G:
        """Explicit edges, int64 [2, E], validated. Order and repeated edges are preserved. `data`: edge_attr, edge_type
        and name."""
        return cls(num_dst, num_src, edges=edge_index, device=edge_index.device, **data)._accept()

    @property
    def is_explicit(self) -> bool:
        """Whether the graph is a list of edges in the caller's order, as opposed to a structured graph."""
        return self._edges is not None

    @graph_property
    def runs(self) -> Runs:
        """The edges as a set, in rows of runs; repeated edges count once."""
        if self._given_runs is not None:
            return self._given_runs
        if self._labels is not None:
            return Runs.from_labels(self._labels)
        src, dst = self.stored_edges.cpu().long().numpy()
        return Runs.from_edges(self.num_dst, self.num_src, dst, src)

    @property
    def edge_index(self) -> Tensor:
        """int64 [2, E]: row 0 holds the sources, row 1 the destinations.

        Explicit graphs keep the caller's order. Structured graphs are sorted by destination, then source. Each read
        returns a new tensor, which the caller may write to.
        """
        return _copy_of(self.ends)

    @graph_property
    def ends(self) -> Tensor:
        """`edge_index` without the copy, for the library's own code: kernels read this memory without checking it."""
        if self._edges is not None:
            return self._edges.long()
        capacity.require(
            self.num_edges * 32,  # the result, and as much again while it is written
            f"the edges of {self} do not fit into memory: int64 [2, E]",
            "runs, degrees, set algebra and structured kernels work without them",
        )
        dst, src = self.runs.edges()
        return torch.from_numpy(np.stack([src, dst])).to(self.device)

    @property
    def stored_edges(self) -> Tensor:
        """`ends`, int32 or int64 as an explicit graph stores it. Reading it makes nothing larger."""
        return self.ends if self._edges is None else self._edges

    @graph_property
    def csr(self) -> CSR:
        """Edges by destination."""
        if self._edges is None:
            ptr = torch.from_numpy(np.append(0, np.cumsum(self.runs.degree())))
            return CSR(ptr.to(self.device), self.ends[0], None)
        src, dst = self._edges.unbind()
        return sorted_by(dst, src, self.num_dst, self.num_src)

    @graph_property
    def csc(self) -> CSR:
        """Edges by source: the transposed graph. Its rows are sources and its columns are destinations."""
        src, dst = self.stored_edges.unbind()
        return sorted_by(src, dst, self.num_src, self.num_dst)

    @graph_property
    def parts(self) -> Parts | None:
        """The complete or causal parts that the graph falls into; None if it is another graph, as one of which the
        edges are repeated."""
        if self._labels is not None:
            return Parts.of_labels(self._labels)
        if self.num_dst != self.num_src or not self.runs.has_one_run_each:
            return None
        parts = Parts.of_rows(self.runs.start, self.runs.stop)
        return parts if parts is None or parts.num_edges == self.num_edges else None

    @graph_property
    def is_scattered(self) -> bool:
        """Whether the graph falls into complete parts whose nodes are not consecutive."""
        return self._labels is not None and self.parts is not None and self.parts.order is not None

    @graph_property
    def labels(self) -> Ints | None:
        """The clique of each node, [N], if a structured graph consists of disjoint cliques; otherwise None."""
        if self._labels is not None or self.is_explicit or self.parts is None or not self.parts.is_complete:
            return self._labels
        return self.parts.labels

    @graph_property
    def cliques(self) -> list[Tensor]:
        """The members of the disjoint cliques: one int64 tensor [number of cliques, size] per clique size."""
        if self.labels is None or self.parts is None:
            raise ValueError(f"{self} is not a graph of disjoint cliques")
        return [torch.from_numpy(members).to(self.device) for members in self.parts.members]

    @graph_property
    def num_edges(self) -> int:
        if self._edges is not None:
            return self._edges.shape[1]
        return self.runs.num_edges if self._labels is None else Parts.of_labels(self._labels).num_edges

    @property
    def edge_type(self) -> Tensor | None:
        """The type of each edge, int64 [E] in the order of `edge_index`; None if edges have no types.

        Each read returns a new tensor, which the caller may write to.
        """
        return None if self.types is None else _copy_of(self.types)

    @graph_property
    def types(self) -> Tensor | None:
        """`edge_type` without the copy, for the library's own code."""
        if self._edge_type is None and self.relation is not None:
            return self.relation.ids(*self.edge_positions())
        return self._edge_type

    def edge_positions(self) -> tuple[Tensor, Tensor]:
        """The positions of the destination and the source of each edge, int64 [E] each, in `edge_index` order."""
        src, dst = self.ends
        return (dst + self.shift, src) if self.positions is None else (self.positions[0][dst], self.positions[1][src])

    @property
    def edge_data(self) -> dict[str, Tensor | None]:
        """The data stored per edge, by argument name of `Graph`. Edge types computed by a rule are not included."""
        return {"edge_attr": self.edge_attr, "edge_type": self._edge_type}

    def dense(self) -> Tensor:
        """The adjacency as a bool matrix [num_dst, num_src] on the graph's device: O(N^2), for inspection and tests."""
        capacity.require(3 * self.num_dst * self.num_src, f"the matrix of {self}", "use a smaller graph")
        if self._edges is None:
            return torch.from_numpy(self.runs.dense()).to(self.device)
        matrix = torch.zeros(self.num_dst, self.num_src, dtype=torch.bool, device=self.device)
        matrix[self._edges[1], self._edges[0]] = True
        return matrix

    def degree(self) -> Tensor:
        """The in-degree of each destination, int64 [num_dst]. Repeated edges count each time."""
        if self._edges is not None:
            return torch.bincount(self._edges[1], minlength=self.num_dst)
        return torch.from_numpy(self.runs.degree()).to(self.device)

    def __setattr__(self, name: str, value: Any) -> None:
        if "is_shared" in self.__dict__:
            raise AttributeError(
                f"{self} is shared by all that bind it, so {name} cannot be set; change a copy, graph.alias(), or use "
                "with_positions or with_relation, which return one"
            )
        super().__setattr__(name, value)
        # Edges sorted by row take long, and depend on the edges alone.
        for derived in _OF_EDGES if name in _EDGES else ("types",):
            self.__dict__.pop(derived, None)

    def with_relation(self: G, relation: Relation | Tensor) -> G:
        """The same edges with edge types from a relation or an integer matrix [num_dst, num_src]."""
        relation = as_relation(relation)
        if isinstance(relation, Table):
            relation.check_fits(self.num_dst, self.num_src, self.shift)
        graph = self._copy()
        graph.relation = relation
        graph._edge_type = None
        return graph

    def with_positions(self: G, dst: Tensor, src: Tensor) -> G:
        """The same edges with these positions of destinations and sources, int64 [num_dst] and [num_src].

        Relative positions and edge type rules are computed from them.
        """
        dst, src = (torch.as_tensor(position, device=self.device) for position in (dst, src))
        for name, position, n in (("dst", dst, self.num_dst), ("src", src, self.num_src)):
            check_form(f"{name} must hold {n} integers", position, INTEGERS, (n,))
        graph = self._copy()
        # Copies, because what is derived from positions is kept.
        graph.positions = (dst.to(torch.int64, copy=True), src.to(torch.int64, copy=True))
        return graph

    def to(self: G, device: torch.device | str, non_blocking: bool = False) -> G:
        """The graph on a device. The copy is cached. `non_blocking`: copy asynchronously from pinned memory."""
        device = torch.device(device)
        if device == self.device:
            return self
        device = torch.empty(0, device=device).device  # with the number of the current one of its kind
        origin = None if self._moved_from is None else self._moved_from()
        first: G = self if origin is None else origin
        for graph in (self, first):
            if graph.device == device:
                return graph
        if device not in first._moved:
            graph = outside_modes(lambda: self._copy(lambda x: x.to(device, non_blocking=non_blocking), device))
            graph._moved_from = weakref.ref(first)
            first._moved.setdefault(device, graph)  # all threads receive the same copy
        return first._moved[device]

    def alias(self: G) -> G:
        """A graph of the same edges and data, which can have its own `exchange` and `node_ids`."""
        return self._copy(lambda x: x)

    def pin_memory(self: G) -> G:
        """The same graph with its edges and their data in pinned memory; `DataLoader(pin_memory=True)` calls this."""
        return self._copy(Tensor.pin_memory)

    def validate(self: G) -> G:
        """Validates explicit edges and returns the graph. Errors name the offending edge.

        Raises:
            TypeError: if edges are not integers.
            ValueError: if a shape is wrong, or attributes do not match the edges.
            IndexError: if an edge refers to a node that does not exist.
        """
        edge_lists.check(self._edges, self.num_dst, self.num_src, self.edge_data)
        return self

    def _accept(self: G) -> G:
        """Validates edges that somebody passed, and stores them."""
        self.validate()
        if (edges := self._edges) is not None:
            if edges.dtype != torch.int64:
                raise TypeError(
                    f"the edges of a Graph must be int64; got {edges.dtype}: graphs.from_edges converts them"
                )
            self._edges = outside_modes(lambda: edge_lists.narrow(edges, self.num_dst, self.num_src))
        return self

    def __repr__(self) -> str:
        size = f"{self.num_dst:,} nodes" if self.num_dst == self.num_src else f"{self.num_dst:,} x {self.num_src:,}"
        named = f"{self.name}: " if self.name else ""
        return f"Graph({named}{size}, {self.num_edges:,} edges)"

    def __getstate__(self) -> dict[str, Any]:
        """The state that defines the graph. Copies and unpickled graphs recompute cached values on their own device."""
        derived = self._edges is not None or self._labels is not None
        part = {} if self.exchange is LOCAL else {"exchange": self.exchange}
        fields = {
            **part,
            **{name: _compact(vars(self)[name]) for name in state.FIELDS},
            "num_dst": int(self.num_dst),
            "num_src": int(self.num_src),
            "_given_runs": None if derived else self.runs,
            "_labels": None if self._labels is None else torch.tensor(self._labels),
            "_edges": None if self._edges is None else self._edges.long(),
            "device": torch.empty(0, device=self.device),  # a tensor, which `torch.load(map_location=)` moves
        }
        state.check(fields, f"{self} cannot be copied or pickled")
        return fields

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Validates the graph: kernels do not check indices, and the pickle may be untrusted.

        Raises:
            ValueError, TypeError, IndexError: as in `validate`, or if a field is missing, unknown or does not fit.
        """
        state.check(fields, "a pickle holds a damaged graph; save the graph again")
        self.__dict__.update(
            fields, _memo=Values(), _of_users=Values(), _moved={}, _moved_from=None, device=fields["device"].device
        )
        self._labels = None if self._labels is None else fields["_labels"].cpu().numpy()
        self.order = None if self.order is None else self.order.cpu()
        self._accept()

    def _copy(self: G, convert: Callable[[Tensor], Tensor] = lambda x: x, device: torch.device | None = None) -> G:
        graph = type(self)(self.num_dst, self.num_src)
        own = vars(self)
        vars(graph).update({name: own[name] for name in _COPIED if name in own}, device=device or self.device)
        for name in ("_edges", "edge_attr", "_edge_type", "positions", "degrees", "node_ids"):
            x = own[name]
            vars(graph)[name] = tuple(map(convert, x)) if isinstance(x, tuple) else x if x is None else convert(x)
        return graph


_COPIED = "_given_runs", "_labels", "name", "relation", "shift", "order", "batch_sizes", "periodic", "runs", "exchange"
_EDGES = frozenset({"num_dst", "num_src", "device", "_edges", "_given_runs", "_labels"})
_OF_EDGES = tuple(name for name, value in vars(GraphData).items() if isinstance(value, graph_property))


def _copy_of(edges: Tensor) -> Tensor:
    return edges.clone() if torch.compiler.is_compiling() else outside_modes(edges.clone)


def _compact(value: Any) -> Any:
    """Copies tensors that are views of a larger storage or expanded: a pickle holds the storage as it is."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        value = value.contiguous()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    return tuple(map(_compact, value)) if isinstance(value, tuple) else value


def structured(graph: G, runs: Runs, **changes: Any) -> G:
    """A graph with these rows of runs. `changes` override arguments of `Graph`."""
    sizes = {"num_dst": runs.num_dst, "num_src": runs.num_src}
    return type(graph)(**{**_inherited(graph), **sizes, "runs": runs, **changes})


def selected(graph: G, which: Tensor, **changes: Any) -> G:
    """A graph with the edges `which` and their data; `which` indexes `edge_index`, int64 or bool."""
    data = {name: None if old is None else old[which] for name, old in graph.edge_data.items()}
    edges = {} if "edges" in changes else {"edges": graph.stored_edges[:, which]}
    return _explicit(graph, **{**edges, **data, **changes})


def renumbered(graph: G, edges: Tensor, **changes: Any) -> G:
    """A graph with the same edge data and renumbered edges, int32 or int64 [2, E]."""
    return _explicit(graph, **{**graph.edge_data, "edges": edges, **changes})


def extended(graph: G, new_edges: Tensor, **new_data: Any) -> G:
    """A graph with new edges, int64 [2, E'], and their data appended to its edges."""
    if new_edges.shape[1] == 0:
        return graph
    old_data = graph.edge_data
    if old_data["edge_type"] is not None and new_data.get("edge_type") is None:
        raise ValueError(
            f"the {new_edges.shape[1]} new edges would have no edge_type; add them with their edge types through "
            "graphs.from_edges"
        )
    data: Any = {name: None if old is None else torch.cat([old, new_data[name]]) for name, old in old_data.items()}
    return _explicit(graph, edges=torch.cat([graph.stored_edges, new_edges], 1), **data)


def _explicit(graph: G, **changes: Any) -> G:
    arguments = {**_inherited(graph), **changes}
    edges = edge_lists.narrow(arguments.pop("edges"), arguments["num_dst"], arguments["num_src"])
    return type(graph)(**arguments, edges=edges)


def _inherited(graph: GraphData) -> dict[str, Any]:
    return {
        name: getattr(graph, name)
        for name in ("num_dst", "num_src", "relation", "shift", "positions", "periodic", "device")
    }
