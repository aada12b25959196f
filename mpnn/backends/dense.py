"""Dot-product attention over whole blocks of pairs, by torch's scaled dot product attention.

A block is the whole graph (complete, causal, or small enough for a mask) or one of its disjoint cliques, of which all
of one size run as a batch. What torch's kernels do not offer (soft capping, other normalisers, dropout that every
backend draws alike, the weights themselves) is written out on the block's score matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import random
from mpnn.aggregate import SUM
from mpnn.backends.estimate import Estimate
from mpnn.graph import Graph
from mpnn.scores import Dot, Lookup, PerEdge, Request

NAME = "dense"

_MOST_PAIRS = 1 << 26  # of a mask; 64 MB
_MOST_SCORES = 1 << 29  # of written-out scores over all heads and batches; 2 GB in float32


def supports(request: Request) -> str | None:
    graph, score = request.graph, request.score
    if not isinstance(score, Dot):
        return "it runs dot-product attention only"
    if request.reduce is not SUM:
        return f"it sums messages, and cannot aggregate by {type(request.reduce).__name__}"
    if score.edge_key is not None or request.edge_value is not None:
        return "vectors on edges would have to be written out for all pairs"
    if graph.is_explicit and graph.num_edges != graph.runs.num_edges:
        return "the graph has repeated edges, which a matrix of pairs cannot tell apart"
    if _by_cliques(request):
        pairs = graph.num_edges
    else:
        pairs = graph.num_dst * graph.num_src
        if not _is_plain_shape(graph) and pairs > _MOST_PAIRS:
            return f"a mask of {graph.num_dst:,} x {graph.num_src:,} pairs is too large"
    written = pairs * request.batch.numel() * request.heads
    if (_written_out(request) or request.bias) and written > _MOST_SCORES:
        return f"it would write out {written:,} scores"
    return None


def estimate(request: Request) -> Estimate:
    graph, clique = request.graph, _by_cliques(request)
    pairs = graph.num_edges if clique else graph.num_dst * graph.num_src
    heads = request.batch.numel() * request.heads
    width = request.value.shape[-1]
    explicit = _written_out(request)
    per_number = 6e-11 if explicit else 3e-11
    if graph.runs.is_causal and not explicit and not request.bias:
        per_number /= 2
    passes = 3.5 if request.needs_grad else 1.0
    launch = 5e-5 * (len(graph.cliques) if clique else 1)
    scores = pairs * heads * (8 if explicit else 0) + (0 if _is_plain_shape(graph) or clique else 5 * pairs)
    traffic = pairs * heads * (3e-9 if explicit else 0) + (
        0 if _is_plain_shape(graph) or clique else 1e-10 * pairs * heads
    )
    return Estimate(launch + passes * (pairs * heads * width * per_number + traffic), scores * passes)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    if not _by_cliques(request):
        return _run_block(request, _whole(request.graph, request.value.device))
    outs, order = [], []
    for members in request.graph.cliques:
        out, _ = _run_block(request, _Block(members, members))
        outs.append(out.flatten(-4, -3))
        order.append(members.flatten())
    return torch.cat(outs, -3).index_select(-3, torch.cat(order).argsort()), None


@dataclass(frozen=True)
class _Block:
    """Pairs to attend over: node numbers dst [C, S] and src [C, T], C blocks of one shape.

    `allowed` [S, T] is the mask, None when every pair is an edge (or every earlier one, when `causal`); `silent` [S]
    marks rows that hear nobody.
    """

    dst: Tensor
    src: Tensor
    allowed: Tensor | None = None
    silent: Tensor | None = None
    causal: bool = False


def _whole(graph: Graph, device: torch.device) -> _Block:
    dst, src = (torch.arange(n, device=device)[None] for n in (graph.num_dst, graph.num_src))
    if _is_plain_shape(graph):
        return _Block(dst, src, causal=not graph.runs.is_complete)

    def masks() -> tuple[Tensor, Tensor | None]:
        allowed = graph.dense()
        silent = ~allowed.any(1)
        return (allowed | silent[:, None], silent) if bool(silent.any()) else (allowed, None)

    allowed, silent = graph.memo("dense mask", masks)
    return _Block(dst, src, allowed, silent)


def _run_block(request: Request, block: _Block) -> tuple[Tensor, Tensor | None]:
    """out [..., C, S, H, D] for cliques, [..., S, H, D] for the whole graph."""
    score = request.score
    assert isinstance(score, Dot)
    q, k, v = (
        _taken(x, ids).transpose(-3, -2)
        for x, ids in ((score.query, block.dst), (score.key, block.src), (request.value, block.src))
    )  # [..., C, H, S or T, D]
    bias = _bias(request, block)
    weights = None
    if _written_out(request):
        out, weights = _write_out(request, block, q, k, v, bias)
    else:
        out = _sdpa(q, k, v, score.scale, _float_mask(bias, block, q.dtype), block.causal and bias is None)
    if block.silent is not None:
        out = out.masked_fill(block.silent[:, None], 0.0)
    out = out.transpose(-3, -2)
    if _by_cliques(request):
        return out, None
    if request.return_weights:
        src, dst = request.graph.edge_index
        assert weights is not None
        weights = weights.squeeze(-4)[..., dst, src].transpose(-2, -1)
    return out.squeeze(-4), weights


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    batch = q.shape[:-3]
    if mask is not None and mask.dim() > 4:
        mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.view(*batch, *out.shape[1:])


def _write_out(
    request: Request, block: _Block, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same attention with its score matrix in sight."""
    score = request.score
    assert isinstance(score, Dot)
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    s = score.scale * q.to(wide) @ k.to(wide).mT
    s = s if score.softcap is None else score.softcap * (s / score.softcap).tanh()
    s = s if bias is None else s + bias
    allowed = block.allowed
    if block.causal:
        allowed = block.src[0] <= block.dst[0][:, None]
    if request.normalize == "softmax":
        weights = (s if allowed is None else s.masked_fill(~allowed, -torch.inf)).softmax(-1)
    else:
        weights = s.sigmoid() if request.normalize == "sigmoid" else s
        weights = weights if allowed is None else weights.masked_fill(~allowed, 0.0)
    kept = weights
    if request.dropout:
        assert request.seed is not None
        streams = random.streams(request.batch, q.shape[-3], q.device)[..., None, :, None, None]
        keep = random.keep(
            request.seed, streams, block.dst[:, None, :, None], block.src[:, None, None, :], request.dropout
        )
        kept = torch.where(keep, weights / (1 - request.dropout), torch.zeros_like(weights))
    return (kept @ v.to(kept.dtype)).to(v.dtype), weights.to(v.dtype)


def _bias(request: Request, block: _Block) -> Tensor | None:
    """All biases of a block as one [..., C, H, S, T]."""
    parts = [_pairs(b, request, block) for b in request.bias]
    return sum(parts[1:], parts[0]) if parts else None


def _pairs(bias: PerEdge, request: Request, block: _Block) -> Tensor:
    graph = request.graph
    if isinstance(bias, Lookup) and bias.relation is not None:
        ids = bias.relation.ids(block.dst[:, :, None] + graph.shift, block.src[:, None, :])
        return bias.table[ids].movedim(-1, -3)
    src, dst = graph.edge_index
    per_edge = bias.table[graph.edge_type] if isinstance(bias, Lookup) else bias  # [..., E, H]
    shape = (*per_edge.shape[:-2], per_edge.shape[-1], graph.num_dst, graph.num_src)
    flat = per_edge.new_zeros(*per_edge.shape[:-2], per_edge.shape[-1], graph.num_dst * graph.num_src)
    flat = flat.index_copy(-1, dst * graph.num_src + src, per_edge.transpose(-1, -2))
    return flat.view(shape).unsqueeze(-4)


def _float_mask(bias: Tensor | None, block: _Block, dtype: torch.dtype) -> Tensor | None:
    if bias is None:
        return None if block.allowed is None else block.allowed[None, None]
    if block.causal:
        return bias.masked_fill(block.src[0] > block.dst[0][:, None], -torch.inf).to(dtype)
    return (bias if block.allowed is None else bias.masked_fill(~block.allowed, -torch.inf)).to(dtype)


def _taken(x: Tensor, ids: Tensor) -> Tensor:
    """[..., N, H, D] at ids [C, S]: [..., C, S, H, D]; a single whole block is a view."""
    if ids.shape[0] == 1 and ids.shape[1] == x.shape[-3]:
        return x.unsqueeze(-4)
    return x.index_select(-3, ids.flatten()).unflatten(-3, ids.shape)


def _is_plain_shape(graph: Graph) -> bool:
    return graph.runs.is_complete or graph.runs.is_causal


def _by_cliques(request: Request) -> bool:
    """Whether to run clique by clique: several of them, and nothing that is told edge by edge."""
    graph = request.graph
    if graph.labels is None or graph.runs.is_complete or request.return_weights:
        return False
    return all(isinstance(b, Lookup) and b.relation is not None for b in request.bias)


def _written_out(request: Request) -> bool:
    score = request.score
    assert isinstance(score, Dot)
    plain = request.normalize == "softmax" and score.softcap is None and not request.dropout
    return not plain or request.return_weights
