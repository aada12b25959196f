"""Dropout by hashing: the right rate, no bias, one mask in forward and backward, and a hash that shows no pattern.

Seeds are fixed, so every bound here either holds always or never; five standard deviations are allowed.
"""

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, graphs, ops
from mpnn.attention import Additive, Attention, DotProduct
from mpnn.graph import rng

SEED = torch.tensor(123456789012345678)
SIDE = 512


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
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= x >> 15
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


def test_mixing_is_lowbias32() -> None:
    words = [0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xDEADBEEF, 0xFFFFFFFF]
    found = rng.mix(torch.tensor(words).int()).tolist()
    assert [x & 0xFFFFFFFF for x in found] == [mixed(x) for x in words]


@pytest.mark.parametrize("p", [0.25, 0.5])
def test_the_fate_of_an_edge_by_hand(p: float) -> None:
    seed, stream, i, j = 0x0123456789ABCDEF, 3, 70_000, 5
    key = (seed & 0xFFFFFFFF) ^ mixed(seed >> 32)
    word = mixed(mixed(mixed(key ^ stream) ^ i) ^ j)
    found = rng.keep(torch.tensor(seed), torch.tensor(stream), torch.tensor(i), torch.tensor(j), p)
    assert bool(found) == ((word >> 8) / 2**24 >= p)


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
