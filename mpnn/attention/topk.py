"""Attention over edges that it chooses itself, out of those of a graph: `TopK` (DeepSeek's sparse attention) and
`BlockTopK` (MoBA). The choice has no gradient; the graph of what is chosen differs by item, and for blocks by head."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mpnn import graphs
from mpnn.attention.dot_product import DotProduct
from mpnn.attention.spec import check_integers
from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.update.maps import Linear

_AT_ONCE = 1 << 24  # numbers that are computed at a time


class TopK(DotProduct):
    """Dot-product attention over the k sources that an indexer scores highest (DeepSeek-V3.2, 2025, arXiv:2512.02556,
    section 2.1).

        I_ij = sum_h (W_w h_i)_h ReLU( <(W_IQ h_i)_h, W_IK h_j> )       over the in-neighbors j of i
        m_i  = DotProduct of i over the k in-neighbors of largest I_ij

    The indexer computes O(N^2) scores, in blocks of rows; attention reads k sources per destination.
    Only `index_loss` has gradients for the indexer. A `KVCache` keeps its keys, too: a new node scores all nodes and
    reads k.

    Args:
        k: sources of each destination. index_heads, index_dim: heads of the indexer and their width.
        options: of `DotProduct`.
    """

    depends_on = "graph"

    def __init__(
        self, dim: int, heads: int, k: int, *, index_heads: int = 4, index_dim: int = 32, **options: Any
    ) -> None:
        super().__init__(dim, heads, **options)
        check_integers(index_heads=index_heads, index_dim=index_dim)
        at_least("k", k, 1)
        self.k = k
        self.index_heads = index_heads
        query_dim, source_dim = self.to_query.in_features, self.to_key.in_features
        self.to_index_query = Linear(query_dim, index_heads * index_dim, bias=False)
        self.to_index_key = Linear(source_dim, index_dim, bias=False)
        self.to_index_weight = Linear(query_dim, index_heads, bias=False)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        _check(self, dst, graph, edge_attr)
        return super().forward(dst, src, self.chosen(dst, src, graph))

    def chosen(self, dst: Tensor, src: Tensor, graph: Graph, index_key: Tensor | None = None) -> Graph:
        """Returns the graph of the chosen edges; see `choose`."""
        _check(self, dst, graph, None)
        return graphs.chosen(self.choose(dst, src, graph, index_key), graph.num_src) & graph

    @torch.no_grad()
    def choose(self, dst: Tensor, src: Tensor, graph: Graph, index_key: Tensor | None = None) -> Tensor:
        """Returns the chosen sources, int64 [N_dst, k] or [B, N_dst, k], -1 where a destination has fewer in-neighbors.
        `index_key`: the indexer's keys of all sources, [..., N_src, index_dim], if they are known; else of `src`."""
        index_key = self.to_index_key(src) if index_key is None else index_key
        parts = []
        for rows in rows_at_a_time(dst, index_key.shape[-2] * self.index_heads):
            edges = graph.rows(rows.start, rows.stop).dense()
            scores = self._index(dst[..., rows, :], index_key).masked_fill(~edges, -torch.inf)
            parts.append(_largest(scores, min(self.k, graph.num_src)))
        return torch.cat(parts, -2) if parts else torch.zeros(*dst.shape[:-1], 0, dtype=torch.int64)

    def index_loss(self, dst: Tensor, src: Tensor, graph: Graph) -> Tensor:
        """Returns the Kullback-Leibler divergence of the attention's distribution over chosen sources from the
        indexer's, as a mean over destinations with in-neighbors. Only the indexer gets gradients (section 2.1, sparse
        training stage).

            sum_j p_ij log(p_ij / q_ij)     p_ij = mean over heads of w_ij,  q_ij = softmax_j I_ij

        Raises:
            ValueError: if the weights depend on more than products: biases, softcap, or another normalizer.
        """
        dst, src, indices = dst.detach(), src.detach(), self.choose(dst, src, graph)
        with torch.no_grad():
            round = super().forward(dst, src, graph)
        score: Any = round.score
        plain = type(score) is Dot and score.softcap is None and score.edge_key is None and not round.bias
        if not plain or self.normalize != "softmax":
            raise ValueError("index_loss needs logits that are products: no biases, softcap or other normalizer")
        total = dst.new_zeros(())
        for rows in rows_at_a_time(dst, max(self.k * self.heads * self.head_dim, src.shape[-2] * self.index_heads)):
            at = indices[..., rows, :]
            p = _weights(score, rows, at)
            scored = checkpoint(self._scores_at, dst[..., rows, :], src, at, use_reentrant=False)
            total = total + (torch.special.xlogy(p, p) - p * scored.log_softmax(-1).masked_fill(at < 0, 0.0)).sum()
        return total / (indices >= 0).any(-1).sum().clamp(min=1)

    def _index(self, dst: Tensor, index_key: Tensor) -> Tensor:
        query = self.to_index_query(dst).unflatten(-1, (self.index_heads, -1))
        products = F.relu(torch.einsum("...ihd,...jd->...ihj", query, index_key))
        return torch.einsum("...ih,...ihj->...ij", self.to_index_weight(dst), products)

    def _scores_at(self, dst: Tensor, src: Tensor, at: Tensor) -> Tensor:
        """The indexer's scores of these sources, -inf for none; 0 in rows without any."""
        absent = (at < 0) & (at >= 0).any(-1, keepdim=True)
        return self._index(dst, self.to_index_key(src)).gather(-1, at.clamp(min=0)).masked_fill(absent, -torch.inf)


class BlockTopK(DotProduct):
    """Dot-product attention over the blocks of sources that each query and head chooses (MoBA, Lu et al. 2025,
    arXiv:2502.13189, eq. 2-6).

        s_ib = <q_i, mean of k_j in block b>       m_i = DotProduct of i over the own block and top - 1 others by s_ib

    A block without in-neighbors of the destination is never chosen. A block of which only some nodes are in-neighbors
    is always chosen, because its mean includes the others. Over `causal()`, these are later blocks and the own one, as
    in the paper.

    With a `KVCache` a new node reads the means of earlier blocks, and keys and values of the blocks that it chooses
    (Quest, Tang et al. 2024, arXiv:2406.10774): O(N / size + top size).

    Args:
        size: nodes of a block. top: blocks that a query chooses, its own included.
        options: of `DotProduct`.
    """

    depends_on = "graph"

    def __init__(self, dim: int, heads: int, size: int, top: int, **options: Any) -> None:
        super().__init__(dim, heads, **options)
        at_least("size", size, 1)
        at_least("top", top, 1)
        self.size = size
        self.block = size
        self.top = top

    def round(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        graph: Graph,
        edge_attr: Tensor | None = None,
        means: Tensor | None = None,
    ) -> Round:
        _check(self, query[..., 0], graph, edge_attr)
        chosen = self.choose(query, key, graph, means)
        if means is not None and graph.num_dst == 1 and chosen.any():
            round = super().round(query, key, value, graph)
            if not round.biased and round.edge_value is None and cast(Dot, round.score).edge_key is None:
                return self._of_chosen(round, chosen[:, :, 0])
        blocks = graphs.blocks(chosen, self.size, graph.num_src, num_dst=graph.num_dst)
        return super().round(query, key, value, blocks & graph)

    def _of_chosen(self, round: Round, chosen: Tensor) -> Round:
        """A round of one destination over the sources of chosen blocks alone, bool [B or 1, H, blocks]."""
        score = cast(Dot, round.score)
        graph = round.graph
        used, block = chosen.int().topk(int(chosen.sum(-1).max()), -1)
        source = (block[..., None] * self.size + torch.arange(self.size, device=block.device)).flatten(-2)
        is_edge = torch.from_numpy(graph.runs.contains(np.zeros((), np.int64), source.cpu().numpy())).to(source.device)
        is_edge &= used.bool().repeat_interleave(self.size, -1)
        head = torch.arange(self.heads, device=source.device)[:, None] // (self.heads // self.kv_heads)
        row = (source.clamp(max=graph.num_src - 1) * self.kv_heads + head).flatten(1)

        def read(x: Tensor) -> Tensor:
            items = x.flatten(-3, -2).view(len(row), -1, x.shape[-1])
            gathered = torch.stack([item.index_select(0, at) for item, at in zip(items, row, strict=True)])
            gathered = gathered.unflatten(1, source.shape[1:]).transpose(1, 2)
            return gathered if x.dim() == 4 else gathered[0]

        alone = graphs.blocks(is_edge[:, :, None], 1, source.shape[-1], num_dst=1)
        return replace(round, graph=alone, value=read(round.value), score=replace(score, key=read(score.key)))

    @torch.no_grad()
    def choose(self, query: Tensor, key: Tensor, graph: Graph, means: Tensor | None = None) -> Tensor:
        """Returns the chosen blocks, bool [B or 1, H, N_dst, blocks], for queries and keys [..., N, H, D]. `means`:
        those of keys of complete blocks, [..., blocks, H_kv, D], if they are known."""
        if graph.positions is not None:
            raise ValueError("BlockTopK counts blocks from the first node, and this graph has other positions")
        visible, whole = (
            x.to(key.device) for x in graph.cached(("visible blocks", self.size), lambda: self._seen(graph))
        )
        means = block_means(key, self.size) if means is None else means
        complete = graph.num_src // self.size
        means = means[..., :complete, :, :]
        if graph.num_src % self.size:
            means = torch.cat([means, key[..., complete * self.size :, :, :].mean(-3, keepdim=True)], -3)
        gate = torch.einsum("...ihd,...bhd->...hib", query, means.repeat_interleave(self.heads // self.kv_heads, -2))
        own = graph.node_positions()[0][:, None] // self.size == torch.arange(visible.shape[1], device=key.device)
        always = visible & (own | ~whole)
        gate = gate.masked_fill(~visible, -torch.inf).masked_fill(always, torch.inf)
        best = gate.topk(min(self.top, gate.shape[-1]), -1).indices
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, best, True) & visible | always
        return chosen if chosen.dim() == 4 else chosen[None]

    def _seen(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """Whether each destination has some, and all sources of each block as in-neighbors, bool [N_dst, blocks]."""
        runs = graph.runs
        first = np.arange(0, graph.num_src, self.size)
        last = np.minimum(first + self.size, graph.num_src)
        count = np.zeros((graph.num_dst, len(first)), np.int64)
        inside = np.minimum(runs.stop[:, None], last) - np.maximum(runs.start[:, None], first)
        np.add.at(count, runs.row, np.maximum(inside, 0))
        return torch.from_numpy(count > 0), torch.from_numpy(count == last - first)


def _largest(scores: Tensor, k: int) -> Tensor:
    """The indices of the k largest scores of each row, -1 for -inf. Of equal scores the first ones, which `topk` does
    not promise: ReLUs make scores of exactly 0, and a cache must choose as over the whole text."""
    best, at = scores.topk(min(k + 1, scores.shape[-1]), -1)
    if 0 < k < scores.shape[-1]:
        tied = (best[..., k - 1] == best[..., k]) & (best[..., k] > -torch.inf)
        if tied.any():
            at[tied] = torch.sort(scores[tied], stable=True, dim=-1, descending=True).indices[..., : k + 1]
    return at[..., :k].masked_fill(best[..., :k] == -torch.inf, -1)


def block_means(key: Tensor, size: int) -> Tensor:
    """The means of whole blocks of keys [..., N, H, D], [..., floor(N / size), H, D]."""
    return key.unfold(-3, size, size).mean(-1) if key.shape[-3] >= size else key[..., :0, :, :]


def _check(attention: DotProduct, x: Tensor, graph: Graph, edge_attr: Tensor | None) -> None:
    """Raises ValueError unless x is [N, d] or [B, N, d], and edges have no attributes."""
    name = type(attention).__name__
    if x.dim() > 3:
        raise ValueError(f"{name} takes features [N, d] or [B, N, d]; got {list(x.shape)}")
    if edge_attr is not None or attention.to_edge is not None or graph.edge_attr is not None or graph.stack:
        raise ValueError(f"{name} chooses its edges, so it takes no edge_attr, no edge_dim and no chosen graph")


def rows_at_a_time(dst: Tensor, numbers: int) -> Iterator[slice]:
    """Rows of [..., N, d] at a time, if each takes this many numbers."""
    step = max(1, _AT_ONCE // max(dst.shape[:-2].numel() * numbers, 1))
    for first in range(0, dst.shape[-2], step):
        yield slice(first, min(first + step, dst.shape[-2]))


def _weights(score: Dot, rows: slice, at: Tensor) -> Tensor:
    """The weights of these sources, the mean of all heads, [..., rows, k]; 0 for none."""
    query = score.query[..., rows, :, :]
    key = score.key
    key = key.repeat_interleave(query.shape[-2] // key.shape[-2], -2)
    index = at.clamp(min=0).flatten(-2)[..., None, None].expand(*at.shape[:-2], -1, *key.shape[-2:])
    keys = key.gather(-3, index).unflatten(-3, at.shape[-2:])
    logits = score.scale * torch.einsum("...ihd,...ikhd->...ihk", query, keys)
    weights = logits.masked_fill((at < 0).unsqueeze(-2), -torch.inf).softmax(-1)
    return weights.nan_to_num(0.0).mean(-2)
