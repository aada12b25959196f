"""Generation: samples token after token. With a cache, each step costs O(in-degree) of the new token. Beam search finds
a likely text by extending the likeliest prefixes in parallel."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
from mpnn.graph.arguments import at_least
from mpnn.graph.topology import Topology

Forward = Callable[..., Tensor]
"""`forward(tokens, cache=...)`: tokens int64 [B, n] that follow those in the cache -> logits [B, n, vocabulary]."""


@torch.no_grad()
def generate(
    forward: Forward,
    tokens: Tensor,
    steps: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos: int | None = None,
    generator: torch.Generator | None = None,
    context: int | None = None,
) -> Tensor:
    """Extends `tokens` [B, N] by up to `steps` tokens sampled from the logits of `forward`.

    Up to `context` tokens, each token is computed once and cached, over the graph of the final length. Beyond `context`
    tokens, the oldest token is dropped in each step. This shifts all positions, so each step recomputes all tokens.

    Args:
        forward: a model in evaluation mode. `forward(tokens, cache=...)` returns logits [B, n, vocabulary] of the token
            after each of the tokens [B, n], which follow those in the cache.
        temperature: divides the logits; 0 always selects the likeliest token.
        top_k: sample only from the `top_k` likeliest tokens. top_p: sample from the smallest set of likeliest tokens
            whose probabilities, at this temperature, add up to at least `top_p` (Holtzman et al. 2020). With both,
            top_k is applied first.
        eos: after this token a sequence is filled with it. Generation ends early when all sequences have ended.
        generator: random generator for sampling. context: maximum number of tokens of `forward`; None for no limit.

    Returns:
        int64 [B, N + steps], or fewer columns if every sequence has ended.

    Raises:
        ValueError: if an option is out of range, or `tokens` is empty.
    """
    _check_options(tokens, steps, temperature, top_k, top_p)
    total = tokens.shape[-1] + steps
    length = total if context is None else min(total, context)
    cache = KVCache(length)
    new = tokens
    ended = torch.zeros_like(tokens[..., :1], dtype=torch.bool)
    for _ in range(steps):
        logits = forward(new, cache=cache) if tokens.shape[-1] <= length else forward(tokens[..., -length:])
        new = sample(logits[..., -1, :], temperature, top_k, top_p, generator)
        if eos is not None:
            new = new.masked_fill(ended, eos)
            ended |= new == eos
        tokens = torch.cat([tokens, new], -1)
        if eos is not None and bool(ended.all()):
            break
    return tokens


def sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """Samples one token for each row of logits [B, vocabulary]: int64 [B, 1]."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), -1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None:
        logits = logits.masked_fill(~nucleus(logits, top_p), -torch.inf)
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)


def nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Mask of the smallest set of likeliest tokens whose probabilities reach `top_p`; bool [B, vocabulary]."""
    probability, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probability.cumsum(-1) - probability
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before < top_p)


def check_causal(graph: Topology | Graph, length: int) -> None:
    """Raises ValueError if, over `length` nodes, a node attends to a later one."""
    bound = graph.bind(length, length) if isinstance(graph, Topology) else graph
    if late := bound.cached("an edge from the future", bound.runs.edge_from_later):
        i, j = late
        raise ValueError(
            f"a language model must not attend to the tokens that it predicts, but in {graph} node {i} attends to "
            f"node {j}; use causal() & ({graph})"
        )


def check_continuation(graph: Topology | Graph | None, lengths: Sequence[int] | None) -> None:
    """Raises ValueError if `graph` or `lengths` is passed: only a pass over whole texts supports them."""
    for name, value in (("graph", graph), ("lengths", lengths)):
        if value is not None:
            raise ValueError(
                f"generation, and any call with a cache, continues one text in each row, over the model's own graph; "
                f"got {name}. Give each document a row of its own, and construct the model with the graph"
            )


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Sets the model to evaluation mode in the block and restores its mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _check_options(tokens: Tensor, steps: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if not temperature >= 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature must be at least 0 and top_k at least 1; got {temperature} and {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1]; got {top_p}")
    at_least("steps", steps, 0)
    if tokens.shape[-1] == 0:
        raise ValueError("generation continues a text of at least one token; got an empty one")


Step = Callable[[Tensor], Tensor]
"""The last token int64 [B, 1] of each text -> logits [B, vocabulary] of the next token."""

Select = Callable[[Tensor], None]
"""Receives the indices int64 [B'] of the texts that continue, in order, to reorder the cache of `Step`."""


@torch.no_grad()
def beam_search(
    step: Step, select: Select, tokens: Tensor, steps: int, *, beams: int = 4, eos: int, penalty: float = 0.6
) -> Tensor:
    """Extends each text of `tokens` [B, 1] by up to `steps` tokens and returns the best continuation results.

    The score is `log p(text) / ((5 + length) / 6)^penalty` (Wu et al. 2016, eq. 14), where the length counts `eos` but
    not the first token. A text without `eos` after `steps` tokens is scored as it is. The search stops early when no
    unfinished text can become the best.

    Returns:
        int64 [B, 1 + longest]; shorter texts are filled with `eos`.

    Raises:
        ValueError: if beams or steps is less than 1.
    """
    at_least("beams", beams, 1)
    at_least("steps", steps, 1)
    batch = len(tokens)
    device = tokens.device
    first = torch.arange(batch, device=device)[:, None] * beams  # index of the first text of each batch entry
    select(torch.arange(batch, device=device).repeat_interleave(beams))
    texts = tokens.repeat_interleave(beams, 0)
    score = torch.full((batch, beams), -torch.inf, device=device)
    score[:, 0] = 0.0
    best = torch.full((batch,), -torch.inf, device=device)
    results = torch.full((batch, steps + 1), eos, device=device)
    for length in range(1, steps + 1):
        log_p = step(texts[:, -1:]).float().log_softmax(-1)
        count = log_p.shape[-1]
        total = (score.view(-1, 1) + log_p).view(batch, -1)
        # each text ends in at most one way, so at least `beams` of 2 * beams candidates have not ended
        top, which = total.topk(min(2 * beams, total.shape[1]), 1)
        parent = first + which // count
        word = which % count
        ends = word.eq(eos) if length < steps else torch.ones_like(word, dtype=torch.bool)
        ended, at = (top.masked_fill(~ends, -torch.inf) / _length_penalty(length, penalty)).max(1)
        better = ended > best
        best = torch.where(better, ended, best)
        text = torch.cat([texts[parent.gather(1, at[:, None]).squeeze(1)], word.gather(1, at[:, None])], 1)
        results[better] = eos
        results[better, : length + 1] = text[better]
        score, at = top.masked_fill(ends, -torch.inf).topk(beams, 1)
        if bool((score[:, 0] / _length_penalty(steps, penalty) <= best).all()):
            break
        parent, word = (x.gather(1, at).flatten() for x in (parent, word))
        select(parent)
        texts = torch.cat([texts[parent], word[:, None]], 1)
    ends = results[:, 1:].eq(eos).int().argmax(1) + results[:, 1:].ne(eos).all(1) * steps
    return results[:, : 2 + int(ends.clamp(max=steps - 1).max())]


def _length_penalty(length: int, penalty: float) -> float:
    return ((5 + length) / 6) ** penalty
