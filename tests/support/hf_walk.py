"""Every text and vision family of transformers that says it supports attention backends, as a tiny model against eager.

python tests/support/hf_walk.py             prints the answers as docs/families.md lists them
python tests/support/hf_walk.py refused     writes the families of texts that `mpnn.hf.use` refuses into that page
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

import mpnn.hf

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
AGREES, DIFFERS, BLIND, REFUSED, NO_MODEL = "agrees", "differs", "notices no change", "raises", "no tiny model"

_KINDS = {
    "text": (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ),
    "vision": (auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,),
}
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    **dict.fromkeys(("rotary_dim", "time_step_rank"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("query_pre_attn_scalar",), 8),
    # what chooses among 13 tokens
    **dict.fromkeys(("index_topk", "index_topk_blocks", "index_block_size", "index_local_blocks"), 2),
    **dict.fromkeys(("attention_chunk_size", "attention_window_size", "local_attention"), 6),
    **dict.fromkeys(("attn_logit_softcapping", "attention_logit_cap"), 2.0),
    # recurrences: chunks shorter than the 13 tokens
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "n_groups", "mamba_ngroups", "mamba_n_groups", "n_mamba_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("chunk_size", "mamba_chunk_size", "mamba_dt_rank", "num_experts_per_token"), 4),
    "mamba_d_ssm": 64, "mamba_expand": 2,
    "index_n_heads": 2, "index_head_dim": 16, "use_sliding_window": True, "max_window_layers": 1,
    "global_attn_every_n_layers": 2,
    "vocab_size": 60, "image_size": 32, "patch_size": 8, "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "attention_dropout": 0.0,
}  # fmt: skip
_MIXED = ["sliding_attention", "full_attention"]
_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
_SPEECH = {"hidden_dim": 32, "num_heads": 4, "dim_head": 8, "input_dim": 16, "output_dim": 8}
_GEMMA4 = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 60, "num_kv_shared_layers": 0,
    "per_layer_config": {}, "layer_types": _MIXED, "global_head_dim": 8,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {  # of configurations whose sizes have names or limits of their own
    "BigBirdConfig": {"attention_type": "original_full", "sep_token_id": 3},
    "LongformerConfig": {"attention_window": [4, 4]},
    "ReformerConfig": {
        "axial_pos_shape": [4, 16], "axial_pos_embds_dim": [8, 24], "attn_layers": ["local", "lsh"],
        "attention_head_size": 8, "feed_forward_size": 48, "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4,
        "num_buckets": 2, "hash_seed": 0,
    },
    "BailingHybridConfig": {
        "num_expert_group": 2, "qk_rope_head_dim": 8, "num_key_value_heads": 4, "num_nextn_predict_layers": 0,
        "layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"],
        "num_experts_per_token": 2,
    },
    "BambaConfig": {"attn_layer_indices": [1]},
    "CohereCompassTextConfig": {
        "layer_types": _MIXED,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _MIXED},
    },
    "DeepseekV2Config": _EXPERTS,
    "Dots1Config": {**_EXPERTS, "n_shared_experts": 1},
    "Dots3NoteTextConfig": {
        **_EXPERTS, "index_topk": 2, "index_head_dim": 16, "index_n_heads": 2, "shared_experts_intermediate_size": 24,
    },
    "Gemma3nTextConfig": {
        "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 60, "laurel_rank": 4,
        "intermediate_size": 48, "layer_types": _MIXED, "activation_sparsity_pattern": [0.0, 0.0],
    },
    "Gemma4TextConfig": _GEMMA4,
    "Glm5NextTextConfig": {
        "index_kpool": 1, "qk_rope_head_dim": 0, "head_dim": 0, "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"], "layer_types": ["linear_attention", "full_attention"],
    },
    "Glm5NextVisionConfig": {"depth": 1, "out_hidden_size": 32, "projection_intermediate_size": 48},
    "GraniteMoeHybridConfig": {
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "Inkling2VisionConfig": {"text_hidden_size": 32},
    "InklingTextConfig": {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "sliding_window_size": 4,
        "d_rel": 4, "rel_extent": 6, "log_scaling_n_floor": 3, "layer_types": ["hybrid_sliding", "hybrid"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "GraniteSpeechEncoderConfig": _SPEECH,
    "GraniteSpeechPlusEncoderConfig": _SPEECH,
    "Blip2QFormerConfig": {"encoder_hidden_size": 32},
    "LongcatFlashConfig": {
        "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 1, "expert_ffn_hidden_size": 24, "ffn_hidden_size": 48,
        "head_dim": 8, "num_key_value_heads": 4,
    },
    "MiniMaxM3VLTextConfig": {"layer_types": ["full_attention", "minimax_m3_sparse"]},
    "NemotronConfig": {"num_key_value_heads": 2},
    "Phi4MultimodalAudioConfig": {"num_blocks": 2, "nemo_conv_channels": 32},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "hc_count": 2,
        "indexer_compress_ratio": 2, "hc_lowrank": 8, "layer_types": ["linear_attention", "full_attention"],
    },
    "RecurrentGemmaConfig": {
        "num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 6, "num_key_value_heads": 2,
    },
    "ZambaConfig": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "XmodConfig": {"default_language": "en_XX", "languages": ["en_XX"]},
    "ZayaConfig": {"num_experts_per_tok": 1, "router_hidden_size": 16},
    "EsmConfig": {"vocab_size": 60, "mask_token_id": 59, "pad_token_id": 0},
    "EsmcConfig": {"num_key_value_heads": 4},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearConfig": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_token": 2},
    "Lfm2Config": {"full_attn_idxs": [1], "layer_types": ["conv", "full_attention"]},
    "Mamba2Config": {"num_heads": 4, "head_dim": 16},
    "MiniMaxConfig": {"block_size": 4},
    "NeoMMEConfig": {
        "embedding_rank": 16, "head_dim": 16, "hidden_size": 64, "embedding_dim": 16,
    },
    "SegformerConfig": {"sr_ratios": [1, 1, 1, 1]},
    "Zamba2Config": {
        "layers_block_type": ["linear_attention", "hybrid"], "n_mamba_heads": 4, "mamba_headdim": 16,
        "attention_hidden_size": 64, "attention_head_dim": 16, "kv_channels": 8, "num_key_value_heads": 4,
        "adapter_rank": 4,
    },
    "SwinConfig": {"patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4},
}  # fmt: skip
_IDS = torch.randint(3, 60, (2, 13), generator=torch.Generator().manual_seed(0))
_KEEP = torch.ones_like(_IDS)
_KEEP[1, 9:] = 0


def families() -> Iterator[tuple[str, str, Any]]:
    """Kind, name and class of each family."""
    seen = set()
    for kind, mappings in _KINDS.items():
        for mapping in mappings:
            for name, classes in mapping.items():
                class_name = classes if isinstance(classes, str) else classes[0]
                model = getattr(transformers, class_name, None)
                if name not in seen and model is not None and getattr(model, "_supports_attention_backend", False):
                    seen.add(name)
                    yield kind, name, model


def tiny(model: Any) -> Any:
    """A model of this class with small sizes, wherever its configuration has them."""
    config = _small(model.config_class)
    with torch.device("meta"):
        count = sum(p.numel() for p in model(config).parameters())
    if count > 3e7:
        raise ValueError(f"{count:.0e} parameters: its sizes have other names")
    torch.manual_seed(0)
    made = model(_small(model.config_class)).eval()
    for name, weight in made.named_parameters():  # attention then chooses, and biases, sinks and norms tell
        if weight.is_floating_point():
            torch.nn.init.normal_(weight, mean=float(weight.dim() == 1 and "norm" in name), std=0.3)
    return made


def _small(kind: Any) -> Any:
    known = kind()
    values = known.to_dict()
    sizes = {name: size for name, size in _SIZES.items() if isinstance(values.get(name), (int, float))}
    if "head_dim" in values:
        sizes["head_dim"] = _SIZES["head_dim"]
    if "qk_rope_head_dim" in sizes:  # latent attention has a key for each head
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    layers = next((sizes[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in sizes), 2)
    if values.get("layer_types"):
        kinds = list(dict.fromkeys(values["layer_types"]))
        sizes["layer_types"] = [kinds[k % len(kinds)] for k in range(layers)]
    for name in known.sub_configs:
        if (part := getattr(known, name, None)) is not None:
            sizes[name] = _small(type(part))
    return kind(**sizes | _OWN.get(kind.__name__, {}))


def output(kind: str, model: Any) -> Tensor:
    """Logits, of tokens that are not padding."""
    if kind == "vision":
        size = getattr(model.config, "image_size", 32)
        height, width = size if isinstance(size, (tuple, list)) else (size, size)
        channels = getattr(model.config, "num_channels", 3)
        return model(
            pixel_values=torch.linspace(-1, 1, 2 * channels * height * width).view(2, channels, height, width)
        )[0]
    more = {"decoder_input_ids": _IDS[:, :5]} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=_IDS, attention_mask=_KEEP, **more)[0]
    return logits if more else logits[_KEEP.bool()]


def answer(kind: str, made: Any) -> tuple[str, str]:
    """AGREES, DIFFERS, BLIND or REFUSED, and the largest difference or the sentence. BLIND: the output is the same if
    the scale of all logits is doubled, so that agreement would say nothing about attention."""
    made.set_attn_implementation("eager")
    with torch.no_grad():
        expected = output(kind, made)
        layers: list[Any] = []

        def counted(module: Any, *args: Any, **options: Any) -> Any:
            layers.append(module)
            return mpnn.hf.attend(module, *args, **options)

        def doubled(module: Any, query: Tensor, *args: Any, **options: Any) -> Any:
            scale = options.pop("scaling", None) or query.shape[-1] ** -0.5
            return mpnn.hf.attend(module, query, *args, scaling=2 * scale, **options)

        try:
            mpnn.hf.use(made)
            with mock.patch.dict(transformers.AttentionInterface._global_mapping, {"mpnn": counted}):
                found = output(kind, made)
            with mock.patch.dict(transformers.AttentionInterface._global_mapping, {"mpnn": doubled}):
                mutated = output(kind, made)
        except Exception as error:
            return REFUSED, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not layers:
        return REFUSED, "no attention layer of this model dispatches"
    difference, change = (float((x - expected).abs().max()) for x in (found, mutated))
    # sums of float32 in another order, through two layers
    bar = 1e-5 * max(1.0, float(expected.abs().max()))
    what = DIFFERS if not difference <= bar else AGREES if change > 10 * bar else BLIND
    return what, f"{difference:.1e}, {change:.1e} with the scale doubled"


def walk() -> Iterator[tuple[str, str, str, str]]:
    """Kind, family, answer and detail of each family."""
    for kind, name, model in families():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                made = tiny(model)
                made.set_attn_implementation("eager")
                with torch.no_grad():
                    output(kind, made)
            except Exception as error:
                yield kind, name, NO_MODEL, f"{type(error).__name__}: {str(error)[:80]!r}"
                continue
            yield kind, name, *answer(kind, made)


def refused() -> list[str]:
    """The families of texts that `mpnn.hf.use` refuses, without weights."""
    names = []
    for name, class_name in _texts().items():
        model = getattr(transformers, class_name, None)
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = model(model.config_class())
        except Exception:  # not offered, or its default configuration makes no model
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of models without attention
            try:
                mpnn.hf.use(made, maps=False, layers=False)
            except ValueError:
                names.append(name)
    return sorted(names)


def _texts() -> dict[str, str]:
    """The first class of each family of texts."""
    classes: dict[str, str] = {}
    for mapping in _KINDS["text"]:
        for name, listed in mapping.items():
            classes.setdefault(name, listed if isinstance(listed, str) else listed[0])
    return classes


def with_refused(page: str, names: list[str]) -> str:
    """The page with the list of the families that are refused."""
    lines = ", ".join(f"`{name}`" for name in names)
    return re.sub(r"(<!-- refused -->\n).*?(\n<!-- end -->)", rf"\g<1>{lines}\g<2>", page, flags=re.DOTALL)


if __name__ == "__main__":
    if sys.argv[1:] == ["refused"]:
        PAGE.write_text(with_refused(PAGE.read_text(), refused()))
        sys.exit()
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name, what, detail in walk():
        counts[kind, what] += 1
        print(f"{kind:6s} {name:28s} {what:14s} {detail}", flush=True)
    print(dict(counts), file=sys.stderr)
