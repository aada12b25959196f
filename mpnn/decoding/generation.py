"""Generation: samples token after token. With a cache, each step costs O(in-degree) of the new token."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mpnn.decoding.cache import KVCache
from mpnn.graph import Graph
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
    cache, new = KVCache(length), tokens
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
    if late := bound.cached("an edge from the future", lambda: _edge_from_the_future(bound)):
        i, j = late
        raise ValueError(
            f"a language model must not attend to the tokens that it predicts, but in {graph} node {i} attends to "
            f"node {j}; use causal() & ({graph})"
        )


def _edge_from_the_future(graph: Graph) -> tuple[int, int] | None:
    """A node and a later node that it attends to, or None."""
    runs = graph.runs
    late = (runs.stop > runs.row + 1).nonzero()[0]
    return (int(runs.row[late[0]]), int(runs.stop[late[0]]) - 1) if len(late) else None


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
    if steps < 0:
        raise ValueError(f"steps must not be negative; got {steps}")
    if tokens.shape[-1] == 0:
        raise ValueError("generation continues a text of at least one token; got an empty one")
