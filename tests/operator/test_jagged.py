"""Jagged tensors: each sequence by itself gives the same, and the result is jagged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, Topology, graphs, ops
from mpnn.attention import DotProduct
from mpnn.update import PreNorm

LENGTHS = [5, 1, 0, 12]
TOPOLOGIES: dict[str, Topology] = {
    "complete": graphs.complete(),
    "causal window": graphs.causal() & graphs.window(3),
    "prefix": graphs.prefix(4),
    "bigbird": graphs.bigbird(block=2, window=1, random=1, globals=1),
}


def jagged(*shape: int, lengths: list[int] = LENGTHS, offsets: Tensor | None = None) -> Tensor:
    values = torch.randn(sum(lengths), *shape, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]) if offsets is None else offsets
    x = torch.nested.nested_tensor_from_jagged(values, ends)
    x.leaf = values  # which values() is a view of
    return x


def sequences(x: Tensor, lengths: list[int] = LENGTHS) -> tuple[Tensor, ...]:
    return x.leaf.split(lengths)  # type: ignore[attr-defined]


def assert_same(found: Tensor, expected: list[Tensor], *inputs: Tensor) -> None:
    """`inputs` are values."""
    right = torch.cat(expected)
    torch.testing.assert_close(found.values(), right)
    direction = torch.randn_like(right)
    gradients = (torch.autograd.grad((y * direction).sum(), inputs, retain_graph=True) for y in (found.values(), right))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_attend(name: str) -> None:
    torch.manual_seed(0)
    topology, query = TOPOLOGIES[name], jagged(4, 8)
    key, value = (jagged(2, width, offsets=query.offsets()) for width in (8, 6))
    out, lse = ops.attend(topology, query, key, value, softcap=3.0, return_lse=True)
    alone = [
        ops.attend(topology.bind(len(q)), q, k, v, softcap=3.0, return_lse=True)
        for q, k, v in zip(*map(sequences, (query, key, value)), strict=True)
    ]
    assert_same(out, [y for y, _ in alone], *(x.leaf for x in (query, key, value)))
    torch.testing.assert_close(lse.values(), torch.cat([x for _, x in alone]))
    assert out.shape[:3] == query.shape[:3]  # the same jagged dimension,
    (out + jagged(4, 6, offsets=query.offsets())).values()  # so that sums are defined
    whole = graphs.documents(LENGTHS, inner=topology).bind(sum(LENGTHS))
    torch.testing.assert_close(ops.attend(whole, query, key, value, softcap=3.0).values(), out.values())


def test_attend_over_other_sequences() -> None:
    torch.manual_seed(0)
    lengths = [3, 4, 2, 0]
    query, memory = jagged(2, 8), jagged(2, 8, lengths=lengths)
    out = ops.attend(graphs.complete(), query, memory, memory)
    pairs = zip(sequences(query), sequences(memory, lengths), strict=True)
    expected = [ops.attend(graphs.complete().bind(len(q), len(m)), q, m, m) for q, m in pairs]
    assert_same(out, expected, query.leaf, memory.leaf)
    with pytest.raises(ValueError, match="compares positions, which a document of 5 destinations and 3 sources"):
        ops.attend(graphs.causal(), query, memory, memory)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's, while it traces
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_message_passing(name: str) -> None:
    torch.manual_seed(0)
    layer = MessagePassing(TOPOLOGIES[name], "sum", PreNorm(16, nn.Linear(16, 16)), DotProduct(16, 4)).double()
    x = jagged(16)
    y = layer(x)
    assert_same(y, [layer(part) for part in sequences(x)], x.leaf, *layer.parameters())
    assert (y + x).shape == x.shape
    assert torch.equal(layer(x, graph=graphs.identity()).values(), layer(x.values(), graph=graphs.identity()))
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x).values(), y.values())


def test_aggregate() -> None:
    x = jagged(3)
    found = ops.aggregate(graphs.causal(), x, "mean")
    assert_same(found, [ops.aggregate(graphs.causal().bind(len(p)), p, "mean") for p in sequences(x)], x.leaf)


def test_other_sequences_change_nothing() -> None:
    x = jagged(2, 8).detach()
    before = ops.attend(graphs.causal(), x, x, x)
    x.values()[6:] = torch.nan
    after = ops.attend(graphs.causal(), x, x, x)
    assert torch.equal(before.values()[:6], after.values()[:6])


def narrowed() -> Tensor:
    one = torch.ones(2, dtype=torch.int64)
    return torch.nested.narrow(torch.zeros(2, 5, 3), 1, one, one, layout=torch.jagged)


ERRORS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "transposed": (lambda x: ops.attend(graphs.causal(), *[x.transpose(1, 2)] * 3), "must be the second"),
    "of two kinds": (lambda x: ops.attend(graphs.causal(), x, x.values(), x.values()), "bind it first"),
    "another graph": (lambda x: ops.attend(graphs.causal().bind(4), x, x, x), "but Graph.* has 4 sources"),
    "a source": (
        lambda x: MessagePassing(graphs.complete())(jagged(4), source=torch.zeros(3, 4)),
        "all features must be jagged",
    ),
    "a gap": (lambda x: ops.aggregate(graphs.causal(), narrowed()), r"which was narrowed: call .contiguous\(\)"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    with pytest.raises((ValueError, TypeError), match=ERRORS[name][1]):
        ERRORS[name][0](jagged(2, 8))
