"""Handwritten digits from scikit-learn: points for a nearest-neighbor graph."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LABELED_PER_CLASS = 20
_VALIDATION = 400


@dataclass(frozen=True, eq=False)
class PointClassification:
    """Points for classification, without a graph.

    Args:
        x: features, float32 `[N, F]`.
        y: classes, int64 `[N]`.
        train_mask, val_mask, test_mask: bool `[N]`, disjoint, together all points.
    """

    x: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor

    @property
    def num_classes(self) -> int:
        return int(self.y.max()) + 1


def digits() -> PointClassification:
    """Loads 1,797 images of 8 x 8 pixels from 0 to 1, split 200 / 400 / 1,197.

    The split is fixed. As in Planetoid, only 20 images per class are labeled for training, so that messages from
    neighbors improve the accuracy.

    Raises:
        ImportError: if scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "the digits come with scikit-learn, which is not installed; run: pip install scikit-learn"
        ) from error
    images, labels = load_digits(return_X_y=True)
    node = np.arange(len(labels))
    order = np.random.RandomState(0).permutation(len(labels))
    train = np.concatenate([order[labels[order] == c][:_LABELED_PER_CLASS] for c in range(10)])
    rest = order[~np.isin(order, train)]
    return PointClassification(
        # The maximum is 16: each pixel counts the set bits in a block of 4 x 4.
        x=torch.from_numpy(images.astype(np.float32) / 16),
        y=torch.from_numpy(labels.astype(np.int64)),
        train_mask=torch.from_numpy(np.isin(node, train)),
        val_mask=torch.from_numpy(np.isin(node, rest[:_VALIDATION])),
        test_mask=torch.from_numpy(np.isin(node, rest[_VALIDATION:])),
    )
