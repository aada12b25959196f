"""Input embeddings of an encoder-decoder model."""

from torch import Tensor, nn

from mpnn.dropout import Dropout
from mpnn.models.layers.blocks import Norm, lookup
from mpnn.models.layers.packing import Packing
from mpnn.models.layers.positions import sinusoid


class WordEmbeddings(nn.Module):
    """Token embeddings plus positions (Vaswani et al. 2017, sections 3.4 and 3.5):

        x_i = dropout(norm(s token_i + P(i)))

    Args:
        token: table of token embeddings.
        context: maximum sentence length.
        learned: P is a learned table if True, sinusoids if False.
        scale: s is sqrt(dim) if True, 1 if False.
        norm: creates the norm of a given width; None: no norm.
        dropout: of the result, in training.
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
        """Returns packed embeddings [..., dim].

        Args:
            tokens: int64 [B, N], or vectors [B, N, dim] that replace the scaled token embeddings.
            packing: packing of the tokens.
            start: position of the first token.
        """
        stop = start + (tokens.shape[1] if packing.documents is None else max(packing.documents))
        if stop > self.context:
            raise ValueError(f"got {stop} tokens, but this model was made with context={self.context}")
        index = packing.position_ids() + start
        x = packing.pack(tokens)
        x = x if x.is_floating_point() else self.scale * lookup(self.token, x, "token")
        if self.position is None:
            positions = sinusoid(index, x.shape[-1], dtype=x.dtype)
        else:
            positions = lookup(self.position, index, "position")
        return self.dropout(self.norm(x + packing.pack(positions.expand(len(tokens), -1, -1))))


def token_table(tokens: int, dim: int, pad: int | None) -> nn.Embedding:
    """Returns token embeddings with std dim^(-1/2), so that initial predictions from the same table are close to
    uniform."""
    table = nn.Embedding(tokens, dim, padding_idx=pad)
    nn.init.normal_(table.weight, std=dim**-0.5)
    return table
