"""`mpnn compare --hf`: the perplexity of a published language model under each graph, without training."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mpnn import Graph
from mpnn.cli import page
from mpnn.cli.view_models import named_graph, own_graph, shown_name, tokenizer_of
from mpnn.train.comparison import half_interval, paired_gaps

OWN = "the model's own masks"
HEADINGS = ("graph", "edges", "perplexity", "nats", "nats above its own graph", "time a piece")

_PIECES = 16
_MAX_TOKENS = 2048  # of a piece, unless --context says so
_TOLERATED = 0.01  # of the loss: a graph so little worse than the best is as good


@dataclass(frozen=True, eq=False)
class Reading:
    """How well a model predicts a text over a graph.

    edges: of one layer over a whole piece, the mean over layers. losses: nats per token of each piece. seconds: of a
    piece, the median.
    """

    graph: str
    edges: int
    losses: Sequence[float]
    seconds: float

    @property
    def perplexity(self) -> float:
        return math.exp(mean(self.losses))


def load(name: str, text: str, context: int | None = None) -> tuple[Any, Tensor]:
    """The model, which runs over its own graph in mpnn, and up to 16 pieces of the text [pieces, context], spread
    evenly.

    `context` is the model's if it is None, at most 2,048 tokens and at most the text."""
    import mpnn.hf  # says if transformers is missing  # isort: skip
    import transformers

    tokenizer = tokenizer_of(name)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(name, output_loading_info=True)
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):
        raise ValueError(
            f"{name} has no trained weights of {type(model).__name__}: {len(missing)} were newly initialised, such as "
            f"{missing[0]}, so its predictions say nothing; pass a language model"
        )
    if not mpnn.hf.is_causal(model):
        raise ValueError(f"{type(model).__name__} of {name} is no decoder: it would read the tokens that it predicts")
    tokens = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if context is None:
        context = min(most or _MAX_TOKENS, _MAX_TOKENS, len(tokens))
    if most is not None and context > most:
        raise ValueError(f"{name} takes at most {most} tokens; got --context {context}")
    if len(tokens) < context or context < 2:
        raise ValueError(f"the text has {len(tokens):,} tokens; --context {context} needs as many, and two at least")
    count = min(_PIECES, len(tokens) // context)
    starts = torch.linspace(0, len(tokens) - context, count).long()
    mpnn.hf.use(model, **own_graph(model))
    return model.eval(), tokens[starts[:, None] + torch.arange(context)]


@torch.no_grad()
def read(model: Any, pieces: Tensor, graphs: Sequence[str]) -> Iterator[Reading]:
    """Reads all pieces over the model's own graph and over each other; graphs with the same edges are one.

    Its own are its masks, or the graph that it was saved with.

    Raises:
        ValueError: if a token attends to a later one over one of the graphs.
    """
    import mpnn.hf

    own = own_graph(model)
    saved = own["graph"]
    name = OWN if saved is None else f"its own, {saved if isinstance(saved, str) else 'by layer'}"
    candidates = [_Candidate(name, own, _graphs(model, pieces[:1], own))]
    for expression in graphs:
        options = named_graph(model, expression, pieces.shape[1])
        bound = _graphs(model, pieces[:1], options)
        same = next((one for one in candidates if _are_equal(one.graphs, bound)), None)
        if same is None:
            candidates.append(_Candidate(expression, options, bound))
        elif same is candidates[0] and saved is not None:
            same.name = f"its own, {expression}"
        else:
            same.name += f" = {expression}"
    for one in candidates:
        handle = mpnn.hf.use(model, **one.options)
        try:
            model(pieces[:1])  # binds the graph
            losses = []
            seconds = []
            for piece in pieces:
                began = perf_counter()
                losses.append(model(piece[None], labels=piece[None]).loss.item())
                seconds.append(perf_counter() - began)
        finally:
            handle.restore()
        edges = round(mean(graph.num_edges for graph in one.graphs))
        yield Reading(one.name, edges, losses, sorted(seconds)[len(seconds) // 2])


@dataclass
class _Candidate:
    """The graph of each attention layer over a piece, and the arguments of `mpnn.hf.use` that they are from."""

    name: str
    options: dict[str, Any]
    graphs: list[Graph]


def _graphs(model: Any, piece: Tensor, options: dict[str, Any]) -> list[Graph]:
    """The graph of each attention layer over one piece."""
    import mpnn.hf

    recorded: list[Graph] = []
    handle = mpnn.hf.use(model, **options)
    try:
        with mpnn.hf.record(lambda graph, _: recorded.append(graph), weights=False):
            model(piece)
    finally:
        handle.restore()
    if not recorded:
        raise ValueError(f"{type(model).__name__} has layers of its own, whose graphs cannot be recorded")
    return recorded


def _are_equal(some: Sequence[Graph], others: Sequence[Graph]) -> bool:
    pairs = {(id(a), id(b)): (a, b) for a, b in zip(some, others, strict=True)}
    return all(a.num_edges == b.num_edges and (a - b).num_edges == 0 for a, b in pairs.values())


def verdict(readings: Sequence[Reading]) -> str:
    """The best graph, and the cheapest among those that are as good, each against the model's own graph."""
    own = readings[0]
    best = min(readings, key=lambda one: mean(one.losses))
    good = [one for one in readings if mean(one.losses) <= mean(best.losses) * (1 + _TOLERATED)]
    cheap = min(good, key=lambda one: one.seconds)
    said = f"{best.graph} has the lowest perplexity, {best.perplexity:.4g}."
    others = [one for one in readings if one is not best]
    if others and not _is_certain(best, second := min(others, key=lambda one: mean(one.losses))):
        said += f" The lead over {second.graph}, {_more(best, second)} nats per token, may be chance."
    for one in dict.fromkeys((best, cheap)):
        if one is not own:
            lower = mean(one.losses) < mean(own.losses)
            change = f"lower by {_more(one, own)}" if lower else f"higher by {_more(own, one)}"
            said += (
                f" Compared with {own.graph}, {one.graph} takes {one.seconds / own.seconds:.2f} of the time, and its "
                f"loss is {change} nats per token (95% interval over the same {len(own.losses)} pieces of text)."
            )
    return said


def _is_certain(best: Reading, other: Reading) -> bool:
    """Whether the 95% interval of the lead, piece by piece, excludes zero."""
    gaps = paired_gaps(best.losses, other.losses)
    return mean(gaps) > half_interval(gaps)


def _more(own: Reading, one: Reading) -> str:
    """How many more nats per token than over the model's own graph, piece by piece, with a 95% interval."""
    gaps = paired_gaps(own.losses, one.losses)
    half = half_interval(gaps)
    return f"{mean(gaps):.2g} ± {half:.2g}" if math.isfinite(half) else f"{mean(gaps):.2g} (one piece: no interval)"


def rows(readings: Sequence[Reading]) -> list[tuple[str, ...]]:
    """The cells under `HEADINGS`."""
    return [
        (
            one.graph, f"{one.edges:,}", f"{one.perplexity:.2f}", f"{mean(one.losses):.3f}",
            "" if one is readings[0] else _more(readings[0], one), f"{one.seconds * 1e3:.0f} ms",
        )
        for one in readings
    ]  # fmt: skip


def write(out: Path, name: str, what: str, readings: Sequence[Reading]) -> None:
    """Writes the results and the page into a folder."""
    graphs = [{**asdict(one), "perplexity": one.perplexity} for one in readings]
    content = {"model": name, "read": what, "verdict": verdict(readings), "graphs": graphs}
    numbered = [(str(rank), *row) for rank, row in enumerate(rows(readings), 1)]
    parts = [page.paragraph(verdict(readings)), page.table(("", *HEADINGS), numbered), page.paragraph(what)]
    page.save(out, content, f"{shown_name(name)} over other graphs", parts)
