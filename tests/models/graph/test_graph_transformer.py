"""Graph Transformer: edges that weigh scores follow the formula."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from parity import drawn
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.models.graph.graph_transformer import EdgeScaled, GraphTransformer

SYSTEM = "Graph Transformer (1 hop, edge features)"
N, IN, EDGE, HIDDEN, HEADS, CLASSES = 11, 5, 3, 4, 2, 3


@pytest.fixture
def graph() -> Graph:
    """Thirty edges with attributes, repeated ones and loops too; nodes 0 and 1 have no in-neighbors."""
    edges = torch.randint(0, N, (2, 30))
    edges[1] = edges[1].clamp(min=2)
    return graphs.from_edges(edges, N, edge_attr=torch.randn(30, EDGE))


def formula(op: MessagePassing, x: Tensor, graph: Graph, attr: Tensor) -> Tensor:
    """What the docstring of `EdgeScaled` says, edge by edge."""
    spec, (src, dst) = op.attention, graph.edge_index
    query, key, value = (
        F.linear(x, to.weight, to.bias).view(N, HEADS, -1) for to in (spec.to_query, spec.to_key, spec.to_value)
    )
    edge = F.linear(attr, spec.to_edge.weight).view(-1, HEADS, HIDDEN)
    out = torch.zeros(N, HEADS, HIDDEN, dtype=x.dtype)
    for i in range(N):
        for h in range(HEADS):
            edges_in = (dst == i).nonzero().squeeze(1).tolist()
            if edges_in:
                scores = torch.stack(
                    [(query[i, h] * key[src[e], h] * edge[e, h]).sum() / HIDDEN**0.5 for e in edges_in]
                )
                out[i, h] = sum(w * value[src[e], h] for w, e in zip(scores.softmax(0), edges_in, strict=True))
    return out.flatten(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_edges_that_weigh_scores_follow_the_formula(
    graph: Graph, measured: Callable[..., None], dtype: torch.dtype
) -> None:
    op = drawn(MessagePassing(None, "sum", None, EdgeScaled(IN, HIDDEN, HEADS, edge_dim=EDGE)), std=0.5).to(dtype)
    x, attr = torch.randn(N, IN, dtype=dtype, requires_grad=True), graph.edge_attr.to(dtype).requires_grad_()
    found, expected = op(x, graph, edge_attr=attr), formula(op.double(), x.double(), graph, attr.double())
    error = (found - expected).abs().max().item()
    measured(SYSTEM, "formula", error, error_bound(2, HIDDEN * HEADS, dtype))
    if dtype == torch.float64:
        for a, b in zip(
            torch.autograd.grad(found.square().sum(), [x, attr]),
            torch.autograd.grad(expected.square().sum(), [x, attr]),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_any_topology_will_do_where_edges_bring_nothing() -> None:
    model = drawn(GraphTransformer(IN, CLASSES, graph=graphs.window(2)))
    x = torch.randn(N, IN)
    torch.testing.assert_close(model(x), model(x, graphs.from_edges(graphs.window(2).bind(N).edge_index, N)))


def test_loss_is_cross_entropy_of_the_chosen_nodes(graph: Graph) -> None:
    model = drawn(GraphTransformer(IN, CLASSES, edge_dim=EDGE))
    x, target, mask = torch.randn(N, IN), torch.randint(0, CLASSES, (N,)), torch.arange(N) < 4
    torch.testing.assert_close(model.loss(x, target, mask, graph), F.cross_entropy(model(x, graph)[:4], target[:4]))
    torch.testing.assert_close(model.loss(x, target, graph=graph), F.cross_entropy(model(x, graph), target))


def test_what_does_not_fit_is_refused(graph: Graph) -> None:
    with pytest.raises(ValueError, match="edges must be 'add' or 'weigh'; got 'multiply'"):
        GraphTransformer(IN, CLASSES, edges="multiply")
    with pytest.raises(ValueError, match="EdgeScaled needs edge_dim"):
        GraphTransformer(IN, CLASSES, edges="weigh")(torch.randn(N, IN), graph)
