"""Logits and weights of tiles of edges, and their gradients; the same for edges by destination, by source or by type.

Features of both ends are tiles [R, E or 1, BH, WIDTH]: those of the program's rows have one entry for all edges of a
row, those of the other ends are gathered.

    CONSTANT     s_ij = scale + bias_ij
    DOT          s_ij = softcap * tanh(scale <q_i, k_j + e_ij> / softcap) + bias_ij
    ADDITIVE     s_ij = act(q_i + k_j + e_ij) + bias_ij                    numbers
    ACTIVATED    s_ij = <vector, act(q_i + k_j + e_ij)> + bias_ij          vectors

Called by the loops over edges of `forward.py` and `backward.py`.
"""

import triton
import triton.language as tl

from mpnn.kernels.cuda.tensors import load_numbers, load_vectors, table_rows
from mpnn.kernels.rows import spec as row_spec

CONSTANT, DOT, ADDITIVE, ACTIVATED = (
    tl.constexpr(kind) for kind in (row_spec.CONSTANT, row_spec.DOT, row_spec.ADDITIVE, row_spec.ACTIVATED)
)
SOFTMAX, SIGMOID, NONE = (tl.constexpr(row_spec.NORMALIZERS[name]) for name in ("softmax", "sigmoid", "none"))


@triton.jit
def tanh(x):
    """Triton's language has no tanh that its interpreter supports."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activation(x, slope, TANH: tl.constexpr):
    if TANH:
        return tanh(x)
    else:
        return tl.where(x > 0, x, x * slope)


@triton.jit
def activation_derivative(x, slope, TANH: tl.constexpr):
    if TANH:
        y = tanh(x)
        return 1.0 - y * y
    else:
        return tl.where(x > 0, 1.0, slope).to(x.dtype)


@triton.jit
def logits(
    query, key, vector, edge_key, edge_key_at, key_types, bias, bias_at, b, edge_id, h, mask, scale, softcap, slope,
    KIND: tl.constexpr, TANH: tl.constexpr, SOFTCAP: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Logits [R, E, BH] of edges; and for their gradients the argument of the activation (or the tanh of soft capping),
    and keys with what edges add to them. `vector` [BH, WIDTH], of an `ACTIVATED` score. Edges add `edge_key` to keys
    (vectors; numbers in an `ADDITIVE` score) and `bias` to logits, if not None."""
    if KIND == CONSTANT:
        s = mask.to(REAL) * scale
        inner = s
        key = s
    elif KIND == DOT:
        if edge_key is not None:
            key = key + load_vectors(edge_key, edge_key_at, b, table_rows(key_types, edge_id), h, mask, WIDTH, REAL)
        s = tl.sum(query * key, 3) * scale
        inner = s
        if SOFTCAP:
            inner = tanh(s / softcap)
            s = softcap * inner
    elif KIND == ADDITIVE:
        inner = tl.sum(query + key, 3)
        if edge_key is not None:
            inner += load_numbers(edge_key, edge_key_at, b, edge_id, h, mask, REAL)
        s = activation(inner, slope, TANH)
    else:
        inner = query + key
        if edge_key is not None:
            inner += load_vectors(edge_key, edge_key_at, b, table_rows(key_types, edge_id), h, mask, WIDTH, REAL)
        s = tl.sum(activation(inner, slope, TANH) * vector, 3)
    if bias is not None:
        s += load_numbers(bias, bias_at, b, edge_id, h, mask, REAL)
    return s, inner, key


@triton.jit
def weights(s, lse, mask, NORMALIZE: tl.constexpr):
    """Weights of edges from their logits and, for softmax, the log-sum-exp of their rows; 0 where masked."""
    if NORMALIZE == SOFTMAX:
        w = tl.exp(s - lse)
    elif NORMALIZE == SIGMOID:
        w = tl.sigmoid(s)
    else:
        w = s
    return tl.where(mask, w, 0.0)


@triton.jit
def logit_gradients(w, d_w, delta, NORMALIZE: tl.constexpr):
    """Gradients of logits from those of weights; `delta`, by row, is the sum of w * d_w."""
    if NORMALIZE == SOFTMAX:
        return w * (d_w - delta)
    elif NORMALIZE == SIGMOID:
        return w * (1.0 - w) * d_w
    else:
        return d_w


@triton.jit
def end_gradients(
    d_s, inner, query, key, vector, scale, slope, KIND: tl.constexpr, TANH: tl.constexpr, SOFTCAP: tl.constexpr
):
    """Gradients of the query and of the key, [R, E, BH, WIDTH] each, from those of logits. The gradient of what an edge
    adds to its key is that of the key."""
    if KIND == DOT:
        g = d_s * scale
        if SOFTCAP:
            g = g * (1.0 - inner * inner)
        return g[:, :, :, None] * key, g[:, :, :, None] * query
    elif KIND == ADDITIVE:
        g = (d_s * activation_derivative(inner, slope, TANH))[:, :, :, None]
        return g, g
    else:
        g = d_s[:, :, :, None] * vector * activation_derivative(inner, slope, TANH)
        return g, g
