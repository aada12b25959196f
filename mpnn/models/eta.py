"""Arrival times: segments of a route hear each other's traffic, and the route hears its segments."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import check, ops
from mpnn.graph import Graph
from mpnn.message_passing import MessagePassing
from mpnn.models.graph_network import ConcatMLP, GraphNetworkLayer
from mpnn.models.saving import Model
from mpnn.update import MLP


class ArrivalTimes(Model):
    """Travel times of road segments and of whole routes, in the manner of Derrow-Pinion et al. 2021 ("ETA prediction
    with graph neural networks in Google Maps"): a supersegment is a graph of segments with a state of the whole, and a
    network of graph-net blocks encodes, processes and decodes it.

        v_i = mlp(norm(x_i)),   e_ij = mlp(edge_attr_ij),   u_r = 0                           encode
        e, v, u <- SupersegmentLayer(e, v, u), `rounds` times                                 process
        t_i = first_i exp( mlp(v_i) ),   T_r = (sum of t_i over route r) exp( mlp(u_r) )      decode

    Training begins at first estimates of the segments' times, such as those at present speed, and at their sums.

    Args:
        in_dim: width of the segments' features. edge_dim: of the features of links between segments. dim: width of
            all states. rounds: of processing.
    """

    def __init__(self, in_dim: int, edge_dim: int, dim: int = 32, rounds: int = 3) -> None:
        super().__init__()
        self.dim = dim
        self.encode_segment = nn.Sequential(nn.BatchNorm1d(in_dim), MLP(in_dim, dim))
        self.encode_link = MLP(edge_dim, dim)
        self.rounds = nn.ModuleList(SupersegmentLayer(dim) for _ in range(rounds))
        self.decode_segment, self.decode_route = MLP(dim, 1, dim), MLP(dim, 1, dim)
        for last in (self.decode_segment[-1], self.decode_route[-1]):
            for parameter in last.parameters():
                nn.init.zeros_(parameter)  # training begins at the first estimates

    def forward(self, x: Tensor, first: Tensor, graph: Graph, routes: Graph) -> tuple[Tensor, Tensor]:
        """The times of N segments, [N], and of R routes, [R].

        Args:
            x: features of the segments, [N, in_dim]. first: first estimates of their times, [N].
            graph: which segments hear each other, with edge_attr [E, edge_dim].
            routes: N sources and R destinations: each route hears the segments that it is made of.
        """
        check.tensor("x", x)
        if graph.edge_attr is None:
            raise ValueError("the links between segments need features; give the graph edge_attr [E, edge_dim]")
        segment, link = self.encode_segment(x), self.encode_link(graph.edge_attr)
        route = x.new_zeros(routes.num_dst, self.dim)
        for layer in self.rounds:
            segment, link, route = layer(segment, link, route, graph, routes)
        times = first * self.decode_segment(segment).squeeze(-1).exp()
        total = ops.aggregate(routes, times[:, None], "sum").squeeze(-1)
        return times, total * self.decode_route(route).squeeze(-1).exp()

    def loss(
        self,
        x: Tensor,
        first: Tensor,
        graph: Graph,
        routes: Graph,
        segment_times: Tensor,
        route_times: Tensor,
        delta: float = 1.0,
    ) -> Tensor:
        """Huber's loss of the segments on routes, a mean, and of the routes, a mean over the number of segments of a
        route; segment_times [N], route_times [R], `delta` the error from which on it grows linearly, in the unit of
        time."""
        times, totals = self(x, first, graph, routes)
        on_route = routes.csr.col
        of_segments = F.huber_loss(times.index_select(0, on_route), segment_times[on_route], delta=delta)
        of_routes = F.huber_loss(totals, route_times, delta=delta)
        return of_segments + of_routes * routes.num_dst / max(routes.num_edges, 1)


class SupersegmentLayer(nn.Module):
    """A graph-net block (Battaglia et al. 2018, algorithm 1) in rounds of message passing: a layer of `GraphNetwork`,
    in which links hear their segments and segments their links, and then, with global features,

        u_r <- u_r + g( [u_r || mean_i v_i] ),     v_i <- v_i + g'( [v_i || u_r] )
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.along_links = GraphNetworkLayer(dim)
        self.hear_segments = MessagePassing(None, "mean", ConcatMLP(dim))
        self.hear_route = MessagePassing(None, "sum", ConcatMLP(dim))

    def forward(
        self, segment: Tensor, link: Tensor, route: Tensor, graph: Graph, routes: Graph
    ) -> tuple[Tensor, Tensor, Tensor]:
        """segment [N, dim], link [E, dim], route [R, dim] -> the same."""
        segment, link = self.along_links(segment, link, graph)
        route = route + self.hear_segments(route, routes, segment)
        of_route = routes.memo("reverse", routes.reverse)
        return segment + self.hear_route(segment, of_route, route), link, route
