"""Longformer (Beltagy et al. 2020): a token hears its neighbours, and a few global tokens hear and are heard by all.

topology   window(w // 2) | global_nodes(hubs)     hubs of each sentence's own: its first token, a question, ...
attention  DotProduct(dim, heads)                  W_Q, W_K, W_V; rows of hubs have their own three (section 3.1)
aggregate  "sum"
update     PostNorm(dim, FeedForward(dim))         as BERT

Everything else is BERT's, or RoBERTa's with `BertConfig(after_pad=True)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.graph import Graph
from mpnn.graphs import batch, complete, global_nodes, window
from mpnn.message_passing import MessagePassing
from mpnn.models.bert import Bert, BertConfig, Encoded, update
from mpnn.models.parts.packing import Packing, all_kept, refuse_while_tracing
from mpnn.topology import Topology


@dataclass(frozen=True, eq=False)
class Hubs:
    """Who hears whom in a layer: `near`, over all tokens; and the tokens `index`, int64 [G], that hear over `wide`, a
    graph of G destinations, instead."""

    near: Graph
    index: Tensor
    wide: Graph


class HubLayer(nn.Module):
    """Two rounds whose destinations share no token, and one update:

        m = near(x),   m_g = wide(x_g, x) for every hub g,   y = update(x, m)

    Both end in one map W_O.
    """

    def __init__(self, config: BertConfig, graph: Topology) -> None:
        super().__init__()
        near, wide = (DotProduct(config.dim, config.heads, dropout=config.attention_dropout) for _ in range(2))
        wide.to_out = near.to_out
        self.graph = graph
        self.near = MessagePassing(graph, "sum", None, near)
        self.wide = MessagePassing(None, "sum", None, wide)
        self.update = update(config)

    def forward(self, x: Tensor, graph: Hubs) -> Tensor:
        """Features of packed tokens, [T, dim]."""
        message = self.near(x, graph.near)
        if len(graph.index):
            message = message.index_copy(0, graph.index, self.wide(x[graph.index], graph.wide, source=x))
        return self.update(x, message)


class Longformer(Bert):
    """A BERT whose tokens hear a window, and whose hubs, which may differ in every sentence, hear and are heard by all.

    Args:
        config: as BERT's. graph: what tokens hear besides the hubs, for all layers or for each; default: the published
            `window(256)`. `window(r, dilation=d)` and any other topology will do. pooler: as BERT's.
    """

    def __init__(
        self, config: BertConfig, graph: Topology | Sequence[Topology] | None = None, *, pooler: bool = True
    ) -> None:
        super().__init__(config, window(256) if graph is None else graph, pooler=pooler)

    @staticmethod
    def layer(config: BertConfig, graph: Topology) -> nn.Module:
        return HubLayer(config, graph)

    def forward(  # type: ignore[override]
        self,
        tokens: Tensor,
        keep: Tensor | None = None,
        types: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        hubs: Tensor | None = None,
        return_states: bool = False,
    ) -> Encoded:
        """One pass over a batch of sentences.

        Args:
            hubs: bool [B, N], the tokens that hear and are heard by all of their sentence; default: the first of each.
            tokens, keep, types, positions, return_states: as `Bert.forward`. Windows go by places: they reach no
                further where places are left out.
        """
        refuse_while_tracing("which tokens hear and are heard by all decides the graph")
        keep = all_kept(tokens) if keep is None else keep
        packing = Packing.of(keep, apart=True)
        if hubs is None:
            hubs = keep & (keep.cumsum(1) == 1)
        if hubs.shape != keep.shape or hubs.dtype != torch.bool:
            raise ValueError(f"hubs must be bool {list(keep.shape)}; got {hubs.dtype} of shape {list(hubs.shape)}")
        return self.encoded(packing, self.heard(packing, hubs & keep), tokens, types, positions, return_states)

    def heard(self, packing: Packing, hubs: Tensor) -> list[Hubs]:
        """Who hears whom in each layer."""
        length = hubs.shape[1]
        index = packing.pack(hubs).nonzero().squeeze(1)
        everybody = [complete().bind(g, n) for g, n in zip(hubs.sum(1).tolist(), packing.lengths, strict=True)]
        wide = batch(everybody or [complete().bind(0)]).to(hubs.device)
        stars = [global_nodes(row.nonzero().squeeze(1)) for row in hubs.cpu()]

        def near(topology: Topology) -> Graph:
            return packing.bind_each([topology.bind(length) | star.bind(length) for star in stars])

        topologies = [layer.graph for layer in self.layers if isinstance(layer, HubLayer)]
        bound = {topology: near(topology) for topology in set(topologies)}
        return [Hubs(bound[topology], index, wide) for topology in topologies]
