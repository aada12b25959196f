"""Trees of texts: the edges and depths against a walk from each node to its root, and attention over a tree against the
separate texts in it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from well_formed import check_well_formed

from mpnn import MessagePassing, Topology, graphs, ops
from mpnn.attention import DotProduct
from mpnn.position import T5, ALiBi, Rotary, Shaw
from mpnn.update import FeedForward, PreNorm


def random_tree(nodes: int, branches: float) -> np.ndarray:
    """Parents of which a share is drawn from all earlier nodes, and the others continue a chain."""
    random = np.random.default_rng(nodes)
    drawn = [random.integers(-1, i) if random.random() < branches else i - 1 for i in range(nodes)]
    return np.array(drawn, np.int64).reshape(nodes)


def ancestors(parent: np.ndarray) -> np.ndarray:
    """Which nodes are on the path from the root to each node, bool [N, N]."""
    on_path = np.zeros((len(parent), len(parent)), bool)
    for i, node in enumerate(range(len(parent))):
        while node >= 0:
            on_path[i, node] = True
            node = int(parent[node])
    return on_path


@pytest.mark.parametrize("branches", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("nodes", [0, 1, 2, 7, 97])
def test_nodes_attend_to_their_ancestors_and_depths_are_positions(nodes: int, branches: float) -> None:
    parent = random_tree(nodes, branches)
    expected, graph = ancestors(parent), graphs.tree(torch.from_numpy(parent))
    check_well_formed(graph.runs)
    assert graph.dense().numpy().tolist() == expected.tolist()
    assert graph.positions is not None
    for depth in graph.positions:
        assert depth.tolist() == (expected.sum(1) - 1).tolist()


OVER_DEPTHS = [
    graphs.causal(), graphs.causal() & graphs.window(3), graphs.causal() & graphs.window(2, dilation=2),
    graphs.causal() & graphs.longformer(4, globals=1), graphs.strided(3), graphs.identity(),
]  # fmt: skip


@pytest.mark.parametrize("topology", OVER_DEPTHS, ids=str)
def test_topologies_of_trees_count_depths(topology: Topology) -> None:
    for branches in (0.1, 0.5):
        parent = random_tree(61, branches)
        on_path = ancestors(parent)
        depth = on_path.sum(1) - 1
        along = topology.bind(int(depth.max()) + 1).dense().numpy()[depth[:, None], depth]
        graph = graphs.tree(parent.tolist(), topology)
        check_well_formed(graph.runs)
        assert (graph.dense().numpy() == (on_path & along)).all()


def test_rollouts_are_a_prompt_and_answers_behind_it() -> None:
    graph = graphs.rollouts(3, [2, 0, 1])
    assert torch.equal(graph.dense(), graphs.tree([-1, 0, 1, 2, 3, 2]).dense())
    assert graph.node_positions()[1].tolist() == [0, 1, 2, 3, 4, 3]
    assert repr(graph) == "Graph(tree: 6 nodes, 19 edges)"
    assert torch.equal(graphs.rollouts(0, [2, 3]).dense(), (graphs.causal() & graphs.documents([2, 3])).bind(5).dense())
    windowed = graphs.rollouts(3, [2, 1], graphs.causal() & graphs.window(1))
    assert windowed.edge_index.T.tolist() == [
        [0, 0], [0, 1], [1, 1], [1, 2], [2, 2], [2, 3], [3, 3], [3, 4], [4, 4], [2, 5], [5, 5],
    ]  # fmt: skip


def test_groups_are_batched() -> None:
    both = graphs.batch([graphs.rollouts(2, [1, 2]), graphs.rollouts(1, [1])])
    assert torch.equal(both.dense(), graphs.tree([-1, 0, 1, 1, 3, -1, 5]).dense())
    assert both.node_positions()[0].tolist() == [0, 1, 2, 2, 3, 0, 1]


def test_a_million_tokens_are_a_run_each() -> None:
    graph = graphs.rollouts(1_000_000, [1000] * 8)
    assert graph.runs.num_runs == 1_000_000 + 2 * 7000 + 1000  # the first answer goes on from the prompt
    assert graph.num_edges == 1_000_000 * 1_000_001 // 2 + 8 * (1000 * 1_000_000 + 1000 * 1001 // 2)


def test_bad_trees_name_the_node() -> None:
    with pytest.raises(ValueError, match="the parent of node 2 is 2; it must be -1, for a root, or a node before 2"):
        graphs.tree([-1, 0, 2])
    with pytest.raises(ValueError, match="the parent of node 1 is -2"):
        graphs.tree(torch.tensor([-1, -2]))
    with pytest.raises(TypeError, match="parent must hold an integer for each node; got float64"):
        graphs.tree([-1, 0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"answers\[1\] must be at least 0; got -1"):
        graphs.rollouts(2, [1, -1])
    with pytest.raises(ValueError, match=r"position 0 attends to position 1, .* use causal\(\) & \(window\(1\)\)"):
        graphs.tree([-1, 0, 1], graphs.window(1))


PROMPT, ANSWERS = 6, [3, 5, 1]


def texts(x: Tensor) -> Iterator[Tensor]:
    """The features of each answer with the prompt before it."""
    answers = x[PROMPT:].split(ANSWERS)
    return (torch.cat([x[:PROMPT], answer]) for answer in answers)


@pytest.mark.parametrize("topology", [graphs.causal(), graphs.causal() & graphs.window(2)], ids=str)
@pytest.mark.parametrize("position", ["rotary", "alibi", "t5", "shaw"])
def test_a_tree_gives_the_features_and_gradients_of_separate_texts(position: str, topology: Topology) -> None:
    torch.manual_seed(0)
    make = {"rotary": lambda: Rotary(4), "alibi": lambda: ALiBi(2), "t5": lambda: T5(2), "shaw": lambda: Shaw(4, 3)}
    layers = [
        MessagePassing(None, "sum", PreNorm(8, FeedForward(8)), DotProduct(8, 2, position=make[position]()))
        for _ in range(2)
    ]
    net = nn.ModuleList(layers).double()
    x = torch.randn(PROMPT + sum(ANSWERS), 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)

    def run(y: Tensor, graph: object) -> Tensor:
        for layer in net:
            y = layer(y, graph)
        return y

    leaves = [x, *net.parameters()]
    found = run(x, graphs.rollouts(PROMPT, ANSWERS, topology))
    gradients = torch.autograd.grad((found * weight).sum(), leaves)
    separate = [run(text, topology) for text in texts(x)]
    expected = torch.cat([separate[0][:PROMPT], *(y[PROMPT:] for y in separate)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    for one, other in zip(gradients, torch.autograd.grad((expected * weight).sum(), leaves), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", ["tiles", "csr", "dense"])
def test_dropout_over_a_tree_drops_the_edges_that_the_reference_drops(backend: str) -> None:
    graph, outs = graphs.rollouts(40, [30, 41]), []
    query, key, value = torch.randn(3, graph.num_src, 2, 4, dtype=torch.float64)
    for name in ("edge_list", backend):
        torch.manual_seed(1)
        outs.append(ops.attend(graph, query, key, value, dropout=0.5, backend=name))
    torch.testing.assert_close(*outs, rtol=0, atol=1e-10)
