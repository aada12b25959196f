"""Cross-entropy losses of models that predict tokens, words or classes."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""Target of positions to ignore."""


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross-entropy in nats. logits: [..., classes]; targets: int64 [...], `IGNORED` at positions to
    ignore."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)


def ignore_document_ends(targets: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns targets [..., N] with `IGNORED` at the last token of each document, because the next token belongs to
    another document."""
    ends = torch.tensor(list(accumulate(lengths)), device=targets.device) - 1
    return targets.index_fill(-1, ends, IGNORED)


def next_word_loss(
    logits: Tensor, target: Tensor, padding_mask: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Returns the mean cross-entropy in nats of each target word after the first, given the words before it.

    Args:
        logits: [B, M - 1, vocabulary], predictions after each word except the last.
        target: int64 [B, M]; each row begins with the start token.
        padding_mask: bool [B, M], True at words that are not predicted; default: none.
        smoothing: label smoothing, the probability spread over the vocabulary (Szegedy et al. 2016).
    """
    labels = target[:, 1:]
    if padding_mask is not None:
        labels = labels.masked_fill(padding_mask[:, 1:], IGNORED)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing)
