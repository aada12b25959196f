"""MAE (He et al. 2022): most patches are left out; those that are seen hear one another, and then all hear all, so that
the pixels of the others can be told from what was seen.

encoder    a ViT over the patches that are seen      complete() over these alone: a quarter of the nodes by default
decoder    rounds over all patches                   those not seen come in as one learned vector and their positions
loss       mean squared error on what was not seen   of pixels, or of pixels normalised within each patch
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.models.parts.images import GridPositions, Size, patchify
from mpnn.models.parts.packing import refuse_while_tracing
from mpnn.models.saving import Model
from mpnn.models.vit import PatchLayers, ViT, ViTConfig
from mpnn.topology import Topology


@dataclass(frozen=True)
class MAEConfig(ViTConfig):
    """Sizes of an MAE; the defaults are those of MAE-Base, whose encoder is ViT-Base/16.

    decoder_dim, decoder_layers, decoder_heads, decoder_hidden: of the decoder. left_out: the fraction of patches that
    the encoder does not see. normalise: whether pixels are to be told as normalised within each patch.
    """

    sinusoidal: bool = True
    decoder_dim: int = 512
    decoder_layers: int = 8
    decoder_heads: int = 16
    decoder_hidden: int = 2048
    left_out: float = 0.75
    normalise: bool = False

    @property
    def decoder(self) -> ViTConfig:
        """The decoder's layers, as those of a ViT."""
        return ViTConfig(
            image=self.image,
            patch=self.patch,
            channels=self.channels,
            dim=self.decoder_dim,
            layers=self.decoder_layers,
            heads=self.decoder_heads,
            hidden=self.decoder_hidden,
            sinusoidal=True,
            activation=self.activation,
            eps=self.eps,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
        )


@dataclass(frozen=True, eq=False)
class Painted:
    """What an MAE makes of images: pixels [B, N, pixels of a patch * C] as `images.patchify` orders them, and which
    patches it saw, bool [B, N]."""

    pixels: Tensor
    seen: Tensor


class MAE(Model):
    """A masked autoencoder; `graph` is over the patches, for encoder and decoder, default: complete."""

    def __init__(self, config: MAEConfig, graph: Topology | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = ViT(config, graph)
        self.decoder = PixelDecoder(config, graph)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> Painted:
        """The pixels of all patches from some.

        Args:
            images: [B, channels, H, W].
            noise: [B, N], the patches with the least of it are seen; default: drawn anew.
        """
        size = self.encoder.patches.grid(images)
        if noise is None:
            noise = torch.rand(len(images), size[0] * size[1], device=images.device)
        seen = least(noise, self.config.left_out)
        return Painted(self.decoder(self.encoder(images, keep=with_class(seen)).last, seen, size), seen)

    def loss(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """The mean squared error of the pixels of patches that were not seen."""
        painted = self(images, noise)
        return pixel_loss(painted, patchify(images, self.config.patch), normalise=self.config.normalise)


class PixelDecoder(nn.Module):
    """From what an encoder made of the patches that it saw to the pixels of all: rounds over all of them, with one
    learned vector for those not seen."""

    def __init__(self, config: MAEConfig, graph: Topology | None = None) -> None:
        super().__init__()
        ours, grid = config.decoder, config.grid
        self.to_dim = nn.Linear(config.dim, ours.dim)
        self.mask_token = nn.Parameter(torch.randn(ours.dim) * 0.02)
        self.positions = GridPositions(grid, ours.dim, extra=1, sinusoidal=True)
        self.layers = PatchLayers(ours, graph)
        self.norm = nn.LayerNorm(ours.dim, eps=ours.eps)
        self.to_pixels = nn.Linear(ours.dim, config.pixels)

    def forward(self, latent: Tensor, seen: Tensor, size: Size, *, stretch: bool = False) -> Tensor:
        """latent [B, 1 + N, dim], whatever it holds where `seen` (bool [B, N]) is False -> [B, N, pixels * C]; `size`:
        the grid of the patches."""
        x = torch.where(with_class(seen)[..., None], self.to_dim(latent), self.mask_token)
        x, _, _ = self.layers(x + self.positions(size, stretch=stretch))
        return self.to_pixels(self.norm(x))[:, 1:]


def least(noise: Tensor, left_out: float) -> Tensor:
    """The patches that are seen, bool [B, N]: those with the least noise [B, N], all but a fraction `left_out`."""
    refuse_while_tracing("the patches that are seen decide the graph")
    seen = int(noise.shape[1] * (1 - left_out))
    return noise.argsort(1).argsort(1) < seen


def with_class(patches: Tensor) -> Tensor:
    """bool [B, 1 + N] of [B, N]: the class token takes part."""
    return F.pad(patches, (1, 0), value=True)


def pixel_loss(painted: Painted, pixels: Tensor, *, normalise: bool = False) -> Tensor:
    """The mean squared error to `pixels` [B, N, pixels * C] over the patches that were not seen; `normalise`: to pixels
    with the mean and the deviation of their patch taken out (He et al. 2022, section 3)."""
    if normalise:
        mean, variance = pixels.mean(-1, keepdim=True), pixels.var(-1, keepdim=True)
        pixels = (pixels - mean) / (variance + 1e-6).sqrt()
    error = (painted.pixels - pixels).square().mean(-1)
    return error[~painted.seen].mean()
