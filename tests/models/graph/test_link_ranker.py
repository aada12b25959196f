"""LinkRanker: its scores are its formula, it begins as popularity, and it is kept whole in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mpnn import graphs
from mpnn.models import RGCN, ComplEx, DistMult, Inner, LightGCN, LinkRanker
from mpnn.models.graph.link_ranker import Form, popular_keys

USERS, ITEMS, DIM, TYPES = 6, 8, 4, 3
FORMS: tuple[Form, ...] = ("undirected", "directed", "two sets")


def links(form: Form, count: int = 20) -> tuple[Tensor, Tensor]:
    high = (USERS, ITEMS) if form == "two sets" else (ITEMS, ITEMS)
    return torch.stack([torch.randint(n, (count,)) for n in high]), torch.randint(TYPES, (count,))


def ranker(form: Form, decoder: str = "complex", encoder: str = "rgcn") -> tuple[LinkRanker, Tensor, Tensor]:
    pairs, relation = links(form)
    num_src = USERS if form == "two sets" else ITEMS
    model = LinkRanker(
        form,
        {"inner": lambda: Inner(), "distmult": lambda: DistMult(DIM, TYPES), "complex": lambda: ComplEx(DIM, TYPES)}[
            decoder
        ](),
        {"rgcn": lambda: RGCN(DIM, DIM, 2 * TYPES, DIM, 1), "lightgcn": lambda: LightGCN(2), "": lambda: None}[
            encoder
        ](),
        num_src=num_src,
        num_dst=ITEMS,
        dim=DIM,
        relations=TYPES,
        popular=len(popular_keys(form, pairs, relation, TYPES, ITEMS)[0]),
    )
    model.set_popularity(pairs, relation)
    return model.eval(), pairs, relation


@pytest.mark.parametrize("form", FORMS)
def test_scores_are_those_of_the_decoder_and_the_popularity_of_both_ends(form: Form) -> None:
    model, pairs, relation = ranker(form)
    z = model.encode(model.graph(pairs, relation))
    first = USERS if form == "two sets" else 0
    assert len(z) == first + ITEMS
    for k, (j, i) in enumerate(pairs.T.tolist()):
        r = int(relation[k])
        into = int(((pairs[1] == i) & (relation == r)).sum())
        out_of = int(((pairs[0] == j) & (relation == r)).sum())
        if form == "undirected":
            into += int(((pairs[0] == i) & (relation == r)).sum())
            out_of += int(((pairs[1] == j) & (relation == r)).sum())
        popular = torch.tensor([1.0 + into, 1.0 if form == "two sets" else 1.0 + out_of]).log().sum()
        expected = model.decoder(z[j : j + 1], z[first + i : first + i + 1], relation[k : k + 1])[0] + popular
        torch.testing.assert_close(model.score(z, pairs, relation)[k], expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of_src", [False, True])
def test_answers_are_the_scores_with_every_other_end(form: Form, of_src: bool) -> None:
    if of_src and form != "directed":
        return
    model, pairs, relation = ranker(form)
    z = model.encode(model.graph(pairs, relation))
    given = pairs[1] if of_src else pairs[0]
    found = model.answers(z, given, relation, of_src=of_src)
    assert found.shape == (len(given), ITEMS)
    for k in range(ITEMS):
        other = torch.full_like(given, k)
        ends = torch.stack([other, given] if of_src else [given, other])
        torch.testing.assert_close(found[:, k], model.score(z, ends, relation))
    some = torch.tensor([5, 1])
    torch.testing.assert_close(model.answers(z, given, relation, of_src=of_src, others=some), found[:, some])


@pytest.mark.parametrize("form", FORMS)
def test_without_vectors_a_model_is_popularity(form: Form) -> None:
    model, pairs, relation = ranker(form, encoder="")
    with torch.no_grad():
        model.own.zero_()
    z = model.encode(model.graph(pairs, relation))
    counts = torch.bincount(pairs[1][relation == 0], minlength=ITEMS).float()
    if form == "undirected":
        counts += torch.bincount(pairs[0][relation == 0], minlength=ITEMS)
    found = model.answers(z, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))[0]
    torch.testing.assert_close(found - found.min(), counts.log1p() - counts.log1p().min())


@pytest.mark.parametrize("form", FORMS)
def test_messages_pass_both_ways_with_types_of_their_own(form: Form) -> None:
    model, pairs, relation = ranker(form)
    graph = model.graph(pairs, relation)
    first = USERS if form == "two sets" else 0
    edges = {(int(j), int(i), int(r)) for (j, i), r in zip(graph.edge_index.T, graph.edge_type, strict=True)}
    back = 0 if form == "undirected" else TYPES
    for (j, i), r in zip(pairs.T.tolist(), relation.tolist(), strict=True):
        assert {(j, first + i, r), (first + i, j, back + r)} <= edges
    assert graph.num_edges == 2 * pairs.shape[1]


def test_a_node_without_a_link_has_no_vector_of_its_own() -> None:
    model, pairs, _ = ranker("undirected", encoder="")
    known = pairs[:, (pairs != 3).all(0)]
    z = model.encode(model.graph(known))
    assert not z[3].any()
    linked = known.flatten().unique()
    assert torch.equal(z[linked], model.own[linked])


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_keeps_everything(form: Form, tmp_path: Path) -> None:
    model, pairs, relation = ranker(form, "distmult", "lightgcn" if form == "undirected" else "rgcn")
    model.calibrate(2.0, -1.0)
    model.save_pretrained(tmp_path)
    again = LinkRanker.from_pretrained(tmp_path)
    graph = model.graph(pairs, relation)
    expected = model(None, pairs, graph, relation)
    assert torch.equal(again(None, pairs, graph, relation), expected)
    assert torch.equal(again.probability(expected), (2 * expected - 1).sigmoid())


def test_features_stand_beside_own_vectors_or_alone() -> None:
    model = LinkRanker("directed", Inner(), LightGCN(1), dim=DIM, in_dim=3).eval()
    x, (pairs, _) = torch.randn(ITEMS, 3), links("directed")
    graph = model.graph(pairs, num_nodes=ITEMS)
    assert model(x, pairs, graph).shape == (20,)
    assert model.encode(graph, x).shape == (ITEMS, DIM)
    with pytest.raises(ValueError, match=r"takes features \[N, 3\] as x; got None"):
        model.encode(graph)
    with pytest.raises(ValueError, match=r"takes no features as x; got \[8, 3\]"):
        ranker("directed")[0].encode(graph, x)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="form must be one of 'undirected', 'directed', 'two sets'; got 'both'"):
        LinkRanker("both", Inner())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="directed links have one set of nodes; got num_src=3 and num_dst=4"):
        LinkRanker("directed", Inner(), num_src=3, num_dst=4)
    model, pairs, relation = ranker("directed")
    with pytest.raises(ValueError, match=r"the links have \d+ popular pairs of a node and a type; popular=\d+"):
        model.set_popularity(pairs[:, :3], relation[:3])


def test_light_gcn_refuses_edge_attr_that_it_would_not_read():
    links = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    weighted = graphs.from_edges(links, num_nodes=4, edge_attr=torch.ones(4))
    with pytest.raises(ValueError, match="weights links by degree only"):
        LightGCN(2)(torch.randn(4, 3), weighted)
