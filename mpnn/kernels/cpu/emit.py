"""What the vector instructions of `mpnn.kernels.cpu.edgewise` and `.activated` are written with: loads, stores, loops
and arithmetic on llvmlite's IR builder, for arrays of float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from mpnn.kernels.cpu.vector import MATH, exp_f32, exp_f64, splat

LANES = 8
# Functions that are called once a block or on few graphs are compiled by themselves and called, which keeps kernels
# quick to compile. Kernels get their buffers from outside, so none of numba's reference counting is needed; it would
# cost an atomic instruction whenever an array is named.
INNER: Any = {"fastmath": MATH, "nogil": True, "_nrt": False}
I64 = ir.IntType(64)
_MATH = ("contract", "reassoc", "nsz", "arcp")
_I32, _I8 = ir.IntType(32), ir.IntType(8)
_LINE = 64  # bytes of a cache line


class Code:
    """The builder, with the loads, stores and loops that everything here is made of."""

    def __init__(self, context: Any, builder: Any, dtype: Any) -> None:
        self.context, self.builder = context, builder
        self.element = ir.FloatType() if dtype == types.float32 else ir.DoubleType()
        self.bits = 32 if dtype == types.float32 else 64

    def data(self, array_type: Any, value: Any) -> Any:
        return cgutils.create_struct_proxy(array_type)(self.context, self.builder, value).data

    def sum(self, *numbers: Any) -> Any:
        """The sum of integers, some of them given as Python's."""
        total = None
        for n in numbers:
            n = ir.Constant(I64, n) if isinstance(n, int) else n
            total = n if total is None else self.builder.add(total, n)
        return total

    def number(self, base: Any, at: Any) -> Any:
        return self.builder.load(self.builder.gep(base, [at]))

    def address(self, base: Any, at: Any, lanes: int = LANES) -> Any:
        return self.builder.bitcast(self.builder.gep(base, [at]), ir.VectorType(self.element, lanes).as_pointer())

    def vector(self, base: Any, at: Any, lanes: int = LANES) -> Any:
        return self.builder.load(self.address(base, at, lanes), align=4)

    def store(self, x: Any, base: Any, at: Any) -> None:
        self.builder.store(x, self.address(base, at, x.type.count), align=4)

    def splat(self, x: Any, lanes: int = LANES) -> Any:
        return splat(self.builder, x, lanes)

    def zero(self, lanes: int = LANES) -> Any:
        return ir.Constant(ir.VectorType(self.element, lanes), [0.0] * lanes)

    def unless(self, flag: Any, x: Any, otherwise: float) -> Any:
        """x, or a constant where the flag is set."""
        return self.builder.select(self.builder.trunc(flag, ir.IntType(1)), self.full(otherwise, x.type.count), x)

    def full(self, x: float, lanes: int = LANES) -> Any:
        return ir.Constant(ir.VectorType(self.element, lanes), [x] * lanes)

    def variable(self, x: Any) -> Any:
        """A register that a loop updates."""
        place = cgutils.alloca_once(self.builder, x.type)
        self.builder.store(x, place)
        return place

    def add(self, x: Any, y: Any) -> Any:
        return self.builder.fadd(x, y, flags=_MATH)

    def subtract(self, x: Any, y: Any) -> Any:
        return self.builder.fsub(x, y, flags=_MATH)

    def multiply(self, x: Any, y: Any) -> Any:
        return self.builder.fmul(x, y, flags=_MATH)

    def exp(self, x: Any) -> Any:
        return exp_f32(self.builder, x) if self.bits == 32 else exp_f64(self.builder, x)

    def loop(self, count: Any, start: Any = 0, step: int = 1) -> Any:
        """Indices from `start` while below `count`."""
        return cgutils.for_range_slice(self.builder, self.sum(start), count, ir.Constant(I64, step), intp=I64)

    def total(self, x: Any) -> Any:
        """The sum of a vector's numbers."""
        kind = ir.FunctionType(self.element, [self.element, x.type])
        name = f"llvm.vector.reduce.fadd.v{x.type.count}f{self.bits}"
        add = cgutils.get_or_insert_function(self.builder.module, kind, name)
        return self.builder.call(add, [ir.Constant(self.element, 0.0), x], fastmath=_MATH)

    def totals(self, x: list[Any]) -> Any:
        """The sums of eight vectors as one vector: three rounds of adding halves, two vectors at a time."""

        def halves(a: Any, b: Any, low: list[int], high: list[int]) -> Any:
            one, other = (ir.Constant(ir.VectorType(_I32, LANES), which) for which in (low, high))
            return self.add(self.builder.shuffle_vector(a, b, one), self.builder.shuffle_vector(a, b, other))

        x = [halves(x[p], x[p + 4], [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]) for p in range(4)]
        x = [halves(x[p], x[p + 1], [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]) for p in (0, 2)]
        return halves(x[0], x[1], [0, 2, 8, 10, 4, 6, 12, 14], [1, 3, 9, 11, 5, 7, 13, 15])

    def by_heads(self, heads: Any, body: Callable[[Any, int], None]) -> None:
        """`body(first head, lanes)` over all heads: eight at a time, then four, two and one."""
        b = self.builder
        eights = b.and_(heads, ir.Constant(I64, -LANES))
        with self.loop(eights, step=LANES) as (h, _):
            body(h, LANES)
        done = eights
        for lanes in (4, 2, 1):
            some = b.icmp_unsigned("!=", b.and_(heads, ir.Constant(I64, lanes)), ir.Constant(I64, 0))
            with b.if_then(some):
                body(done, lanes)
            done = b.add(done, b.and_(heads, ir.Constant(I64, lanes)))

    def fetch(self, base: Any, at: Any, numbers: Any) -> None:
        """Asks for the cache lines of `numbers` numbers ahead of their use."""
        b, pointer = self.builder, _I8.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
        call = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
        with self.loop(numbers, step=_LINE * 8 // self.bits) as (c, _):
            line = b.bitcast(b.gep(base, [b.add(at, c)]), pointer)
            b.call(call, [line, *(ir.Constant(_I32, n) for n in (0, 3, 1))])
