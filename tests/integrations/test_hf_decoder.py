"""GPT, GPT-2, Llama and Mistral as message passing against Hugging Face's own, on the same weights."""

import pytest
import torch
from error_bound import error_bound

from mpnn.graphs import bigbird, causal, complete, window
from mpnn.models import from_hf

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, WIDTH = 4, 15, 32
EXACT, SINGLE = error_bound(3, 48, torch.float64), error_bound(3, 48)
ROUNDED = 2e-5  # float64 too, but transformers computes norms, angles and softmax of Llama in float32

GPT_ROW, LLAMA_ROW = "GPT, GPT-2", "Llama family (rotary, grouped heads, RMSNorm, SwiGLU), Mistral's sliding window"
COMMON = {
    "vocab_size": 99,
    "initializer_range": 0.3,  # large enough for attention to choose
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GPT_SIZES = {"n_positions": 40, "n_embd": WIDTH, "n_layer": 3, "n_head": 4}
LLAMA_SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

LENGTHS = torch.tensor([15, 3, 9, 1])
RIGHT = torch.arange(LENGTH) < LENGTHS[:, None]
LEFT = RIGHT.flip(1)
MASKS = {"no padding": torch.ones_like(RIGHT), "right padding": RIGHT, "left padding": LEFT}


def config(family, **changes):
    kind, sizes = {
        "gpt2": (transformers.GPT2Config, GPT_SIZES),
        "gpt": (transformers.OpenAIGPTConfig, GPT_SIZES),
        "llama": (transformers.LlamaConfig, LLAMA_SIZES),
        "mistral": (transformers.MistralConfig, {**LLAMA_SIZES, "sliding_window": 5}),
    }[family]
    # transformers' eager attention of Llama has NaN for padding in float64, where it takes the least float64 for a mask
    # of scores that it then rounds to float32
    attention = "sdpa" if family in ("llama", "mistral") else "eager"
    return kind(**COMMON, **{"attn_implementation": attention, **sizes, **changes})


BARE = {
    "gpt2": transformers.GPT2Model,
    "gpt": transformers.OpenAIGPTModel,
    "llama": transformers.LlamaModel,
    "mistral": transformers.MistralModel,
}
LANGUAGE = {
    "gpt2": transformers.GPT2LMHeadModel,
    "gpt": transformers.OpenAIGPTLMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
}
REMEMBERING = ("gpt2", "llama", "mistral")
PEERS = {
    "gpt2": (GPT_ROW, "Hugging Face GPT-2"),
    "gpt": (GPT_ROW, "Hugging Face OpenAI-GPT"),
    "llama": (LLAMA_ROW, "Hugging Face Llama"),
    "mistral": (LLAMA_ROW, "Hugging Face Mistral"),
}


def hugging_face(kind, family, dtype=torch.float64, **changes):
    model = kind(config(family, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))  # norms and biases too are then no longer trivial
    return model.to(dtype).eval()


def bare(family, dtype=torch.float64, **changes):
    return hugging_face(BARE[family], family, dtype, **changes)


def language(family, dtype=torch.float64, **changes):
    return hugging_face(LANGUAGE[family], family, dtype, **changes)


def tokens(batch=BATCH, length=LENGTH):
    return torch.randint(3, 99, (batch, length))


def largest(difference):
    return difference.abs().max().item()


def tight(family):
    return ROUNDED if family in ("llama", "mistral") else EXACT


# ------------------------------------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("family", BARE)
def test_equals_hugging_face_on_every_token(family, mask, dtype, measured):
    theirs, ids = bare(family, dtype), tokens()
    expected = theirs(ids, attention_mask=mask.long()).last_hidden_state
    found = from_hf(theirs)(ids, attention_mask=mask.long()).last_hidden_state
    assert found.dtype == dtype
    assert not found[~mask].any()
    error = largest((expected - found)[mask])
    if dtype == torch.float32:
        measured(*PEERS[family], error, SINGLE)
    else:
        assert error < tight(family)


@pytest.mark.parametrize("family", BARE)
def test_hidden_states_and_attentions_equal_hugging_face(family):
    theirs, ids = bare(family, torch.float32, attn_implementation="eager"), tokens()
    call = {"attention_mask": LEFT.long(), "output_hidden_states": True, "output_attentions": True}
    expected, found = theirs(ids, **call), from_hf(theirs)(ids, **call)
    assert type(found) is type(expected)
    for name in ("hidden_states", "attentions"):
        assert len(found[name]) == len(expected[name])
        for a, b in zip(expected[name], found[name], strict=True):
            at = a - b if name == "hidden_states" else (a - b).movedim(1, -1)
            assert largest(at[LEFT]) < SINGLE


CONFIGURATIONS = {
    "scores as they are": ("gpt2", {"scale_attn_weights": False}),
    "scores by depth": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    "upcast": ("gpt2", {"reorder_and_upcast_attn": True}),
    "hidden": ("gpt2", {"n_inner": 24, "activation_function": "relu"}),
    "silu": ("gpt", {"afn": "silu"}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 12, "hidden_act": "gelu"}),
    "one head each": ("llama", {"num_key_value_heads": 4}),
    "base": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 100.0, "factor": 3.0}}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "no window": ("mistral", {"sliding_window": None}),
    "narrowest window": ("mistral", {"sliding_window": 1}),
}


@pytest.mark.parametrize(("family", "changes"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_configurations(family, changes, measured):
    theirs, ids = bare(family, torch.float32, **changes), tokens()
    measured(*PEERS[family], largest(theirs(ids).last_hidden_state - from_hf(theirs)(ids).last_hidden_state), SINGLE)


@pytest.mark.parametrize("family", BARE)
def test_gradients_equal_hugging_face(family):
    theirs = language(family)
    ours, ids = from_hf(theirs), tokens()
    for model in (theirs, ours):
        model(ids, labels=ids).loss.backward()
    pairs = {"gpt2": ("wpe", "position"), "gpt": ("positions_embed", "position")}
    if family in pairs:
        body, name = pairs[family]
        expected = getattr(theirs.transformer, body).weight.grad
        found = getattr(ours.transformer.model, name).weight.grad
    else:
        expected = theirs.model.layers[0].self_attn.k_proj.weight.grad
        found = ours.model.model.layers[0].attention.to_key.weight.grad
    assert largest(expected) > 1e-4
    assert largest(expected - found) < 10 * tight(family)


def test_token_types_are_tokens_in_gpt2_and_vectors_stand_for_tokens():
    theirs, ids = bare("gpt2"), tokens()
    ours, types = from_hf(theirs), tokens()
    expected = theirs(ids, token_type_ids=types).last_hidden_state
    assert largest(expected - ours(ids, token_type_ids=types).last_hidden_state) < EXACT
    vectors = theirs.wte(ids)
    assert largest(expected - ours(inputs_embeds=vectors, token_type_ids=types).last_hidden_state) < EXACT


@pytest.mark.parametrize("family", BARE)
def test_positions_of_any_kind(family):
    """Positions that do not follow the places: each row has its own, and rows of one length too."""
    theirs, ids = bare(family), tokens()
    ours, positions = from_hf(theirs), torch.randint(40, (BATCH, LENGTH))
    for mask in (MASKS["no padding"], LEFT):
        call = {"attention_mask": mask.long(), "position_ids": positions}
        error = largest((theirs(ids, **call).last_hidden_state - ours(ids, **call).last_hidden_state)[mask])
        assert error < 10 * tight(family)


def test_holes_keep_their_places_in_llama():
    theirs, ids = bare("llama"), tokens()
    holes = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(1)) < 0.6
    expected, found = (m(ids, attention_mask=holes.long()).last_hidden_state for m in (theirs, from_hf(theirs)))
    assert largest((expected - found)[holes]) < ROUNDED


# ------------------------------------------------------------------------------------------------ heads

HEADS = {
    "gpt2 classification": ("gpt2", "GPT2ForSequenceClassification", {"num_labels": 3}),
    "gpt2 tokens": ("gpt2", "GPT2ForTokenClassification", {"num_labels": 3}),
    "gpt classification": ("gpt", "OpenAIGPTForSequenceClassification", {"num_labels": 3}),
    "llama classification": ("llama", "LlamaForSequenceClassification", {"num_labels": 3}),
    "llama tokens": ("llama", "LlamaForTokenClassification", {"num_labels": 3}),
    "mistral classification": ("mistral", "MistralForSequenceClassification", {"num_labels": 3}),
}


@pytest.mark.parametrize(("family", "kind", "changes"), HEADS.values(), ids=HEADS)
def test_classification_heads(family, kind, changes):
    theirs = hugging_face(getattr(transformers, kind), family, **changes)
    ours, ids = from_hf(theirs), tokens().masked_fill(~RIGHT, 0)
    labels = torch.randint(3, (BATCH,))
    if "Token" in kind:
        labels = labels[:, None].expand(-1, LENGTH).masked_fill(~RIGHT, -100)
    call = {"attention_mask": RIGHT.long(), "labels": labels}
    expected, found = theirs(ids, **call), ours(ids, **call)
    assert type(found) is type(expected)
    kept = RIGHT if "Token" in kind else slice(None)
    assert largest((expected.logits - found.logits)[kept]) < 10 * tight(family)
    assert abs(expected.loss.item() - found.loss.item()) < tight(family)


@pytest.mark.parametrize("family", LANGUAGE)
def test_language_model_heads(family):
    theirs = language(family)
    ours, ids = from_hf(theirs), tokens()
    labels = ids.masked_fill(~RIGHT, -100)
    expected, found = (m(ids, attention_mask=RIGHT.long(), labels=labels) for m in (theirs, ours))
    assert largest((expected.logits - found.logits)[RIGHT]) < 100 * tight(family)
    assert abs(expected.loss.item() - found.loss.item()) < tight(family)


@pytest.mark.parametrize(("family", "kind"), [("gpt2", "GPT2DoubleHeadsModel"), ("gpt", "OpenAIGPTDoubleHeadsModel")])
def test_heads_that_choose_between_texts(family, kind):
    theirs = hugging_face(getattr(transformers, kind), family)
    ours, ids = from_hf(theirs), torch.randint(3, 99, (2, 3, 7))
    call = {"mc_token_ids": torch.tensor([[6, 4, 5], [2, 6, 3]]), "labels": ids, "mc_labels": torch.tensor([1, 2])}
    expected, found = theirs(ids, **call), ours(ids, **call)
    for name in ("logits", "mc_logits", "loss", "mc_loss"):
        assert largest(expected[name] - found[name]) < 100 * EXACT


def test_the_head_stays_tied_to_the_tokens():
    ours = from_hf(language("gpt2"))
    assert ours.lm_head.weight is ours.transformer.model.token.weight


# ------------------------------------------------------------------------------------------------ generation

GREEDY = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.mark.parametrize("mask", [MASKS["no padding"], LEFT], ids=["no padding", "left padding"])
@pytest.mark.parametrize("family", LANGUAGE)
def test_generates_what_hugging_face_generates(family, mask):
    theirs, ids = language(family), tokens()
    call = {"attention_mask": mask.long(), **GREEDY}
    assert torch.equal(theirs.generate(ids, **call), from_hf(theirs).generate(ids, **call))


@pytest.mark.parametrize("mask", [MASKS["no padding"], LEFT], ids=["no padding", "left padding"])
def test_beam_search_too(mask):
    theirs, ids = language("llama"), tokens()
    call = {"attention_mask": mask.long(), "num_beams": 3, **GREEDY}
    assert torch.equal(theirs.generate(ids, **call), from_hf(theirs).generate(ids, **call))


@pytest.mark.parametrize(("mask", "first", "step"), [(MASKS["no padding"], (4, 15), (4, 1)), (LEFT, (28,), (4,))])
@pytest.mark.parametrize("family", REMEMBERING)
def test_a_step_computes_the_new_tokens_alone(family, mask, first, step):
    """With padding, the 28 tokens of all texts and then one more of each are nodes of one graph."""
    ours, seen = from_hf(language(family)), []
    body = ours.transformer.model if family == "gpt2" else ours.model.model
    body.layers[0].register_forward_hook(lambda module, given, out: seen.append(tuple(out.shape[:-1])))
    ours.generate(tokens(), attention_mask=mask.long(), **GREEDY)
    assert seen == [first] + 8 * [step]


@pytest.mark.parametrize("eager", [None, True], ids=["by default", "asked for"])
@pytest.mark.parametrize("mask", [MASKS["no padding"], LEFT], ids=["no padding", "left padding"])
@pytest.mark.parametrize("family", REMEMBERING)
@torch.no_grad()
def test_goes_on_from_past_key_values(family, mask, eager):
    """In three pieces, the last of several tokens, of which each text keeps its own."""
    theirs = bare(family)
    ours, ids = from_hf(theirs), tokens(length=22)
    mask = torch.cat([mask, torch.ones(BATCH, 7, dtype=torch.bool)], 1).long()
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    past, found = None, []
    for start, stop in ((0, 15), (15, 16), (16, 22)):
        out = ours(ids[:, start:stop], attention_mask=mask[:, :stop], past_key_values=past, use_cache=eager)
        past = out.past_key_values
        assert past.get_seq_length() == stop
        found.append(out.last_hidden_state)
    assert largest((torch.cat(found, 1) - expected)[mask.bool()]) < 10 * tight(family)


def test_a_text_of_no_tokens_yet_may_begin_later():
    theirs = bare("llama")
    ours, ids = from_hf(theirs), tokens(2, 6)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]])
    with torch.no_grad():
        expected = theirs(ids, attention_mask=mask).last_hidden_state
        past = ours(ids[:, :4], attention_mask=mask[:, :4], use_cache=True).past_key_values
        found = ours(ids[:, 4:], attention_mask=mask, past_key_values=past).last_hidden_state
    assert largest(found - expected[:, 4:]) < ROUNDED


def test_no_past_where_none_is_wanted():
    ours, ids = from_hf(bare("llama")), tokens()
    assert ours(ids, use_cache=False).past_key_values is None
    assert len(ours(ids, use_cache=False, return_dict=False)) == 1


# ------------------------------------------------------------------------------------------------ other topologies


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_sliding_window_equals_hugging_face_under_that_mask(family):
    theirs, ids, graph = bare(family), tokens(), causal() & window(3)
    ours = from_hf(theirs, graph=graph)
    allowed = graph.bind(LENGTH).dense().expand(BATCH, 1, -1, -1)
    mask = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -1e9)
    expected = theirs(ids, attention_mask=mask).last_hidden_state
    assert largest(expected - ours(ids).last_hidden_state) < tight(family)
    assert largest(expected - from_hf(theirs)(ids).last_hidden_state) > 1e-2


def test_a_sliding_window_generates_as_it_reads():
    ours, ids = from_hf(language("gpt2"), graph=causal() & window(3)), tokens()
    out = ours.generate(ids, **GREEDY)
    assert torch.equal(ours(out).logits[:, LENGTH - 1 : -1].argmax(-1), out[:, LENGTH:])


def test_a_topology_whose_rows_depend_on_the_length_is_read_anew_each_time():
    ours, ids = from_hf(language("gpt2"), graph=causal() & bigbird(block=4, window=1, random=1, globals=1)), tokens()
    with pytest.raises(ValueError, match=r"cannot be cached; generate with use_cache=False"):
        ours.generate(ids, **GREEDY)
    out = ours.generate(ids, use_cache=False, **GREEDY)
    for stop in range(LENGTH, LENGTH + 9):
        assert torch.equal(ours(out[:, :stop]).logits[:, -1].argmax(-1), out[:, stop])


# ------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("family", BARE)
def test_a_graph_that_attends_to_the_future_is_refused(family):
    with pytest.raises(ValueError, match="must not attend to the tokens that it predicts"):
        from_hf(bare(family), graph=complete())


@pytest.mark.parametrize(
    ("family", "changes", "field"),
    [
        ("gpt2", {"add_cross_attention": True}, "config.add_cross_attention = True"),
        ("gpt2", {"activation_function": "mish"}, "config.activation_function = 'mish'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0}},
            r"config.rope_parameters\['rope_type'\] = 'yarn'",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "linear",
                    "rope_theta": 9.0,
                    "factor": 2.0,
                    "partial_rotary_factor": 0.5,
                }
            },
            "partial_rotary_factor",
        ),
    ],
    ids=lambda given: given if isinstance(given, str) else None,
)
def test_configurations_that_are_not_supported_are_named(family, changes, field):
    with pytest.raises(ValueError, match=field):
        from_hf(bare(family, **changes))


def test_calls_that_do_not_fit_get_a_sentence():
    ours, ids = from_hf(bare("llama")), tokens()
    with torch.no_grad():
        past = ours(ids, use_cache=True).past_key_values
        with pytest.raises(ValueError, match="began without padding go on without"):
            ours(
                ids[:, :1], attention_mask=torch.cat([MASKS["no padding"], LEFT[:, :1]], 1).long(), past_key_values=past
            )
        with pytest.raises(ValueError, match="output_attentions are those of whole texts"):
            ours(ids[:, :1], past_key_values=past, output_attentions=True)
    with pytest.raises(ValueError, match="position_ids that do not count up need an attention_mask"):
        ours(ids, position_ids=torch.zeros(1, LENGTH, dtype=torch.int64))
    with pytest.raises(ValueError, match="does not take token_type_ids"):
        ours(ids, token_type_ids=ids)
    with pytest.raises(ValueError, match=r"a cache does not store gradients; decode under torch.no_grad\(\)"):
        ours(ids[:, :1], past_key_values=ours(ids).past_key_values)
    foreign = transformers.DynamicCache()
    foreign.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    with pytest.raises(ValueError, match="must come from this model; got a DynamicCache that is not empty"):
        ours(ids, past_key_values=foreign)
    with pytest.raises(ValueError, match="does not take use_cache"):
        from_hf(bare("gpt"))(ids, use_cache=True)
