"""mpnn.backends.reference: the specification by kernels, which gives what the specification gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from mpnn import Graph, aggregate, graphs
from mpnn.backends import edge_list, reference
from mpnn.graph.edge_tables import BiasTable, EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import AdditiveScore, Dot, LeakyReLU

GRAPHS = {
    "window": graphs.window(2).bind(9),
    "edges": graphs.from_edges(torch.tensor([[0, 3, 3, 1, 0, 3, 8], [2, 0, 2, 2, 1, 2, 4]]), 9),
    "no edges": graphs.from_edges(torch.zeros(2, 0, dtype=torch.int64), 9),
}


class Doubled(aggregate.Sum):
    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return 2 * super().reduce(messages, index)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def with_own_reduce() -> aggregate.Sum:
    own = aggregate.Sum()
    own.reduce = Doubled().reduce  # type: ignore[method-assign]
    return own


OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "variance": {"reduce": aggregate.Var()},
    "maximum": {"reduce": aggregate.Max()},
    "mean": {"reduce": aggregate.Mean()},
    "a subclass": {"reduce": Doubled()},
    "a sum with a reduce of its own": {"reduce": with_own_reduce()},
    "no normalizer": {"normalize": "none", "return_weights": True},
    "vectors of edges": {"edge_value": EmbeddingTable(leaf(5, 4, 8), Offset(2))},
    "a bias": {"bias": (BiasTable(leaf(5, 4), Offset(2)),), "return_weights": True, "return_lse": True},
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=list(GRAPHS))
@pytest.mark.parametrize("batch", [(), (2,), (1, 3)], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.covering(times=2)
def test_results_and_gradients(
    graph: Graph, batch: tuple[int, ...], heads: tuple[int, int], options: dict[str, Any]
) -> None:
    for width, softcap in ((3, None), (8, 1.5)):
        query, key = leaf(*batch, 9, 4, width), leaf(*batch, 9, heads[0], width)
        value = leaf(*batch, 9, heads[1], 8)
        round = Round(graph, value, Dot(query, key, 0.4, softcap=softcap), **options)
        found, expected = reference.run(round), edge_list.run(round)
        torch.testing.assert_close(found.out, expected.out)
        torch.testing.assert_close(found.weights, expected.weights)
        torch.testing.assert_close(found.lse, expected.lse)
        direction = torch.randn_like(found.out)
        got, wanted = (
            torch.autograd.grad(x.out, round.tensors, direction, materialize_grads=True) for x in (found, expected)
        )
        torch.testing.assert_close(got, wanted)


LISTED = graphs.from_edges([[0, 2, 2, 1, 3, 0], [1, 1, 0, 1, 0, 1]], num_dst=3, num_src=4)


def request(batch: tuple[int, ...], heads: int, key_heads: int, width: int, **fields: Any) -> Round:
    query = leaf(*batch, 3, heads, width)
    key, value = leaf(*batch, 4, key_heads, width), leaf(*batch, 4, key_heads, width + 1)
    return Round(LISTED, value, Dot(query, key, 0.7)).with_fields(**fields)


def assert_same_to_the_second_order(given: Round) -> None:
    leaves = [x for x in given.tensors if x.requires_grad]
    found = []
    for run in (reference.run, edge_list.run):
        out = run(given).out
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True, materialize_grads=True)
        second = torch.autograd.grad(sum(x.cos().sum() for x in first), leaves, materialize_grads=True)
        found.append([out, *first, *second])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("batch", [(), (5,)], ids=str)
@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (4, 2), (4, 1)])
@pytest.mark.parametrize("width", [1, 3, 8])
def test_second_derivatives_of_heads_and_widths(batch: tuple[int, ...], heads: int, key_heads: int, width: int) -> None:
    """Features are narrower and wider than there are heads."""
    assert_same_to_the_second_order(request(batch, heads, key_heads, width))


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_second_derivatives_of_scores_and_terms(batch: tuple[int, ...]) -> None:
    given = request(batch, 4, 2, 3)
    score: Any = given.score
    for other in (
        Dot(score.query, score.key, 0.7, EmbeddingTable(leaf(3, 4, 3), Offset(1))),
        Dot(score.query, score.key, 0.7, leaf(6, 1, 3)),
        AdditiveScore(leaf(*batch, 3, 4), leaf(*batch, 4, 4), LeakyReLU()),
    ):
        assert_same_to_the_second_order(given.with_fields(score=other))
    fields: tuple[dict[str, Any], ...] = (
        {"normalize": "sigmoid"},
        {"bias": (leaf(6, 1), leaf(*batch, 6, 4))},
        {"dst_bias": leaf(*batch, 3, 4), "src_bias": leaf(*batch, 4, 1)},
        {"edge_value": leaf(6, 1, 4)},
        {"sinks": leaf(4)},
        {"reduce": aggregate.Var()},
    )
    for changes in fields:
        assert_same_to_the_second_order(given.with_fields(**changes))


def test_forms_hold_no_tensor_but_the_seed() -> None:
    given = request((), 4, 2, 3, bias=(leaf(6, 4),), dropout=0.5, seed=torch.tensor(1), sinks=leaf(4))
    score: Any = given.score
    form: Any = reference.form(given)
    held = [x for x in (*vars(form).values(), *vars(form.score).values()) if isinstance(x, (Tensor, tuple))]
    assert held == [given.seed]
    assert form.graph is LISTED
    assert form.score.scale == 0.7
    fields = {"value": given.value, "bias": given.bias, "sinks": given.sinks}
    again = reference.filled(form, {"query": score.query, "key": score.key}, **fields)
    torch.testing.assert_close(reference.run(again).out, reference.run(given).out)
    assert reference.filled(form, {}, bias=(None, given.bias[0])).bias == given.bias
    plain = Round(LISTED, given.value, normalize="none")
    assert reference.filled(reference.form(plain), {}, value=given.value).score is None
