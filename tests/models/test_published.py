"""`load_weights`: each definition, with weights of transformers, gives what transformers gives, and its gradients."""

import copy
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

from hf_models import made  # noqa: E402

BATCH, LENGTH, WORDS, PAD = 3, 12, 50, 1
IDS = torch.arange(3, 3 + BATCH * LENGTH).view(BATCH, LENGTH) * 7 % (WORDS - 3) + 3
OURS = {"vocabulary": WORDS, "dim": 16, "layers": 2, "heads": 2, "hidden": 24}
GPT = {"vocabulary": WORDS, "dim": 16, "layers": 2, "heads": 2, "context": 32, "activation": "gelu_new"}
PICTURE = {"dim": 16, "layers": 2, "heads": 2, "hidden": 24}


def hugging_face(family, name, **changes):
    """A model in float64, with norms and biases away from what they begin as."""
    return made(family, getattr(transformers, name), **changes).double()


def pictures(height, width):
    return torch.randn(2, 3, height, width, dtype=torch.float64)


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
    hf_model = hugging_face("bert", "BertModel")
    bert = loaded(Bert, BertConfig(**OURS, context=32, pad=PAD), hf_model)
    expected = hf_model(IDS)
    close(bert(IDS).pooled, expected.pooler_output)
    agree(bert, bert(IDS).last, hf_model, expected.last_hidden_state)


def test_roberta():
    hf_model = hugging_face("roberta", "RobertaModel")
    bert = loaded(Bert, BertConfig(**OURS, context=30, pad=PAD, after_pad=True, eps=1e-12), hf_model)
    agree(bert, bert(IDS).last, hf_model, hf_model(IDS).last_hidden_state)


def test_big_bird():
    hf_model = hugging_face("big_bird", "BigBirdModel")
    bert = loaded(Bert, BertConfig(**OURS, context=32, pad=PAD, activation="gelu_new"), hf_model)
    expected = hf_model(IDS)
    close(bert(IDS).pooled, expected.pooler_output)
    agree(bert, bert(IDS).last, hf_model, expected.last_hidden_state)


def test_longformer():
    hf_model = hugging_face("longformer", "LongformerModel")
    config = BertConfig(**OURS, context=30, pad=PAD, after_pad=True)
    longformer = loaded(Longformer, config, hf_model, graphs.window(2))
    hubs = torch.arange(LENGTH).lt(2).expand(BATCH, -1)
    expected = hf_model(IDS, global_attention_mask=hubs.long()).last_hidden_state
    found = longformer(IDS, hubs=hubs).last
    agree(longformer, found, hf_model, expected, 1e-5)  # transformers takes this softmax in float32


def test_gpt2():
    hf_model = hugging_face("gpt2", "GPT2Model")
    gpt = loaded(GPT2, GPTConfig(**GPT), hf_model)
    agree(gpt, gpt(IDS), hf_model, hf_model(IDS).last_hidden_state @ hf_model.wte.weight.T)


def test_openai_gpt():
    hf_model = hugging_face("openai-gpt", "OpenAIGPTModel")
    gpt = loaded(GPT2, GPTConfig(**GPT, norm_first=False), hf_model)
    agree(gpt, gpt(IDS), hf_model, hf_model(IDS).last_hidden_state @ hf_model.tokens_embed.weight.T)


LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
LLAMAS = {
    "Llama": ({}, {}),
    "Mistral": ({"sliding_window": 4}, {}),
    "positions that are divided": ({"rope_parameters": LINEAR}, {"base": 100.0, "factor": 2.0}),
    "Llama 3.1": ({"rope_parameters": LLAMA3}, {"base": 100.0, "factor": 4.0, "trained_context": 8}),
    "own width of heads": ({"head_dim": 6, "attention_bias": True}, {"head_dim": 6, "bias": True}),
}


@pytest.mark.parametrize("name", LLAMAS)
def test_llama(name):
    theirs, changes = LLAMAS[name]
    family = "Mistral" if name == "Mistral" else "Llama"
    hf_model = hugging_face(family.lower(), f"{family}ForCausalLM", tie_word_embeddings=False, **theirs)
    topology = graphs.causal() & graphs.window(3) if name == "Mistral" else graphs.causal()
    llama = loaded(Llama, LlamaConfig(**OURS, kv_heads=1, context=32, eps=1e-6, **changes), hf_model, topology)
    agree(llama, llama(IDS), hf_model, hf_model(IDS).logits, 1e-5)  # rotates in float32


@pytest.mark.parametrize("family", ["Bart", "Marian"])
def test_bart(family):
    hf_model = hugging_face(family.lower(), f"{family}Model")
    stacks = {"encoder_layers": 2, "decoder_layers": 2, "embedding_norm": family == "Bart", "activation": "gelu"}
    places = {"context": 32, "learned_positions": True, "scale": False}
    config = TransformerConfig(WORDS, pad=PAD, start=2, eos=2, dim=16, heads=2, hidden=24, **stacks, **places)
    model = loaded(Transformer, config, hf_model)
    expected = hf_model(input_ids=IDS, decoder_input_ids=IDS.roll(1, 1)).last_hidden_state
    agree(model, model(IDS, IDS.roll(1, 1)), hf_model, expected @ hf_model.shared.weight.T)


def test_xlnet():
    hf_model = hugging_face("xlnet", "XLNetModel")
    model = loaded(XLNet, XLNetConfig(**OURS), hf_model, head=False)
    types = torch.arange(LENGTH).gt(6).long().expand(BATCH, -1)
    expected = hf_model(IDS, token_type_ids=types).last_hidden_state
    agree(model, model(IDS, types), hf_model, expected, 1e-5)  # waves in float32


@pytest.mark.parametrize("segments", [False, True])
def test_xlnets_predictions_in_an_order(segments):
    """perm_mask hides what stands at or after a token in the order; from the query stream its own content too."""
    hf_model = hugging_face("xlnet", "XLNetLMHeadModel").float()  # its masks are float32
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
    found = model.loss(IDS, order.tolist(), given["token_type_ids"], last=4)
    close(found, hf_model(IDS, **given, labels=targets).loss, 1e-5)


def test_xlnet_over_a_window_equals_a_mask():
    hf_model = hugging_face("xlnet", "XLNetModel")
    model = loaded(XLNet, XLNetConfig(**OURS), hf_model, head=False)
    mask = (~graphs.window(2).bind(LENGTH).dense()).double().expand(BATCH, -1, -1)
    close(model(IDS, graph=graphs.window(2)), hf_model(IDS, perm_mask=mask).last_hidden_state, 1e-5)


def test_transformer_xl_is_a_one_way_xlnet():
    """With attn_type="uni", XLNet has Transformer-XL's relative positions and its memory from segment to segment."""
    one_way = {"attn_type": "uni", "mem_len": 5, "ff_activation": "relu", "layer_norm_eps": 1e-5, "d_inner": 64}
    hf_model = hugging_face("xlnet", "XLNetModel", **one_way)
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
    off = dict.fromkeys(("hidden_dropout_prob", "local_attention_probs_dropout_prob"), 0.0)
    chunks = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "axial_pos_shape": [3, 4]}
    hf_model = hugging_face("reformer", "ReformerModel", **off, **chunks, num_buckets=4, is_decoder=True)
    config = ReformerConfig(
        **OURS | {"layers": ("local", "lsh")}, head_dim=8, context=32, causal=True, local=Chunks(4), lsh=Chunks(4),
        buckets=4, seed=0, axial=(3, 4), axial_dims=(8, 8),
    )  # fmt: skip
    reformer = loaded(Reformer, config, hf_model)
    hf_model.train()  # it has no gradients in evaluation; nothing here drops out
    agree(reformer, reformer(IDS).last, hf_model, hf_model(IDS).last_hidden_state)


@pytest.mark.parametrize(
    ("image", "patch"), [((20, 20), (4, 4)), ((12, 20), (4, 4)), ((8, 18), (2, 6)), ((22, 22), (4, 4))], ids=str
)
def test_vit(image, patch):
    hf_model = hugging_face("vit", "ViTModel", image_size=image, patch_size=patch, attn_implementation="sdpa")
    images = pictures(*image)
    model = loaded(ViT, ViTConfig(image=image, patch=patch, **PICTURE), hf_model, pooler=16)
    expected, found = hf_model(images), model(images)
    close(found.pooled, expected.pooler_output)
    agree(model, found.last, hf_model, expected.last_hidden_state)


def test_vit_over_neighbors_equals_a_mask():
    hf_model = hugging_face("vit", "ViTModel", image_size=20, patch_size=4, attn_implementation="eager")
    images, near = pictures(20, 20), graphs.neighborhood(5, 5, 1)
    mask = torch.zeros(2, 1, 26, 26, dtype=torch.float64).masked_fill(~with_class_token(near).bind(26).dense(), -1e9)
    model = loaded(ViT, ViTConfig(image=20, patch=4, **PICTURE), hf_model, near, pooler=16)
    expected = hf_model(images, attention_mask=mask).last_hidden_state
    assert (expected - hf_model(images).last_hidden_state).abs().max() > 0.1
    agree(model, model(images).last, hf_model, expected, 1e-5)  # eager attention takes its softmax in float32


def test_a_vit_stretches_positions():
    sizes = {"image_size": 20, "patch_size": 4, "attn_implementation": "sdpa"}
    hf_model = hugging_face("vit", "ViTForMaskedImageModeling", **sizes).vit
    hf_model.embeddings.mask_token = None
    model = loaded(ViT, ViTConfig(image=20, patch=4, **PICTURE), hf_model)
    images = pictures(16, 28)
    with pytest.raises(ValueError, match="for 5 x 5 patches, and the image has 4 x 7"):
        model(images)
    expected = hf_model(images, interpolate_pos_encoding=True).last_hidden_state
    agree(model, model(images, stretch=True).last, hf_model, expected)


@pytest.mark.parametrize(("ratio", "normalize"), [(0.75, False), (0.6, True), (0.0, False)])
def test_mae(ratio, normalize):
    sizes = {"image_size": 20, "patch_size": 4, "mask_ratio": ratio, "norm_pix_loss": normalize}
    hf_model = hugging_face("vit_mae", "ViTMAEForPreTraining", **sizes, attn_implementation="sdpa")
    decoder = {"decoder_dim": 16, "decoder_layers": 2, "decoder_heads": 2, "decoder_hidden": 24}
    config = MAEConfig(image=20, patch=4, **PICTURE, **decoder, mask_ratio=ratio, normalize=normalize)
    model = loaded(MAE, config, hf_model)
    images, noise = pictures(20, 20), torch.rand(2, 25)
    expected, found = hf_model(images, noise=noise), model(images, noise)
    assert torch.equal(found.seen, expected.mask == 0)
    if ratio:  # with no patch left out there is nothing to lose
        close(model.loss(images, noise), expected.loss)
    agree(model, found.pixels, hf_model, expected.logits)


def test_mae_over_a_grid_attends_to_visible_neighbors_only():
    config = MAEConfig(image=20, patch=4, **PICTURE | {"layers": 1}, mask_ratio=0.6)
    model, images, noise = MAE(config, graphs.grid(5, 5)).double(), pictures(20, 20), torch.arange(25.0)[None]
    images.requires_grad_()
    last = model.encoder(images[:1], node_mask=with_class(visible_patches(noise, 0.6))).last  # sees patches 0 to 9
    (last[0, 1] * torch.randn(16)).sum().backward()
    patches = images.grad.unfold(2, 4, 4).unfold(3, 4, 4).abs().sum((0, 1, 4, 5)).flatten()
    assert patches.nonzero().flatten().tolist() == [0, 1, 5]


@pytest.mark.parametrize(
    ("image", "window"),
    [(16, 4), (14, 4), (12, 3), ((10, 14), 2), (9, 2)],
    ids=["divided", "filled up", "windows of 3", "wide", "the last patch cut short"],
)
def test_swin(image, window):
    sizes = {"embed_dim": 8, "depths": [2, 2], "image_size": image, "window_size": window}
    hf_model = hugging_face("swin", "SwinModel", **sizes, attn_implementation="sdpa")
    config = SwinConfig(image, patch=2, dim=8, depths=(2, 2), heads=(1, 2), window=window)
    images = pictures(*((image, image) if isinstance(image, int) else image))
    model = loaded(Swin, config, hf_model)
    agree(model, model(images).last, hf_model, hf_model(images).last_hidden_state)


def test_a_swin_stretches_positions():
    sizes = {"embed_dim": 8, "depths": [2, 2], "image_size": 16, "window_size": 2, "use_absolute_embeddings": True}
    options = {"attn_implementation": "sdpa", "encoder_stride": 4}
    hf_model = hugging_face("swin", "SwinForMaskedImageModeling", **sizes, **options).swin
    hf_model.embeddings.mask_token = None
    config = SwinConfig(16, patch=2, dim=8, depths=(2, 2), heads=(1, 2), window=2, positions=True)
    model = loaded(Swin, config, hf_model)
    images = pictures(24, 20)
    expected = hf_model(images, interpolate_pos_encoding=True).last_hidden_state
    agree(model, model(images, stretch=True).last, hf_model, expected)


def test_refuses_models_and_weights_that_do_not_fit():
    with pytest.raises(TypeError, match=r"knows the weights of Longformer.*got Linear"):
        load_weights(torch.nn.Linear(2, 2), {})
    smaller = Bert(BertConfig(**OURS | {"layers": 1}, context=32, pad=PAD))
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*layers.1"):
        load_weights(smaller, hugging_face("bert", "BertModel").state_dict())
