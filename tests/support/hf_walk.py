"""Every text and vision family of transformers that says it supports attention backends, as a tiny model against eager.

python tests/support/hf_walk.py      prints the answers as docs/integrations.md lists them
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto as auto

import mpnn.hf

AGREES, DIFFERS, REFUSED, NO_MODEL = "agrees", "differs", "raises", "no tiny model"

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
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "vocab_size": 60, "image_size": 32, "patch_size": 8, "sliding_window": 6, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "attention_dropout": 0.0,
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
    torch.manual_seed(0)
    config = model.config_class()
    known = config.to_dict()
    sizes = {name: size for name, size in _SIZES.items() if isinstance(known.get(name), (int, float))}
    if "qk_rope_head_dim" in sizes:
        sizes["head_dim"] = sizes["qk_rope_head_dim"]
    layers = next((sizes[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if n in sizes), 2)
    if known.get("layer_types"):
        kinds = list(dict.fromkeys(known["layer_types"]))
        sizes["layer_types"] = [kinds[k % len(kinds)] for k in range(layers)]
    made = model(model.config_class(**sizes)).eval()
    if sum(p.numel() for p in made.parameters()) > 3e7:
        raise ValueError("its sizes have other names")
    return made


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
    """AGREES, DIFFERS or REFUSED, and the largest difference or the sentence."""
    made.set_attn_implementation("eager")
    with torch.no_grad():
        expected = output(kind, made)
        layers: list[Any] = []

        def counted(module: Any, *args: Any, **options: Any) -> Any:
            layers.append(module)
            return mpnn.hf.attend(module, *args, **options)

        try:
            mpnn.hf.use(made)
            with mock.patch.dict(transformers.AttentionInterface._global_mapping, {"mpnn": counted}):
                found = output(kind, made)
        except Exception as error:
            return REFUSED, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if not layers:
        return REFUSED, "no attention layer of this model dispatches"
    difference = float((found - expected).abs().max())
    # sums of float32 in another order, through two layers
    return (AGREES if difference <= 1e-5 * max(1.0, float(expected.abs().max())) else DIFFERS), f"{difference:.1e}"


def walk(seconds: int = 20) -> Iterator[tuple[str, str, str, str]]:
    """Kind, family, answer and detail of each family."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"it takes more than {seconds} s")

    signal.signal(signal.SIGALRM, late)
    for kind, name, model in families():
        signal.alarm(seconds)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = tiny(model)
                made.set_attn_implementation("eager")
                with torch.no_grad():
                    output(kind, made)
        except Exception as error:
            yield kind, name, NO_MODEL, f"{type(error).__name__}: {str(error)[:80]!r}"
            continue
        finally:
            signal.alarm(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield kind, name, *answer(kind, made)


if __name__ == "__main__":
    counts: Counter[tuple[str, str]] = Counter()
    for kind, name, what, detail in walk():
        counts[kind, what] += 1
        print(f"{kind:6s} {name:28s} {what:14s} {detail}", flush=True)
    print(dict(counts), file=sys.stderr)
