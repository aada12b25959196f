"""A training step of a PyTorch Geometric model, before and after one line: `mpnn.pyg.use(model)`.

Both models have the same weights and graph. Steps alternate, and the times are the medians.

    python examples/pyg_one_line.py
    python examples/pyg_one_line.py --model GraphSAGE --nodes 20000
"""

from __future__ import annotations

import argparse
import copy
import time

import torch
import torch_geometric.nn as pyg
from torch import Tensor, nn

import mpnn.pyg

MODELS = {"GAT": pyg.GAT, "GCN": pyg.GCN, "GIN": pyg.GIN, "GraphSAGE": pyg.GraphSAGE}


def seconds_of_step(model: nn.Module, x: Tensor, edge_index: Tensor) -> float:
    began = time.perf_counter()
    model(x, edge_index).square().mean().backward()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="GAT")
    parser.add_argument(
        "--nodes", type=int, default=20_000, help="number of nodes; each has 14 in-neighbors on average"
    )
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed")
    options = parser.parse_args()

    torch.manual_seed(0)
    x = torch.randn(options.nodes, 64)
    edge_index = torch.randint(0, options.nodes, (2, 14 * options.nodes))
    original = MODELS[options.model](64, 64, num_layers=3, **({"heads": 4} if options.model == "GAT" else {}))
    model = copy.deepcopy(original)

    report = mpnn.pyg.use(model)  # the one line

    print(report)
    with torch.no_grad():
        difference = (model(x, edge_index) - original(x, edge_index)).abs().max().item()
    print(f"largest difference of the outputs: {difference:.1e}")
    for each in (original, model):
        seconds_of_step(each, x, edge_index)  # the first step plans and caches
    times = torch.tensor(
        [[seconds_of_step(each, x, edge_index) for each in (original, model)] for _ in range(options.steps)]
    )
    before, after = times.median(0).values.tolist()
    print(
        f"{options.model}, {options.nodes:,} nodes, forward and backward: {1e3 * before:.1f} ms before, "
        f"{1e3 * after:.1f} ms after, {before / after:.1f} times as fast"
    )


if __name__ == "__main__":
    main()
