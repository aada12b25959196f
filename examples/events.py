"""Link prediction over time: TGAT and TGN (Xu et al. 2020; Rossi et al. 2020) against models without time.

Generated data by default: the claim is about a law, that a memory of past events predicts what comes next, and the best
score that the law allows is known. The rule: 100 users and 60 items, which belong to 6 groups of 10. A user is in one
group at a time. At each of 6,000 events, a user drawn at random leaves the group for any with probability 0.1, then
chooses an item of the group. An event has features: the center of the item's group, 8 standard normal numbers, plus as
much noise. A model scores for each of the last 1,500 events the user with the item chosen, and with an item drawn at
random; models with time see all events before. The best score knows the group of the user's last event.

With --data movielens, the events are the 100,000 ratings of MovieLens, in the order of their times; an event has the
rating and the genres of the film as features. The last 15% are the test, all before are for training.

    python examples/events.py                           two minutes on one core
    python examples/events.py --data movielens          a quarter of an hour
    python examples/events.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from recommendation import table
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import graphs
from mpnn.data import NeighborBatch, neighbor_batches
from mpnn.models import TGAT, PairMLP, TGNMemory
from mpnn.train.link_predictor import auc
from mpnn.train.loop import History, Settings, fit

MODELS = ("TGN", "TGAT", "embeddings", "popularity", "group of the last event")
WIDTH, BATCH, LAST, TEST = 8, 250, 10, 0.15


class Events:
    """`user`, `item` [E], numbers of nodes, users first; `time` [E], in order; `features` [E, F]; `other`, items drawn
    at random; `first_of_test`, the number of events for training."""

    def __init__(self, user: Tensor, item: Tensor, time: Tensor, features: Tensor, first: int, draw: Any) -> None:
        self.user, self.time, self.features, self.first_of_test = user, time, features, first
        self.users, items = int(user.max()) + 1, int(item.max()) + 1
        self.nodes, self.item, self.other = self.users + items, self.users + item, self.users + draw(items)
        both = torch.stack([torch.cat([self.user, self.item]), torch.cat([self.item, self.user])])
        graph = graphs.from_edges(both, self.nodes, edge_attr=features.repeat(2, 1))
        self.past = graphs.TemporalGraph(graph, time.repeat(2), latest=True)

    def batches(self, first: int, last: int) -> list[tuple[slice, NeighborBatch]]:
        """User, item and other item of each event, each with its last neighbors before the event."""
        ends = torch.stack([self.user, self.item, self.other], 1)[first:last].flatten()
        before = self.time[first:last].repeat_interleave(3)
        options = {"before": before, "batch_size": 3 * BATCH, "shuffle": False}
        found = neighbor_batches(self.past, ends, [LAST], **options)
        return [(slice(first + k * BATCH, min(first + (k + 1) * BATCH, last)), b) for k, b in enumerate(found)]


USERS, ITEMS, GROUPS, EVENTS, TRAIN = 100, 60, 6, 6000, 4500


class Generated(Events):
    """Events by the rule above; `scores`, what the group of the user's last event says of item and other."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randint, size=(EVENTS,), generator=generator)
        leaves, new, member = torch.rand(EVENTS, generator=generator) < 0.1, draw(GROUPS), draw(ITEMS // GROUPS)
        users, time = draw(USERS), draw(1, 60).cumsum(0)  # seconds
        group, last = [user % GROUPS for user in range(USERS)], torch.full((USERS,), -1)
        in_group, known = torch.zeros(EVENTS, dtype=torch.int64), torch.zeros(EVENTS, dtype=torch.int64)
        for e, user in enumerate(users.tolist()):
            group[user] = int(new[e]) if leaves[e] else group[user]
            in_group[e], known[e], last[user] = group[user], last[user], group[user]
        other = draw(ITEMS)
        centers = torch.randn(GROUPS, WIDTH, generator=generator)
        features = centers[in_group] + torch.randn(EVENTS, WIDTH, generator=generator)
        super().__init__(users, in_group * (ITEMS // GROUPS) + member, time, features, TRAIN, lambda _: other)
        self.scores = [((ends - USERS) // (ITEMS // GROUPS) == known).double() for ends in (self.item, self.other)]


class Ratings(Events):
    """The ratings of MovieLens 100k."""

    def __init__(self, seed: int) -> None:
        generator, rows = torch.Generator().manual_seed(seed), table("ml-100k.inter")
        names = ("user_id:token", "item_id:token", "rating:float", "timestamp:float")
        user, item, rating, time = (torch.tensor([int(float(row[name])) for row in rows]) for name in names)
        order = time.argsort(stable=True)
        films = {int(row["item_id:token"]): set(row["class:token_seq"].split()) for row in table("ml-100k.item")}
        genres = sorted(set().union(*films.values()))
        of_film = torch.tensor([[float(genre in films[k]) for genre in genres] for k in range(1, len(films) + 1)])
        features = torch.cat([(rating - 3)[:, None] / 2, of_film[item - 1]], 1)
        draw = partial(torch.randint, size=(len(rows),), generator=generator)
        first = len(rows) - int(TEST * len(rows))
        super().__init__(user[order] - 1, item[order] - 1, time[order], features[order], first, draw)


class Temporal(nn.Module):
    """Learned vectors of nodes, with a memory or without, through TGAT to the score of a pair."""

    def __init__(self, kind: str, events: Events) -> None:
        super().__init__()
        width = events.features.shape[1]
        self.own = nn.Embedding(events.nodes, 16)
        self.memory = TGNMemory(events.nodes, width, 32, 16) if kind == "TGN" else None
        self.embed = None if kind == "embeddings" else TGAT(48 if self.memory else 16, 32, 1, 2, 16, width)
        self.score = PairMLP(16 if self.embed is None else 32, 32)

    def forward(self, batch: NeighborBatch) -> tuple[Tensor, Tensor]:
        """The scores of user and item, and of user and other item."""
        x = self.own(batch.sources if self.embed else batch.nodes)
        if self.memory is not None:
            x = torch.cat([x, self.memory(batch.sources)[0]], 1)
        z = x if self.embed is None else self.embed(x, batch.graphs, batch.ages)
        user, item, other = z.view(-1, 3, z.shape[1]).unbind(1)
        return self.score(user, item), self.score(user, other)


def train(kind: type[Any], name: str, epochs: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    events = kind(seed)
    first, last = events.first_of_test, len(events.time)
    if name in MODELS[3:]:
        count = torch.bincount(events.item[:first], minlength=events.nodes).double()
        scores = events.scores if "group" in name else [count[ends] for ends in (events.item, events.other)]
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), auc(*(score[first:] for score in scores)))
    model, batches = Temporal(name, events), events.batches(0, first)

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
        for after, batch in events.batches(first, last):
            observe(now)
            scores.append(model(batch))
            now = after
    return Outcome(history, auc(*map(torch.cat, zip(*scores, strict=True))))


def main() -> None:
    command = parser(__doc__, 3, MODELS)
    command.add_argument("--data", choices=("generated", "movielens"), default="generated")
    options = command.parse_args()
    kind, task, prefix = Generated, "generated events", "events"
    if options.data == "movielens":
        kind, task, prefix = Ratings, "next ratings of MovieLens 100k", "events-movielens"
        options.models = [name for name in options.models if "group" not in name]
    epochs = options.steps or (15 if kind is Generated else 2)
    for name in options.models:
        row = Row(f"{prefix}-{name.lower().replace(' ', '-')}", task, name, "AUC", "none", "")
        measure(row, partial(train, kind, name, epochs), options, {"epochs": epochs} if name in MODELS[:3] else {})


if __name__ == "__main__":
    main()
