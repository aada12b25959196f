"""BART and Marian of transformers as message passing: encoder and decoder, post-norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.decoding.cache import KVCache
from mpnn.graph.topology import Topology
from mpnn.integrations.hf.arguments import option, refuse, tokens_or_vectors
from mpnn.integrations.hf.bert import longer_config, repeat_positions
from mpnn.integrations.hf.kv_cache import check_empty
from mpnn.integrations.hf.modules import Adapter, padding_mask_of
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.layers.cross_attention import StackOutput
from mpnn.models.layers.packing import Packing, token_mask
from mpnn.models.text.transformer import Transformer, TransformerConfig


def convert(hf_model: Any, graph: Topology | None, copies: Copies, context: int | None = None) -> BartEncoderDecoder:
    """A `BartModel` or `MarianModel` as message passing; `graph` is the encoder's topology, and the decoder stays
    causal and attends to the whole source. `longformer(512, globals=1)` and positions stretched to `context` make it
    a Longformer with a decoder (Beltagy et al. 2020, section 7)."""
    check_class(hf_model, "BartModel", "MarianModel")
    config = hf_model.config
    if context is not None:
        config = longer_config(config, 0, context, copies)
    marian = config.model_type == "marian"
    check_config(
        config,
        decoder_attention_heads=config.encoder_attention_heads,
        decoder_ffn_dim=config.encoder_ffn_dim,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        is_causal=True,
        quantization_config=None,
    )
    apart = marian and not config.share_encoder_decoder_embeddings
    ours = TransformerConfig(
        vocabulary=config.vocab_size,
        target_vocabulary=config.decoder_vocab_size if apart else None,
        pad=config.pad_token_id,
        start=config.decoder_start_token_id,
        eos=_first(config.eos_token_id),
        dim=config.d_model,
        heads=config.encoder_attention_heads,
        hidden=config.encoder_ffn_dim,
        encoder_layers=config.encoder_layers,
        decoder_layers=config.decoder_layers,
        context=config.max_position_embeddings,
        learned_positions=True,
        scale=config.scale_embedding,
        embedding_norm=not marian,
        activation=activation(config, "activation_function"),
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        activation_dropout=config.activation_dropout,
        smoothing=0.0,
    )
    unused = 0 if marian else hf_model.encoder.embed_positions.offset

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        if name == "shared.weight":
            return {}
        if name.startswith("encoder."):
            name = name.replace(".within.", ".").replace(".across.", ".")
        if not marian and name.endswith(".position.weight"):
            weight = repeat_positions(weight[unused:], ours.context)
        return {name: weight}

    return BartEncoderDecoder(with_weights(lambda: Transformer(ours, graph), hf_model, NAMES, copies, change), config)


def _first(ends: Any) -> int:
    """The token that ends a text; of several, the first."""
    if isinstance(ends, int):
        return ends
    if not ends:
        raise ValueError(f"from_hf does not support config.eos_token_id = {ends!r}: it needs a token that ends texts")
    return int(ends[0])


NAMES = (
    ("encoder.embed_tokens.", "source.token."),
    ("decoder.embed_tokens.", "target.token."),
    ("encoder.embed_positions.", "source.position."),
    ("decoder.embed_positions.", "target.position."),
    ("encoder.layernorm_embedding.", "source.norm."),
    ("decoder.layernorm_embedding.", "target.norm."),
    ("encoder.layers.", "encoder."),
    ("decoder.layers.", "decoder."),
    (".encoder_attn.", ".across.attention."),
    (".encoder_attn_layer_norm.", ".across.update.norm."),
    (".self_attn.", ".within.attention."),
    (".self_attn_layer_norm.", ".within.update.norm."),
    (".q_proj.", ".to_query."),
    (".k_proj.", ".to_key."),
    (".v_proj.", ".to_value."),
    (".out_proj.", ".to_out."),
    (".fc1.", ".across.update.ffn.0."),
    (".fc2.", ".across.update.ffn.3."),
    (".final_layer_norm.", ".across.update.ffn_norm."),
)


class BartEncoder(Adapter):
    """The encoder half with the call of transformers, for its `generate`."""

    model: Transformer

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """`BaseModelOutput`, or its tuple; arguments as those of `BartEncoderDecoder`."""
        refuse(**others)
        output = _output(self.encode(input_ids, attention_mask, inputs_embeds, output_hidden_states, output_attentions))
        return self.answer(output, return_dict)

    def encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
    ) -> StackOutput:
        tokens = tokens_or_vectors(input_ids, inputs_embeds, self.config.d_model)
        return self.model.encode(
            tokens,
            padding_mask=padding_mask_of(tokens, attention_mask),
            **self.requested_outputs(output_hidden_states, output_attentions),
        )


class BartEncoderDecoder(Adapter):
    """A BART or Marian with the call of transformers."""

    model: Transformer

    def get_encoder(self, modality: str | None = None) -> BartEncoder:
        return BartEncoder(self.model, self.config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        encoder_outputs: Any = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        decoder_inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B sources of at most N tokens and B targets of at most M.

        Args:
            input_ids: int64 [B, N]; or inputs_embeds: [B, N, dim], vectors in place of token embeddings.
            attention_mask: [B, N], 1 where there is a token and 0 where there is none, in any arrangement.
            decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask: the same of the targets. Without
                targets, a BART takes the sources moved by one.
            encoder_outputs: what `get_encoder()` answered with, or its last_hidden_state in a tuple.
            past_key_values, use_cache: as transformers' `generate` gives them; targets are then the new tokens only.
                Plain calls answer without a cache unless use_cache is True.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            `Seq2SeqModelOutput`, or its tuple, whose states and attentions are zeros where there is no token.

        Raises:
            ValueError, TypeError, IndexError: an invalid argument; the message names it.
        """
        from transformers.modeling_outputs import Seq2SeqModelOutput

        refuse(**others)
        states = option(self.config, "output_hidden_states", output_hidden_states)
        weights = option(self.config, "output_attentions", output_attentions)
        target = self._target(input_ids, decoder_input_ids, decoder_inputs_embeds)
        past, source, memory = past_key_values, encoder_outputs, None
        if past is not None and not isinstance(past, TranslationCache):
            check_empty(past)
            past, use_cache = None, True
        if past is not None:
            memory = past.memory
        elif source is not None:
            memory = _encoded_source(source, attention_mask)
        else:
            memory = self.get_encoder().encode(input_ids, attention_mask, inputs_embeds, states, weights)
        source = _output(memory) if source is None else source
        if past is None and use_cache:
            past = TranslationCache(KVCache(self.model.config.context), memory)
        padding_mask = None
        if past is None:
            padding_mask = padding_mask_of(target, decoder_attention_mask, "decoder_attention_mask")
        if past is not None and decoder_attention_mask is not None and not bool(decoder_attention_mask.all()):
            raise ValueError("with a cache, decoder_attention_mask must be 1 throughout; call with use_cache=False")
        if past is not None and weights:
            raise ValueError("with a cache there are no attentions to give out; call with use_cache=False")
        found = self.model.decode(
            target,
            memory,
            padding_mask=padding_mask,
            cache=None if past is None else past.cache,
            return_states=states,
            return_weights=weights,
        )
        output = Seq2SeqModelOutput(
            last_hidden_state=found.last,
            past_key_values=past,
            decoder_hidden_states=found.states or None,
            decoder_attentions=found.weights or None,
            cross_attentions=found.cross_weights or None,
            encoder_last_hidden_state=source[0],
            encoder_hidden_states=_field(source, "hidden_states", 1),
            encoder_attentions=_field(source, "attentions", 2),
        )
        return self.answer(output, return_dict)

    def _target(self, input_ids: Tensor | None, ids: Tensor | None, embeds: Tensor | None) -> Tensor:
        """Tokens [B, M] of the targets, or vectors [B, M, dim]."""
        config = self.config
        if ids is None and embeds is None and config.model_type == "bart":
            if input_ids is None:
                raise ValueError("give decoder_input_ids or decoder_inputs_embeds, as there are no input_ids to move")
            moved = input_ids.roll(1, 1)
            moved[:, :1] = config.decoder_start_token_id
            return moved
        target = tokens_or_vectors(ids, embeds, config.d_model, "decoder_")
        # Marian's decoder scales given vectors, its encoder and BART do not
        return target * self.model.target.scale if embeds is not None and config.model_type == "marian" else target


class TranslationCache:
    """`past_key_values` of translations: cached keys and values of the targets, and the encoded sources."""

    is_compileable = False

    def __init__(self, cache: KVCache, memory: StackOutput) -> None:
        self.cache, self.memory = cache, memory

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.cache.count

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last `-tokens_to_remove` tokens, as assisted generation does."""
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to forget, as a negative one; got {tokens_to_remove}")
        self.cache.crop(max(self.cache.count + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replaces translation b by translation `beam_idx[b]`."""
        self.cache.select(beam_idx)
        self.memory = self.memory.select(beam_idx)


def _encoded_source(encoder_outputs: Any, attention_mask: Tensor | None) -> StackOutput:
    """The output of an encoder as sources of the decoder."""
    last = encoder_outputs[0]
    packing = Packing.of(token_mask(last, padding_mask_of(last, attention_mask)))
    return StackOutput(packing.pack(last), packing)


def _output(found: StackOutput) -> Any:
    from transformers.modeling_outputs import BaseModelOutput

    return BaseModelOutput(
        last_hidden_state=found.last, hidden_states=found.states or None, attentions=found.weights or None
    )


def _field(encoder_outputs: Any, name: str, place: int) -> Any:
    """A part of an encoder's output, which may be a plain tuple."""
    if hasattr(encoder_outputs, name):
        return getattr(encoder_outputs, name)
    return encoder_outputs[place] if len(encoder_outputs) > place else None
