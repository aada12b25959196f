"""Biases that follow from the offset of an edge's two ends, as one table that kernels look up in themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from mpnn.relation import Offset
from mpnn.scores import Lookup, PerEdge, Request


def by_offset(bias: PerEdge) -> bool:
    return isinstance(bias, Lookup) and isinstance(bias.relation, Offset)


def table(request: Request, room: int = 0) -> Tensor | None:
    """All biases by offset as one [H, offsets]: that of i - j stands at i - j + num_src - 1, with some room at the end;
    None when there are none."""
    graph, biases = request.graph, [b for b in request.bias if by_offset(b)]
    if not biases:
        return None
    offsets = graph.num_dst + graph.num_src - 1 + room
    i = torch.arange(offsets, device=graph.device) - (graph.num_src - 1) + graph.shift
    zero = torch.zeros((), dtype=torch.int64, device=graph.device)
    parts = [
        b.table.to(request.wide).index_select(0, b.relation.ids(i, zero))
        for b in biases
        if isinstance(b, Lookup) and b.relation
    ]
    return sum(parts[1:], parts[0]).expand(-1, request.heads).T.contiguous()
