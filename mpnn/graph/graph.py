"""Graph: the edges between a fixed number of sources and destinations, and the graphs that follow from it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpnn.graph import reachability
from mpnn.graph.algebra import Algebra
from mpnn.graph.arguments import at_least, one_set
from mpnn.graph.registry import FUNCTIONS
from mpnn.graph.subgraphs import Subgraphs
from mpnn.graph.transforms import Transforms

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class Graph(Algebra, Subgraphs, Transforms):
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
