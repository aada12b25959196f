"""R-GCN: messages transformed by a linear map for each edge type."""

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Typed
from mpnn.models.layers.stack import Stack
from mpnn.update import SelfConnection


class RGCN(Stack):
    """Relational graph convolutional network for entity classification (Schlichtkrull et al. 2018, eq. 2).

        h_i <- relu( W_0 h_i + sum_r W_r mean_{j in N_r(i)} h_j ),   last layer: without relu

    Args:
        in_dim, classes: widths of the input features and of the logits.
        relations: number of edge types.
        hidden: width between layers.
        layers: number of layers.
        bases: number of basis maps that every `W_r` is a combination of (eq. 3); None for independent `W_r`.
        dropout: dropout probability of the features that enter each layer.
        graph: topology or graph of every layer; None if each call passes one.
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
        for d, out in pairwise(widths):
            maps = Typed(d, out, relations) if bases is None else BasisTyped(d, out, relations, bases)
            act = F.relu if len(rounds) < layers - 1 else None
            rounds.append(MessagePassing(graph, "mean", SelfConnection(d, out, act, bias=False), maps))
        super().__init__(rounds, dropout)


class BasisTyped(Typed):
    """`Typed` whose maps are linear combinations of basis maps: `W_r = sum_b a_rb V_b` (eq. 3)."""

    depends_on = "node"

    def __init__(self, in_dim: int, out_dim: int, relations: int, bases: int, *, bias: bool = True) -> None:
        super().__init__(in_dim, out_dim, bases, bias=bias)
        self.relations = relations
        self.coefficients = nn.Parameter(torch.empty(relations, bases))
        nn.init.xavier_uniform_(self.coefficients)

    def maps(self) -> Tensor:
        return torch.einsum("rb,bio->rio", self.coefficients, self.weight)
