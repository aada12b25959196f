"""Recommendation on MovieLens 100k: LightGCN (He et al. 2020) and PinSage (Ying et al. 2018) against factors without a
graph, random walks and popularity.

943 users gave 100,000 ratings to 1,682 films; `pip install --no-deps recbole` brings the file. As in the benchmark of
Microsoft's recommenders, three quarters of the ratings of each user, drawn at random, are for training and the others
for the test, every rating counts as an interest, and a model ranks all films of the training that the user has not
rated there. The measure is nDCG at 10: the sum of 1 / log2(1 + rank) over the first ten that are in the test, over that
of the best order. PinSage sees of a film its year, its genres and the number of its ratings, and scores by the mean
similarity to the user's films.

    python examples/recommendation.py                           half an hour on one core
    python examples/recommendation.py --seeds 1 --steps 2       a quick test
"""

from __future__ import annotations

import csv
from functools import partial
from typing import Any

import torch
from experiment import Outcome, Row, measure, parser
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import EdgeWeight
from mpnn.data.read import read
from mpnn.models import PinSage
from mpnn.train.loop import History, Settings, fit

MODELS = ("LightGCN", "factors", "PinSage", "random walks", "popularity")
SOURCE = "benchmark of recommenders-team/recommenders"
PUBLISHED = {"LightGCN": ("0.420", SOURCE), "factors": ("0.390 for BPR", SOURCE)}
STEPS = {"LightGCN": 1000, "factors": 300, "PinSage": 300}
NEIGHBORS, NEGATIVES, FIRST, BATCH = 10, 20, 10, 4096


class Ratings:
    """`user`, `item` [T]: the ratings of the training; `known` and `test` [USERS, ITEMS] bool; `x` [ITEMS, F]: what is
    known of films."""

    def __init__(self, seed: int) -> None:
        generator, ratings = torch.Generator().manual_seed(seed), table("ml-100k.inter")
        pairs = torch.tensor([(int(row["user_id:token"]), int(row["item_id:token"])) for row in ratings]) - 1
        self.users, self.items = (pairs.amax(0) + 1).tolist()
        order = torch.randperm(len(pairs), generator=generator)
        user, item = pairs[order[pairs[order, 0].argsort(stable=True)]].T  # by user, each in random order
        count = torch.bincount(user)
        place = torch.arange(len(user)) - (count.cumsum(0) - count)[user]
        in_test = place >= (0.75 * count[user]).round()
        self.user, self.item = user[~in_test], item[~in_test]
        self.test = torch.zeros(self.users, self.items, dtype=torch.bool)
        self.test[user[in_test], item[in_test]] = True
        self.known = torch.zeros_like(self.test)
        self.known[self.user, self.item] = True
        self.count = torch.bincount(self.item, minlength=self.items).float()
        films = {int(row["item_id:token"]) - 1: row for row in table("ml-100k.item")}
        genres = sorted({genre for row in films.values() for genre in row["class:token_seq"].split()})
        rows = [films[item] for item in range(self.items)]
        year = [float(row["release_year:token"]) if row["release_year:token"].isdigit() else 1990.0 for row in rows]
        of_genre = [[float(genre in row["class:token_seq"].split()) for genre in genres] for row in rows]
        x = torch.cat([torch.tensor(year)[:, None], torch.tensor(of_genre), self.count.log1p()[:, None]], 1)
        self.x = (x - x.mean(0)) / x.std(0).clamp(min=1e-6)

    def ndcg(self, scores: Tensor) -> float:
        """nDCG at 10 of scores [USERS, ITEMS], the mean over users."""
        unseen = scores.masked_fill(self.known | (self.count == 0), -torch.inf)
        hits = self.test.gather(1, unseen.topk(FIRST).indices).float()
        gain = 1 / torch.arange(2, FIRST + 2).log2()
        best = gain.cumsum(0)[self.test.sum(1).clamp(min=1, max=FIRST) - 1]
        return ((hits * gain).sum(1) / best).mean().item()


def table(file: str) -> list[dict[str, str]]:
    lines = read("movielens-100k", file).decode().splitlines()
    return list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))


class LightGCN(nn.Module):
    """Vectors of users and items, averaged over hops without maps or activations (He et al. 2020, eq. 3 to 8):

        e_i^(k+1) = sum_j e_j^(k) / sqrt(|N_i| |N_j|),   e_i = mean_k e_i^(k)

    Without hops these are the factors of BPR (Rendle et al. 2009).
    """

    def __init__(self, ratings: Ratings, hops: int, dim: int = 64) -> None:
        super().__init__()
        self.users, self.hops, self.penalty = ratings.users, hops, 1e-4 if hops else 1e-2
        self.own = nn.Embedding(ratings.users + ratings.items, dim)
        nn.init.normal_(self.own.weight, std=0.1)
        ends = torch.stack([ratings.user, ratings.item + ratings.users])
        degree = torch.bincount(ends.flatten()).float()
        weight = degree[ends].prod(0).rsqrt()
        graph = graphs.from_edges(torch.cat([ends, ends.flip(0)], 1), len(self.own.weight), edge_attr=weight.repeat(2))
        self.hop = MessagePassing(graph, "sum", None, EdgeWeight())

    def forward(self) -> tuple[Tensor, Tensor]:
        """The vectors of users and of items."""
        e = mean = self.own.weight
        for _ in range(self.hops):
            e = self.hop(e)
            mean = mean + e
        mean = mean / (self.hops + 1)
        return mean[: self.users], mean[self.users :]

    def loss(self, user: Tensor, item: Tensor, other: Tensor) -> Tensor:
        """BPR: the user's film scores higher than another. With a penalty on the vectors that a batch reads."""
        users, items = self()
        user_z = users.index_select(0, user)
        margin = (user_z * (items.index_select(0, item) - items.index_select(0, other))).sum(1)
        read = self.own(torch.cat([user, item + self.users, other + self.users]))
        return F.softplus(-margin).mean() + self.penalty * read.square().sum() / (2 * len(user))


def item_scores(similarity: Tensor, ratings: Ratings) -> Tensor:
    """The mean similarity [ITEMS, ITEMS] of a film to those that a user has rated: [USERS, ITEMS]."""
    known = ratings.known.float()
    return (known / known.sum(1, keepdim=True)) @ similarity


def visits(ratings: Ratings) -> Tensor:
    """How often random walks from a film visit another, [ITEMS, ITEMS]."""
    walks = graphs.random_walk_neighbors(_bipartite(ratings), ratings.items - 1, seed=0)
    src, dst = walks.edge_index
    return torch.zeros(ratings.items, ratings.items).index_put((dst, src), walks.edge_attr.float())


def _bipartite(ratings: Ratings) -> Graph:
    ends = torch.stack([ratings.user, ratings.item])
    return graphs.from_edges(ends, num_src=ratings.users, num_dst=ratings.items)


def train(name: str, steps: int, seed: int, progress: Any, checkpoint: Any) -> Outcome:
    ratings = Ratings(seed)
    if name not in STEPS:
        scores = (
            ratings.count.expand(ratings.users, -1) if name == "popularity" else item_scores(visits(ratings), ratings)
        )
        return Outcome(History(train_loss=[0.0], seconds=[0.0]), ratings.ndcg(scores))
    model: Any = (
        PinSage(ratings.x.shape[1], 32) if name == "PinSage" else LightGCN(ratings, 3 if name == "LightGCN" else 0)
    )
    walks = graphs.random_walk_neighbors(_bipartite(ratings), NEIGHBORS, seed=seed) if name == "PinSage" else None

    def loss(k: int) -> Tensor:
        if walks is None:
            drawn = torch.randint(len(ratings.user), (BATCH,))
            other = torch.randint(ratings.items, (BATCH,))
            user = ratings.user[drawn]
            other = torch.where(ratings.known[user, other], torch.randint(ratings.items, (BATCH,)), other)
            return model.loss(user, ratings.item[drawn], other)
        # Two films that a user rated are related. Negatives have the distribution of word2vec's.
        query, positive = torch.multinomial(ratings.known[torch.randint(ratings.users, (512,))].float(), 2).T
        negative = torch.multinomial(ratings.count**0.75, 512 * NEGATIVES, replacement=True)
        return model.loss(ratings.x, walks, query, positive, negative.view(512, NEGATIVES), margin=1.0)

    rate = 3e-3 if name == "PinSage" else 1e-2
    history = fit(
        model, Adam(model.parameters(), lr=rate), loss, Settings(steps), progress=progress, checkpoint=checkpoint
    )
    model.eval()
    with torch.no_grad():
        if walks is None:
            users, items = model()
            return Outcome(history, ratings.ndcg(users @ items.T))
        z = model(ratings.x, walks)
        return Outcome(history, ratings.ndcg(item_scores(z @ z.T, ratings)))


def main() -> None:
    options = parser(__doc__, 2, MODELS).parse_args()
    for name in options.models:
        file = f"recommendation-{name.lower().replace(' ', '-')}"
        row = Row(file, "ratings of MovieLens 100k", name, "nDCG at 10", *PUBLISHED.get(name, ("none", "")))
        steps = options.steps or STEPS.get(name, 0)
        measure(row, partial(train, name, steps), options, {"steps": steps} if name in STEPS else {})


if __name__ == "__main__":
    main()
