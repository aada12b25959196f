"""Training of LinkRanker: what it learns, what it must not see, and its measures."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from mpnn import graphs
from mpnn.data import LinkSplit, split_links
from mpnn.data.links import with_absent_destinations
from mpnn.models import RGCN, ComplEx, Inner, LightGCN, LinkRanker
from mpnn.models.graph.link_ranker import Form, popular_keys
from mpnn.train import link_ranker
from mpnn.train.link_predictor import auc
from mpnn.train.link_ranker import (
    KnownAnswers,
    LinkTraining,
    Queries,
    calibration,
    candidates,
    filtered_ranks,
    fit_link_ranker,
    link_measures,
    queries,
    ranking_loss,
)
from mpnn.train.loop import shuffled


def model_of(split: LinkSplit, form: Form, encoder: bool = True, relations: int = 1) -> LinkRanker:
    num_src, num_dst = split.graph.num_src, split.graph.num_dst
    popular = popular_keys(form, split.train, split.train_type, relations, max(num_src, num_dst))[0]
    typed = split.train_type is not None
    network = RGCN(16, 16, 2 * relations, 16, 1) if typed else LightGCN(2)
    model = LinkRanker(
        form,
        ComplEx(16, relations) if typed else Inner(),
        network if encoder else None,
        num_src=num_src,
        num_dst=num_dst,
        dim=16,
        relations=relations,
        popular=len(popular),
    )
    model.set_popularity(split.train, split.train_type)
    return model


def two_sets(pairs: Tensor, users: int, items: int, seed: int = 0) -> LinkSplit:
    split = split_links(graphs.from_edges(pairs, num_src=users, num_dst=items), 0.1, 0.1, one_set=False, seed=seed)
    return with_absent_destinations(split, grouped=True)


def random_links(users: int, items: int, count: int, seed: int = 0) -> Tensor:
    """Different pairs, each as likely as any other."""
    order = torch.randperm(users * items, generator=torch.Generator().manual_seed(seed))[:count]
    return torch.stack([order // items, order % items])


def fitted(split: LinkSplit, form: Form, steps: int = 40, **more: int) -> LinkTraining:
    torch.manual_seed(0)
    training = LinkTraining(model_of(split, form, **more), split, batch=512)
    optimizer = torch.optim.Adam(training.model.parameters(), lr=0.02)
    fit_link_ranker(training, optimizer, steps=steps, validate_every=10)
    return training


def test_groups_of_users_and_items_are_learned() -> None:
    users, items = torch.arange(60) % 3, torch.arange(45) % 3
    same = (users[:, None] == items).nonzero().T
    kept = same[:, torch.rand(same.shape[1], generator=torch.Generator().manual_seed(0)) < 0.7]
    split = two_sets(kept, 60, 45)
    found = link_measures(training := fitted(split, "two sets"), *training.scorers())
    assert found["AUC"] > 0.9
    assert found["Hits@10"] > 0.7, "five of fifteen items of the group are left"


def test_relations_are_learned_with_their_direction() -> None:
    """r0 leads one step around a ring of 30, r1 two steps, in a knowledge graph with a few facts missing."""
    node = torch.arange(30)
    steps = [(0, 1), (1, 2), (2, 3), (3, 5)]
    ends = torch.cat([torch.stack([node, (node + step) % 30]) for _, step in steps], 1)
    types = torch.tensor([r for r, _ in steps]).repeat_interleave(30)
    graph = graphs.from_edges(ends, 30, edge_type=types)
    split = with_absent_destinations(split_links(graph, 0.1, 0.1, directed=True), grouped=True)
    training = fitted(split, "directed", 150, relations=4)
    score, answers = training.scorers()
    assert link_measures(training, score, answers)["MRR"] > 0.3, "by chance it is 0.13"
    pairs, relation = training.part("train")
    forward, backward = (score(p, relation).mean() for p in (pairs, pairs.flip(0)))
    assert forward > backward + 1


@pytest.mark.parametrize("form", ["two sets", "undirected", "directed"])
def test_links_at_random_cannot_be_learned(form: Form) -> None:
    """The leak test: whatever a split or a step leaked would show as an AUC away from one half."""
    pairs = random_links(80, 80, 2500)
    if form == "two sets":
        split = two_sets(pairs, 80, 80)
    else:
        whole = graphs.from_edges(pairs, 80)
        whole = whole.undirected() if form == "undirected" else whole
        split = split_links(whole, 0.1, 0.1, directed=form == "directed")
        split = with_absent_destinations(split, grouped=True) if form == "directed" else split
    training = fitted(split, form)
    found = link_measures(training, *training.scorers())
    error = (1 / (6 * split.test.shape[1])) ** 0.5
    assert abs(found["AUC"] - 0.5) < 4 * error
    at_random = 1 / filtered_ranks(
        training, "test", lambda given, r, of_src: torch.rand(len(given), split.graph.num_dst)
    )
    assert abs(found["MRR"] - at_random.mean()) < 5 * at_random.std() / len(at_random) ** 0.5


def test_a_shuffled_column_leaves_no_more_than_popularity() -> None:
    """Users with new items each, drawn as often as before: only how popular an item is can be learned."""
    generator = torch.Generator().manual_seed(0)
    weight = 1 / (1.0 + torch.arange(60))
    pairs = torch.stack(
        [torch.randint(80, (3000,), generator=generator), torch.multinomial(weight, 3000, True, generator=generator)]
    )
    split = two_sets(pairs.unique(dim=1), 80, 60)
    training = fitted(split, "two sets")
    found = link_measures(training, *training.scorers())
    popular = torch.bincount(split.train[1], minlength=60).double()
    of_popularity = auc(popular[split.test[1]], popular[split.test_absent[1]])
    assert of_popularity > 0.6
    assert found["AUC"] < of_popularity + 4 * (1 / (6 * split.test.shape[1])) ** 0.5


def test_a_step_sends_no_message_along_the_links_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    split = two_sets(random_links(30, 25, 400), 30, 25)
    training = LinkTraining(model_of(split, "two sets"), split, batch=40)
    seen: list[tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = []
    encode = training.model.encode
    known: set[tuple[int, ...]] = set()

    def watched(graph: object, x: Tensor | None = None) -> Tensor:
        known.clear()
        known.update(tuple(edge) for edge in graph.edge_index.T.tolist())  # type: ignore[attr-defined]
        return encode(graph, x)

    def loss(model: object, z: Tensor, asked: Queries, answers: object, sample: object) -> Tensor:
        links = {(int(j), 30 + int(i)) for j, i in zip(asked.given, asked.answer, strict=True)}
        seen.append((links, {*known}))
        return z.sum()

    monkeypatch.setattr(training.model, "encode", watched)
    monkeypatch.setattr(link_ranker, "ranking_loss", loss)
    every: set[tuple[int, ...]] = set()
    for k in range(-(-training.count // training.asked)):
        training.loss(k)
    for links, messages in seen:
        assert not links & messages
        assert not {(i, j) for j, i in links} & messages
        assert len(messages) == 2 * (training.count - len(links))
        every |= links
    assert every == {(j, 30 + i) for j, i in split.train.T.tolist()}, "an epoch asks for all"
    assert max(len(links) for links, _ in seen) - min(len(links) for links, _ in seen) <= len(seen)


@pytest.mark.parametrize("form", ["two sets", "undirected", "directed"])
def test_ranks_and_losses_are_those_of_the_definition(form: Form) -> None:
    torch.manual_seed(1)
    pairs = random_links(20, 20, 150)
    types = torch.randint(2, (150,))
    whole = graphs.from_edges(pairs, 20, edge_type=types)
    split = split_links(whole, 0.2, 0.2, directed=True)
    model = model_of(split, form, relations=2).eval()
    training = LinkTraining(model, split)
    _, answers = training.scorers()
    every = {
        (asked.of_src, int(g), int(r), int(a))
        for part in ("train", "val", "test")
        for asked in queries(form, *training.part(part))
        for g, r, a in zip(asked.given, asked.relation, asked.answer, strict=True)
    }
    ranks = []
    for asked in queries(form, *training.part("test")):
        scores = answers(asked.given, asked.relation, asked.of_src)
        for k, (g, r, a) in enumerate(
            zip(asked.given.tolist(), asked.relation.tolist(), asked.answer.tolist(), strict=True)
        ):
            others = [n for n in range(20) if n != a and (asked.of_src, g, r, n) not in every]
            above = sum(bool(scores[k, n] > scores[k, a]) for n in others)
            ranks.append(1 + above + sum(bool(scores[k, n] == scores[k, a]) for n in others) / 2)
    assert filtered_ranks(training, "test", answers).tolist() == ranks
    quick = filtered_ranks(training, "test", answers, most=3)
    assert len(quick) == 3 * len(queries(form, *training.part("test")))
    z = model.encode(training.graph)
    (asked, *_), (known, *_) = queries(form, *training.part("train")), training.known("train")
    answered = {(int(g), int(r), int(a)) for g, r, a in zip(asked.given, asked.relation, asked.answer, strict=True)}
    scores = model.answers(z, asked.given, asked.relation)
    losses = []
    for k, (g, r, a) in enumerate(
        zip(asked.given.tolist(), asked.relation.tolist(), asked.answer.tolist(), strict=True)
    ):
        others = [n for n in range(20) if n == a or (g, r, n) not in answered]
        losses.append(scores[k, others].logsumexp(0) - scores[k, a])
    torch.testing.assert_close(ranking_loss(model, z, asked, known), torch.stack(losses).mean())


def test_the_loss_over_a_sample_of_many_nodes_is_that_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the error of a sample: of 3,000 nodes, 700 stand for all."""
    split = two_sets(random_links(50, 3000, 4000), 50, 3000)
    model = model_of(split, "two sets").eval()
    training = LinkTraining(model, split)
    z = model.encode(training.graph)
    (asked,), (known,) = queries("two sets", *training.part("train")), training.known("train")
    exact = ranking_loss(model, z, asked, known)
    monkeypatch.setattr(link_ranker, "_CANDIDATES", 100)
    monkeypatch.setattr(link_ranker, "_SAMPLE", 800)
    samples = [candidates(model, asked) for _ in range(5)]
    found = torch.stack([ranking_loss(model, z, asked, known, sample) for sample in samples])
    assert (found.mean() - exact).abs() < 0.05
    assert found.std() > 0, "other samples"


def knowledge(relations: int = 3) -> LinkSplit:
    """Typed links of 40 nodes, of which no two link the same nodes."""
    pairs = random_links(40, 40, 500)
    pairs = pairs[:, pairs[0] < pairs[1]]
    types = torch.arange(pairs.shape[1]) % relations
    return with_absent_destinations(
        split_links(graphs.from_edges(pairs, 40, edge_type=types), 0.1, 0.1, directed=True), grouped=True
    )


@pytest.mark.parametrize("form", ["two sets", "directed"])
def test_samples_of_all_in_neighbors_give_the_loss_of_the_whole_graph(form: Form) -> None:
    split = two_sets(random_links(60, 45, 900), 60, 45) if form == "two sets" else knowledge()
    relations = 1 if form == "two sets" else 3
    model = model_of(split, form, relations=relations)
    model.dropout.p = 0.0
    every = [-1] * (2 if form == "two sets" else 1)
    whole, sampled = (LinkTraining(model, split, batch=50, fanouts=fanouts) for fanouts in (None, every))
    for k in range(3):
        expected, found = whole.loss(k), sampled.loss(k)
        torch.testing.assert_close(found, expected)
        of_whole, of_sampled = (torch.autograd.grad(loss, model.own)[0] for loss in (expected, found))
        torch.testing.assert_close(of_sampled, of_whole, rtol=1e-4, atol=1e-6)


def test_the_mean_over_samples_is_the_state_of_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 45 items with 16 users each, 4 are drawn; the ends of the links that are asked for send nothing."""
    split = two_sets(random_links(60, 45, 900), 60, 45)
    model = model_of(split, "two sets")
    model.dropout.p = 0.0
    model.encoder = LightGCN(1)
    states: list[Tensor] = []
    monkeypatch.setattr(link_ranker, "ranking_loss", lambda model, z, *more: states.append(z[60:].detach()) or z.sum())
    monkeypatch.setattr(link_ranker, "shuffled", lambda count, batch, k, seed: shuffled(count, batch, 0, seed))
    LinkTraining(model, split, batch=100).loss(0)
    training = LinkTraining(model, split, batch=100, fanouts=[4])
    with torch.no_grad():
        for k in range(80):
            training.loss(k)
    expected, *drawn = states
    mean = torch.stack(drawn).mean(0)
    assert not torch.equal(drawn[0], drawn[1])
    slope = (mean * expected).sum() / expected.square().sum()
    assert slope == pytest.approx(1, abs=0.03)


def test_fanouts_that_do_not_fit_are_refused() -> None:
    split = two_sets(random_links(30, 25, 400), 30, 25)
    with pytest.raises(ValueError, match="this model passes none"):
        LinkTraining(model_of(split, "two sets", encoder=False), split, fanouts=[3])
    with pytest.raises(ValueError, match="a number for each of the 2 layers of the encoder; got 1"):
        LinkTraining(model_of(split, "two sets"), split, fanouts=[3])
    with pytest.raises(ValueError, match=r"-1 for all in-neighbors; got \[3, -2\]"):
        LinkTraining(model_of(split, "two sets"), split, fanouts=[3, -2])


def test_equal_scores_count_as_half_before_and_half_behind() -> None:
    split = two_sets(random_links(10, 40, 100), 10, 40)
    training = LinkTraining(model_of(split, "two sets"), split)
    ranks = filtered_ranks(training, "test", lambda given, relation, of_src: torch.zeros(len(given), 40))
    known = [int((torch.cat([split.train, split.val, split.test], 1)[0] == user).sum()) for user in split.test[0]]
    assert ranks.tolist() == [1 + (40 - count) / 2 for count in known]


def test_known_answers_are_found_by_node_and_relation() -> None:
    asked = Queries(torch.tensor([3, 0, 3, 3]), torch.tensor([1, 0, 0, 1]), torch.tensor([7, 8, 9, 5]), False)
    query, node = KnownAnswers(asked, 2).of(torch.tensor([0, 3, 2, 3]), torch.tensor([1, 1, 0, 0]))
    assert sorted(zip(query.tolist(), node.tolist(), strict=True)) == [(1, 5), (1, 7), (3, 9)]


def test_measures_are_those_of_scikit_learn() -> None:
    split = two_sets(random_links(30, 25, 300), 30, 25)
    training = LinkTraining(model_of(split, "two sets"), split)
    score, answers = training.scorers()
    found = link_measures(training, score, answers)
    scores = torch.cat([score(*training.part("test")), score(*training.absent("test"))]).detach().numpy()
    is_link = [1] * split.test.shape[1] + [0] * split.test.shape[1]
    assert found["AUC"] == pytest.approx(roc_auc_score(is_link, scores))
    assert found["average precision"] == pytest.approx(average_precision_score(is_link, scores))
    ranks = filtered_ranks(training, "test", answers)
    assert found["Hits@3"] == pytest.approx((ranks <= 3).double().mean().item())
    assert found["MRR"] == pytest.approx((1 / ranks).mean().item())


def test_probabilities_are_calibrated_and_keep_the_order() -> None:
    generator = torch.Generator().manual_seed(0)
    links = 3 + 2 * torch.randn(4000, generator=generator)
    absent = 1 + 2 * torch.randn(4000, generator=generator)
    scale, shift = calibration(links, absent)
    assert scale == pytest.approx(0.5, abs=0.05), "the odds of two normal distributions: (3 - 1) / 2^2"
    assert shift == pytest.approx(-1.0, abs=0.1)
    assert calibration(absent, links)[0] == 0, "worse than chance; the order does not turn"


def test_the_best_weights_are_kept() -> None:
    split = two_sets(random_links(30, 25, 300), 30, 25)
    torch.manual_seed(0)
    training = LinkTraining(model_of(split, "two sets"), split, batch=64)
    optimizer = torch.optim.Adam(training.model.parameters(), lr=0.3)
    history = fit_link_ranker(training, optimizer, steps=20, validate_every=5)
    assert training.validate()["MRR"] == max(history.val["MRR"])
