"""GGNN: a node is a memory cell, and what its neighbours say is the cell's input, round after round."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from mpnn import check
from mpnn.attention import Typed
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.readout import GatedReadout
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import GRU


class GGNN(Model):
    """Gated graph network (Li et al. 2016, eq. 1-7): the same layer in every round.

        h_i = [x_i || 0],   h_i <- GRU( input = b + sum_j A_type(ij) h_j,  hidden = h_i ),   logits = readout(h, x)

    Edges have classes where there are several `relations`; in the paper each edge also stands there the other way
    round, with a class of its own.

    Args:
        in_dim: width of the features, at most `dim`. classes: width of the logits. dim: of the cells.
        rounds: of message passing. relations: classes of edges.
        graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        dim: int = 64,
        rounds: int = 5,
        relations: int = 1,
        *,
        graph: Topology | Graph | None = None,
    ) -> None:
        super().__init__()
        if in_dim > dim:
            raise ValueError(f"cells of width {dim} cannot begin with {in_dim} features; dim must be at least in_dim")
        self.in_dim, self.dim, self.rounds = in_dim, dim, rounds
        self.layer = MessagePassing(graph, "sum", GRU(dim), Typed(dim, dim, relations))
        self.readout = GatedReadout(dim, in_dim, classes)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, pool: Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> logits [..., N, classes]; or [..., G, classes] with `pool`, see `GatedReadout`."""
        check.tensor("x", x)
        check.fits("GGNN", "x", x, (self.in_dim, None))
        h = F.pad(x, (0, self.dim - x.shape[-1]))
        for _ in range(self.rounds):
            h = self.layer(h, graph)
        return self.readout(h, x, pool)
