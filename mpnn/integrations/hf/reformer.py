"""Reformer of transformers as message passing.

A token attends to its own and the neighbouring chunks, cyclically, whether or not they share its bucket, and to the
chunks of all rounds of hashing at once. A pair of several rounds is a repeated edge. With `config.hash_seed` both draw
the same directions, and so the same graphs. If `config.num_buckets` is None, each batch's length decides it; in
transformers, the length of the first batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.graph.topology import Topology
from mpnn.integrations.hf.arguments import option, refuse, tokens_or_vectors
from mpnn.integrations.hf.modules import Adapter, ids_of, padding_mask_of
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.text.reformer import Chunks, Reformer, ReformerConfig


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> ReformerEncoder:
    """A `ReformerModel` as message passing; `graph` takes the place of chunks and hashes in all layers."""
    config = hf_model.config
    check_class(hf_model, "ReformerModel")
    check_config(config, num_hidden_layers=len(config.attn_layers), quantization_config=None)
    ours = ReformerConfig(
        vocabulary=config.vocab_size,
        dim=config.hidden_size,
        layers=tuple(config.attn_layers),
        heads=config.num_attention_heads,
        head_dim=config.attention_head_size,
        hidden=config.feed_forward_size,
        local=Chunks(
            config.local_attn_chunk_length,
            config.local_num_chunks_before,
            config.local_num_chunks_after,
            config.local_attention_probs_dropout_prob,
        ),
        lsh=Chunks(
            config.lsh_attn_chunk_length,
            config.lsh_num_chunks_before,
            config.lsh_num_chunks_after,
            config.lsh_attention_probs_dropout_prob,
        ),
        buckets=config.num_buckets,
        rounds=config.num_hashes,
        seed=config.hash_seed,
        causal=config.is_decoder,
        axial=tuple(config.axial_pos_shape) if config.axial_pos_embds else None,
        axial_dims=tuple(config.axial_pos_embds_dim),
        context=config.max_position_embeddings,
        activation=activation(config, "hidden_act"),
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
    )
    model = with_weights(lambda: Reformer(ours, graph), hf_model, NAMES, copies, _as_table)
    return ReformerEncoder(model, config)


NAMES = (
    ("embeddings.word_embeddings.", "token."),
    ("embeddings.position_embeddings.embedding.", "position."),
    ("embeddings.position_embeddings.weights.0", "position.row.weight"),
    ("embeddings.position_embeddings.weights.1", "position.column.weight"),
    ("encoder.layer_norm.", "norm."),
    ("encoder.layers.", "layers."),
    (".attention.layer_norm.", ".update.norm."),
    (".attention.self_attention.query_key.", ".attention.to_query."),
    *((f".attention.self_attention.{which}.", f".attention.to_{which}.") for which in ("query", "key", "value")),
    (".attention.output.dense.", ".attention.to_out."),
    (".feed_forward.layer_norm.", ".update.ffn_norm."),
    (".feed_forward.dense.dense.", ".update.ffn.0."),
    (".feed_forward.output.dense.", ".update.ffn.3."),
)


def _as_table(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Axial positions are kept as [rows, 1, dim] and [1, columns, dim]."""
    axial = name in ("position.row.weight", "position.column.weight")
    return {name: weight.flatten(0, 1) if axial else weight}


class ReformerEncoder(Adapter):
    """A Reformer with the call of transformers."""

    model: Reformer

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        num_hashes: int | None = None,
        past_buckets_states: Any = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        """One pass over B sentences of at most N tokens.

        Args:
            input_ids: int64 [B, N]; or inputs_embeds: [B, N, dim], vectors in place of token embeddings.
            attention_mask: [B, N], 1 where there is a token and 0 where there is none, in any arrangement.
            position_ids: int64 [B, N] or [1, N], default 0 to N-1.
            num_hashes: rounds of hashing; default: the configuration's.
            output_hidden_states, return_dict: as in transformers; default: the configuration's.

        Returns:
            `ReformerModelOutput`, or its tuple: last_hidden_state [B, N, 2 * dim], hidden_states. All are zeros where
            there is no token.

        Raises:
            ValueError, TypeError, IndexError: an invalid argument, or one for a cache or for attentions,
                which transformers gives by chunks; the message names it.
        """
        from transformers.models.reformer.modeling_reformer import ReformerModelOutput

        attentions = option(self.config, "output_attentions", output_attentions)
        if use_cache:
            raise ValueError("a Reformer hashes all tokens anew and keeps no cache; generate with use_cache=False")
        refuse(past_buckets_states=past_buckets_states, output_attentions=attentions, **others)
        tokens = tokens_or_vectors(input_ids, inputs_embeds, self.config.hidden_size)
        found = self.model(
            tokens,
            ids_of(tokens, position_ids, "position_ids"),
            padding_mask=padding_mask_of(tokens, attention_mask),
            rounds=num_hashes,
            return_states=option(self.config, "output_hidden_states", output_hidden_states),
        )
        states: Any = None if found.states is None else list(found.states)
        output = ReformerModelOutput(last_hidden_state=found.last, hidden_states=states)
        return self.answer(output, return_dict)
