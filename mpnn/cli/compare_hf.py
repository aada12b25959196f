"""`mpnn compare --hf`: the perplexity of a published language model under each graph, without training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mpnn.graphs import parse

_PIECES = 16
_TOLERATED = 0.01  # of the loss: a graph so little worse than the best is as good


@dataclass(frozen=True)
class Reading:
    """How well a model predicts a text over a graph.

    edges: of one layer over a whole piece. losses: nats per token of each piece. seconds: of a piece, the median.
    """

    graph: str
    edges: int
    losses: Sequence[float]
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(mean(self.losses))


def load(name: str, text: str, context: int) -> tuple[Any, Tensor]:
    """The model with its own attention in mpnn, and up to 16 pieces of the text [pieces, context], spread evenly.

    Raises:
        ImportError: if transformers is not installed.
        ValueError, OSError: if there is no such model, or the text is too short for one piece.
    """
    try:
        import transformers

        import mpnn.hf
    except ImportError:
        raise ImportError("--hf needs transformers, which is not installed; run: pip install transformers") from None
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(name).eval()
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and context > most:
        raise ValueError(f"{name} takes at most {most} tokens; got --context {context}")
    if len(tokens) < context:
        raise ValueError(f"the text has {len(tokens):,} tokens; --context {context} needs as many at least")
    count = min(_PIECES, len(tokens) // context)
    starts = torch.linspace(0, len(tokens) - context, count).long()
    mpnn.hf.use(model)
    return model, tokens[starts[:, None] + torch.arange(context)]


@torch.no_grad()
def read(model: Any, pieces: Tensor, graphs: Sequence[str]) -> Iterator[Reading]:
    """Reads all pieces over each graph.

    Raises:
        ValueError: if a graph does not fit the model.
    """
    import mpnn.hf

    for expression in graphs:
        topology = parse(expression)
        handle = mpnn.hf.use(model, topology)
        try:
            model(pieces[:1])  # binds the graph
            losses, seconds = [], []
            for piece in pieces:
                began = perf_counter()
                losses.append(model(piece[None], labels=piece[None]).loss.item())
                seconds.append(perf_counter() - began)
        finally:
            handle.restore()
        yield Reading(expression, topology.bind(pieces.shape[1]).num_edges, losses, sorted(seconds)[len(seconds) // 2])


def verdict(readings: Sequence[Reading]) -> str:
    """The cheapest graph among those that are as good as the best."""
    best = min(readings, key=lambda one: mean(one.losses))
    good = [one for one in readings if mean(one.losses) <= mean(best.losses) * (1 + _TOLERATED)]
    cheap = min(good, key=lambda one: one.seconds)
    said = f"{best.graph} predicts best: perplexity {best.perplexity:.4g}."
    if cheap is not best:
        gaps = [b - a for a, b in zip(best.losses, cheap.losses, strict=True)]
        error = f" ± {stdev(gaps) / math.sqrt(len(gaps)):.2g}" if len(gaps) > 1 else ""
        said += (
            f" {cheap.graph} takes {cheap.seconds / best.seconds:.2f} of its time and loses {mean(gaps):.2g}{error} "
            "nats per token."
        )
    return said


def rows(readings: Sequence[Reading]) -> list[tuple[str, ...]]:
    """Cells: graph, edges, perplexity, nats per token with the standard error over pieces, time."""
    found: list[tuple[str, ...]] = []
    for one in readings:
        error = f" ± {stdev(one.losses) / math.sqrt(len(one.losses)):.3f}" if len(one.losses) > 1 else ""
        nats, time = f"{mean(one.losses):.3f}{error}", f"{one.seconds * 1e3:.0f} ms"
        found.append((one.graph, f"{one.edges:,}", f"{one.perplexity:.2f}", nats, time))
    return found


HEADINGS = ("graph", "edges", "perplexity", "nats a token", "time of a piece")


def text_of(file: Path | None) -> str:
    """The text of a file, or Python's manual.

    Raises:
        OSError, ValueError: if the file cannot be read.
    """
    from mpnn.cli.tasks import manual

    return manual() if file is None else file.read_text(encoding="utf-8")
