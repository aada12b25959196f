"""Claims of lectures on transformers and graphs that take a training each: scores, positions, an LSTM, graph networks,
and networks as graphs.

    python examples/claims_trained.py                       6 minutes on a core that others share
    python examples/claims_trained.py --steps 2             a quick test

Each function below measures one claim, which its docstring states. Times are processor times of one thread.
docs/results.md says where each claim does not hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean, stdev
from time import process_time

import networkx as nx
import torch
from claims import Numbers, seeded
from demonstration import measure, parser
from experiment import console
from heads_as_hedge import NODES, SYMBOLS, WIDTH, questions
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import AdditiveV2, Attention, DotProduct
from mpnn.attention.spec import KeyValue
from mpnn.cli.tasks import manual
from mpnn.data import Characters, batches, digits
from mpnn.models import GAT, GCN, GPT, MeshGraphNet, RelationalMLP
from mpnn.models.layers.positions import sinusoidal
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.train.node_classifier import node_loss, node_scores
from mpnn.update import FeedForward, PreNorm


class Score(KeyValue):
    """e_ij = h_i^T h_j, or h_i^T W h_j with a map; the messages are V h_j. Both divided by sqrt(D)."""

    def __init__(self, query: nn.Module) -> None:
        super().__init__()
        self.to_query, self.to_value = query, nn.Linear(WIDTH, WIDTH)

    def project(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        return self.to_query(dst).unsqueeze(-2), src.unsqueeze(-2), self.to_value(src).unsqueeze(-2)

    def round(self, query: Tensor, key: Tensor, value: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        return Round(graph, value, Dot(query, key, WIDTH**-0.5))


def scores(steps: int) -> Numbers:
    """Attention needs a score that distinguishes the query from the key: h^T h is the same in both directions, h^T W h
    (Luong et al. 2015) and additive attention (Bahdanau et al. 2015) are not. The share of right answers when each of
    16 nodes asks for the symbol of another by its name, one layer of one head; and milliseconds of a step."""
    kinds: dict[str, Callable[[], Attention]] = {
        "h^T h": lambda: Score(nn.Identity()),
        "h^T W h": lambda: Score(nn.Linear(WIDTH, WIDTH, bias=False)),
        "additive": lambda: AdditiveV2(WIDTH, WIDTH, activation=torch.tanh),
    }
    numbers = {}
    for name, attention in kinds.items():
        torch.manual_seed(0)
        layer = MessagePassing(graphs.complete(), "sum", PreNorm(WIDTH, FeedForward(WIDTH)), attention())
        model = nn.Sequential(
            nn.Linear(2 * NODES + SYMBOLS, WIDTH), layer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS)
        )

        def examples(count: int) -> tuple[Tensor, Tensor]:
            (who, symbol, asked), answer = questions(count)
            parts = F.one_hot(who, NODES), F.one_hot(symbol, SYMBOLS), F.one_hot(asked, NODES)
            return torch.cat(parts, -1).float(), answer

        numbers[name], numbers[f"{name}, ms a step"] = accuracy(model, examples, steps)
    return numbers


def positions(steps: int) -> Numbers:
    """A graph knows no order, so positions must be features, and not all features do at a length that was not trained.
    Each symbol is asked for the one before it, after training on 8 to 24 symbols; the share of right answers by length.
    The position is not given, or as a feature: its index, the index divided by the length, its binary digits, a one-hot
    vector, or sines (Vaswani et al. 2017), concatenated with the symbol; or sines added to it. Two layers over
    complete()."""
    numbers = {}
    for name in ("none", "index", "normalized", "binary", "one-hot", "sines", "sines, added"):
        torch.manual_seed(0)
        embed = nn.Linear(SYMBOLS_OF_TEXT + (0 if name == "sines, added" else position(name, 2).shape[1]), TEXT_WIDTH)
        layers = [
            MessagePassing(
                graphs.complete(), "sum", PreNorm(TEXT_WIDTH, FeedForward(TEXT_WIDTH)), DotProduct(TEXT_WIDTH, 4)
            )
            for _ in range(2)
        ]
        rest = nn.Sequential(*layers, nn.LayerNorm(TEXT_WIDTH), nn.Linear(TEXT_WIDTH, SYMBOLS_OF_TEXT))

        def answers(symbols: Tensor, name: str = name, embed: nn.Module = embed, rest: nn.Module = rest) -> Tensor:
            x, at = F.one_hot(symbols, SYMBOLS_OF_TEXT).float(), position(name, symbols.shape[1])
            if name == "sines, added":
                return rest(embed(x) + at)
            return rest(embed(torch.cat([x, at.expand(len(x), -1, -1)], -1)))

        optimizer = torch.optim.Adam([*embed.parameters(), *rest.parameters()], 2e-3)
        for _ in range(steps):
            symbols = torch.randint(SYMBOLS_OF_TEXT, (32, int(torch.randint(8, 25, ()))))
            loss = F.cross_entropy(answers(symbols).flatten(0, 1), symbols.roll(1, 1).flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for n in (12, 24, 32, 48):
            symbols = torch.randint(SYMBOLS_OF_TEXT, (200, n))
            with torch.no_grad():
                right = answers(symbols).argmax(-1) == symbols.roll(1, 1)
            numbers[f"{name}, N = {n}"] = float(right.double().mean())
    return numbers


SYMBOLS_OF_TEXT, TEXT_WIDTH = 8, 64


def position(name: str, n: int) -> Tensor:
    """Features of n positions, [n, width]."""
    index = torch.arange(n)[:, None]
    if name == "none":
        return torch.zeros(n, 1)
    if name == "index":
        return index.float()
    if name == "normalized":
        return index / (n - 1)
    if name == "binary":
        return (index >> torch.arange(6) & 1).float()
    if name == "one-hot":
        return F.one_hot(index[:, 0], TEXT_WIDTH).float()
    return sinusoidal(n, TEXT_WIDTH)


def accuracy(model: nn.Module, examples: Callable[[int], tuple[Tensor, Tensor]], steps: int) -> tuple[float, float]:
    """Right answers on new examples after training on others, and milliseconds of a step."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    began = process_time()
    for _ in range(steps):
        x, answer = examples(32)
        loss = F.cross_entropy(model(x).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    taken = 1000 * (process_time() - began) / steps
    with torch.no_grad():
        x, answer = examples(500)
        return float((model.eval()(x).argmax(-1) == answer).double().mean()), taken


class LSTM(nn.Module):
    """A character model with the weights of a GPT of two layers of width 64, to within 1%."""

    def __init__(self, vocabulary: int, dim: int) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(vocabulary, dim), nn.LSTM(dim, dim, 2, batch_first=True)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.lstm(self.embed(tokens))[0]).flatten(0, 1), targets.flatten())


def lstm(steps: int) -> Numbers:
    """An LSTM and a transformer with equally many weights learn a text equally well. Nats per character of Python's
    manual after equal steps of 16 crops of 128 characters, the best of two learning rates, and what a step takes."""
    text = manual()
    symbols = Characters(text)
    tokens = symbols.encode(text)
    cut = len(tokens) * 9 // 10
    count = len(symbols)
    builders: dict[str, Callable[[], nn.Module]] = {
        "transformer": lambda: GPT(count, 64, 4, 2, context=128),
        "LSTM": lambda: LSTM(count, 81),
    }
    numbers: Numbers = {}
    for name, build in builders.items():
        losses = []
        for rate in (2e-3, 6e-3):
            torch.manual_seed(0)
            model = build()
            optimizer = torch.optim.Adam(model.parameters(), rate)
            began = process_time()
            for _ in range(steps):
                optimizer.zero_grad()
                model.loss(*batches(tokens[:cut], 128, 16)).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            numbers[f"{name}, ms a step"] = 1000 * (process_time() - began) / steps
            with torch.no_grad():
                torch.manual_seed(1)
                losses.append(mean(float(model.eval().loss(*batches(tokens[cut:], 128, 16))) for _ in range(20)))
        numbers[f"{name}, nats"] = min(losses)
        numbers[f"{name}, weights"] = sum(weight.numel() for weight in model.parameters())
    return numbers


def graph_networks(steps: int) -> Numbers:
    """Attention over edges is better than a mean over them (Velickovic et al. 2018), and states of edges are better
    still (Battaglia et al. 2018). Digits over their 8 nearest images, 200 of 1,797 labeled: the share of right test
    images, mean and standard deviation over three seeds, and milliseconds of a step; two layers of width 64."""
    images = digits()
    graph = graphs.knn(images.x, 8).undirected().with_self_loops()
    src, dst = graph.edge_index
    distance = (images.x[src] - images.x[dst]).norm(dim=1, keepdim=True)
    nets: dict[str, tuple[Callable[[], nn.Module], Graph]] = {
        "GCN": (lambda: GCN(64, 10, 64), graph),
        "attention (GAT)": (lambda: GAT(64, 10, 8, 8), graph),
        "states of edges": (
            lambda: MeshGraphNet(64, 1, 10, 64, 2, hidden=1),
            graphs.from_edges(graph.edge_index, len(images.x), edge_attr=distance),
        ),
    }
    numbers: Numbers = {}
    for name, (build, over) in nets.items():
        reached, spent = [], []
        for seed in range(3):
            torch.manual_seed(seed)
            model = build()
            optimizer = torch.optim.Adam(model.parameters(), 0.005, weight_decay=5e-4)
            began = process_time()
            for _ in range(min(steps, 60)):
                optimizer.zero_grad()
                node_loss(model.train()(images.x, over)[images.train_mask], images.y[images.train_mask]).backward()
                optimizer.step()
            spent.append(1000 * (process_time() - began) / min(steps, 60))
            reached.append(node_scores(model, over, images, images.test_mask)[1])
        numbers |= {name: mean(reached), f"{name}, spread": stdev(reached), f"{name}, ms a step": min(spent)}
    return numbers


def relational_graphs(steps: int) -> Numbers:
    """The graph of a neural network decides how well it learns, and a sweet spot lies between a lattice and a complete
    graph (You et al. 2020). Right digits of perceptrons of 16 nodes with equally many multiplications, mean and
    standard deviation over five seeds; and the average path length and the clustering of each graph."""
    images = digits()
    budget = 16 * 16 * 4 * 4  # multiplications of a hidden layer over all pairs, 4 neurons a node
    kinds = {
        "complete": nx.complete_graph(16),
        "ring of 2": nx.watts_strogatz_graph(16, 2, 0.0),
        "ring of 4": nx.watts_strogatz_graph(16, 4, 0.0),
        "small world of 4": nx.connected_watts_strogatz_graph(16, 4, 0.3, seed=0),
        "random of 4": nx.connected_watts_strogatz_graph(16, 4, 1.0, seed=0),
        "small world of 8": nx.connected_watts_strogatz_graph(16, 8, 0.3, seed=0),
        "nodes alone": nx.empty_graph(16),
    }
    numbers: Numbers = {}
    for name, drawn in kinds.items():
        graph = graphs.from_networkx(drawn).with_self_loops()
        dim = round((budget / graph.num_edges) ** 0.5)
        reached = []
        for seed in range(5):
            torch.manual_seed(seed)
            model = RelationalMLP(64, 10, 16 * dim, 5, nodes=16, graph=graph)
            optimizer = torch.optim.Adam(model.parameters(), 3e-3, weight_decay=1e-4)
            for _ in range(min(steps, 100)):
                optimizer.zero_grad()
                model.loss(images.x[images.train_mask], images.y[images.train_mask]).backward()
                optimizer.step()
            with torch.no_grad():
                right = model.eval()(images.x).argmax(-1) == images.y
            reached.append(float(right[images.test_mask].double().mean()))
        numbers |= {f"{name}: right": mean(reached), f"{name}: spread": stdev(reached)}
        if nx.is_connected(drawn):
            numbers[f"{name}: path length"] = nx.average_shortest_path_length(drawn)
        numbers[f"{name}: clustering"] = nx.average_clustering(drawn)
    return numbers


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=400, help="training steps of each network, at most")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    claims = (scores, positions, lstm, graph_networks, relational_graphs)
    points = {claim.__name__: partial(seeded, partial(claim, arguments.steps)) for claim in claims}
    results = measure("claims_trained", points, arguments, {"steps": arguments.steps})
    table = Table("claim", "measured")
    for name, numbers in results.items():
        table.add_row(name, "\n".join(f"{key}: {value:.4g}" for key, value in numbers.items()))
    console.print(table)


if __name__ == "__main__":
    main()
