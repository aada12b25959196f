"""BigBird as message passing against Hugging Face's own: complete, and block-sparse in evaluation and in training."""

import copy

import pytest
import torch
from error_bound import error_bound, largest

from mpnn import graphs
from mpnn.models import Bert, BertConfig, BigBird, from_hf

transformers = pytest.importorskip("transformers")

from hf_models import made  # noqa: E402

SYSTEM = "BigBird"
SPARSE = "Hugging Face BigBird, block-sparse"
BATCH, WORDS = 2, 99
EXACT = error_bound(2, 64, torch.float64, scale=10)  # states and their gradients reach 10
BOUND = error_bound(2, 64)


def big_bird(**changes):
    """Block-sparse, and without dropout."""
    sizes = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2, "max_position_embeddings": 100}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return made("big_bird", transformers.BigBirdModel, vocab_size=WORDS, **off, **sizes | changes)


def sentences(length, padding=False):
    lengths = torch.tensor([length, length - 17 if padding else length])
    mask = torch.arange(length) < lengths[:, None]
    return {"input_ids": torch.randint(3, WORDS, (BATCH, length)), "attention_mask": mask.long()}


def compare(theirs, batch, measured, peer):
    """Both in float32, for the record, and in float64."""
    mask = batch["attention_mask"].bool()
    for bound, model in ((BOUND, theirs), (EXACT, copy.deepcopy(theirs).double())):
        ours = from_hf(model)
        expected, found = model(**batch), ours(**batch)
        assert type(found) is type(expected)
        error = largest(expected.last_hidden_state[mask] - found.last_hidden_state[mask])
        assert error < bound
        if model is theirs:
            measured(SYSTEM, peer, error, BOUND)
        assert largest(expected.pooler_output - found.pooler_output) < bound
    return found


@pytest.mark.parametrize("length", [64, 53, 40, 37])
@pytest.mark.parametrize("padding", [False, True], ids=["no padding", "padding"])
@pytest.mark.covering
def test_block_sparse_equals_hugging_face(length, padding, measured):
    theirs = big_bird()
    compare(theirs, sentences(length, padding), measured, SPARSE)
    assert theirs.attention_type == "block_sparse"


@pytest.mark.parametrize("padding", [False, True], ids=["no padding", "padding"])
def test_random_blocks_of_training_equal_hugging_face(padding, measured):
    theirs = big_bird().train()
    sparse = compare(theirs, sentences(59, padding), measured, f"{SPARSE}, training")
    assert largest(sparse.last_hidden_state - from_hf(theirs.double()).eval()(**sentences(59)).last_hidden_state) > 0.01


@pytest.mark.parametrize("context", [1024, 2048])
def test_the_lengths_of_the_paper_draw_in_their_own_way(context, measured):
    sizes = {"block_size": 64, "max_position_embeddings": context, "num_random_blocks": 3, "num_hidden_layers": 1}
    theirs = big_bird(**sizes, hidden_size=8).train()
    batch = {"input_ids": torch.randint(3, WORDS, (1, 1024)), "attention_mask": torch.ones(1, 1024)}
    with torch.no_grad():
        expected, found = theirs(**batch), from_hf(theirs)(**batch)
    measured(SYSTEM, f"{SPARSE}, training", largest(expected.last_hidden_state - found.last_hidden_state), BOUND)


def test_a_swapped_graph_takes_the_place_of_the_blocks():
    theirs = big_bird(attention_type="original_full").double()
    sparse = big_bird().double()
    sparse.load_state_dict(theirs.state_dict())
    batch = sentences(40)
    found = from_hf(sparse, graph=graphs.complete())(**batch).last_hidden_state
    assert largest(theirs(**batch).last_hidden_state - found) < EXACT


def test_is_a_bert_over_its_own_graphs():
    sizes = BertConfig(vocabulary=WORDS, dim=16, layers=2, heads=2, hidden=32, context=30)
    model = BigBird(sizes, block=2, random=1, globals=1).eval()
    own = [graphs.bigbird(2, 3, 1, 1, seed) for seed in (0, 1)]
    assert [layer.graph for layer in model.layers] == own
    tokens, keep = torch.randint(3, WORDS, (2, 19)), torch.arange(19) < torch.tensor([[19], [8]])
    bert = Bert(sizes, own).eval()
    bert.load_state_dict(model.state_dict())
    assert torch.equal(model(tokens, padding_mask=~keep).last, bert(tokens, padding_mask=~keep).last)
