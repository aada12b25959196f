"""Graphs as pictures in ASCII, so that tests show their edges: rows are destinations, columns sources."""

import textwrap

import torch
from torch import Tensor

from mpnn import Graph


def drawn(picture: str) -> Tensor:
    """The bool matrix of a picture whose rows are made of `#` (an edge) and `.` (none)."""
    rows = textwrap.dedent(picture).split()
    return torch.tensor([[mark == "#" for mark in row] for row in rows])


def draw(graph: Graph) -> str:
    """The picture of a graph, one line a destination."""
    return "\n".join("".join("#" if edge else "." for edge in row) for row in graph.dense().tolist())


# Six edges among four nodes in no order: 1 -> 0 twice, a self-loop on 2, and node 3 has no in-neighbors.
EDGES = torch.tensor([[1, 2, 0, 1, 2, 3], [0, 1, 1, 0, 2, 1]])
ATTR = torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0, 15.0])
KIND = torch.tensor([0, 1, 2, 0, 1, 2])
MASK = drawn("""
    .#..
    #.##
    ..#.
    ....
""")


def listed(graph: Graph) -> list[tuple[int, int]]:
    """The edges as pairs (src, dst), in the caller's order."""
    return [(src, dst) for src, dst in graph.edge_index.T.tolist()]
