"""Scores of tiles of edges, and the gradients that go back through them; the same for rows of either direction.

Features of both ends are tiles [R, E or 1, BH, WIDTH]: one of them is that of the rows, the other is gathered.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from mpnn.kernels import row_spec
from mpnn.kernels.cuda.tensors import View, numbers, vectors

CONSTANT, DOT, ADDITIVE, ACTIVATED = (
    tl.constexpr(kind) for kind in (row_spec.CONSTANT, row_spec.DOT, row_spec.ADDITIVE, row_spec.ACTIVATED)
)
SOFTMAX, SIGMOID, NONE = (tl.constexpr(row_spec.NORMALIZERS[name]) for name in ("softmax", "sigmoid", "none"))


class PerEdge(NamedTuple):
    """What edges have, each None if there is none: vectors beside keys or under an activation, vectors beside values,
    numbers under an additive score's activation, and numbers added to scores."""

    edge: View | None
    edge_value: View | None
    before: View | None
    bias: View | None


@triton.jit
def tanh(x):
    """Triton's language has none that its interpreter knows too."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activation(x, slope, TANH: tl.constexpr):
    if TANH:
        return tanh(x)
    else:
        return tl.where(x > 0, x, x * slope)


@triton.jit
def steepness(x, slope, TANH: tl.constexpr):
    """The derivative of `activation`."""
    if TANH:
        y = tanh(x)
        return 1.0 - y * y
    else:
        return tl.where(x > 0, 1.0, slope).to(x.dtype)


@triton.jit
def scores(
    dst, src, vector, given, e, b, h, on, scale, cap, slope, KIND: tl.constexpr, TANH: tl.constexpr,
    CAPPED: tl.constexpr, WIDTH: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Scores [R, E, BH] of edges whose numbers are e [R, E]; and, for the gradients, what an activation was applied to
    (or what soft capping made of it), and what queries were multiplied by.

    `given` is a `PerEdge`; `vector` [BH, WIDTH], of an activated score.
    """
    if KIND == CONSTANT:
        s = on.to(REAL) * scale
        inner = s
        keys = s
    elif KIND == DOT:
        keys = src
        if given.edge is not None:
            keys = keys + vectors(given.edge, b, e, h, on, WIDTH, REAL)
        s = tl.sum(dst * keys, 3) * scale
        inner = s
        if CAPPED:
            inner = tanh(s / cap)
            s = cap * inner
    elif KIND == ADDITIVE:
        keys = src
        inner = tl.sum(dst + src, 3)
        if given.before is not None:
            inner += numbers(given.before, b, e, h, on, REAL)
        s = activation(inner, slope, TANH)
    else:
        keys = src
        inner = dst + src
        if given.edge is not None:
            inner += vectors(given.edge, b, e, h, on, WIDTH, REAL)
        s = tl.sum(activation(inner, slope, TANH) * vector, 3)
    if given.bias is not None:
        s += numbers(given.bias, b, e, h, on, REAL)
    return s, inner, keys


@triton.jit
def weights(s, norm, on, NORMALIZE: tl.constexpr):
    """Weights of edges from their scores, and, for softmax, the logarithms of the sums of their rows; 0 where off."""
    if NORMALIZE == SOFTMAX:
        w = tl.exp(s - norm)
    elif NORMALIZE == SIGMOID:
        w = tl.sigmoid(s)
    else:
        w = s
    return tl.where(on, w, 0.0)


@triton.jit
def score_gradients(w, d_w, delta, NORMALIZE: tl.constexpr):
    """Gradients of scores from those of weights; `delta`, by row, is the sum of w * d_w."""
    if NORMALIZE == SOFTMAX:
        return w * (d_w - delta)
    elif NORMALIZE == SIGMOID:
        return w * (1.0 - w) * d_w
    else:
        return d_w
