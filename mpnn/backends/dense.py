"""Dot-product attention over whole blocks of pairs, by torch's scaled dot product attention.

A block is the whole graph (complete, causal, or small enough for a mask) or one of its disjoint cliques, of which all
of one size run as a batch, or all at once where torch has a kernel for that. What torch's kernels do not offer (soft
capping, other normalisers, dropout that every backend draws alike, the weights themselves) is written out on the
block's score matrix.

NaN and infinities of a node can reach rows of its block that do not attend to it: a mask's zero times NaN is NaN, in
torch's kernels too. And where a query is NaN but the values are not, torch's CPU kernel gives numbers instead of NaN
over fewer than 8 sources. To look for them in the result would add 6 to 35 % to a call over up to 64 nodes, and make
the host wait for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import random
from mpnn.aggregate import Sum
from mpnn.backends.estimate import Estimate, both_ways, on_gpu, priced
from mpnn.graph import Graph
from mpnn.kernels import by_class, varlen
from mpnn.relation import Offset, Relation
from mpnn.scores import Dot, Lookup, PerEdge, Request

NAME = "dense"

_MOST_PAIRS = 1 << 26  # of a mask; 64 MB
_MOST_SCORES = 1 << 29  # of written-out scores over all heads and batches; 2 GB in float32


def supports(request: Request) -> str | None:
    graph, score = request.graph, request.score
    if not isinstance(score, Dot):
        return "it runs dot-product attention only"
    if type(request.reduce) is not Sum:
        return "it sums messages, and cannot aggregate them otherwise"
    if not all(isinstance(vectors, Lookup) and vectors.relation is not None for vectors in _vectors(request)):
        return "vectors on edges would have to be written out for all pairs, unless they go by a rule of classes"
    if score.edge_key is not None and score.softcap is not None:
        return "it does not cap scores that vectors on edges take part in"
    if _by_cliques(request):
        pairs = graph.num_edges
    else:
        pairs = graph.num_dst * graph.num_src
        if pairs > _MOST_PAIRS and _plain_shape(graph) is None:
            return f"a mask of {graph.num_dst:,} x {graph.num_src:,} pairs is too large"
    if graph.is_explicit and graph.num_edges != graph.runs.num_edges:
        return "the graph has repeated edges, which a matrix of pairs cannot tell apart"
    written = max(pairs, graph.num_dst * _classes(request)) * request.batch.numel() * request.heads
    if (_written_out(request) or _is_biased(request)) and written > _MOST_SCORES:
        return f"it would write out {written:,} scores"
    return None


def counts(request: Request) -> dict[str, float]:
    """Pairs, for each head, by what is done with them, and the copies that cliques take."""
    graph, width = request.graph, request.value.shape[-1]
    heads = request.batch.numel() * request.heads
    by_cliques, written = _by_cliques(request), _written_out(request)
    pairs = float(heads * (graph.num_edges if by_cliques else graph.num_dst * graph.num_src))
    found = {"call": 1.0}
    if _is_biased(request):
        found["biased pair"] = pairs
    if not by_cliques and _plain_shape(graph) is None:
        found["masked pair"] = pairs
    if written:
        found |= {"written pair": pairs, "written number": pairs * width}
        if request.dropout:
            found["dropped pair"] = pairs
        if isinstance(request.score, Dot) and request.score.softcap:
            found["capped pair"] = pairs
    else:
        narrow = request.value.dtype != request.wide and graph.device.type == "cpu"
        kind = "double " if request.wide == torch.float64 else "narrow " * narrow
        if not by_cliques and not request.bias and _plain_shape(graph) == "causal":
            pairs *= 0.5 + min(0.5, 256 / max(graph.num_src, 1))  # blocks of sources on the diagonal are computed whole
        found |= {f"{kind}pair": pairs, f"{kind}number": pairs * width}
    if _vectors(request):
        found["written number"] = found.get("written number", 0.0) + heads * graph.num_dst * _classes(request) * width
    if by_cliques:
        found |= {"clique size": float(len(graph.cliques)), "clique": float(heads * sum(map(len, graph.cliques)))}
        found["clique number"] = float(graph.num_dst * heads * width)
    return both_ways(found, request.needs_grad)


def estimate(request: Request) -> Estimate:
    graph, heads = request.graph, request.batch.numel() * request.heads
    by_cliques, written = _by_cliques(request), _written_out(request)
    pairs = graph.num_edges if by_cliques else graph.num_dst * graph.num_src
    copies = (3 + 2 * bool(request.dropout) + 1.5 * request.needs_grad) * written + 1.7 * _is_biased(request)
    gathered = graph.num_dst * heads * (4 * request.value.shape[-1] * by_cliques + _classes(request))
    masked = not by_cliques and _plain_shape(graph) is None
    size = (pairs * heads * copies + gathered) * torch.finfo(request.wide).bits / 8 + 5 * pairs * masked
    if request.value.device.type == "cuda":
        return Estimate(_seconds_on_gpu(request, pairs * heads, size, written or masked), size)
    return priced(NAME, counts(request), size)


def _seconds_on_gpu(request: Request, pairs: float, size: float, whole: bool) -> float:
    """Two products for each pair, five more on the way back; `whole`: all pairs, though the graph may be causal."""
    score, graph = request.score, request.graph
    assert isinstance(score, Dot)
    passes = 3.5 if request.needs_grad else 1.0
    if not whole and not _by_cliques(request) and not _is_complete(graph):
        pairs *= 0.5
    flops = 2 * pairs * (score.query.shape[-1] + request.value.shape[-1])
    moved = 2 * size + sum(x.numel() for x in (score.query, score.key, request.value)) * request.value.element_size()
    return on_gpu(passes * flops, passes * moved, request.value.dtype, passes * (8 if size else 1))


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    score, graph = request.score, request.graph
    assert isinstance(score, Dot)
    features = score.query, score.key, request.value
    if (straight := direct(request)) is not None:
        return straight(*features, score.scale), None
    if not _by_cliques(request):
        block = graph.memo("dense block", lambda: _whole(graph))
        out, weights = _run_block(request, block, *(x.unsqueeze(-4) for x in features))
        if request.return_weights and weights is not None:
            src, dst = graph.edge_index
            return out.squeeze(-4), weights.squeeze(-4)[..., dst, src].transpose(-2, -1)
        return out.squeeze(-4), None
    order, places = graph.memo("clique by clique", lambda: _order(graph))
    query, key, value = (x.index_select(-3, order) for x in features)
    if _at_once(request):
        sizes, largest = graph.memo("clique sizes", lambda: _sizes(graph))
        return varlen.attention(query, key, value, sizes, largest, score.scale).index_select(-3, places), None
    outs, first = [], 0
    for members in graph.cliques:
        parts = (x.narrow(-3, first, members.numel()).unflatten(-3, members.shape) for x in (query, key, value))
        outs.append(_run_block(request, _Block(members, members), *parts)[0].flatten(-4, -3))
        first += members.numel()
    return torch.cat(outs, -3).index_select(-3, places), None


def direct(request: Request) -> Callable[[Tensor, Tensor, Tensor, float], Tensor] | None:
    """What runs every request of this form, given query, key, value and scale, if torch's kernel does all of it."""
    shape = _plain_shape(request.graph)
    if shape is None or _is_biased(request) or _written_out(request):
        return None
    return _causal if shape == "causal" else _complete


def _complete(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool = False) -> Tensor:
    """Out [..., N_dst, H, D] over all pairs, or all earlier ones, in as few views as may be: on few nodes they are
    what takes time beside the kernel."""
    if query.dim() == 3:
        return _complete(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), scale, causal).squeeze(0)
    q, k, v = query.transpose(-3, -2), key.transpose(-3, -2), value.transpose(-3, -2)
    return _sdpa(q, k, v, scale, None, causal).transpose(-3, -2)


_causal = partial(_complete, causal=True)


def _order(graph: Graph) -> tuple[Tensor, Tensor]:
    """The nodes clique by clique, and where each of them then stands."""
    order = torch.cat([members.flatten() for members in graph.cliques])
    return order, order.argsort()


def _at_once(request: Request) -> bool:
    """Whether cliques of all sizes run in one kernel."""
    score = request.score
    assert isinstance(score, Dot)
    plain = not _is_biased(request) and not _written_out(request)
    same_heads = score.key.shape[-2] == request.value.shape[-2]
    return plain and same_heads and len(request.graph.cliques) > 1 and varlen.runs_here(score.query, request.value)


def _sizes(graph: Graph) -> tuple[Tensor, int]:
    """The sizes of the cliques in the order of `_order`, and the largest."""
    sizes = [size for count, size in (members.shape for members in graph.cliques) for _ in range(count)]
    return torch.tensor(sizes, device=graph.device), max(sizes)


@dataclass(frozen=True)
class _Block:
    """Pairs to attend over: node numbers dst [C, S] and src [C, T], C blocks of one shape.

    `allowed` [S, T] is the mask, None when every pair is an edge (or every earlier one, when `causal`); `silent` [S]
    marks rows that hear nobody; `whole`: the nodes are all there are, in line.
    """

    dst: Tensor
    src: Tensor
    allowed: Tensor | None = None
    silent: Tensor | None = None
    causal: bool = False
    whole: bool = False

    @property
    def pairs(self) -> Tensor | None:
        """The mask, written out when `causal` too."""
        return self.src[0] <= self.dst[0][:, None] if self.causal else self.allowed


def _whole(graph: Graph) -> _Block:
    dst, src = (torch.arange(n, device=graph.device)[None] for n in (graph.num_dst, graph.num_src))
    if shape := _plain_shape(graph):
        return _Block(dst, src, causal=shape == "causal", whole=True)
    allowed = graph.dense()
    silent = ~allowed.any(1)
    if bool(silent.any()):
        return _Block(dst, src, allowed | silent[:, None], silent, whole=True)
    return _Block(dst, src, allowed, whole=True)


def _run_block(request: Request, block: _Block, *features: Tensor) -> tuple[Tensor, Tensor | None]:
    """Queries, keys and values [..., C, S or T, H, D] to out [..., C, S, H, D] and, if written out, the weights
    [..., C, H, S, T]."""
    score = request.score
    assert isinstance(score, Dot)
    q, k, v = (x.transpose(-3, -2) for x in features)  # [..., C, H, S or T, D]
    bias, weights = _bias(request, block, q), None
    if _written_out(request):
        out, weights = _write_out(request, block, q, k, v, bias)
    else:
        out = _sdpa(q, k, v, score.scale, _mask(bias, block), block.causal and bias is None)
    if block.silent is not None:
        out = out.masked_fill(block.silent[:, None], 0.0)
    return out.transpose(-3, -2), weights


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    """Out [..., H, S, D] of q, k and v [..., H, S or T, D], with one dimension or more before H."""
    if q.dim() > 4:
        batch = q.shape[:-3]
        if mask is not None and (mask.dim() > 4 or mask.shape[0] > 1):
            mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
        out = _sdpa(q.flatten(0, -4), k.flatten(0, -4), v.flatten(0, -4), scale, mask, causal)
        return out.view(*batch, *out.shape[1:])
    if scale <= 0:  # torch's kernels mask scores before they scale them, and -inf would turn round, or to NaN
        q, scale = (-q, -scale) if scale < 0 else (q * 0.0, 1.0)
    if k.shape[1] != v.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def _write_out(
    request: Request, block: _Block, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The same attention with its score matrix in sight."""
    score = request.score
    assert isinstance(score, Dot)
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    s = score.scale * q.to(request.wide) @ k.to(request.wide).mT
    s = s if score.softcap is None else score.softcap * (s / score.softcap).tanh()
    s = s if bias is None else s + bias
    allowed = block.pairs
    if request.normalize == "softmax":
        weights = _softmax(s if allowed is None else s.masked_fill(~allowed, -torch.inf), bool(request.bias))
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
    out = kept @ v.to(kept.dtype)
    if request.edge_value is not None:
        assert isinstance(request.edge_value, Lookup)
        table, relation = request.edge_value.table, request.edge_value.relation
        assert relation is not None
        sums = by_class.summed(kept, _ids(relation, request.graph, block), relation.count)
        out = out + by_class.mixed(sums, table.to(request.wide))
    return out.to(v.dtype), weights.to(v.dtype)


def _softmax(s: Tensor, may_be_silent: bool) -> Tensor:
    """Over the last dimension; with biases a row may be -inf throughout, and then weighs nothing."""
    if not may_be_silent:
        return s.softmax(-1)
    silent = (s == -torch.inf).all(-1, keepdim=True)
    return s.masked_fill(silent, 0.0).softmax(-1).masked_fill(silent, 0.0)


def _bias(request: Request, block: _Block, q: Tensor) -> Tensor | None:
    """All biases of a block as one [..., C, H, S, T], the scores of vectors on edges among them."""
    score, parts, alike = request.score, [], []
    assert isinstance(score, Dot)
    vectors = score.edge_key
    for bias in request.bias:
        if isinstance(bias, Lookup) and isinstance(vectors, Lookup) and bias.relation == vectors.relation:
            alike.append(bias.table.to(request.wide))
        else:
            parts.append(_pairs(bias, request, block))
    if isinstance(vectors, Lookup):
        numbers = sum(alike[1:], alike[0]) if alike else None
        products = by_class.products(score.scale * q.to(request.wide), vectors.table.to(request.wide), numbers)
        parts.append(_picked(products, vectors, request.graph, block))
    return sum(parts[1:], parts[0]) if parts else None


def _picked(products: Tensor, vectors: Lookup, graph: Graph, block: _Block) -> Tensor:
    """The number of each pair [..., C, H, S, T] among those of its destination for all classes, [..., C, H, S, R]."""
    relation = vectors.relation
    assert relation is not None
    if block.whole and isinstance(relation, Offset) and graph.num_dst and graph.num_src:
        return by_class.picked_by_offset(products, relation.clip, graph.shift, graph.num_src)
    return by_class.picked(products, _ids(relation, graph, block))


def _ids(relation: Relation, graph: Graph, block: _Block) -> Tensor:
    """The class of each pair, int64 [C, S, T]."""
    return relation.ids(block.dst[:, :, None] + graph.shift, block.src[:, None, :])


def _pairs(bias: PerEdge, request: Request, block: _Block) -> Tensor:
    graph = request.graph
    if isinstance(bias, Lookup) and bias.relation is not None:
        return _rows(bias, _ids(bias.relation, graph, block), request.wide).movedim(-1, -3)
    csr = graph.csr
    if isinstance(bias, Lookup):
        per_edge = _rows(bias, bias.ids(graph), request.wide)  # [E, H]
    else:
        per_edge = csr.from_caller(bias.to(request.wide), -2)  # [..., E, H]
    pairs = per_edge.new_zeros(*per_edge.shape[:-2], per_edge.shape[-1], graph.num_dst * graph.num_src)
    pairs = pairs.index_copy(-1, csr.row * graph.num_src + csr.col, per_edge.mT)
    return pairs.unflatten(-1, (graph.num_dst, graph.num_src)).unsqueeze(-4)


def _rows(bias: Lookup, ids: Tensor, wide: torch.dtype) -> Tensor:
    """Entries of a table [..., H] for ids [...]. What they share gets its gradients summed in the wide type, and in
    the same order every time, as indexing with brackets would not."""
    return bias.table.to(wide).index_select(0, ids.flatten()).unflatten(0, ids.shape)


def _mask(bias: Tensor | None, block: _Block) -> Tensor | None:
    """Both kinds that torch takes: which pairs are allowed, or what is added to their scores; [..., C, H, S, T]."""
    if bias is None:
        return None if block.allowed is None else block.allowed[None, None]
    allowed = block.pairs
    return bias if allowed is None else bias.masked_fill(~allowed, -torch.inf)


def _plain_shape(graph: Graph) -> Literal["complete", "causal"] | None:
    """What torch's kernels know without a mask."""
    return graph.memo("plain shape", lambda: _look_for_plain_shape(graph))


def _look_for_plain_shape(graph: Graph) -> Literal["complete", "causal"] | None:
    if graph.is_explicit and graph.num_edges not in _plain_counts(graph.num_dst, graph.num_src):
        return None  # without reading the edges
    if _is_complete(graph):
        return "complete"
    return "causal" if graph.labels is None and graph.runs.is_causal else None


def _plain_counts(num_dst: int, num_src: int) -> tuple[int, int]:
    """How many edges complete and causal graphs have."""
    short = min(num_dst, num_src)
    return num_dst * num_src, short * (short + 1) // 2 + (num_dst - short) * num_src


def _is_complete(graph: Graph) -> bool:
    """Asked of the labels of cliques, so that their runs, of which there are many, need not be built."""
    labels = graph.labels
    if labels is None:
        return graph.runs.is_complete
    return graph.memo("one clique", lambda: bool((labels == labels[:1]).all()))


def _by_cliques(request: Request) -> bool:
    """Whether to run clique by clique: several of them, and nothing that is told edge by edge."""
    graph = request.graph
    if graph.labels is None or _is_complete(graph) or request.return_weights:
        return False
    return all(isinstance(b, Lookup) and b.relation is not None for b in request.bias)


def _vectors(request: Request) -> list[PerEdge]:
    """The vectors on edges."""
    assert isinstance(request.score, Dot)
    return [vectors for vectors in (request.score.edge_key, request.edge_value) if vectors is not None]


def _classes(request: Request) -> int:
    """How many classes all vectors on edges have."""
    return sum(len(vectors.table) for vectors in _vectors(request) if isinstance(vectors, Lookup))


def _is_biased(request: Request) -> bool:
    """Whether a number of its own is added to the score of each pair."""
    assert isinstance(request.score, Dot)
    return bool(request.bias) or request.score.edge_key is not None


def _written_out(request: Request) -> bool:
    score = request.score
    assert isinstance(score, Dot)
    plain = request.normalize == "softmax" and score.softcap is None and not request.dropout
    # Beside 16-bit features torch's kernels take a bias of 32 bits on CPUs only.
    narrow_bias = _is_biased(request) and request.value.dtype != request.wide and request.value.device.type != "cpu"
    # Where there is no pair, torch's kernels give a result that no gradient leads to.
    bias_alone = _is_biased(request) and request.graph.num_dst * request.graph.num_src * request.batch.numel() == 0
    return not plain or request.return_weights or request.edge_value is not None or narrow_bias or bias_alone
