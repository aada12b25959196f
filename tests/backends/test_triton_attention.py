"""Attention by `csr`'s kernels for GPUs, against the specification `edge_list`, forward and backward."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from on_triton import (  # noqa: F401 - fixtures
    CLOSE,
    DEVICE,
    INTERPRETED,
    MARKS,
    REQUESTS,
    SEED,
    additive,
    additive_v2,
    check,
    dot,
    hubs,
    leaf,
    poisoned,
    rounding,
    scattered,
    small_pieces,
    with_vectors,
    without_edges,
)
from torch import Tensor

from mpnn import graphs, rng
from mpnn.backends import csr, edge_list
from mpnn.backends.csr import cuda_attention, cuda_reduce, on_device
from mpnn.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph import Graph
from mpnn.kernels.cuda.schedule import Sorted
from mpnn.round import Round
from mpnn.scores import Dot, LeakyReLU

pytestmark = MARKS


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_agrees_with_the_specification(make: Callable[[Graph], Round]) -> None:
    for graph in (scattered(), without_edges()):
        check(make(graph), what=str(graph))


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (2, 3), (3, 8), (4, 40), (5, 1), (1, 300)])
def test_every_width_and_number_of_heads(heads: int, width: int) -> None:
    check(dot(scattered(5, 20), heads=heads, width=width, shared=heads))


def test_structured_and_rectangular_graphs() -> None:
    for graph in (graphs.longformer(4, globals=1).bind(13), graphs.complete().bind(4, 11), graphs.causal().bind(1)):
        check(dot(graph.to(DEVICE)), what=str(graph))


def test_nothing_at_all_is_fine() -> None:
    graph = scattered()
    for given in (
        dot(graph, (0,)),
        dot(graph, (2, 0)),
        replace(dot(graph), score=Dot(leaf(10, 3, 0), leaf(10, 3, 0), 1.0)),
        replace(dot(graph), value=leaf(10, 3, 0)),
        dot(graphs.complete().bind(0).to(DEVICE)),
    ):
        check(given)
    wide = replace(dot(graph), value=leaf(10, 3, 0), return_weights=True)
    found = [backend.run(wide)[1] for backend in (cuda_attention, edge_list)]
    torch.testing.assert_close(*found, **CLOSE)
    torch.testing.assert_close(*(torch.autograd.grad(w.square().sum(), wide.score.query)[0] for w in found), **CLOSE)


def test_features_may_be_parts_of_one_tensor() -> None:
    graph, fused = scattered(), leaf(2, 10, 3, 2, 4)
    query, key, value = fused.unbind(-3)
    given = Round(graph, value, Dot(query, key, 0.5))
    found = [torch.autograd.grad(b.run(given)[0].sin().sum(), fused)[0] for b in (cuda_attention, edge_list)]
    torch.testing.assert_close(*found, **CLOSE)
    turned = dot(graph)
    turned = replace(turned, value=leaf(10, 7, 3).transpose(-1, -2))
    torch.testing.assert_close(cuda_attention.run(turned)[0], edge_list.run(turned)[0], **CLOSE)


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
def test_weights_come_back_in_the_callers_order_and_differentiate(normalize: str) -> None:
    graph = scattered()
    given = replace(dot(graph, (2,)), normalize=normalize, dropout=0.5, seed=SEED, return_weights=True)
    leaves, found = [t for t in given.tensors if t.requires_grad], []
    for backend in (cuda_attention, edge_list):
        out, weights = backend.run(given)
        alone = torch.autograd.grad(weights.square().sum(), leaves[1:], retain_graph=True)
        both = torch.autograd.grad(out.square().sum() + weights.sin().sum(), leaves)
        found.append([out, weights, *alone, *both])
    assert found[0][1].shape == (2, graph.num_edges, 3)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


def test_dropout_falls_where_the_specification_says_and_where_it_falls_on_a_cpu() -> None:
    graph = scattered()
    value = torch.eye(10, dtype=torch.float64, device=DEVICE)[:, None]  # so that the result is the weights
    ones = torch.ones(graph.num_edges, 2, dtype=torch.float64, device=DEVICE)
    given = Round(graph, value, bias=(ones,), normalize="none", dropout=0.5, seed=SEED)
    out = cuda_attention.run(given)[0]
    i, h, j = torch.meshgrid(*(torch.arange(n, device=DEVICE) for n in (10, 2, 10)), indexing="ij")
    kept = rng.keep(SEED, h, i, j, 0.5)
    count = torch.zeros(10, 10, dtype=torch.float64, device=DEVICE)
    count.index_put_((graph.edge_index[1], graph.edge_index[0]), ones[:, 0], accumulate=True)
    assert out.equal(2.0 * kept * count[:, None])
    on_cpu = replace(given, graph=graph.to("cpu"), value=value.cpu(), bias=(ones.cpu(),), seed=SEED.cpu())
    assert csr.run(on_cpu)[0].equal(out.cpu())


# ---------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["dot", "additive", "additive v2", "sigmoid", "by class"])
def test_hubs_are_divided_and_put_together_again(kind: str) -> None:
    graph = hubs()
    given = {
        "dot": lambda: replace(
            dot(graph, heads=2, shared=1), bias=(BiasTable(leaf(2, 2)),), dropout=0.5, seed=SEED, return_weights=True
        ),
        "additive": lambda: additive(graph, LeakyReLU()),
        "additive v2": lambda: additive_v2(graph, LeakyReLU()),
        "sigmoid": lambda: replace(dot(graph), normalize="sigmoid"),
        "by class": lambda: with_vectors(graph, EmbeddingTable(leaf(2, 3, 5)), EmbeddingTable(leaf(2, 3, 7))),
    }[kind]()
    for edges in (on_device.rows(graph), on_device.columns(graph)()):
        assert edges.divided.slots >= 2
        assert {b.long for b in edges.bins} == {True, False}
    check(given)


def test_every_edge_of_every_row_is_shared_out_once() -> None:
    degree = torch.tensor([0, 1, 8, 9, 25, 0, 3, 100, 21, 20])
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    edges = Sorted(ptr, torch.zeros(int(ptr[-1]), dtype=torch.int64), None, 1, piece=20)
    pieces = [
        (row, first, last, slot, b.long)
        for b in edges.bins
        for row, first, last, slot in zip(*(x.tolist() for x in b.units[:4]), strict=True)
    ]
    for row in range(len(degree)):
        own = sorted(p for p in pieces if p[0] == row)
        assert own[0][1] == ptr[row]
        assert own[-1][2] == ptr[row + 1]
        assert all(one[2] == two[1] for one, two in itertools.pairwise(own))
        assert all(last - first <= 20 and long == (last - first > 8) for _, first, last, _, long in own)
        assert [p[3] for p in own] == ([-1] if len(own) == 1 else list(range(own[0][3], own[0][3] + len(own))))
    assert edges.divided.row.tolist() == [4, 7, 8]
    assert edges.divided.ptr.tolist() == [0, 2, 7, 9]
    lengths = [last - first for _, first, last, _, _ in pieces]
    assert all(after <= 2 * max(before, 1) for before, after in itertools.pairwise(lengths))


@pytest.mark.usefixtures("small_pieces")
def test_a_divided_row_of_which_a_part_weighs_nothing() -> None:
    graph = hubs()
    bias = torch.zeros(graph.num_edges, 1, dtype=torch.float64, device=DEVICE)
    in_edges = (graph.edge_index[1] == 0).nonzero().squeeze(1)
    bias[in_edges[:20]] = -torch.inf
    bias[in_edges[20:]] = -1000.0
    bias[graph.edge_index[1] == 2] = -torch.inf
    given = replace(dot(graph), bias=(bias,))
    check(given)
    bias[in_edges] = -torch.inf
    check(given)
    assert cuda_attention.run(given)[0][[0, 2]].eq(0).all()


def test_large_scores_do_not_overflow() -> None:
    given = dot(scattered())
    check(replace(given, score=replace(given.score, scale=1e4)), {"rtol": 1e-9, "atol": 1e-9})


def test_nan_reaches_who_hears_it_and_nobody_else() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 3]], device=DEVICE), 4)
    for part in ("value", "key"):
        given = dot(graph)
        with torch.no_grad():
            (given.value if part == "value" else given.score.key)[1] = torch.nan
        out, _ = cuda_attention.run(given)
        assert out[2].isnan().all()
        assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", [REQUESTS["grouped heads, batch, dropout"], REQUESTS["additive v2"]])
def test_every_run_gives_the_same_bits(make: Callable[[Graph], Round]) -> None:
    given = make(hubs())
    leaves = [t for t in given.tensors if t.requires_grad]

    def once() -> list[Tensor]:
        out, _ = cuda_attention.run(given)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    assert all(one.equal(two) for one, two in zip(once(), once(), strict=True))


@pytest.mark.skipif(INTERPRETED, reason="there is no device to wait for")
def test_nothing_waits_for_the_device() -> None:
    given = REQUESTS["grouped heads, batch, dropout"](hubs())
    leaves = [t for t in given.tensors if t.requires_grad]

    def once() -> tuple[Tensor, ...]:
        return torch.autograd.grad(cuda_attention.run(given)[0].square().sum(), leaves)

    expected = once()  # which also makes what the graph keeps
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


# ---------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_narrow_types_are_computed_in_float32(dtype: torch.dtype) -> None:
    graph, unit = scattered(), rounding(dtype)
    for make in (dot, lambda g: additive(g, LeakyReLU()), lambda g: additive_v2(g, torch.tanh)):
        exact = make(graph)
        names = {"value": exact.value, **vars(exact.score)}
        given = {k: v.detach().to(dtype).requires_grad_() for k, v in names.items() if isinstance(v, Tensor)}
        wide = {k: v.detach().double().requires_grad_() for k, v in given.items()}
        narrow, double = (
            replace(exact, value=x["value"], score=replace(exact.score, **{k: v for k, v in x.items() if k != "value"}))
            for x in (given, wide)
        )
        out, expected = cuda_attention.run(narrow)[0], edge_list.run(double)[0]
        assert out.dtype == dtype
        # The result is rounded once. Before, float32: scores up to 30 are right to 30 * 15 * 2^-24, weights to as much
        # relatively, and positive sums of 40 weights lose 40 * 2^-24.
        largest = float(wide["value"].detach().abs().max())
        bound = unit * expected.abs() + (450 + 40) * 2**-24 * largest
        assert ((out.double() - expected).abs() <= bound).all()
        # Gradients see results rounded to the type once more (in `<out, d_out>`), times keys of size about 3.
        ours, theirs = (torch.autograd.grad(o.sum(), list(x.values())) for o, x in ((out, given), (expected, wide)))
        for name, one, other in zip(given, ours, theirs, strict=True):
            assert one.dtype == dtype, name
            terms = graph.num_edges if name == "vector" else 12
            bound = unit * other.abs() + terms * (unit + 500 * 2**-24) * 5 * largest * 3
            assert ((one.double() - other).abs() <= bound).all(), name


def test_places_beyond_two_to_the_31_are_reached() -> None:
    """Nodes so far apart that 32-bit offsets would overflow; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it
    apart = 2**30 + 8
    memory = torch.empty(2 * apart + 4, dtype=torch.float16, device=DEVICE)
    value = memory.as_strided((3, 1, 4), (apart, 4, 1))
    value.copy_(torch.arange(12).view(3, 1, 4))
    graph = graphs.from_edges(torch.tensor([[2, 1, 0], [0, 0, 2]], device=DEVICE), 3)
    given = Round(graph, value.requires_grad_(), Dot(value, value, 0.01))
    out = cuda_attention.run(given)[0]
    near = value.detach().contiguous()
    assert out.equal(cuda_attention.run(Round(graph, near, Dot(near, near, 0.01)))[0])
    assert out[2].tolist() == [[0.0, 1.0, 2.0, 3.0]]
    summed = cuda_reduce.run(Round(graph, value.detach(), normalize="none"))[0]
    assert summed[0].tolist() == [[12.0, 14.0, 16.0, 18.0]]
