"""Sparse Transformer (Child et al. 2019): GPT over sparse graphs that reach all earlier tokens in two rounds.

topology   strided(s) = near | every                   near: the last s tokens; every: every s-th token before
           fixed(b, c) = own block | summaries         summaries: the last c tokens of each earlier block
attention  PerHead(dim, heads)                         all heads share a pattern, or each has its own
Aggregate, update and the rest of the model are those of GPT-2.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal

import torch

from mpnn import Graph, MessagePassing, Topology
from mpnn.graphs import causal, fixed, from_edges, identity, strided, window
from mpnn.models.layers.per_head import PerHead
from mpnn.models.text.gpt import CausalTransformer, GPTConfig, update


def strided_patterns(stride: int) -> list[Topology]:
    """Returns the two parts of `strided(stride)` (Child et al. 2019, section 4.3): the last `stride` nodes, and every
    `stride`-th node up to the node itself."""
    near = causal() & window(stride - 1)
    return [near, strided(stride) - near | identity()]


def fixed_patterns(block: int, summary: int = 1) -> list[Topology]:
    """Returns the two parts of `fixed(block, summary)` (section 4.3): the own block of a node, and the last `summary`
    nodes of each earlier block together with the node itself."""
    own = fixed(block, 0)
    return [own, fixed(block, summary) - own | identity()]


class SparseTransformer(CausalTransformer):
    """Sparse Transformer (Child et al. 2019), with the three ways of section 5.1 to assign patterns.

    Args:
        config: as for `CausalTransformer`.
        patterns: causal topologies, such as those of `strided_patterns` or `fixed_patterns`.
        by: "layers": layers use the patterns in turn. "heads": the heads of every layer use them in turn. "none": all
            layers and heads use the union of the patterns.

    Raises:
        ValueError: if `by` is none of these, or if a node attends to a later one.
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
            raise ValueError(f'by must be "layers", "heads" or "none"; got {by!r}')

    @staticmethod
    def layer(config: GPTConfig, graph: Topology) -> MessagePassing:
        attention = PerHead(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(graph, "sum", update(config), attention)


@dataclass(frozen=True, repr=False)
class ByHead(Topology):
    """One pattern per head: a graph with the edges of all patterns, those of head h with edge type h, for `PerHead`."""

    patterns: tuple[Topology, ...]

    def _graph(self, num_dst: int, num_src: int) -> Graph:
        edges = [pattern.bind(num_dst, num_src).edge_index for pattern in self.patterns]
        head = torch.repeat_interleave(torch.tensor([part.shape[1] for part in edges]))
        return from_edges(torch.cat(edges, 1), num_src=num_src, num_dst=num_dst, edge_type=head)

    def __repr__(self) -> str:
        return f"by_head({', '.join(map(str, self.patterns))})"
