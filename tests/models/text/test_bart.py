"""BART and Marian as message passing against Hugging Face's own, on the same weights; generation with beams too."""

import copy

import pytest
import torch
from error_bound import error_bound

from mpnn.models import from_hf

transformers = pytest.importorskip("transformers")

SYSTEM = "Transformer, encoder–decoder"
EXACT = error_bound(2, 64, torch.float64)
BOUND = error_bound(2, 64)
BATCH, LENGTH, TARGET, EOS = 4, 9, 7, 2

SOURCE = torch.arange(LENGTH) < torch.tensor([9, 3, 6, 1])[:, None]
HOLES = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6
WORDS = torch.arange(TARGET) < torch.tensor([4, 7, 1, 7])[:, None]
SIZES = {
    "vocab_size": 60,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 24,
    "init_std": 0.3,  # large enough for attention to choose
    "attn_implementation": "eager",
}


def bart(head="Model", dtype=torch.float64, **changes):
    config = transformers.BartConfig(**(SIZES | changes))
    return seen(getattr(transformers, f"Bart{head}")(config).to(dtype))


def marian(head="Model", dtype=torch.float64, **changes):
    special = {"pad_token_id": 59, "eos_token_id": EOS, "decoder_start_token_id": 59, "forced_eos_token_id": EOS}
    config = transformers.MarianConfig(**(SIZES | special | {"scale_embedding": True} | changes))
    return seen(getattr(transformers, f"Marian{head}")(config).to(dtype))


def seen(model):
    """Biases and norms that are not trivial, as after training."""
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            p.data += 0.2 * torch.randn_like(p)
    return model.eval()


def batch(mask=SOURCE, words=WORDS):
    return {
        "input_ids": torch.randint(3, 59, (BATCH, LENGTH)),
        "attention_mask": mask.long(),
        "decoder_input_ids": torch.randint(3, 59, (BATCH, TARGET)),
        "decoder_attention_mask": words.long(),
    }


def largest(difference):
    return difference.abs().max().item()


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("make", [bart, marian])
@pytest.mark.parametrize("mask", [SOURCE, HOLES, torch.ones_like(SOURCE)], ids=["padding", "holes", "no padding"])
def test_equals_hugging_face_on_every_token(make, mask, measured):
    for dtype in (torch.float32, torch.float64):
        theirs = make(dtype=dtype)
        call = batch(mask)
        with torch.no_grad():
            expected, found = theirs(**call), from_hf(theirs)(**call)
        assert type(found) is type(expected)
        assert found.last_hidden_state.dtype == dtype
        reached = WORDS & mask.any(1, keepdim=True)  # without a word in its source, theirs is NaN or a mean of padding
        errors = [
            largest((expected.last_hidden_state - found.last_hidden_state)[reached]),
            largest((expected.encoder_last_hidden_state - found.encoder_last_hidden_state)[mask]),
        ]
        if dtype == torch.float32:
            measured(SYSTEM, f"Hugging Face {make.__name__.upper() if make is bart else 'Marian'}", max(errors), BOUND)
        assert max(errors) < (EXACT if dtype == torch.float64 else BOUND)


@pytest.mark.parametrize("make", [bart, marian])
def test_states_and_attentions_equal_hugging_face(make):
    theirs = make()
    call = batch() | {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        expected, found = theirs(**call), from_hf(theirs)(**call)
    kept = {"encoder": SOURCE, "decoder": WORDS, "cross": WORDS}
    for name, layers in [
        *(("encoder_hidden_states", 3), ("decoder_hidden_states", 4)),
        *(("encoder_attentions", 2), ("decoder_attentions", 3), ("cross_attentions", 3)),
    ]:
        assert len(found[name]) == len(expected[name]) == layers
        for a, b in zip(expected[name], found[name], strict=True):
            assert a.shape == b.shape
            difference = (a - b).movedim(1, -1) if "attentions" in name else a - b
            assert largest(difference[kept[name.split("_")[0]]]) < EXACT, name


@pytest.mark.parametrize("make", [bart, marian])
def test_gradients_equal_hugging_face(make):
    theirs = make()
    ours = from_hf(theirs)
    call, weight = batch(), torch.randn(BATCH, TARGET, 32, dtype=torch.float64) * WORDS[..., None]
    for model in (theirs, ours):
        (model(**call).last_hidden_state * weight).sum().backward()
    expected = copy.deepcopy(theirs)
    with torch.no_grad():
        for p, original in zip(expected.parameters(), theirs.parameters(), strict=True):
            p.copy_(torch.zeros_like(p) if original.grad is None else original.grad)
    expected = dict(from_hf(expected).named_parameters())
    for name, p in ours.named_parameters():
        assert p.requires_grad or "position" in name
        if p.requires_grad:
            assert largest(p.grad - expected[name]) < EXACT * (1 + expected[name].abs().max()), name


def test_vectors_for_tokens_and_a_bart_without_targets():
    for theirs in (bart(scale_embedding=True), marian()):
        ours, ids = from_hf(theirs), batch()["input_ids"]
        call = {
            "inputs_embeds": torch.randn(2, 5, 32).double(),
            "decoder_inputs_embeds": torch.randn(2, 3, 32).double(),
        }
        assert largest(theirs(**call).last_hidden_state - ours(**call).last_hidden_state) < EXACT
        if ours.config.model_type == "bart":
            assert largest(theirs(ids).last_hidden_state - ours(ids).last_hidden_state) < EXACT


def test_encoder_outputs_that_are_given_are_not_computed_again():
    theirs, call = bart(), batch()
    ours = from_hf(theirs)
    encoded = ours.get_encoder()(call["input_ids"], attention_mask=call["attention_mask"])
    assert type(encoded) is transformers.modeling_outputs.BaseModelOutput
    whole = ours(**call).last_hidden_state
    del call["input_ids"]
    assert torch.equal(ours(**call, encoder_outputs=encoded).last_hidden_state, whole)
    assert torch.equal(ours(**call, encoder_outputs=(encoded[0],), return_dict=False)[0], whole)


# ------------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (bart, "ForConditionalGeneration"),
        (bart, "ForSequenceClassification"),
        (bart, "ForQuestionAnswering"),
        (marian, "MTModel"),
    ],
)
def test_heads_equal_hugging_face(make, head):
    theirs = make(head)
    call = batch(torch.ones_like(SOURCE))
    del call["decoder_attention_mask"]
    if "Sequence" in head:
        del call["decoder_input_ids"]
        call["input_ids"][:, -1] = EOS
    with torch.no_grad():
        expected, found = theirs(**call), from_hf(theirs)(**call)
    assert type(found) is type(expected)
    logits = [name for name in expected if "logits" in name]
    assert logits
    for name in logits:
        assert largest(expected[name] - found[name]) < EXACT


@pytest.mark.parametrize("make", [bart, marian])
def test_training_loss_equals_hugging_face(make):
    theirs = make("ForConditionalGeneration" if make is bart else "MTModel")
    call = {"input_ids": batch()["input_ids"], "labels": torch.randint(3, 59, (BATCH, TARGET))}
    assert largest(theirs(**call).loss - from_hf(theirs)(**call).loss) < EXACT


@pytest.mark.parametrize("make", [bart, marian])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "use_cache": False}], ids=str)
@pytest.mark.parametrize("mask", [SOURCE, torch.ones_like(SOURCE)], ids=["padding", "no padding"])
def test_transformers_generates_the_same_tokens(make, options, mask):
    theirs = make("ForConditionalGeneration" if make is bart else "MTModel")
    call = {"input_ids": batch()["input_ids"], "attention_mask": mask.long()} | options
    call |= {"max_length": 12, "no_repeat_ngram_size": 1}  # models with random weights say the same again and again
    expected = theirs.generate(**call)
    assert torch.equal(expected, from_hf(theirs).generate(**call))
    assert expected.shape == (BATCH, 12)


def test_steps_with_a_cache_equal_one_pass():
    ours, call = from_hf(bart()), batch()
    del call["decoder_attention_mask"]
    words = call.pop("decoder_input_ids")
    with torch.no_grad():
        whole = ours(**call, decoder_input_ids=words, use_cache=False)
        assert whole.past_key_values is None
        past, steps = None, []
        for part in words.split([3, 1, 1, 2], 1):
            found = ours(**call, decoder_input_ids=part, past_key_values=past, use_cache=True)
            past = found.past_key_values
            steps.append(found.last_hidden_state)
    assert past.get_seq_length() == TARGET
    assert largest(torch.cat(steps, 1) - whole.last_hidden_state) < EXACT


# ------------------------------------------------------------------------------------------------ other graphs


def test_nothing_leaks_from_one_sentence_to_another():
    ours, call = from_hf(bart(dtype=torch.float32)), batch()
    before = ours(**call).last_hidden_state
    call["input_ids"][2] = (call["input_ids"][2] + 1) % 59
    after = ours(**call).last_hidden_state
    assert torch.equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert not torch.equal(before[2], after[2])
