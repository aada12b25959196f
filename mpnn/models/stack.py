"""What graph networks share: rounds of message passing, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.topology import Topology


class Stack(nn.Module):
    """`x <- layer(dropout(x))` for each layer; every layer hears over the same graph.

    Args:
        layers: the rounds. dropout: of the features that enter each of them, in training.
    """

    def __init__(self, layers: Iterable[MessagePassing], dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor, graph: Topology | Graph | None = None) -> Tensor:
        """x [..., N, in_dim] -> [..., N, out_dim] over `graph`, or over the layers' own when that is None.

        Where the first thing a model does is a linear map (GCN, GAT), x may be a torch sparse tensor [N, in_dim].
        """
        for layer in self.layers:
            x = layer(self.dropout(x), graph)
        return x


class Dropout(nn.Dropout):
    """Dropout that draws only for the stored numbers of sparse features: bags of words are nearly all zeros, and to
    draw for those takes longer than all the rest of a training step."""

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_sparse:
            return super().forward(x)
        x = x.coalesce()
        kept = F.dropout(x.values(), self.p, self.training)
        return torch.sparse_coo_tensor(x.indices(), kept, x.shape, is_coalesced=True, check_invariants=False)
