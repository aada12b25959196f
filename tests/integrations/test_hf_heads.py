"""Every model that transformers offers for the families of `from_hf`: the same answer and the same gradients, or a
refusal that names it."""

import pytest
import torch
from error_bound import error_bound
from hf_models import BATCH, LENGTH, OFFERED, call_of, made, tensors

from mpnn.models import from_hf, to_hf

transformers = pytest.importorskip("transformers")

PEER, BOUND = "Hugging Face, every head", error_bound(2, 24)

KEEP = torch.arange(LENGTH) < torch.tensor([9, 4, 6])[:, None]
EVERY = torch.ones(BATCH, LENGTH, dtype=torch.bool)
REFUSED = {
    *("BartEncoder", "BartDecoder", "BartDecoderWrapper", "MarianEncoder", "MarianDecoder", "MarianDecoderWrapper"),
    *("BartForCausalLM", "MarianForCausalLM"),  # named after what they stand on, the DecoderWrapper
    "SwinBackbone",
}
WITHOUT_ATTENTIONS = ("longformer", "reformer")
"""Families that refuse `output_attentions`, as transformers gives these by window and by chunk."""

CACHES = {"past_key_values", "past_buckets_states"}
"""What plain calls of ours do not answer with everywhere: what was read, to go on from."""

ROWS = {
    **dict.fromkeys(["bert", "roberta"], "BERT, RoBERTa; masked LM, both directions"),
    **dict.fromkeys(["gpt2", "openai-gpt"], "GPT, GPT-2"),
    **dict.fromkeys(
        ["llama", "mistral"], "Llama family (rotary, grouped heads, RMSNorm, SwiGLU), Mistral's sliding window"
    ),
    **dict.fromkeys(["bart", "marian"], "Transformer, encoder–decoder"),
    "longformer": "Longformer",
    "big_bird": "BigBird",
    "reformer": "Reformer",
    "xlnet": "XLNet",
    "vit": "ViT",
    "vit_mae": "MAE",
    "swin": "Swin",
}


def at_tokens(x, mask):
    """The part of `x` that belongs to tokens, whether it goes by sentences, by choices or by heads."""
    if mask is None:
        return x
    if x.shape[: mask.dim()] == mask.shape:
        return x[mask.bool()]
    flat = mask.flatten(0, -2).bool()
    if x.shape[:2] == flat.shape:
        return x[flat]
    return x.movedim(1, -1)[flat] if x.dim() == 4 and x.shape[::2] == flat.shape else x


@pytest.mark.parametrize(("family", "kind"), OFFERED, ids=lambda x: getattr(x, "__name__", None))
def test_every_head_answers_as_the_original_or_is_refused(family, kind, measured):
    theirs = made(family, kind, attn_implementation="eager")
    if kind.__name__ in REFUSED:
        with pytest.raises(ValueError, match=kind.__name__.replace("ForCausalLM", "DecoderWrapper")):
            from_hf(theirs)
        return
    # the loss of question answering is over padding too, where ours are zeros
    call = call_of(theirs, EVERY if "QuestionAnswering" in kind.__name__ else KEEP)
    call["num_items_in_batch"] = torch.tensor(7)  # as trainers have it
    call |= {"output_hidden_states": True, "output_attentions": family not in WITHOUT_ATTENTIONS}
    ours = from_hf(theirs)
    expected, found = theirs(**call), ours(**call)
    assert type(found) is type(expected)
    assert list(found) == [name for name in expected if name in found or name not in CACHES]
    for name in found.keys() - CACHES:
        parts = tensors(found[name])
        for which, x in tensors(expected[name]).items():
            assert (parts[which].shape, parts[which].dtype) == (x.shape, x.dtype)
            difference = at_tokens((x - parts[which]).abs(), call.get("attention_mask"))
            measured(ROWS[family], PEER, difference.max().item() if x.numel() else 0.0, BOUND)
    if "loss" in expected and family != "reformer":  # of which transformers has gradients in training mode only
        expected.loss.backward()
        found.loss.backward()
        gradients = dict(to_hf(of_gradients(ours)).named_parameters())
        for name, weight in of_gradients(theirs).named_parameters():
            assert (weight - gradients[name]).abs().max() < BOUND * (1 + weight.abs().max()), name


def of_gradients(model):
    """The model with the gradient of each weight in the place of the weight."""
    model.requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
    return model


def test_weights_that_are_not_tied_are_refused_where_ours_are():
    theirs = made("bart", transformers.BartForConditionalGeneration, tie_word_embeddings=False)
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        from_hf(theirs)
