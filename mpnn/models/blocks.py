"""What models share besides the operator: embeddings, and activations by their usual names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mpnn.dropout import Dropout

Norm = Callable[[int], nn.Module]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_new": partial(nn.GELU, approximate="tanh"),
    "gelu_pytorch_tanh": partial(nn.GELU, approximate="tanh"),
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
"""Activations by the names that published configurations give them."""


class Embeddings(nn.Module):
    """What a node knows before it hears anybody (Devlin et al. 2019, figure 2):

        x_i = dropout(norm(token_i + position_i + type_i))

    `pad`: the token whose vector stays as it is in training, or None.
    """

    def __init__(
        self, tokens: int, positions: int, types: int, dim: int, *, pad: int | None, norm: Norm, dropout: float
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, dim, padding_idx=pad)
        self.position = nn.Embedding(positions, dim)
        self.token_type = nn.Embedding(types, dim)
        self.norm, self.dropout = norm(dim), Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor, types: Tensor) -> Tensor:
        """[..., dim] from integers [...]; `tokens` may also be vectors [..., dim] that stand in their place.

        Raises:
            IndexError: an integer that its table does not have.
        """
        vectors = tokens if tokens.is_floating_point() else looked_up(self.token, tokens, "token")
        vectors = (
            vectors + looked_up(self.token_type, types, "token type") + looked_up(self.position, positions, "position")
        )
        return self.dropout(self.norm(vectors))


def looked_up(table: nn.Embedding, ids: Tensor, what: str) -> Tensor:
    """`table(ids)`, refusing with a sentence where torch's own speaks of an index in itself."""
    if ids.numel() and not torch.compiler.is_compiling():
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= table.num_embeddings:
            bad = low if low < 0 else high
            raise IndexError(f"{what} {bad} is not among those that the model has, 0 to {table.num_embeddings - 1}")
    return table(ids)
