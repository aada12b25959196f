"""Longformer of transformers as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.graph.topology import Topology
from mpnn.graphs import window
from mpnn.integrations.hf import bert
from mpnn.integrations.hf.arguments import option, refuse, tokens_or_vectors
from mpnn.integrations.hf.modules import Adapter, ids_of, mask_of, padding_mask_of
from mpnn.integrations.hf.weights import Copies, check_class, with_weights
from mpnn.models.layers.packing import token_mask
from mpnn.models.text.longformer import Longformer


def convert(hf_model: Any, graph: Topology | None, copies: Copies, context: int | None = None) -> LongformerEncoder:
    """A `LongformerModel` as message passing; `graph` takes the place of its windows, not of its global tokens."""
    check_class(hf_model, "LongformerModel")
    bert.check_encoder(hf_model.config)
    ours = bert.bert_config(hf_model.config, after_pad=True)
    config, longer, repeat = bert.stretch(hf_model.config, ours, context, copies)
    graphs = [window(width // 2) if graph is None else graph for width in config.attention_window]

    def change(name: str, weight: Tensor) -> dict[str, Tensor]:
        """The output projection is shared by both rounds of a layer, and gets both names."""
        found = repeat(name, weight)
        return found | {n.replace(".near.", ".wide."): w for n, w in found.items() if ".to_out." in n}

    model = with_weights(
        lambda: Longformer(longer, graphs, pooler=hf_model.pooler is not None), hf_model, NAMES, copies, change
    )
    return LongformerEncoder(model, config)


NAMES = (
    *((f".attention.self.{which}_global.", f".wide.attention.to_{which}.") for which in ("query", "key", "value")),
    *((f".attention.self.{which}.", f".near.attention.to_{which}.") for which in ("query", "key", "value")),
    (".attention.output.dense.", ".near.attention.to_out."),
    *bert.NAMES,
)


class LongformerEncoder(Adapter):
    """A Longformer with the call of transformers."""

    model: Longformer

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        global_attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B sentences of at most N tokens.

        Args:
            input_ids: int64 [B, N]; or inputs_embeds: [B, N, dim], vectors in place of token embeddings.
            attention_mask: [B, N], 1 where there is a token and 0 where there is none, in any arrangement.
            global_attention_mask: [B, N], 1 for global tokens; default: none.
            token_type_ids: int64 [B, N], default 0. position_ids: int64 [B, N] or [1, N], default: counted over what
                is no pad.
            output_hidden_states, return_dict: as in transformers; default: the configuration's.

        Returns:
            `LongformerBaseModelOutputWithPooling`, or its tuple: last_hidden_state [B, N, dim], pooler_output [B, dim],
            hidden_states. All are zeros where there is no token.

        Raises:
            ValueError, TypeError, IndexError: an invalid argument, or output_attentions, which transformers
                gives by window and not by token; the message names it.
        """
        from transformers.models.longformer.modeling_longformer import LongformerBaseModelOutputWithPooling

        refuse(output_attentions=option(self.config, "output_attentions", output_attentions), **others)
        tokens = tokens_or_vectors(input_ids, inputs_embeds, self.config.hidden_size)
        hubs = mask_of(tokens, global_attention_mask, "global_attention_mask")
        found = self.model(
            tokens,
            ids_of(tokens, token_type_ids, "token_type_ids"),
            ids_of(tokens, position_ids, "position_ids"),
            padding_mask=padding_mask_of(tokens, attention_mask),
            hubs=~token_mask(tokens) if hubs is None else hubs,
            return_states=option(self.config, "output_hidden_states", output_hidden_states),
        )
        output = LongformerBaseModelOutputWithPooling(
            last_hidden_state=found.last, pooler_output=found.pooled, hidden_states=found.states
        )
        return self.answer(output, return_dict)
