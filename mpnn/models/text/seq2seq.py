"""Recurrent translation with attention (Bahdanau, Cho, Bengio 2015).

encoder    bidirectional recurrent network; the annotation h_j of a word is the concatenation of its two states
decoder    recurrent network whose state s attends to the annotations before each word:
           MessagePassing(complete(), "sum", None, AdditiveV2(dim, dim, activation=F.tanh, ...))(s, source=h)
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mpnn import MessagePassing
from mpnn.attention import AdditiveV2
from mpnn.decoding.cache import KVCache
from mpnn.decoding.generation import eval_mode, generate
from mpnn.graph.arguments import MAX_VALUE
from mpnn.graphs import complete
from mpnn.models.layers.blocks import lookup
from mpnn.models.layers.cross_attention import CrossAttention
from mpnn.models.layers.losses import next_word_loss
from mpnn.models.layers.packing import Packing, token_mask
from mpnn.models.saving import Model
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear


@dataclass(frozen=True, eq=False)
class Annotations:
    """EncoderOutput sources.

    packed: annotations h_j in the layout of `packing`. state: initial state of the decoder, [B, dim]. cache: holds
    U h_j, which is the same at every decoding step.
    """

    packed: Tensor
    packing: Packing
    state: Tensor
    cache: KVCache = field(default_factory=lambda: KVCache(MAX_VALUE))


class Seq2Seq(Model):
    """Recurrent encoder and decoder with attention (section 3 and appendix A.2 of the paper):

        a_ij = softmax_j( v . tanh(W s_{i-1} + U h_j) ),   c_i = sum_j a_ij h_j                 `align`, one operator
        s_i  = GRU(s_{i-1}, [e(y_{i-1}) || c_i])
        p(y_i) = softmax( W_o maxout(V [s_{i-1} || e(y_{i-1}) || c_i]) )

    The initial state is s_0 = tanh(W_s h_1), with h_1 the backward state of the first word. The GRU is that of torch,
    which applies the reset gate after the linear map. The default widths are those of the paper.

    Args:
        vocabulary, target_vocabulary: numbers of tokens of both languages.
        embedding: width of the embeddings e.
        dim: width of the state s; must be even, because maxout takes pairs.
        start, eos: first and last token of a target.
        dropout: of embeddings and of the output of maxout, in training.

    Raises:
        ValueError: if `dim` is odd.
    """

    def __init__(
        self,
        vocabulary: int,
        target_vocabulary: int,
        embedding: int = 620,
        dim: int = 1000,
        *,
        start: int = 1,
        eos: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % 2:
            raise ValueError(f"maxout takes pairs of {dim} numbers; dim must be even")
        self.start = start
        self.eos = eos
        self.source, self.target = nn.Embedding(vocabulary, embedding), nn.Embedding(target_vocabulary, embedding)
        self.dropout = Dropout(dropout)
        self.reader = nn.GRU(embedding, dim, batch_first=True, bidirectional=True)
        self.to_state = Linear(dim, dim)
        self.align = MessagePassing(
            complete(),
            "sum",
            None,
            AdditiveV2(dim, dim, activation=F.tanh, source_dim=2 * dim, bias=False, map_value=False),
        )
        self.writer = nn.GRUCell(embedding + 2 * dim, dim)
        self.readout = Linear(dim + embedding + 2 * dim, dim)
        self.to_logits = Linear(dim // 2, target_vocabulary)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding_mask: Tensor | None = None,
        return_weights: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the logits of the word after each target word (teacher forcing).

        Args:
            source: int64 [B, N].
            target: int64 [B, M]; each row starts with `start`.
            source_padding_mask: bool [B, N], True at padding; default: no padding. Each sentence has at least one
                word, and its padding comes last.
            return_weights: also return the attention weights a_ij, [B, M, N].

        Returns:
            float [B, M, target_vocabulary], or (logits, weights).
        """
        annotations = self.encode(source, padding_mask=source_padding_mask)
        state = annotations.state
        logits = []
        weights = []
        for word in target.unbind(1):
            step_logits, state, weight = self.step(word, state, annotations)
            logits.append(step_logits)
            weights.append(weight)
        stacked = torch.stack(logits, 1)
        return (stacked, torch.stack(weights, 1)) if return_weights else stacked

    def encode(self, source: Tensor, *, padding_mask: Tensor | None = None) -> Annotations:
        """Encodes sources [B, N].

        Raises:
            ValueError: if a sentence has no word, or padding before its last word.
        """
        mask = token_mask(source, padding_mask)
        packing = Packing.of(mask)
        lengths = mask.sum(1)
        if bool((mask.cummin(1).values.sum(1) != lengths).any()) or bool((lengths == 0).any()):
            raise ValueError(
                "padding must follow the words of each sentence, at least one word: the padding mask must be False at "
                "the first positions"
            )
        x = self.dropout(lookup(self.source, source, "token"))
        states, _ = self.reader(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        backward = states[:, 0].chunk(2, -1)[1]
        return Annotations(packing.pack(states), packing, self.to_state(backward).tanh())

    def step(self, word: Tensor, state: Tensor, annotations: Annotations) -> tuple[Tensor, Tensor, Tensor]:
        """Runs one step of the decoder.

        Args:
            word: int64 [B], the last word.
            state: float [B, dim], the state before it.
            annotations: the output of `encode`.

        Returns:
            Logits of the next word [B, target_vocabulary], the new state [B, dim] and the attention weights [B, N].
        """
        crossing = CrossAttention(Packing.of_tokens(word[:, None]), annotations.packing)
        message, weights = crossing.attend(self.align, state[:, None], annotations.packed, True, annotations.cache)
        features = torch.cat([self.dropout(lookup(self.target, word, "token")), message[:, 0]], -1)
        pairs = self.readout(torch.cat([state, features], -1)).unflatten(-1, (-1, 2))
        return self.to_logits(self.dropout(pairs.amax(-1))), self.writer(features, state), weights[:, 0, 0]

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats of each target word after the first, given the words before it.

        The first target word is `start` and is not predicted. target_padding_mask: bool [B, M], True at
        padding; default: no padding. Other arguments are those of `forward`.
        """
        logits = self(source, target[:, :-1], source_padding_mask=source_padding_mask)
        return next_word_loss(logits, target, target_padding_mask)

    @torch.no_grad()
    def generate(self, source: Tensor, steps: int, *, padding_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Translates sources [B, N]. padding_mask: as `source_padding_mask` of `forward`.

        Each translation starts with `start` and ends with `eos` or after `steps` more words. Decoding is greedy by
        default; other options are those of `generation.generate`.

        Returns:
            int64 [B, at most 1 + steps].
        """
        with eval_mode(self):
            annotations = self.encode(source, padding_mask=padding_mask)
            state = annotations.state

            def forward(tokens: Tensor, cache: KVCache) -> Tensor:
                nonlocal state  # a recurrent network has no other cache
                logits, state, _ = self.step(tokens[:, -1], state, annotations)
                return logits[:, None]

            first = torch.full((len(source), 1), self.start, device=source.device)
            return generate(forward, first, steps, **{"temperature": 0.0, "eos": self.eos, **options})
