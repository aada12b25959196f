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
from mpnn.scores import Dot

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
        mine, theirs = (
            torch.autograd.grad(x.out, round.tensors, direction, materialize_grads=True) for x in (found, expected)
        )
        torch.testing.assert_close(mine, theirs)
