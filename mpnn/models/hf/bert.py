"""BERT of transformers as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mpnn.models.bert import Bert, BertConfig
from mpnn.models.hf.given import kept, one_of, per_token, refuse, wanted
from mpnn.models.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.topology import Topology


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> Encoder:
    """A `BertModel` as message passing."""
    config = hf_model.config
    check_class(hf_model, "BertModel")
    check_config(
        config,
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type="absolute",
        is_causal=False,
        quantization_config=None,
    )
    ours = BertConfig(
        vocabulary=config.vocab_size,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        hidden=config.intermediate_size,
        context=config.max_position_embeddings,
        types=config.type_vocab_size,
        pad=config.pad_token_id,
        activation=activation(config, "hidden_act"),
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
        attention_dropout=config.attention_probs_dropout_prob,
    )
    model = with_weights(lambda: Bert(ours, graph, pooler=hf_model.pooler is not None), hf_model, _NAMES, copies)
    return Encoder(model, config)


_NAMES = (
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


class Encoder(nn.Module):
    """An encoder that is called as those of transformers are."""

    def __init__(self, model: Bert, config: Any) -> None:
        super().__init__()
        self.model, self.config = model, config

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
            ValueError, TypeError, IndexError: an argument that does not fit; the sentence names it.
        """
        from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

        refuse(**others)
        tokens = one_of(input_ids, inputs_embeds, self.config.hidden_size)
        shape = (tokens.shape[0], tokens.shape[1])
        found = self.model(
            tokens,
            None if attention_mask is None else kept(attention_mask, shape),
            None if token_type_ids is None else per_token("token_type_ids", token_type_ids, shape),
            None if position_ids is None else per_token("position_ids", position_ids, shape),
            return_states=wanted(self.config, "output_hidden_states", output_hidden_states),
            return_weights=wanted(self.config, "output_attentions", output_attentions),
        )
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=found.last,
            pooler_output=found.pooled,
            hidden_states=found.states,
            attentions=found.weights,
        )
        return output if wanted(self.config, "return_dict", return_dict) else output.to_tuple()
