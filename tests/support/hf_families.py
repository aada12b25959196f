"""Tiny models of transformers with random weights, one of each of twenty families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import Tensor

DECODER: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "vocab_size": 60, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "pad_token_id": 0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8,
}  # fmt: skip
MIXED = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}

DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER, sliding_window=6)),
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**{**DECODER, "head_dim": 8})),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER)),
    "gemma2": lambda: hf.Gemma2ForCausalLM(hf.Gemma2Config(**DECODER, sliding_window=6, query_pre_attn_scalar=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER, **MIXED, query_pre_attn_scalar=8)),
    "olmo2": lambda: hf.Olmo2ForCausalLM(hf.Olmo2Config(**DECODER)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**DECODER)),
    "gpt_oss": lambda: hf.GptOssForCausalLM(
        hf.GptOssConfig(**DECODER, **MIXED, num_local_experts=2, num_experts_per_tok=1)
    ),
    "llama4": lambda: hf.Llama4ForCausalLM(
        hf.Llama4TextConfig(
            **DECODER,
            intermediate_size_mlp=48,
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=6,
            layer_types=["chunked_attention", "full_attention"],
            no_rope_layers=[1, 0],
        )
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
    ),
    "gpt_neox": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**ENCODER, bos_token_id=1, eos_token_id=2)),
}

ENCODERS: dict[str, Callable[[], Any]] = {
    "bert": lambda: hf.BertModel(hf.BertConfig(**ENCODER)),
    "roberta": lambda: hf.RobertaModel(hf.RobertaConfig(**ENCODER)),
    "electra": lambda: hf.ElectraModel(hf.ElectraConfig(**ENCODER)),
    "modernbert": lambda: hf.ModernBertModel(
        hf.ModernBertConfig(**ENCODER, local_attention=6, global_attn_every_n_layers=2)
    ),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**VISION)),
    "dinov2": lambda: hf.Dinov2Model(hf.Dinov2Config(**VISION)),
    "siglip": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)),
    "swin": lambda: hf.SwinModel(
        hf.SwinConfig(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
    ),
    "t5": lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(
            vocab_size=60, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0,
            decoder_start_token_id=0,
        )
    ),
    "bart": lambda: hf.BartForConditionalGeneration(
        hf.BartConfig(
            vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0, decoder_start_token_id=2,
        )
    ),
    "whisper": lambda: hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(
            vocab_size=60, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=20,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    ),
}  # fmt: skip

IDS = torch.randint(3, 60, (2, 17), generator=torch.Generator().manual_seed(1))
LEFT = torch.ones_like(IDS)  # padding on the left of the second sequence
LEFT[1, :5] = 0
RIGHT = LEFT.flip(1)


def tiny(name: str) -> Any:
    """The model of a family, always with the same weights."""
    torch.manual_seed(0)
    return (DECODERS | ENCODERS)[name]().eval()


def recompute(model: Any) -> None:
    """Turns checkpointing on. Transformers 5.20, the last one for Python 3.10, knows only the older name."""
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)()


def output(model: Any) -> Tensor:
    """Logits or hidden states of all tokens that are not padding."""
    if model.main_input_name == "pixel_values":
        return model(pixel_values=torch.linspace(-1, 1, 2 * 3 * 32 * 32).view(2, 3, 32, 32)).last_hidden_state
    if model.main_input_name == "input_features":
        return model(input_features=torch.linspace(-1, 1, 2 * 8 * 40).view(2, 8, 40), decoder_input_ids=IDS).logits
    if model.config.is_encoder_decoder:
        return model(input_ids=IDS, attention_mask=RIGHT, decoder_input_ids=IDS[:, :9]).logits
    if model.can_generate():
        return model(IDS, attention_mask=LEFT).logits[LEFT.bool()]
    return model(IDS, attention_mask=RIGHT).last_hidden_state[RIGHT.bool()]
