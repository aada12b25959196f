"""Who hears whom in a Reformer (Kitaev et al. 2020): graphs made of chunks of places, or of hashes of the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graphs import chunks
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.packing import Packing
from mpnn.models.parts.per_head import PerHead
from mpnn.topology import Topology


@dataclass(frozen=True)
class Chunks:
    """How long chunks are, how many before and after its own a chunk hears, and the dropout of attention weights."""

    size: int = 64
    before: int = 1
    after: int = 0
    dropout: float = 0.0


@dataclass(frozen=True)
class ReformerConfig:
    """Sizes of a Reformer.

    layers: "local" or "lsh" each; local, lsh: their chunks. head_dim: width of a head. buckets: how many hashes there
    are, an even number, or several numbers whose product it is; None: a power of two near twice the number of chunks.
    rounds: of hashing. seed: of the hashes' directions; None draws new ones each time, from torch's generator. causal:
    whether nobody hears what comes later. axial, axial_dims: rows and columns of the positions, and the widths of their
    parts; None: one table. context: the longest sentence.
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
        if kind not in ("local", "lsh"):
            raise ValueError(f'layers are "local" or "lsh"; got {kind!r}')
        return self.local if kind == "local" else self.lsh

    @property
    def multiple(self) -> int:
        """Sentences are cut into chunks as if their lengths were multiples of this."""
        return lcm(*(self.chunks(kind).size for kind in self.layers))

    def hashes(self, length: int) -> tuple[int, ...]:
        """The numbers whose product is the number of buckets for this length."""
        if isinstance(self.buckets, int):
            return (self.buckets,)
        if self.buckets is not None:
            return tuple(self.buckets)
        power = (2 * (length // self.lsh.size)).bit_length() - 1
        most = 2 * max(int((self.context // self.lsh.size) ** 0.5), self.lsh.size)
        return (2**power,) if 2**power <= most else (2 ** (power // 2), 2 ** (power - power // 2))


class SharedKey(PerHead):
    """Attention whose keys are its queries, brought to one length (section 2), each head over a graph of its own:

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
        """What is hashed, [..., N, H, D]."""
        return self.to_query(x).unflatten(-1, (self.heads, -1))


class Heard:
    """Who hears whom in the layers of a Reformer, for a batch of packed sentences.

    `places` int64 [B, P]: the packed tokens at their places, -1 where there is none.
    """

    def __init__(self, config: ReformerConfig, packing: Packing, rounds: int | None = None) -> None:
        self.config, self.packing = config, packing
        self.rounds = config.rounds if rounds is None else rounds
        keep = packing.keep
        number = torch.where(keep, keep.flatten().cumsum(0).view_as(keep) - 1, -1)
        self.places = F.pad(number, (0, -keep.shape[1] % config.multiple), value=-1)

    @torch.no_grad()
    def by(self, layer: MessagePassing, x: Tensor) -> Graph:
        """By chunks of places, or of what the layer hashes of x [T, 2 * dim]."""
        batch, length = self.places.shape
        shared = layer.attention if isinstance(layer.attention, SharedKey) else None
        cut = self.config.chunks("local" if shared is None else "lsh")
        if length <= cut.size:
            graph = chunks(self.places, max(length, 1), len(x), before=0)
        elif shared is None:
            graph = chunks(self.places, cut.size, len(x), before=cut.before, after=cut.after)
        else:
            order = self._sorted(shared.queries(layer.update.prepare(x)))
            head = torch.arange(shared.heads, device=x.device).repeat(batch)
            graph = chunks(order, cut.size, len(x), before=cut.before, after=cut.after, edge_type=head)
        if self.config.causal:
            src, dst = graph.edge_index
            graph = _selected(graph, src <= dst)
        return graph if shared is None else _not_oneself(graph)

    def over(self, topology: Topology, layer: MessagePassing) -> Graph:
        """Over any topology instead."""
        graph = self.packing.bind_each([topology.bind(self.packing.keep.shape[1])] * len(self.places))
        return _not_oneself(graph) if isinstance(layer.attention, SharedKey) else graph

    def _sorted(self, queries: Tensor) -> Tensor:
        """For each sentence and head, tokens by the hash of their queries [T, H, D], round after round: int64
        [B * H, rounds * P]; places without a token come last in each round."""
        batch, length = self.places.shape
        there = self.places >= 0
        hashed = hashes(queries, self.config.hashes(length), self.rounds, self.config.seed)
        key = hashed.new_full((batch, length, *hashed.shape[1:]), torch.iinfo(torch.int64).max)
        key[there] = hashed * length + there.nonzero()[:, 1].view(-1, 1, 1)
        rank = key.movedim(1, -1).argsort(dim=-1, stable=True)  # [B, H, rounds, P]
        return self.places.view(batch, 1, 1, length).expand_as(rank).gather(-1, rank).flatten(2).flatten(0, 1)


def hashes(x: Tensor, buckets: Sequence[int], rounds: int, seed: int | None) -> Tensor:
    """The bucket of each vector of x [T, H, D] in each round, int64 [T, H, rounds]: `argmax([xR; -xR])` for random
    directions R of each head (section 2); with several numbers of buckets, they are the digits of one number."""
    generator = None if seed is None else torch.Generator(x.device).manual_seed(seed)
    shape = (*x.shape[1:], rounds, sum(buckets) // 2)
    directions = torch.randn(shape, generator=generator, device=x.device, dtype=x.dtype)
    turned = torch.einsum("thd,hdrk->thrk", x, directions).split([n // 2 for n in buckets], -1)
    digits = [torch.cat([part, -part], -1).argmax(-1) for part in turned]
    return sum((digit * prod(buckets[:k]) for k, digit in enumerate(digits)), torch.zeros_like(digits[0]))


def _not_oneself(graph: Graph) -> Graph:
    """Nobody hears itself, but who would then hear nobody (section 2, "Causal masking for shared-QK"), in each head."""
    src, dst = graph.edge_index
    others = _selected(graph, src != dst)
    head = torch.zeros_like(dst) if graph.edge_type is None else graph.edge_type
    hears = torch.zeros(int(head.max()) + 1 if len(head) else 1, graph.num_dst, dtype=torch.bool, device=dst.device)
    hears[head[src != dst], others.edge_index[1]] = True
    alone_in, alone = (~hears).nonzero().T
    edges = torch.cat([others.edge_index, alone.expand(2, -1)], 1)
    kind = None if others.edge_type is None else torch.cat([others.edge_type, alone_in])
    return Graph.from_edges(edges, graph.num_dst, graph.num_src, edge_type=kind)


def _selected(graph: Graph, which: Tensor) -> Graph:
    kind = None if graph.edge_type is None else graph.edge_type[which]
    return Graph.from_edges(graph.edge_index[:, which], graph.num_dst, graph.num_src, edge_type=kind)
