"""Vector instructions for scores of the form `<vector, activation(dst_i + src_j + edge_ij)>` (GATv2, Bahdanau).

The sums under the activation are made in registers, forward and backward, edge by edge; conventions are those of
`mpnn.kernels.cpu.edgewise`.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from mpnn.kernels.cpu.emit import I64, INNER, LANES, Code

int64, void = types.int64, types.void


class _Sums(Code):
    """`z = dst_i + src_j + edge_ij`, its activation and the derivative of that."""

    def __init__(self, context: Any, builder: Any, arrays: Any, values: Any) -> None:
        super().__init__(context, builder, arrays[0].dtype)
        self.a, self.d, self.d_at, self.s, self.s_at, self.e, self.e_at, self.e_start = (
            self.data(*pair) for pair in zip(arrays, values, strict=True)
        )

    def sums(self, edge: Any, at: Any, first: Any) -> Any:
        """The vector at `at` among a node's features, which for the edge's own begins at `first`."""
        x = self.vector(self.d, self.sum(self.number(self.d_at, edge), at))
        y = self.vector(self.s, self.sum(self.number(self.s_at, edge), at))
        return self.add(self.add(x, y), self.vector(self.e, self.sum(self.number(self.e_at, edge), first)))

    def tanh(self, z: Any) -> Any:
        """`1 - 2 / (exp(2 z) + 1)`: right to a unit of 1, also where exp overflows."""
        one, two = self.full(1.0), self.full(2.0)
        return self.builder.fsub(one, self.builder.fdiv(two, self.builder.fadd(self.exp(self.builder.fadd(z, z)), one)))

    def leaky(self, z: Any, slope: Any) -> Any:
        """The derivative of LeakyReLU, by which it multiplies z itself as well."""
        return self.builder.select(self.builder.fcmp_ordered(">", z, self.zero()), self.full(1.0), slope)

    def is_tanh(self, flag: Any) -> Any:
        return self.builder.icmp_signed("!=", flag, ir.Constant(I64, 0))

    def step(self, vectors: Any, head: Any, v: Any) -> Any:
        """Where vector v of a head begins."""
        return self.builder.mul(self.sum(self.builder.mul(head, vectors), v), ir.Constant(I64, LANES))


@intrinsic
def _dots(typing, a, d, d_at, s, s_at, e, e_at, e_start, n, heads, vectors, slope, tanh, ahead, of_d, of_s, out):  # type: ignore[no-untyped-def]
    signature = void(a, d, d_at, s, s_at, e, e_at, e_start, int64, int64, int64, slope, int64, int64, int64, int64, out)

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = _Sums(context, builder, (a, d, d_at, s, s_at, e, e_at, e_start), args[:8])
        n_, heads_, vectors_ = args[8:11]
        slope_, (ahead_, of_d_, of_s_), to = code.splat(args[11]), args[13:16], code.data(out, args[16])

        def one_head(is_tanh: bool, edge: Any, h: Any) -> None:
            total, first = code.variable(code.zero()), code.number(code.e_start, h)
            with code.loop(vectors_) as (v, _):
                at = code.step(vectors_, h, v)
                z = code.sums(edge, at, code.sum(first, builder.mul(v, ir.Constant(I64, LANES))))
                y = code.tanh(z) if is_tanh else code.multiply(z, code.leaky(z, slope_))
                builder.store(code.add(builder.load(total), code.multiply(y, code.vector(code.a, at))), total)
            place = builder.gep(to, [code.sum(builder.mul(edge, heads_), h)])
            builder.store(code.total(builder.load(total)), place)

        def all_edges(is_tanh: bool) -> None:
            with code.loop(n_) as (edge, _):
                for base, at, numbers in ((code.d, code.d_at, of_d_), (code.s, code.s_at, of_s_)):
                    code.fetch(base, code.number(at, code.sum(edge, ahead_)), numbers)
                with code.loop(heads_) as (h, _):
                    one_head(is_tanh, edge, h)

        with builder.if_else(code.is_tanh(args[12])) as (then, otherwise):
            with then:
                all_edges(True)
            with otherwise:
                all_edges(False)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def activated_dots(a, d, d_at, s, s_at, e, e_at, e_start, n, heads, vectors, slope, tanh, ahead, of_d, of_s, out):  # type: ignore[no-untyped-def]
    """`out[edge * heads + h] = <a_h, activation(d_h + s_h + e_h)>` for the edges below n: tanh, or LeakyReLU.

    Of what the edge `ahead` further on reads, `of_d` and `of_s` numbers are fetched early.
    """
    _dots(a, d, d_at, s, s_at, e, e_at, e_start, n, heads, vectors, slope, tanh, ahead, of_d, of_s, out)


@intrinsic
def _gradient(  # type: ignore[no-untyped-def]
    typing, a, d, d_at, s, s_at, e, e_at, e_start, g, first, last, heads, vectors, slope, tanh, d_sum, d_a, d_e
):
    signature = void(
        a, d, d_at, s, s_at, e, e_at, e_start, g, int64, int64, int64, int64, slope, int64, d_sum, d_a, d_e
    )

    def generate(context: Any, builder: Any, _: Any, args: Any) -> Any:
        code = _Sums(context, builder, (a, d, d_at, s, s_at, e, e_at, e_start), args[:8])
        pg = code.data(g, args[8])
        first_, last_, heads_, vectors_ = args[9:13]
        slope_, to_sum, to_a, to_e = (
            code.splat(args[13]),
            *(code.data(*pair) for pair in zip((d_sum, d_a, d_e), args[15:18], strict=True)),
        )
        wanted = builder.icmp_signed(
            ">", context.make_array(d_e)(context, builder, args[17]).nitems, ir.Constant(I64, 0)
        )

        def all_edges(is_tanh: bool) -> None:
            with code.loop(heads_) as (h, _), code.loop(vectors_) as (v, _):
                at = code.step(vectors_, h, v)
                own = code.sum(code.number(code.e_start, h), builder.mul(v, ir.Constant(I64, LANES)))
                factor = code.vector(code.a, at)
                sums, along = (code.variable(code.vector(x, at)) for x in (to_sum, to_a))
                with code.loop(last_, first_) as (edge, _):
                    z = code.sums(edge, at, own)
                    y = code.tanh(z) if is_tanh else None
                    slope_here = (
                        code.subtract(code.full(1.0), code.multiply(y, y)) if is_tanh else code.leaky(z, slope_)
                    )
                    y = y if is_tanh else code.multiply(z, slope_here)
                    weight = code.splat(code.number(pg, code.sum(builder.mul(edge, heads_), h)))
                    t = code.multiply(code.multiply(weight, factor), slope_here)
                    builder.store(code.add(builder.load(sums), t), sums)
                    builder.store(code.add(builder.load(along), code.multiply(weight, y)), along)
                    with builder.if_then(wanted):
                        place = code.sum(code.number(code.e_at, edge), own)
                        code.store(code.add(code.vector(to_e, place), t), to_e, place)
                code.store(builder.load(sums), to_sum, at)
                code.store(builder.load(along), to_a, at)

        with builder.if_else(code.is_tanh(args[14])) as (then, otherwise):
            with then:
                all_edges(True)
            with otherwise:
                all_edges(False)
        return context.get_dummy_value()

    return signature, generate


@njit(**INNER)
def activated_gradient(
    a, d, d_at, s, s_at, e, e_at, e_start, g, first, last, heads, vectors, slope, tanh, d_sum, d_a, d_e
):  # type: ignore[no-untyped-def]
    """Gradients of the sums under the activation, `t = g * a * activation'(z)`, for the edges first to last.

    g [edges * heads] is the gradient of the scores. `d_sum += t` and `d_a += g * activation(z)`, each [heads, vectors];
    unless d_e is empty, t is written there as e is read, and added up where heads share a vector.
    """
    _gradient(a, d, d_at, s, s_at, e, e_at, e_start, g, first, last, heads, vectors, slope, tanh, d_sum, d_a, d_e)
