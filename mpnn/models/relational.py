"""The relational graph view of an MLP: groups of neurons that hear each other, a linear map of its own on each edge."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check
from mpnn.attention import Attention, Terms
from mpnn.graph import Graph
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import Activate

COMPLETE = complete()


class RelationalMLP(Model):
    """An MLP whose wiring is a graph (You et al. 2020, "Graph structure of neural networks", eq. 1-3).

        x_i <- relu( norm( sum_j W_ij x_j + b_i ) )   over the j that group i hears
        logits = W_out (x_1 || ... || x_nodes)

    Features are shared out over `nodes` groups of neurons, and each layer is one round of message passing among them:
    a linear layer in which the blocks without an edge are zero, and are neither kept nor computed. Over `complete()` it
    is `nn.Linear`. The paper's groups hear themselves: give a graph with self-loops.

    Args:
        in_dim, hidden: widths, multiples of `nodes`. classes: width of the logits. layers: rounds. nodes: groups of
            neurons. graph: who hears whom.
    """

    def __init__(
        self,
        in_dim: int,
        classes: int,
        hidden: int = 512,
        layers: int = 4,
        *,
        nodes: int = 64,
        graph: Topology | Graph = COMPLETE,
    ) -> None:
        super().__init__()
        for name, width in (("in_dim", in_dim), ("hidden", hidden)):
            if nodes < 1 or width % nodes:
                raise ValueError(f"{nodes} groups of neurons cannot share {name}={width} evenly")
        self.nodes = nodes
        wiring = graph.bind(nodes) if isinstance(graph, Topology) else graph
        widths = [in_dim // nodes] + [hidden // nodes] * layers
        self.layers = nn.ModuleList(
            MessagePassing(wiring, "sum", Activate(NormReLU(hidden)), OwnMaps(wiring, d, hidden // nodes))
            for d in widths[:-1]
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, in_dim] -> logits [B, classes]; group i has the i-th stretch of the features."""
        h = x.unflatten(-1, (self.nodes, -1))
        for layer in self.layers:
            h = layer(h)
        return self.head(h.flatten(-2))

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Mean cross-entropy in nats; target int64 [B]."""
        return F.cross_entropy(self(x), target)


class NormReLU(nn.Module):
    """Batch normalisation of each neuron, and ReLU: [B, nodes, D] -> [B, nodes, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view_as(x).relu()


class OwnMaps(Attention):
    """A linear map for every edge of one graph (You et al. 2020, eq. 3): `m_i = sum_j W_ij h_j + b_i`.

    What a node hears is laid side by side and mapped at once, so that over a complete graph this is one matrix product,
    and in general costs edges times `in_dim` times `out_dim`.

    Args:
        graph: whose edges get maps; no other graph can be given at call. in_dim, out_dim: widths of a node's features
            and of its message. bias: whether nodes have biases.

    The parameters: `weight` [N, most, in_dim, out_dim], of node i and the k-th source that it hears, in the caller's
    edge order, `most` being the highest degree; maps beyond a node's degree are never used. `bias` [N, out_dim].
    """

    normalize = "none"

    def __init__(self, graph: Graph, in_dim: int, out_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        degree = graph.degree()
        self.edges = graph.num_edges
        self.weight = nn.Parameter(torch.empty(graph.num_dst, int(degree.max()) if len(degree) else 0, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(graph.num_dst, out_dim)) if bias else None
        # as nn.Linear is initialised, by how many numbers a neuron hears
        reach = (degree.clamp(min=1) * in_dim).to(self.weight.dtype).rsqrt()
        with torch.no_grad():
            self.weight.uniform_(-1, 1).mul_(reach[:, None, None, None])
            if self.bias is not None:
                self.bias.uniform_(-1, 1).mul_(reach[:, None])

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        nodes, most = self.weight.shape[:2]
        check.fits("OwnMaps", "x" if dst is src else "source", src, (self.weight.shape[2], self.weight.dtype))
        if (graph.num_dst, graph.num_edges) != (nodes, self.edges):
            raise ValueError(f"these maps belong to {self.edges} edges into {nodes} nodes; the graph is {graph}")
        return Terms(src.unsqueeze(-2), graph=graph.derived(_edge_by_edge, most, num_dst=nodes * most))

    def merge(self, out: Tensor) -> Tensor:
        heard = out.squeeze(-2).unflatten(-2, self.weight.shape[:2])  # [..., N, most, in_dim]
        message = torch.einsum("...nkd,nkde->...ne", heard, self.weight)
        return message if self.bias is None else message + self.bias


def _edge_by_edge(graph: Graph, most: int) -> Graph:
    """Destination i becomes `most` destinations, of which the k-th hears what i hears k-th."""
    csr = graph.csr
    place = torch.arange(len(csr.col), device=graph.device) - csr.ptr[csr.row]
    return Graph.from_edges(torch.stack([csr.col, csr.row * most + place]), graph.num_dst * most, graph.num_src)
