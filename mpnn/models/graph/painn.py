"""PaiNN: states of atoms that are numbers, and vectors that rotate with the molecule."""

import torch
from torch import Tensor, nn

from mpnn import Graph, ops
from mpnn.models.layers.molecules import RadialBasis, RadialFilter, of_types, sum_of, vectors_of
from mpnn.models.saving import Model
from mpnn.update import MLP
from mpnn.update.maps import Linear


class PaiNN(Model):
    """Polarizable atom interaction network (Schütt et al. 2021, arXiv:2102.03150, eq. 7 to 9), with the Gaussians of
    SchNet.

        s_i <- s_i + sum_j a_j * A_ij          v_i <- v_i + sum_j (v_j * b_j) * B_ij + sum_j c_j * C_ij u_ij
        s_i <- s_i + f_ss + f_sv <U v_i, V v_i>          v_i <- v_i + f_vv * U v_i

    [a || b || c] is an MLP of s_j, [A || B || C] a filter of the distance, u_ij the unit vector from i to j, and f an
    MLP of [s_i || |V v_i|].

    - topology: atoms within the cutoff, `graphs.radius(positions, cutoff)`
    - attention: none; weights for each edge and feature
    - aggregate: sum
    - update: gates between numbers and vectors

    Args:
        dim: width of numbers and of vectors. layers: number of rounds.
        gaussians, cutoff, types, out_dim: as of `SchNet`.
    """

    def __init__(
        self,
        dim: int = 128,
        layers: int = 3,
        gaussians: int = 20,
        cutoff: float = 5.0,
        types: int = 100,
        out_dim: int = 1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(types, dim)
        self.basis = RadialBasis(cutoff, gaussians)
        self.layers = nn.ModuleList(PaiNNLayer(dim, gaussians) for _ in range(layers))
        self.head = MLP(dim, out_dim, dim // 2, nn.SiLU)

    def forward(
        self, types: Tensor, positions: Tensor, graph: Graph, pool: Graph | None = None, cell: Tensor | None = None
    ) -> Tensor:
        """Maps types int64 [N], positions [N, 3] to [N, out_dim], or [G, out_dim] with `pool` (see `molecules.sum_of`).
        `cell` [3, 3] is that of a periodic graph of `graphs.radius`, [G, 3, 3] those of the graphs of a batch."""
        vectors = vectors_of(graph, positions, cell, pool)
        distance = vectors.norm(dim=-1)
        unit = vectors / distance.clamp(min=1e-9)[:, None]
        basis = self.basis(distance)
        s = of_types(self.embed, types)
        v = s.new_zeros(3, *s.shape)
        for layer in self.layers:
            s, v = layer(s, v, unit, basis, graph)
        return sum_of(self.head(s), pool)


class PaiNNLayer(nn.Module):
    """A round of messages and a round of gates within each atom. Vectors are [3, N, dim]."""

    def __init__(self, dim: int, gaussians: int) -> None:
        super().__init__()
        self.of_source = MLP(dim, 3 * dim, dim, nn.SiLU)
        self.filter = RadialFilter(Linear(gaussians, 3 * dim))
        self.mix = Linear(dim, 2 * dim, bias=False)
        self.gates = MLP(2 * dim, 3 * dim, dim, nn.SiLU)

    def forward(self, s: Tensor, v: Tensor, unit: Tensor, basis: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """s [N, dim], v [3, N, dim], unit [E, 3], basis [E, gaussians + 1] -> s and v, updated."""
        a, b, c = self.of_source(s).chunk(3, -1)
        to_s, along_v, along_unit = (weight.contiguous() for weight in self.filter(basis).chunk(3, -1))
        axes = [ops.aggregate(graph, c, weight=along_unit * unit[:, k, None]) for k in range(3)]
        v = v + ops.aggregate(graph, v * b, weight=along_v) + torch.stack(axes)
        s = s + ops.aggregate(graph, a, weight=to_s)
        u, w = self.mix(v).chunk(2, -1)
        length = (w.square().sum(0) + 1e-8).sqrt()  # with a derivative at 0
        f_ss, f_sv, f_vv = self.gates(torch.cat([s, length], -1)).chunk(3, -1)
        return s + f_ss + f_sv * (u * w).sum(0), v + f_vv * u
