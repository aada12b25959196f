"""ViT (Dosovitskiy et al. 2021): every patch of an image hears every other, and a class token hears them all.

topology   complete()                              or any other over the patches: neighborhood(14, 14, 2), window(16)
attention  DotProduct(dim, heads)                  w_ij = softmax_j( <W_Q h_i, W_K h_j> / sqrt(D) ),  h = norm(x)
aggregate  "sum"                                   m_i  = W_O || _h sum_j w_ij W_V h_j
update     PreNorm(dim, FeedForward(dim))          z    = x + m,  y = z + ffn(norm'(z))             (eq. 2, 3)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn.attention import DotProduct
from mpnn.dropout import Dropout
from mpnn.graph import Graph
from mpnn.graphs import complete
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import ACTIVATIONS, updated_by
from mpnn.models.parts.images import GridPositions, Patches, Seen, Size, as_matrix, hide, pair, with_class_token
from mpnn.models.parts.packing import Packing
from mpnn.models.parts.rounds import through
from mpnn.models.saving import Model
from mpnn.topology import Topology
from mpnn.update import PreNorm


@dataclass(frozen=True)
class ViTConfig:
    """Sizes of a ViT; the defaults are ViT-Base/16's.

    image, patch: pixels, one integer or two (down and across). dim, hidden: widths of the model and of its
    feed-forward network. sinusoidal: fixed positions in place of learned ones. activation: a name in
    `blocks.ACTIVATIONS`. eps: added to variances by LayerNorm.
    """

    image: int | list[int] = 224
    patch: int | list[int] = 16
    channels: int = 3
    dim: int = 768
    layers: int = 12
    heads: int = 12
    hidden: int = 3072
    sinusoidal: bool = False
    activation: str = "gelu"
    eps: float = 1e-12
    dropout: float = 0.0
    attention_dropout: float = 0.0

    @property
    def grid(self) -> Size:
        """How many patches an image has, down and across."""
        (height, width), (down, across) = pair(self.image), pair(self.patch)
        return height // down, width // across

    @property
    def pixels(self) -> int:
        """How many numbers a patch is made of."""
        down, across = pair(self.patch)
        return down * across * self.channels


class ViT(Model):
    """ViT over any topology of the patches; the class token is node 0, and hears and is heard by all.

    Args:
        graph: who hears whom among the patches; default: all.
        pooler: the width of a map (and tanh, or `pooler_activation`) of the class token; 0: none.
        hides: whether patches can be hidden behind a learned vector (masked image modelling).
    """

    def __init__(
        self,
        config: ViTConfig,
        graph: Topology | None = None,
        *,
        pooler: int = 0,
        pooler_activation: str = "tanh",
        hides: bool = False,
    ) -> None:
        super().__init__()
        dim = config.dim
        self.config, self.width = config, pooler or dim
        self.patches = Patches(config.channels, dim, config.patch)
        self.class_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.mask_token = nn.Parameter(torch.zeros(dim)) if hides else None
        self.positions = GridPositions(config.grid, dim, extra=1, sinusoidal=config.sinusoidal)
        self.dropout = Dropout(config.dropout)
        self.layers = PatchLayers(config, graph)
        self.norm = nn.LayerNorm(dim, eps=config.eps)
        self.pooler = nn.Sequential(nn.Linear(dim, pooler), ACTIVATIONS[pooler_activation]()) if pooler else None

    def forward(
        self,
        images: Tensor,
        hidden: Tensor | None = None,
        keep: Tensor | None = None,
        *,
        stretch: bool = False,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Seen:
        """One pass over images.

        Args:
            images: [B, channels, H, W].
            hidden: bool [B, N], which of the N patches are hidden behind the mask token.
            keep: bool [B, 1 + N], which nodes take part; default: all. The others are neither computed nor heard.
            stretch: whether positions are stretched to images of another size.
            return_states, return_weights: whether to give more than the last layer's output.

        Returns:
            last and states [B, 1 + N, dim], pooled [B, width], weights [B, heads, 1 + N, 1 + N].
        """
        x = self.patches(images)
        x = x if hidden is None else hide(x, hidden, self.mask_token)
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        x = self.dropout(x + self.positions(self.patches.grid(images), stretch=stretch))
        x, states, weights = self.layers(x, keep, return_states=return_states, return_weights=return_weights)
        last = self.norm(x)
        if keep is not None:
            last = last * keep[..., None]
        pooled = last[:, 0] if self.pooler is None else self.pooler(last[:, 0])
        return Seen(last, pooled, states, weights)


class PatchLayers(nn.ModuleList):
    """Rounds over a class token and patches: each one operator, a whole pre-norm transformer layer."""

    def __init__(self, config: ViTConfig, graph: Topology | None) -> None:
        super().__init__()
        self.graph = with_class_token(complete() if graph is None else graph)
        self.extend(self._layer(config) for _ in range(config.layers))

    def forward(
        self, x: Tensor, keep: Tensor | None = None, *, return_states: bool = False, return_weights: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """x [B, 1 + N, dim] -> the same, the states before and after each round, and their weights
        [B, H, 1 + N, 1 + N]; zeros at nodes that are not kept (`keep` bool [B, 1 + N], default: all)."""
        asked = {"return_states": return_states, "return_weights": return_weights}
        if keep is None:
            x, states, heard = through(self, [self.graph] * len(self), x, **asked)
            weights = [as_matrix(w, self.graph.bind(x.shape[1]).to(x.device)) for w in heard]
        else:
            packing, graph = self._among(keep)
            x, states, heard = through(self, [graph] * len(self), packing.pack(x), **asked)
            x, states = packing.unpack(x), [packing.unpack(y) for y in states]
            weights = [packing.unpack_weights(w, graph) for w in heard]
        return x, tuple(states) if return_states else None, tuple(weights) if return_weights else None

    def _layer(self, config: ViTConfig) -> MessagePassing:
        update = updated_by(PreNorm, config)
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(self.graph, "sum", update, attention)

    def _among(self, keep: Tensor) -> tuple[Packing, Topology | Graph]:
        """The nodes that take part, and the graph over them: one for all images where everybody hears everybody, and
        else one for each image, as each is left with other edges."""
        whole = self.graph.bind(keep.shape[1])
        if whole.runs.is_complete:
            packing = Packing.of(keep)
            return packing, packing.bind(complete())
        packing = Packing.of(keep, apart=True)
        return packing, packing.bind_each([whole] * len(keep))
