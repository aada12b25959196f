"""`load_weights`: each definition, with weights of transformers, gives what transformers gives, and its gradients."""

import copy
from functools import partial
from math import nan

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
    TransformerXL,
    ViT,
    ViTConfig,
    XLNet,
    XLNetConfig,
    load_weights,
)
from mpnn.models.layers.images import with_class_token
from mpnn.models.text.reformer import Chunks
from mpnn.models.vision.mae import visible_patches, with_class

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
XLNET = {"d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24, "vocab_size": WORDS, "initializer_range": 0.3}
IMAGE = {**SIZES, "image_size": 20, "patch_size": 4, "attn_implementation": "sdpa"}
PICTURE = {"image": 20, "patch": 4, "dim": 16, "layers": 2, "heads": 2, "hidden": 24}
REFORMER = {
    "attn_layers": ["local", "lsh"],
    "attention_head_size": 8,
    "feed_forward_size": 24,
    "axial_pos_shape": [3, 4],
    "axial_pos_embds_dim": [8, 8],
    "local_attn_chunk_length": 4,
    "lsh_attn_chunk_length": 4,
    "num_buckets": 4,
    "hash_seed": 0,
    "is_decoder": True,
    "vocab_size": WORDS,
    **SIZES,
    "hidden_dropout_prob": 0.0,
    "local_attention_probs_dropout_prob": 0.0,
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


def agree(model, found, hf_model, expected, atol=1e-11):
    """The outputs, and the gradients of all parameters: `load_weights` gives those of transformers our names."""
    close(found, expected, atol)
    weight = torch.randn_like(found)
    for output in (found, expected):
        (output * weight).sum().backward()
    gradients = copy.deepcopy(hf_model)
    with torch.no_grad():
        for p, original in zip(gradients.parameters(), hf_model.parameters(), strict=True):
            p.copy_(original.grad if original.grad is not None else torch.full_like(p, 0 if p.requires_grad else nan))
    named = dict(load_weights(copy.deepcopy(model), gradients.state_dict()).named_parameters())
    assert any(p.grad is not None for p in model.parameters())
    for name, p in model.named_parameters():
        if p.requires_grad and not named[name].isnan().any():  # Marian's positions are not trained
            scale = 1 + named[name].abs().max()
            close((torch.zeros_like(p) if p.grad is None else p.grad) / scale, named[name].detach() / scale, 10 * atol)


def test_bert():
    hf_model = hugging_face("BertModel", "BertConfig", **SIZES, **WORDED)
    bert = loaded(Bert, BertConfig(**OURS, context=34, pad=PAD), hf_model)
    expected = hf_model(IDS)
    close(bert(IDS).pooled, expected.pooler_output)
    agree(bert, bert(IDS).last, hf_model, expected.last_hidden_state)


def test_roberta():
    hf_model = hugging_face("RobertaModel", "RobertaConfig", **SIZES, **WORDED)
    bert = loaded(Bert, BertConfig(**OURS, context=32, pad=PAD, after_pad=True, eps=1e-12), hf_model)
    agree(bert, bert(IDS).last, hf_model, hf_model(IDS).last_hidden_state)


def test_big_bird():
    hf_model = hugging_face("BigBirdModel", "BigBirdConfig", **SIZES, **WORDED, attention_type="original_full")
    bert = loaded(Bert, BertConfig(**OURS, context=34, pad=PAD, activation="gelu_new"), hf_model)
    expected = hf_model(IDS)
    close(bert(IDS).pooled, expected.pooler_output)
    agree(bert, bert(IDS).last, hf_model, expected.last_hidden_state)


def test_longformer():
    hf_model = hugging_face("LongformerModel", "LongformerConfig", **SIZES, **WORDED, attention_window=[4, 4])
    config = BertConfig(**OURS, context=32, pad=PAD, after_pad=True)
    longformer = loaded(Longformer, config, hf_model, graphs.window(2))
    hubs = torch.arange(LENGTH).lt(2).expand(BATCH, -1)
    expected = hf_model(IDS, global_attention_mask=hubs.long()).last_hidden_state
    agree(
        longformer, longformer(IDS, hubs=hubs).last, hf_model, expected, 1e-5
    )  # transformers takes this softmax in float32


def test_gpt2():
    hf_model = hugging_face("GPT2Model", "GPT2Config", **GPT)
    gpt = loaded(
        GPT2, GPTConfig(vocabulary=WORDS, dim=16, layers=2, heads=2, context=34, activation="gelu_new"), hf_model
    )
    logits = hf_model(IDS).last_hidden_state @ hf_model.wte.weight.T
    agree(gpt, gpt(IDS), hf_model, logits)


def test_openai_gpt():
    hf_model = hugging_face("OpenAIGPTModel", "OpenAIGPTConfig", **GPT)
    config = GPTConfig(vocabulary=WORDS, dim=16, layers=2, heads=2, context=34, activation="gelu_new", norm_first=False)
    logits = hf_model(IDS).last_hidden_state @ hf_model.tokens_embed.weight.T
    gpt = loaded(GPT2, config, hf_model)
    agree(gpt, gpt(IDS), hf_model, logits)


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
def test_llama(family):
    window = {"sliding_window": 4} if family == "Mistral" else {}
    settings = {**SIZES, **WORDED, **window, "num_key_value_heads": 1, "tie_word_embeddings": False}
    hf_model = hugging_face(f"{family}ForCausalLM", f"{family}Config", **settings)
    config = LlamaConfig(**OURS, kv_heads=1, context=34, eps=1e-6)
    topology = graphs.causal() & graphs.window(3) if window else graphs.causal()
    llama = loaded(Llama, config, hf_model, topology)
    agree(llama, llama(IDS), hf_model, hf_model(IDS).logits, 1e-5)  # rotates in float32


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
    agree(model, model(IDS, IDS.roll(1, 1)), hf_model, expected @ hf_model.shared.weight.T)


def test_xlnet():
    hf_model = hugging_face("XLNetModel", "XLNetConfig", **XLNET)
    model = loaded(XLNet, XLNetConfig(**OURS), hf_model, head=False)
    types = torch.arange(LENGTH).gt(6).long().expand(BATCH, -1)
    expected = hf_model(IDS, token_type_ids=types).last_hidden_state
    agree(model, model(IDS, types), hf_model, expected, 1e-5)  # waves in float32


@pytest.mark.parametrize("segments", [False, True])
def test_xlnets_predictions_in_an_order(segments):
    """perm_mask hides what stands at or after a token in the order; from the query stream its own content too."""
    hf_model = hugging_face("XLNetLMHeadModel", "XLNetConfig", **XLNET).float()  # its masks are float32
    model = XLNet(XLNetConfig(**OURS)).eval()
    load_weights(model, hf_model.transformer.state_dict() | {"bias": hf_model.lm_loss.bias})
    order = torch.tensor([4, 1, 11, 7, 0, 8, 10, 3, 2, 6, 9, 5])
    rank = order.argsort()
    given = {
        "token_type_ids": torch.arange(LENGTH).gt(6).long().expand(BATCH, -1) if segments else None,
        "perm_mask": (rank >= rank[:, None]).float().expand(BATCH, -1, -1),
        "target_mapping": torch.eye(LENGTH).expand(BATCH, -1, -1),
    }
    expected = hf_model(IDS, **given).logits
    rest = order[1:]  # the first has no in-neighbors: transformers then attends to all
    close(model.predict(IDS, order.tolist(), given["token_type_ids"])[:, rest], expected[:, rest], 1e-5)
    targets = torch.full_like(IDS, -100)
    targets[:, order[-4:]] = IDS[:, order[-4:]]
    close(
        model.loss(IDS, order.tolist(), given["token_type_ids"], last=4),
        hf_model(IDS, **given, labels=targets).loss,
        1e-5,
    )


def test_xlnet_over_a_window_equals_a_mask():
    hf_model = hugging_face("XLNetModel", "XLNetConfig", **XLNET)
    model = loaded(XLNet, XLNetConfig(**OURS), hf_model, head=False)
    mask = (~graphs.window(2).bind(LENGTH).dense()).double().expand(BATCH, -1, -1)
    close(model(IDS, graph=graphs.window(2)), hf_model(IDS, perm_mask=mask).last_hidden_state, 1e-5)


def test_transformer_xl_is_a_one_way_xlnet():
    """With attn_type="uni", XLNet has Transformer-XL's relative positions and its memory from segment to segment."""
    one_way = {"attn_type": "uni", "mem_len": 5, "ff_activation": "relu", "layer_norm_eps": 1e-5, "d_inner": 64}
    hf_model = hugging_face("XLNetModel", "XLNetConfig", **XLNET | one_way)
    body = loaded(XLNet, XLNetConfig(**OURS | {"hidden": 64}), hf_model, head=False).state_dict()
    model = TransformerXL(WORDS, 16, 2, 2, remember=5).double().eval()
    model.load_state_dict({name: body.get(name, model.bias) for name in model.state_dict()})
    mems = memory = None
    for segment in IDS.split([5, 1, 6], 1):
        expected = hf_model(segment, mems=mems)
        logits, memory = model(segment, memory)
        mems = expected.mems
        close(logits, expected.last_hidden_state @ hf_model.word_embedding.weight.T + model.bias, 1e-5)


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
        axial=(3, 4),
        axial_dims=(8, 8),
        context=34,
    )
    reformer = loaded(Reformer, config, hf_model)
    hf_model.train()  # it has no gradients in evaluation; nothing here drops out
    agree(reformer, reformer(IDS).last, hf_model, hf_model(IDS).last_hidden_state)


def test_vit():
    hf_model = hugging_face("ViTModel", "ViTConfig", **IMAGE)
    images = torch.randn(2, 3, 20, 20, dtype=torch.float64)
    model = loaded(ViT, ViTConfig(**PICTURE), hf_model, pooler=16)
    expected, found = hf_model(images), model(images)
    close(found.pooled, expected.pooler_output)
    agree(model, found.last, hf_model, expected.last_hidden_state)


def test_vit_over_neighbors_equals_a_mask():
    hf_model = hugging_face("ViTModel", "ViTConfig", **IMAGE | {"attn_implementation": "eager"})
    images, near = torch.randn(2, 3, 20, 20, dtype=torch.float64), graphs.neighborhood(5, 5, 1)
    mask = torch.zeros(2, 1, 26, 26, dtype=torch.float64).masked_fill(~with_class_token(near).bind(26).dense(), -1e9)
    model = loaded(ViT, ViTConfig(**PICTURE), hf_model, near, pooler=16)
    expected = hf_model(images, attention_mask=mask).last_hidden_state
    assert (expected - hf_model(images).last_hidden_state).abs().max() > 0.1
    agree(model, model(images).last, hf_model, expected, 1e-5)  # eager attention takes its softmax in float32


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
    model = loaded(MAE, ours, hf_model)
    expected, found = hf_model(images, noise=noise), model(images, noise)
    assert torch.equal(found.seen, expected.mask == 0)
    agree(model, found.pixels, hf_model, expected.logits)


def test_mae_over_a_grid_attends_to_visible_neighbors_only():
    model = MAE(MAEConfig(**PICTURE | {"layers": 1}, mask_ratio=0.6), graphs.grid(5, 5)).double()
    images, noise = torch.randn(1, 3, 20, 20, dtype=torch.float64), torch.arange(25.0)[None]  # sees patches 0 to 9
    images.requires_grad_()
    last = model.encoder(images, node_mask=with_class(visible_patches(noise, 0.6))).last
    (last[0, 1] * torch.randn(16)).sum().backward()
    patches = images.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((0, 1, 4, 5)).flatten()
    assert patches.nonzero().flatten().tolist() == [0, 1, 5]


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
    model = loaded(Swin, config, hf_model)
    agree(model, model(images).last, hf_model, hf_model(images).last_hidden_state)


def test_refuses_models_and_weights_that_do_not_fit():
    with pytest.raises(TypeError, match=r"knows the weights of Longformer.*got Linear"):
        load_weights(torch.nn.Linear(2, 2), {})
    hf_model = hugging_face("BertModel", "BertConfig", **SIZES, **WORDED)
    smaller = partial(Bert, BertConfig(**OURS | {"layers": 1}, context=34, pad=PAD))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*layers.1"):
        load_weights(smaller(), hf_model.state_dict())
