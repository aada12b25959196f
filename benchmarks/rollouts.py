"""A prompt with several answers: a training step over one tree against one over separate texts.

`python -m benchmarks workloads --only rollouts` times both by the clock. On a machine that does other work,
`python -m benchmarks.rollouts 7` takes seven turns of each and compares the minimum processor times.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.contest import OURS, STEP, Bar, Case, Contest, Entry
from benchmarks.measure import peak
from benchmarks.truth import Agreement
from mpnn import MessagePassing, graphs
from mpnn.attention import DotProduct
from mpnn.position import Rotary
from mpnn.update import GatedFeedForward, PreNorm

SEPARATE, PEER = "separate texts, mpnn", "separate texts, transformers, sdpa"
DIM, HEADS, LAYERS, WORDS = 256, 4, 2, 1000


def cases(small: bool) -> Iterator[Case]:
    prompt, answers, length = (32, 3, 8) if small else (2048, 8, 256)
    shape = f"a prompt of {prompt:,} with {answers} answers of {length}, {LAYERS} layers of {DIM}, a step"
    yield Case("workload", f"rollouts, {shape}", partial(_layers, prompt, answers, length), (STEP,))
    yield Case("workload", f"rollouts of a Llama, {shape}", partial(_llama, prompt, answers, length), (STEP,))


def _step(name: str, model: nn.Module, loss: Callable[[], Tensor]) -> Entry:
    def step() -> Tensor:
        model.zero_grad()
        result = loss()
        result.backward()
        return result.detach()

    return Entry(name, step, answer=torch.no_grad()(loss))


def _layers(prompt: int, answers: int, length: int) -> Contest:
    """Layers of this library alone: the same features over a tree, and over packed texts."""
    layers = nn.ModuleList(
        MessagePassing(
            None,
            "sum",
            PreNorm(DIM, GatedFeedForward(DIM, 2 * DIM), norm=nn.RMSNorm),
            DotProduct(DIM, HEADS, position=Rotary(DIM // HEADS), bias=False),
        )
        for _ in range(LAYERS)
    )
    x = torch.randn(prompt + answers * length, DIM)
    first, *others = x[prompt:].split(length)
    packed = torch.cat([x[:prompt], first, *(part for answer in others for part in (x[:prompt], answer))])
    apart = graphs.causal() & graphs.documents([prompt + length] * answers)

    def over_a_tree() -> Tensor:
        y, graph = x, graphs.rollouts(prompt, [length] * answers)
        for layer in layers:
            y = layer(y, graph)
        return y[prompt:].square().mean()

    def over_texts() -> Tensor:
        y, graph = packed, apart.bind(len(packed))
        for layer in layers:
            y = layer(y, graph)
        return y.view(answers, prompt + length, DIM)[:, prompt:].square().mean()

    entries = [_step(OURS, layers, over_a_tree), _step(SEPARATE, layers, over_texts)]
    bars = [
        Bar(f"at least 3.8 times faster than {SEPARATE}", 3.8, "at least", STEP, SEPARATE),
        Bar(f"at least 4 times less memory than {SEPARATE}", 4.0, "less memory", STEP, SEPARATE),
    ]
    return Contest(entries, Agreement(), "each other's loss", bars, {"tokens": len(x)})


def _llama(prompt: int, answers: int, length: int) -> Contest:
    import transformers as hf

    import mpnn.hf

    config = hf.LlamaConfig(
        vocab_size=WORDS, hidden_size=DIM, intermediate_size=688, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=prompt + length, attn_implementation="sdpa",
    )  # fmt: skip
    peer = hf.LlamaForCausalLM(config)
    ours = copy.deepcopy(peer)
    mpnn.hf.use(ours)
    start, ends = torch.randint(WORDS, (prompt,)), torch.randint(WORDS, (answers, length))
    collate, group = mpnn.hf.Rollouts(ours), {"prompt": start, "answers": list(ends)}
    texts = torch.cat([start.expand(answers, -1), ends], 1)
    labels = texts.masked_fill(torch.arange(prompt + length) < prompt, -100)

    entries = [
        _step(OURS, ours, lambda: ours(**collate([group])).loss),
        _step(PEER, peer, lambda: peer(texts, labels=labels, use_cache=False).loss),
    ]
    bars = [Bar(f"at least 3 times faster than {PEER}", 3.0, "at least", STEP, PEER)]
    return Contest(entries, Agreement(), "each other's loss", bars, {"tokens": prompt + answers * (length + 1)})


def main(turns: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    for case in cases(small=False):
        ours, peer = (entry for entry in case.make().entries if isinstance(entry, Entry))
        seconds: dict[str, list[float]] = {ours.name: [], peer.name: []}
        for _ in range(turns):
            for entry in (ours, peer):
                began = time.process_time()
                entry.call()
                seconds[entry.name].append(time.process_time() - began)
        memory = {entry.name: peak(entry.call) or 0 for entry in (ours, peer)}
        print(case.title)
        for name, times in seconds.items():
            print(f"    {name:36} {min(times):6.2f} s {memory[name] / 1e6:8.1f} MB")
        ratios = min(seconds[peer.name]) / min(seconds[ours.name]), memory[peer.name] / (memory[ours.name] or 1)
        print("    {:.2f} times less time, {:.2f} times less memory".format(*ratios), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
