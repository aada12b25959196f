"""A transformer layer in one call; float32 on CPU, without gradients.

Weights are read where they lie, in each call: nothing of a model is kept, so nothing can be outdated.
`mpnn/kernels/cpu/encoder_layer.cpp` states the formulas and computes them.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from mpnn.kernels.cpu import library, threads
from mpnn.kernels.cpu.library import address, fields
from mpnn.kernels.parts import Parts

ACTIVATIONS = "identity", "gelu", "gelu_tanh", "relu", "quick_gelu", "silu"
"""In the order of `panels::Activation`."""

MAPS = "queries", "keys", "values", "output", "hidden columns", "back", "gates"
"""What messages call the maps of a layer, in their order."""

_MAPS = c_void_p * 7
_STRIDES = c_int64 * 7
_NORMS = c_void_p * 2


class _Parameters(Structure):
    """`struct EncoderLayer` of encoder_layer.cpp, which describes the fields."""

    _fields_ = (
        *fields(c_int64, "width heads kv_heads head_width hidden pre_norm rms_norm gated activation"),
        *fields(c_double, "scale"),
        *fields(c_double * 2, "epsilon"),
        *fields(_MAPS, "weight"),
        *fields(_STRIDES, "row column"),
        *fields(_MAPS, "bias"),
        *fields(_NORMS, "norm_weight norm_bias"),
        *fields(c_void_p, "x y cos sin keys values documents"),
        *fields(c_int64, "count causal"),
    )


@dataclass(frozen=True)
class Form:
    """The sizes of a layer, and what it computes.

    epsilons: of the norms of attention and of the network. kv_heads, head_width: None: as many as `heads`, and `width /
    heads`. rms_norm: norms divide by the root of the mean square, and subtract no mean. gated: there is a map of gates.
    """

    width: int
    heads: int
    hidden: int
    activation: str
    pre_norm: bool
    epsilons: tuple[float, float]
    scale: float
    kv_heads: int | None = None
    head_width: int | None = None
    rms_norm: bool = False
    gated: bool = False

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """The shapes [out, in] of the maps."""
        sizes = _sizes(self)
        inner = sizes.heads * sizes.head_width
        of_keys = (sizes.kv_heads * sizes.head_width, self.width)
        up = self.hidden, self.width
        maps = [(inner, self.width), of_keys, of_keys, (self.width, inner), up, (self.width, self.hidden)]
        return [*maps, up] if self.gated else maps


class Weights(NamedTuple):
    """The maps of queries, keys, values, output, to hidden columns and back, and of gates, [out, in]; their biases; the
    weights and the biases of both norms. All are float32, on the CPU, and contiguous, or transposed where they are
    maps; each bias, and each of a norm, may be None."""

    maps: tuple[Tensor, ...]
    biases: tuple[Tensor | None, ...]
    norm_weights: tuple[Tensor | None, ...]
    norm_biases: tuple[Tensor | None, ...]


def refusal(form: Form) -> str | None:
    """The reason why no kernel computes a layer of these sizes here, or None."""
    if (why := library.why_missing()) is not None:
        return why
    p = _sizes(form)
    if _function("fits")(ctypes.addressof(p)):
        return None
    least = _least_head_width()
    if p.head_width % least:
        return f"the compiled call takes heads of {least} numbers or a multiple; these have {p.head_width}"
    return f"there is no kernel for these sizes: {form}"


@cache
def _least_head_width() -> int:
    """The least width of a head of this processor's kernel, of which the others are multiples."""
    for width in range(1, 65):
        p = _Parameters(256, 64, 64, width, 256)
        if _function("fits")(ctypes.addressof(p)):
            return width
    return 1


def _sizes(form: Form) -> _Parameters:
    heads = form.heads if form.kv_heads is None else form.kv_heads
    head_width = form.head_width
    if head_width is None:
        head_width = 0 if form.width % form.heads else form.width // form.heads
    kind = form.pre_norm, form.rms_norm, form.gated, ACTIVATIONS.index(form.activation)
    return _Parameters(form.width, form.heads, heads, head_width, form.hidden, *kind)


class Places:
    """Where a layer finds its weights in tensors of known sizes and strides: from call to call, only addresses change.

    Args:
        layer: the layer.
        weights: the weights of a call.
        tensors: those that hold them.
        sources: for each map its number among the tensors, from 1 on, or 0 for a map that is not there; then in the
            same way for each bias (`len(MAPS)` each), for the weights of both norms and for their biases.

    Raises:
        TypeError, ValueError: if the layer cannot read the weights, or one of them does not lie in its tensor.
    """

    def __init__(
        self, layer: EncoderLayer, weights: Weights, tensors: Sequence[Tensor], sources: Sequence[int]
    ) -> None:
        p = _Parameters.from_buffer_copy(layer._p)
        layer._point_to(weights, p)
        self._p = p
        self._sources = sources
        pointers = [at or 0 for part in (p.weight, p.bias, p.norm_weight, p.norm_bias) for at in part]
        starts = [0, *map(Tensor.data_ptr, tensors)]  # the zero stands for a tensor that is not there
        # What computes a weight returns memory that is free again, at an address that means nothing in another call.
        memory = [range(1), *map(_memory, tensors)]
        if not all(at in memory[k] for at, k in zip(pointers, sources, strict=True)):
            raise TypeError("a weight of the layer does not lie in the tensor of its map or norm")
        self._offsets = [at - starts[k] for at, k in zip(pointers, sources, strict=True)]

    def read(self, tensors: Sequence[Tensor]) -> Located | None:
        """Returns the weights in tensors of the same sizes and strides; None if the memory of one was freed."""
        starts = [0, *map(Tensor.data_ptr, tensors)]
        if 0 in starts[1:]:
            return None
        return Located(self._p, list(map(add, map(starts.__getitem__, self._sources), self._offsets)))


def _memory(x: Tensor) -> range:
    """The addresses of the storage of a tensor."""
    storage = x.untyped_storage()
    return range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


class Located(NamedTuple):
    """Weights by their addresses, in the order of the fields of a call, and the parameters in which their strides are.
    The tensors must live until the call has ended."""

    parameters: _Parameters
    addresses: list[int]

    def write(self) -> _Parameters:
        """Returns the parameters of one call."""
        p = _Parameters.from_buffer_copy(self.parameters)
        _SEVEN.pack_into(p, _Parameters.weight.offset, *self.addresses[:7])
        _ELEVEN.pack_into(p, _Parameters.bias.offset, *self.addresses[7:])
        return p


_SEVEN = struct.Struct("7Q")
_ELEVEN = struct.Struct("11Q")  # biases, and weights and biases of norms, which are neighbors


class EncoderLayer:
    """A layer without weights: they are read where they lie, in each call.

    Raises:
        ValueError: if there is no kernel for these sizes.
    """

    def __init__(self, form: Form) -> None:
        if (why := refusal(form)) is not None:
            raise ValueError(why)
        self.form = form
        p = _sizes(form)
        p.scale = form.scale
        p.epsilon = (c_double * 2)(*form.epsilons)
        self._p = p
        shapes = form.shapes
        width = torch.Size([form.width])
        self._map_shapes = list(map(torch.Size, shapes))
        self._vector_shapes = [*(torch.Size([rows]) for rows, _ in shapes), *[width] * 4]

    def __call__(
        self,
        x: Tensor,
        weights: Weights | Located,
        parts: Parts,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Returns the states [..., width] of rows x [..., width], contiguous, which are those of the parts.

        cos_sin: cosine and sine of the angles by which queries and keys are rotated, [rows, head width], contiguous.
        states: where keys and values of each part are written, [heads of keys, rows, width of a head].

        Raises:
            TypeError: if a tensor is not one of float32 in this process's memory.
            ValueError: if x has other rows than the parts, or another width than the layer; if weights, cos_sin or
                states have other sizes, or do not lie in memory as the kernel reads them.
            MemoryError: if there was no memory for intermediate results.
        """
        p = weights.write() if isinstance(weights, Located) else _Parameters.from_buffer_copy(self._p)
        rows = parts.num_nodes
        if x.shape[-1] != p.width or x.numel() != rows * p.width:
            raise ValueError(f"x must hold {rows} rows of {p.width} numbers; got {list(x.shape)}")
        p.x = _address_of_rows("x", x)
        y = torch.empty_like(x)
        p.y = y.data_ptr()
        if cos_sin is not None:
            if any(each.numel() != rows * p.head_width for each in cos_sin):
                raise ValueError(f"cos_sin must be [{rows}, {p.head_width}]; got {list(cos_sin[0].shape)}")
            p.cos, p.sin = (_address_of_rows("cos_sin", each) for each in cos_sin)
        if states is not None:
            if any(state.numel() != p.kv_heads * rows * p.head_width for state in states):
                shape = [p.kv_heads, rows, p.head_width]
                raise ValueError(f"states must be {shape}; got {list(states[0].shape)}")
            p.keys, p.values = (_address_of_rows("states", state) for state in states)
        p.documents = parts.address
        p.count = parts.count
        p.causal = parts.is_causal
        with torch._C._profiler._RecordFunctionFast("mpnn::layer"):
            if isinstance(weights, Weights):
                self._point_to(weights, p)
            if not _function("run")(ctypes.addressof(p), *_crew()):
                raise MemoryError("no memory for the intermediate results of a layer")
        return y

    def reads(self, weights: Weights) -> bool:
        """Whether the kernel can read these weights: plain tensors of its sizes that lie in memory as it reads them."""
        maps, biases, norm_weights, norm_biases = weights
        vectors = [*biases, *norm_weights, *norm_biases]
        present = [t for t in vectors if t is not None]
        expected = [shape for t, shape in zip(vectors, self._vector_shapes, strict=True) if t is not None]
        return (
            are_plain([*maps, *present])
            and list(map(_shape_of, maps)) == self._map_shapes
            and list(map(_shape_of, present)) == expected
            and all(1 in stride for stride in map(Tensor.stride, maps))
            and all(map(Tensor.is_contiguous, present))
        )

    def _point_to(self, weights: Weights, p: _Parameters) -> None:
        """Writes the addresses and strides of the weights into `p`.

        Raises:
            TypeError, ValueError: if the kernel cannot read one of them.
        """
        if not self.reads(weights):
            self._refuse(weights)
        maps, biases, norm_weights, norm_biases = weights
        strides = list(map(Tensor.stride, maps))
        p.weight = _MAPS(*map(_address, maps))
        p.row = _STRIDES(*[row for row, _ in strides])
        p.column = _STRIDES(*[column for _, column in strides])
        p.bias = _MAPS(*map(_address, biases))
        p.norm_weight = _NORMS(*map(_address, norm_weights))
        p.norm_bias = _NORMS(*map(_address, norm_biases))

    def _refuse(self, weights: Weights) -> None:
        """Raises the error of the first weight that the kernel cannot read."""
        names = [f"the {kind} of the map {m}" for kind in ("weight", "bias") for m in MAPS[: len(self._map_shapes)]]
        names += [
            f"the {kind} of the norm of {part}" for kind in ("weight", "bias") for part in ("attention", "the network")
        ]
        tensors = [*weights.maps, *weights.biases, *weights.norm_weights, *weights.norm_biases]
        shapes = [*self._map_shapes, *self._vector_shapes]
        for name, tensor, shape in zip(names, tensors, shapes, strict=True):
            if tensor is None:
                continue
            _refuse_unless_plain(name, tensor, shape)
            if 1 not in tensor.stride():
                how = "contiguous or transposed" if len(shape) == 2 else "contiguous"
                raise ValueError(f"{name} must be {how}; its strides are {tensor.stride()}")


_PLAIN = {Tensor, Parameter}
_FLOAT32 = {torch.float32}
_dtype_of: Callable[[Tensor], torch.dtype] = Tensor.dtype.__get__  # type: ignore[attr-defined]
_shape_of: Callable[[Tensor], torch.Size] = Tensor.shape.__get__  # type: ignore[attr-defined]
_is_cpu: Callable[[Tensor], bool] = Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def are_plain(tensors: Sequence[Any]) -> bool:
    """Whether the numbers of these tensors are float32 in this process's memory; addresses are checked apart."""
    return (
        _PLAIN.issuperset(map(type, tensors))
        and _FLOAT32.issuperset(map(_dtype_of, tensors))
        and all(map(_is_cpu, tensors))
        and not any(map(Tensor.is_neg, tensors))
    )


def _address(x: Tensor | None) -> int | None:
    """The address of a tensor that `are_plain`: `library.address`, sooner for parameters."""
    if type(x) is Parameter:
        return x.data_ptr() or address(x)
    return address(x)


def _refuse_unless_plain(name: str, x: Tensor, shape: torch.Size | None = None) -> None:
    """Raises TypeError or ValueError if `x` is not a plain tensor of float32 on the CPU, or has another shape."""
    if type(x) not in _PLAIN:
        raise TypeError(f"{name} must be a plain tensor; got a {type(x).__name__}")
    if x.dtype is not torch.float32:
        raise TypeError(f"{name} must be float32; got {x.dtype}")
    if shape is not None and x.shape != shape:
        raise ValueError(f"{name} must be {list(shape)}; got {list(x.shape)}")
    address(x)
    if x.is_neg():
        raise ValueError(f"{name} is a view of negated numbers; call .resolve_neg()")


def _refuse_unless_contiguous(name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous; its strides are {x.stride()}")


def _address_of_rows(name: str, x: Tensor) -> int | None:
    """The address of contiguous rows.

    Raises:
        TypeError, ValueError: if the kernel cannot read them.
    """
    if are_plain([x]) and x.is_contiguous() and (at := x.data_ptr()):
        return at
    _refuse_unless_plain(name, x)
    _refuse_unless_contiguous(name, x)
    return address(x)


def _crew() -> tuple[int | None, bool, int]:
    """torch's threads, as the kernels take them."""
    count = torch.get_num_threads()
    team = threads.team() if count > 1 else None
    return (None, False, 1) if team is None else (team.address, team.forks, count)


@cache
def _function(name: str) -> Any:
    function = library._load()[f"encoder_layer_{name}"]
    function.restype = c_int64
    function.argtypes = [c_void_p] if name == "fits" else [c_void_p, c_void_p, c_int64, c_int64]
    return function
