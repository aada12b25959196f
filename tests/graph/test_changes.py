"""What graphs, topologies and positions keep, after what it was made from has changed: the same as if it were new."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from mpnn import MessagePassing, Topology, graphs, ops
from mpnn.attention import Additive, Degree, DotProduct, Kernel, Typed
from mpnn.backends import BACKENDS, csr, dense, edge_list
from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Flipped, Offset, Relation, Table
from mpnn.models import Graphormer
from mpnn.position import T5, ALiBi, Rotary
from mpnn.update import FeedForward, PostNorm, PreNorm

N, DIM, HEADS = 12, 16, 2
X = torch.randn(N, DIM, generator=torch.Generator().manual_seed(0))
EDGES = torch.randint(N, (2, 40), generator=torch.Generator().manual_seed(1))


def edges(**data: Any) -> Graph:
    return graphs.from_edges(EDGES, N, **data)


def attend(graph: Graph, backend: str = "auto", **options: Any) -> Tensor:
    x = X.view(N, HEADS, -1)
    return ops.attend(graph, x, x, x, backend=backend, **options)


# ---------------------------------------------------------------------------------------- attributes of graphs

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "rotary": lambda: MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=Rotary(8))),
    "ALiBi": lambda: MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=ALiBi(HEADS))),
    "T5": lambda: MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=T5(HEADS))),
    "edges": lambda: MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, edge_dim=3)),
    "types": lambda: MessagePassing(None, "sum", None, Typed(DIM, DIM, 4)),
    "degrees": lambda: MessagePassing(None, "sum", None, Degree(DIM, DIM)),
}
CHANGES: dict[str, Callable[[], Any]] = {
    "positions": lambda: (torch.arange(N) * 3, torch.arange(N) * 2),
    "edge_attr": lambda: torch.randn(40, 3),
    "relation": lambda: Offset(1),
    "shift": lambda: 2,
    "degrees": lambda: (torch.arange(N) + 1.0, torch.arange(N) + 2.0),
}


@pytest.mark.parametrize("attribute", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_an_attribute_that_is_set_counts_in_the_next_call(name: str, attribute: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().eval()
    weights = torch.ones(40) if name == "degrees" else torch.ones(40, 3)
    for make in (lambda: edges(edge_attr=weights), lambda: graphs.window(3).bind(N).alias()):
        used, fresh = make(), make()
        if used.edge_attr is None and "edge" in name + attribute:
            continue
        for graph in (used, fresh):
            graph.relation = Offset(1 if name == "types" else 2)
        layer(X, used)
        value = CHANGES[attribute]()
        if name == "degrees" and attribute == "edge_attr":
            value = value[:, 0].abs()
        for graph in (used, fresh):
            setattr(graph, attribute, value)
        torch.testing.assert_close(layer(X, used), layer(X, fresh), rtol=0, atol=0)


def test_sorted_edges_stay_when_attributes_change() -> None:
    graph = edges(edge_attr=torch.ones(40, 3))
    rows = graph.csr
    graph.edge_attr = torch.zeros(40, 3)
    assert graph.csr is rows


def test_what_graphs_are_made_from_may_be_written_to() -> None:
    positions = torch.arange(N)
    classes = torch.zeros(N, N, dtype=torch.int64)
    table = BiasTable(torch.tensor([[0.0], [9.0]]), Table(classes + torch.eye(N, dtype=torch.int64)))
    held = BiasTable(table.table, Table(classes))
    layer = MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=Rotary(8)))
    for graph in (edges(), graphs.window(2).bind(N)):
        placed = graph.with_positions(positions, positions)
        before = layer(X, placed), attend(graph, bias=held)
        positions.mul_(7)
        classes.fill_(1 << 40)
        assert layer(X, placed).equal(before[0])
        assert attend(graph.alias(), bias=held).equal(before[1])
        positions.copy_(torch.arange(N))
        classes.zero_()


# ---------------------------------------------------------------------------------------- rules for edge types


class Learned(Relation):
    """A rule that somebody writes, which reads a tensor."""

    count = 3

    def __init__(self, of_node: Tensor) -> None:
        self.of_node = of_node

    def ids(self, dst: Tensor, src: Tensor) -> Tensor:
        return (self.of_node[dst] + self.of_node[src]) % self.count


RULES: dict[str, tuple[Callable[[], Any], Callable[[Any], Tensor]]] = {
    "of a user": (lambda: Learned(torch.arange(N)), lambda rule: rule.of_node),
    "a matrix": (lambda: Table(torch.arange(N * N).view(N, N) % 3), lambda rule: rule.classes),
    "reversed": (lambda: Flipped(Table(torch.arange(N * N).view(N, N) % 3)), lambda rule: rule.inner.classes),
}


@pytest.mark.parametrize("backend", ["auto", *(b.NAME for b in BACKENDS if b in (csr, dense, edge_list))])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_is_asked_again_when_what_it_reads_has_changed(name: str, backend: str) -> None:
    make, read = RULES[name]
    numbers = torch.randn(3, HEADS, requires_grad=True)
    for graph in (edges(), graphs.window(3).bind(N)):
        if backend == "dense" and graph.is_explicit:
            continue
        used, fresh = make(), make()
        attend(graph, backend, bias=BiasTable(numbers, used)).sum().backward()
        for rule in (used, fresh):
            read(rule).copy_(read(rule).roll(1, -1))
        pair = [attend(graph, backend, bias=BiasTable(numbers, rule)) for rule in (used, fresh)]
        assert pair[0].equal(pair[1])
        grads = [torch.autograd.grad(out.square().sum(), numbers)[0] for out in pair]
        assert grads[0].equal(grads[1])


def test_types_of_a_matrix_are_kept_while_it_stays_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    ids = Table.ids
    monkeypatch.setattr(Table, "ids", lambda self, *ends: (asked.append(1), ids(self, *ends))[1])
    table = BiasTable(torch.randn(3, HEADS), Table(torch.arange(N * N).view(N, N) % 3))
    graph = edges()
    for _ in range(3):
        attend(graph, "csr", bias=table)
    assert len(asked) == 1


# ---------------------------------------------------------------------------------------- positions and models


def test_slopes_and_frequencies_are_read_in_each_call() -> None:
    alibi, rotary = ALiBi(HEADS), Rotary(8)
    layers = [MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=p)) for p in (alibi, rotary)]
    for graph in (edges(), graphs.causal().bind(N)):
        before = [layer(X, graph) for layer in layers]
        alibi.slopes = [slope * 3 for slope in alibi.slopes]
        rotary.frequencies = tuple(2 * f for f in rotary.frequencies)
        found = [layer(X, graph) for layer in layers]
        right = [layer(X, graph.alias()) for layer in layers]
        torch.testing.assert_close(found, right, rtol=0, atol=0)
        assert not any(map(torch.equal, found, before))


def test_a_rotation_of_ones_own_is_not_taken_for_the_librarys() -> None:
    class Faster(Rotary):
        speed = 1.0

        def angles(self, graph: Graph) -> list[tuple[Tensor, Tensor]]:
            angles = [self.speed * p[:, None, None] for p in graph.node_positions()]
            return [(a.cos(), a.sin()) for a in angles]

    graph = edges()
    position = Faster(8)
    layer = MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=position))
    plain = MessagePassing(None, "sum", None, DotProduct(DIM, HEADS, position=Rotary(8)))
    plain.load_state_dict(layer.state_dict())
    before = plain(X, graph), layer(X, graph)
    assert not before[0].equal(before[1])
    position.speed = 2.0
    assert not layer(X, graph).equal(before[1])


def test_graphormer_reads_the_attributes_of_edges_in_each_call() -> None:
    torch.manual_seed(0)
    model = Graphormer(DIM, 1, dim=8, heads=2, layers=2, edge_dim=3, steps=2).eval()
    attr = torch.randn(40, 3, requires_grad=True)
    molecule = edges(edge_attr=attr)
    for _ in range(2):
        expected = model(X, [edges(edge_attr=attr.detach().clone())])
        found = model(X, [molecule])
        torch.testing.assert_close(found, expected)
        (gradient,) = torch.autograd.grad(found.sum(), attr)
        assert gradient.abs().sum() > 0
        with torch.no_grad():
            attr.mul_(-2)


# ---------------------------------------------------------------------------------------- topologies


def test_a_topology_refuses_what_may_change() -> None:
    lengths = torch.tensor([3, 4])
    labels = np.arange(7) % 2
    with pytest.raises(TypeError, match=r"argument 0 of a topology is a tensor.*pass tuple\(x\.tolist\(\)\)"):
        Topology.of(lambda i, n, sizes: [(0, i + 1)], lengths)
    for rule in (lambda i, n: [(0, i + int(lengths[0]))], lambda i, n: [(0, i + len(labels))]):
        with pytest.raises(TypeError, match=r"the rule of a topology closes over (lengths|labels), a (Tensor|ndarray)"):
            Topology.of(rule)
    with pytest.raises(TypeError, match="closes over labels"):
        Topology.cliques(lambda n: labels)
    width = 2
    assert Topology.of(lambda i, n: [(i - width, i + 1)]).bind(5).num_edges == 12


# ---------------------------------------------------------------------------------------- shallow copies

COPIED: dict[str, Callable[[], nn.Module]] = {
    "sum": lambda: MessagePassing(graphs.complete(), "sum", PreNorm(DIM, FeedForward(DIM))),
    "post-norm": lambda: MessagePassing(
        graphs.complete(), "sum", PostNorm(DIM, FeedForward(DIM)), DotProduct(DIM, HEADS)
    ),
    "pre-norm": lambda: MessagePassing(graphs.causal(), "sum", PreNorm(DIM, FeedForward(DIM)), DotProduct(DIM, HEADS)),
    "edges": lambda: MessagePassing(edges(), "mean", PreNorm(DIM, FeedForward(DIM)), DotProduct(DIM, HEADS)),
    "additive": lambda: MessagePassing(edges(), "sum", None, Additive(DIM, 8, HEADS)),
    "linear": lambda: MessagePassing(graphs.complete(), "sum", None, Kernel(DIM, HEADS)),
    "positions": lambda: MessagePassing(
        graphs.causal(), "sum", None, DotProduct(DIM, HEADS, position=[T5(HEADS), Rotary(8)])
    ),
}


def shallow(module: nn.Module) -> nn.Module:
    """A copy whose tables of modules and parameters are its own, and hold the same objects."""
    other = copy.copy(module)
    for table in ("_modules", "_parameters", "_buffers"):
        other.__dict__[table] = dict(getattr(module, table))
    return other


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", COPIED)
def test_a_shallow_copy_computes_with_its_own_weights(name: str, recorded: bool) -> None:
    torch.manual_seed(0)
    original = COPIED[name]().eval()
    with torch.set_grad_enabled(recorded):
        before = original(X)
        assert original(X).equal(before)
        other = shallow(original)
        assert other(X).equal(before)
        torch.manual_seed(1)
        fresh = COPIED[name]().eval()
        for part in ("attention", "update"):
            setattr(other, part, getattr(fresh, part))
        torch.testing.assert_close(other(X), fresh(X))
        assert original(X).equal(before)
        assert not other(X).equal(before)


def test_a_copied_cache_continues_alone() -> None:
    layer = MessagePassing(graphs.causal(), "sum", None, DotProduct(DIM, HEADS)).eval()
    with torch.no_grad():
        whole = layer(torch.cat([X[:6], X[8:10]]))
        cache = KVCache(N)
        layer(X[:6], cache=cache)
        other = copy.copy(cache)
        layer(X[6:8], cache=cache)
        torch.testing.assert_close(layer(X[8:10], cache=other), whole[6:])


@dataclass(frozen=True)
class Parity(Offset):
    """A rule by value: graphs keep what it gives under equal rules."""


def test_rules_by_value_are_kept_under_equal_rules() -> None:
    graph = edges()
    table = torch.randn(5, HEADS)
    attend(graph, "csr", bias=BiasTable(table, Offset(2)))
    known = len(graph._memo)
    attend(graph, "csr", bias=BiasTable(table, Offset(2)))
    assert len(graph._memo) == known
