"""BigBird of transformers as message passing: complete graphs, or blocks as transformers chooses them.

Its block-sparse graph goes by places in the batch, padding included, in blocks: the first and the last block hear and
are heard by all, every other block hears itself, its two neighbours and some blocks more. In training those are drawn
for each head from numpy's generator, seeded with the number of the layer. In evaluation they are the first block, as
often as blocks would be drawn: its tokens then weigh so many times more, which repeated edges say. Batches that are too
short for blocks hear over complete graphs.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graphs import complete, from_blocks
from mpnn.message_passing import MessagePassing
from mpnn.models.bert import Bert, BertConfig, update
from mpnn.models.hf import bert
from mpnn.models.hf.weights import Copies, check_class, check_config, with_weights
from mpnn.models.parts.packing import Packing
from mpnn.models.parts.per_head import PerHead
from mpnn.topology import Topology


def convert(hf_model: Any, graph: Topology | None, copies: Copies, context: int | None = None) -> bert.Encoder:
    """A `BigBirdModel` as message passing, of either `attention_type`."""
    check_class(hf_model, "BigBirdModel")
    bert.check_encoder(hf_model.config)
    check_config(hf_model.config, use_bias=True, rescale_embeddings=False)
    sparse = graph is None and hf_model.attention_type == "block_sparse"
    if sparse:
        check_config(hf_model.config, is_decoder=False)
    elif hf_model.config.is_decoder:
        graph = bert.decoder_graph(hf_model.config, graph)
    ours = bert.bert_config(hf_model.config, after_pad=False)
    config, longer, repeat = bert.stretched(hf_model.config, ours, context, copies)

    def build() -> Bert:
        pooler = hf_model.pooler is not None
        if not sparse:
            return Bert(longer, graph, pooler=pooler)
        return BlockSparse(longer, block=config.block_size, random=config.num_random_blocks, pooler=pooler)

    return bert.Encoder(with_weights(build, hf_model, (*bert.NAMES, ("pooler.", "pooler.0.")), copies, repeat), config)


class BlockSparse(Bert):
    """BERT over the blocks that transformers chooses. In neither is there a dropout of attention weights.

    Args:
        config, pooler: as BERT's. block: tokens of a block. random: how many blocks are drawn for each.
    """

    def __init__(self, config: BertConfig, *, block: int, random: int, pooler: bool = True) -> None:
        super().__init__(config, pooler=pooler)
        self.block, self.random = block, random

    @staticmethod
    def layer(config: BertConfig, graph: Topology) -> nn.Module:
        return MessagePassing(None, "sum", update(config), PerHead(config.dim, config.heads))

    def packing(self, keep: Tensor) -> Packing:
        return Packing.of(keep, apart=not bool(keep.all()))

    def graphs(self, packing: Packing) -> list[Graph]:
        layers, length = range(len(self.layers)), packing.keep.shape[1]
        if length <= (5 + 2 * self.random) * self.block:
            return [packing.bind(complete()) for _ in layers]
        blocks = -(-length // self.block)
        if self.training:
            heads, context = self.config.heads, self.config.context
            found = [_drawn(blocks, self.block, self.random, heads, context, seed) for seed in layers]
        else:
            found = [_evaluated(blocks, self.block, self.random)] * len(layers)
        bound = {graph: self._bound(packing, graph) for graph in set(found)}
        return [bound[graph] for graph in found]

    def _bound(self, packing: Packing, graph: Graph) -> Graph:
        if packing.apart:
            return packing.bind_each([graph] * len(packing.lengths))
        return graph.induced(torch.arange(graph.num_dst) < packing.keep.shape[1]).to(packing.index.device)


@lru_cache(maxsize=4)
def _evaluated(blocks: int, size: int, random: int) -> Graph:
    pairs = _pairs(np.zeros((blocks - 2, random), np.int64))
    with torch.inference_mode(False):
        return from_blocks(pairs, size, blocks)


@lru_cache(maxsize=64)
def _drawn(blocks: int, size: int, random: int, heads: int, context: int, seed: int) -> Graph:
    pairs = [_pairs(table) for table in drawn_blocks(blocks, size, random, heads, context, seed)]
    head = np.repeat(np.arange(heads), [pair.shape[1] for pair in pairs])
    with torch.inference_mode(False):
        return from_blocks(np.concatenate(pairs, 1), size, blocks, edge_type=torch.from_numpy(head))


def _pairs(table: np.ndarray) -> np.ndarray:
    """(source block, destination block), int64 [2, K]; `table` [blocks - 2, random] holds what is heard besides."""
    last = len(table) + 1
    inner = [{0, i - 1, i, i + 1, last} for i in range(1, last)]
    heard = [range(last + 1), *([*near, *more] for near, more in zip(inner, table, strict=True)), range(last + 1)]
    return np.array([(src, dst) for dst, blocks in enumerate(heard) for src in blocks], np.int64).T


def drawn_blocks(blocks: int, size: int, random: int, heads: int, context: int, seed: int) -> np.ndarray:
    """The blocks that transformers draws in training, int64 [heads, blocks - 2, random].

    Lengths of 1024, 3072 and 4096 tokens draw as the paper's own program did, from the first 1024 tokens of the longest
    sentence there can be; other lengths draw from the first 2 * random + 5 blocks. Blocks that are heard anyway are
    mostly, but in the first case not always, left out; those count once more.
    """
    generator = np.random.RandomState(seed)
    if blocks * size in (1024, 3072, 4096):
        last = 1024 // size - 1 if size < 512 else context // size - 1
        tables = [_draw_for(context // size, last, random, generator) for _ in range(heads)]
        return np.stack(tables)[:, : blocks - 2]
    end = 2 * random + 5
    found = np.zeros((heads, blocks - 2, random), np.int64)
    for i in range(1, blocks - 1):
        never = {0, i - 1, i, i + 1, end - 1} | ({end - 2} if i == 1 else {1} if i == end - 2 else set())
        for head in range(heads):
            allowed = [block for block in generator.permutation(end) if block not in never]
            found[head, i - 1] = allowed[:random]
    return found


def _draw_for(blocks: int, last: int, random: int, generator: np.random.RandomState) -> np.ndarray:
    """One head's table [blocks - 2, random] for sentences of `blocks` blocks, drawn from those up to `last`."""
    inner, found = np.arange(1, blocks - 1), np.zeros((blocks - 2, random), np.int64)
    for i in range(1, blocks - 1):
        if i < 3:
            pool = inner[i + 1 : last]
        elif i >= blocks - 3 or i - 2 > last:
            pool = inner[:last]
        elif i + 1 == last:
            pool = inner[: i - 2]
        else:
            pool = np.concatenate([inner[: i - 2], inner[i + 1 : last]])
        found[i - 1] = generator.permutation(pool)[:random]
    return found
