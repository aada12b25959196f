"""Swin (Liu et al. 2021): patches hear those in their window, the windows shift from layer to layer, and stage by stage
four patches become one.

topology   windows(h, w, size), then windows(h, w, size, shift=size // 2), in turn
attention  DotProduct(dim, heads, position=Table)  w_ij = softmax_j( <q_i, k_j> / sqrt(D) + B[dy, dx] )       (eq. 4)
aggregate  "sum"
update     PreNorm(dim, FeedForward(dim))          z = x + m,  y = z + ffn(norm(z))                           (eq. 3)

merging    pooling(h, w, 2), Typed: one linear map for each place in a cell of 2 x 2, after a norm over the four
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.attention import DotProduct, Typed
from mpnn.dropout import Dropout
from mpnn.graphs import pooling
from mpnn.message_passing import MessagePassing
from mpnn.models.parts.blocks import ACTIVATIONS
from mpnn.models.parts.images import GridPositions, Patches, Seen, Size, hide, pair
from mpnn.models.saving import Model
from mpnn.models.swin_windows import by_window, filled_up, hears
from mpnn.ops import built
from mpnn.position import Table
from mpnn.topology import Topology
from mpnn.update import FeedForward, PreNorm


@dataclass(frozen=True)
class SwinConfig:
    """Sizes of a Swin; the defaults are Swin-T's.

    image, patch: pixels, one integer or two (down and across). dim: the first stage's width, which doubles with each
    stage. depths, heads: of each stage. window: patches a side. ratio: width of the feed-forward networks over that of
    their stage. positions: whether patches have learned positions too. activation: a name in `blocks.ACTIVATIONS`.
    eps: added to variances by the layers' LayerNorm. drop_path: of the last layer, see `DropPath`; that of the others
    grows towards it from 0.
    """

    image: int | list[int] = 224
    patch: int | list[int] = 4
    channels: int = 3
    dim: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    window: int = 7
    ratio: float = 4.0
    positions: bool = False
    activation: str = "gelu"
    eps: float = 1e-5
    dropout: float = 0.0
    attention_dropout: float = 0.0
    drop_path: float = 0.1

    @property
    def grid(self) -> Size:
        """How many patches an image has, down and across; the last may be filled up with zeros."""
        (height, width), (down, across) = pair(self.image), pair(self.patch)
        return -(-height // down), -(-width // across)


class Swin(Model):
    """Swin over its windows, or over another topology in every layer, which must fit the grids of all stages.

    `hides`: whether patches can be hidden behind a learned vector (masked image modelling).
    """

    def __init__(self, config: SwinConfig, graph: Topology | None = None, *, hides: bool = False) -> None:
        super().__init__()
        self.config, self.width = config, config.dim * 2 ** (len(config.depths) - 1)
        self.patches = Patches(config.channels, config.dim, config.patch)
        self.patch_norm = nn.LayerNorm(config.dim)
        self.mask_token = nn.Parameter(torch.zeros(config.dim)) if hides else None
        self.positions = GridPositions(config.grid, config.dim) if config.positions else None
        self.dropout = Dropout(config.dropout)
        last, layers = len(config.depths) - 1, sum(config.depths)
        drop_paths = iter([config.drop_path * k / max(layers - 1, 1) for k in range(layers)])
        self.stages = nn.ModuleList(Stage(config, k, graph, drop_paths, merges=k < last) for k in range(last + 1))
        self.norm = nn.LayerNorm(self.width, eps=config.eps)

    def forward(
        self,
        images: Tensor,
        hidden: Tensor | None = None,
        *,
        stretch: bool = False,
        return_states: bool = False,
        return_weights: bool = False,
    ) -> Seen:
        """One pass over images.

        Args:
            images: [B, channels, H, W]; filled up with zeros to whole patches.
            hidden: bool [B, N], which of the N patches are hidden behind the mask token.
            stretch: whether positions, where there are any, are stretched to images of another size.
            return_states, return_weights: whether to give more than the last stage's output.

        Returns:
            last [B, patches of the last stage, width], pooled [B, width], its mean; states: the patches that each stage
            takes, and the last; weights: those of each stage's last layer, [B, windows, heads, S, S] over the S places
            of each window. Rows of padding are zeros.
        """
        images, size = self.filled(images)
        x = self.patch_norm(self.patches(images))
        x = x if hidden is None else hide(x, hidden, self.mask_token)
        x = x if self.positions is None else x + self.positions(size, stretch=stretch)
        x = self.dropout(x)
        states, weights = [x], []
        for stage in self.stages:
            x, size, heard = stage(x, size, return_weights)
            states.append(x)
            weights.append(heard)
        last = self.norm(x)
        return Seen(
            last, last.mean(1), tuple(states) if return_states else None, tuple(weights) if return_weights else None
        )

    def filled(self, images: Tensor) -> tuple[Tensor, Size]:
        """Images filled up to whole patches, and how many these are."""
        (down, across), (height, width) = self.patches.patch, images.shape[-2:]
        images = F.pad(images, (0, -width % across, 0, -height % down))
        return images, self.patches.grid(images)


class Stage(nn.Module):
    """Some layers over one grid of patches; then, unless it is the last stage, four patches become one."""

    def __init__(
        self, config: SwinConfig, number: int, graph: Topology | None, drop_paths: Iterator[float], *, merges: bool
    ) -> None:
        super().__init__()
        dim = config.dim * 2**number
        self.layers = nn.ModuleList(
            WindowLayer(config, dim, config.heads[number], graph, next(drop_paths), shifted=k % 2 == 1)
            for k in range(config.depths[number])
        )
        self.merge = PatchMerging(dim) if merges else None

    def forward(self, x: Tensor, size: Size, return_weights: bool = False) -> tuple[Tensor, Size, Tensor | None]:
        """x [B, N, dim] over a grid of `size` -> that of the next stage, its size, and the last layer's weights."""
        weights = None
        for k, layer in enumerate(self.layers):
            x, weights = layer(x, size, return_weights and k == len(self.layers) - 1)
        if self.merge is None:
            return x, size, weights
        return *self.merge(x, size), weights


class WindowLayer(nn.Module):
    """One operator over the windows of whatever grid it is called with, see `swin_windows`."""

    def __init__(
        self, config: SwinConfig, dim: int, heads: int, graph: Topology | None, drop_path: float, *, shifted: bool
    ) -> None:
        super().__init__()
        self.graph, self.window, self.shifted = graph, config.window, shifted
        relations = (2 * config.window - 1) ** 2
        attention = DotProduct(dim, heads, dropout=config.attention_dropout, position=Table(heads, relations=relations))
        ffn = FeedForward(dim, int(config.ratio * dim), ACTIVATIONS[config.activation])
        norm = partial(nn.LayerNorm, eps=config.eps)
        update = PreNorm(dim, ffn, dropout=config.dropout, norm=norm, drop_path=drop_path)
        self.round = MessagePassing(None, "sum", update, attention)

    def forward(self, x: Tensor, size: Size, return_weights: bool = False) -> tuple[Tensor, Tensor | None]:
        """x [B, N, dim] over a grid of `size` -> the same, and if asked for the weights [B, windows, heads, S, S]."""
        topology, whole, cell, shift = built(hears, self.graph, self.window, self.shifted, *size)
        source = None if whole == size else filled_up(self.round.update.prepare(x), size, whole)
        if not return_weights:
            return self.round(x, topology, source=source), None
        y, weights = self.round(x, topology, source=source, return_weights=True)
        graph = topology.bind(size[0] * size[1], whole[0] * whole[1]).to(x.device)
        return y, by_window(weights, graph, size, whole, cell, shift)


class PatchMerging(nn.Module):
    """A node for each cell of 2 x 2 patches, twice as wide, which hears them by one linear map for each place in it:

        y = W norm(x_00 || x_01 || x_10 || x_11) = sum_k W_k norm(...)_k

    Patches beyond the edge are zeros.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.round = MessagePassing(None, "sum", None, NormedTyped(dim, 2 * dim, relations=4))

    def forward(self, x: Tensor, size: Size) -> tuple[Tensor, Size]:
        """x [B, N, dim] over a grid of `size` -> [B, N', 2 * dim] and the size of its grid, half of it rounded up."""
        rows, columns = (size[0] + 1) // 2, (size[1] + 1) // 2
        hearing = x.new_empty(len(x), rows * columns, 0)  # nodes that know nothing yet
        return self.round(hearing, built(pooling, *size, 2), source=x), (rows, columns)


class NormedTyped(Typed):
    """`Typed` without a bias, after a norm over all that a node heard."""

    def __init__(self, in_dim: int, out_dim: int, relations: int) -> None:
        super().__init__(in_dim, out_dim, relations, bias=False)
        self.norm = nn.LayerNorm(relations * in_dim)
        nn.init.xavier_uniform_(self.weight.detach().flatten(0, 1))  # every place is heard, so they are one map

    def gathered(self, out: Tensor) -> Tensor:
        return self.norm(super().gathered(out))
