"""Weights of other kinds than softmax: sparsemax, entmax 1.5 and talking heads, exact, with any derivative."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import Graph, MessagePassing, explain, graphs, ops
from mpnn.aggregate import Index, segment_entmax15, segment_sparsemax
from mpnn.attention import DotProduct
from mpnn.backends import registered

GRAPHS = {
    "window": graphs.window(3).bind(11),
    "edges": graphs.from_edges(torch.randint(0, 11, (2, 60), generator=torch.Generator().manual_seed(0)), 11),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "sparsemax": {"normalize": "sparsemax"},
    "entmax15": {"normalize": "entmax15"},
    "talking heads": {"mix_logits": torch.randn(4, 4).double(), "mix_weights": torch.randn(4, 4).double()},
    "mixed sparse weights, max, dropout": {
        "normalize": "entmax15", "mix_weights": torch.randn(4, 4).double(), "reduce": "max", "dropout": 0.3,
        "softcap": 2.0,
    },
}  # fmt: skip


def by_bisection(z: Tensor, power: float) -> Tensor:
    """max(z - t, 0)^power that sums to 1 over the last dimension."""
    low, high = z.amax(-1, keepdim=True) - 1.0, z.amax(-1, keepdim=True)
    for _ in range(80):
        middle = (low + high) / 2
        above = (z - middle).clamp(min=0).pow(power).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (z - low).clamp(min=0).pow(power)


@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0, 1e4])
def test_they_sum_to_one_and_are_those_of_the_definition(scale: float) -> None:
    lengths = torch.tensor([0, 1, 2, 3, 4, 5, 7, 8, 9, 33])
    dst = torch.arange(10).repeat_interleave(lengths)
    index = Index.of(dst, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]))
    scores = scale * torch.randn(len(dst), 2, dtype=torch.float64)
    scores[-3:] = scores[-3]  # ties
    for function, power, by in ((segment_sparsemax, 1.0, 1.0), (segment_entmax15, 2.0, 0.5)):
        found = function(scores, index)
        for i in range(1, 10):
            row = by * scores[dst == i].T
            torch.testing.assert_close(found[dst == i].T, by_bisection(row, power), rtol=1e-6, atol=1e-9 * scale)
            torch.testing.assert_close(function(scores + 1e3, index), found, rtol=1e-6, atol=1e-8 * scale)
        if scale > 20:
            assert (found == 0).double().mean() > 0.5
        low = function(scores.to(torch.bfloat16), index)
        assert low.dtype == torch.bfloat16


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("on", GRAPHS)
def test_fast_rounds_are_those_of_edge_list(name: str, on: str) -> None:
    graph, options = GRAPHS[on], OPTIONS[name]
    features = [torch.randn(2, 11, heads, 3, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]

    def run(backend: str) -> list[Tensor]:
        torch.manual_seed(0)
        out, weights = ops.attend(graph, *features, backend=backend, return_weights=True, **options)
        first = torch.autograd.grad(out.sin().sum() + weights.sin().sum(), features, create_graph=True)
        return [out, weights, *first, *torch.autograd.grad(sum(x.square().sum() for x in first), features)]

    expected = run("edge_list")
    for backend in ("csr", "auto"):
        torch.testing.assert_close(run(backend), expected, rtol=1e-8, atol=1e-8)
    weights = expected[1]
    if name in ("sparsemax", "entmax15"):
        sums = torch.zeros(2, 11, 4, dtype=weights.dtype).index_add(1, graph.edge_index[1], weights)
        torch.testing.assert_close(sums[:, graph.degree() > 0], torch.ones_like(sums[:, graph.degree() > 0]))
        assert (weights == 0).any()


def test_gradients_are_exact() -> None:
    graph = GRAPHS["edges"]
    query, key, value = (torch.randn(11, 1, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    for normalize in ("sparsemax", "entmax15"):
        assert torch.autograd.gradcheck(
            lambda q, k, v, normalize=normalize: ops.attend(graph, q, k, v, normalize=normalize, scale=2.0),
            (query, key, value),
        )


def test_layers_plans_and_refusals() -> None:
    graph: Graph = graphs.from_edges(torch.randint(0, 4096, (2, 1 << 15)), 4096)
    op, x = MessagePassing(graph, "sum", None, DotProduct(64, 4, normalize="entmax15")), torch.randn(4096, 64)
    assert explain(op, x).rewrites == "logits, weights by torch, their aggregate (csr, csr)"
    query = torch.randn(4096, 4, 16)
    for backend in registered():
        if backend.NAME in ("dense", "tiles", "scan"):
            for options in ({"normalize": "sparsemax"}, {"mix_weights": torch.eye(4)}):
                with pytest.raises(ValueError, match=backend.NAME):
                    ops.attend(graphs.causal().bind(4096), query, query, query, backend=backend.NAME, **options)
    with pytest.raises(ValueError, match=r"mix_logits must be a map of the 4 heads of weighted edges, \[4, 4\]"):
        ops.attend(graph, query, query, query, mix_logits=torch.eye(3))
    with pytest.raises(ValueError, match="sinks are logits of a softmax"):
        ops.attend(graph, query, query, query, normalize="sparsemax", sinks=torch.zeros(4))
    with pytest.raises(ValueError, match="return_lse needs"):
        ops.attend(graph, query, query, query, mix_logits=torch.eye(4), return_lse=True)
