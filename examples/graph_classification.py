"""Classification of molecules and proteins with the protocol of GIN: ten folds, and the epoch that is best on average.

Each of 350 epochs has 50 batches of 32 graphs; the learning rate is halved every 50 epochs. The accuracy on the fold
that was left out is measured after each epoch, and the epoch with the best mean over the ten folds counts (Xu et al.
2019, section 7). A killed script resumes where it was.

    python examples/graph_classification.py --models GIN --data MUTAG        one hour on one core
    python examples/graph_classification.py --seeds 1 --steps 2              a quick test: one fold
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import Graph, graphs
from mpnn.data import GraphClassification, tu
from mpnn.models import GIN, PNA, Graphormer
from mpnn.train.loop import Settings, fit

MODELS = ("GIN", "PNA", "Graphormer")
PUBLISHED = {("GIN", "MUTAG"): "89.4 ± 5.6", ("GIN", "PROTEINS"): "76.2 ± 2.8"}
EPOCH, BATCH = 50, 32

Folds = list[tuple[Tensor, Tensor]]
"""The graphs for training and those that are left out, of each fold."""


def build(name: str, collection: GraphClassification) -> nn.Module:
    """A model of graphs whose nodes have one-hot tags."""
    tags, classes = collection.num_tags, collection.num_classes
    if name == "GIN":
        return GIN(tags, classes)
    if name == "PNA":
        return PNA(tags, classes, 32)
    return Graphormer(tags, classes, dim=32, heads=4, layers=4)


class Molecules:
    """The graphs of a collection, bound once, to be put into batches."""

    def __init__(self, collection: GraphClassification) -> None:
        self.collection = collection
        self.x = [F.one_hot(small.tags, collection.num_tags).float() for small in collection.graphs]
        self.graphs = [graphs.from_edges(small.edge_index, small.num_nodes) for small in collection.graphs]
        self.y = torch.tensor([small.label for small in collection.graphs])

    def logits(self, model: nn.Module, index: Tensor) -> Tensor:
        """The logits [B, classes] of the graphs of `index`."""
        chosen: list[Graph] = [self.graphs[i] for i in index.tolist()]
        x = torch.cat([self.x[i] for i in index.tolist()])
        if isinstance(model, Graphormer):
            return model(x, chosen)
        graph_of_node = torch.repeat_interleave(torch.tensor([graph.num_dst for graph in chosen]))
        edges = torch.stack([torch.arange(len(x)), graph_of_node])
        pool = graphs.from_edges(edges, num_src=len(x), num_dst=len(chosen))  # from each node to its graph
        return model(x, graphs.batch(chosen), pool=pool)


def train(
    name: str, molecules: Molecules, folds: Folds, steps: int, fold: int, progress: Any, checkpoint: Any
) -> Outcome:
    """Trains without one fold and measures the accuracy on it after each epoch."""
    known, held_out = folds[fold]
    model = build(name, molecules.collection)

    def loss(k: int) -> Tensor:
        index = known[torch.randperm(len(known))[:BATCH]]
        return F.cross_entropy(molecules.logits(model, index), molecules.y[index])

    @torch.no_grad()
    def validate() -> dict[str, float]:
        model.eval()
        predicted = torch.cat([molecules.logits(model, part).argmax(1) for part in held_out.split(128)])
        return {"accuracy": 100 * (predicted == molecules.y[held_out]).float().mean().item()}

    settings = Settings(steps, rate=lambda step: 0.5 ** (step // (50 * EPOCH)), validate_every=EPOCH)
    optimizer = Adam(model.parameters(), lr=0.01 if name == "GIN" else 0.001, fused=True)
    history = fit(model, optimizer, loss, settings, validate=validate, progress=progress, checkpoint=checkpoint)
    return Outcome(history, curve=history.val_accuracy)


def main() -> None:
    options = parser(__doc__, 10, MODELS)
    options.add_argument("--data", nargs="+", choices=["MUTAG", "PROTEINS"], default=["MUTAG", "PROTEINS"])
    options = options.parse_args()
    steps = options.steps or 350 * EPOCH
    for data in options.data:
        molecules = Molecules(tu(data))
        splits = StratifiedKFold(10, shuffle=True, random_state=0).split(molecules.y, molecules.y)
        folds = [(torch.from_numpy(known), torch.from_numpy(held_out)) for known, held_out in splits]
        for name in options.models:
            published = PUBLISHED.get((name, data), "none")
            source = "Xu et al. 2019, table 1" if published != "none" else ""
            row = Row(f"{data.lower()}-{name.lower()}", data, name, "% accuracy, 10 folds", published, source)
            measure(row, partial(train, name, molecules, folds, steps), options, {"steps": steps})


if __name__ == "__main__":
    main()
