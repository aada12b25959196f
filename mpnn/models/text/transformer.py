"""The encoder-decoder Transformer (Vaswani et al. 2017).

topology   encoder: complete()                  decoder: causal(), then complete() from the source to the target
attention  DotProduct(dim, heads)               w_ij = softmax_j( <W_Q x_i, W_K x_j> / sqrt(D) )                (eq. 1)
aggregate  "sum"                                m_i  = W_O || _h sum_j w_ij W_V x_j                    (section 3.2.2)
update     PostNorm(dim, FeedForward(dim))      z    = norm(x + m),  y = norm'(z + ffn(z))        (section 3.1, eq. 2)
           PostNorm(dim) within the target      y    = norm(x + m)
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpnn import MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.decoding.cache import KVCache
from mpnn.decoding.generation import beam_search, eval_mode, generate
from mpnn.graphs import causal, complete
from mpnn.models.layers.blocks import ACTIVATIONS, AnyGraph, Norm, lookup, run_layers, topology_per_layer
from mpnn.models.layers.cross_attention import CrossAttention, StackOutput
from mpnn.models.layers.decoder import causal_topologies
from mpnn.models.layers.images import ImageOutput
from mpnn.models.layers.losses import next_word_loss
from mpnn.models.layers.packing import Packing, token_mask
from mpnn.models.layers.positions import sinusoid
from mpnn.models.saving import Model
from mpnn.update import FeedForward, PostNorm, PreNorm
from mpnn.update.dropout import Dropout
from mpnn.update.maps import linear

CAUSAL = causal()
COMPLETE = complete()


@dataclass(frozen=True)
class TransformerConfig:
    """Configuration of a Transformer. The defaults are those of the base model (table 3 of the paper).

    vocabulary: number of tokens. target_vocabulary: number of tokens of the target language, with an embedding table of
    its own; None: both languages share one table. pad: the token whose embedding is not trained, or None. start, eos:
    first and last token of a target. dim, hidden: widths of the model and of its feed-forward networks. context:
    maximum sentence length. learned_positions: use a table of positions instead of sinusoids. scale: multiply token
    embeddings by sqrt(dim) (section 3.4). embedding_norm: apply LayerNorm to embeddings (BART). pre_norm: use PreNorm
    instead of PostNorm. final_norm: apply LayerNorm after the last layer of the encoder and of the decoder. activation:
    a name in `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm. smoothing: label smoothing (section 5.4).
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
    smoothing: float = 0.1


class Transformer(Model):
    """An encoder over `graph` and a decoder over `target_graph`. Each target word also attends to the whole source.

        h = encoder_norm(layer_N ... layer_1(source(words)))                    `encode`
        s = decoder_norm(layer_M ... layer_1(target(words), sources = h))       `decode`
        logits = s W_token^T                                                    `logits`

    Args:
        config: sizes and options.
        graph: topology of the encoder's self-attention, or a `Graph` of words.
        target_graph: topology of the decoder's self-attention, or a `Graph` of words.

    Raises:
        ValueError: if a word attends to a later one when `target_graph` is bound to `config.context` words.
    """

    def __init__(
        self, config: TransformerConfig, graph: AnyGraph | None = None, target_graph: AnyGraph | None = None
    ) -> None:
        super().__init__()
        (graph,) = topology_per_layer(COMPLETE if graph is None else graph, 1)
        (target_graph,) = causal_topologies(CAUSAL if target_graph is None else target_graph, 1, config.context)
        norm = partial(nn.LayerNorm, eps=config.eps)

        def attend(topology: Topology, *, ffn: bool) -> MessagePassing:
            network = FeedForward(config.dim, config.hidden, ACTIVATIONS[config.activation]) if ffn else None
            layer = PreNorm if config.pre_norm else PostNorm
            update = layer(config.dim, network, dropout=config.dropout, norm=norm)
            attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
            return MessagePassing(topology, "sum", update, attention)

        def words(token: nn.Embedding) -> WordEmbeddings:
            return WordEmbeddings(
                token,
                config.context,
                learned=config.learned_positions,
                scale=config.scale,
                norm=norm if config.embedding_norm else None,
                dropout=config.dropout,
            )

        self.config = config
        token = target_token = token_table(config.vocabulary, config.dim, config.pad)
        if config.target_vocabulary is not None:
            target_token = token_table(config.target_vocabulary, config.dim, config.pad)
        self.source, self.target = words(token), words(target_token)
        self.encoder = nn.ModuleList(attend(graph, ffn=True) for _ in range(config.encoder_layers))
        self.decoder = nn.ModuleList(
            DecoderLayer(attend(target_graph, ffn=False), attend(COMPLETE, ffn=True))
            for _ in range(config.decoder_layers)
        )
        self.encoder_norm, self.decoder_norm = (
            norm(config.dim) if config.final_norm else nn.Identity() for _ in range(2)
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        source_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
        source_lengths: Sequence[int] | None = None,
        target_lengths: Sequence[int] | None = None,
        graph: AnyGraph | Sequence[AnyGraph] | None = None,
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
            graph: replaces the topology of the encoder in this call: one for all sentences, or a list with one for
                each.

        Returns:
            float [B, M, target vocabulary]; zeros at padding.
        """
        memory = self.encode(source, padding_mask=source_padding_mask, lengths=source_lengths, graph=graph)
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
        graph: AnyGraph | Sequence[AnyGraph] | None = None,
        return_weights: bool = False,
    ) -> StackOutput:
        """Runs the encoder.

        Args:
            source: int64 [B, N], or vectors [B, N, dim] that replace the token embeddings.
            padding_mask: bool [B, N], True at padding; default: no padding.
            lengths: lengths of the sentences packed in every row.
            graph: replaces the topology of every layer: one for all sentences, or a list with one for each.
            return_weights: also return the attention weights of every layer.
        """
        layers = [layer for layer in self.encoder if isinstance(layer, MessagePassing)]
        graphs: list[Any]
        if isinstance(graph, Sequence):
            packing, union = Packing.each(graph, token_mask(source, padding_mask))
            graphs = [union] * len(layers)
        else:
            packing = Packing.of_tokens(source, padding_mask, lengths)
            graphs = [packing.bind(layer.graph if graph is None else graph) for layer in layers]
        x, weights = run_layers(self.encoder, graphs, self.source(source, packing), return_weights=return_weights)
        return StackOutput(self.encoder_norm(x), packing, tuple(map(packing.unpack_weights, weights, graphs)))

    def decode(
        self,
        target: Tensor,
        memory: StackOutput | ImageOutput | Tensor,
        *,
        padding_mask: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        cache: KVCache | None = None,
        return_weights: bool = False,
    ) -> StackOutput:
        """Runs the decoder.

        Args:
            target: int64 [B, M], or vectors [B, M, dim] that replace the token embeddings.
            memory: the output of `encode`, or of an encoder of images, such as `ViT`, or vectors [B, N, dim]. With a
                cache, pass `StackOutput.of(memory)`, so that keys and values of the source are computed once.
            padding_mask, lengths, return_weights: as for `encode`.
            cache: keys and values of the preceding target words. `target` then holds the words that follow them.

        Raises:
            ValueError: if `cache` is combined with padding, `lengths` or `return_weights`.
        """
        memory = StackOutput.of(memory)
        packing = Packing.of_tokens(target, padding_mask, lengths)
        if cache is not None and (return_weights or lengths is not None or not bool(packing.token_mask.all())):
            raise ValueError(
                "with a cache, rows must have no padding and one sentence each, and no attention weights are returned"
            )
        across = CrossAttention(packing, memory.packing)
        x = self.target(target, packing, 0 if cache is None else cache.count)
        self_weights = []
        cross_weights = []
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
        target_padding_mask: Tensor | None = None,
        target_lengths: Sequence[int] | None = None,
        **options: Any,
    ) -> Tensor:
        """Returns the mean cross-entropy in nats of each target word after the first, given the words before it.

        Labels are smoothed by `config.smoothing`. The first word of each sentence is `config.start` and is not
        predicted. Arguments are those of `forward`.
        """
        if target_lengths is None:
            read = target[:, :-1]
            ignored = target_padding_mask
            options["target_padding_mask"] = None if ignored is None else ignored[:, :-1]
        else:  # the last word of a document is not the last of its row
            first = Packing.of_tokens(target, target_padding_mask, target_lengths).position_ids() == 0
            read = target
            ignored = first.expand(target.shape)
            options["target_lengths"] = target_lengths
        logits = self(source, read, **options)[:, : target.shape[1] - 1]
        return next_word_loss(logits, target, ignored, self.config.smoothing)

    @torch.no_grad()
    def generate(self, source: Tensor, steps: int, *, padding_mask: Tensor | None = None, **options: Any) -> Tensor:
        """Translates sources [B, N]. padding_mask: bool [B, N], True at padding; default: no padding.

        Each translation starts with `config.start` and ends with `config.eos` or after `steps` more words. Decoding is
        greedy by default; other options are those of `generation.generate`. The source is encoded once, and each word
        is computed once.

        Returns:
            int64 [B, at most 1 + steps].
        """
        with self._translation(source, steps, padding_mask) as (start, memory):

            def forward(tokens: Tensor, cache: KVCache) -> Tensor:
                return self.logits(self.decode(tokens, memory, cache=cache).last)

            return generate(forward, start, steps, **{"temperature": 0.0, "eos": self.config.eos, **options})

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


class DecoderLayer(nn.Module):
    """Self-attention within the target, then cross-attention to the source."""

    def __init__(self, within: MessagePassing, across: MessagePassing) -> None:
        super().__init__()
        self.within = within
        self.across = across


class WordEmbeddings(nn.Module):
    """Token embeddings plus positions (Vaswani et al. 2017, sections 3.4 and 3.5):

        x_i = dropout(norm(s token_i + P(i)))

    Args:
        token: table of token embeddings.
        context: maximum sentence length.
        learned: P is a learned table if True, sinusoids if False.
        scale: s is sqrt(dim) if True, 1 if False.
        norm: creates the norm of a given width; None: no norm.
        dropout: of the result, in training.
    """

    def __init__(
        self, token: nn.Embedding, context: int, *, learned: bool, scale: bool, norm: Norm | None, dropout: float
    ) -> None:
        super().__init__()
        dim = token.embedding_dim
        self.token = token
        self.context = context
        self.scale = dim**0.5 if scale else 1.0
        self.position = nn.Embedding(context, dim) if learned else None
        self.norm = nn.Identity() if norm is None else norm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, packing: Packing, start: int = 0) -> Tensor:
        """Returns packed embeddings [..., dim].

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] that replace the scaled token embeddings.
            packing: packing of the tokens.
            start: position of the first token.
        """
        stop = start + (tokens.shape[1] if packing.documents is None else max(packing.documents))
        if stop > self.context:
            raise ValueError(f"got {stop} tokens, but this model was made with context={self.context}")
        index = packing.position_ids() + start
        x = packing.pack(tokens)
        x = x if x.is_floating_point() else self.scale * lookup(self.token, x, "token")
        if self.position is None:
            positions = sinusoid(index, x.shape[-1], dtype=x.dtype)
        else:
            positions = lookup(self.position, index, "position")
        return self.dropout(self.norm(x + packing.pack(positions.expand(len(tokens), -1, -1))))


def token_table(tokens: int, dim: int, pad: int | None) -> nn.Embedding:
    """Returns token embeddings with std dim^(-1/2), so that initial predictions from the same table are close to
    uniform."""
    table = nn.Embedding(tokens, dim, padding_idx=pad)
    nn.init.normal_(table.weight, std=dim**-0.5)
    return table
