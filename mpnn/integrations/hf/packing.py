"""How one pass of a model is divided into texts: the one place of this integration that knows it.

Packed texts stand one after the other in a row. A call says where they begin by `seq_idx`, by `cu_seq_lens_q`, or by
`position_ids` that restart. `Divided`, the forward pass that `use` gives each model of transformers, reads this once
and keeps it as the `Packing` of the pass, because many families drop these keywords on the way to their layers. Masks,
attention and recurrent layers find it by `of`.

Checkpointing computes layers again after the pass has ended. So a layer on the way to a recurrence (`in_layer`)
remembers the packing with its input, and has it again when autograd gives it this input again.
"""

import copy
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from transformers import PreTrainedModel

from mpnn import Graph, graphs
from mpnn.graph.runs import Ints
from mpnn.integrations.callers import calling, put
from mpnn.integrations.hf import compat
from mpnn.kernels.parts import Parts

T = TypeVar("T")

NAMES = "seq_idx", "cu_seq_lens_q", "cu_seqlens", "cu_seq_lens_k"
"""The keywords that say where texts begin."""
_NAMES = frozenset(NAMES)

NO_CACHE = "packed sequences have no cache here; call the model with use_cache=False"

_MASKED = "attention_mask", "past_key_values", "cache_params"
"""With one of these, `position_ids` that restart are no texts, as in transformers."""


def once(results: dict[Any, T], key: Hashable, build: Callable[[], T]) -> T:
    """Returns the result of `build`, which is computed once a key and kept among the results."""
    if key not in results:
        results[key] = build()
    return results[key]


class Packing:
    """The texts of a batch of rows.

    shape: (rows, tokens of a row). lengths: of the texts, row after row. cu_seqlens: where they begin, int32
    [texts + 1] on the device of the batch. One of the last two is enough; a layer that needs the other reads or makes
    it. said: the tensor that says it.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        lengths: list[int] | None = None,
        cu_seqlens: Tensor | None = None,
        said: Tensor | None = None,
    ) -> None:
        self.shape = shape
        self._lengths = lengths
        self._cu_seqlens = cu_seqlens
        self._said = said
        self.divided: dict[Hashable, Any] = {}
        """What layers of one form derive from the lengths."""

    @property
    def key(self) -> int:
        """The same for all layers that are given the same tensor."""
        return id(self if self._said is None else self._said)

    @property
    def lengths(self) -> list[int]:
        if self._lengths is None:
            assert self._cu_seqlens is not None
            self._lengths = _lengths_of(self._cu_seqlens, self.shape)
        return self._lengths

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    def cu_seqlens(self, device: torch.device) -> Tensor:
        if self._cu_seqlens is None:
            ends = np.append(0, np.cumsum(self.lengths)).astype(np.int32)
            self._cu_seqlens = torch.from_numpy(ends).to(device)
        return self._cu_seqlens

    @cached_property
    def positions(self) -> Ints:
        """The position of each token in its text, int64 [B, N]."""
        lengths = np.array(self.lengths, np.int64)
        first = np.repeat(np.cumsum(lengths) - lengths, lengths)
        positions = (np.arange(len(first)) - first).reshape(self.shape)
        if self.shape[0] > 1 and positions[:, :1].any():
            raise ValueError(
                f"a text continues from one row to the next: the rows have {self.shape[1]} tokens each, and the texts "
                f"{self.lengths}; pass them in a batch of one row"
            )
        return positions

    def parts(self, is_causal: bool) -> Parts:
        """The texts as compiled layers take them."""
        return once(self.divided, ("parts", is_causal), lambda: Parts(self.lengths, is_causal))

    def graph(self, is_causal: bool, device: torch.device) -> Graph:
        """The graph over the tokens of all rows, in which each text is complete or causal."""
        return once(self.divided, ("graph", is_causal, device), lambda: self._graph(is_causal).to(device))

    def _graph(self, is_causal: bool) -> Graph:
        topology = graphs.documents(self.lengths)
        topology = topology & graphs.causal() if is_causal else topology
        return topology.bind(self.shape[0] * self.shape[1])

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Packing):
            return self is other
        return self.shape == other.shape and self.lengths == other.lengths

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Packing({self.shape}, {self.lengths})"


def _lengths_of(cu_seqlens: Tensor, shape: tuple[int, int]) -> list[int]:
    _check_not_capturing(cu_seqlens, "where packed sequences begin (cu_seq_lens)")
    ends: list[int] = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(ends)]
    tokens = shape[0] * shape[1]
    if ends[0] or ends[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(f"cu_seq_lens must rise from 0 to the {tokens} tokens of the batch; got {ends}")
    return [length for length in lengths if length]


def _check_not_capturing(numbers: Tensor, what: str) -> None:
    if numbers.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError(f"{what} is on the GPU, and cannot be read while a CUDA graph is captured")


class _Pass(threading.local):
    """The packing of the pass that runs in this thread. task: the backward pass in which `again` were computed again,
    each with the packing that it had."""

    packing: Packing | None = None
    task = -1
    again: tuple[tuple[weakref.ref[nn.Module], Packing | None], ...] = ()


_PASS = _Pass()


def current() -> Packing | None:
    """The packing of the pass that runs in this thread; None if its rows are one text each."""
    return _PASS.packing


@contextmanager
def within(packing: Packing | None) -> Iterator[None]:
    """Makes this the packing of the layers that run in the block."""
    before = _PASS.packing
    _PASS.packing = packing
    try:
        yield
    finally:
        _PASS.packing = before


def is_packed(options: Mapping[str, Any]) -> bool:
    """Whether a layer with these keywords is in a pass over packed texts."""
    return _PASS.packing is not None or any(options.get(name) is not None for name in NAMES)


def of(options: Mapping[str, Any], shape: tuple[int, int]) -> Packing | None:
    """The packing of a layer over rows of this shape: that of the pass, or what its own keywords say. None if nothing
    is packed.

    Raises:
        ValueError: if the layer has other tokens than the texts.
    """
    packing = _PASS.packing
    if packing is None and options.keys() & _NAMES:
        packing = _said(options, shape)
    if packing is not None and packing.shape != shape:
        raise ValueError(
            f"the texts of this pass are rows of the shape {list(packing.shape)}, and this layer has tokens of the "
            f"shape {list(shape)}, so it does not know where texts begin; pass the texts as a batch, padded"
        )
    return packing


def _said(options: Mapping[str, Any], shape: tuple[int, int]) -> Packing | None:
    """Returns the division that the keywords of a call describe."""
    name = next((name for name in NAMES if options.get(name) is not None), None)
    if name is None:
        return None
    given: Tensor = options[name]
    if name != "seq_idx":
        return Packing(shape, cu_seqlens=given, said=given)
    if tuple(given.shape) != shape:
        raise ValueError(f"seq_idx must have shape {list(shape)}, the tokens; got {list(given.shape)}")
    _check_not_capturing(given, "seq_idx")
    return _from_breaks(given.diff(dim=-1) != 0, shape, given)


def _from_breaks(breaks: Tensor, shape: tuple[int, int], said: Tensor) -> Packing:
    """The packing of rows whose tokens begin a text where `breaks`, bool [B or 1, N - 1], says so."""
    begins = F.pad(breaks.cpu(), (1, 0), value=True).expand(shape).flatten()
    starts = begins.nonzero().flatten()
    return Packing(shape, starts.diff(append=starts.new_tensor([begins.numel()])).tolist(), said=said)


# ------------------------------------------------------------------------------------------------- a model's own call


def signature_of(model: Any) -> inspect.Signature:
    """The signature of the forward pass of a model's class, without the model."""
    _, *parameters = inspect.signature(type(model).forward).parameters.values()
    return inspect.Signature(parameters)


class Divided:
    """The forward pass of a model, in which `current()` says how its rows are divided. It is an object, not a closure,
    so that copies of the model call themselves."""

    def __init__(self, model: PreTrainedModel, reads_positions: bool, refusal: str, has_states: bool) -> None:
        self.model = model
        self.inner = vars(model).get("forward")
        self.reads_positions = reads_positions
        self.refusal = refusal
        self.has_states = has_states
        self._names = tuple(self.__signature__.parameters)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature by which the trainer of transformers chooses the columns of a dataset."""
        return signature_of(self.model) if self.inner is None else inspect.signature(self.inner)

    @property
    def __code__(self) -> Any:
        """Where torch.export says that the model's code is."""
        return inspect.unwrap(type(self.model).forward).__code__

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not torch.compiler.is_compiling() and (caller := calling(self.model)) is not self.model:  # a shallow copy
            caller.forward = self._of(caller)
            return caller.forward(*args, **options)
        given = dict(zip(self._names, args, strict=False)) | options if args else options
        if _PASS.packing is None and not self._may_pack(given):
            return self._run(*args, **options)
        return self._divided(args, options, given)

    def _of(self, model: Any) -> Any:
        """The same for another model."""
        ours = copy.copy(self)
        ours.model = model
        inner = copy.copy(self.inner)
        if getattr(inner, "model", None) is self.model:
            vars(inner)["model"] = model
            ours.inner = inner
        return ours

    def _run(self, *args: Any, **options: Any) -> Any:
        if self.inner is not None:
            return self.inner(*args, **options)
        return type(self.model).forward(self.model, *args, **options)

    def _may_pack(self, given: Mapping[str, Any]) -> bool:
        if given.keys() & _NAMES and any(given.get(name) is not None for name in NAMES):
            return True
        if not self.reads_positions or given.get("position_ids") is None or torch.compiler.is_exporting():
            return False
        return all(given.get(name) is None for name in _MASKED)

    @torch.compiler.disable(recursive=False)  # numbers decide, so a compiled program breaks here
    def _divided(self, args: tuple[Any, ...], options: dict[str, Any], given: dict[str, Any]) -> Any:
        packing = self._packing(given)
        if packing is not None and packing is not _PASS.packing:
            self._check(given)
        if packing is not None and (positions := self._positions(packing, given)) is not None:
            args = ()
            options = given | {"position_ids": positions}
        with within(packing):
            return self._run(*args, **options)

    @torch.compiler.disable
    def _packing(self, given: Mapping[str, Any]) -> Packing | None:
        """The packing of this call: that of the call around it if it has the same tokens, else what the call says. A
        tower without tokens of its own, of images or sounds, has none."""
        tokens = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        if not isinstance(tokens, Tensor) or tokens.is_meta:
            return None
        shape = (tokens.shape[0], tokens.shape[1])
        if _PASS.packing is not None and _PASS.packing.shape == shape:
            return _PASS.packing
        return _said(given, shape) or self._by_positions(given, shape)

    def _by_positions(self, given: Mapping[str, Any], shape: tuple[int, int]) -> Packing | None:
        """Texts whose `position_ids` do not go on, in a call without a mask and a cache, as transformers packs them."""
        if not self._may_pack(given):
            return None
        positions = given["position_ids"]
        if positions.dim() == 3 and len(positions) == 4:  # those of the text, before those of images
            positions = positions[0]
        if positions.dim() != 2 or positions.shape[-1] != shape[1]:
            return None
        breaks = (positions.diff(dim=-1) != 1).cpu()
        return _from_breaks(breaks, shape, positions) if bool(breaks.any()) else None

    def _check(self, given: Mapping[str, Any]) -> None:
        """Raises ValueError if a layer of this model would not keep texts apart."""
        use_cache = given.get("use_cache")
        caches = getattr(self.model.config, "use_cache", False) if use_cache is None else use_cache
        compat.refuse(
            {
                f"{self.refusal}; pass them as a batch, padded": self.refusal,
                f"some recurrent layers of transformers {compat.VERSION} do not see where packed sequences begin; "
                f"install transformers {compat.TESTED}, or pass the sequences as a batch, padded": (
                    self.has_states and compat.IS_OLDER
                ),
                NO_CACHE: self.has_states and caches,
            }
        )

    @torch.compiler.disable
    def _positions(self, packing: Packing, given: Mapping[str, Any]) -> Tensor | None:
        """The `position_ids` [B, N] of a call that takes them and has none; else None."""
        if given.get("position_ids") is not None or "position_ids" not in self._names:
            return None
        ids = given.get("input_ids")
        device = given["inputs_embeds"].device if ids is None else ids.device
        positions = torch.from_numpy(packing.positions).to(device)
        numbers = next(filter(None, map(_numbers, self.model.modules())), None)
        if numbers is None:
            return positions
        if ids is None:  # no token is padding
            return numbers(torch.full_like(positions, -1)).gather(1, positions)
        texts = ids.flatten().split(packing.lengths)
        return torch.cat([numbers(text[None])[0] for text in texts]).view(packing.shape)


def divide(model: PreTrainedModel, reads_positions: bool, refusal: str, has_states: bool) -> list[Callable[[], None]]:
    """Gives a model the forward pass above, unless it has it already; returns what undoes it.

    reads_positions: whether `position_ids` that restart are texts. refusal: why packed texts would be mixed, or an
    empty string. has_states: whether layers have states, which keep texts apart in a pass without a cache only.
    """
    if isinstance(vars(model).get("forward"), Divided):
        return []
    return [put(model, "forward", Divided(model, reads_positions, refusal, has_states))]


def replaced(model: nn.Module) -> Any:
    """The forward pass that a model has instead of its class's, other than the one above; None if it has none."""
    forward = vars(model).get("forward")
    return forward.inner if isinstance(forward, Divided) else forward


def replace(model: nn.Module, forward: Any) -> Callable[[], None]:
    """Gives a model a forward pass that keeps the division above; returns what undoes it."""
    divided = vars(model).get("forward")
    return put(divided, "inner", forward) if isinstance(divided, Divided) else put(model, "forward", forward)


def default_positions(model: Any, input_ids: Tensor) -> Tensor:
    """The positions int64 [B, N] that the model gives tokens [B, N] if it gets none: RoBERTa's depend on padding."""
    numbers = _numbers(getattr(model.base_model, "embeddings", None))
    if numbers is not None:
        return numbers(input_ids)
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def _numbers(embeddings: Any) -> Callable[[Tensor], Tensor] | None:
    """The function by which embeddings of a family number tokens [B, N], after their padding; None if they have
    none."""
    name = "create_position_ids_from_input_ids"
    make = getattr(embeddings, name, None) or getattr(sys.modules[type(embeddings).__module__], name, None)
    padding_idx = getattr(embeddings, "padding_idx", None)
    return None if make is None or padding_idx is None else partial(make, padding_idx=padding_idx)


# ---------------------------------------------------------------------------------------------- layers computed again


class _Input(NamedTuple):
    """The memory of a layer's input, and the packing of its pass."""

    memory: StorageWeakRef
    packing: Packing | None

    @property
    def is_alive(self) -> bool:
        return not self.memory.expired()


class _Inputs:
    """The packing of passes by the inputs of layers, as long as these live. Checkpointing gives a layer the memory that
    it had as input in the pass, detached or not."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[Any, ...], _Input] = {}
        self._limit = 1024

    @torch.compiler.disable
    def remember(self, x: Tensor | None, packing: Packing | None) -> None:
        if x is None:
            return
        if len(self._by_place) > self._limit:
            self._by_place = {key: known for key, known in self._by_place.items() if known.is_alive}
            self._limit = max(1024, 2 * len(self._by_place))
        known = self._by_place.get(_place(x))
        if known is not None and known.is_alive and known.packing != packing:
            packing = _AMBIGUOUS
        self._by_place[_place(x)] = _Input(StorageWeakRef(x.untyped_storage()), packing)

    @torch.compiler.disable
    def recall(self, x: Tensor | None, layer: nn.Module) -> Packing | None:
        """The packing of the pass in which a layer had this input."""
        known = None if x is None else self._by_place.get(_place(x))
        packing = known.packing if known is not None and known.is_alive else _of_layer_around(layer)
        if packing is _AMBIGUOUS:
            raise ValueError(
                f"{type(layer).__name__} is computed again for its gradient, and cannot know how the texts of its pass "
                "were packed: its input was copied, or is that of passes with other texts; train without "
                "checkpointing, or pass the texts as a batch, padded"
            )
        if torch._C._current_graph_task_id() != _PASS.task:
            _PASS.task = torch._C._current_graph_task_id()
            _PASS.again = ()
        _PASS.again = (*_PASS.again, (weakref.ref(layer), packing))
        return packing


def _of_layer_around(layer: nn.Module) -> Packing | None:
    """Returns the division that the layers around this one had when this backward pass recomputed them, if all had the
    same, else `_AMBIGUOUS`: where checkpoints are nested, the input of the inner one is new."""
    if torch._C._current_graph_task_id() != _PASS.task:
        return _AMBIGUOUS
    layers = [(outer(), packing) for outer, packing in _PASS.again]
    packings = [packing for outer, packing in layers if outer is not None and layer in set(outer.modules())]
    is_one = packings and all(packing == packings[0] for packing in packings)
    return packings[0] if is_one else _AMBIGUOUS


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape)


_AMBIGUOUS = Packing((0, 0), [])
_INPUTS = _Inputs()
_MARK = "_was_packed"


def in_layer(forward: Callable[..., Any], layer: nn.Module, *args: Any, **options: Any) -> Any:
    """The forward pass of a layer that may be computed again when the pass has ended."""
    if _PASS.packing is None and _MARK not in vars(layer):
        return forward(layer, *args, **options)
    return _in_layer(forward, layer, args, options)


@torch.compiler.disable(recursive=False)
def _in_layer(forward: Callable[..., Any], layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    packing = _PASS.packing
    x = _first_tensor((*args, *options.values()))
    is_backward = torch._C._current_graph_task_id() != -1
    if packing is None and is_backward:
        packing = _INPUTS.recall(x, layer)
    vars(layer)[_MARK] = True
    _INPUTS.remember(x, packing)
    with within(packing):
        out = forward(layer, *args, **options)
    _INPUTS.remember(_first_tensor(out if isinstance(out, (tuple, list)) else (out,)), packing)
    return out


def _first_tensor(values: tuple[Any, ...] | list[Any]) -> Tensor | None:
    return next((value for value in values if isinstance(value, Tensor)), None)


def forget(layers: Iterable[nn.Module]) -> None:
    """Removes what layers know of earlier passes."""
    for layer in layers:
        vars(layer).pop(_MARK, None)
