"""The way back to transformers: what was trained here is a checkpoint there, and comes back as it was."""

import copy
import pickle

import pytest
import safetensors.torch
import torch
from error_bound import error_bound
from hf_models import BATCH, LENGTH, OFFERED, call_of, made, tensors

from mpnn import graphs
from mpnn.integrations import hf
from mpnn.models import Bert, BertConfig, from_hf, to_hf

transformers = pytest.importorskip("transformers")

EVERY = torch.ones(BATCH, LENGTH, dtype=torch.bool)
BOUND = error_bound(2, 24)
HEADS = {
    *("BertForMaskedLM", "RobertaForSequenceClassification", "LongformerForTokenClassification"),
    *("BigBirdForPreTraining", "ReformerForQuestionAnswering", "XLNetLMHeadModel", "GPT2LMHeadModel"),
    *("OpenAIGPTDoubleHeadsModel", "LlamaForCausalLM", "MistralForSequenceClassification"),
    *("ViTForMaskedImageModeling", "ViTMAEForPreTraining", "SwinForImageClassification"),
    *("BartForConditionalGeneration", "MarianMTModel"),
}
BARE = {
    *("BertModel", "RobertaModel", "LongformerModel", "BigBirdModel", "ReformerModel", "XLNetModel", "GPT2Model"),
    *("OpenAIGPTModel", "LlamaModel", "MistralModel", "ViTModel", "ViTMAEModel", "SwinModel", "BartModel"),
    "MarianModel",
}
CLASSES = {kind.__name__: (family, kind) for family, kind in OFFERED}


@pytest.fixture(autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


def model_of(name, **changes):
    return made(*CLASSES[name], **changes)


def answers(model, call):
    torch.manual_seed(1)
    return {which: x for which, x in tensors(model(**call)).items() if not which.startswith(".past")}


def train(model, call):
    """One step, after which every weight that has a say in the answer is another one."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    sum(x.square().mean() for x in answers(model, call).values() if x.requires_grad).backward()
    optimizer.step()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def differ(a, b):
    return max((a[which] - b[which]).abs().max().item() for which in a.keys() & b.keys())


# ------------------------------------------------------------------------------------------------ there and back


@pytest.mark.parametrize("name", sorted(BARE | HEADS))
def test_what_was_trained_here_is_a_checkpoint_there(name, tmp_path):
    theirs = model_of(name)
    ours, call = from_hf(theirs), call_of(theirs, EVERY)
    before = answers(ours, call)
    train(ours, call)
    found = answers(ours, call)
    assert differ(before, found) > 1e-4

    ours.save_pretrained(tmp_path)
    again, report = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert differ(answers(again, call), found) < BOUND
    assert same(from_hf(again).state_dict(), ours.state_dict())
    assert differ(answers(to_hf(ours), call), found) < BOUND


@pytest.mark.parametrize("name", sorted(BARE | HEADS))
def test_back_without_training_is_the_original(name):
    theirs = model_of(name)
    back = to_hf(from_hf(theirs))
    assert type(back) is type(theirs)
    assert repr(back) == repr(theirs)
    expected, found = theirs.state_dict(), back.state_dict()
    for which in [which for which in expected if which.endswith("embed_positions.weight") and "Bart" in name]:
        assert not found[which][:2].any()  # rows that are never looked up
        expected[which] = torch.cat([torch.zeros(2, 16), expected[which][2:]])
    assert same(expected, found)
    assert same(dict(theirs.named_buffers()), dict(back.named_buffers()))
    assert back.config.to_dict() == theirs.config.to_dict()


def test_back_is_a_copy_in_the_same_state():
    theirs = model_of("BertForMaskedLM").to(torch.bfloat16).train()
    theirs.bert.embeddings.word_embeddings.weight.requires_grad_(False)
    ours = from_hf(theirs)
    back = to_hf(ours)
    assert back.training
    assert back.bert.training
    assert {p.dtype for p in back.parameters()} == {torch.bfloat16}
    assert {n for n, p in back.named_parameters() if not p.requires_grad} == {"bert.embeddings.word_embeddings.weight"}
    assert back.cls.predictions.decoder.weight is back.bert.embeddings.word_embeddings.weight
    assert back.config is back.bert.config
    before = ours.bert.model.layers[0].attention.to_key.weight.clone()
    back.bert.encoder.layer[0].attention.self.key.weight.data.zero_()
    assert torch.equal(ours.bert.model.layers[0].attention.to_key.weight, before)


def test_what_the_bare_model_lacks_it_lacks_afterwards_too():
    theirs = transformers.BertModel(model_of("BertModel").config, add_pooling_layer=False)
    assert to_hf(from_hf(theirs)).pooler is None


def test_a_configuration_of_its_own_goes_along(tmp_path):
    theirs = model_of("BertForSequenceClassification")
    ours = from_hf(theirs)
    assert ours.config is ours.bert.config
    ours.config.id2label = {0: "bad", 1: "so so", 2: "good"}
    ours.save_pretrained(tmp_path)
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert again.config.id2label[2] == "good"
    assert theirs.config.id2label[2] == "LABEL_2"


# ------------------------------------------------------------------------------------------------ graphs


def test_a_topology_is_no_part_of_it(tmp_path):
    theirs, near = model_of("BertForMaskedLM"), graphs.window(1)
    ours, call = from_hf(theirs, graph=near), call_of(theirs, EVERY)
    train(ours, call)
    ours.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path)
    assert differ(answers(again, call), answers(ours, call)) > 0.01
    assert same(answers(from_hf(again, graph=near), call), answers(ours, call))


@pytest.mark.parametrize("name", ["BertModel", "RobertaForMaskedLM", "LongformerModel", "BigBirdModel", "BartModel"])
def test_stretched_positions_stay_stretched(name, tmp_path):
    theirs, wide = model_of(name), graphs.longformer(4, globals=1)
    ours, call = from_hf(theirs, graph=wide, context=70), call_of(theirs, EVERY)
    ours.save_pretrained(tmp_path)
    again = type(theirs).from_pretrained(tmp_path)
    rows = again.config.max_position_embeddings
    assert rows == theirs.config.max_position_embeddings - 32 + (72 if "oberta" in name or "Long" in name else 70)
    assert repr(to_hf(ours)) == repr(again)
    assert same(dict(to_hf(ours).named_buffers()), dict(again.named_buffers()))
    assert same(answers(from_hf(again, graph=wide), call), answers(ours, call))


# ------------------------------------------------------------------------------------------------ as a module


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "GPT2Model"])
def test_is_a_module_like_any_other(name):
    ours, call = from_hf(model_of(name)), call_of(model_of(name), EVERY)
    assert type(ours).__name__ == name if "LM" in name else "Decoder" in type(ours).__name__
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(twin) is type(ours)
        assert same(answers(twin, call), answers(ours, call))
        assert same(to_hf(twin).state_dict(), to_hf(ours).state_dict())
    other = from_hf(model_of(name))
    assert not same(answers(other, call), answers(ours, call))
    other.load_state_dict(ours.state_dict())
    assert same(answers(other, call), answers(ours, call))


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "MistralForSequenceClassification", "RobertaModel"])
def test_takes_the_weights_that_it_saved(name, tmp_path):
    """As trainers do that go on from a checkpoint."""
    ours, other = from_hf(model_of(name)), from_hf(model_of(name))
    ours.save_pretrained(tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    report = other.load_state_dict(weights, strict=False)
    assert set(report.missing_keys) <= {"lm_head.weight"}  # it is the table of tokens
    assert not report.unexpected_keys
    assert same(other.state_dict(), ours.state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_state_dict(dict(list(weights.items())[:3]))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        other.load_state_dict(ours.state_dict() | {"odd": torch.zeros(1)})


def test_saves_weights_that_are_given(tmp_path):
    """As trainers do whose weights are elsewhere."""
    ours, other = from_hf(model_of("LlamaForCausalLM")), from_hf(model_of("LlamaForCausalLM"))
    ours.save_pretrained(tmp_path, state_dict=other.state_dict())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(from_hf(again).state_dict(), other.state_dict())
    assert not same(ours.state_dict(), other.state_dict())


# ------------------------------------------------------------------------------------------------ refusals


def test_refuses_what_from_hf_did_not_give():
    with pytest.raises(TypeError, match="takes what from_hf gave; got a Bert"):
        to_hf(Bert(BertConfig(vocabulary=9, dim=8, layers=1, heads=1, hidden=8, context=5)))


def test_refuses_weights_that_are_not_those_of_the_original():
    ours = from_hf(model_of("BertModel"))
    ours.model.layers[0].attention.adapter = torch.nn.Linear(16, 2, bias=False)
    with pytest.raises(ValueError, match=r"another shape are: model\.layers\.0\.attention\.adapter\.weight"):
        to_hf(ours)
    ours = from_hf(model_of("BertModel"))
    ours.model.embeddings.token = torch.nn.Embedding(60, 16)
    with pytest.raises(ValueError, match=r"another shape are: model\.embeddings\.token\.weight"):
        to_hf(ours)


class Scaled(torch.nn.Module):
    def __init__(self, hf_model, weights) -> None:
        super().__init__()
        self.config = hf_model.config
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(w, requires_grad=False) for w in weights)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [(lambda w: [w * 0.5], r"came from: from_hf computes with them"), (lambda w: [w, w + 0], "that repeats numbers")],
)
def test_refuses_a_family_whose_weights_are_not_just_moved(change, sentence, monkeypatch):
    def convert(hf_model, graph, copies):
        return Scaled(hf_model, change(hf_model.pooler.dense.weight.detach()))

    monkeypatch.setitem(hf.FAMILIES, "bert", convert)
    with pytest.raises(ValueError, match=sentence):
        to_hf(from_hf(model_of("BertModel")))
