"""The attention that `mpnn view` shows over the nodes of a graph: of runs of `mpnn train` on nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn import Graph, MessagePassing
from mpnn.cli.measure import attention_weights
from mpnn.cli.tasks import NodeRun, Nodes
from mpnn.cli.train import saved_run
from mpnn.cli.view_models import record_each, shown_name
from mpnn.graph.registry import did_you_mean
from mpnn.view import Page, subject as subjects
from mpnn.view.attention import Recording, attention

_MAX_NODES = 5_000  # on the page: those nearest to the chosen one
_BUDGET = 4 << 20  # bytes of the weights over one graph
_TYPICAL = 8  # in-neighbors of the node that is chosen without --node
_SIDE = 8  # pixels of a digit


def of_run(folder: str, node: str | None, graphs: Sequence[str] | None) -> Page:
    """The page of a run on nodes.

    Args:
        folder: where `mpnn train` saved it.
        node: the id or number of the node that is chosen when the page opens. None: one with about eight in-neighbors.
        graphs: expressions as for `mpnn train --graph`; "" stands for the graph of the training. None: this one.
    """
    run, model = saved_run(Path(folder))
    if not isinstance(run, NodeRun):
        what = "links" if run.settings["task"] == "links" else "many graphs"
        raise ValueError(f"the page shows classes of the nodes of one graph, and {folder} was trained on {what}")
    nodes = run.nodes
    if nodes.outputs.problem != "classes":
        raise ValueError(
            f"the page shows classes of nodes, and {folder} has {nodes.outputs.problem}: mpnn eval prints how good its "
            "model is, and mpnn predict writes a row for each node"
        )
    if any(layer.attention is None for layer in model.modules() if isinstance(layer, MessagePassing)):
        raise ValueError(f"the model in {folder} has no attention; train one with --model gat, transformer or gcn")

    def bind(expression: str) -> Graph:
        return nodes.graph(expression) if expression else run.graph

    own = bind(graphs[0] if graphs else "")
    size = len(nodes.data.x)
    ids = getattr(nodes.data, "ids", None)
    start = int((own.degree() - _TYPICAL).abs().argmin()) if node is None else _index(node, ids, size)
    order = _order(_nearest(own, start, _MAX_NODES), _classes(nodes))
    recorded, _ = record_each(
        lambda graph: record(model, nodes, bind(graph), graph or run.expression, order), graphs, lambda _: None
    )
    shown = subject(model, nodes, own, order, start)
    left = "" if len(order) == size else f" The page has the {len(order):,} of {size:,} nodes that are nearest to it."
    name = start if shown.names is None else shown.names[shown.start]
    said = f"What node {name} and its neighbors attend to in {shown_name(folder)}, in every layer and head.{left}"
    return Page(f"Node {name} and its neighbors", said, attention=attention(shown, recorded))


def record(model: Any, nodes: Nodes, graph: Graph, name: str, order: NDArray[np.int64]) -> Recording:
    """The attention of a model of nodes over a graph, between the nodes of `order`."""
    weights = attention_weights(model, nodes.data.x, graph)
    recording = Recording(name, len(order), len(weights), order, _BUDGET)
    for of_layer in weights:
        recording.add(graph, of_layer)
    return recording


def subject(model: Any, nodes: Nodes, graph: Graph, order: NDArray[np.int64], node: int) -> subjects.Nodes:
    """The nodes of `order` with their classes, and with their pictures if they are digits."""
    with torch.no_grad():
        predicted = model.eval()(nodes.data.x, graph).argmax(-1)
    at = torch.from_numpy(order)
    pictures = _pictures(nodes.data.x.cpu()[at]) if nodes.name == "digits" else None
    classes, given = _classes(nodes)[order].tolist(), predicted.cpu()[at].tolist()
    ids = getattr(nodes.data, "ids", None)
    names = nodes.outputs.names
    return subjects.Nodes(
        order.tolist(),
        classes,
        given,
        int((order == node).argmax()),
        pictures,
        None if ids is None else [ids[k] for k in order],
        None if names == tuple(map(str, range(len(names)))) else names,
    )


def _index(node: str, ids: Sequence[str] | None, size: int) -> int:
    """The number of a node from its id, or from its number where nodes have no ids."""
    if ids is not None:
        if node not in ids:
            some = ", ".join(ids[:3]) + ", ..." * (size > 3)
            raise ValueError(
                f"--node {node}: there is no such id{did_you_mean(node, ids)}; the {size:,} ids are {some}"
            )
        return ids.index(node)
    if not node.isdigit() or int(node) >= size:
        raise ValueError(f"--node {node}: the nodes of this run are 0 to {size - 1}")
    return int(node)


def by_class(nodes: Nodes) -> NDArray[np.int64]:
    """All nodes by class, and by number within a class. The matrices show classes as blocks."""
    return _order(np.arange(len(nodes.data.x)), _classes(nodes))


def _classes(nodes: Nodes) -> NDArray[np.int64]:
    """The class of each node; -1 where it is not known. In your own files, those are the nodes outside the parts."""
    data = nodes.data
    known = data.train_mask | data.val_mask | data.test_mask | (nodes.name != "edges")
    classes: NDArray[np.int64] = torch.where(known, data.y, -1).cpu().numpy()
    return classes


def _order(shown: NDArray[np.int64], classes: NDArray[np.int64]) -> NDArray[np.int64]:
    return shown[np.lexsort((shown, classes[shown]))]


def _nearest(graph: Graph, node: int, most: int) -> NDArray[np.int64]:
    """At most `most` nodes: those from which the fewest edges lead to `node`, and then those that have no way to it."""
    if graph.num_dst <= most:
        return np.arange(graph.num_dst)
    src, dst = graph.edge_index.cpu().numpy()
    reached = np.zeros(graph.num_dst, bool)
    reached[node], layers = True, [np.array([node])]
    while len(layers[-1]) and sum(map(len, layers)) < most:
        fresh = np.unique(src[np.isin(dst, layers[-1])])
        layers.append(fresh[~reached[fresh]])
        reached[fresh] = True
    return np.concatenate([*layers, np.flatnonzero(~reached)])[:most]


def _pictures(x: Tensor) -> NDArray[np.uint8]:
    """Digits, float [N, 64], as black on white, uint8 [N, 8, 8, 3]."""
    dark = x.view(-1, _SIDE, _SIDE, 1) / x.max()
    pixels: NDArray[np.uint8] = (255 * (1 - dark)).round().byte().expand(-1, -1, -1, 3).numpy()
    return pixels
