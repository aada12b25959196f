"""LightGCN: sums over in-neighbors, weighted by degrees, without maps or activations."""

from torch import Tensor

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import EdgeWeight
from mpnn.attention.degree import degree_weights
from mpnn.graph.arguments import at_least
from mpnn.models.layers.stack import Graphs, hop, over_each
from mpnn.models.saving import Model
from mpnn.round import Round


class LightGCN(Model):
    """Light graph convolution for recommendation (He et al. 2020, eq. 3 to 8).

        e_i^(k+1) = sum_j e_j^(k) / sqrt(d_i d_j),   e_i = mean_k e_i^(k)   of k = 0 to `layers`

    e^(0) are the vectors of users and items, or of any nodes. The graph has each link in both directions.

    - topology: the known links
    - attention: weights by degree, as GCN's
    - aggregate: sum
    - update: none

    Args:
        layers: the number of hops.
        graph: topology or graph of every hop; None if each call passes one.

    Raises:
        ValueError: the graph has edge_attr, which LightGCN does not read.
    """

    def __init__(self, layers: int = 3, graph: Topology | Graph | None = None) -> None:
        super().__init__()
        self.layers = at_least("layers", layers, 1)
        self.hop = MessagePassing(graph, "sum", None, _ByDegree())

    def forward(self, x: Tensor, graph: Graphs | None = None) -> Tensor:
        """Maps x [..., N, d] to [..., N, d]. graph: as of `mpnn.models.GCN`."""
        total = x
        for layer, own in over_each([self.hop] * self.layers, graph):
            x = hop(layer, x, own)
            total = total[..., : x.shape[-2], :] + x
        return total / (self.layers + 1)


class _ByDegree(EdgeWeight):
    """The weights of `mpnn.attention.Degree`, without its map."""

    depends_on = "row"

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        if edge_attr is not None:
            raise ValueError(
                f"LightGCN weights links by degree only, but got edge_attr {list(edge_attr.shape)}; pass a graph "
                "without edge_attr, or use GCN, which reads one weight per edge"
            )
        weight = graph.cached(("degree weights", src.dtype), lambda: degree_weights(graph, dtype=src.dtype))
        return super().forward(dst, src, graph, weight)
