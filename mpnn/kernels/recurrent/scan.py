"""Recurrences: sums over causal graphs in time linear in the nodes, as differentiable functions of tensors.

    out_i = scale sum_{j in N(i)} decay_ij <q_i, k_j> u_j          decay_ij: the gates of the nodes after j up to i

`linear_attention` has no gates and more general graphs; `recurrence` has gates a head or a feature, the delta rule, and
states that enter and leave. On CPU `mpnn/kernels/cpu/{scan,delta_rule,feature_gates}.cpp` compute them and state the
formulas. They advance in chunks of nodes. Within a chunk the logits are materialized, so that all work is matrix
products; few states are in memory. NaN in a source can reach rows of its chunk that do not attend to it. On CUDA
`cuda/chunks` next to this file computes recurrences, or node by node `cuda/recurrence.py` those that chunks do
not serve (`in_chunks`). Torch operations compute linear attention there (`_scan`), as on other devices and where no
library was compiled, which refuse recurrences.
"""

from collections.abc import Iterable, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from functools import lru_cache, partial
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.kernels.cpu import library
from mpnn.kernels.cpu.library import address
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.kernels.derivatives import Kernel, launch
from mpnn.kernels.memory import empty, zeros
from mpnn.kernels.recurrent import reference

ALL, PAST, FUTURE = range(3)
_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # in the order of scan.h
LOGITS = 36  # per row of a running sum: the average within its chunk
_MIN_COLUMNS = 32  # of an item, if one per state is too few for the threads
_CHUNKED_WIDTH = 256  # of features of a recurrence on a GPU
_CHUNKED_NODES = 16  # of a document of a recurrence on a GPU, on average; fewer leave most of a chunk empty
_FEW = 3  # nodes that are computed one after the other, not in chunks
_MIN_PARTS = 4  # of the heads in a backward pass, for any number of threads
_MOST_TOGETHER = 8  # heads with the same queries and keys in one work item, whose states are in the cache


class Block(NamedTuple):
    """Rows [first, last) that attend to sources [start, stop). `extent` is `ALL` for all of them. With as many rows as
    sources it can be `PAST`, sources up to the row's own, or `FUTURE`, sources from the row's own on."""

    first: int
    last: int
    start: int
    stop: int
    extent: int

    def transposed(self) -> "Block":
        return Block(self.start, self.stop, self.first, self.last, (ALL, FUTURE, PAST)[self.extent])


# ------------------------------------------------------------------------------------------------ linear attention


@torch.library.custom_op(
    "mpnn::linear_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, float scale, int[] blocks) -> Tensor",  # torch 2.6 infers no list
)
def linear_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[int]) -> Tensor:
    """`out_i = scale sum_j <query_i, key_j> value_j` over the in-neighbors j of i in the blocks.

    Args:
        query: [B, N, G, R, F]: R heads share each of G states. key: [B, M, G, P, F]. value: [B, M, G, P, D]; P
            sources per node. blocks: the fields of all `Block`s, concatenated.

    Returns:
        [B, N, G, R, D], float32 for 16-bit features.
    """
    scan = _compiled_scan if query.device.type == "cpu" and library.why_missing() is None else _scan
    return scan(query, key, value, scale, _unflattened(blocks))


@linear_attention.register_fake
def _(query, key, value, scale, blocks):  # type: ignore[no-untyped-def]
    if not query.device == key.device == value.device:  # torch asks here if one of them is a meta tensor
        devices = f"{query.device}, {key.device} and {value.device}"
        raise ValueError(f"query, key and value are on {devices}; move them to one device")
    return query.new_empty(*query.shape[:-1], value.shape[-1], dtype=_wide(query))


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.scale, ctx.blocks = inputs
    ctx.save_for_backward(query, key, value)


def _backward(ctx: Any, d_out: Tensor) -> Any:
    """Each gradient is linear attention again: `sum d_out . out` is symmetric in its four factors."""
    query, key, value = ctx.saved_tensors
    transposed = [number for block in _unflattened(ctx.blocks) for number in block.transposed()]
    needed = ctx.needs_input_grad
    d_query = linear_attention(d_out, value, key, ctx.scale, ctx.blocks).to(query.dtype) if needed[0] else None
    d_key = linear_attention(value, d_out, query, ctx.scale, transposed).to(key.dtype) if needed[1] else None
    d_value = linear_attention(key, query, d_out, ctx.scale, transposed).to(value.dtype) if needed[2] else None
    return d_query, d_key, d_value, None, None


linear_attention.register_autograd(_backward, setup_context=_setup)


def _unflattened(blocks: list[int]) -> list[Block]:
    size = len(Block._fields)
    return [Block(*blocks[i : i + size]) for i in range(0, len(blocks), size)]


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# ------------------------------------------------------------------------------------------------ in C++


class _Features(Structure):
    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("type", "batch", "node", "group", "head", "shared")))


class _Gradient(Structure):
    _fields_ = (("data", c_void_p), ("groups", c_int64), ("copies", c_int64))


class _Parameters(Structure):
    """`struct Scan` of scan.h, which describes the fields."""

    _fields_ = (
        *((name, c_int64) for name in ("groups", "heads", "sources", "batch", "num_dst", "width", "value_width")),
        ("scale", c_double),
        *((name, _Features) for name in ("query", "key", "value")),
        *((name, c_void_p) for name in ("out", "blocks")),
        *((name, c_int64) for name in ("num_blocks", "by_feature")),
        *((name, c_void_p) for name in ("log_gate", "beta", "state", "last")),
        ("d_out", _Features),
        ("d_last", c_void_p),
        *((name, _Gradient) for name in ("d_query", "d_key", "d_value")),
        *((name, c_void_p) for name in ("d_log_gate", "d_beta", "d_state")),
        ("unit", c_int64),
        ("together", c_int64),
    )


def _features(x: Tensor, groups: int) -> _Features:
    """x [B, N, G, P, F], or [B, N, G, F], for this many states; a group of x may serve several."""
    strides = x.stride()[:4] if x.dim() == 5 else (*x.stride()[:3], 0)
    return _Features(address(x), _TYPES.index(x.dtype), *strides, groups // x.shape[2])


def _compiled_scan(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
    batch, nodes, groups, heads, width = query.shape
    out = empty(query.new_empty(0, dtype=_wide(query)), batch, nodes, groups, heads, value.shape[-1])
    if not out.numel():
        return out
    fields, rest = _in_order(blocks, nodes)
    for first, last in rest:
        out[:, first:last] = 0
    if not key.numel():
        return out.zero_()
    query, key, value = map(_readable, (query, key, value))
    p = _Parameters(groups, heads, key.shape[3], batch, nodes, width, value.shape[-1], scale)
    p.query, p.key, p.value = (_features(x, groups) for x in (query, key, value))
    p.out = address(out)
    p.blocks = fields.ctypes.data
    p.num_blocks = len(fields)
    p.together = 1
    library.run("scan", out.dtype, p, batch * groups, _column_parts(batch * groups, p.value_width))
    return out


def _column_parts(states: int, columns: int) -> int:
    return min(-(-torch.get_num_threads() // states), -(-columns // _MIN_COLUMNS))


def _readable(x: Tensor) -> Tensor:
    """x with contiguous rows and without a pending negation; itself where possible."""
    return x.resolve_neg() if x.stride(-1) == 1 else x.contiguous().resolve_neg()


def _in_order(blocks: list[Block], nodes: int) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """The fields of each block, and whether it adds to rows that an earlier block wrote [blocks, 6]; and the rows to
    be zeros before: those that no block writes."""
    written = np.zeros(nodes + 2, bool)
    touched = np.zeros(nodes, bool)
    fields = []
    for block in blocks:
        rows = slice(block.first, block.last)
        # A block that adds to some rows may be the first at others, so that these must be 0 before.
        adds = bool(touched[rows].any())
        touched[rows] = True
        if not adds:
            written[block.first + 1 : block.last + 1] = True
        fields.append((*block, int(adds)))
    # Row r is entry r + 1. With both ends set, each gap begins and ends with a change.
    written[[0, -1]] = True
    ends = np.flatnonzero(np.diff(written))
    return np.array(fields, np.int64).reshape(-1, 6), list(zip(ends[::2].tolist(), ends[1::2].tolist(), strict=True))


# ------------------------------------------------------------------------------------------------ recurrences


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scale: float = 1.0,
    documents: Sequence[int] | None = None,
    unit: bool = False,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """A causal sum with gates, and the delta rule, on CPU and CUDA:

        S_i = exp(log_gate_i) S_(i-1) + k_i^T u_i          out_i = scale q_i S_i
        u_i = v_i, or with beta: beta_i (v_i - k_i exp(log_gate_i) S_(i-1))

    (Mamba-2 and RetNet have gates a head; GLA gates a feature; DeltaNet beta; Gated DeltaNet and KDA both.)

    Args:
        query, key: [B, N, H or fewer, F]; a head of them serves H / H_kv consecutive heads.
        value: [B, N, H or fewer, D]. All float32, float64, bfloat16 or float16.
        log_gate: [B, N, H], a gate a head, or [B, N, H, F], a gate a feature of the keys; -inf is a gate of 0, None 1.
        beta: [B, N, H], or None for a plain sum.
        state: [B, H, F, D], S before the first node; None for zeros.
        documents: lengths of documents, which sum to N. Each begins with a state of zeros, but the first with `state`.
        unit: whether queries and keys are divided by their lengths, sqrt(|x|^2 + 1e-6).
        dtype: of out. Default: float32 for 16-bit features, else that of the features.

    Returns:
        out [B, N, H, D], and S after the last node, [B, H, F, D], which is float32 for 16-bit features.

    Raises:
        ValueError: if shapes do not fit together.
        RuntimeError: if there are no compiled kernels for these tensors.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name} must have shape [B, N, H, width]; got {list(x.shape)}")
    batch, nodes, _, width = query.shape
    heads = max(x.shape[2] for x in (query, key, value, log_gate, beta) if x is not None)
    heads = max(heads, 0 if state is None else state.shape[1])
    deep = value.shape[-1]
    gates = (width,) if log_gate is not None and log_gate.dim() == 4 else ()
    check_shape("log_gate", log_gate, batch, nodes, heads, *gates, optional=True)
    check_shape("beta", beta, batch, nodes, heads, optional=True)
    check_shape("state", state, batch, heads, width, deep, optional=True)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if heads % x.shape[2] or x.shape[:2] != (batch, nodes):
            shape = f"[{batch}, {nodes}, heads that divide {heads}, width]"
            raise ValueError(f"{name} must have shape {shape}; got {list(x.shape)}")
    ends = ends_of(documents, nodes)
    on_gpu = by_triton(query)
    if not on_gpu:
        check_device(query, "recurrences")
    wide = _wide(query)
    dtype = wide if dtype is None else dtype
    chunked = on_gpu and in_chunks(query.dtype, width, deep, ends)
    if not chunked:  # which reads gates of any type
        log_gate, beta, state = (None if x is None else x.to(wide) for x in (log_gate, beta, state))
    if not value.numel() or not query.numel():
        last = query.new_zeros(batch, heads, width, deep, dtype=wide) if state is None else state.to(wide)
        used = [x for x in (query, key, value, log_gate, beta, state) if x is not None]
        nothing = torch.stack([x.flatten()[:0].sum(dtype=wide) for x in used]).sum()  # so that autograd knows them
        out = query.new_zeros(batch, nodes, heads, deep, dtype=dtype)
        return out + nothing.to(dtype), last + nothing
    # Without derivatives the kernel divides by lengths, too, and no autograd function is called.
    if not on_gpu and not is_differentiated():
        out, last = _run(query, key, value, log_gate, beta, state, scale, heads, ends, unit)
        return out.to(dtype), last
    if unit:
        query, key = (_unit(x) for x in (query, key))
    inputs = query, key, value, log_gate, beta, state
    if chunked:
        from mpnn.kernels.recurrent.cuda.chunks import function as chunks  # imports Triton

        refuse_tangents(inputs)
        return chunks.run(*inputs, scale, heads, ends, dtype)
    kernel = _KERNEL
    if on_gpu:
        from mpnn.kernels.recurrent.cuda import recurrence as node_by_node

        kernel = node_by_node.KERNEL
    options = scale, heads, ends
    out, last = launch(kernel, options, partial(reference.recurrence, *options), *inputs)
    return out.to(dtype), last


def refuse_tangents(inputs: Iterable[Tensor | None]) -> None:
    """Raises NotImplementedError if a tensor has a tangent: torch takes those of operators without a rule as zeros."""
    if forward_ad._current_level < 0:
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in inputs):
        raise NotImplementedError("recurrences have no forward-mode derivatives (jvp) on CUDA")


def in_chunks(dtype: torch.dtype, width: int, deep: int, ends: Sequence[int]) -> bool:
    """Whether a GPU runs a recurrence over documents that end there in parallel chunks: features of at most 32 bits, at
    most 256 wide, and at least 16 nodes a document on average. Others go node by node, as a step of decoding does."""
    return dtype.itemsize <= 4 and max(width, deep) <= _CHUNKED_WIDTH and ends[-1] >= _CHUNKED_NODES * len(ends)


def _unit(x: Tensor) -> Tensor:
    wide = x.to(_wide(x))
    return (wide * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


def by_triton(x: Tensor) -> bool:
    """Whether Triton's kernels compute a recurrence of this tensor."""
    return x.device.type == "cuda"


def serves(x: Tensor) -> bool:
    """Whether kernels compute recurrences of this tensor."""
    return has_kernel(x) and (by_triton(x) or library.why_missing() is None)


def has_kernel(x: Tensor) -> bool:
    """Whether there is a kernel for this tensor. On a CPU it may lack its library, of which compiled programs cannot
    ask."""
    return unavailable(x, ()) is None if by_triton(x) else x.is_cpu


def is_differentiated() -> bool:
    """Whether there may be derivatives: gradients, or tangents, which only an autograd function refuses."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def check_tensor(name: str, x: Any) -> None:
    """Raises TypeError unless `x` is a tensor of 16, 32 or 64-bit floating point."""
    if not isinstance(x, Tensor) or x.dtype not in _TYPES:
        got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"{name} must be a floating-point tensor of 16 bits or more; got {got}")


def check_shape(name: str, x: Tensor | None, *shape: int, optional: bool = False) -> None:
    """Raises ValueError if `x` has another shape, and TypeError as `check_tensor`."""
    if x is None and optional:
        return
    check_tensor(name, x)
    if x is not None and x.shape != shape:
        raise ValueError(f"{name} must have shape {list(shape)}; got {list(x.shape)}")


def ends_of(documents: Sequence[int] | None, nodes: int) -> tuple[int, ...]:
    """The node after each document that has nodes. Raises ValueError unless the lengths sum to the nodes."""
    lengths = [nodes] if documents is None else list(documents)
    if sum(lengths) != nodes or min(lengths, default=0) < 0:
        raise ValueError(f"lengths of documents must sum to the {nodes} nodes; got {lengths}")
    return tuple(accumulate(n for n in lengths if n))


def check_device(x: Tensor, what: str) -> None:
    """Raises RuntimeError if there are no compiled kernels for this tensor."""
    reason = "they are on CPU only" if x.device.type != "cpu" else library.why_missing()
    if reason is not None:
        raise RuntimeError(f"there are no compiled kernels for {what}: {reason}")


_Options = tuple[float, int, tuple[int, ...]]
"""The scale, the number of heads of the result, and the ends of documents."""


def _forward(options: _Options, needs: Sequence[bool], *tensors: Any) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    query, key, value, log_gate, beta, state = tensors
    return _run(query, key, value, log_gate, beta, state, *options), ()


def _gradients(
    options: _Options,
    needs: Sequence[bool],
    tensors: Sequence[Any],
    saved: Any,
    d_out: Tensor | None,
    d_last: Tensor | None,
) -> list[Tensor | None]:
    query, key, value, log_gate, beta, state = tensors
    p, _held = _parameters(query, key, value, log_gate, beta, state, *options)
    like = query.new_empty(0, dtype=_wide(query))
    heads = p.groups
    d_out = like.new_zeros(p.batch, p.num_dst, heads, p.value_width) if d_out is None else _readable(d_out)
    d_last = None if d_last is None else d_last.contiguous().resolve_neg()
    shared = gcd(query.shape[2], key.shape[2], value.shape[2])  # other heads share no gradient with these
    parts = min(heads, max(shared, -(-_MIN_PARTS // p.batch)))
    parts = shared if shared * p.batch >= _MIN_PARTS else parts
    copies = [parts if x.shape[2] % parts else 1 for x in (query, key, value)]
    grads = [  # a part writes the groups of its heads: all of one copy, or the only one
        (empty if n == 1 or x.shape[2] == 1 else zeros)(like, n, *x.shape)
        for n, x in zip(copies, (query, key, value), strict=True)
    ]
    rest = [None if x is None else empty(like, *x.shape) for x in (log_gate, beta, state)]
    p.d_out = _features(d_out, heads)
    p.d_last = address(d_last)
    p.d_query, p.d_key, p.d_value = (_Gradient(address(x), x.shape[3], len(x)) for x in grads)
    p.d_log_gate, p.d_beta, p.d_state = map(address, rest)
    library.run(_kernel(log_gate, beta) + "_backward", like.dtype, p, p.batch, parts)
    sums = [(x[0] if len(x) == 1 else x.sum(0)).to(query.dtype) for x in grads]
    return [*sums, *rest]


_KERNEL = Kernel(_forward, _gradients)


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    scale: float,
    heads: int,
    ends: tuple[int, ...],
    unit: bool = False,
) -> tuple[Tensor, Tensor]:
    """out and the last state. unit: only without gradients."""
    p, _held = _parameters(query, key, value, log_gate, beta, state, scale, heads, ends)
    like = query.new_empty(0, dtype=_wide(query))
    out = empty(like, p.batch, p.num_dst, heads, p.value_width)
    last = empty(like, p.batch, heads, p.width, p.value_width)
    p.out = address(out)
    p.last = address(last)
    p.unit = unit
    # A step of decoding: products of chunks would be of matrices with a single row.
    if p.num_dst <= _FEW and len(ends) == 1:
        library.run("recurrence_steps", like.dtype, p, p.batch, heads)
    elif (name := _kernel(log_gate, beta)) == "scan":
        # Heads that share queries and keys share the products of these.
        p.together = _heads_together(p.batch * heads, gcd(p.query.shared, p.key.shared))
        sets = p.batch * heads // p.together
        library.run(name, like.dtype, p, sets, _column_parts(sets, p.value_width))
    else:
        library.run(name, like.dtype, p, p.batch, heads)
    return out, last


def _heads_together(states: int, shared: int) -> int:
    """A divisor of the states that share queries and keys, which leaves work for each thread."""
    most = min(_MOST_TOGETHER, states // torch.get_num_threads())
    return max((n for n in range(1, most + 1) if shared % n == 0), default=1)


def _kernel(log_gate: Tensor | None, beta: Tensor | None) -> str:
    if log_gate is not None and log_gate.dim() == 4:
        return "feature_gates"
    return "scan" if beta is None else "delta_rule"


def _parameters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_gate: Tensor | None,
    beta: Tensor | None,
    state: Tensor | None,
    scale: float,
    heads: int,
    ends: tuple[int, ...],
) -> tuple[_Parameters, Any]:
    """Returns the parameters of both passes, and the tensors that must live as long: parameters hold addresses."""
    batch, nodes, _, width = query.shape
    p = _Parameters(heads, 1, 1, batch, nodes, width, value.shape[-1], scale)
    features = [_readable(x) for x in (query, key, value)]
    p.query, p.key, p.value = (_features(x, heads) for x in features)
    numbers = [None if x is None else x.contiguous().resolve_neg() for x in (log_gate, beta, state)]
    p.log_gate, p.beta, p.state = map(address, numbers)
    p.by_feature = log_gate is not None and log_gate.dim() == 4
    blocks = _blocks(ends)
    p.blocks = blocks.ctypes.data
    p.num_blocks = len(blocks)
    return p, (features, numbers, blocks)


@lru_cache(maxsize=16)
def _blocks(ends: tuple[int, ...]) -> NDArray[np.int64]:
    """The fields of the blocks of documents that end there."""
    return np.array([(a, b, a, b, PAST, 0) for a, b in zip((0, *ends), ends, strict=False)], np.int64)


# ------------------------------------------------------------------------------------------------ in torch


def _scan(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
    batch, nodes, groups, heads = query.shape[:-1]
    deep = value.shape[-1]
    wide = _wide(query)
    out = query.new_zeros(batch, nodes, groups, heads, deep, dtype=wide)
    step = _chunk(batch * groups)

    def add(first: int, last: int, part: Tensor) -> None:
        out[:, first:last] += part.view(batch, groups, last - first, heads, deep).transpose(1, 2)

    for block in blocks:
        state = query.new_zeros(batch * groups, query.shape[-1], deep, dtype=wide)
        if block.extent == ALL:
            for start, stop in _steps(block.start, block.stop, step):
                state.baddbmm_(_cut(key, start, stop, wide).mT, _cut(value, start, stop, wide), alpha=scale)
            for first, last in _steps(block.first, block.last, step):
                add(first, last, _cut(query, first, last, wide) @ state)
            continue
        shift = block.start - block.first
        rows = _steps(block.first, block.last, step)
        # A row of FUTURE attends to sources after it, so that its state grows from the end.
        for first, last in rows if block.extent == PAST else reversed(rows):
            q = _cut(query, first, last, wide)
            k, v = (_cut(x, first + shift, last + shift, wide) for x in (key, value))
            # The state holds the chunks before. Pairs within this chunk are materialized.
            logits = _mask(q @ k.mT, last - first, block.extent)
            add(first, last, torch.baddbmm(q @ state, logits, v, alpha=scale))
            state.baddbmm_(k.mT, v, alpha=scale)
    return out


def _steps(first: int, last: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, last)) for a in range(first, last, step)]


def _chunk(states: int) -> int:
    """Rows per chunk: more if fewer states advance together, to outweigh the overhead of a step."""
    return min(max(512 // max(states, 1), 64), 256)


def _cut(x: Tensor, first: int, last: int, wide: torch.dtype) -> Tensor:
    """Nodes first to last of x [B, N, G, P, F] as [B * G, nodes * P, F]."""
    return x[:, first:last].to(wide).transpose(1, 2).flatten(2, 3).flatten(0, 1)


def _mask(logits: Tensor, nodes: int, extent: int) -> Tensor:
    """Logits [B * G, nodes * R, nodes * P], with zeros where the pair is not an edge."""
    hidden = torch.ones(nodes, nodes, dtype=torch.bool, device=logits.device)
    hidden = hidden.triu(1) if extent == PAST else hidden.tril(-1)
    view = logits.unflatten(2, (nodes, logits.shape[2] // nodes)).unflatten(1, (nodes, logits.shape[1] // nodes))
    return view.masked_fill(hidden[:, None, :, None], 0.0).view_as(logits)
