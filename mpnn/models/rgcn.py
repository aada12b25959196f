"""R-GCN: what a neighbour says is heard through a map that belongs to the kind of link between the two."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import Typed
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.stack import Stack
from mpnn.topology import Topology
from mpnn.update import SelfConnection


class RGCN(Stack):
    """Relational graph convolution for classifying entities (Schlichtkrull et al. 2018, eq. 2).

        h_i <- relu( W_0 h_i + sum_r W_r mean_{j in N_r(i)} h_j ),   last layer: without relu

    Args:
        in_dim: width of the features. classes: width of the logits. relations: classes of edges.
        hidden: between layers. layers: their number.
        bases: of how many maps all `W_r` are combinations (eq. 3); None for free ones.
        dropout: of the features that enter each layer.
        graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        relations: int,
        hidden: int = 16,
        layers: int = 2,
        *,
        bases: int | None = None,
        dropout: float = 0.0,
        graph: Topology | Graph | None = None,
    ) -> None:
        widths = [in_dim, *[hidden] * (layers - 1), classes]
        rounds: list[MessagePassing] = []
        for here, there in pairwise(widths):
            maps = Typed(here, there, relations) if bases is None else BasisTyped(here, there, relations, bases)
            act = F.relu if len(rounds) < layers - 1 else None
            rounds.append(MessagePassing(graph, "mean", SelfConnection(here, there, act, bias=False), maps))
        super().__init__(rounds, dropout)


class BasisTyped(Typed):
    """`Typed` whose maps are combinations of a few: `W_r = sum_b a_rb V_b` (eq. 3)."""

    def __init__(self, in_dim: int, out_dim: int, relations: int, bases: int, *, bias: bool = True) -> None:
        super().__init__(in_dim, out_dim, bases, bias=bias)
        self.relations = relations
        self.coefficients = nn.Parameter(torch.empty(relations, bases))
        nn.init.xavier_uniform_(self.coefficients)

    def maps(self) -> Tensor:
        return torch.einsum("rb,bio->rio", self.coefficients, self.weight)


class BlockTyped(Typed):
    """`Typed` whose maps are zero but for blocks on their diagonal (eq. 4); `blocks` divides both widths."""

    def __init__(self, in_dim: int, out_dim: int, relations: int, blocks: int, *, bias: bool = True) -> None:
        if in_dim % blocks or out_dim % blocks:
            raise ValueError(f"{blocks} blocks do not divide widths of {in_dim} and {out_dim}")
        super().__init__(in_dim // blocks, out_dim // blocks, relations * blocks, bias=False)
        self.in_dim, self.relations = in_dim, relations
        self.bias = nn.Parameter(torch.zeros(out_dim)) if bias else None

    def maps(self) -> Tensor:
        return torch.stack([torch.block_diag(*blocks) for blocks in self.weight.unflatten(0, (self.relations, -1))])
