"""Graphormer: every atom hears every other of its molecule, and is told how the bonds lead there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check, encodings, graphs
from mpnn.attention import DotProduct
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.position import EdgeBias, Position, Table
from mpnn.update import FeedForward, PreNorm


class Graphormer(Model):
    """Graphormer for properties of molecules (Ying et al. 2021, "Do transformers really perform bad for graph
    representation?").

        h_i  = W x_i + z_in[indegree i] + z_out[outdegree i]                               centrality (eq. 5)
        s_ij = <W_Q h_i, W_K h_j> / sqrt(D) + b[distance ij] + c_ij                        spatial    (eq. 6)
        c_ij = 1/L sum_n <x_{e_n}, w_n>,   e_1 ... e_L the edges on a path of i and j      edges      (eq. 7)
        y    = z + ffn(norm'(z)),   z = h + attention(norm(h))                             layers     (eq. 8-9)

    A virtual node joins each molecule (section 3.2): it hears all and is heard by all, with a `b` of its own, and what
    it has heard in the end is read out. Pairs without a path between them have a `b` of their own too. The biases are
    shared by all layers.

    Args:
        in_dim: width of the nodes' features. outputs: properties to predict. edge_dim: width of the edges' features;
            0 when they have none.
        dim, heads, layers: width, a multiple of heads; number of heads; of layers.
        most_degree: larger degrees count as this. max_distance: longer distances count as this.
        steps: of longer paths, the first so many edges (nearest to i) count.
        dropout: of what layers add and of attention weights, in training.
    """

    def __init__(
        self,
        in_dim: int,
        outputs: int,
        edge_dim: int = 0,
        dim: int = 80,
        heads: int = 8,
        layers: int = 12,
        *,
        most_degree: int = 64,
        max_distance: int = 20,
        steps: int = 5,
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.most_degree, self.max_distance, self.steps, self.edge_dim = most_degree, max_distance, steps, edge_dim
        self.embed = nn.Linear(in_dim, dim)
        self.of_indegree, self.of_outdegree = (nn.Embedding(most_degree + 1, dim) for _ in range(2))
        self.virtual = nn.Parameter(torch.randn(1, dim))
        # classes of pairs: distances 0 to max_distance, no path, and those with the virtual node
        positions: list[Position] = [Table(heads, relations=max_distance + 3)]
        if edge_dim:
            positions.append(EdgeBias(steps * edge_dim, heads))
        self.dropout = Dropout(dropout)
        self.layers = nn.ModuleList(
            MessagePassing(
                None,
                "sum",
                PreNorm(dim, FeedForward(dim, dim), dropout=dropout),
                DotProduct(dim, heads, dropout=dropout, position=positions),
            )
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, outputs)

    def forward(self, x: Tensor, molecules: Sequence[Graph]) -> Tensor:
        """Properties [G, outputs] of G molecules of any sizes.

        Args:
            x: the nodes' features [N, in_dim], those of each molecule after those of the one before it.
            molecules: their graphs, with `edge_attr` [E, edge_dim] when the model has an edge_dim. Distances and paths
                are found once for each graph, and kept with it.
        """
        check.tensor("x", x)
        check.fits("Graphormer", "x", x, check.takes(self.embed))
        sizes = [molecule.num_dst for molecule in molecules]
        if sum(sizes) != len(x):
            raise ValueError(f"the {len(sizes)} molecules have {sum(sizes)} nodes, but there are features of {len(x)}")
        degree = torch.cat([encodings.degrees(molecule, self.most_degree) for molecule in molecules])
        h = self.embed(x) + self.of_indegree(degree[:, 0]) + self.of_outdegree(degree[:, 1])
        h = torch.cat([part for nodes in h.split(sizes) for part in (self.virtual, nodes)])
        pairs = graphs.batch([self._pairs(molecule) for molecule in molecules])
        h = self.dropout(h)
        for layer in self.layers:
            h = layer(h, pairs)
        virtual = torch.tensor([0, *sizes[:-1]], device=x.device).cumsum(0) + torch.arange(len(sizes), device=x.device)
        return self.head(self.norm(h[virtual]))

    def loss(self, x: Tensor, molecules: Sequence[Graph], target: Tensor) -> Tensor:
        """Mean absolute error (section 4.1); target [G, outputs]."""
        return F.l1_loss(self(x, molecules), target)

    def _pairs(self, molecule: Graph) -> Graph:
        """Everybody hears everybody, the virtual node (node 0) included; kept with the molecule."""
        key = ("graphormer", self.max_distance, self.steps, self.edge_dim)
        return molecule.memo(key, lambda: _pairs(molecule, self.max_distance, self.steps, self.edge_dim))


def _pairs(molecule: Graph, max_distance: int, steps: int, edge_dim: int) -> Graph:
    """The complete graph over a molecule and a virtual node before it. An edge's class says how far apart its ends are;
    its attributes [steps * edge_dim], step by step, the features on the path over the path's length."""
    n = molecule.num_dst
    classes = F.pad(encodings.shortest_paths(molecule, max_distance), (1, 0, 1, 0), value=max_distance + 2)
    edges = graphs.complete().bind(n + 1).edge_index.to(molecule.device)
    attr = None
    if edge_dim:
        attr = F.pad(_along_paths(molecule, steps, edge_dim), (0, 0, 1, 0, 1, 0)).flatten(0, 1)
    return graphs.from_edges(edges, n + 1, edge_attr=attr, edge_type=classes.flatten())


def _along_paths(molecule: Graph, steps: int, edge_dim: int) -> Tensor:
    """[N, N, steps * edge_dim]: the features of the edges on a shortest path, over how many there are."""
    given = molecule.edge_attr
    features = given[:, None] if given is not None and given.dim() == 1 else given
    if features is None or features.shape[1:] != (edge_dim,):
        got = "none" if given is None else list(given.shape)
        raise ValueError(f"edge_attr must have shape [{molecule.num_edges}, {edge_dim}], as edge_dim says; got {got}")
    paths = encodings.path_edges(molecule, steps)
    none = features.new_zeros(1, edge_dim)
    on_path = torch.cat([features, none])[paths]  # -1 finds the last row
    length = (paths >= 0).sum(-1).clamp(min=1)
    return (on_path / length[..., None, None]).flatten(-2)
