"""Parts of graphs: what they say is the adjacency, and a graph that does not fall into parts has none."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra.numpy import arrays

from mpnn import Graph, Topology, graphs
from mpnn.graph.runs import Ints, Runs
from mpnn.kernels.parts import Parts

LENGTHS = st.lists(st.integers(1, 4), max_size=5)


def adjacency(parts: Parts) -> np.ndarray:
    """bool [N, N], pair by pair."""
    of = parts.labels
    node = np.arange(parts.num_nodes)
    same = of[:, None] == of
    return same & (node[:, None] >= node) if parts.is_causal else same


def by_looking(allowed: np.ndarray) -> list[int] | None:
    """The lengths of the parts of an adjacency, found by trying all lengths of each part."""
    n = len(allowed)
    for kind in (np.tril, np.asarray):
        lengths: list[int] = []
        expected = np.zeros_like(allowed)
        while sum(lengths) < n:
            first = sum(lengths)
            fits = [k for k in range(1, n - first + 1) if (allowed[first:, first] == (np.arange(n - first) < k)).all()]
            lengths.append(fits[0] if fits else n - first)
            stop = sum(lengths)
            expected[first:stop, first:stop] = kind(np.ones((stop - first, stop - first), bool))
        if (expected == allowed).all():
            return lengths
    return None


@settings(deadline=None)
@given(LENGTHS, st.booleans())
def test_parts_of_documents(lengths: list[int], is_causal: bool) -> None:
    topology = graphs.documents(lengths)
    graph = (topology & graphs.causal() if is_causal else topology)._graph(sum(lengths), sum(lengths))
    parts = graph.parts
    assert parts is not None
    assert parts.order is None
    assert parts.lengths.tolist() == lengths
    assert (adjacency(parts) == graph.dense().numpy()).all()
    assert parts.is_complete == (not is_causal or max(lengths, default=0) <= 1)
    assert parts.num_edges == graph.num_edges
    assert sorted(np.concatenate([np.zeros(0), *map(np.ravel, parts.members)])) == list(range(sum(lengths)))


@settings(deadline=None, max_examples=300)
@given(LENGTHS, st.booleans(), st.data())
def test_a_graph_with_one_edge_more_or_less(lengths: list[int], is_causal: bool, data: st.DataObject) -> None:
    n = sum(lengths)
    allowed = adjacency(Parts(lengths, is_causal))
    for _ in range(data.draw(st.integers(0, 2)) if n else 0):
        edge = data.draw(st.tuples(st.integers(0, n - 1), st.integers(0, n - 1)))
        allowed[edge] = not allowed[edge]
    parts = Graph.from_runs(Runs.from_dense(allowed)).parts
    assert (None if parts is None else parts.lengths.tolist()) == by_looking(allowed)
    assert parts is None or (adjacency(parts) == allowed).all()


@given(arrays(np.int64, st.integers(0, 12), elements=st.integers(-2, 3)))
def test_parts_of_labels(labels: Ints) -> None:
    parts = Parts.of_labels(labels)
    assert (adjacency(parts) == (labels[:, None] == labels)).all()
    assert parts.num_edges == (labels[:, None] == labels).sum()
    assert Graph.from_labels(labels).is_scattered == (parts.order is not None)
    by_label = sorted(range(len(labels)), key=labels.__getitem__)
    order = np.arange(len(labels)) if parts.order is None else parts.order
    assert (parts.order is None) == (by_label == list(range(len(labels))) or len(set(labels.tolist())) == len(labels))
    assert (np.diff(parts.labels[order]) >= 0).all()
    for members in parts.members:
        assert (parts.labels[members] == parts.labels[members[:, :1]]).all()


def test_nodes_of_a_label_keep_their_order() -> None:
    """Also where numpy's other ways to sort change it."""
    labels = np.random.default_rng(0).integers(0, 3, 200)
    order = Parts.of_labels(labels).order
    assert order is not None
    assert order.tolist() == sorted(range(200), key=labels.__getitem__)


@pytest.mark.parametrize(
    "topology",
    [
        *(
            graphs.window(1),
            graphs.prefix(2),
            ~graphs.identity(),
            graphs.global_nodes(1),
            graphs.causal() & graphs.window(1),
        ),
        *(graphs.permutation([1, 0, 2, 3]), graphs.causal() - graphs.identity(), graphs.strided(2)),
    ],
    ids=str,
)
def test_graphs_without_parts(topology: Topology) -> None:
    assert topology.bind(4).parts is None


def test_edges_as_data_may_be_causal_parts() -> None:
    pairs = torch.tensor([[0, 0, 1, 2], [0, 1, 1, 2]])
    parts = graphs.from_edges(pairs, 3).parts
    assert parts is not None
    assert parts.lengths.tolist() == [2, 1]
    assert graphs.from_edges(torch.cat([pairs, pairs], 1), 3).parts is None, "an edge counts twice"
    assert graphs.complete().bind(2, 3).parts is None


def test_a_batch_and_the_table_of_kernels() -> None:
    parts = Parts([3, 2], is_causal=True).repeated(2)
    assert parts.is_causal
    assert parts.table.tolist() == [[0, 3, 0, 3], [3, 2, 0, 2], [5, 3, 0, 3], [8, 2, 0, 2]]
    assert Parts([4, 3], keys=([1, 0], [2, 3])).table.tolist() == [[0, 4, 1, 2], [4, 3, 0, 3]]
