"""Graph-BERT: subgraphs by intimacy, and the paper's formulas written out for one target at a time."""

from __future__ import annotations

import math

import pytest
import torch
from error_bound import error_bound
from parity import equals_formula, moved
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.models.graph.graph_bert import GraphBert, Subgraphs, intimate_subgraphs

SYSTEM = "Graph-BERT, encodings"
N, IN, DIM, HEADS, K = 12, 5, 8, 2, 4
BOUND = error_bound(2, 2 * DIM)


@pytest.fixture
def graph() -> Graph:
    """Two rings with a bridge, and a node apart."""
    edges = [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 0], [1, 2, 3, 4, 0, 6, 7, 8, 9, 10, 5, 5]]
    return graphs.from_edges(edges, N).undirected()


def intimacy(graph: Graph, alpha: float) -> Tensor:
    a = graph.dense().double()
    walk = a / a.sum(0).clamp(min=1)
    return alpha * torch.linalg.inv(torch.eye(N, dtype=torch.float64) - (1 - alpha) * walk)


def test_subgraphs_hold_the_target_and_the_most_intimate(graph: Graph) -> None:
    found = intimate_subgraphs(graph, K)
    s = intimacy(graph, 0.15)
    for i in range(N):
        target, *context = found.nodes[i].tolist()
        assert target == i
        assert i not in context
        assert len(set(context)) == K
        left = [j for j in range(N) if j not in (i, *context)]
        scores = s[i, context]
        assert (scores.diff() <= 1e-7).all(), "the most intimate first, as far as float32 tells"
        assert scores[-1] >= s[i, left].max() - 1e-7
    assert found.hops[:, 0].tolist() == [0] * N
    assert found.hops[11, 1:].tolist() == [100] * K, "nothing leads to the node apart"
    assert found.roles[1, 0] == found.roles[4, 0], "both next to the node with the bridge"


def position(number: float) -> Tensor:
    """Sines and cosines of one integer, [DIM]."""
    pairs = [(number / 10000 ** (2 * pair / DIM)) for pair in range(DIM // 2)]
    return torch.tensor([wave(angle) for angle in pairs for wave in (math.sin, math.cos)], dtype=torch.float64)


def alone(net: GraphBert, x: Tensor, subgraphs: Subgraphs, target: int) -> Tensor:
    """Logits of one target in float64."""
    along, rows = isinstance(net.residual, MessagePassing), []
    for rank, (j, role, hops) in enumerate(
        zip(subgraphs.nodes[target], subgraphs.roles[target], subgraphs.hops[target], strict=True)
    ):
        rows.append(net.embed(x[j]) + position(int(role)) + position(rank) + position(int(hops)))
    h = torch.stack(rows)
    for layer in net.layers:
        attention, update = layer.attention, layer.update
        query, key, value = (
            to(h).view(K + 1, HEADS, -1).transpose(0, 1)
            for to in (attention.to_query, attention.to_key, attention.to_value)
        )
        weights = (query @ key.transpose(1, 2) / (DIM // HEADS) ** 0.5).softmax(-1)
        message = attention.to_out((weights @ value).transpose(0, 1).reshape(K + 1, DIM))
        h = F.layer_norm(h + message, (DIM,), update.norm.weight, update.norm.bias)
        first, last = update.ffn[0], update.ffn[3]
        h = F.layer_norm(h + last(F.gelu(first(h))), (DIM,), update.ffn_norm.weight, update.ffn_norm.bias)
        h = h + (gcn(net.residual, x, subgraphs)[target] if along else net.residual(x[subgraphs.nodes[target]]))
    return net.head(h.mean(0)) + (gcn(net.residual_logits, x, subgraphs)[target] if along else 0)


def gcn(layer: MessagePassing, x: Tensor, subgraphs: Subgraphs) -> Tensor:
    """D^-1/2 (A + I) D^-1/2 x W, dense."""
    a = subgraphs.graph.dense().double()
    scale = a.sum(1).rsqrt()
    return scale[:, None] * a * scale @ layer.attention.to_value(x) + layer.attention.bias


@pytest.mark.parametrize("residual", ["raw", "graph"])
def test_equals_the_formula(graph: Graph, residual: str, measured) -> None:
    net, x = moved(GraphBert(IN, 3, DIM, HEADS, residual=residual)), torch.randn(N, IN)
    subgraphs = intimate_subgraphs(graph, K)
    equals_formula(
        net,
        lambda dtype: net(x.to(dtype), subgraphs),
        lambda: torch.stack([alone(net, x.double(), subgraphs, i) for i in range(N)]),
        lambda error: measured(SYSTEM, "formula", error, BOUND),
    )


def test_a_batch_of_targets_is_those_targets(graph: Graph) -> None:
    net, x = moved(GraphBert(IN, 3, DIM, HEADS)), torch.randn(N, IN)
    subgraphs, some = intimate_subgraphs(graph, K), torch.tensor([7, 2, 2])
    torch.testing.assert_close(net(x, subgraphs.of(some)), net(x, subgraphs)[some])


def test_refusals_name_what_does_not_fit(graph: Graph) -> None:
    with pytest.raises(ValueError, match="less than the number of nodes, 12; got 12"):
        intimate_subgraphs(graph, N)
    with pytest.raises(ValueError, match="dim must be even, because the encodings are pairs of sine and cosine; got 9"):
        GraphBert(IN, 2, 9, 3)
    with pytest.raises(ValueError, match=r"residual must be .* got 'none'"):
        GraphBert(IN, 2, DIM, HEADS, residual="none")
    found = intimate_subgraphs(graph, K)
    with pytest.raises(ValueError, match="needs the whole graph"):
        GraphBert(IN, 2, DIM, HEADS, residual="graph")(
            torch.randn(N, IN), Subgraphs(found.nodes, found.roles, found.hops)
        )
