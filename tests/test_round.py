"""Requests: what plans remember of them, and what of them is told edge by edge."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import engine, graphs, ops
from mpnn.aggregate import PNA, Index, Max, Median, Std, Sum
from mpnn.graph import rng
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import AdditiveScore, Dot, LeakyReLU


def features() -> list[Tensor]:
    return [torch.randn(4, 2, 3) for _ in range(3)]


def test_scales_are_planned_for_alike() -> None:
    graph = graphs.complete().bind(4)
    query, key, value = features()
    first, second = (Round(graph, value, Dot(query, key, scale, softcap=scale)) for scale in (0.1, 0.2))
    assert first.signature == second.signature


class Unhashable(nn.Module):
    __hash__ = None

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("activation", [lambda: lambda x: x.relu(), Unhashable], ids=["function", "module"])
def test_activations_that_are_made_anew_for_each_call_are_planned_for_alike(activation: Callable) -> None:
    graph = graphs.complete().bind(4)
    query, key, value = features()
    made = activation(), activation()  # both alive, so that they are not one
    first, second = (Round(graph, value, AdditiveScore(query[..., 0], key[..., 0], by)) for by in made)
    assert first.signature == second.signature


def test_activations_of_fused_kernels_are_recognized() -> None:
    graph = graphs.complete().bind(4)
    query, key, value = features()
    known = torch.tanh, F.tanh, F.leaky_relu, LeakyReLU(), torch.relu, lambda x: x
    forms = [Round(graph, value, AdditiveScore(query[..., 0], key[..., 0], by)).signature for by in known]
    assert len(set(forms)) == len(known)


@pytest.mark.parametrize("data", [(torch.ones(2), None), (None, (1.0, torch.ones(2))), torch.ones(2)])
def test_a_tensor_without_a_role_is_refused(data: Any) -> None:
    """Also within a tuple that holds other things: visitors would not move or cut it."""

    @dataclass(eq=False)
    class Own(Round):
        extra: Any = None

    def own(extra: Any) -> Round:
        return Own(graphs.causal().bind(3), torch.ones(3, 1, 2), normalize="none", extra=extra)

    with pytest.raises(TypeError, match="extra of a round has no role"):
        own(data).map(lambda x, name, role: x)
    for plain in (None, (), (1.0, None), "text"):
        assert own(plain).map(lambda x, name, role: x).extra == plain


def test_a_table_of_too_few_classes_is_named_where_nodes_have_places_too() -> None:
    graph = graphs.complete().bind(4).with_positions(torch.arange(4), torch.arange(4))
    with pytest.raises(ValueError, match=r"bias must have shape \[3, 2\], one row for each edge type; got \[2, 2\]"):
        ops.attend(graph, *features(), bias=BiasTable(torch.zeros(2, 2), Offset(1)))


def test_numbers_of_heads_are_needed_where_weights_are_dropped() -> None:
    query, key, value = features()
    graph = graphs.complete().bind(4)
    score = Dot(query, key, 1.0)
    seed = torch.tensor(1)
    assert "head_ids" in Round(graph, value, score, dropout=0.5, seed=seed, head_ids=(2, 8)).needs
    assert "head_ids" not in Round(graph, value, score, head_ids=(2, 8)).needs
    assert "head_ids" not in Round(graph, value, score, dropout=0.5, seed=seed).needs


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("by", ["score", "bias", "node bias", None])
def test_keys_of_dropout_are_of_each_entry_and_head(dropout: float, by: str | None) -> None:
    query, key, value = (torch.randn(3, 5, 4, 2, 3) for _ in range(3))
    graph = graphs.complete().bind(4)
    weights: dict[str | None, dict[str, Any]] = {
        "score": {"score": Dot(query, key, 1.0)},
        "bias": {"bias": (torch.zeros(16, 2),)},
        "node bias": {"dst_bias": torch.zeros(4, 2)},
        None: {},
    }
    seed = torch.tensor(7) if dropout else None
    keys = Round(graph, value, dropout=dropout, seed=seed, **weights[by]).dropout_keys()
    if not dropout or by is None:
        assert keys is None
    else:
        assert keys is not None
        assert keys.equal(rng.keys(torch.tensor(7), torch.arange(3 * 5 * 2)))


class OwnReduce(Std):
    def reduce(self, messages: Tensor, index: Index) -> Tensor:
        return 2 * super().reduce(messages, index)


class OwnSum(Sum):
    pass


def test_needs_of_aggregators() -> None:
    value = torch.randn(4, 1, 3)
    graph = graphs.complete().bind(4)
    plain = Round(graph, value, normalize="none").needs - {"sum"}
    with_own = Sum()
    with_own.reduce = lambda messages, index: messages  # type: ignore[method-assign]
    expected: list[tuple[Any, set[str]]] = [
        (Sum(), {"sum"}),
        (Max(), {"max"}),
        (Std(), {"aggregate of parts", "var"}),
        (PNA(("mean", "min", Std())), {"aggregate of parts", "mean", "min", "var"}),
        (OwnReduce(), {"own aggregate"}),
        (OwnSum(), {"own aggregate"}),
        (with_own, {"own aggregate"}),
        (Median(), {"own aggregate"}),
    ]
    for aggregator, needs in expected:
        assert Round(graph, value, normalize="none", reduce=aggregator).needs == plain | needs, aggregator


def test_biases_of_nodes_are_keys_of_dictionaries() -> None:
    x = torch.zeros(4, 2)
    bias = ops.NodeBias(x)
    assert len({bias, ops.NodeBias(x)}) == 2
    with pytest.raises(AttributeError):
        bias.dst = None  # type: ignore[misc]


@pytest.mark.parametrize(
    ("operand", "shape"), [("value", (4, 3, 5)), ("log_gate", (4, 3, 1)), ("beta", (4, 3)), ("state", (3, 5, 5))]
)
def test_heads_of_a_recurrence_are_those_of_any_operand(operand: str, shape: tuple[int, ...]) -> None:
    query, key, value = torch.randn(3, 4, 1, 5)
    given = Round(graphs.causal().bind(4), value, Dot(query, key, 1.0), normalize="none", return_state=True)
    assert given.heads == 1
    assert given.with_fields(**{operand: torch.randn(shape)}).heads == 3


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((16, 2), True),
        ((16, 1), True),
        ((3, 16, 2), True),
        ((1, 16, 2), True),
        ((5, 3, 16, 2), True),
        ((5, 1, 16, 1), True),
        ((1, 5, 3, 16, 2), False),
        ((2, 16, 2), False),
        ((3, 3, 16, 2), False),
        ((15, 2), False),
        ((16, 3), False),
        ((16,), False),
    ],
    ids=str,
)
def test_shapes_of_biases(shape: tuple[int, ...], fits: bool) -> None:
    query, key, value = torch.randn(3, 5, 3, 4, 2, 6)
    given = Round(graphs.complete().bind(4), value, Dot(query, key, 1.0), bias=(torch.zeros(shape),))
    if fits:
        assert engine.run(given)[0].shape == value.shape
    else:
        with pytest.raises(ValueError, match=r"bias must have shape \[16, 2\], one row for each edge"):
            engine.run(given)
