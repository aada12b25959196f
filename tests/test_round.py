"""Requests: what plans remember of them, and what of them is told edge by edge."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import engine, graphs, ops
from mpnn.aggregate import PNA, SUM, Index, Max, Median, Std, Sum
from mpnn.graph import rng
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.round import Round, plain_form, reads
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


class OwnTable(BiasTable):
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
        ((17, 2), False),
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


@pytest.mark.parametrize("batch", [(), (7,), (5, 3)], ids=str)
@pytest.mark.parametrize("name", ["bias", "dst_bias", "src_bias"])
def test_heads_of_biases_count_where_no_score_has_any(name: str, batch: tuple[int, ...]) -> None:
    graph = graphs.complete().bind(4)
    bias = torch.zeros(*batch, 16 if name == "bias" else 4, 3)
    given = Round(graph, torch.randn(*batch, 4, 1, 6), **{name: (bias,) if name == "bias" else bias})
    assert given.heads == 3
    assert given.batch == batch
    assert engine.run(given, "edge_list")[0].shape == (*batch, 4, 3, 6)


@pytest.mark.parametrize("end", ["dst", "src"])
@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        ((4, 2), (4, 2), True),
        ((4, 1), (4, 2), True),
        ((4, 2), (4, 1), True),
        ((4, 1), (4, 1), True),
        ((5, 4, 2), (5, 4, 1), True),
        ((3, 5, 4, 1), (3, 5, 4, 2), True),
        ((4, 2), (4, 3), False),
        ((4, 2), (5, 2), False),
        ((5, 4, 2), (3, 4, 2), False),
        ((5, 4, 2), (5, 1, 2), False),
        ((5, 4, 2), (4, 2), False),
        ((), (), False),
    ],
    ids=str,
)
def test_several_biases_of_nodes_add_up(first: tuple[int, ...], second: tuple[int, ...], fits: bool, end: str) -> None:
    given = torch.randn(first), torch.randn(second)
    biases = tuple(ops.NodeBias(**{end: x}) for x in given)
    graph, value = graphs.complete().bind(4), torch.zeros(4, 2, 3)
    if fits:
        found = Round(graph, value, bias=biases)
        assert found.bias == ()
        assert getattr(found, f"{end}_bias").equal(given[0] + given[1])
        assert getattr(found, {"dst": "src_bias", "src": "dst_bias"}[end]) is None
    else:
        with pytest.raises(ValueError, match=rf"{end}_bias of all biases must have shape .* got \[.*\] and \["):
            Round(graph, value, bias=biases)


NODES = torch.arange(4, dtype=torch.int32)
OTHER_FIELDS: dict[str, Any] = {
    "bias": (torch.zeros(16, 2),),
    "edge_value": torch.zeros(16, 2, 3),
    "normalize": "none",
    "dropout": 0.5,
    "seed": torch.tensor(1),
    "reduce": Max(),
    "return_weights": True,
    "return_lse": True,
    "sinks": torch.zeros(2),
    "log_gate": torch.zeros(4, 2, 1),
    "beta": torch.zeros(4, 2),
    "state": torch.zeros(2, 3, 3),
    "return_state": True,
    "dst_bias": torch.zeros(4, 2),
    "src_bias": torch.zeros(4, 2),
    "head_ids": (0, 2),
    "keep_accumulate_dtype": True,
    "mix_logits": torch.eye(2),
    "mix_weights": torch.eye(2),
}
"""For each field of a round that has a default, another value."""


def test_all_fields_with_defaults_are_below() -> None:
    assert {field.name for field in fields(Round) if field.default is not MISSING} - {"score"} == OTHER_FIELDS.keys()


@pytest.mark.parametrize("name", OTHER_FIELDS)
def test_a_function_reads_all_of_a_round_only_if_it_reads_each_field_that_is_not_plain(name: str) -> None:
    query, key, value = features()
    given = Round(graphs.complete().bind(4), value).with_fields(**{name: OTHER_FIELDS[name]})
    assert not reads(given, ("value",))
    assert reads(given, ("value", name))
    of_score = "query", "key", "scale"
    scored = given.with_fields(score=Dot(query, key, 1.0))
    assert not reads(scored, ("value",), of_score)
    assert reads(scored, ("value", name), of_score)


def test_a_function_reads_all_of_a_score_only_if_it_reads_each_field_and_no_method_is_its_own() -> None:
    query, key, value = features()
    graph, of_score = graphs.complete().bind(4), ("query", "key", "scale")
    plain = Round(graph, value, Dot(query, key, 1.0), reduce=SUM, dropout=0)
    assert reads(plain, ("value",), of_score)
    for read in (("key", "scale"), ("query", "key")):
        assert not reads(plain, ("value",), read)
    for name, x in (("softcap", 2.0), ("edge_key", torch.zeros(16, 2, 3))):
        other = plain.with_fields(score=Dot(query, key, 1.0, **{name: x}))
        assert not reads(other, ("value",), of_score)
        assert reads(other, ("value",), (*of_score, name))
    own = Dot(query, key, 1.0)
    own.__dict__["logits"] = lambda *features: 0.0
    assert not reads(plain.with_fields(score=own), ("value",), of_score)


@pytest.mark.parametrize(
    ("name", "one", "other", "alike"),
    [
        ("scale", 0.1, 0.2, True),
        ("scale", -0.1, -0.2, True),
        ("scale", 0.0, 0.1, False),
        ("scale", inf, 1.5, False),
        ("scale", -inf, -1.5, False),
        ("scale", nan, -1.5, False),
        ("scale", 1.0, 1.5, False),  # the first is the default
        ("scale", 1, 1.5, False),
        ("scales", (0.1, 0.2), (0.3, 0.4), True),
        ("scales", (0.1, 0.0), (0.3, 0.4), False),
        ("scales", (), (0.1,), False),
        ("dropout", 0.1, 0.9, True),
        ("dropout", 0.0, 0.1, False),
        ("dropout", 1.0, 0.9, False),
        ("dropout", 1.0, 0.0, False),
        ("flag", True, False, False),
        ("text", "a", "b", False),
        ("x", torch.zeros(2, 3), torch.ones(2, 3), True),
        ("x", torch.zeros(2, 3), torch.zeros(3, 2), False),
        ("x", torch.zeros(2, 3), torch.zeros(2, 3).double(), False),
        ("x", torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True), False),
        ("x", torch.zeros(2, 3), torch.zeros(2, 3, device="meta"), False),
        ("table", BiasTable(torch.zeros(3, 2)), BiasTable(torch.ones(3, 2)), True),
        ("table", BiasTable(torch.zeros(3, 2)), BiasTable(torch.zeros(3, 2), Offset(1)), False),
        ("table", BiasTable(torch.zeros(3, 2), Offset(2)), BiasTable(torch.zeros(3, 2), Offset(1)), False),
        ("table", BiasTable(torch.zeros(3, 2)), EmbeddingTable(torch.zeros(3, 2)), False),
        ("of a type", [1], [2], True),
        ("of a type", [1], {1}, False),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_plans_depend_on(name: str, one: Any, other: Any, alike: bool) -> None:
    assert (plain_form(name, one, 1.0) == plain_form(name, other, 1.0)) == alike


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"return_weights": True}, {"return_weights"}),
        ({"return_lse": True}, {"return_lse"}),
        ({"return_lse": True, "return_weights": True}, {"return_lse", "return_weights", "weights and lse"}),
        ({"dst_bias": torch.zeros(4, 2)}, {"bias by nodes"}),
        ({"src_bias": torch.zeros(4, 2)}, {"bias by nodes"}),
        ({"keep_accumulate_dtype": True}, set()),
        ({"bias": (torch.zeros(16, 2),)}, {"bias per edge"}),
        (
            {"bias": (BiasTable(torch.zeros(3, 2)), OwnTable(torch.zeros(3, 2)))},
            {"bias by edge_type", "bias of type OwnTable"},
        ),
        ({"edge_value": EmbeddingTable(torch.zeros(3, 2, 3), Offset(1))}, {"edge_value by Offset"}),
        ({"dropout": 0.5, "seed": torch.tensor(1)}, {"dropout"}),
        ({"reduce": PNA(("mean", OwnSum()))}, {"aggregate of parts", "mean", "own aggregate"}),
    ],
    ids=lambda x: ", ".join(sorted(x)) or "nothing",
)
def test_needs_of_fields(changes: dict[str, Any], needs: set[str]) -> None:
    query, key, value = features()
    given = Round(graphs.complete().bind(4), value, Dot(query, key, 1.0))
    assert given.needs == {"cpu", "float32", "Dot", "softmax", "sum"}
    without = {"sum"} if "reduce" in changes else set()
    assert given.with_fields(**changes).needs == given.needs - without | needs


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_only_16_bits_are_rounded_at_the_end(dtype: torch.dtype) -> None:
    given = Round(graphs.complete().bind(4), torch.zeros(4, 1, 3, dtype=dtype), keep_accumulate_dtype=True)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert given.accumulate_dtype == given.result_dtype == wide
    assert given.with_fields(keep_accumulate_dtype=False).result_dtype == dtype
    assert ("keep_accumulate_dtype" in given.needs) == (dtype.itemsize == 2)


def test_needs_of_devices_and_graphs() -> None:
    graph = graphs.from_edges([[0, 1], [1, 0]], 4)
    value = torch.zeros(4, 1, 3)
    assert Round(graph, value).needs == {"cpu", "float32", "no score", "sum", "explicit graph"}
    assert "another device" in Round(graph, value.to("meta")).needs
    dropout = {"dropout": 0.5, "seed": torch.tensor(1)}
    assert "node_ids" not in Round(graph, value, **dropout).needs
    numbered = graphs.from_edges([[0, 1], [1, 0]], 4)
    numbered.node_ids = NODES, NODES
    assert "node_ids" not in Round(numbered, value).needs
    assert "node_ids" in Round(numbered, value, **dropout).needs
