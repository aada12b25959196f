"""T5's position bias as a table by offset: O(N) numbers, where transformers computes [1, heads, queries, keys].

`by_offset` replaces `compute_bias` of attention layers such as T5's, whose bias depends on the offset between key and
query only (Raffel et al. 2020, section 2.1). The layers pass what it returns to the attention function unchanged.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpnn import Graph
from mpnn.edge_tables import BiasTable
from mpnn.graph.relations import Offset

_FAMILIES = "t5", "mt5"  # which pass the bias on without computing with it


class OffsetBias(NamedTuple):
    """The bias of `queries` after `past` tokens over `keys`. It holds the layer rather than its table, so that gradient
    checkpointing does not differentiate one table twice."""

    layer: Any
    queries: int
    keys: int
    past: int

    @property
    def clip(self) -> int:
        """The largest offset in the table; all larger ones are in the buckets of `max_distance`."""
        return min(max(self.queries, self.keys) - 1, self.layer.relative_attention_max_distance + self.past)

    def table(self, like: Tensor) -> Tensor:
        """The bias of each offset of key and query, [2 * clip + 1, H]."""
        layer, device = self.layer, self.layer.relative_attention_bias.weight.device
        if device.type == "meta":  # offloaded; the hooks of accelerate load the weight when the module is called
            device = like.device
        buckets = layer._relative_position_bucket(
            torch.arange(-self.clip, self.clip + 1, device=device) - self.past,
            bidirectional=not layer.is_decoder,
            num_buckets=layer.relative_attention_num_buckets,
            max_distance=layer.relative_attention_max_distance,
        )
        table: Tensor = layer.relative_attention_bias(buckets)
        return table.to(like)

    def over(self, graph: Graph, is_flat: bool, like: Tensor) -> BiasTable | Tensor:
        """The bias of the edges of a graph, over one sequence or over all of a batch, one after the other."""
        if not is_flat or self.queries == self.keys:
            return BiasTable(self.table(like), Offset(self.clip))
        return self.on_edges(graph, like)

    def on_edges(self, graph: Graph, like: Tensor) -> Tensor:
        """The bias of each edge, [E, H]."""
        src, dst = graph.edge_index
        return self.table(like)[(src % self.keys - dst % self.queries).clamp(-self.clip, self.clip) + self.clip]


class _ByOffset:
    """`compute_bias` of a layer. It is an object, not a closure, so that copies of the model use their own layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(
        self, query_length: int, key_length: int, device: Any = None, past_seen_tokens: int | Tensor = 0
    ) -> OffsetBias:
        return OffsetBias(self.layer, query_length, key_length, int(past_seen_tokens))


def by_offset(model: nn.Module) -> list[Callable[[], None]]:
    """Makes the layers of a model compute their bias by offset; returns what undoes it."""
    layers: list[Any] = [
        module
        for module in model.modules()
        if getattr(module, "has_relative_attention_bias", False)
        and "compute_bias" not in vars(module)
        and type(module).__module__.split(".")[-1].removeprefix("modeling_") in _FAMILIES
    ]
    for layer in layers:
        layer.compute_bias = _ByOffset(layer)
    return [partial(delattr, layer, "compute_bias") for layer in layers]


def has_no_bias(layer: Any) -> bool:
    """Whether the bias of this layer is T5's zeros for cross-attention."""
    is_cross = getattr(layer, "is_decoder", False) and getattr(layer, "is_causal", None) is False
    return is_cross and getattr(layer, "has_relative_attention_bias", None) is False
