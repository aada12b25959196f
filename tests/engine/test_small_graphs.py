"""What is kept with a graph so that calls on small ones are cheap serves every later call, whatever the first was."""

import pytest
import torch

from mpnn import graphs, ops
from mpnn.edge_tables import BiasTable
from mpnn.round import Round
from mpnn.scores import Dot

EDGES = torch.tensor([[0, 1, 2, 2, 0], [1, 1, 0, 1, 3]])


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "std"])
def test_a_graph_first_used_in_inference_mode_is_trained_over_afterwards(reduce: str) -> None:
    graph, x = graphs.from_edges(EDGES, 4), torch.randn(4, 3, dtype=torch.float64)
    with torch.inference_mode():
        first = ops.aggregate(graph, x, reduce, backend="edge_list")
    again = ops.aggregate(graph, x.requires_grad_(), reduce, backend="edge_list")
    again.sum().backward()
    assert torch.equal(first.clone(), again)
    assert x.grad is not None


def test_features_that_need_gradients_are_planned_for_apart() -> None:
    graph = graphs.from_edges(EDGES, 4)
    query, key, value = (torch.randn(4, 2, 3) for _ in range(3))

    def signature(*learned: torch.Tensor, table: torch.Tensor) -> object:
        for x in (query, key, value):
            x.requires_grad_(any(x is one for one in learned))
        return Round(graph, value, Dot(query, key, 1.0), bias=(BiasTable(table),)).signature

    plain, learned = torch.zeros(2, 2), torch.zeros(2, 2, requires_grad=True)
    without = signature(table=plain)
    assert without == signature(table=plain)
    others = [signature(one, table=plain) for one in (query, key, value)] + [signature(table=learned)]
    assert without not in others
    with torch.no_grad():
        assert signature(value, table=plain) not in [without, *others]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_results_have_the_shape_and_type_of_the_features(dtype: torch.dtype, batch: tuple[int, ...]) -> None:
    graph = graphs.from_edges(EDGES, 4)
    query, key, value = (torch.randn(*batch, 4, 2, 3).to(dtype) for _ in range(3))
    out, weights = ops.attend(graph, query, key, value, backend="edge_list", return_weights=True)
    assert (out.shape, out.dtype) == (value.shape, dtype)
    assert (weights.shape, weights.dtype) == ((*batch, 5, 2), dtype)
    half = torch.finfo(dtype).eps / 2  # a rounded weight is off by half of this, relatively; they add up to one
    sums = torch.zeros(*batch, 4, 2, dtype=torch.float64).index_add(-2, EDGES[1], weights.double())
    assert (sums[..., [0, 1, 3], :] - 1).abs().max() <= 3 * half + 4 * torch.finfo(torch.float32).eps
    assert (sums[..., 2, :] == 0).all()


def test_an_end_that_is_no_node_is_named_in_graphs_over_two_sets_of_nodes() -> None:
    graphs.from_edges([[4], [1]], num_src=5, num_dst=2)
    with pytest.raises(IndexError, match="destination 2, but there are 2 destinations"):
        graphs.from_edges([[0, 4], [1, 2]], num_src=5, num_dst=2)
    with pytest.raises(IndexError, match="source 5, but there are 5 sources"):
        graphs.from_edges([[0, 5], [1, 1]], num_src=5, num_dst=2)
    with pytest.raises(IndexError, match=r"edge 1 .* has source -1"):
        graphs.from_edges([[0, -1], [1, 1]], num_src=5, num_dst=2)


def test_a_batch_over_two_sets_of_nodes_numbers_each_set_by_itself() -> None:
    parts = [graphs.from_edges([[2, 0], [0, 1]], num_src=3, num_dst=2), graphs.from_edges([[0], [0]], num_src=1)]
    parts.insert(1, graphs.from_edges([[], []], num_src=2, num_dst=4))
    joined = graphs.batch(parts)
    assert joined.edge_index.tolist() == [[2, 0, 5], [0, 1, 6]]
    assert (joined.num_src, joined.num_dst) == (6, 7)
