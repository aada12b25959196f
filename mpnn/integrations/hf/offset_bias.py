"""T5's position bias as a table by offset: O(N) numbers, where transformers computes [1, heads, queries, keys].

`by_offset` replaces `compute_bias` of attention layers such as T5's, whose bias depends on the offset between key and
query only (Raffel et al. 2020, section 2.1). The layers pass what it returns to the attention function unchanged.
MPNet's encoder (`native.py`) has the same bias.

Other code, such as a hook of a layer on the way, may compute with the bias, and expects a tensor. So `passes_on` looks
in each call whether the modules on the way run their own code alone. If not, transformers computes the tensor.
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from mpnn import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.integrations.callers import put
from mpnn.integrations.hf import compat
from mpnn.integrations.hf.packing import once

_FAMILIES = "t5", "mt5"  # which pass the bias on without computing with it


@dataclass(eq=False)
class OffsetBias:
    """The bias of `queries` after `past` tokens over `keys`, which all layers of a forward pass share.

    It holds the embedding rather than its table, so that gradient checkpointing does not differentiate one table twice.
    `bucket` maps offsets of key and query to rows of the embedding; offsets above `max_distance` share one.
    """

    embedding: nn.Module
    bucket: Callable[[Tensor], Tensor]
    max_distance: int
    queries: int
    keys: int
    first: int | Tensor
    _row: Tensor | None = None
    _pairs: dict[bool, Tensor] = field(default_factory=dict)

    @cached_property
    def past(self) -> int:
        """The number of tokens before the first query, which a static cache has on its device."""
        return int(self.first)

    @property
    def clip(self) -> int:
        """The largest offset in the table; all larger ones are in the buckets of `max_distance`."""
        return min(max(self.queries, self.keys) - 1, self.max_distance + self.past)

    def table(self, like: Tensor) -> Tensor:
        """The bias of each offset of key and query, [2 * clip + 1, H]."""
        return self._of(torch.arange(-self.clip, self.clip + 1, device=self._device(like)) - self.past, like)

    def row(self, start: int, count: int, like: Tensor) -> Tensor:
        """The bias of one query and each of the keys from `start` on, [1, H, 1, count]. Computed once a forward pass,
        unless its gradient is asked for."""
        row = None if torch.is_grad_enabled() else self._row
        if row is None:
            row = self._of(torch.arange(self.keys, device=self._device(like)) - self.first, like).T[None, :, None]
            self._row = None if torch.is_grad_enabled() else row
        return row[..., start : start + count].to(like)

    def pairs(self, is_causal: bool, like: Tensor) -> Tensor:
        """The bias of all pairs, [1, H, queries, keys], -inf for later keys if causal. Computed once a forward pass,
        without a gradient."""
        return once(self._pairs, is_causal, lambda: self._all_pairs(is_causal, like)).to(like)

    def _all_pairs(self, is_causal: bool, like: Tensor) -> Tensor:
        device = self._device(like)
        offsets = torch.arange(self.keys, device=device) - torch.arange(self.queries, device=device)[:, None]
        bias = self._of(offsets - self.past, like).permute(2, 0, 1)[None]
        return (bias.masked_fill(offsets > self.past, -torch.inf) if is_causal else bias).contiguous()

    def _of(self, offsets: Tensor, like: Tensor) -> Tensor:
        """The bias of these offsets of key and query, [..., H]."""
        bias: Tensor = self.embedding(self.bucket(offsets))
        return bias.to(like)

    def _device(self, like: Tensor) -> torch.device:
        weight: Any = self.embedding.weight
        device: torch.device = weight.device
        # An offloaded weight is loaded by accelerate's hooks when the module is called.
        return like.device if device.type == "meta" else device

    def over(self, graph: Graph, is_flat: bool, like: Tensor) -> BiasTable | Tensor:
        """The bias of the edges of a graph, over one sequence or over all of a batch, one after the other."""
        if not is_flat or self.queries == self.keys:
            return BiasTable(self.table(like), Offset(self.clip))
        return self.on_edges(graph, like)

    def on_edges(self, graph: Graph, like: Tensor) -> Tensor:
        """The bias of each edge, [E, H]."""
        src, dst = graph.edge_index
        return self.table(like)[(src % self.keys - dst % self.queries).clamp(-self.clip, self.clip) + self.clip]


_FOLDERS = Path(torch.__file__).parent, Path(str(transformers.__file__)).parent, Path(__file__).parents[2]
_LIBRARIES = tuple(f"{folder}{os.sep}" for folder in _FOLDERS)


def passes_on(stack: nn.Module, kind: type) -> bool:
    """Whether the modules between a stack of layers and its attention layers, of a class, leave the bias as it is: they
    run code of transformers or of this library, without hooks."""
    if torch.compiler.is_compiling():  # which guards modules itself
        return True
    return (
        not _has_any_global_hook()
        # What stands around the forward pass of the stack does not get the bias.
        and _is_of_a_library(type(stack).forward)
        and all(_is_untouched(part) for part in _on_the_way(stack, kind) if part is not stack)
    )


def _on_the_way(part: nn.Module, kind: type) -> Iterator[nn.Module]:
    """The attention layers in a module, and the modules that contain them."""
    if isinstance(part, kind):
        yield part
        return
    inner = [child for child in part._modules.values() if child is not None and child._modules]
    found = [module for child in inner for module in _on_the_way(child, kind)]
    if found:
        yield part
        yield from found


def _is_untouched(part: nn.Module) -> bool:
    """Whether a call runs the forward pass of the module's class, as a library wrote it, and no hook gets its arguments
    or results."""
    kind: Any = type(part)
    is_own = "forward" not in vars(part) and _is_of_a_library(kind.forward) and _is_of_a_library(kind.__call__)
    return is_own and not (part._backward_hooks or part._backward_pre_hooks) and compat.has_only_idle_hooks(part)


def _is_of_a_library(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(_LIBRARIES)


class _ByOffset:
    """`compute_bias` of a layer. It is an object, not a closure, so that copies of the model use their own layer."""

    def __init__(self, layer: Any, stack: nn.Module) -> None:
        self.layer = layer
        self.stack = stack

    def __call__(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
    ) -> OffsetBias | Tensor:
        layer = self.layer
        is_copy = False
        if not torch.compiler.is_compiling():
            # An attribute is not bound: a shallow copy of the layer has that of its original.
            caller = sys._getframe(1).f_locals.get("self", layer)
            is_copy = caller is not layer and getattr(caller, "__dict__", {}).get("compute_bias") is self
            layer = caller if is_copy else layer
        original = type(layer).compute_bias
        if is_copy or not (_is_of_a_library(original) and passes_on(self.stack, type(layer))):
            dense: Tensor = original(layer, query_length, key_length, device, past_seen_tokens)
            return dense
        bucket = partial(
            layer._relative_position_bucket,
            bidirectional=not layer.is_decoder,
            num_buckets=layer.relative_attention_num_buckets,
            max_distance=layer.relative_attention_max_distance,
        )
        most = layer.relative_attention_max_distance
        return OffsetBias(layer.relative_attention_bias, bucket, most, query_length, key_length, past_seen_tokens)


def by_offset(model: nn.Module) -> list[Callable[[], None]]:
    """Makes the layers of a model compute their bias by offset; returns what undoes it."""
    layers: dict[Any, nn.Module] = {}
    for stack in model.modules():  # a stack comes before the stacks inside it
        if isinstance(getattr(stack, "block", None), nn.ModuleList):
            layers |= {layer: stack for layer in stack.modules() if _has_table(layer)}
    return [put(layer, "compute_bias", _ByOffset(layer, stack)) for layer, stack in layers.items()]


def _has_table(layer: nn.Module) -> bool:
    """Whether this is a layer of T5 with a table of biases, which is as transformers made it."""
    return (
        bool(getattr(layer, "has_relative_attention_bias", False))
        and "compute_bias" not in vars(layer)
        and type(layer).__module__.split(".")[-1].removeprefix("modeling_") in _FAMILIES
    )


def has_no_bias(layer: Any) -> bool:
    """Whether the bias of this layer is T5's zeros for cross-attention."""
    is_cross = getattr(layer, "is_decoder", False) and getattr(layer, "is_causal", None) is False
    return is_cross and getattr(layer, "has_relative_attention_bias", None) is False
