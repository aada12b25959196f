"""Graphs of a Reformer (Kitaev et al. 2020): chunks of positions, or chunks of nodes sorted by hashes of features."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.graph import Graph
from mpnn.graph.topology import Topology
from mpnn.graphs import chunks
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.packing import Packing
from mpnn.models.layers.per_head import SharedKey

if TYPE_CHECKING:
    from mpnn.models.text.reformer import ReformerConfig


class ReformerGraphs:
    """Builds the graphs of the layers of a Reformer for a batch of packed sentences.

    index: int64 [B, P], the packed index of the token at each position, -1 at padding. P is a multiple of
    `config.length_multiple`.
    """

    def __init__(self, config: ReformerConfig, packing: Packing) -> None:
        self.config, self.packing = config, packing
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
            graph = select_edges(graph, src <= dst)
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


def drop_self_loops(graph: Graph) -> Graph:
    """Removes self-loops in each head, then adds one to each node without in-neighbors (section 2, "Causal masking for
    shared-QK")."""
    src, dst = graph.edge_index
    others = select_edges(graph, src != dst)
    head = torch.zeros_like(dst) if graph.edge_type is None else graph.edge_type
    reached = torch.zeros(int(head.max()) + 1 if len(head) else 1, graph.num_dst, dtype=torch.bool, device=dst.device)
    reached[head[src != dst], others.edge_index[1]] = True
    isolated_head, isolated = (~reached).nonzero().T
    edges = torch.cat([others.edge_index, isolated.expand(2, -1)], 1)
    edge_type = None if others.edge_type is None else torch.cat([others.edge_type, isolated_head])
    return Graph.from_edges(edges, graph.num_dst, graph.num_src, edge_type=edge_type)


def select_edges(graph: Graph, mask: Tensor) -> Graph:
    edge_type = None if graph.edge_type is None else graph.edge_type[mask]
    return Graph.from_edges(graph.edge_index[:, mask], graph.num_dst, graph.num_src, edge_type=edge_type)
