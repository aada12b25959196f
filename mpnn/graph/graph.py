"""Graph: the edges between a fixed number of sources and destinations, and the graphs that follow from it: by set
algebra, of some of its nodes, and with other edges between them."""

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import reachability
from mpnn.graph.arguments import at_least, check_form, one_set
from mpnn.graph.bound import BoundGraph
from mpnn.graph.csr import inverse
from mpnn.graph.data import G, GraphData, extended, renumbered, selected, structured
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.relations import Offset, Relation, flipped
from mpnn.graph.runs import Ints, Runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Graph(GraphData):
    """Destinations, sources and the edges between them.

    Created by `Topology.bind` and the builders in `mpnn.graphs`.

    `relation` is the rule that gives each edge its type; `edge_type` holds the types. `shift` is the offset of
    destinations among sources: destination i is source i + shift. It only affects relative positions. `positions`,
    int64 [num_dst] and [num_src], are the sequence positions of the nodes if they differ from the node numbers.
    `degrees`, [num_dst] and [num_src], are those in the larger graph that this one was sampled from, or the sums of the
    weights of incoming edges there. `batch_sizes` are the numbers of nodes of the graphs that `graphs.batch` joined.
    `periodic` says that `edge_attr` holds the lattice shifts of a graph that was built in a cell (`graphs.radius`).

    A part of a larger graph that one process computes (`mpnn.distributed`) has two more attributes. `exchange` maps
    the features of the process's own nodes to those of all sources. `node_ids`, int32 [num_dst] and [num_src], are the
    numbers of the nodes in the larger graph: dropout hashes them, so that all parts drop the edges that the whole does.
    """

    # -------------------------------------------------------------------- other edges between the same nodes, as sets

    def __or__(self: G, other: G) -> G:
        """The union of both edge sets, as rows of runs. Neither graph may have edge attributes or types as data.

        One rule holds for `|`, `&` and `-`: an edge of the result has all that it has in the operands, or they are
        refused. Only explicit edges have data, so one operand of `&` may have them, and both of `-`, whose edges are
        those of the left one. A relation, a shift or positions that one operand has are those of the result. Of two
        relations that differ it has none: `with_relation` sets one for all edges.

        Raises:
            ValueError: if edges would lose their data, if the operands differ in a shift or positions that both have,
                if they are on two devices, or if their sizes differ.
        """
        if not isinstance(other, GraphData):
            return NotImplemented
        refuse_loss("|", self, other)
        return structured(self, _merged(self, other, operator.or_), **common("|", self, other))

    def __and__(self: G, other: G) -> G:
        """The edges in both graphs. Keeps order, repeated edges and data of the graph with edge data, or of the
        explicit one, or of this one. Raises as `|`."""
        if not isinstance(other, GraphData):
            return NotImplemented
        one = self
        two = other
        if _has_data(two) or (two.is_explicit and not one.is_explicit):
            one, two = two, one
        refuse_loss("&", two)
        runs = _merged(one, two, operator.and_)
        alike = common("&", one, two)
        if one.is_explicit:
            return _edges_in(one, runs, alike)
        labels = None
        # Parts of consecutive nodes are seen in the runs.
        if (one.is_scattered or two.is_scattered) and one.labels is not None and two.labels is not None:
            labels = np.unique(np.stack([one.labels, two.labels]), axis=1, return_inverse=True)[1].reshape(-1)
        return structured(one, runs, labels=labels, **alike)

    def __sub__(self: G, other: G) -> G:
        """The edges in this graph only. An explicit graph keeps its order, repeated edges and data. Raises as `|`."""
        if not isinstance(other, GraphData):
            return NotImplemented
        runs = _merged(self, other, operator.sub)
        alike = common("-", self, other) | {"relation": self.relation}
        return _edges_in(self, runs, alike) if self.is_explicit else structured(self, runs, **alike)

    def __invert__(self: G) -> G:
        """The complement: all pairs that are not edges."""
        return structured(self, self.runs.complement())

    # --------------------------------------------------------------------- some of the destinations, sources or nodes

    def rows(self: G, start: int, stop: int) -> G:
        """Returns the graph of destinations `start` to `stop` over the same sources. Positions are preserved.

        The cost depends on these rows, not on the size of the graph.
        """
        for name, bound in (("start", start), ("stop", stop)):
            if not hasattr(bound, "__index__") or getattr(bound, "dtype", None) in (torch.float32, torch.float64):
                raise TypeError(f"{name} must be an integer; got {bound!r}")
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= self.num_dst:
            raise ValueError(f"rows {start} to {stop} are not among the {self.num_dst} destinations of {self}")
        shift = self.shift + start
        positions = None if self.positions is None else (self.positions[0][start:stop], self.positions[1])
        if not self.is_explicit:
            return structured(self, self.runs.take(np.arange(start, stop)), shift=shift, positions=positions)
        first, last = (int(self.csr.ptr[i]) for i in (start, stop))
        edge_id = self.csr.edge_id
        which = torch.arange(first, last, device=self.device) if edge_id is None else edge_id[first:last].sort().values
        src, dst = self.stored_edges[:, which]
        return selected(
            self, which, edges=torch.stack([src, dst - start]), num_dst=stop - start, shift=shift, positions=positions
        )

    def columns(self: G, sources: Tensor) -> G:
        """Returns the graph over the sources `sources` only, int64 [n], ascending and distinct, and all destinations.

        Positions are preserved. Attention over several sets of sources is merged by `mpnn.ops.merge`.

        Raises:
            ValueError: if the sources are not ascending, or not among those of the graph.
        """
        sources = torch.as_tensor(sources, device=self.device)
        check_form("sources must be int64 [n]", sources, "int64", (None,))
        if len(sources) and (bool((sources.diff() <= 0).any()) or sources[0] < 0 or sources[-1] >= self.num_src):
            raise ValueError(f"sources must ascend, each once, from 0 to {self.num_src - 1} at most")
        first, last = (int(sources[0]), int(sources[-1])) if len(sources) else (0, -1)
        changes: dict[str, Any] = {"num_src": len(sources), "shift": self.shift - first}
        if self.positions is not None or last - first + 1 != len(sources):
            dst, src = self.node_positions()
            changes |= {"shift": 0, "positions": (dst, src[sources])}
        if not self.is_explicit:
            return structured(self, self.runs.columns(sources.cpu().numpy()), **changes)
        return _with_ends(self, 0, sources, self.num_src, changes)

    def compact(self: G, keep: Tensor | None = None) -> tuple[Tensor, G]:
        """Returns the sources that have at least one edge, int64 ascending, and the graph over only these sources.

        Positions are preserved. The sources `keep`, int64, stay even without an edge.
        """
        if self.is_explicit:
            src, dst = self.stored_edges
            index, place = torch.unique(src if keep is None else torch.cat([src, keep]), return_inverse=True)
            index = index.long()
            narrower = renumbered(self, torch.stack([place[: len(src)], dst]), num_src=len(index))
        else:
            runs = self.runs.sources()
            if keep is not None:
                nodes = keep.cpu().numpy()
                runs = runs | Runs.from_edges(1, self.num_src, np.zeros_like(nodes), nodes)
            index = torch.from_numpy(runs.edges()[1]).to(self.device)
            narrower = structured(self, self.runs.over_sources(runs), num_src=len(index))
        if self.positions is None:  # not `node_positions`, whose size is `num_src`, which may be much larger
            narrower.positions = torch.arange(self.num_dst, device=self.device) + self.shift, index
        else:
            narrower.positions = self.positions[0], self.positions[1][index]
        return index, narrower

    def subgraph(self: G, keep: Tensor) -> G:
        """Returns the nodes that are True in `keep`, bool [num_nodes], renumbered, and the edges between them.

        Positions are preserved.
        """
        one_set("a part of the nodes", self)
        try:
            keep = torch.as_tensor(keep, device=self.device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"keep must be a bool tensor [{self.num_dst}]; got {type(keep).__name__}") from None
        check_form(f"keep must be bool [{self.num_dst}]", keep, "bool", (self.num_dst,))
        if keep.all():
            return self
        dst, src = self.node_positions()
        positions = dst[keep], src[keep]
        if not self.is_explicit:
            nodes = keep.nonzero().squeeze(1).cpu().numpy()
            return structured(self, self.runs.take(nodes).columns(nodes), shift=0, positions=positions)
        which = keep[self.stored_edges].all(0).nonzero().squeeze(1)
        edges = (keep.cumsum(0) - 1)[self.stored_edges[:, which]]
        num_nodes = int(keep.sum())
        return selected(self, which, edges=edges, num_dst=num_nodes, num_src=num_nodes, shift=0, positions=positions)

    # ------------------------------------------------------------------- reversed, added and dropped edges, and walks

    def reverse(self: G) -> G:
        """Reverses every edge. Edges keep their attributes and types; shifts of a periodic graph change their sign."""
        relation = None if self.relation is None else flipped(self.relation)
        positions = self.positions
        by_distance = relation is None or any(type(one) is Offset for one in (relation, self.relation))
        if positions is None and self.shift and not by_distance:
            positions = self.node_positions()  # a shift determines relative positions only
        changes: dict[str, Any] = {
            "num_dst": self.num_src,
            "num_src": self.num_dst,
            "relation": relation,
            "shift": -self.shift if positions is None else 0,
            "positions": positions and positions[::-1],
        }
        if self.is_explicit:
            return renumbered(self, self.stored_edges.flip(0), **changes, **_of_the_way_back(self))
        if self.labels is not None:
            return structured(self, self.runs, labels=self._labels, **changes)
        return structured(self, self.runs.transpose(), **changes)

    def power(self: G, k: int) -> G:
        """i receives from j if a walk of exactly `k` edges leads from j to i (with self-loops: at most k)."""
        one_set("power", self)
        if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1:
            raise ValueError(f"power needs an integer k >= 1; got {k!r}")
        return self if self.labels is not None else structured(self, reachability.power(self.runs, k))

    def with_self_loops(self: G, fill: float = 0.0) -> G:
        """Adds the missing self-loops. New loops come last, with edge attributes of `fill`."""
        if self.num_dst != self.num_src:
            raise ValueError(
                f"self-loops need one set of nodes; the graph is {self.num_dst} x {self.num_src}: its sources are "
                "other nodes than its destinations. Leave self-loops out, and take a model with a term of the node "
                "itself, such as GraphSAGE"
            )
        if not hasattr(fill, "__float__"):
            raise TypeError(f"fill must be a number, the edge attribute of new loops; got {fill!r}")
        if self.labels is not None:
            return self
        if not self.is_explicit:
            i = np.arange(self.num_dst)
            return structured(self, self.runs | Runs.from_edges(self.num_dst, self.num_src, i, i))
        src, dst = self.ends
        missing = torch.ones(self.num_dst, dtype=torch.bool, device=self.device)
        missing[dst[src == dst]] = False
        loops = missing.nonzero().squeeze(1)
        attr = self.edge_attr
        new = None if attr is None else attr.new_full((len(loops), *attr.shape[1:]), fill)
        if new is not None and (new != fill).any() and fill == fill:  # NaN never equals itself
            raise ValueError(f"loops cannot have attributes of {fill} where edge_attr holds {new.dtype}")
        return extended(self, torch.stack([loops, loops]), edge_attr=new)

    def undirected(self: G) -> G:
        """Adds the missing reverse edges. They come last and copy the attributes of the original edge; shifts of a
        periodic graph change their sign."""
        one_set("undirected", self)
        if self.labels is not None:
            return self
        if not self.is_explicit:
            return structured(self, self.runs | self.runs.transpose())
        src, dst = self.ends
        is_one_way = ~torch.isin(src * self.num_dst + dst, dst * self.num_dst + src)
        one_way = selected(self, is_one_way.nonzero().squeeze(1))
        return extended(self, one_way.ends.flip(0), **{**one_way.edge_data, **_of_the_way_back(one_way)})

    def drop_edges(self: G, p: float, generator: torch.Generator | None = None) -> G:
        """Drops each edge with probability p (DropEdge, Rong et al. 2020). The other edges keep order and attributes.

        `edge_ids` of the result, int64, holds their indices in this graph. Samples are drawn on the CPU from
        `generator`, or from torch's default generator.
        """
        if isinstance(p, bool) or not hasattr(p, "__float__"):
            raise TypeError(f"p must be a number from 0 to 1; got {p!r}")
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"p must lie between 0 and 1; got {p}")
        _ = self.stored_edges  # raises MemoryError first if the edges do not fit into memory
        return keep_edges(self, torch.rand(self.num_edges, generator=generator) >= p)

    def reordered(self: G, method: str = "rcm") -> G:
        """Returns the same graph with an order in which kernels process its rows: common sources are adjacent.

        Nodes, edges and results keep the caller's order. This speeds up CPU aggregation on large meshes and road maps
        with randomly numbered nodes: on a road-like grid of 202,500 nodes with 2.8 edges each, a plain sum takes 0.78
        of its time at width 128 (one core of a Zen 3 EPYC). The order is computed once, here, and stored in `order`,
        int64 [N].

        Args:
            method: "rcm" (reverse Cuthill-McKee: neighbors close together) or "degree" (highest in-degree first).

        Raises:
            ValueError: if the method is unknown.
        """
        one_set("reordered", self)
        if method not in ("rcm", "degree"):
            raise ValueError(f"unknown order {method!r}; expected one of rcm, degree")
        src, dst = self.stored_edges.cpu().long().numpy()
        graph = self._copy()
        if method == "degree":
            order = np.argsort(-np.bincount(dst, minlength=self.num_dst), kind="stable")
        else:
            order = _reverse_cuthill_mckee(src, dst, self.num_dst)
        graph.order = torch.from_numpy(order)
        return graph

    # ------------------------------------------------------------------------------ what messages reach, and pictures

    def reach(self, layers: int) -> float:
        """Returns the fraction of (destination, source) pairs that `layers` rounds of message passing connect.

        1.0 means that every node has received from every node. Each node reaches itself in zero rounds, so `reach(1)`
        counts the diagonal even if the graph has no self-loops. Above 1,024 nodes, the result is an estimate from 256
        evenly spaced sources.
        """
        one_set("reach", self)
        return reachability.fraction(self.runs, at_least("layers", layers, 0))

    def diameter(self) -> int | None:
        """Returns the number of layers after which every node has received from every other; None if this never
        happens.

        Of a graph without edges from later nodes, such as `causal()`: from every earlier node.
        Above 1,024 nodes, estimated from a sample of sources, like `reach`.
        """
        one_set("diameter", self)
        return reachability.diameter(self.runs)

    def components(self) -> Tensor:
        """Returns the component of each source, int64 [num_src], numbered from 0.

        Two sources are in the same component if a destination receives from both, or if a chain of such pairs connects
        them.
        """
        return torch.from_numpy(reachability.components(self.runs)).to(self.device)

    def plot(self, ax: "Axes | None" = None, **options: Any) -> "Axes":
        """Plots the adjacency matrix, destinations as rows and sources as columns; see `mpnn.view.plot.adjacency`."""
        axes: Axes = FUNCTIONS["plot"](self, ax=ax, **options)
        return axes

    def _repr_html_(self) -> str:
        text: str = FUNCTIONS["html"](self)
        return text


def _merged(one: GraphData, other: GraphData, merge: Callable[[Runs, Runs], Runs]) -> Runs:
    if one.device != other.device:
        raise ValueError(f"the graphs are on {one.device} and {other.device}; move one with .to(device)")
    return merge(one.runs, other.runs)


def _edges_in(graph: G, runs: Runs, alike: dict[str, Any]) -> G:
    """The explicit edges that are also in `runs`, with their data."""
    src, dst = graph.stored_edges.cpu().long().numpy()
    return selected(graph, torch.from_numpy(runs.contains(dst, src)).to(graph.device), **alike)


def _has_data(graph: GraphData) -> bool:
    return any(data is not None for data in graph.edge_data.values())


def refuse_loss(symbol: str, *graphs: GraphData) -> None:
    """Raises ValueError if one of these operands has edge data: the result keeps its edges, but not their data."""
    for graph in filter(_has_data, graphs):
        raise ValueError(
            f"`{symbol}` would lose the edge data of {graph}; no operand of a | b and one of a & b can have edge "
            "attributes or types as data. Pass the edges alone, or join edges and data, with "
            "graphs.from_edges"
        )


def common(symbol: str, one: BoundGraph, other: BoundGraph) -> dict[str, Any]:
    """The relation, shift and positions of the result: what one operand has and the other has not, or both alike."""
    at = one.positions, other.positions
    alike = {
        "shift": 0 in (one.shift, other.shift) or one.shift == other.shift,
        "positions": at[0] is None or at[1] is None or all(map(torch.equal, at[0], at[1])),
    }
    for name, agrees in alike.items():
        if not agrees:
            raise ValueError(f"the operands of `{symbol}` differ in their {name}: {one} and {other}; use one for both")
    return {"relation": _relation(symbol, one, other), **{x: getattr(one, x) or getattr(other, x) for x in alike}}


def _relation(symbol: str, one: BoundGraph, other: BoundGraph) -> Relation | None:
    """None for two rules that differ: then code that needs types asks for them, instead of getting those of one
    rule."""
    if symbol == "-" or (isinstance(one, GraphData) and one._edge_type is not None):
        return one.relation
    rules = [rule for rule in (one.relation, other.relation) if rule is not None]
    return rules[0] if rules and rules[0] == rules[-1] else None


def take(graph: G, nodes: Tensor) -> G:
    """The graph of the destinations `nodes`, int64 ascending and distinct, over the same sources."""
    dst, src = graph.node_positions()
    changes: dict[str, Any] = {"num_dst": len(nodes), "shift": 0, "positions": (dst[nodes], src)}
    if not graph.is_explicit:
        return structured(graph, graph.runs.take(nodes.cpu().numpy()), **changes)
    return _with_ends(graph, 1, nodes, graph.num_dst, changes)


def _with_ends(graph: G, end: int, nodes: Tensor, num_nodes: int, changes: dict[str, Any]) -> G:
    """The explicit edges whose source (`end` 0) or destination (1) is among `nodes`, which are renumbered."""
    place = torch.full((num_nodes,), -1, device=graph.device)
    place[nodes] = torch.arange(len(nodes), device=graph.device)
    which = (place[graph.stored_edges[end]] >= 0).nonzero().squeeze(1)
    edges = graph.stored_edges[:, which]
    edges[end] = place[edges[end]]
    return selected(graph, which, edges=edges, **changes)


def without_rows(graph: G, rows: Tensor) -> G:
    """The graph without the edges of the destinations `rows`, bool [num_dst]."""
    if graph.is_explicit:
        return selected(graph, ~rows.to(graph.device)[graph.ends[1]])
    runs = graph.runs
    dropped = rows.cpu().numpy()
    keep = ~dropped[runs.row]
    return structured(
        graph, Runs.of(graph.num_dst, graph.num_src, [(runs.row[keep], runs.start[keep], runs.stop[keep])])
    )


def with_sources(graph: G, order: Tensor) -> G:
    """An explicit graph whose source k is source `order[k]` of this one, int64 [num_src], a permutation."""
    src, dst = graph.stored_edges
    at = graph.positions and (graph.positions[0], graph.positions[1][order])
    return renumbered(graph, torch.stack([inverse(order)[src], dst]), positions=at)


def _of_the_way_back(graph: GraphData) -> dict[str, Tensor]:
    """The shifts of the reverse edges of a periodic graph; nothing of other graphs, whose attributes stay."""
    return {"edge_attr": -graph.edge_attr} if graph.periodic and graph.edge_attr is not None else {}


def keep_edges(graph: G, keep: Tensor) -> G:
    """The edges where `keep`, bool [E], is True; `edge_ids` of the result holds their indices in `graph`."""
    edge_ids = keep.nonzero().squeeze(1).to(graph.device)
    subset = selected(graph, edge_ids)
    subset.edge_ids = edge_ids
    subset.exchange = graph.exchange
    subset.node_ids = graph.node_ids
    return subset


def _reverse_cuthill_mckee(src: Ints, dst: Ints, num_nodes: int) -> Ints:
    if num_nodes == 0:
        return np.empty(0, np.int64)
    from scipy import sparse
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([src, dst]), np.concatenate([dst, src])
    both_ways = sparse.csr_matrix((np.ones(len(ends[0]), bool), ends), shape=(num_nodes, num_nodes))
    return reverse_cuthill_mckee(both_ways, symmetric_mode=True).astype(np.int64)
