"""Texts that share their beginnings, such as a prompt with several answers, as trees: a pass computes a token once."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mpnn.graph import Graph, capacity
from mpnn.graph.arguments import at_least, integers
from mpnn.graph.runs import Ints, Runs, require_room
from mpnn.graph.topology import Topology


def tree(parent: Sequence[int] | Tensor, topology: Topology | None = None) -> Graph:
    """i receives from itself and from its ancestors: `causal()` along each path from a root to a node.

    `positions` are the depths of the nodes, so that relative positions see each path as one text.

    ::

        tree([-1, 0, 1, 1, 0])   #....
                                 ##...
                                 ###..
                                 ##.#.
                                 #...#

    Args:
        parent: the parent of each node, integers [N]; -1 for a root. Parents come before their children.
        topology: restricts each path, by depth; it must have no edges to later positions. `tree(parent, causal() &
            window(256))` is a window over each text; `tree(parent) & window(256)` compares the numbers of nodes.
    """
    graph = Graph.from_runs(paths(parents_of(parent)))
    depth = graph.degree() - 1
    graph = graph if topology is None else Graph.from_runs(along(graph.runs, topology))
    graph.name = "tree" if topology is None else f"tree, {topology}"
    return graph.with_positions(depth, depth)


def rollouts(prompt: int, answers: Sequence[int] | Tensor, topology: Topology | None = None) -> Graph:
    """Returns the graph of a prompt of `prompt` tokens, followed by answers of these lengths: each answer receives
    from the prompt and from its own earlier tokens. `positions` and `topology` are as for `tree`, and `graphs.batch`
    joins several groups.

    ::

        rollouts(2, [1, 2])   #....
                              ##...
                              ###..
                              ##.#.
                              ##.##
    """
    return tree(torch.from_numpy(answers_after(prompt, answers)), topology)


def answers_after(prompt: int, answers: Sequence[int] | Tensor) -> Ints:
    """The parent of each token of a prompt and its answers, int64 [N]."""
    lengths = integers("answers", answers)
    sizes = [at_least("prompt", prompt, 0), *(at_least(f"answers[{k}]", n, 0) for k, n in enumerate(lengths))]
    what = f"a prompt of {sizes[0]:,} tokens and {len(lengths)} answers of {sum(sizes[1:]):,}"
    capacity.require(32 * sum(sizes), what, "use shorter texts")
    parent = np.arange(sum(sizes)) - 1
    first = np.cumsum(sizes)[:-1]
    parent[first[first < len(parent)]] = sizes[0] - 1
    return parent


def parents_of(parent: Sequence[int] | Tensor) -> Ints:
    """The parents of nodes as int64 [N], validated."""
    try:
        array = parent.detach().cpu().numpy() if isinstance(parent, Tensor) else np.asarray(parent)
    except ValueError:
        raise TypeError(f"parent must hold an integer for each node; got {parent!r}") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise TypeError(f"parent must hold an integer for each node; got {array.dtype} of shape {list(array.shape)}")
    array = array.astype(np.int64)
    wrong = (array < -1) | (array >= np.arange(len(array)))
    if wrong.any():
        i = int(wrong.argmax())
        raise ValueError(f"the parent of node {i} is {array[i]}; it must be -1, for a root, or a node before {i}")
    return array


def paths(parent: Ints) -> Runs:
    """The nodes from a root to each node."""
    n = len(parent)
    begins = np.append(True, parent[1:] != np.arange(n - 1))[:n]
    head = np.flatnonzero(begins)
    chain = np.cumsum(begins) - 1
    path = np.arange(len(head))
    count = len(head)
    ends = np.append(head, n)[1:]
    # Of the last node of each chain, the nearest run first.
    runs = [np.stack([path, head, ends])]
    while len(path):
        stop = parent[runs[-1][1]] + 1
        path = path[stop > 0]
        stop = stop[stop > 0]
        runs.append(np.stack([path, head[chain[stop - 1]], stop]))
        count += len(path)
        require_room(len(head), n, count)
    path, start, stop = np.concatenate(runs, 1)
    ptr = np.append(0, np.cumsum(np.bincount(path, minlength=len(head))))
    order = np.lexsort([start, path])
    nodes = Runs(len(head), n, ptr, start[order], stop[order]).take(chain)
    nodes.stop[nodes.ptr[1:] - 1] = np.arange(n) + 1
    return nodes


def along(paths: Runs, topology: Topology) -> Runs:
    """The nodes on the path to each node to which it attends over a topology on depths."""
    depth = paths.degree() - 1
    most = int(depth.max(initial=-1)) + 1
    by_depth = topology.bind(most).runs
    late = by_depth.stop > by_depth.row + 1
    if late.any():
        i = int(by_depth.row[late.argmax()])
        raise ValueError(
            f"in {topology}, position {i} attends to position {by_depth.stop[late.argmax()] - 1}, and a node of a tree "
            f"attends to itself and its ancestors only; use causal() & ({topology})"
        )
    node = paths.row
    first = depth[paths.start]
    of_path = Runs.of(len(node), most, [(np.arange(len(node)), first, first + paths.stop - paths.start)])
    inside = by_depth.take(depth[node]) & of_path
    shift = (paths.start - first)[inside.row]
    return Runs.of(len(depth), len(depth), [(node[inside.row], inside.start + shift, inside.stop + shift)])
