"""The `csr` backend's kernels for GPUs, against the specification `edge_list`, forward and backward.

`TRITON_INTERPRET=1 pytest -m triton` runs them on CPU tensors in Triton's interpreter; where there is a GPU,
`pytest -m triton` runs what is compiled for it.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from mpnn import graphs, random
from mpnn.aggregate import PNA, Aggregator, Max, Mean, Min, Std, Sum, Var
from mpnn.backends import csr, edge_list
from mpnn.backends.csr import cuda_attention, cuda_reduce
from mpnn.graph import Graph
from mpnn.plan import plan
from mpnn.relation import Offset
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU, Lookup, Request

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="no GPU: set TRITON_INTERPRET=1"),
    # numpy, which interprets, warns of overflows and NaN where a GPU does not
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"
SEED = torch.tensor(2**60 + 7, device=DEVICE)
# Sums of at most 60 float64 terms of size about 10, twice over (softmax, then values): 60 * 10 * 2 * 1.1e-16 < 2e-13.
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh memory is full of NaN, so that whatever is not written shows."""
    if INTERPRETED:
        torch.use_deterministic_algorithms(True)
    else:  # what is freed here is what is handed out next
        torch.cuda.empty_cache()
        _ = [torch.full((1 << k,), torch.nan, device=DEVICE) for k in range(7, 22)]
    yield
    torch.use_deterministic_algorithms(False)


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(DEVICE, dtype).requires_grad_()


def scattered(nodes: int = 9, edges: int = 40) -> Graph:
    """Edges in no order, some of them repeated, with classes; node 0 hears nobody, node 1 is heard by nobody."""
    generator = torch.Generator().manual_seed(5)
    src, dst = torch.randint(1, nodes, (2, edges), generator=generator)
    edge_index = torch.stack([src + (src == 1), dst]).to(DEVICE)
    return graphs.from_edges(edge_index, nodes + 1, edge_type=torch.arange(edges, device=DEVICE) % 3)


def without_edges() -> Graph:
    none = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)
    return graphs.from_edges(none, 3, edge_type=none[0])


def hubs() -> Graph:
    """Node 0 hears 40 times, node 1 is heard 40 times; the other rows are short."""
    src, dst = torch.randint(0, 9, (2, 100), generator=torch.Generator().manual_seed(7))
    dst[:40], src[40:80] = 0, 1
    order = torch.randperm(100, generator=torch.Generator().manual_seed(7))
    classes = torch.arange(100, device=DEVICE) % 2
    return graphs.from_edges(torch.stack([src, dst])[:, order].to(DEVICE), 9, edge_type=classes)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of more than 20 edges are divided, as those of more than 256 are otherwise."""
    monkeypatch.setattr("mpnn.kernels.cuda.schedule._PIECE", 20)


def dot(graph: Graph, batch: tuple[int, ...] = (), heads: int = 3, width: int = 5, shared: int = 3) -> Request:
    query, key = leaf(*batch, graph.num_dst, heads, width), leaf(*batch, graph.num_src, shared, width)
    return Request(graph, leaf(*batch, graph.num_src, shared, width + 2), Dot(query, key, 0.6))


def additive(graph: Graph, activation: Callable[[Tensor], Tensor], batch: tuple[int, ...] = ()) -> Request:
    ends = [leaf(*batch, n, 3) for n in (graph.num_dst, graph.num_src)]
    return Request(graph, leaf(*batch, graph.num_src, 3, 4), AdditiveScore(*ends, activation, leaf(graph.num_edges, 3)))


def additive_v2(graph: Graph, activation: Callable[[Tensor], Tensor], edge_heads: int = 3) -> Request:
    ends = [leaf(n, 3, 5) for n in (graph.num_dst, graph.num_src)]
    edge = leaf(graph.num_edges, edge_heads, 5)
    return Request(graph, leaf(graph.num_src, 3, 4), AdditiveV2Score(*ends, leaf(3, 5), activation, edge))


def with_vectors(graph: Graph, edge_key: Tensor | Lookup, edge_value: Tensor | Lookup) -> Request:
    given = dot(graph, (2,))
    return replace(given, score=replace(given.score, edge_key=edge_key), edge_value=edge_value)


REQUESTS: dict[str, Callable[[Graph], Request]] = {
    "dot": dot,
    "grouped heads, batch, dropout": lambda g: replace(dot(g, (2, 1), heads=4, shared=2), dropout=0.5, seed=SEED),
    "one key for all heads": lambda g: dot(g, heads=5, shared=1),
    "sigmoid": lambda g: replace(dot(g), normalize="sigmoid", dropout=0.25, seed=SEED),
    "no normaliser": lambda g: replace(dot(g), normalize="none", bias=(leaf(g.num_edges, 3),)),
    "softcap, biases and tables": lambda g: replace(
        (r := dot(g, (2,))),
        score=replace(r.score, softcap=0.7),
        bias=(leaf(g.num_edges, 1), leaf(2, g.num_edges, 3), Lookup(leaf(3, 3)), Lookup(leaf(3, 1), Offset(1))),
    ),
    "everything": lambda g: replace(
        (r := dot(g, heads=2, width=8, shared=1)),
        score=replace(r.score, edge_key=Lookup(leaf(3, 2, 8))),
        bias=(leaf(g.num_edges, 1), Lookup(leaf(3, 2))),
        edge_value=Lookup(leaf(3, 1, 10)),
        dropout=0.5,
        seed=SEED,
        return_weights=True,
    ),
    "vectors on edges": lambda g: with_vectors(g, leaf(g.num_edges, 3, 5), leaf(g.num_edges, 1, 7)),
    "vectors by class": lambda g: replace(
        with_vectors(g, Lookup(leaf(3, 3, 5)), Lookup(leaf(7, 1, 7), Offset(3))), dropout=0.5, seed=SEED
    ),
    "additive": lambda g: replace(additive(g, LeakyReLU(0.3), (2,)), dropout=0.5, seed=SEED),
    "additive, tanh": lambda g: replace(additive(g, torch.tanh), bias=(leaf(g.num_edges, 3),)),
    "additive v2": lambda g: additive_v2(g, LeakyReLU()),
    "additive v2, tanh": lambda g: additive_v2(g, torch.tanh, edge_heads=1),
    "weights by bias alone": lambda g: replace(dot(g), score=None, bias=(leaf(g.num_edges, 3),)),
    "mean": lambda g: replace(dot(g), reduce=Mean()),
}


def check(given: Request, close: dict[str, float] = CLOSE, what: str = "") -> None:
    """Output and gradients are those of the specification."""
    kernels = cuda_reduce if csr.reduce.is_plain(given) else cuda_attention
    assert kernels.supports(given) is None
    leaves = [t for t in given.tensors if t.requires_grad]
    found = []
    for backend in (kernels, edge_list):
        out, _ = backend.run(given)
        direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=DEVICE).view(out.shape)
        found.append([out, *torch.autograd.grad(out, leaves, direction, materialize_grads=True)])
    for k, (ours, expected) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(ours, expected, **close, msg=lambda m, k=k: f"{what}, {k}: {m}")


# ---------------------------------------------------------------------------------------- attention


@pytest.mark.parametrize("make", REQUESTS.values(), ids=REQUESTS)
def test_agrees_with_the_specification(make: Callable[[Graph], Request]) -> None:
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


def test_features_may_be_parts_of_one_tensor() -> None:
    graph, fused = scattered(), leaf(2, 10, 3, 2, 4)
    query, key, value = fused.unbind(-3)
    given = Request(graph, value, Dot(query, key, 0.5))
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
    given = Request(graph, value, bias=(ones,), normalize="none", dropout=0.5, seed=SEED)
    out = cuda_attention.run(given)[0]
    i, h, j = torch.meshgrid(*(torch.arange(n, device=DEVICE) for n in (10, 2, 10)), indexing="ij")
    kept = random.keep(SEED, h, i, j, 0.5)
    count = torch.zeros(10, 10, dtype=torch.float64, device=DEVICE)
    count.index_put_((graph.edge_index[1], graph.edge_index[0]), ones[:, 0], accumulate=True)
    assert out.equal(2.0 * kept * count[:, None])
    on_cpu = replace(given, graph=graph.to("cpu"), value=value.cpu(), bias=(ones.cpu(),), seed=SEED.cpu())
    assert csr.run(on_cpu)[0].equal(out.cpu())


# ---------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kind", ["dot", "additive", "additive v2", "sigmoid", "by class"])
def test_hubs_are_divided_and_put_together_again(kind: str) -> None:
    from mpnn.backends.csr import on_device

    graph = hubs()
    given = {
        "dot": lambda: replace(
            dot(graph, heads=2, shared=1), bias=(Lookup(leaf(2, 2)),), dropout=0.5, seed=SEED, return_weights=True
        ),
        "additive": lambda: additive(graph, LeakyReLU()),
        "additive v2": lambda: additive_v2(graph, LeakyReLU()),
        "sigmoid": lambda: replace(dot(graph), normalize="sigmoid"),
        "by class": lambda: with_vectors(graph, Lookup(leaf(2, 3, 5)), Lookup(leaf(2, 3, 7))),
    }[kind]()
    for edges in (on_device.rows(graph), on_device.columns(graph)()):
        assert edges.divided.slots >= 2
        assert {b.long for b in edges.bins} == {True, False}
    check(given)


def test_every_edge_of_every_row_is_shared_out_once() -> None:
    from mpnn.kernels.cuda.schedule import Sorted

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
    heard = (graph.edge_index[1] == 0).nonzero().squeeze(1)
    bias[heard[:20]] = -torch.inf
    bias[heard[20:]] = -1000.0
    bias[graph.edge_index[1] == 2] = -torch.inf
    given = replace(dot(graph), bias=(bias,))
    check(given)
    bias[heard] = -torch.inf
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
def test_every_run_gives_the_same_bits(make: Callable[[Graph], Request]) -> None:
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


def rounding(dtype: torch.dtype) -> float:
    """What one rounding loses at most, relatively; the interpreter truncates bfloat16."""
    truncates = INTERPRETED and dtype == torch.bfloat16
    return torch.finfo(dtype).eps / (1 if truncates else 2)


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
    given = Request(graph, value.requires_grad_(), Dot(value, value, 0.01))
    out = cuda_attention.run(given)[0]
    near = Request(
        graph, value.detach().contiguous(), Dot(value.detach().contiguous(), value.detach().contiguous(), 0.01)
    )
    assert out.equal(cuda_attention.run(near)[0])
    assert out[2].tolist() == [[0.0, 1.0, 2.0, 3.0]]
    summed = cuda_reduce.run(Request(graph, value.detach(), normalize="none"))[0]
    assert summed[0].tolist() == [[12.0, 14.0, 16.0, 18.0]]


# ---------------------------------------------------------------------------------------- aggregation

AGGREGATORS = (Sum(), Mean(), Max(), Min(), Var(), Std(), PNA())


def halves(*shape: int) -> Tensor:
    """So that sums are exact in any order and many messages are equal."""
    return (2 * torch.randn(*shape, dtype=torch.float64)).round().div(2).to(DEVICE).requires_grad_()


@pytest.mark.parametrize("aggregator", AGGREGATORS, ids=lambda a: type(a).__name__)
def test_aggregation_agrees_with_the_specification(aggregator: Aggregator) -> None:
    # squares of up to 10, 60 of them, and a root whose derivative is up to 1 / (2 * sqrt(1e-5)): 60 * 100 * 160 * 1e-16
    close = {"rtol": 1e-10, "atol": 1e-10}
    for graph, batch, heads, width in (
        (scattered(), (2, 1), 3, 5),
        (without_edges(), (), 2, 1),
        (graphs.window(1).bind(5).to(DEVICE), (), 1, 1),
    ):
        plain = Request(graph, halves(*batch, graph.num_src, heads, width), normalize="none", reduce=aggregator)
        check(plain, close, str(graph))
        weight = torch.randint(-2, 3, (*batch, graph.num_edges, heads)).to(DEVICE).double().requires_grad_()
        check(replace(plain, bias=(weight,)), close, f"{graph}, weighted")


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("aggregator", [Mean(), Max(), Var()], ids=lambda a: type(a).__name__)
def test_aggregation_divides_hubs(aggregator: Aggregator) -> None:
    graph = hubs()
    for width in (1, 40):
        plain = Request(graph, halves(9, 1, width), normalize="none", reduce=aggregator)
        check(plain, {"rtol": 1e-10, "atol": 1e-10})
    weight = torch.randint(-2, 3, (graph.num_edges, 1)).to(DEVICE).double().requires_grad_()
    check(replace(plain, bias=(weight, Lookup(leaf(2, 1)))), {"rtol": 1e-9, "atol": 1e-9})


def test_one_weight_for_all_heads_and_one_head_for_all_weights() -> None:
    graph = scattered()
    plain = Request(graph, halves(2, 10, 3, 4), bias=(halves(graph.num_edges, 1),), normalize="none")
    check(plain)
    check(replace(plain, value=halves(2, 10, 1, 4), bias=(halves(graph.num_edges, 3),), reduce=Max()))


def test_extremes_hand_on_nan() -> None:
    graph = graphs.from_edges(torch.tensor([[0, 1, 2, 3], [1, 1, 3, 3]], device=DEVICE), 4)
    value = halves(4, 1, 3)
    with torch.no_grad():
        value[0] = torch.nan
    for aggregator in (Max(), Min(), Sum()):
        out, _ = cuda_reduce.run(Request(graph, value, normalize="none", reduce=aggregator))
        assert out[1].isnan().all()
        assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.usefixtures("small_pieces")
def test_narrow_sums_are_rounded_once() -> None:
    graph = hubs()
    value = torch.randn(9, 1, 8, device=DEVICE).bfloat16()
    out = cuda_reduce.run(Request(graph, value, normalize="none"))[0]
    expected = edge_list.run(Request(graph, value.double(), normalize="none"))[0]
    # 60 terms of up to 4 in float32, and one rounding
    assert out.dtype == torch.bfloat16
    assert ((out.double() - expected).abs() <= rounding(out.dtype) * expected.abs() + 60 * 240 * 2**-24).all()


# ---------------------------------------------------------------------------------------- refusals and plans


def test_what_it_cannot_do_is_refused_in_a_sentence() -> None:
    graph = scattered()
    given = dot(graph)
    refused = {
        "cannot compile elu": replace(given, score=replace(additive(graph, F.elu).score)),
        "sums messages or takes their mean": replace(given, reduce=Max()),
        "at most 4,096 wide, and these 5,000": replace(given, value=leaf(10, 3, 5000)),
    }
    for sentence, request in refused.items():
        assert sentence in cuda_attention.supports(request)


def on_cuda(graph: Graph, kind: str) -> Request:
    """A request with features that are nowhere, but claim to be on a GPU."""
    with FakeTensorMode():
        query, key, value, listening, heard = (
            torch.empty(n, *shape, dtype=torch.bfloat16, device="cuda:0", requires_grad=True)
            for n, *shape in (
                (graph.num_dst, 8, 64), (graph.num_src, 8, 64), (graph.num_src, 8, 64), (graph.num_dst, 8),
                (graph.num_src, 8),
            )
        )  # fmt: skip
    if kind == "aggregation":
        return Request(graph, value, normalize="none")
    score = Dot(query, key, 0.1) if kind == "dot" else AdditiveScore(listening, heard, LeakyReLU())
    return Request(graph, value, score)


def citations() -> Graph:
    return graphs.from_edges(torch.randint(0, 20_000, (2, 200_000)), 20_000)


@pytest.mark.parametrize(
    ("kind", "graph", "backend"),
    [
        ("dot", graphs.complete().bind(4096), "dense"),
        ("dot", graphs.causal().bind(4096), "dense"),
        ("dot", citations(), "csr"),
        ("GAT", citations(), "csr"),
        ("aggregation", citations(), "csr"),
        ("GAT", graphs.complete().bind(64), "csr"),
    ],
)
def test_the_plan_for_a_gpu_is_sensible_where_it_is_clear(kind: str, graph: Graph, backend: str) -> None:
    found = plan(on_cuda(graph, kind))
    assert found.backend == backend
    assert all(0 < c.seconds < 1 for c in found.candidates if c.reason is None)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for kind in ("dot", "aggregation"):
        assert csr.supports(on_cuda(graphs.causal().bind(3), kind)) == (
            'triton is not installed: pip install "mpnn[triton]"'
        )


# ---------------------------------------------------------------------------------------- for a GPU, without one

COMPILING = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class NoDevice:
    get_current_target = lambda self: GPUTarget("cuda", int(sys.argv[1]), 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

triton.runtime.driver.set_active(NoDevice())
launch, compiled = JITFunction.run, []

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    name = f"{self.fn.__module__}.{self.fn.__name__}".removeprefix("mpnn.kernels.cuda.")
    compiled.append((name, len(kernel.asm["cubin"])))

JITFunction.run = compile_only
sys.path.insert(0, sys.argv[2])
import test_triton_csr as given
from mpnn.kernels.cuda import schedule
schedule._PIECE = 20
in_double = given.leaf, given.halves  # which takes long to compile
given.leaf, given.halves = (
    lambda *shape, make=make: make(*shape).detach().float().requires_grad_() for make in in_double
)
attending = given.REQUESTS["everything"](given.hubs())
plain = given.Request(
    attending.graph, given.halves(9, 2, 8), bias=(given.halves(100, 2),), normalize="none", reduce=given.Max()
)
for request in (attending, plain):
    backend = given.cuda_reduce if given.csr.reduce.is_plain(request) else given.cuda_attention
    out, _ = backend.run(request)
    out.sum().backward()
print(json.dumps(sorted(set(compiled))))
"""


@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU to compile for")
def test_every_kernel_compiles_for_a_gpu(tmp_path: Path) -> None:
    """What the interpreter takes, the compiler might not: here it compiles what calls would launch, for an H100."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, "90", str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = dict(json.loads(done.stdout))
    assert set(kernels) == {
        "forward.attend", "forward.join", "backward.deltas", "backward.by_destination", "backward.by_source",
        "backward.by_class", "reduce.fold", "reduce.join", "reduce.spread",
    }  # fmt: skip
    assert all(size > 0 for size in kernels.values())
