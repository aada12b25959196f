"""PNA: several aggregators at once, each scaled by how many spoke."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import aggregate, check, ops
from mpnn.attention import EdgeMessage
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import Update


class PNA(Model):
    """Principal neighbourhood aggregation (Corso et al. 2020, eq. 7-8).

        m_i = [ s (reduce_j M(h_i, h_j, e_ij)) for each scaler s and aggregator reduce ]
        h_i <- h_i + relu( U(h_i, m_i) )

    M and U are linear maps of their arguments side by side, each of `towers` parts of h having its own.

    Args:
        in_dim: width of the features. classes: width of the logits. dim: of the layers, a multiple of `towers`.
        layers: their number. aggregators, scalers: see `mpnn.aggregate.PNA`.
        edge_dim: width of the edges' attributes, None where they have none.
        average_log_degree: mean of log(d + 1) over the training graphs; default: over the graph at hand.
        graph: whom nodes hear; None when each call gives it.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        dim: int = 64,
        layers: int = 4,
        *,
        towers: int = 1,
        aggregators: Sequence[str] = ("mean", "max", "min", "std"),
        scalers: Sequence[str] = ("identity", "amplification", "attenuation"),
        edge_dim: int | None = None,
        average_log_degree: float | None = None,
        graph: Topology | Graph | None = None,
    ) -> None:
        super().__init__()
        if towers < 1 or dim % towers:
            raise ValueError(f"{towers} towers cannot share a width of {dim} evenly")
        width = dim // towers
        ends, views = 2 if edge_dim is None else 3, len(aggregators) * len(scalers)
        self.embed = nn.Linear(in_dim, dim)
        self.layers = nn.ModuleList(
            MessagePassing(
                graph,
                aggregate.PNA(aggregators, scalers, average_log_degree),
                TowerUpdate([nn.Linear((1 + views) * width, width) for _ in range(towers)], nn.Linear(dim, dim)),
                EdgeMessage(
                    TowerMessage(
                        [nn.Linear(ends * width, width) for _ in range(towers)],
                        None if edge_dim is None else nn.Linear(edge_dim, width),
                    )
                ),
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, classes)

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        edge_attr: Tensor | None = None,
        pool: Graph | None = None,
    ) -> Tensor:
        """x [..., N, in_dim] -> logits [..., N, classes]; or [..., G, classes] with `pool`, a graph of N sources and G
        destinations in which each destination hears the nodes of one graph. edge_attr: [E, edge_dim]; default: the
        graph's."""
        check.tensor("x", x)
        check.fits("PNA", "x", x, check.takes(self.embed))
        h = self.embed(x)
        for layer in self.layers:
            h = h + F.relu(layer(h, graph, edge_attr=edge_attr))
        return self.head(h if pool is None else ops.aggregate(pool, h, "mean"))


class TowerMessage(nn.Module):
    """M: for each tower t, `mlp_t( h_it || h_jt || W e_ij )`.

    Args:
        mlps: one for each tower. edge: W, None where edges have no features.
        shared: whether each tower hears all of h, rather than a part of its own.
    """

    def __init__(self, mlps: Iterable[nn.Module], edge: nn.Module | None = None, shared: bool = False) -> None:
        super().__init__()
        self.mlps, self.edge, self.shared = nn.ModuleList(mlps), edge, shared

    def forward(self, dst: Tensor, src: Tensor, edge_attr: Tensor | None) -> Tensor:
        """[..., E, T, F] of the features at both ends of each edge, [..., E, d], and edge_attr [E, edge_dim]."""
        heard = [parted(x, len(self.mlps), self.shared) for x in (dst, src)]
        if self.edge is not None:
            if edge_attr is None:
                raise ValueError("this layer was made with edge_dim, so the graph or the call must give edge_attr")
            heard.append(self.edge(edge_attr).unsqueeze(-2).expand_as(heard[0]))
        side_by_side = torch.cat(heard, -1)
        return torch.stack([mlp(side_by_side[..., t, :]) for t, mlp in enumerate(self.mlps)], -2)


class TowerUpdate(Update):
    """U: `out( mlp_1( x_1 || m_1 ) || mlp_2( x_2 || m_2 ) || ... )`, one MLP for each tower; `shared` as above."""

    def __init__(self, mlps: Iterable[nn.Module], out: nn.Module, shared: bool = False) -> None:
        super().__init__()
        self.mlps, self.out, self.shared = nn.ModuleList(mlps), out, shared

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        towers = len(self.mlps)
        both = torch.cat([parted(x, towers, self.shared), message.unflatten(-1, (towers, -1))], -1)
        return self.out(torch.cat([mlp(both[..., t, :]) for t, mlp in enumerate(self.mlps)], -1))


def parted(x: Tensor, towers: int, shared: bool) -> Tensor:
    """[..., towers, F]: the whole of x [..., d] for each tower, or a part for each."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], towers, -1) if shared else x.unflatten(-1, (towers, -1))
