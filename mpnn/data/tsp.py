"""Travelling salesman problem: the published test instances, and the weights of a model that solves them."""

import numpy as np
import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.locate import locate

_FILE = "attention_model_tsp20.safetensors"


def cities(count: int = 10_000, size: int = 20, seed: int = 1234) -> Tensor:
    """Instances of `size` points in the unit square, float32 [count, size, 2]: by default those of Kool et al. 2019.

    A smaller `count` gives the first `count` of the same instances.
    """
    points = np.random.RandomState(seed).uniform(size=(count, size, 2))
    return torch.from_numpy(points.astype(np.float32))


def tsp_weights() -> dict[str, Tensor]:
    """The attention model of Kool et al. 2019, trained by its authors on 20 cities: tensors by name, for
    `mpnn.models.TSP.from_published`.

    Raises:
        DatasetNotFound: if the file is not on this machine; the message explains how to get it.
        DamagedFile: if the file is truncated or not a safetensors file.
        ImportError: if safetensors is not installed.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(
            "the weights are stored with safetensors, which is not installed; run: pip install safetensors"
        ) from error
    path = locate("tsp", _FILE) / _FILE
    try:
        weights: dict[str, Tensor] = load_file(path)
    except Exception as error:  # safetensors raises its own exception types
        raise DamagedFile(f"{path} does not contain weights ({error}); delete it and fetch it again") from None
    return weights
