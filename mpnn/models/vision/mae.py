"""MAE (He et al. 2022): an encoder over the visible patches, and a decoder that reconstructs the masked ones.

encoder    a ViT over the visible patches            complete() over these only: a quarter of the patches by default
decoder    layers over all patches                   a masked patch is a learned mask token plus its position
loss       mean squared error on masked patches      of pixels, or of pixels normalized within each patch
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mpnn import Graph, Topology
from mpnn.models.layers.images import GridPositions, Size, patchify
from mpnn.models.layers.packing import require_eager
from mpnn.models.saving import Model
from mpnn.models.vision.vit import PatchLayers, ViT, ViTConfig
from mpnn.update.maps import Linear


@dataclass(frozen=True)
class MAEConfig(ViTConfig):
    """Configuration of an MAE. The defaults are those of MAE-Base, whose encoder is ViT-Base/16.

    decoder_dim, decoder_layers, decoder_heads, decoder_hidden: sizes of the decoder. mask_ratio: fraction of the
    patches that are masked. normalize: whether the target pixels are normalized within each patch. The others are those
    of `ViTConfig`.
    """

    sinusoidal: bool = True
    decoder_dim: int = 512
    decoder_layers: int = 8
    decoder_heads: int = 16
    decoder_hidden: int = 2048
    mask_ratio: float = 0.75
    normalize: bool = False

    @property
    def decoder(self) -> ViTConfig:
        """Configuration of the decoder's layers."""
        return replace(
            self,
            dim=self.decoder_dim,
            layers=self.decoder_layers,
            heads=self.decoder_heads,
            hidden=self.decoder_hidden,
            sinusoidal=True,
        )


@dataclass(frozen=True, eq=False)
class MAEOutput:
    """Output of an MAE.

    pixels: reconstructed pixels [B, N, pixels of a patch * C], in the order of `images.patchify`. seen: bool [B, N],
    the patches that were visible to the encoder.
    """

    pixels: Tensor
    seen: Tensor


class MAE(Model):
    """Masked autoencoder (He et al. 2022).

    Args:
        config: the configuration.
        graph: topology over the patches, for encoder and decoder; default: complete.
    """

    def __init__(self, config: MAEConfig, graph: Topology | Graph | None = None) -> None:
        super().__init__()
        self.config = config
        self.encoder = ViT(config, graph)
        self.decoder = PixelDecoder(config, graph)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> MAEOutput:
        """Reconstructs all patches from the visible ones.

        Args:
            images: [B, channels, H, W].
            noise: [B, N]. The patches with the lowest noise are visible. Default: random.
        """
        size = self.encoder.patches.grid(images)
        if noise is None:
            noise = torch.rand(len(images), size[0] * size[1], device=images.device)
        seen = visible_patches(noise, self.config.mask_ratio)
        return MAEOutput(self.decoder(self.encoder(images, node_mask=with_class(seen)).last, seen, size), seen)

    def loss(self, images: Tensor, noise: Tensor | None = None) -> Tensor:
        """Returns the mean squared error of the pixels of the masked patches."""
        painted = self(images, noise)
        return pixel_loss(painted, patchify(images, self.config.patch), normalize=self.config.normalize)


class PixelDecoder(nn.Module):
    """Layers over all patches that map an encoder's output to pixels. Masked patches enter as a learned mask token."""

    def __init__(self, config: MAEConfig, graph: Topology | Graph | None = None) -> None:
        super().__init__()
        decoder = config.decoder
        grid = config.grid
        self.to_dim = Linear(config.dim, decoder.dim)
        self.mask_token = nn.Parameter(torch.randn(decoder.dim) * 0.02)
        self.positions = GridPositions(grid, decoder.dim, extra=1, sinusoidal=True)
        self.layers = PatchLayers(decoder, graph)
        self.norm = nn.LayerNorm(decoder.dim, eps=decoder.eps)
        self.to_pixels = Linear(decoder.dim, config.pixels)

    def forward(self, latent: Tensor, seen: Tensor, size: Size, *, stretch: bool = False) -> Tensor:
        """latent [B, 1 + N, dim] -> pixels [B, N, pixels of a patch * C].

        Args:
            latent: output of the encoder. Rows of masked patches are ignored.
            seen: bool [B, N], the visible patches.
            size: the grid of the patches.
            stretch: whether positions are interpolated to images of another size.
        """
        x = torch.where(with_class(seen)[..., None], self.to_dim(latent), self.mask_token)
        x, _ = self.layers(x + self.positions(size, stretch=stretch))
        return self.to_pixels(self.norm(x))[:, 1:]


def visible_patches(noise: Tensor, mask_ratio: float) -> Tensor:
    """Returns the visible patches, bool [B, N]. The fraction `mask_ratio` with the highest noise [B, N] is masked."""
    require_eager("the patches that are seen decide the graph")
    seen = int(noise.shape[1] * (1 - mask_ratio))
    return noise.argsort(1).argsort(1) < seen


def with_class(patches: Tensor) -> Tensor:
    """Adds the class token, which is always visible: bool [B, N] -> [B, 1 + N]."""
    return F.pad(patches, (1, 0), value=True)


def pixel_loss(painted: MAEOutput, pixels: Tensor, *, normalize: bool = False) -> Tensor:
    """Mean squared error to `pixels` [B, N, pixels of a patch * C] over the masked patches.

    With `normalize`, the target pixels are standardized by the mean and the standard deviation of their patch (He et
    al. 2022, section 3).
    """
    if normalize:
        mean = pixels.mean(-1, keepdim=True)
        variance = pixels.var(-1, keepdim=True)
        pixels = (pixels - mean) / (variance + 1e-6).sqrt()
    error = (painted.pixels - pixels).square().mean(-1)
    return error[~painted.seen].mean()
