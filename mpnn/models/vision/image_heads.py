"""Image classification head."""

from torch import Tensor
from torch.nn import functional as F

from mpnn.models.saving import Model
from mpnn.models.vision.swin import Swin
from mpnn.models.vision.vit import ViT
from mpnn.update.maps import Linear


class ImageClassifier(Model):
    """A linear classifier of an encoder's pooled output, for example `ImageClassifier(ViT(config), 10)`.

    The pooled output is the class token of a ViT (Dosovitskiy et al. 2021, eq. 4) or the mean over the patches of a
    Swin (Liu et al. 2021).

    Args:
        encoder: the image encoder.
        classes: number of classes, the width of the logits.
    """

    def __init__(self, encoder: ViT | Swin, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.to_logits = Linear(encoder.width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [B, channels, H, W] to logits [B, classes]."""
        return self.to_logits(self.encoder(images).pooled)

    def loss(self, images: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean cross-entropy in nats. targets: int64 [B]."""
        return F.cross_entropy(self(images), targets)
