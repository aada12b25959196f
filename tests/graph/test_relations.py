"""Classes of edges by rule, each against a loop over pairs."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from mpnn import graphs, ops
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Flipped, GridOffset, Offset, Relation, Table, as_relation


def classes(relation: Relation, num_dst: int, num_src: int) -> Tensor:
    return relation.ids(torch.arange(num_dst)[:, None], torch.arange(num_src))


def test_offsets_are_clipped_and_count_from_zero() -> None:
    relation = Offset(2)
    assert classes(relation, 3, 6).tolist() == [[2, 3, 4, 4, 4, 4], [1, 2, 3, 4, 4, 4], [0, 1, 2, 3, 4, 4]]
    assert relation.count == 5
    assert classes(Offset(0), 2, 2).tolist() == [[0, 0], [0, 0]]


def test_tables_are_looked_up() -> None:
    table = torch.tensor([[0, 3], [1, 0], [2, 2]], dtype=torch.int32)
    relation = as_relation(table)
    assert torch.equal(classes(relation, 3, 2), table.long())
    assert relation.count == 4
    assert repr(relation) == "Table(3 x 2, 4 edge types)"
    assert as_relation(relation) is relation
    assert Table(torch.zeros(0, 0, dtype=torch.int64)).count == 0


def test_flipped_edges_keep_their_class() -> None:
    table = as_relation(torch.tensor([[0, 3], [1, 0], [2, 2]]))
    assert torch.equal(classes(Flipped(table), 2, 3), classes(table, 3, 2).T)
    assert Flipped(table).count == 4


def test_rules_are_equal_when_they_say_the_same() -> None:
    assert Offset(2) == Offset(2) != Offset(3)
    assert len({Offset(2), Offset(2), Flipped(Offset(2)), GridOffset(2, 1, 1), GridOffset(2, 1, 1)}) == 3
    table = torch.zeros(2, 2, dtype=torch.int64)
    assert Table(table) != Table(table)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (torch.zeros(3), r"integer matrix \[num_dst, num_src\]; got torch.float32 of shape \[3\]"),
        (torch.zeros(2, 2), r"integer matrix \[num_dst, num_src\]; got torch.float32 of shape \[2, 2\]"),
        (torch.tensor([[0, -1]]), "must not be negative; it holds a negative one"),
    ],
)
def test_bad_tables_are_refused(table: Tensor, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Table(table)


@pytest.mark.parametrize("backend", ["edge_list", "csr", "dense"])
def test_a_graph_keeps_no_table_alive_that_a_call_brought(backend: str) -> None:
    graph, x = graphs.causal().bind(5), torch.randn(5, 1, 8, requires_grad=True)
    table = Table(torch.randint(0, 3, (5, 5)))
    bias = torch.randn(table.count, 1, requires_grad=True)
    ops.attend(graph, x, x, x, bias=BiasTable(bias, table), backend=backend).sum().backward()
    gone = weakref.ref(table)
    del table
    gc.collect()
    assert gone() is None
