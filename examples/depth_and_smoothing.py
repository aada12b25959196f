"""Do deep graph networks smooth everything away? Five models of 2 to 64 layers on Cora.

A layer of GCN or GAT replaces a paper's features by a weighted mean over the papers it cites, so many layers make all
papers alike. MAGNA, Graph-BERT and GPS are deep by other means: residual connections, and attention over a small graph
of its own for each paper (Graph-BERT) or over all papers (GPS). The figure has the test accuracy, and the Dirichlet
energy of the features that enter the last map,

    sum over citations |h_i - h_j|^2 / sum over citations (|h_i|^2 + |h_j|^2)

which is 0 if papers have the features of those they cite, and about 1 if the two have nothing to do with each other.

All models have width 32 and the same training; only depth changes. It is a demonstration, not the papers' settings,
which examples/cora.py has.

    python examples/depth_and_smoothing.py                                ten minutes on an idle core
    python examples/depth_and_smoothing.py --depths 2 --epochs 1          a quick test
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import torch
from demonstration import measure, parser, save
from experiment import console
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import Additive, Attention, Degree
from mpnn.data import NodeClassification, cora
from mpnn.models import GPS, MAGNA, GraphBert
from mpnn.models.graph.graph_bert import intimate_subgraphs
from mpnn.models.layers.stack import Stack
from mpnn.train.node_classifier import fit_node_classifier
from mpnn.update import Activate

NAME = "depth_and_smoothing"
WIDTH, DROPOUT = 32, 0.5


def gcn(features: int, classes: int, layers: int) -> nn.Module:
    return _stack(layers, F.relu, Degree(features, WIDTH), lambda: Degree(WIDTH, WIDTH), Degree(WIDTH, classes))


def gat(features: int, classes: int, layers: int) -> nn.Module:
    first = Additive(features, WIDTH // 4, 4)
    last = Additive(WIDTH, classes, 1, concat=False)
    return _stack(layers, F.elu, first, lambda: Additive(WIDTH, WIDTH // 4, 4), last)


def _stack(
    layers: int,
    activation: Callable[[Tensor], Tensor],
    first: Attention,
    inner: Callable[[], Attention],
    last: Attention,
) -> nn.Module:
    hidden = [first, *(inner() for _ in range(layers - 2))]
    rounds = [MessagePassing(None, "sum", Activate(activation), attention) for attention in hidden]
    return Stack([*rounds, MessagePassing(None, "sum", None, last)], DROPOUT)


MODELS: dict[str, tuple[Callable[[int, int, int], nn.Module], int]] = {
    "GCN": (gcn, 64),
    "GAT": (gat, 64),
    "MAGNA": (lambda features, classes, layers: MAGNA(features, classes, WIDTH, 4, layers, dropout=DROPOUT), 32),
    "Graph-BERT": (
        lambda features, classes, layers: GraphBert(features, classes, WIDTH, 2, layers, residual="graph"),
        16,
    ),
    "GPS": (lambda features, classes, layers: GPS(features, classes, WIDTH, 4, layers, dropout=DROPOUT), 8),
}
"""The models, and the most layers, fewer where a layer takes long: those of MAGNA pass messages over 6 hops, those of
Graph-BERT over 8 nodes for each paper, those of GPS over all pairs of papers."""


def train(
    name: str, layers: int, epochs: int, data: NodeClassification, graph: Any, citations: Graph
) -> dict[str, float]:
    """Test accuracy in percent, and Dirichlet energy, after training."""
    torch.manual_seed(0)
    model = MODELS[name][0](data.x.shape[1], data.num_classes, layers)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
    history = fit_node_classifier(model, graph, data, optimizer, epochs=epochs)
    assert history.test_accuracy is not None
    return {"accuracy": round(100 * history.test_accuracy, 2), "energy": energy(model, data.x, graph, citations)}


@torch.no_grad()
def energy(model: Any, x: Tensor, graph: Any, citations: Graph) -> float:
    """The Dirichlet energy of what enters the last map."""
    last, inputs = model.layers[-1] if isinstance(model, Stack) else model.head, []
    handle = last.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    model.eval()(x, graph)
    handle.remove()
    (h,), (src, dst) = inputs, citations.edge_index
    lengths = h[src].square().sum() + h[dst].square().sum()
    return float((h[src] - h[dst]).square().sum() / lengths.clamp(min=1e-30))


def draw(values: dict[tuple[str, int], dict[str, float]]) -> plt.Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    figure.suptitle("GCN and GAT fail from 16 layers on; MAGNA and Graph-BERT do not", fontsize=13)
    for color, name in enumerate(MODELS):
        points = {layers: value for (model, layers), value in values.items() if model == name}
        style = {"color": f"C{color}", "marker": "o", "label": name}
        left.plot(list(points), [p["accuracy"] for p in points.values()], **style)
        right.plot(list(points), [max(p["energy"], 1e-7) for p in points.values()], **style)
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.xaxis.set_major_formatter("{x:g}")
        ax.set_xlabel("layers")
    left.axhline(100 / 7, color="grey", linestyle=":", linewidth=1)
    left.text(2, 100 / 7 + 1.5, "a guess", fontsize=9, color="grey")
    left.set(ylabel="test accuracy on Cora, %", ylim=(0, 90))
    right.set(yscale="log", ylabel="Dirichlet energy of the last features (0: all alike)")
    right.legend(loc="lower left")
    return figure


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--depths", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="numbers of layers")
    command.add_argument("--epochs", type=int, default=60, help="training steps of each network")
    options = command.parse_args()
    data = cora()
    citations = graphs.from_edges(data.edge_index, data.num_nodes)
    along = citations.with_self_loops()
    inputs: dict[str, Any] = dict.fromkeys(MODELS, along) | {"Graph-BERT": intimate_subgraphs(citations, 7)}
    runs = [(name, depth) for depth in options.depths for name, (_, most) in MODELS.items() if depth <= most]
    jobs = {
        f"{name}, {depth} layers": partial(train, name, depth, options.epochs, data, inputs[name], citations)
        for name, depth in runs
    }
    values = dict(zip(runs, measure(NAME, jobs, options, {"epochs": options.epochs}).values(), strict=True))
    for name in MODELS:
        of_model = {depth: value for (model, depth), value in values.items() if model == name}
        text = "; ".join(f"{k}: {v['accuracy']:.1f}%, {v['energy']:.2g}" for k, v in of_model.items())
        console.print(f"{name}, accuracy and energy by layers: {text}", soft_wrap=True)
    save(draw(values), NAME, options)


if __name__ == "__main__":
    main()
