"""Attention that chooses its edges, against the formulas of MoBA and of DeepSeek's sparse attention in float64."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, graphs
from mpnn.attention import BlockTopK, DotProduct, TopK
from mpnn.decoding.cache import KVCache
from mpnn.graph.stacked import StackedGraph
from mpnn.position import ALiBi, Rotary
from tests.support.error_bound import error_bound, largest

B, N, DIM, HEADS = 2, 22, 16, 4
BOUND = error_bound(1, N, torch.float64)


def layer(attention: Any, graph: Any = None) -> MessagePassing:
    return MessagePassing(graphs.causal() if graph is None else graph, "sum", None, attention).double()


def attend(attention: DotProduct, x: Tensor, pairs: Tensor) -> Tensor:
    """Dot-product attention of x [B, N, d] over pairs, bool [B, 1 or H, N, N], written out."""
    query, key, value = attention.project(x, x, graphs.causal().bind(N))
    key, value = (y.repeat_interleave(HEADS // y.shape[2], 2) for y in (key, value))
    logits = torch.einsum("bihd,bjhd->bhij", query, key) * attention.scale
    weights = logits.masked_fill(~pairs, -torch.inf).softmax(-1)
    return attention.merge(torch.einsum("bhij,bjhd->bihd", weights, value))


def assert_same(op: MessagePassing, found: Tensor, expected: Tensor, x: Tensor) -> float:
    """The largest difference of the outputs."""
    inputs, weight = [x, *(p for p in op.parameters())], torch.randn_like(expected)
    pairs = [torch.autograd.grad(y, inputs, weight, allow_unused=True) for y in (found, expected)]
    for one, two in ((found, expected), *zip(*pairs, strict=True)):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)
    return largest((found - expected).detach())


def index_scores(attention: TopK, x: Tensor) -> Tensor:
    query = attention.to_index_query(x).unflatten(-1, (attention.index_heads, -1))
    key, weight = attention.to_index_key(x), attention.to_index_weight(x)
    return sum(weight[..., h, None] * (query[..., h, :] @ key.mT).relu() for h in range(attention.index_heads))


def top_pairs(attention: TopK, x: Tensor) -> Tensor:
    """The chosen pairs, whose scores are the k largest among the nodes up to each; scores of zero may tie."""
    scores, chosen = index_scores(attention, x), attention.choose(x, x, graphs.causal().bind(N))
    pairs = graphs.chosen(chosen, N).dense()
    for b in range(B):
        for i in range(N):
            assert not pairs[b, i, i + 1 :].any()
            expected = scores[b, i, : i + 1].sort(descending=True).values[: attention.k]
            torch.testing.assert_close(scores[b, i][pairs[b, i]].sort(descending=True).values, expected)
    return pairs


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"position": Rotary(4)}], ids=str)
def test_top_k_attends_to_the_sources_that_the_indexer_scores_highest(options: dict[str, Any], measured: Any) -> None:
    op, x = layer(TopK(DIM, HEADS, 5, index_heads=2, index_dim=8, **options)), torch.randn(B, N, DIM).double()
    x.requires_grad_()
    expected = attend(op.attention, x, top_pairs(op.attention, x)[:, None])
    measured("MoBA, DSA, NSA", "formula (DSA)", assert_same(op, op(x), expected, x), BOUND)
    torch.testing.assert_close(op(x[0]), expected[0])
    assert op.rounds(x)[0].graph.degree().max() == 5


def test_the_index_loss_is_the_divergence_over_the_chosen_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpnn.attention.topk._AT_ONCE", 1000)  # several chunks of rows
    attention, x = TopK(DIM, HEADS, 5, index_heads=2, index_dim=8).double(), torch.randn(B, N, DIM).double()
    x.requires_grad_()
    graph, pairs = graphs.causal().bind(N), top_pairs(attention, x)
    query, key, _ = attention.project(x, x, graph)
    logits = torch.einsum("bihd,bjhd->bhij", query, key) * attention.scale
    p = logits.masked_fill(~pairs[:, None], -torch.inf).softmax(-1).mean(1).detach()
    log_q = index_scores(attention, x.detach()).masked_fill(~pairs, -torch.inf).log_softmax(-1)
    expected = sum((p[b, i, j] * (p[b, i, j].log() - log_q[b, i, j])) for b, i, j in pairs.nonzero().tolist()) / (B * N)
    found = attention.index_loss(x, x, graph)
    torch.testing.assert_close(found, expected)
    indexer = [attention.to_index_query.weight, attention.to_index_key.weight, attention.to_index_weight.weight]
    for one, two in zip(*(torch.autograd.grad(y, indexer) for y in (found, expected)), strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)
    attention.index_loss(x, x, graph).backward()
    assert x.grad is None
    assert attention.to_query.weight.grad is None


def test_nodes_without_in_neighbors_get_zeros_and_finite_gradients() -> None:
    op, x = layer(TopK(DIM, HEADS, 3), graphs.causal() - graphs.identity()), torch.randn(B, N, DIM).double()
    out, loss = op(x), op.attention.index_loss(x, x, op.graph.bind(N))
    torch.testing.assert_close(out[:, 0], op.attention.to_out.bias.expand(B, -1))
    (out.sum() + loss).backward()
    assert all(p.grad.isfinite().all() for p in op.parameters())


def moba_pairs(attention: BlockTopK, x: Tensor) -> Tensor:
    """The blocks of each query: its own, and of the whole blocks before it those of largest gate."""
    query, key, _ = (y.detach() for y in attention.project(x, x, graphs.causal().bind(N)))
    size, pairs = attention.size, torch.zeros(B, HEADS, N, N, dtype=torch.bool)
    for b, h, i in torch.cartesian_prod(torch.arange(B), torch.arange(HEADS), torch.arange(N)).tolist():
        keys = key[b, :, h * key.shape[2] // HEADS]
        gates = {n: float(query[b, i, h] @ keys[n * size : n * size + size].mean(0)) for n in range(i // size)}
        for n in [i // size, *sorted(gates, key=lambda n: -gates[n])[: attention.top - 1]]:
            pairs[b, h, i, n * size : min(n * size + size, i + 1)] = True
    return pairs


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2}, {"position": Rotary(4)}], ids=str)
def test_block_top_k_is_moba(options: dict[str, Any], measured: Any) -> None:
    op, x = layer(BlockTopK(DIM, HEADS, 4, 3, **options)), torch.randn(B, N, DIM).double()
    x.requires_grad_()
    expected = attend(op.attention, x, moba_pairs(op.attention, x))
    measured("MoBA, DSA, NSA", "formula (MoBA)", assert_same(op, op(x), expected, x), BOUND)
    torch.testing.assert_close(op(x[0]), expected[0])


def test_blocks_chosen_over_other_graphs_stay_within_them() -> None:
    window, x = (graphs.window(5) & graphs.causal()).bind(N), torch.randn(B, N, DIM).double()
    graph = layer(BlockTopK(DIM, HEADS, 4, 1)).rounds(x, window)[0].graph
    pairs = window.dense()
    for i, n in torch.cartesian_prod(torch.arange(N), torch.arange(6)).tolist():
        block = pairs[i, 4 * n : 4 * n + 4]
        block &= i // 4 == n or not block.all()  # blocks seen in part are always chosen, and no other but the own one
    assert torch.equal(graph.dense(), pairs.expand(B, HEADS, N, N))
    whole = layer(BlockTopK(DIM, HEADS, 4, 2)).rounds(x, graphs.complete())[0].graph
    assert isinstance(whole, StackedGraph)
    assert set(whole.degree().flatten().tolist()) <= {8, 6}  # the last block has two nodes
    own = torch.arange(N) // 4 == (torch.arange(N) // 4)[:, None]
    assert whole.dense()[..., own].all()


choosers = pytest.mark.parametrize(
    "attention", [TopK(DIM, HEADS, 3, position=Rotary(4)), BlockTopK(DIM, HEADS, 4, 3, position=Rotary(4))],
    ids=["TopK", "BlockTopK"],
)  # fmt: skip


@choosers
def test_chosen_edges_are_decoded_from_a_cache(attention: DotProduct) -> None:
    op, x, cache = layer(attention), torch.randn(B, N, DIM).double(), KVCache(N)
    with torch.no_grad():
        parts = [op(x[:, a:b], cache=cache) for a, b in ((0, 9), (9, 10), (10, 15), (15, N))]
        torch.testing.assert_close(torch.cat(parts, 1), op(x), rtol=0, atol=1e-12)


def test_top_k_of_a_window_are_decoded_from_a_cache() -> None:
    op, x, cache = layer(TopK(DIM, HEADS, 3, position=Rotary(4))), torch.randn(B, N, DIM).double(), KVCache(N)
    near = graphs.causal() & graphs.window(7)
    with torch.no_grad():
        parts = [op(x[:, k : k + 1], near, cache=cache) for k in range(N)]
        torch.testing.assert_close(torch.cat(parts, 1), op(x, near), rtol=0, atol=1e-12)


@pytest.mark.parametrize("batch", [(), (1,), (3,)], ids=str)
def test_a_token_reads_the_means_and_the_chosen_blocks_alone(batch: tuple[int, ...]) -> None:
    """Keys and values of other blocks are NaN when the token comes, and it chooses as over all of them."""
    op, cache = layer(BlockTopK(DIM, HEADS, 4, 3, kv_heads=2, position=Rotary(4))), KVCache(N)
    x, attention, graph = torch.randn(*batch, N, DIM).double(), op.attention, graphs.causal().bind(N)
    whole = op(x)
    with torch.no_grad():
        op(x[..., : N - 1, :], cache=cache)
        query, key, _ = attention.project(x, x, graph)
        chosen = attention.choose(query, key, graph)[:, :, -1]  # [B, H, blocks]
        others = ~chosen.unflatten(1, (2, -1)).any(2).repeat_interleave(4, -1)[..., : N - 1]
        assert others.any()
        entry = cache._entries[op]
        for stored in (entry.key, entry.value):
            stored.view(-1, *stored.shape[-3:])[:, : N - 1].masked_fill_(others.mT[..., None], torch.nan)
        found = op(x[..., N - 1 :, :], cache=cache)
    torch.testing.assert_close(found[..., 0, :], whole[..., -1, :], rtol=0, atol=1e-12)


@choosers
def test_choices_follow_what_a_cache_forgets(attention: DotProduct) -> None:
    op, cache = layer(attention), KVCache(N)
    x, other = torch.randn(2, 2, N, DIM).double()
    with torch.no_grad():
        op(other[:, :14], cache=cache)
        op(other[:, 14:15], cache=cache)
        cache.crop(6)
        x = torch.cat([other[:, :6], x[:, 6:]], 1)
        for kept in (copy.deepcopy(cache), cache):
            parts = [op(x[:, a:b], cache=kept) for a, b in itertools.pairwise([6, 13, *range(14, N + 1)])]
            torch.testing.assert_close(torch.cat(parts, 1), op(x)[:, 6:], rtol=0, atol=1e-12)
        cache.crop(N - 3)
        cache.select(torch.tensor([1, 1, 0]))
        x = x[[1, 1, 0]]
        parts = [op(x[:, k : k + 1], cache=cache) for k in range(N - 3, N)]
        torch.testing.assert_close(torch.cat(parts, 1), op(x)[:, N - 3 :], rtol=0, atol=1e-12)


def test_what_a_choice_cannot_do_is_refused() -> None:
    x, graph = torch.randn(B, N, DIM), graphs.causal().bind(N)
    weighted = graphs.from_edges([[0], [1]], N, edge_attr=torch.ones(1, 3))
    for attention in (TopK(DIM, HEADS, 3), BlockTopK(DIM, HEADS, 4, 2)):
        op = MessagePassing(graphs.causal(), "sum", None, attention)
        with pytest.raises(ValueError, match=r"takes features \[N, d\] or \[B, N, d\]"):
            op(x[None])
        with pytest.raises(ValueError, match="chooses its edges, so it takes no edge_attr"):
            op(x, weighted)
    with pytest.raises(ValueError, match="has other positions"):
        MessagePassing(None, "sum", None, attention)(x, graph.with_positions(torch.arange(N), torch.arange(N)))
    with pytest.raises(ValueError, match="index_loss needs logits that are products"):
        TopK(DIM, HEADS, 3, position=ALiBi(HEADS)).index_loss(x, x, graph)
    with pytest.raises(ValueError, match="k must be"):
        TopK(DIM, HEADS, 0)
