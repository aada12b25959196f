"""Arrival times: a graph network over streets predicts trips better than models of single streets.

In a simulated city (`city.py`), queues spread backwards from each street to the streets that lead into it. The
example trains on trips of twelve days and predicts the trips of three others. It compares four predictions: the sum of
times at free speed, the sum of times at the speeds measured at departure, a linear model of each segment, and a graph
network over the segments of a route and the streets that leave it (`mpnn.models.ArrivalTimes`).

    python examples/arrival_times.py                             half a minute
    python examples/arrival_times.py --trips 50 --epochs 1       a quick test
"""

from __future__ import annotations

import argparse

import torch
from city import Trips, city, trips
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.linear_model import LinearRegression
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.models import ArrivalTimes

LEARNED, NEW = range(12), range(12, 15)  # days
BATCH = 40
FREE, NOW = 0, 1  # columns of `Trips.x`

Errors = dict[str, tuple[float, float]]


def main() -> None:
    options = arguments()
    torch.set_num_threads(1)  # the matrix products are too small for several threads
    table = Table("predicted by", "segment", "whole route", title="mean absolute error in minutes, on three new days")
    for name, (segment, route) in compare(options.trips, options.epochs, options.seed).items():
        table.add_row(name, f"{segment:.3f}", f"{route:.2f}")
    Console().print(table)


def compare(count: int, epochs: int, seed: int) -> Errors:
    """Mean absolute errors of segments and of routes for each prediction; trains on `count` trips."""
    town = city(days=len(LEARNED) + len(NEW), seed=seed)
    train = trips(town, count, LEARNED, seed=seed + 1)
    new = Trips.join(trips(town, 400, NEW, seed=seed + 2, usual=LEARNED))
    joined = Trips.join(train)
    linear = LinearRegression().fit(joined.x[joined.on_route], joined.segment_minutes[joined.on_route])
    torch.manual_seed(seed)
    model = fit(ArrivalTimes(joined.x.shape[1], joined.edge_attr.shape[1]), train, epochs)
    with torch.no_grad():
        predictions = model(new.x, new.x[:, NOW], *graphs_of(new))
    return {
        "times at free speed": errors(new, new.x[:, FREE]),
        "times at present speed": errors(new, new.x[:, NOW]),
        "a linear model of each segment": errors(new, torch.from_numpy(linear.predict(new.x)).float()),
        "ArrivalTimes": errors(new, *predictions),
    }


def fit(model: ArrivalTimes, train: list[Trips], epochs: int) -> ArrivalTimes:
    """Trains the model with Adam; the learning rate rises to 0.01 and falls again. Returns it in evaluation mode."""
    batches = [Trips.join(train[k : k + BATCH]) for k in range(0, len(train), BATCH)]
    batch_graphs = [graphs_of(batch) for batch in batches]
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=epochs * len(batches))
    for _ in track(range(epochs), "training", transient=True):
        for k in torch.randperm(len(batches)).tolist():
            trip = batches[k]
            optimizer.zero_grad()
            model.loss(trip.x, trip.x[:, NOW], *batch_graphs[k], trip.segment_minutes, trip.route_minutes).backward()
            optimizer.step()
            schedule.step()
    return model.eval()


def graphs_of(trip: Trips) -> tuple[Graph, Graph]:
    """The graph between segments, and the graph from the segments of a route to the route."""
    segments = trip.on_route.nonzero().squeeze(1)
    segment_to_route = torch.stack([segments, trip.route[segments]])
    routes = graphs.from_edges(segment_to_route, num_src=len(trip.x), num_dst=len(trip.route_minutes))
    return graphs.from_edges(trip.edge_index, len(trip.x), edge_attr=trip.edge_attr), routes


def errors(trip: Trips, segment: Tensor, route: Tensor | None = None) -> tuple[float, float]:
    """Mean absolute errors of segments on routes and of routes. `route` defaults to the sum of its segments."""
    on = trip.on_route
    if route is None:
        route = torch.zeros(len(trip.route_minutes)).index_add(0, trip.route[on], segment[on])
    of_segments = (segment - trip.segment_minutes)[on].abs().mean().item()
    return of_segments, (route - trip.route_minutes).abs().mean().item()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trips", type=int, default=1200, help="number of trips for training")
    parser.add_argument("--epochs", type=int, default=15, help="number of training epochs")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the city, the trips and the model")
    return parser.parse_args()


if __name__ == "__main__":
    main()
