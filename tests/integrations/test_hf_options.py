"""Options and calls of transformers, one by one: the same numbers, or a refusal that names what is not supported."""

import inspect

import pytest
import torch
from error_bound import error_bound
from hf_models import BATCH, LENGTH, OFFERED, call_of, made

from mpnn.decoding.cache import KVCache
from mpnn.models import from_hf, to_hf

transformers = pytest.importorskip("transformers")

CLASSES = {kind.__name__: (family, kind) for family, kind in OFFERED}
EVERY = torch.ones(BATCH, LENGTH, dtype=torch.bool)
BOUND = error_bound(2, 24)


def model_of(name, **changes):
    return made(*CLASSES[name], attn_implementation="eager", **changes)


def error(theirs):
    call = call_of(theirs, EVERY)
    expected, found = theirs(**call), from_hf(theirs)(**call)
    name = "logits" if "logits" in expected else "last_hidden_state"
    return (expected[name] - found[name]).abs().max().item()


# ------------------------------------------------------------------------------------------------ configurations


@pytest.mark.parametrize("name", ["swish", "gelu_fast", "gelu_python", "gelu_accurate", "gelu_python_tanh"])
def test_activations_under_their_other_names(name):
    """Marian's published models have swish."""
    assert error(model_of("MarianMTModel", activation_function=name)) < BOUND


def test_a_llama_has_no_window_and_a_mistral_no_biases_whatever_the_configuration_says():
    assert error(model_of("LlamaForCausalLM", sliding_window=3)) < BOUND
    assert error(model_of("MistralForCausalLM", attention_bias=True, mlp_bias=True)) < BOUND


REFUSED = {
    "hears the future, Llama": ("LlamaModel", {"is_causal": False}, "config.is_causal = False"),
    "hears the future, GPT-2": ("GPT2Model", {"is_causal": False}, "config.is_causal = False"),
    "hears the future, BART": ("BartModel", {"is_causal": False}, "config.is_causal = False"),
    "hears the future, BERT": ("BertLMHeadModel", {"is_causal": False}, "config.is_causal = False"),
    "hears the past only": ("BertModel", {"is_causal": True}, "config.is_causal = True"),
    "hears nobody": ("MistralModel", {"sliding_window": 0}, "config.sliding_window = 0"),
    "no pad to count from": ("RobertaModel", {"pad_token_id": None}, "config.pad_token_id"),
    "no end": ("BartModel", {"eos_token_id": None}, "config.eos_token_id = None"),
}


@pytest.mark.parametrize(("name", "changes", "option"), REFUSED.values(), ids=REFUSED)
def test_options_that_are_not_supported_are_named(name, changes, option):
    with pytest.raises(ValueError, match=option):
        from_hf(model_of(name, **changes))


def test_weights_that_the_configuration_does_not_say_are_named():
    theirs = model_of("BertModel")
    theirs.encoder.layer[0].intermediate.dense.lora = torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match=r"adds 1, such as layers.0.update.ffn.0.lora. Merge adapters"):
        from_hf(theirs)
    theirs = model_of("BertModel")
    quantised = torch.nn.Identity()  # its weights are no parameters
    theirs.encoder.layer[0].intermediate.dense = quantised
    with pytest.raises(ValueError, match=r"lacks 2, such as layers.0.update.ffn.0.bias.*dequantise"):
        from_hf(theirs)
    theirs = model_of("BertModel")
    theirs.pooler.dense = torch.nn.Linear(16, 8)
    with pytest.raises(ValueError, match=r"pooler.0.weight is not: \[8, 16\] instead of \[16, 16\]"):
        from_hf(theirs)


def test_weights_that_are_not_there_are_refused():
    with pytest.raises(ValueError, match=r"embeddings.word_embeddings.weight is on the meta device. Load them"):
        from_hf(model_of("BertModel").to("meta"))


# ------------------------------------------------------------------------------------------------ calls


@pytest.mark.parametrize(
    "name", ["GPT2Model", "OpenAIGPTModel", "LlamaModel", "BertModel", "RobertaModel", "BartModel"]
)
@pytest.mark.parametrize("decodes", [False, True])
def test_arguments_come_in_the_order_of_transformers(name, decodes):
    theirs = model_of(name, is_decoder=decodes)
    orders = [list(inspect.signature(model.forward).parameters.values()) for model in (theirs, from_hf(theirs))]
    by_place = [p.name for p in orders[1] if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert by_place == [p.name for p in orders[0]][: len(by_place)]


@pytest.mark.parametrize("name", ["LlamaModel", "GPT2Model", "BertLMHeadModel", "BartModel", "BertModel"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_call_does_not_say_who_hears_whom(name, causal):
    theirs = model_of(name)
    with pytest.raises(ValueError, match="does not take is_causal"):
        from_hf(theirs)(**call_of(theirs, EVERY), is_causal=causal)


# ------------------------------------------------------------------------------------------------ generation

LEFT = torch.arange(6) >= torch.tensor([0, 3, 5])[:, None]
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
DECODERS = ["BertLMHeadModel", "RobertaForCausalLM", "BigBirdForCausalLM"]
CACHED = ["GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel", "BartForConditionalGeneration"]


def begun(batch=3):
    return torch.randint(3, 50, (batch, 6))


@pytest.mark.parametrize("mask", [torch.ones(3, 6, dtype=torch.bool), LEFT], ids=["no padding", "left padding"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", DECODERS)
def test_bert_generates_what_hugging_face_generates(name, beams, mask):
    theirs, ids = model_of(name), begun()
    call = {"attention_mask": mask.long(), "num_beams": beams, **GREEDY}
    assert torch.equal(theirs.generate(ids, **call), from_hf(theirs).generate(ids, **call))


@pytest.mark.parametrize("name", DECODERS)
def test_bert_computes_the_new_tokens_alone(name):
    ours, seen = from_hf(model_of(name)), []
    ours.base_model.model.layers[0].register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape[:2])))
    ours.generate(begun(), **GREEDY)
    assert seen == [(3, 6)] + 4 * [(3, 1)]


@torch.no_grad()
@pytest.mark.parametrize("name", ["BertModel", "RobertaModel"])
def test_bert_goes_on_from_past_key_values(name):
    theirs, ids, types = model_of(name, is_decoder=True), begun(), torch.randint(2, (3, 6))
    ours, expected = from_hf(theirs), theirs(ids, token_type_ids=types)
    begin = ours(ids[:, :4], token_type_ids=types[:, :4])
    rest = ours(ids[:, 4:], token_type_ids=types[:, 4:], past_key_values=begin.past_key_values)
    found = torch.cat([begin.last_hidden_state, rest.last_hidden_state], 1)
    assert (expected.last_hidden_state - found).abs().max() < BOUND
    assert (expected.pooler_output - begin.pooler_output).abs().max() < BOUND


@pytest.mark.parametrize("assistant", ["another", "itself", "the prompt"])
@pytest.mark.parametrize("name", CACHED)
def test_assistants_guess_and_the_model_decides(name, assistant):
    """What was guessed wrongly is forgotten."""
    theirs, other, ids = model_of(name), model_of(name), begun(1)
    ours = from_hf(theirs)
    if assistant == "the prompt":
        ids, guess = torch.cat([ids, ids], 1), {"prompt_lookup_num_tokens": 3}
    else:
        guess = {"assistant_model": ours if assistant == "itself" else from_hf(other)}
    assert torch.equal(ours.generate(ids, **guess, **GREEDY), theirs.generate(ids, **GREEDY))


@torch.no_grad()
@pytest.mark.parametrize("padded", [False, True], ids=["no padding", "left padding"])
@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertLMHeadModel"])
def test_what_was_forgotten_is_not_heard_and_what_remains_is_not_read_again(name, padded, monkeypatch):
    ours, ids, other = from_hf(model_of(name)), begun(), begun()
    begin = LEFT if padded else torch.ones_like(LEFT)
    whole = torch.cat([begin, torch.ones_like(begin)], 1).long()
    past = ours(ids, attention_mask=begin.long(), use_cache=True).past_key_values
    ours(other, attention_mask=whole, past_key_values=past)
    past.crop(-7)
    assert past.get_seq_length() == 5
    read, mask = nodes_read(monkeypatch), torch.cat([whole[:, :5], whole[:, 6:]], 1)
    found = [ours(other[:, :4], attention_mask=mask[:, :9], past_key_values=past).logits]
    found += [ours(other[:, 4:], attention_mask=mask, past_key_values=past).logits]
    assert set(read) == ({12, 6} if padded else {4, 2})  # texts with padding follow one another
    expected = ours(torch.cat([ids[:, :5], other], 1), attention_mask=mask).logits[:, 5:]
    assert (torch.cat(found, 1) - expected).abs().max() < BOUND
    with pytest.raises(ValueError, match="as a negative one; got 3"):
        past.crop(3)


@torch.no_grad()
def test_a_translation_forgets_words_and_does_not_read_the_others_again(monkeypatch):
    ours, source, words, other = from_hf(model_of("BartForConditionalGeneration")), begun(), begun(), begun()
    past = ours(source, decoder_input_ids=words, use_cache=True).past_key_values
    past.crop(-2)
    assert past.get_seq_length() == 4
    read = nodes_read(monkeypatch)
    found = ours(source, decoder_input_ids=other, past_key_values=past).logits
    assert set(read) == {6}
    expected = ours(source, decoder_input_ids=torch.cat([words[:, :4], other], 1)).logits[:, 4:]
    assert (found - expected).abs().max() < BOUND


def nodes_read(monkeypatch):
    """A list that takes down how many nodes each layer reads from now on."""
    hear, read = KVCache.update, []

    def taken_down(cache, layer, attention, given, x, source):
        read.append(x.shape[-2])
        return hear(cache, layer, attention, given, x, source)

    monkeypatch.setattr(KVCache, "update", taken_down)
    return read


@pytest.mark.parametrize("name", CACHED)
def test_caches_of_a_length_from_the_beginning_are_refused(name):
    with pytest.raises(ValueError, match=r"got a StaticCache\. Generate without cache_implementation"):
        from_hf(model_of(name)).generate(begun(), cache_implementation="static", **GREEDY)


def test_a_reformer_says_how_to_generate():
    ours, ids = from_hf(model_of("ReformerModelWithLMHead")), begun()
    with pytest.raises(ValueError, match="generate with use_cache=False"):
        ours.generate(ids, **GREEDY)
    assert ours.generate(ids, use_cache=False, **GREEDY).shape == (3, 11)


# ------------------------------------------------------------------------------------------------ as a model of theirs


@pytest.mark.parametrize(
    "name", ["BertForMaskedLM", "GPT2LMHeadModel", "XLNetModel", "BartModel", "ViTModel", "SwinModel"]
)
def test_answers_what_pipelines_and_trainers_ask(name):
    theirs = model_of(name).to(torch.bfloat16)
    ours = from_hf(theirs)
    assert (ours.device, ours.dtype) == (theirs.device, theirs.dtype)
    weights = {id(weight) for weight in ours.parameters()}
    assert all(id(weight) in weights for weight in ours.get_input_embeddings().parameters())
    before = {which: weight.clone() for which, weight in ours.state_dict().items()}
    ours.tie_weights()
    assert all(torch.equal(before[which], weight) for which, weight in ours.state_dict().items())


def test_a_decoder_goes_back():
    theirs = model_of("BertLMHeadModel")
    back = to_hf(from_hf(theirs))
    assert back.config.to_dict() == theirs.config.to_dict()
    assert all(torch.equal(weight, back.state_dict()[which]) for which, weight in theirs.state_dict().items())
