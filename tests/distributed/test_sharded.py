"""Parts of graphs in several processes against the whole graph in one; and plans that need no process."""

import os
from pathlib import Path

import forked
import pytest
import torch
import torch.distributed as dist

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import Attention, DotProduct, Kernel, KeyValue, Retention
from mpnn.attention.recurrent import Recurrent
from mpnn.decoding.cache import KVCache
from mpnn.distributed import Owners, node_mean, partition, sharded
from mpnn.distributed.partition import cost_of_node
from mpnn.models import Bert, BertConfig, SentenceClassifier
from mpnn.models.layers.per_head import PerHead
from mpnn.update import FeedForward, PreNorm

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ranks", "quarters"),
    [(2, "0"), *(pytest.param(*row, marks=pytest.mark.slow) for row in ((2, "123"), (3, "0123"), (4, "02")))],
)
def test_all_cases_agree_with_one_process(ranks, quarters, tmp_path):
    """Every topology, attention, aggregator, position and division of nodes, in float64 to 1e-12, forward and
    gradients; dropout of weights, edges and features; bytes as planned; means of losses. The cases are in
    tests/support/distributed_cases.py."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    meeting = tmp_path / "meeting"
    for out in forked.run_ranks(ranks, "distributed_cases", meeting, *quarters, folder=tmp_path, PYTHONPATH=path):
        assert len(out.splitlines()) > 40 * len(quarters)


# ------------------------------------------------------------------------------------------------ owners

DIVISIONS = {
    "equal": Owners.equal(11, 4),
    "fewer nodes than ranks": Owners.equal(2, 5),
    "zigzag": Owners.zigzag(11, 3),
    "sizes": Owners.of_sizes([0, 4, 0, 7]),
    "by hand": Owners.of_nodes(torch.tensor([2, 0, 0, 1, 2, 2, 0, 1, 1, 1, 0]), 3),
    "cost": Owners.of_cost(torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]), 2),
    "nothing": Owners.equal(0, 2),
}


@pytest.mark.parametrize("owners", DIVISIONS.values(), ids=DIVISIONS)
def test_each_node_has_one_owner(owners):
    every = torch.arange(owners.num_nodes)
    assert sum(owners.sizes) == owners.num_nodes
    owner = owners.of(every)
    for rank in range(owners.ranks):
        nodes = owners.nodes(rank)
        assert len(nodes) == owners.sizes[rank]
        assert torch.equal(nodes, (owner == rank).nonzero().squeeze(1))
        if (block := owners.block(rank)) is not None:
            assert torch.equal(nodes, torch.arange(*block))


def test_cuts_are_even_in_cost_and_zigzag_evens_out_causal():
    assert DIVISIONS["cost"].sizes == [1, 10]  # 9 and 10
    causal = graphs.causal().bind(4096)
    edges = {
        balance: [plan.edges for plan in partition(causal, 4, balance=balance, node_cost=0).plans()]
        for balance in ("nodes", "edges", "zigzag")
    }
    busiest = {balance: max(each) * 4 / causal.num_edges for balance, each in edges.items()}
    assert busiest["nodes"] > 1.7
    assert busiest["edges"] < 1.01
    assert busiest["zigzag"] < 1.01


def test_the_cost_of_a_node_follows_from_the_model():
    with torch.device("meta"):  # Mistral's layer, 19,456 edges a node
        mistral = MessagePassing(
            None, "sum", PreNorm(4096, FeedForward(4096, 14_336)), DotProduct(4096, 32, kv_heads=8)
        )
    window = (graphs.causal() & graphs.window(4096)).bind(1 << 15)
    maps = 2 * (2 * 4096**2 + 2 * 4096 * 1024) + 4 * 4096 * 14_336
    assert cost_of_node(mistral) == maps / (4 * 4096)
    by_model, by_number = (partition(window, 8, node_cost=c) for c in (mistral, maps / (4 * 4096)))
    assert by_model.dst.sizes == by_number.dst.sizes != partition(window, 8).dst.sizes
    with pytest.raises(TypeError, match="Linear has no DotProduct, by which"):
        partition(window, 8, node_cost=torch.nn.Linear(2, 2))


def test_metis_fetches_less_than_blocks():
    pytest.importorskip("pymetis")
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    grid = graphs.grid(20, 20).bind(400).edge_index
    mesh = graphs.from_edges(order[grid], 400)
    fetches = {b: sum(plan.fetches for plan in partition(mesh, 4, balance=b).plans()) for b in ("edges", "metis")}
    assert fetches["metis"] < fetches["edges"] / 4
    with pytest.raises(ValueError, match="is for explicit graphs"):
        partition(graphs.causal().bind(8), 2, balance="metis")


# ------------------------------------------------------------------------------------------------ plans


def test_a_plan_without_processes_counts_what_each_rank_fetches():
    part = partition(graphs.window(256).bind(131_072), 8, balance="nodes")
    plans = part.plans()
    assert [plan.nodes for plan in plans] == [16_384] * 8
    assert [plan.fetches for plan in plans] == [256, *[512] * 6, 256]
    assert [plan.sends for plan in plans] == [256, *[512] * 6, 256]
    assert part.fetched_bytes(768, torch.bfloat16, batch=2)[1] == 512 * 768 * 2 * 2
    table = part.explain(768)
    assert "8 ranks" in table
    assert "512" in table
    assert "the busiest rank has 1.00 times the mean edges" in table


def test_bytes_of_heads_do_not_depend_on_the_graph():
    causal, window = (partition(g.bind(4096), 8, balance="nodes") for g in (graphs.causal(), graphs.window(16)))
    mine, others = 512, 4096 - 512
    # queries, keys and values of the others' nodes in one of 8 heads, and results of the own nodes in 7
    assert causal.head_bytes(8, 8, 64) == window.head_bytes(8, 8, 64) == [(3 * others + 7 * mine) * 64 * 4] * 8
    assert causal.head_bytes(8, 1, 64) == causal.head_bytes(8, 8, 64)
    assert 'transport="heads" brings 3,670,016 bytes to the busiest rank, less' in causal.explain(512, num_heads=8)
    assert "no less than the halo" in window.explain(512, num_heads=8)
    assert 'heads" cannot run: 8 ranks do not divide 12 heads' in causal.explain(768, num_heads=12)
    with pytest.raises(ValueError, match="8 ranks do not divide 12 heads of queries and 12 of keys"):
        causal.head_bytes(12, 12, 64)


def test_parts_cover_the_edges_of_the_whole_graph():
    whole = graphs.from_edges(torch.randint(30, (2, 90)), 30)
    part = partition(whole, 3, parts=torch.arange(30) % 3)
    edges = []
    for rank in range(3):
        shard = part.shard(rank)
        dst, src = shard.node_ids
        edges.append(torch.stack([src[shard.edge_index[0]], dst[shard.edge_index[1]]]))
    found = sorted(map(tuple, torch.cat(edges, 1).T.tolist()))
    assert found == sorted(map(tuple, whole.edge_index.T.tolist()))
    x = torch.randn(30, 2)
    assert torch.equal(part.scatter(x, rank=1), x[1::3])


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda g: partition(graphs.causal(), 2), TypeError, r"pass \(causal\(\)\).bind\(n\)"),
        (lambda g: partition(g, 2, balance="even"), ValueError, "balance must be one of edges, nodes, zigzag, metis"),
        (lambda g: partition(g, 2, transport="ring"), ValueError, "transport must be one of"),
        (lambda g: partition(g, 0), ValueError, "at least 1; got 0"),
        (lambda g: partition(g, 2, parts=torch.zeros(3)), ValueError, "parts must hold 8 integers"),
        (lambda g: partition(g, 2, parts=torch.full((8,), 2)), ValueError, r"must lie in 0..1; got 2 to 2"),
        (lambda g: partition(g), RuntimeError, "no process group"),
        (lambda g: partition(g, 2).scatter(torch.zeros(8, 1)), RuntimeError, "name a rank"),
        (lambda g: partition(g, 2).shard(2), ValueError, "ranks 0 to 1; got 2"),
        (lambda g: partition(g, 2).scatter(torch.zeros(7, 1), rank=0), ValueError, "rows of all destinations, 8"),
        (lambda g: node_mean(torch.ones(1)), RuntimeError, "no process group"),
    ],
)
def test_refusals_say_what_to_do(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(graphs.causal().bind(8))


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_needs_the_whole_graph_refuses_a_part(one_process):
    whole, x = graphs.from_edges(torch.randint(9, (2, 20)), 9), torch.randn(9, 4)
    shard = partition(whole).shard()
    with pytest.raises(ValueError, match=r"pass average_log_degree=\(graph.degree\(\) \+ 1\).log\(\).mean\(\)"):
        MessagePassing(None, "pna", None, None)(x, shard)
    with sharded():
        with pytest.raises(ValueError, match="the processes have 8 destinations and 8 sources in all, and the graph"):
            MessagePassing(whole, "sum", None, None)(x[:8])
        layer = MessagePassing(graphs.causal(), "sum", None, DotProduct(4, 1))
        with pytest.raises(ValueError, match="decode on one process"):
            layer(x, cache=KVCache(16))
        with pytest.raises(Exception, match="leave them uncompiled"):
            torch.compile(layer, backend="eager", fullgraph=True)(x)
    with pytest.raises(ValueError, match="owners are for 2 ranks; there are 1"), sharded(None, Owners.equal(9, 2)):
        pass
    with pytest.raises(ValueError, match="has features of 8 destinations"), sharded(partition(whole)):
        MessagePassing(graphs.causal(), "sum", None, None)(x[:8])
    with pytest.raises(ValueError, match="at least one loss"):
        node_mean(torch.zeros(0))


class Central(DotProduct):
    """Subtracts the mean of all queries, which a process does not know."""

    def project(self, dst, src, graph):
        query, key, value = super().project(dst, src, graph)
        return query - query.mean(-3, keepdim=True), key, value


class Narrow(DotProduct):
    def __init__(self, dim, heads):
        super().__init__(dim, heads, head_dim=2)


class Doubled(DotProduct):
    depends_on = "node"

    def project(self, dst, src, graph):
        query, key, value = super().project(dst, src, graph)
        return 2 * query, key, value


def test_an_attention_is_divided_only_if_its_class_says_what_its_terms_depend_on(one_process):
    x = torch.randn(8, 4)
    wrapped = type("FSDPDotProduct", (DotProduct,), {"__deepcopy__": None})  # as FSDP2 does
    for attention in (Doubled(4, 2), Narrow(4, 2), wrapped(4, 2), Kernel(4, 2)):
        layer = MessagePassing(graphs.causal(), "sum", None, attention)
        with sharded():
            torch.testing.assert_close(layer(x), layer(x))
    with sharded(), pytest.raises(ValueError, match=r'Central does not state .* write depends_on = "node"'):
        MessagePassing(graphs.causal(), "sum", None, Central(4, 2))(x)
    with sharded(), pytest.raises(ValueError, match="Retention passes a state from node to node"):
        MessagePassing(graphs.causal(), "sum", None, Retention(4, 2))(x)
    for attention in (Kernel(4, 2), PerHead(4, 2)):
        layer = MessagePassing(graphs.causal(), "sum", None, attention)
        with sharded(transport="heads"), pytest.raises(ValueError, match="of single nodes, as DotProduct does"):
            layer(x)


def test_every_attention_of_the_library_says_what_its_terms_depend_on():
    import mpnn.models  # noqa: F401

    def subclasses(of):
        for each in of.__subclasses__():
            yield each
            yield from subclasses(each)

    ours = {each for each in subclasses(Attention) if each.__module__.startswith("mpnn.")} - {KeyValue}
    assert len(ours) > 15
    silent = {each for each in ours if each.depends_on == "graph" and not issubclass(each, Recurrent)}
    assert {each.__name__ for each in silent} == {"OwnMaps", "TopK", "BlockTopK", "EdgeFilter", "TypedAdditive"}


def test_what_would_see_a_part_of_the_nodes_refuses_inside_sharded(one_process):
    x, graph = torch.randn(8, 2, 4), graphs.causal().bind(8)
    heads = graphs.windows(4, 2, 2).bind(8).with_relation(torch.zeros(8, 8, dtype=torch.int64))
    classifier = SentenceClassifier(Bert(BertConfig(20, 8, 1, 2, 8, 64)), 3)
    roberta = Bert(BertConfig(20, 8, 1, 2, 8, 64, after_pad=True))
    tokens, chosen = torch.arange(6)[None], graphs.chosen(torch.zeros(1, 2, 8, 1, dtype=torch.int64), 8)
    with sharded():
        with pytest.raises(ValueError, match=r"takes a bias by edge type \(BiasTable\), scale"):
            ops.attend(graph, x, x, x, bias=ops.NodeBias(x[..., 0]))
        with pytest.raises(ValueError, match="takes a bias by edge type"):
            ops.attend(graph, x, x, x, return_weights=True)
        with pytest.raises(ValueError, match='take transport="heads"'):
            ops.attend(graph, x, x, x, normalize="softmax_dst")
        with pytest.raises(ValueError, match="differs by item and head, and its nodes are not divided"):
            ops.attend(chosen, x[None], x[None], x[None])
        with pytest.raises(ValueError, match="call them outside"):
            ops.aggregate(graph, x[:, 0])
        with pytest.raises(ValueError, match="differs by item and head, and its nodes are not divided"):
            MessagePassing(chosen, "sum", None, DotProduct(4, 2))(x[:, 0])
        with pytest.raises(ValueError, match="set its dropout to 0"):
            MessagePassing(heads, "sum", None, PerHead(4, 2, dropout=0.5))(x[:, 0])
        with pytest.raises(ValueError, match="one process has the first token"):
            classifier(tokens)
        with pytest.raises(ValueError, match="pass positions"):
            roberta(tokens)
        assert roberta(tokens, positions=2 + tokens).pooled is not None
    with sharded(None, Owners.equal(8, 1)), pytest.raises(ValueError, match="has features of 6 destinations"):
        roberta(tokens, positions=2 + tokens)
    with pytest.raises(ValueError, match="pass a partition, or"), sharded(partition(graph), Owners.equal(8, 1)):
        pass


def test_a_mean_over_nodes_is_exact_in_float64(one_process):
    losses = torch.rand(7, dtype=torch.float64, requires_grad=True)
    node_mean(losses).backward()
    assert torch.equal(losses.grad, torch.full((7,), 1 / 7, dtype=torch.float64))


def test_sharded_needs_processes_and_leaves_nothing_behind():
    with pytest.raises(RuntimeError, match="no process group"), sharded():
        pass
    with pytest.raises(RuntimeError, match="planned without processes"), sharded(partition(graphs.causal().bind(8), 2)):
        pass
    layer = MessagePassing(graphs.causal(), "sum", None, DotProduct(4, 1))
    assert layer(torch.randn(8, 4)).shape == (8, 4)
