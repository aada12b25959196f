"""What the words of a translator know before they hear anybody."""

from __future__ import annotations

from torch import Tensor, nn

from mpnn.dropout import Dropout
from mpnn.models.parts.blocks import Norm, looked_up
from mpnn.models.parts.packing import Packing
from mpnn.models.parts.positions import sinusoidal


class Words(nn.Module):
    """A word and where it stands (Vaswani et al. 2017, sections 3.4 and 3.5): `x_i = dropout(norm(s token_i + P(i)))`.

    Args:
        token: the table of token embeddings. context: the longest sentence.
        learned: whether P is a table too, in place of sinusoids. scale: whether s is sqrt(dim), else 1.
        norm: None for no norm.
    """

    def __init__(
        self, token: nn.Embedding, context: int, *, learned: bool, scale: bool, norm: Norm | None, dropout: float
    ) -> None:
        super().__init__()
        dim = token.embedding_dim
        self.token, self.context, self.scale = token, context, dim**0.5 if scale else 1.0
        self.position = nn.Embedding(context, dim) if learned else None
        self.norm = nn.Identity() if norm is None else norm(dim)
        self.dropout = Dropout(dropout)

    def forward(self, tokens: Tensor, packing: Packing, start: int = 0) -> Tensor:
        """Packed [..., dim] of tokens int64 [B, N], the first of which is at position `start`; tokens may also be
        vectors [B, N, dim] that stand in the place of scaled token embeddings.

        Raises:
            ValueError: longer than `context`. IndexError: a token that the table does not have.
        """
        stop = start + (tokens.shape[1] if packing.documents is None else max(packing.documents))
        if stop > self.context:
            raise ValueError(f"got {stop} tokens, but this model was made with context={self.context}")
        at = packing.positions() + start
        x = packing.pack(tokens)
        x = x if x.is_floating_point() else self.scale * looked_up(self.token, x, "token")
        if self.position is None:
            positions = sinusoidal(stop, x.shape[-1], dtype=x.dtype).to(x.device)
        else:
            positions = self.position.weight
        return self.dropout(self.norm(x + packing.pack(positions[at].expand(len(tokens), -1, -1))))


def token_table(tokens: int, dim: int, pad: int | None) -> nn.Embedding:
    """Token embeddings, short enough for logits by the same table to start out undecided."""
    table = nn.Embedding(tokens, dim, padding_idx=pad)
    nn.init.normal_(table.weight, std=dim**-0.5)
    return table
