"""SchNet: filters that are continuous functions of the distance between atoms."""

from torch import Tensor, nn

from mpnn import Graph, MessagePassing
from mpnn.attention import EdgeFilter
from mpnn.models.layers.molecules import RadialBasis, RadialFilter, ShiftedSoftplus, of_types, sum_of, vectors_of
from mpnn.models.saving import Model
from mpnn.update import Add
from mpnn.update.maps import Linear


class SchNet(Model):
    """SchNet (Schütt et al. 2017, arXiv:1706.08566, section 4). The energy of a molecule does not change if it is
    rotated or moved, and its derivatives, the forces, train: every sum over edges differentiates twice.

        h_i <- h_i + V ssp( U sum_j (W h_j) * f(|p_j - p_i|) + b )

    - topology: atoms within the cutoff, `graphs.radius(positions, cutoff)`
    - attention: none; a weight for each edge and feature, f: an MLP of Gaussians of the distance, times a cutoff
    - aggregate: sum
    - update: residual, after two maps with a shifted softplus

    Args:
        dim: width of the states. filters: width of the messages. layers: number of rounds.
        gaussians: number of Gaussians. cutoff: the distance from which on atoms do not interact.
        types: number of types of atoms. out_dim: width of the result, 1 for an energy.
    """

    def __init__(
        self,
        dim: int = 128,
        filters: int = 128,
        layers: int = 6,
        gaussians: int = 50,
        cutoff: float = 10.0,
        types: int = 100,
        out_dim: int = 1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(types, dim)
        self.basis = RadialBasis(cutoff, gaussians)
        self.layers = nn.ModuleList(_layer(dim, filters, gaussians) for _ in range(layers))
        self.head = nn.Sequential(Linear(dim, dim // 2), ShiftedSoftplus(), Linear(dim // 2, out_dim))

    def forward(
        self, types: Tensor, positions: Tensor, graph: Graph, pool: Graph | None = None, cell: Tensor | None = None
    ) -> Tensor:
        """Maps types int64 [N], positions [N, 3] to [N, out_dim], or [G, out_dim] with `pool` (see `molecules.sum_of`).
        `cell` [3, 3] is that of a periodic graph of `graphs.radius`, [G, 3, 3] those of the graphs of a batch."""
        h = of_types(self.embed, types)
        basis = self.basis(vectors_of(graph, positions, cell, pool).norm(dim=-1))
        for layer in self.layers:
            h = layer(h, graph, edge_attr=basis)
        return sum_of(self.head(h), pool)


def _layer(dim: int, filters: int, gaussians: int) -> MessagePassing:
    network = nn.Sequential(Linear(gaussians, filters), ShiftedSoftplus(), Linear(filters, filters))
    out = nn.Sequential(Linear(filters, dim), ShiftedSoftplus(), Linear(dim, dim))
    return MessagePassing(None, "sum", Add(), EdgeFilter(RadialFilter(network), Linear(dim, filters, bias=False), out))
