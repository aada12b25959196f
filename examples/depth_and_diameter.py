"""How deep must a network be? As deep as its graph's diameter.

Every node holds one of four symbols, and must say the symbols of all nodes. Four graphs over 11 nodes, and 0 to 11
layers of the same network: only the graph and the depth change. A node can learn the symbol of another one only if
there are as many layers as edges between them, so the accuracy should be

    reach + (1 - reach) / 4        reach: the share of pairs that so many layers connect, `graph.reach(layers)`

and it should come to 100% when the number of layers is the diameter, `graph.diameter()`. The figure has what was
trained as points on the lines that the graph predicts.

    python examples/depth_and_diameter.py                   six minutes on one core
    python examples/depth_and_diameter.py --steps 5 --deepest 2          a quick test
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from rich.progress import Progress
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.update import FeedForward

NODES, SYMBOLS, WIDTH = 11, 4, 64


def tree() -> Graph:
    """A binary tree: node i is the parent of 2 i + 1 and 2 i + 2."""
    child = torch.arange(1, NODES)
    return graphs.from_edges(torch.stack([child, (child - 1) // 2]), NODES).undirected().with_self_loops()


def ring() -> Graph:
    node = torch.arange(NODES)
    return graphs.from_edges(torch.stack([node, (node + 1) % NODES]), NODES).undirected().with_self_loops()


GRAPHS = {
    "path: window(1)": graphs.window(1).bind(NODES),
    "ring": ring(),
    "tree": tree(),
    "hub: global_nodes(1)": (graphs.global_nodes(1) | graphs.identity()).bind(NODES),
}


class Residual(nn.Module):
    """An update: what was received, and a learned function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = FeedForward(WIDTH)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return message + self.learned(message)


class Network(nn.Module):
    """Layers that take the maximum of the features of a node and its in-neighbors, then a residual network."""

    def __init__(self, graph: Graph, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(NODES * SYMBOLS, WIDTH)
        self.layers = nn.ModuleList(MessagePassing(graph, "max", Residual(), None) for _ in range(layers))
        self.head = nn.Linear(WIDTH, NODES * SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        """Symbols of nodes [B, N] -> logits [B, N, N, symbols]: what each node says about each node."""
        own = torch.eye(NODES)[:, :, None] * F.one_hot(symbols, SYMBOLS)[:, :, None].float()
        h = self.embed(own.flatten(2)).relu()
        for layer in self.layers:
            h = layer(h)
        return self.head(h).unflatten(-1, (NODES, SYMBOLS))


def train(graph: Graph, layers: int, steps: int) -> float:
    """The accuracy on new symbols, after training."""
    torch.manual_seed(0)
    model = Network(graph, layers)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 2))
    for _ in range(steps):
        logits, said = answers(model, 32)
        loss = F.cross_entropy(logits.flatten(0, 2), said.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        logits, said = answers(model, 500)
    return float((logits.argmax(-1) == said).double().mean())


def answers(model: Network, batch: int) -> tuple[Tensor, Tensor]:
    """What the nodes say about random symbols, and what they should say."""
    symbols = torch.randint(SYMBOLS, (batch, NODES))
    return model(symbols), symbols[:, None].expand(-1, NODES, -1)


def draw(found: dict[str, dict[int, float]], path: Path) -> None:
    figure, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for colour, (name, accuracy) in enumerate(found.items()):
        graph, depths = GRAPHS[name], list(accuracy)
        reach = [graph.reach(layers) if layers else 1 / NODES for layers in depths]
        ax.plot(depths, [100 * (r + (1 - r) / SYMBOLS) for r in reach], color=f"C{colour}", linewidth=1.5)
        label = f"{name}, diameter {graph.diameter()}"
        ax.plot(depths, [100 * accuracy[k] for k in depths], "o", color=f"C{colour}", label=label)
        if graph.diameter() in accuracy:
            ax.axvline(graph.diameter(), color=f"C{colour}", linewidth=0.8, linestyle=":")
    ax.set(xlabel="layers", ylabel="symbols that nodes know, %", ylim=(20, 103))
    ax.set_title("A network knows what its graph lets it hear: points trained, lines predicted", fontsize=11)
    ax.legend(loc="lower right", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each network")
    parser.add_argument("--deepest", type=int, default=NODES, help="the largest number of layers")
    parser.add_argument("--out", type=Path, default=Path("runs/depth"), help="folder of the figure and the numbers")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[int, float]] = {}
    with Progress(transient=True) as bars:
        bar = bars.add_task("training", total=sum(min(g.diameter() + 1, options.deepest) + 1 for g in GRAPHS.values()))
        for name, graph in GRAPHS.items():
            found[name] = {}
            for layers in range(min(graph.diameter() + 1, options.deepest) + 1):
                found[name][layers] = train(graph, layers, options.steps)
                bars.advance(bar)
    worst = 0.0
    for name, accuracy in found.items():
        for layers, value in accuracy.items():
            reach = GRAPHS[name].reach(layers) if layers else 1 / NODES
            worst = max(worst, abs(value - reach - (1 - reach) / SYMBOLS))
        text = " ".join(f"{value:.0%}" for value in accuracy.values())
        print(f"{name}, diameter {GRAPHS[name].diameter()}: {text}")
    print(f"largest distance between trained and predicted: {100 * worst:.1f} points")
    record = {"steps": options.steps, "largest_distance": worst, "accuracy": found}
    (options.out / "depth_and_diameter.json").write_text(json.dumps(record, indent=1) + "\n")
    draw(found, options.out / "depth_and_diameter.png")


if __name__ == "__main__":
    main()
