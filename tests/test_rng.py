"""Dropout by hashing: the right rate, no bias, one mask in forward and backward, and a hash that shows no pattern.

Seeds are fixed, so every bound here either holds always or never; five standard deviations are allowed.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import Additive, Attention, DotProduct
from mpnn.graph import rng
from mpnn.kernels.dropout_threshold import threshold

SEED = torch.tensor(123456789012345678)
SIDE = 512
MASK = 0xFFFFFFFF


def kept(p: float = 0.5, seed: Tensor = SEED, stream: int = 0) -> Tensor:
    """The fate of all edges between SIDE nodes, [dst, src]."""
    node = torch.arange(SIDE)
    return rng.keep(seed, torch.tensor(stream), node[:, None], node[None, :], p)


def correlation(a: Tensor, b: Tensor) -> float:
    """Of two equally long lists of fair coin flips: mean 0, standard deviation 1 / sqrt(n)."""
    return float(((2.0 * a - 1) * (2.0 * b - 1)).mean())


# ---------------------------------------------------------------------------------------- what is dropped


@pytest.mark.parametrize("p", [0.0, 0.01, 0.1, 0.5, 0.9, 0.999])
def test_rate(p: float) -> None:
    dropped = 1 - float(kept(p).double().mean())
    assert abs(dropped - p) <= 5 * (p * (1 - p)) ** 0.5 / SIDE


def dropped_weights(graph: object, backend: str = "edge_list", p: float = 0.4, batch: int = 1) -> Tensor:
    """What becomes of equal weights, [batch, head, dst, src]: values are one-hot, so outputs are the weights."""
    n = graph.num_dst
    query = torch.zeros(batch, n, 2, 3)
    value = torch.eye(n)[None, :, None].expand(batch, n, 2, n)
    return ops.attend(graph, query, query, value, dropout=p, backend=backend).transpose(1, 2)


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
def test_weights_left_are_scaled_up(backend: str) -> None:
    weights = dropped_weights(graphs.complete().bind(50), backend)
    scaled = 1 / 50 / 0.6
    assert ((weights == 0) | ((weights - scaled).abs() < 1e-8)).all()
    assert abs(float(weights.sum(-1).mean()) - 1) <= 5 * (0.4 / 0.6) ** 0.5 / (2 * 50 * 50) ** 0.5


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
def test_every_batch_and_head_has_its_own_mask(backend: str) -> None:
    masks = (dropped_weights(graphs.complete().bind(40), backend, p=0.5, batch=3) > 0).flatten(0, 1)
    for a in range(6):
        for b in range(a):
            assert abs(correlation(masks[a], masks[b])) <= 5 / 40


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
def test_the_backward_pass_drops_the_same(backend: str) -> None:
    graph = graphs.window(4).bind(20)
    query, value = torch.randn(20, 2, 3), torch.eye(20)[:, None].repeat(1, 2, 1).requires_grad_()
    out = ops.attend(graph, query, query, value, dropout=0.4, backend=backend)
    direction = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, value, direction)
    torch.testing.assert_close(gradient, torch.einsum("ihj,ihd->jhd", out, direction))


def test_repeated_edges_share_their_fate() -> None:
    twice = graphs.from_edges(torch.tensor([[0, 0], [0, 0]]), 1)
    for _ in range(20):
        out = ops.attend(twice, *[torch.ones(1, 1, 1)] * 3, dropout=0.5)
        assert float(out) in (0.0, 2.0)


@pytest.mark.parametrize("attention", [DotProduct(8, 2, dropout=0.5), Additive(8, 4, 2, dropout=0.5)], ids=type)
def test_layers_drop_in_training_only_and_repeat_with_the_seed(attention: Attention) -> None:
    op, x = MessagePassing(graphs.window(3), "sum", None, attention), torch.randn(2, 20, 8)
    assert not op(x).equal(op(x))
    torch.manual_seed(5)
    first = op(x)
    torch.manual_seed(5)
    assert op(x).equal(first)
    op.eval()
    exact = op(x)
    assert op(x).equal(exact)
    attention.dropout, op.training = 0.0, True
    assert op(x).equal(exact)


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
@pytest.mark.sample(2)
def test_the_mean_over_many_masks_is_the_output_without(backend: str) -> None:
    graph = graphs.causal().bind(8)
    query, key, value = (torch.randn(8, 2, 3) for _ in range(3))
    drawn = torch.stack([ops.attend(graph, query, key, value, dropout=0.3, backend=backend) for _ in range(600)])
    error = (drawn.mean(0) - ops.attend(graph, query, key, value)).abs()
    assert (error <= 5 * drawn.std(0) / 600**0.5).all()


# ---------------------------------------------------------------------------------------- the hash


def mixed(x: int) -> int:
    """lowbias32, in Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def test_mixing_is_lowbias32() -> None:
    words = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    found = rng.mix(torch.tensor(words).int()).tolist()
    assert [x & MASK for x in found] == [mixed(x) for x in words]


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_the_fate_of_edges_by_hand(p: float) -> None:
    low, high, nodes = 0x89ABCDEF, 0x01234567, [0, 5, 70_000, 2**31 - 1]
    key = mixed(low) ^ high
    for stream, i, j in itertools.product(range(3), nodes, nodes):
        ends = (mixed(mixed(key) ^ i) | 1) * (mixed(mixed(~key & MASK) ^ j) | 1)
        word = (mixed(low ^ mixed(high) ^ stream) | 1) * ends
        signed = (word & MASK) - (word & 1 << 31) * 2
        found = rng.keep(torch.tensor(high << 32 | low), *map(torch.tensor, (stream, i, j)), p)
        assert bool(found) == (signed / 2**32 + 0.5 >= p)


@pytest.mark.parametrize("shift", [1, 2, 3, 7, 64, 128])
def test_no_correlation_along_rows_columns_or_diagonals(shift: int) -> None:
    keep = kept()
    n = SIDE * (SIDE - shift)
    assert abs(correlation(keep[:, shift:], keep[:, :-shift])) <= 5 / n**0.5
    assert abs(correlation(keep[shift:], keep[:-shift])) <= 5 / n**0.5
    assert abs(correlation(keep[shift:, shift:], keep[:-shift, :-shift])) <= 5 / (SIDE - shift)
    assert abs(correlation(keep, keep.T)) <= 5 * 2**0.5 / SIDE + 1 / SIDE  # pairs count twice, the diagonal is itself


def test_no_correlation_between_streams_or_seeds() -> None:
    keep = kept()
    for other in (*(kept(stream=s) for s in (1, 2, 3, 64)), *(kept(seed=SEED + d) for d in (1, 2, 1 << 32, 1 << 40))):
        assert abs(correlation(keep, other)) <= 5 / SIDE


# What a product of words could do wrong: be a matrix of low rank in disguise. Words joined by ^ are one, and fail.


def centered(keep: Tensor, p: float) -> Tensor:
    """Mean 0 and variance 1."""
    return (keep.float() - (1 - p)) / (p * (1 - p)) ** 0.5


def excess_of_pairs(rows: Tensor) -> float:
    """How far correlations of pairs of rows scatter beyond chance, in standard errors."""
    pairs = torch.triu_indices(len(rows), len(rows), 1)
    squares = (rows @ rows.T / rows.shape[1] ** 0.5)[pairs[0], pairs[1]].double() ** 2
    return float((squares.mean() - 1) / squares.std() * len(squares) ** 0.5)


def joined_by_xor(p: float) -> Tensor:
    node = torch.arange(SIDE)
    return (rng.words(SEED.int(), node)[:, None] ^ rng.words(~SEED.int(), node)) >= threshold(p)


def deviations(keep: Callable[[float], Tensor], p: float) -> list[float]:
    """Of pairs of rows and of columns, and of products over 2 x 2 blocks: rows a apart and columns b."""
    x = centered(keep(p), p)
    found = [excess_of_pairs(x), excess_of_pairs(x.T)]
    for a, b in itertools.product((1, 7, 64), repeat=2):
        block = x[a:, b:] * x[a:, :-b] * x[:-a, b:] * x[:-a, :-b]
        found.append(float(block.sum() / block.norm()))
    return [abs(z) for z in found]


@pytest.mark.parametrize("p", [0.5, 0.1, 0.02])
def test_pairs_of_rows_and_blocks_of_edges_are_independent(p: float) -> None:
    assert max(deviations(kept, p)) <= 5
    assert max(deviations(joined_by_xor, p)) > 20


@pytest.mark.parametrize("p", [0.5, 0.1])
def test_streams_and_seeds_are_independent_in_pairs(p: float) -> None:
    streams = [kept(p, stream=s)[:128, :128] for s in range(48)]
    seeds = [kept(p, seed=SEED + d)[:128, :128] for s in range(24) for d in (s + 1, (s + 1) << 32)]
    rows = centered(torch.stack(streams + seeds), p).flatten(1)
    rows = rows - rows.mean(1, keepdim=True)
    assert abs(excess_of_pairs(rows)) <= 5
    pairs = torch.triu_indices(len(rows), len(rows), 1)
    assert float((rows @ rows.T / 128)[pairs[0], pairs[1]].abs().max()) <= 5.5


def test_each_row_and_column_drops_its_share() -> None:
    for p in (0.02, 0.1, 0.5, 0.9):
        x = centered(kept(p), p)
        for sums in (x.sum(0), x.sum(1)):
            assert float(sums.abs().max()) <= 6 * SIDE**0.5
            assert abs(float((sums**2).mean() / SIDE - 1)) <= 5 * (2 / SIDE) ** 0.5


def test_numbers_far_apart_are_words_as_well() -> None:
    """Node ids of a part of a graph: multiples, and up to 2^31."""
    for node in (torch.arange(SIDE) << 16, torch.arange(SIDE) * 4096 + 2**30, 2**31 - 1 - torch.arange(SIDE)):
        keep = rng.keep(SEED, torch.tensor(0), node[:, None], node[None, :], 0.5)
        assert max(deviations(lambda _p, keep=keep: keep, 0.5)) <= 5
