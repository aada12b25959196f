"""The Transformer, encoder and decoder (Vaswani et al. 2017): a translation hears its source, and itself so far.

encoder    complete()                     MessagePassing(complete(), "sum", PostNorm(dim, ffn), DotProduct(dim, heads))
decoder    causal(), then across to the source:
                                          MessagePassing(causal(), "sum", PostNorm(dim), DotProduct(dim, heads))
                                          MessagePassing(complete(), "sum", PostNorm(dim, ffn), DotProduct(dim, heads))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import DotProduct
from mpnn.decoding import Cache
from mpnn.graphs import causal, complete
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.beams import beam_search
from mpnn.models.parts.blocks import ACTIVATIONS
from mpnn.models.parts.crossing import Crossing, Half
from mpnn.models.parts.generation import evaluating, generate, refuse_the_future
from mpnn.models.parts.losses import next_word_loss
from mpnn.models.parts.packing import Packing
from mpnn.models.parts.rounds import through
from mpnn.models.parts.words import Words, token_table
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import FeedForward, PostNorm, PreNorm


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a Transformer; the defaults are those of the paper's base model (its table 3).

    vocabulary: number of tokens, with one table for both languages unless target_vocabulary is given. pad: the token
    whose embedding is not trained, or None; start, eos: what a translation begins and ends with. dim, hidden: widths of
    the model and of its feed-forward networks. context: the longest sentence. learned_positions: a table of them, in
    place of sinusoids. scale: token embeddings are multiplied by sqrt(dim) (section 3.4). embedding_norm: LayerNorm on
    embeddings (BART). pre_norm: PreNorm in place of PostNorm. final_norm: LayerNorm behind the last layer of each half.
    activation: a name in `blocks.ACTIVATIONS`. smoothing: of labels (section 5.4).
    """

    vocabulary: int = 37000
    target_vocabulary: int | None = None
    pad: int | None = 0
    start: int = 1
    eos: int = 2
    dim: int = 512
    heads: int = 8
    hidden: int = 2048
    encoder_layers: int = 6
    decoder_layers: int = 6
    context: int = 1024
    learned_positions: bool = False
    scale: bool = True
    embedding_norm: bool = False
    pre_norm: bool = False
    final_norm: bool = False
    activation: str = "relu"
    eps: float = 1e-5
    dropout: float = 0.1
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    smoothing: float = 0.1


class DecoderLayer(nn.Module):
    """A round in which each word hears those before it, and one in which it hears the whole source."""

    def __init__(self, config: TransformerConfig, graph: Topology) -> None:
        super().__init__()
        self.within = MessagePassing(graph, "sum", _update(config, None), _attention(config))
        self.across = MessagePassing(complete(), "sum", _update(config, _ffn(config)), _attention(config))


class Transformer(Model):
    """An encoder over `graph` and a decoder over `target_graph`, whose words also hear the whole source.

    Args:
        graph: who hears whom in a source; default: complete(). target_graph: in a target; default: causal().

    Raises:
        ValueError: over `config.context` words, a word of the target hears a later one.
    """

    def __init__(
        self, config: TransformerConfig, graph: Topology | None = None, target_graph: Topology | None = None
    ) -> None:
        super().__init__()
        graph = complete() if graph is None else graph
        target_graph = causal() if target_graph is None else target_graph
        refuse_the_future(target_graph, config.context)
        self.config = config
        token = other = token_table(config.vocabulary, config.dim, config.pad)
        if config.target_vocabulary is not None:
            other = token_table(config.target_vocabulary, config.dim, config.pad)
        self.source, self.target = _words(config, token), _words(config, other)
        self.encoder = nn.ModuleList(
            MessagePassing(graph, "sum", _update(config, _ffn(config)), _attention(config))
            for _ in range(config.encoder_layers)
        )
        self.decoder = nn.ModuleList(DecoderLayer(config, target_graph) for _ in range(config.decoder_layers))
        self.encoder_norm, self.decoder_norm = (
            nn.LayerNorm(config.dim, config.eps) if config.final_norm else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        *,
        source_lengths: Sequence[int] | None = None,
        target_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits of the word that follows each word of the target.

        Args:
            source: int64 [B, N]. target: int64 [B, M], from `config.start` on.
            source_keep, target_keep: bool [B, N] and [B, M], which places hold words; default: all. The others are
                neither computed nor heard.
            source_lengths, target_lengths: every row packs sentences of these lengths, N and M together, as many in
                both: sentence k of the target is computed from sentence k of the source, as if they were alone. They
                take no `keep` beside them.

        Returns:
            [B, M, vocabulary of the target]; zeros where there is no word.
        """
        memory = self.encode(source, source_keep, lengths=source_lengths)
        return self.logits(self.decode(target, memory, target_keep, lengths=target_lengths).last)

    def logits(self, states: Tensor) -> Tensor:
        """Logits [..., vocabulary] of a decoder's states [..., dim], by the token embeddings."""
        return F.linear(states, self.target.token.weight)

    def encode(
        self,
        source: Tensor,
        keep: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Half:
        """What the decoder hears of sources [B, N] (or vectors [B, N, dim]) and their places kept, bool [B, N], or the
        `lengths` of the sentences that every row packs."""
        packing = _packing(source, keep, lengths)
        graphs = [packing.bind(layer.graph) for layer in self.encoder if isinstance(layer, MessagePassing)]
        x, states, heard = through(
            self.encoder,
            graphs,
            self.source(source, packing),
            return_states=return_states,
            return_weights=return_weights,
        )
        weights = map(packing.unpack_weights, heard, graphs)
        return Half(self.encoder_norm(x), packing, tuple(map(packing.unpack, states)), tuple(weights))

    def decode(
        self,
        target: Tensor,
        memory: Half,
        keep: Tensor | None = None,
        *,
        lengths: Sequence[int] | None = None,
        cache: Cache | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Half:
        """The decoder's pass over targets [B, M] (or vectors [B, M, dim]) that hear what `encode` gave.

        With a cache, the targets are those that come after the ones it has seen, all places are kept, and there are no
        weights to return.
        """
        packing = _packing(target, keep, lengths)
        if cache is not None and (return_weights or lengths is not None or not bool(packing.keep.all())):
            raise ValueError(
                "with a cache every place holds a word, every row is one sentence, and no weights are returned"
            )
        across = Crossing(packing, memory.packing)
        x = self.target(target, packing, 0 if cache is None else cache.count)
        states, weights, crossed = [x], [], []
        for layer in self.decoder:
            assert isinstance(layer, DecoderLayer)
            graph = packing.bind(layer.within.graph) if cache is None else None
            x = layer.within(x, graph, cache=cache, return_weights=return_weights)
            if return_weights:
                x, heard = x
                weights.append(packing.unpack_weights(heard, packing.bind(layer.within.graph)))
            x = across.hear(layer.across, x, memory.packed, return_weights, None if cache is None else memory.heard)
            if return_weights:
                x, of_source = x
                crossed.append(of_source)
            states.append(x)
        outputs = tuple(packing.unpack(x) for x in states) if return_states else ()
        return Half(self.decoder_norm(x), packing, outputs, tuple(weights), tuple(crossed))

    def loss(
        self,
        source: Tensor,
        target: Tensor,
        source_keep: Tensor | None = None,
        target_keep: Tensor | None = None,
        *,
        source_lengths: Sequence[int] | None = None,
        target_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Mean cross-entropy in nats, labels smoothed by `config.smoothing`, of each word of the target but the first,
        which is `config.start`, given those before it; arguments as those of `forward`. Packed sentences each begin
        with `config.start`, which is not predicted."""
        if target_lengths is not None or source_lengths is not None:
            lengths = {"source_lengths": source_lengths, "target_lengths": target_lengths}
            logits = self(source, target, source_keep, target_keep, **lengths)[:, :-1]
            predicted = Packing.whole(target, target_lengths).positions() > 0
            return next_word_loss(logits, target, predicted.expand(target.shape), self.config.smoothing)
        keep = None if target_keep is None else target_keep[:, :-1]
        logits = self(source, target[:, :-1], source_keep, keep)
        return next_word_loss(logits, target, target_keep, self.config.smoothing)

    @torch.no_grad()
    def generate(
        self,
        source: Tensor,
        steps: int,
        source_keep: Tensor | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Translations of sources [B, N] from `config.start` on to `config.eos`, of up to `steps` words more: int64
        [B, 1 + steps] or fewer. Greedy by default, else drawn as `generation.generate` says. The source is encoded
        once, and each word computed once."""
        with self._translating(source, steps, source_keep) as (start, memory):

            def forward(tokens: Tensor, cache: Cache) -> Tensor:
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
        source_keep: Tensor | None = None,
        *,
        beams: int = 4,
        penalty: float = 0.6,
    ) -> Tensor:
        """Translations as `generate` gives them, but the likeliest that `beams.beam_search` finds; the defaults are the
        paper's (section 6.1)."""
        with self._translating(source, steps, source_keep) as (start, memory):
            cache = Cache(steps + 1)

            def step(tokens: Tensor) -> Tensor:
                return self.logits(self.decode(tokens, memory, cache=cache).last[:, -1])

            def select(index: Tensor) -> None:
                nonlocal memory
                cache.select(index)
                memory = memory.select(index)

            return beam_search(step, select, start, steps, beams=beams, eos=self.config.eos, penalty=penalty)

    @contextmanager
    def _translating(self, source: Tensor, steps: int, keep: Tensor | None) -> Iterator[tuple[Tensor, Half]]:
        """The first words [B, 1] of translations, and what they hear, with the model in evaluation mode."""
        if steps >= self.config.context:
            raise ValueError(f"steps must be less than the context of {self.config.context}; got {steps}")
        with evaluating(self):
            yield torch.full((len(source), 1), self.config.start, device=source.device), self.encode(source, keep)


def _packing(tokens: Tensor, keep: Tensor | None, lengths: Sequence[int] | None) -> Packing:
    if keep is None:
        return Packing.whole(tokens, lengths)
    if lengths is not None:
        raise ValueError("lengths describe rows without padding; give either keep or lengths")
    return Packing.of(keep)


def _words(config: TransformerConfig, token: nn.Embedding) -> Words:
    return Words(
        token,
        config.context,
        learned=config.learned_positions,
        scale=config.scale,
        norm=partial(nn.LayerNorm, eps=config.eps) if config.embedding_norm else None,
        dropout=config.dropout,
    )


def _attention(config: TransformerConfig) -> DotProduct:
    return DotProduct(config.dim, config.heads, dropout=config.attention_dropout)


def _ffn(config: TransformerConfig) -> FeedForward:
    return FeedForward(config.dim, config.hidden, ACTIVATIONS[config.activation], config.activation_dropout)


def _update(config: TransformerConfig, ffn: FeedForward | None) -> PreNorm | PostNorm:
    """What a word makes of its message: the second half of a layer, or a part of it without `ffn`."""
    norm = partial(nn.LayerNorm, eps=config.eps)
    return (PreNorm if config.pre_norm else PostNorm)(config.dim, ffn, dropout=config.dropout, norm=norm)
