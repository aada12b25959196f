"""Small models of transformers for the tests of `from_hf`, and something to call each of them with."""

import importlib
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WORDS, PAD, EOS, LABELS = 3, 9, 50, 1, 2, 3
KEEP = torch.arange(LENGTH) < torch.tensor([9, 4, 6])[:, None]

BERT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
GPT = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "summary_first_dropout": 0.0}
LLAMA = {**BERT, "num_key_value_heads": 1}
IMAGE = {**BERT, "image_size": 8, "patch_size": 2, "encoder_stride": 2}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "init_std": 0.3,
}
REFORMER = {
    "attn_layers": ["local", "lsh"],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [8, 8],
    "max_position_embeddings": 32,
    "local_attn_chunk_length": 3,
    "lsh_attn_chunk_length": 3,
    "num_buckets": 2,
    "hash_seed": 0,
    "local_num_chunks_after": 0,
    "lsh_num_chunks_after": 0,
}
SIZES = {
    "bert": BERT,
    "roberta": BERT,
    "longformer": {**BERT, "attention_window": [4, 4]},
    "big_bird": {**BERT, "attention_type": "original_full"},
    "reformer": REFORMER,
    "xlnet": {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "summary_last_dropout": 0.0},
    "gpt2": GPT,
    "openai-gpt": GPT,
    "llama": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 4},
    "vit": IMAGE,
    "vit_mae": {
        **IMAGE,
        "decoder_hidden_size": 16,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 24,
    },
    "swin": {
        "image_size": 8,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
        "encoder_stride": 4,
    },
    "bart": BART,
    "marian": {**BART, "decoder_start_token_id": PAD, "forced_eos_token_id": EOS},
}
"""The smallest of each family."""

DECODERS = ("BertLMHeadModel", "RobertaForCausalLM", "BigBirdForCausalLM", "ReformerModelWithLMHead")


def offered():
    """(family, class) of every model that transformers offers and that a configuration is enough to make."""
    for family in SIZES:
        kind = transformers.CONFIG_MAPPING[family]
        module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        for model in vars(module).values():
            if not inspect.isclass(model) or not issubclass(model, transformers.PreTrainedModel):
                continue
            abstract = model.forward is transformers.PreTrainedModel.forward or model.__module__ != module.__name__
            if not abstract and "grid_size" not in inspect.signature(model.__init__).parameters:
                yield family, model


OFFERED = list(offered())


def made(family, kind, **changes):
    """A model with random weights, large enough for attention to choose."""
    special = {"vocab_size": WORDS, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": 0, "sep_token_id": EOS}
    special |= {"initializer_range": 0.3, "is_decoder": kind.__name__ in DECODERS}
    special["num_labels"] = 2 if "QuestionAnswering" in kind.__name__ else LABELS
    model = kind(transformers.CONFIG_MAPPING[family](**special | SIZES[family] | changes)).eval()
    moved(model)
    return model


def moved(model, by=0.1):
    """The weights that are trained, somewhere else: norms and biases too are then no longer what they begin as."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(by * torch.randn_like(weight))


def call_of(theirs, keep):
    """What the model is called with, labels included, from the names that its `forward` has."""
    name, config = type(theirs).__name__, theirs.config
    ids = torch.where(keep, torch.randint(3, WORDS, keep.shape), PAD)
    ids[torch.arange(BATCH), keep.sum(1) - 1] = EOS
    words = torch.where(keep, ids, -100)
    call = {
        "input_ids": ids,
        "attention_mask": keep.long(),
        "token_type_ids": torch.randint(getattr(config, "type_vocab_size", 2), keep.shape),
        "global_attention_mask": torch.arange(LENGTH).lt(2).long().expand(keep.shape),
        "decoder_input_ids": ids.roll(1, 1),
        "decoder_attention_mask": keep.long(),
        "labels": words,
        "start_positions": torch.tensor([0, 2, 1]),
        "end_positions": torch.tensor([1, 3, 3]),
        "next_sentence_label": torch.tensor([0, 1, 0]),
        "question_lengths": torch.tensor([[2], [1], [3]]),
        "mc_token_ids": torch.tensor([[1, 3], [0, 2], [3, 1]]),
        "mc_labels": torch.tensor([1, 0, 1]),
        "pixel_values": torch.randn(BATCH, 3, 8, 8),
        "noise": torch.rand(BATCH, 16),
        "bool_masked_pos": torch.rand(BATCH, 16) < 0.5,
    }
    if "TokenClassification" in name:
        call["labels"] = torch.where(keep, torch.randint(LABELS, keep.shape), -100)
    elif any(part in name for part in ("Classification", "MultipleChoice", "NextSentence")):
        call["labels"] = torch.tensor([1, 0, 1])
    if "MultipleChoice" in name or "DoubleHeads" in name:
        for which in ("input_ids", "attention_mask", "global_attention_mask", "token_type_ids"):
            call[which] = torch.stack([call[which], call[which].roll(1, 0)], 1)
    if "DoubleHeads" in name:
        call["labels"] = torch.stack([words, words.roll(1, 0)], 1)
    if "Masked" not in name:
        del call["bool_masked_pos"]
    if name == "OpenAIGPTDoubleHeadsModel":
        del call["attention_mask"]  # its own attention does not take one of choices
    if "pixel_values" in (taken := inspect.signature(theirs.forward).parameters):
        del call["attention_mask"]  # of patches, which is another one
    return {which: value for which, value in call.items() if which in taken}


def tensors(answer, at=""):
    """The tensors of an output object, by where they are in it."""
    if torch.is_tensor(answer):
        return {at: answer}
    if isinstance(answer, dict):
        return {k: v for name, part in answer.items() for k, v in tensors(part, f"{at}.{name}").items()}
    if isinstance(answer, (list, tuple)):
        return {k: v for number, part in enumerate(answer) for k, v in tensors(part, f"{at}.{number}").items()}
    return {}
