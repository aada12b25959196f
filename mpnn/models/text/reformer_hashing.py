"""Graphs of a Reformer (Kitaev et al. 2020): chunks of positions, or chunks of nodes sorted by hashes of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import chunks
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.packing import Packing
from mpnn.models.layers.per_head import PerHead


@dataclass(frozen=True)
class Chunks:
    """size: nodes in a chunk. before, after: number of chunks before and after its own that a chunk attends to.
    dropout: of attention weights."""

    size: int = 64
    before: int = 1
    after: int = 0
    dropout: float = 0.0


@dataclass(frozen=True)
class ReformerConfig:
    """Configuration of a Reformer.

    layers: "local" or "lsh" for each layer. local, lsh: chunks of each kind of layer. head_dim: width of a head.
    buckets: number of hash buckets, an even number, or several numbers whose product it is; None: a power of two near
    twice the number of chunks. rounds: number of hashing rounds. seed: seed of the hash directions; None: draw new ones
    in each call from torch's global generator. causal: remove edges from later nodes. axial, axial_dims: numbers of
    rows and columns of axial positions, and the widths of their vectors; axial=None: one table. context: maximum
    sentence length.
    """

    vocabulary: int = 320
    dim: int = 256
    layers: Sequence[str] = ("local", "lsh", "local", "lsh", "local", "lsh")
    heads: int = 2
    head_dim: int = 64
    hidden: int = 512
    local: Chunks = Chunks()
    lsh: Chunks = Chunks()
    buckets: int | Sequence[int] | None = None
    rounds: int = 1
    seed: int | None = None
    causal: bool = False
    axial: Sequence[int] | None = (64, 64)
    axial_dims: Sequence[int] = (64, 192)
    context: int = 4096
    activation: str = "relu"
    eps: float = 1e-12
    dropout: float = 0.05

    def chunks(self, kind: str) -> Chunks:
        """Returns the chunks of layers of this kind."""
        if kind not in ("local", "lsh"):
            raise ValueError(f'layers are "local" or "lsh"; got {kind!r}')
        return self.local if kind == "local" else self.lsh

    @property
    def multiple(self) -> int:
        """Lengths are padded to a multiple of this before they are divided into chunks."""
        return lcm(*(self.chunks(kind).size for kind in self.layers))

    def hashes(self, length: int) -> tuple[int, ...]:
        """Returns the factors of the number of buckets for this length."""
        if isinstance(self.buckets, int):
            return (self.buckets,)
        if self.buckets is not None:
            return tuple(self.buckets)
        power = (2 * (length // self.lsh.size)).bit_length() - 1
        limit = 2 * max(int((self.context // self.lsh.size) ** 0.5), self.lsh.size)
        return (2**power,) if 2**power <= limit else (2 ** (power // 2), 2 ** (power - power // 2))


class SharedKey(PerHead):
    """Attention with shared queries and keys (section 2). Keys are normalized queries, and each head has its own graph:

    q_j = W_Q h_j,   k_j = q_j / rms(q_j),   w_ij = softmax_j( <q_i, k_j> / sqrt(D) )
    """

    def __init__(self, dim: int, heads: int, *, head_dim: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, head_dim=head_dim, bias=False, dropout=dropout)
        del self.to_key

    def mapped(self, dst: Tensor, src: Tensor, graph: Graph) -> tuple[Tensor, Tensor, Tensor]:
        query, key = self.queries(dst), self.queries(src)
        value = self.to_value(src).unflatten(-1, (self.heads, -1))
        return query, F.rms_norm(key, key.shape[-1:], eps=1e-6), value

    def queries(self, x: Tensor) -> Tensor:
        """Returns the queries [..., N, H, D], which are also hashed."""
        return self.to_query(x).unflatten(-1, (self.heads, -1))


class Heard:
    """Builds the graphs of the layers of a Reformer for a batch of packed sentences.

    places: int64 [B, P], the packed index of the token at each position, -1 at padding. P is a multiple of
    `config.multiple`.
    """

    def __init__(self, config: ReformerConfig, packing: Packing, rounds: int | None = None) -> None:
        self.config, self.packing = config, packing
        self.rounds = config.rounds if rounds is None else rounds
        keep = packing.keep
        index = torch.where(keep, keep.flatten().cumsum(0).view_as(keep) - 1, -1)
        self.places = F.pad(index, (0, -keep.shape[1] % config.multiple), value=-1)

    @torch.no_grad()
    def by(self, layer: MessagePassing, x: Tensor) -> Graph:
        """Returns the graph of a layer: chunks of positions, or of nodes sorted by hashes of x [T, 2 * dim]."""
        batch, length = self.places.shape
        shared = layer.attention if isinstance(layer.attention, SharedKey) else None
        layout = self.config.chunks("local" if shared is None else "lsh")
        if length <= layout.size:
            graph = chunks(self.places, max(length, 1), len(x), before=0)
        elif shared is None:
            graph = chunks(self.places, layout.size, len(x), before=layout.before, after=layout.after)
        else:
            order = self._sort_by_hash(shared.queries(layer.update.prepare(x)))
            head = torch.arange(shared.heads, device=x.device).repeat(batch)
            graph = chunks(order, layout.size, len(x), before=layout.before, after=layout.after, edge_type=head)
        if self.config.causal:
            src, dst = graph.edge_index
            graph = _select_edges(graph, src <= dst)
        return graph if shared is None else _drop_self_loops(graph)

    def over(self, topology: Topology, layer: MessagePassing) -> Graph:
        """Returns the graph of a layer over a given topology."""
        graph = self.packing.bind_each([topology.bind(self.packing.keep.shape[1])] * len(self.places))
        return _drop_self_loops(graph) if isinstance(layer.attention, SharedKey) else graph

    def _sort_by_hash(self, queries: Tensor) -> Tensor:
        """Sorts the tokens of each sentence and head by the hash of their queries [T, H, D].

        Returns:
            int64 [B * H, rounds * P]: packed indices, one round after the other. Padding (-1) is last in each round.
        """
        batch, length = self.places.shape
        has_token = self.places >= 0
        bucket = hashes(queries, self.config.hashes(length), self.rounds, self.config.seed)
        key = bucket.new_full((batch, length, *bucket.shape[1:]), torch.iinfo(torch.int64).max)
        key[has_token] = bucket * length + has_token.nonzero()[:, 1].view(-1, 1, 1)
        rank = key.movedim(1, -1).argsort(dim=-1, stable=True)  # [B, H, rounds, P]
        return self.places.view(batch, 1, 1, length).expand_as(rank).gather(-1, rank).flatten(2).flatten(0, 1)


def hashes(x: Tensor, buckets: Sequence[int], rounds: int, seed: int | None) -> Tensor:
    """Returns the bucket of each vector of x [T, H, D] in each round, int64 [T, H, rounds].

    The bucket is `argmax([xR; -xR])` for random directions R of each head and round (section 2). Several factors in
    `buckets` give one digit each of a mixed-radix number.
    """
    generator = None if seed is None else torch.Generator(x.device).manual_seed(seed)
    shape = (*x.shape[1:], rounds, sum(buckets) // 2)
    directions = torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)
    projections = torch.einsum("thd,hdrk->thrk", x, directions).split([n // 2 for n in buckets], -1)
    digits = [torch.cat([part, -part], -1).argmax(-1) for part in projections]
    return sum((digit * prod(buckets[:k]) for k, digit in enumerate(digits)), torch.zeros_like(digits[0]))


def _drop_self_loops(graph: Graph) -> Graph:
    """Removes self-loops in each head, then adds one to each node without in-neighbors (section 2, "Causal masking for
    shared-QK")."""
    src, dst = graph.edge_index
    others = _select_edges(graph, src != dst)
    head = torch.zeros_like(dst) if graph.edge_type is None else graph.edge_type
    reached = torch.zeros(int(head.max()) + 1 if len(head) else 1, graph.num_dst, dtype=torch.bool, device=dst.device)
    reached[head[src != dst], others.edge_index[1]] = True
    isolated_head, isolated = (~reached).nonzero().T
    edges = torch.cat([others.edge_index, isolated.expand(2, -1)], 1)
    edge_type = None if others.edge_type is None else torch.cat([others.edge_type, isolated_head])
    return Graph.from_edges(edges, graph.num_dst, graph.num_src, edge_type=edge_type)


def _select_edges(graph: Graph, mask: Tensor) -> Graph:
    edge_type = None if graph.edge_type is None else graph.edge_type[mask]
    return Graph.from_edges(graph.edge_index[:, mask], graph.num_dst, graph.num_src, edge_type=edge_type)
