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
