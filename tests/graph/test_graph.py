"""Graphs of explicit edges and of runs: their forms, the order of their edges, and the graphs made from them."""

import copy
import gc
import operator
import pickle
import weakref

import numpy as np
import pytest
import torch
from drawings import ATTR, EDGES, KIND, MASK, listed
from torch import Tensor

from mpnn import Graph, graphs, ops
from mpnn.graph.bind_cache import bytes_of
from mpnn.graph.relations import Offset


@pytest.fixture
def graph() -> Graph:
    return graphs.from_edges(EDGES, 4, edge_attr=ATTR)


# ------------------------------------------------------------------------------------------------ its forms


def test_explicit_edges_stay_as_they_are(graph: Graph) -> None:
    assert graph.is_explicit
    assert torch.equal(graph.edge_index, EDGES)
    assert torch.equal(graph.dense(), MASK)
    assert graph.num_edges == 6
    assert graph.degree().tolist() == [2, 3, 1, 0]  # repeated edges count
    assert graph.runs.num_edges == 5  # as a set they do not
    assert str(graph) == "Graph(4 nodes, 6 edges)"


def test_structured_edges_are_written_out_by_destination() -> None:
    graph = graphs.window(1).bind(3)
    assert not graph.is_explicit
    assert listed(graph) == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2)]
    assert graph.degree().tolist() == [2, 3, 2]
    assert str(graph) == "Graph(window(1): 3 nodes, 7 edges)"
    assert str(graphs.complete().bind(1200, 5)) == "Graph(complete(): 1,200 x 5, 6,000 edges)"


def test_structured_graphs_are_measured_without_writing_edges_out() -> None:
    graph = graphs.window(2, dilation=7).bind(31)  # bound by no other test, which would share it
    assert graph.dense().sum() == graph.num_edges == graph.degree().sum()
    _ = graph.reverse(), graph.power(2), graph | graph, ~graph, graph.undirected(), graph.to("cpu"), repr(graph)
    assert "ends" not in vars(graph)


@pytest.mark.parametrize("structured", [False, True])
def test_sorted_forms_hold_the_same_edges(structured: bool) -> None:
    graph = (graphs.causal() & graphs.window(2)).bind(5, 4) if structured else graphs.from_edges(EDGES, 4)
    src, dst = graph.edge_index
    for sorted_edges, row, col, n in ((graph.csr, dst, src, graph.num_dst), (graph.csc, src, dst, graph.num_src)):
        assert sorted_edges.ptr.tolist() == [int((row < r).sum()) for r in range(n + 1)]
        assert torch.equal(sorted_edges.row, sorted_edges.from_caller(row))
        assert torch.equal(sorted_edges.col, sorted_edges.from_caller(col))
        assert (sorted_edges.row.diff() >= 0).all()
        numbers = torch.randn(2, graph.num_edges)
        there = sorted_edges.from_caller(numbers, dim=1)
        assert torch.equal(sorted_edges.to_caller(there, dim=1), numbers)


def test_edges_of_a_structured_graph_are_already_sorted_by_destination() -> None:
    assert (graphs.causal() & graphs.window(2)).bind(5, 4).csr.edge_id is None


def test_edges_of_one_row_keep_their_order() -> None:
    assert graphs.from_edges(EDGES, 4).csr.edge_id.tolist() == [0, 3, 1, 2, 5, 4]
    many = graphs.from_edges(torch.randint(0, 9, (2, 5000)), 9)  # so many that an unstable sort would mix them up
    for sorted_edges in (many.csr, many.csc):
        assert all((row.diff() > 0).all() for row in sorted_edges.edge_id.split(sorted_edges.ptr.diff().tolist()))


def test_forms_are_built_once(graph: Graph) -> None:
    for form in ("runs", "ends", "csr", "csc", "num_edges", "labels"):
        assert getattr(graph, form) is getattr(graph, form)
    calls: list[int] = []
    for _ in range(2):
        graph.cached("count", lambda: calls.append(1))
    assert calls == [1]


@pytest.mark.parametrize("structured", [False, True])
def test_what_a_graph_returns_may_be_written_to(structured: bool) -> None:
    graph = graphs.window(1)._graph(4, 4) if structured else graphs.from_edges(EDGES, 4, edge_type=KIND)
    graph = graph.with_relation(Offset(1)) if structured else graph
    x = torch.rand(4, 2)
    expected, edges, kinds = ops.aggregate(graph, x, "sum"), graph.edge_index, graph.edge_type
    graph.edge_index.add_(10_000_000)
    graph.edge_type.add_(10_000_000)
    assert torch.equal(graph.edge_index, edges)
    assert torch.equal(graph.edge_type, kinds)
    again = graph._copy()
    again.edge_index.add_(10_000_000)  # before anything is derived
    assert torch.equal(ops.aggregate(again, x, "sum"), expected)


# ------------------------------------------------------------------------------------------------ derived graphs


def test_reverse_turns_every_edge_and_keeps_its_place() -> None:
    graph = graphs.from_edges(EDGES, num_dst=4, num_src=5, edge_attr=ATTR, edge_type=KIND).reverse()
    assert (graph.num_dst, graph.num_src) == (5, 4)
    assert torch.equal(graph.edge_index, EDGES.flip(0))
    assert torch.equal(graph.edge_attr, ATTR)
    assert torch.equal(graph.edge_type, KIND)


def test_reversed_classes_stay_with_their_edges() -> None:
    graph = (graphs.causal() & graphs.window(2)).with_relation(Offset(1)).bind(7).rows(0, 5)
    back = graph.reverse()
    by_edge = dict(zip(listed(graph), graph.edge_type.tolist(), strict=True))
    assert {(dst, src): kind for (src, dst), kind in by_edge.items()} == dict(
        zip(listed(back), back.edge_type.tolist(), strict=True)
    )
    assert torch.equal(back.reverse().edge_type, graph.edge_type)
    remembered = graphs.memory(2).with_relation(Offset(3)).bind(3)
    again = remembered.reverse().reverse()
    assert (again.shift, again.edge_type.tolist()) == (2, remembered.edge_type.tolist())
    turned = remembered.reverse()
    j, i = turned.edge_index.flip(0)  # the edges reversed
    assert torch.equal(turned.edge_type, (j - (i + 2)).clamp(-3, 3) + 3)


def test_classes_by_rule_stay_with_their_edges_where_explicit_rows_are_reversed() -> None:
    rows = graphs.from_edges([[0, 1, 2, 3], [1, 2, 3, 3]]).with_relation(Offset(3)).rows(1, 4)
    assert torch.equal(rows.reverse().edge_type, rows.edge_type)


@pytest.mark.parametrize(
    "relation", [torch.arange(36).view(6, 6), graphs.grid(2, 3).bind(6).relation], ids=["table", "grid"]
)
def test_classes_that_go_by_more_than_distance_stay_with_their_edges_where_rows_are_reversed(relation) -> None:
    rows = graphs.window(2).with_relation(relation).bind(6).rows(2, 5)
    back = rows.reverse()
    by_edge = dict(zip(listed(rows), rows.edge_type.tolist(), strict=True))
    assert {(src, dst): kind for (dst, src), kind in by_edge.items()} == dict(
        zip(listed(back), back.edge_type.tolist(), strict=True)
    )
    assert torch.equal(back.reverse().edge_type, rows.edge_type)
    assert back.reverse().relation is rows.relation


def test_reversed_cliques_are_the_same_cliques() -> None:
    graph = graphs.documents([2, 3]).bind(5).reverse()
    assert graph.labels is not None
    assert torch.equal(graph.dense(), graphs.documents([2, 3]).bind(5).dense())


def test_power_counts_steps() -> None:
    path = graphs.from_edges([[0, 1, 2, 3], [1, 2, 3, 4]])
    assert torch.equal(path.power(1).dense(), path.dense())
    assert listed(path.power(2)) == [(0, 2), (1, 3), (2, 4)]
    assert listed(path.power(4)) == [(0, 4)]
    assert path.power(5).num_edges == 0
    assert torch.equal(graphs.window(2).bind(20).power(3).dense(), graphs.window(6).bind(20).dense())
    assert graphs.documents([2, 3]).bind(5).power(7).labels is not None


def test_self_loops_are_added_last_and_once(graph: Graph) -> None:
    looped = graph.with_self_loops(fill=-1.0)
    assert torch.equal(looped.edge_index[:, :6], EDGES)
    assert listed(looped)[6:] == [(0, 0), (1, 1), (3, 3)]  # 2 has one already
    assert looped.edge_attr.tolist() == [*ATTR.tolist(), -1.0, -1.0, -1.0]
    again = looped.with_self_loops()
    assert torch.equal(again.edge_index, looped.edge_index)
    wide = graphs.from_edges(EDGES, 4, edge_attr=torch.ones(6, 2, 3)).with_self_loops(fill=0.5)
    assert wide.edge_attr.shape == (9, 2, 3)
    assert (wide.edge_attr[6:] == 0.5).all()


def test_structured_graphs_get_their_loops_as_runs() -> None:
    graph = (graphs.causal() - graphs.identity()).bind(6)
    assert graph.with_self_loops().runs.same_as(graphs.causal().bind(6).runs)
    assert graphs.documents([2, 3]).bind(5).with_self_loops().labels is not None


def test_new_edges_need_a_class_where_edges_have_one() -> None:
    graph = graphs.from_edges(EDGES, 4, edge_type=KIND)
    with pytest.raises(ValueError, match="the 3 new edges would have no edge_type; add them with their edge types"):
        graph.with_self_loops()
    complete = graphs.from_edges([[0, 1], [0, 1]], edge_type=KIND[:2])
    assert torch.equal(complete.with_self_loops().edge_type, KIND[:2])  # nothing to add
    ruled = graphs.from_edges(EDGES, 4).with_relation(Offset(1)).with_self_loops()
    assert ruled.edge_type.tolist() == [2, 2, 0, 2, 1, 2, 1, 1, 1]  # a rule gives new edges theirs


def test_undirected_edges_lend_their_attributes() -> None:
    # 0 -> 1 goes both ways; 1 -> 2 is there twice and its reverse is not; 2 -> 2 is its own
    edges = [[0, 1, 1, 1, 2], [1, 0, 2, 2, 2]]
    graph = graphs.from_edges(edges, 4, edge_attr=ATTR[:5], edge_type=KIND[:5]).undirected()
    assert listed(graph) == [(0, 1), (1, 0), (1, 2), (1, 2), (2, 2), (2, 1), (2, 1)]
    assert graph.edge_attr.tolist() == [10.0, 11.0, 12.0, 13.0, 14.0, 12.0, 13.0]
    assert graph.edge_type.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert torch.equal(graph.undirected().edge_index, graph.edge_index)
    causal = graphs.causal().bind(5)
    assert causal.undirected().runs.is_complete
    assert not causal.undirected().is_explicit


@pytest.mark.parametrize("structured", [False, True])
def test_dropped_edges_leave_the_rest_in_order(structured: bool) -> None:
    graph = (
        graphs.window(3).with_relation(Offset(3)).bind(60) if structured else graphs.from_edges(EDGES, edge_attr=ATTR)
    )
    dropped = graph.drop_edges(0.4, torch.Generator().manual_seed(3))
    kept = dropped.edge_ids
    assert kept is not None
    assert (kept.diff() > 0).all()
    assert torch.equal(dropped.edge_index, graph.edge_index[:, kept])
    if structured:
        assert torch.equal(dropped.edge_type, graph.edge_type[kept])
        # a binomial count of some 400 edges, within six deviations
        assert abs(len(kept) / graph.num_edges - 0.6) < 6 * (0.24 / graph.num_edges) ** 0.5
    else:
        assert torch.equal(dropped.edge_attr, ATTR[kept])
    again = graph.drop_edges(0.4, torch.Generator().manual_seed(3))
    assert torch.equal(again.edge_index, dropped.edge_index)
    assert graph.drop_edges(0.0).num_edges == graph.num_edges
    assert graph.drop_edges(1.0).num_edges == 0


def test_classes_can_be_given_anew(graph: Graph) -> None:
    typed = graphs.from_edges(EDGES, 4, edge_attr=ATTR, edge_type=KIND).with_relation(Offset(9))
    assert torch.equal(typed.edge_type, EDGES[0] - EDGES[1] + 9)
    assert torch.equal(typed.edge_attr, ATTR)
    assert typed.num_edge_types == 19
    table = torch.arange(16).view(4, 4)
    assert graph.with_relation(table).edge_type.tolist() == [1, 6, 4, 1, 10, 7]
    assert graph.edge_type is None
    with pytest.raises(ValueError, match=r"Table\(3 x 4, 1 edge types\) does not fit a graph of 4 x 4"):
        graph.with_relation(torch.zeros(3, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="a relation table is an integer matrix"):
        graph.with_relation(torch.zeros(4, 4))


def test_classes_given_as_data_are_counted() -> None:
    graph = graphs.from_edges(EDGES, edge_type=KIND.int())
    assert graph.edge_type.dtype == torch.int64
    assert torch.equal(graph.edge_type, KIND)
    assert graph.num_edge_types == 3
    assert graphs.from_edges([[], []], edge_type=[]).num_edge_types == 0
    assert graphs.from_edges(EDGES).num_edge_types == 0


# ------------------------------------------------------------------------------------------------ set algebra


def test_explicit_edges_survive_intersection_and_difference_as_they_were(graph: Graph) -> None:
    upper = graphs.causal().bind(4).reverse()  # sources at or after the destination
    for together in (graph & upper, upper & graph):
        assert listed(together) == [(1, 0), (2, 1), (1, 0), (2, 2), (3, 1)]
        assert together.edge_attr.tolist() == [10.0, 11.0, 13.0, 14.0, 15.0]
    rest = graph - upper
    assert listed(rest) == [(0, 1)]
    assert rest.edge_attr.tolist() == [12.0]
    typed = graphs.from_edges(EDGES, 4, edge_type=KIND) - graphs.identity()
    assert typed.edge_type.tolist() == [0, 1, 2, 0, 2]
    assert listed(upper - graph) == [(0, 0), (2, 0), (3, 0), (1, 1), (3, 2), (3, 3)]


def test_a_union_is_a_set_of_edges(graph: Graph) -> None:
    plain = graphs.from_edges(EDGES, 4)
    assert torch.equal((plain | graphs.identity()).dense(), MASK | torch.eye(4, dtype=torch.bool))
    assert (plain | plain).num_edges == 5


def test_the_algebra_loses_nothing_of_an_operand(graph: Graph) -> None:
    plain, typed = graphs.from_edges(EDGES, 4), graphs.from_edges(EDGES, 4, edge_type=KIND)
    for together in (graph & plain, plain & graph, graph - graphs.identity(), graph - typed):
        assert together.edge_attr is not None
    for combine in (lambda: graph | graphs.identity(), lambda: plain | graph, lambda: graph & typed):
        with pytest.raises(ValueError, match=r"would lose the edge data of Graph\(4 nodes, 6 edges\)"):
            combine()


def test_operands_agree_in_what_both_of_them_have() -> None:
    a = graphs.window(1).bind(4).with_relation(Offset(1))
    assert (graphs.complete() - a).relation is None  # none of its edges is one of a
    assert (a | graphs.identity()).relation == (graphs.identity() | a).relation == (a | a).relation == Offset(1)
    assert (graphs.from_edges(EDGES, 4, edge_type=KIND) & a).relation is None  # its types are data
    far = graphs.complete().bind(4).with_relation(Offset(3))
    assert not (a | far).has_edge_types  # neither rule holds for all edges
    assert (a | far).with_relation(Offset(3)).num_edge_types == 7
    at = torch.arange(4)
    for one, other, name in (
        (graphs.causal().bind(8).rows(1, 5), graphs.causal().bind(8).rows(2, 6), "shift"),
        (plain_at(at), plain_at(at + 1), "positions"),
    ):
        for combine in (operator.or_, operator.and_, operator.sub):
            with pytest.raises(ValueError, match=f"the operands of `.` differ in their {name}: "):
                combine(one, other)
        assert (one | one).num_edges == one.num_edges


def plain_at(positions: Tensor) -> Graph:
    return graphs.window(1).bind(4).with_positions(positions, positions)


def test_intersected_cliques_are_cliques() -> None:
    graph = graphs.documents([3, 3]).bind(6) & graphs.documents([2, 4]).bind(6)
    assert torch.equal(graph.dense(), graphs.documents([2, 1, 3]).bind(6).dense())
    assert graph.labels is not None
    assert (graph.dense().numpy() == (graph.labels[:, None] == graph.labels)).all()
    assert sorted(tuple(members.shape) for members in graph.cliques) == [(1, 1), (1, 2), (1, 3)]
    assert (graphs.documents([3]).bind(3) & graphs.causal().bind(3)).labels is None
    assert (graphs.documents([]).bind(0) & graphs.complete().bind(0)).num_edges == 0


def test_cliques_of_a_graph_that_has_none() -> None:
    with pytest.raises(ValueError, match=r"Graph\(causal\(\): 3 nodes, 6 edges\) is not a graph of disjoint cliques"):
        _ = graphs.causal().bind(3).cliques


# ------------------------------------------------------------------------------------------------ devices


def test_pinning_takes_edges_and_their_data_along(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x.clone())  # which needs a GPU
    graph = graphs.from_edges(
        torch.tensor([[0, 1], [1, 2]]), 3, edge_attr=torch.ones(2), edge_type=torch.tensor([0, 1])
    )
    copy = graph.pin_memory()
    assert len(pinned) == 3
    assert copy is not graph
    assert torch.equal(copy.edge_index, graph.edge_index)
    assert torch.equal(copy.edge_attr, graph.edge_attr)
    assert graphs.causal().bind(4).pin_memory().num_edges == 10


def test_a_graph_without_references_is_freed_at_once() -> None:
    gc.collect()
    gc.disable()  # edges are large and few: nothing would tell the collector to look for cycles of them
    try:
        uses = [lambda g: (g.csr, g.csc, g.runs), lambda g: g.to("meta").to("cpu"), copy.deepcopy]
        x = torch.randn(4, 2, 3, requires_grad=True)
        uses.append(lambda g: ops.attend(g, x, x, x, backend="csr").sum().backward())
        for use in uses:
            graph = graphs.from_edges(EDGES, 4, edge_attr=ATTR)
            use(graph)
            there = weakref.ref(graph)
            del graph
            assert there() is None
    finally:
        gc.enable()


def test_a_moved_graph_goes_on_without_the_one_it_was_moved_from() -> None:
    away = graphs.causal().bind(3).power(2).to("meta")
    back = away.to("cpu")
    assert (back.device.type, back.num_edges) == ("cpu", 6)
    assert away.to("cpu") is back
    assert back.to("meta") is away
    alone = pickle.loads(pickle.dumps(graphs.from_edges(EDGES, 4).to("cpu")))
    assert alone.to("cpu") is alone


def test_a_graph_moves_once_and_knows_its_way_back() -> None:
    graph = graphs.from_edges(EDGES, 4, edge_attr=ATTR, edge_type=KIND)
    away = graph.to("meta")  # the one other device that every machine has
    assert away is graph.to(torch.device("meta"))
    assert away.to("cpu") is graph
    assert graph.to("cpu") is graph
    assert away.device == away.edge_index.device == away.edge_attr.device == away.edge_type.device
    assert away.device.type == "meta"


def test_structured_graphs_move_with_their_runs() -> None:
    graph = graphs.windows(2, 2, size=2).bind(4)
    away = graph.to("meta")
    assert away.labels is graph.labels
    assert (away.relation, away.name, away.num_edges) == (graph.relation, graph.name, graph.num_edges)
    for form in (away.edge_index, away.dense(), away.degree(), away.csr.ptr, away.cliques[0], away.reverse().degree()):
        assert form.device.type == "meta"
    assert (graphs.causal() & away).device.type == "meta"
    assert (away | graphs.causal()).device.type == "meta"
    with pytest.raises(ValueError, match=r"the graphs are on cpu and meta; move one with \.to\(device\)"):
        graph | away


# ------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize("structured", [False, True])
def test_some_things_need_one_set_of_nodes(structured: bool) -> None:
    graph = graphs.complete().bind(2, 3) if structured else graphs.from_edges([[2], [1]], num_src=3, num_dst=2)
    for name, call in (
        ("power", lambda: graph.power(2)),
        ("self-loops", graph.with_self_loops),
        ("undirected", graph.undirected),
        ("reach", lambda: graph.reach(1)),
        ("diameter", graph.diameter),
    ):
        with pytest.raises(ValueError, match=f"{name} needs? one set of nodes; the graph is 2 x 3"):
            call()


def test_bad_numbers_are_named(graph: Graph) -> None:
    with pytest.raises(ValueError, match=r"power needs an integer k >= 1; got 1\.5"):
        graph.power(1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"start must be an integer; got 0\.0"):
        graph.rows(0.0, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"loops cannot have attributes of 0\.5 where edge_attr holds torch\.int64"):
        graphs.from_edges(EDGES, edge_attr=KIND).with_self_loops(0.5)
    with pytest.raises(ValueError, match="power needs an integer k >= 1; got 0"):
        graph.power(0)
    with pytest.raises(ValueError, match=r"p must lie between 0 and 1; got 1\.5"):
        graph.drop_edges(1.5)
    with pytest.raises(ValueError, match="layers must be at least 0; got -1"):
        graph.reach(-1)
    with pytest.raises(ValueError, match="same size; got 4 x 4 and 3 x 3"):
        graph & graphs.causal().bind(3)


def test_edges_of_32_bits_are_converted_by_the_builder_and_refused_by_the_graph() -> None:
    edges = EDGES.int()
    assert torch.equal(graphs.from_edges(edges, 4).csr.ptr, graphs.from_edges(EDGES, 4).csr.ptr)
    with pytest.raises(TypeError, match=r"must be int64; got torch.int32: graphs.from_edges converts them"):
        Graph.from_edges(edges, 4, 4)


@pytest.mark.parametrize("graph", [graphs.window(2).bind(6), graphs.from_edges([[0, 1, 2, 5, 3], [1, 1, 0, 3, 5]], 6)])
def test_a_part_of_the_nodes_and_the_edges_between_them(graph):
    keep = torch.tensor([True, True, False, True, False, True])
    part = graph.subgraph(keep)
    assert torch.equal(part.dense(), graph.dense()[keep][:, keep])
    assert part.node_positions()[0].tolist() == [0, 1, 3, 5]
    both = graphs.batch([part, graph])
    assert both.node_positions()[1].tolist() == [0, 1, 3, 5, 0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"keep must be bool \[6\]; got torch.bool of shape \[5\]"):
        graph.subgraph(keep[:5])


def test_kernels_keep_32_bits_for_an_end_of_an_edge_and_no_order_that_they_do_not_read() -> None:
    num_edges, num_nodes = 100_000, 100
    graph = graphs.from_edges(torch.randint(num_nodes, (2, num_edges)), num_nodes)
    x = torch.randn(num_nodes, 2, 4, requires_grad=True)

    def bytes_per_edge() -> int:
        return round(bytes_of(graph) / num_edges)

    assert bytes_per_edge() == 2 * 4  # both ends, in 32 bits
    ops.aggregate(graph, x[:, 0], backend="csr").sum().backward()
    assert bytes_per_edge() == 8 + 2 * (4 + 8)  # by destination and by source: the other end, the edge's number
    ops.attend(graph, x, x, x, backend="csr").sum().backward()
    assert bytes_per_edge() == 8 + 2 * (4 + 8) + 8  # where an edge by source is by destination
    assert graph.edge_index.dtype == torch.int64
    assert bytes_per_edge() == 8 + 2 * (4 + 8) + 8 + 16


def test_many_edges_are_stored_in_32_bits_and_read_in_64(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = torch.randint(9, (2, 40), generator=torch.Generator().manual_seed(0))
    keep = torch.arange(9) % 3 > 0

    def derived() -> list[Graph]:
        graph = graphs.from_edges(edges, 9, edge_type=torch.arange(40) % 3)
        plain = graphs.from_edges(edges, 9)
        return [
            *(graph, graph.reverse(), graph.rows(2, 7), graph.columns(torch.tensor([1, 4, 5])), graph.compact()[1]),
            *(graph.subgraph(keep), graph & graphs.causal().bind(9), graph - graphs.causal().bind(9)),
            *(
                plain.with_self_loops(),
                plain.undirected(),
                plain.power(2),
                plain.reordered(),
                graphs.batch([graph, graph]),
            ),
            *(graph.drop_edges(0.5, torch.Generator().manual_seed(0)), pickle.loads(pickle.dumps(graph))),
        ]

    wide = derived()
    monkeypatch.setattr("mpnn.graph.csr._MANY_EDGES", 10)
    narrow = derived()
    assert wide[0].stored_edges.dtype == torch.int64
    assert narrow[0].stored_edges.dtype == narrow[-1].stored_edges.dtype == torch.int32
    assert torch.equal(narrow[0].edge_index, edges)
    for one, other in zip(wide, narrow, strict=True):
        assert one.edge_index.dtype == other.edge_index.dtype == torch.int64
        assert torch.equal(one.edge_index, other.edge_index)
        for sides in ("csr", "csc"):
            mine, theirs = getattr(one, sides), getattr(other, sides)
            assert torch.equal(mine.ptr, theirs.ptr)
            assert torch.equal(mine.col, theirs.col)
        assert torch.equal(one.dense(), other.dense())
        assert torch.equal(one.degree(), other.degree())
        assert np.array_equal(one.runs.start, other.runs.start)
    state = narrow[0].__getstate__()
    assert state["_edges"].dtype == torch.int64  # a file that versions without 32 bits read
    assert graphs.from_edges([[2**31], [0]], num_src=2**31 + 1, num_dst=1).stored_edges.dtype == torch.int64
