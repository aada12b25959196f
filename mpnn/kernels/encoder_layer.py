"""A transformer layer in one call, with weights that are packed once; float32 on CPU, without gradients.

`mpnn/kernels/cpu/encoder_layer.cpp` states the formulas and computes them.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mpnn.kernels.cpu import library, threads
from mpnn.kernels.cpu.library import address, fields

ACTIVATIONS = "identity", "gelu", "gelu_tanh", "relu", "quick_gelu", "silu"
"""In the order of `panels::Activation`."""

_NO_MEMORY = 1
_OUTDATED = 2
_MAPS = c_void_p * 7
_STRIDES = c_int64 * 7


class _Parameters(Structure):
    """`struct EncoderLayer` of encoder_layer.cpp, which describes the fields."""

    _fields_ = (
        *fields(c_int64, "width heads kv_heads head_width hidden pre_norm rms_norm gated activation"),
        *fields(c_double, "scale"),
        *fields(c_double * 2, "epsilon"),
        *fields(_MAPS, "weight"),
        *fields(_STRIDES, "row column"),
        *fields(_MAPS, "bias"),
        *fields(c_void_p * 2, "norm_weight norm_bias"),
        *fields(c_void_p, "packed"),
        *fields(c_int64, "calls"),
        *fields(c_void_p, "x y cos sin keys values documents"),
        *fields(c_int64, "count causal"),
    )


class Documents:
    """The documents of a batch, one behind the other: the number of rows of each, and the keys that its rows attend
    to, `keys` of them from the row `first_key` of the document on. In causal documents, a row attends to those of them
    up to itself.

    Raises:
        ValueError: if a document has no keys, or keys that are not among its rows.
    """

    def __init__(
        self,
        rows: Sequence[int],
        first_key: Sequence[int] | None = None,
        keys: Sequence[int] | None = None,
        is_causal: bool = False,
    ) -> None:
        self.is_causal = is_causal
        lengths = np.asarray(rows, np.int64)
        self.count = len(lengths)
        self.rows = int(lengths.sum())
        self._table: NDArray[np.int64] = np.empty((len(lengths), 4), np.int64)
        self._table[:, 0] = np.cumsum(lengths) - lengths
        self._table[:, 1] = lengths
        self._table[:, 2] = 0 if first_key is None else first_key
        self._table[:, 3] = lengths if keys is None else keys
        if self.count and (self._table[:, 2:].sum(1) > lengths).any():
            raise ValueError("the keys of a document must be among its rows")
        if self.count and self._table[:, 3].min() < 1:
            raise ValueError("a document must have at least one key")
        self.address = self._table.ctypes.data


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
        heads = self.heads if self.kv_heads is None else self.kv_heads
        head_width = self.width // self.heads if self.head_width is None else self.head_width
        inner = self.heads * head_width
        of_keys = (heads * head_width, self.width)
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


def has_kernel(form: Form) -> bool:
    """Whether there is a kernel for a layer of these sizes."""
    return _numbers(_sizes(form)) > 0


def _numbers(p: _Parameters) -> int:
    """The number of floats of the packed weights; 0 if there is no kernel."""
    return int(_function("numbers")(ctypes.addressof(p)))


def _sizes(form: Form) -> _Parameters:
    heads = form.heads if form.kv_heads is None else form.kv_heads
    head_width = form.head_width
    if head_width is None:
        head_width = 0 if form.width % form.heads else form.width // form.heads
    kind = form.pre_norm, form.rms_norm, form.gated, ACTIVATIONS.index(form.activation)
    return _Parameters(form.width, form.heads, heads, head_width, form.hidden, *kind)


class EncoderLayer:
    """A layer with packed copies of its weights, which take as much memory as the weights.

    Raises:
        ValueError: if there is no kernel for these sizes.
    """

    def __init__(self, form: Form, weights: Weights) -> None:
        p = _sizes(form)
        p.scale = form.scale
        p.epsilon = (c_double * 2)(*form.epsilons)
        count = _numbers(p)
        if not count:
            raise ValueError(f"there is no kernel for a layer of these sizes: {form}")
        self._p = p
        self._weights = weights
        self._packed = torch.empty(count)
        _LAYERS.add(self)
        p.packed = address(self._packed)
        self._pack()

    @staticmethod
    def packed_bytes() -> int:
        """The memory of all packed weights."""
        return sum(layer._packed.nbytes for layer in _LAYERS)

    def _pack(self) -> None:
        p, (maps, biases, norm_weights, norm_biases) = self._p, self._weights
        p.weight, p.bias = _MAPS(*map(address, maps)), _MAPS(*map(address, biases))
        p.row, p.column = _STRIDES(*(map.stride(0) for map in maps)), _STRIDES(*(map.stride(1) for map in maps))
        p.norm_weight, p.norm_bias = (
            (c_void_p * 2)(*map(address, norm_weights)),
            (c_void_p * 2)(*map(address, norm_biases)),
        )
        _function("pack")(ctypes.addressof(p), *_crew())

    def __call__(
        self,
        x: Tensor,
        documents: Documents,
        turns: tuple[Tensor, Tensor] | None = None,
        states: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The states [..., width] of rows x [..., width], contiguous, which are those of the documents.

        turns: cosine and sine of the angles by which queries and keys turn, [rows, width of a head], contiguous.
        states: where keys and values of each document are written, [heads of keys, rows, width of a head].

        Packed weights that have changed since are packed again. A change is seen where numbers differ that this call
        compares: in proportion to its work, and others in each call.

        Raises:
            ValueError: if x has other rows than the documents, or another width than the layer, or the turns other
                sizes.
            MemoryError: if there was no memory for intermediate results.
        """
        p = _Parameters.from_buffer_copy(self._p)
        y = torch.empty_like(x)
        self._p.calls += 1
        p.x = address(x)
        p.y = address(y)
        p.documents = documents.address
        p.count = documents.count
        p.causal = documents.is_causal
        if x.shape[-1] != p.width or x.numel() != documents.rows * p.width:
            raise ValueError(f"x must hold {documents.rows} rows of {p.width} numbers; got {list(x.shape)}")
        if turns is not None:
            if any(turn.numel() != documents.rows * p.head_width for turn in turns):
                raise ValueError(f"turns must be [{documents.rows}, {p.head_width}]; got {list(turns[0].shape)}")
            p.cos, p.sin = map(address, turns)
        if states is not None:
            p.keys, p.values = map(address, states)
        while (status := _function("run")(ctypes.addressof(p), *_crew())) == _OUTDATED:
            self._pack()
        if status == _NO_MEMORY:
            raise MemoryError("no memory for the intermediate results of a layer")
        return y


def _crew() -> tuple[int | None, bool, int]:
    """torch's threads, as the kernels take them."""
    count = torch.get_num_threads()
    team = threads.team() if count > 1 else None
    return (None, False, 1) if team is None else (team.address, team.forks, count)


_LAYERS: weakref.WeakSet[EncoderLayer] = weakref.WeakSet()


@cache
def _function(name: str) -> Any:
    function = library._load()[f"encoder_layer_{name}"]
    function.restype = c_int64
    function.argtypes = [c_void_p] if name == "numbers" else [c_void_p, c_void_p, c_int64, c_int64]
    return function
