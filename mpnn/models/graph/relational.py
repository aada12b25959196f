"""The relational graph view of an MLP: message passing between groups of neurons, with one linear map per edge."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Attention
from mpnn.graphs import complete
from mpnn.models.saving import Model
from mpnn.round import Round, validation
from mpnn.update import Activate
from mpnn.update.maps import Linear

COMPLETE = complete()


class RelationalMLP(Model):
    """An MLP whose wiring is a graph (You et al. 2020, "Graph structure of neural networks", eq. 1-3).

        x_i <- relu( norm( sum_j W_ij x_j + b_i ) )   over the in-neighbors j of group i
        logits = W_out (x_1 || ... || x_nodes)

    The features are split into `nodes` groups of neurons. Each layer is one round of message passing between groups: a
    block-sparse linear layer that stores and computes only the blocks that have an edge. Over `complete()` it equals
    `nn.Linear`. In the paper each group has a self-loop: pass a graph with self-loops.

    Args:
        in_dim: width of the input features, a multiple of `nodes`.
        classes: number of classes, the width of the logits.
        hidden: width of each layer, a multiple of `nodes`.
        layers: number of message passing layers.
        nodes: number of groups of neurons.
        graph: topology or graph over the groups.
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
        self.head = Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Maps x [B, in_dim] to logits [B, classes]. Group i gets the i-th contiguous slice of the features."""
        h = x.unflatten(-1, (self.nodes, -1))
        for layer in self.layers:
            h = layer(h)
        return self.head(h.flatten(-2))

    def loss(self, x: Tensor, target: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats; target int64 [B]."""
        return F.cross_entropy(self(x), target)


class NormReLU(nn.Module):
    """Batch normalization of each neuron, then ReLU: [B, nodes, D] -> [B, nodes, D]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(-2)).view_as(x).relu()


class OwnMaps(Attention):
    """A linear map for every edge of one graph (You et al. 2020, eq. 3): `m_i = sum_j W_ij h_j + b_i`.

    The features of a node's in-neighbors are concatenated and mapped at once, so that over a complete graph this is one
    matrix product. The cost is O(edges * in_dim * out_dim).

    Args:
        graph: the graph whose edges get maps. Calls cannot use another graph.
        in_dim: width of a node's features.
        out_dim: width of a node's message.
        bias: whether nodes have biases.

    Parameters:
        weight: [N, max_degree, in_dim, out_dim], the map of node i and its k-th in-neighbor, in the caller's edge
            order. Maps beyond a node's in-degree are not used.
        bias: [N, out_dim].
    """

    normalize = "none"
    depends_on = "graph"

    def __init__(self, graph: Graph, in_dim: int, out_dim: int, *, bias: bool = True) -> None:
        super().__init__()
        degree = graph.degree()
        self.edges = graph.num_edges
        self.weight = nn.Parameter(torch.empty(graph.num_dst, int(degree.max()) if len(degree) else 0, in_dim, out_dim))
        self.bias = nn.Parameter(torch.empty(graph.num_dst, out_dim)) if bias else None
        # the initialization of nn.Linear, with a fan-in of in-degree * in_dim
        bound = (degree.clamp(min=1) * in_dim).to(self.weight.dtype).rsqrt()
        with torch.no_grad():
            self.weight.uniform_(-1, 1).mul_(bound[:, None, None, None])
            if self.bias is not None:
                self.bias.uniform_(-1, 1).mul_(bound[:, None])

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        nodes, max_degree = self.weight.shape[:2]
        validation.fits("OwnMaps", "x" if dst is src else "source", src, (self.weight.shape[2], self.weight.dtype))
        if (graph.num_dst, graph.num_edges) != (nodes, self.edges):
            raise ValueError(f"OwnMaps has maps for {self.edges} edges into {nodes} nodes; the graph is {graph}")
        return Round(graph.derive(_one_dst_per_edge, max_degree, num_dst=nodes * max_degree), src.unsqueeze(-2))

    def merge(self, out: Tensor) -> Tensor:
        sources = out.squeeze(-2).unflatten(-2, self.weight.shape[:2])  # [..., N, max_degree, in_dim]
        message = torch.einsum("...nkd,nkde->...ne", sources, self.weight)
        return message if self.bias is None else message + self.bias


def _one_dst_per_edge(graph: Graph, max_degree: int) -> Graph:
    """Splits destination i into `max_degree` destinations. The k-th one receives from the k-th in-neighbor of i."""
    csr = graph.csr
    rank = torch.arange(len(csr.col), device=graph.device) - csr.ptr[csr.row]
    return Graph.from_edges(
        torch.stack([csr.col, csr.row * max_degree + rank]), graph.num_dst * max_degree, graph.num_src
    )
