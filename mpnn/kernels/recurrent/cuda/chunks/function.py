"""Recurrences in parallel chunks as a differentiable operator: the counterpart of `scan.recurrence`, which
states the formulas, and whose `in_chunks` says when it calls them.

    forward     gates | scores, solve      walk            outputs        (what it reads | is read of gates a feature)
    backward    sent (delta rule)          walk_back       values, keys

Only `walk` and `walk_back` go from chunk to chunk, with the states alone; the other kernels take all chunks at once.
The gradients need the states of all chunks, which the forward pass keeps in the type of its products: F x D numbers for
each C nodes of a head.

Products are those of tensor cores and are added up in float32: bfloat16 features in bfloat16, float16 features in TF32,
which holds their 11 bits and has the range that sums need, and float32 features in three products of TF32, which leave
an error of some 1e-6.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from mpnn.kernels.cuda.launch import start
from mpnn.kernels.cuda.schedule import power_of_two
from mpnn.kernels.cuda.tensors import on_device, with_contiguous_rows
from mpnn.kernels.derivatives import are_differentiated, gradients_again
from mpnn.kernels.recurrent import reference
from mpnn.kernels.recurrent.cuda.chunks import gradients, outputs, states, within
from mpnn.kernels.recurrent.cuda.chunks.tiles import chunks_of, count_chunks, rows

_ARGUMENTS = 6  # of a recurrence that are tensors
_WIDTH_OF_64 = 64  # the smallest width of heads with chunks of 64 nodes
_SHARED_MEMORY = 163 << 10  # of a program on an A100
_LEAST = 16  # the smallest side of a product
_GATES = 16  # heads of a program of `gates`


class Launch(NamedTuple):
    """How a kernel is compiled: columns (or features) of a program, its warps, and the stages of its loops; for `keys`
    also the columns of a step of its loop."""

    columns: int
    warps: int = 4
    stages: int = 1
    inner: int = 64


class Config(NamedTuple):
    """C nodes of a chunk, rows of the states that a walk without the delta rule holds, and each kernel's launch."""

    chunk: int = 64
    rows: int = 64
    scores: Launch = Launch(32)
    solve: Launch = Launch(64)
    walk: Launch = Launch(32, stages=3)
    walk_back: Launch = Launch(32, stages=3)
    outputs: Launch = Launch(64)
    sent: Launch = Launch(64)
    values: Launch = Launch(64)
    keys: Launch = Launch(64)


_NARROW = Config()
_NARROW_SMALL = Config(chunk=32, scores=Launch(16), keys=Launch(32))
_WIDE = Config(32, 32, *(Launch(32, stages=n, inner=32) for n in (1, 1, 2, 2, 1, 1, 1, 1)))


def config(dtype: torch.dtype, by_feature: bool, narrowest: int) -> Config:
    """The configuration for features of a dtype, with gates a feature or not, and the narrower of keys and values.

    Gates a feature need more tiles at once. With heads 16 wide, chunks of 64 nodes gave other bits for a batch than for
    a part of it (an H100, Triton 3.6).
    """
    if dtype != torch.bfloat16:
        return _WIDE
    return _NARROW_SMALL if by_feature or narrowest < _WIDTH_OF_64 else _NARROW


class _Operands(NamedTuple):
    """The arguments of a recurrence and what the kernels before `outputs` compute; None where it has no such thing."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_gate: Tensor | None
    beta: Tensor | None
    state: Tensor | None
    from_start: Tensor | None = None
    to_end: Tensor | None = None
    P: Tensor | None = None
    A: Tensor | None = None
    early_query: Tensor | None = None
    early_key: Tensor | None = None
    late_key: Tensor | None = None
    through: Tensor | None = None
    T: Tensor | None = None
    W: Tensor | None = None
    V: Tensor | None = None
    states: Tensor | None = None

    @property
    def by_feature(self) -> bool:
        return self.log_gate is not None and self.log_gate.dim() == 4


@lru_cache(maxsize=16)
def _shared_memory(device: torch.device) -> int:
    """The bytes that the stages of a loop may take: what a program can have, less a share for other tiles."""
    known = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(0.85 * getattr(known, "shared_memory_per_block_optin", _SHARED_MEMORY))


class _Pass:
    """The sizes of a recurrence, new tensors of them, and launches of kernels."""

    def __init__(self, x: _Operands, scale: float, heads: int, ends: Sequence[int], launches: bool = True) -> None:
        self.batch, self.nodes, _, self.width = x.query.shape
        self.deep = x.value.shape[-1]
        self.heads = heads
        self.scale = scale
        self.device = x.query.device
        self.config = config(x.query.dtype, x.by_feature, min(self.width, self.deep))
        self.ends = tuple(ends)
        self.launches = launches
        self.count = count_chunks(ends, self.config.chunk)
        is_narrow = x.query.dtype == torch.bfloat16
        self.dtype = torch.bfloat16 if is_narrow else torch.float32
        self.whole_width = max(_LEAST, power_of_two(self.width))
        self.levels = self.config.chunk.bit_length() - 1
        self.precision = {
            "C": self.config.chunk,
            "NARROW": tl.bfloat16 if is_narrow else None,
            "PRECISION": "tf32x3" if x.query.dtype == torch.float32 else "tf32",
        }

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def of_nodes(self, *width: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.new(self.batch, self.nodes, self.heads, *width, dtype=dtype)

    def of_chunks(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return self.new(self.batch, self.heads, self.count, *shape, dtype=dtype)

    def blocks(self, launch: Launch, width: int) -> tuple[int, int]:
        """The columns of a program, and the blocks of columns that hold a width."""
        columns = min(launch.columns, max(_LEAST, power_of_two(width)))
        return columns, -(-width // columns)

    def run(self, kernel: Any, launch: Launch, blocks: int, *arguments: Any, **sizes: int | bool) -> None:
        """One program for each batch entry, chunk, head and block."""
        programs = self.batch * self.count * self.heads * blocks
        self.launch(kernel, launch, programs, 2, self.count, *arguments, **sizes)

    def walk(self, kernel: Any, launch: Launch, has_delta: bool, *arguments: Any) -> None:
        """One program for each batch entry, document, head and block of a state."""
        columns, column_blocks = self.blocks(launch, self.deep)
        height = self.whole_width if has_delta else min(self.config.rows, self.whole_width)
        row_blocks = -(-self.width // height)
        # a stage holds rows of up to three tensors of keys' width, and of two of the values'
        stage = self.config.chunk * (3 * height + 2 * columns) * self.dtype.itemsize
        launch = launch._replace(stages=max(1, min(launch.stages, _shared_memory(self.device) // stage)))
        programs = self.batch * len(self.ends) * self.heads * row_blocks * column_blocks
        sizes = len(self.ends), self.count, row_blocks, column_blocks, self.heads, self.nodes
        self.launch(kernel, launch, programs, 3, *sizes, *arguments, ROWS=height, COLUMNS=columns)

    def launch(self, kernel: Any, launch: Launch, programs: int, tables: int, *arguments: Any, **sizes: Any) -> None:
        if not self.launches:
            return
        chunks = chunks_of(self.ends, self.config.chunk, self.device)
        operands = *chunks[:tables], *arguments
        start(kernel, programs, operands, {**self.precision, **sizes}, launch.warps, launch.stages)


def run(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None, beta: Tensor | None, state: Tensor | None,
    scale: float, heads: int, ends: tuple[int, ...], dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The arguments and results of `scan.recurrence`; `heads` of the result, `ends` of the documents, and
    the `dtype` of out."""
    out, last, _ = _forward(query, key, value, log_gate, beta, state, scale, heads, list(ends), dtype)
    return out, last


@torch.library.custom_op(
    "mpnn::recurrence_in_chunks",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? log_gate, Tensor? beta, Tensor? state, float scale, "
    "int heads, int[] ends, ScalarType dtype) -> (Tensor, Tensor, Tensor[])",
)
def _forward(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None, beta: Tensor | None, state: Tensor | None,
    scale: float, heads: int, ends: list[int], dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """out, the last state, and what the backward pass reads: an operator, so that compiled programs hold it whole."""
    return _computed(query, key, value, log_gate, beta, state, scale, heads, ends, dtype)


@_forward.register_fake
def _(query, key, value, log_gate, beta, state, scale, heads, ends, dtype):  # type: ignore[no-untyped-def]
    return _computed(query, key, value, log_gate, beta, state, scale, heads, ends, dtype, launches=False)


def _computed(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None, beta: Tensor | None, state: Tensor | None,
    scale: float, heads: int, ends: list[int], dtype: torch.dtype, launches: bool = True,
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    x = _operands(query, key, value, log_gate, beta, state)
    p = _Pass(x, scale, heads, ends, launches)
    out = p.of_nodes(p.deep, dtype=dtype)
    with on_device(query):
        x = _solved(_gated(x, p), p)
        x, last = _walked(x, p)
        _write(out, x, p)
    return out, last, [y for y in x[_ARGUMENTS:] if y is not None]


@torch.library.custom_op(
    "mpnn::recurrence_in_chunks_backward",
    mutates_args=(),
    schema="(Tensor? d_out, Tensor? d_last, Tensor query, Tensor key, Tensor value, Tensor? log_gate, Tensor? beta, "
    "Tensor? state, Tensor[] computed, float scale, int heads, int[] ends) -> Tensor[]",
)
def _backward(
    d_out: Tensor | None, d_last: Tensor | None, query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None,
    beta: Tensor | None, state: Tensor | None, computed: list[Tensor], scale: float, heads: int, ends: list[int],
) -> list[Tensor]:  # fmt: skip
    """The gradients of the inputs that are not None."""
    x = _operands(query, key, value, log_gate, beta, state, computed)
    p = _Pass(x, scale, heads, ends)
    d_out = p.of_nodes(p.deep).zero_() if d_out is None else with_contiguous_rows(d_out)
    d_last = None if d_last is None else d_last.contiguous()
    with on_device(query):
        grads = _gradients(x, p, d_out, d_last)
    inputs = query, key, value, log_gate, beta, state
    return [_summed(d, y).to(y.dtype) for d, y in zip(grads, inputs, strict=True) if y is not None and d is not None]


@_backward.register_fake
def _(d_out, d_last, query, key, value, log_gate, beta, state, computed, scale, heads, ends):  # type: ignore[no-untyped-def]
    inputs = query, key, value, log_gate, beta, state
    return [y.new_empty(y.shape) for y in inputs if y is not None]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scale, ctx.heads, ctx.ends, _ = inputs
    ctx.save_for_backward(*tensors, *output[2])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, d_out: Tensor | None, d_last: Tensor | None, _: Any) -> Any:
    inputs = ctx.saved_tensors[:_ARGUMENTS]
    computed = list(ctx.saved_tensors[_ARGUMENTS:])
    if are_differentiated((d_out, d_last)):
        equal = partial(reference.recurrence, ctx.scale, ctx.heads, tuple(ctx.ends))
        needs = ctx.needs_input_grad[:_ARGUMENTS]
        return *gradients_again(equal, inputs, needs, (d_out, d_last)), *[None] * 4
    grads = iter(_backward(d_out, d_last, *inputs, computed, ctx.scale, ctx.heads, ctx.ends))
    return *(None if x is None else next(grads) for x in inputs), None, None, None, None


_forward.register_autograd(_differentiate, setup_context=_setup)


def _operands(
    query: Tensor, key: Tensor, value: Tensor, log_gate: Tensor | None, beta: Tensor | None, state: Tensor | None,
    computed: list[Tensor] | None = None,
) -> _Operands:  # fmt: skip
    features = map(with_contiguous_rows, (query, key, value))
    numbers = (None if x is None else x.contiguous() for x in (log_gate, beta, state))
    x = _Operands(*features, *numbers)
    if computed is None:
        return x
    names: list[str] = []
    if x.by_feature:
        names += ["P", "A", "early_query", "early_key", "late_key", "through"]
    elif log_gate is not None:
        names += ["from_start", "to_end"]
    names += ["states"] if beta is None else ["T", "W", "V", "states"]
    names = [name for name in names if beta is not None or name not in ("A", "early_key")]
    return x._replace(**dict(zip(names, computed, strict=True)))


def _summed(grad: Tensor, x: Tensor) -> Tensor:
    """The gradients [B, N, H, width] of the heads that share a head of x, added up."""
    return grad if grad.shape == x.shape else grad.unflatten(2, (x.shape[2], -1)).sum(3)


def _gated(x: _Operands, p: _Pass) -> _Operands:
    """With the products of gates within chunks."""
    if x.log_gate is None:
        return x
    if not x.by_feature:
        from_start, to_end = p.of_nodes(dtype=torch.float32), p.of_nodes(dtype=torch.float32)
        together = min(_GATES, power_of_two(p.heads))
        programs = p.batch * p.count * -(-p.heads // together)
        sizes = -(-p.heads // together), p.heads, p.nodes
        p.launch(
            within.gates, Launch(together), programs, 2, p.count, *sizes, x.log_gate, from_start, to_end, BH=together
        )
        return x._replace(from_start=from_start, to_end=to_end)
    size = p.config.chunk
    has_delta = x.beta is not None
    x = x._replace(
        P=p.of_chunks(size, size),
        A=p.of_chunks(size, size, dtype=torch.float32) if has_delta else None,
        early_query=p.of_nodes(p.width),
        early_key=p.of_nodes(p.width) if has_delta else None,
        late_key=p.of_nodes(p.width),
        through=p.of_chunks(p.width, dtype=torch.float32),
    )
    features, _ = p.blocks(p.config.scores, p.width)
    query, key = rows(x.query, p.heads), rows(x.key, p.heads)
    p.run(
        within.scores, p.config.scores, 1, p.heads, p.nodes, p.width, query, key, x.log_gate, x.P, x.A, x.early_query,
        x.early_key, x.late_key, x.through, LEVELS=p.levels, FEATURES=features,
    )  # fmt: skip
    return x


def _solved(x: _Operands, p: _Pass) -> _Operands:
    """With T, W and V of the delta rule."""
    if x.beta is None:
        return x
    x = x._replace(T=p.of_chunks(p.config.chunk, p.config.chunk), W=p.of_nodes(p.width), V=p.of_nodes(p.deep))
    columns, _ = p.blocks(p.config.solve, p.deep)
    key = rows(x.key, p.heads)
    early_key = key if x.early_key is None else rows(x.early_key, p.heads)
    p.run(
        within.solve, p.config.solve, 1, p.heads, p.nodes, p.width, p.deep, key, rows(x.value, p.heads), x.log_gate,
        x.from_start, early_key, x.A, x.beta, x.T, x.W, x.V, LEVELS=p.levels, WIDTH=p.whole_width, DEEP=columns,
        EXACT="tf32x3" if p.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return x


def _walked(x: _Operands, p: _Pass) -> tuple[_Operands, Tensor]:
    """With the state before each chunk, and with e in place of V; and the last state."""
    last = p.new(p.batch, p.heads, p.width, p.deep, dtype=torch.float32)
    x = x._replace(states=p.of_chunks(p.width, p.deep))
    key = rows(x.late_key if x.by_feature else x.key, p.heads)
    value = rows(x.value if x.V is None else x.V, p.heads)
    p.walk(
        states.walk, p.config.walk, x.beta is not None, p.width, p.deep, key, value, x.W, x.beta, x.from_start,
        x.to_end, x.through, x.state, x.states, x.V, last,
    )  # fmt: skip
    return x, last


def _write(out: Tensor, x: _Operands, p: _Pass) -> None:
    columns, blocks = p.blocks(p.config.outputs, p.deep)
    query = rows(x.early_query if x.by_feature else x.query, p.heads)
    value = rows(x.value if x.V is None else x.V, p.heads)
    p.run(
        outputs.outputs, p.config.outputs, blocks, blocks, p.heads, p.nodes, p.scale, p.width, p.deep, query,
        rows(x.key, p.heads), value, x.log_gate, x.beta, x.from_start, x.P, x.states, out, WIDTH=p.whole_width,
        DEEP=columns,
    )  # fmt: skip


def _gradients(x: _Operands, p: _Pass, d_out: Tensor, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
    """Returns the gradients of query, key and value, [B, N, H, ...], and of log_gate, beta and state."""
    query, key = rows(x.query, p.heads), rows(x.key, p.heads)
    early_query = rows(x.early_query, p.heads) if x.by_feature else query
    late_key = rows(x.late_key, p.heads) if x.by_feature else key
    value = rows(x.value if x.V is None else x.V, p.heads)
    d_o = rows(d_out, p.heads)
    sizes = p.heads, p.nodes, p.scale, p.width, p.deep
    sent = None
    if x.beta is not None:
        sent = p.of_nodes(p.deep)
        columns, blocks = p.blocks(p.config.sent, p.deep)
        p.run(
            outputs.sent, p.config.sent, blocks, blocks, *sizes, query, key, x.log_gate, x.P, d_o, sent,
            WIDTH=p.whole_width, DEEP=columns,
        )  # fmt: skip
    d_states = p.of_chunks(p.width, p.deep)
    d_state = None if x.state is None else torch.empty_like(x.state, dtype=torch.float32)
    p.walk(
        states.walk_back, p.config.walk_back, x.beta is not None, p.scale, p.width, p.deep, early_query, late_key, d_o,
        sent, x.W, x.beta, x.from_start, x.to_end, x.through, d_last, d_states, d_state,
    )  # fmt: skip

    d_value = p.of_nodes(p.deep)
    R = p.of_chunks(p.config.chunk, p.config.chunk)
    d_beta = M = None
    if x.beta is not None:
        d_beta = p.of_nodes(dtype=torch.float32)
        M = torch.empty_like(R)
    columns, _ = p.blocks(p.config.values, p.deep)
    p.run(
        gradients.values, p.config.values, 1, *sizes, query, late_key, value, x.log_gate, x.beta, x.to_end, x.P, x.A,
        x.T, sent, d_o, d_states, d_value, d_beta, R, M, WIDTH=p.whole_width, DEEP=columns,
    )  # fmt: skip

    d_query, d_key = p.of_nodes(p.width), p.of_nodes(p.width)
    features, blocks = p.blocks(p.config.keys, p.width)
    columns, _ = p.blocks(Launch(p.config.keys.inner), p.deep)
    shape = x.log_gate.shape if x.by_feature else (p.batch, blocks, p.nodes, p.heads)
    d_log_gate = None if x.log_gate is None else p.new(*shape, dtype=torch.float32)
    p.run(
        gradients.keys, p.config.keys, blocks, blocks, *sizes, query, key, value, x.log_gate, x.beta, x.from_start,
        x.to_end, R, M, d_o, d_value, x.states, d_states, d_query, d_key, d_log_gate, LEVELS=p.levels,
        FEATURES=features, DEEP=columns, BY_FEATURE=x.by_feature,
    )  # fmt: skip
    if d_log_gate is not None and not x.by_feature:
        d_log_gate = d_log_gate.sum(1)
    return d_query, d_key, d_value, d_log_gate, d_beta, d_state
