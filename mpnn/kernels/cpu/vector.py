"""Vector instructions for numba kernels, written with llvmlite's IR builder.

Plain numba unrolls short loops over heads and features without vectorising them and keeps exp scalar. These few
intrinsics work on flat contiguous arrays of float32 or float64 with all shapes known at compile time, so that LLVM
keeps them in registers. A shape travels as the length of a tuple of zeros, part of the argument's type: numba compiles
once for each shape, and its cache on disk works. Widths are given as vectors times lanes.

None of the arithmetic assumes that numbers are finite: NaN passes through as NaN.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mpnn.kernels.cpu.hashing import reaches

MATH = {"contract", "reassoc", "nsz", "arcp", "afn"}  # fast, but with NaN and infinities
_TANH_IS_ONE = 40.0  # of half of this, in float64 too
_MATH = ("contract", "reassoc", "nsz", "arcp")
_I64, _I32, _I8 = ir.IntType(64), ir.IntType(32), ir.IntType(8)


class _Operands:
    """The shapes of an operation, and the addresses and vector types that follow from them."""

    def __init__(self, context: Any, builder: Any, dtype: Any, heads: Any, vectors: Any, lanes: Any) -> None:
        self.context, self.builder = context, builder
        self.heads, self.vectors, self.lanes = heads.count, vectors.count, lanes.count
        self.element = _element(dtype)
        self.bits = 32 if isinstance(self.element, ir.FloatType) else 64
        self.vector = ir.VectorType(self.element, self.lanes)

    def data(self, array_type: Any, value: Any) -> Any:
        return cgutils.create_struct_proxy(array_type)(self.context, self.builder, value).data

    def scalar(self, base: Any, at: Any, more: int) -> Any:
        return self.builder.gep(base, [self.builder.add(at, ir.Constant(_I64, more))])

    def at(self, base: Any, at: Any, more: int) -> Any:
        return self.builder.bitcast(self.scalar(base, at, more), self.vector.as_pointer())

    def splat(self, x: Any) -> Any:
        return splat(self.builder, x, self.lanes)


def _element(dtype: Any) -> Any:
    return ir.FloatType() if dtype == types.float32 else ir.DoubleType()


def exp_f32(b: Any, x: Any) -> Any:
    """2^n * p(f) with x = (n + f) log 2: a polynomial for the fraction, the exponent's bits for the rest."""
    lanes = x.type.count
    ints = ir.VectorType(_I32, lanes)

    def constant(v: float) -> Any:
        return ir.Constant(x.type, [v] * lanes)

    rint = cgutils.get_or_insert_function(b.module, ir.FunctionType(x.type, [x.type]), f"llvm.rint.v{lanes}f32")
    scaled = b.fmul(x, constant(1.4426950216293335))
    low, high = (b.fcmp_ordered(op, scaled, constant(v)) for op, v in (("<", -126.0), (">", 127.0)))
    whole = b.call(rint, [b.select(low, constant(-126.0), b.select(high, constant(127.0), scaled))])
    # the remainder in two steps, so that it keeps all its bits
    rest = b.fsub(x, b.fmul(whole, constant(0.693145751953125)))
    rest = b.fsub(rest, b.fmul(whole, constant(1.428606765330187e-06)))
    p = constant(1.0 / 720)
    for c in (1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0):
        p = b.fadd(b.fmul(p, rest, flags=_MATH), constant(c), flags=_MATH)
    exponent = b.shl(b.add(b.fptosi(whole, ints), ir.Constant(ints, [127] * lanes)), ir.Constant(ints, [23] * lanes))
    result = b.fmul(p, b.bitcast(exponent, x.type))
    infinite = b.fcmp_ordered(">", x, constant(88.7228393554687))
    return b.select(low, constant(0.0), b.select(infinite, constant(float("inf")), result))


def exp_f64(b: Any, x: Any) -> Any:
    exp = cgutils.get_or_insert_function(b.module, ir.FunctionType(ir.DoubleType(), [ir.DoubleType()]), "llvm.exp.f64")
    out = x
    for k in range(x.type.count):
        lane = ir.Constant(_I32, k)
        out = b.insert_element(out, b.call(exp, [b.extract_element(x, lane)]), lane)
    return out


@intrinsic
def outer(  # type: ignore[no-untyped-def]
    typing, a, a_at, a_row, a_k, b, b_at, b_k, c, c_at, c_row, depth, add, rows, vectors, lanes
):
    """`C[r, :] (+)= sum_k A[r, k] * B[k, :]` for a few rows and vectors of columns, all of C in registers.

    A is read one number at a time, at `a_at + r * a_row + k * a_k`, so transposes cost nothing; rows of B and C are
    contiguous, at `b_at + k * b_k` and `c_at + r * c_row`. `add`: whether C is added to or written.
    """
    i64 = types.int64
    signature = types.void(a, i64, i64, i64, b, i64, i64, c, i64, i64, i64, types.boolean, rows, vectors, lanes)

    def generate(context: Any, b_: Any, _: Any, args: Any) -> Any:
        of = _Operands(context, b_, a.dtype, rows, vectors, lanes)
        pa, pb, pc = of.data(a, args[0]), of.data(b, args[4]), of.data(c, args[7])
        _a, a_at, a_row, a_k, _b, b_at, b_k, _c, c_at, c_row, depth, add = args[:12]
        count, wide = rows.count, vectors.count

        def step(base: Any, stride: Any, k: int) -> Any:
            return b_.add(base, b_.mul(stride, ir.Constant(_I64, k)))

        into = [[of.at(pc, step(c_at, c_row, r), s * of.lanes) for s in range(wide)] for r in range(count)]
        sums = [[cgutils.alloca_once(b_, of.vector) for _ in range(wide)] for _ in range(count)]
        adds = b_.icmp_unsigned("!=", add, ir.Constant(add.type, 0))
        zero = ir.Constant(of.vector, [0.0] * of.lanes)
        with b_.if_else(adds) as (then, otherwise):
            with then:
                for r in range(count):
                    for s in range(wide):
                        b_.store(b_.load(into[r][s], align=4), sums[r][s])
            with otherwise:
                for r in range(count):
                    for s in range(wide):
                        b_.store(zero, sums[r][s])
        kind = ir.FunctionType(of.vector, [of.vector] * 3)
        fma = cgutils.get_or_insert_function(b_.module, kind, f"llvm.fma.v{of.lanes}f{of.bits}")
        starts = [step(a_at, a_row, r) for r in range(count)]
        with cgutils.for_range(b_, depth, intp=_I64) as loop:
            k = loop.index
            y = [b_.load(of.at(pb, b_.add(b_at, b_.mul(k, b_k)), s * of.lanes), align=4) for s in range(wide)]
            for r in range(count):
                x = of.splat(b_.load(of.scalar(pa, b_.add(starts[r], b_.mul(k, a_k)), 0)))
                for s in range(wide):
                    b_.store(b_.call(fma, [x, y[s], b_.load(sums[r][s])]), sums[r][s])
        for r in range(count):
            for s in range(wide):
                b_.store(b_.load(sums[r][s]), into[r][s], align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def tops(typing, s, at, count, top, vectors, lanes):  # type: ignore[no-untyped-def]
    """`top[r] = max(top[r], s[at + c * width + r] for c < count)`, width vectors x lanes; NaN is passed over."""
    signature = types.void(s, types.int64, types.int64, top, vectors, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Columns(context, b, s.dtype, vectors, lanes)
        source, into = of.data(s, args[0]), of.data(top, args[3])
        best = of.kept(into)
        with of.rows(source, args[1], args[2]) as row:
            for pointer, so_far in zip(row, best, strict=True):
                value, largest = b.load(pointer, align=4), b.load(so_far)
                b.store(b.select(b.fcmp_ordered(">", value, largest), value, largest), so_far)
        of.give(best, into)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exps(typing, s, at, count, top, total, vectors, lanes):  # type: ignore[no-untyped-def]
    """`s[c, r] <- exp(s[c, r] - top[r])` and `total[r] += sum_c s[c, r]`, for c < count from s[at] on."""
    signature = types.void(s, types.int64, types.int64, top, total, vectors, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Columns(context, b, s.dtype, vectors, lanes)
        source, highest, into = of.data(s, args[0]), of.data(top, args[3]), of.data(total, args[4])
        sums = of.kept(into)
        with of.rows(source, args[1], args[2]) as row:
            for r, (pointer, so_far) in enumerate(zip(row, sums, strict=True)):
                value = of.exp(b.fsub(b.load(pointer, align=4), of.column(highest, r)))
                b.store(value, pointer, align=4)
                b.store(b.fadd(value, b.load(so_far), flags=_MATH), so_far)
        of.give(sums, into)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def softmax_gradient(typing, s, g, at, count, lse, delta, vectors, lanes):  # type: ignore[no-untyped-def]
    """`s[c, r] <- exp(s[c, r] - lse[r])`, then `g[c, r] <- s[c, r] * (g[c, r] - delta[r])`."""
    signature = types.void(s, g, types.int64, types.int64, lse, delta, vectors, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Columns(context, b, s.dtype, vectors, lanes)
        scores, gradients = of.data(s, args[0]), of.data(g, args[1])
        log_sum, inner = of.data(lse, args[4]), of.data(delta, args[5])
        with of.rows(scores, args[2], args[3], gradients) as row:
            for r in range(of.vectors):
                p, d = row[r], row[of.vectors + r]
                value = of.exp(b.fsub(b.load(p, align=4), of.column(log_sum, r)))
                b.store(value, p, align=4)
                change = b.fsub(b.load(d, align=4), of.column(inner, r), flags=_MATH)
                b.store(b.fmul(value, change, flags=_MATH), d, align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def capped(typing, s, at, count, cap, slope, vectors, lanes):  # type: ignore[no-untyped-def]
    """`s[c, r] <- cap * tanh(s[c, r] / cap)` for c < count from s[at] on, and the derivative into `slope[c, r]`."""
    signature = types.void(s, types.int64, types.int64, s.dtype, slope, vectors, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Columns(context, b, s.dtype, vectors, lanes)
        scores, slopes, cap = of.data(s, args[0]), of.data(slope, args[4]), of.splat(args[3])
        one, most = (ir.Constant(of.vector, [x] * of.lanes) for x in (1.0, _TANH_IS_ONE))
        twice = b.fdiv(ir.Constant(of.vector, [2.0] * of.lanes), cap)
        with of.rows(scores, args[1], args[2], slopes) as row:
            for r in range(of.vectors):
                y = b.fmul(b.load(row[r], align=4), twice)
                for op, bound in ((">", most), ("<", b.fneg(most))):  # which let NaN pass
                    y = b.select(b.fcmp_ordered(op, y, bound), bound, y)
                e = of.exp(y)
                tanh = b.fdiv(b.fsub(e, one), b.fadd(e, one))
                b.store(b.fmul(cap, tanh), row[r], align=4)
                b.store(b.fsub(one, b.fmul(tanh, tanh)), row[of.vectors + r], align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def drop(typing, s, at, count, row_keys, first, threshold, grow, vectors, lanes):  # type: ignore[no-untyped-def]
    """`s[c, r] <- s[c, r] * grow` where `mix(row_keys[r] ^ (first + c)) >> 8` reaches `threshold`, else 0; the hash
    is `mpnn.request.rng.mix`."""
    signature = types.void(s, types.int64, types.int64, row_keys, types.int64, types.uint32, s.dtype, vectors, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Columns(context, b, s.dtype, vectors, lanes)
        ints = ir.VectorType(_I32, of.lanes)

        source, keys = of.data(s, args[0]), of.data(row_keys, args[3])
        limit, factor = splat(b, args[5], of.lanes), of.splat(args[6])
        zero = ir.Constant(of.vector, [0.0] * of.lanes)
        column = cgutils.alloca_once_value(b, b.trunc(args[4], _I32))
        with of.rows(source, args[1], args[2]) as row:
            here = splat(b, b.load(column), of.lanes)
            for r, pointer in enumerate(row):
                at_key = b.bitcast(b.gep(keys, [ir.Constant(_I64, r * of.lanes)]), ints.as_pointer())
                keeps = reaches(b, b.xor(b.load(at_key, align=4), here), limit)
                b.store(b.select(keeps, b.fmul(b.load(pointer, align=4), factor, flags=_MATH), zero), pointer, align=4)
            b.store(b.add(b.load(column), ir.Constant(_I32, 1)), column)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def drop_row(typing, x, out, at, count, row_key, threshold, grow, lanes):  # type: ignore[no-untyped-def]
    """`out[at + c] <- x[at + c] * grow` where `mix(row_key ^ c) >> 8` reaches `threshold`, else 0; `count` vectors."""
    signature = types.void(x, out, types.int64, types.int64, types.uint32, types.uint32, x.dtype, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Operands(context, b, x.dtype, lanes, lanes, lanes)
        source, into = of.data(x, args[0]), of.data(out, args[1])
        key, limit, factor = splat(b, args[4], of.lanes), splat(b, args[5], of.lanes), of.splat(args[6])
        zero = ir.Constant(of.vector, [0.0] * of.lanes)
        first = ir.Constant(ir.VectorType(_I32, of.lanes), list(range(of.lanes)))
        with cgutils.for_range(b, args[3], intp=_I64) as loop:
            step = b.mul(loop.index, ir.Constant(_I64, of.lanes))
            column = b.add(splat(b, b.trunc(step, _I32), of.lanes), first)
            keeps, here = reaches(b, b.xor(key, column), limit), b.add(args[2], step)
            kept = b.fmul(b.load(of.at(source, here, 0), align=4), factor, flags=_MATH)
            b.store(b.select(keeps, kept, zero), of.at(into, here, 0), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def scaled(typing, x, at, factor, out, to, count, lanes):  # type: ignore[no-untyped-def]
    """`out[to + c] = factor * x[at + c]` for `count` vectors of numbers."""
    signature = types.void(x, types.int64, x.dtype, out, types.int64, types.int64, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Operands(context, b, x.dtype, lanes, lanes, lanes)
        source, into, by = of.data(x, args[0]), of.data(out, args[3]), of.splat(args[2])
        with cgutils.for_range(b, args[5], intp=_I64) as loop:
            step = b.mul(loop.index, ir.Constant(_I64, of.lanes))
            value = b.fmul(b.load(of.at(source, b.add(args[1], step), 0), align=4), by)
            b.store(value, of.at(into, b.add(args[4], step), 0), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def turned(typing, x, at, row, factor, out, to, out_row, lanes):  # type: ignore[no-untyped-def]
    """`out[to + d * out_row + r] = factor * x[at + r * row + d]` for a square of r and d below `lanes`."""
    i64 = types.int64
    signature = types.void(x, i64, i64, x.dtype, out, i64, i64, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Operands(context, b, x.dtype, lanes, lanes, lanes)
        source, into, by, n = of.data(x, args[0]), of.data(out, args[4]), of.splat(args[3]), of.lanes
        numbers = [ir.Constant(_I64, r) for r in range(n)]
        rows = [b.load(of.at(source, b.add(args[1], b.mul(args[2], r)), 0), align=4) for r in numbers]
        # Lanes of vectors half the square apart are shuffled together: each round moves one bit of r to d.
        halves = [ir.Constant(ir.VectorType(_I32, n), [h + k // 2 + k % 2 * n for k in range(n)]) for h in (0, n // 2)]
        for _round in range(n.bit_length() - 1):
            rows = [b.shuffle_vector(rows[r], rows[r + n // 2], half) for r in range(n // 2) for half in halves]
        for d, vector in zip(numbers, rows, strict=True):
            b.store(b.fmul(vector, by), of.at(into, b.add(args[5], b.mul(args[6], d)), 0), align=4)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_to(typing, x, x_at, y, y_at, vectors, lanes):  # type: ignore[no-untyped-def]
    """`x[x_at + r] += y[y_at + r]` for vectors x lanes numbers."""
    signature = types.void(x, types.int64, y, types.int64, vectors, lanes)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Columns(context, b, x.dtype, vectors, lanes)
        into, source = of.data(x, args[0]), of.data(y, args[2])
        for r in range(of.vectors):
            pointer = of.at(into, args[1], r * of.lanes)
            b.store(
                b.fadd(b.load(pointer, align=4), b.load(of.at(source, args[3], r * of.lanes), align=4)),
                pointer,
                align=4,
            )
        return context.get_dummy_value()

    return signature, generate


class _Columns(_Operands):
    """A tile [count, vectors x lanes] whose columns are worked on side by side."""

    def __init__(self, context: Any, builder: Any, dtype: Any, vectors: Any, lanes: Any) -> None:
        super().__init__(context, builder, dtype, vectors, vectors, lanes)

    def kept(self, base: Any) -> list[Any]:
        """The numbers at `base`, in registers."""
        start = ir.Constant(_I64, 0)
        return [
            cgutils.alloca_once_value(self.builder, self.builder.load(self.at(base, start, r * self.lanes), align=4))
            for r in range(self.vectors)
        ]

    def give(self, kept: list[Any], base: Any) -> None:
        for r, register in enumerate(kept):
            at = self.at(base, ir.Constant(_I64, 0), r * self.lanes)
            self.builder.store(self.builder.load(register), at, align=4)

    def column(self, base: Any, r: int) -> Any:
        return self.builder.load(self.at(base, ir.Constant(_I64, 0), r * self.lanes), align=4)

    @contextmanager
    def rows(self, base: Any, at: Any, count: Any, *more: Any) -> Iterator[list[Any]]:
        """A loop over `count` rows; gives the addresses of a row's vectors, in `base` and in what is laid out alike."""
        width = ir.Constant(_I64, self.vectors * self.lanes)
        with cgutils.for_range(self.builder, count, intp=_I64) as loop:
            row = self.builder.add(at, self.builder.mul(loop.index, width))
            yield [self.at(x, row, r * self.lanes) for x in (base, *more) for r in range(self.vectors)]

    def exp(self, x: Any) -> Any:
        return _exp_below(self.builder, x) if self.bits == 32 else exp_f64(self.builder, x)


def _exp_below(b: Any, x: Any) -> Any:
    """exp(x) for x that are not large: 2^n * p(f) with x log2(e) = n + f; off by some |x| units in the last place,
    which is less than one of exp(0). Exactly zero below the normal range, so that what is no edge weighs nothing."""
    lanes = x.type.count
    ints = ir.VectorType(_I32, lanes)

    def constant(v: float) -> Any:
        return ir.Constant(x.type, [v] * lanes)

    y = b.fmul(x, constant(1.4426950216293335), flags=_MATH)
    # Written as x86's maximum, which lets NaN pass. At -127 the fraction is 0, p is 1, and the bits sum to zero.
    y = b.select(b.fcmp_ordered(">", constant(-127.0), y), constant(-127.0), y)
    rint = cgutils.get_or_insert_function(b.module, ir.FunctionType(x.type, [x.type]), f"llvm.rint.v{lanes}f32")
    whole = b.call(rint, [y])
    fraction = b.fsub(y, whole)
    p = constant(_POWERS_OF_TWO[0])
    for c in _POWERS_OF_TWO[1:]:
        p = b.fadd(b.fmul(p, fraction, flags=_MATH), constant(c), flags=_MATH)
    exponent = b.shl(b.fptosi(whole, ints), ir.Constant(ints, [23] * lanes))
    return b.bitcast(b.add(b.bitcast(p, ints), exponent), x.type)


# 2^f on [-1/2, 1/2] by its smallest largest relative error, 1e-7 with the constant term kept at 1.
_POWERS_OF_TWO = (1.326472731e-3, 9.671512991e-3, 5.550733581e-2, 2.402224243e-1, 6.931470037e-1, 1.0)


def splat(b: Any, x: Any, lanes: int) -> Any:
    """x in every lane."""
    kind = ir.VectorType(x.type, lanes)
    first = b.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_I32, 0))
    zeros = ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes)
    return b.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)
