"""Parts of a graph: subsets of its destinations, sources or nodes. Positions are preserved."""

import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpnn.graph.arguments import check_form, one_set
from mpnn.graph.csr import inverse
from mpnn.graph.data import G, GraphData, renumbered, selected, structured
from mpnn.graph.runs import Runs


class Subgraphs(GraphData):
    """The methods of a graph that return some of its destinations, sources or nodes."""

    def rows(self: G, start: int, stop: int) -> G:
        """The graph of destinations `start` to `stop` over the same sources. Positions are preserved.

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
        """The graph over the sources `sources` only, int64 [n], ascending and distinct, and all destinations.

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
        """The sources that have at least one edge, int64 ascending, and the graph over only these sources.

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
        """The nodes that are True in `keep`, bool [num_nodes], renumbered, and the edges between them.

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
