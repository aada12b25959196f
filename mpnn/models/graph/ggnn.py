"""GGNN: each node is a GRU cell whose input is the sum of its messages."""

from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Typed
from mpnn.models.layers.readout import GatedReadout
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import GRU


class GGNN(Model):
    """Gated graph neural network (Li et al. 2016, eq. 1-7). All rounds share one layer.

        h_i = [x_i || 0],   h_i <- GRU( input = b + sum_j A_type(ij) h_j,  hidden = h_i ),   logits = readout(h, x)

    With several `relations` the graph needs edge types. In the paper the graph also contains the reverse of each edge,
    with an edge type of its own.

    Args:
        in_dim: width of the input features, at most `dim`.
        classes: number of classes, the width of the logits.
        dim: width of the node states.
        rounds: number of message passing rounds.
        relations: number of edge types.
        graph: topology or graph of every layer; None if each call passes one.
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
            raise ValueError(f"dim must be at least in_dim; got dim = {dim} and in_dim = {in_dim}")
        self.in_dim = in_dim
        self.dim = dim
        self.rounds = rounds
        self.layer = MessagePassing(graph, "sum", GRU(dim), Typed(dim, dim, relations))
        self.readout = GatedReadout(dim, in_dim, classes)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None, pool: Graph | None = None) -> Tensor:
        """Maps x [..., N, in_dim] to logits [..., N, classes], or [..., G, classes] with `pool` (see
        `GatedReadout`)."""
        validation.input_features("x", x)
        validation.fits("GGNN", "x", x, (self.in_dim, None))
        h = F.pad(x, (0, self.dim - x.shape[-1]))
        for _ in range(self.rounds):
            h = self.layer(h, graph)
        return self.readout(h, x, pool)
