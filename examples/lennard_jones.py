"""Atoms: PaiNN and SchNet learn energies and forces of Lennard-Jones clusters, and run molecular dynamics with them.

The data are made on the spot: clusters of 13 atoms at random temperatures, moved by Langevin dynamics in the potential

    E = sum over pairs of 4 (1 / r^12 - 1 / r^6)

in whose units everything is. A network learns energies and forces of 1,000 states; its forces are the negative
derivatives of its energy, so training differentiates twice (`mpnn.models.layers.molecules.forces`). It is then tested
on states of other clusters, and moves one by velocity Verlet without friction: the sum of its energy and the kinetic
energy must stay what it was.

    python examples/lennard_jones.py                                     27 minutes on a core that others share
    python examples/lennard_jones.py --steps 3 --states 40 --moves 3     a quick test
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from demonstration import measure, parser
from experiment import console
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.models import PaiNN, SchNet
from mpnn.models.layers.molecules import forces

NAME = "lennard_jones"
ATOMS, CUTOFF, TIME_STEP = 13, 4.0, 0.005
BATCH, FORCE_WEIGHT = 10, 10.0
MODELS = {
    "PaiNN": lambda: PaiNN(48, 3, 20, CUTOFF, 1),
    "SchNet": lambda: SchNet(64, 64, 3, 40, CUTOFF, 1),
}


def potential(positions: Tensor) -> Tensor:
    """Energies [B] of clusters [B, N, 3]."""
    i, j = torch.triu_indices(positions.shape[1], positions.shape[1], 1)
    inverse = (positions[:, i] - positions[:, j]).square().sum(-1).reciprocal() ** 3
    return 4 * (inverse.square() - inverse).sum(-1)


def exact(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Energies [B] and forces [B, N, 3] of the potential."""
    positions = positions.detach().requires_grad_()
    energy = potential(positions)
    return energy.detach(), forces(energy, positions)


@dataclass(frozen=True)
class States:
    """Positions [B, N, 3], energies [B] and forces [B, N, 3]."""

    positions: Tensor
    energy: Tensor
    force: Tensor

    @staticmethod
    def draw(count: int, seed: int, every: int = 20) -> States:
        """States of clusters that begin as random balls, cool down to temperatures between 0.05 and 0.3, and then move
        on; one of every 20 steps is taken. A weak spring keeps atoms from leaving."""
        generator = torch.Generator().manual_seed(seed)
        clusters = 50
        radius = (ATOMS / 0.6) ** (1 / 3)
        x = radius * torch.randn(clusters, ATOMS, 3, generator=generator, dtype=torch.float64) / math.sqrt(3)
        for _ in range(2000):  # down the slope, by short steps: random balls have overlapping atoms
            force = exact(x)[1] - 0.5 * x
            x = x + 0.02 * force / force.norm(dim=-1, keepdim=True).clamp(min=1.0)
        v, found = torch.zeros_like(x), []
        temperature = 0.05 + 0.25 * torch.rand(clusters, 1, 1, generator=generator, dtype=torch.float64)
        keep = math.exp(-TIME_STEP)
        for step in range(1000 + every * math.ceil(count / clusters)):
            v = v + TIME_STEP * (exact(x)[1] - 0.02 * (x - x.mean(1, keepdim=True)))
            noise = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            v = keep * v + (temperature * (1 - keep**2)).sqrt() * noise
            x = x + TIME_STEP * v
            if step >= 1000 and step % every == 0:
                found.append(x)
        positions = torch.cat(found)[:count]
        return States(positions.float(), *(y.float() for y in exact(positions)))


def over(positions: Tensor) -> tuple[Graph, Graph]:
    """The atoms within the cutoff of each other, and the graph from atoms to their clusters, for [B, N, 3]."""
    count, atoms = positions.shape[:2]
    of_atom = torch.arange(count).repeat_interleave(atoms)
    pool = graphs.from_edges(torch.stack([torch.arange(count * atoms), of_atom]), num_src=count * atoms, num_dst=count)
    return graphs.radius(positions.flatten(0, 1), CUTOFF, labels=of_atom), pool


def predicted(model: Any, positions: Tensor, *, training: bool = False) -> tuple[Tensor, Tensor]:
    """Energies [B] and forces [B, N, 3] of a model, for positions [B, N, 3]."""
    at = positions.flatten(0, 1).requires_grad_()
    energy = model(torch.zeros(len(at), dtype=torch.int64), at, *over(positions.detach())).squeeze(-1)
    return energy, forces(energy, at, create_graph=training).view_as(positions)


def trained(model: Any, states: States, steps: int) -> Any:
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        batch = torch.randint(len(states.energy), (BATCH,))
        energy, force = predicted(model, states.positions[batch], training=True)
        of_energy = ((energy - states.energy[batch]) / ATOMS).square().mean()
        loss = of_energy + FORCE_WEIGHT * (force - states.force[batch]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


def moved(model: Any, start: Tensor, moves: int, temperature: float = 0.15) -> tuple[list[float], list[float]]:
    """Velocity Verlet from a state [1, N, 3]: the model's total energy, and its potential energy, after each step."""
    generator = torch.Generator().manual_seed(0)
    x, v = start, math.sqrt(temperature) * torch.randn(start.shape, generator=generator)
    v = v - v.mean(1, keepdim=True)
    energy, force = predicted(model, x)
    total, potential_energy = [], []
    for _ in range(moves):
        v = v + TIME_STEP / 2 * force
        x = (x + TIME_STEP * v).detach()
        energy, force = predicted(model, x)
        v = v + TIME_STEP / 2 * force
        potential_energy.append(energy.item())
        total.append(energy.item() + v.square().sum().item() / 2)
    return total, potential_energy


def tested(make: Any, states: States, new: States, options: Any) -> dict[str, float]:
    """Trains a model. Returns its errors on new states, and how well it conserves energy."""
    torch.manual_seed(0)
    model = make()
    trained(model, states, options.steps)
    energy, force = predicted(model, new.positions)
    total, potential_energy = (torch.tensor(values, dtype=torch.float64) for values in
                               moved(model, new.positions[-1:], options.moves))  # fmt: skip
    return {
        "force_mae": (force - new.force).abs().mean().item(),
        "force_mean_absolute": new.force.abs().mean().item(),
        "energy_mae_per_atom": (energy - new.energy).abs().mean().item() / ATOMS,
        "energy_std_per_atom": new.energy.std().item() / ATOMS,
        "total_energy_std": total.std().item(),
        "total_energy_drift": (total[-len(total) // 10 :].mean() - total[: max(len(total) // 10, 1)].mean()).item(),
        "potential_energy_std": potential_energy.std().item(),
    }


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)
    states, new = States.draw(options.states, seed=0), States.draw(200, seed=1)
    points = {name: lambda make=make: tested(make, states, new, options) for name, make in MODELS.items()}
    settings = {"steps": options.steps, "states": options.states, "moves": options.moves, "batch": BATCH}
    for name, p in measure(NAME, points, options, settings).items():
        console.print(
            f"{name}: force error {p['force_mae']:.4f} ({p['force_mae'] / p['force_mean_absolute']:.1%} of the mean "
            f"force), energy error {p['energy_mae_per_atom']:.5f} an atom; {options.moves} steps of dynamics: "
            f"total energy varies by {p['total_energy_std']:.5f}, potential energy by {p['potential_energy_std']:.3f}",
            soft_wrap=True,
        )


def arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=4000, help="number of training steps of each model")
    options.add_argument("--states", type=int, default=1000, help="number of states to learn from")
    options.add_argument("--moves", type=int, default=2000, help="number of steps of molecular dynamics")
    return options.parse_args()


if __name__ == "__main__":
    main()
