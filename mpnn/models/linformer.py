"""Linformer: attention in linear time, because everybody hears a few landmarks instead of everybody."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn import check
from mpnn.attention import Attention, Terms
from mpnn.graph import Graph
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.bert import Bert, BertConfig, update
from mpnn.scores import Dot
from mpnn.topology import Topology

COMPLETE = complete()


class Linformer(Attention):
    """Linformer's attention (Wang et al. 2020, eq. 7), for an operator over a complete graph.

        K' = W_K (E h),   V' = W_V (F h)                  k landmarks, each a learned mixture of all N sources
        m_i = W_O || _h softmax_j( <W_Q h_i, K'_j> / sqrt(D) ) V'_j          over the k landmarks

    Two rounds over rectangular graphs: `complete().bind(k, N)`, whose weights are the learned E and F, shared by all
    heads (the paper's headwise sharing), and then `complete().bind(N, k)`, whose edges `return_weights` speaks of. Both
    cost N k instead of N^2.

        MessagePassing(complete(), "sum", PreNorm(512, FeedForward(512)), Linformer(512, 8, length=4096))

    Args:
        dim: width of the features, a multiple of `heads`. length: of the longest sequence of sources; shorter ones use
            the first columns of E and F. landmarks: k, their number. bias: whether the four maps have biases.
        dropout: of attention weights, in training.
    """

    def __init__(
        self, dim: int, heads: int, *, length: int, landmarks: int = 256, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if length < 1 or landmarks < 1:
            raise ValueError(f"length and landmarks must be at least 1; got {length} and {landmarks}")
        self.heads, self.head_dim, self.dropout = heads, dim // heads, dropout
        self.to_query, self.to_key, self.to_value, self.to_out = (nn.Linear(dim, dim, bias) for _ in range(4))
        self.mix_keys, self.mix_values = (nn.Parameter(torch.empty(landmarks, length)) for _ in range(2))
        for mix in (self.mix_keys, self.mix_values):
            nn.init.normal_(mix, std=length**-0.5)  # landmarks of about the size of what they mix

    def takes(self) -> tuple[check.Takes, check.Takes]:
        return check.takes(self.to_query), check.takes(self.to_key)

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Terms:
        landmarks, length = self.mix_keys.shape
        if not graph.runs.is_complete:
            raise ValueError(f"Linformer's landmarks mix all sources, so it needs complete(); the graph is {graph}")
        if graph.num_src > length:
            raise ValueError(f"got {graph.num_src} sources, but this Linformer was made with length={length}")
        key, value = (
            to(mix[:, : graph.num_src] @ src).unflatten(-1, (self.heads, -1))
            for to, mix in ((self.to_key, self.mix_keys), (self.to_value, self.mix_values))
        )
        query = self.to_query(dst).unflatten(-1, (self.heads, -1))
        from_landmarks = COMPLETE.bind(graph.num_dst, landmarks).to(graph.device)
        return Terms(value, Dot(query, key, self.head_dim**-0.5), graph=from_landmarks)

    def merge(self, out: Tensor) -> Tensor:
        return self.to_out(out.flatten(-2))


@dataclass(frozen=True)
class LinformerConfig(BertConfig):
    """Sizes of a Linformer: BERT's, and `landmarks`, how many mixtures of its tokens a sentence is heard through."""

    landmarks: int = 256


class LinformerEncoder(Bert):
    """BERT with Linformer's attention. Sentences of a batch are of one length, without padding: what is learned are
    mixtures of places, whoever stands there."""

    def __init__(self, config: LinformerConfig, *, pooler: bool = True) -> None:
        super().__init__(config, pooler=pooler)

    @staticmethod
    def layer(config: BertConfig, graph: Topology) -> MessagePassing:
        assert isinstance(config, LinformerConfig)
        attention = Linformer(
            config.dim,
            config.heads,
            length=config.context,
            landmarks=config.landmarks,
            dropout=config.attention_dropout,
        )
        return MessagePassing(graph, "sum", update(config), attention)
