"""Attention by the fused rows of `csr`, by C++ on CPU and by Triton on GPU, against the specification `edge_list`.

What goes beyond what all backends share: other scores, vectors on edges, hubs, memory.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from row_cases import (  # noqa: F401 - fixtures
    AGGREGATION,
    ATTENTION,
    BOTH,
    CLOSE,
    CPU,
    REQUESTS,
    SEED,
    START,
    TRITON,
    Kernels,
    additive,
    additive_v2,
    check,
    dot,
    hubs,
    leaf,
    moved,
    poisoned,
    rounding,
    run,
    scattered,
    small_pieces,
    with_vectors,
    without_edges,
)
from threads import same_bits
from torch import Tensor
from watched import COPIES, LOOKS, Watched

from mpnn import engine, graphs, ops
from mpnn.backends import csr, edge_list, edge_orders
from mpnn.engine import plan
from mpnn.graph import Graph, rng
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset, Relation
from mpnn.kernels.cuda.launch import Arguments, Launches
from mpnn.kernels.cuda.schedule import Sorted
from mpnn.kernels.rows import attention as row_attention
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

# Rows of 3,000 terms instead of 60: 50 times what CLOSE allows.
CLOSE_IN_HUBS = {"rtol": 5e-11, "atol": 5e-11}


@pytest.fixture(params=BOTH)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return request.param


def hubs_for(kernels: Kernels) -> Graph:
    """With rows of 3,000 edges; of 40 for Triton, whose interpreter is slow."""
    return hubs() if kernels is TRITON else hubs(3000)


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_agrees_with_the_specification(make: Callable[[Graph], Round], kernels: Kernels) -> None:
    for graph in (scattered(), without_edges()):
        check(kernels, make(graph), what=str(graph))


@pytest.mark.parametrize("entries", [(2, 1), (3,), (1, 3), (1, 1), (2, 3)], ids=str)
def test_data_of_edges_that_some_entries_of_a_batch_share(entries: tuple[int, ...], kernels: Kernels) -> None:
    graph = scattered(4, 12)
    given = replace(dot(graph, (2, 3)), bias=(leaf(*entries, graph.num_edges, 3),))
    edge_value = leaf(*entries, graph.num_edges, 1, 7)
    edge_key = leaf(*entries, graph.num_edges, 3, 5)
    for each in (given, replace(given, edge_value=edge_value, score=replace(given.score, edge_key=edge_key))):
        check(kernels, each)


@pytest.mark.parametrize(("heads", "width"), [(1, 1), (2, 3), (3, 8), (4, 40), (5, 1), (1, 300)])
def test_every_width_and_number_of_heads(heads: int, width: int, kernels: Kernels) -> None:
    check(kernels, dot(scattered(5, 20), heads=heads, width=width, shared=heads))


def test_structured_and_rectangular_graphs(kernels: Kernels) -> None:
    for graph in (graphs.longformer(4, globals=1).bind(13), graphs.complete().bind(4, 11), graphs.causal().bind(1)):
        check(kernels, dot(graph), what=str(graph))


def test_nothing_at_all_is_fine(kernels: Kernels) -> None:
    graph = scattered()
    for given in (
        dot(graph, (0,)),
        dot(graph, (2, 0)),
        replace(dot(graph), score=Dot(leaf(10, 3, 0), leaf(10, 3, 0), 1.0)),
        replace(dot(graph), value=leaf(10, 3, 0)),
        dot(graphs.complete().bind(0)),
    ):
        check(kernels, given)
    wide = moved(replace(dot(graph), value=leaf(10, 3, 0), return_weights=True), kernels.device)
    found = [weights for _, weights in (run(kernels, wide), engine.run(wide, "edge_list"))]
    torch.testing.assert_close(*found, **CLOSE)
    torch.testing.assert_close(*(torch.autograd.grad(w.square().sum(), wide.score.query)[0] for w in found), **CLOSE)


def test_features_may_be_parts_of_one_tensor(kernels: Kernels) -> None:
    graph, fused = scattered().to(kernels.device), leaf(2, 10, 3, 2, 4).detach().to(kernels.device).requires_grad_()
    query, key, value = fused.unbind(-3)
    given = Round(graph, value, Dot(query, key, 0.5))
    found = [
        torch.autograd.grad(out.sin().sum(), fused)[0]
        for out, _ in (run(kernels, given), engine.run(given, "edge_list"))
    ]
    torch.testing.assert_close(*found, **CLOSE)
    turned = moved(dot(scattered()), kernels.device)
    turned = replace(turned, value=turned.value.detach().mT.contiguous().mT)
    torch.testing.assert_close(run(kernels, turned)[0], engine.run(turned, "edge_list")[0], **CLOSE)


@pytest.mark.parametrize("normalize", ["softmax", "sigmoid", "none"])
def test_weights_come_back_in_the_callers_order_and_differentiate(normalize: str, kernels: Kernels) -> None:
    graph = scattered()
    given = replace(dot(graph, (2,)), normalize=normalize, dropout=0.5, seed=SEED, return_weights=True)
    given = moved(given, kernels.device)
    leaves, found = [t for t in given.tensors if t.requires_grad], []
    for out, weights in (run(kernels, given), engine.run(given, "edge_list")):
        alone = torch.autograd.grad(weights.square().sum(), leaves[1:], retain_graph=True)
        both = torch.autograd.grad(out.square().sum() + weights.sin().sum(), leaves)
        found.append([out, weights, *alone, *both])
    assert found[0][1].shape == (2, graph.num_edges, 3)
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE)


def test_dropout_by_the_numbers_that_nodes_have_in_a_whole_graph() -> None:
    edges = torch.stack([torch.arange(300) * 7 % 50, torch.arange(300) * 11 % 40])
    part = Graph.from_edges(edges, 40, 50)
    part.node_ids = torch.arange(60, 20, -1, dtype=torch.int32), torch.arange(50, dtype=torch.int32) * 3
    given = replace(dot(part), dropout=0.5, seed=SEED)
    check(CPU, given)
    whole = replace(given, graph=Graph.from_edges(edges, 40, 50))
    assert not run(CPU, given)[0].equal(run(CPU, whole)[0])


@pytest.mark.parametrize("kernels", BOTH[1:], indirect=True)
def test_dropout_falls_where_the_specification_says_and_where_it_falls_on_a_cpu(kernels: Kernels) -> None:
    graph = scattered()
    value = torch.eye(10, dtype=torch.float64)[:, None]  # so that the result is the weights
    ones = torch.ones(graph.num_edges, 2, dtype=torch.float64)
    given = Round(graph, value, bias=(ones,), normalize="none", dropout=0.5, seed=SEED)
    out = run(kernels, moved(given, kernels.device))[0].cpu()
    i, h, j = torch.meshgrid(*(torch.arange(n) for n in (10, 2, 10)), indexing="ij")
    kept = rng.keep(SEED, h, i, j, 0.5)
    count = torch.zeros(10, 10, dtype=torch.float64)
    count.index_put_((graph.edge_index[1], graph.edge_index[0]), ones[:, 0], accumulate=True)
    assert out.equal(2.0 * kept * count[:, None])
    assert engine.run(given, "csr")[0].equal(out)


# ---------------------------------------------------------------------------------------- rows


IN_HUBS: dict[str, Callable[[Graph], Round]] = {
    "dot": lambda g: replace(
        dot(g, heads=2, shared=1), bias=(BiasTable(leaf(2, 2)),), dropout=0.5, seed=SEED, return_weights=True
    ),
    "additive": lambda g: additive(g, LeakyReLU()),
    "additive v2": lambda g: additive_v2(g, LeakyReLU()),
    "sigmoid": lambda g: replace(dot(g), normalize="sigmoid"),
    "by class": lambda g: with_vectors(g, EmbeddingTable(leaf(2, 3, 5)), EmbeddingTable(leaf(2, 3, 7))),
    "biases alone": lambda g: replace(dot(g), score=None, bias=(leaf(g.num_edges, 3),)),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", IN_HUBS.values(), ids=IN_HUBS)
def test_hubs_are_divided_and_put_together_again(make: Callable[[Graph], Round], kernels: Kernels) -> None:
    graph = hubs_for(kernels)
    if kernels is CPU:
        edges = edge_orders.by_destination(graph)
        cuts = torch.from_numpy(row_attention.chunks_of(edges, 1).cuts)
        assert int((cuts < edges.ptr[1]).sum()) > 10  # a hub lies in more than ten chunks
    else:
        for edges in (edge_orders.rows_on_gpu(graph), edge_orders.columns_on_gpu(graph)()):
            assert edges.divided.slots >= 2
    check(kernels, make(graph), CLOSE_IN_HUBS)


SHARED: dict[str, Callable[[Graph], Round]] = {
    "eight heads": lambda g: dot(g, heads=8, shared=1),
    "four heads": lambda g: dot(g, (2,), heads=4, shared=1),
    "twelve heads, batch": lambda g: dot(g, (2,), heads=12, shared=1),
    "sixteen heads, two keys, dropout": lambda g: replace(dot(g, heads=16, shared=2), dropout=0.5, seed=SEED),
    "two numbers of keys": lambda g: replace(dot(g, heads=16, shared=1), value=leaf(g.num_src, 2, 7)),
    "sigmoid": lambda g: replace(dot(g, heads=8, shared=1), normalize="sigmoid"),
    "no normalizer": lambda g: replace(dot(g, heads=8, shared=1), normalize="none"),
    "softcap, biases, weights": lambda g: replace(
        (r := dot(g, heads=8, shared=1)),
        score=replace(r.score, softcap=0.7),
        bias=(leaf(g.num_edges, 8), BiasTable(leaf(3, 1), Offset(1))),
        return_weights=True,
    ),
    "biases of nodes": lambda g: replace(
        dot(g, (2,), heads=8, shared=1), dst_bias=leaf(2, g.num_dst, 8), src_bias=leaf(2, g.num_src, 8)
    ),
    "vectors on edges": lambda g: replace(
        (r := dot(g, heads=8, shared=1)),
        score=replace(r.score, edge_key=leaf(g.num_edges, 1, 5)),
        edge_value=leaf(g.num_edges, 8, 7),
    ),
    "vectors by rule": lambda g: replace(
        (r := dot(g, heads=8, shared=1)),
        score=replace(r.score, edge_key=EmbeddingTable(leaf(7, 8, 5), Offset(3))),
        edge_value=EmbeddingTable(leaf(7, 1, 7), Offset(3)),
    ),
}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_heads_that_share_keys(make: Callable[[Graph], Round], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both passes go by destination: nothing asks for the edges by source, but the sums of biases of sources."""
    monkeypatch.setattr(row_attention, "_LONG", 0)
    for graph in (scattered(), hubs(150), without_edges()):
        given = make(graph)
        if given.src_bias is None:
            monkeypatch.setattr(edge_orders, "by_source_with_slots", lambda graph: pytest.fail("by source"))
        check(CPU, given, CLOSE_IN_HUBS, what=str(graph))


@pytest.mark.usefixtures("small_pieces")
def test_weights_and_the_log_sum_exp_of_logits_differentiate(kernels: Kernels) -> None:
    given = replace(dot(hubs_for(kernels), heads=2, shared=1), return_lse=True, return_weights=True)
    given = moved(given, kernels.device)
    leaves, found = [given.value, given.score.query, given.score.key], []
    for result in (kernels.attention.run(given), edge_list.run(given)):
        lse = result.lse.masked_fill(result.lse.isinf(), 0.0)
        total = result.out.sin().sum() + lse.sin().sum()
        alone = torch.autograd.grad(lse.cos().sum(), leaves[1:], retain_graph=True)
        both = torch.autograd.grad(total, leaves, retain_graph=True)
        every = torch.autograd.grad(total + result.weights.square().sum(), leaves)
        found.append([result.out, result.weights, result.lse, *alone, *both, *every])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE_IN_HUBS)


def test_heads_that_share_keys_have_a_differentiable_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_attention, "_LONG", 0)
    given = replace(dot(hubs(150), heads=8, shared=1), return_lse=True)
    leaves = [given.value, given.score.query, given.score.key]
    found = []
    for out, lse in (engine.run(given, "csr"), engine.run(given, "edge_list")):
        lse = lse.masked_fill(lse.isinf(), 0.0)
        found.append([out, lse, *torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaves)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **CLOSE_IN_HUBS)


def test_heads_that_share_keys_get_the_same_bits_on_any_number_of_threads() -> None:
    given = dot(graphs.random(128).bind(400), heads=8, width=32, shared=1)
    leaves = [given.value, given.score.query, given.score.key]

    def results() -> list[Tensor]:
        out, _ = engine.run(given, "csr")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    assert len(row_attention.chunks_of(edge_orders.by_destination(given.graph), 8 * 40)) > 8
    assert same_bits(results, 1, 2)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("make", IN_HUBS.values(), ids=IN_HUBS)
def test_every_run_gives_the_same_bits_on_any_number_of_threads(
    make: Callable[[Graph], Round], kernels: Kernels
) -> None:
    given = moved(make(hubs_for(kernels)), kernels.device)
    leaves = [t for t in given.tensors if t.requires_grad]

    def results() -> list[Tensor]:
        out, _ = run(kernels, given)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    assert same_bits(results, 1, 2)


def test_every_edge_of_every_row_is_shared_out_once() -> None:
    degree = torch.tensor([0, 1, 8, 9, 25, 0, 3, 100, 21, 20])
    ptr = torch.cat([degree.new_zeros(1), degree.cumsum(0)])
    edges = Sorted(ptr, torch.zeros(int(ptr[-1]), dtype=torch.int64), None, 1, piece=20)
    pieces = edges.units.tolist()
    for row in range(len(degree)):
        own = sorted(p for p in pieces if p[0] == row)
        assert own[0][1] == ptr[row]
        assert own[-1][2] == ptr[row + 1]
        assert all(one[2] == two[1] for one, two in itertools.pairwise(own))
        assert all(last - first <= 20 for _, first, last, _ in own)
        assert [p[3] for p in own] == ([-1] if len(own) == 1 else list(range(own[0][3], own[0][3] + len(own))))
    assert edges.divided.row.tolist() == [4, 7, 8]
    assert edges.divided.ptr.tolist() == [0, 2, 7, 9]
    lengths = [last - first for _, first, last, _ in pieces]
    assert all(8 * after <= 9 * max(before, 1) for before, after in itertools.pairwise(lengths))


@pytest.mark.usefixtures("small_pieces")
def test_a_divided_row_of_which_a_part_weighs_nothing(kernels: Kernels) -> None:
    graph = hubs_for(kernels)
    bias = torch.zeros(graph.num_edges, 1, dtype=torch.float64)
    in_edges = (graph.edge_index[1] == 0).nonzero().squeeze(1)
    half = len(in_edges) // 2
    bias[in_edges[:half]] = -torch.inf
    bias[in_edges[half:]] = -1000.0
    bias[graph.edge_index[1] == 2] = -torch.inf
    given = replace(dot(graph), bias=(bias,))
    check(kernels, given, CLOSE_IN_HUBS)
    bias[in_edges] = -torch.inf
    check(kernels, given, CLOSE_IN_HUBS)
    assert run(kernels, moved(given, kernels.device))[0][[0, 2]].eq(0).all()


def test_large_scores_do_not_overflow(kernels: Kernels) -> None:
    given = dot(scattered())
    check(kernels, replace(given, score=replace(given.score, scale=1e4)), {"rtol": 1e-9, "atol": 1e-9})


@pytest.mark.parametrize("which", ["value", "key"])
def test_nan_reaches_who_hears_it_and_nobody_else(which: str, kernels: Kernels) -> None:
    given = dot(graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 2, 3, 3]]), 4))
    with torch.no_grad():
        (given.value if which == "value" else given.score.key)[1] = torch.nan
    out, _ = run(kernels, moved(given, kernels.device))
    assert out[2].isnan().all()
    assert out[[0, 1, 3]].isfinite().all()


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("name", ["dst", "src", "vector", "edge", "value"])
def test_each_gradient_alone(name: str, kernels: Kernels) -> None:
    given = additive_v2(hubs_for(kernels), LeakyReLU())
    numbers = {"value": given.value, **vars(given.score)}
    alone = {k: v.detach().requires_grad_(k == name) for k, v in numbers.items() if isinstance(v, Tensor)}
    value = alone.pop("value")
    check(kernels, replace(given, value=value, score=replace(given.score, **alone)), CLOSE_IN_HUBS)


@pytest.mark.skipif(TRITON.device == "cpu", reason="there is no device to wait for")
@pytest.mark.parametrize("kernels", BOTH[1:], indirect=True)
def test_nothing_waits_for_the_device(kernels: Kernels) -> None:
    given = moved(REQUESTS["grouped heads, batch, dropout"](hubs()), kernels.device)
    leaves = [t for t in given.tensors if t.requires_grad]

    def once() -> tuple[Tensor, ...]:
        return torch.autograd.grad(run(kernels, given)[0].square().sum(), leaves)

    expected = once()  # which also makes what the graph keeps
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = once()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kernels", BOTH[1:], indirect=True)
@pytest.mark.parametrize("name", ["grouped heads, batch, dropout", "everything", "additive", "mean"])
def test_a_second_call_neither_waits_nor_copies(name: str, kernels: Kernels) -> None:
    """So that calls are captured in CUDA graphs: no number is read, and no tensor made of numbers of Python."""
    given = moved(REQUESTS[name](scattered()), kernels.device)
    leaves = [t for t in given.tensors if t.requires_grad]

    def once() -> None:
        torch.autograd.grad(run(kernels, given)[0].sum(), leaves, allow_unused=True)

    once()  # which makes what the graph keeps
    with Watched(LOOKS | COPIES) as watched:
        once()
    assert watched.looks == []


def test_later_launches_pass_addresses_and_what_was_kept() -> None:
    """A compiled kernel, here a fake, is prepared once for each key."""
    passed: list[Any] = []

    class Compiled:
        asm: ClassVar = {}

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments: passed.append((grid, arguments))

    class Kernel:
        arg_names: ClassVar = ["x", "none", "n", "p", "E"]

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
            def first(*arguments: Any, **constants: Any) -> Compiled:
                passed.append((grid, arguments, constants))
                return Compiled()

            return first

    launches, x, y = Launches(), torch.zeros(3), torch.zeros(3)
    arguments = Arguments(5, (7, 0.5), {"E": 8}, warps=2)
    kernel = Kernel()
    for tensor in (x, y):
        START(launches, "key", kernel, (tensor, None), lambda: arguments)
    options = {"num_warps": 2, "num_stages": 3, "maxnreg": None}
    later = (5, 1, 1), (y.data_ptr(), None, 7, 0.5, 8)
    assert passed == [((5,), (x, None, 7, 0.5), {"E": 8, **options}), later]
    for key in range(1000):
        START(launches, key, kernel, (x, None), lambda: arguments)
    assert len(launches._kept) < 1000


# ---------------------------------------------------------------------------------------- types


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_narrow_types_are_computed_in_float32(dtype: torch.dtype, kernels: Kernels) -> None:
    unit, graph = rounding(kernels, dtype), scattered() if kernels is TRITON else hubs(3000)
    longest = int(torch.cat([graph.degree(), graph.reverse().degree()]).max())
    for make in (dot, lambda g: additive(g, LeakyReLU()), lambda g: additive_v2(g, torch.tanh)):
        exact = moved(make(graph), kernels.device)
        names = {"value": exact.value, **vars(exact.score)}
        given = {k: v.detach().to(dtype).requires_grad_() for k, v in names.items() if isinstance(v, Tensor)}
        wide = {k: v.detach().double().requires_grad_() for k, v in given.items()}
        narrow, double = (
            replace(exact, value=x["value"], score=replace(exact.score, **{k: v for k, v in x.items() if k != "value"}))
            for x in (given, wide)
        )
        out, expected = run(kernels, narrow)[0], engine.run(double, "edge_list")[0]
        assert out.dtype == dtype
        # The result is rounded once. Before, float32: scores up to 30 are right to 30 * 15 * 2^-24, weights to as much
        # relatively, and positive sums of the weights of a row lose its length * 2^-24.
        largest = float(wide["value"].detach().abs().max())
        bound = unit * expected.abs() + (450 + longest) * 2**-24 * largest
        assert ((out.double() - expected).abs() <= bound).all()
        # Gradients see results rounded to the type once more (in `<out, d_out>`), times keys of size about 3.
        ours, theirs = (torch.autograd.grad(o.sum(), list(x.values())) for o, x in ((out, given), (expected, wide)))
        for name, one, other in zip(given, ours, theirs, strict=True):
            assert one.dtype == dtype, name
            terms = graph.num_edges if name == "vector" else longest
            bound = unit * other.abs() + terms * (unit + 500 * 2**-24) * 5 * largest * 3
            assert ((one.double() - other).abs() <= bound).all(), name


@pytest.mark.parametrize("kernels", BOTH[1:], indirect=True)
def test_places_beyond_two_to_the_31_are_reached(kernels: Kernels) -> None:
    """Nodes so far apart that 32-bit offsets would overflow; the memory between them is never touched."""
    torch.use_deterministic_algorithms(False)  # which would fill it
    apart = 2**30 + 8
    memory = torch.empty(2 * apart + 4, dtype=torch.float16, device=kernels.device)
    value = memory.as_strided((3, 1, 4), (apart, 4, 1))
    value.copy_(torch.arange(12).view(3, 1, 4))
    graph = graphs.from_edges(torch.tensor([[2, 1, 0], [0, 0, 2]], device=kernels.device), 3)
    given = Round(graph, value.requires_grad_(), Dot(value, value, 0.01))
    out = ATTENTION.run(given)[0]
    near = value.detach().contiguous()
    assert out.equal(ATTENTION.run(Round(graph, near, Dot(near, near, 0.01)))[0])
    assert out[2].tolist() == [[0.0, 1.0, 2.0, 3.0]]
    summed = AGGREGATION.run(Round(graph, value.detach(), normalize="none"))[0]
    assert summed[0].tolist() == [[12.0, 14.0, 16.0, 18.0]]


# ---------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("kind", ["dot", "additive", "additive v2"])
def test_nothing_of_edges_times_width_is_made(kind: str) -> None:
    nodes, edges, heads, width = 40, 4000, 2, 32
    graph = graphs.from_edges(torch.randint(0, nodes, (2, edges)), nodes)
    x, y, z = (leaf(nodes, heads, width) for _ in range(3))
    score = {
        "dot": Dot(x, y, 0.3),
        "additive": AdditiveScore(leaf(nodes, heads), leaf(nodes, heads), LeakyReLU()),
        "additive v2": AdditiveV2Score(x, y, leaf(heads, width), LeakyReLU()),
    }[kind]
    given = Round(graph, z, score)
    engine.run(given, "csr")[0].sum().backward()  # what the graph keeps is made here
    with torch.profiler.profile(profile_memory=True) as profile:
        engine.run(given, "csr")[0].sum().backward()
    taken = [e.self_cpu_memory_usage for e in profile.events()]
    assert max(taken) < 8 * edges * heads * width / 2


# ---------------------------------------------------------------------------------------- refusals


def test_vectors_that_are_not_as_wide_as_the_features_are_refused() -> None:
    graph = scattered()
    given = replace(dot(graph), edge_value=leaf(graph.num_edges, 3, 1))
    with pytest.raises(plan.Refused, match="edge_value is 1 wide, and the features"):
        engine.run(given, "csr")


@pytest.mark.parametrize(
    "edge_type", [torch.tensor([3]).expand(4), torch.tensor([[0, 9], [1, 9], [2, 9], [3, 9]])[:, 0]]
)
def test_edge_types_may_have_any_strides(edge_type: Tensor) -> None:
    graph = Graph.from_edges(torch.tensor([[0, 1, 2, 2], [0, 0, 1, 2]]), 3, 3, edge_type=edge_type)
    x, table = leaf(3, 1, 8), leaf(4, 1)
    ours, exact = (ops.attend(graph, x, x, x, bias=BiasTable(table), backend=name) for name in ("csr", "edge_list"))
    torch.testing.assert_close(ours, exact, **CLOSE)
    gradients = (torch.autograd.grad(out.sin().sum(), (x, table)) for out in (ours, exact))
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, **CLOSE)


def test_a_rule_that_gives_types_beyond_its_count_is_refused() -> None:
    class Distance(Relation):
        count = 3

        def ids(self, dst: Tensor, src: Tensor) -> Tensor:
            return (dst - src).abs()

    x = leaf(5, 1, 8)
    with pytest.raises(IndexError, match=r"edge types from 0 to 4, and its count is 3: its ids must lie in \[0, 3\)"):
        ops.attend(graphs.causal().bind(5), x, x, x, bias=BiasTable(leaf(3, 1), Distance()), backend="csr")


@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_rows_read_a_cache_with_heads_outside_of_nodes(
    kv_heads: int, batch: tuple[int, ...], dtype: torch.dtype
) -> None:
    """As the cache of a decoder lies: without a copy where few edges read it, and the same in all strides."""
    graph = (graphs.causal() & graphs.window(40)).bind(97).rows(96, 97)
    query = torch.randn(*batch, 1, 6, 16, dtype=dtype)
    cache = torch.randn(*batch, kv_heads, 97, 48, dtype=dtype)
    key, value = cache[..., 16:32].transpose(-3, -2), cache[..., 32:].transpose(-3, -2)

    def results(backend: str, leaves: list[Tensor]) -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in leaves]
        out = ops.attend(graph, *leaves, backend=backend)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    expected = results("edge_list", [query, key, value])
    for leaves in ([query, key, value], [query, key.contiguous(), value], [query, key, value.contiguous()]):
        for a, b in zip(results("csr", leaves), expected, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("form", ["beside one another", "nodes first", "one for all nodes", "every other", "by column"])
def test_numbers_of_an_additive_score_are_read_where_they_lie(form: str) -> None:
    nodes, heads = 37, 3
    numbers = torch.randn(2, nodes, 12)
    pair = {
        "beside one another": numbers[..., : 2 * heads],
        "nodes first": numbers.transpose(0, 1).contiguous().transpose(0, 1)[..., : 2 * heads],
        "one for all nodes": numbers[:, :1, : 2 * heads].expand(2, nodes, 2 * heads),
        "every other": numbers[..., ::2],
        "by column": numbers.mT.contiguous().mT[..., : 2 * heads],
    }[form]
    graph = graphs.from_edges(torch.randint(nodes, (2, 5 * nodes)), nodes)
    dst, src = pair.chunk(2, -1)
    round = Round(graph, torch.randn(2, nodes, heads, 5), AdditiveScore(dst, src, LeakyReLU()))
    with torch.no_grad():
        torch.testing.assert_close(csr.run(round).out, edge_list.run(round).out)


@pytest.mark.parametrize(("nodes", "name"), [(2**19, "gathered number"), (2**19 + 1, "far gathered number")])
def test_features_of_more_than_16_mib_are_read_from_memory(nodes: int, name: str) -> None:
    """Of 8 numbers a node, to which 5 are rounded up."""
    graph = graphs.from_edges([[0, 1, 2], [5, 6, 5]], nodes)
    x = torch.zeros(1).expand(nodes, 1, 5)
    counts = csr.counts(Round(graph, x, Dot(x, x, 1.0)))
    assert {key: n for key, n in counts.items() if "gathered" in key} == {name: 3.0 * 8 * 2}
