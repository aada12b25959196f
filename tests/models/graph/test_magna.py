"""MAGNA: the diffusion of attention equals a sum over powers of its matrix, written out densely."""

from __future__ import annotations

import pytest
import torch
from error_bound import error_bound
from parity import equals_formula, moved
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, graphs
from mpnn.graph.exchange import Exchange
from mpnn.models.graph.magna import MAGNA, MagnaAttention
from mpnn.models.layers.propagation import Propagation
from mpnn.round import Round
from mpnn.scores import Dot

SYSTEM = "multi-hop attention (MAGNA)"
N, IN, DIM, HEADS, CLASSES = 17, 5, 12, 3, 4
BOUND = error_bound(2, 4 * DIM)


@pytest.fixture
def graph() -> Graph:
    """Sixty edges of three classes, repeated ones too; some nodes have no in-neighbors."""
    edges = torch.randint(0, N, (2, 60))
    edges[1] = edges[1].clamp(min=2)
    return graphs.from_edges(edges, N, edge_type=torch.randint(0, 3, (60,)))


def dense_attention(attention: MagnaAttention, h: Tensor, graph: Graph) -> Tensor:
    """One-hop attention, [H, N, N], edge by edge and row by row."""
    src, dst = graph.edge_index
    weights = []
    for head in range(HEADS):
        of = slice(head * DIM // HEADS, (head + 1) * DIM // HEADS)
        vectors = [attention.by_dst[head], attention.by_src[head]]
        ends = [h[dst] @ attention.to_dst.weight[of].T, h[src] @ attention.to_src.weight[of].T]
        if attention.relation is not None:
            ends.append(attention.relation.weight[graph.edge_type][:, of])
            vectors.append(attention.by_relation[head])
        score = F.leaky_relu(torch.cat(ends, 1).tanh() @ torch.cat(vectors), 0.2)
        a = torch.zeros(N, N, dtype=h.dtype)
        for i in range(N):
            share = score[dst == i].softmax(0)
            for j, w in zip(src[dst == i], share, strict=True):
                a[i, j] = a[i, j] + w
        weights.append(a)
    return torch.stack(weights)


def dense_model(model: MAGNA, x: Tensor, graph: Graph, hops: int, alpha: float) -> Tensor:
    """The model in plain algebra: after `hops` rounds of the iteration, sum over k of a power's weight times A^k V."""
    h = F.linear(x, model.embed.weight, model.embed.bias)
    for layer in model.layers:
        attention, update = layer.attention, layer.update
        inner = F.layer_norm(h, (DIM,), update.norm.weight, update.norm.bias)
        a = dense_attention(attention, inner, graph)
        share = [alpha * (1 - alpha) ** k for k in range(hops)] + [(1 - alpha) ** hops]
        diffused = sum(share[k] * torch.matrix_power(a, k) for k in range(hops + 1))
        value = (inner @ attention.to_value.weight.T).view(N, HEADS, -1).transpose(0, 1)
        h = h + (diffused @ value).transpose(0, 1).reshape(N, DIM) @ attention.to_out.weight.T
        first, last = update.ffn[0], update.ffn[3]
        inner = F.layer_norm(h, (DIM,), update.ffn_norm.weight, update.ffn_norm.bias)
        h = h + F.linear(F.linear(inner, first.weight, first.bias).relu(), last.weight, last.bias)
    h = F.layer_norm(h, (DIM,), model.norm.weight, model.norm.bias)
    return F.linear(h, model.head.weight, model.head.bias)


def made(**options) -> MAGNA:
    return moved(MAGNA(IN, CLASSES, DIM, HEADS, 2, **options))


@pytest.mark.parametrize("relations", [0, 3])
@pytest.mark.parametrize(("hops", "alpha"), [(1, 0.5), (4, 0.1)])
def test_equals_the_formula(graph: Graph, hops: int, alpha: float, relations: int, measured) -> None:
    model, x = made(hops=hops, alpha=alpha, relations=relations), torch.randn(N, IN)
    equals_formula(
        model,
        lambda dtype: model(x.to(dtype), graph),
        lambda: dense_model(model, x.double(), graph, hops, alpha),
        lambda error: measured(SYSTEM, "formula", error, BOUND),
    )


def test_many_hops_are_personalised_pagerank_of_attention(graph: Graph) -> None:
    """The sum without end is alpha (I - (1 - alpha) A)^-1 V."""
    attention = MagnaAttention(DIM, HEADS).double()
    layer = Propagation(graph, attention=attention, hops=400, teleport=0.1)
    h = torch.randn(N, DIM, dtype=torch.float64)
    value = attention.to_value(h).view(N, HEADS, -1).transpose(0, 1)
    spread = 0.1 * torch.linalg.inv(torch.eye(N) - 0.9 * dense_attention(attention, h, graph)) @ value
    expected = attention.to_out(spread.transpose(0, 1).reshape(N, DIM))
    torch.testing.assert_close(layer(h), expected)


def test_refusals_name_what_does_not_fit(graph: Graph) -> None:
    with pytest.raises(ValueError, match=r"has 2 edge types; .* has 3"):
        MAGNA(IN, CLASSES, DIM, HEADS, relations=2)(torch.randn(N, IN), graph)
    with pytest.raises(ValueError, match=r"has 2 edge types; .* has none"):
        MAGNA(IN, CLASSES, DIM, HEADS, relations=2)(torch.randn(4, IN), graphs.complete())


def test_hops_exchange_what_other_processes_have() -> None:
    """A part whose sources come in another order: `own` are those of its destinations."""
    own = torch.tensor([3, 0, 4, 1, 2])

    class Reordered(Exchange):
        def __call__(self, x: Tensor, dim: int = -2) -> Tensor:
            return torch.empty_like(x).index_copy(dim, own, x)

    exchange = Reordered()
    exchange.own = own
    edges = torch.randint(0, 5, (2, 12))
    whole = graphs.from_edges(edges, 5)
    part = graphs.from_edges(torch.stack([own[edges[0]], edges[1]]), 5)
    part.exchange = exchange
    query, key, value = torch.randn(3, 2, 5, HEADS, DIM)
    layer = Propagation(whole, "sum", None, None, hops=3, teleport=0.25)
    expected, _ = layer._run(Round(whole, value, Dot(query, key, 1.0)))
    key, value = exchange(key, -3), exchange(value, -3)
    found, _ = layer._run(Round(part, value, Dot(query, key, 1.0)))
    torch.testing.assert_close(found, expected)
