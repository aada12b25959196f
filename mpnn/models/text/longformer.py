"""Longformer (Beltagy et al. 2020): sliding-window attention with a few global tokens (hubs).

A token attends to its window and to the hubs of its sentence. A hub attends to all tokens of its sentence.

topology   window(w // 2) | global_nodes(hubs)     hubs may differ per sentence: the first token, a question, ...
attention  DotProduct(dim, heads)                  separate W_Q, W_K, W_V for tokens and for hubs (section 3.1)
aggregate  "sum"
update     PostNorm(dim, FeedForward(dim))         as BERT

Everything else is BERT's, or RoBERTa's with `BertConfig(after_pad=True)`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.graphs import batch, complete, global_nodes, window
from mpnn.models.layers.packing import Packing, require_eager, token_mask
from mpnn.models.text.bert import Bert, BertConfig, EncoderOutput, update


@dataclass(frozen=True, eq=False)
class Hubs:
    """The two graphs of a layer.

    near: graph over all T packed tokens. index: the hubs among them, int64 [G]. wide: graph with G destinations, the
    hubs, and T sources. It replaces the rows of hubs in `near`.
    """

    near: Graph
    index: Tensor
    wide: Graph


class HubLayer(nn.Module):
    """Windowed attention for tokens, global attention for hubs, and one update:

        m = near(x),   m_g = wide(x_g, x) for every hub g,   y = update(x, m)

    Both attentions share the output map W_O.
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
        """Maps features of packed tokens [T, dim] to [T, dim]."""
        message = self.near(x, graph.near)
        if len(graph.index):
            message = message.index_copy(0, graph.index, self.wide(x[graph.index], graph.wide, source=x))
        return self.update(x, message)


class Longformer(Bert):
    """BERT with sliding-window attention and hubs, which may differ per sentence.

    Args:
        config: as for `Bert`.
        graph: topology of the attention of all tokens, besides the hubs: one for all layers, or one per layer; default:
            `window(256)`, as in the paper. May be any topology, such as `window(r, dilation=d)`.
        pooler: as for `Bert`.
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
        types: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        padding_mask: Tensor | None = None,
        hubs: Tensor | None = None,
    ) -> EncoderOutput:
        """Encodes a batch of sentences.

        Args:
            hubs: bool [B, N], True at hubs; default: the first token of each sentence.
            tokens, types, positions, padding_mask: as for `Bert.forward`. Windows are measured in positions of the
                padded row, so padding inside a sentence counts towards the distance.

        Raises:
            ValueError: if `hubs` is not bool [B, N], or if the call is traced.
        """
        require_eager("the values of hubs decide the graph")
        mask = token_mask(tokens, padding_mask)
        packing = Packing.of(mask, separate=True)
        if hubs is None:
            hubs = mask & (mask.cumsum(1) == 1)
        if hubs.shape != mask.shape or hubs.dtype != torch.bool:
            raise ValueError(f"hubs must be bool {list(mask.shape)}; got {hubs.dtype} of shape {list(hubs.shape)}")
        return self.encode(packing, self.hub_graphs(packing, hubs & mask), tokens, types, positions)

    def hub_graphs(self, packing: Packing, hubs: Tensor) -> list[Hubs]:
        """Returns the graphs of each layer for hubs bool [B, N]."""
        length = hubs.shape[1]
        index = packing.pack(hubs).nonzero().squeeze(1)
        hub_rows = [complete().bind(g, n) for g, n in zip(hubs.sum(1).tolist(), packing.lengths, strict=True)]
        wide = batch(hub_rows or [complete().bind(0)]).to(hubs.device)
        stars = [global_nodes(row.nonzero().squeeze(1)) for row in hubs.cpu()]

        def near(topology: Topology) -> Graph:
            return packing.bind_each([topology.bind(length) | star.bind(length) for star in stars])

        topologies = [layer.graph for layer in self.layers if isinstance(layer, HubLayer)]
        bound = {topology: near(topology) for topology in set(topologies)}
        return [Hubs(bound[topology], index, wide) for topology in topologies]
