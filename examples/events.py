"""Link prediction over time: TGAT and TGN (Xu et al. 2020; Rossi et al. 2020) against models without time.

Generated data: the claim is about a law, that a memory of past events tells what comes next, and the best score that
the law allows is known. The rule: 100 users and 60 items, which belong to 6 groups of 10. A user is in one group at a
time. At each of 6,000 events, a user drawn at random leaves the group for any with probability 0.1, then chooses an
item of the group. An event has features: the center of the item's group, 8 standard normal numbers, plus as much
noise. A model scores for each of the last 1,500 events the user with the item chosen, and with an item drawn at
random; models with time see all events before. The best score knows the group of the user's last event.

    python examples/events.py                           two minutes on one core
    python examples/events.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import graphs
from mpnn.data import NeighborBatch, neighbor_batches
from mpnn.models import TGAT, PairMLP, TGNMemory
from mpnn.train.link_predictor import auc
from mpnn.train.loop import History, Settings, fit

MODELS = ("TGN", "TGAT", "embeddings", "popularity", "group of the last event")
USERS, ITEMS, GROUPS, EVENTS, TRAIN, WIDTH, BATCH, LAST = 100, 60, 6, 6000, 4500, 8, 250, 10
NODES = USERS + ITEMS


class Events:
    """Events by the rule above: `user`, `item` [EVENTS], numbers of nodes; `time`, `features`; `other`, items drawn at
    random; `scores`, what the group of the user's last event says of item and other."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randint, size=(EVENTS,), generator=generator)
        leaves, new, member = torch.rand(EVENTS, generator=generator) < 0.1, draw(GROUPS), draw(ITEMS // GROUPS)
        self.user, self.time = draw(USERS), draw(1, 60).cumsum(0)  # seconds
        group, last = [user % GROUPS for user in range(USERS)], torch.full((USERS,), -1)
        in_group, known = torch.zeros(EVENTS, dtype=torch.int64), torch.zeros(EVENTS, dtype=torch.int64)
        for e, user in enumerate(self.user.tolist()):
            group[user] = int(new[e]) if leaves[e] else group[user]
            in_group[e], known[e], last[user] = group[user], last[user], group[user]
        self.item = USERS + in_group * (ITEMS // GROUPS) + member
        self.other = USERS + draw(ITEMS)
        centers = torch.randn(GROUPS, WIDTH, generator=generator)
        self.features = centers[in_group] + torch.randn(EVENTS, WIDTH, generator=generator)
        self.scores = [((ends - USERS) // (ITEMS // GROUPS) == known).double() for ends in (self.item, self.other)]
        both = torch.stack([torch.cat([self.user, self.item]), torch.cat([self.item, self.user])])
        graph = graphs.from_edges(both, NODES, edge_attr=self.features.repeat(2, 1))
        self.past = graphs.TemporalGraph(graph, self.time.repeat(2), latest=True)

    def batches(self, first: int, last: int) -> list[tuple[slice, NeighborBatch]]:
        """User, item and other item of each event, each with its last neighbors before the event."""
        ends = torch.stack([self.user, self.item, self.other], 1)[first:last].flatten()
        before = self.time[first:last].repeat_interleave(3)
        options = {"before": before, "batch_size": 3 * BATCH, "shuffle": False}
        found = neighbor_batches(self.past, ends, [LAST], **options)
        return [(slice(first + k * BATCH, min(first + (k + 1) * BATCH, last)), b) for k, b in enumerate(found)]


class Temporal(nn.Module):
    """Learned vectors of nodes, with a memory or without, through TGAT to the score of a pair."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.own = nn.Embedding(NODES, 16)
        self.memory = TGNMemory(NODES, WIDTH, 32, 16) if kind == "TGN" else None
        self.embed = None if kind == "embeddings" else TGAT(48 if self.memory else 16, 32, 1, 2, 16, WIDTH)
        self.score = PairMLP(16 if self.embed is None else 32, 32)

    def forward(self, batch: NeighborBatch) -> tuple[Tensor, Tensor]:
        """The scores of user and item, and of user and other item."""
        x = self.own(batch.sources if self.embed else batch.nodes)
        if self.memory is not None:
            x = torch.cat([x, self.memory(batch.sources)[0]], 1)
        z = x if self.embed is None else self.embed(x, batch.graphs, batch.ages)
        user, item, other = z.view(-1, 3, z.shape[1]).unbind(1)
        return self.score(user, item), self.score(user, other)


def train(name: str, epochs: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    events = Events(seed)
    if name in MODELS[3:]:
        count = torch.bincount(events.item[:TRAIN], minlength=NODES).double()
        scores = events.scores if "group" in name else [count[ends] for ends in (events.item, events.other)]
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), auc(*(score[TRAIN:] for score in scores)))
    model, batches = Temporal(name), events.batches(0, TRAIN)

    def observe(now: slice) -> None:
        if model.memory is not None:
            model.memory.observe(events.user[now], events.item[now], events.time[now], events.features[now])

    def loss(k: int) -> Tensor:
        if model.memory is not None:
            if k % len(batches) == 0:
                model.memory.reset()
            else:
                observe(batches[(k - 1) % len(batches)][0])
        item, other = model(batches[k % len(batches)][1])
        return F.softplus(-item).mean() + F.softplus(other).mean()

    steps = epochs * len(batches)
    optimizer = Adam(model.parameters(), lr=3e-3)
    history = fit(model, optimizer, loss, Settings(steps), progress=progress, checkpoint=checkpoint)
    model.eval()
    scores, now = [], batches[-1][0]
    with torch.no_grad():
        for after, batch in events.batches(TRAIN, EVENTS):
            observe(now)
            scores.append(model(batch))
            now = after
    return Outcome(history, auc(*map(torch.cat, zip(*scores, strict=True))))


def main() -> None:
    options = parser(__doc__, 3, MODELS).parse_args()
    epochs = options.steps or 15
    for name in options.models:
        row = Row(f"events-{name.lower().replace(' ', '-')}", "generated events", name, "AUC", "none", "")
        measure(row, partial(train, name, epochs), options, {"epochs": epochs} if name in MODELS[:3] else {})


if __name__ == "__main__":
    main()
