"""Travel time prediction: message passing between road segments, and between segments and routes."""

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, ops
from mpnn.models.layers.interaction import ResidualConcat, interaction, rest_of_mlp
from mpnn.models.saving import Model
from mpnn.round import validation
from mpnn.update import MLP


class ArrivalTimes(Model):
    """Travel times of road segments and of whole routes, after Derrow-Pinion et al. 2021 ("ETA prediction with graph
    neural networks in Google Maps"). A route is a graph of segments with a global state. Graph network blocks encode,
    process and decode it.

        v_i = mlp(norm(x_i)),   e_ij = mlp(edge_attr_ij),   u_r = 0                           encode
        e, v, u <- SupersegmentLayer(e, v, u), `rounds` times                                 process
        t_i = first_i exp( mlp(v_i) ),   T_r = (sum of t_i over route r) exp( mlp(u_r) )      decode

    The untrained model returns the first estimates of the segments' times, for example those at present speed, and
    their sums over the routes.

    Args:
        in_dim: width of the segments' features.
        edge_dim: width of the features of the links between segments.
        dim: width of all states.
        rounds: number of processing layers.
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
                nn.init.zeros_(parameter)  # so the untrained model returns the first estimates

    def forward(self, x: Tensor, first: Tensor, graph: Graph, routes: Graph) -> tuple[Tensor, Tensor]:
        """Returns the times of the N segments, [N], and of the R routes, [R].

        Args:
            x: features of the segments, [N, in_dim].
            first: first estimates of the segments' times, [N].
            graph: links between segments, with edge_attr [E, edge_dim].
            routes: graph with N sources and R destinations. Each route receives from its segments.
        """
        validation.input_features("x", x)
        if graph.edge_attr is None:
            raise ValueError("the links between segments need features: create the graph with edge_attr [E, edge_dim]")
        segment = self.encode_segment(x)
        link = self.encode_link(graph.edge_attr)
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
        """Returns the Huber loss of the segments plus Huber loss of the routes.

        The segments' part is a mean over all (route, segment) pairs. The routes' part is a mean over routes, divided
        by the mean number of segments per route.

        Args:
            x, first, graph, routes: as in `forward`.
            segment_times: target times of the segments, [N].
            route_times: target times of the routes, [R].
            delta: error above which the loss grows linearly, in the unit of time.
        """
        times, totals = self(x, first, graph, routes)
        predicted, expected = (each.index_select(0, routes.csr.col) for each in (times, segment_times))
        segment_loss = F.huber_loss(predicted, expected, delta=delta)
        route_loss = F.huber_loss(totals, route_times, delta=delta)
        return segment_loss + route_loss * routes.num_dst / max(routes.num_edges, 1)


class SupersegmentLayer(nn.Module):
    """A graph network block (Battaglia et al. 2018, algorithm 1).

    First an `interaction`: links receive from their segments, then segments from their links. Then routes and segments
    exchange messages:

        u_r <- u_r + g( [u_r || mean_i v_i] ),     v_i <- v_i + g'( [v_i || u_r] )
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.along_links = interaction(dim, norm=False)
        self.hear_segments, self.hear_route = (
            MessagePassing(None, reduce, ResidualConcat(dim, rest_of_mlp(dim, dim, 1, nn.ReLU, norm=False)))
            for reduce in ("mean", "sum")
        )

    def forward(
        self, segment: Tensor, link: Tensor, route: Tensor, graph: Graph, routes: Graph
    ) -> tuple[Tensor, Tensor, Tensor]:
        """segment [N, dim], link [E, dim], route [R, dim] -> the same shapes, updated."""
        segment, link = self.along_links(segment, graph, edge_attr=link)
        route = self.hear_segments(route, routes, segment)
        return self.hear_route(segment, routes.cached("reverse", routes.reverse), route), link, route
