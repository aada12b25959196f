"""Whole graphs: a network of nodes, and a readout of their states."""

import torch
from torch import Tensor, nn

from mpnn import Graph, Topology
from mpnn.aggregate import Name as Aggregate
from mpnn.models.layers.readout import pooled
from mpnn.models.saving import Model
from mpnn.update.maps import Linear


class GraphPredictor(Model):
    """A network of nodes and a readout of each graph (the functions M and R of Gilmer et al. 2017, section 2).

        h = encoder(x, graph),   r_G = reduce of h_i over the nodes i of G,   y_G = W_2 relu( W_1 r_G + b_1 ) + b_2

    Args:
        encoder: any graph network of this library that maps [N, in_dim] to [N, dim].
        dim: width of h.
        outputs: width of the result.
        readout: "mean", "sum", "max" or the name of another aggregator. The sum suits numbers that grow with a graph.
    """

    def __init__(self, encoder: Model, dim: int, outputs: int, readout: Aggregate = "mean") -> None:
        super().__init__()
        self.encoder = encoder
        self.readout = readout
        self.head = nn.Sequential(Linear(dim, dim), nn.ReLU(), Linear(dim, outputs))

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, pool: Graph | None = None) -> Tensor:
        """Maps x [N, in_dim] to [G, outputs]. In `pool`, each of G destinations receives from the nodes of one graph.
        Without it, all nodes are those of one graph, and G is 1."""
        h = self.encoder(x, graph)
        if pool is None:
            nodes = torch.arange(len(h), device=h.device)
            pool = Graph.from_edges(torch.stack([nodes, torch.zeros_like(nodes)]), 1, len(h))
        return self.head(pooled(pool, h, self.readout))
