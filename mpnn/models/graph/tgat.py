"""TGAT: attention over earlier edges, with their ages in keys and values."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing
from mpnn.graphs.encodings import TimeEncoding
from mpnn.models.graph.graph_transformer import HeadsOf
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import MLP


class TGAT(Model):
    """Temporal graph attention (Xu et al. 2020, arXiv:2002.07962, section 3.2), the embedding of TGN as well.

        q_i = W_Q [h_i || Phi(0)],   [k_ij, v_ij] = [W_K, W_V] [h_j || e_ij || Phi(t_i - t_ij)]
        m_i = || _h sum_j softmax_j( <q_i, k_ij> / sqrt(D) ) v_ij,   h_i <- W_1 relu( W_0 [m_i || h_i] + b_0 ) + b_1

    - topology: edges before the time t_i of the query, `neighbor_batches(TemporalGraph(...), ..., before=)`
    - attention: dot product, with the attributes and the age of an edge in its key and value
    - aggregate: sum
    - update: an MLP

    Args:
        in_dim, dim: widths of the features and of the states, which are the result.
        layers, heads: numbers of rounds and of heads, which divide dim.
        time_dim: width of the encoding of ages. edge_dim: width of edge attributes, or 0.
        dropout: of attention weights, in training.
    """

    def __init__(
        self,
        in_dim: int,
        dim: int = 100,
        layers: int = 2,
        heads: int = 2,
        time_dim: int = 100,
        edge_dim: int = 0,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        self.edge_dim = edge_dim
        self.encode = TimeEncoding(time_dim)
        attention = partial(HeadsOf, edge_dim=edge_dim + time_dim, dropout=dropout, shared=False)
        self.layers, self.merge = nn.ModuleList(), nn.ModuleList()
        for d in ([in_dim] + [dim] * layers)[:-1]:
            by_time = attention(d, dim // heads, heads, query_dim=d + time_dim)
            self.layers.append(MessagePassing(None, "sum", None, by_time))
            self.merge.append(MLP(dim + d, dim))

    def forward(self, x: Tensor, graphs: Sequence[Graph], ages: Sequence[Tensor]) -> Tensor:
        """Returns the states of the destinations of the last graph, [..., N, dim].

        Args:
            x: [..., M, in_dim], features of the sources of the first graph.
            graphs: one for each layer, as in a `NeighborBatch`; edge_dim is the width of their attributes.
            ages: [E] for each graph, how long before its destination's time each edge was.
        """
        validation.input_features("x", x)
        if not len(graphs) == len(ages) == len(self.layers):
            raise ValueError(f"{len(self.layers)} layers need as many graphs and ages; got {len(graphs)}, {len(ages)}")
        now = self.encode(x.new_zeros(()))
        for layer, merge, graph, age in zip(self.layers, self.merge, graphs, ages, strict=True):
            edges = self.encode(age)
            if self.edge_dim:
                edges = torch.cat([validation.edge_features("TGAT", graph.edge_attr), edges], -1)
            own = x[..., : graph.num_dst, :]
            query = torch.cat([own, now.expand(*own.shape[:-1], -1)], -1)
            message = layer(query, graph, source=x, edge_attr=edges)
            x = merge(torch.cat([message, own], -1))
        return x
