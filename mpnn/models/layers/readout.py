"""Readouts: from the states of nodes to those of whole graphs, or of fewer nodes."""

import torch
from torch import Tensor, nn

from mpnn import Graph, ops
from mpnn.aggregate import Name as Aggregate
from mpnn.update.maps import Linear


def pooled(pool: Graph, values: Tensor, aggregate: Aggregate = "sum") -> Tensor:
    """Values of nodes [..., N, d] -> those of graphs [..., G, d]. In `pool`, each of G destinations receives from the
    nodes of one graph.

    Raises:
        ValueError: a node is in no graph.
    """
    return ops.aggregate(every_node(pool), values, aggregate)


def every_node(pool: Graph) -> Graph:
    """Returns `pool`, unless a node is in no graph of it: its state would be ignored. Programs that torch compiles or
    exports do not check it."""
    if not torch.compiler.is_compiling():
        pool.cached("every node", lambda: _check_every_node(pool))
    return pool


def _check_every_node(pool: Graph) -> bool:
    count = torch.bincount(pool.ends[0], minlength=pool.num_src)
    if len(absent := (count == 0).nonzero()):
        raise ValueError(
            f"pool must name the graph of each node: {len(absent)} of {pool.num_src} nodes are in none of its "
            f"{pool.num_dst} graphs, node {int(absent[0])} first"
        )
    return True


class GatedReadout(nn.Module):
    """Gated sum over the nodes of each graph (Li et al. 2016, eq. 7; Gilmer et al. 2017, eq. 4):

        r_i = sigmoid( W_g [h_i || x_i] ) * ( W_v [h_i || x_i] ),   r_G = sum of r_i over the nodes i of G

    x are the input features of the nodes, h their final states.

    Args:
        dim: width of h.
        in_dim: width of x.
        out_dim: width of the result.
    """

    def __init__(self, dim: int, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.gate, self.vote = (Linear(dim + in_dim, out_dim) for _ in range(2))

    def forward(self, h: Tensor, x: Tensor, pool: Graph | None = None) -> Tensor:
        """Returns the readout r.

        Args:
            h: [..., N, dim].
            x: [..., N, in_dim].
            pool: graph with N sources and G destinations. Destination g receives from the nodes of graph g.

        Returns:
            r_i [..., N, out_dim], or r_G [..., G, out_dim] with `pool`.
        """
        features = torch.cat([h, x], -1)
        votes = self.gate(features).sigmoid() * self.vote(features)
        return votes if pool is None else pooled(pool, votes)


class Set2Set(nn.Module):
    """Attention over the nodes of each graph, whose query an LSTM changes from step to step (Vinyals et al. 2016,
    arXiv:1511.06391, eq. 3 to 7):

        q_t = LSTM( [q_{t-1} || r_{t-1}] )          r_t = sum_i softmax_i( <h_i, q_t> ) h_i

    Args:
        dim: width of h. steps: number of steps.
    """

    def __init__(self, dim: int, steps: int = 3) -> None:
        super().__init__()
        self.dim = dim
        self.steps = steps
        self.lstm = nn.LSTM(2 * dim, dim)

    def forward(self, h: Tensor, pool: Graph) -> Tensor:
        """h [N, dim] -> [q || r] after the last step, [G, 2 * dim]. In `pool`, each of G destinations receives from the
        nodes of one graph."""
        both = h.new_zeros(every_node(pool).num_dst, 2 * self.dim)
        state = None
        nodes = h[:, None]
        for _ in range(self.steps):
            query, state = self.lstm(both[None], state)
            read = ops.attend(pool, query[0][:, None], nodes, nodes, scale=1.0)
            both = torch.cat([query[0], read[:, 0]], -1)
        return both


class TopKPooling(nn.Module):
    """Keeps the nodes of each graph that a learned direction scores highest (Gao & Ji 2019, arXiv:1905.05178; Cangea et
    al. 2018), and the edges between them:

        s_i = tanh( <h_i, w> / |w| )          h_i <- s_i h_i   for the ceil(ratio * n) nodes of largest s_i

    Args:
        dim: width of h. ratio: the share of nodes to keep, above 0 and at most 1.
    """

    def __init__(self, dim: int, ratio: float = 0.5) -> None:
        super().__init__()
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio must be above 0 and at most 1; got {ratio}")
        self.ratio = ratio
        self.weight = nn.Parameter(torch.empty(dim))
        nn.init.uniform_(self.weight, -(dim**-0.5), dim**-0.5)

    def forward(self, h: Tensor, graph: Graph, pool: Graph) -> tuple[Tensor, Graph, Graph]:
        """h [N, dim] -> those of M nodes in their order, [M, dim], the graph between them, and their `pool`: each of G
        destinations receives from the nodes of one graph. Ties go to the lower number."""
        node, of = pool.ends
        if not torch.equal(node.sort().values, torch.arange(len(h), device=h.device)):
            raise ValueError("pool must have one edge for each node, to its graph")
        score = ((h @ self.weight) / self.weight.norm()).tanh()
        of_node = torch.zeros_like(node).index_copy(0, node, of)
        order = score.detach().argsort(descending=True, stable=True)
        order = order[of_node[order].argsort(stable=True)]
        count = pool.degree()
        rank = torch.arange(len(order), device=h.device) - (count.cumsum(0) - count)[of_node[order]]
        keep = torch.zeros_like(order, dtype=torch.bool)
        # A ratio such as .55 is a little more or less than its decimals: 20 times it must not be above 11.
        size = (self.ratio * count.double() * (1 - 2**-50)).ceil()
        keep[order] = rank < size[of_node[order]]
        kept = keep.nonzero().squeeze(1)
        pairs = torch.stack([torch.arange(len(kept), device=h.device), of_node[kept]])
        left = Graph.from_edges(pairs, pool.num_dst, len(kept), name=pool.name)
        return h[kept] * score[kept, None], graph.subgraph(keep), left
