"""A custom aggregator in ten lines, as a function or as an object, that is robust against outliers.

Sensors on a grid predict which of four regions they are in, from their own measurements and those of their neighbors.
One sensor in five is broken and reports large numbers. Three networks differ in one argument, the aggregator: the mean,
a trimmed mean (a function), and a mean that gives more weight to messages near the median (an object with a learned
width).

    python examples/custom_aggregator.py                 seconds
    python examples/custom_aggregator.py --epochs 5      a quick test
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.aggregate import Aggregator, Index, Median, segment_sum
from mpnn.data import PointClassification
from mpnn.train.node_classifier import fit_node_classifier
from mpnn.update import Activate

SIDE, CHANNELS, REGIONS = 24, 8, 4


def trimmed_mean(messages: Tensor, index: Index) -> Tensor:
    """The mean of each component without the lowest and the highest quarter of its messages."""
    by_value = messages.argsort(dim=0, stable=True)
    order = by_value.gather(0, index[by_value].argsort(dim=0, stable=True))  # by destination, then by value
    rank = torch.arange(len(messages)) - index.ptr[index]
    cut = index.degree[index] // 4
    inner = (rank >= cut) & (rank < index.degree[index] - cut)
    sums = segment_sum(messages.gather(0, order)[inner], Index.of(index[inner], index.ptr))
    return sums / (index.degree - 2 * (index.degree // 4)).clamp(min=1).view(-1, *[1] * (messages.dim() - 1))


class Trust(nn.Module):
    """Weighted mean with the weights `exp(-(distance from the median / width)^2)` and a learned width."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(1.0))

    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        distance = messages - Median().reduce(messages, index)[index]
        weight = (-(distance / self.width).square()).exp()
        return segment_sum(weight * messages, index) / segment_sum(weight, index).clamp(min=1e-6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=100)
    options = parser.parse_args()

    data = sensors()
    graph = graphs.grid(SIDE, SIDE, connectivity=8).bind(SIDE * SIDE).with_self_loops()
    aggregators: dict[str, str | Callable[[Tensor, Index], Tensor] | Aggregator] = {
        "mean": "mean",
        "trimmed mean (a function)": trimmed_mean,
        "trust near the median (an object)": Trust(),
    }
    table = Table("aggregator", "test accuracy", title="sensors on a grid, one in five broken")
    for name, aggregate in aggregators.items():
        torch.manual_seed(0)
        network = MessagePassing(graph, aggregate, Activate(nn.Linear(CHANNELS, REGIONS)))
        optimizer = torch.optim.Adam(network.parameters(), lr=0.05)
        history = fit_node_classifier(network, graph, data, optimizer, epochs=options.epochs)
        table.add_row(name, f"{history.test_accuracy:.1%}")
    Console().print(table)


def sensors() -> PointClassification:
    """Readings are a mean for each region plus noise; one sensor in five is broken and reports large random numbers."""
    torch.manual_seed(0)
    at = torch.cartesian_prod(torch.arange(SIDE), torch.arange(SIDE)).float()
    region = torch.cdist(at, SIDE * torch.rand(REGIONS, 2)).argmin(1)
    readings = torch.randn(REGIONS, CHANNELS)[region] + torch.randn(SIDE**2, CHANNELS)
    broken = torch.rand(SIDE**2) < 0.2
    readings[broken] = 30 * torch.randn(int(broken.sum()), CHANNELS)
    part = torch.rand(SIDE**2)
    return PointClassification(readings, region, part < 0.3, (part >= 0.3) & (part < 0.4), part >= 0.4)


if __name__ == "__main__":
    main()
