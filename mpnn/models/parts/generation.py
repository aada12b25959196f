"""Generation: a model's own words, one after the other, each step at the cost of what the new token hears."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpnn.decoding import Cache
from mpnn.graph import Graph
from mpnn.topology import Topology

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
    """`tokens` [B, N] and up to `steps` more, drawn from what `forward` makes of those before.

    Up to `context` tokens, each is computed once and kept in a cache over the graph of the final length. Beyond,
    positions are counted from the oldest token that is not forgotten, so every step computes all of them anew.

    Args:
        forward: `forward(tokens, cache=...)` gives logits [B, n, vocabulary] of what follows each of the tokens
            [B, n], which come after those in the cache; a model in evaluation mode.
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: draw among so many of the likeliest only. top_p: among the fewest whose probabilities, at this
            temperature, add up to at least this much (Holtzman et al. 2020). With both, top_k comes first.
        eos: a sequence that has drawn this token goes on with nothing else; when all have, generation ends early.
        generator: source of the draws. context: how many tokens `forward` takes; None for any number.

    Returns:
        int64 [B, N + steps], or fewer when every sequence has ended.

    Raises:
        ValueError: an option out of its range, or no token to begin with.
    """
    _check(tokens, steps, temperature, top_k, top_p)
    total = tokens.shape[-1] + steps
    length = total if context is None else min(total, context)
    cache, fresh = Cache(length), tokens
    ended = torch.zeros_like(tokens[..., :1], dtype=torch.bool)
    for _ in range(steps):
        logits = forward(fresh, cache=cache) if tokens.shape[-1] <= length else forward(tokens[..., -length:])
        fresh = drawn(logits[..., -1, :], temperature, top_k, top_p, generator)
        if eos is not None:
            fresh = fresh.masked_fill(ended, eos)
            ended |= fresh == eos
        tokens = torch.cat([tokens, fresh], -1)
        if eos is not None and bool(ended.all()):
            break
    return tokens


def drawn(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> Tensor:
    """One token for each row of logits [B, vocabulary]: int64 [B, 1]."""
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
    """Which tokens are among the fewest, likeliest first, whose probabilities reach `top_p`; bool [B, vocabulary]."""
    probability, order = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    before = probability.cumsum(-1) - probability
    return torch.zeros_like(logits, dtype=torch.bool).scatter(-1, order, before < top_p)


def refuse_the_future(graph: Topology | Graph, length: int) -> None:
    """Raises ValueError when, over `length` nodes, somebody hears a later one."""
    bound = graph.bind(length, length) if isinstance(graph, Topology) else graph
    if late := bound.memo("an edge from the future", lambda: _late(bound)):
        i, j = late
        raise ValueError(
            f"a language model must not hear the tokens that it is to predict, but in {graph} node {i} hears "
            f"node {j}; use causal() & ({graph})"
        )


def _late(graph: Graph) -> tuple[int, int] | None:
    """A node and a later one that it attends to, if there are any."""
    runs = graph.runs
    late = (runs.stop > runs.row + 1).nonzero()[0]
    return (int(runs.row[late[0]]), int(runs.stop[late[0]]) - 1) if len(late) else None


def refuse_to_continue(graph: Topology | Graph | None, lengths: Sequence[int] | None) -> None:
    """Raises ValueError for what only a pass over whole texts takes."""
    for name, value in (("graph", graph), ("lengths", lengths)):
        if value is not None:
            raise ValueError(
                f"generation, and any call with a cache, continues one text in each row, over the model's own graph; "
                f"got {name}. Give each document a row of its own, and make the model with the graph"
            )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, and afterwards in the mode in which it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _check(tokens: Tensor, steps: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    if temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(f"temperature must be at least 0 and top_k at least 1; got {temperature} and {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1]; got {top_p}")
    if steps < 0:
        raise ValueError(f"steps must not be negative; got {steps}")
    if tokens.shape[-1] == 0:
        raise ValueError("generation continues a text of at least one token; got none")
