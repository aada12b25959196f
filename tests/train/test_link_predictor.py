"""Link prediction: its loop and its measures."""

from __future__ import annotations

import pytest
import torch

from mpnn import graphs
from mpnn.data import split_links, split_relation
from mpnn.models import GCN, HGT, LinkPredictor
from mpnn.models.graph.link_prediction import Inner
from mpnn.train.link_predictor import auc, fit_link_predictor, hits, link_scores


def test_two_groups_of_friends_are_learned() -> None:
    """Links are within groups; the features say the group. Validation and test links score above absent pairs between
    the groups."""
    torch.manual_seed(0)
    group = torch.arange(40) // 20
    links = torch.combinations(torch.arange(40)).T
    links = links[:, (group[links[0]] == group[links[1]]) & (torch.rand(links.shape[1]) < 0.9)]
    split, x = split_links(graphs.from_edges(links).undirected()), torch.eye(2)[group]
    model, graph = LinkPredictor(GCN(2, 4, 8, dropout=0.0), Inner()), split.graph.with_self_loops()
    before = auc(*link_scores(model, x, graph, split.test, split.test_absent))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    history = fit_link_predictor(model, x, split, optimizer, graph, epochs=20)
    assert history.val_step == [5, 10, 15, 20]
    after = auc(*link_scores(model, x, graph, split.test, split.test_absent))
    assert after > max(before, 0.85)


def test_the_best_weights_are_kept() -> None:
    torch.manual_seed(0)
    split, x = split_links(graphs.from_edges(torch.randint(40, (2, 200)), 40).undirected()), torch.randn(40, 4)
    model, graph = LinkPredictor(GCN(4, 8, 8, dropout=0.0), Inner()), split.graph.with_self_loops()
    history = fit_link_predictor(model, x, split, torch.optim.Adam(model.parameters(), lr=0.3), graph, epochs=20)
    measured = auc(*link_scores(model, x, graph, split.val, split.val_absent))
    assert measured == max(history.val["AUC"]) != history.val["AUC"][-1]


def test_links_between_two_kinds_are_learned() -> None:
    torch.manual_seed(0)
    users, items = torch.arange(40) % 2, torch.arange(30) % 2
    pairs = (users[:, None] == items).nonzero().T
    pairs = pairs[:, torch.rand(pairs.shape[1]) < 0.8]
    buys = graphs.from_edges(pairs, num_src=40, num_dst=30)
    relation = ("user", "buys", "item")
    whole = graphs.HeteroGraph({relation: buys, ("item", "bought by", "user"): buys.reverse()})
    known, split = split_relation(whole, relation, 0.1, 0.1)
    x = {"user": torch.eye(2)[users], "item": torch.eye(2)[items]}
    model = LinkPredictor(HGT({"user": 2, "item": 2}, 8, [*whole], 8, 2), Inner(), kinds=("user", "item"))
    fit_link_predictor(model, x, split, torch.optim.Adam(model.parameters(), lr=0.02), known, epochs=30)
    assert auc(*link_scores(model, x, known, split.test, split.test_absent)) > 0.9


def test_auc_counts_pairs_and_ties_half() -> None:
    links, absent = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([2.0, 1.0])
    assert auc(links, absent) == pytest.approx((2 + 0.5 + 0) / 6)
    torch.manual_seed(0)
    links, absent = torch.randint(9, (50,)).float(), torch.randint(9, (70,)).float()
    wins = (links[:, None] > absent).double() + 0.5 * (links[:, None] == absent)
    assert auc(links, absent) == pytest.approx(wins.mean().item(), abs=1e-12)


def test_hits_are_links_above_the_k_th_absent_pair() -> None:
    links, absent = torch.tensor([5.0, 3.0, 2.0]), torch.tensor([4.0, 3.0, 1.0])
    assert [hits(links, absent, k) for k in (1, 2, 3)] == pytest.approx([1 / 3, 1 / 3, 1])
    with pytest.raises(ValueError, match="k must be from 1 to the number of absent pairs, 3; got 4"):
        hits(links, absent, 4)
