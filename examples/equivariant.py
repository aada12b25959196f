"""Equivariant attention: values are tensor products of e3nn, the round is MessagePassing, and forces are trained.

A layer after Equiformer (Liao and Smidt 2023, arXiv:2206.11990): features of an atom are numbers and vectors. A value
is the tensor product of the source's features with the spherical harmonics of the edge, weighted by its length; logits
are a function of lengths and of the numbers at both ends, so they do not change when the molecule turns.

The data are states of Lennard-Jones clusters, those of lennard_jones.py. Needs the extra `e3nn`.

    python examples/equivariant.py               two minutes on a core
    python examples/equivariant.py --steps 2     a quick test
"""

import argparse

import torch
from e3nn import o3
from e3nn.nn import Gate
from lennard_jones import ATOMS, CUTOFF, States, predicted, trained
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import Attention
from mpnn.models.layers.molecules import RadialBasis, RadialFilter, sum_of, vectors_of
from mpnn.round import Round
from mpnn.update import MLP

NUMBERS, VECTORS, HEADS, GAUSSIANS = 32, 16, 4, 20
HARMONICS = o3.Irreps("0e + 1o")
STATE = o3.Irreps(f"{NUMBERS}x0e + {VECTORS}x1o")
GATE = Gate(f"{NUMBERS}x0e", [nn.functional.silu], f"{VECTORS}x0e", [torch.sigmoid], f"{VECTORS}x1o")
"""A vector is multiplied by a number of its own."""


class TensorProducts(Attention):
    """`m_i = sum_j softmax_j(MLP(s_i, s_j, r_ij)) (h_j x Y(r_ij))`; heads share no channels."""

    def __init__(self) -> None:
        super().__init__()
        first, second = [(mul, ir) for mul, ir in STATE], [(1, ir) for _, ir in HARMONICS]
        # Each channel by itself: numbers and vectors, from numbers and from vectors.
        paths = [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        kinds = [(NUMBERS, "0e"), (NUMBERS, "1o"), (VECTORS, "1o"), (VECTORS, "0e")]
        steps = [(*path, "uvu", True) for path in paths]
        self.product = o3.TensorProduct(first, second, kinds, steps, shared_weights=False, internal_weights=False)
        self.to_weights = RadialFilter(MLP(GAUSSIANS, self.product.weight_numel, 32, nn.SiLU))
        self.to_logits = MLP(GAUSSIANS + 2 * NUMBERS, HEADS, 32, nn.SiLU)
        self.of_message = o3.Linear(o3.Irreps(kinds), GATE.irreps_in)
        self.sizes = [mul * o3.Irrep(ir).dim for mul, ir in kinds]

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        """edge_attr: harmonics and radial basis, [E, 4 + gaussians + 1]."""
        assert edge_attr is not None
        harmonics, basis = edge_attr.split([HARMONICS.dim, GAUSSIANS + 1], -1)
        j, i = graph.edge_index
        values = self.product(src.index_select(0, j), harmonics, self.to_weights(basis))
        by_head = [part.unflatten(-1, (HEADS, -1)) for part in values.split(self.sizes, -1)]
        numbers = dst[:, :NUMBERS].index_select(0, i), src[:, :NUMBERS].index_select(0, j)
        logits = self.to_logits(torch.cat([basis[:, :-1], *numbers], -1))
        edge_value = torch.cat(by_head, -1)
        # All of a value is of its edge, so that of the source is zero.
        nothing = src.new_zeros(len(src), *edge_value.shape[1:])
        return Round(graph, nothing, bias=(logits,), edge_value=edge_value)

    def merge(self, out: Tensor) -> Tensor:
        parts = out.split([size // HEADS for size in self.sizes], -1)
        return self.of_message(torch.cat([part.flatten(-2) for part in parts], -1))


class Equivariant(nn.Module):
    """Energies of molecules, with the signature of `PaiNN`."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.basis, self.embed = RadialBasis(CUTOFF, GAUSSIANS), nn.Embedding(1, NUMBERS)
        rounds = [MessagePassing(None, "sum", lambda x, m: x + GATE(m), TensorProducts()) for _ in range(layers)]
        self.layers, self.head = nn.ModuleList(rounds), MLP(NUMBERS, 1, 32, nn.SiLU)

    def states(self, types: Tensor, positions: Tensor, graph: Graph) -> Tensor:
        """Numbers and vectors of atoms, [N, NUMBERS + 3 VECTORS]."""
        vectors = vectors_of(graph, positions, None, None)
        harmonics = o3.spherical_harmonics(HARMONICS, vectors, normalize=True, normalization="component")
        edges = torch.cat([harmonics, self.basis(vectors.norm(dim=-1))], -1)
        x = nn.functional.pad(self.embed(types), (0, 3 * VECTORS))
        for layer in self.layers:
            x = layer(x, graph, edge_attr=edges)
        return x

    def forward(self, types: Tensor, positions: Tensor, graph: Graph, pool: Graph | None = None) -> Tensor:
        return sum_of(self.head(self.states(types, positions, graph)[:, :NUMBERS]), pool)


def turned(model: Equivariant, positions: Tensor) -> tuple[float, float]:
    """How much states [N, ...], turned back, and forces differ when a cluster turns, relative to the largest."""
    turn = o3.rand_matrix().to(positions)
    of_state = STATE.D_from_matrix(turn.cpu().float()).to(positions)
    types, graph = torch.zeros(ATOMS, dtype=torch.int64), graphs.radius(positions, CUTOFF)
    states, again = (model.states(types, x, graph) for x in (positions, positions @ turn.mT))
    force, then = (predicted(model, x[None])[1][0] for x in (positions, positions @ turn.mT))
    differences = (again - states @ of_state.mT, states), (then - force @ turn.mT, force)
    return tuple(float((a.abs().max() / b.abs().max()).detach()) for a, b in differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="number of training steps")
    parser.add_argument("--states", type=int, default=300, help="number of states to learn from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    states, new = States.draw(options.states, seed=0), States.draw(50, seed=1)
    model = Equivariant()
    error = (predicted(model, new.positions)[1] - new.force).abs().mean()
    print(f"force error on new clusters {error:.3f}, mean force {new.force.abs().mean():.3f}", flush=True)
    trained(model, states, options.steps)
    error = (predicted(model, new.positions)[1] - new.force).abs().mean()
    print(f"after {options.steps} steps {error:.3f}")
    of_states, of_forces = turned(model, new.positions[0])
    print(f"a turned cluster: states turn with it to {of_states:.0e}, forces to {of_forces:.0e}")
    assert max(of_states, of_forces) < 1e-4


if __name__ == "__main__":
    main()
