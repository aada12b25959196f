"""BigBird of transformers as message passing: complete graphs, or blocks as transformers chooses them.

Its block-sparse graph goes by places in the batch, padding included, in blocks: the first and the last block are
global, every other block attends to itself, its two neighbours and some blocks more. In training those are drawn
for each head from numpy's generator, seeded with the number of the layer. In evaluation they are the first block, as
often as blocks would be drawn: its tokens then count that many times. The sources begin with
that many copies of them, so that rows have few runs; if attention weights are requested, repeated edges have the same
effect. Batches that are too short for blocks attend over complete graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpnn.graph import Graph
from mpnn.graph.bind_cache import cached_graph
from mpnn.graph.topology import Topology
from mpnn.graphs import batch, complete, from_blocks
from mpnn.integrations.hf import bert
from mpnn.integrations.hf.modules import Adapter
from mpnn.integrations.hf.weights import Copies, check_class, check_config, with_weights
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.packing import Packing
from mpnn.models.layers.per_head import PerHead
from mpnn.models.text.bert import Bert, BertConfig, EncoderOutput, update


def convert(hf_model: Any, graph: Topology | None, copies: Copies, context: int | None = None) -> Adapter:
    """A `BigBirdModel` as message passing, of either `attention_type`."""
    check_class(hf_model, "BigBirdModel")
    bert.check_encoder(hf_model.config)
    check_config(hf_model.config, use_bias=True, rescale_embeddings=False)
    ours, names = bert.bert_config(hf_model.config, after_pad=False), (*bert.NAMES, ("pooler.", "pooler.0."))
    if graph is not None or hf_model.attention_type != "block_sparse":
        return bert.over(graph, ours, hf_model, copies, context, names)
    check_config(hf_model.config, is_decoder=False)
    config, longer, repeat = bert.stretch(hf_model.config, ours, context, copies)

    def build() -> Bert:
        pooler = hf_model.pooler is not None
        return BlockSparse(longer, block=config.block_size, random=config.num_random_blocks, pooler=pooler)

    return bert.BertEncoder(with_weights(build, hf_model, names, copies, repeat), config)


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
        return WithCopies(None, "sum", update(config), PerHead(config.dim, config.heads))

    def packing(self, token_mask: Tensor) -> Packing:
        return Packing.of(token_mask, separate=not bool(token_mask.all()))

    def graphs(self, packing: Packing) -> list[Any]:
        if packing.documents is not None:
            raise ValueError("blocks of transformers' BigBird lie in whole rows; give each document a row of its own")
        layers, length = range(len(self.layers)), packing.token_mask.shape[1]
        if length <= (5 + 2 * self.random) * self.block:
            return [packing.bind(complete()) for _ in layers]
        if not self.training:
            return [_with_copies(packing, self.block, self.random)] * len(layers)
        blocks, heads, context = -(-length // self.block), self.config.heads, self.config.context
        found = [_training_graph(blocks, self.block, self.random, heads, context, seed) for seed in layers]
        return [_bind_blocks(packing, graph) for graph in found]

    def encode(
        self,
        packing: Packing,
        graphs: Sequence[Any],
        tokens: Tensor,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> EncoderOutput:
        if return_weights and any(isinstance(graph, tuple) for graph in graphs):
            blocks = -(-packing.token_mask.shape[1] // self.block)
            graphs = [_bind_blocks(packing, _evaluation_graph(blocks, self.block, self.random))] * len(graphs)
        return super().encode(packing, graphs, tokens, types, positions, return_states, return_weights)


def _bind_blocks(packing: Packing, graph: Graph) -> Graph:
    """A graph over whole blocks, restricted to the tokens of a packing."""
    if packing.separate:
        return packing.bind_each([graph] * len(packing.lengths))
    return graph.subgraph(torch.arange(graph.num_dst) < packing.token_mask.shape[1]).to(packing.token_mask.device)


class WithCopies(MessagePassing):
    """`MessagePassing` over a graph, or over a pair of a graph and the nodes that its sources are copies of."""

    def forward(self, x: Tensor, graph: Any = None, source: Any = None, *given: Any, **options: Any) -> Any:
        if isinstance(graph, tuple):
            graph, nodes = graph
            source = x.index_select(-2, nodes)
        return super().forward(x, graph, source, *given, **options)


def _with_copies(packing: Packing, size: int, random: int) -> tuple[Graph, Tensor]:
    """The edges of `_evaluation_graph` over a packing, with copied nodes among the sources: the graph, and the node of
    each source, int64 [N_src]."""
    length, device = packing.token_mask.shape[1], packing.token_mask.device
    topology, again = Topology.of(_after_copies, size, random), _copied(length, size, random)
    if not packing.separate:
        return topology.bind(length, len(again)).to(device), again.to(device)
    whole, parts, nodes, before = topology.bind(len(again)), [], [], 0
    for keep in packing.token_mask.cpu():
        kept, copies = keep[again], int(keep[again[:-length]].sum())
        runs = whole.subgraph(kept).runs
        parts.append(Graph.from_runs(runs.take(np.arange(copies, runs.num_dst))))
        nodes.append(before + (keep.cumsum(0) - 1)[again][kept])
        before += int(keep.sum())
    return batch(parts).to(device), torch.cat(nodes).to(device)


def _after_copies(i: np.ndarray, num_src: int, size: int, random: int) -> list[tuple[Any, Any]]:
    """The edges of `_evaluation_graph`, whose sources are `random` copies of the first block and then all nodes. If
    there are as many destinations, the copies have no in-neighbors."""
    more = random * size
    node = i + num_src - len(i)
    begin, last = (node - more) // size * size + more, (num_src - more - 1) // size * size + more
    inner, ends = (begin > more) & (begin < last), (node >= more) & ((begin == more) | (begin >= last))
    return [
        (np.where(ends, more, 0), np.where(ends, num_src, 0)),
        (0, np.where(inner, more + size, 0)),
        (begin - size, np.where(inner, begin + 2 * size, 0)),
        (last, np.where(inner, num_src, 0)),
    ]


def _copied(length: int, size: int, random: int) -> Tensor:
    """The node of each source of `_after_copies`."""
    return torch.cat([torch.arange(size).repeat(random), torch.arange(length)])


@cached_graph
def _evaluation_graph(blocks: int, size: int, random: int) -> Graph:
    pairs = _pairs(np.zeros((blocks - 2, random), np.int64))
    with torch.inference_mode(False):
        return from_blocks(pairs, size, blocks)


@cached_graph
def _training_graph(blocks: int, size: int, random: int, heads: int, context: int, seed: int) -> Graph:
    pairs = [_pairs(table) for table in draw_blocks(blocks, size, random, heads, context, seed)]
    head = np.repeat(np.arange(heads), [pair.shape[1] for pair in pairs])
    with torch.inference_mode(False):
        return from_blocks(np.concatenate(pairs, 1), size, blocks, edge_type=torch.from_numpy(head))


def _pairs(table: np.ndarray) -> np.ndarray:
    """(source block, destination block), int64 [2, K]; `table` [blocks - 2, random] holds the random source blocks."""
    last = len(table) + 1
    inner = [{0, i - 1, i, i + 1, last} for i in range(1, last)]
    sources = [range(last + 1), *([*near, *more] for near, more in zip(inner, table, strict=True)), range(last + 1)]
    return np.array([(src, dst) for dst, blocks in enumerate(sources) for src in blocks], np.int64).T


def draw_blocks(blocks: int, size: int, random: int, heads: int, context: int, seed: int) -> np.ndarray:
    """The blocks that transformers draws in training, int64 [heads, blocks - 2, random].

    Lengths of 1024, 3072 and 4096 tokens draw as the paper's own program did, from the first 1024 tokens of the longest
    sentence there can be; other lengths draw from the first 2 * random + 5 blocks. Blocks that are sources anyway are
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
