"""Link prediction: scores and losses are PyTorch Geometric's, and negatives are reproducible."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from error_bound import error_bound

from mpnn import Graph, graphs
from mpnn.graphs import HeteroGraph
from mpnn.models import GCN, HGT, RGCN, ComplEx, DistMult, Inner, LightGCN, LinkPredictor, PairMLP

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "link prediction, PinSage-style recommendation"
N, IN, DIM, RELATIONS = 15, 6, 4, 3
BOUND = error_bound(3, N)


@pytest.fixture
def graph() -> Graph:
    return graphs.from_edges(torch.randint(0, N, (2, 40)), N, edge_type=torch.arange(40) % RELATIONS)


def gcn() -> GCN:
    return GCN(IN, DIM, dropout=0.0)


def test_the_loss_is_that_of_a_graph_autoencoder(graph: Graph, measured: Callable[..., None]) -> None:
    model = LinkPredictor(gcn(), Inner())
    x, pairs = torch.randn(N, IN), torch.randint(0, N, (2, 20))
    theirs = pyg.GAE(torch.nn.Identity())
    z = model.encoder(x, graph)
    expected = theirs.recon_loss(z, graph.edge_index, pairs)
    measured(SYSTEM, "PyTorch Geometric GAE", (model.loss(x, graph, negative=pairs) - expected).abs().item(), BOUND)
    scores = model(x, pairs, graph).sigmoid()
    measured(SYSTEM, "PyTorch Geometric GAE", (scores - theirs.decode(z, pairs)).abs().max().item(), BOUND)


def test_distmult_scores_are_those_of_pyg(graph: Graph, measured: Callable[..., None]) -> None:
    model = LinkPredictor(RGCN(IN, DIM, RELATIONS), DistMult(DIM, RELATIONS))
    theirs = pyg.DistMult(N, RELATIONS, DIM)
    x, pairs, kind = torch.randn(N, IN), torch.randint(0, N, (2, 20)), torch.randint(0, RELATIONS, (20,))
    with torch.no_grad():
        theirs.node_emb.weight.copy_(model.encoder(x, graph))
        theirs.rel_emb.weight.copy_(model.decoder.relation)
    expected = theirs(pairs[0], kind, pairs[1])
    measured(SYSTEM, "PyTorch Geometric DistMult", (model(x, pairs, graph, kind) - expected).abs().max().item(), BOUND)


def test_complex_scores_are_those_of_pyg(graph: Graph, measured: Callable[..., None]) -> None:
    model = LinkPredictor(RGCN(IN, 2 * DIM, RELATIONS), ComplEx(2 * DIM, RELATIONS))
    theirs = pyg.ComplEx(N, RELATIONS, DIM)
    x, pairs, kind = torch.randn(N, IN), torch.randint(0, N, (2, 20)), torch.randint(0, RELATIONS, (20,))
    z = model.encoder(x, graph)
    with torch.no_grad():
        for table, values in (
            ((theirs.node_emb, theirs.node_emb_im), z),
            ((theirs.rel_emb, theirs.rel_emb_im), model.decoder.relation),
        ):
            for half, part in zip(table, values.chunk(2, 1), strict=True):
                half.weight.copy_(part)
    expected = theirs(pairs[0], kind, pairs[1])
    error = (model(x, pairs, graph, kind) - expected).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric ComplEx", error, BOUND)
    with pytest.raises(ValueError, match="a width into real and imaginary parts, so it is even; got 5"):
        ComplEx(5, RELATIONS)


@pytest.mark.parametrize("decoder", [Inner(), DistMult(6, RELATIONS), ComplEx(6, RELATIONS)])
def test_a_query_scores_all_other_ends(decoder: Inner | DistMult | ComplEx) -> None:
    """Of sources, and of destinations whose sources are asked for."""
    src, dst, kind = torch.randn(7, 6), torch.randn(7, 6), torch.randint(0, RELATIONS, (7,))
    scores = decoder(src, dst) if isinstance(decoder, Inner) else decoder(src, dst, kind)
    torch.testing.assert_close((decoder.query(src, kind) @ dst.T).diagonal(), scores)
    torch.testing.assert_close((decoder.query(dst, kind, of_src=True) @ src.T).diagonal(), scores)


def test_light_gcn_is_that_of_pyg(measured: Callable[..., None]) -> None:
    links = torch.randint(0, N, (2, 30))
    graph = graphs.from_edges(links, N).undirected()
    theirs = pyg.LightGCN(N, DIM, 3)
    expected = theirs.get_embedding(graph.edge_index)
    found = LightGCN(3)(theirs.embedding.weight, graph)
    measured(SYSTEM, "PyTorch Geometric LightGCN", (found - expected).abs().max().item(), BOUND)


def test_a_pair_and_its_reverse_may_differ_to_an_mlp(graph: Graph) -> None:
    model, x = LinkPredictor(gcn(), PairMLP(DIM)), torch.randn(N, IN)
    first, last = model.decoder.layers[0], model.decoder.layers[2]
    z, pairs = model.encoder(x, graph), torch.tensor([[0, 3], [3, 0]])
    inner = torch.cat([z[pairs[0]], z[pairs[1]]], 1) @ first.weight.T + first.bias
    scores = model(x, pairs, graph)
    torch.testing.assert_close(scores, inner.relu() @ last.weight[0] + last.bias)
    assert scores[0] != scores[1]


def test_the_negatives_of_a_loss_follow_the_generator(graph: Graph) -> None:
    model, x = LinkPredictor(gcn(), Inner()), torch.randn(N, IN)
    one, same, other = (model.loss(x, graph, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert one == same
    assert one != other


def test_kinds_of_links_are_part_of_the_loss(graph: Graph) -> None:
    model, x = LinkPredictor(RGCN(IN, DIM, RELATIONS), DistMult(DIM, RELATIONS)), torch.randn(N, IN)
    kind, drawn = graph.edge_type, torch.randint(0, N, (2, 40))
    there, absent = (model(x, pairs, graph, kind).sigmoid() for pairs in (graph.edge_index, drawn))
    expected = -there.log().mean() - (1 - absent).log().mean()
    torch.testing.assert_close(model.loss(x, graph, negative=drawn, relation=kind), expected)


def test_what_does_not_fit_is_refused(graph: Graph) -> None:
    x, pairs = torch.randn(N, IN), torch.randint(0, N, (2, 9))
    with pytest.raises(ValueError, match=r"pairs must be int64 \[2, P\], sources then destinations; got \[9, 2\]"):
        LinkPredictor(gcn(), Inner())(x, pairs.T, graph)
    with pytest.raises(ValueError, match="DistMult scores 3 edge types: pass relation"):
        LinkPredictor(gcn(), DistMult(DIM, RELATIONS))(x, pairs, graph)


def shop() -> HeteroGraph:
    ends = torch.stack([torch.randint(8, (25,)), torch.randint(6, (25,))])
    buys = graphs.from_edges(ends, num_src=8, num_dst=6)
    return HeteroGraph({("user", "buys", "item"): buys, ("item", "bought by", "user"): buys.reverse()})


def test_links_between_two_kinds_are_those_of_their_encoded_nodes(tmp_path: Path) -> None:
    whole = shop()
    encoder = HGT({"user": IN, "item": IN}, DIM, [*whole], 8, 2)
    model = LinkPredictor(encoder, PairMLP(DIM), kinds=("user", "item")).eval()
    x = {"user": torch.randn(8, IN), "item": torch.randn(6, IN)}
    pairs = torch.tensor([[7, 0, 3], [5, 5, 0]])
    z = encoder(x, whole)
    expected = model.decoder(z["user"][pairs[0]], z["item"][pairs[1]])
    torch.testing.assert_close(model(x, pairs, whole), expected)
    loss = model.loss(x, whole, negative=pairs)
    there = model(x, whole["user", "buys", "item"].edge_index, whole)
    torch.testing.assert_close(
        loss, torch.nn.functional.softplus(-there).mean() + torch.nn.functional.softplus(expected).mean()
    )
    assert model.loss(x, whole).isfinite()
    model.save_pretrained(tmp_path)
    again = LinkPredictor.from_pretrained(tmp_path)
    assert torch.equal(again(x, pairs, whole), model(x, pairs, whole))
    assert again.loss(x, whole, negative=pairs) == loss


def test_kinds_that_do_not_fit_are_refused(graph: Graph) -> None:
    whole = shop()
    x = {"user": torch.randn(8, IN), "item": torch.randn(6, IN)}
    encoder = HGT({"user": IN, "item": IN}, DIM, [*whole], 8, 2)
    pairs = torch.tensor([[0], [0]])
    with pytest.raises(
        ValueError, match="kinds=None and an encoder whose result is kinds 'user', 'item': name the kinds"
    ):
        LinkPredictor(encoder, Inner())(x, pairs, whole)
    with pytest.raises(ValueError, match=r"kinds=\('user', 'item'\) and an encoder whose result is a tensor"):
        LinkPredictor(gcn(), Inner(), kinds=("user", "item"))(torch.randn(N, IN), pairs, graph)
    with pytest.raises(ValueError, match="links are from 'user' to 'shop'; the encoder has no 'shop'"):
        LinkPredictor(encoder, Inner(), kinds=("user", "shop"))(x, pairs, whole)
    double = HeteroGraph({**whole, ("user", "views", "item"): whole["user", "buys", "item"]})
    with pytest.raises(ValueError, match=r"2 relations lead from \('user', 'item'\): pass positive and negative pairs"):
        LinkPredictor(encoder, Inner(), kinds=("user", "item")).loss(x, double)
