"""Short tours through 20 cities, found by attention: the weights that Kool et al. (2019) trained, as message passing.

Solves instances in three ways, prints how long their tours are on average, and draws that instance to a picture where
attention gains most on going to the nearest city each time. Over all 10,000 instances, greedy tours are 3.847 long, as
published. Needs the authors' weights; where they are not found, a sentence says how to get them.

    python examples/tsp.py                                  half a minute on two cores
    python examples/tsp.py --instances 20 --draws 10        to see it run
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mpnn import data
from mpnn.models import TSP
from mpnn.models.tsp import tour_length


def nearest_neighbour(cities: Tensor) -> Tensor:
    """From the first city on, always the nearest of those left: tours int64 [B, N] through points [B, N, 2]."""
    distance = torch.cdist(cities, cities)
    last = torch.zeros(len(cities), 1, dtype=torch.int64)
    tours = [last]
    for _ in range(cities.shape[1] - 1):
        distance.scatter_(2, last[..., None].expand(-1, cities.shape[1], -1), torch.inf)  # nobody goes there again
        last = distance.take_along_dim(last[..., None], 1).argmin(2)
        tours.append(last)
    return torch.cat(tours, 1)


def best_of(model: TSP, cities: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """The shortest of so many tours drawn for each instance."""
    many = cities.repeat_interleave(draws, 0)
    tours = model.sample(many, generator)
    best = tour_length(many, tours).view(-1, draws).argmin(1)
    return tours.view(len(cities), draws, -1)[torch.arange(len(cities)), best]


def draw(cities: Tensor, tours: dict[str, Tensor], path: str) -> None:
    """One picture for each way of solving an instance [N, 2]; the tour begins at the ring."""
    figure, axes = plt.subplots(1, len(tours), figsize=(4 * len(tours), 4.3), layout="constrained")
    for ax, (name, tour) in zip(axes, tours.items(), strict=True):
        x, y = cities[torch.cat([tour, tour[:1]])].T.tolist()
        ax.plot(x, y, color="0.55", linewidth=1.2, zorder=1)
        ax.scatter(x, y, s=22, color="C0", zorder=2)
        ax.scatter(x[:1], y[:1], s=90, facecolors="none", edgecolors="C3", zorder=3)
        ax.set_title(f"{name}: {tour_length(cities[None], tour[None]).item():.3f}", fontsize=11)
        ax.set(xlim=(-0.04, 1.04), ylim=(-0.04, 1.04), aspect="equal", xticks=[], yticks=[])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    options = arguments()
    model, generator = TSP.from_published(data.tsp_weights()), torch.Generator().manual_seed(0)
    cities = data.cities(options.instances)
    pieces = cities.split(max(1, 20_000 // options.draws))
    found = {
        "nearest neighbour": nearest_neighbour(cities),
        "attention, greedy": torch.cat([model.solve(piece) for piece in cities.split(1000)]),
        f"attention, best of {options.draws}": torch.cat(
            [best_of(model, piece, options.draws, generator) for piece in pieces]
        ),
    }
    lengths = {name: tour_length(cities, tours) for name, tours in found.items()}
    table = Table("tours", "mean length", title=f"{options.instances} instances of 20 cities")
    for name, length in lengths.items():
        table.add_row(name, f"{length.mean().item():.3f}")
    console = Console()
    console.print(table)
    shown = int((lengths["nearest neighbour"] - lengths["attention, greedy"]).argmax())
    draw(cities[shown], {name: tours[shown] for name, tours in found.items()}, options.picture)
    console.print(f"instance {shown} is drawn in {options.picture}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=500, help="how many of the 10,000 published ones")
    parser.add_argument("--draws", type=int, default=20, help="tours drawn for each instance")
    parser.add_argument("--picture", default="tsp.png", help="where to draw one of them")
    return parser.parse_args()


if __name__ == "__main__":
    main()
