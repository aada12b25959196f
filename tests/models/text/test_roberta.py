"""RoBERTa and causal BERT as message passing against Hugging Face's own; a RoBERTa stretched into a Longformer."""

import pytest
import torch
from error_bound import error_bound

from mpnn import graphs
from mpnn.models import Bert, BertConfig, from_hf

transformers = pytest.importorskip("transformers")

SYSTEM = "BERT, RoBERTa; masked LM, both directions"
BATCH, LENGTH, WORDS, PAD = 4, 13, 99, 1
LENGTHS = torch.tensor([13, 5, 9, 1])
RIGHT = torch.arange(LENGTH) < LENGTHS[:, None]
EVERY = torch.ones(BATCH, LENGTH, dtype=torch.bool)
EXACT = error_bound(2, 64, torch.float64)
BOUND = error_bound(2, 64)


def config(family="Roberta", **changes):
    settings = {
        "vocab_size": WORDS,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 32 if family == "Roberta" else 30,
        "type_vocab_size": 1 if family == "Roberta" else 2,
        "initializer_range": 0.3,  # large enough for attention to choose
        "attn_implementation": "eager",
    }
    return getattr(transformers, f"{family}Config")(**(settings | changes))


def sentences(mask):
    ids = torch.where(mask, torch.randint(3, WORDS, mask.shape), PAD)
    return {"input_ids": ids, "attention_mask": mask.long()}


def largest(a, b):
    return (a - b).abs().max().item()


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("mask", [EVERY, RIGHT, RIGHT.flip(1)], ids=["no padding", "right padding", "left padding"])
def test_equals_hugging_face_on_every_token(mask, measured):
    theirs = transformers.RobertaModel(config()).eval()
    batch = sentences(mask)
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    assert type(found) is type(expected)
    error = largest(expected.last_hidden_state[mask], found.last_hidden_state[mask])
    measured(SYSTEM, "Hugging Face RoBERTa", error, BOUND)
    theirs = theirs.double()
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    assert largest(expected.last_hidden_state[mask], found.last_hidden_state[mask]) < EXACT
    first = mask[:, 0]
    assert largest(expected.pooler_output[first], found.pooler_output[first]) < EXACT


def test_positions_count_what_is_no_pad_and_may_be_given():
    theirs = transformers.RobertaModel(config()).double().eval()
    ours = from_hf(theirs)
    ids = torch.tensor([[0, PAD, 5, 7, PAD, 9]])  # padding that is attended to, as nothing masks it
    assert largest(theirs(ids).last_hidden_state, ours(ids).last_hidden_state) < EXACT
    vectors = theirs.embeddings.word_embeddings(ids)
    assert largest(*(m(inputs_embeds=vectors).last_hidden_state for m in (theirs, ours))) < EXACT
    given = torch.randint(2, 32, (1, 6))
    assert largest(*(m(ids, position_ids=given).last_hidden_state for m in (theirs, ours))) < EXACT


HEADS = ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice")


@pytest.mark.parametrize("head", HEADS)
def test_heads_equal_hugging_face(head, measured):
    theirs = getattr(transformers, f"RobertaFor{head}")(config()).eval()
    batch = sentences(EVERY)
    if head == "MultipleChoice":
        batch = {name: x.view(2, 2, LENGTH) for name, x in batch.items()}
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    assert type(found) is type(expected)
    logits = [name for name in expected if "logits" in name]
    assert logits
    for name in logits:
        measured(SYSTEM, "Hugging Face RoBERTa", largest(expected[name], found[name]), BOUND)


# ------------------------------------------------------------------------------------------------ one direction


@pytest.mark.parametrize(("family", "head"), [("Roberta", "RobertaForCausalLM"), ("Bert", "BertLMHeadModel")])
@pytest.mark.parametrize("mask", [EVERY, RIGHT], ids=["no padding", "right padding"])
def test_a_decoder_attends_to_earlier_tokens(family, head, mask, measured):
    theirs = getattr(transformers, head)(config(family, is_decoder=True)).eval()
    batch = sentences(mask) | {"use_cache": False}
    ours = from_hf(theirs)
    expected, found = theirs(**batch), ours(**batch)
    assert type(found) is type(expected)
    measured(SYSTEM, f"Hugging Face {head}", largest(expected.logits[mask], found.logits[mask]), BOUND)
    batch["input_ids"][:, 8:] = 7
    assert torch.equal(found.logits[0, :8], ours(**batch).logits[0, :8])


def test_a_decoder_generates_the_same():
    theirs = transformers.RobertaForCausalLM(config(is_decoder=True, bos_token_id=None)).eval()
    options = {"max_new_tokens": 5, "do_sample": False, "use_cache": False, "pad_token_id": PAD, "eos_token_id": None}
    ids = torch.randint(3, WORDS, (2, 6))
    expected, found = (model.generate(ids, **options) for model in (theirs, from_hf(theirs)))
    assert expected.tolist() == found.tolist()


# ------------------------------------------------------------------------------------------------ the model itself


def test_is_constructed_without_hugging_face(tmp_path):
    sizes = BertConfig(vocabulary=50, dim=16, layers=2, heads=2, hidden=32, context=10, types=1, pad=1, after_pad=True)
    model = Bert(sizes, [graphs.window(1), graphs.window(2)], pooler=False).eval()
    tokens = torch.tensor([[4, 5, 6, 7], [8, 9, 1, 1]])
    keep = tokens != 1
    found = model(tokens, padding_mask=~keep).last
    assert largest(found[1, :2], model(tokens[1:, :2]).last[0]) < 1e-6
    model.save_pretrained(tmp_path)
    assert torch.equal(Bert.from_pretrained(tmp_path)(tokens, padding_mask=~keep).last, found)


def test_refuses_graphs_that_do_not_match_the_layers_and_positions_after_no_pad():
    with pytest.raises(ValueError, match="one for each of 12 layers; got 2"):
        Bert(BertConfig(), [graphs.window(1)] * 2)
    with pytest.raises(ValueError, match="needs a pad"):
        Bert(BertConfig(pad=None, after_pad=True))
