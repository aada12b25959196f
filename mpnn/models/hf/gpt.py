"""GPT and GPT-2 of transformers as message passing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mpnn.graphs import causal
from mpnn.models.gpt import GPT2, GPTConfig
from mpnn.models.hf.decoder import CausalDecoder
from mpnn.models.hf.weights import Copies, activation, check_class, check_config, with_weights
from mpnn.topology import Topology


def convert_gpt2(hf_model: Any, graph: Topology | None, copies: Copies) -> CausalDecoder:
    """A `GPT2Model` as message passing."""
    config = hf_model.config
    check_class(hf_model, "GPT2Model")
    check_config(config, add_cross_attention=False, quantization_config=None)
    ours = GPTConfig(
        hidden=config.n_inner,
        activation=activation(config, "activation_function"),
        scaled=config.scale_attn_weights,
        scaled_by_depth=config.scale_attn_by_inverse_layer_idx,
        **_common(config),
    )
    model = with_weights(lambda: GPT2(ours, graph or causal()), hf_model, _GPT2_NAMES + _NAMES, copies, _split)
    output = "BaseModelOutputWithPastAndCrossAttentions"
    return CausalDecoder(model, config, output, types=True, remembers=True)


def convert_gpt(hf_model: Any, graph: Topology | None, copies: Copies) -> CausalDecoder:
    """An `OpenAIGPTModel` as message passing."""
    config = hf_model.config
    check_class(hf_model, "OpenAIGPTModel")
    check_config(config, quantization_config=None)
    ours = GPTConfig(activation=_ACTIVATIONS[config.afn], norm_first=False, **_common(config))
    model = with_weights(lambda: GPT2(ours, graph or causal()), hf_model, _GPT_NAMES + _NAMES, copies, _split)
    return CausalDecoder(model, config, "BaseModelOutput", types=True, remembers=False)


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
