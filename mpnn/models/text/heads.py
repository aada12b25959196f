"""Heads on an encoder: masked language modeling, sentence classification and token classification.

The encoder may be any model with the configuration and the outputs of `Bert`: `MaskedLM(Bert(config))`,
`SentenceClassifier(Bert(config, window(64)), classes=2)`.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mpnn.graph.sharding import active
from mpnn.models.layers.blocks import ACTIVATIONS
from mpnn.models.layers.losses import IGNORED, token_loss
from mpnn.models.saving import Model
from mpnn.models.text.bert import Bert
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear, linear


class Head(Model):
    """Base class: the loss of a model that maps tokens to logits."""

    def loss(self, tokens: Tensor, targets: Tensor, types: Tensor | None = None, **options: Any) -> Tensor:
        """Returns the mean cross-entropy in nats. targets: int64 [B, N], -100 at positions to ignore, or [B] for a
        `SentenceClassifier`."""
        return token_loss(self(tokens, types, **options), targets)


class Classifier(Head):
    """Base class: an encoder and a linear map to logits."""

    def __init__(self, encoder: Bert, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = Dropout(encoder.config.dropout)
        self.to_logits = Linear(encoder.config.dim, classes)


class MaskedLM(Head):
    """Predicts the token at each position with the token embeddings (Devlin et al. 2019, section 3.1; Liu et al. 2019):

        logits_i = norm(act(W y_i + c)) W_token^T + b

    Over a complete graph, targets are the masked tokens (see `mask_tokens`). Over `causal()`, each token predicts the
    next one, and targets are the tokens shifted by one position.
    """

    def __init__(self, encoder: Bert) -> None:
        super().__init__()
        config = encoder.config
        self.encoder = encoder
        self.transform = nn.Sequential(
            Linear(config.dim, config.dim),
            ACTIVATIONS[config.activation](),
            nn.LayerNorm(config.dim, eps=config.eps),
        )
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, tokens: Tensor, types: Tensor | None = None, **options: Any) -> Tensor:
        """Returns logits [B, N, vocabulary]. Arguments are those of `Bert.forward`."""
        states = self.encoder(tokens, types, **options).last
        return linear(self.transform(states), self.encoder.embeddings.token.weight, self.bias)


def mask_tokens(
    tokens: Tensor,
    mask: int,
    vocabulary: int,
    candidates: Tensor | None = None,
    *,
    rate: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Masks random tokens and returns the inputs and targets of a `MaskedLM` (Devlin et al. 2019, section 3.1).

    Each token is selected with probability `rate`. Of the selected tokens, 80% become the token `mask`, 10% become a
    random token and 10% stay.

    Args:
        tokens: int64 [B, N].
        mask: id of the mask token.
        vocabulary: number of tokens, for random replacements.
        candidates: bool [B, N], True at tokens that may be selected; default: all.
        rate: probability that a token is selected, in (0, 1].
        generator: random generator on the CPU.

    Returns:
        Inputs and targets, int64 [B, N] each. Targets are -100 at tokens that were not selected.

    Raises:
        ValueError: if `rate` is not in (0, 1].
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate is the probability that a token is selected, in (0, 1]; got {rate}")

    def bernoulli(p: float) -> Tensor:
        return (torch.rand(tokens.shape, generator=generator) < p).to(tokens.device)

    selected = bernoulli(rate) if candidates is None else bernoulli(rate) & candidates
    random_tokens = torch.randint(vocabulary, tokens.shape, generator=generator).to(tokens.device)
    replacements = torch.where(bernoulli(8 / 9), torch.full_like(tokens, mask), random_tokens)
    inputs = torch.where(selected & bernoulli(0.9), replacements, tokens)
    return inputs, tokens.masked_fill(~selected, IGNORED)


class SentenceClassifier(Classifier):
    """Classifies each sentence from its first token: `logits = W dropout(pooled)` (Devlin et al. 2019, section 4.1)."""

    def __init__(self, encoder: Bert, classes: int) -> None:
        if encoder.pooler is None:
            raise ValueError("SentenceClassifier needs the output of the pooler; create the encoder with pooler=True")
        super().__init__(encoder, classes)

    def forward(self, tokens: Tensor, types: Tensor | None = None, **options: Any) -> Tensor:
        """Returns logits [B, classes]. Arguments are those of `Bert.forward`.

        Raises:
            ValueError: if nodes are divided over processes, because only one of them has the first token.
        """
        if active() is not None:
            raise ValueError(
                "one process has the first token: inside sharded, call the encoder and compute the loss where its "
                "`pooled` is not None"
            )
        return self.to_logits(self.dropout(self.encoder(tokens, types, **options).pooled))


class TokenClassifier(Classifier):
    """Classifies each token: `logits_i = W dropout(y_i)` (Devlin et al. 2019, section 5.3)."""

    def forward(self, tokens: Tensor, types: Tensor | None = None, **options: Any) -> Tensor:
        """Returns logits [B, N, classes]. Arguments are those of `Bert.forward`."""
        return self.to_logits(self.dropout(self.encoder(tokens, types, **options).last))
