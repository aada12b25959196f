"""What translators share: how far off they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The label of what is not to be predicted."""


def next_word_loss(logits: Tensor, target: Tensor, keep: Tensor | None = None, smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy in nats of each word of the targets but the first, given those before it.

    Args:
        logits: [B, M - 1, vocabulary], of what follows each word but the last.
        target: int64 [B, M], from the start token on. keep: bool [B, M], which places hold words; default: all.
        smoothing: how much of each label is spread over the vocabulary (Szegedy et al. 2016).
    """
    labels = target[:, 1:] if keep is None else target[:, 1:].masked_fill(~keep[:, 1:], IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)


def all_kept(tokens: Tensor) -> Tensor:
    """bool [B, N]: every place holds a word."""
    return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
