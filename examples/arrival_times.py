"""When will I arrive? Streets that hear their neighbours know what a driver will meet, and each alone does not.

In a made-up city (`mpnn.data.city`) queues grow backwards, from each street into those that lead into it. Trips on
three days are predicted from twelve others: by the sum of times at free speed, by that at the speeds measured at
departure, by a linear model of each segment, and by a graph network over the segments of a route and the streets that
leave it (`mpnn.models.ArrivalTimes`).

    python examples/arrival_times.py                             half a minute
    python examples/arrival_times.py --trips 50 --epochs 1       to see it run
"""

from __future__ import annotations

import argparse

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.linear_model import LinearRegression
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.data import Trips, city, trips
from mpnn.models import ArrivalTimes

LEARNED, NEW = range(12), range(12, 15)  # days
BATCH = 40
FREE, NOW = 0, 1  # columns of `Trips.x`

Errors = dict[str, tuple[float, float]]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # the products are small: a second thread would wait more than work
    table = Table("predicted by", "segment", "whole route", title="mean absolute error in minutes, on three new days")
    for name, (segment, route) in compare(options.trips, options.epochs, options.seed).items():
        table.add_row(name, f"{segment:.3f}", f"{route:.2f}")
    Console().print(table)


def compare(count: int, epochs: int, seed: int) -> Errors:
    """Mean absolute errors, of segments and of routes, of each way to predict; trained on `count` trips."""
    town = city(days=len(LEARNED) + len(NEW), seed=seed)
    train = trips(town, count, LEARNED, seed=seed + 1)
    new = Trips.join(trips(town, 400, NEW, seed=seed + 2, usual=LEARNED))
    known = Trips.join(train)
    linear = LinearRegression().fit(known.x[known.on_route], known.segment_minutes[known.on_route])
    torch.manual_seed(seed)
    model = trained(ArrivalTimes(known.x.shape[1], known.edge_attr.shape[1]), train, epochs)
    with torch.no_grad():
        found = model(new.x, new.x[:, NOW], *graphs_of(new))
    return {
        "times at free speed": errors(new, new.x[:, FREE]),
        "times at present speed": errors(new, new.x[:, NOW]),
        "a linear model of each segment": errors(new, torch.from_numpy(linear.predict(new.x)).float()),
        "ArrivalTimes": errors(new, *found),
    }


def trained(model: ArrivalTimes, train: list[Trips], epochs: int) -> ArrivalTimes:
    """Adam, its learning rate climbing to 0.01 and falling again."""
    batches = [Trips.join(train[k : k + BATCH]) for k in range(0, len(train), BATCH)]
    whom = [graphs_of(batch) for batch in batches]
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=epochs * len(batches))
    for _ in track(range(epochs), "training", transient=True):
        for k in torch.randperm(len(batches)).tolist():
            trip = batches[k]
            optimizer.zero_grad()
            model.loss(trip.x, trip.x[:, NOW], *whom[k], trip.segment_minutes, trip.route_minutes).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def graphs_of(trip: Trips) -> tuple[Graph, Graph]:
    """Which segments hear each other, and which segments a route hears: those that it is made of."""
    segments = trip.on_route.nonzero().squeeze(1)
    made_of = torch.stack([segments, trip.route[segments]])
    routes = graphs.from_edges(made_of, num_src=len(trip.x), num_dst=len(trip.route_minutes))
    return graphs.from_edges(trip.edge_index, len(trip.x), edge_attr=trip.edge_attr), routes


def errors(trip: Trips, segment: Tensor, route: Tensor | None = None) -> tuple[float, float]:
    """Of segments on routes, and of routes, which take the sum of their segments where nothing else is given."""
    on = trip.on_route
    if route is None:
        route = torch.zeros(len(trip.route_minutes)).index_add(0, trip.route[on], segment[on])
    of_segments = (segment - trip.segment_minutes)[on].abs().mean().item()
    return of_segments, (route - trip.route_minutes).abs().mean().item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=1200, help="to learn from")
    parser.add_argument("--epochs", type=int, default=15, help="times that each of them is seen")
    parser.add_argument("--seed", type=int, default=0, help="of the city, the trips and the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
