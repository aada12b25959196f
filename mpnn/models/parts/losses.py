"""How far off models are that say which token, word or class it is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The target of what is not to be predicted."""


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats: logits [..., classes], targets int64 [...], `IGNORED` where there is none."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def without_ends(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """The targets [..., N] of documents of these lengths, with `IGNORED` at the last token of each: what follows it is
    another document."""
    ends = torch.tensor(list(accumulate(lengths)), device=targets.device) - 1
    return targets.index_fill(-1, ends, IGNORED)


def next_word_loss(logits: Tensor, target: Tensor, keep: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of each word of the targets but the first, given those before it.

    Args:
        logits: [B, M - 1, vocabulary], of what follows each word but the last.
        target: int64 [B, M], from the start token on. keep: bool [B, M], which places hold words; default: all.
        smoothing: how much of each label is spread over the vocabulary (Szegedy et al. 2016).
    """
    labels = target[:, 1:] if keep is None else target[:, 1:].masked_fill(~keep[:, 1:], IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def node_loss(logits: Tensor, target: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean cross-entropy in nats: logits [N, classes], target int64 [N], over the nodes of `mask`, bool [N], or all."""
    return F.cross_entropy(logits, target) if mask is None else F.cross_entropy(logits[mask], target[mask])
