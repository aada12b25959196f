"""Attention layers in programs that torch traces (`torch.compile`, `torch.export`).

While a program is traced, the numbers in a padding mask are unknown, so there is no graph yet. The operator
`torch.ops.mpnn.mask_graph` builds the graph when the program runs and returns its number, which is the token of
`torch.ops.mpnn.run`. A process that loads an exported program imports `mpnn.hf`, which registers the operator.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mpnn import Graph
from mpnn.graph.sharding import active
from mpnn.integrations.hf import packing
from mpnn.integrations.hf.closures import Band, Sizes, parse
from mpnn.integrations.hf.masks import Instead, Mask

_MATERIALIZED = "position_bias", "output_attentions", "sinks", "indices", "block_indices", *packing.NAMES

torch.library.define(
    "mpnn::mask_graph",
    "(Tensor? padding, SymInt[] sizes, int? left, int? right, str topology, bool causal) -> Tensor",
)


def reason(mask: Any, options: dict[str, Any], is_cross: bool, needs_graph: bool) -> str | None:
    """Why the graph of this layer depends on more than a program knows, or None if it does not."""
    is_mask = isinstance(mask, Mask)
    is_band = is_mask and isinstance(mask.function, tuple) and mask.texts is None
    needing = [name for name in _MATERIALIZED if options.get(name) is not None and options[name] is not False]
    reasons = (
        (
            is_mask and mask.place is not None and needs_graph,
            "its graph depends on the position in a static cache, which is known when the program runs",
        ),
        (active() is not None, "its tokens are divided over processes"),
        (is_cross, "the position of its queries in the decoder is known when the program runs"),
        (
            bool(needing),
            f"{', '.join(needing)} needs the edges of its graph, which are known when the program runs",
        ),
        (isinstance(mask, Tensor), "its mask is a tensor, whose graph is known when the program runs"),
        (is_mask and not is_band, "its mask depends on numbers"),
        (packing.current() is not None, "where its packed texts begin is known when the program runs"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def graph(
    mask: Mask, topology: tuple[str | None, bool], batch: int, keys: int, device: torch.device
) -> tuple[Graph, bool]:
    """As `Mask.graph`, for a mask that is a band, and the text of a topology that replaces it."""
    from mpnn.engine.compile.traced_graph import Built  # imports torch's compiler

    is_flat = mask.padding is not None
    sizes = [batch if is_flat else 1, *mask.sizes._replace(keys=keys)]
    left, right = cast(Band, mask.function)
    token = torch.ops.mpnn.mask_graph(mask.padding, sizes, left, right, topology[0] or "", topology[1])
    count = batch if is_flat else 1
    return cast(Graph, Built(token, count * mask.sizes.queries, count * keys, device)), is_flat


class _Owner(np.ndarray):
    """The memory of a token, which keeps its graph alive."""

    graph: Graph


def _mask_graph(
    padding: Tensor | None, sizes: Sequence[int], left: int | None, right: int | None, topology: str, causal: bool
) -> Tensor:
    batch, *rest = sizes
    mask = Mask(batch, Sizes(*rest), (left, right), padding)
    instead = Instead(parse(topology), causal) if topology else None
    built, _ = mask.graph(instead, batch, mask.sizes.keys, torch.device("cpu"), flat=padding is not None)
    owner = np.array(int(built.token)).view(_Owner)
    owner.graph = built
    return torch.from_numpy(owner)


torch.library.impl("mpnn::mask_graph", "default", _mask_graph)


@torch.library.register_fake("mpnn::mask_graph")
def _fake(
    padding: Tensor | None, sizes: Sequence[int], left: int | None, right: int | None, topology: str, causal: bool
) -> Tensor:
    return torch.empty((), dtype=torch.int64)
