"""A forward pass never asks the device for a number: on a GPU that would wait for all work before it.

Whatever makes Python look at a tensor goes through a few operators, which are watched for here, on CPU tensors.
"""

import pytest
import torch
from watched import Watched

from mpnn import MessagePassing, graphs
from mpnn.attention import Additive, AdditiveV2, Degree, DotProduct, Kernel, Typed
from mpnn.position import T5, ALiBi, Rotary, Shaw
from mpnn.update import FeedForward, PreNorm

N, DIM = 20, 16


def looks(call):
    """Where the second call and its backward pass look at numbers; the first makes what is kept of the graph."""
    call().sum().backward()
    with Watched() as watched:
        call().sum().backward()
    return watched.looks


def test_looking_is_noticed():
    x = torch.randn(3, requires_grad=True)
    assert looks(lambda: x * x.detach().sum().item()) != []
    assert looks(lambda: x[x > 0]) != []
    assert looks(lambda: x.relu()) == []


SEQUENCE = {"causal": graphs.causal(), "window": graphs.window(2), "windows": graphs.windows(5, 4, size=3, shift=1)}


@pytest.mark.parametrize("backend", ["edge_list", "dense"])
@pytest.mark.parametrize("topology", SEQUENCE.values(), ids=SEQUENCE)
@pytest.mark.parametrize("position", [None, Rotary(4), ALiBi(4), T5(4), Shaw(4, 3)], ids=lambda p: type(p).__name__)
@pytest.mark.covering(times=2)
def test_attention_over_sequences(topology, position, backend):
    attention = DotProduct(DIM, 4, dropout=0.1, position=position)
    layer = MessagePassing(topology, "sum", PreNorm(DIM, FeedForward(DIM), dropout=0.1), attention, backend=backend)
    x = torch.randn(2, N, DIM)
    assert looks(lambda: layer(x)) == []


@pytest.mark.parametrize(
    ("attention", "with_edges"),
    [
        (DotProduct(DIM, 4, edge_dim=3), True),
        (Additive(DIM, 4, 4, edge_dim=3, dropout=0.1), True),
        (AdditiveV2(DIM, 4, 4), False),
        (Degree(DIM, DIM), False),
        (Typed(DIM, DIM, relations=2), False),
        (Kernel(DIM, 4, features=8), False),
    ],
    ids=lambda a: type(a).__name__,
)
def test_attention_over_graphs(attention, with_edges):
    graph = graphs.from_edges(torch.randint(0, N, (2, 60)), N, edge_type=torch.arange(60) % 2)
    layer = MessagePassing(graph, "sum", None, attention, backend="edge_list")
    x, edge_attr = torch.randn(N, DIM), torch.rand(60, 3)
    assert looks(lambda: layer(x, edge_attr=edge_attr if with_edges else None)) == []


@pytest.mark.parametrize("aggregate", ["sum", "mean", "max", "min", "std", "softmax", "pna"])
def test_aggregators(aggregate):
    layer = MessagePassing(graphs.window(2), aggregate, None, None, backend="edge_list")
    x = torch.randn(N, DIM, requires_grad=True)
    assert looks(lambda: layer(x)) == []
