"""GRPO and DPO with each prompt and its answers as one tree, on a small Llama of transformers.

1. GRPO (Shao et al. 2024): the model answers prompts of random letters, and is rewarded for each vowel. The mean reward
   goes up.
2. DPO (Rafailov et al. 2023): a copy learns from pairs of those answers, the better against the worse.
3. A step over separate texts computes each prompt again for each answer. A table compares loss, time and tokens.

    python examples/rollouts.py                                              half a minute on two cores
    python examples/rollouts.py --steps 1 --prompt 9 --answers 3 --length 4  a quick test
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import mpnn.hf

LETTERS, VOWELS = 12, (0, 4, 8)  # a to l


def grpo_loss(new: list[Tensor], old: list[Tensor], advantages: Tensor, clip: float = 0.2) -> Tensor:
    """GRPO's loss without its KL term, of the log-probabilities of each answer's tokens.

    -mean over answers, mean over tokens of min(r A, clamp(r, 1 - clip, 1 + clip) A),  r = exp(new - old)
    """
    losses = []
    for log_probs, before, advantage in zip(new, old, advantages, strict=True):
        ratio = (log_probs - before).exp()
        losses.append(-torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean())
    return torch.stack(losses).mean()


def advantages_of(rewards: Tensor) -> Tensor:
    """The reward of each answer over the mean of its group, in standard deviations, [groups, answers] -> [all]."""
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def dpo_loss(policy: Tensor, reference: Tensor, beta: float = 0.1) -> Tensor:
    """DPO's loss, of the log-probabilities of chosen and rejected answers, [pairs, 2].

    -mean over pairs of log sigmoid(beta ((chosen - its reference) - (rejected - its reference)))
    """
    margin = policy - reference
    return -F.logsigmoid(beta * (margin[:, 0] - margin[:, 1])).mean()


def log_probs(model: LlamaForCausalLM, batch: dict[str, Any]) -> list[Tensor]:
    """Of the tokens of each answer: one row holds all prompts and answers."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return mpnn.hf.log_probs(model(**inputs).logits, batch)


def separately(model: LlamaForCausalLM, groups: list[dict[str, Any]]) -> list[Tensor]:
    """The same over separate texts of one length, a row each."""
    texts = torch.stack([torch.cat([group["prompt"], answer]) for group in groups for answer in group["answers"]])
    length = len(groups[0]["answers"][0])
    logits = model(texts).logits[:, -length - 1 : -1]
    return list(logits.log_softmax(-1).gather(2, texts[:, -length:, None])[..., 0])


def answers_to(model: LlamaForCausalLM, prompts: Tensor, answers: int, length: int) -> Tensor:
    """Sampled answers, [groups, answers, length]."""
    model.eval()
    texts = model.generate(
        prompts, max_new_tokens=length, min_new_tokens=length, num_return_sequences=answers, do_sample=True,
        pad_token_id=LETTERS, eos_token_id=None,
    )  # fmt: skip
    model.train()
    return texts[:, prompts.shape[1] :].view(len(prompts), answers, length)


def reward(answers: Tensor) -> Tensor:
    """The share of vowels, [groups, answers]."""
    return torch.isin(answers, torch.tensor(VOWELS)).float().mean(-1)


def main(steps: int, prompt: int, answers: int, length: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS + 1, hidden_size=128, intermediate_size=344, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=prompt + length, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    mpnn.hf.use(model)
    collate = mpnn.hf.Rollouts(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    rewards = []
    for _ in range(steps):
        prompts = torch.randint(LETTERS, (4, prompt))
        sampled = answers_to(model, prompts, answers, length)
        rewards.append(reward(sampled))
        batch = collate([{"prompt": p, "answers": list(a)} for p, a in zip(prompts, sampled, strict=True)])
        new = log_probs(model, batch)
        loss = grpo_loss(new, [x.detach() for x in new], advantages_of(rewards[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"GRPO, {steps} steps: mean reward {rewards[0].mean():.2f} -> {rewards[-1].mean():.2f}")

    policy = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
    best, worst = rewards[-1].argmax(1), rewards[-1].argmin(1)
    pairs = [{"prompt": p, "answers": [a[i], a[k]]} for p, a, i, k in zip(prompts, sampled, best, worst, strict=True)]
    batch, losses = collate(pairs), []
    with torch.no_grad():
        reference = torch.stack([x.sum() for x in log_probs(model, batch)]).view(-1, 2)
    for _ in range(steps):
        chosen = torch.stack([x.sum() for x in log_probs(policy, batch)]).view(-1, 2)
        losses.append(dpo_loss(chosen, reference))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    print(f"DPO, {steps} steps: loss {losses[0].item():.3f} -> {losses[-1].item():.3f}")

    group = [{"prompt": prompts[0], "answers": list(sampled[0])}]
    row = collate(group)
    table = Table("a GRPO step over", "tokens", "loss", "seconds", title=f"a prompt of {prompt}, {answers} answers")
    for name, tokens, compute in (
        ("separate texts", answers * (prompt + length), lambda: separately(model, group)),
        ("one tree", row["input_ids"].numel(), lambda: log_probs(model, row)),
    ):
        begin = time.perf_counter()
        new = compute()
        loss = grpo_loss(new, [1.1 * x.detach() for x in new], advantages_of(reward(sampled[:1])))
        loss.backward()
        table.add_row(name, f"{tokens:,}", f"{loss.item():.6f}", f"{time.perf_counter() - begin:.2f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=15, help="steps of each training (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=300, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--answers", type=int, default=8, help="answers to each prompt (default: %(default)s)")
    parser.add_argument("--length", type=int, default=32, help="tokens of an answer (default: %(default)s)")
    main(**vars(parser.parse_args()))
