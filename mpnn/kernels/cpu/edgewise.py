"""Vector instructions over the edges of a block, for numba kernels that walk a sparse graph.

As `mpnn.kernels.cpu.vector`, but with all shapes known at run time only, so that one compilation serves every number of
heads and every width: vectors are of 8 numbers, widths are given in vectors, and where the features of a head begin
comes from small arrays. Which node an edge reads comes as an array of offsets, `at`: edge e reads the features that
begin at `x[at[e]]`.

Loops over heads end in shorter vectors, so that no head is computed twice; loops over features do not, so features come
padded with zeros.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mpnn.kernels.cpu.emit import I64, INNER, LANES, Code
from mpnn.kernels.cpu.hashing import reaches

_I32 = ir.IntType(32)
int64, void = types.int64, types.void


@intrinsic
def _dots(typing, a, a_at, b, b_at, b_start, n, heads, vectors, scale, ahead, of_a, of_b, out):  # type: ignore[no-untyped-def]
    signature = void(a, a_at, b, b_at, b_start, int64, int64, int64, scale, int64, int64, int64, out)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, a.dtype)
        pa, pa_at, pb, pb_at, pb_start = (
            code.data(*array) for array in zip((a, a_at, b, b_at, b_start), args[:5], strict=True)
        )
        n_, heads_, vectors_, scale_, ahead_, of_a_, of_b_ = args[5:12]
        to, factor = code.data(out, args[12]), code.splat(scale_)
        width = builder.mul(vectors_, ir.Constant(I64, LANES))

        def product(x: Any, y: Any, step: Any) -> Any:
            return code.multiply(code.vector(pa, code.sum(x, step)), code.vector(pb, code.sum(y, step)))

        def eight(a_from: list[Any], b_from: list[Any]) -> Any:
            """Dot products of eight pairs, at once."""
            sums = [code.variable(product(x, y, 0)) for x, y in zip(a_from, b_from, strict=True)]
            with code.loop(width, LANES, LANES) as (step, _):
                for place, x, y in zip(sums, a_from, b_from, strict=True):
                    builder.store(code.add(product(x, y, step), builder.load(place)), place)
            return code.multiply(code.totals([builder.load(place) for place in sums]), factor)

        def fetch(e: Any) -> None:
            for base, at, numbers in ((pa, pa_at, of_a_), (pb, pb_at, of_b_)):
                code.fetch(base, code.number(at, code.sum(e, ahead_)), numbers)

        even = builder.icmp_unsigned("==", builder.and_(heads_, ir.Constant(I64, LANES - 1)), ir.Constant(I64, 0))
        with builder.if_else(even) as (by_heads, by_edges):
            with by_heads, code.loop(n_) as (e, _):
                fetch(e)
                a_row, b_row = code.number(pa_at, e), code.number(pb_at, e)
                with code.loop(heads_, step=LANES) as (h, _):
                    heads_here = [code.sum(h, p) for p in range(8)]
                    a_from = [code.sum(a_row, builder.mul(k, width)) for k in heads_here]
                    b_from = [code.sum(b_row, code.number(pb_start, k)) for k in heads_here]
                    code.store(eight(a_from, b_from), to, code.sum(builder.mul(e, heads_), h))
            with by_edges, code.loop(n_, step=LANES) as (e, _):
                edges = [code.sum(e, p) for p in range(8)]
                for at in edges:
                    fetch(at)
                with code.loop(heads_) as (h, _):
                    a_first, b_first = builder.mul(h, width), code.number(pb_start, h)
                    a_from = [code.sum(code.number(pa_at, at), a_first) for at in edges]
                    b_from = [code.sum(code.number(pb_at, at), b_first) for at in edges]
                    found = eight(a_from, b_from)
                    for p, at in enumerate(edges):
                        place = builder.gep(to, [code.sum(builder.mul(at, heads_), h)])
                        builder.store(builder.extract_element(found, ir.Constant(_I32, p)), place)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def dots(a, a_at, b, b_at, b_start, n, heads, vectors, scale, ahead, of_a, of_b, out):  # type: ignore[no-untyped-def]
    """`out[e * heads + h] = scale * <a_h of edge e, b_h of edge e>` for the edges below n.

    The features of a stand head after head, those of b where `b_start` says. Of what the edge `ahead` further on reads,
    `of_a` and `of_b` numbers are fetched early: `a_at` or `b_at` has that many more entries. Where heads are no
    multiple of 8, edges go by eights: `a_at` and `b_at` name something that can be read, and `out` has room, up to the
    next multiple of 8 edges.
    """
    _dots(a, a_at, b, b_at, b_start, n, heads, vectors, scale, ahead, of_a, of_b, out)


@intrinsic
def weighted(typing, w, w_at, x, x_at, first, last, head, offset, vectors, ahead, size, fresh, out):  # type: ignore[no-untyped-def]
    """`out[v] += sum over the edges first to last of w[w_at[e] + head[v]] * x[x_at[e] + offset[v]]`, for each vector v;
    where `fresh`, out counts as zero.

    The `size` numbers of x that the edge `ahead` further on reads are fetched early: `x_at` has that many more entries.
    """
    signature = void(w, w_at, x, x_at, int64, int64, head, offset, int64, int64, int64, types.boolean, out)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, x.dtype)
        pw, pw_at, px, px_at = (code.data(*p) for p in zip((w, w_at, x, x_at), args[:4], strict=True))
        first_, last_ = args[4:6]
        p_head, p_offset = code.data(head, args[6]), code.data(offset, args[7])
        vectors_, ahead_, size_, fresh_, to = *args[8:12], code.data(out, args[12])

        def some(v: Any, count: int, fetch: bool) -> None:
            """`count` vectors from v on, in registers along all edges."""
            at = [code.sum(v, p) for p in range(count)]
            heads, offsets = [code.number(p_head, p) for p in at], [code.number(p_offset, p) for p in at]
            places = [builder.mul(p, ir.Constant(I64, LANES)) for p in at]
            sums = [code.variable(code.unless(fresh_, code.vector(to, place), 0.0)) for place in places]
            with code.loop(last_, first_) as (e, _):
                if fetch:
                    code.fetch(px, code.number(px_at, code.sum(e, ahead_)), size_)
                w_row, x_row = code.number(pw_at, e), code.number(px_at, e)
                for place, h, o in zip(sums, heads, offsets, strict=True):
                    factor = code.splat(code.number(pw, code.sum(w_row, h)))
                    product = code.multiply(factor, code.vector(px, code.sum(x_row, o)))
                    builder.store(code.add(product, builder.load(place)), place)
            for place, s in zip(places, sums, strict=True):
                code.store(builder.load(s), to, place)

        def if_any(condition: Any, v: Any, count: int, fetch: bool) -> None:
            with builder.if_then(condition):
                some(v, count, fetch)

        eights = builder.and_(vectors_, ir.Constant(I64, -8))
        has_eight = builder.icmp_unsigned("!=", eights, ir.Constant(I64, 0))
        if_any(has_eight, ir.Constant(I64, 0), 8, True)
        with code.loop(eights, 8, 8) as (v, _):
            some(v, 8, False)
        done = eights
        for count in (4, 2, 1):
            bit = builder.and_(vectors_, ir.Constant(I64, count))
            there = builder.icmp_unsigned("!=", bit, ir.Constant(I64, 0))
            begins = builder.icmp_unsigned("==", done, ir.Constant(I64, 0))
            with builder.if_then(there), builder.if_else(begins) as (then, otherwise):
                with then:
                    some(done, count, True)
                with otherwise:
                    some(done, count, False)
            done = builder.add(done, bit)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def also_weighted(w, w_at, x, x_at, first, last, head, offset, vectors, out):  # type: ignore[no-untyped-def]
    """`weighted`, added to what is there and without fetching early: for the vectors that edges have of their own."""
    weighted(w, w_at, x, x_at, first, last, head, offset, vectors, 0, 0, False, out)


@intrinsic
def added(typing, a, a_at, b, b_at, n, heads, ahead, of_a, of_b, out):  # type: ignore[no-untyped-def]
    """`out[e * heads + h] = a[a_at[e] + h] + b[b_at[e] + h]` for n edges, fetching early as `dots`."""
    signature = void(a, a_at, b, b_at, int64, int64, int64, int64, int64, out)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, a.dtype)
        pa, pa_at, pb, pb_at = (code.data(*p) for p in zip((a, a_at, b, b_at), args[:4], strict=True))
        n_, heads_, ahead_, of_a_, of_b_, to = *args[4:9], code.data(out, args[9])
        with code.loop(n_) as (e, _):
            for base, at, numbers in ((pa, pa_at, of_a_), (pb, pb_at, of_b_)):
                code.fetch(base, code.number(at, code.sum(e, ahead_)), numbers)
            a_row, b_row, row = code.number(pa_at, e), code.number(pb_at, e), builder.mul(e, heads_)

            def body(h: Any, lanes: int) -> None:
                x, y = code.vector(pa, code.sum(a_row, h), lanes), code.vector(pb, code.sum(b_row, h), lanes)
                code.store(code.add(x, y), to, code.sum(row, h))

            code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def gathered(typing, x, col, first, n, heads, out, room):  # type: ignore[no-untyped-def]
    """Of x [N, 3, heads], what the nodes `col[first:]` of n edges have, into out [3, room], each [n, heads]."""
    signature = void(x, col, int64, int64, int64, out, int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, x.dtype)
        px, p_col, first_, n_, heads_ = code.data(x, args[0]), code.data(col, args[1]), *args[2:5]
        to, room_ = code.data(out, args[5]), args[6]

        def body(h: Any, lanes: int) -> None:
            with code.loop(n_) as (e, _):
                node = builder.mul(code.number(p_col, code.sum(first_, e)), ir.Constant(I64, 3))
                edge = code.sum(builder.mul(e, heads_), h)
                for k in range(3):
                    at = code.sum(builder.mul(code.sum(node, k), heads_), h)
                    code.store(code.vector(px, at, lanes), to, code.sum(edge, builder.mul(room_, ir.Constant(I64, k))))

        code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def totalled(typing, x, at, step, n, heads, fresh, out):  # type: ignore[no-untyped-def]
    """`out[h] += sum over n edges of x[at + e * step + h]`; where `fresh`, out counts as zero."""
    signature = void(x, int64, int64, int64, int64, types.boolean, out)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, x.dtype)
        px, at_, step_, n_, heads_, fresh_, to = code.data(x, args[0]), *args[1:6], code.data(out, args[6])

        def body(h: Any, lanes: int) -> None:
            total = code.variable(code.unless(fresh_, code.vector(to, h, lanes), 0.0))
            with code.loop(n_) as (e, _):
                y = code.vector(px, code.sum(at_, builder.mul(e, step_), h), lanes)
                builder.store(code.add(builder.load(total), y), total)
            code.store(builder.load(total), to, h)

        code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def highest(typing, s, at, n, heads, fresh, top, shift):  # type: ignore[no-untyped-def]
    """`top[h]` becomes the largest of itself (minus infinity where `fresh`) and the scores `s[at + e * heads + h]` of n
    edges, and `shift[h]` the same but for 0 in place of minus infinity; NaN is passed over."""
    signature = void(s, int64, int64, int64, types.boolean, top, shift)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, s.dtype)
        ps, at_, n_, heads_, fresh_ = code.data(s, args[0]), *args[1:5]
        to, to_shift = code.data(top, args[5]), code.data(shift, args[6])

        def body(h: Any, lanes: int) -> None:
            lowest = code.full(float("-inf"), lanes)
            best = code.variable(code.unless(fresh_, code.vector(to, h, lanes), float("-inf")))
            with code.loop(n_) as (e, _):
                x = code.vector(ps, code.sum(at_, builder.mul(e, heads_), h), lanes)
                so_far = builder.load(best)
                builder.store(builder.select(builder.fcmp_ordered(">", x, so_far), x, so_far), best)
            found = builder.load(best)
            code.store(found, to, h)
            none = builder.fcmp_ordered("==", found, lowest)
            code.store(builder.select(none, code.zero(lanes), found), to_shift, h)

        code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exponentials(typing, s, at, n, heads, fresh, shift, z):  # type: ignore[no-untyped-def]
    """Scores s of n edges become `exp(s - shift[h])`, and are added to `z[h]`, which counts as zero where `fresh`."""
    signature = void(s, int64, int64, int64, types.boolean, shift, z)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, s.dtype)
        ps, at_, n_, heads_, fresh_ = code.data(s, args[0]), *args[1:5]
        p_shift, pz = code.data(shift, args[5]), code.data(z, args[6])

        def body(h: Any, lanes: int) -> None:
            shift_ = code.vector(p_shift, h, lanes)
            total = code.variable(code.unless(fresh_, code.vector(pz, h, lanes), 0.0))
            with code.loop(n_) as (e, _):
                place = code.sum(at_, builder.mul(e, heads_), h)
                x = code.exp(builder.fsub(code.vector(ps, place, lanes), shift_))
                code.store(x, ps, place)
                builder.store(code.add(x, builder.load(total)), total)
            code.store(builder.load(total), pz, h)

        code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def finished(typing, row, sums, shift, z, heads, vectors, out, norm):  # type: ignore[no-untyped-def]
    """Writes a row: `out = sums / z`, and what weights follow from, `norm[row] = (shift, 1 / z)`; 0 where z is 0."""
    signature = void(int64, sums, shift, z, int64, int64, out, norm)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, sums.dtype)
        row_, heads_, vectors_ = args[0], args[4], args[5]
        p_sums, p_shift, pz = (code.data(*p) for p in zip((sums, shift, z), args[1:4], strict=True))
        to, to_norm = code.data(out, args[6]), code.data(norm, args[7])
        from_shift = builder.mul(builder.mul(row_, heads_), ir.Constant(I64, 2))
        from_inverse = code.sum(from_shift, heads_)

        def body(h: Any, lanes: int) -> None:
            total = code.vector(pz, h, lanes)
            nothing = builder.fcmp_ordered("==", total, code.zero(lanes))
            inverse = builder.select(nothing, code.zero(lanes), builder.fdiv(code.full(1.0, lanes), total))
            code.store(code.vector(p_shift, h, lanes), to_norm, code.sum(from_shift, h))
            code.store(inverse, to_norm, code.sum(from_inverse, h))

        code.by_heads(heads_, body)
        width = builder.mul(vectors_, ir.Constant(I64, LANES))
        start = builder.mul(builder.mul(row_, heads_), width)
        with code.loop(heads_) as (h, _):
            factor, own = code.splat(code.number(to_norm, code.sum(from_inverse, h))), builder.mul(h, width)
            with code.loop(width, step=LANES) as (d, _):
                at = code.sum(own, d)
                code.store(code.multiply(code.vector(p_sums, at), factor), to, code.sum(start, at))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def scaled(typing, x, factor, count, out, at):  # type: ignore[no-untyped-def]
    """`out[at:] = factor * x` for `count` numbers, a multiple of 8."""
    signature = void(x, factor, int64, out, int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, x.dtype)
        px, by, to = code.data(x, args[0]), code.splat(args[1]), code.data(out, args[3])
        with code.loop(args[2], step=LANES) as (d, _):
            code.store(code.multiply(code.vector(px, d), by), to, code.sum(args[4], d))
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def copied(typing, x, at, step, n, heads, out, to, to_step):  # type: ignore[no-untyped-def]
    """`out[to + e * to_step + h] = x[at + e * step + h]` for n edges."""
    signature = void(x, int64, int64, int64, int64, out, int64, int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, x.dtype)
        px, at_, step_, n_, heads_ = code.data(x, args[0]), *args[1:5]
        po, to_, to_step_ = code.data(out, args[5]), *args[6:8]

        def body(h: Any, lanes: int) -> None:
            with code.loop(n_) as (e, _):
                y = code.vector(px, code.sum(at_, builder.mul(e, step_), h), lanes)
                code.store(y, po, code.sum(to_, builder.mul(e, to_step_), h))

        code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def _softmax_gradient(typing, s, g, of_row, room, count):  # type: ignore[no-untyped-def]
    signature = void(s, g, of_row, int64, int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, s.dtype)
        ps, pg, p_row, room_, count_ = *(code.data(*p) for p in zip((s, g, of_row), args[:3], strict=True)), *args[3:5]
        with code.loop(count_, step=LANES) as (c, _):
            shift, inverse, delta = (
                code.vector(p_row, code.sum(builder.mul(room_, ir.Constant(I64, k)), c)) for k in range(3)
            )
            x = code.multiply(code.exp(builder.fsub(code.vector(ps, c), shift)), inverse)
            code.store(x, ps, c)
            code.store(code.multiply(x, code.subtract(code.vector(pg, c), delta)), pg, c)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def softmax_gradient(s, g, of_row, room, count):  # type: ignore[no-untyped-def]
    """Scores s become weights `exp(s - shift) / z`, and gradients g of the weights those of the scores,
    `weight * (g - delta)`, below `count`, by eights; of_row [3, room] has shift, 1 / z and delta of each.
    """
    _softmax_gradient(s, g, of_row, room, count)


@intrinsic
def _exponential(typing, x, count):  # type: ignore[no-untyped-def]
    """`x[c] = exp(x[c])` below `count`, by eights: x has room for the last of them."""
    signature = void(x, int64)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, x.dtype)
        px = code.data(x, args[0])
        with code.loop(args[1], step=LANES) as (c, _):
            code.store(code.exp(code.vector(px, c)), px, c)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def sigmoid(s, n):  # type: ignore[no-untyped-def]
    """`s = 1 / (1 + exp(-s))` below n; s has room for a multiple of 8."""
    one = s.dtype.type(1)
    for c in range(n):
        s[c] = -s[c]
    _exponential(s, n)
    for c in range(n):
        s[c] = one / (one + s[c])


@intrinsic
def _keep(typing, row_keys, cols, first, at, n, heads, threshold, grow, out):  # type: ignore[no-untyped-def]
    signature = void(row_keys, cols, int64, int64, int64, int64, threshold, grow, out)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = Code(context, builder, out.dtype)
        keys, sources, first_, at_, n_, heads_ = code.data(row_keys, args[0]), code.data(cols, args[1]), *args[2:6]
        threshold_, grow_, to = args[6], args[7], code.data(out, args[8])

        def body(h: Any, lanes: int) -> None:
            kind = ir.VectorType(_I32, lanes)

            key = builder.load(builder.bitcast(builder.gep(keys, [h]), kind.as_pointer()), align=4)
            least, kept = code.splat(threshold_, lanes), code.splat(grow_, lanes)
            with code.loop(n_) as (e, _):
                source = builder.trunc(code.number(sources, code.sum(first_, e)), _I32)
                keeps = reaches(builder, builder.xor(key, code.splat(source, lanes)), least)
                factor = builder.select(keeps, kept, code.zero(lanes))
                code.store(factor, to, code.sum(at_, builder.mul(e, heads_), h))

        code.by_heads(heads_, body)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def keep(row_keys, cols, first, at, n, heads, threshold, grow, out):  # type: ignore[no-untyped-def]
    """What each weight is multiplied by, 0 or `grow`, into `out[at + e * heads + h]` for n edges of one row, whose
    sources stand at `cols[first:]`. `mpnn.request.rng.keep` is the specification; `row_keys[h]` its first half."""
    _keep(row_keys, cols, first, at, n, heads, threshold, grow, out)
