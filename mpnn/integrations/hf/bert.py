"""BERT and RoBERTa of transformers as message passing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.decoding.cache import KVCache
from mpnn.decoding.generation import check_causal
from mpnn.graph.topology import Topology
from mpnn.graphs import causal
from mpnn.integrations.hf.arguments import refuse, tokens_or_vectors
from mpnn.integrations.hf.decoder import TypesThirdDecoder
from mpnn.integrations.hf.modules import Adapter, ids_of, padding_mask_of
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.layers.blocks import embed, lookup
from mpnn.models.layers.decoder import Bind, DecoderOutput
from mpnn.models.layers.packing import select_first
from mpnn.models.layers.rounds import run_layers
from mpnn.models.text.bert import Bert, BertConfig

Change = Callable[[str, Tensor], dict[str, Tensor]]
"""What `with_weights` takes for weights that differ in more than their name."""


def convert(hf_model: Any, graph: Topology | None, copies: Copies, context: int | None = None) -> Adapter:
    """A `BertModel` or `RobertaModel` as message passing; decoders attend over `causal()`."""
    check_class(hf_model, "BertModel", "RobertaModel")
    check_encoder(hf_model.config)
    ours = bert_config(hf_model.config, after_pad=hf_model.config.model_type == "roberta")
    return over(graph, ours, hf_model, copies, context, NAMES)


def over(
    graph: Topology | None,
    ours: BertConfig,
    hf_model: Any,
    copies: Copies,
    context: int | None,
    names: Sequence[tuple[str, str]],
) -> Adapter:
    """The model of transformers over a graph: an encoder over all, or a decoder."""
    config, longer, repeat = stretch(hf_model.config, ours, context, copies)
    pooler, decodes = hf_model.pooler is not None, hf_model.config.is_decoder
    topology = decoder_graph(hf_model.config, graph) if decodes else graph
    kind = DecodingBert if decodes else Bert
    model = with_weights(lambda: kind(longer, topology, pooler=pooler), hf_model, names, copies, repeat)
    return BertDecoder(model, config) if isinstance(model, DecodingBert) else BertEncoder(model, config)


def decoder_graph(config: Any, graph: Topology | None) -> Topology:
    """The topology of a decoder: `causal()`, or `graph`, which must have no edges from later tokens."""
    if graph is None:
        return causal()
    check_causal(graph, config.max_position_embeddings)
    return graph


def check_encoder(config: Any) -> None:
    """Raises ValueError for options that no BERT-like family supports here."""
    check_config(
        config,
        add_cross_attention=False,
        position_embedding_type="absolute",
        is_causal=getattr(config, "is_decoder", False),
        quantization_config=None,
    )


def bert_config(config: Any, after_pad: bool) -> BertConfig:
    """The sizes that all BERT-like families have."""
    if after_pad and config.pad_token_id is None:
        raise ValueError("from_hf needs a config.pad_token_id, from which positions count on; got None")
    return BertConfig(
        vocabulary=config.vocab_size,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        hidden=config.intermediate_size,
        context=config.max_position_embeddings - (config.pad_token_id + 1 if after_pad else 0),
        types=config.type_vocab_size,
        pad=config.pad_token_id,
        activation=activation(config, "hidden_act"),
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
        after_pad=after_pad,
    )


def stretch(config: Any, ours: BertConfig, context: int | None, copies: Copies) -> tuple[Any, BertConfig, Change]:
    """For `context` positions: the configuration of transformers, ours, and the change of weights that repeats the
    table of positions as often as need be (Beltagy et al. 2020, section 5); rows before the first position, RoBERTa's
    for pads, stand once. None changes nothing."""
    if context is None:
        return config, ours, lambda name, weight: {name: weight}

    def repeat(name: str, weight: Tensor) -> dict[str, Tensor]:
        if name != "embeddings.position.weight":
            return {name: weight}
        before, positions = weight.split([ours.first_position, ours.context])
        return {name: torch.cat([before, repeat_positions(positions, context)])}

    longer = longer_config(config, ours.first_position, context, copies)
    return longer, replace(ours, context=context), repeat


def longer_config(config: Any, first: int, context: int, copies: Copies) -> Any:
    """A copy of a configuration of transformers whose table of positions has `context` rows behind the `first`."""
    have = config.max_position_embeddings - first
    if context < have:
        raise ValueError(f"context stretches the {have} positions that this model has; got {context}")
    longer = copies.setdefault(id(config), copy.deepcopy(config))
    longer.max_position_embeddings = first + context
    return longer


def repeat_positions(positions: Tensor, context: int) -> Tensor:
    """Vectors of positions [n, dim], repeated as often as need be for `context` of them."""
    return positions.repeat(-(-context // len(positions)), 1)[:context]


NAMES = (
    ("embeddings.word_embeddings.", "embeddings.token."),
    ("embeddings.position_embeddings.", "embeddings.position."),
    ("embeddings.token_type_embeddings.", "embeddings.token_type."),
    ("embeddings.LayerNorm.", "embeddings.norm."),
    ("encoder.layer.", "layers."),
    (".attention.self.query.", ".attention.to_query."),
    (".attention.self.key.", ".attention.to_key."),
    (".attention.self.value.", ".attention.to_value."),
    (".attention.output.dense.", ".attention.to_out."),
    (".attention.output.LayerNorm.", ".update.norm."),
    (".intermediate.dense.", ".update.ffn.0."),
    (".output.dense.", ".update.ffn.3."),
    (".output.LayerNorm.", ".update.ffn_norm."),
    ("pooler.dense.", "pooler.0."),
)


class BertEncoder(Adapter):
    """A BERT, RoBERTa or BigBird encoder with the call of transformers."""

    model: Bert

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B sentences of at most N tokens.

        Args:
            input_ids: int64 [B, N]; or inputs_embeds: [B, N, dim], vectors in place of token embeddings.
            attention_mask: [B, N], 1 where there is a token and 0 where there is none, in any arrangement.
            token_type_ids: int64 [B, N], default 0. position_ids: int64 [B, N] or [1, N], default 0 to N-1.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            `BaseModelOutputWithPoolingAndCrossAttentions`, or its tuple: last_hidden_state [B, N, dim], pooler_output
            [B, dim], hidden_states, attentions [B, H, N, N]. All are zeros where there is no token, and sentences are
            pooled at their first token, also where padding comes before it.

        Raises:
            ValueError, TypeError, IndexError: an invalid argument; the message names it.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        refuse(**others)
        tokens = tokens_or_vectors(input_ids, inputs_embeds, self.config.hidden_size)
        found = self.model(
            tokens,
            ids_of(tokens, token_type_ids, "token_type_ids"),
            ids_of(tokens, position_ids, "position_ids"),
            padding_mask=padding_mask_of(tokens, attention_mask),
            **self.requested_outputs(output_hidden_states, output_attentions),
        )
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=found.last,
            pooler_output=found.pooled,
            hidden_states=found.states,
            attentions=found.weights,
            cross_attentions=None if found.weights is None else (),
        )
        return self.answer(output, return_dict)


class DecodingBert(Bert):
    """A BERT over a causal graph with the interface of `models.layers.decoder.Decoder`. Tokens [..., n], or vectors in
    their place, already include token types."""

    @property
    def position(self) -> nn.Embedding:
        return self.embeddings.position

    def decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        *,
        bind: Bind,
        cache: KVCache | None = None,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> DecoderOutput:
        own = self.embeddings
        x = own.dropout(own.norm(tokens + lookup(own.position, positions, "position")))
        layers: list[Any] = list(self.layers)
        graphs = [bind(layer.graph) for layer in layers]
        x, states, weights = run_layers(
            layers, graphs, x, return_states=return_states, return_weights=return_weights, cache=cache
        )
        return DecoderOutput(x, tuple(states) if return_states else None, tuple(weights) if return_weights else None)


class BertDecoder(TypesThirdDecoder):
    """A BERT decoder with the call of transformers."""

    model: DecodingBert  # type: ignore[assignment]

    def __init__(self, model: DecodingBert, config: Any) -> None:
        super().__init__(model, config, "BaseModelOutputWithPoolingAndCrossAttentions", takes_cache=True)  # type: ignore[arg-type]

    def add_token_types(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        own = self.model.embeddings
        vectors = embed(own.token, tokens)
        types = torch.zeros(vectors.shape[:2], dtype=torch.int64, device=vectors.device) if types is None else types
        return vectors + lookup(own.token_type, types, "token type")

    def default_positions(self, tokens: Tensor, start: int) -> Tensor:
        """Padding of a RoBERTa keeps its own row."""
        positions, first = self.model.positions(tokens), self.model.config.first_position
        return torch.where(positions >= first, positions + start, positions)

    def check_positions(self, keep: Tensor, positions: Tensor) -> None:
        """Accepts all positions, as transformers does for these models."""

    def pooled(self, last: Tensor, keep: Tensor) -> Tensor | None:
        pooler = self.model.pooler
        return None if pooler is None else pooler(select_first(last, keep))
