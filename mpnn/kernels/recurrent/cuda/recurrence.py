"""Recurrences with gates and the delta rule, node by node, by Triton's kernels: the counterpart of `scan`,
which states the formulas and calls it where `chunks` do not serve: in float64, and for few nodes, as in decoding.

A program holds some columns of the state S [F, D] of a head in registers, and advances one document node by node. So
each gate is a factor, and any gate is exact. The gradients need no stored states: one pass goes backwards with Z, the
gradient of S, and one forwards with S again (q includes the scale, S is gated already, before node i stores):

    backwards    du = k (Z + q^T do)     de = beta du     dk = Z u      Z <- gate (Z + q^T do - k^T de)
    forwards     dq = S do               dk = -S de                     S <- gate (S + k^T u)

Both leave out the edge i -> i, u_i.do_i times k_i and q_i, which torch adds. The gradient of log_gate_i is the sum over
the edges that it decays: those that end at i or later nodes of the document, less those that begin there, which are
`q.dq + k.dk (forwards) - k.dk (backwards)` of these nodes.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpnn.kernels.cuda.launch import start
from mpnn.kernels.cuda.schedule import power_of_two
from mpnn.kernels.cuda.tensors import on_device, real, with_contiguous_rows
from mpnn.kernels.derivatives import Kernel
from mpnn.kernels.recurrent.cuda.chunks.tiles import of_document, rows

_NUMBERS = 8192  # of a state in a program


@triton.jit
def _row(x, b, node, h, d, mask, REAL: tl.constexpr):
    """x[b, node, h / shared, d], zeros where masked."""
    at = x.data + b * x.batch + node * x.node + h // x.shared * x.head
    return tl.load(at + d, mask=mask, other=0.0).to(REAL)


@triton.jit
def _in_real(x, REAL: tl.constexpr):
    """A float64 argument in the type of the arithmetic, [1]."""
    return (tl.zeros([1], tl.float64) + x).to(REAL)


@triton.jit
def _gate(log_gate, at, f, width, BY_FEATURE: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr):
    """The gates [WIDTH, 1] of the node and head number `at`; ones without gates."""
    gate = tl.full([WIDTH, 1], 1.0, REAL)
    if log_gate is not None:
        if BY_FEATURE:
            gate = tl.exp(tl.load(log_gate + at * width + f, mask=f < width, other=0.0))[:, None]
        else:
            gate = gate * tl.exp(tl.load(log_gate + at))
    return gate


@triton.jit
def _place(ends, documents, blocks, heads, nodes, width, deep, WIDTH: tl.constexpr, DEEP: tl.constexpr):
    """The share of a program in a grid of batch entries, documents, heads and blocks of columns, the last the fastest:
    its document, first and last node, head, entry, block, features, columns, and the place of a state and its mask."""
    share = tl.program_id(0)
    block = share % blocks
    h = share // blocks % heads
    document = share // blocks // heads % documents
    b = share // blocks // heads // documents
    first = 0
    last = nodes
    if ends is not None:
        first, last = tl.load(ends + document), tl.load(ends + document + 1)
    f = tl.arange(0, WIDTH)
    d = block * DEEP + tl.arange(0, DEEP)
    h, b = h.to(tl.int64), b.to(tl.int64)
    state = (b * heads + h) * width * deep + f[:, None] * deep + d[None, :]
    return document, first, last, h, b, block, f, d, state, (f < width)[:, None] & (d < deep)[None, :]


@triton.jit
def forward(
    ends, documents, blocks, heads, nodes, scale: tl.float64, width, deep, query, key, value, log_gate, beta, state,
    out, last_state, e, BY_FEATURE: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """out [B, N, H, D], the last state [B, H, F, D], and if not None the e [B, N, H, D] that beta multiplies."""
    document, first, last, h, b, _, f, d, place, inside = _place(
        ends, documents, blocks, heads, nodes, width, deep, WIDTH, DEEP
    )
    factor = _in_real(scale, REAL)
    S = tl.zeros([WIDTH, DEEP], REAL)
    if state is not None:
        S = tl.load(state + place, mask=of_document(document, 0, inside), other=0.0)
    for i in range(first, last):
        at = (b * nodes + i) * heads + h
        S = S * _gate(log_gate, at, f, width, BY_FEATURE, WIDTH, REAL)
        k = _row(key, b, i, h, f, f < width, REAL)[:, None]
        u = _row(value, b, i, h, d, d < deep, REAL)
        if beta is not None:
            u -= tl.sum(k * S, 0)
            if e is not None:
                tl.store(e + at * deep + d, u, mask=d < deep)
            u = u * tl.load(beta + at)
        S += k * u[None, :]
        q = _row(query, b, i, h, f, f < width, REAL)[:, None]
        tl.store(out + at * deep + d, factor * tl.sum(q * S, 0), mask=d < deep)
    tl.store(last_state + place, S, mask=of_document(document, documents - 1, inside))


@triton.jit
def backwards(
    ends, documents, blocks, heads, nodes, scale: tl.float64, width, deep, query, key, u, log_gate, beta, d_out, d_last,
    d_key, own, d_u, d_state, BY_FEATURE: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """d_u [B, N, H, D], d_state, and of each block of columns: d_key [B, blocks, N, H, F] and own [B, blocks, N, H],
    which is <u_i, do_i>."""
    document, first, last, h, b, block, f, d, place, inside = _place(
        ends, documents, blocks, heads, nodes, width, deep, WIDTH, DEEP
    )
    factor = _in_real(scale, REAL)
    Z = tl.zeros([WIDTH, DEEP], REAL)
    if d_last is not None:
        Z = tl.load(d_last + place, mask=of_document(document, documents - 1, inside), other=0.0)
    for n in range(first, last):
        i = first + last - 1 - n
        at = (b * nodes + i) * heads + h
        part = ((b * blocks + block) * nodes + i) * heads + h
        d_o = _row(d_out, b, i, h, d, d < deep, REAL)
        stored = _row(u, b, i, h, d, d < deep, REAL)
        tl.store(d_key + part * width + f, tl.sum(Z * stored[None, :], 1), mask=f < width)
        tl.store(own + part, tl.sum(stored * d_o, 0))
        Z += factor * _row(query, b, i, h, f, f < width, REAL)[:, None] * d_o[None, :]
        k = _row(key, b, i, h, f, f < width, REAL)[:, None]
        d_stored = tl.sum(k * Z, 0)
        tl.store(d_u + at * deep + d, d_stored, mask=d < deep)
        if beta is not None:
            Z -= k * (d_stored * tl.load(beta + at))[None, :]
        Z = Z * _gate(log_gate, at, f, width, BY_FEATURE, WIDTH, REAL)
    if d_state is not None:
        tl.store(d_state + place, Z, mask=of_document(document, 0, inside))


@triton.jit
def forwards(
    ends, documents, blocks, heads, nodes, scale: tl.float64, width, deep, key, u, log_gate, state, d_out, d_e, d_query,
    d_key,
    BY_FEATURE: tl.constexpr, WIDTH: tl.constexpr, DEEP: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Of each block of columns: d_query, and what d_key gets from reading, if not None [B, blocks, N, H, F]."""
    document, first, last, h, b, block, f, d, place, inside = _place(
        ends, documents, blocks, heads, nodes, width, deep, WIDTH, DEEP
    )
    factor = _in_real(scale, REAL)
    S = tl.zeros([WIDTH, DEEP], REAL)
    if state is not None:
        S = tl.load(state + place, mask=of_document(document, 0, inside), other=0.0)
    for i in range(first, last):
        at = (b * nodes + i) * heads + h
        part = (((b * blocks + block) * nodes + i) * heads + h) * width
        S = S * _gate(log_gate, at, f, width, BY_FEATURE, WIDTH, REAL)
        d_o = _row(d_out, b, i, h, d, d < deep, REAL)
        tl.store(d_query + part + f, factor * tl.sum(S * d_o[None, :], 1), mask=f < width)
        if d_key is not None:
            d_read = tl.load(d_e + at * deep + d, mask=d < deep, other=0.0)
            tl.store(d_key + part + f, -tl.sum(S * d_read[None, :], 1), mask=f < width)
        stored = _row(u, b, i, h, d, d < deep, REAL)
        S += _row(key, b, i, h, f, f < width, REAL)[:, None] * stored[None, :]


def _readable(tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Features with contiguous rows, and contiguous numbers."""
    features, numbers = tensors[:3], tensors[3:]
    return *map(with_contiguous_rows, features), *(None if x is None else x.contiguous() for x in numbers)


_Options = tuple[float, int, tuple[int, ...]]
"""The scale, the number of heads of the result, and the ends of documents."""


def _run(
    options: _Options, needs: Sequence[bool], *given: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor | None, Tensor]]:
    """The arguments and results of `scan.recurrence`, and for the backward pass the e that beta multiplies and the last
    state."""
    query, key, value, log_gate, beta, state = _readable(given)
    heads = options[1]
    batch, nodes, _, width = query.shape
    out = query.new_empty(batch, nodes, heads, value.shape[-1], dtype=real(query.dtype)[0])
    last = out.new_empty(batch, heads, width, value.shape[-1])
    e = torch.empty_like(out) if beta is not None and any(needs) else None
    features = (rows(x, heads) for x in (query, key, value))
    _launch(forward, options, last, nodes, log_gate, (*features, log_gate, beta, state, out, last, e))
    return (out, last), (e, last)


def _gradients(
    options: _Options,
    needs: Sequence[bool],
    given: Sequence[Any],
    saved: Any,
    d_out: Tensor | None,
    d_last: Tensor | None,
) -> list[Tensor | None]:
    scale, heads, ends = options
    e, last = saved
    query, key, value, log_gate, beta, state = _readable(given)
    batch, _, width, deep = last.shape
    nodes = query.shape[1]
    blocks = _blocks(width, deep)[0]
    d_out = last.new_zeros(batch, nodes, heads, deep) if d_out is None else with_contiguous_rows(d_out)
    d_last = None if d_last is None else d_last.contiguous()
    u = value if beta is None else e * beta[..., None]
    d_query, d_key = last.new_empty(2, batch, blocks, nodes, heads, width)
    own, d_u = last.new_empty(batch, blocks, nodes, heads), last.new_empty(batch, nodes, heads, deep)
    d_state, read = (None if x is None else y.new_empty(y.shape) for x, y in ((state, last), (beta, d_key)))
    q, k, stored, d_o = (rows(x, heads) for x in (query, key, u, d_out))
    arguments = q, k, stored, log_gate, beta, d_o, d_last, d_key, own, d_u, d_state
    _launch(backwards, options, last, nodes, log_gate, arguments)
    d_value = d_u if beta is None else d_u * beta[..., None]
    arguments = k, stored, log_gate, state, d_o, d_value, d_query, read
    _launch(forwards, options, last, nodes, log_gate, arguments)

    d_query = d_query.sum(1)
    d_key = d_key.sum(1)
    own = scale * own.sum(1)[..., None]
    read = 0 if read is None else read.sum(1)
    each_query, each_key = (x.repeat_interleave(heads // x.shape[2], 2).to(last.dtype) for x in (query, key))
    d_log_gate = None
    if log_gate is not None:
        edges = each_query * d_query + each_key * (read - d_key)
        # decayed by the first gate of the last document
        entering = last.new_zeros(last.shape) if state is None or len(ends) > 1 else state * d_state
        entering = entering.sum(-1)
        if log_gate.dim() == 3:
            edges, entering = edges.sum(-1), entering.sum(-1)
        d_log_gate = _crossing(edges, None if d_last is None else entering, ends).to(last.dtype)
    d_beta = None if beta is None else (d_u * e).sum(-1)
    each = (d_query + own * each_key, query), (d_key + read + own * each_query, key), (d_value, value)
    grads = [x.unflatten(2, (y.shape[2], -1)).sum(3).to(y.dtype) for x, y in each]
    return [*grads, d_log_gate, d_beta, d_state]


KERNEL = Kernel(_run, _gradients)


@lru_cache(maxsize=64)
def _ends_on(ends: tuple[int, ...], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The ends of documents with a 0 in front, and the end of each node's document. Cached, so that no later call
    copies anything to the device."""
    starts = (0, *ends[:-1])
    of_nodes = [end for start, end in zip(starts, ends, strict=True) for _ in range(start, end)]
    return torch.tensor((0, *ends), device=device), torch.tensor(of_nodes, device=device)


def _blocks(width: int, deep: int) -> tuple[int, int]:
    """The blocks of columns of a state, and the columns of one."""
    columns = min(power_of_two(deep), max(1, _NUMBERS // power_of_two(width)))
    return -(-deep // columns), columns


def _launch(kernel: Any, options: _Options, state: Tensor, nodes: int, log_gate: Tensor | None, tensors: Any) -> None:
    """Runs a kernel for states [B, H, F, D]."""
    batch, heads, width, deep = state.shape
    blocks, columns = _blocks(width, deep)
    scale, _, ends = options
    documents = len(ends)
    sizes = documents, blocks, heads, nodes, float(scale), width, deep
    constants = {
        "BY_FEATURE": log_gate is not None and log_gate.dim() == 4,
        "WIDTH": power_of_two(width),
        "DEEP": columns,
        "REAL": real(state.dtype)[1],
    }
    with on_device(state):
        operands = _ends_on(ends, state.device)[0], *sizes, *tensors
        start(kernel, batch * documents * heads * blocks, operands, constants)


def _crossing(edges: Tensor, entering: Tensor | None, ends: tuple[int, ...]) -> Tensor:
    """The sums [B, N, ...] over the edges that begin before a node of a document and end at it or after it, of `edges`
    [B, N, ...]: those that end at a node, less those that begin there. From the end, where the sum is 0; if the last
    state has a gradient, in the last document from the start, where it is `entering` [B, ...]."""
    edges = edges.double()
    sums = torch.cat([edges, torch.zeros_like(edges[:, :1])], 1).flip(1).cumsum(1).flip(1)
    out = sums[:, :-1]
    end = _ends_on(ends, edges.device)[1]
    out = out if end is None else out - sums.index_select(1, end)
    if entering is not None:
        begin = ends[-2] if len(ends) > 1 else 0
        out[:, begin] = entering
        out[:, begin + 1 :] = entering[:, None] - edges[:, begin:-1].cumsum(1)
    return out
