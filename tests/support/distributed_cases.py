"""One process of a group: runs all cases on its part of each graph, and compares with the whole graph.

    RANK=0 WORLD_SIZE=2 python -m distributed_cases FILE 0 1 2 3

FILE is where the processes of a group meet. Case k is in quarter k mod 4, and runs if that is given; what is no case of
a model is in quarter 0. Prints a line for each case; the exit code is 1 if one disagrees.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from live_memory import LiveMemory
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mpnn import MessagePassing, aggregate, graphs, ops
from mpnn.attention import (
    Additive,
    AdditiveV2,
    Degree,
    DotProduct,
    EdgeMessage,
    EdgeWeight,
    Kernel,
    Mapped,
    Near,
    Typed,
)
from mpnn.data import NeighborBatch, neighbor_batches
from mpnn.distributed import Owners, Part, disk, node_mean, partition, sharded, sum_gradients
from mpnn.graph import Graph, sharding
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.exchange import Layer
from mpnn.graph.relations import Offset
from mpnn.models import GAT, GCN, GPT, MAGNA, Bert, BertConfig, GraphSAGE, MoNet, Transformer, TransformerConfig
from mpnn.models.graph.graph_transformer import EdgeScaled, HeadsOf
from mpnn.models.graph.rgcn import BasisTyped
from mpnn.models.layers.per_head import PerHead, SharedKey
from mpnn.models.layers.propagation import Propagation
from mpnn.models.layers.relative import RelativeDotProduct
from mpnn.models.text.linformer import Linformer
from mpnn.models.vision.swin import NormedTyped
from mpnn.position import T5, ALiBi, EdgeBias, Rotary, Shaw
from mpnn.update import Add, FeedForward, PreNorm
from mpnn.update.dropout import Dropout

WIDTH = 16
EXACT, SINGLE = 1e-12, 1e-5


class Case(NamedTuple):
    name: str
    graph: Any  # a topology, or a whole graph
    nodes: int
    model: Callable[[], nn.Module]
    owners: Callable[[int, int], Owners] = Owners.equal
    training: bool = False
    dtype: torch.dtype = torch.float64
    batch: tuple[int, ...] = ()
    transport: str = "halo"


def explicit(nodes: int, edges: int, *, attributes: int = 0, types: int = 0, seed: int = 0) -> Graph:
    """Random edges, with repeats; the last node has none."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(max(nodes - 1, 1), (2, edges), generator=draw)
    attr = torch.randn(edges, attributes, generator=draw, dtype=torch.float64) if attributes else None
    kind = torch.randint(types, (edges,), generator=draw) if types else None
    return graphs.from_edges(ends, nodes, edge_attr=attr, edge_type=kind)


def layer(*, heads: int = 2, backend: str = "auto", edge_dropout: float = 0.0, **options: Any) -> nn.Module:
    return MessagePassing(
        None,
        "sum",
        PreNorm(WIDTH, FeedForward(WIDTH)),
        DotProduct(WIDTH, heads, **options),
        backend=backend,
        edge_dropout=edge_dropout,
    )


many_heads = partial(layer, heads=12, head_dim=4)
"""Two, three and four processes divide these heads."""


def of(attention: Callable[[], Any] | None = None, aggregator: Any = "sum", **options: Any) -> Callable[[], nn.Module]:
    kind = Propagation if "hops" in options else MessagePassing
    return lambda: kind(None, aggregator, None, None if attention is None else attention(), **options)


def drawn(position: Any) -> Any:
    for parameter in position.parameters():
        nn.init.normal_(parameter)
    return position


def positions(heads: int, width: int) -> dict[str, Callable[[], Any]]:
    """Relative positions for so many heads of this width."""
    return {
        "rotary": lambda: Rotary(width),
        "alibi": lambda: ALiBi(heads),
        "t5": lambda: drawn(T5(heads, buckets=8, max_distance=8)),
        "shaw": lambda: drawn(Shaw(width, 3)),
    }


class Dropped(nn.Module):
    """A layer between two dropouts of features."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.layer = Dropout(0.4), layer(dropout=0.3, edge_dropout=0.2)

    def forward(self, x: torch.Tensor, graph: Any) -> torch.Tensor:
        return self.dropout(self.layer(self.dropout(x), graph))


class Tokens(nn.Module):
    """A language model of which the first component of x says the tokens."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.model = GPT(11, WIDTH, 2, 2, context=64, **options) if model is None else model

    def forward(self, x: torch.Tensor, graph: Any) -> torch.Tensor:
        return self.model((x[..., 0].abs() * 7).long() % 11, graph=graph)


def by_hand(nodes: int, ranks: int) -> Owners:
    """Every third node belongs to another rank."""
    return Owners.of_nodes(torch.arange(nodes) // 3 % ranks, ranks)


def uneven(nodes: int, ranks: int) -> Owners:
    """The first rank has nothing."""
    return Owners.of_sizes([0, *Owners.equal(nodes, ranks - 1).sizes] if ranks > 1 else [nodes])


TOPOLOGIES = {
    "window": graphs.window(5),
    "causal": graphs.causal(),
    "causal window": graphs.causal() & graphs.window(7),
    "complete": graphs.complete(),
    "longformer": graphs.longformer(8, globals=2),
    "bigbird": graphs.bigbird(block=4, window=3, random=1, globals=1),
    "strided": graphs.strided(6),
    "identity": graphs.identity(),
    "prefix": graphs.prefix(9),
}


def cases() -> Iterator[Case]:
    for name, topology in TOPOLOGIES.items():
        for nodes in (53, 3):
            if name == "prefix" and nodes < 9:
                continue
            yield Case(f"{name} of {nodes}", topology, nodes, layer)
    yield Case("grid", graphs.grid(7, 9), 63, layer)
    yield Case("documents", graphs.documents([13, 1, 30, 9]), 53, layer)
    for owners in (Owners.zigzag, by_hand, uneven):
        for name, graph in {"causal": graphs.causal(), "window": graphs.window(4), "edges": explicit(41, 160)}.items():
            yield Case(f"{name}, {owners.__name__}", graph, 41, layer, owners)
    for backend in ("edge_list", "csr", "dense", "tiles"):
        model = partial(layer, backend=backend, dropout=0.4)
        yield Case(f"dropout, {backend}", graphs.causal() & graphs.window(9), 45, model, training=True)
        yield Case(f"dropout by hand, {backend}", graphs.window(9), 45, model, by_hand, training=True)
        yield Case(f"single, {backend}", graphs.window(9), 45, model, training=True, dtype=torch.float32)
    yield from cases_of_transport("halo", (), graphs.causal(), layer, 2, WIDTH // 2)
    edges, weighted, typed = explicit(47, 300), explicit(47, 300, attributes=3), explicit(47, 300, types=4)
    yield Case("GAT", edges, 47, of(lambda: Additive(WIDTH, 4, 2)))
    yield Case("GAT, dropout", edges, 47, of(lambda: Additive(WIDTH, 4, 2, dropout=0.5)), by_hand, training=True)
    yield Case("GCN's weights", edges, 47, of(lambda: Degree(WIDTH, 8)), by_hand)
    yield Case("edges with attributes", weighted, 47, of(lambda: DotProduct(WIDTH, 2, edge_dim=3)))
    yield Case("types", typed, 47, of(lambda: Typed(WIDTH, 8, relations=4)), by_hand)
    message = lambda: EdgeMessage(lambda dst, src, attr: F.relu(src) * dst)  # noqa: E731
    yield Case("messages of both ends", edges, 47, of(message))
    yield Case("kernel", graphs.causal(), 47, of(lambda: Kernel(WIDTH, 2, features=8)))
    near = lambda **o: Near(nn.Linear(WIDTH, WIDTH), 4, **o)  # noqa: E731
    for name, attention in {
        "near": near,
        "near, not normalized": lambda: near(normalized=False),
        "edge weights": lambda: EdgeWeight(normalized=True),
        "mapped": lambda: Mapped(nn.Linear(WIDTH, 8)),
    }.items():
        yield Case(name, edges, 47, of(attention), by_hand)
    yield Case("edges scale", weighted, 47, of(lambda: EdgeScaled(WIDTH, 4, 2, edge_dim=3)), by_hand)
    yield Case("own head width", weighted, 47, of(lambda: HeadsOf(WIDTH, 4, 2, edge_dim=3)), by_hand)
    yield Case("types of bases", typed, 47, of(lambda: BasisTyped(WIDTH, 8, 4, 2)), by_hand)
    yield Case("types, normed", typed, 47, of(lambda: NormedTyped(WIDTH, 8, 4)), by_hand)
    two_types = explicit(47, 300, types=2)
    yield Case("graphs of heads", two_types, 47, of(lambda: PerHead(WIDTH, 2)), by_hand)
    yield Case("graphs of heads, shared keys", two_types, 47, of(lambda: SharedKey(WIDTH, 2, head_dim=4)), by_hand)
    yield Case("landmarks", graphs.complete(), 47, of(lambda: Linformer(WIDTH, 2, length=64, landmarks=5)), by_hand)
    waves = of(lambda: RelativeDotProduct(WIDTH, 2))
    for transport in ("halo", "stream"):
        yield Case(f"{transport}, waves of offsets", graphs.causal(), 41, waves, by_hand, transport=transport)
    pna = aggregate.PNA(average_log_degree=1.7)
    for aggregator in ("sum", "mean", "max", "min", "std", "median", pna, aggregate.Softmax()):
        yield Case(f"aggregate {str(aggregator).split('(')[0]}", edges, 47, of(None, aggregator), by_hand)
    yield Case("hops", edges, 47, of(lambda: Additive(WIDTH, 8, 2), hops=3, teleport=0.2), by_hand)
    yield Case("dropped features, edges and weights", graphs.window(6), 45, Dropped, training=True)
    yield Case("the same by hand", edges, 47, Dropped, by_hand, training=True, batch=(2,))
    yield Case("a batch", graphs.causal(), 29, layer, batch=(2, 3))
    looped = edges.with_self_loops()
    yield Case("GCN", looped, 47, lambda: GCN(WIDTH, 3), by_hand, training=True)
    yield Case("GAT's model", looped, 47, lambda: GAT(WIDTH, 3), training=True)
    yield Case("GraphSAGE", looped, 47, lambda: GraphSAGE(WIDTH, 3), by_hand, training=True)
    yield Case("MAGNA", looped, 47, lambda: MAGNA(WIDTH, 3, dim=16, heads=2), by_hand, training=True)
    yield Case("MoNet", looped, 47, lambda: MoNet(WIDTH, 3), by_hand, training=True)
    gpt = partial(Tokens, graph=graphs.causal() & graphs.window(5), dropout=0.1)
    yield Case("GPT", graphs.causal() & graphs.window(5), 48, gpt, training=True, batch=(2,))
    yield Case("GPT, zigzag", graphs.causal(), 48, gpt, Owners.zigzag, training=True, batch=(2,))


def cases_of_transport(
    transport: str, topologies: tuple[str, ...], graph: Any, make: Callable[..., nn.Module], heads: int, width: int
) -> Iterator[Case]:
    """What every transport is tried on; `graph` is one that it is made for."""
    case = partial(Case, transport=transport)
    for name in topologies:
        yield case(f"{transport}, {name}", TOPOLOGIES[name], 53, make)
    yield case(f"{transport}, fewer nodes than ranks", graph, 3, make)
    for owners in (Owners.zigzag, by_hand, uneven):
        yield case(f"{transport}, {owners.__name__}", graph, 81, partial(make, position=Rotary(width)), owners)
    for backend in ("edge_list", "csr", "tiles"):
        model = partial(make, backend=backend, dropout=0.4)
        yield case(f"{transport}, dropout, {backend}", graph, 85, model, by_hand, training=True, batch=(2,))
    yield case(f"{transport}, single", graph, 85, make, dtype=torch.float32, batch=(2, 1))
    for name, position in positions(heads, width).items():
        for owners in (Owners.equal, Owners.zigzag):
            model = lambda position=position: make(position=position())  # noqa: E731
            yield case(f"{transport}, {name}, {owners.__name__}", graph, 77, model, owners)
    weighted = wheel()
    yield case(f"{transport}, edges", explicit(47, 300), 47, make, by_hand)
    yield case(f"{transport}, GATv2", weighted, 60, of(lambda: AdditiveV2(WIDTH, 4, heads)), by_hand)
    yield case(f"{transport}, GAT", weighted, 60, of(lambda: Additive(WIDTH, 4, heads)), by_hand)
    yield case(f"{transport}, edges with attributes", weighted, 60, partial(make, edge_dim=3), by_hand)
    numbers = lambda: make(position=EdgeBias(3, heads))  # noqa: E731
    yield case(f"{transport}, numbers of edges", weighted, 60, numbers, by_hand)


def wheel() -> Graph:
    """Edges with attributes; node 7 receives from all."""
    spokes = torch.stack([torch.arange(60), torch.full((60,), 7)])
    edges = torch.cat([spokes, explicit(60, 80).edge_index], 1)
    return graphs.from_edges(edges, 60, edge_attr=torch.randn(140, 3, dtype=torch.float64))


def cases_of_transports() -> Iterator[Case]:
    causal, longformer = graphs.causal(), TOPOLOGIES["longformer"]
    names = ("causal", "complete", "window", "causal window", "longformer", "bigbird", "identity")
    yield from cases_of_transport("heads", names, causal, many_heads, 12, 4)
    yield from cases_of_transport("stream", names, causal, layer, 2, WIDTH // 2)
    yield from cases_of_transport("queries", names, longformer, layer, 2, WIDTH // 2)
    by_heads = partial(Case, transport="heads")
    model = partial(many_heads, backend="dense", dropout=0.4)
    yield by_heads("heads, dropout, dense", graphs.window(9), 45, model, by_hand, training=True, batch=(2,))
    yield by_heads("heads, one for keys", causal, 37, partial(many_heads, kv_heads=1))
    edges = explicit(47, 300)
    hops = of(lambda: DotProduct(WIDTH, 12, head_dim=4, dropout=0.2), hops=3, teleport=0.2)
    yield by_heads("heads, hops", edges, 47, hops, by_hand, training=True)
    dropping = partial(many_heads, edge_dropout=0.3)
    yield by_heads("heads, dropped edges", graphs.window(6), 45, dropping, training=True)
    gpt = lambda: GPT(11, 24, 12, 2, graph=graphs.causal(), context=64, dropout=0.1)  # noqa: E731
    yield by_heads("heads, GPT", causal, 48, lambda: Tokens(gpt()), Owners.zigzag, training=True, batch=(2,))
    streamed = partial(Case, transport="stream")
    yield streamed("stream, dropped", edges, 47, Dropped, by_hand, training=True, batch=(2,))
    windowed = causal & graphs.window(5)
    yield streamed("stream, GPT", windowed, 48, partial(Tokens, graph=windowed, dropout=0.1), training=True, batch=(2,))
    # transport="auto" takes heads for the first from three processes on, and the halo for the others
    for name in ("causal", "window"):
        yield Case(f"auto, {name}", TOPOLOGIES[name], 53, many_heads, transport="auto")
    yield Case("auto, GAT", edges, 47, of(lambda: Additive(WIDTH, 4, 2)), transport="auto")
    yield Case("auto, longformer", longformer, 83, layer, transport="auto")


def largest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest number if that is over 1."""
    if not found.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def errors(case: Case) -> tuple[float, str]:
    """The largest difference to one process that has the whole graph, and where it is."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    owners = case.owners(case.nodes, ranks)
    torch.manual_seed(0)
    model = case.model().to(case.dtype).train(case.training)
    graph = case.graph
    if isinstance(graph, Graph) and graph.edge_attr is not None:
        graph = graphs.from_edges(graph.edge_index, graph.num_dst, edge_attr=graph.edge_attr.to(case.dtype))
    x = torch.randn(*case.batch, case.nodes, WIDTH, dtype=case.dtype, requires_grad=True)
    torch.manual_seed(7)
    with sharded(alone(), Owners.equal(case.nodes, 1)):
        expected = model(x, graph)
        weight = torch.randn(expected.shape, dtype=case.dtype, generator=torch.Generator().manual_seed(1))
        (expected * weight).sum().backward()
    of_whole = gradients(model)

    mine = owners.nodes(rank)
    own = x.detach().index_select(-2, mine).requires_grad_()
    torch.manual_seed(7)
    # of the first kind of owners, the processes find out for themselves who has what
    with sharded(None, None if case.owners is Owners.equal else owners, case.transport):
        found = model(own, graph)
        (found * weight.index_select(-2, mine)).sum().backward()
    sum_gradients(model.parameters())
    differences = {"out": largest(found, expected.index_select(-2, mine))}
    if x.grad is not None:
        own_grad = torch.zeros_like(own) if own.grad is None else own.grad
        differences["d_x"] = largest(own_grad, x.grad.index_select(-2, mine))
    for (name, _), here, whole in zip(model.named_parameters(), gradients(model), of_whole, strict=True):
        differences[f"d_{name}"] = largest(here, whole)
    if not case.training:
        differences["without sharding"] = largest(model(x, graph), expected)
    where = max(differences, key=lambda name: differences[name])
    return differences[where], where


def check_bytes() -> None:
    """What an exchange receives is what the plan says, and a node that no rank fetches changes nothing elsewhere."""
    for graph, balance in (
        (graphs.window(4).bind(50), "nodes"),
        (explicit(50, 120), "edges"),
        (graphs.causal().bind(50), "zigzag"),
    ):
        part = partition(graph, balance=balance)
        x = torch.randn(2, 50, 3)
        torch.distributed.broadcast(x, 0)
        shard = part.shard()
        assert shard.exchange is not None
        shard.exchange(part.scatter(x))
        assert shard.exchange.received == part.fetched_bytes(3, batch=2)[part.rank], (balance, shard.exchange.received)
        torch.testing.assert_close(part.gather(part.scatter(x)), x, rtol=0, atol=0)
        torch.testing.assert_close(shard.exchange(part.scatter(x)), x[:, shard.node_ids[1].long()], rtol=0, atol=0)
        half = x.to(torch.bfloat16)
        assert torch.equal(shard.exchange(part.scatter(half)), half[:, shard.node_ids[1].long()])
        # what this rank does not fetch has no influence, bit for bit
        torch.manual_seed(0)
        op = MessagePassing(None, "sum", None, DotProduct(3, 1))
        before = op(part.scatter(x), shard)
        other = x.clone()
        outside = torch.ones(50, dtype=torch.bool)
        outside[shard.node_ids[1].long()] = False
        every = [torch.zeros(50, dtype=torch.int64) for _ in range(part.ranks)]
        dist.all_gather(every, outside.long())
        for rank, unread in enumerate(every):
            changed = other.clone()
            changed[:, unread.bool()] += 1
            after = op(part.scatter(changed), shard)
            if rank == part.rank:
                assert torch.equal(before, after)


def check_what_travels() -> None:
    """Keys and values, in the dtype of the arithmetic, where they are fewer bytes than features."""
    x = torch.randn(2, 50, WIDTH)
    for wide, numbers in ((False, 8), (True, WIDTH)):  # keys and values: one head of 4, or 12 of them
        op = many_heads() if wide else many_heads(kv_heads=1)
        for autocast, dtype in ((False, torch.float32), (not wide, torch.bfloat16)):
            part = partition(graphs.window(4).bind(50), balance="nodes", transport="halo")
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                op(part.scatter(x), part.shard())
            received = part.shard().exchange.received
            expected = part.fetched_bytes(numbers, dtype if autocast else torch.float32, batch=2)[part.rank]
            assert received == expected, (wide, autocast, received, expected)


def check_heads() -> None:
    """Bytes of transport="heads", where it is refused, and what "auto" takes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    topology = graphs.causal()
    part = partition(topology.bind(50), balance="zigzag", transport="heads")
    op, x = many_heads(kv_heads=1), torch.randn(2, 50, WIDTH)
    op(part.scatter(x), part.shard())
    exchange = part.shard().exchange
    assert exchange is not None
    expected = part.head_bytes(12, 1, 4, batch=2)[rank]
    assert exchange.received == expected, (exchange.received, expected)
    refused = {
        "Degree does not compute": of(lambda: Degree(WIDTH, 8))(),
        "a layer without attention": of(None)(),
        'aggregator "sum"': MessagePassing(None, "max", None, DotProduct(WIDTH, 12, head_dim=4)),
    }
    if ranks > 2:
        refused["2 heads, which"] = layer()
    for words, refusing in refused.items():
        with pytest.raises(ValueError, match=f'{words}.*; take transport="halo"'):
            refusing(part.scatter(x), part.shard())
    with pytest.raises(ValueError, match="does not return weights"):
        op(part.scatter(x), part.shard(), return_weights=True)
    auto = partition(topology.bind(5000), balance="nodes")
    wide = Layer(DotProduct(24, 12), aggregate.Sum(), False, False, False)
    by_heads, by_halo = max(auto.head_bytes(12, 12, 2)), max(auto.fetched_bytes(24))
    assert auto.transport_of(wide) == ("heads" if by_heads < by_halo else "halo")
    assert (by_heads < by_halo) == (ranks > 4)
    narrow = Layer(DotProduct(24, 12, kv_heads=1), aggregate.Sum(), False, False, False)
    by_heads, by_halo = max(auto.head_bytes(12, 1, 2)), max(auto.fetched_bytes(4))  # keys and values travel
    assert auto.transport_of(narrow) == ("heads" if by_heads < by_halo else "halo") == "halo"
    assert partition(graphs.window(9).bind(5000)).transport_of(wide) == "halo"


def check_transports() -> None:
    """Bytes of the transports in pieces, their refusals, and what "auto" takes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = graphs.longformer(8, globals=2).bind(400)
    x = torch.randn(2, 400, WIDTH)
    op = layer()
    received = {}
    for transport in ("halo", "queries", "stream"):
        part = partition(whole, balance="nodes", transport=transport)
        op(part.scatter(x), part.shard())
        exchange = part.shard().exchange
        assert exchange is not None
        received[transport] = exchange.received
        most = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
        dist.all_gather(most, torch.tensor([exchange.received]))
        received[f"most {transport}"] = max(map(int, most))
        for words, refusing in {
            "does not compute queries, keys and values": of(lambda: Degree(WIDTH, 8))(),
            "merged by the sums of a softmax": of(lambda: DotProduct(WIDTH, 2, normalize="sigmoid"))(),
            "one hop": of(lambda: DotProduct(WIDTH, 2), hops=2)(),
        }.items():
            if transport != "halo":
                with pytest.raises(ValueError, match=f'transport="{transport}" cannot run this layer: .*{words}'):
                    refusing(part.scatter(x), part.shard())
    part = partition(whole, balance="nodes")
    assert received["halo"] == part.fetched_bytes(WIDTH, batch=2)[rank]
    assert received["queries"] == 2 * part.query_bytes(WIDTH, 2, WIDTH // 2)[rank]
    assert received["stream"] == 2 * received["halo"]  # keys and values
    assert received["most queries"] < received["most halo"] / 3
    assert part.transport_of(Layer(op.attention, aggregate.Sum(), False, False, False)) == "queries"
    assert part.transport_of(Layer(op.attention, aggregate.Sum(), True, False, False)) == "halo"
    assert part.transport_of(Layer(op.attention, aggregate.Sum(), False, False, True)) == "halo"


def ring(nodes: int) -> Graph:
    """Each node receives from itself and the three on either side."""
    near = (torch.arange(nodes) + torch.arange(-3, 4)[:, None]) % nodes
    return graphs.from_edges(torch.stack([near.flatten(), torch.arange(nodes).repeat(7)]), nodes)


def check_memory() -> None:
    """Tensors of a rank take O(own + halo) bytes, however large the whole graph is: at most as much as in one process
    over so many nodes, twice the features of the sources (which the exchange puts together and in order), and four
    times those of the halo (sent and received, they and their gradients)."""
    own, width = 1024, 64
    transformer = MessagePassing(None, "sum", PreNorm(width, FeedForward(width)), DotProduct(width, 4))
    gat = MessagePassing(None, "sum", None, Additive(width, width // 4, 4))
    for name, build, op in (("window(32)", graphs.window(32).bind, transformer), ("ring", ring, gat)):
        part = partition(build(own * dist.get_world_size()), balance="nodes")
        plan = part.plans()[part.rank]
        local = own + plan.fetches
        here, alone, whole = (
            live_memory(op, graph, nodes, width)
            for graph, nodes in ((part.shard(), own), (build(local), local), (part.graph, own * part.ranks))
        )
        assert here <= alone + (2 * local + 4 * plan.fetches) * width * 4, (name, here, alone)
        assert here < 0.8 * whole, (name, here, whole)
        print(
            f"0.0e+00 memory over {name}: {here:,} of {whole:,} bytes; {alone:,} over {local:,} nodes alone", flush=True
        )


def live_memory(op: nn.Module, graph: Graph, nodes: int, width: int) -> int:
    """The most bytes that tensors of a forward and a backward pass hold, after one that fills caches of the graph."""
    x = torch.zeros(nodes, width, requires_grad=True)
    for _ in range(2):
        op.zero_grad()
        x.grad = None
        with LiveMemory() as live:
            op(x, graph).sum().backward()
    return live.peak


def check_losses() -> None:
    """`node_mean` under averaged and added gradients is the mean of all nodes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    owners = Owners.of_sizes([3 * r for r in range(ranks)])  # the first rank has no node
    x = torch.arange(float(owners.num_nodes)).sqrt()
    weight = nn.Parameter(torch.tensor(2.0))
    (weight**2 * x).mean().backward()
    expected, weight.grad = weight.grad.clone(), None
    for averaged in (True, False):
        node_mean(weight**2 * x[owners.nodes(rank)], averaged=averaged).backward()
        sum_gradients([weight])
        torch.testing.assert_close(weight.grad / (ranks if averaged else 1), expected)
        weight.grad = None


def check_second_derivatives() -> None:
    """A loss of gradients, as of forces, has the gradients of one process."""
    graph, mine = explicit(20, 80), Owners.equal(20, dist.get_world_size()).nodes(dist.get_rank())
    for transport, attention in {
        "halo": lambda: Additive(WIDTH, 4, 12),
        "heads": lambda: DotProduct(WIDTH, 12, head_dim=4),
        "queries": lambda: DotProduct(WIDTH, 12, head_dim=4),
    }.items():
        torch.manual_seed(0)
        op = MessagePassing(graph, "sum", None, attention(), backend="edge_list").double()
        x = torch.randn(20, WIDTH, dtype=torch.float64, requires_grad=True)
        own = x.detach()[mine].requires_grad_()

        def loss(x: torch.Tensor, op: nn.Module = op) -> torch.Tensor:
            (force,) = torch.autograd.grad(op(x).tanh().sum(), x, create_graph=True)
            return force.square().sum()

        loss(x).backward()
        expected = gradients(op)
        with sharded(None, Owners.equal(20, dist.get_world_size()), transport):
            loss(own).backward()
        sum_gradients(op.parameters())
        assert own.grad is not None
        assert x.grad is not None
        assert largest(own.grad, x.grad[mine]) < EXACT, transport
        for here, whole in zip(gradients(op), expected, strict=True):
            assert largest(here, whole) < EXACT, transport
    op = MessagePassing(graph, "sum", None, DotProduct(WIDTH, 2), backend="edge_list").double()
    with (
        pytest.raises(RuntimeError, match='not transport="stream"'),
        sharded(None, None, "stream"),
    ):
        loss(own, op).backward()


def check_several_lengths() -> None:
    """Inputs of other lengths in one `sharded`, and cross-attention where sizes are equal on some processes only."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    gpt = GPT(20, 8, 2, 1, graph=graphs.causal(), context=64).double().eval()
    dropout = Dropout(0.5)
    with sharded():
        # the second and the third have as many nodes on the last process, and not on the others
        for owners in (Owners.equal(40, ranks), Owners.of_sizes([6] * ranks), Owners.of_sizes([9] * (ranks - 1) + [6])):
            tokens, mine = torch.arange(owners.num_nodes)[None] % 20, owners.nodes(rank)
            assert largest(gpt(tokens[:, mine]), whole(gpt, tokens)[:, mine]) < EXACT
            x = torch.ones(owners.num_nodes, 8)
            torch.manual_seed(3)
            here = dropout(x[mine])
            torch.manual_seed(3)
            assert torch.equal(here, whole(dropout, x)[mine])
    cross = MessagePassing(graphs.complete(), "sum", None, DotProduct(WIDTH, 12, head_dim=4)).double()
    dst, src = Owners.of_sizes([5] * ranks), Owners.of_sizes([5] * (ranks - 1) + [9])
    x, source = (torch.randn(n, WIDTH, dtype=torch.float64) for n in (dst.num_nodes, src.num_nodes))
    of_dst, of_src = dst.nodes(rank), src.nodes(rank)
    for transport in ("halo", "heads", "queries", "stream"):
        with sharded(None, None, transport):
            assert largest(cross(x[of_dst], source=source[of_src]), whole(cross, x, source=source)[of_dst]) < EXACT


def whole(module: Callable[..., Any], *inputs: Any, **more: Any) -> Any:
    """What one process computes."""
    with sharded(alone()):
        return module(*inputs, **more)


@cache
def alone() -> dist.ProcessGroup:
    """A group of this process."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def check_disagreement() -> None:
    """Other graphs, owners, dtypes or batch sizes on one process are an error on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain, odd = MessagePassing(graphs.causal(), "sum", None, None), rank == 1
    x = torch.ones(1 + odd, 6, WIDTH)
    parts = torch.arange(12) % ranks
    wrong: list[Callable[[], Any]] = [
        lambda: plain(x),
        lambda: plain(x[:1].to(torch.float64 if odd else torch.float32)),
        lambda: plain(x[:1], graphs.window(3) if odd else graphs.window(2)),
        lambda: partition(explicit(12, 40, seed=rank)).shard(),
        lambda: MessagePassing(graphs.causal(), "sum", None, DotProduct(WIDTH, 2))(x[:1]),
        lambda: partition(graphs.causal().bind(12), parts=parts.flip(0) if odd else parts).shard(),
    ]
    torch.manual_seed(rank)
    for call in wrong:
        with sharded(), pytest.raises(ValueError, match="the processes disagree"):
            call()


def check_attend() -> None:
    """`ops.attend` of this process's nodes, by every transport, with tables, softcaps and sinks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    graph = graphs.longformer(8, globals=2).bind(60)
    mine = Owners.zigzag(60, ranks).nodes(rank)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 60, h, 4, dtype=torch.float64, generator=draw) for h in (12, 12, 12))
    bias, sinks = (torch.randn(*shape, dtype=torch.float64, generator=draw) for shape in ((9, 12), (12,)))
    for transport in ("halo", "heads", "queries", "stream", "auto"):
        options: dict[str, Any] = {"softcap": 2.0, "scale": 0.7, "bias": BiasTable(bias, Offset(4))}
        if transport in ("halo", "heads", "auto"):
            options["sinks"] = sinks
        whole_terms, own_terms = (
            [x.detach().requires_grad_() for x in terms]
            for terms in ((query, key, value), [x[:, mine] for x in (query, key, value)])
        )
        expected = ops.attend(graph, *whole_terms, **options)
        expected.square().sum().backward()
        with sharded(None, Owners.zigzag(60, ranks), transport):
            out = ops.attend(graph, *own_terms, **options)
            out.square().sum().backward()
        assert largest(out, expected[:, mine]) < EXACT, transport
        for here, everywhere in zip(own_terms, whole_terms, strict=True):
            assert largest(here.grad, everywhere.grad[:, mine]) < EXACT, transport


class SumsOfTwo(nn.Module):
    """GIN's layers, without its norms over nodes, which see a process's own ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (MessagePassing(None, "sum", Add(nn.Linear(WIDTH, n))) for n in (WIDTH, 3))

    def forward(self, x: torch.Tensor, graph: Any) -> torch.Tensor:
        return self.second(self.first(x, graph).relu(), graph)


def check_cut() -> None:
    """GCN, GAT, GraphSAGE and GIN's layers train with DDP over parts that are mapped from the disk."""
    folder, ranks = Path(f"{sys.argv[1]}.parts"), dist.get_world_size()
    whole = explicit(60, 400)
    draw = torch.Generator().manual_seed(1)
    x, labels = torch.randn(60, WIDTH, dtype=torch.float64, generator=draw), torch.randint(3, (60,), generator=draw)
    if dist.get_rank() == 0:
        compressed = graphs.compressed(whole)
        data = {"x": x.numpy(), "labels": labels.numpy()}
        disk.cut(compressed, folder, disk.ldg(compressed, ranks), ranks, data=data)
    dist.barrier()
    part = Part.open(folder)
    for name, build in {
        "GCN": lambda: GCN(WIDTH, 3, dropout=0.0),
        "GAT": lambda: GAT(WIDTH, 3, dropout=0.0),
        "GraphSAGE": lambda: GraphSAGE(WIDTH, 3, dropout=0.0),
        "GIN": SumsOfTwo,
    }.items():
        torch.manual_seed(0)
        alone: Any = build().double()
        divided = DistributedDataParallel(deepcopy(alone))
        of = {model: torch.optim.SGD(model.parameters(), 0.1) for model in (alone, divided)}
        for _ in range(3):
            expected = F.cross_entropy(alone(x, whole), labels)
            out = divided(part.data["x"], part.graph)
            loss = node_mean(F.cross_entropy(out, part.data["labels"], reduction="none"))
            for model, each in ((alone, expected), (divided, loss)):
                of[model].zero_grad()
                each.backward()
                of[model].step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert largest(total / ranks, expected.detach()) < EXACT, name
        for here, there in zip(divided.parameters(), alone.parameters(), strict=True):
            assert largest(here, there) < EXACT, name


def check_cut_of_edge_data() -> None:
    """Attributes and types of edges travel with the parts of a cut."""
    folder, ranks = Path(f"{sys.argv[1]}.attributes"), dist.get_world_size()
    whole = explicit(60, 400, attributes=3, types=4)
    owners = torch.arange(60) % ranks
    if dist.get_rank() == 0:
        data = {"edge_attr": whole.edge_attr.numpy(), "edge_type": whole.edge_type.numpy()}
        disk.cut(graphs.compressed(whole), folder, owners.numpy(), ranks, data=data)
    dist.barrier()
    part = Part.open(folder)
    x = torch.randn(60, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for name, attention in {
        "attributes": Additive(WIDTH, 8, 2, edge_dim=3),
        "types": Typed(WIDTH, 2, 4),
    }.items():
        op = MessagePassing(None, "sum", None, attention).double()
        found, expected = op(x[part.nodes], part.graph), op(x, whole)[part.nodes]
        assert largest(found.detach(), expected.detach()) < EXACT, name


def check_sampled() -> None:
    """Batches sampled over parts are those of one process that has the whole graph, and GraphSAGE trains on them with
    the same losses, gradients and weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(1)
    x, labels = torch.randn(60, WIDTH, dtype=torch.float64, generator=draw), torch.randint(3, (60,), generator=draw)
    nodes, fanouts, options = torch.arange(0, 60, 2), [3, -1, 2], {"batch_size": 7, "seed": 3, "world": ranks}
    of = {"no data": explicit(60, 400), "data": explicit(60, 400, attributes=3, types=4)}
    of["weights"] = explicit(60, 400, attributes=1)
    for kind, whole in of.items():
        folder = Path(f"{sys.argv[1]}.sampled {kind}")
        if rank == 0:
            data = {name: values.numpy() for name, values in whole.edge_data.items() if values is not None}
            owners = torch.randint(ranks, (60,), generator=torch.Generator().manual_seed(2)).numpy()
            disk.cut(graphs.compressed(whole), folder, owners, ranks, data=data | {"x": x.numpy()})
        dist.barrier()
        part = Part.open(folder)
        here = [*neighbor_batches(part.whole, nodes, fanouts, part.data["x"], rank=rank, **options)]
        there = [[*neighbor_batches(whole, nodes, fanouts, x, rank=r, **options)] for r in range(ranks)]
        for batch, expected in zip(here, there[rank], strict=True):
            check_batch(batch, expected)
        torch.manual_seed(0)
        alone = GraphSAGE(WIDTH, 3, layers=3, dropout=0.0).double()
        divided = deepcopy(alone)
        for batch, *every in zip(here, *there, strict=True):
            expected = torch.cat([losses_of(alone, each, labels) for each in every]).mean()
            loss = node_mean(losses_of(divided, batch, labels), averaged=False)
            alone.zero_grad()
            divided.zero_grad()
            expected.backward()
            loss.backward()
            sum_gradients(divided.parameters())
            total = loss.detach().clone()
            dist.all_reduce(total)
            assert largest(total, expected.detach()) < EXACT
            for mine, other in zip(divided.parameters(), alone.parameters(), strict=True):
                assert largest(mine.grad, other.grad) < EXACT
                mine.data -= 0.1 * mine.grad
                other.data -= 0.1 * other.grad
    with pytest.raises(ValueError, match=f"this is the graph of rank {rank} of world {ranks}; got rank 0 of world 1"):
        neighbor_batches(part.whole, nodes, fanouts, batch_size=7)
    with pytest.raises(ValueError, match=f"a row for each of the {len(part.nodes)} nodes; got 60"):
        neighbor_batches(part.whole, nodes, fanouts, x, rank=rank, **options)


def check_batch(batch: NeighborBatch, expected: NeighborBatch) -> None:
    assert torch.equal(batch.nodes, expected.nodes)
    assert torch.equal(batch.sources, expected.sources)
    assert torch.equal(batch.x, expected.x)
    for here, there in zip(batch.graphs, expected.graphs, strict=True):
        assert torch.equal(here.edge_index, there.edge_index)
        for name, values in there.edge_data.items():
            assert here.edge_data[name] is values is None or torch.equal(here.edge_data[name], values), name
        for mine, other in zip(
            (*here.degrees, *here.node_positions()), (*there.degrees, *there.node_positions()), strict=True
        ):
            torch.testing.assert_close(mine, other)


def losses_of(model: Any, batch: NeighborBatch, labels: torch.Tensor) -> torch.Tensor:
    h = batch.x
    for layer, graph in zip(model.layers, batch.graphs, strict=True):
        h = layer(h[: graph.num_dst], graph, source=h)
    return F.cross_entropy(model.head(h), labels[batch.nodes], reduction="none")


def check_kept_parts() -> None:
    """A partition keeps its parts, and those of other graphs, from one `sharded` to the next."""
    part = partition(graphs.causal().bind(40))
    mine = part.dst.sizes[part.rank]
    for topology in (graphs.causal(), graphs.window(3)):
        with sharded(part):
            first = sharding.bind(topology, mine, mine)
        with sharded(part):
            assert sharding.bind(topology, mine, mine) is first
        assert (first is part.shard()) == (topology == graphs.causal())
    rectangle = partition(graphs.complete().bind(10, 14))
    shape = rectangle.dst.sizes[part.rank], rectangle.src.sizes[part.rank]
    with sharded(rectangle):
        assert sharding.bind(graphs.complete(), *shape) is rectangle.shard()


def check_encoders() -> None:
    """Sinusoids and learned positions go by the numbers of tokens in the whole sentence. The pooled output is that of
    the first token, on the process that has it."""
    torch.manual_seed(0)
    for learned in (False, True):
        config = TransformerConfig(20, dim=8, heads=2, hidden=8, encoder_layers=1, learned_positions=learned)
        transformer, tokens = Transformer(config).double().eval(), torch.arange(12)[None]
        mine = Owners.equal(12, dist.get_world_size()).nodes(dist.get_rank())
        with sharded():
            expected = whole(transformer.encode, tokens).last[:, mine]
            assert largest(transformer.encode(tokens[:, mine]).last, expected) < EXACT
    bert = Bert(BertConfig(20, 8, 1, 2, 8, 64)).double().eval()
    tokens = torch.arange(12)[None]
    for owners in (Owners.equal(12, dist.get_world_size()), uneven(12, dist.get_world_size())):
        mine = owners.nodes(dist.get_rank())
        expected = bert(tokens).pooled
        with sharded():
            pooled = bert(tokens[:, mine]).pooled
        assert (pooled is not None) == (0 in mine)
        assert pooled is None or largest(pooled, expected) < EXACT


def main() -> None:
    meeting, quarters = sys.argv[1], {int(quarter) for quarter in sys.argv[2:]}
    torch.set_num_threads(1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    failed = False
    checks = [
        check_bytes,
        check_what_travels,
        check_memory,
        check_heads,
        check_transports,
        check_losses,
        check_second_derivatives,
    ]
    checks += [check_several_lengths, check_disagreement, check_kept_parts, check_encoders, check_attend, check_cut]
    checks += [check_cut_of_edge_data, check_sampled]
    for check in checks if 0 in quarters else ():
        check()
        print(f"0.0e+00 {check.__name__}", flush=True)
    for k, case in enumerate((*cases(), *cases_of_transports())):
        if k % 4 not in quarters:
            continue
        try:
            error, where = errors(case)
        except Exception:
            traceback.print_exc()
            print(f"FAILED {case.name}", flush=True)
            os._exit(1)  # the others would wait
        bound = EXACT if case.dtype == torch.float64 else SINGLE
        wrong = not error <= bound
        failed |= wrong
        print(f"{'WRONG ' if wrong else ''}{error:.1e} {case.name} ({where})", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
