"""Trains a travelling salesman from scratch, by REINFORCE with a rollout baseline (Kool et al. 2019, algorithm 1).

A policy samples a tour of each random instance; the reward is how much shorter it is than the greedy tour of the
baseline, which is an earlier copy of the policy. After each round of steps the policy replaces the baseline if its
greedy tours are significantly shorter (a paired t-test on instances that both have not seen). The result is how much
longer greedy tours are than optimal ones, on the published instances; an integer program finds the optimal ones.

The paper trains 250,000 steps of 512 instances on a GPU. The defaults here take about ten minutes of one core: half
the width, and 0.2% of the instances.

    python examples/tsp_reinforce.py                                   ten minutes on one core
    python examples/tsp_reinforce.py --steps 4 --instances 5 --dim 16  a quick test
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import torch
from experiment import Outcome, Row, console, measure, parser
from published_tours import cities as published_cities
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse.csgraph import connected_components
from scipy.stats import ttest_rel
from torch import Tensor, nn
from torch.optim import Adam

from mpnn.models import TSP
from mpnn.models.graph.tsp import tour_length
from mpnn.train.loop import Settings, fit, warm_cosine

CITIES, BATCH, HEADS = 20, 128, 4
ROUND = 100  # steps between two comparisons with the baseline
COMPARED = 1000  # instances of a comparison
SIGNIFICANCE = 0.05


class Learner(nn.Module):
    """The policy and its baseline in one module, so that a checkpoint contains both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.policy = TSP(dim, HEADS, hidden=4 * dim)
        self.baseline = deepcopy(self.policy).requires_grad_(False)

    def loss(self, k: int) -> Tensor:
        """REINFORCE on batch k of random instances."""
        self.baseline.eval()
        if k and k % ROUND == 0:
            self.challenge()
        return self.policy.loss(torch.rand(BATCH, CITIES, 2), self.baseline)

    def challenge(self) -> None:
        """Copies the policy to the baseline if its greedy tours are significantly shorter."""
        cities = torch.rand(COMPARED, CITIES, 2)
        self.policy.eval()
        lengths = [tour_length(cities, model.solve(cities)).numpy() for model in (self.policy, self.baseline)]
        self.policy.train()
        if ttest_rel(*lengths, alternative="less").pvalue < SIGNIFICANCE:
            self.baseline.load_state_dict(self.policy.state_dict())


def train(dim: int, steps: int, cities: Tensor, best: Tensor, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    learner = Learner(dim)
    held_out = torch.rand(COMPARED, CITIES, 2, generator=torch.Generator().manual_seed(seed + 1))

    def length() -> dict[str, float]:
        learner.eval()
        return {"tour length": tour_length(held_out, learner.policy.solve(held_out)).mean().item()}

    history = fit(
        learner,
        Adam(learner.policy.parameters(), lr=1e-3),
        learner.loss,
        Settings(steps, rate=warm_cosine(steps), clip=1.0, validate_every=min(ROUND, steps)),
        validate=length,
        progress=progress,
        checkpoint=checkpoint,
    )
    greedy = tour_length(cities, learner.eval().policy.solve(cities))
    console.print(f"mean length of greedy tours {greedy.mean():.3f}, of optimal tours {best.mean():.3f}")
    return Outcome(history, 100 * (greedy.mean() / best.mean() - 1).item())


def optimal_length(cities: np.ndarray) -> float:
    """The length of the shortest tour through points [N, 2].

    An integer program (Dantzig, Fulkerson & Johnson 1954) chooses the edges: two at each city, and at least two that
    leave each set of cities. Only the sets that a solution violates are added, until it is a single tour.
    """
    count = len(cities)
    first, second = np.triu_indices(count, 1)
    cost = np.linalg.norm(cities[first] - cities[second], axis=1)
    ends = np.arange(count)[:, None]
    constraints = [LinearConstraint(((first == ends) | (second == ends)).astype(float), 2, 2)]
    while True:
        chosen = milp(cost, integrality=np.ones(len(cost)), bounds=Bounds(0, 1), constraints=constraints).x > 0.5
        adjacency = np.zeros((count, count))
        adjacency[first[chosen], second[chosen]] = 1
        parts, part = connected_components(adjacency, directed=False)
        if parts == 1:
            return float(cost[chosen].sum())
        leaves = [(part[first] == p) != (part[second] == p) for p in range(parts)]
        constraints.append(LinearConstraint(np.array(leaves, dtype=float), 2, np.inf))


def main() -> None:
    options = parser(__doc__, 1, ["attention"])
    options.add_argument("--dim", type=int, default=64, help=f"width, a multiple of {HEADS} (the number of heads)")
    options.add_argument("--instances", type=int, default=500, help="number of published instances for the test")
    options = options.parse_args()
    cities, steps = published_cities(options.instances), options.steps or 2_000
    best = torch.tensor([optimal_length(instance.double().numpy()) for instance in cities])
    row = Row(
        "tsp-reinforce",
        "tours of 20 cities",
        "attention, from scratch",
        "% over optimal, greedy",
        "0.34",
        "Kool et al. 2019, table 1",
    )
    settings = {"steps": steps, "dim": options.dim, "batch": BATCH, "instances": options.instances}
    measure(row, partial(train, options.dim, steps, cities, best), options, settings)


if __name__ == "__main__":
    main()
