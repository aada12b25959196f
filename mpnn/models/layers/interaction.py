"""Interaction networks with residual states of nodes and edges: the layer of graph networks, MeshGraphNets and
GraphCast."""

from collections.abc import Callable

from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import Concat, EdgeUpdate
from mpnn.update.maps import Linear


def interaction(
    dim: int,
    hidden: int = 1,
    activation: Callable[[], nn.Module] = nn.ReLU,
    graph: Topology | Graph | None = None,
    *,
    norm: bool = True,
) -> MessagePassing:
    """`y, e = layer(x, graph, edge_attr=e)` (Battaglia et al. 2016; Sanchez-Gonzalez et al. 2020, arXiv:2002.09405):

        e_ij <- e_ij + f( W [e_ij || x_i || x_j] )          y_i = x_i + g( V [x_i || sum_j e_ij] )

    f and g are the rest of MLPs with `hidden` hidden layers and, if `norm`, a layer norm.
    """
    f, g = (rest_of_mlp(dim, dim, hidden, activation, norm=norm) for _ in range(2))
    return MessagePassing(graph, "sum", ResidualConcat(dim, g), edges=EdgeUpdate(dim, dim, f=f, residual=True))


class Processor(Model):
    """The base of models of nodes and edges with states: both are embedded, and go through interactions."""

    embed: nn.Module
    embed_edge: nn.Module
    layers: nn.ModuleList

    def states(
        self, x: Tensor, graph: Topology | Graph | None, edge_attr: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [..., N, in_dim], edge_attr [..., E, edge_dim] (default: the graph's) -> [..., N, dim], [..., E, dim]."""
        owner = type(self).__name__
        embed = self.embed
        validation.input_features("x", x)
        validation.fits(owner, "x", x, validation.takes(embed[0] if isinstance(embed, nn.Sequential) else embed))
        edge_attr = getattr(graph, "edge_attr", None) if edge_attr is None else edge_attr
        h = embed(x)
        e = self.embed_edge(validation.edge_features(owner, edge_attr))
        for layer in self.layers:
            h, e = layer(h, graph, edge_attr=e)
        return h, e


class ResidualConcat(Concat):
    """`y = x + f( W [x || m] )`."""

    def __init__(self, dim: int, f: nn.Module) -> None:
        super().__init__(dim, dim)
        self.f = f

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        return x + self.f(super().forward(x, message))


def mlp(
    in_dim: int,
    dim: int,
    out_dim: int | None = None,
    hidden: int = 1,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """An MLP with `hidden` hidden layers of width `dim`; with out_dim None a result of width dim, and a layer norm."""
    rest = rest_of_mlp(dim, dim if out_dim is None else out_dim, hidden, activation, norm=out_dim is None)
    return nn.Sequential(Linear(in_dim, dim), *rest)


def rest_of_mlp(
    dim: int, out_dim: int, hidden: int, activation: Callable[[], nn.Module], *, norm: bool = True
) -> nn.Sequential:
    """Returns the modules after the first linear map of such an MLP."""
    layers: list[nn.Module] = []
    for k in range(hidden):
        layers += [activation(), Linear(dim, out_dim if k == hidden - 1 else dim)]
    return nn.Sequential(*layers, *([nn.LayerNorm(out_dim)] if norm else []))
