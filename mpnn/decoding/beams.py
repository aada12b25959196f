"""Beam search: finds a likely text by extending the likeliest prefixes in parallel."""

from collections.abc import Callable

import torch
from torch import Tensor

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
    if beams < 1 or steps < 1:
        raise ValueError(f"beams and steps must be at least 1; got {beams} and {steps}")
    batch, device = len(tokens), tokens.device
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
        parent, word = first + which // count, which % count
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
