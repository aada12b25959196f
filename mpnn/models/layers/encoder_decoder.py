"""The base class of encoder-decoder models: encoding, decoding with cross-attention, loss, generation and search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from mpnn.decoding.beams import beam_search
from mpnn.decoding.cache import KVCache
from mpnn.decoding.generation import eval_mode, generate
from mpnn.maps import linear
from mpnn.message_passing import MessagePassing
from mpnn.models.layers.cross_attention import CrossAttention, StackOutput
from mpnn.models.layers.losses import next_word_loss
from mpnn.models.layers.packing import Packing
from mpnn.models.layers.rounds import run_layers
from mpnn.models.layers.word_embeddings import WordEmbeddings
from mpnn.models.saving import Model


class Options(Protocol):
    """The options that decoding and the loss read.

    start, eos: first and last token of a target. context: maximum sentence length. smoothing: label smoothing.
    """

    @property
    def start(self) -> int: ...
    @property
    def eos(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def smoothing(self) -> float: ...


class DecoderLayer(nn.Module):
    """Self-attention within the target, then cross-attention to the source."""

    def __init__(self, within: MessagePassing, across: MessagePassing) -> None:
        super().__init__()
        self.within, self.across = within, across


class EncoderDecoder(Model):
    """Base class of encoder-decoder models. Subclasses create the modules below.

    h = encoder_norm(layer_N ... layer_1(source(words)))                    `encode`
    s = decoder_norm(layer_M ... layer_1(target(words), sources = h))       `decode`
    logits = s W_token^T                                                    `logits`
    """

    config: Options
    source: WordEmbeddings
    target: WordEmbeddings
    encoder: nn.ModuleList
    decoder: nn.ModuleList
    encoder_norm: nn.Module
    decoder_norm: nn.Module

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
        source_lengths: Sequence[int] | None = None,
        target_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the logits of the word after each target word.

        Args:
            source: int64 [B, N].
            target: int64 [B, M]; each row starts with `config.start`.
            source_padding_mask, target_padding_mask: bool [B, N] and [B, M], True at padding; default: no padding.
                Padding is not computed and not attended to.
            source_lengths, target_lengths: lengths of the sentences packed in every row. They sum to N and M, and both
                have the same number of entries. Target sentence k attends to source sentence k only, and the result is
                the same as for separate rows. Cannot be combined with padding masks.

        Returns:
            float [B, M, target vocabulary]; zeros at padding.
        """
        memory = self.encode(source, padding_mask=source_padding_mask, lengths=source_lengths)
        decoded = self.decode(target, memory, padding_mask=target_padding_mask, lengths=target_lengths)
        return self.logits(decoded.last)

    def logits(self, states: Tensor) -> Tensor:
        """Returns logits [..., vocabulary] of decoder states [..., dim]: products with the target token embeddings."""
        return linear(states, self.target.token.weight)

    def encode(
        self,
        source: Tensor,
        *,
        padding_mask: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        return_weights: bool = False,
    ) -> StackOutput:
        """Runs the encoder.

        Args:
            source: int64 [B, N], or vectors [B, N, dim] that replace the token embeddings.
            padding_mask: bool [B, N], True at padding; default: no padding.
            lengths: lengths of the sentences packed in every row.
            return_weights: also return the attention weights of every layer.
        """
        packing = Packing.of_tokens(source, padding_mask, lengths)
        graphs = [packing.bind(layer.graph) for layer in self.encoder if isinstance(layer, MessagePassing)]
        x, weights = run_layers(self.encoder, graphs, self.source(source, packing), return_weights=return_weights)
        return StackOutput(self.encoder_norm(x), packing, tuple(map(packing.unpack_weights, weights, graphs)))

    def decode(
        self,
        target: Tensor,
        memory: StackOutput,
        *,
        padding_mask: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> StackOutput:
        """Runs the decoder.

        Args:
            target: int64 [B, M], or vectors [B, M, dim] that replace the token embeddings.
            memory: the output of `encode`.
            padding_mask: bool [B, M], True at padding; default: no padding.
            lengths: lengths of the sentences packed in every row.
            cache: keys and values of the preceding target words. `target` then holds the words that follow them.
            return_weights: also return the attention weights of every layer.

        Raises:
            ValueError: if `cache` is combined with padding, `lengths` or `return_weights`.
        """
        packing = Packing.of_tokens(target, padding_mask, lengths)
        if cache is not None and (return_weights or lengths is not None or not bool(packing.token_mask.all())):
            raise ValueError(
                "with a cache, rows must have no padding and one sentence each, and no attention weights are returned"
            )
        across = CrossAttention(packing, memory.packing)
        x = self.target(target, packing, 0 if cache is None else cache.count)
        self_weights, cross_weights = [], []
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            graph = packing.bind(layer.within.graph) if cache is None else None
            x = layer.within(x, graph, cache=cache, return_weights=return_weights)
            if return_weights:
                x, weights = x
                self_weights.append(packing.unpack_weights(weights, packing.bind(layer.within.graph)))
            x = across.attend(layer.across, x, memory.packed, return_weights, None if cache is None else memory.cache)
            if return_weights:
                x, weights = x
                cross_weights.append(weights)
        return StackOutput(self.decoder_norm(x), packing, tuple(self_weights), tuple(cross_weights))

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
        source_lengths: Sequence[int] | None = None,
        target_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats of each target word after the first, given the words before it.

        Labels are smoothed by `config.smoothing`. The first word of each sentence is `config.start` and is not
        predicted. Arguments are those of `forward`.
        """
        if target_lengths is not None or source_lengths is not None:
            logits = self(
                source,
                target,
                source_padding_mask=source_padding_mask,
                target_padding_mask=target_padding_mask,
                source_lengths=source_lengths,
                target_lengths=target_lengths,
            )[:, :-1]
            first = Packing.of_tokens(target, lengths=target_lengths).position_ids() == 0
            return next_word_loss(logits, target, first.expand(target.shape), self.config.smoothing)
        logits = self(
            source,
            target[:, :-1],
            source_padding_mask=source_padding_mask,
            target_padding_mask=None if target_padding_mask is None else target_padding_mask[:, :-1],
        )
        return next_word_loss(logits, target, target_padding_mask, self.config.smoothing)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        steps: int,
        *,
        padding_mask: Tensor | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Translates sources [B, N]. padding_mask: bool [B, N], True at padding; default: no padding.

        Each translation starts with `config.start` and ends with `config.eos` or after `steps` more words. Decoding is
        greedy by default; otherwise words are sampled as in `generation.generate`. The source is encoded once, and each
        word is computed once.

        Returns:
            int64 [B, at most 1 + steps].
        """
        with self._translation(source, steps, padding_mask) as (start, memory):

            def forward(tokens: Tensor, cache: KVCache) -> Tensor:
                return self.logits(self.decode(tokens, memory, cache=cache).last)

            return generate(
                forward,
                start,
                steps,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                eos=self.config.eos,
                generator=generator,
            )

    @torch.no_grad()
    def search(
        self,
        source: Tensor,
        steps: int,
        *,
        padding_mask: Tensor | None = None,
        beams: int = 4,
        penalty: float = 0.6,
    ) -> Tensor:
        """Translates as `generate`, but by `beams.beam_search`. The defaults are those of the paper (section 6.1)."""
        with self._translation(source, steps, padding_mask) as (start, memory):
            cache = KVCache(steps + 1)

            def step(tokens: Tensor) -> Tensor:
                return self.logits(self.decode(tokens, memory, cache=cache).last[:, -1])

            def select(index: Tensor) -> None:
                nonlocal memory
                cache.select(index)
                memory = memory.select(index)

            return beam_search(step, select, start, steps, beams=beams, eos=self.config.eos, penalty=penalty)

    @contextmanager
    def _translation(
        self, source: Tensor, steps: int, padding_mask: Tensor | None
    ) -> Iterator[tuple[Tensor, StackOutput]]:
        """Yields the first words [B, 1] and the encoded source, with the model in evaluation mode."""
        if steps >= self.config.context:
            raise ValueError(f"steps must be less than the context of {self.config.context}; got {steps}")
        with eval_mode(self):
            yield (
                torch.full((len(source), 1), self.config.start, device=source.device),
                self.encode(source, padding_mask=padding_mask),
            )
