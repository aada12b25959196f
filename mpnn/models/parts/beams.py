"""Beam search: the likeliest text among the many that begin with the likeliest beginnings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Step = Callable[[Tensor], Tensor]
"""The last tokens int64 [B, 1] of the texts so far -> logits [B, vocabulary] of what follows."""

Select = Callable[[Tensor], None]
"""Told which texts, int64 [B'], go on in which order, so that what `Step` keeps of them follows."""


@torch.no_grad()
def beam_search(
    step: Step, select: Select, tokens: Tensor, steps: int, *, beams: int = 4, eos: int, penalty: float = 0.6
) -> Tensor:
    """Texts from `tokens` [B, 1] on, each the best that was found of up to `steps` tokens more.

    Texts are compared by `log p(text) / ((5 + length) / 6)^penalty` (Wu et al. 2016, eq. 14), where the length counts
    `eos` and not the first token. One that has not ended after `steps` tokens counts as it is. A text is given up as
    soon as it cannot become the best.

    Returns:
        int64 [B, 1 + longest], `eos` behind those that end before.

    Raises:
        ValueError: beams or steps are less than 1.
    """
    if beams < 1 or steps < 1:
        raise ValueError(f"beams and steps must be at least 1; got {beams} and {steps}")
    batch, device = len(tokens), tokens.device
    first = torch.arange(batch, device=device)[:, None] * beams  # of each sentence's texts
    select(torch.arange(batch, device=device).repeat_interleave(beams))
    texts = tokens.repeat_interleave(beams, 0)
    score = torch.full((batch, beams), -torch.inf, device=device)
    score[:, 0] = 0.0
    best = torch.full((batch,), -torch.inf, device=device)
    found = torch.full((batch, steps + 1), eos, device=device)
    for length in range(1, steps + 1):
        log_p = step(texts[:, -1:]).float().log_softmax(-1)
        count = log_p.shape[-1]
        total = (score.view(-1, 1) + log_p).view(batch, -1)
        # of twice as many as go on, half are sure not to have ended
        top, which = total.topk(min(2 * beams, total.shape[1]), 1)
        parent, word = first + which // count, which % count
        ends = word.eq(eos) if length < steps else torch.ones_like(word, dtype=torch.bool)
        ended, at = (top.masked_fill(~ends, -torch.inf) / _lengthened(length, penalty)).max(1)
        better = ended > best
        best = torch.where(better, ended, best)
        text = torch.cat([texts[parent.gather(1, at[:, None]).squeeze(1)], word.gather(1, at[:, None])], 1)
        found[better] = eos
        found[better, : length + 1] = text[better]
        score, at = top.masked_fill(ends, -torch.inf).topk(beams, 1)
        if bool((score[:, 0] / _lengthened(steps, penalty) <= best).all()):
            break
        parent, word = (x.gather(1, at).flatten() for x in (parent, word))
        select(parent)
        texts = torch.cat([texts[parent], word[:, None]], 1)
    ends = found[:, 1:].eq(eos).int().argmax(1) + found[:, 1:].ne(eos).all(1) * steps
    return found[:, : 2 + int(ends.clamp(max=steps - 1).max())]


def _lengthened(length: int, penalty: float) -> float:
    return ((5 + length) / 6) ** penalty
