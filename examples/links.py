"""Link prediction on Cora: auto-encoders that score absent citations (Kipf & Welling 2016).

85% of the links are for training, 5% for validation, 10% for the test, each with as many pairs that are not linked.
The area under the ROC curve (AUC) of the test links is printed next to the published one and to that of popularity: a
pair scores the product of its degrees.

    python examples/links.py                           ten minutes on two cores
    python examples/links.py --seeds 1 --steps 3       a quick test
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.optim import Adam

from mpnn import graphs
from mpnn.data import NodeClassification, cora
from mpnn.models import GCN, GraphSAGE, LinkPredictor
from mpnn.models.graph.link_prediction import Inner
from mpnn.train.loop import History, Settings, fit

MODELS = ("GAE", "GraphSAGE", "popularity")
PUBLISHED = {"GAE": ("0.910 ± 0.0002", "Kipf & Welling 2016, table 1")}


class Links:
    """The links of a graph [2, L], one direction each, split at random; `absent` pairs for validation and test."""

    def __init__(self, data: NodeClassification, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        src, dst = data.edge_index
        links = data.edge_index[:, src < dst]
        links = links[:, torch.randperm(links.shape[1], generator=generator)]
        held = [links.shape[1] // 20, links.shape[1] // 10]
        self.val, self.test, self.train = links.split([*held, links.shape[1] - sum(held)], 1)
        whole = graphs.from_edges(data.edge_index, data.num_nodes)
        self.val_absent, self.test_absent = graphs.absent_edges(whole, sum(held), generator).split(held, 1)
        self.graph = graphs.from_edges(self.train, data.num_nodes).undirected()


def auc(positive: Tensor, negative: Tensor) -> float:
    truth = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))])
    return float(roc_auc_score(truth, torch.cat([positive, negative])))


def train(name: str, data: NodeClassification, steps: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    links, x = Links(data, seed), data.x  # not normalized, as in the authors' code
    if name == "popularity":
        degree = links.graph.degree().float()
        scores = [degree[pairs].prod(0) for pairs in (links.test, links.test_absent)]
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), auc(*scores))
    encoder = GCN(x.shape[1], 16, 32, dropout=0.0) if name == "GAE" else GraphSAGE(x.shape[1], 16, 32)
    model, graph = LinkPredictor(encoder, Inner()), links.graph.with_self_loops()

    @torch.no_grad()
    def measured(positive: Tensor, negative: Tensor) -> float:
        model.eval()
        return auc(model(x, positive, graph), model(x, negative, graph))

    history = fit(
        model,
        Adam(model.parameters(), lr=0.01),
        lambda k: model.loss(x, graph, links.train),
        Settings(steps, keep="best", validate_every=5),
        validate=lambda: {"AUC": measured(links.val, links.val_absent)},
        progress=progress,
        checkpoint=checkpoint,
    )
    return Outcome(history, measured(links.test, links.test_absent))


def main() -> None:
    options = parser(__doc__, 10, MODELS).parse_args()
    data = cora()
    steps = options.steps or 200
    for name in options.models:
        published, source = PUBLISHED.get(name, ("none", ""))
        row = Row(f"links-{name.lower()}", "links of Cora", name, "AUC", published, source)
        measure(row, partial(train, name, data, steps), options, {"steps": steps, "features": "words, 0 or 1"})


if __name__ == "__main__":
    main()
