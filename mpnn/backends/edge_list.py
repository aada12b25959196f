"""The specification: every edge written out in plain torch.

It takes everything, works in float64, differentiates twice, and is slow; every other backend is tested against it.
16-bit features are widened to float32 inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mpnn import random
from mpnn.aggregate import Index, segment_softmax
from mpnn.backends.estimate import Estimate
from mpnn.graph import CSR
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, Lookup, PerEdge, Request

NAME = "edge_list"


def supports(request: Request) -> str | None:
    return None


def estimate(request: Request) -> Estimate:
    numbers = request.graph.num_edges * request.batch.numel() * request.heads * request.value.shape[-1]
    element = request.value.element_size()
    passes, kept = (3.2, 6) if request.needs_grad else (1, 4)
    if not request.weighted:
        return Estimate(2e-5 + 2.5e-9 * numbers * passes, numbers * element * 2)
    return Estimate(1e-4 + 8e-9 * numbers * passes, numbers * element * kept)


def run(request: Request) -> tuple[Tensor, Tensor | None]:
    csr = request.graph.csr
    dtype = request.value.dtype
    index = Index.of(csr.row, csr.ptr)
    messages = _grouped(_nodes_first(request.value).index_select(0, csr.col), request)
    if request.edge_value is not None:
        messages = messages + _per_edge(request.edge_value, request, csr, trailing=2)
    weights = _weights(request, csr, index) if request.weighted else None
    if weights is not None:
        kept = _dropped(weights, request, csr) if request.dropout else weights
        messages = kept[..., None] * messages
    out = request.reduce.reduce(messages, index).movedim(0, -3).to(dtype)
    if not request.return_weights:
        return out, None
    if weights is None:
        weights = messages.new_ones(*messages.shape[:-2], 1)
    return out, csr.to_caller(weights).movedim(0, -2).to(dtype)


def _weights(request: Request, csr: CSR, index: Index) -> Tensor:
    """Normalised weights, [E, ..., H] in CSR order."""
    terms = [_per_edge(b, request, csr, trailing=1) for b in request.bias]
    if request.score is not None:
        terms.append(_score(request, csr))
    scores = sum(terms[1:], terms[0])
    if request.normalize == "softmax":
        return segment_softmax(scores, index)
    return scores.sigmoid() if request.normalize == "sigmoid" else scores


def _score(request: Request, csr: CSR) -> Tensor:
    match request.score:
        case Dot(query, key, scale, edge_key, softcap):
            keys = _grouped(_nodes_first(key).index_select(0, csr.col), request)
            if edge_key is not None:
                keys = keys + _per_edge(edge_key, request, csr, trailing=2)
            score = scale * (_nodes_first(query).index_select(0, csr.row) * keys).sum(-1)
            return score if softcap is None else softcap * (score / softcap).tanh()
        case AdditiveScore(dst, src, activation, edge):
            total = _nodes_first(dst, 1).index_select(0, csr.row) + _nodes_first(src, 1).index_select(0, csr.col)
            return activation(total if edge is None else total + _per_edge(edge, request, csr, trailing=1))
        case AdditiveV2Score(dst, src, vector, activation, edge):
            total = _nodes_first(dst).index_select(0, csr.row) + _nodes_first(src).index_select(0, csr.col)
            total = total if edge is None else total + _per_edge(edge, request, csr, trailing=2)
            return (activation(total) * vector.to(total.dtype)).sum(-1)
    raise TypeError(f"edge_list knows no score of type {type(request.score).__name__}")


def _dropped(weights: Tensor, request: Request, csr: CSR) -> Tensor:
    assert request.seed is not None
    streams = random.streams(weights.shape[1:-1], weights.shape[-1], weights.device)
    ends = [ids.view(-1, *[1] * streams.dim()) for ids in (csr.row, csr.col)]
    kept = random.keep(request.seed, streams, ends[0], ends[1], request.dropout)
    return torch.where(kept, weights / (1 - request.dropout), torch.zeros_like(weights))


def _per_edge(data: PerEdge, request: Request, csr: CSR, trailing: int) -> Tensor:
    """[E, ..., H] or [E, ..., H, D] (`trailing` dimensions behind the batch), in CSR order."""
    if isinstance(data, Lookup):
        rows = _wide(data.table).index_select(0, data.ids(request.graph))
    else:
        rows = csr.from_caller(_wide(data).movedim(-1 - trailing, 0))
    missing = len(request.batch) - (rows.dim() - 1 - trailing)
    return rows.view(rows.shape[0], *[1] * missing, *rows.shape[1:])


def _grouped(rows: Tensor, request: Request) -> Tensor:
    """[E, ..., H_kv, D] with each shared head repeated for the heads that share it."""
    heads, given = request.heads, rows.shape[-2]
    return rows if given in (1, heads) else rows.repeat_interleave(heads // given, -2)


def _nodes_first(x: Tensor, trailing: int = 2) -> Tensor:
    return _wide(x).movedim(-1 - trailing, 0)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
