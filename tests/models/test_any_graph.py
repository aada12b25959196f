"""Any explicit graph in any ready model: constructed with it, called with it, a batch of graphs, padding, in place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.models import GPT, Bert, BertConfig, Transformer, TransformerConfig, ViT, ViTConfig

TREE = graphs.from_edges(torch.tensor([[1, 0, 2, 4, 3, 5], [0, 2, 2, 2, 4, 4]]), 6).undirected().with_self_loops()
DAG = graphs.from_edges(torch.tensor([[0, 0, 1, 2, 2], [1, 2, 3, 4, 5]]), 6).with_self_loops()
RING = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), 4)
BERT = BertConfig(vocabulary=30, dim=32, layers=2, heads=4, hidden=64, context=8, dropout=0.0)
SMALL = TransformerConfig(
    vocabulary=30, dim=32, heads=4, hidden=64, encoder_layers=2, decoder_layers=1, context=8, dropout=0.0
)
VIT = ViTConfig(image=8, patch=4, dim=32, layers=2, heads=4, hidden=64)
TOKENS = torch.randint(3, 30, (2, 6), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))

Make = Callable[..., Any]
MODELS: dict[str, tuple[Graph, Make, Callable[..., Tensor]]] = {
    "Bert": (TREE, lambda *g: Bert(BERT, *g), lambda m, **k: m(TOKENS, **k).last),
    "GPT": (DAG, lambda *g: GPT(30, 32, 4, 2, *g, context=8), lambda m, **k: m(TOKENS, **k)),
    "ViT": (RING, lambda *g: ViT(VIT, *g), lambda m, **k: m(IMAGES, **k).last),
    "Transformer": (TREE, lambda *g: Transformer(SMALL, *g), lambda m, **k: m(TOKENS, TOKENS, **k)),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_given_once_is_that_given_with_each_call(name: str) -> None:
    graph, make, call = MODELS[name]
    torch.manual_seed(0)
    plain = make().eval()
    torch.manual_seed(0)
    built = make(graph).eval()
    expected = call(plain, graph=graph)
    torch.testing.assert_close(call(built), expected)
    assert not torch.allclose(call(plain), expected, atol=1e-3)


@pytest.mark.parametrize("name", ["Bert", "Transformer", "ViT"])
def test_a_batch_of_graphs_is_each_graph_alone(name: str) -> None:
    graph, make, call = MODELS[name]
    model, others = make().eval(), [graph, graphs.window(1)]
    both = call(model, graph=others)
    for k, one in enumerate(others):
        torch.testing.assert_close(both[k], call(model, graph=one)[k])
    with pytest.raises(ValueError, match="3 graphs"):
        call(model, graph=[graph] * 3)


def test_a_node_sees_its_in_neighbors_and_padding_changes_nothing() -> None:
    model = Bert(BERT, TREE).eval()
    out = model(TOKENS).last
    changed = TOKENS.clone()
    changed[:, 5] = 3  # two steps from 2, three from 0 and 1
    moved = (model(changed).last != out).any(-1).all(0)
    assert moved.tolist() == [False, False, True, True, True, True]
    padded = torch.cat([TOKENS, torch.zeros(2, 2, dtype=torch.int64)], 1)
    mask = torch.arange(8).expand(2, 8) >= 6
    torch.testing.assert_close(model(padded, padding_mask=mask).last[:, :6], out)
    weights = model(TOKENS, return_weights=True).weights
    assert weights is not None
    assert ((weights[0] > 0).any(1) == TREE.dense()).all()


def test_a_prefix_of_a_dag_has_the_edges_among_its_nodes() -> None:
    model = GPT(30, 32, 4, 2, DAG, context=6).eval()
    torch.testing.assert_close(model(TOKENS[:, :4]), model(TOKENS)[:, :4])
    assert model.generate(TOKENS[:, :2], 4, temperature=0.0).shape == (2, 6)
    with pytest.raises(ValueError, match="6 nodes, and the text or image has 7"):
        GPT(30, 32, 4, 2, DAG, context=8)(torch.zeros(1, 7, dtype=torch.int64))


def sized(graph: Graph, size: int) -> Graph:
    """The edges of a graph among so many nodes, of which those beyond its own have loops."""
    loops = torch.arange(size).expand(2, size)
    inside = graph.edge_index[:, (graph.edge_index < size).all(0)]
    return graphs.from_edges(torch.cat([inside, loops], 1).unique(dim=1), size)


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_of_another_size_is_refused(name: str) -> None:
    graph, make, call = MODELS[name]
    model = make().eval()
    size = graph.num_dst
    several = graphs.batch([graph, graph])
    for other in (sized(graph, size - 1), sized(graph, size + 1), several):
        with pytest.raises(ValueError, match=rf"{other.num_dst} (nodes|destinations)[^{size}]*{size}"):
            call(model, graph=other)
        if name == "GPT":
            continue
        with pytest.raises(ValueError, match=f"the graph has {other.num_dst} nodes, and the text or image has {size}"):
            call(model, graph=[graph, other])
        with pytest.raises(ValueError, match=f"the graph has {other.num_dst} nodes, and the text or image has {size}"):
            call(make(other).eval())


@pytest.mark.parametrize("make", [lambda: Bert(BERT), lambda: Transformer(SMALL)], ids=["Bert", "Transformer"])
def test_graphs_of_padded_texts_are_over_their_tokens_or_their_rows(make: Callable[[], Any]) -> None:
    model = make().eval()
    encode = model if isinstance(model, Bert) else model.encode
    mask = torch.arange(6).expand(2, 6) >= torch.tensor([[6], [4]])
    whole = encode(TOKENS[:1], graph=TREE).last
    part = encode(TOKENS[1:, :4], graph=TREE.subgraph(torch.arange(6) < 4)).last
    for graph in (TREE, [TREE, TREE], [TREE, TREE.subgraph(torch.arange(6) < 4)]):
        last = encode(TOKENS, padding_mask=mask, graph=graph).last
        last = last.view(-1, 32)[(~mask).flatten()] if last.dim() == 3 else last
        torch.testing.assert_close(last, torch.cat([whole[0], part[0]]))
    for graph in (sized(TREE, 5), [TREE, sized(TREE, 5)], sized(TREE, 7)):
        with pytest.raises(ValueError, match=r"the graph has [57] nodes, and the text or image has [46]"):
            encode(TOKENS, padding_mask=mask, graph=graph)


def test_graphs_of_packed_texts_are_over_each() -> None:
    for model in (Bert(BERT).eval(), GPT(30, 32, 4, 2, context=8).eval()):
        edges = graphs.from_edges(graphs.causal().bind(3).edge_index, 3)
        model(TOKENS, graph=edges, lengths=[3, 3])
        with pytest.raises(ValueError, match=r"the graph has 3 nodes, and the text or image has [24]"):
            model(TOKENS, graph=edges, lengths=[2, 4])
        with pytest.raises(ValueError, match="the graph has 6 nodes, and the text or image has 3"):
            model(TOKENS, graph=DAG, lengths=[3, 3])


def test_each_layer_has_its_own_graph() -> None:
    model = Bert(BERT, [TREE, graphs.causal()]).eval()
    (first, second) = (layer.graph.bind(6).num_edges for layer in model.layers)
    assert (first, second) == (TREE.num_edges, 21)


def test_what_cannot_be_is_refused_when_the_model_is_made() -> None:
    with pytest.raises(ValueError, match=r"node 0 attends to node 2"):
        GPT(30, 32, 4, 2, TREE, context=6)
    with pytest.raises(ValueError, match=r"node 0 attends to node 2"):
        Transformer(SMALL, None, TREE)
    with pytest.raises(ValueError, match="as many destinations as sources"):
        Bert(BERT, graphs.complete().bind(2, 3))
    with pytest.raises(ValueError, match="edge 0 -> 1 is listed 2 times"):
        Bert(BERT, graphs.from_edges(torch.tensor([[0, 0], [1, 1]]), 2))
    with pytest.raises(IndexError, match=r"edge 1 \(0 -> 5\)"):
        graphs.listed([0, 0], [1, 5], 3)
    with pytest.raises(TypeError, match="a Graph, or one per layer"):
        Bert(BERT, 7)  # type: ignore[arg-type]


def test_a_list_of_edges_is_a_topology() -> None:
    topology = graphs.as_topology(TREE)
    exact = graphs.as_topology(TREE, prefixes=False)
    assert graphs.parse(repr(exact)) == exact != topology
    assert exact.take(torch.arange(2, 5).numpy(), 6).same_as(topology.bind(6).rows(2, 5).runs)
    assert topology.bind(6).dense().equal(TREE.dense())
    assert topology.bind(4).dense().equal(TREE.dense()[:4, :4])
    assert graphs.parse(str(graphs.listed([0, 1], [1, 1], 2))) == graphs.listed([0, 1], [1, 1], 2)
    assert (topology & graphs.causal()).bind(6).dense().equal(TREE.dense().tril())
    rows = topology.bind(6).rows(2, 5)
    assert topology.take(torch.arange(2, 5).numpy(), 6).num_edges == rows.num_edges


def test_models_in_place() -> None:
    transformers = pytest.importorskip("transformers")
    import mpnn.hf

    config = transformers.BertConfig(
        vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    allowed = torch.where(TREE.dense(), 0.0, -torch.inf).expand(2, 1, 6, 6)
    with torch.no_grad():
        expected = model(TOKENS, attention_mask=allowed).last_hidden_state
        handle = mpnn.hf.use(model, graph=TREE)
        torch.testing.assert_close(model(TOKENS).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
        handle.restore()
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=30, n_embd=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="causal=False"):
        mpnn.hf.use(gpt, graph=TREE)
    mpnn.hf.use(gpt.eval(), graph=DAG)
    changed = TOKENS.clone()
    changed[:, 1] = 3  # 3 alone receives from 1
    moved = (gpt(changed).logits != gpt(TOKENS).logits).any(-1).any(0)
    assert moved.tolist() == [False, True, False, True, False, False]
