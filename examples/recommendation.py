"""Recommendation on a rating graph: PinSage (Ying et al. 2018) against popularity, features alone and random walks.

The graph is generated, because no installed package contains ratings. The rule: 600 items and 1,000 users have tastes,
standard normal vectors t of 8 numbers. Item j has a popularity p_j, log-normal. User i rates 20 different items,
drawn with probabilities proportional to p_j exp(t_i . t_j). A model sees of an item its taste plus standard normal
noise, and the number of its ratings. One rating of each user is for validation and one for the test; the others are
for training. A model ranks all items that a user has not rated, and scores a hit if the hidden one is among its first
10.

    python examples/recommendation.py                           ten minutes on one core
    python examples/recommendation.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import graphs
from mpnn.models import PinSage
from mpnn.train.loop import History, Settings, fit

MODELS = ("PinSage", "random walks", "features", "popularity")
ITEMS, USERS, RATINGS, TASTE = 600, 1000, 20, 8
NEIGHBORS, QUERIES, NEGATIVES, FIRST = 10, 512, 20, 10


class Ratings:
    """Ratings by the rule above. `train` [USERS, RATINGS - 2], `val` and `test` [USERS]: items; `x`: their features."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        items, users = (torch.randn(count, TASTE, generator=generator) for count in (ITEMS, USERS))
        popularity = torch.randn(ITEMS, generator=generator)  # its logarithm
        chance = (popularity + users @ items.T).softmax(1)
        rated = torch.multinomial(chance, RATINGS, generator=generator)
        rated = rated.gather(1, torch.rand(rated.shape, generator=generator).argsort(1))  # the first drawn are the best
        self.val, self.test, self.train = rated[:, 0], rated[:, 1], rated[:, 2:]
        self.count = torch.bincount(self.train.flatten(), minlength=ITEMS).float()
        look = items + torch.randn(items.shape, generator=generator)
        self.x = torch.cat([look, self.count.log1p()[:, None]], 1)
        users = torch.arange(USERS).repeat_interleave(self.train.shape[1])
        bipartite = graphs.from_edges(torch.stack([users, self.train.flatten()]), num_src=USERS, num_dst=ITEMS)
        self.walks = graphs.random_walk_neighbors(bipartite, NEIGHBORS, seed=seed)
        self.all_walks = graphs.random_walk_neighbors(bipartite, ITEMS - 1, seed=seed)

    def hits(self, scores: Tensor, hidden: Tensor) -> float:
        """The percentage of users whose hidden item is among the first 10 by scores [USERS, ITEMS]."""
        other = self.test if hidden is self.val else self.val
        known = torch.cat([self.train, other[:, None]], 1)
        first = scores.scatter(1, known, -torch.inf).topk(FIRST).indices
        return 100 * (first == hidden[:, None]).any(1).float().mean().item()


def item_scores(similarity: Tensor, ratings: Ratings) -> Tensor:
    """The mean similarity [ITEMS, ITEMS] of an item to those that a user has rated: [USERS, ITEMS]."""
    return similarity[ratings.train].mean(1)


def without_training(name: str, ratings: Ratings) -> Tensor:
    """Scores [USERS, ITEMS] by the number of ratings, cosine of features, or visits of random walks."""
    if name == "popularity":
        return ratings.count.expand(USERS, -1)
    if name == "features":
        look = F.normalize(ratings.x[:, :TASTE], dim=1)
        return item_scores(look @ look.T, ratings)
    visits = torch.zeros(ITEMS, ITEMS)
    src, dst = ratings.all_walks.edge_index
    visits[dst, src] = ratings.all_walks.edge_attr
    return item_scores(visits, ratings)


def train(name: str, steps: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    ratings = Ratings(seed)
    if name != "PinSage":
        scores = without_training(name, ratings)
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), ratings.hits(scores, ratings.test))
    model = PinSage(ratings.x.shape[1], 32)
    mean, std = ratings.x.mean(0), ratings.x.std(0)
    x = (ratings.x - mean) / std

    def loss(k: int) -> Tensor:
        """Two items that a user rated are related. Negatives have the distribution of word2vec's: uniform ones teach
        popularity and little else."""
        users = torch.randint(USERS, (QUERIES,))
        pairs = torch.rand(QUERIES, ratings.train.shape[1]).topk(2).indices
        query, positive = ratings.train[users[:, None], pairs].T
        negative = torch.multinomial(ratings.count**0.75, QUERIES * NEGATIVES, replacement=True)
        return model.loss(x, ratings.walks, query, positive, negative.view(QUERIES, NEGATIVES), margin=1.0)

    @torch.no_grad()
    def hits(hidden: Tensor) -> float:
        z = model.eval()(x, ratings.walks)
        return ratings.hits(item_scores(z @ z.T, ratings), hidden)

    history = fit(
        model,
        Adam(model.parameters(), lr=3e-3),
        loss,
        Settings(steps, validate_every=min(50, steps), keep="best"),
        validate=lambda: {"hits": hits(ratings.val)},
        progress=progress,
        checkpoint=checkpoint,
    )
    return Outcome(history, hits(ratings.test))


def main() -> None:
    options = parser(__doc__, 5, MODELS).parse_args()
    steps = options.steps or 1000
    for name in options.models:
        row = Row(
            f"recommendation-{name.lower().replace(' ', '-')}",
            "a generated rating graph",
            name,
            "% hits in the first 10",
            "none",
            "",
        )
        measure(row, partial(train, name, steps), options, {"steps": steps} if name == "PinSage" else {})


if __name__ == "__main__":
    main()
