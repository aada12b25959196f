"""Biases by offset i - j, as one table that kernels read."""

import torch
from torch import Tensor

from mpnn.edge_tables import EmbeddingTable, PerEdge, total
from mpnn.graph.relations import Offset
from mpnn.round import Round


def by_offset(bias: PerEdge) -> bool:
    """Whether a bias is a table by offset."""
    return isinstance(bias, EmbeddingTable) and type(bias.relation) is Offset


def table(round: Round, room: int = 0) -> Tensor | None:
    """The sum of all biases by offset, [H, offsets + room]: the bias of i - j is at index i - j + num_src - 1. None if
    there are no such biases."""
    graph, biases = round.graph, [b for b in round.bias if by_offset(b)]
    if not biases:
        return None
    offsets = graph.num_dst + graph.num_src - 1 + room
    i = torch.arange(offsets, device=graph.device) - (graph.num_src - 1) + graph.shift
    zero = torch.zeros((), dtype=torch.int64, device=graph.device)
    by_index = total(
        [
            b.table.to(round.accumulate_dtype).index_select(0, b.relation.ids(i, zero))
            for b in biases
            if isinstance(b, EmbeddingTable) and b.relation
        ]
    )
    return None if by_index is None else by_index.expand(-1, round.heads).T.contiguous()
