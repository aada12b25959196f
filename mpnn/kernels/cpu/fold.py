"""Vector instructions that fold the features of several neighbours into a few vectors kept in registers.

Beside `mpnn.kernels.cpu.vector`: here the loop over edges is inside the instruction, and the width is known at run time
only; a caller takes a row in pieces of several vectors, and its end as one vector that is partly filled. Which formula
is folded, and how many vectors are, come as the lengths of tuples of zeros, and are compiled in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

BYTES = 32  # of a vector
AHEAD = 6  # edges, by which features are fetched early
SUM, SQUARES, EXTREME, COUNTED = (0,) * 1, (0,) * 2, (0,) * 3, (0,) * 4  # what is folded
PARTLY = ()  # in place of a number of vectors: one of them, of which `rest` numbers are there
_MATH = ("contract", "reassoc", "nsz", "arcp")
_I64, _I32, _I8, _I1 = ir.IntType(64), ir.IntType(32), ir.IntType(8), ir.IntType(1)


@intrinsic
def fold(  # type: ignore[no-untyped-def]
    typing, x, at, size, lines, col, first, n, last, weight, weight_at, step, own, own_at, out, out_at, count, begins,
    scale, rest, kind, vectors,
):  # fmt: skip
    """Folds the messages `m = weight[weight_at + e * step] * x[col[first + e] * size + at :]` of edges e < n into
    `out[out_at:]`, which starts afresh if `begins`, and is multiplied by `scale` in the end.

    SUM: m. SQUARES: (m - own[own_at:])^2. EXTREME: the largest, NaN if any is. COUNTED: the largest, and how many are
    equal to it into `count[out_at:]`. Meanwhile the first `lines` cache lines of the neighbours a few edges on are
    asked for, up to `col[last]`.
    """
    i64 = types.int64
    signature = types.void(
        x, i64, i64, i64, col, i64, i64, i64, weight, i64, i64, own, i64, out, i64, count, types.boolean, x.dtype, i64,
        kind, vectors,
    )  # fmt: skip

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        _x, at, size, lines, _c, first, n, last, _w, w_at, step = args[:11]
        _o, own_at, _t, out_at, _n, begins, scale, rest = args[11:19]
        of = _Row(context, b, x.dtype, vectors, rest)
        source, weights, result = of.data(x, _x), of.data(weight, _w), of.data(out, _t)
        counts, mean = of.data(count, _n), of.data(own, _o)
        extreme, counted = kind.count in (len(EXTREME), len(COUNTED)), kind.count == len(COUNTED)
        sums = of.started(result, out_at, begins, float("-inf") if extreme else 0.0)
        equal = of.started(counts, out_at, begins, 0.0) if counted else []
        means = of.loaded(mean, own_at) if kind.count == len(SQUARES) else []
        with of.neighbours(of.data(col, _c), first, n, last, size, lines, (source,)) as (e, row):
            w = of.splat(b.load(b.gep(weights, [b.add(w_at, b.mul(e, step))])))
            for k, value in enumerate(of.loaded(source, b.add(row, at))):
                m, so_far = b.fmul(w, value, flags=_MATH), b.load(sums[k])
                if extreme:
                    larger = b.fcmp_ordered(">", m, so_far)
                    if counted:
                        tied = b.select(b.fcmp_ordered("==", m, so_far), of.full(1.0), of.full(0.0))
                        b.store(b.select(larger, of.full(1.0), b.fadd(b.load(equal[k]), tied)), equal[k])
                    m = b.select(b.fcmp_unordered("uno", m, m), m, b.select(larger, m, so_far))
                else:
                    if means:
                        m = b.fsub(m, means[k], flags=_MATH)
                        m = b.fmul(m, m, flags=_MATH)
                    m = b.fadd(so_far, m, flags=_MATH)
                b.store(m, sums[k])
        factor = of.splat(scale)
        of.stored([b.fmul(b.load(s), factor, flags=_MATH) for s in sums], result, out_at)
        of.stored([b.load(s) for s in equal], counts, out_at)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def spread(  # type: ignore[no-untyped-def]
    typing, d_out, other, at, size, lines, col, first, n, last, weight, dot, weight_at, step, own, own_at, out, out_at,
    begins, rest, kind, dots, vectors,
):  # fmt: skip
    """The gradient of `fold`, over the transposed graph: adds `weight_e * t_e` to `out[out_at:]` and, with `dots`,
    `<t_e, own>` to `dot[weight_at + e * step]`, for t the gradient of edge e's message `m = weight_e * own`.

    With d_out and other read at `col[first + e] * size + at`: SUM: d_out. SQUARES: d_out * (m - other). EXTREME: d_out
    where m equals other.
    """
    i64 = types.int64
    signature = types.void(
        d_out, other, i64, i64, i64, col, i64, i64, i64, weight, dot, i64, i64, own, i64, out, i64, types.boolean, i64,
        kind, dots, vectors,
    )  # fmt: skip

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        _g, _r, at, size, lines, _c, first, n, last, _w, _d, w_at, step = args[:13]
        _o, own_at, _t, out_at, begins, rest = args[13:19]
        of = _Row(context, b, d_out.dtype, vectors, rest)
        gradient, compared, result = of.data(d_out, _g), of.data(other, _r), of.data(out, _t)
        weights, products, mine = of.data(weight, _w), of.data(dot, _d), of.loaded(of.data(own, _o), own_at)
        read = (gradient,) if kind.count == len(SUM) else (gradient, compared)
        sums = of.started(result, out_at, begins, 0.0)
        with of.neighbours(of.data(col, _c), first, n, last, size, lines, read) as (e, row):
            here = b.add(w_at, b.mul(e, step))
            w, total = of.splat(b.load(b.gep(weights, [here]))), None
            others = of.loaded(compared, b.add(row, at)) if len(read) > 1 else []
            for k, t in enumerate(of.loaded(gradient, b.add(row, at))):
                if kind.count == len(SQUARES):
                    t = b.fmul(t, b.fsub(b.fmul(w, mine[k], flags=_MATH), others[k], flags=_MATH), flags=_MATH)
                elif others:
                    reached = b.fcmp_ordered("==", b.fmul(w, mine[k]), others[k])
                    t = b.select(reached, t, of.full(0.0))
                b.store(b.fadd(b.load(sums[k]), b.fmul(w, t, flags=_MATH), flags=_MATH), sums[k])
                product = b.fmul(t, mine[k], flags=_MATH)
                total = product if total is None else b.fadd(total, product, flags=_MATH)
            if dots.count:
                place = b.gep(products, [here])
                b.store(b.fadd(b.load(place), of.total(total), flags=_MATH), place)
        of.stored([b.load(s) for s in sums], result, out_at)
        return context.get_dummy_value()

    return signature, generate


class _Row:
    """The builder, with a few vectors' loads, stores and registers."""

    def __init__(self, context: Any, builder: Any, dtype: Any, vectors: Any, rest: Any) -> None:
        self.context, self.builder = context, builder
        self.element = ir.FloatType() if dtype == types.float32 else ir.DoubleType()
        self.bits = 32 if dtype == types.float32 else 64
        self.lanes, self.count = 8 * BYTES // self.bits, max(vectors.count, 1)
        self.vector = ir.VectorType(self.element, self.lanes)
        self.there = None
        if not vectors.count:
            ids = ir.Constant(ir.VectorType(_I64, self.lanes), list(range(self.lanes)))
            self.there = builder.icmp_signed("<", ids, self.splat(rest))

    def data(self, array_type: Any, value: Any) -> Any:
        return cgutils.create_struct_proxy(array_type)(self.context, self.builder, value).data

    def full(self, x: float) -> Any:
        return ir.Constant(self.vector, [x] * self.lanes)

    def splat(self, x: Any) -> Any:
        kind = ir.VectorType(x.type, self.lanes)
        first = self.builder.insert_element(ir.Constant(kind, ir.Undefined), x, ir.Constant(_I32, 0))
        zeros = ir.Constant(ir.VectorType(_I32, self.lanes), [0] * self.lanes)
        return self.builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), zeros)

    def total(self, x: Any) -> Any:
        kind = ir.FunctionType(self.element, [self.element, self.vector])
        add = self._function(f"llvm.vector.reduce.fadd.v{self.lanes}f{self.bits}", kind)
        return self.builder.call(add, [ir.Constant(self.element, 0.0), x], fastmath=_MATH)

    def loaded(self, base: Any, at: Any) -> list[Any]:
        """The vectors from `base[at]` on; what is not there is zero."""
        b, places = self.builder, self._places(base, at)
        if self.there is None:
            return [b.load(p, align=4) for p in places]
        kind = ir.FunctionType(self.vector, [self.vector.as_pointer(), _I32, self.there.type, self.vector])
        load = self._function(f"llvm.masked.load.v{self.lanes}f{self.bits}.p0", kind)
        return [b.call(load, [places[0], ir.Constant(_I32, 4), self.there, self.full(0.0)])]

    def stored(self, values: list[Any], base: Any, at: Any) -> None:
        b = self.builder
        for value, place in zip(values, self._places(base, at), strict=False):
            if self.there is None:
                b.store(value, place, align=4)
            else:
                kind = ir.FunctionType(ir.VoidType(), [self.vector, self.vector.as_pointer(), _I32, self.there.type])
                store = self._function(f"llvm.masked.store.v{self.lanes}f{self.bits}.p0", kind)
                b.call(store, [value, place, ir.Constant(_I32, 4), self.there])

    def started(self, base: Any, at: Any, begins: Any, start: float) -> list[Any]:
        """Registers that hold `start` if this `begins`, else what is at `base[at]`."""
        b = self.builder
        registers = [cgutils.alloca_once(b, self.vector) for _ in range(self.count)]
        with b.if_else(b.icmp_unsigned("!=", begins, ir.Constant(begins.type, 0))) as (afresh, goes_on):
            with afresh:
                for register in registers:
                    b.store(self.full(start), register)
            with goes_on:
                for register, value in zip(registers, self.loaded(base, at), strict=True):
                    b.store(value, register)
        return registers

    @contextmanager
    def neighbours(
        self, col: Any, first: Any, n: Any, last: Any, size: Any, lines: Any, read: tuple[Any, ...]
    ) -> Iterator[tuple[Any, Any]]:
        """A loop over n edges: gives each edge's number and where the features of its neighbour begin, and asks early
        for the first cache lines of them in the arrays `read`."""
        b = self.builder

        def start(edge: Any) -> Any:
            return b.mul(b.sext(b.load(b.gep(col, [edge])), _I64), size)

        with cgutils.for_range(b, n, intp=_I64) as loop:
            later = b.add(first, b.add(loop.index, ir.Constant(_I64, AHEAD)))
            ahead = start(b.select(b.icmp_signed("<", later, last), later, last))
            with cgutils.for_range(b, lines, intp=_I64) as line:
                more = b.mul(line.index, ir.Constant(_I64, 512 // self.bits))
                for base in read:
                    self.fetch(b.gep(base, [b.add(ahead, more)]))
            yield loop.index, start(b.add(first, loop.index))

    def fetch(self, place: Any) -> None:
        b, pointer = self.builder, _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        numbers = [ir.Constant(_I32, k) for k in (0, 3, 1)]
        b.call(self._function("llvm.prefetch.p0", kind), [b.bitcast(place, pointer), *numbers])

    def _places(self, base: Any, at: Any) -> list[Any]:
        b = self.builder
        return [
            b.bitcast(b.gep(base, [b.add(at, ir.Constant(_I64, k * self.lanes))]), self.vector.as_pointer())
            for k in range(self.count)
        ]

    def _function(self, name: str, kind: Any) -> Any:
        return cgutils.get_or_insert_function(self.builder.module, kind, name)


@intrinsic
def fetch_row(typing, x, at, size):  # type: ignore[no-untyped-def]
    """Asks for the cache lines of the `size` numbers from `x[at]` on."""
    signature = types.void(x, types.int64, types.int64)

    def generate(context: Any, b: Any, _: Any, args: Any) -> Any:
        of = _Row(context, b, x.dtype, types.Tuple(()), args[2])
        numbers = 512 // of.bits
        lines = b.sdiv(b.add(args[2], ir.Constant(_I64, numbers - 1)), ir.Constant(_I64, numbers))
        with cgutils.for_range(b, lines, intp=_I64) as line:
            of.fetch(b.gep(of.data(x, args[0]), [b.add(args[1], b.mul(line.index, ir.Constant(_I64, numbers)))]))
        return context.get_dummy_value()

    return signature, generate
