"""Short tours through 20 cities by an attention model with the weights of Kool et al. (2019), as message passing.

Solves instances with three methods, prints the mean tour length of each, and draws the instance on which attention
improves most over the nearest-neighbor heuristic. Over all 10,000 instances, the mean length of greedy tours is 3.847,
as published. It needs the authors' weights; if they are missing, an error explains how to get them.

    python examples/tsp.py                                  half a minute on two cores
    python examples/tsp.py --instances 20 --draws 10        a quick test
"""

from __future__ import annotations

import argparse

import matplotlib.pyplot as plt
import torch
from published_tours import cities as published_cities, published_model, tsp_weights
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mpnn.models import TSP
from mpnn.models.graph.tsp import tour_length


def nearest_neighbor(cities: Tensor) -> Tensor:
    """Starts at the first city and always visits the nearest unvisited one: points [B, N, 2] -> tours int64 [B, N]."""
    distance = torch.cdist(cities, cities)
    last = torch.zeros(len(cities), 1, dtype=torch.int64)
    tours = [last]
    for _ in range(cities.shape[1] - 1):
        distance.scatter_(2, last[..., None].expand(-1, cities.shape[1], -1), torch.inf)  # mark as visited
        last = distance.take_along_dim(last[..., None], 1).argmin(2)
        tours.append(last)
    return torch.cat(tours, 1)


def best_of(model: TSP, cities: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """The shortest of `draws` sampled tours for each instance."""
    repeated = cities.repeat_interleave(draws, 0)
    tours = model.sample(repeated, generator)
    best = tour_length(repeated, tours).view(-1, draws).argmin(1)
    return tours.view(len(cities), draws, -1)[torch.arange(len(cities)), best]


def draw(cities: Tensor, tours: dict[str, Tensor], path: str) -> None:
    """Draws the tour of each method for one instance [N, 2]; a ring marks the first city."""
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
    model, generator = published_model(tsp_weights()), torch.Generator().manual_seed(0)
    cities = published_cities(options.instances)
    pieces = cities.split(max(1, 20_000 // options.draws))
    tours_by_method = {
        "nearest neighbor": nearest_neighbor(cities),
        "attention, greedy": torch.cat([model.solve(piece) for piece in cities.split(1000)]),
        f"attention, best of {options.draws}": torch.cat(
            [best_of(model, piece, options.draws, generator) for piece in pieces]
        ),
    }
    lengths = {name: tour_length(cities, tours) for name, tours in tours_by_method.items()}
    table = Table("tours", "mean length", title=f"{options.instances} instances of 20 cities")
    for name, length in lengths.items():
        table.add_row(name, f"{length.mean().item():.3f}")
    console = Console()
    console.print(table)
    instance = int((lengths["nearest neighbor"] - lengths["attention, greedy"]).argmax())
    draw(cities[instance], {name: tours[instance] for name, tours in tours_by_method.items()}, options.picture)
    console.print(f"instance {instance} is drawn in {options.picture}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=500, help="number of the 10,000 published instances")
    parser.add_argument("--draws", type=int, default=20, help="number of sampled tours for each instance")
    parser.add_argument("--picture", default="tsp.png", help="file for the picture of one instance")
    return parser.parse_args()


if __name__ == "__main__":
    main()
