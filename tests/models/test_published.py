"""`load_weights`: each definition, with weights of transformers, gives what transformers gives."""

from functools import partial

import pytest
import torch

from mpnn import graphs
from mpnn.models import (
    GPT2,
    MAE,
    Bert,
    BertConfig,
    GPTConfig,
    Llama,
    LlamaConfig,
    Longformer,
    MAEConfig,
    Reformer,
    ReformerConfig,
    Swin,
    SwinConfig,
    Transformer,
    TransformerConfig,
    ViT,
    ViTConfig,
    XLNet,
    XLNetConfig,
    load_weights,
)
from mpnn.models.text.reformer import Chunks

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WORDS, PAD = 3, 12, 50, 1
IDS = torch.arange(3, 3 + BATCH * LENGTH).view(BATCH, LENGTH) * 7 % (WORDS - 3) + 3
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 34,
    "initializer_range": 0.3,  # large enough for attention to choose
}
WORDED = {"vocab_size": WORDS, "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 2}
OURS = {"vocabulary": WORDS, "dim": 16, "layers": 2, "heads": 2, "hidden": 24}
GPT = {"n_positions": 34, "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": WORDS, "initializer_range": 0.3}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 34,
    "init_std": 0.3,
}
IMAGE = {**SIZES, "image_size": 20, "patch_size": 4, "attn_implementation": "sdpa"}
PICTURE = {"image": 20, "patch": 4, "dim": 16, "layers": 2, "heads": 2, "hidden": 24}
REFORMER = {
    "attn_layers": ["local", "lsh"],
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "axial_pos_shape": [4, 8],
    "axial_pos_embds_dim": [8, 8],
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 4,
    "hash_seed": 0,
    "is_decoder": True,
    "vocab_size": WORDS,
    **SIZES,
}


def hugging_face(name, config, **settings):
    """A model in float64, with norms and biases away from what they begin as."""
    model = getattr(transformers, name)(getattr(transformers, config)(**settings)).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def loaded(kind, config, hf_model, *args, **options):
    return load_weights(kind(config, *args, **options).double(), hf_model.state_dict()).eval()


def close(found, expected, atol=1e-11):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def test_bert():
    hf_model = hugging_face("BertModel", "BertConfig", **SIZES, **WORDED)
    bert = loaded(Bert, BertConfig(**OURS, context=34, pad=PAD), hf_model)
    expected = hf_model(IDS)
    close(bert(IDS).last, expected.last_hidden_state)
    close(bert(IDS).pooled, expected.pooler_output)


def test_roberta():
    hf_model = hugging_face("RobertaModel", "RobertaConfig", **SIZES, **WORDED)
    bert = loaded(Bert, BertConfig(**OURS, context=32, pad=PAD, after_pad=True, eps=1e-12), hf_model)
    close(bert(IDS).last, hf_model(IDS).last_hidden_state)


def test_big_bird():
    hf_model = hugging_face("BigBirdModel", "BigBirdConfig", **SIZES, **WORDED, attention_type="original_full")
    bert = loaded(Bert, BertConfig(**OURS, context=34, pad=PAD, activation="gelu_new"), hf_model)
    expected = hf_model(IDS)
    close(bert(IDS).last, expected.last_hidden_state)
    close(bert(IDS).pooled, expected.pooler_output)


def test_longformer():
    hf_model = hugging_face("LongformerModel", "LongformerConfig", **SIZES, **WORDED, attention_window=[4, 4])
    config = BertConfig(**OURS, context=32, pad=PAD, after_pad=True)
    longformer = loaded(Longformer, config, hf_model, graphs.window(2))
    hubs = torch.arange(LENGTH).lt(2).expand(BATCH, -1)
    expected = hf_model(IDS, global_attention_mask=hubs.long()).last_hidden_state
    close(longformer(IDS, hubs=hubs).last, expected, 1e-5)  # transformers takes this softmax in float32


def test_gpt2():
    hf_model = hugging_face("GPT2Model", "GPT2Config", **GPT)
    gpt = loaded(
        GPT2, GPTConfig(vocabulary=WORDS, dim=16, layers=2, heads=2, context=34, activation="gelu_new"), hf_model
    )
    logits = hf_model(IDS).last_hidden_state @ hf_model.wte.weight.T
    close(gpt(IDS), logits)


def test_openai_gpt():
    hf_model = hugging_face("OpenAIGPTModel", "OpenAIGPTConfig", **GPT)
    config = GPTConfig(vocabulary=WORDS, dim=16, layers=2, heads=2, context=34, activation="gelu_new", norm_first=False)
    logits = hf_model(IDS).last_hidden_state @ hf_model.tokens_embed.weight.T
    close(loaded(GPT2, config, hf_model)(IDS), logits, 1e-11)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_llama(family):
    window = {"sliding_window": 4} if family == "Mistral" else {}
    settings = {**SIZES, **WORDED, **window, "num_key_value_heads": 1, "tie_word_embeddings": False}
    hf_model = hugging_face(f"{family}ForCausalLM", f"{family}Config", **settings)
    config = LlamaConfig(**OURS, kv_heads=1, context=34, eps=1e-6)
    topology = graphs.causal() & graphs.window(3) if window else graphs.causal()
    close(loaded(Llama, config, hf_model, topology)(IDS), hf_model(IDS).logits, 1e-5)  # rotates in float32


@pytest.mark.parametrize("family", ["Bart", "Marian"])
def test_bart(family):
    marian = family == "Marian"
    special = {**WORDED, "decoder_start_token_id": 2, "forced_eos_token_id": 2}
    hf_model = hugging_face(f"{family}Model", f"{family}Config", **BART, **special)
    config = TransformerConfig(
        vocabulary=WORDS,
        pad=PAD,
        start=2,
        eos=2,
        dim=16,
        heads=2,
        hidden=24,
        encoder_layers=2,
        decoder_layers=2,
        context=34,
        learned_positions=True,
        scale=False,
        embedding_norm=not marian,
        activation="gelu",
    )
    model = loaded(Transformer, config, hf_model)
    expected = hf_model(input_ids=IDS, decoder_input_ids=IDS.roll(1, 1)).last_hidden_state
    close(model(IDS, IDS.roll(1, 1)), expected @ hf_model.shared.weight.T)


def test_xlnet():
    sizes = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": WORDS, "initializer_range": 0.3}
    hf_model = hugging_face("XLNetModel", "XLNetConfig", **sizes)
    model = loaded(XLNet, XLNetConfig(**OURS), hf_model, head=False)
    types = torch.arange(LENGTH).gt(6).long().expand(BATCH, -1)
    close(model(IDS, types), hf_model(IDS, token_type_ids=types).last_hidden_state, 1e-5)  # waves in float32


def test_reformer():
    hf_model = hugging_face("ReformerModel", "ReformerConfig", **REFORMER)
    config = ReformerConfig(
        vocabulary=WORDS,
        dim=16,
        layers=("local", "lsh"),
        heads=2,
        head_dim=8,
        hidden=24,
        local=Chunks(4),
        lsh=Chunks(4),
        buckets=4,
        seed=0,
        causal=True,
        axial=(4, 8),
        axial_dims=(8, 8),
        context=34,
    )
    close(loaded(Reformer, config, hf_model)(IDS).last, hf_model(IDS).last_hidden_state)


def test_vit():
    hf_model = hugging_face("ViTModel", "ViTConfig", **IMAGE)
    images = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    model = loaded(ViT, ViTConfig(**PICTURE), hf_model, pooler=16)
    expected, found = hf_model(images), model(images)
    close(found.last, expected.last_hidden_state)
    close(found.pooled, expected.pooler_output)


def test_mae():
    decoder = {
        "decoder_hidden_size": 8,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 12,
    }
    hf_model = hugging_face("ViTMAEForPreTraining", "ViTMAEConfig", **IMAGE, **decoder)
    ours = MAEConfig(**PICTURE, decoder_dim=8, decoder_layers=2, decoder_heads=2, decoder_hidden=12, mask_ratio=0.75)
    images, noise = torch.randn(2, 3, 20, 20, dtype=torch.float64), torch.rand(2, 25)
    expected, found = hf_model(images, noise=noise), loaded(MAE, ours, hf_model)(images, noise)
    assert torch.equal(found.seen, expected.mask == 0)
    close(found.pixels, expected.logits)


def test_swin():
    settings = {
        "image_size": 16,
        "patch_size": 2,
        "embed_dim": 8,
        "depths": [2, 2],
        "num_heads": [1, 2],
        "window_size": 4,
    }
    hf_model = hugging_face("SwinModel", "SwinConfig", **settings, initializer_range=0.3, attn_implementation="sdpa")
    config = SwinConfig(image=16, patch=2, dim=8, depths=(2, 2), heads=(1, 2), window=4)
    images = torch.randn(2, 3, 16, 16, dtype=torch.float64)
    close(loaded(Swin, config, hf_model)(images).last, hf_model(images).last_hidden_state)


def test_refuses_models_and_weights_that_do_not_fit():
    with pytest.raises(TypeError, match=r"knows the weights of Longformer.*got Linear"):
        load_weights(torch.nn.Linear(2, 2), {})
    hf_model = hugging_face("BertModel", "BertConfig", **SIZES, **WORDED)
    smaller = partial(Bert, BertConfig(**OURS | {"layers": 1}, context=34, pad=PAD))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*layers.1"):
        load_weights(smaller(), hf_model.state_dict())
