"""The selective scan of Mamba-1 in parallel chunks, by Triton: the counterpart of `../selective_scan.py`, which
states the formulas. Each channel and state has a gate of its own, so nothing here is a product of matrices.

    forward     passed (from zeros)    walk    passed (from the states)
    backward    passed, walk           passed (of gradients, from the end), walk (from the end)       gradients

`passed` goes through the nodes of each chunk, all chunks at once. Its first call finds what a chunk adds to the state
after it, `walk` joins these from chunk to chunk, and its second call writes y. Because a gate is `exp(dt A)`, the
product of the gates of a chunk is that of a sum of steps. The backward pass computes states again instead of keeping
them.

`gradients` needs the states of all nodes in the order from the last. So it holds those of a few nodes, which it
computes from the state before them.

A program holds a tile [states, channels] of a chunk (in `walk` of a document), and goes from node to node (from chunk
to chunk). Called by `mpnn.kernels.recurrent.selective`.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mpnn.kernels.cuda.launch import start
from mpnn.kernels.cuda.schedule import power_of_two
from mpnn.kernels.cuda.tensors import on_device, real
from mpnn.kernels.derivatives import are_differentiated, gradients_again
from mpnn.kernels.recurrent import reference
from mpnn.kernels.recurrent.cuda.chunks.tiles import chunks_of, count_chunks, of_document

_NODES = 32  # of a chunk
_FEW = 4  # nodes whose states `gradients` holds
_CHANNELS = 32  # of a program, which is one warp
_TOGETHER = 16  # chunks that a step of the walk loads at once
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _then(gate, sent, later_gate, later_sent):
    """`h <- gate h + sent` followed by the same of a later node."""
    return gate * later_gate, later_gate * sent + later_sent


@triton.jit
def _row(x, at, channels, d, mask, REAL: tl.constexpr):
    return tl.load(x + at * channels + d, mask=mask, other=0.0).to(REAL)[None, :]


@triton.jit
def _column(x, at, states, s, mask, REAL: tl.constexpr):
    return tl.load(x + at * states + s, mask=mask, other=0.0).to(REAL)[:, None]


@triton.jit
def _place(starts, stops, chunks, blocks, nodes, C: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr):
    """The share of a program in a grid of batch entries, chunks and blocks of channels, the last the fastest: its
    block, entry and chunk, the first node of the chunk and the node after its last, and its channels and states."""
    share = tl.program_id(0)
    block = share % blocks
    c = share // blocks % chunks
    b = (share // blocks // chunks).to(tl.int64)
    first = c * C
    stop = tl.minimum(first + C, nodes)
    if starts is not None:
        first = tl.load(starts + c)
        stop = tl.load(stops + c)
    return block, b, c, first, stop, block * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, STATES)


@triton.jit
def passed(
    starts, stops, chunks, blocks, nodes, channels, states, x, dt, A, B, C_in, before, y, within, after, total,
    C: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, FEW: tl.constexpr, BACK: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """From the states `before` chunks [batch, chunks, states, channels]: y [batch, nodes, channels], or the states
    `within` chunks before each group of FEW nodes [batch, chunks, C / FEW, states, channels]. Or from zeros: the state
    `after` each chunk, and the sum of its steps [batch, chunks, channels]; with `BACK`, where x is the gradient of y
    and B is C, the gradient of the state before each chunk."""
    _, b, c, first, stop, d, s = _place(starts, stops, chunks, blocks, nodes, C, CHANNELS, STATES)
    is_channel = d < channels
    is_state = s < states
    exists = is_state[:, None] & is_channel[None, :]
    cell = s[:, None] * channels + d[None, :]
    rate = tl.load(A + cell, mask=exists, other=0.0) * LOG2_E
    place = (b * chunks + c) * states * channels + cell
    h, steps = tl.zeros([STATES, CHANNELS], REAL), tl.zeros([1, CHANNELS], REAL)
    if before is not None:
        h = tl.load(before + place, mask=exists, other=0.0)
    for n in range(first, stop):
        if within is not None:  # noqa: SIM102 - a condition of the compilation
            if (n - first) % FEW == 0:
                group = (b * chunks + c) * (C // FEW) + (n - first) // FEW
                tl.store(within + group * states * channels + cell, h, mask=exists)
        at = b * nodes + (first + stop - 1 - n if BACK else n)
        step = _row(dt, at, channels, d, is_channel, REAL)
        one = _row(x, at, channels, d, is_channel, REAL)
        key = _column(B, at, states, s, is_state, REAL)
        gate = tl.exp2(rate * step)
        h = gate * (h + key * one) if BACK else gate * h + key * (step * one)
        if y is not None:
            query = _column(C_in, at, states, s, is_state, REAL)
            tl.store(y + at * channels + d, tl.sum(h * query, 0), mask=is_channel)
        steps += step
    if after is not None:
        tl.store(after + place, h, mask=exists)
        tl.store(total + (b * chunks + c) * channels + d[None, :], steps, mask=is_channel[None, :])


@triton.jit
def walk(
    first_chunk, documents, chunks, blocks, channels, states, total, A, sent, entering, out, leaving,
    TOGETHER: tl.constexpr, CHANNELS: tl.constexpr, BACK: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """out, the state before each chunk; with `BACK` the gradient of the state after it. `entering` is the state of the
    document that is walked first, `leaving` that after the last one; each may be None."""
    share = tl.program_id(0)
    d = share % blocks * CHANNELS + tl.arange(0, CHANNELS)
    s = share // blocks % states
    share = share // blocks // states
    document = share % documents
    b = (share // documents).to(tl.int64)
    c0 = 0
    count = chunks
    if first_chunk is not None:
        c0 = tl.load(first_chunk + document)
        count = tl.load(first_chunk + document + 1) - c0
    is_channel = d < channels
    k = tl.arange(0, TOGETHER)
    rate = tl.load(A + s * channels + d, mask=is_channel, other=0.0)[None, :]
    cell = s * channels + d
    state = tl.zeros([CHANNELS], REAL)
    if entering is not None:
        begins = of_document(document, documents - 1 if BACK else 0, is_channel)
        state = tl.load(entering + b * states * channels + cell, mask=begins, other=0.0)
    for k0 in range(0, count + 1, TOGETHER):
        # Place i has the state after i chunks.
        i = k0 + k
        chunk = c0 + (count - i if BACK else i - 1)
        exists = ((i > 0) & (i <= count))[:, None] & is_channel[None, :]
        row = b * chunks + chunk[:, None]
        gate = tl.exp2(rate * LOG2_E * tl.load(total + row * channels + d[None, :], mask=exists, other=0.0))
        one = tl.load(sent + (row * states + s) * channels + d[None, :], mask=exists, other=0.0)
        one += tl.where(k[:, None] == 0, gate * state[None, :], 0.0)
        all_states = tl.associative_scan((gate, one), 0, _then)[1]
        target = (row + (-1 if BACK else 1)) * states + s
        tl.store(out + target * channels + d[None, :], all_states, mask=(i < count)[:, None] & is_channel[None, :])
        state = tl.sum(tl.where(k[:, None] == TOGETHER - 1, all_states, 0.0), 0)
    if leaving is not None:
        ends = of_document(document, 0 if BACK else documents - 1, is_channel)
        tl.store(leaving + b * states * channels + cell, state, mask=ends)


@triton.jit
def gradients(
    starts, stops, chunks, blocks, nodes, channels, states, x, dt, A, B, C_in, d_y, within, d_after, d_x, d_dt, d_A,
    d_B, d_C, size, C: tl.constexpr, CHANNELS: tl.constexpr, STATES: tl.constexpr, FEW: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    """d_x and d_dt [batch, nodes, channels]; of each chunk d_A [batch, chunks, states, channels]; of each block of
    channels d_B and d_C [blocks, batch, nodes, states], `size` numbers a block. With g the gradient of h and
    `read_t = gate_t h_(t-1)`, the gradient of a step is `x <g, B> + <A, g read>`."""
    block, b, c, first, stop, d, s = _place(starts, stops, chunks, blocks, nodes, C, CHANNELS, STATES)
    is_channel = d < channels
    is_state = s < states
    exists = is_state[:, None] & is_channel[None, :]
    cell = s[:, None] * channels + d[None, :]
    rate = tl.load(A + cell, mask=exists, other=0.0)
    place = (b * chunks + c) * states * channels + cell
    Z = tl.load(d_after + place, mask=exists, other=0.0)
    d_rate = tl.zeros([STATES, CHANNELS], REAL)
    groups = tl.cdiv(stop - first, FEW)
    for k in range(groups):
        group = groups - 1 - k
        start = first + group * FEW
        h = tl.load(within + ((b * chunks + c) * (C // FEW) + group) * states * channels + cell, mask=exists, other=0.0)
        reads = ()
        for j in tl.static_range(FEW):
            at = b * nodes + start + j
            inside = start + j < stop
            step = _row(dt, at, channels, d, is_channel & inside, REAL)
            stored = step * _row(x, at, channels, d, is_channel & inside, REAL)
            read = tl.exp2(rate * LOG2_E * step) * h
            h = read + _column(B, at, states, s, is_state & inside, REAL) * stored
            reads = reads + (read,)  # noqa: RUF005 - Triton unpacks no tuples
        for i in tl.static_range(FEW - 1, -1, -1):
            at = b * nodes + start + i
            inside = start + i < stop
            step = _row(dt, at, channels, d, is_channel & inside, REAL)
            one = _row(x, at, channels, d, is_channel & inside, REAL)
            d_out = _row(d_y, at, channels, d, is_channel & inside, REAL)
            key = _column(B, at, states, s, is_state & inside, REAL)
            g = Z + d_out * _column(C_in, at, states, s, is_state & inside, REAL)
            read = reads[i]
            by_gate = g * read
            d_rate += step * by_gate
            d_stored = tl.sum(g * key, 0)[None, :]
            d_step = one * d_stored + tl.sum(rate * by_gate, 0)[None, :]
            row = at * channels + d[None, :]
            column = block.to(tl.int64) * size + at * states + s
            tl.store(d_x + row, step * d_stored, mask=(is_channel & inside)[None, :])
            tl.store(d_dt + row, d_step, mask=(is_channel & inside)[None, :])
            tl.store(d_B + column, tl.sum(g * (step * one), 1), mask=is_state & inside)
            tl.store(d_C + column, tl.sum((read + key * (step * one)) * d_out, 1), mask=is_state & inside)
            Z = tl.exp2(rate * LOG2_E * step) * g
    tl.store(d_A + place, d_rate, mask=exists)


class _Pass:
    """The sizes of a scan, and launches of its kernels."""

    def __init__(self, x: Tensor, A: Tensor, ends: list[int]) -> None:
        self.batch, self.nodes, self.channels = x.shape
        self.states = len(A)
        self.dtype, self.real = real(x.dtype)
        self.tables = chunks_of(tuple(ends), _NODES, x.device)
        self.documents = len(ends)
        self.chunks = count_chunks(ends, _NODES)
        self.blocks = -(-self.channels // _CHANNELS)

    def of_chunks(self, x: Tensor, groups: int = 1) -> Tensor:
        return x.new_empty(self.batch, self.chunks * groups, self.states, self.channels, dtype=self.dtype)

    def run(self, kernel: Any, *arguments: Any, **options: int) -> None:
        """A program for each chunk and block of channels."""
        sizes = self.chunks, self.blocks, self.nodes, self.channels, self.states
        options |= {"C": _NODES, "FEW": _FEW, "STATES": power_of_two(self.states)}
        self.launch(kernel, self.batch * self.chunks, *self.tables[:2], *sizes, *arguments, **options)

    def launch(self, kernel: Any, parts: int, *arguments: Any, **options: int) -> None:
        constants = {"CHANNELS": _CHANNELS, "REAL": self.real, **options}
        start(kernel, parts * self.blocks, arguments, constants, warps=1, stages=1)

    def walked(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, entering: Tensor | None, leaving: Tensor | None, back: bool
    ) -> Tensor:
        """The state before each chunk or, with `back`, the gradient of that after it."""
        sent, out = self.of_chunks(x), self.of_chunks(x)
        total = out.new_empty(self.batch, self.chunks, self.channels)
        self.run(passed, x, dt, A, B, None, None, None, None, sent, total, BACK=back)
        sizes = self.documents, self.chunks, self.blocks, self.channels, self.states
        arguments = total, A, sent, entering, out, leaving
        parts = self.batch * self.documents * self.states
        self.launch(walk, parts, self.tables.first, *sizes, *arguments, TOGETHER=_TOGETHER, BACK=back)
        return out


@torch.library.custom_op(
    "mpnn::selective_scan_in_chunks",
    mutates_args=(),
    schema="(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor state, int[] ends) -> (Tensor, Tensor)",
)
def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor, ends: list[int]
) -> tuple[Tensor, Tensor]:
    """y, and the last state.

    Args:
        x: [batch, N, channels], of any type, as B and C [batch, N, S]. dt, as x, A [S, channels] and state [batch, S,
            channels] have the type of the arithmetic: float64 for float64, else float32. ends: of the documents.
    """
    x, dt, A, B, C, state = (tensor.contiguous() for tensor in (x, dt, A, B, C, state))
    p = _Pass(x, A, ends)
    y, last = torch.empty_like(dt), torch.empty_like(state)
    with on_device(x):
        before = p.walked(x, dt, A, B, state, last, back=False)
        p.run(passed, x, dt, A, B, C, before, y, None, None, None, BACK=False)
    return y, last


@scan.register_fake
def _(x, dt, A, B, C, state, ends):  # type: ignore[no-untyped-def]
    return dt.new_empty(dt.shape), state.new_empty(state.shape)


@torch.library.custom_op(
    "mpnn::selective_scan_in_chunks_backward",
    mutates_args=(),
    schema="(Tensor d_y, Tensor? d_last, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor state, int[] ends)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    d_y: Tensor, d_last: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Tensor,
    ends: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    d_y, x, dt, A, B, C, state = (tensor.contiguous() for tensor in (d_y, x, dt, A, B, C, state))
    d_last = None if d_last is None else d_last.contiguous()
    p = _Pass(x, A, ends)
    d_x = torch.empty_like(dt)
    d_dt = torch.empty_like(dt)
    d_A = p.of_chunks(x)
    d_state = torch.empty_like(state)
    d_B, d_C = dt.new_empty(2, p.blocks, *B.shape)
    with on_device(x):
        before = p.walked(x, dt, A, B, state, None, back=False)
        d_after = p.walked(d_y, dt, A, C, d_last, d_state, back=True)
        within = p.of_chunks(x, _NODES // _FEW)
        p.run(passed, x, dt, A, B, None, before, None, within, None, None, BACK=False)
        p.run(gradients, x, dt, A, B, C, d_y, within, d_after, d_x, d_dt, d_A, d_B, d_C, B.numel())
    return d_x.to(x.dtype), d_dt, d_A.sum((0, 1)), d_B.sum(0).to(B.dtype), d_C.sum(0).to(C.dtype), d_state


@_backward.register_fake
def _(d_y, d_last, x, dt, A, B, C, state, ends):  # type: ignore[no-untyped-def]
    return tuple(y.new_empty(y.shape) for y in (x, dt, A, B, C, state))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.ends = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_y: Tensor | None, d_last: Tensor | None) -> Any:
    tensors = ctx.saved_tensors
    if are_differentiated((d_y, d_last)):
        equal = partial(reference.selective_scan, ctx.ends)
        return *gradients_again(equal, tensors, ctx.needs_input_grad[:6], (d_y, d_last)), None
    d_y = torch.zeros_like(tensors[1]) if d_y is None else d_y
    return *_backward(d_y, d_last, *tensors, ctx.ends), None


scan.register_autograd(_differentiate, setup_context=_setup)
