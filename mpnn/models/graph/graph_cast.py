"""GraphCast: from a grid to a mesh of the globe and back."""

from torch import Tensor, nn

from mpnn import Graph
from mpnn.models.layers.interaction import interaction, mlp
from mpnn.models.saving import Model
from mpnn.round import validation


class GraphCast(Model):
    """The architecture of GraphCast (Lam et al. 2023, arXiv:2212.12794, section 3 of the supplement).

        e_ij <- e_ij + f( W [e_ij || h_i || h_j] )          h_i <- h_i + g( V [h_i || sum_j e_ij] )

    - topology: grid -> mesh, then the multi-mesh `graphs.icosphere(level)` in each layer, then mesh -> grid
    - attention: none; the message of an edge is its state
    - aggregate: sum
    - update: residual MLPs with SiLU and a layer norm, of edges and of nodes

    Args:
        in_dim, mesh_dim, edge_dim, out_dim: widths of the features of grid points, of mesh nodes (their positions) and
            of all edges (the vector between their ends), and of the result, the change of the weather.
        dim: width of all states. layers: number of rounds over the mesh.
    """

    def __init__(
        self, in_dim: int, mesh_dim: int, edge_dim: int, out_dim: int, dim: int = 512, layers: int = 16
    ) -> None:
        super().__init__()
        self.embed_grid, self.embed_mesh = (mlp(width, dim, activation=nn.SiLU) for width in (in_dim, mesh_dim))
        self.embed_edges = nn.ModuleList(mlp(edge_dim, dim, activation=nn.SiLU) for _ in range(3))
        self.encode, self.decode, *process = (interaction(dim, activation=nn.SiLU) for _ in range(2 + layers))
        self.process = nn.ModuleList(process)
        self.grid = mlp(dim, dim, activation=nn.SiLU)
        self.head = mlp(dim, dim, out_dim, activation=nn.SiLU)

    def forward(self, grid: Tensor, mesh: Tensor, to_mesh: Graph, within: Graph, to_grid: Graph) -> Tensor:
        """Maps grid [..., G, in_dim], mesh [..., M, mesh_dim] to [..., G, out_dim]. The graphs have edge_attr [E,
        edge_dim]: `to_mesh` M x G (destinations x sources), `within` M x M, `to_grid` G x M."""
        validation.fits("GraphCast", "grid", grid, validation.takes(self.embed_grid[0]))
        validation.fits("GraphCast", "mesh", mesh, validation.takes(self.embed_mesh[0]))
        steps = (to_mesh, within, to_grid)
        if any(graph.edge_attr is None for graph in steps):
            raise ValueError("GraphCast needs edge features: pass graphs that have edge_attr")
        enter, along, leave = (embed(g.edge_attr) for embed, g in zip(self.embed_edges, steps, strict=True))
        x = self.embed_grid(grid)
        h = self.embed_mesh(mesh)
        h, _ = self.encode(h, to_mesh, source=x, edge_attr=enter)
        x = x + self.grid(x)
        for layer in self.process:
            h, along = layer(h, within, edge_attr=along)
        x, _ = self.decode(x, to_grid, source=h, edge_attr=leave)
        return self.head(x)
