"""How deep must a network be? As deep as its graph's diameter.

Every node holds one of four symbols, and must say the symbols of all nodes. Four graphs over 11 nodes, and 0 to 11
layers of the same network: only the graph and the depth change. A node can learn the symbol of another one only if
there are as many layers as edges between them, so the accuracy should be

    reach + (1 - reach) / 4        reach: the share of pairs that this many layers connect, `graph.reach(layers)`

and it should come to 100% when the number of layers is the diameter, `graph.diameter()`. The figure has what was
trained as points on the lines that the graph predicts.

    python examples/depth_and_diameter.py                   six minutes on one core
    python examples/depth_and_diameter.py --steps 5 --deepest 2          a quick test
"""

from __future__ import annotations

from functools import partial

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.update import FeedForward

NAME = "depth_and_diameter"
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
    """Returns the answers of the nodes for random symbols, and the right answers."""
    symbols = torch.randint(SYMBOLS, (batch, NODES))
    return model(symbols), symbols[:, None].expand(-1, NODES, -1)


def predicted(graph: Graph, layers: int) -> float:
    """The accuracy of a node that knows all symbols within reach, and guesses the others."""
    reach = graph.reach(layers) if layers else 1 / NODES
    return reach + (1 - reach) / SYMBOLS


def draw(found: dict[str, dict[int, float]]) -> plt.Figure:
    figure, ax = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for color, (name, accuracy) in enumerate(found.items()):
        graph, depths = GRAPHS[name], list(accuracy)
        ax.plot(depths, [100 * predicted(graph, k) for k in depths], color=f"C{color}", linewidth=1.5)
        label = f"{name}, diameter {graph.diameter()}"
        ax.plot(depths, [100 * accuracy[k] for k in depths], "o", color=f"C{color}", label=label)
        if graph.diameter() in accuracy:
            ax.axvline(graph.diameter(), color=f"C{color}", linewidth=0.8, linestyle=":")
    ax.set(xlabel="layers", ylabel="symbols that nodes know, %", ylim=(20, 103))
    ax.set_title("A network knows what its graph lets it hear: points trained, lines predicted", fontsize=11)
    ax.legend(loc="lower right", fontsize=9)
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--steps", type=int, default=500, help="training steps of each network")
    command.add_argument("--deepest", type=int, default=NODES, help="the largest number of layers")
    options = command.parse_args()
    runs = [(name, k) for name, g in GRAPHS.items() for k in range(min(g.diameter() + 1, options.deepest) + 1)]
    jobs = {f"{name}, {k} layers": partial(train, GRAPHS[name], k, options.steps) for name, k in runs}
    values = measure(NAME, jobs, options, {"steps": options.steps})
    found: dict[str, dict[int, float]] = {name: {} for name in GRAPHS}
    for (name, layers), value in zip(runs, values.values(), strict=True):
        found[name][layers] = value
    for name, accuracy in found.items():
        text = " ".join(f"{value:.0%}" for value in accuracy.values())
        console.print(f"{name}, diameter {GRAPHS[name].diameter()}: {text}", soft_wrap=True)
    worst = max(abs(value - predicted(GRAPHS[name], k)) for name, by in found.items() for k, value in by.items())
    console.print(f"largest distance between trained and predicted: {100 * worst:.1f} points")
    save(draw(found), NAME, options)


if __name__ == "__main__":
    main()
