"""Waves on a pond: a MeshGraphNet learns a physical system on irregular meshes, and predicts it on a new one.

Each pond is a square with a round island, and a mesh of triangles that is finer around the island. The wave equation on
it (linear finite elements, small steps of leapfrog) makes the data: heights and velocities of the water, which drops
set in motion. Two networks learn one step of 0.05 from 24 ponds, and then predict 40 steps of four others, each from
its own prediction before:

- MeshGraphNet: edges have states, which begin with the vector between their ends
- GNN: the sum over the neighbors, without features of edges; the same number of layers and the same training

Both are compared with persistence, which says that nothing moves. The picture shows the waves, and both predictions.

    python examples/waves.py                                     23 minutes on a core that others share
    python examples/waves.py --steps 3 --ponds 2 --spacing 0.2   a quick test
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from demonstration import measure, parser
from experiment import console
from matplotlib.animation import FuncAnimation, PillowWriter
from scipy.sparse import coo_array
from scipy.spatial import Delaunay
from torch import Tensor, nn

from mpnn import Graph, graphs
from mpnn.models import GNN, MeshGraphNet

NAME = "waves"
STEP, LENGTH, NOISE = 0.05, 40, 0.01
LAYERS, WIDTH, BATCH, NEW = 4, 48, 2, 4


@dataclass(frozen=True)
class Pond:
    """A mesh, and the state of the water after each step: heights and velocities [LENGTH + 1, N, 2]."""

    points: np.ndarray
    triangles: np.ndarray
    graph: Graph
    states: Tensor


def pond(seed: int, spacing: float) -> Pond:
    """A pond with an island at a random place, and one to three drops that fall into it."""
    generator = np.random.default_rng(seed)
    center, radius = generator.uniform(0.3, 0.7, 2), generator.uniform(0.1, 0.2)
    points = scattered(generator, center, radius, spacing)
    triangles = Delaunay(points).simplices
    middle = points[triangles].mean(1)
    triangles = triangles[np.linalg.norm(middle - center, axis=1) > radius]
    stiffness, mass = elements(points, triangles)
    drops = generator.uniform(0.0, 1.0, (generator.integers(1, 4), 2))
    height = np.exp(-(np.linalg.norm(points[:, None] - drops, axis=-1) ** 2) / (2 * 0.12**2)).sum(1)
    pairs = np.unique(np.sort(triangles[:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), 1), axis=0)
    edges = torch.from_numpy(np.concatenate([pairs, pairs[:, ::-1]]).T.copy())
    at = torch.from_numpy(points).float()
    vectors = at[edges[0]] - at[edges[1]]
    attr = torch.cat([vectors, vectors.norm(dim=1, keepdim=True)], 1) / spacing
    graph = graphs.from_edges(edges, len(points), edge_attr=attr)
    return Pond(points, triangles, graph, torch.from_numpy(simulated(height, stiffness, mass)).float())


def scattered(generator: np.random.Generator, center: np.ndarray, radius: float, spacing: float) -> np.ndarray:
    """Points of the mesh: on both shores, and random ones between that keep their distance, less near the island."""
    side = np.linspace(0, 1, round(1 / spacing) + 1)[:-1]
    zero, one = np.zeros_like(side), np.ones_like(side)
    square = np.concatenate([np.stack(xy, 1) for xy in ((side, zero), (one, side), (1 - side, one), (zero, 1 - side))])
    angle = np.linspace(0, 2 * math.pi, max(round(2 * math.pi * radius / (0.6 * spacing)), 6), endpoint=False)
    shore = center + radius * np.stack([np.cos(angle), np.sin(angle)], 1)
    points = np.concatenate([square, shore])
    for candidate in generator.uniform(0, 1, (round(20 / spacing**2), 2)):
        away = np.linalg.norm(candidate - center) - radius
        own = spacing * min(0.6 + away, 1.0)
        if away > 0.4 * spacing and (np.linalg.norm(points - candidate, axis=1) > 0.75 * own).all():
            points = np.concatenate([points, candidate[None]])
    return points


def elements(points: np.ndarray, triangles: np.ndarray) -> tuple[coo_array, np.ndarray]:
    """The stiffness matrix of linear elements, and the lumped mass of each point. Shores reflect waves."""
    corners = points[triangles]
    opposite = corners[:, [2, 0, 1]] - corners[:, [1, 2, 0]]
    area = np.abs(opposite[:, 0, 0] * opposite[:, 1, 1] - opposite[:, 0, 1] * opposite[:, 1, 0]) / 2
    values = np.einsum("tad,tbd->tab", opposite, opposite) / (4 * area[:, None, None])
    rows, columns = np.broadcast_arrays(triangles[:, :, None], triangles[:, None, :])
    size = (len(points), len(points))
    stiffness = coo_array((values.ravel(), (rows.ravel(), columns.ravel())), shape=size).tocsr()
    return stiffness, np.bincount(triangles.ravel(), np.repeat(area / 3, 3), len(points))


def simulated(height: np.ndarray, stiffness: Any, mass: np.ndarray) -> np.ndarray:
    """Heights and velocities of u'' = -K u / m with wave speed 1, [LENGTH + 1, N, 2]. The small step is below the limit
    that Gershgorin's circles give."""
    limit = 2 / math.sqrt((abs(stiffness).sum(1) / mass).max())
    small = math.ceil(STEP / (0.5 * limit))
    dt, velocity, states = STEP / small, np.zeros_like(height), []
    for _ in range(LENGTH + 1):
        states.append(np.stack([height, velocity], 1))
        for _ in range(small):
            velocity = velocity - dt / 2 * (stiffness @ height) / mass
            height = height + dt * velocity
            velocity = velocity - dt / 2 * (stiffness @ height) / mass
    return np.stack(states)


class Stepper(nn.Module):
    """Advances the state by a step: a network predicts the change of the velocity, and by how much the height differs
    from what the mean of both velocities makes of it. Both in units of what is usual."""

    def __init__(self, network: nn.Module, ponds: list[Pond]) -> None:
        super().__init__()
        now, then = (torch.cat([p.states[part].flatten(0, 1) for p in ponds]) for part in (slice(-1), slice(1, None)))
        self.network = network
        self.register_buffer("scale", now.std(0))
        self.register_buffer("usual", unknown(now, then).std(0))

    def forward(self, state: Tensor, graph: Graph) -> Tensor:
        difference, change = (self.network(state / self.scale, graph) * self.usual).unbind(1)
        height, velocity = state.unbind(1)
        return torch.stack([height + STEP * (velocity + change / 2) + difference, velocity + change], 1)

    def loss(self, now: Tensor, then: Tensor, graph: Graph) -> Tensor:
        return (self.network(now / self.scale, graph) - unknown(now, then) / self.usual).square().mean()


def unknown(now: Tensor, then: Tensor) -> Tensor:
    """Returns the target of the network, [N, 2], for states [N, 2] before and after a step."""
    change = then - now
    return torch.stack([change[:, 0] - STEP * (now[:, 1] + then[:, 1]) / 2, change[:, 1]], 1)


def mesh_graph_net() -> nn.Module:
    return MeshGraphNet(2, 3, 2, WIDTH, LAYERS, hidden=1)


def gnn() -> nn.Module:
    return GNN(2, 2, WIDTH, LAYERS, aggregate="sum")


def trained(network: nn.Module, ponds: list[Pond], steps: int) -> Stepper:
    """Learns single steps. Noise on the states teaches the network to correct its own errors (Sanchez-Gonzalez et al.
    2020, section 3.5)."""
    model = Stepper(network, ponds)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        chosen = [ponds[k] for k in torch.randint(len(ponds), (BATCH,))]
        moments = [int(torch.randint(LENGTH, ())) for _ in chosen]
        now, then = (torch.cat([p.states[t + k] for p, t in zip(chosen, moments, strict=True)]) for k in (0, 1))
        noisy = now + NOISE * model.scale * torch.randn_like(now)
        batch = graphs.batch([p.graph for p in chosen])
        loss = model.loss(noisy, then, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def rollout(model: Stepper, start: Tensor, graph: Graph) -> Tensor:
    """The states that follow from the model's own predictions, [LENGTH + 1, N, 2]."""
    states = [start]
    for _ in range(LENGTH):
        states.append(model(states[-1], graph))
    return torch.stack(states)


def errors(predicted: list[Tensor], ponds: list[Pond]) -> dict[str, list[float]]:
    """The root mean square error of heights after each step, divided by the root mean square of the heights."""
    wrong = torch.stack([(a - p.states)[..., 0].square().mean(1) for a, p in zip(predicted, ponds, strict=True)])
    heights = torch.stack([p.states[..., 0].square().mean() for p in ponds])
    return {"error": [round(e, 4) for e in (wrong.mean(0) / heights.mean()).sqrt().tolist()]}


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # the meshes are small
    ponds, new = ([pond(seed, options.spacing) for seed in seeds] for seeds in
                  (range(options.ponds), range(1000, 1000 + NEW)))  # fmt: skip

    def network(name: str, make: Any) -> dict[str, list[float]]:
        torch.manual_seed(0)
        model = trained(make(), ponds, options.steps)
        predicted = [rollout(model, p.states[0], p.graph) for p in new]
        np.save(options.out / f"{NAME}-{name}.npy", predicted[0][..., 0].numpy())
        return errors(predicted, new)

    points = {
        "persistence": lambda: errors([p.states[:1].expand_as(p.states) for p in new], new),
        "MeshGraphNet": partial(network, "MeshGraphNet", mesh_graph_net),
        "GNN": partial(network, "GNN", gnn),
    }
    settings = {"steps": options.steps, "ponds": options.ponds, "spacing": options.spacing, "layers": LAYERS}
    found = measure(NAME, points, options, settings | {"width": WIDTH, "batch": BATCH, "noise": NOISE})
    for name, point in found.items():
        one, ten, last = (point["error"][k] for k in (1, 10, LENGTH))
        console.print(f"{name}: error {one:.1%} after 1 step, {ten:.1%} after 10, {last:.1%} after {LENGTH}")
    animate(new[0], options)


def animate(truth: Pond, options: Any) -> None:
    """Writes OUT/waves.webp: the water of the first new pond, and what the networks predict."""
    files = {name: options.out / f"{NAME}-{name}.npy" for name in ("MeshGraphNet", "GNN")}
    if not all(path.exists() for path in files.values()):
        console.print("no picture: the rollouts are not in the folder; --force trains again")
        return
    heights = {"finite elements": truth.states[..., 0].numpy()} | {name: np.load(path) for name, path in files.items()}
    figure, axes = plt.subplots(1, len(heights), figsize=(7.5, 2.8), layout="constrained")
    drawn = []
    for ax, (name, values) in zip(axes, heights.items(), strict=True):
        ax.set(title=name, xticks=[], yticks=[], aspect="equal")
        ax.axis("off")
        drawn.append(ax.tripcolor(*truth.points.T, truth.triangles, values[0], shading="gouraud", cmap="RdBu_r",
                                  vmin=-0.6, vmax=0.6))  # fmt: skip

    def frame(k: int) -> list[Any]:
        for mesh, values in zip(drawn, heights.values(), strict=True):
            mesh.set_array(values[k])
        figure.suptitle(f"step {k}", fontsize=9)
        return drawn

    path = options.out / f"{NAME}.webp"
    FuncAnimation(figure, frame, LENGTH + 1).save(path, PillowWriter(fps=8), dpi=72)
    plt.close(figure)
    console.print(f"drawn in {path}", soft_wrap=True)


def arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=8000, help="number of training steps of each network")
    options.add_argument("--ponds", type=int, default=24, help="number of ponds to learn from")
    options.add_argument("--spacing", type=float, default=0.07, help="usual distance between points of a mesh")
    return options.parse_args()


if __name__ == "__main__":
    main()
