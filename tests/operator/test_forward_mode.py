"""Derivatives in forward mode (jvp, dual numbers) of attention and sums run in kernels, alone and in all compositions.

`edge_list` is made of torch's operations, whose derivatives are torch's own: it is what kernels are compared with.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vmap

from mpnn import Graph, MessagePassing, graphs, ops
from mpnn.attention import Additive, AdditiveV2, DotProduct
from mpnn.engine import run as run_round
from mpnn.engine.choice import FORWARD, choose
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.ops import NodeBias
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU
from tests.support.live_memory import LiveMemory

HEADS = 4
_EDGES = torch.randint(0, 60, (2, 300), generator=torch.Generator().manual_seed(0))
GRAPHS: dict[str, Graph] = {
    "causal": graphs.causal().bind(110),
    "window": graphs.window(9).bind(130),
    "documents": (graphs.documents([40, 1, 59]) & graphs.causal()).bind(100),
    "no in-neighbors": (graphs.causal() - graphs.identity()).bind(40),
    "cliques": graphs.windows(8, 8, 4, 2).bind(64),
    "edges": graphs.from_edges(_EDGES, 60),
}
KERNELS = {"tiles": [name for name in GRAPHS if name not in ("edges", "cliques")], "csr": list(GRAPHS)}
ON = [(backend, graph) for backend, of in KERNELS.items() for graph in of]


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


def features(graph: Graph, width: int = 8, key_heads: int = HEADS, batch: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
    src = (*batch, graph.num_src, key_heads, width)
    return randn(*batch, graph.num_dst, HEADS, width), randn(*src), randn(*src)


def assert_same(run: Callable[[str], Any], backend: str = "auto", **bounds: Any) -> None:
    """`run(backend)` gives what `edge_list` gives, for the same random numbers."""
    found, expected = [], []
    for name, results in ((backend, found), ("edge_list", expected)):
        torch.manual_seed(1)
        results += run(name)
    torch.testing.assert_close(found, expected, **bounds)


OPTIONS: dict[str, Callable[[Graph, Any, str], Any]] = {
    "plain": lambda graph, x, b: ops.attend(graph, *x, backend=b),
    "values": lambda graph, x, b: ops.attend(graph, x[0].detach(), x[1].detach(), x[2], backend=b),
    "queries": lambda graph, x, b: ops.attend(graph, x[0], x[1].detach(), x[2].detach(), backend=b),
    "softcap": lambda graph, x, b: ops.attend(graph, *x, softcap=1.5, scale=0.7, backend=b),
    "dropout": lambda graph, x, b: ops.attend(graph, *x, dropout=0.4, backend=b),
    "sinks": lambda graph, x, b: ops.attend(graph, *x, sinks=x[0][0, :, 0], backend=b),
    "sigmoid": lambda graph, x, b: ops.attend(graph, *x, normalize="sigmoid", backend=b),
    "no normalizer": lambda graph, x, b: ops.attend(graph, *x, normalize="none", backend=b),
    "bias": lambda graph, x, b: ops.attend(graph, *x, bias=x[0].mean().expand(graph.num_edges, 1) * 2, backend=b),
    "bias of nodes": lambda graph, x, b: ops.attend(graph, *x, bias=NodeBias(src=x[1][..., 0]), backend=b),
    "weights": lambda graph, x, b: ops.attend(graph, *x, return_weights=True, backend=b)[1],
}
_ROWS_ONLY = ("weights", "sigmoid", "no normalizer")


@pytest.mark.parametrize(
    ("backend", "name", "option"),
    [(*on, option) for on in ON for option in OPTIONS if on[0] == "csr" or option not in _ROWS_ONLY],
)
def test_tangents_of_attention(backend: str, name: str, option: str) -> None:
    graph, f = GRAPHS[name], OPTIONS[option]
    x = features(graph)
    tangents = tuple(map(torch.randn_like, x))
    assert_same(lambda b: jvp(lambda *x: f(graph, x, b), x, tangents), backend)


@pytest.mark.parametrize(("backend", "name"), ON)
@pytest.mark.parametrize("width", [5, 16])
def test_grouped_heads_batches_and_odd_widths(backend: str, name: str, width: int) -> None:
    graph = GRAPHS[name]
    x = features(graph, width, key_heads=2, batch=(3,))
    tangents = tuple(map(torch.randn_like, x))
    assert_same(lambda b: jvp(lambda *x: ops.attend(graph, *x, backend=b), x, tangents), backend)


@pytest.mark.parametrize("backend", ["tiles", "csr"])
def test_tangents_of_tables(backend: str) -> None:
    """Biases by offset, and in rows also vectors by offset that are added to keys and values."""
    graph = GRAPHS["causal"]
    query, key, value = features(graph)
    tensors = query, randn(11, HEADS), randn(11, HEADS, 8), randn(11, 1, 8)

    def f(query: Tensor, bias: Tensor, edge_key: Tensor, edge_value: Tensor, b: str) -> Tensor:
        vectors = [EmbeddingTable(x, Offset(5)) if backend == "csr" else None for x in (edge_key, edge_value)]
        score = Dot(query, key, 0.3, vectors[0])
        return run_round(Round(graph, value, score, bias=(BiasTable(bias, Offset(5)),), edge_value=vectors[1]), b)[0]

    tangents = tuple(map(torch.randn_like, tensors))
    assert_same(lambda b: jvp(lambda *x: f(*x, b), tensors, tangents), backend)


@pytest.mark.parametrize("activation", [LeakyReLU(0.2), torch.tanh], ids=["leaky", "tanh"])
@pytest.mark.parametrize("vectors", [False, True])
def test_tangents_of_additive_scores_with_data_of_edges(vectors: bool, activation: Any) -> None:
    graph = GRAPHS["edges"]
    value, edge_value = randn(60, HEADS, 8), randn(graph.num_edges, HEADS, 8)
    ends = randn(60, HEADS, 8), randn(60, HEADS, 8)
    edge, vector = randn(graph.num_edges, HEADS, 8), randn(HEADS, 8)
    x = (value, edge_value, *ends, edge, vector)

    def f(value: Tensor, edge_value: Tensor, dst: Tensor, src: Tensor, edge: Tensor, vector: Tensor, b: str) -> Tensor:
        score: Any = AdditiveV2Score(dst, src, vector, activation, edge)
        if not vectors:
            score = AdditiveScore(dst[..., 0], src[..., 0], activation, edge[..., 0])
        return run_round(Round(graph, value, score, edge_value=edge_value), b)[0]

    tangents = tuple(map(torch.randn_like, x))
    assert_same(lambda b: jvp(lambda *x: f(*x, b), x, tangents), "csr")


def _dual(f: Callable[..., Any], x: tuple[Tensor, ...], tangents: tuple[Tensor, ...]) -> Any:
    return f(*(forward_ad.make_dual(primal, tangent) for primal, tangent in zip(x, tangents, strict=True)))


def _loss(out: Tensor, moved: Tensor) -> Tensor:
    return (2 * out.sin() + moved.cos()).sum()


def _reverse_over_forward(f: Callable[..., Any], x: Any, tangents: Any) -> Any:
    leaves = [y.clone().requires_grad_() for y in (*x, *tangents)]
    return torch.autograd.grad(_loss(*jvp(f, tuple(leaves[:3]), tuple(leaves[3:]))), leaves)


def _reverse_inside_a_dual_level(f: Callable[..., Any], x: Any, tangents: Any) -> Any:
    leaves = [y.clone().requires_grad_() for y in (*x, *tangents)]
    with forward_ad.dual_level():
        out = forward_ad.unpack_dual(_dual(f, tuple(leaves[:3]), tuple(leaves[3:])))
        return torch.autograd.grad(_loss(out.primal, out.tangent), leaves)


def _products_with_the_hessian_by_dual_numbers(f: Callable[..., Any], x: Any, tangents: Any) -> Any:
    leaves = [y.clone().requires_grad_() for y in x]
    with forward_ad.dual_level():
        gradients = torch.autograd.grad(_dual(f, tuple(leaves), tangents).sin().sum(), leaves)
        return [forward_ad.unpack_dual(gradient).tangent for gradient in gradients]


def _dual_numbers(f: Callable[..., Any], x: Any, tangents: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(_dual(f, x, tangents))


def _meanflow(f: Callable[..., Any], x: Any, tangents: Any) -> Any:
    """The tangent is a target, as in MeanFlow (Geng et al. 2025, arXiv:2505.13447)."""
    leaves = tuple(y.clone().requires_grad_() for y in x)
    out, moved = jvp(f, leaves, tangents)
    return torch.autograd.grad((out - moved.detach()).square().sum(), leaves)


COMPOSITIONS: dict[str, Callable[[Callable[..., Any], Any, Any], Any]] = {
    "dual numbers": _dual_numbers,
    "a target in a loss": _meanflow,
    "reverse over forward": _reverse_over_forward,
    "reverse inside a dual level": _reverse_inside_a_dual_level,
    "forward over reverse by dual numbers": _products_with_the_hessian_by_dual_numbers,
    "jvp of jvp": lambda f, x, t: [jvp(lambda *x: jvp(f, x, t)[1], x, t[::-1])[1]],
    "jvp of jvp of jvp": lambda f, x, t: [jvp(lambda *x: jvp(lambda *x: jvp(f, x, t)[1], x, t)[1], x, t[::-1])[1]],
    "grad of jvp": lambda f, x, t: [grad(lambda q: jvp(f, (q, *x[1:]), t)[1].sin().sum())(x[0])],
    "jvp of grad": lambda f, x, t: [jvp(grad(lambda q: f(q, *x[1:]).sin().sum()), x[:1], t[:1])[1]],
    "vmap of jvp": lambda f, x, t: vmap(lambda q, d: jvp(f, (q, *x[1:]), (d, *t[1:])), (0, 1))(
        torch.stack([x[0], t[0]]), torch.stack([t[1], t[2]], 1)
    ),
    "jvp of vmap": lambda f, x, t: jvp(
        vmap(lambda q: f(q, *x[1:])), (torch.stack([x[0], t[0]]),), (torch.stack(t[1:]),)
    ),
    "jacfwd": lambda f, x, t: [jacfwd(lambda s: f(x[0] * s, *x[1:]))(torch.full((2, 1, 1), 0.3).double().sum(0)[0])],
}


@pytest.mark.parametrize("how", COMPOSITIONS)
@pytest.mark.parametrize(("backend", "name"), [("tiles", "window"), ("csr", "edges"), ("csr", "documents")])
def test_compositions_of_transforms(backend: str, name: str, how: str) -> None:
    graph = GRAPHS[name]
    x, tangents = features(graph), features(graph)
    composed = COMPOSITIONS[how]
    for option in ("softcap", "dropout"):
        f = OPTIONS[option]
        if option == "dropout" and ("vmap" in how or how == "jacfwd"):
            continue  # each entry draws its own, or none may
        for name_or_auto in (backend, "auto"):
            assert_same(lambda b, f=f: composed(lambda *x: f(graph, x, b), x, tangents), name_or_auto)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_dropout_in_vmap_of_jvp(randomness: str) -> None:
    graph = GRAPHS["causal"]
    x = features(graph)
    many = torch.stack([x[0], x[1], x[2]])

    def f(backend: str) -> Any:
        def one(q: Tensor) -> Any:
            return jvp(lambda q: ops.attend(graph, q, q, q, dropout=0.4, backend=backend), (q,), (q.cos(),))

        return vmap(one, randomness=randomness)(many)

    assert_same(f, "tiles")
    assert_same(f, "csr")


REDUCTIONS = ["sum", "mean", "max", "var", "std"]


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("name", ["edges", "window"])
def test_tangents_of_aggregates(name: str, reduce: str) -> None:
    graph = GRAPHS[name]
    x, weight = randn(graph.num_src, 8), randn(graph.num_edges)
    tangents = randn(graph.num_src, 8), randn(graph.num_edges)

    def f(backend: str) -> Any:
        leaves = [y.clone().requires_grad_() for y in (x, weight, *tangents)]
        moved = jvp(
            lambda x, w: ops.aggregate(graph, x, reduce, weight=w, backend=backend),
            tuple(leaves[:2]),
            tuple(leaves[2:]),
        )
        return [*moved, *torch.autograd.grad(_loss(*moved), leaves)]

    assert_same(f)
    if reduce in ("sum", "mean"):
        assert_same(f, "csr")


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "dot products": lambda: MessagePassing(graphs.window(3), "sum", None, DotProduct(16, 4)),
    "GAT": lambda: MessagePassing(GRAPHS["edges"], "sum", None, Additive(16, 4, HEADS)),
    "GATv2": lambda: MessagePassing(GRAPHS["edges"], "sum", None, AdditiveV2(16, 4, HEADS)),
    "a mean": lambda: MessagePassing(GRAPHS["edges"], "mean"),
}


@pytest.mark.parametrize("of", LAYERS)
def test_layers(of: str) -> None:
    layer = LAYERS[of]().double()
    x, tangent = randn(60, 16), randn(60, 16)

    def f(backend: str) -> Any:
        layer.backend = backend
        return jvp(layer, (x,), (tangent,))

    assert_same(f)


def _forward(graph: Graph, **options: Any) -> str:
    q, k, v = features(graph)
    return choose(Round(graph, v, Dot(q, k, 1.0), **options), FORWARD).name


def test_kernels_run_in_forward_mode() -> None:
    names = {name: _forward(graph) for name, graph in GRAPHS.items()}
    expected = {name: "csr" if name == "edges" else "tiles" for name in GRAPHS}
    assert names == expected
    assert _forward(GRAPHS["window"], sinks=randn(HEADS)) == "tiles"
    assert _forward(GRAPHS["causal"], normalize="sparsemax") == "csr"  # weights, and sums with them
    assert _forward(GRAPHS["window"], mix_weights=randn(HEADS, HEADS)) != "edge_list"


def test_no_tensor_of_edges_times_width() -> None:
    graph = graphs.window(64).bind(2048)
    x = tuple(randn(2048, 4, 64, dtype=torch.float32) for _ in range(3))
    tangents = tuple(map(torch.randn_like, x))
    for backend in ("auto", "csr"):
        f = lambda *x, backend=backend: ops.attend(graph, *x, backend=backend)  # noqa: E731
        jvp(f, x, tangents)
        with LiveMemory() as memory:
            jvp(f, x, tangents)
        assert memory.peak < 4 * x[0].nbytes < graph.num_edges * 4 * 64


@pytest.mark.parametrize("backend", ["tiles", "csr"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_no_row_that_does_not_attend_to_it(bad: float, backend: str) -> None:
    graph = graphs.causal().bind(150)
    x = features(graph)
    tangents = tuple(map(torch.randn_like, x))
    for of in (*x, *tangents):
        of[100, 0, 0] = bad
    for results in jvp(lambda *x: ops.attend(graph, *x, backend=backend), x, tangents):
        assert results[:100].isfinite().all()
        assert results[:, 1:].isfinite().all()
        assert not results[100, 0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["tiles", "csr"])
def test_16_bits_are_as_exact_as_their_last_digit(backend: str, dtype: torch.dtype) -> None:
    graph = GRAPHS["causal"]
    x = tuple(y.to(dtype) for y in features(graph))
    tangents = tuple(torch.randn(y.shape).to(dtype) for y in x)
    out, moved = jvp(lambda *x: ops.attend(graph, *x, backend=backend), x, tangents)
    wide, exact = (tuple(y.double() for y in of) for of in (x, tangents))
    _, expected = jvp(lambda *x: ops.attend(graph, *x, backend="edge_list"), wide, exact)
    assert out.dtype == moved.dtype == dtype
    # The results of the forward pass are rounded once, and so is the tangent; t multiplies the former's error.
    error = (moved.double() - expected).abs()
    assert error.max() < 6 * torch.finfo(dtype).eps * expected.abs().max()


@pytest.mark.parametrize("backend", ["tiles", "csr"])
def test_float32_is_as_exact_as_the_reference(backend: str) -> None:
    graph = GRAPHS["window"]
    x = tuple(y.float() for y in features(graph, 64))
    tangents = tuple(map(torch.randn_like, x))
    doubles = [tuple(y.double() for y in of) for of in (x, tangents)]
    _, exact = jvp(lambda *x: ops.attend(graph, *x, backend="edge_list"), *doubles)

    def error(backend: str) -> float:
        _, moved = jvp(lambda *x: ops.attend(graph, *x, backend=backend), x, tangents)
        return float((moved - exact).abs().max())

    assert error(backend) < 2 * error("edge_list")


def _plain_and_strided() -> Iterator[tuple[Tensor, Tensor]]:
    x = randn(130, HEADS, 8)
    yield x, torch.zeros(1, 1, 1, dtype=x.dtype).expand(x.shape)
    yield x, randn(HEADS, 130, 8).transpose(0, 1)
    yield x, torch._efficientzerotensor(x.shape, dtype=x.dtype)
    yield x.transpose(0, 1).contiguous().transpose(0, 1), torch._neg_view(randn(*x.shape))


@pytest.mark.parametrize("backend", ["tiles", "csr"])
@pytest.mark.parametrize("case", range(4))
def test_tangents_of_any_strides(backend: str, case: int) -> None:
    x, tangent = list(_plain_and_strided())[case]
    f = lambda b: lambda *x: ops.attend(GRAPHS["window"], *x, backend=b)  # noqa: E731
    others = tuple(randn(130, HEADS, 8) for _ in range(2))

    def dual(b: str) -> Any:
        with forward_ad.dual_level():
            out = f(b)(forward_ad.make_dual(x, tangent), *others)
            return forward_ad.unpack_dual(out)

    primal, moved = dual(backend)
    expected, reference = dual("edge_list")
    torch.testing.assert_close(primal, expected)
    moved, reference = (torch.zeros_like(primal) if y is None else y for y in (moved, reference))
    torch.testing.assert_close(moved + 0.0, reference + 0.0)
