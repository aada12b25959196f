"""Attention layers of transformers whose masks need no graph of their own.

A text without padding attends to all tokens, or to those before: a graph that all texts of this length share. The plan
for it says whether torch's kernel computes it. Then it is called here, because a round takes as long as the kernel on
16 tokens (25 us against 11 us, which is 9 % of a training step of a small BERT); else the call is one like any other.

A new token attends to a slice of its keys, or to those that are not padding. Its graph would be a new one in each call,
and to make it takes longer than torch's kernel over a hundred tokens, which computes it here; as it does where a device
has the numbers of a mask.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn import graphs, ops
from mpnn.backends import dense, registered
from mpnn.engine import dispatch
from mpnn.engine.choice import choose
from mpnn.graph import Graph
from mpnn.graph.bind_cache import cached_graph
from mpnn.integrations.hf.masks import Pairs
from mpnn.integrations.hf.offset_bias import OffsetBias
from mpnn.integrations.hf.packing import Packing
from mpnn.kernels.dense import varlen
from mpnn.kernels.derivatives import differentiable_again
from mpnn.round import Round
from mpnn.scores import Dot

_PREPARATION = 1.5e-4  # seconds that Python takes for a round over a graph, beyond a call of torch's kernel
_FEW = 128  # keys up to which the reshaping takes as long as it saves, on a CPU


def attend(
    query: Tensor, key: Tensor, value: Tensor, pairs: Pairs, scale: float | None, by_offset: OffsetBias | None
) -> Tensor | None:
    """Out [B, queries, H, D] of query [B, H, queries, D], key and value [B, H_kv, keys, D]; None if it needs the graph
    of the mask."""
    if scale is not None and scale <= 0:
        return None
    if pairs.stop is not None and (pairs.start, pairs.stop) != (0, key.shape[2]):
        key = key[:, :, pairs.start : pairs.stop]
        value = value[:, :, pairs.start : pairs.stop]
    if query.shape[2] == 1:
        out = _of_one_query(query, key, value, scale, _row(query, key, pairs, by_offset))
    elif by_offset is not None:
        return None
    elif pairs.allowed is not None or _is_by_torch(query, key, value, pairs.is_causal):
        out = dense.sdpa(query, key, value, _scale(query, scale), pairs.allowed, pairs.is_causal)
    else:
        graph = _graph_of(pairs.is_causal, query.shape[2], key.shape[2], query.device)
        return ops.attend(graph, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), scale=scale)
    return (out if pairs.empty is None else out.masked_fill(pairs.empty, 0.0)).transpose(1, 2)


@cached_graph
def _graph_of(is_causal: bool, queries: int, keys: int, device: torch.device) -> Graph:
    """The complete or causal graph of a text."""
    return (graphs.causal() if is_causal else graphs.complete()).bind(queries, keys).to(device)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool,
    scale: float | None,
    texts: Packing,
    longest: int | None = None,
) -> Tensor | None:
    """Out [1, T, H, D] of query [1, H, T, D], key and value [1, H_kv, T, D] within packed texts; None where torch's
    kernel does not take this. With the length of the longest one, no length is read."""
    if scale is not None and scale <= 0:
        return None
    if not varlen.runs_here(query, value):
        if not query.is_cpu or query.shape[0] > 1:
            return None
        return _text_by_text(query, key, value, is_causal, _scale(query, scale), texts)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    ends = texts.cu_seqlens(query.device).to(torch.int32)
    longest = texts.longest if longest is None else int(longest)
    return varlen.packed(q, k, v, ends, ends, longest, longest, _scale(query, scale), is_causal)[None]


def attend_documents(graph: Graph, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor | None:
    """Out [..., N, H, D] of query [..., N, H, D], key and value [..., N, H_kv, D] over packed texts, each by the kernel
    that computes it alone; None for other graphs, on other devices and for several rows."""
    if not query.is_cpu or query.shape[:-3].numel() != 1 or (scale is not None and scale <= 0):
        return None
    texts, is_causal = graph.cached("packed texts", lambda: _packed_texts(graph))
    if texts is None:
        return None
    q, k, v = (x[None] if x.dim() == 3 else x.flatten(0, -4) for x in (query, key, value))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = _text_by_text(q, k, v, is_causal, _scale(query, scale), texts)
    return out.view(query.shape[:-1] + value.shape[-1:])


def _packed_texts(graph: Graph) -> tuple[Packing | None, bool]:
    """The texts that a graph consists of, if there are several, and whether they are causal."""
    parts = None if graph.is_explicit else graph.parts
    if parts is None or parts.count < 2 or parts.order is not None:
        return None, False
    return Packing((1, graph.num_dst), parts.lengths.tolist()), parts.is_causal


def _text_by_text(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float, texts: Packing) -> Tensor:
    """Each text by the kernel that computes it alone: so its states have the same bits in any batch."""
    form = is_causal, _learns(query, key, value), *((x.shape[1], x.shape[3], x.dtype) for x in (query, key, value))
    division = texts.divided.get(form)
    if division is None:
        division = texts.divided[form] = _divide(query, key, value, is_causal, texts.lengths)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if division.order is None or division.inverse is None:
        graph, backend = division.graphs[0]
        return ops.attend(graph, q, k, v, scale=scale, backend=backend)[None]
    q, k, v = (x.index_select(0, division.order) for x in (q, k, v))
    outs = []
    first = 0
    for graph, backend in division.graphs:
        here = slice(first, first + graph.num_dst)
        outs.append(ops.attend(graph, q[here], k[here], v[here], scale=scale, backend=backend))
        first += graph.num_dst
    return torch.cat(outs).index_select(0, division.inverse)[None]


class _Division(NamedTuple):
    """Packed texts by what computes them: graphs and their backends, and the order of the tokens in which the graphs
    follow one another. No order: there is one graph."""

    graphs: list[tuple[Graph, str]]
    order: Tensor | None = None
    inverse: Tensor | None = None


def _divide(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, lengths: list[int]) -> _Division:
    by_torch = {n: _is_by_torch(query[:, :, :n], key[:, :, :n], value[:, :, :n], is_causal) for n in set(lengths) if n}
    graphs_of = []
    tokens = []
    first = np.cumsum(lengths) - lengths
    for wanted, backend in ((True, "dense"), (False, "auto")):
        texts = [k for k, n in enumerate(lengths) if n and by_torch[n] == wanted]
        if texts:
            sizes = [lengths[k] for k in texts]
            topology = graphs.documents(sizes)
            graphs_of.append(((topology & graphs.causal() if is_causal else topology).bind(sum(sizes)), backend))
            tokens += [np.arange(first[k], first[k] + lengths[k]) for k in texts]
    if len(graphs_of) == 1:
        return _Division(graphs_of)
    order = torch.from_numpy(np.concatenate(tokens))
    return _Division(graphs_of, order, order.argsort())


def _scale(query: Tensor, scale: float | None) -> float:
    return query.shape[-1] ** -0.5 if scale is None else float(scale)


def _row(query: Tensor, key: Tensor, pairs: Pairs, by_offset: OffsetBias | None) -> Tensor | None:
    """Returns the bias of the logits of one query, [B or 1, H or 1, 1, keys]; None for zeros."""
    if by_offset is None:
        return None if pairs.allowed is None else pairs.added(query.dtype)
    row = by_offset.row(pairs.start, key.shape[2], query)
    return row if pairs.allowed is None else row + pairs.added(query.dtype)


def _of_one_query(query: Tensor, key: Tensor, value: Tensor, scale: float | None, mask: Tensor | None) -> Tensor:
    """Out [B, H, 1, D]."""
    batch, heads, _, width = query.shape
    groups = key.shape[1]
    if mask is None and varlen.runs_here(query, value):
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return varlen.whole(q, k, v, _scale(query, scale)).transpose(1, 2)
    if groups == heads or (mask is None and key.shape[2] <= _FEW):
        out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=groups != heads)
    else:
        # The heads that share keys are rows of one product.
        rows = query.reshape(batch, groups, heads // groups, width)
        if mask is not None and mask.shape[1] > 1:
            mask = mask.reshape(mask.shape[0], groups, heads // groups, mask.shape[3])
        out = F.scaled_dot_product_attention(rows, key, value, mask, scale=scale)
        out = out.reshape(batch, heads, 1, value.shape[3])
    return differentiable_again(out) if out.requires_grad else out


def _is_by_torch(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> bool:
    """Whether torch's kernel is what a text of such features gets alone. It does not depend on the number of texts."""
    if query.is_cuda and query.dtype.itemsize == 2:
        return True
    like = query.dtype, key.dtype, value.dtype
    form = query.shape[1:], key.shape[1:], value.shape[1:], like, _learns(query, key, value), registered()
    graph = _graph_of(is_causal, query.shape[2], key.shape[2], query.device)
    return graph.cached(("by torch", form), lambda: _plans_torch(graph, query[:1], key[:1], value[:1]))


def _plans_torch(graph: Graph, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the plan chooses torch's kernel, or another one that gains less than a round takes in Python."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    round = Round(graph, v, Dot(q, k, 1.0))
    if dispatch.planned(round, "auto").choice.by is dense:
        return dense.direct(round) is not None
    estimate = choose(round, estimated=True).estimate
    return estimate is not None and dense.estimate(round).seconds < estimate.seconds + _PREPARATION


def _learns(*features: Tensor) -> tuple[bool, ...]:
    return tuple(torch.is_grad_enabled() and x.requires_grad for x in features)
