"""Graphormer: attention over all pairs of atoms of a molecule, with distances and bonds as biases."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.graphs import encodings
from mpnn.models.saving import Model
from mpnn.position import EdgeBias, Position, Table
from mpnn.round import validation
from mpnn.update import FeedForward, PreNorm
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear


class Graphormer(Model):
    """Graphormer for molecular property prediction (Ying et al. 2021, "Do transformers really perform bad for graph
    representation?").

        h_i  = W x_i + z_in[indegree i] + z_out[outdegree i]                               centrality (eq. 5)
        s_ij = <W_Q h_i, W_K h_j> / sqrt(D) + b[distance ij] + c_ij                        spatial    (eq. 6)
        c_ij = 1/L sum_n <x_{e_n}, w_n>,   e_1 ... e_L the edges of a path from j to i     edges      (eq. 7)
        y    = z + ffn(norm'(z)),   z = h + attention(norm(h))                             layers     (eq. 8-9)

    A virtual node is added to each molecule (section 3.2). It is connected with all atoms in both directions, with its
    own value of `b`, and its final state is the readout. Pairs without a path also have their own value of `b`. All
    layers share the biases.

    Args:
        in_dim: width of the nodes' features.
        outputs: number of properties to predict.
        edge_dim: width of the edge features; 0 if there are none.
        dim: width of the layers, a multiple of `heads`.
        heads: number of attention heads.
        layers: number of layers.
        most_degree: larger degrees are clipped to this.
        max_distance: longer distances are clipped to this.
        steps: number of edges of a path that are used, nearest to i first.
        dropout: dropout probability of the residual branches and of the attention weights, in training.
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
        self.most_degree = most_degree
        self.max_distance = max_distance
        self.steps = steps
        self.edge_dim = edge_dim
        self.embed = Linear(in_dim, dim)
        self.of_indegree, self.of_outdegree = (nn.Embedding(most_degree + 1, dim) for _ in range(2))
        self.virtual = nn.Parameter(torch.randn(1, dim))
        # edge types: distances 0 to max_distance, no path, and pairs with the virtual node
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
        self.norm = nn.LayerNorm(dim)
        self.head = Linear(dim, outputs)

    def forward(self, x: Tensor, molecules: Sequence[Graph]) -> Tensor:
        """Returns properties [G, outputs] of G molecules of any sizes.

        Args:
            x: the nodes' features [N, in_dim], molecule after molecule.
            molecules: the molecules' graphs, with `edge_attr` [E, edge_dim] if the model has an edge_dim. Distances and
                paths are computed once for each graph and cached on it; `edge_attr` is read in each call.
        """
        validation.input_features("x", x)
        validation.fits("Graphormer", "x", x, validation.takes(self.embed))
        sizes = [molecule.num_dst for molecule in molecules]
        if sum(sizes) != len(x):
            raise ValueError(f"the {len(sizes)} molecules have {sum(sizes)} nodes, but x has {len(x)} rows")
        degree = torch.cat([encodings.degrees(molecule, self.most_degree) for molecule in molecules])
        h = self.embed(x) + self.of_indegree(degree[:, 0]) + self.of_outdegree(degree[:, 1])
        h = torch.cat([part for nodes in h.split(sizes) for part in (self.virtual, nodes)])
        pairs = graphs.batch([_pairs(molecule, self.max_distance) for molecule in molecules])
        edge_attr = None
        if self.edge_dim:
            edge_attr = torch.cat([_along_paths(molecule, self.steps, self.edge_dim) for molecule in molecules])
        h = self.dropout(h)
        for layer in self.layers:
            h = layer(h, pairs, edge_attr=edge_attr)
        virtual = torch.tensor([0, *sizes[:-1]], device=x.device).cumsum(0) + torch.arange(len(sizes), device=x.device)
        return self.head(self.norm(h[virtual]))

    def loss(self, x: Tensor, molecules: Sequence[Graph], target: Tensor) -> Tensor:
        """Returns the mean absolute error (section 4.1); target [G, outputs]."""
        return F.l1_loss(self(x, molecules), target)


def _pairs(molecule: Graph, max_distance: int) -> Graph:
    """The complete graph over a virtual node (node 0) and the nodes of a molecule, cached on the molecule. The type of
    an edge is the distance between its two nodes."""

    def build() -> Graph:
        n = molecule.num_dst
        distances = F.pad(encodings.shortest_paths(molecule, max_distance), (1, 0, 1, 0), value=max_distance + 2)
        edges = graphs.complete().bind(n + 1).edge_index.to(molecule.device)
        return graphs.from_edges(edges, n + 1, edge_type=distances.flatten())

    return molecule.cached(("graphormer", max_distance), build)


def _along_paths(molecule: Graph, steps: int, edge_dim: int) -> Tensor:
    """[(1 + N)^2, steps * edge_dim], for each edge of `_pairs`: the features of the edges on a shortest path, step by
    step, divided by the number of these edges; zeros for the virtual node."""
    edge_attr = molecule.edge_attr
    features = edge_attr[:, None] if edge_attr is not None and edge_attr.dim() == 1 else edge_attr
    if features is None or features.shape[1:] != (edge_dim,):
        got = "none" if edge_attr is None else list(edge_attr.shape)
        raise ValueError(f"edge_attr must have shape [{molecule.num_edges}, {edge_dim}], as edge_dim says; got {got}")
    paths = molecule.cached(("path edges", steps), lambda: encodings.path_edges(molecule, steps))
    none = features.new_zeros(1, edge_dim)
    on_path = torch.cat([features, none])[paths]  # -1 (no edge) selects the last row, zeros
    length = (paths >= 0).sum(-1).clamp(min=1)
    return F.pad((on_path / length[..., None, None]).flatten(-2), (0, 0, 1, 0, 1, 0)).flatten(0, 1)
