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

from experiment import Outcome, Row, measure, parser
from torch.optim import Adam

from mpnn import graphs
from mpnn.data import NodeClassification, cora, split_links
from mpnn.models import GCN, GraphSAGE, LinkPredictor
from mpnn.models.graph.link_prediction import Inner
from mpnn.train.link_predictor import auc, fit_link_predictor, link_scores
from mpnn.train.loop import History

MODELS = ("GAE", "GraphSAGE", "popularity")
PUBLISHED = {"GAE": ("0.910 ± 0.0002", "Kipf & Welling 2016, table 1")}


def train(name: str, data: NodeClassification, steps: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    x = data.x  # not normalized, as in the authors' code
    links = split_links(graphs.from_edges(data.edge_index, data.num_nodes), seed=seed)
    if name == "popularity":
        degree = links.graph.degree().float()
        scores = [degree[pairs].prod(0) for pairs in (links.test, links.test_absent)]
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), auc(*scores))
    encoder = GCN(x.shape[1], 16, 32, dropout=0.0) if name == "GAE" else GraphSAGE(x.shape[1], 16, 32)
    model, graph = LinkPredictor(encoder, Inner()), links.graph.with_self_loops()
    optimizer = Adam(model.parameters(), lr=0.01)
    history = fit_link_predictor(
        model, x, links, optimizer, graph, epochs=steps, progress=progress, checkpoint=checkpoint
    )
    return Outcome(history, auc(*link_scores(model, x, graph, links.test, links.test_absent)))


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
