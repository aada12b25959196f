"""Trees of texts in decoders of transformers: prompts with their answers in one row, against separate texts."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from hf_families import DECODER, MIXED, recompute
from torch import Tensor
from torch.utils.data import DataLoader

import mpnn.hf
from mpnn.integrations.hf.trees import FAMILIES

GPT = {"vocab_size": 60, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
WINDOW = {**DECODER, "sliding_window": 6}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(FAMILIES, DECODER),
    "gpt2": {**GPT, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    **dict.fromkeys(("mistral", "phi3", "starcoder2"), WINDOW),
    "cohere2": {**DECODER, **MIXED},
    "gemma2": {**WINDOW, "query_pre_attn_scalar": 8},
    "gemma3_text": {**DECODER, **MIXED, "query_pre_attn_scalar": 8},
    "gpt_oss": {**DECODER, **MIXED, **EXPERTS},
    "mixtral": {**WINDOW, **EXPERTS},
    "qwen3_moe": {**DECODER, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}
QUICK = ("llama", "qwen3", "gpt2", "gemma3_text", "mistral")
EVERY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in sorted(FAMILIES)]


def random_tokens(count: int) -> list[int]:
    return torch.randint(3, 60, (count,), generator=torch.Generator().manual_seed(count)).tolist()


GROUPS: list[dict[str, Any]] = [
    {"prompt": random_tokens(8), "answers": [random_tokens(9), random_tokens(1), [], random_tokens(4)]},
    {"prompt": random_tokens(2)[:1], "answers": [[], random_tokens(3), random_tokens(2)]},
    {"prompt": random_tokens(12), "answers": [random_tokens(5)]},
]


def decoder(name: str) -> Any:
    """A tiny decoder in float64, its RMSNorms too, which transformers computes in float32."""
    torch.manual_seed(0)
    config = hf.CONFIG_MAPPING[name](**CONFIGS[name], initializer_range=0.3)
    model = hf.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = exact_norm(module, 1.0 if "Gemma" in type(module).__name__ else 0.0)
    return model


def exact_norm(module: Any, base: float) -> Any:
    def forward(x: Tensor) -> Tensor:
        eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (base + module.weight)

    return forward


def separately(model: Any, groups: list[dict[str, Any]]) -> list[Tensor]:
    """The log-probabilities of the tokens of each answer, a call for each text."""
    result = []
    for group in groups:
        first = len(group["prompt"])
        for answer in group["answers"]:
            text = torch.tensor([group["prompt"] + answer])
            log_probs = model(text, use_cache=False).logits.log_softmax(-1)[0, first - 1 : -1]
            result.append(log_probs.gather(1, text[0, first:, None])[:, 0])
    return result


def with_gradients(model: Any, log_probs: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The numbers, and the gradients of a weighted sum of them."""
    torch.manual_seed(1)
    model.zero_grad()
    sum((x * torch.randn_like(x)).sum() for x in log_probs).backward()  # type: ignore[union-attr]
    return [x.detach() for x in log_probs], {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def in_one_row(model: Any, groups: list[dict[str, Any]]) -> list[Tensor]:
    batch = mpnn.hf.Rollouts(model)(groups)
    return mpnn.hf.log_probs(model(**batch).logits, batch)


def check(name: str, graph: str | None) -> None:
    model = decoder(name)
    model.set_attn_implementation("sdpa" if graph is None and name not in ("gemma2", "gpt_oss") else "mpnn")
    if graph is not None:
        mpnn.hf.use(model, graph)
    expected, gradients = with_gradients(model, separately(model, GROUPS))
    if graph is None:
        mpnn.hf.use(model)
    found, others = with_gradients(model, in_one_row(model, GROUPS))
    # routers of experts and Cohere's norm compute in float32 in both
    atol = 1e-5 if name in ("mixtral", "qwen3_moe", "gpt_oss", "cohere2") else 1e-10
    assert [len(x) for x in found] == [9, 1, 0, 4, 0, 3, 2, 5]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)
    for key, gradient in gradients.items():
        torch.testing.assert_close(others[key], gradient, rtol=0, atol=atol * max(1.0, float(gradient.abs().max())))


@pytest.mark.parametrize("name", EVERY)
def test_answers_of_a_row_are_those_of_separate_texts(name: str) -> None:
    check(name, None)


@pytest.mark.parametrize("graph", ["causal() & window(3)", "causal() & longformer(4, globals=1)"])
@pytest.mark.parametrize("name", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_graphs_count_depths(name: str, graph: str) -> None:
    check(name, graph)


def test_the_loss_of_the_model_is_the_mean_over_the_answers() -> None:
    model = decoder("llama")
    mpnn.hf.use(model)
    loss = model(**mpnn.hf.Rollouts(model)(GROUPS)).loss
    torch.testing.assert_close(loss.double(), -torch.cat(separately(model, GROUPS)).mean(), rtol=0, atol=1e-5)


def test_a_row_repeats_the_last_token_of_a_prompt() -> None:
    model = decoder("llama")
    model.set_attn_implementation("mpnn")
    batch = mpnn.hf.Rollouts(model)([{"prompt": [5, 6, 7], "answers": [[8, 9], [], torch.tensor([3])]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 7, 3]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 2, 3]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 8, 9, -100, 3]]
    assert batch["attention_mask"].answers == (slice(3, 5), slice(5, 5), slice(6, 7))


def test_a_row_may_begin_with_an_answer() -> None:
    """A prompt of one token, of which each answer has a copy, and an answer without tokens before all others."""
    model = decoder("gpt2")
    mpnn.hf.use(model)
    found, expected = in_one_row(model, GROUPS[1:]), separately(model, GROUPS[1:])
    assert [len(x) for x in found] == [0, 3, 2, 5]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected), rtol=0, atol=1e-10)


def test_checkpointing_computes_the_same_gradients() -> None:
    model = decoder("mistral").train()
    mpnn.hf.use(model)
    _, expected = with_gradients(model, in_one_row(model, GROUPS))
    recompute(model)
    _, found = with_gradients(model, in_one_row(model, GROUPS))
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probabilities_of_half_precision_are_computed_in_float32(dtype: torch.dtype) -> None:
    model = decoder("llama")
    mpnn.hf.use(model)
    batch = mpnn.hf.Rollouts(model)(GROUPS)
    logits = model(**batch).logits.to(dtype)
    found, expected = mpnn.hf.log_probs(logits, batch), mpnn.hf.log_probs(logits.double(), batch)
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(torch.cat(found).double(), torch.cat(expected), rtol=0, atol=1e-5)


def test_batches_go_through_data_loaders_and_devices() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = decoder("llama")
    mpnn.hf.use(model)
    expected = in_one_row(model, GROUPS[:2])
    loader = DataLoader(GROUPS, batch_size=2, collate_fn=mpnn.hf.Rollouts(model))  # type: ignore[arg-type]
    batch = accelerate.utils.send_to_device(next(iter(loader)), "cpu")
    batch = pickle.loads(pickle.dumps(batch))  # as between a worker and its process
    for one, other in zip(mpnn.hf.log_probs(model(**batch).logits, batch), expected, strict=True):
        assert one.equal(other)


def test_a_tree_goes_on_from_a_cache() -> None:
    """As in speculative decoding: cached tokens, then drafts that branch, then one path of them."""
    model = decoder("llama").eval()
    mpnn.hf.use(model)
    text, chain = torch.tensor([random_tokens(9)]), [-1, 0, 1, 2, 3]
    tree = mpnn.hf.TreeMask([*chain, 4, 4, 5, 6])  # two drafts of two tokens
    with torch.no_grad():
        cache = model(text[:, :5], use_cache=True).past_key_values
        found = model(
            text[:, 5:], attention_mask=tree, position_ids=tree.position_ids[:, 5:], past_key_values=cache
        ).logits  # fmt: skip
        for path in ([5, 7], [6, 8]):
            whole = model(text[:, [0, 1, 2, 3, 4, *path]], use_cache=False).logits[:, 5:]
            torch.testing.assert_close(found[:, [k - 5 for k in path]], whole, rtol=0, atol=1e-10)
        for layer in cache.layers:
            layer.keys, layer.values = (x[:, :, [0, 1, 2, 3, 4, 6, 8]] for x in (layer.keys, layer.values))
        following = model(text[:, :1], past_key_values=cache).logits
        whole = model(text[:, [0, 1, 2, 3, 4, 6, 8, 0]], use_cache=False).logits[:, -1:]
        torch.testing.assert_close(following, whole, rtol=0, atol=1e-10)


# -------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", ["mamba2", "rwkv", "qwen3_next", "jamba", "opt"])
def test_families_that_were_not_compared_are_refused(name: str) -> None:
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(hf.CONFIG_MAPPING[name]())
    with pytest.raises(ValueError, match=f"not compared with separate texts for models of the type {name}"):
        mpnn.hf.Rollouts(model)


def test_a_tree_without_a_collator_is_refused_by_other_families() -> None:
    model = hf.OlmoForCausalLM(hf.OlmoConfig(**DECODER))
    mpnn.hf.use(model)
    mask = mpnn.hf.TreeMask([-1, 0, 0])
    with pytest.raises(ValueError, match="were not compared with separate texts for models of the type olmo"):
        model(torch.tensor([[3, 4, 5]]), attention_mask=mask, position_ids=mask.position_ids)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_other_attention_refuses_a_tree(attention: str) -> None:
    model = decoder("llama")
    model.set_attn_implementation(attention)
    with pytest.raises(ValueError, match=f"LlamaForCausalLM attends by '{attention}'; call mpnn.hf.use"):
        mpnn.hf.Rollouts(model)
    mask = mpnn.hf.TreeMask([-1, 0, 0])
    with pytest.raises((TypeError, AttributeError), match="a TreeMask is not a tensor"):
        model(torch.tensor([[3, 4, 5]]), attention_mask=mask, position_ids=mask.position_ids)


def test_log_probabilities_of_a_model_that_ignores_the_tree_are_refused() -> None:
    """RWKV takes an attention_mask and does not read it."""
    model = hf.RwkvForCausalLM(hf.RwkvConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, context_length=16))
    batch: dict[str, Any] = {"input_ids": torch.tensor([[3, 4, 5]])}
    batch["attention_mask"] = mpnn.hf.TreeMask([-1, 0, 0], [slice(1, 2), slice(2, 3)])
    logits = model(**batch, use_cache=False).logits
    with pytest.raises(ValueError, match="no model has read the tree of this batch"):
        mpnn.hf.log_probs(logits, batch)
    mpnn.hf.use(decoder("llama")).model(**batch)
    assert len(mpnn.hf.log_probs(logits, batch)) == 2


def test_rows_that_do_not_fit_the_tree_are_refused() -> None:
    model = decoder("mistral").eval()
    mpnn.hf.use(model)
    mask = mpnn.hf.TreeMask([-1, 0, 0])
    with pytest.raises(ValueError, match="the tree has 3 tokens, and the model has 4 new ones"):
        model(torch.tensor([[3, 4, 5, 6]]), attention_mask=mask, use_cache=False)
    with pytest.raises(ValueError, match="for one row of tokens; got a batch of 2"):
        model(torch.ones(2, 3, dtype=torch.long), attention_mask=mask)
    tokens = torch.tensor([random_tokens(12)])
    cache = model(tokens, use_cache=True).past_key_values  # a window of 6 tokens
    longer = mpnn.hf.TreeMask([*range(-1, 11), 11, 11])
    with pytest.raises(ValueError, match="takes no sliding cache that has dropped some"):
        model(
            tokens[:, :2], attention_mask=longer, position_ids=longer.position_ids[:, 12:], past_key_values=cache
        )  # fmt: skip
    with pytest.raises(ValueError, match="a tree of texts has no cu_seq_lens"):
        model(
            tokens[:, :3], attention_mask=mask, position_ids=mask.position_ids, use_cache=False,
            cu_seq_lens_k=torch.tensor([0, 3]),
        )  # fmt: skip


def test_masks_that_are_not_causal_are_refused() -> None:
    torch.manual_seed(0)
    config = hf.Gemma3TextConfig(**CONFIGS["gemma3_text"], use_bidirectional_attention=True)
    model = hf.Gemma3TextModel(config)
    mpnn.hf.use(model)
    mask = mpnn.hf.TreeMask([-1, 0, 0])
    with pytest.raises(ValueError, match="this model's mask is not causal"):
        model(torch.tensor([[3, 4, 5]]), attention_mask=mask, position_ids=mask.position_ids)


def test_groups_that_cannot_be_packed_are_named() -> None:
    model = decoder("llama")
    mpnn.hf.use(model)
    collate = mpnn.hf.Rollouts(model)
    with pytest.raises(ValueError, match="the prompt of group 1 has no token"):
        collate([GROUPS[0], {"prompt": [], "answers": [[3]]}])
    with pytest.raises(TypeError, match=r"answer 1 of group 0 must be a list of token numbers; got torch\.float32"):
        collate([{"prompt": [3], "answers": [[3], [0.5]]}])
    with pytest.raises(ValueError, match="no answer has a token"):
        collate([{"prompt": [3], "answers": [[]]}])
    batch = collate(GROUPS)
    with pytest.raises(ValueError, match=r"the row has 48 tokens, and the logits are of shape \[1, 3, 60\]"):
        mpnn.hf.log_probs(torch.zeros(1, 3, 60), batch)


# -------------------------------------------------------------------------------------------------- with others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch, where a program breaks
def test_a_compiled_model_computes_the_same() -> None:
    torch.compiler.reset()
    model = decoder("llama")
    mpnn.hf.use(model)
    program = torch.compile(model, backend="aot_eager")
    for groups in (GROUPS[:1], GROUPS[1:], GROUPS):
        batch = mpnn.hf.Rollouts(model)(groups)
        found = mpnn.hf.log_probs(program(**batch).logits, batch)
        for one, other in zip(found, in_one_row(model, groups), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_trainer_of_transformers_takes_the_collator(tmp_path: Any) -> None:
    model = decoder("llama").float()
    mpnn.hf.use(model)
    expected = model(**mpnn.hf.Rollouts(model)(GROUPS)).loss.item()
    arguments = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=3, max_steps=2, logging_steps=1, report_to=[], use_cpu=True,
        remove_unused_columns=False, learning_rate=1e-2, disable_tqdm=True,
    )  # fmt: skip
    trainer = hf.Trainer(model, arguments, train_dataset=GROUPS, data_collator=mpnn.hf.Rollouts(model))  # type: ignore[arg-type]
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(expected, abs=1e-3)
    assert losses[1] < losses[0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of trl and its packages
def test_losses_and_gradients_are_those_of_trl(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of GRPO and one of DPO over padded separate texts, computed by TRL's trainers (TRL 1.16)."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    import rollouts
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = Tokenizer(WordLevel({str(k): k for k in range(60)}, unk_token="0"))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", bos_token="1")
    options = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": []}
    groups = [{"prompt": group["prompt"], "answers": [a for a in group["answers"] if a][:2]} for group in GROUPS[:2]]
    ours = float_llama()
    mpnn.hf.use(ours)
    batch = mpnn.hf.Rollouts(ours)(groups)
    theirs = float_llama().train()

    answers = [answer for group in groups for answer in group["answers"]]
    prompt_ids, prompt_mask = padded([group["prompt"] for group in groups for _ in group["answers"]], left=True)
    ids, mask = padded(answers, left=False)
    torch.manual_seed(2)
    old = [x.detach() + 0.3 * torch.randn_like(x) for x in rollouts.log_probs(ours, batch)]
    padded_old = torch.nn.utils.rnn.pad_sequence(old, batch_first=True)
    advantages = torch.tensor([0.3, -1.2, 0.9, -0.5])
    grpo = trl.GRPOTrainer(
        model=theirs,
        args=trl.GRPOConfig(
            **options, per_device_train_batch_size=4, num_generations=2, max_completion_length=9, loss_type="grpo"
        ),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["3 4"] * 4}),
        processing_class=tokenizer,
    )
    grpo.current_gradient_accumulation_steps = 1
    inputs = {"prompt_ids": prompt_ids, "prompt_mask": prompt_mask, "completion_ids": ids, "completion_mask": mask}
    inputs |= {"advantages": advantages, "old_per_token_logps": padded_old}
    expected = grpo._compute_loss(theirs, inputs)
    same_step(expected, theirs, rollouts.grpo_loss(rollouts.log_probs(ours, batch), old, advantages), ours)

    reference, theirs = float_llama(), float_llama().train()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    dpo = trl.DPOTrainer(
        model=theirs,
        ref_model=reference,
        args=trl.DPOConfig(**options, beta=0.1),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["3"], "chosen": ["4"], "rejected": ["5"]}),
        processing_class=tokenizer,
    )
    pairs = [
        {"prompt_ids": group["prompt"], "chosen_ids": group["answers"][0], "rejected_ids": group["answers"][1]}
        for group in groups
    ]
    expected = dpo.compute_loss(theirs, dpo.data_collator(pairs))
    mpnn.hf.use(reference)
    policy, before = (
        torch.stack([x.sum() for x in rollouts.log_probs(model, batch)]).view(-1, 2) for model in (ours, reference)
    )
    same_step(expected, theirs, rollouts.dpo_loss(policy, before.detach()), ours)


def float_llama() -> Any:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER, initializer_range=0.3))


def padded(texts: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
    length = max(map(len, texts))
    ids, mask = torch.zeros(2, len(texts), length, dtype=torch.long)
    for k, text in enumerate(texts):
        inside = slice(length - len(text), None) if left else slice(len(text))
        ids[k, inside], mask[k, inside] = torch.tensor(text), 1
    return ids, mask


def same_step(expected: Tensor, theirs: Any, loss: Tensor, ours: Any) -> None:
    theirs.zero_grad()
    expected.backward()
    ours.zero_grad()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5 * float(other.grad.abs().max()))
