"""Attention over tiles against its naive twin, forward and gradients: odd lengths, both dtypes, every option."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from mpnn import Graph, graphs
from mpnn.backends.tiles import _layout
from mpnn.graph import rng
from mpnn.graph.topology import Topology
from mpnn.kernels.tiles.attention import (
    MAX_KEPT,
    ROWS,
    Dropout,
    Layout,
    Options,
    Prefilled,
    TileAttention,
    _slots,
)

SEED, STREAMS = torch.tensor(7), torch.arange(8)
OPTIONS = ["plain", "softcap", "table", "bias", "shared bias", "dropout", "all"]


def naive(graph: Graph, q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, bias: Tensor | None, scale: float,
          softcap: float | None, dropout: Dropout | None) -> Tensor:  # fmt: skip
    """The twin: softmax(softcap(scale Q K^T) + table + bias) V over all pairs, with -inf where (i, j) is no edge."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    logits = scale * torch.einsum("bihd,bjhd->bhij", q, k)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    i, j = torch.arange(graph.num_dst)[:, None], torch.arange(graph.num_src)
    if table is not None:
        logits = logits + table[:, i - j + graph.num_src - 1]
    edges = graph.dense()
    if bias is not None:
        logits = logits + torch.zeros(*bias.shape[:2], *edges.shape, dtype=q.dtype).masked_scatter(edges, bias)
    weights = logits.masked_fill(~edges, -torch.inf).softmax(-1).masked_fill(~edges.any(1, keepdim=True), 0)
    if dropout:
        keep = rng.keep(SEED, STREAMS.view(*weights.shape[:2], 1, 1), i, j, dropout.p)
        weights = weights * keep / (1 - dropout.p)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def leaves(graph: Graph, dtype: torch.dtype, option: str, widths: tuple[int, int] = (24, 8)) -> list[Tensor | None]:
    """query, key, value, table, bias"""
    shapes = [(2, graph.num_dst, 4, widths[0]), (2, graph.num_src, 2, widths[0]), (2, graph.num_src, 2, widths[1])]
    query, key, value = (torch.randn(shape, dtype=dtype) for shape in shapes)
    table = bias = None
    if option in ("table", "all"):
        table = torch.randn(4, graph.num_dst + graph.num_src - 1 + ROWS, dtype=dtype)
    if "bias" in option or option == "all":
        bias = torch.randn(1 if "shared" in option else 2, 4, graph.num_edges, dtype=dtype)
    return [None if x is None else x.requires_grad_() for x in (query, key, value, table, bias)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("topology", "nodes"),
    [
        (graphs.complete(), (31, 5)),
        (graphs.complete(), (97, 193)),
        (graphs.causal(), (131, 131)),
        (graphs.longformer(20, globals=3), (250, 250)),
        (graphs.documents([1, 50, 99]) - graphs.identity(), (150, 150)),  # the first node attends to no node
    ],
    ids=str,
)
@pytest.mark.covering(times=2)
def test_it_computes_what_its_twin_does(
    topology: Topology, nodes: tuple[int, int], option: str, dtype: torch.dtype
) -> None:
    graph = topology.bind(*nodes)
    inputs = leaves(graph, dtype, option)
    softcap = 1.5 if option in ("softcap", "all") else None
    keys = rng.keys(SEED, STREAMS)
    dropout = Dropout(keys, 0.3) if option in ("dropout", "all") else None
    out, _ = TileAttention.apply(*inputs, None, None, Options(Prefilled(_layout(graph)), 0.2, softcap, dropout))
    expected = naive(graph, *inputs, 0.2, softcap, dropout)
    direction = torch.randn(out.shape, dtype=dtype)
    tensors = [x for x in inputs if x is not None]
    results, twins = ([y, *torch.autograd.grad((y * direction).sum(), tensors)] for y in (out, expected))
    for ours, exact in zip(results, twins, strict=True):
        # Sums of up to 200 terms, each with a few roundings, which go either way: some tens of units of the largest.
        torch.testing.assert_close(
            ours, exact, rtol=0, atol=64 * torch.finfo(dtype).eps * float(exact.detach().abs().max())
        )


@pytest.mark.parametrize("softcap", [30.0, 1e6, 1e30])
def test_a_softcap_keeps_the_digits_of_logits_of_any_size(softcap: float) -> None:
    graph = graphs.causal().bind(70)
    inputs = leaves(graph, torch.float32, "softcap")
    doubles = [None if x is None else x.detach().double().requires_grad_() for x in inputs]
    out, _ = TileAttention.apply(*inputs, None, None, Options(Prefilled(_layout(graph)), 0.2, softcap))
    exact = naive(graph, *doubles, 0.2, softcap, None)
    for result, twin in zip(
        (out, *torch.autograd.grad(out.sin().sum(), inputs[:3])),
        (exact, *torch.autograd.grad(exact.sin().sum(), doubles[:3])),
        strict=True,
    ):
        atol = 64 * torch.finfo(torch.float32).eps * float(twin.detach().abs().max())
        torch.testing.assert_close(result.double(), twin, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", ["plain", "softcap", "bias", "dropout"])
def test_16_bits_are_added_up_in_float32_and_rounded_once(option: str, dtype: torch.dtype) -> None:
    graph, scale, unit = graphs.longformer(20, globals=3).bind(250), 0.2, torch.finfo(dtype).eps / 2
    query, key, value, table, bias = leaves(graph, torch.float32, option)
    narrow = [x.detach().to(dtype).requires_grad_() for x in (query, key, value) if x is not None]
    softcap = 1.5 if option == "softcap" else None
    dropout = Dropout(rng.keys(SEED, STREAMS), 0.3) if option == "dropout" else None
    options = Options(Prefilled(_layout(graph)), scale, softcap, dropout)
    out, lse = TileAttention.apply(*narrow, table, bias, None, None, options)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    wide = [x.detach().double().requires_grad_() for x in narrow]
    exact = naive(graph, *wide, None, None if bias is None else bias.double(), scale, softcap, dropout)
    direction = torch.randn(out.shape).to(dtype)
    ours = torch.autograd.grad((out * direction).sum(), narrow + ([] if bias is None else [bias]))
    (weights,) = torch.autograd.grad(exact.sum(), wide[2], retain_graph=True)  # of the rows that attend to each source
    expected = torch.autograd.grad((exact * direction.double()).sum(), wide + ([] if bias is None else [bias]))
    # delta_i = <d_out_i, out_i> reads outputs that were rounded, and each logit's gradient P (dP - delta) errs with it.
    delta = unit * float((direction.double() * exact.detach()).abs().sum(-1).max())
    largest = [float(x.detach().abs().max()) for x in narrow]
    from_delta = [0, scale * delta * largest[1], scale * delta * largest[0] * float(weights.max()), 0, delta]
    for found, truth, more in zip((out, *ours), (exact, *expected), from_delta, strict=False):
        size = float(truth.detach().abs().max())
        # the last rounding, and those of float32 as above
        assert float((found.detach().double() - truth.detach()).abs().max()) <= unit * size + more + 64 * 2**-23 * size


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_16_bits(bad: float) -> None:
    value = torch.zeros(1, 40, 1, 8, dtype=torch.bfloat16)
    value[0, 10, 0, 3] = bad
    zeros, layout = torch.zeros_like(value), _layout(graphs.causal().bind(40))
    out, _ = TileAttention.apply(zeros, zeros, value, *[None] * 4, Options(Prefilled(layout), 1.0))
    torch.testing.assert_close(out[0, 10:, 0, 3], value[0, 10, 0, 3].expand(30), equal_nan=True)
    assert not out[0, :10].any()


def test_no_tile_is_read_or_written_outside_the_tensors() -> None:
    """Guard numbers around every tensor: reads of them would make NaN, writes would replace them."""
    graph = graphs.causal().bind(45)
    buffers = [torch.full((2, 45 + 96, 2, 8), torch.nan) for _ in range(3)]
    inputs = [b[:, 48:93] for b in buffers]
    for x in inputs:
        x.copy_(torch.randn(x.shape))
        x.requires_grad_()
    out, _ = TileAttention.apply(*inputs, *[None] * 4, Options(Prefilled(_layout(graph)), 0.2))
    assert all(x.isfinite().all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))
    assert all(int(b.isnan().sum()) == 2 * 96 * 2 * 8 for b in buffers)


@pytest.mark.parametrize(
    ("topology", "copies"),
    [
        (graphs.window(20), 2),
        (graphs.causal(), 6),
        (graphs.identity(), 1),
        (graphs.strided(700), 6),
    ],
    ids=str,
)
def test_segments_add_to_one_copy_only_if_they_share_no_queries(topology: Topology, copies: int) -> None:
    layout = _layout(topology.bind(96 * 32))
    cuts, found = layout.segments(6)
    ptr, other = layout.by_key[:2]
    queries = [set(other[ptr[a] : ptr[b]].tolist()) for a, b in itertools.pairwise(cuts)]
    assert len(queries) == 6
    assert found == copies
    for s, t in itertools.combinations(range(6), 2):
        assert (t - s) % found or not queries[s] & queries[t]


def layout_of(*queries: list[int]) -> Layout:
    """With these query tiles for each key tile."""
    count = 1 + max(map(max, queries))
    keys = [[k for k, of in enumerate(queries) if q in of] for q in range(count)]

    def arrays(lists: list[list[int]]) -> tuple[np.ndarray, ...]:
        return np.cumsum([0, *map(len, lists)]), np.concatenate(lists).astype(np.int64)

    return Layout(arrays(keys), arrays(list(queries)), (), ())


@pytest.mark.parametrize(
    ("queries", "copies"),
    [
        ([[0, 1], [1, 2], [2, 3]], 2),  # each shares one tile with the next
        ([[2, 3], [1, 2], [0, 1]], 2),
        ([[0, 1], [2, 3], [4, 5]], 1),
        ([[4, 5], [2, 3], [0, 1]], 1),
        ([[0, 1], [2, 3], [1, 4]], 3),
        ([[0], [0]], 2),
    ],
    ids=str,
)
def test_segments_have_copies_if_their_ranges_of_queries_meet(queries: list[list[int]], copies: int) -> None:
    cuts, found = layout_of(*queries).segments(len(queries))
    assert cuts.tolist() == list(range(len(queries) + 1))
    assert found == copies


def test_tiles_are_kept_from_the_first_to_the_last_of_one_tile() -> None:
    assert layout_of([0, 1], [1, 2], [2, 3]).reach == (2, 2)
    assert layout_of([0, 1, 5], [1, 2], [2, 0]).reach == (3, 6)
    assert layout_of([0], [1], [2]).reach == (1, 1)
    assert _layout(graphs.causal().bind(300)).reach == (4, 10)
    for reach, size, slots in (
        (7, MAX_KEPT // 4, 4),
        (3, MAX_KEPT // 4, 3),
        (7, MAX_KEPT // 4 + 1, 3),
        (7, 2 * MAX_KEPT, 1),
        (7, 0, 7),
    ):
        assert _slots(reach, size) == slots


def test_a_segment_may_have_no_tile() -> None:
    """Keys behind the last query of a causal graph belong to a segment, whose gradients are zeros."""
    layout = _layout(graphs.causal().bind(96 * 32).rows(0, 32))
    cuts, copies = layout.segments(6)
    assert np.diff(layout.by_key[0][cuts]).tolist() == [1, 0]
    assert copies == 1


def test_saved_features_that_hooks_bring_back_with_other_strides() -> None:
    """Offloading libraries keep what a backward pass reads elsewhere, and return copies of it."""
    graph = graphs.causal().bind(45)
    inputs = leaves(graph, torch.float64, "shared bias")
    options = Options(Prefilled(_layout(graph)), 0.2)
    tensors = [x for x in inputs if x is not None]

    def gradients() -> tuple[Tensor, ...]:
        out, _ = TileAttention.apply(*inputs, None, None, options)
        return torch.autograd.grad(out.sin().sum(), tensors)

    def reversed_strides(x: Tensor) -> Tensor:
        order = tuple(reversed(range(x.dim())))
        return x.permute(order).contiguous().permute(order)

    expected = gradients()
    with torch.autograd.graph.saved_tensors_hooks(reversed_strides, lambda x: x):
        elsewhere = gradients()
    for found in (elsewhere, gradients()):
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
