"""DimeNet++: messages between edges, weighted by distances and by the angles between edges."""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, ops
from mpnn.attention import EdgeFilter
from mpnn.graphs import line_graph
from mpnn.graphs.explicit import edges_into
from mpnn.models.layers.molecules import of_types, sum_of, vectors_of
from mpnn.models.saving import Model
from mpnn.update import MLP, EdgeUpdate, Update
from mpnn.update.maps import Linear

_MOST = 64  # functions of an angle or a distance; the paper has 7 and 6


class DimeNet(Model):
    """DimeNet++ (Gasteiger et al. 2020, arXiv:2011.14115; DimeNet: arXiv:2003.03123, eq. 4 to 10). States m belong to
    edges: that of j -> i receives from all k -> j but i -> j, with weights by |p_k - p_j| and the angle at j.

        m_ji <- f( m_ji, s( U sum_k s( D (s(W m_kj) * R e_kj) ) * A a_kji ) )
        h_i = sum_l g_l( sum_j (R_l e_ji) * m_ji )

    s is SiLU, f has residual MLPs, g_l is an MLP for each round, e and a are those of `DirectionalBasis`.

    - topology: `graphs.line_graph` of the atoms within the cutoff, without backtracking
    - attention: none; a weight for each pair of edges and feature
    - aggregate: sum
    - update: residual MLPs

    Args:
        dim: width of the states. layers: number of rounds. hidden: width of the messages between edges.
        spherical, radial: numbers of functions of angle and distance. cutoff, types, out_dim: as of `SchNet`.
    """

    def __init__(
        self,
        dim: int = 128,
        layers: int = 4,
        hidden: int = 64,
        spherical: int = 7,
        radial: int = 6,
        cutoff: float = 5.0,
        types: int = 100,
        out_dim: int = 1,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(types, dim)
        self.basis = DirectionalBasis(spherical, radial, cutoff)
        self.embed_distance = nn.Sequential(Linear(radial, dim), nn.SiLU())
        self.embed_edge = EdgeUpdate(dim, dim, f=nn.SiLU())
        self.layers = nn.ModuleList(DimeNetLayer(dim, hidden, spherical * radial, radial) for _ in range(layers))
        self.heads = nn.ModuleList(Head(dim, radial, out_dim) for _ in range(layers + 1))

    def forward(
        self, types: Tensor, positions: Tensor, graph: Graph, pool: Graph | None = None, cell: Tensor | None = None
    ) -> Tensor:
        """Maps types int64 [N], positions [N, 3] to [N, out_dim], or [G, out_dim] with `pool` (see `molecules.sum_of`).
        `cell` [3, 3] is that of a periodic graph of `graphs.radius`, [G, 3, 3] those of the graphs of a batch.
        Raises ValueError for self-loops, and for atoms at the same place: neither has angles. In a cell, an edge from
        an atom's own image has a length and is not such a loop."""
        if cell is None and torch.any(graph.ends[0] == graph.ends[1]):
            raise ValueError("DimeNet's graph must have no self-loops, which have no angles; graphs.radius makes none")
        line = graph.derive(line_graph, False, num_dst=graph.num_edges, num_src=graph.num_edges)
        into = graph.derive(edges_into, num_dst=graph.num_dst, num_src=graph.num_edges)
        vectors = vectors_of(graph, positions, cell, pool)
        if len(upon := (vectors == 0).all(1).nonzero()):
            i, j = graph.ends[:, int(upon[0])].tolist()
            raise ValueError(
                f"atoms {i} and {j} lie at the same place, where DimeNet's functions of distance are infinite"
            )
        distance, angle = self.basis(vectors, line)
        h = of_types(self.embed, types)
        m, _ = self.embed_edge(self.embed_distance(distance), h, h, graph)
        out = self.heads[0](m, distance, into)
        for layer, head in zip(self.layers, self.heads[1:], strict=True):
            m = layer(m, distance, angle, line)
            out = out + head(m, distance, into)
        return sum_of(out, pool)


class DirectionalBasis(nn.Module):
    """Functions of the length of an edge, d cutoff, and of the angle between two (DimeNet, eq. 6 to 8):

        e_n = u(d) sin(w_n d)          a_ln = u(d) c_ln j_l(z_ln d) P_l(cos) sqrt((2l + 1) / 4 pi)

    j_l is a spherical Bessel function, z_ln its n-th zero, c_ln a norm, P_l a Legendre polynomial, w_n = n pi at first.
    The envelope u(d) = 1/d - 28 d^5 + 48 d^6 - 21 d^7 reaches 0 at the cutoff, with two derivatives.
    """

    def __init__(self, spherical: int, radial: int, cutoff: float) -> None:
        super().__init__()
        from scipy.special import spherical_jn  # takes a third of a second to import

        for name, count in (("spherical", spherical), ("radial", radial)):
            if count > _MOST:
                raise ValueError(
                    f"{name} must be at most {_MOST}, as each function's zeros are searched for; got {count}"
                )
        self.cutoff = cutoff
        self.frequency = nn.Parameter(torch.arange(1, radial + 1) * math.pi)
        zeros = bessel_zeros(spherical, radial)
        order = np.arange(spherical)[:, None]
        norm = np.sqrt((2 * order + 1) / (2 * np.pi)) / np.abs(spherical_jn(order + 1, zeros))
        self.constants = torch.from_numpy(np.stack([zeros, norm]))

    def forward(self, vectors: Tensor, line: Graph) -> tuple[Tensor, Tensor]:
        """vectors [E, 3], a graph of edges with T pairs -> [E, radial], [T, spherical * radial]."""
        length, (first, second) = vectors.norm(dim=-1), line.ends
        d = (length / self.cutoff)[:, None]
        envelope = (1 / d - d**5 * (28 - 48 * d + 21 * d**2)) * (d < 1)
        # float64: recurrences lose digits where z d < l
        zeros, norm = self.constants.to(d.device)
        x = zeros * d.double()[..., None]
        before = x.cos() / x
        last = x.sin() / x
        unit = vectors / length[:, None]
        # not unit[first], whose backward pass adds up in any order
        cos = (unit.index_select(0, first) * unit.index_select(0, second)).sum(-1)
        bessel = [last[:, 0]]
        legendre = [torch.ones_like(cos), cos]
        for k in range(1, len(zeros)):
            before, last = last, (2 * k - 1) / x * last - before
            bessel.append(last[:, k])
            legendre.append(((2 * k + 1) * cos * legendre[k] - k * legendre[k - 1]) / (k + 1))
        along = envelope[..., None] * (norm * torch.stack(bessel, 1)).to(d.dtype)
        angle = along.index_select(0, first) * torch.stack(legendre[: len(zeros)], -1)[..., None]
        return envelope * torch.sin(self.frequency * d), angle.flatten(1)


def bessel_zeros(orders: int, count: int) -> np.ndarray:
    """The first zeros of the spherical Bessel functions j_0, j_1, ..., float64 [orders, count]. Those of j_(l+1) lie
    between those of j_l."""
    from scipy.optimize import brentq
    from scipy.special import spherical_jn

    zeros = [np.arange(1, count + orders) * np.pi]
    for order in range(1, orders):
        between = zip(zeros[-1][:-1], zeros[-1][1:], strict=True)
        zeros.append(np.array([brentq(lambda x, n=order: spherical_jn(n, x), *ends, xtol=1e-14) for ends in between]))
    return np.stack([row[:count] for row in zeros])


class DimeNetLayer(nn.Module):
    """A round of messages between edges, and residual MLPs of their states."""

    def __init__(self, dim: int, hidden: int, angles: int, radial: int, basis: int = 8) -> None:
        super().__init__()
        self.of_source, self.down = Linear(dim, dim), Linear(dim, hidden, bias=False)
        self.radial = nn.Sequential(Linear(radial, basis, bias=False), Linear(basis, dim, bias=False))
        weights = nn.Sequential(Linear(angles, basis, bias=False), Linear(basis, hidden, bias=False))
        up = nn.Sequential(Linear(hidden, dim, bias=False), nn.SiLU())
        self.round = MessagePassing(None, "sum", Residuals(dim), EdgeFilter(weights, out=up))

    def forward(self, m: Tensor, distance: Tensor, angle: Tensor, line: Graph) -> Tensor:
        """m [E, dim], distance [E, radial], angle [T, angles] -> [E, dim]."""
        source = F.silu(self.down(F.silu(self.of_source(m)) * self.radial(distance)))
        return self.round(m, line, source=source, edge_attr=angle)


class Residuals(Update):
    """`y = r''( r'( x + s(V r(s(W x) + m)) ) )` with r(x) = x + s(B s(A x)) and s = SiLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.own, self.next = Linear(dim, dim), Linear(dim, dim)
        self.pairs = nn.ModuleList(MLP(dim, dim, activation=nn.SiLU) for _ in range(3))

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        h = F.silu(self.own(x)) + message
        for k, pair in enumerate(self.pairs):
            h = h + F.silu(pair(h))
            h = x + F.silu(self.next(h)) if k == 0 else h
        return h


class Head(nn.Module):
    """The sum of the states of incoming edges, weighted by distance, through an MLP that is 0 at first."""

    def __init__(self, dim: int, radial: int, out_dim: int) -> None:
        super().__init__()
        hidden = [layer for _ in range(3) for layer in (Linear(2 * dim, 2 * dim), nn.SiLU())]
        self.radial, last = Linear(radial, dim, bias=False), Linear(2 * dim, out_dim, bias=False)
        self.f = nn.Sequential(Linear(dim, 2 * dim, bias=False), *hidden, last)
        nn.init.zeros_(last.weight)

    def forward(self, m: Tensor, distance: Tensor, into: Graph) -> Tensor:
        return self.f(ops.aggregate(into, m, weight=self.radial(distance)))
