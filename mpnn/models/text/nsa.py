"""NSA (Yuan et al. 2025, arXiv:2502.11089): a Llama over three graphs: block summaries, chosen blocks, and a window.

topology   causal() & window(w - 1); node t to the blocks of l nodes, d apart, that end at t or before (eq. 7);
           causal() & blocks(the n blocks of l' nodes whose summaries weigh most, for each group of heads)  (eq. 8-12)
attention  w^c_ij = softmax_j( <q_i, k^c_j> / sqrt(D) )       for each topology c, with keys and values of its own
aggregate  "sum"                                              m_i = W_O || _h sum_c g^c_ih sum_j w^c_ij v^c_j    (eq. 5)
update     PreNorm(dim, GatedFeedForward, norm=RMSNorm)       g_i = sigmoid(W_G h_i);  y as in Llama
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, graphs, ops
from mpnn.attention.topk import rows_at_a_time
from mpnn.decoding.cache import KVCache
from mpnn.graph.arguments import at_least
from mpnn.graph.runs import Runs
from mpnn.models.layers.blocks import ACTIVATIONS, Norm
from mpnn.models.layers.decoder import PlainDecoder
from mpnn.models.text.llama import LlamaConfig
from mpnn.update import GatedFeedForward, PreNorm
from mpnn.update.maps import Linear


@dataclass(frozen=True)
class NSAConfig(LlamaConfig):
    """Configuration of an NSA: that of a Llama, and the blocks and the window of the paper (section 4.1).

    size, stride: l and d, the size of a summarized block, and the distance from one to the next. block, top: l' and n,
    the size of a block to choose, and the number of chosen blocks, which includes the first one and the last two.
    window: w. `stride` divides `size` and `block`. Heads that share keys and values share a choice, too. Queries and
    keys of chosen blocks and of the window are rotated.
    """

    size: int = 32
    stride: int = 16
    block: int = 64
    top: int = 16
    window: int = 512


class Summaries(nn.Module):
    """A vector for each block of `size` vectors, `stride` apart: an MLP of them and of learned positions in a block.

    x [..., N, H, D] -> [..., M, H, D], where M = floor((N - size) / stride) + 1, or 0 if N < size.
    """

    def __init__(self, size: int, stride: int, heads: int, width: int) -> None:
        super().__init__()
        self.size = size
        self.stride = stride
        self.position = nn.Parameter(torch.randn(heads, size, width) * 0.02)
        self.mlp = nn.Sequential(Linear(size * width, width), nn.GELU(), Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        missing = max(self.size - x.shape[-3], 0)
        blocks = F.pad(x, (0, 0, 0, 0, 0, missing)).unfold(-3, self.size, self.stride).mT + self.position
        summaries = self.mlp(blocks.flatten(-2))
        return summaries[..., : 0 if missing else None, :, :]


class NSALayer(nn.Module):
    """A layer of NSA: x [B, N, dim] -> y [B, N, dim]. See the equations of the module.

    Raises:
        ValueError: if sizes of the configuration do not divide each other.
    """

    graph = graphs.causal()

    def __init__(self, config: NSAConfig, norm: Norm) -> None:
        super().__init__()
        for name, least in (("size", 1), ("stride", 1), ("block", 1), ("top", 3), ("window", 1)):
            at_least(name, getattr(config, name), least)
        self.kv_heads = config.heads if config.kv_heads is None else config.kv_heads
        if config.size % config.stride or config.block % config.stride or config.heads % self.kv_heads:
            raise ValueError(f"stride must divide size and block, and kv_heads heads; got {config}")
        self.config = config
        self.rotary = config.rotary()
        dim = config.dim
        self.near = self.graph & graphs.window(config.window - 1)
        width = self.rotary.dim
        self.to_query = Linear(dim, config.heads * width, config.bias)
        self.to_key, self.to_value = (Linear(dim, 3 * self.kv_heads * width, config.bias) for _ in range(2))
        shape = config.size, config.stride, self.kv_heads, width
        self.key_summaries, self.value_summaries = Summaries(*shape), Summaries(*shape)
        self.to_gate, self.to_out = Linear(dim, 3 * config.heads), Linear(config.heads * width, dim, config.bias)
        ffn = GatedFeedForward(dim, config.hidden, ACTIVATIONS[config.activation])
        self.update = PreNorm(dim, ffn, norm=norm)

    def forward(self, x: Tensor, graph: Any = None, *, cache: KVCache | None = None) -> Tensor:
        if graph not in (None, self.graph):
            raise ValueError("NSA chooses its own graphs over whole texts: call it without graph and lengths")
        config = self.config
        h = self.update.prepare(x)
        start = 0 if cache is None else cache.seen(self)
        nodes = start + x.shape[-2]
        at = np.arange(start, start + x.shape[-2])
        query = self.to_query(h).unflatten(-1, (config.heads, -1))
        key, value = (x(h).unflatten(-1, (3 * self.kv_heads, -1)) for x in (self.to_key, self.to_value))
        plain, turned = key.split([self.kv_heads, 2 * self.kv_heads], -2)
        position = torch.from_numpy(at).to(h.device)
        new = self.graph.bind(len(at)).to(h.device)
        rotated, turned = self.rotary.rotate(query, turned, new.with_positions(position, position) if start else new)
        key = torch.cat([plain, turned], -2)
        if cache is not None:
            key, value = cache.append(self, key, value)
        keys, values = key.chunk(3, -2), value.chunk(3, -2)
        summaries = self.summarize(keys[0], values[0], cache, len(at))
        ended = Runs.of(len(at), summaries[0].shape[-3], [(at - start, 0, (at - config.size + 1) // config.stride + 1)])
        causal, near = (x.bind(nodes).to(h.device) for x in (self.graph, self.near))
        if start:  # else the bound graphs, which keep their plans
            causal, near = causal.rows(start, nodes), near.rows(start, nodes)
        chosen = graphs.blocks(self.choose(query, summaries[0], start), config.block, nodes, num_dst=len(at)) & causal
        attend = partial(ops.attend, dropout=config.attention_dropout if self.training else 0.0)
        parts = [attend(Graph.from_runs(ended).to(h.device), query, *summaries)]
        parts += [attend(bound, rotated, *kv) for bound, *kv in zip((chosen, near), keys[1:], values[1:], strict=True)]
        gate = self.to_gate(h).sigmoid().unflatten(-1, (3, -1, 1))
        return self.update(x, self.to_out((gate * torch.stack(parts, -3)).sum(-3).flatten(-2)))

    def summarize(self, key: Tensor, value: Tensor, cache: KVCache | None, new_nodes: int) -> tuple[Tensor, Tensor]:
        """The summaries of the keys and values of all nodes; a cache keeps those of earlier calls."""
        held = None if cache is None else cache.state(self)
        start = 0 if held is None else held.shape[-3] * self.config.stride
        new = [self.key_summaries(key[..., start:, :, :]), self.value_summaries(value[..., start:, :, :])]
        both = torch.cat(new, -2)
        both = both if held is None else torch.cat([held, both], -3)
        if cache is not None:
            cache.keep_state(self, both, new_nodes)
        return both.split(self.kv_heads, -2)

    @torch.no_grad()
    def choose(self, query: Tensor, summaries: Tensor, start: int = 0) -> Tensor:
        """The chosen blocks, bool [B, kv_heads, N, blocks], for queries [B, N, H, D] of the nodes from `start` on and
        summaries of keys."""
        config = self.config
        nodes = start + query.shape[-3]
        count = summaries.shape[-3]
        blocks, summary = (torch.arange(n, device=query.device) for n in (-(-nodes // config.block), count))
        # eq. 9: the number of (m, n) with i = j l'/d + m - n, m < l'/d, n < l/d is that of shared stretches of d nodes
        first = summary[:, None] * config.stride - blocks * config.block
        stretches = (first + config.size).clamp(max=config.block) - first.clamp(min=0)
        overlaps = stretches.clamp(min=0).to(query.dtype) / config.stride
        shared = query.unflatten(-2, (self.kv_heads, -1))
        chosen = []
        for rows in rows_at_a_time(query.flatten(-2), config.heads * count):
            at = torch.arange(start + rows.start, start + rows.stop, device=query.device)[:, None]
            logits = torch.einsum("bighd,bmgd->bghim", shared[:, rows], summaries) * self.rotary.dim**-0.5
            logits = logits.masked_fill(summary * config.stride + config.size > at + 1, -torch.inf)
            importance = logits.softmax(-1).nan_to_num(0.0).sum(2) @ overlaps  # eq. 8, 10
            own = at // config.block
            always = (blocks == 0) | (blocks == own) | (blocks == own - 1)
            importance = importance.masked_fill(always, torch.inf).masked_fill(blocks > own, -torch.inf)
            best = importance.topk(min(config.top, len(blocks)), -1).indices
            chosen.append(torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, best, True) & (blocks <= own))
        return torch.cat(chosen, -2)


class NSA(PlainDecoder):
    """Decoder-only language model of natively trainable sparse attention.

    The graphs of chosen blocks are built in each call, so `torch.compile` does not trace it. A cache keeps the keys,
    the values and the summaries; `KVCache.crop` raises an error.

    Args:
        config: sizes and options.
    """

    def __init__(self, config: NSAConfig) -> None:
        norm = partial(nn.RMSNorm, eps=config.eps)
        super().__init__(config, (NSALayer(config, norm) for _ in range(config.layers)), norm)
