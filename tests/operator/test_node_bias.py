"""Biases of nodes and softmax over destinations against naive formulas, and the systems that they make."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, engine, graphs, ops
from mpnn.attention import Attention, DotProduct
from mpnn.attention.parts import check_divisible
from mpnn.decoding.cache import KVCache
from mpnn.engine.choice import choose
from mpnn.engine.rewrites import softmax_dst
from mpnn.graph.exchange import Exchange, Layer
from mpnn.models.layers.propagation import Propagation
from mpnn.ops import NodeBias
from mpnn.round import Round
from mpnn.scores import Dot

BACKENDS = ("edge_list", "dense", "tiles", "csr")
HEADS, WIDTH = 4, 8
GRAPHS = {
    "causal": graphs.causal().bind(37),
    "window over more sources": graphs.window(9).bind(40).rows(7, 40),
    "longformer": graphs.longformer(6, globals=2).bind(131),
    "documents": graphs.documents([5, 40, 7]).bind(52),
}


def leaves(graph: Graph, *batch: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """query, key, value and the biases of destinations and of sources."""
    torch.manual_seed(0)
    m, n = graph.num_dst, graph.num_src
    shapes = [(m, HEADS, WIDTH), (n, 2, WIDTH), (n, 2, 5), (m, HEADS), (n, HEADS)]
    return [torch.randn(*batch, *shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def naive(graph: Graph, q: Tensor, k: Tensor, v: Tensor, dst: Tensor, src: Tensor, normalize: str) -> Tensor:
    """The formula over all pairs."""
    k, v = (x.repeat_interleave(HEADS // 2, -2) for x in (k, v))
    logits = torch.einsum("...ihd,...jhd->...hij", q, k) * WIDTH**-0.5
    logits = logits + dst.mT[..., None] + src.mT[..., None, :]
    edges = graph.dense()
    if normalize.startswith("softmax"):
        axis = -2 if normalize == "softmax_dst" else -1
        weights = logits.masked_fill(~edges, -torch.inf).softmax(axis).nan_to_num(0.0)
    else:
        weights = (logits.sigmoid() if normalize == "sigmoid" else logits).masked_fill(~edges, 0.0)
    return torch.einsum("...hij,...jhd->...ihd", weights, v)


def assert_equal(found: Tensor, right: Tensor, inputs: list[Tensor]) -> None:
    """Values and gradients to 1e-10."""
    direction = torch.randn_like(right)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    results = [torch.autograd.grad((x * direction).sum(), inputs) for x in (found, right)]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("normalize", ["softmax", "softmax_dst", "sigmoid", "none"])
@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.covering(times=2)
def test_the_formula_over_all_pairs(name: str, backend: str, normalize: str) -> None:
    if backend == "tiles" and not normalize.startswith("softmax"):
        pytest.skip("tiles normalize by softmax")
    graph = GRAPHS[name]
    inputs = leaves(graph, 2)
    q, k, v, dst, src = inputs
    out = ops.attend(graph, q, k, v, bias=NodeBias(dst, src), normalize=normalize, backend=backend)
    assert_equal(out, naive(graph, *inputs, normalize), inputs)


@pytest.mark.parametrize("backend", ["edge_list", "tiles", "csr"])
def test_lse_and_its_gradients(backend: str) -> None:
    graph = GRAPHS["causal"]
    q, k, v, dst, src = leaves(graph)
    _, lse = ops.attend(graph, q, k, v, bias=NodeBias(dst, src), return_lse=True, backend=backend)
    logits = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(2, -2)) * WIDTH**-0.5 + dst.T[..., None]
    logits = logits + src.T[:, None]
    assert_equal(lse, logits.masked_fill(~graph.dense(), -torch.inf).logsumexp(-1).T, [q, k, dst, src])


@pytest.mark.parametrize("backend", BACKENDS)
def test_sums_of_large_numbers_keep_their_digits(backend: str) -> None:
    """The running sums of gates differ by little between neighbors, and from 0 by 1e4."""
    graph = (graphs.causal() & graphs.window(30)).bind(150)
    q, k, v, dst, _ = leaves(graph, dtype=torch.float32)
    running = (8192 + torch.rand(150, HEADS).cumsum(0)).requires_grad_()
    exact = [x.detach().double().requires_grad_() for x in (q, k, v, running)]
    right = naive(graph, *exact, -exact[3], "softmax")
    out = ops.attend(graph, q, k, v, bias=NodeBias(running, -running), backend=backend)
    # logits of size 10 are rounded to 2^-21; if one number was added to them alone, to 2^-10
    torch.testing.assert_close(out.double(), right, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(
        torch.autograd.grad(out.sum(), (q, k, v, running)), torch.autograd.grad(right.sum(), exact), strict=True
    ):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)
    for size in (0.0, 1e4):  # the softmax over destinations takes a large lse away again
        w = ops.attend(graph, q, k, torch.ones_like(v), bias=NodeBias(dst + size), normalize="softmax_dst",
                       backend=backend)  # fmt: skip
        torch.testing.assert_close(w.sum(0), torch.full((HEADS, 5), 150.0), rtol=1e-4 if not size else 2e-3, atol=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_features_take_wide_biases(backend: str, dtype: torch.dtype) -> None:
    graph = GRAPHS["documents"]
    inputs = [x.detach() for x in leaves(graph, dtype=dtype)[:3]]
    large = torch.arange(52.0)[:, None] / 16 + 4000  # bfloat16 knows multiples of 16 there
    for normalize in ("softmax", "softmax_dst"):
        out = ops.attend(graph, *inputs, bias=NodeBias(large, -large), normalize=normalize, backend=backend)
        wide = (x.double() for x in inputs)
        right = naive(graph, *wide, large.expand(-1, HEADS).double(), -large.expand(-1, HEADS).double(), normalize)
        torch.testing.assert_close(out.double(), right, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_source_gives_all_its_weight(backend: str) -> None:
    graph = graphs.window(4).bind(40)
    q, k, _, _, _ = leaves(graph)
    w = ops.attend(graph, q, k, torch.eye(40, dtype=torch.float64)[:, None], normalize="softmax_dst", backend=backend)
    torch.testing.assert_close(w.sum(0), torch.ones(HEADS, 40, dtype=torch.float64))


@pytest.mark.parametrize("size", [1e3, 1e5, 1e8, 1e12, 1e30])
@pytest.mark.parametrize("of", ["destinations", "sources", "edges", "products"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.covering
def test_every_source_gives_all_its_weight_for_any_logits(backend: str, of: str, size: float) -> None:
    graph = GRAPHS["longformer"]
    q, k, v, dst, src = (x.detach() for x in leaves(graph, dtype=torch.float32))
    if of == "products":
        q = q * min(size, 1e8)
    biases = {
        "destinations": NodeBias(dst=dst * size, src=src),
        "sources": NodeBias(dst=dst, src=src * size),
        "edges": torch.randn(graph.num_edges, HEADS) * size,
    }
    sums = ops.attend(
        graph, q, k, torch.ones_like(v), bias=biases.get(of), normalize="softmax_dst", backend=backend
    ).sum(0)
    torch.testing.assert_close(sums, torch.full((HEADS, 5), 131.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("backend", ["csr", "tiles"])
def test_the_sums_of_rounded_weights_have_gradients(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_dst, "_ROUNDED", -1.0)
    for graph in GRAPHS.values():
        inputs = leaves(graph, 2)
        q, k, v, dst, src = inputs
        of_edges = torch.randn(graph.num_edges, HEADS, dtype=torch.float64)
        bias = NodeBias(dst, src), of_edges
        expected = ops.attend(graph, q, k, v, bias=bias, normalize="softmax_dst", backend="edge_list")
        found = ops.attend(graph, q, k, v, bias=bias, normalize="softmax_dst", backend=backend)
        assert_equal(found, expected, inputs)


@pytest.mark.parametrize("backend", ["csr", "tiles"])
def test_a_softmax_over_destinations_is_priced_as_two_passes(backend: str) -> None:
    q, k, v, *_ = (x.detach() for x in leaves(GRAPHS["causal"]))
    once = choose(Round(GRAPHS["causal"], v, Dot(q, k, 0.3)), backend, estimated=True).estimate
    both = choose(Round(GRAPHS["causal"], v, Dot(q, k, 0.3), normalize="softmax_dst"), backend, estimated=True).estimate
    assert once is not None
    assert both is not None
    assert 1.5 * once.seconds < both.seconds < 2.5 * once.seconds


def test_rounded_weights_and_data_of_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax_dst, "_ROUNDED", -1.0)
    graph = GRAPHS["longformer"]
    q, k, v, _, _ = leaves(graph)
    added = torch.randn(graph.num_edges, 1, 5, dtype=torch.float64)
    round = Round(graph, v, Dot(q, k, 0.3), edge_value=added, normalize="softmax_dst", return_weights=True)
    for which in (0, 1):  # the results, and the weights
        found, expected = (engine.run(round, backend)[which] for backend in ("csr", "edge_list"))
        assert found is not None
        assert expected is not None
        assert_equal(found, expected, [q, k])


def test_a_source_masked_by_its_bias_weighs_nothing() -> None:
    graph = GRAPHS["causal"]
    q, k, v, dst, src = leaves(graph)
    hidden = src.detach().clone()
    hidden[[0, 5]] = -torch.inf
    for normalize in ("softmax", "softmax_dst"):
        for backend in BACKENDS:
            bias = NodeBias(dst, hidden.requires_grad_())
            out = ops.attend(graph, q, k, v, bias=bias, normalize=normalize, backend=backend)
            torch.testing.assert_close(out, naive(graph, q, k, v, dst, hidden, normalize))
            assert all(g[1:].isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v, dst)))


# ---------------------------------------------------------------------------------------- where they are used


class Gated(Attention):
    """A layer with biases of nodes: an attention as users write it."""

    depends_on = "node"

    def __init__(self, dim: int, normalize: str = "softmax") -> None:
        super().__init__()
        self.to_logits, self.normalize = nn.Linear(dim, 2), normalize

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        q, k = dst.unflatten(-1, (2, -1)), src.unflatten(-1, (2, -1))
        return Round(graph, k, Dot(q, k, 0.5), bias=(NodeBias(self.to_logits(dst), self.to_logits(src)),))


@pytest.mark.parametrize("normalize", ["softmax", "softmax_dst"])
def test_a_compiled_layer_gives_the_numbers_of_an_eager_one(normalize: str) -> None:
    torch._dynamo.reset()
    op, x = MessagePassing(graphs.window(3), "sum", None, Gated(8, normalize)), torch.randn(2, 12, 8)
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    results = [torch.autograd.grad(f(x).square().sum(), list(op.parameters())) for f in (compiled, op)]
    torch.testing.assert_close(compiled(x), op(x))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("normalize", ["softmax", "softmax_dst"])
def test_hops_apply_biases_once(normalize: str) -> None:
    x = torch.randn(12, 8, dtype=torch.float64)
    one = MessagePassing(graphs.window(3), "sum", None, Gated(8, normalize)).double()
    two = Propagation(graphs.window(3), "sum", None, one.attention, hops=2)
    _, weights = one(x, return_weights=True)
    src, dst = graphs.window(3).bind(12).edge_index
    w = torch.zeros(2, 12, 12, dtype=torch.float64).index_put((torch.arange(2)[:, None], dst, src), weights.T)
    right = (w @ w @ x.unflatten(-1, (2, -1)).transpose(0, 1)).transpose(0, 1).flatten(1)
    torch.testing.assert_close(two(x), right)


def test_several_biases_add_up() -> None:
    graph = GRAPHS["causal"]
    q, k, v, dst, src = leaves(graph)
    per_edge = torch.randn(graph.num_edges, HEADS, dtype=torch.float64)
    parts = Round(graph, v, Dot(q, k, 1.0), bias=(NodeBias(dst), per_edge, NodeBias(dst, src)))
    joined = Round(graph, v, Dot(q, k, 1.0), bias=(per_edge,), dst_bias=2 * dst, src_bias=src)
    assert parts.bias == (per_edge,)
    shared = Round(graph, v, Dot(q, k, 1.0), bias=(NodeBias(dst), NodeBias(dst[:, :1])))
    assert shared.dst_bias.equal(dst + dst[:, :1])
    torch.testing.assert_close(engine.run(parts)[0], engine.run(joined)[0])


def test_refusals() -> None:
    graph = GRAPHS["causal"]
    q, k, v, dst, src = leaves(graph)

    def attend(**options: Any) -> Any:
        return ops.attend(graph, q, k, v, **options)

    for bias, sentence in (
        (NodeBias(dst[1:]), r"dst_bias has 36 nodes .* has 37 destinations"),
        (NodeBias(src=src[..., :3]), "src_bias has 3 heads, and the score has 4"),
        (NodeBias(src=src[:, 0]), r"src_bias must have shape \[..., N, H\]"),
        (NodeBias(src=src.expand(2, -1, -1)), "must have the same batch dimensions"),
    ):
        with pytest.raises(ValueError, match=sentence):
            attend(bias=bias)
    for other in (dst[:1], dst[0], dst[..., :3], dst[None], dst[0, 0], 3.0):
        for pair in ((dst, other), (other, dst)):
            with pytest.raises(ValueError, match=r"dst_bias of all biases must have shape .* got .*\[37, 4\]"):
                attend(bias=tuple(map(NodeBias, pair)))
    with pytest.raises(ValueError, match=r"dst_bias of all biases must have shape .* got \[37, 2\] and \[37, 3\]"):
        attend(bias=(NodeBias(dst[:, :2]), NodeBias(dst[:, :3])))
    one = attend(bias=NodeBias(dst + dst[:, :1]))
    for pair in ((dst, dst[:, :1]), (dst[:, :1], dst)):  # a bias of all heads beside one of each
        torch.testing.assert_close(attend(bias=tuple(map(NodeBias, pair))), one)
    with pytest.raises(TypeError, match="src_bias must be floating point"):
        attend(bias=NodeBias(src=src > 0))
    with pytest.raises(ValueError, match="log_gate, beta and states go with sums"):
        attend(bias=NodeBias(dst), log_gate=torch.zeros(37, HEADS), normalize="none")
    for option in ({"return_lse": True}, {"sinks": torch.zeros(HEADS, dtype=torch.float64)}):
        with pytest.raises(ValueError, match="softmax"):
            attend(normalize="softmax_dst", **option)
    with pytest.raises(ValueError, match="'scan' cannot run this: it does not add biases of nodes"):
        attend(bias=NodeBias(dst), normalize="none", backend="scan")

    over_destinations = DotProduct(8, 2, normalize="softmax_dst")
    with pytest.raises(ValueError, match='divided over processes; take transport="heads"'):
        check_divisible(Layer(over_destinations, "sum", False, False, False), Exchange())
    layer = MessagePassing(graphs.causal(), "sum", None, over_destinations)
    with pytest.raises(ValueError, match="a node depends on later ones"):
        layer(torch.randn(3, 8), cache=KVCache(5))


def test_an_unweighted_round_has_nothing_to_normalize() -> None:
    plain = Round(GRAPHS["causal"], torch.randn(37, 2, 4), normalize="softmax_dst")
    for backend in ("edge_list", "csr"):
        torch.testing.assert_close(
            engine.run(plain, backend)[0], engine.run(replace(plain, normalize="softmax"), backend)[0]
        )


# ---------------------------------------------------------------------------------------- systems

Measured = Callable[[str, str, float, float], None]
SYSTEMS = "slot attention, Sinkhorn attention, forgetting transformer"


def largest(found: Tensor, right: Tensor, inputs: list[Tensor]) -> float:
    """The largest difference of values and of gradients."""
    direction = torch.randn_like(right)
    ours, theirs = (torch.autograd.grad((x * direction).sum(), inputs, retain_graph=True) for x in (found, right))
    pairs = [(found, right), *zip(ours, theirs, strict=True)]
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slot_attention(backend: str, measured: Measured) -> None:
    """Locatello et al. 2020, algorithm 1: slots compete for inputs."""
    inputs, start, dim = torch.randn(2, 50, 16).double(), torch.randn(2, 5, 16).double(), 16
    inputs.requires_grad_()
    to_q, to_k, to_v = (nn.Linear(dim, dim, bias=False).double() for _ in range(3))
    cell, norm = nn.GRUCell(dim, dim).double(), nn.LayerNorm(dim).double()
    mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim)).double()

    def step(slots: Tensor, mean: Callable[[Tensor], Tensor]) -> Tensor:
        update = mean(to_q(norm(slots)))
        slots = cell(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        return slots + mlp(slots)

    key, value = to_k(inputs), to_v(inputs)
    graph = graphs.complete().bind(5, 50)
    with_one = F.pad(value, (0, 1), value=1.0)

    def ours(query: Tensor) -> Tensor:
        q, k, v = (x.unsqueeze(-2) for x in (query, key, with_one))
        sums = ops.attend(graph, q, k, v, normalize="softmax_dst", backend=backend).squeeze(-2)
        sums = sums + 1e-8 * with_one.sum(1, keepdim=True)
        return sums[..., :-1] / sums[..., -1:]

    def formula(query: Tensor) -> Tensor:
        weights = (key @ query.mT * dim**-0.5).softmax(-1) + 1e-8  # [B, inputs, slots]
        return (weights / weights.sum(1, keepdim=True)).mT @ value

    found = right = start
    for _ in range(3):
        found, right = step(found, ours), step(right, formula)
    error = largest(found, right, [inputs, *to_q.parameters(), *to_k.parameters(), *cell.parameters()])
    measured(SYSTEMS, "slot attention, formula", error, 1e-10)


@pytest.mark.parametrize("backend", ["edge_list", "tiles", "csr"])
def test_sinkhorn_attention(backend: str, measured: Measured) -> None:
    """Sander et al. 2022 (Sinkformers): rows and columns are normalized in turn; each is a bias of nodes."""
    graph = graphs.window(6).bind(40)
    q, k, v = inputs = [torch.randn(40, 2, 8).double().requires_grad_() for _ in range(3)]
    back = graph.reverse()
    of_src = torch.zeros(40, 2, dtype=torch.float64)
    for _ in range(4):
        of_dst = -ops.attend(graph, q, k, v, bias=NodeBias(src=of_src), return_lse=True, backend=backend)[1]
        of_src = -ops.attend(back, k, q, v, bias=NodeBias(src=of_dst), return_lse=True, backend=backend)[1]
    out = ops.attend(graph, q, k, v, bias=NodeBias(src=of_src), backend=backend)
    weights = (torch.einsum("ihd,jhd->hij", q, k) * 8**-0.5).exp() * graph.dense()
    for _ in range(4):
        weights = weights / weights.sum(-1, keepdim=True)
        weights = weights / weights.sum(-2, keepdim=True)
    weights = weights / weights.sum(-1, keepdim=True)
    error = largest(out, torch.einsum("hij,jhd->ihd", weights, v), inputs)
    measured(SYSTEMS, "Sinkhorn attention, formula", error, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forgetting_transformer(backend: str, measured: Measured) -> None:
    """Lin et al. 2025: logits less by what was forgotten between two tokens, documents apart."""
    graph = (graphs.causal() & graphs.documents([30, 45])).bind(75)
    q, k, v = (torch.randn(2, 75, 2, 8).double().requires_grad_() for _ in range(3))
    gate = torch.randn(2, 75, 2).double().requires_grad_()
    running = F.logsigmoid(gate).cumsum(-2)
    out = ops.attend(graph, q, k, v, bias=NodeBias(running, -running), backend=backend)
    forgotten = torch.zeros(2, 2, 75, 75, dtype=torch.float64)
    for i in range(75):
        for j in range(i + 1):
            forgotten[:, :, i, j] = F.logsigmoid(gate[:, j + 1 : i + 1]).sum(1)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * 8**-0.5 + forgotten
    weights = logits.masked_fill(~graph.dense(), -torch.inf).softmax(-1)
    error = largest(out, torch.einsum("bhij,bjhd->bihd", weights, v), [q, k, v, gate])
    measured(SYSTEMS, "forgetting transformer, formula", error, 1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_as_a_number_of_keys(backend: str) -> None:
    """0 for tokens and -inf for padding, as torch's float `key_padding_mask`."""
    mha = nn.MultiheadAttention(16, 4, batch_first=True).double().eval()
    x = torch.randn(3, 20, 16, dtype=torch.float64)
    padding = torch.zeros(3, 20, dtype=torch.float64)
    padding[1, 15:], padding[2, 3:] = -torch.inf, -1e4
    right, _ = mha(x, x, x, key_padding_mask=padding)
    q, k, v = (y.unflatten(-1, (4, 4)) for y in F.linear(x, mha.in_proj_weight, mha.in_proj_bias).chunk(3, -1))
    out = ops.attend(graphs.complete().bind(20), q, k, v, bias=NodeBias(src=padding[..., None]), backend=backend)
    torch.testing.assert_close(mha.out_proj(out.flatten(-2)), right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", ["edge_list", "dense", "csr", "tiles"])
def test_views_with_a_pending_negation(backend: str) -> None:
    """torch negates such views when they are read; kernels read memory."""
    graph = graphs.causal().bind(6)
    query, key, value = (torch.randn(6, 1, 8) for _ in range(3))
    for sizes in ((graph.num_edges,), (6, 6)):
        plain = [torch.randn(n, 1) for n in sizes]
        found, expected = (
            ops.attend(graph, query, key, value, bias=x[0] if len(x) == 1 else NodeBias(*x), backend=backend)
            for x in ([torch._neg_view(-x) for x in plain], plain)
        )
        torch.testing.assert_close(found, expected)
