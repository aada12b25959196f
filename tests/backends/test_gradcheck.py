"""Gradients of every attention, aggregator and update against finite differences, in float64."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from mpnn import MessagePassing, attention, graphs, position
from mpnn.aggregate import NAMED, PNA, PowerMean, Softmax
from mpnn.attention import Attention
from mpnn.graph import Graph

DIM, EDGE = 4, 2


def molecule() -> Graph:
    """Six nodes, edges in no order with attributes and classes, node 4 has no in-neighbors."""
    edges = torch.tensor([[3, 0, 1, 2, 5, 0, 4, 1], [0, 1, 0, 3, 3, 2, 5, 2]])
    attr = torch.randn(8, EDGE, dtype=torch.float64)
    return graphs.from_edges(edges, 6, edge_attr=attr, edge_type=torch.tensor([0, 1, 1, 0, 2, 2, 1, 0]))


def check(op: MessagePassing, x: Tensor, *more: Tensor, source: Tensor | None = None) -> None:
    op = op.double()
    learned = [p for p in op.parameters() if p.requires_grad]
    given = [t for t in (x, source, *more) if t is not None]

    def run(*_: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same edges dropped each time
        return op(x, source=source)

    assert gradcheck(run, (*given, *learned), fast_mode=True)


def features(n: int = 6, dim: int = DIM) -> Tensor:
    return torch.randn(n, dim, dtype=torch.float64, requires_grad=True)


ATTENTIONS: dict[str, Callable[[], Attention]] = {
    "dot product": lambda: attention.DotProduct(DIM, 2),
    "grouped": lambda: attention.DotProduct(DIM, 2, kv_heads=1, bias=False),
    "edge features": lambda: attention.DotProduct(DIM, 2, edge_dim=EDGE),
    "softcap": lambda: attention.DotProduct(DIM, 2, softcap=0.5),
    "sigmoid": lambda: attention.DotProduct(DIM, 2, normalize="sigmoid"),
    "unnormalized": lambda: attention.DotProduct(DIM, 2, normalize="none"),
    "rotary": lambda: attention.DotProduct(DIM, 2, position=position.Rotary(2)),
    "alibi": lambda: attention.DotProduct(DIM, 2, position=position.ALiBi(2)),
    "shaw": lambda: attention.DotProduct(DIM, 2, position=position.Shaw(2, max_distance=2)),
    "t5": lambda: attention.DotProduct(DIM, 2, position=position.T5(2, buckets=4, max_distance=8)),
    "table": lambda: attention.DotProduct(DIM, 2, position=position.Table(2, relations=3)),
    "edge bias": lambda: attention.DotProduct(DIM, 2, position=position.EdgeBias(EDGE, 2)),
    "dropout": lambda: attention.DotProduct(DIM, 2, dropout=0.4),
    "additive": lambda: attention.Additive(DIM, 3, heads=2),
    "additive, edges, mean": lambda: attention.Additive(DIM, 3, heads=2, edge_dim=EDGE, concat=False, dropout=0.4),
    "additive v2": lambda: attention.AdditiveV2(DIM, 3, heads=2, activation=torch.tanh),
    "additive v2, edges": lambda: attention.AdditiveV2(DIM, 3, heads=2, edge_dim=EDGE, share=True, concat=False),
    "typed": lambda: attention.Typed(DIM, 3, relations=3),
}


@pytest.mark.parametrize("make", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention(make: Callable[[], Attention]) -> None:
    spec = make()
    for parameter in spec.parameters():
        nn.init.normal_(parameter, std=0.5)
    check(MessagePassing(molecule(), "sum", None, spec), features())


AGGREGATORS = {
    **{name: make() for name, make in NAMED.items()},
    "softmax, learned": Softmax(0.7, learn=True),
    "power mean, learned": PowerMean(1.7, learn=True),
    "pna, learned": PNA(["mean", Softmax(learn=True)], ["identity", "amplification"]),
}


@pytest.mark.parametrize("name", AGGREGATORS)
def test_aggregator(name: str) -> None:
    positive = (1 + torch.rand(6, DIM, dtype=torch.float64)).requires_grad_()
    check(MessagePassing(molecule(), AGGREGATORS[name], None, None), positive)


@pytest.mark.parametrize("kind", ["dot product", "edge features", "alibi", "shaw", "additive v2", "typed"])
def test_second_derivatives_through_edge_list(kind: str) -> None:
    op = MessagePassing(molecule(), "sum", None, ATTENTIONS[kind](), backend="edge_list").double()
    assert gradgradcheck(op, features(), fast_mode=True)


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "softmax", "median"])
def test_second_derivatives_of_aggregators(name: str) -> None:
    op = MessagePassing(molecule(), name, None, None, backend="edge_list")
    assert gradgradcheck(lambda x: op(x.square()), features(), fast_mode=True)
