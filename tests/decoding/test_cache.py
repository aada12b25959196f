"""Cached decoding: node by node it is the full pass, and a step costs as much as its in-degree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpnn.attention import Additive, Degree, DotProduct, Retention, ShortConvolution
from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.graph.relations import GridOffset
from mpnn.graphs import bigbird, causal, complete, from_edges, identity, memory, permutation, random, strided, window
from mpnn.message_passing import MessagePassing
from mpnn.position import T5, ALiBi, Rotary, Shaw, Table
from mpnn.update import FeedForward, PreNorm

N, DIM, HEADS = 23, 16, 4
EXACT = 1e-10

TOPOLOGIES = (
    causal(),
    causal() & window(4),
    strided(4),
    causal() & (window(1) | random(3, seed=1)),
    causal() & bigbird(block=4, window=1, random=1, globals=1),
    causal() & window(2, dilation=3),
    causal() - identity(),  # the first has no in-neighbors
)
POSITIONS = {
    "none": lambda: None,
    "rotary": lambda: Rotary(DIM // HEADS),
    "ALiBi": lambda: ALiBi(HEADS),
    "T5": lambda: T5(HEADS, 8, 16, bidirectional=False),
    "Shaw": lambda: Shaw(DIM // HEADS, 5),
    "grid": lambda: Table(HEADS, GridOffset(6, 3, 3)),  # an image read pixel by pixel: it needs absolute places
    "rotary and T5": lambda: (Rotary(DIM // HEADS), T5(HEADS, 8, 16)),
}
PIECES = {"one by one": [1] * N, "a prompt first": [9] + [1] * (N - 9), "in pieces": [4, 1, 8, 3, 1, 6]}


def layer(graph, position=None, update=None, **options) -> MessagePassing:
    update = PreNorm(DIM, FeedForward(DIM)) if update is None else update
    made = MessagePassing(graph, "sum", update, DotProduct(DIM, HEADS, position=position, **options))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))  # tables that start at zero too
    return made.double().eval()


@torch.no_grad()
def decoded(layers, x, pieces, **call):
    cache = KVCache(x.shape[-2])
    done = []
    for new in x.split(pieces, -2):
        for one in layers:
            new = one(new, cache=cache, **call)
        done.append(new)
    assert cache.count == x.shape[-2]
    return torch.cat(done, -2)


@torch.no_grad()
def in_one_pass(layers, x, **call):
    for one in layers:
        x = one(x, **call)
    return x


def largest(difference):
    return difference.abs().max().item()


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("graph", TOPOLOGIES, ids=str)
@pytest.mark.covering
def test_node_by_node_equals_the_full_pass(graph, position):
    """All pairs of a graph and a position, a graph and a division, a position and a division."""
    layers = [layer(graph, POSITIONS[position]()) for _ in range(2)]
    x = torch.randn(2, N, DIM, dtype=torch.float64)
    k = TOPOLOGIES.index(graph) + list(POSITIONS).index(position)
    pieces = list(PIECES.values())[k % len(PIECES)]
    assert largest(decoded(layers, x, pieces) - in_one_pass(layers, x)) < EXACT


@pytest.mark.parametrize("graph", [complete(), window(3)], ids=str)
def test_a_source_is_projected_once_and_attended_to_at_every_step(graph):
    """Cross-attention: a decoder layer that attends to its own nodes and then to those of an encoder."""
    own, other = layer(causal(), Rotary(DIM // HEADS)), layer(graph, (Rotary(DIM // HEADS), ALiBi(HEADS)))
    x, source = (torch.randn(2, n, DIM, dtype=torch.float64) for n in (N, 11))
    expected = in_one_pass([other], in_one_pass([own], x), source=source)
    mapped = []
    other.attention.to_key.register_forward_hook(lambda module, given, out: mapped.append(out.shape[1]))
    cache, done = KVCache(N), []
    with torch.no_grad():
        for new in x.split([4] + [1] * 19, 1):
            done.append(other(own(new, cache=cache), source=source, cache=cache))
    assert largest(torch.cat(done, 1) - expected) < EXACT
    assert mapped == [11] + [0] * 19


def test_the_rows_of_the_new_nodes_may_be_given_as_graphs():
    """A tree that grows: each node attends to its parent and itself, whatever nodes there will be."""
    parent = [0, 0, 0, 1, 1, 2, 5, 3]
    grows = layer(None, ALiBi(HEADS))
    x = torch.randn(8, DIM, dtype=torch.float64)
    edges = torch.tensor([[*parent, *range(1, 8)], [*range(8), *range(1, 8)]])
    expected = in_one_pass([grows], x, graph=from_edges(edges, 8))
    cache = KVCache(8)
    with torch.no_grad():
        for i in range(8):
            sources = sorted({parent[i], i})
            rows = from_edges(torch.tensor([sources, [0] * len(sources)]), num_dst=1, num_src=i + 1)
            rows = rows.with_positions(torch.tensor([i]), torch.arange(i + 1))
            assert largest(grows(x[i : i + 1], rows, cache=cache) - expected[i]) < EXACT


def test_explicit_edges_keep_their_attributes():
    edges = torch.tensor([[0, 1, 0, 2, 1, 3, 0], [0, 1, 2, 2, 3, 3, 3]])
    graph = from_edges(edges, 4, edge_attr=torch.randn(7, 3, dtype=torch.float64))
    layers = [layer(graph, edge_dim=3)]
    x = torch.randn(4, DIM, dtype=torch.float64)
    assert largest(decoded(layers, x, [1] * 4) - in_one_pass(layers, x)) < EXACT


def test_weights_are_those_of_the_full_pass():
    banded, x = layer(causal() & window(3), ALiBi(HEADS)), torch.randn(2, N, DIM, dtype=torch.float64)
    with torch.no_grad():
        _, expected = banded(x, return_weights=True)
        cache = KVCache(N)
        found = [banded(new, cache=cache, return_weights=True)[1] for new in x.split([6] + [1] * 17, 1)]
    assert largest(torch.cat(found, 1) - expected) < EXACT


def test_a_text_may_go_on_in_two_ways():
    """A copy of a cache serves the same layers, and what one of them reads the other does not."""
    op, x = layer(causal()), torch.randn(2, 9, DIM, dtype=torch.float64)
    with torch.no_grad():
        cache = KVCache(9)
        op(x[:, :5], cache=cache)
        other = copy.deepcopy(cache)
        for piece in (x[:, 5:8], x[:, 8:]):
            op(piece.flip(0), cache=other)
        torch.testing.assert_close(op(x[:, 5:], cache=cache), op(x)[:, 5:])
    assert (cache.count, other.count) == (9, 9)


@torch.no_grad()
def test_the_last_nodes_may_be_forgotten_and_others_come_in_their_place():
    layers, source = [layer(causal()), layer(complete())], torch.randn(2, 5, DIM, dtype=torch.float64)
    x, other = torch.randn(2, 2, 9, DIM, dtype=torch.float64)
    cache = KVCache(9)

    def read(new):
        return layers[1](layers[0](new, cache=cache), source=source, cache=cache)

    read(x[:, :7])
    cache.crop(4)
    assert cache.count == 4
    found = torch.cat([read(other[:, 4:6]), read(other[:, 6:])], 1)
    whole = layers[1](layers[0](torch.cat([x[:, :4], other[:, 4:]], 1)), source=source)
    assert largest(found - whole[:, 4:]) < EXACT
    cache.crop(9)
    for count in (-1, 10):
        with pytest.raises(ValueError, match=f"count must be from 0 to 9, the number of nodes .*; got {count}"):
            cache.crop(count)


def test_members_of_a_batch_may_be_dropped_and_doubled():
    layers, chosen = [layer(causal()), layer(causal())], torch.tensor([2, 0, 2])
    x = torch.randn(3, N, DIM, dtype=torch.float64)
    expected = in_one_pass(layers, x)[chosen]
    cache = KVCache(N)
    with torch.no_grad():
        for one, new in zip(layers, (x[:, :20], in_one_pass(layers[:1], x[:, :20])), strict=True):
            one(new, cache=cache)
        cache.select(chosen)
        last = x[chosen][:, 20:]
        for one in layers:
            last = one(last, cache=cache)
    assert largest(last - expected[:, 20:]) < EXACT


# ------------------------------------------------------------------------------------------------ what a step costs


class Written(TorchDispatchMode):
    """Counts the numbers that operations give, views aside: what a step moves."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        inputs = {a.untyped_storage().data_ptr() for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in inputs:
                self.numbers += tensor.numel()
        return out


def written_by_a_step(graph, position, length) -> int:
    """At the last node of so many, after room for all has been made."""
    one = MessagePassing(graph, "sum", PreNorm(DIM, FeedForward(DIM)), DotProduct(DIM, HEADS, position=position))
    cache = KVCache(length)
    with torch.no_grad():
        one(torch.randn(1, length - 3, DIM), cache=cache)
        one(torch.randn(1, 1, DIM), cache=cache)
        one(torch.randn(1, 1, DIM), cache=cache)
        with Written() as written:
            one(torch.randn(1, 1, DIM), cache=cache)
    return written.numbers


@pytest.mark.parametrize("position", [p for k, p in POSITIONS.items() if k != "grid"])
def test_a_step_over_a_window_moves_as_much_at_any_length(position):
    graph = causal() & window(4)
    near, far = (written_by_a_step(graph, position(), length) for length in (64, 1024))
    assert near == far


def test_a_step_gathers_only_its_in_neighbors():
    """strided(32): 32 near nodes and every 32nd before, 63 of 1024."""
    asked = []
    one = layer(strided(32), ALiBi(HEADS))
    merge = one.attention.round
    one.attention.round = lambda query, key, value, *rest: asked.append(len(key[0])) or merge(query, key, value, *rest)
    cache = KVCache(1024)
    with torch.no_grad():
        one(torch.randn(1, 1023, DIM, dtype=torch.float64), cache=cache)
        one(torch.randn(1, 1, DIM, dtype=torch.float64), cache=cache)
    assert asked == [1023, int(strided(32).bind(1024).degree()[-1])] == [1023, 63]


# ------------------------------------------------------------------------------------------------ short convolutions


def convolution(graph=None) -> MessagePassing:
    graph = causal() & window(3) if graph is None else graph
    return MessagePassing(graph, "sum", None, ShortConvolution(DIM, 4)).double()


@pytest.mark.parametrize("pieces", [*PIECES.values(), [2, 1, 20]], ids=[*PIECES, "a long piece"])
@torch.no_grad()
def test_a_short_convolution_keeps_its_last_nodes(pieces):
    one, cache, done = convolution(), KVCache(N), []
    x = torch.randn(2, N, DIM, dtype=torch.float64)
    for new in x.split(pieces, -2):
        done.append(one(new, cache=cache))
        (entry,) = cache._entries.values()
        assert entry.value.untyped_storage().nbytes() <= 2 * 3 * DIM * 8
        assert len(entry.value[0]) == min(3, cache.count)
    assert largest(torch.cat(done, -2) - one(x)) < EXACT


@torch.no_grad()
def test_a_cache_of_a_short_convolution_is_copied_and_selected_but_not_cropped():
    one, cache = convolution(), KVCache(N)
    x = torch.randn(2, N, DIM, dtype=torch.float64)
    one(x[:, :2], cache=cache)
    cache.crop(1)  # the first nodes are all there
    one(x[:, 1:9], cache=cache)
    other = copy.deepcopy(cache)
    other.select(torch.tensor([1, 1]))
    one(torch.randn(2, 3, DIM, dtype=torch.float64), cache=cache)
    mixed = torch.cat([x[[1, 1], :9], x[:, 9:]], 1)
    assert largest(one(x[:, 9:], cache=other) - one(mixed)[:, 9:]) < EXACT
    with pytest.raises(ValueError, match="cannot forget nodes: copy the cache before them, or crop"):
        cache.crop(9)
    cache.crop(0)
    assert largest(one(x, cache=cache) - one(x)) < EXACT


@torch.no_grad()
@pytest.mark.parametrize(
    "make",
    [lambda: layer(causal()), convolution, lambda: MessagePassing(causal(), "sum", None, Retention(DIM, 2)).double()],
)
def test_entries_that_do_not_exist_cannot_be_selected(make):
    one, x = make(), torch.randn(N, DIM, dtype=torch.float64)
    with torch.no_grad():
        cache = KVCache(N)
        one(x[:5], cache=cache)
        with pytest.raises(ValueError, match="without a batch"):
            cache.select(torch.tensor([0]))
        torch.testing.assert_close(one(x[5:6], cache=cache), one(x)[5:6])  # nothing was selected
        cache = KVCache(N)
        one(x[None, :5].expand(2, -1, -1), cache=cache)
        for index in (torch.tensor([2]), torch.tensor([-1])):
            with pytest.raises(IndexError, match="from 0 to 1"):
                cache.select(index)
        for index in ([0], torch.tensor(0), torch.tensor([True, False])):
            with pytest.raises(TypeError, match="a tensor of integers"):
                cache.select(index)
        cache.select(torch.tensor([], dtype=torch.int64))
        assert one(x[None, 5:6].expand(0, -1, -1), cache=cache).shape == (0, 1, DIM)


def test_a_short_convolution_over_more_nodes_is_refused_in_decoding():
    one, cache = convolution(causal() & window(5)), KVCache(N)
    one(torch.randn(1, 9, DIM, dtype=torch.float64), cache=cache)
    with pytest.raises(ValueError, match="nodes 9 to 9 attend to node 4, and this attention keeps the nodes"):
        one(torch.randn(1, 1, DIM, dtype=torch.float64), cache=cache)


# ------------------------------------------------------------------------------------------------ rows and places


@pytest.mark.parametrize("position", POSITIONS.values(), ids=POSITIONS)
def test_nodes_may_stand_elsewhere_than_at_their_numbers(position):
    """The same nodes in another order, each placed where it stood: the same numbers."""
    order = torch.randperm(9)
    one = layer(None, position())
    x = torch.randn(2, 9, DIM, dtype=torch.float64)
    shuffled = (causal() & window(3)).bind(9)
    edges = order.argsort()[shuffled.edge_index]
    expected = one(x, shuffled)
    found = one(x[:, order], from_edges(edges, 9).with_positions(order, order))
    assert largest(found - expected[:, order]) < EXACT


def test_places_follow_the_graph():
    graph = causal().bind(3).with_positions(torch.tensor([7, 8, 9]), torch.tensor([4, 5, 6]))
    assert [at.tolist() for at in graph.reverse().node_positions()] == [[4, 5, 6], [7, 8, 9]]
    assert (graph & window(1)).node_positions()[0].tolist() == [7, 8, 9]
    with pytest.raises(ValueError, match=r"dst must hold 3 integers; got torch.int64 of shape \[2\]"):
        graph.with_positions(torch.tensor([0, 1]), torch.arange(3))


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (complete(), "no node attends to a later one"),
        (permutation([2, 0, 1, 3]), "one of the first 1 nodes attends to node 2"),
        (memory(2), "num_src must be 6; got 4"),
    ],
    ids=str,
)
def test_graphs_that_cannot_be_decoded(graph, message):
    with pytest.raises(ValueError, match=message), torch.no_grad():
        layer(graph)(torch.randn(1, DIM, dtype=torch.float64), cache=KVCache(4))


def test_gat_decodes_node_by_node():
    layer_of_gat, x = MessagePassing(causal(), attention=Additive(DIM, 4, 4)).double(), torch.randn(1, 5, DIM).double()
    with torch.no_grad():
        cache = KVCache(5)
        steps = [layer_of_gat(x[:, i : i + 1], cache=cache) for i in range(5)]
        torch.testing.assert_close(torch.cat(steps, 1), layer_of_gat(x), rtol=0, atol=1e-12)


def test_attention_that_cannot_be_cached_is_refused():
    x, cache = torch.randn(1, 3, DIM), KVCache(4)
    with pytest.raises(ValueError, match="Additive, AdditiveV2 and recurrent attention can use a cache; got Degree"):
        MessagePassing(causal(), attention=Degree(DIM, 4))(x, cache=cache)
    dot = MessagePassing(causal(), attention=DotProduct(DIM, HEADS))
    with pytest.raises(ValueError, match=r"a cache does not store gradients; decode under torch.no_grad\(\)"):
        dot(x, cache=KVCache(4))
    with torch.no_grad():
        dot(x, cache=cache)
        with pytest.raises(ValueError, match="a length of 4 nodes; with the new ones there would be 6"):
            dot(x, cache=cache)
        with pytest.raises(ValueError, match="holds batches of \\[1\\]; got one of \\[2\\]"):
            dot(torch.randn(2, 1, DIM), cache=cache)
        with pytest.raises(ValueError, match="its own nodes or to a source"):
            dot(torch.randn(1, 1, DIM), source=x, cache=cache)
        with pytest.raises(ValueError, match="a cache cannot be combined with edge_attr"):
            dot(torch.randn(1, 1, DIM), edge_attr=torch.randn(1), cache=cache)
    with pytest.raises(ValueError, match="length must be at least 1"):
        KVCache(0)


def test_a_graph_of_another_size_is_refused():
    banded = MessagePassing(None, attention=DotProduct(DIM, HEADS))
    with pytest.raises(ValueError, match="nodes 0 to 1 of 8 need a graph of all"), torch.no_grad():
        banded(torch.randn(1, 2, DIM), Graph.from_edges(torch.zeros(2, 1, dtype=torch.int64), 5, 5), cache=KVCache(8))
