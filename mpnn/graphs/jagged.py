"""torch's jagged tensors (`torch.nested`, layout jagged): sequences of different lengths in one row, as documents.

A call over jagged features runs over their values, and a topology is that of each sequence: `documents(lengths,
inner=topology)`, with the lengths that the offsets give.
"""

from typing import Any

import torch
from torch import Tensor

from mpnn.graph import Graph
from mpnn.graph.modes import uncompiled
from mpnn.graph.topology import Topology
from mpnn.graphs.sequence import documents


@uncompiled
def call(
    operator: Any, x: Tensor, graph: Topology | Graph, source: Any, edge_attr: Tensor | None, weights: bool, cache: Any
) -> Any:
    """The call of an operator with jagged features. Arguments as for `MessagePassing.forward`."""
    if cache is not None:
        raise ValueError("a cache holds sequences of one length; x is jagged")
    graph = graph_of(graph, x, source if isinstance(source, Tensor) else x)
    result = operator(values_of("x", x), graph, values_of("source", source), edge_attr, weights)
    return (like(result[0], x), result[1]) if isinstance(result, tuple) else like(result, x)


def is_jagged(x: Any) -> bool:
    return isinstance(x, Tensor) and x.layout == torch.jagged


def values_of(name: str, x: Any) -> Any:
    """The values of a jagged tensor [B, j, ...], [sum of lengths, ...]; anything else unchanged.

    Raises:
        ValueError: the jagged dimension is not the second, or places lie between the sequences.
    """
    if not is_jagged(x):
        return x
    if x._ragged_idx != 1:
        raise ValueError(
            f"the jagged dimension of {name} must be the second, [B, j, ...]; it is number {x._ragged_idx} of "
            f"{x.dim()}: transpose {name}"
        )
    if x.lengths() is not None:
        raise ValueError(f"places lie between the sequences of {name}, which was narrowed: call .contiguous()")
    return x.values()


def lengths_of(x: Tensor) -> tuple[int, ...]:
    """The lengths of the sequences."""
    offsets: Tensor = x.offsets()  # type: ignore[attr-defined]  # of jagged tensors alone
    return tuple(offsets.diff().tolist())


def like(values: Tensor, x: Any) -> Tensor:
    """Values [sum of lengths, ...] as a jagged tensor of the sequences of `x`, so that sums of both are defined."""
    return torch.nested.nested_tensor_from_jagged(values, x.offsets())


def graph_of(graph: Topology | Graph, dst: Tensor, src: Tensor) -> Topology | Graph:
    """The topology of all sequences, if `graph` is that of each; a Graph is one over all nodes.

    Raises:
        TypeError: one of the two is not jagged.
        ValueError: they have other numbers of sequences, or the topology compares positions and their lengths differ.
    """
    if not isinstance(graph, Topology):
        return graph
    if not (is_jagged(dst) and is_jagged(src)):
        raise TypeError("a topology over jagged features is that of each sequence, so all features must be jagged")
    lengths = lengths_of(dst)
    return documents(lengths, graph, src_lengths=None if src.offsets() is dst.offsets() else lengths_of(src))  # type: ignore[attr-defined]
