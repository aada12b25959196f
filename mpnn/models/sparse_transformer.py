"""Sparse Transformer: GPT, whose tokens reach everybody in two steps, each of them to few.

topology   strided(s) = near | every                   near: the last s tokens; every: each s-th one before
           fixed(b, c) = own block | summaries         the last c tokens of each block stand for it
attention  PerHead(dim, heads)                         heads that share a pattern, or have one each
aggregate, update and the model around them are GPT-2's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

import torch

from mpnn.graph import Graph
from mpnn.graphs import causal, fixed, from_edges, identity, strided, window
from mpnn.message_passing import MessagePassing
from mpnn.models.gpt import GPT2, GPTConfig, update
from mpnn.models.parts.per_head import PerHead
from mpnn.topology import Topology


def strided_patterns(stride: int) -> list[Topology]:
    """The two parts of `strided(stride)` (Child et al. 2019, section 4.3): the last `stride` nodes, and oneself and
    every `stride`-th one before."""
    near = causal() & window(stride - 1)
    return [near, strided(stride) - near | identity()]


def fixed_patterns(block: int, summary: int = 1) -> list[Topology]:
    """The two parts of `fixed(block, summary)` (section 4.3): one's own block, and oneself and the last `summary` nodes
    of each block before."""
    own = fixed(block, 0)
    return [own, fixed(block, summary) - own | identity()]


class SparseTransformer(GPT2):
    """Sparse Transformer (Child et al. 2019), in the three ways of its section 5.1 to share out patterns.

    Args:
        config: sizes, as GPT-2's. patterns: those of `strided_patterns`, `fixed_patterns` or any others.
        by: "layers": layer after layer takes the next pattern. "heads": head after head does, in every layer. "none":
            all hear over the union.
    """

    def __init__(
        self,
        config: GPTConfig,
        patterns: Sequence[Topology],
        by: Literal["layers", "heads", "none"] = "none",
    ) -> None:
        if by == "layers":
            super().__init__(config, [patterns[k % len(patterns)] for k in range(config.layers)])
        elif by == "heads":
            super().__init__(config, ByHead(tuple(patterns[k % len(patterns)] for k in range(config.heads))))
        elif by == "none":
            super().__init__(config, reduce(or_, patterns))
        else:
            raise ValueError(f'patterns are shared out by "layers", "heads" or "none"; got {by!r}')

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        attention = PerHead(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update(config), attention)


@dataclass(frozen=True, repr=False)
class ByHead(Topology):
    """A pattern for each head: the edges of all, those of head h in class h, as `PerHead` hears them."""

    patterns: tuple[Topology, ...]

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        edges = [pattern.bind(num_dst, num_src).edge_index for pattern in self.patterns]
        head = torch.repeat_interleave(torch.tensor([part.shape[1] for part in edges]))
        return from_edges(torch.cat(edges, 1), num_src=num_src, num_dst=num_dst, edge_type=head)

    def __repr__(self) -> str:
        return f"by_head({', '.join(map(str, self.patterns))})"
