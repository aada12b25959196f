"""GPT and GPT-2 of transformers as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.graph.topology import Topology
from mpnn.graphs import causal
from mpnn.integrations.hf.decoder import CausalDecoder, TypesThirdDecoder
from mpnn.integrations.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.models.layers.blocks import embed, lookup
from mpnn.models.text.gpt import GPT2, GPTConfig


def convert_gpt2(hf_model: Any, graph: Topology | None, copies: Copies) -> GPT2Decoder:
    """A `GPT2Model` as message passing."""
    config = hf_model.config
    check_class(hf_model, "GPT2Model")
    check_config(config, add_cross_attention=False, is_causal=True, quantization_config=None)
    ours = GPTConfig(
        hidden=config.n_inner,
        activation=activation(config, "activation_function"),
        scaled=config.scale_attn_weights,
        scaled_by_depth=config.scale_attn_by_inverse_layer_idx,
        **_common(config),
    )
    topology = causal() if graph is None else graph
    model = with_weights(lambda: GPT2(ours, topology), hf_model, _GPT2_NAMES + _NAMES, copies, _split)
    return GPT2Decoder(model, config, "BaseModelOutputWithPastAndCrossAttentions", takes_cache=True)


def convert_gpt(hf_model: Any, graph: Topology | None, copies: Copies) -> GPTDecoder:
    """An `OpenAIGPTModel` as message passing."""
    config = hf_model.config
    check_class(hf_model, "OpenAIGPTModel")
    check_config(config, quantization_config=None)
    ours = GPTConfig(activation=_ACTIVATIONS[config.afn], norm_first=False, **_common(config))
    topology = causal() if graph is None else graph
    model = with_weights(lambda: GPT2(ours, topology), hf_model, _GPT_NAMES + _NAMES, copies, _split)
    return GPTDecoder(model, config, "BaseModelOutput", takes_cache=False)


class _WithTypes(CausalDecoder):
    """A decoder that embeds token types as tokens and adds both vectors."""

    def add_token_types(self, tokens: Tensor, types: Tensor | None) -> Tensor:
        if types is None:
            return tokens
        return embed(self.model.token, tokens) + lookup(self.model.token, types, "token type")


class GPT2Decoder(_WithTypes):
    """A GPT-2 with the call of transformers: `CausalDecoder` with another order of arguments."""

    def forward(  # type: ignore[override]  # the order is that of transformers
        self,
        input_ids: Tensor | None = None,
        past_key_values: Any = None,
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
            past_key_values,
            inputs_embeds,
            token_type_ids=token_type_ids,
            **others,
        )


class GPTDecoder(TypesThirdDecoder, _WithTypes):
    """A GPT with the call of transformers."""


_ACTIVATIONS = {"relu": "relu", "silu": "silu", "gelu": "gelu_new", "swish": "silu"}
"""What the names in GPT's configuration stand for."""

_GPT2_NAMES = (("wte.", "token."), ("wpe.", "position."), ("ln_f.", "norm."))
_GPT_NAMES = (("tokens_embed.", "token."), ("positions_embed.", "position."))
_NAMES = (
    ("h.", "layers."),
    (".attn.c_attn.", ".attention."),
    (".attn.c_proj.", ".attention.to_out."),
    (".ln_1.", ".update.norm."),
    (".ln_2.", ".update.ffn_norm."),
    (".mlp.c_fc.", ".update.ffn.0."),
    (".mlp.c_proj.", ".update.ffn.3."),
)


def _common(config: Any) -> dict[str, Any]:
    return {
        "vocabulary": config.vocab_size,
        "dim": config.n_embd,
        "layers": config.n_layer,
        "heads": config.n_head,
        "context": config.n_positions,
        "eps": config.layer_norm_epsilon,
        "dropout": config.resid_pdrop,
        "embedding_dropout": config.embd_pdrop,
        "attention_dropout": config.attn_pdrop,
    }


def _split(name: str, weight: Tensor) -> dict[str, Tensor]:
    """Linear maps of GPT are transposed, and those of query, key and value are one."""
    if not name.startswith("layers.") or ".norm." in name or ".ffn_norm." in name:
        return {name: weight}
    weight = weight.mT if weight.dim() == 2 else weight
    head, _, kind = name.rpartition(".")
    if not head.endswith(".attention"):
        return {name: weight}
    parts = zip(("to_query", "to_key", "to_value"), weight.chunk(3), strict=True)
    return {f"{head}.{part}.{kind}": chunk for part, chunk in parts}
