"""Translation by aligning (Bahdanau, Cho, Bengio 2015): each word that is written hears the words that are read.

encoder    a recurrent network both ways; the annotation h_j of a word is its two states side by side
decoder    a recurrent network whose state s hears the annotations before each word:
           MessagePassing(complete(), "sum", None, AdditiveV2(dim, dim, activation=F.tanh, ...))(s, source=h)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from mpnn.attention import AdditiveV2
from mpnn.decoding import Cache
from mpnn.dropout import Dropout
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import looked_up
from mpnn.models.parts.crossing import Crossing
from mpnn.models.parts.generation import evaluating, generate
from mpnn.models.parts.losses import next_word_loss
from mpnn.models.parts.packing import Packing, all_kept
from mpnn.models.saving import Model


@dataclass(frozen=True, eq=False)
class Annotations:
    """What the decoder hears of sources, `packed` as `packing` has it, and the state [B, dim] that it begins in;
    `heard` keeps U h_j, which is the same for each word."""

    packed: Tensor
    packing: Packing
    state: Tensor
    heard: Cache = field(default_factory=lambda: Cache(sys.maxsize))


class Seq2Seq(Model):
    """A recurrent encoder and decoder with attention; section 3 and appendix A.2 of the paper:

        a_ij = softmax_j( v . tanh(W s_{i-1} + U h_j) ),   c_i = sum_j a_ij h_j                 `align`, one operator
        s_i  = GRU(s_{i-1}, [e(y_{i-1}) || c_i])
        p(y_i) = softmax( W_o maxout(V [s_{i-1} || e(y_{i-1}) || c_i]) )

    from s_0 = tanh(W_s h_1 backward). The GRU is torch's, which resets a state after it is mapped.

    Args:
        vocabulary, target_vocabulary: numbers of tokens of both languages. embedding: width of e. dim: of s, even, as
            maxout takes pairs; the defaults are the paper's. start, eos: what a translation begins and ends with.
        dropout: of embeddings and of what maxout gives, in training.
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
        self.start, self.eos = start, eos
        self.source, self.target = nn.Embedding(vocabulary, embedding), nn.Embedding(target_vocabulary, embedding)
        self.dropout = Dropout(dropout)
        self.reader = nn.GRU(embedding, dim, batch_first=True, bidirectional=True)
        self.to_state = nn.Linear(dim, dim)
        self.align = MessagePassing(
            complete(),
            "sum",
            None,
            AdditiveV2(dim, dim, activation=F.tanh, source_dim=2 * dim, bias=False, map_value=False),
        )
        self.writer = nn.GRUCell(embedding + 2 * dim, dim)
        self.readout = nn.Linear(dim + embedding + 2 * dim, dim)
        self.to_logits = nn.Linear(dim // 2, target_vocabulary)

    def forward(
        self, source: Tensor, target: Tensor, source_keep: Tensor | None = None, return_weights: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits of the word that follows each word of the target, all of which are given.

        Args:
            source: int64 [B, N]. target: int64 [B, M], from `start` on.
            source_keep: bool [B, N], which places hold words: of each sentence the first, at least one; default: all.
            return_weights: also return who was heard, a_ij [B, M, N].

        Returns:
            [B, M, target_vocabulary], or (logits, weights).
        """
        heard = self.encode(source, source_keep)
        state, logits, weights = heard.state, [], []
        for word in target.unbind(1):
            step, state, weight = self.step(word, state, heard)
            logits.append(step)
            weights.append(weight)
        found = torch.stack(logits, 1)
        return (found, torch.stack(weights, 1)) if return_weights else found

    def encode(self, source: Tensor, keep: Tensor | None = None) -> Annotations:
        """The annotations of sources [B, N]."""
        packing = Packing.of(all_kept(source) if keep is None else keep)
        lengths = packing.keep.sum(1)
        if bool((packing.keep.cummin(1).values.sum(1) != lengths).any()) or bool((lengths == 0).any()):
            raise ValueError(
                "source_keep must keep the first places of each sentence, at least one: padding comes last"
            )
        x = self.dropout(looked_up(self.source, source, "token"))
        states, _ = self.reader(pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False))
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=source.shape[1])
        backward = states[:, 0].chunk(2, -1)[1]
        return Annotations(packing.pack(states), packing, self.to_state(backward).tanh())

    def step(self, word: Tensor, state: Tensor, heard: Annotations) -> tuple[Tensor, Tensor, Tensor]:
        """The last word int64 [B] and the state before it [B, dim] -> logits of the next word [B, target_vocabulary],
        the state after it, and who was heard, [B, N]."""
        crossing = Crossing(Packing.of(all_kept(word[:, None])), heard.packing)
        message, weights = crossing.hear(self.align, state[:, None], heard.packed, True, heard.heard)
        known = torch.cat([self.dropout(looked_up(self.target, word, "token")), message[:, 0]], -1)
        pairs = self.readout(torch.cat([state, known], -1)).unflatten(-1, (-1, 2))
        return self.to_logits(self.dropout(pairs.amax(-1))), self.writer(known, state), weights[:, 0, 0]

    def loss(
        self, source: Tensor, target: Tensor, source_keep: Tensor | None = None, target_keep: Tensor | None = None
    ) -> Tensor:
        """Mean cross-entropy in nats of each word of the target but the first, which is `start`, given those before it;
        target_keep: bool [B, M], which places hold words; default: all."""
        logits = self(source, target[:, :-1], source_keep)
        return next_word_loss(logits, target, target_keep)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        steps: int,
        source_keep: Tensor | None = None,
        *,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Translations of sources [B, N] from `start` on to `eos`, of up to `steps` words more: int64 [B, 1 + steps] or
        fewer. Greedy by default, else drawn at this temperature."""
        with evaluating(self):
            heard = self.encode(source, source_keep)
            state = heard.state

            def forward(tokens: Tensor, cache: Cache) -> Tensor:
                nonlocal state  # all that a recurrent network keeps
                logits, state, _ = self.step(tokens[:, -1], state, heard)
                return logits[:, None]

            begin = torch.full((len(source), 1), self.start, device=source.device)
            return generate(forward, begin, steps, temperature=temperature, eos=self.eos, generator=generator)
