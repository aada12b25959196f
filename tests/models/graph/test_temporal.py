"""TGAT and TGN: time encodings, attention over earlier edges and memories, with the weights of PyTorch Geometric and
against their formulas written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from error_bound import error_bound
from torch import Tensor, nn

from mpnn import MessagePassing, graphs
from mpnn.data import neighbor_batches
from mpnn.graphs.encodings import TimeEncoding
from mpnn.models import TGAT, TGNMemory
from mpnn.models.graph.graph_transformer import HeadsOf
from mpnn.update import SelfConnection

SYSTEM = "TGAT, TGN"
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
N, DIM, EDGE, TIME = 12, 6, 3, 5


def randomized(model: Any, dtype: torch.dtype = torch.float64) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    return model.to(dtype)


def events(count: int, dtype: torch.dtype, start: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From each of six users at least once, to each of six items at least once, in the order of time."""
    src, dst = (torch.cat([torch.randperm(6), torch.randint(6, (count - 6,))]) for _ in range(2))
    time = start + torch.randperm(10 * count)[:count].sort().values
    return src, dst + 6, time, torch.randn(count, EDGE, dtype=dtype)


def with_weights_of(ours: TGNMemory, theirs: Any) -> None:
    with torch.no_grad():
        ours.encode.frequency.copy_(theirs.time_enc.lin.weight[:, 0])
        ours.encode.phase.copy_(theirs.time_enc.lin.bias)
        ours.round.update.cell.load_state_dict(theirs.gru.state_dict())


@pytest.fixture
def tgn() -> Any:
    pytest.importorskip("torch_geometric")
    from torch_geometric.nn.models import tgn

    return tgn


@DTYPES
def test_the_time_encoding_is_pygs(dtype: torch.dtype, tgn: Any, measured: Callable[..., None]) -> None:
    theirs, ours, t = tgn.TimeEncoder(8).to(dtype), TimeEncoding(8).to(dtype), torch.arange(-20, 20)
    with torch.no_grad():
        ours.frequency.copy_(theirs.lin.weight[:, 0])
        ours.phase.copy_(theirs.lin.bias)
    error = (ours(t) - theirs(t.to(dtype))).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric TimeEncoder", error, error_bound(2, 2, dtype, scale=20))


@pytest.mark.parametrize("kind", ["last", "mean"])
@pytest.mark.parametrize("training", [False, True])
@DTYPES
def test_memories_are_pygs(
    kind: str, training: bool, dtype: torch.dtype, tgn: Any, measured: Callable[..., None]
) -> None:
    """Three batches. Every user and item is in each: PyTorch Geometric computes what an event does to a node when the
    node is next in a batch, from memories of then; messages of nodes without new events count again; and in training
    it updates a node without messages, by zeros: so ours begins with what its first batch does."""
    aggregate = {"last": tgn.LastAggregator, "mean": tgn.MeanAggregator}[kind]()
    message = tgn.IdentityMessage(EDGE, DIM, TIME)
    theirs = tgn.TGNMemory(N, EDGE, DIM, TIME, message, aggregate).to(dtype)
    theirs.reset_state()  # whose messages now have the type
    theirs.train(training)
    ours = TGNMemory(N, EDGE, DIM, TIME, kind).to(dtype)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    with_weights_of(ours, theirs)
    theirs.reset_state()
    if training:
        zeros = torch.zeros(N, EDGE + 2 * DIM + TIME, dtype=dtype)
        ours.memory.copy_(theirs.gru(zeros, ours.memory).detach())
    nodes = torch.randperm(N)
    for start in (0, 500, 1000):
        batch = events(20, dtype, start)
        for model in (theirs, ours):
            model.update_state(*batch) if model is theirs else model.observe(*batch)
        theirs.detach()
        (found, times), (expected, expected_times) = ours(nodes), theirs(nodes)
        assert torch.equal(times, expected_times)
        error = (found - expected).abs().max().item()
        measured(SYSTEM, "PyTorch Geometric TGNMemory", error, error_bound(3, 40, dtype, scale=8))
    if training and dtype == torch.float64:
        lin = theirs.time_enc.lin
        own = torch.autograd.grad(found.square().sum(), [*ours.encode.parameters(), *ours.round.parameters()])
        other = torch.autograd.grad(expected.square().sum(), [lin.weight, lin.bias, *theirs.gru.parameters()])
        for a, b in zip(own, other, strict=True):
            torch.testing.assert_close(a, b.view_as(a), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["last", "mean"])
def test_memories_are_their_formula(kind: str, measured: Callable[..., None]) -> None:
    """Event by event, between any two nodes: some take part in no batch, some twice in an event."""
    model = randomized(TGNMemory(N, EDGE, DIM, TIME, kind))
    s, t = torch.zeros(N, DIM, dtype=torch.float64), [0] * N
    for start in (0, 40, 80):
        src, dst = torch.randint(N - 1, (2, 9))
        time, message = start + torch.randint(40, (9,)), torch.randn(9, EDGE, dtype=torch.float64)
        model.observe(src, dst, time, message)
        sent: dict[int, list[tuple[int, Tensor]]] = {}
        for i, j in ((src, dst), (dst, src)):
            for e in range(9):
                phi = torch.cos((time[e] - t[i[e]]) * model.encode.frequency + model.encode.phase)
                sent.setdefault(int(i[e]), []).append((int(time[e]), torch.cat([s[i[e]], s[j[e]], message[e], phi])))
        s = s.clone()
        for i, messages in sent.items():
            at = [time for time, _ in messages]
            latest = max(k for k in range(len(at)) if at[k] == max(at))
            rows = torch.stack([row for _, row in messages])
            s[i] = model.round.update.cell((rows[latest] if kind == "last" else rows.mean(0))[None], s[None, i])[0]
            t[i] = max(at)
        s = s.detach()
        found, times = model(torch.arange(N))
        assert times.tolist() == t
        measured(SYSTEM, "formula", (found - s).abs().max().item(), error_bound(3, 40, torch.float64, scale=8))
    assert not found[N - 1].any()


def test_the_last_event_at_one_time_is_the_last_in_order() -> None:
    """Whether a node is the source or the destination of an event changes nothing."""

    def memory_of_0(*events: tuple[int, int, float]) -> torch.Tensor:
        model.reset()
        src, dst, message = zip(*events, strict=True)
        time = torch.full((len(events),), 5)
        model.observe(torch.tensor(src), torch.tensor(dst), time, torch.tensor(message)[:, None])
        return model.memory[0].clone()

    model = TGNMemory(3, 1, 4, 2)
    for first in ((1, 0, 1.0), (0, 1, 1.0)):
        for last in ((0, 2, -1.0), (2, 0, -1.0)):
            torch.testing.assert_close(memory_of_0(first, last), memory_of_0(last))


def test_memories_are_in_files_and_only_the_last_events_have_gradients(tmp_path: Path) -> None:
    model, nodes = TGNMemory(N, EDGE, DIM, TIME), torch.arange(N)
    model.observe(*events(20, torch.float32))
    expected, times = model(nodes)
    assert expected.requires_grad
    assert torch.equal(expected, model.memory)
    model.save_pretrained(tmp_path)
    other = TGNMemory(N, EDGE, DIM, TIME)
    other.observe(*events(20, torch.float32, 500))
    other.load_state_dict(model.state_dict())
    for copied in (other, TGNMemory.from_pretrained(tmp_path)):
        found, found_times = copied(nodes)
        assert torch.equal(found, expected)
        assert torch.equal(found_times, times)
        assert not found.requires_grad
    with torch.no_grad():
        model.round.update.cell.bias_ih.add_(1)  # as a step does
    assert not torch.equal(model(nodes)[0], model.memory)
    with torch.no_grad():
        assert torch.equal(model(nodes)[0], model.memory)
    model.observe(torch.tensor([3]), torch.tensor([4]), torch.tensor([999]), torch.randn(1, EDGE))
    found, times = model(nodes)
    found.index_select(0, torch.tensor([0, 1, 2])).sum().backward()
    assert not model.round.update.cell.bias_ih.grad.any()  # their events were before
    assert times[3:5].tolist() == [999, 999]
    model.observe(*(x[:0] for x in events(20, torch.float32)))
    assert torch.equal(model(nodes)[0], found)
    assert not model(nodes)[0].requires_grad
    model.reset()
    assert not model(nodes)[0].any()
    assert not model(nodes)[1].any()


@DTYPES
def test_the_embedding_of_tgn_is_pygs(dtype: torch.dtype, tgn: Any, measured: Callable[..., None]) -> None:
    """The layer of PyTorch Geometric's example: a TransformerConv whose edges have encoded times and messages."""
    from torch_geometric.nn import TransformerConv

    encoder = tgn.TimeEncoder(TIME).to(dtype)
    theirs = TransformerConv(DIM, 4, heads=2, edge_dim=TIME + EDGE).to(dtype)
    encode = TimeEncoding(TIME).to(dtype)
    attention = HeadsOf(DIM, 4, 2, edge_dim=TIME + EDGE)
    ours = MessagePassing(None, "sum", SelfConnection(DIM, 8), attention).to(dtype)
    with torch.no_grad():
        encode.frequency.copy_(encoder.lin.weight[:, 0])
        encode.phase.copy_(encoder.lin.bias)
    names = {"to_query": "lin_query", "to_key": "lin_key", "to_value": "lin_value", "to_edge": "lin_edge"}
    for mine, name in names.items():
        getattr(attention, mine).load_state_dict(getattr(theirs, name).state_dict())
    ours.update.linear.load_state_dict(theirs.lin_skip.state_dict())
    edges, age = torch.randint(N, (2, 40)), torch.randint(50, (40,))
    x, message = torch.randn(N, DIM, dtype=dtype, requires_grad=True), torch.randn(40, EDGE, dtype=dtype)
    found = ours(x, graphs.from_edges(edges, N), edge_attr=torch.cat([encode(age), message], -1))
    expected = theirs(x, edges, torch.cat([encoder(age.to(dtype)), message], -1))
    error = (found - expected).abs().max().item()
    measured(SYSTEM, "PyTorch Geometric TransformerConv", error, error_bound(4, 24, dtype, scale=4))


@DTYPES
def test_the_attention_of_tgat_is_pygs_if_keys_and_values_share_the_map_of_edges(
    dtype: torch.dtype, measured: Callable[..., None]
) -> None:
    pyg = pytest.importorskip("torch_geometric.nn")
    theirs = pyg.TransformerConv((DIM, DIM + TIME), 4, heads=2, edge_dim=EDGE + TIME, root_weight=False).to(dtype)
    attention = HeadsOf(DIM, 4, 2, edge_dim=EDGE + TIME, query_dim=DIM + TIME, shared=False).to(dtype)
    for mine, name in (
        ("query", "query"),
        ("key", "key"),
        ("value", "value"),
        ("edge", "edge"),
        ("edge_value", "edge"),
    ):
        getattr(attention, f"to_{mine}").load_state_dict(getattr(theirs, f"lin_{name}").state_dict())
    edges = torch.stack([torch.randint(N, (40,)), torch.randint(7, (40,))])
    edge_attr, x = torch.randn(40, EDGE + TIME, dtype=dtype), torch.randn(N, DIM, dtype=dtype)
    query = torch.randn(7, DIM + TIME, dtype=dtype)
    graph = graphs.from_edges(edges, num_src=N, num_dst=7)
    expected = theirs((x, query), edges, edge_attr)
    for backend in ("auto", "csr", "edge_list"):
        op = MessagePassing(graph, "sum", None, attention, backend=backend)
        error = (op(query, source=x, edge_attr=edge_attr) - expected).abs().max().item()
        measured(SYSTEM, "PyTorch Geometric TransformerConv", error, error_bound(4, 24, dtype, scale=4))


def recursive(model: TGAT, past: graphs.TemporalGraph, x: Tensor, node: int, time: Tensor, layer: int) -> Tensor:
    """The paper's equations for one node at one time, over all earlier edges."""
    if not layer:
        return x[node]
    own = recursive(model, past, x, node, time, layer - 1)
    attention: Any = model.layers[layer - 1].attention
    src, dst, times = *past.whole.edge_index, past.times[past.edge_ids.argsort()]
    rows = [e for e in range(len(src)) if dst[e] == node and times[e] < time]
    q = attention.to_query(torch.cat([own, model.encode(torch.zeros((), dtype=x.dtype))])).view(2, -1)
    message = torch.zeros_like(q)
    if rows:
        keys, values = [], []
        for e in rows:
            at = times[e] if past.as_of == "edge" else time
            h = recursive(model, past, x, int(src[e]), at, layer - 1)
            of_edge = torch.cat([past.whole.edge_attr[e], model.encode(time - times[e])])
            keys.append((attention.to_key(h) + attention.to_edge(of_edge)).view(2, -1))
            values.append((attention.to_value(h) + attention.to_edge_value(of_edge)).view(2, -1))
        logits = (torch.stack(keys) * q).sum(-1) / q.shape[-1] ** 0.5
        message = (logits.softmax(0)[..., None] * torch.stack(values)).sum(0)
    first, _, _, last = model.merge[layer - 1]
    return last(first(torch.cat([message.flatten(), own])).relu())


@pytest.mark.parametrize("as_of", ["edge", "query"])
def test_tgat_over_sampled_batches_is_its_formula(as_of: str, measured: Callable[..., None]) -> None:
    """With all earlier edges, so that later ones do not count."""
    model = randomized(TGAT(DIM, 4, 2, 2, TIME, EDGE).eval())
    x, times = torch.randn(N, DIM, dtype=torch.float64), torch.randint(20, (40,))
    edges = graphs.from_edges(torch.randint(N, (2, 40)), N, edge_attr=torch.randn(40, EDGE, dtype=torch.float64))
    past = graphs.TemporalGraph(edges, times, as_of=as_of)
    nodes, before = torch.randint(N, (10,)), torch.randint(5, 22, (10,))
    for batch in neighbor_batches(past, nodes, [-1, -1], x, before=before, batch_size=4, shuffle=False):
        found = model(batch.x, batch.graphs, batch.ages)
        for k, row in enumerate(found):
            expected = recursive(model, past, x, int(batch.nodes[k]), batch.times[k], 2)
            error = (row - expected).abs().max().item()
            measured(SYSTEM, "formula", error, error_bound(4, 24, torch.float64, scale=8))


def test_mistakes_are_named() -> None:
    memory, (src, dst, time, message) = TGNMemory(N, EDGE, DIM, TIME), events(8, torch.float32, 5)
    with pytest.raises(ValueError, match="aggregate must be 'last' or 'mean'; got 'max'"):
        TGNMemory(N, EDGE, aggregate="max")
    with pytest.raises(ValueError, match=r"time must be int64 \[8\], as src and dst; got torch.float32 \[8\]"):
        memory.observe(src, dst, time.float(), message)
    with pytest.raises(ValueError, match=r"message must be \[8, 3\]; got \[8, 2\]"):
        memory.observe(src, dst, time, message[:, :2])
    with pytest.raises(ValueError, match=r"nodes\[0\] is 12, but there are 12 nodes"):
        memory.observe(src.index_fill(0, torch.tensor([0]), 12), dst, time, message)
    memory.observe(src, dst, time, message)
    with pytest.raises(ValueError, match=r"an event of node \d+ at 4 is before its last one, at"):
        memory.observe(src, dst, torch.where(torch.arange(8) == 2, 4, time + 99), message)
    graph, x = graphs.from_edges([[0], [1]], 2), torch.randn(2, DIM)
    with pytest.raises(ValueError, match="3 heads do not divide a width of 8"):
        TGAT(DIM, 8, heads=3)
    with pytest.raises(ValueError, match="2 layers need as many graphs and ages; got 1, 1"):
        TGAT(DIM, 8)(x, [graph], [torch.ones(1)])
    with pytest.raises(ValueError, match="edge_attr"):
        TGAT(DIM, 8, 1, edge_dim=2)(x, [graph], [torch.ones(1)])
    with pytest.raises(ValueError, match="dim must be at least 1; got 0"):
        TimeEncoding(0)
