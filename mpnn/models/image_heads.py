"""What an encoder of images is trained for: their classes."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from mpnn.models.saving import Model
from mpnn.models.swin import Swin
from mpnn.models.vit import ViT


class ImageClassifier(Model):
    """The class of each image, linear in what the encoder makes of it as a whole: `ImageClassifier(ViT(config), 10)`.

    A ViT gives its class token (Dosovitskiy et al. 2021, eq. 4), a Swin the mean of its patches (Liu et al. 2021).
    """

    def __init__(self, encoder: ViT | Swin, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.to_logits = nn.Linear(encoder.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [B, classes] of images [B, channels, H, W]."""
        return self.to_logits(self.encoder(images).pooled)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats; targets int64 [B]."""
        return F.cross_entropy(self(images), targets)
