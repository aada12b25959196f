"""The states between chunks: the only part of a recurrence that is computed one chunk after the other.

    walk         u = v, or e = V - W S and u = beta e of the delta rule     S <- through S + (k to_end)^T u
    walk_back    x = beta (sent + (k to_end) Z)      Z <- through Z + scale (q from_start)^T do - W^T x

S [F, D] is the state before a chunk and Z the gradient of the state after it; both are stored for each chunk, in the
type of the products, and all else is computed for all chunks at once (`within`, `outputs`, `gradients`). A program
holds a block of S: some columns of it, because these do not depend on one another, and without the delta rule also
some rows. So few heads fill a GPU.

Loop nest: the chunks of a document, in order. One program for each batch entry, document, head and block.
Called by `function.py`.
"""

import triton
import triton.language as tl

from mpnn.kernels.recurrent.cuda.chunks.tiles import dot, load, of_document


@triton.jit
def _place(
    starts, stops, first_chunk, documents, chunks, row_blocks, column_blocks, heads, nodes, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """The share of a program: its entry, document, head, features and columns, the first chunk of the document and the
    chunk after its last, and so its nodes. A single document has no tables."""
    share = tl.program_id(0)
    f = share % row_blocks * ROWS + tl.arange(0, ROWS)
    d = share // row_blocks % column_blocks * COLUMNS + tl.arange(0, COLUMNS)
    share = share // row_blocks // column_blocks
    h = share % heads
    document = share // heads % documents
    b = share // heads // documents
    c0 = 0
    c1 = chunks
    begin = 0
    end = nodes
    if first_chunk is not None:
        c0, c1 = tl.load(first_chunk + document), tl.load(first_chunk + document + 1)
        begin, end = tl.load(starts + c0), tl.load(stops + c1 - 1)
    return b.to(tl.int64), document, h.to(tl.int64), f, d, c0, c1, begin, end


@triton.jit
def walk(
    starts, stops, first_chunk, documents, chunks, row_blocks, column_blocks, heads, nodes, width, deep, key, value, W,
    beta, from_start, to_end, through, state, states, e_out, last, C: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """states [B, H, chunks, F, D]; the last state [B, H, F, D]; e [B, N, H, D] with the delta rule, whose `value` is V.
    With gates a feature `key` is k to_end; else to_end and from_start have gates a head, or are None."""
    b, document, h, f, d, c0, c1, begin, end = _place(
        starts, stops, first_chunk, documents, chunks, row_blocks, column_blocks, heads, nodes, ROWS, COLUMNS
    )
    exists = (f < width)[:, None] & (d < deep)[None, :]
    cell = f[:, None] * deep + d[None, :]
    S = tl.zeros([ROWS, COLUMNS], tl.float32)
    if state is not None:
        place = (b * heads + h) * width * deep + cell
        S = tl.load(state + place, mask=of_document(document, 0, exists), other=0.0).to(tl.float32)
    for c in range(c0, c1):
        n = begin + (c - c0) * C + tl.arange(0, C)
        inside = n < end
        at = (b * nodes + n) * heads + h
        tl.store(states + ((b * heads + h) * chunks + c) * width * deep + cell, S, mask=exists)
        k = load(key, b, n, h, f, inside, width)
        u = load(value, b, n, h, d, inside, deep)
        if W is not None:
            w = tl.load(W + at[:, None] * width + f[None, :], mask=inside[:, None] & (f < width)[None, :], other=0.0)
            u = u.to(tl.float32) - dot(w, S, NARROW, PRECISION)
            tl.store(e_out + at[:, None] * deep + d[None, :], u, mask=inside[:, None] & (d < deep)[None, :])
            u *= tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)[:, None]
        if to_end is not None:
            u = u * tl.load(to_end + at, mask=inside, other=0.0)[:, None]
            final = (b * nodes + tl.minimum(begin + (c - c0) * C + C, end) - 1) * heads + h
            S = S * tl.load(from_start + final)
        if through is not None:
            gate = tl.load(through + ((b * heads + h) * chunks + c) * width + f, mask=f < width, other=0.0)
            S = S * gate[:, None]
        S += dot(tl.trans(k), u, NARROW, PRECISION)
    tl.store(last + (b * heads + h) * width * deep + cell, S, mask=of_document(document, documents - 1, exists))


@triton.jit
def walk_back(
    starts, stops, first_chunk, documents, chunks, row_blocks, column_blocks, heads, nodes, scale, width, deep, query,
    key, d_out, sent, W, beta, from_start, to_end, through, d_last, d_states, d_state, C: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NARROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """d_states [B, H, chunks, F, D], of the state after each chunk, and d_state [B, H, F, D] unless it is None. With
    gates a feature `query` is q from_start and `key` k to_end. `sent` is scale P^T do."""
    b, document, h, f, d, c0, c1, begin, end = _place(
        starts, stops, first_chunk, documents, chunks, row_blocks, column_blocks, heads, nodes, ROWS, COLUMNS
    )
    exists = (f < width)[:, None] & (d < deep)[None, :]
    cell = f[:, None] * deep + d[None, :]
    Z = tl.zeros([ROWS, COLUMNS], tl.float32)
    if d_last is not None:
        place = (b * heads + h) * width * deep + cell
        Z = tl.load(d_last + place, mask=of_document(document, documents - 1, exists), other=0.0).to(tl.float32)
    for t in range(c1 - c0):
        c = c1 - 1 - t
        n = begin + (c - c0) * C + tl.arange(0, C)
        inside = n < end
        at = (b * nodes + n) * heads + h
        tl.store(d_states + ((b * heads + h) * chunks + c) * width * deep + cell, Z, mask=exists)
        q = load(query, b, n, h, f, inside, width)
        do = load(d_out, b, n, h, d, inside, deep).to(tl.float32) * scale
        if from_start is not None:
            do *= tl.load(from_start + at, mask=inside, other=0.0)[:, None]
        added = dot(tl.trans(q), do, NARROW, PRECISION)
        if W is not None:
            k = load(key, b, n, h, f, inside, width)
            w = tl.load(W + at[:, None] * width + f[None, :], mask=inside[:, None] & (f < width)[None, :], other=0.0)
            x = dot(k, Z, NARROW, PRECISION)
            if to_end is not None:
                x *= tl.load(to_end + at, mask=inside, other=0.0)[:, None]
            x += tl.load(
                sent + at[:, None] * deep + d[None, :], mask=inside[:, None] & (d < deep)[None, :], other=0.0
            ).to(tl.float32)
            x *= tl.load(beta + at, mask=inside, other=0.0).to(tl.float32)[:, None]
            added -= dot(tl.trans(w), x, NARROW, PRECISION)
        if from_start is not None:
            final = (b * nodes + tl.minimum(begin + (c - c0) * C + C, end) - 1) * heads + h
            Z = Z * tl.load(from_start + final)
        if through is not None:
            gate = tl.load(through + ((b * heads + h) * chunks + c) * width + f, mask=f < width, other=0.0)
            Z = Z * gate[:, None]
        Z += added
    if d_state is not None:
        tl.store(d_state + (b * heads + h) * width * deep + cell, Z, mask=of_document(document, 0, exists))
