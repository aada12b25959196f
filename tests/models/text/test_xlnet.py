"""XLNet as message passing against Hugging Face's own, on the same weights."""

import re

import pytest
import torch
from error_bound import error_bound, largest

from mpnn import graphs
from mpnn.models import XLNet, XLNetConfig, from_hf

transformers = pytest.importorskip("transformers")

from hf_models import made  # noqa: E402

BATCH, LENGTH, VOCABULARY = 3, 9, 31
SINGLE = error_bound(2, 32)

KEEP = torch.arange(LENGTH) >= torch.tensor([0, 3, 5])[:, None]  # padding comes first
HIDDEN = torch.rand(BATCH, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.4
PREDICTED = torch.tensor([[3, 7], [5, 8], [6, 7]])
MAPPING = torch.nn.functional.one_hot(PREDICTED, LENGTH).float()


def hugging_face(**changes):
    return made("xlnet", transformers.XLNetModel, vocab_size=VOCABULARY, n_layer=3, **changes)


def sentences(*names):
    """Random sentences, with those of all optional inputs that are named."""
    given = {
        "attention_mask": KEEP.long(),
        "input_mask": (~KEEP).float(),
        "token_type_ids": torch.randint(2, (BATCH, LENGTH)),
        "perm_mask": HIDDEN.float(),
        "target_mapping": MAPPING,
    }
    return {"input_ids": torch.randint(VOCABULARY, (BATCH, LENGTH))} | {name: given[name] for name in names}


def furthest_apart(a, b):
    return max(largest(x - y) for x, y in zip(a, b, strict=True))


INPUTS = [
    (),
    ("token_type_ids",),
    ("attention_mask",),
    ("input_mask", "token_type_ids"),
    ("perm_mask",),
    ("perm_mask", "target_mapping"),
    ("attention_mask", "perm_mask", "target_mapping", "token_type_ids"),
]


@pytest.mark.parametrize("names", INPUTS, ids="+".join)
def test_equals_hugging_face_everywhere(names, measured):
    theirs, batch = hugging_face(), sentences(*names)
    ours = from_hf(theirs)
    everything = {"output_hidden_states": True, "output_attentions": True}
    expected, found = theirs(**batch, **everything), ours(**batch, **everything)
    assert type(found) is type(expected)
    measured("XLNet", "Hugging Face XLNet", largest(expected.last_hidden_state - found.last_hidden_state), SINGLE)
    assert furthest_apart(expected.hidden_states, found.hidden_states) < SINGLE
    assert furthest_apart(expected.mems, found.mems) < SINGLE
    if "target_mapping" in names:
        rows = torch.arange(BATCH)[:, None], slice(None), PREDICTED
        for (content, query), (our_content, our_query) in zip(expected.attentions, found.attentions, strict=True):
            assert largest(content - our_content) < SINGLE
            assert our_query.shape == query.shape
            assert largest(query[rows] - our_query[rows]) < SINGLE
    else:
        assert furthest_apart(expected.attentions, found.attentions) < SINGLE
    weight = torch.randn_like(found.last_hidden_state)
    for output in (expected, found):
        (output.last_hidden_state * weight).sum().backward()
    for (name, original), copied in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        if original.grad is not None:
            assert largest(copied.grad - original.grad) < 5 * SINGLE * (1 + original.grad.abs().max()), name


OPTIONS = [
    *({}, {"mem_len": 5}, {"mem_len": None}, {"reuse_len": 4}),
    *({"attn_type": "uni"}, {"attn_type": "uni", "same_length": True}, {"clamp_len": 3}),
    {"bi_data": True, "clamp_len": 4},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.sample(2)
def test_memories_equal_hugging_face(options, measured):
    theirs = hugging_face(**options)
    ours = from_hf(theirs)
    more = INPUTS[-1] if options.get("attn_type") != "uni" else ()
    # "bi_data" divides the batch by two
    first, second = ({k: x[:2] for k, x in sentences(*names).items()} for names in (("token_type_ids",), more))
    expected, found = theirs(**first), ours(**first)
    for _ in range(2):
        measured("XLNet", "Hugging Face XLNet", largest(expected[0] - found[0]), SINGLE)
        expected, found = theirs(**second, mems=expected.mems), ours(**second, mems=found.mems)
        measured("XLNet", "Hugging Face XLNet", largest(expected[0] - found[0]), SINGLE)
        assert [m.shape for m in expected.mems] == [m.shape for m in found.mems]
        assert furthest_apart(expected.mems, found.mems) < SINGLE
    assert ours(**second, use_mems=False).mems is None


def test_a_mask_that_keeps_everything_changes_nothing():
    ours, batch = from_hf(hugging_face()), sentences()
    assert torch.equal(ours(**batch, attention_mask=torch.ones(BATCH, LENGTH))[0], ours(**batch)[0])


@pytest.mark.parametrize("topology", [graphs.window(2), graphs.causal(), graphs.longformer(2, globals=1)], ids=str)
def test_a_swapped_graph_equals_hugging_face_with_that_graph_as_its_mask(topology):
    theirs, batch = hugging_face(), sentences("target_mapping", "token_type_ids")
    mask = (~topology.bind(LENGTH).dense()).float().expand(BATCH, -1, -1)
    found = from_hf(theirs, graph=topology)(**batch)
    assert largest(theirs(**batch, perm_mask=mask)[0] - found[0]) < SINGLE
    assert largest(theirs(**batch)[0] - found[0]) > 0.01


def test_a_replaced_graph_connects_tokens_without_padding():
    ours, batch = from_hf(hugging_face(), graph=graphs.window(2)), sentences("attention_mask")
    padded = ours(**batch).last_hidden_state
    alone = ours(batch["input_ids"][1:2, 3:]).last_hidden_state
    assert largest(padded[1, 3:] - alone[0]) < SINGLE


def test_predictions_need_the_head_and_a_whole_order():
    tokens, config = torch.randint(VOCABULARY, (2, LENGTH)), XLNetConfig(VOCABULARY, 16, layers=1, heads=2, hidden=32)
    with pytest.raises(ValueError, match="create the model with head=True"):
        XLNet(config, head=False).predict(tokens, list(range(LENGTH)))
    with pytest.raises(ValueError, match=re.escape("order must hold each of 0..8 once")):
        XLNet(config).predict(tokens, [0] * LENGTH)
