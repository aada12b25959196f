"""flash-attn's functions and torch's `varlen_attn`, on a CPU, with gradients, in any floating-point dtype.

    from mpnn.varlen import flash_attn_varlen_func                 instead of flash_attn
    from mpnn.varlen import varlen_attn                            instead of torch.nn.attention.varlen
    python -m mpnn.shim flash_attn script.py                       for code that imports flash_attn itself

Names, signatures and shapes are those of flash-attn 2.8 (Dao 2023, arXiv:2307.08691) and of torch 2.13. Sequences of
different lengths lie in one row, and cu_seqlens holds where they begin and end: each is a document of a graph. Causal
masks and windows are aligned at the bottom right: the last query of a sequence is at its last key. On a GPU the graph
moves to the features.

Arguments that only concern kernels (max_seqlen, deterministic, num_splits) have no effect.
"""

import inspect
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpnn import ops
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.graph.runs import Ints
from mpnn.graph.topology import Pairs, Topology

Window = tuple[int, int]
_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Computes attention over sequences of one length, as `flash_attn.flash_attn_func`.

        logits_ij = softcap * tanh(scale * <q_i, k_j> / softcap) - slope * |i + N - M - j|

    Args:
        q: [B, M, H, D]. k: [B, N, H_kv, D]. v: [B, N, H_kv, D_v]; H is a multiple of H_kv.
        dropout_p: the probability that a weight is dropped; 0.0 in evaluation.
        softmax_scale: default 1 / sqrt(D).
        causal: query i attends to the keys up to i + N - M.
        window_size: (left, right); query i attends to the keys from i + N - M - left to i + N - M + right. A negative
            number means no limit.
        softcap: 0.0 is none.
        alibi_slopes: [H], or [B, H], which takes memory for B * H numbers an edge.
        deterministic: no effect: sums have one order.
        return_attn_probs: also return the log-sum-exp of the logits, and None in place of the probabilities.

    Returns:
        out [B, M, H, D_v], zeros for a query without keys; or (out, softmax_lse [B, H, M], None). The log-sum-exp of a
        query without keys is -inf.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together; the message names the argument.
    """
    _check_dims("[B, N, H, D]", q=q, k=k, v=v)
    if not len(q) == len(k) == len(v):
        raise ValueError(f"q, k and v must have the same batch size; got {len(q)}, {len(k)} and {len(v)}")
    return _flash(
        (q, k, v),
        ([q.shape[1]], [k.shape[1]], len(q)),
        (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Computes attention over sequences of different lengths in one row, as `flash_attn.flash_attn_varlen_func`.

    Args:
        q: [T_q, H, D]. k: [T_k, H_kv, D]. v: [T_k, H_kv, D_v].
        cu_seqlens_q, cu_seqlens_k: integers [B + 1], 0 and then the end of each sequence; the last are T_q and T_k.
        max_seqlen_q, max_seqlen_k: no effect.
        alibi_slopes: [H], or [B, H], which takes memory for H numbers an edge.
        block_table: integers [B, pages], the pages of each sequence; k and v are then [pages, size, H_kv, D], and
            cu_seqlens_k gives the lengths alone.

    The other arguments are those of `flash_attn_func`, where M and N are the lengths of a sequence.

    Returns:
        out [T_q, H, D_v], or (out, softmax_lse [H, T_q], None).

    Raises:
        ValueError, TypeError: as `flash_attn_func`, or cu_seqlens do not ascend from 0 to the number of tokens.
    """
    lengths_q = _lengths("cu_seqlens_q", cu_seqlens_q)
    lengths_k = lengths_q if cu_seqlens_k is cu_seqlens_q else _lengths("cu_seqlens_k", cu_seqlens_k)
    if block_table is not None:
        k, v = (_paged(name, x, block_table, lengths_k) for name, x in (("k", k), ("v", v)))
    _check_dims("[T, H, D]", q=q, k=k, v=v)
    _check_total("cu_seqlens_q", lengths_q, "q", q)
    _check_total("cu_seqlens_k", lengths_k, "k", k)
    return _flash(
        (q, k, v),
        (lengths_q, lengths_k, len(lengths_q)),
        (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes),
        return_attn_probs,
    )


def _flash(
    qkv: tuple[Tensor, Tensor, Tensor],
    sizes: tuple[Sequence[int], Sequence[int], int],
    options: tuple[float, float | None, bool, Window, float, Tensor | None],
    lse: bool,
) -> Any:
    """out, or (out, lse [..., H, N], None), of features [..., N, H, D]."""
    lengths_q, lengths_k, batch = sizes
    dropout, scale, causal, window, softcap, slopes = options
    graph = _aligned(lengths_q, lengths_k, causal, window).to(qkv[0].device)
    bias = None
    if slopes is not None:
        heads = qkv[0].shape[-2]
        if slopes.shape not in ((heads,), (batch, heads)):
            raise ValueError(f"alibi_slopes must have shape [{heads}] or [{batch}, {heads}]; got {list(slopes.shape)}")
        graph, bias = _alibi(graph, slopes, lengths_q, lengths_k, batched=qkv[0].dim() == 4)
    result = ops.attend(
        graph, *qkv, bias=bias, scale=scale, softcap=softcap if softcap > 0 else None, dropout=dropout, return_lse=lse
    )
    return (result[0], result[1].transpose(-1, -2), None) if lse else result


def _packed(function: Callable[..., Any], name: str, first: int, *, shares_lengths: bool = False) -> Any:
    """Returns the variant of a function whose arguments from number `first` on (of q, k, v) are one tensor, `name`.
    With `shares_lengths`, queries and keys have the same cu_seqlens and max_seqlen."""
    count = 3 - first
    parameters = list(inspect.signature(function).parameters.values())
    one = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor)
    rest = [p for p in parameters[3:] if p.name != "block_table"]
    if shares_lengths:
        rest = [rest[0].replace(name="cu_seqlens"), rest[2].replace(name="max_seqlen"), *rest[4:]]
    signature = inspect.Signature([*parameters[:first], one, *rest])

    def packed(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        *before, joined = [bound.arguments.pop(p) for p in list(signature.parameters)[: first + 1]]
        if not isinstance(joined, Tensor) or joined.dim() < 3 or joined.shape[-3] != count:
            shape = list(joined.shape) if isinstance(joined, Tensor) else type(joined).__name__
            raise ValueError(f"{name} must have shape [..., {count}, H, D]; got {shape}")
        given = dict(bound.arguments)
        if shares_lengths:
            given |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), given.pop("cu_seqlens"))
            given |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), given.pop("max_seqlen"))
        return function(*before, *joined.unbind(-3), **given)

    packed.__name__ = packed.__qualname__ = function.__name__.replace("func", f"{name}packed_func")
    packed.__doc__ = f"Computes `{function.__name__}` with {name} in one tensor, [..., {count}, H, D]."
    packed.__signature__ = signature  # type: ignore[attr-defined]
    return packed


flash_attn_kvpacked_func = _packed(flash_attn_func, "kv", 1)
flash_attn_qkvpacked_func = _packed(flash_attn_func, "qkv", 0)
flash_attn_varlen_kvpacked_func = _packed(flash_attn_varlen_func, "kv", 1)
flash_attn_varlen_qkvpacked_func = _packed(flash_attn_varlen_func, "qkv", 0, shares_lengths=True)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = _NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Computes attention of new tokens over a cache, which it fills, as `flash_attn.flash_attn_with_kvcache`.

    Args:
        q: [B, M, H, D]. k_cache: [B_cache, S, H_kv, D]. v_cache: [B_cache, S, H_kv, D_v].
        k, v: [B, M_new, H_kv, D]: written into the caches in place, from position cache_seqlens on.
        cache_seqlens: the tokens in the cache before the call, an integer or [B]; None is S.
        cache_batch_idx: [B], the rows of the cache; default 0..B - 1.
        cache_leftpad: [B], the first position of each row that holds a token.
        num_splits: no effect.

    The other arguments are those of `flash_attn_func`. Rotary embeddings and a block_table are not served.

    Returns:
        out [B, M, H, D_v], or (out, softmax_lse [B, H, M]).

    Raises:
        NotImplementedError: rotary_cos, rotary_sin or block_table are given.
        ValueError, TypeError: as `flash_attn_func`, or the new tokens exceed the cache.
    """
    if rotary_cos is not None or rotary_sin is not None or block_table is not None:
        raise NotImplementedError(
            "mpnn.varlen.flash_attn_with_kvcache takes no rotary_cos, rotary_sin or block_table: rotate q and k before "
            "the call; for pages, call flash_attn_varlen_func(block_table=...)"
        )
    _check_dims("[B, N, H, D]", q=q, k_cache=k_cache, v_cache=v_cache)
    size = k_cache.shape[1]
    batch = len(q)
    rows = list(range(batch)) if cache_batch_idx is None else cache_batch_idx.tolist()
    counts = torch.as_tensor(size if cache_seqlens is None else cache_seqlens).expand(batch).tolist()
    firsts = [0] * batch if cache_leftpad is None else cache_leftpad.tolist()
    if k is not None and v is not None:
        ends = [n + k.shape[1] for n in counts]
        if max(ends, default=0) > size:
            raise ValueError(f"{k.shape[1]} new tokens after {max(counts)} exceed the cache of {size}")
        with torch.no_grad():
            for new, row, begin, end in zip(range(batch), rows, counts, ends, strict=True):
                k_cache[row, begin:end], v_cache[row, begin:end] = k[new], v[new]
        counts = ends
    held = [slice(first, n) for first, n in zip(firsts, counts, strict=True)]
    keys, values = (torch.cat([x[row, span] for row, span in zip(rows, held, strict=True)]) for x in (k_cache, v_cache))
    lengths = [n - first for first, n in zip(firsts, counts, strict=True)]
    out, lse, _ = flash_attn_varlen_func(
        q.flatten(0, 1),
        keys,
        values,
        _cumulative([q.shape[1]] * batch),
        _cumulative(lengths),
        q.shape[1],
        size,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_attn_probs=True,
    )
    out = out.unflatten(0, q.shape[:2])
    lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


class AuxRequest(NamedTuple):
    """The further results of `varlen_attn` to return, as torch's class of this name."""

    lse: bool = False


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: Window = _NO_WINDOW,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    """Computes attention over sequences of different lengths, as `torch.nn.attention.varlen.varlen_attn`.

    Args:
        query: [T_q, H, D]. key: [T_k, H_kv, D]. value: [T_k, H_kv, D_v].
        cu_seq_q, cu_seq_k: integers [B + 1], 0 and then the end of each sequence. cu_seq_k may be None with seqused_k
            and block_table.
        max_q, max_k, num_splits: no effect.
        return_aux: `AuxRequest(lse=True)`, torch's or this module's, also returns the log-sum-exp.
        scale: default 1 / sqrt(D).
        window_size: (left, right), as in `flash_attn_func`; (-1, 0) is causal.
        enable_gqa: allows H to be a multiple of H_kv.
        seqused_k: integers [B], how many keys of each sequence are read.
        block_table: integers [B, pages], the pages of each sequence; key and value are [pages, size, H_kv, D].

    Returns:
        out [T_q, H, D_v], or (out, lse [H, T_q]).

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together; block_table comes without seqused_k;
            return_aux asks for max_scores.
    """
    if getattr(return_aux, "max_scores", False):
        raise ValueError("varlen_attn returns the log-sum-exp, lse, and no max_scores")
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            "Expect query and key/value to have the same number of heads but got "
            f"Hq={query.shape[-2]} and Hkv={key.shape[-2]}. Try setting enable_gqa=True for GQA."
        )
    lengths_q = _lengths("cu_seq_q", cu_seq_q)
    used = None if seqused_k is None else [int(n) for n in seqused_k.tolist()]
    if block_table is not None:
        if used is None:
            raise ValueError("block_table needs seqused_k, the number of keys of each sequence")
        key, value = (_paged(name, x, block_table, used) for name, x in (("key", key), ("value", value)))
        held = used
    else:
        held = _lengths("cu_seq_k", cu_seq_k)
        _check_total("cu_seq_k", held, "key", key)
    _check_dims("[T, H, D]", query=query, key=key, value=value)
    _check_total("cu_seq_q", lengths_q, "query", query)
    counts = held if used is None else used
    if len(counts) != len(held) or any(n > most for n, most in zip(counts, held, strict=True)):
        raise ValueError(f"seqused_k holds numbers up to the lengths of the sequences, {held}; got {counts}")
    starts = np.cumsum([0, *held[:-1]]).tolist()
    graph = _aligned(lengths_q, counts, False, window_size, starts, len(key)).to(query.device)
    wants_lse = return_aux is not None and return_aux.lse
    result = ops.attend(graph, query, key, value, scale=scale, return_lse=wants_lse)
    return (result[0], result[1].transpose(-1, -2)) if wants_lse else result


# ---------------------------------------------------------------------------------------------------- graphs


def spans(
    lengths: Sequence[int],
    src_lengths: Sequence[int],
    shifts: Sequence[int],
    left: int = -1,
    right: int = -1,
    src_starts: Sequence[int] | None = None,
) -> Topology:
    """Returns a topology of documents in which query i attends to the keys from i + shift - left to i + shift + right
    of its document.

    Args:
        lengths, src_lengths: the numbers of queries and of keys of each document.
        shifts: of each document, the key at which its first query stands.
        left, right: a negative number means no limit.
        src_starts: where the keys of each document begin; by default one document follows the other.
    """
    starts = accumulate(src_lengths[:-1], initial=0) if src_starts is None else src_starts
    args = (tuple(lengths), tuple(starts), tuple(src_lengths), tuple(shifts), max(left, -1), max(right, -1))
    return Topology.of(_spans, *args)


def _spans(
    i: Ints,
    num_src: int,
    lengths: tuple[int, ...],
    starts: tuple[int, ...],
    src_lengths: tuple[int, ...],
    shifts: tuple[int, ...],
    left: int,
    right: int,
) -> Pairs:
    ends = np.cumsum(np.asarray(lengths, np.int64))
    document = np.searchsorted(ends, i, side="right")
    begin = np.asarray(starts, np.int64)[document]
    count = np.asarray(src_lengths, np.int64)[document]
    at = i - (ends - np.asarray(lengths, np.int64))[document] + np.asarray(shifts, np.int64)[document]
    first = 0 if left < 0 else np.clip(at - left, 0, count)
    last = count if right < 0 else np.clip(at + right + 1, 0, count)
    return [(begin + first, begin + last)]


def _aligned(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    causal: bool,
    window: Window,
    src_starts: Sequence[int] | None = None,
    num_src: int | None = None,
) -> Graph:
    """The graph of sequences whose last query is at the last key. Its positions are those of keys in a sequence."""
    if len(lengths_q) != len(lengths_k):
        raise ValueError(
            f"queries and keys must be of as many sequences; their lengths are of {len(lengths_q)} and {len(lengths_k)}"
        )
    left, right = (int(n) for n in window)
    shifts = [n - m for m, n in zip(lengths_q, lengths_k, strict=True)]
    topology = spans(lengths_q, lengths_k, shifts, left, 0 if causal else right, src_starts)
    return topology.bind(sum(lengths_q), sum(lengths_k) if num_src is None else num_src)


def _alibi(
    graph: Graph, slopes: Tensor, lengths_q: Sequence[int], lengths_k: Sequence[int], batched: bool
) -> tuple[Graph, Any]:
    """The graph with the positions of nodes in their sequences, and the bias -slope * |distance|: a table by offset for
    slopes of heads, numbers of edges for slopes of sequences and heads."""

    def positioned() -> Graph:
        dst = [torch.arange(m) + n - m for m, n in zip(lengths_q, lengths_k, strict=True)]
        src = [torch.arange(n) for n in lengths_k]
        none = [torch.zeros(0, dtype=torch.int64)]
        return graph.with_positions(torch.cat(dst + none).to(graph.device), torch.cat(src + none).to(graph.device))

    positioned_graph = graph.cached("positions in sequences", positioned)
    if slopes.dim() == 1:
        farthest = max([*lengths_q, *lengths_k], default=0)
        distance = torch.arange(-farthest, farthest + 1, device=slopes.device).abs()
        return positioned_graph, BiasTable(-slopes * distance[:, None], Offset(farthest))
    dst, src = positioned_graph.edge_positions()
    distance = (dst - src).abs()[:, None]
    if batched:
        return positioned_graph, -slopes[:, None, :] * distance
    document = torch.repeat_interleave(torch.tensor(lengths_q, device=slopes.device))
    return positioned_graph, -slopes[document[positioned_graph.edge_index[1]]] * distance


# ---------------------------------------------------------------------------------------------------- calls


def _check_dims(shape: str, **tensors: Tensor) -> None:
    """Raises TypeError or ValueError unless these are tensors of as many dimensions as the shape has."""
    dims = shape.count(",") + 1
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor {shape}; got {type(x).__name__}")
        if x.dim() != dims:
            raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")


def _lengths(name: str, cu_seqlens: Any) -> list[int]:
    """The lengths of sequences. Raises TypeError or ValueError unless cu_seqlens are integers that ascend from 0."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.is_floating_point() or cu_seqlens.dim() != 1:
        got = f"{cu_seqlens.dtype} {list(cu_seqlens.shape)}" if isinstance(cu_seqlens, Tensor) else repr(cu_seqlens)
        raise TypeError(f"{name} must be a tensor of integers, [batch_size + 1]; got {got}")
    ends = cu_seqlens.tolist()
    if not ends or ends[0] != 0:
        raise ValueError(f"{name} must begin with 0; got {ends[:8]}: it holds cumulative lengths, [batch_size + 1]")
    lengths = [end - begin for begin, end in pairwise(ends)]
    if lengths and min(lengths) < 0:
        k = next(k for k, n in enumerate(lengths) if n < 0)
        raise ValueError(f"{name} must ascend; sequence {k} would begin at {ends[k]} and end at {ends[k + 1]}")
    return lengths


def _check_total(name: str, lengths: Sequence[int], of: str, x: Tensor) -> None:
    if sum(lengths) != len(x):
        raise ValueError(f"{name} ends at {sum(lengths)}, but {of} has {len(x)} tokens (shape {list(x.shape)})")


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths, dtype=np.int64).tolist()])


def _paged(name: str, cache: Tensor, block_table: Tensor, lengths: Sequence[int]) -> Tensor:
    """The first `lengths[b]` tokens of each sequence, [T, H, D], from pages [pages, size, H, D]."""
    _check_dims("[pages, size, H, D]", **{name: cache})
    size = cache.shape[1]
    if len(block_table) != len(lengths) or max(lengths, default=0) > block_table.shape[1] * size:
        raise ValueError(
            f"block_table must have a row for each of {len(lengths)} sequences, with pages for {max(lengths)} tokens; "
            f"got {list(block_table.shape)}, pages of {size}"
        )
    rows = [
        cache[pages[: -(-n // size)].long()].flatten(0, 1)[:n] for pages, n in zip(block_table, lengths, strict=True)
    ]
    return torch.cat(rows)
