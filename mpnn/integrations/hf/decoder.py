"""Causal decoders with the call of transformers, for its `generate`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpnn.integrations.hf.arguments import as_token_mask, expanded_ids, option, refuse, tokens_or_vectors
from mpnn.integrations.hf.kv_cache import PastKeyValues, Text, check_empty, counts_up, pack_text, read
from mpnn.integrations.hf.modules import Adapter, ids_of
from mpnn.models.layers.decoder import Decoder, DecoderOutput
from mpnn.models.layers.packing import Packing, token_mask


class CausalDecoder(Adapter):
    """Gives a decoder the call of transformers' bare decoders.

    Args:
        output: the class of `transformers.modeling_outputs` that a call returns.
        remembers: whether it takes past_key_values.
    """

    model: Decoder

    def __init__(self, model: Decoder, config: Any, output: str, *, takes_cache: bool) -> None:
        super().__init__(model, config)
        self._output, self._takes_cache = output, takes_cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        token_type_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B texts of at most N tokens, or over the n that come after those in `past_key_values`.

        Args:
            input_ids: int64 [B, n]; or inputs_embeds: [B, n, dim], vectors in place of token embeddings. Where each
                text has several choices, [B, choices, n], as what goes with them.
            attention_mask: [B, N], 1 where there is a token and 0 where there is none, those in the past included.
            position_ids: int64 [B, n] or [1, n], default: counted on from the past, padding included.
            past_key_values: what an earlier call gave, or an empty cache of transformers.
            token_type_ids: int64 [B, n], where the model has them.
            use_cache: whether to give past_key_values; default: the configuration's.
            output_hidden_states, output_attentions, return_dict: as in transformers; default: the configuration's.

        Returns:
            The output object of transformers, or its tuple: last_hidden_state [B, n, dim], past_key_values,
            hidden_states, attentions [B, H, N, N]. All are zeros where there is no token.

        Raises:
            ValueError, TypeError, IndexError: an invalid argument; the message names it.
        """
        from transformers import modeling_outputs

        if not self._takes_cache:
            refuse(past_key_values=past_key_values, use_cache=use_cache)
        refuse(**others)
        choices = None if input_ids is None or input_ids.dim() != 3 else input_ids.shape[:2]
        if choices:
            given = (input_ids, attention_mask, position_ids, token_type_ids)
            input_ids, attention_mask, position_ids, token_type_ids = map(_flatten_choices, given)
        past = self._past(past_key_values)
        start = 0 if past is None else past.get_seq_length()
        text = self._text(input_ids, inputs_embeds, attention_mask, position_ids, token_type_ids, start)
        states = option(self.config, "output_hidden_states", output_hidden_states)
        weights = option(self.config, "output_attentions", output_attentions)
        with_cache = self._takes_cache and option(self.config, "use_cache", use_cache)
        attentions = None
        found: DecoderOutput
        packing: Packing | None
        regular = attention_mask is None and position_ids is None
        if past is None and (use_cache is None or weights or not with_cache):
            packing = Packing.of_tokens(text[0]) if regular else pack_text(self.model, text)
            found, bind = read(self.model, text, packing, states, weights)
            if with_cache:
                past = PastKeyValues(self.model)
                past.defer(text)
            if found.weights is not None:
                graphs = [bind(layer.graph) for layer in self.model.layers]  # type: ignore[arg-type]
                attentions = tuple(map(packing.unpack_weights, found.weights, graphs))
        elif weights:
            raise ValueError(
                "output_attentions are those of whole texts; call without past_key_values, and generate with "
                "use_cache=False"
            )
        else:
            past = PastKeyValues(self.model) if past is None else past
            found, packing = past.decode_next(text, states)
        last = _unpack(found.last, packing)
        last = last.unflatten(0, choices) if choices else last
        answer: dict[str, Any] = {"last_hidden_state": last, "attentions": attentions}
        if found.states is not None:
            answer["hidden_states"] = (*(_unpack(x, packing) for x in found.states[:-1]), last)
        if self._takes_cache:
            answer["past_key_values"] = past if with_cache else None
        kind = getattr(modeling_outputs, self._output)
        if attentions is not None and "cross_attentions" in kind.__dataclass_fields__:
            answer["cross_attentions"] = ()
        if "pooler_output" in kind.__dataclass_fields__:
            answer["pooler_output"] = self.pooled(last, text[1])
        output = kind(**answer)
        return self.answer(output, return_dict)

    def add_token_types(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        """Tokens; or, if the model has token types, vectors of tokens plus types."""
        refuse(token_type_ids=types)
        return tokens

    def default_positions(self, tokens: Tensor, start: int) -> Tensor:
        """Default positions of tokens that follow `start` others, int64 [B, n]."""
        return torch.arange(start, start + tokens.shape[1], device=tokens.device).expand(tokens.shape[:2])

    def pooled(self, last: Tensor, keep: Tensor) -> Tensor | None:
        """The pooled output [B, dim]; None for a model without a pooler."""
        return None

    def check_positions(self, keep: Tensor, positions: Tensor) -> None:
        """Raises ValueError for positions that transformers would read as packed documents."""
        if self._takes_cache and not counts_up(keep, positions):
            raise ValueError(
                "position_ids that do not count up need an attention_mask beside them: without one, transformers "
                "takes them for documents that follow one another; here these are rows of a batch of their own"
            )

    def _past(self, given: Any) -> PastKeyValues | None:
        if isinstance(given, PastKeyValues):
            return given
        if given is None:
            return None
        check_empty(given)
        return None

    def _text(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        token_type_ids: Tensor | None,
        start: int,
    ) -> Text:
        tokens = tokens_or_vectors(input_ids, inputs_embeds, self.config.hidden_size)
        size, new = tokens.shape[:2]
        keep = token_mask(tokens)
        if attention_mask is not None:
            keep = as_token_mask(attention_mask, (size, start + new))[:, start:]
        positions = self.default_positions(tokens, start)
        if position_ids is not None:
            positions = expanded_ids("position_ids", position_ids, (size, new))
            if attention_mask is None and start == 0:
                self.check_positions(keep, positions)
        return self.add_token_types(tokens, ids_of(tokens, token_type_ids, "token_type_ids")), keep, positions


class TypesThirdDecoder(CausalDecoder):
    """A decoder whose third argument is token_type_ids, and whose past_key_values are a keyword."""

    def forward(  # type: ignore[override]  # the order is that of transformers
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **others: Any,
    ) -> Any:
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            **others,
        )


def _flatten_choices(x: Tensor | None) -> Tensor | None:
    """[B, choices, n] as [B * choices, n]."""
    return None if x is None else x.flatten(0, -2)


def _unpack(x: Tensor, packing: Packing | None) -> Tensor:
    return x if packing is None else packing.unpack(x)
