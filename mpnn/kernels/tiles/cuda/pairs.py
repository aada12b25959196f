"""The computation at the pairs of a tile: loads, products, logits, edges and dropout. Used by `forward` and
`backward`.

    x_ij = softcap * tanh(scale * <q_i, k_j> / softcap) + table[h, i - j + N_src - 1] + bias[h, e] + dst_i + src_j

A tile has queries along one axis and keys along the other: queries down in the passes by row, keys down in the pass by
column (`KEYS_DOWN`). i and j are numbers of nodes, [H, 1] and [1, W] or the other way round.

Float32 features are planes: three bfloat16 numbers whose sum they are up to 2**-24. A product of float32 is six
products of planes on the tensor cores, which leaves out those below 2**-24. Tensor cores truncate what they add to an
accumulator, so that long sums would drift by 4e-5. `dot` therefore starts from zero, and the caller adds its result.
"""

from math import log

import triton
import triton.language as tl

LN2 = tl.constexpr(log(2))
LOG2E = tl.constexpr(1 / log(2))
LOWEST = tl.constexpr(-3.3e38)  # below all logits, and finite, so that differences of running maxima are
INTEGERS = ["copies", "heads", "num_dst", "num_src", "threshold", "items", "nodes"]  # not specialized


@triton.jit
def load_rows(
    base, first, stride, count, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr
):
    """Rows `first` to `first + ROWS` of a matrix, [ROWS, WIDTH]; zeros beyond D and, with CHECK, beyond `count`."""
    n, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = base + tl.cast(first, tl.int64) * stride + n[:, None] * stride + d[None, :]
    if CHECK:
        if D < WIDTH:
            x = tl.load(at, mask=(n < count - first)[:, None] & (d < D)[None, :], other=0.0)
        else:
            x = tl.load(at, mask=(n < count - first)[:, None], other=0.0)
    elif D < WIDTH:
        x = tl.load(at, mask=(d < D)[None, :], other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def store_rows(base, x, first, stride, count, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Writes x [ROWS, WIDTH] to the rows `first` to `first + ROWS` below `count`."""
    n, d = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = base + tl.cast(first, tl.int64) * stride + n[:, None] * stride + d[None, :]
    tl.store(at, x.to(base.dtype.element_ty), mask=(n < count - first)[:, None] & (d < D)[None, :])


@triton.jit
def load_planes(
    base, plane, first, stride, count,
    ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """`load_rows` of each plane; `plane` is their distance. With one plane the other two are the same."""
    a = load_rows(base, first, stride, count, ROWS, D, WIDTH, CHECK)
    b = a
    c = a
    if PLANES == 3:
        b = load_rows(base + plane, first, stride, count, ROWS, D, WIDTH, CHECK)
        c = load_rows(base + plane * 2, first, stride, count, ROWS, D, WIDTH, CHECK)
    return a, b, c


@triton.jit
def planes_of(x, like, PLANES: tl.constexpr):
    """x in the type of `like`, or the three bfloat16 whose sum it is."""
    a = x.to(like.dtype)
    b = a
    c = a
    if PLANES == 3:
        x -= a.to(tl.float32)
        b = x.to(like.dtype)
        c = (x - b.to(tl.float32)).to(like.dtype)
    return a, b, c


@triton.jit
def dot(a, a1, a2, b, b1, b2, zero, PLANES: tl.constexpr):
    """a @ b, the smallest products first."""
    if PLANES == 3:
        x = tl.dot(a1, b1, zero)
        x = tl.dot(a2, b, x)
        x = tl.dot(a, b2, x)
        x = tl.dot(a1, b, x)
        x = tl.dot(a, b1, x)
        x = tl.dot(a, b, x)
    else:
        x = tl.dot(a, b, zero)
    return x


@triton.jit
def add_dot(acc, a, a1, a2, b, b1, b2, PLANES: tl.constexpr):
    """acc + a @ b."""
    if PLANES == 3:
        acc += dot(a, a1, a2, b, b1, b2, tl.zeros_like(acc), PLANES)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def spread(
    numbers, first_row, first_column, ROWS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    KEYS_DOWN: tl.constexpr,
):  # fmt: skip
    """numbers [columns / 32, ROWS] of a tile over QUERIES x KEYS pairs, of which (first_row, first_column) is first."""
    at = numbers + first_column // 32 * ROWS + first_row + tl.arange(0, QUERIES)
    j = tl.arange(0, KEYS)
    x = tl.load(at)
    x = x[None, :] if KEYS_DOWN else x[:, None]
    for w in tl.static_range(1, KEYS // 32):
        y = tl.load(at + w * ROWS)
        y = y[None, :] if KEYS_DOWN else y[:, None]
        low = j < 32 * w
        low = low[:, None] if KEYS_DOWN else low[None, :]
        x = tl.where(low, x, y)
    return x


@triton.jit
def bits_below(word, bit):
    """The number of bits of uint32 `word` that are set below `bit`."""
    x = word & ((tl.full([], 1, tl.uint32) << bit) - 1)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x * 0x01010101) >> 24


@triton.jit
def tanh(x):
    """Exact to about 4e-7 of the result, also near 0, where 1 - 2 / (exp(2x) + 1) cancels."""
    y = x * x
    small = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835)))))
    return tl.where(tl.abs(x) < 0.3, small, 1 - 2 / (tl.exp2(x * (2 * LOG2E)) + 1))


@triton.jit
def load_words(words, n, count, CHECK: tl.constexpr):
    """The words of nodes n for dropout; without CHECK all n are below the count."""
    return tl.load(words + n, mask=n < count if CHECK else None, other=0 if CHECK else None)


@triton.jit
def kept(of_query, of_key, threshold):
    """Whether dropout keeps the pairs, `mpnn.graph.rng.keep`, by the words of both ends. One of them is times that of
    the stream."""
    return of_query * of_key >= threshold


@triton.jit
def unless_dropped(is_kept, x, keep_scale):
    """x where kept, else 0: a product, because of a constant the compiler would make a choice between 16-bit numbers,
    which takes three instructions each."""
    return tl.where(is_kept, x, keep_scale * 0.0)


@triton.jit
def logits(
    a, a1, a2, b, b1, b2, i, j, dst, src, pattern, number, first_row, first_column, words, edges_before, table, bias,
    dst_bias, scale, softcap, num_dst, num_src, ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, PARTIAL: tl.constexpr, KEYS_DOWN: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Logits over `factor` of QUERIES x KEYS pairs of a tile; the tanh of the softcap; whether each is an edge, if
    PARTIAL; and with `bias` its number in the order of rows.

    a, b: the features along the first axis and along the second. dst, src: the biases of nodes.
    """
    zero = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
    x = dot(a, a1, a2, tl.trans(b), tl.trans(b1), tl.trans(b2), zero, PLANES)
    word = pattern
    is_edge = True
    edge = pattern
    t = x
    if PARTIAL:
        at = words + tl.cast(pattern, tl.int64) * (ROWS * COLUMNS // 32)
        word = spread(at, first_row, first_column, ROWS, QUERIES, KEYS, KEYS_DOWN)
        is_edge = ((word >> (j & 31)) & 1) != 0
    if softcap is not None:
        t = tanh(x * (scale / softcap))
        x = t * softcap
    elif (table is not None) or (bias is not None) or (dst_bias is not None):
        x = x * scale
    if table is not None:
        x += tl.load(table + (i - j), mask=(i < num_dst) & (j < num_src), other=0.0)
    if bias is not None:
        at = edges_before + tl.cast(tl.load(number), tl.int64) * (ROWS * COLUMNS // 32)
        edge = spread(at, first_row, first_column, ROWS, QUERIES, KEYS, KEYS_DOWN)
        if PARTIAL:
            edge += bits_below(word.to(tl.uint32, bitcast=True), (j & 31).to(tl.uint32)).to(tl.int64)
        else:
            edge += j & 31
        x += tl.load(bias + edge, mask=is_edge, other=0.0)
    if dst_bias is not None:
        x += dst + src
    return x, t, is_edge, edge


@triton.jit
def factor(table, bias, dst_bias, scale, softcap):
    """Returns the factor that makes results of `logits` logits of base 2."""
    if (softcap is not None) or (table is not None) or (bias is not None) or (dst_bias is not None):
        return LOG2E
    else:
        return LOG2E * scale


@triton.jit
def load_unit(units, copies, heads):
    """The program's unit, see `Schedule`, its copy (a head of a batch entry), and the two."""
    unit = units + tl.program_id(0) // copies * 8
    copy = tl.program_id(0) % copies
    row = tl.load(unit)
    first = tl.load(unit + 1)
    middle = tl.load(unit + 2)
    last = tl.load(unit + 3)
    slot = tl.load(unit + 4)
    place, middle_place, middle_pattern = tl.load(unit + 5), tl.load(unit + 6), tl.load(unit + 7)
    b, h = tl.cast(copy // heads, tl.int64), tl.cast(copy % heads, tl.int64)
    return row, first, middle, last, slot, place, middle_place, middle_pattern, copy, b, h


@triton.jit
def load_nodes(x, n, count):
    """x[n] of numbers of nodes, 0 beyond the count."""
    return tl.load(x + n, mask=n < count, other=0.0)


@triton.jit
def gradients(
    a, a1, a2, b, b1, b2, c, c1, c2, d, d1, d2, i, j, dst, src, of_query, of_key, norm, delta, pattern, number,
    first_row, first_column, words, edges_before, table, bias, dst_bias, dst_words, threshold, keep_scale, scale,
    softcap, num_dst, num_src, ROWS: tl.constexpr, COLUMNS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PARTIAL: tl.constexpr, KEYS_DOWN: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Of pairs of a tile, see `backward`: the weights w after dropout; the gradients dx of logits; those of
    scaled products, before the softcap; whether each is an edge; and its number.

    a, b: as for `logits`. c, d: values and gradients of results, in the same order.
    """
    x, t, is_edge, edge = logits(
        a, a1, a2, b, b1, b2, i, j, dst, src, pattern, number, first_row, first_column, words, edges_before, table,
        bias, dst_bias, scale, softcap, num_dst, num_src, ROWS, COLUMNS, QUERIES, KEYS, PARTIAL, KEYS_DOWN, PLANES,
    )  # fmt: skip
    p = tl.exp2(x * factor(table, bias, dst_bias, scale, softcap) - norm)
    if PARTIAL:
        p = tl.where(is_edge, p, 0.0)
    zero = tl.zeros([c.shape[0], d.shape[0]], tl.float32)
    dw = dot(c, c1, c2, tl.trans(d), tl.trans(d1), tl.trans(d2), zero, PLANES)
    w = p
    if dst_words is not None:
        kept_scale = tl.where(kept(of_query, of_key, threshold), keep_scale, 0.0)
        w = p * kept_scale
        dw = dw * kept_scale
    dx = p * (dw - delta)
    ds = dx
    if softcap is not None:
        ds = dx * (1 - t * t)
    return w, dx, ds, is_edge, edge
