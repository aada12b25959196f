"""Fine-tuning a decoder of transformers on long contexts: packed documents, and a window of earlier tokens.

1. A small Llama learns the characters of Python's manual for a while with transformers' own attention. Its documents
   are packed into rows of 4,096 tokens, and do not attend to one another.
2. Two copies of it go on from there on the same batches: one with transformers' attention, one over
   `causal() & window(256)` by `mpnn.hf.use`. A table compares loss and time per step.

    python examples/packed_documents.py                              two minutes on two cores
    python examples/packed_documents.py --steps 2 --context 512      a quick test
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import mpnn.hf
from mpnn.data import Characters
from mpnn.data.text import topics


def rows(context: int, symbols: Characters) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of `context` tokens [1, N] for ever, and the position of each token in its document."""
    while True:
        tokens, positions = torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        for text in topics().values():
            document = symbols.encode(text)[:context]
            tokens, positions = torch.cat([tokens, document]), torch.cat([positions, torch.arange(len(document))])
            if len(tokens) >= context:
                yield tokens[None, :context], positions[None, :context]
                tokens, positions = tokens[:0], positions[:0]


def train(model: LlamaForCausalLM, batches: list[tuple[Tensor, Tensor]], name: str) -> tuple[list[float], float]:
    """The loss of each step, and the minimum time of a step in seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, seconds = [], []
    for tokens, positions in track(batches, name):
        begin = time.perf_counter()
        labels = tokens.masked_fill(positions == 0, -100)  # the first token of a document follows from nothing
        loss = model(tokens, position_ids=positions, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, min(seconds)


def main(steps: int, context: int, window: int) -> None:
    torch.manual_seed(0)
    symbols = Characters("".join(topics().values()))
    config = LlamaConfig(
        vocab_size=len(symbols), hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=context, attn_implementation="sdpa",
    )  # fmt: skip
    model, source = LlamaForCausalLM(config), rows(context, symbols)
    before = [next(source) for _ in range(steps)]
    after = [next(source) for _ in range(steps)]
    losses, _ = train(model, before, "Llama")

    narrow = copy.deepcopy(model)
    mpnn.hf.use(narrow, graph=f"causal() & window({window})")  # the one line
    table = Table("attention", "loss before", "loss after", "seconds per step", title=f"{context:,} packed tokens")
    last = slice(-max(steps // 4, 1), None)
    reached = sum(losses[last]) / len(losses[last])
    for name, one in (("transformers, sdpa", model), (narrow.config.mpnn_graph, narrow)):
        found, seconds = train(one, after, name)
        table.add_row(name, f"{reached:.2f}", f"{sum(found[last]) / len(found[last]):.2f}", f"{seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of each part (default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a row (default: %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="earlier tokens to attend to (default: %(default)s)")
    main(**vars(parser.parse_args()))
