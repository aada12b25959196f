"""Llama and Mistral of transformers as message passing."""

from __future__ import annotations

from typing import Any

from mpnn.graph.topology import Topology
from mpnn.graphs import causal, window
from mpnn.integrations.hf.decoder import CausalDecoder
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.text.llama import Llama, LlamaConfig


def convert(hf_model: Any, graph: Topology | None, copies: Copies) -> CausalDecoder:
    """A `LlamaModel` or `MistralModel` as message passing."""
    config = hf_model.config
    check_class(hf_model, "LlamaModel", "MistralModel")
    check_config(config, is_causal=True, quantization_config=None)
    llama = config.model_type == "llama"  # Mistral has neither biases nor, if its configuration says so, Llama a window
    ours = LlamaConfig(
        vocabulary=config.vocab_size,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        hidden=config.intermediate_size,
        context=config.max_position_embeddings,
        activation=activation(config, "hidden_act"),
        eps=config.rms_norm_eps,
        bias=llama and config.attention_bias,
        ffn_bias=llama and config.mlp_bias,
        attention_dropout=config.attention_dropout,
        tied=True,  # a bare model has no map of its own at the end
        **_rotary(config.rope_parameters),
    )
    if graph is None:
        graph = causal() if llama else _sliding_window(config)
    model = with_weights(lambda: Llama(ours, graph), hf_model, _NAMES, copies)
    return CausalDecoder(model, config, "BaseModelOutputWithPast", takes_cache=True)


def _sliding_window(config: Any) -> Topology:
    """The sliding window counts the node itself."""
    width = config.sliding_window
    if width is not None and width < 1:
        raise ValueError(f"from_hf does not support config.sliding_window = {width!r}, only None and 1 or more")
    return causal() if width is None else causal() & window(width - 1)


def _rotary(given: dict[str, Any]) -> dict[str, Any]:
    """Our fields of the rotary positions, from those of transformers."""
    kind = given["rope_type"]
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "from_hf does not support config.rope_parameters['partial_rotary_factor'] = "
            f"{given['partial_rotary_factor']!r}, only 1.0"
        )
    fields = {"base": given["rope_theta"]}
    if kind == "default":
        return fields
    if kind == "linear":
        return {**fields, "factor": given["factor"]}
    if kind == "llama3":
        return {
            **fields,
            "factor": given["factor"],
            "slow": given["low_freq_factor"],
            "fast": given["high_freq_factor"],
            "trained_context": given["original_max_position_embeddings"],
        }
    raise ValueError(
        f"from_hf does not support config.rope_parameters['rope_type'] = {kind!r}, only default, linear, llama3"
    )


_NAMES = (
    ("embed_tokens.", "token."),
    (".self_attn.q_proj.", ".attention.to_query."),
    (".self_attn.k_proj.", ".attention.to_key."),
    (".self_attn.v_proj.", ".attention.to_value."),
    (".self_attn.o_proj.", ".attention.to_out."),
    (".input_layernorm.", ".update.norm."),
    (".post_attention_layernorm.", ".update.ffn_norm."),
    (".mlp.gate_proj.", ".update.ffn.to_gate."),
    (".mlp.up_proj.", ".update.ffn.to_hidden."),
    (".mlp.down_proj.", ".update.ffn.to_out."),
)
