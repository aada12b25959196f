"""PinSage: its layers are the formula, and PyTorch Geometric's weighted sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from error_bound import error_bound
from torch import Tensor
from torch.nn import functional as F

from mpnn import Graph, graphs
from mpnn.models import PinSage

pyg = pytest.importorskip("torch_geometric.nn")

SYSTEM = "link prediction, PinSage-style recommendation"
ITEMS, USERS, IN, HIDDEN, OUT = 12, 9, 5, 8, 4
BOUND = error_bound(3, 2 * HIDDEN)


@pytest.fixture
def graph() -> Graph:
    """Random-walk neighbors of items by way of users; the last item has none."""
    edges = torch.stack([torch.randint(0, USERS, (30,)), torch.randint(0, ITEMS - 1, (30,))])
    return graphs.random_walk_neighbors(graphs.from_edges(edges, num_src=USERS, num_dst=ITEMS), k=4, walks=50)


def with_sums(model: PinSage, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Algorithm 1, layer by layer, around any weighted sum over in-neighbors."""
    h = x
    for layer in model.layers:
        message, join = layer.attention.value[0], layer.update.linear
        pooled = total(F.linear(h, message.weight, message.bias).relu())
        h = F.normalize(F.linear(torch.cat([h, pooled], 1), join.weight, join.bias).relu(), dim=1)
    first, last = model.head[0], model.head[2]
    return F.linear(F.linear(h, first.weight, first.bias).relu(), last.weight)


def shares(graph: Graph) -> Tensor:
    """Visits, divided by those from the same item; edge by edge."""
    visits = graph.edge_attr.double().tolist()
    dst = graph.edge_index[1].tolist()
    return torch.tensor(
        [v / sum(w for w, j in zip(visits, dst, strict=True) if i == j) for v, i in zip(visits, dst, strict=True)]
    )


def test_layers_follow_the_formula(graph: Graph, measured: Callable[..., None]) -> None:
    model = PinSage(IN, OUT, HIDDEN)
    matrix = torch.zeros(ITEMS, ITEMS, dtype=torch.float64)
    for share, (j, i) in zip(shares(graph), graph.edge_index.T.tolist(), strict=True):
        matrix[i, j] = share
    x = torch.randn(ITEMS, IN)
    found = model(x, graph)
    exact = x.double().requires_grad_()
    expected = with_sums(model.double(), exact, lambda h: matrix @ h)
    measured(SYSTEM, "formula", (found - expected).abs().max().item(), BOUND)
    again = model(exact, graph)
    torch.testing.assert_close(again, expected, rtol=1e-6, atol=1e-6)  # shares were summed in float32
    torch.testing.assert_close(
        *(torch.autograd.grad(y.square().sum(), exact)[0] for y in (again, expected)), rtol=1e-5, atol=1e-5
    )


def test_pooling_is_the_weighted_sum_of_pyg(graph: Graph, measured: Callable[..., None]) -> None:
    model, conv = PinSage(IN, OUT, HIDDEN), pyg.SimpleConv(aggr="sum")
    x = torch.randn(ITEMS, IN)
    weight = shares(graph).float()
    expected = with_sums(model, x, lambda h: conv(h, graph.edge_index, weight))
    measured(SYSTEM, "PyTorch Geometric SimpleConv", (model(x, graph) - expected).abs().max().item(), BOUND)


def test_the_loss_is_a_hinge_over_all_that_do_not_go_with_the_query(graph: Graph) -> None:
    model, x = PinSage(IN, OUT, HIDDEN), torch.randn(ITEMS, IN)
    z = model(x, graph)
    query, good, bad = torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([[4, 5, 6], [7, 8, 9]])
    terms = [
        (z[q] @ z[n] - z[q] @ z[p] + 0.1).clamp(min=0) for q, p, row in zip(query, good, bad, strict=True) for n in row
    ]
    torch.testing.assert_close(model.loss(x, graph, query, good, bad), torch.stack(terms).mean())
    torch.testing.assert_close(model.loss(x, graph, query, good, bad[:, 0]), torch.stack([terms[0], terms[3]]).mean())


def test_an_item_without_in_neighbors_has_an_embedding_of_its_own(graph: Graph) -> None:
    assert graph.degree()[-1] == 0
    z = PinSage(IN, OUT, HIDDEN)(torch.randn(ITEMS, IN), graph)
    assert z[-1].isfinite().all()
    assert z[-1].any()
