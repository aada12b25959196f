"""ViT (Dosovitskiy et al. 2021): attention over all patches of an image and a class token.

topology   complete()                              or any other over the patches: neighborhood(14, 14, 2), window(16)
attention  DotProduct(dim, heads)                  w_ij = softmax_j( <W_Q h_i, W_K h_j> / sqrt(D) ),  h = norm(x)
aggregate  "sum"                                   m_i  = W_O || _h sum_j w_ij W_V h_j
update     PreNorm(dim, FeedForward(dim))          z    = x + m,  y = z + ffn(norm'(z))             (eq. 2, 3)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mpnn import Graph, MessagePassing, Topology
from mpnn.attention import DotProduct
from mpnn.graphs import complete
from mpnn.models.layers.blocks import run_layers, transformer_update
from mpnn.models.layers.images import GridPositions, ImageOutput, Patches, Size, pair, with_class_token
from mpnn.models.layers.packing import Packing
from mpnn.models.saving import Model
from mpnn.update import PreNorm
from mpnn.update.dropout import Dropout
from mpnn.update.maps import Linear


@dataclass(frozen=True)
class ViTConfig:
    """Configuration of a ViT. The defaults are those of ViT-Base/16.

    image, patch: sizes of the images and of the patches in pixels, one integer or two (height and width). channels:
    number of image channels. dim, hidden: widths of the model and of its feed-forward networks. sinusoidal: whether
    positions are fixed sinusoids instead of learned embeddings. activation: a name in `blocks.ACTIVATIONS`. eps: added
    to variances by LayerNorm. dropout: of the embeddings and the residual branches. attention_dropout: of the attention
    weights.
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
        """Number of patches of an image (rows, columns)."""
        (height, width), (down, across) = pair(self.image), pair(self.patch)
        return height // down, width // across

    @property
    def pixels(self) -> int:
        """Number of values of a patch: its pixels times its channels."""
        down, across = pair(self.patch)
        return down * across * self.channels


class ViT(Model):
    """Vision transformer over any topology of the patches (Dosovitskiy et al. 2021).

    The class token is node 0. It is connected with all patches in both directions.

    Args:
        config: the configuration.
        graph: topology over the patches, or a `Graph` of them; default: complete.
        pooler: width of a linear layer with tanh on the class token; 0 for none.
    """

    def __init__(self, config: ViTConfig, graph: Topology | Graph | None = None, *, pooler: int = 0) -> None:
        super().__init__()
        dim = config.dim
        self.config = config
        self.width = pooler or dim
        self.patches = Patches(config.channels, dim, config.patch)
        self.class_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.positions = GridPositions(config.grid, dim, extra=1, sinusoidal=config.sinusoidal)
        self.dropout = Dropout(config.dropout)
        self.layers = PatchLayers(config, graph)
        self.norm = nn.LayerNorm(dim, eps=config.eps)
        self.pooler = nn.Sequential(Linear(dim, pooler), nn.Tanh()) if pooler else None

    def forward(
        self,
        images: Tensor,
        node_mask: Tensor | None = None,
        *,
        graph: Topology | Graph | Sequence[Topology | Graph] | None = None,
        stretch: bool = False,
        return_weights: bool = False,
    ) -> ImageOutput:
        """Encodes images.

        Args:
            images: [B, channels, H, W].
            node_mask: bool [B, 1 + N], True at nodes to compute; default: all. Other nodes are removed from the graph,
                and their outputs are zeros.
            graph: replaces the topology over the patches in this call: one for all images, or a list with one for each,
                such as `[graphs.knn(p, 8) for p in model.patches(images)]`.
            stretch: whether positions are interpolated to images of another size.
            return_weights: whether to return the attention weights.

        Returns:
            last [B, 1 + N, dim], pooled [B, width], weights [B, heads, 1 + N, 1 + N].
        """
        x = self.patches(images)
        x = torch.cat([self.class_token.expand(len(x), 1, -1), x], 1)
        x = self.dropout(x + self.positions(self.patches.grid(images), stretch=stretch))
        x, weights = self.layers(x, node_mask, graph, return_weights=return_weights)
        last = self.norm(x)
        if node_mask is not None:
            last = last * node_mask[..., None]
        pooled = last[:, 0] if self.pooler is None else self.pooler(last[:, 0])
        return ImageOutput(last, pooled, weights)


class PatchLayers(nn.ModuleList):
    """Pre-norm transformer layers over a class token and patches."""

    def __init__(self, config: ViTConfig, graph: Topology | Graph | None) -> None:
        super().__init__()
        self.graph = with_class_token(complete() if graph is None else graph)
        self.extend(self._layer(config) for _ in range(config.layers))

    def forward(
        self,
        x: Tensor,
        node_mask: Tensor | None = None,
        graph: Topology | Graph | Sequence[Topology | Graph] | None = None,
        *,
        return_weights: bool = False,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """x [B, 1 + N, dim] -> the same shape, and the weights of each layer [B, H, 1 + N, 1 + N]. Outputs are zeros
        where `node_mask` (bool [B, 1 + N], default: all) is False. `graph` replaces that over the patches."""
        packing, bound = self._packed(x, node_mask, graph)
        x, edge_weights = run_layers(self, [bound] * len(self), packing.pack(x), return_weights=return_weights)
        weights = tuple(packing.unpack_weights(w, bound) for w in edge_weights)
        return packing.unpack(x), weights if return_weights else None

    def _layer(self, config: ViTConfig) -> MessagePassing:
        update = transformer_update(PreNorm, config)
        attention = DotProduct(config.dim, config.heads, dropout=config.attention_dropout)
        return MessagePassing(self.graph, "sum", update, attention)

    def _packed(
        self, x: Tensor, node_mask: Tensor | None, graph: Topology | Graph | Sequence[Topology | Graph] | None
    ) -> tuple[Packing, Topology | Graph]:
        """The packing of the remaining nodes and the graph over them.

        A complete graph is bound to all images at once. Other graphs differ between images after nodes are removed, so
        they are bound image by image.
        """
        if isinstance(graph, Sequence):
            mask = x.new_ones(x.shape[:2], dtype=torch.bool) if node_mask is None else node_mask
            packing = Packing.of(mask, separate=True)
            return packing, packing.bind_each([with_class_token(one).bind(mask.shape[1]) for one in graph])
        topology = self.graph if graph is None else with_class_token(graph)
        if node_mask is None:
            packing = Packing.of_tokens(x)
            return packing, packing.bind(topology)
        whole = topology.bind(node_mask.shape[1])
        if whole.runs.is_complete:
            packing = Packing.of(node_mask)
            return packing, packing.bind(complete())
        packing = Packing.of(node_mask, separate=True)
        return packing, packing.bind_each([whole] * len(node_mask))
