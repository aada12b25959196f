"""Linformer: attention in linear time. Each token attends to a few landmarks, learned mixtures of all tokens."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import Attention
from mpnn.graphs import complete
from mpnn.models.text.bert import Bert, BertConfig, update
from mpnn.round import Round
from mpnn.scores import Dot
from mpnn.update.maps import Linear

COMPLETE = complete()


class Linformer(Attention):
    """Linformer attention (Wang et al. 2020, eq. 7), for an operator over a complete graph.

        K' = W_K (E h),   V' = W_V (F h)                  k landmarks, each a learned mixture of all N sources
        m_i = W_O || _h softmax_j( <W_Q h_i, K'_j> / sqrt(D) ) V'_j          over the k landmarks

    These are two rounds over rectangular graphs. The first, over `complete().bind(k, N)`, has the learned weights E and
    F, shared by all heads (headwise sharing in the paper). The second is attention over `complete().bind(N, k)`;
    `return_weights` returns the weights of its edges. Both cost O(N k) instead of O(N^2).

        MessagePassing(complete(), "sum", PreNorm(512, FeedForward(512)), Linformer(512, 8, length=4096))

    Args:
        dim: width of the features; must be a multiple of `heads`.
        heads: number of heads.
        length: maximum number of sources. Shorter sequences use the first columns of E and F.
        landmarks: number of landmarks, k.
        bias: whether the four linear maps have biases.
        dropout: of attention weights, in training.

    Raises:
        ValueError: if `heads` does not divide `dim`, or if `length` or `landmarks` is less than 1.
    """

    depends_on = "row"  # landmarks are mixed from all sources
    reads = "to_query", "to_key"

    def __init__(
        self, dim: int, heads: int, *, length: int, landmarks: int = 256, bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise ValueError(f"{heads} heads do not divide a width of {dim}")
        if length < 1 or landmarks < 1:
            raise ValueError(f"length and landmarks must be at least 1; got {length} and {landmarks}")
        self.heads = heads
        self.head_dim = dim // heads
        self.dropout = dropout
        self.to_query, self.to_key, self.to_value, self.to_out = (Linear(dim, dim, bias) for _ in range(4))
        self.mix_keys, self.mix_values = (nn.Parameter(torch.empty(landmarks, length)) for _ in range(2))
        for mix in (self.mix_keys, self.mix_values):
            nn.init.normal_(mix, std=length**-0.5)  # keeps the scale of the mixed features

    def forward(self, dst: Tensor, src: Tensor, graph: Graph, edge_attr: Tensor | None = None) -> Round:
        landmarks, length = self.mix_keys.shape
        if not graph.runs.is_complete:
            raise ValueError(f"Linformer's landmarks mix all sources, so it needs complete(); got {graph}")
        if graph.num_src > length:
            raise ValueError(f"got {graph.num_src} sources, but this Linformer was made with length={length}")
        key, value = (
            to(mix[:, : graph.num_src] @ src).unflatten(-1, (self.heads, -1))
            for to, mix in ((self.to_key, self.mix_keys), (self.to_value, self.mix_values))
        )
        query = self.to_query(dst).unflatten(-1, (self.heads, -1))
        from_landmarks = COMPLETE.bind(graph.num_dst, landmarks).to(graph.device)
        return Round(from_landmarks, value, Dot(query, key, self.head_dim**-0.5))

    def merge(self, out: Tensor) -> Tensor:
        return self.to_out(out.flatten(-2))


@dataclass(frozen=True)
class LinformerConfig(BertConfig):
    """Configuration of a Linformer: that of BERT, and `landmarks`, the number of landmarks of each layer."""

    landmarks: int = 256


class LinformerEncoder(Bert):
    """BERT with Linformer attention.

    All sentences of a batch must have the same length, without padding, because the mixtures are learned per position.
    """

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
