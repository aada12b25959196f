"""Travelling salesman by attention (Kool, van Hoof, Welling 2019): a policy that selects a tour city by city.

topology   encoder: complete() over the cities      decoder: from the unvisited cities to one node for each tour
attention  encoder: DotProduct(dim, heads)          decoder: the glimpse, a DotProduct, then `Pointer`    (eq. 6 and 7)
aggregate  "sum"
update     encoder: PostNorm(dim, ffn, norm=BatchNorm)                                                    (eq. 2 and 3)

The features of a tour are the mean of all cities and the first and the last city of the tour. The glimpse updates them;
the weights of the pointer are the probabilities of the next city.
"""

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing
from mpnn.attention import Attention, DotProduct
from mpnn.decoding.cache import KVCache
from mpnn.graphs import causal, complete, identity
from mpnn.models.layers.blocks import BatchNorm
from mpnn.models.saving import Model
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.update import FeedForward, PostNorm
from mpnn.update.maps import Linear

LATER = ~causal() | identity()
"""Step t of a tour attends to the cities that are visited at step t or later."""


class TSP(Model):
    """A policy over tours of any number of cities in the plane. Equation numbers are those of Kool et al. 2019.

        h_i = W x_i + b, then `layers` times eq. 2 and 3          `encode`
        q_t = W_Q [mean_i h_i || h_first || h_last]               eq. 4 and 5; learned placeholders at the first step
        g_t = sum_j softmax_j(<q_t, W_K h_j> / sqrt(D)) W_V h_j    `glimpse`: several heads, over the unvisited cities j
        p_t = softmax_j(C tanh(<W_O g_t, W h_j> / sqrt(dim)))      `pointer`: eq. 6 to 8, over the same cities

    The defaults are the paper's.

    Args:
        dim: width of the features, a multiple of `heads`.
        heads: number of attention heads.
        layers: number of encoder layers.
        hidden: width of the encoder's feed-forward networks.
        clip: C, the bound of the pointer's logits.
    """

    def __init__(self, dim: int = 128, heads: int = 8, layers: int = 3, hidden: int = 512, clip: float = 10.0) -> None:
        super().__init__()
        self.embed = Linear(2, dim)
        self.layers = nn.ModuleList(
            MessagePassing(
                complete(),
                "sum",
                PostNorm(dim, FeedForward(dim, hidden, nn.ReLU), norm=BatchNorm),
                DotProduct(dim, heads, bias=False),
            )
            for _ in range(layers)
        )
        self.nowhere = nn.Parameter(torch.empty(2 * dim).uniform_(-1, 1))
        self.glimpse = MessagePassing(None, "sum", None, DotProduct(dim, heads, bias=False, query_dim=3 * dim))
        self.to_key = Linear(dim, dim, bias=False)
        self.pointer = MessagePassing(None, "sum", None, Pointer(clip))

    def forward(self, cities: Tensor, tours: Tensor) -> Tensor:
        """Returns the log-probabilities [B] of tours under the policy.

        All steps run in parallel. With the cities sorted in the order of their tour, step t attends to the cities from
        t on, which is the same structured graph for all tours.

        Args:
            cities: points [B, N, 2].
            tours: int64 [B, N], the order in which the cities are visited.
        """
        return self._log_probability(self.encode(cities), tours)

    def encode(self, cities: Tensor) -> Tensor:
        """Maps points [B, N, 2] to features of the cities [B, N, dim]."""
        if cities.dim() != 3 or cities.shape[2] != 2 or 0 in cities.shape:
            raise ValueError(f"cities must be points [B, N, 2] with B and N at least 1; got {list(cities.shape)}")
        h = self.embed(cities)
        for layer in self.layers:
            h = layer(h)
        return h

    @torch.no_grad()
    def solve(self, cities: Tensor) -> Tensor:
        """Returns greedy tours int64 [B, N] through points [B, N, 2]: the most likely city at each step."""
        return self._tours(self.encode(cities))

    @torch.no_grad()
    def sample(self, cities: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Samples tours int64 [B, N] from the policy. Repeat the cities to get several tours of each instance."""
        return self._tours(self.encode(cities), sample=True, generator=generator)

    def loss(self, cities: Tensor, baseline: "TSP", generator: torch.Generator | None = None) -> Tensor:
        """Returns the loss of REINFORCE with a greedy rollout baseline (eq. 9 and algorithm 1).

            (length(tour) - length(tour of the baseline)) * log p(tour),   the tour sampled from this policy

        Its gradient estimates the gradient of the expected tour length.

        Args:
            cities: points [B, N, 2].
            baseline: the best policy so far, a copy in evaluation mode.
            generator: random number generator of the sampled tours.
        """
        h = self.encode(cities)
        with torch.no_grad():
            tours = self._tours(h, sample=True, generator=generator)
            advantage = tour_length(cities, tours) - tour_length(cities, baseline.solve(cities))
        return (advantage * self._log_probability(h, tours)).mean()

    def _log_probability(self, h: Tensor, tours: Tensor) -> Tensor:
        """Cities' features [B, N, dim] and tours [B, N] -> log-probabilities [B]."""
        count = h.shape[1]
        graph = LATER.bind(count).to(h.device)
        h = torch.take_along_dim(h, tours[..., None], 1)
        before = torch.cat([h[:, :1].expand(-1, count - 1, -1), h[:, :-1]], -1)
        before = torch.cat([self.nowhere.expand(len(h), 1, -1), before], 1)
        context = torch.cat([h.mean(1, keepdim=True).expand_as(h), before], -1)
        probability = self._probability(context, graph, h, self.to_key(h))
        return probability[..., graph.csr.ptr[:-1]].log().sum(-1)  # the first edge of row t is from city t

    def _probability(
        self, context: Tensor, graph: Graph, h: Tensor, keys: Tensor, cache: KVCache | None = None
    ) -> Tensor:
        """Probabilities [..., E] of the unvisited cities of each tour, in the order of the graph's edges."""
        glimpse = self.glimpse(context, graph, source=h, cache=cache)
        return self.pointer(glimpse, graph, source=keys, return_weights=True)[1].squeeze(-1)

    def _tours(self, h: Tensor, *, sample: bool = False, generator: torch.Generator | None = None) -> Tensor:
        """Returns greedy or sampled tours [B, N] over cities' features [B, N, dim], one city after the other."""
        batch, count, dim = h.shape
        mean = h.mean(1)
        nodes = h.flatten(0, 1)
        keys = self.to_key(h.flatten(0, 1))
        before = self.nowhere.expand(batch, 2 * dim)
        cache = KVCache(batch * count)
        unvisited = torch.ones(batch, count, dtype=torch.bool, device=h.device)
        tours = torch.empty(batch, 0, dtype=torch.int64, device=h.device)
        for left in range(count, 0, -1):
            if tours.shape[1]:
                last = torch.take_along_dim(h, tours[:, -1:, None], 1).squeeze(1)
                before = torch.cat([last if tours.shape[1] == 1 else before[:, :dim], last], -1)
            tour, city = unvisited.nonzero(as_tuple=True)
            graph = Graph.from_edges(torch.stack([tour * count + city, tour]), batch, batch * count)
            p = self._probability(torch.cat([mean, before], -1), graph, nodes, keys, cache).view(batch, left)
            choice = torch.multinomial(p, 1, generator=generator) if sample else p.argmax(1, keepdim=True)
            city = city.view(batch, left).gather(1, choice)
            unvisited.scatter_(1, city, False)
            tours = torch.cat([tours, city], 1)
        return tours


class Pointer(Attention):
    """Attention weights `w_ij = softmax_j( clip * tanh( <x_i, key_j> / sqrt(dim) ) )`. The sources are the keys."""

    depends_on = "node"

    def __init__(self, clip: float) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        query, key = dst.unsqueeze(-2), src.unsqueeze(-2)
        # a softcap c computes c * tanh(score / c), so the scale includes c
        return Round(graph, key, Dot(query, key, self.clip * key.shape[-1] ** -0.5, softcap=self.clip))


def tour_length(cities: Tensor, tours: Tensor) -> Tensor:
    """Lengths [B] of closed tours int64 [B, N] through points [B, N, 2]."""
    path = torch.take_along_dim(cities, tours[..., None], 1)
    return (path - path.roll(-1, 1)).norm(dim=-1).sum(-1)
