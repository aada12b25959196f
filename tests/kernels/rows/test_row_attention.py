"""mpnn.kernels.rows.attention: scores, biases and normalizers along rows, with derivatives in both modes, next to the
specification."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn import graphs
from mpnn.backends import csr, edge_list
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.kernels import memory
from mpnn.kernels.cpu import library
from mpnn.kernels.rows import attention, rows
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")

# Row 1 has no edges, and one edge is listed twice.
EDGES = torch.tensor([[3, 0, 2, 1, 1, 0, 3, 4, 2, 0, 1], [2, 0, 2, 3, 2, 2, 0, 2, 3, 2, 2]])
GRAPH = graphs.from_edges(EDGES, num_dst=4, num_src=5)
DST, SRC, COUNT = 4, 5, EDGES.shape[1]
H, D = 4, 8

Case = tuple[Callable[..., Round], list[tuple[str, tuple[int, ...]]]]


def dot(
    value: Tensor, query: Tensor, key: Tensor, *biases: Tensor, softcap: float | None = None, **options: Any
) -> Round:
    return Round(GRAPH, value, Dot(query, key, 0.4, softcap=softcap), bias=biases, **options)


def of_nodes(value: Tensor, query: Tensor, key: Tensor, *biases: Tensor, names: str, **options: Any) -> Round:
    return dot(value, query, key, **dict(zip(names.split(), biases, strict=True)), **options)


def edge_keys(value: Tensor, query: Tensor, key: Tensor, edge: Tensor, **options: Any) -> Round:
    return Round(GRAPH, value, Dot(query, key, 0.4, edge), **options)


def edge_values(value: Tensor, query: Tensor, key: Tensor, edge: Tensor, **options: Any) -> Round:
    return Round(GRAPH, value, Dot(query, key, 0.4), edge_value=edge, **options)


def tables(
    value: Tensor, query: Tensor, key: Tensor, of_keys: Tensor, of_values: Tensor, bias: Tensor, **more: Any
) -> Round:
    score = Dot(query, key, 0.4, EmbeddingTable(of_keys, Offset(2)))
    of_values = EmbeddingTable(of_values, Offset(1))  # type: ignore[assignment]
    return Round(GRAPH, value, score, edge_value=of_values, bias=(BiasTable(bias, Offset(1)),), **more)


def additive(value: Tensor, dst: Tensor, src: Tensor, *edge: Tensor, **options: Any) -> Round:
    return Round(GRAPH, value, AdditiveScore(dst, src, LeakyReLU(0.2), *edge), **options)


def activated(value: Tensor, dst: Tensor, src: Tensor, vector: Tensor, *edge: Tensor, **options: Any) -> Round:
    return Round(GRAPH, value, AdditiveV2Score(dst, src, vector, LeakyReLU(0.2), *edge), **options)


def biased(value: Tensor, bias: Tensor, **options: Any) -> Round:
    return Round(GRAPH, value, bias=(bias,), **options)


VALUE, QUERY, KEY = ("src", (H, D)), ("dst", (H, D)), ("src", (H, D))
SHARED = ("src", (2, D))
CASES: dict[str, Case] = {
    "dot": (dot, [VALUE, QUERY, KEY]),
    "heads with the same keys": (dot, [SHARED, QUERY, SHARED]),
    "all heads with the same keys": (dot, [("src", (1, D)), QUERY, ("src", (1, D))]),
    "widths of 5 and 3": (dot, [("src", (H, 3)), ("dst", (H, 5)), ("src", (H, 5))]),
    "softcap": (partial(dot, softcap=1.5), [VALUE, QUERY, KEY, ("edge", (H,))]),
    "a bias": (dot, [VALUE, QUERY, KEY, ("edge", (H,))]),
    "a bias for all heads": (dot, [VALUE, QUERY, KEY, ("edge", (1,))]),
    "a bias for all entries": (dot, [VALUE, QUERY, KEY, ("shared edge", (H,))]),
    "dst_bias": (partial(of_nodes, names="dst_bias"), [VALUE, QUERY, KEY, ("dst", (H,))]),
    "src_bias": (partial(of_nodes, names="src_bias"), [VALUE, QUERY, KEY, ("src", (H,))]),
    "both": (partial(of_nodes, names="dst_bias src_bias"), [VALUE, QUERY, KEY, ("dst", (H,)), ("src", (H,))]),
    "keys of edges": (edge_keys, [VALUE, QUERY, KEY, ("edge", (H, D))]),
    "values of edges": (edge_values, [VALUE, QUERY, KEY, ("edge", (H, D))]),
    "tables": (tables, [VALUE, QUERY, KEY, ("", (5, H, D)), ("", (3, H, D)), ("", (3, H))]),
    "additive": (additive, [VALUE, ("dst", (H,)), ("src", (H,))]),
    "additive with edges": (additive, [VALUE, ("dst", (H,)), ("src", (H,)), ("edge", (H,))]),
    "activated": (activated, [VALUE, QUERY, KEY, ("", (H, D))]),
    "activated with edges": (activated, [VALUE, QUERY, KEY, ("", (H, D)), ("edge", (H, D))]),
    "biases only": (biased, [VALUE, ("edge", (H,))]),
}
SIZES = {"src": SRC, "dst": DST, "edge": COUNT}


def tensors_of(name: str, batch: tuple[int, ...]) -> list[Tensor]:
    shapes = []
    for kind, shape in CASES[name][1]:
        if kind == "shared edge":
            shapes.append((COUNT, *shape))
        else:
            shapes.append((*batch, SIZES[kind], *shape) if kind else shape)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.fixture(params=[1, 3], ids="{} chunks".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The edges are divided into about so many chunks, and outputs are allocated without being filled."""
    monkeypatch.setattr(attention, "_MIN_COMPONENTS", COUNT * H * D // request.param)
    monkeypatch.setattr(rows, "MIN_PIECE", 2)
    monkeypatch.setattr(memory, "LARGE", 1)
    GRAPH._memo.clear()


def results(backend: Any, round: Round) -> list[Tensor]:
    found = backend.run(round)
    return [x for x in (found.out, found.weights, found.lse) if x is not None]


def summed(found: list[Tensor]) -> Tensor:
    """A number that depends on all results; the lse of rows without edges is -inf."""
    directions = torch.Generator().manual_seed(3)
    total = torch.zeros((), dtype=torch.float64)
    for x in found:
        weights = torch.randn(x.shape, dtype=torch.float64, generator=directions)
        total = total + (weights * torch.where(x.detach().isfinite(), x, 0.0)).sum()
    return total


OPTIONS: list[dict[str, Any]] = [
    {},
    {"return_weights": True, "return_lse": True},
    {"return_lse": True},
    {"normalize": "sigmoid", "return_weights": True},
    {"normalize": "none"},
]


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (2, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(times=3)
def test_results_and_derivatives(name: str, batch: tuple[int, ...], options: dict[str, Any]) -> None:
    make = partial(CASES[name][0], **options)
    tensors = tensors_of(name, batch)
    of_all = []
    for backend in (csr, edge_list):
        found = results(backend, make(*tensors))
        of_all.append([*found, *torch.autograd.grad(summed(found), tensors)])
    torch.testing.assert_close(*of_all)
    with torch.no_grad():
        torch.testing.assert_close(results(csr, make(*tensors)), [x.detach() for x in of_all[1][: len(found)]])


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("options", OPTIONS[:3], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(times=2)
def test_tangents_and_their_gradients(name: str, batch: tuple[int, ...], options: dict[str, Any]) -> None:
    """Of each tensor alone, and of all."""
    make = partial(CASES[name][0], **options)
    tensors = tensors_of(name, batch)
    directions = [torch.randn_like(x) for x in tensors]
    for moved in [*([k] for k in range(len(tensors))), list(range(len(tensors)))]:
        of_all = []
        for backend in (csr, edge_list):
            with forward_ad.dual_level():
                duals = [
                    forward_ad.make_dual(x, d) if k in moved else x
                    for k, (x, d) in enumerate(zip(tensors, directions, strict=True))
                ]
                found = [forward_ad.unpack_dual(x) for x in results(backend, make(*duals))]
            tangents = [torch.zeros_like(x) if tangent is None else tangent for x, tangent in found]
            tangents = [
                tangent.masked_fill(~x.isfinite(), 0.0) for tangent, (x, _) in zip(tangents, found, strict=True)
            ]
            gradients: Any = [None] * len(tensors)
            if any(x.requires_grad for x in tangents):
                gradients = torch.autograd.grad(summed(tangents), tensors, materialize_grads=True)
            of_all.append([*tangents, *gradients])
        torch.testing.assert_close(*of_all)


def is_repeated(round: Round) -> bool:
    function: Any = csr.bind(round)
    return bool(function.func is csr._attend_repeated)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("batch", [(), (3,), (2, 2)], ids=str)
def test_calls_that_are_repeated_with_other_tensors(batch: tuple[int, ...]) -> None:
    """Features are read where they lie, if they lie in order."""

    def of(nodes: int, *shape: int) -> Tensor:
        return torch.randn(*batch, nodes, *shape, dtype=torch.float64)

    def numbers(nodes: int) -> Tensor:
        return of(nodes, 3 * H)[..., H : 2 * H]  # next to other numbers of the nodes

    def dot_of(key_heads: int, width: int, value_width: int) -> Round:
        return dot(of(SRC, key_heads, value_width), of(DST, H, width), of(SRC, key_heads, width))

    def swapped() -> Round:
        key = torch.randn(*batch, H, SRC, D, dtype=torch.float64).transpose(-2, -3)
        return dot(of(SRC, H, D), of(DST, H, D), key)

    rounds: dict[str, tuple[Callable[[], Round], bool]] = {
        "dot": (lambda: dot_of(H, D, D), True),
        "other widths": (lambda: dot_of(H, 2 * D, D), True),
        "shared keys": (lambda: dot_of(2, D, D), True),
        "a narrow value": (lambda: dot_of(H, D, 5), False),
        "narrow keys": (lambda: dot_of(H, 5, D), False),
        "keys in another order": (swapped, False),
        "negated keys": (lambda: dot(of(SRC, H, D), of(DST, H, D), torch._neg_view(of(SRC, H, D))), False),
        "additive": (lambda: additive(of(SRC, H, D), of(DST, H), of(SRC, H)), True),
        "strided numbers": (lambda: additive(of(SRC, H, D), numbers(DST), numbers(SRC)), len(batch) < 2),
        "activated": (lambda: activated(of(SRC, H, D), of(DST, H, D), of(SRC, H, D), torch.randn(H, D).double()), True),
        "biased": (lambda: biased(of(SRC, H, D), torch.randn(COUNT, H).double()), False),
        "no numbers": (lambda: dot_of(H, D, 0), False),
    }
    for name, (make, expected) in rounds.items():
        assert is_repeated(make()) == expected, name
        function: Any = csr.bind(make())
        for _ in range(2):
            round = make()
            torch.testing.assert_close(
                function(round).out, edge_list.run(round).out, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize(
    ("key_heads", "value_heads", "repeated"), [(1, 1, False), (2, 1, True), (1, 2, True), (2, 2, True)]
)
def test_keys_that_eight_heads_share_are_copied(key_heads: int, value_heads: int, repeated: bool) -> None:
    heads = attention.SHARED_FORWARD
    value, query, key = (torch.randn(n, h, D) for n, h in ((SRC, value_heads), (DST, heads), (SRC, key_heads)))
    assert is_repeated(Round(GRAPH, value, Dot(query, key, 0.4))) == repeated
    dst, src = torch.randn(DST, heads), torch.randn(SRC, heads)
    score = AdditiveScore(dst, src, LeakyReLU(0.2))
    assert is_repeated(Round(GRAPH, torch.randn(SRC, 1, D), score)), "an additive score has no keys"


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("heads", [(8, 1, 1), (8, 2, 1), (4, 1, 1), (8, 1, 2)], ids=str)
def test_heads_that_share_keys_over_long_rows(heads: tuple[int, int, int]) -> None:
    """The kernels copy keys and gradients of keys."""
    nodes = 6
    graph = graphs.from_edges(torch.randint(0, nodes, (2, 16 * nodes)), nodes)
    query, key, value = (torch.randn(2, nodes, h, D, dtype=torch.float64, requires_grad=True) for h in heads)
    of_all = []
    for backend in (csr, edge_list):
        out = backend.run(Round(graph, value, Dot(query, key, 0.4))).out
        of_all.append([out, *torch.autograd.grad(out.sin().sum(), (query, key, value))])
    torch.testing.assert_close(*of_all)


def test_no_edges_and_no_entries() -> None:
    none = graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), num_dst=DST, num_src=SRC)
    for graph, batch in ((none, ()), (none, (2,)), (GRAPH, (0,))):
        query, key, value = (
            torch.randn(*batch, n, H, D, dtype=torch.float64, requires_grad=True) for n in (DST, SRC, SRC)
        )
        round = Round(graph, value, Dot(query, key, 0.4), return_weights=True, return_lse=True)
        found = results(csr, round)
        torch.testing.assert_close(found, results(edge_list, round))
        gradients = torch.autograd.grad(found[0].sum(), (query, key, value), materialize_grads=True)
        assert not any(x.any() for x in gradients)
        with forward_ad.dual_level():
            dual = Dot(forward_ad.make_dual(query, torch.ones_like(query)), key, 0.4)
            out = csr.run(Round(graph, value, dual)).out
            assert out.shape == (*batch, DST, H, D)
