"""What an encoder is trained for: hidden tokens, classes of sentences, classes of tokens.

Each stands on any encoder that is made from a `BertConfig` and answers as `Bert` does: `MaskedLM(Bert(config))`,
`SentenceClassifier(Bert(config, window(64)), classes=2)`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.dropout import Dropout
from mpnn.models.bert import Bert
from mpnn.models.parts.blocks import ACTIVATIONS
from mpnn.models.parts.losses import IGNORED, token_loss
from mpnn.models.saving import Model


class MaskedLM(Model):
    """Which token stands at each place (Devlin et al. 2019, section 3.1; Liu et al. 2019), by the token embeddings:

        logits_i = norm(act(W y_i + c)) W_token^T + b

    Over a complete graph, both directions predict tokens that are hidden (`hidden`); over `causal()`, each token
    predicts the next, and targets are the tokens moved by one.
    """

    def __init__(self, encoder: Bert) -> None:
        super().__init__()
        config = encoder.config
        self.encoder = encoder
        self.transform = nn.Sequential(
            nn.Linear(config.dim, config.dim),
            ACTIVATIONS[config.activation](),
            nn.LayerNorm(config.dim, eps=config.eps),
        )
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(
        self, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Logits [B, N, vocabulary]; arguments as those of `Bert`."""
        found = self.encoder(tokens, keep, types, **options).last
        return F.linear(self.transform(found), self.encoder.embeddings.token.weight, self.bias)

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        keep: Tensor | None = None,
        types: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Mean cross-entropy in nats; targets int64 [B, N], -100 where there is nothing to predict."""
        return token_loss(self(tokens, keep, types, **options), targets)


def hidden(
    tokens: Tensor,
    mask: int,
    vocabulary: int,
    keep: Tensor | None = None,
    *,
    rate: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens with some hidden, and the targets of a `MaskedLM` (Devlin et al. 2019, section 3.1).

    Each kept token is chosen with probability `rate`; of those chosen, 80% become the token `mask`, 10% any token and
    10% stay. `tokens` int64 [B, N], `keep` bool [B, N]; the results are int64 [B, N].
    """
    if not 0.0 < rate <= 1.0:
        raise ValueError(f"rate is the probability that a token is chosen, in (0, 1]; got {rate}")

    def drawn(p: float) -> Tensor:
        return (torch.rand(tokens.shape, generator=generator) < p).to(tokens.device)

    chosen = drawn(rate) if keep is None else drawn(rate) & keep
    any_token = torch.randint(vocabulary, tokens.shape, generator=generator).to(tokens.device)
    replaced = torch.where(drawn(8 / 9), torch.full_like(tokens, mask), any_token)
    seen = torch.where(chosen & drawn(0.9), replaced, tokens)
    return seen, tokens.masked_fill(~chosen, IGNORED)


class SentenceClassifier(Model):
    """The class of each sentence by its first token, `logits = W dropout(pooled)` (Devlin et al. 2019, section 4.1)."""

    def __init__(self, encoder: Bert, classes: int) -> None:
        super().__init__()
        if encoder.pooler is None:
            raise ValueError(
                "sentences are classified by what the pooler makes of them; make the encoder with pooler=True"
            )
        self.encoder, self.dropout = encoder, Dropout(encoder.config.dropout)
        self.to_logits = nn.Linear(encoder.config.dim, classes)

    def forward(
        self, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Logits [B, classes]; arguments as those of `Bert`."""
        return self.to_logits(self.dropout(self.encoder(tokens, keep, types, **options).pooled))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        keep: Tensor | None = None,
        types: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Mean cross-entropy in nats; targets int64 [B]."""
        return token_loss(self(tokens, keep, types, **options), targets)


class TokenClassifier(Model):
    """The class of each token: `logits_i = W dropout(y_i)` (Devlin et al. 2019, section 5.3)."""

    def __init__(self, encoder: Bert, classes: int) -> None:
        super().__init__()
        self.encoder, self.dropout = encoder, Dropout(encoder.config.dropout)
        self.to_logits = nn.Linear(encoder.config.dim, classes)

    def forward(
        self, tokens: Tensor, keep: Tensor | None = None, types: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Logits [B, N, classes]; arguments as those of `Bert`."""
        return self.to_logits(self.dropout(self.encoder(tokens, keep, types, **options).last))

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        keep: Tensor | None = None,
        types: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Mean cross-entropy in nats; targets int64 [B, N], -100 where a token has no class."""
        return token_loss(self(tokens, keep, types, **options), targets)
