"""Sources that a layer of transformers chooses by content, as graphs: `indices=` (DeepSeek V3.2, GLM-MoE-DSA) and
`block_indices=` (MiniMax M3). What is chosen and allowed by the mask is an edge; no matrix of pairs is built."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpnn import Graph, graphs
from mpnn.graph.runs import Runs
from mpnn.graph.stacked import StackedGraph
from mpnn.integrations.hf.masks import Instead, Mask


def allowed(indices: Tensor, mask: Tensor) -> Tensor:
    """The indices [B, queries, k] of sources that the mask allows, bool [B, 1, queries, keys]; -1 for others."""
    pairs = mask[:, 0].expand(len(indices), indices.shape[1], -1)
    return indices.where(pairs.gather(-1, indices.long().clamp(min=0)), -1)


def of_indices(indices: Tensor, keys: int, mask: Graph) -> Graph:
    """The graph over the nodes of all entries of the batch, one after the other, within that of the mask."""
    first = torch.arange(len(indices), device=indices.device)[:, None, None] * keys
    numbered = torch.where(indices >= 0, indices.long() + first, -1)
    return graphs.chosen(numbered.flatten(0, 1), len(indices) * keys) & mask


def of_blocks(module: nn.Module, chosen: Tensor, mask: Mask, instead: Instead | None, keys: int) -> Graph:
    """A graph for each entry of the batch and each group of heads, of chosen blocks [B, groups, queries, k], -1 for
    none, within the mask.

    Raises:
        ValueError: if the layer does not say how long its blocks are.
    """
    size: Any = getattr(getattr(module, "indexer", None), "block_size", None)
    if not isinstance(size, int):
        raise ValueError(f"{type(module).__name__} passes block_indices, and has no indexer.block_size; use 'eager'")
    batch, groups, queries, _ = chosen.shape
    count = -(-keys // size)
    flags = torch.zeros(*chosen.shape[:3], count + 1, dtype=torch.bool, device=chosen.device)
    flags.scatter_(-1, torch.where(chosen >= 0, chosen, count).long(), True)
    by_block = graphs.blocks(flags[..., :count], size, keys, num_dst=queries)
    return by_block & _stacked(mask.graph(instead, batch, keys, chosen.device, flat=True)[0], batch, groups)


def _stacked(flat: Graph, batch: int, groups: int) -> Graph:
    """The graph of each entry of the batch, for each group of heads, of that over all of their nodes."""
    runs, keys, queries = flat.runs, flat.num_src // batch, flat.num_dst // batch
    first = runs.row // queries * keys
    rows = Runs(runs.num_dst, keys, runs.ptr, runs.start - first, runs.stop - first)
    each = np.arange(batch * queries).reshape(batch, 1, queries).repeat(groups, 1).reshape(-1)
    return StackedGraph(Graph.from_runs(rows.take(each)).to(flat.device), (batch, groups))
