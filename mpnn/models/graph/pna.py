"""PNA: several aggregators in parallel, each scaled by functions of the in-degree."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology, aggregate
from mpnn.attention import EdgeMessage
from mpnn.models.layers.readout import pooled
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import Update
from mpnn.update.maps import Linear


class PNA(Model):
    """Principal neighborhood aggregation (Corso et al. 2020, eq. 7-8).

        m_i = [ s (reduce_j M(h_i, h_j, e_ij)) for each scaler s and aggregator reduce ]
        h_i <- h_i + relu( U(h_i, m_i) )

    M and U are linear maps of their concatenated arguments. The features h are split into `towers` parts, each with its
    own maps.

    Args:
        in_dim, classes: widths of the input features and of the logits.
        dim: width of the layers, a multiple of `towers`.
        layers: number of layers.
        towers: number of parts of h.
        aggregators: see `mpnn.aggregate.PNA`.
        scalers: see `mpnn.aggregate.PNA`.
        edge_dim: width of the edge features; None if there are none.
        average_log_degree: mean of log(d + 1) over the training graphs; default: over the graph of the call.
        graph: topology or graph of every layer; None if each call passes one.
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
        ends = 2 if edge_dim is None else 3
        views = len(aggregators) * len(scalers)
        self.embed = Linear(in_dim, dim)
        self.layers = nn.ModuleList(
            MessagePassing(
                graph,
                aggregate.PNA(aggregators, scalers, average_log_degree),
                TowerUpdate([Linear((1 + views) * width, width) for _ in range(towers)], Linear(dim, dim)),
                EdgeMessage(
                    TowerMessage(
                        [Linear(ends * width, width) for _ in range(towers)],
                        None if edge_dim is None else Linear(edge_dim, width),
                    )
                ),
            )
            for _ in range(layers)
        )
        self.head = Linear(dim, classes)

    def forward(
        self,
        x: Tensor,
        graph: Topology | Graph | None = None,
        edge_attr: Tensor | None = None,
        pool: Graph | None = None,
    ) -> Tensor:
        """Maps x [..., N, in_dim] to logits [..., N, classes], or [..., G, classes] with `pool`.

        `pool` has N sources and G destinations: each destination receives from the nodes of one graph. edge_attr:
        [E, edge_dim]; default: the graph's.
        """
        validation.input_features("x", x)
        validation.fits("PNA", "x", x, validation.takes(self.embed))
        h = self.embed(x)
        for layer in self.layers:
            h = h + F.relu(layer(h, graph, edge_attr=edge_attr))
        return self.head(h if pool is None else pooled(pool, h, "mean"))


class TowerMessage(nn.Module):
    """M: for each tower t, `mlp_t( h_it || h_jt || W e_ij )`.

    Args:
        mlps: one for each tower.
        edge: the map W; None if edges have no features.
    """

    def __init__(self, mlps: Iterable[nn.Module], edge: nn.Module | None = None) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(mlps)
        self.edge = edge

    def forward(self, dst: Tensor, src: Tensor, edge_attr: Tensor | None) -> Tensor:
        """dst and src [..., E, d], edge_attr [E, edge_dim] -> messages [..., E, T, F] of T towers."""
        parts = [x.unflatten(-1, (len(self.mlps), -1)) for x in (dst, src)]
        if self.edge is not None:
            edge_attr = validation.edge_features("a layer with edge_dim", edge_attr)
            validation.fits("PNA", "edge_attr", edge_attr, validation.takes(self.edge))
            parts.append(self.edge(edge_attr).unsqueeze(-2).expand_as(parts[0]))
        inputs = torch.cat(parts, -1)
        return torch.stack([mlp(inputs[..., t, :]) for t, mlp in enumerate(self.mlps)], -2)


class TowerUpdate(Update):
    """U: `out( mlp_1( x_1 || m_1 ) || mlp_2( x_2 || m_2 ) || ... )`, one MLP for each tower."""

    def __init__(self, mlps: Iterable[nn.Module], out: nn.Module) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(mlps)
        self.out = out

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        inputs = torch.cat([each.unflatten(-1, (len(self.mlps), -1)) for each in (x, message)], -1)
        return self.out(torch.cat([mlp(inputs[..., t, :]) for t, mlp in enumerate(self.mlps)], -1))
