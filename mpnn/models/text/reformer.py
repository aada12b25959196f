"""Reformer (Kitaev et al. 2020): attention within chunks of positions and within buckets of locality-sensitive hashes.

topology   local: a chunk attends to itself and the one before    lsh: the same, with the nodes sorted by hash, per head
attention  local: DotProduct(dim, heads)                          lsh: SharedKey, k_j = q_j / rms(q_j)      (section 2)
aggregate  "sum"                                                  m_i = W_O || _h sum_j w_ij W_V h_j
update     Reversible(dim, FeedForward(dim))                      y1 = x1 + m,  y2 = x2 + ffn(norm'(y1))        (eq. 9)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm, prod

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.decoding.generation import check_causal
from mpnn.graph.data import selected
from mpnn.graphs import chunks
from mpnn.graphs.content import drop_self_loops
from mpnn.models.layers.blocks import AxialPositions, embed, lookup, transformer_update
from mpnn.models.layers.losses import token_loss
from mpnn.models.layers.packing import Packing, require_eager, token_mask
from mpnn.models.layers.per_head import SharedKey
from mpnn.models.saving import Model
from mpnn.models.text.bert import EncoderOutput
from mpnn.update import Reversible
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear


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
    def length_multiple(self) -> int:
        """Lengths are padded to a multiple of this before they are divided into chunks."""
        return lcm(*(self.chunks(kind).size for kind in self.layers))

    def bucket_factors(self, length: int) -> tuple[int, ...]:
        """Returns the factors of the number of buckets for this length."""
        if isinstance(self.buckets, int):
            return (self.buckets,)
        if self.buckets is not None:
            return tuple(self.buckets)
        power = (2 * (length // self.lsh.size)).bit_length() - 1
        limit = 2 * max(int((self.context // self.lsh.size) ** 0.5), self.lsh.size)
        return (2**power,) if 2**power <= limit else (2 ** (power // 2), 2 ** (power - power // 2))


class Reformer(Model):
    """Reformer encoder or decoder (Kitaev et al. 2020). The output is the concatenation of its two streams, of width
    `2 * dim`.

    The layers are reversible, but this implementation still stores their activations for the backward pass.

    Args:
        config: sizes and options.
        graph: replaces the chunks and hashes of all layers. It is bound to the positions of the padded row.

    Raises:
        ValueError: if `config.causal` and a node of `graph` attends to a later one.
    """

    def __init__(self, config: ReformerConfig, graph: Topology | None = None) -> None:
        super().__init__()
        if config.causal and graph is not None:
            check_causal(graph, config.context)
        dim = config.dim
        self.config = config
        self.graph = graph
        self.token = nn.Embedding(config.vocabulary, dim)
        axial = None if config.axial is None else AxialPositions(config.axial, config.axial_dims)
        self.position = nn.Embedding(config.context, dim) if axial is None else axial

        def layer(kind: str) -> MessagePassing:
            update = transformer_update(Reversible, config, ffn_dropout=config.dropout)
            dropout = config.chunks(kind).dropout
            attention = (
                SharedKey(dim, config.heads, head_dim=config.head_dim, dropout=dropout)
                if kind == "lsh"
                else DotProduct(dim, config.heads, head_dim=config.head_dim, dropout=dropout, bias=False)
            )
            return MessagePassing(None, "sum", update, attention)

        self.layers = nn.ModuleList(layer(kind) for kind in config.layers)
        self.norm = nn.LayerNorm(2 * dim, eps=config.eps)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
    ) -> EncoderOutput:
        """Encodes a batch of sentences.

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] that replace the token embeddings.
            positions: int64 [B, N]; default: 0 to N - 1.
            padding_mask: bool [B, N], True at padding; default: no padding. Padding is not computed and not attended
                to.

        Returns:
            `last` has shape [B, N, 2 * dim]. `pooled` and `weights` are None.
        """
        require_eager("the tokens' hashes decide the graph")
        packing = Packing.of(token_mask(tokens, padding_mask), separate=True)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])
        vectors = embed(self.token, tokens)
        x = self.dropout(packing.pack(vectors)) + self.dropout(self._position(packing.pack(positions)))
        x = torch.cat([x, x], -1)
        graphs = ReformerGraphs(self.config, packing)
        for layer in self.layers:
            assert isinstance(layer, MessagePassing)
            x = layer(x, graphs.of(layer, x) if self.graph is None else graphs.of_topology(self.graph, layer))
        return EncoderOutput(packing.unpack(self.dropout(self.norm(x))), None, None)

    def _position(self, positions: Tensor) -> Tensor:
        if isinstance(self.position, AxialPositions):
            return self.position(positions)
        assert isinstance(self.position, nn.Embedding)
        return lookup(self.position, positions, "position")


class ReformerLM(Model):
    """Reformer for causal or masked language modeling: `logits_i = W y_i + b`. W is not tied to the embeddings."""

    def __init__(self, config: ReformerConfig, graph: Topology | None = None) -> None:
        super().__init__()
        self.encoder = Reformer(config, graph)
        self.to_logits = Linear(2 * config.dim, config.vocabulary)

    def forward(self, tokens: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        """Returns logits [B, N, vocabulary]. Arguments are those of `Reformer.forward`."""
        return self.to_logits(self.encoder(tokens, padding_mask=padding_mask).last)

    def loss(self, tokens: Tensor, targets: Tensor, *, padding_mask: Tensor | None = None) -> Tensor:
        """Returns the mean cross-entropy in nats. targets: int64 [B, N], -100 at positions to ignore."""
        return token_loss(self(tokens, padding_mask=padding_mask), targets)


class ReformerGraphs:
    """Builds the graphs of the layers of a Reformer for a batch of packed sentences.

    index: int64 [B, P], the packed index of the token at each position, -1 at padding. P is a multiple of
    `config.length_multiple`.
    """

    def __init__(self, config: ReformerConfig, packing: Packing) -> None:
        self.config = config
        self.packing = packing
        mask = packing.token_mask
        index = torch.where(mask, mask.flatten().cumsum(0).view_as(mask) - 1, -1)
        self.index = F.pad(index, (0, -mask.shape[1] % config.length_multiple), value=-1)

    @torch.no_grad()
    def of(self, layer: MessagePassing, x: Tensor) -> Graph:
        """Returns the graph of a layer: chunks of positions, or of nodes sorted by hashes of x [T, 2 * dim]."""
        batch, length = self.index.shape
        shared = layer.attention if isinstance(layer.attention, SharedKey) else None
        layout = self.config.chunks("local" if shared is None else "lsh")
        if length <= layout.size:
            graph = chunks(self.index, max(length, 1), len(x), before=0)
        elif shared is None:
            graph = chunks(self.index, layout.size, len(x), before=layout.before, after=layout.after)
        else:
            order = self._sort_by_hash(shared.queries(layer.update.prepare(x)))
            head = torch.arange(shared.heads, device=x.device).repeat(batch)
            graph = chunks(order, layout.size, len(x), before=layout.before, after=layout.after, edge_type=head)
        if self.config.causal:
            src, dst = graph.edge_index
            graph = selected(graph, src <= dst)
        return graph if shared is None else drop_self_loops(graph)

    def of_topology(self, topology: Topology, layer: MessagePassing) -> Graph:
        """Returns the graph of a layer over a given topology."""
        graph = self.packing.bind_each([topology.bind(self.packing.token_mask.shape[1])] * len(self.index))
        return drop_self_loops(graph) if isinstance(layer.attention, SharedKey) else graph

    def _sort_by_hash(self, queries: Tensor) -> Tensor:
        """Sorts the tokens of each sentence and head by the hash of their queries [T, H, D].

        Returns:
            int64 [B * H, rounds * P]: packed indices, one round after the other. Padding (-1) is last in each round.
        """
        batch, length = self.index.shape
        has_token = self.index >= 0
        bucket = hash_buckets(queries, self.config.bucket_factors(length), self.config.rounds, self.config.seed)
        key = bucket.new_full((batch, length, *bucket.shape[1:]), torch.iinfo(torch.int64).max)
        key[has_token] = bucket * length + has_token.nonzero()[:, 1].view(-1, 1, 1)
        rank = key.movedim(1, -1).argsort(dim=-1, stable=True)  # [B, H, rounds, P]
        return self.index.view(batch, 1, 1, length).expand_as(rank).gather(-1, rank).flatten(2).flatten(0, 1)


def hash_buckets(x: Tensor, buckets: Sequence[int], rounds: int, seed: int | None) -> Tensor:
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
