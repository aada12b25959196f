"""Fashion-MNIST: small pictures of clothes, in the IDX files of MNIST."""

import gzip
import zlib
from io import BytesIO
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mpnn.data.errors import DamagedFile
from mpnn.data.locate import locate
from mpnn.data.read import read_bytes

_PARTS = {"train": ("train", 60_000), "test": ("t10k", 10_000)}


def fashion_mnist(split: str = "train") -> tuple[Tensor, Tensor]:
    """Images of clothes of ten kinds (Xiao et al. 2017).

    Args:
        split: "train", 60,000 images, or "test", 10,000.

    Returns:
        Images, uint8 `[P, 28, 28]`, 0 for the background, and kinds, int64 `[P]`.

    Raises:
        ValueError: if there is no such split.
        DatasetNotFound, DamagedFile: see `mpnn.data.errors`.
    """
    if split not in _PARTS:
        raise ValueError(f"expected a split of {', '.join(_PARTS)}, got {split!r}")
    part, count = _PARTS[split]
    names = (f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz")
    folder = locate("fashion-mnist", *names)
    images, kinds = (
        read_idx(folder / name, shape) for name, shape in zip(names, ((count, 28, 28), (count,)), strict=True)
    )
    return images, kinds.long()


def read_idx(path: Path, shape: tuple[int, ...]) -> Tensor:
    """Reads a gzipped IDX file of bytes: two zeros, 8 for bytes, the number of dimensions, the sizes as big-endian
    32-bit integers, then the bytes. Returns uint8 `[*shape]`.

    Raises:
        DatasetNotFound: if there is no such file.
        DamagedFile: if it is not such a file, or has another shape.
    """
    expected = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes()
    length = len(expected) + prod(shape)
    packed = BytesIO(read_bytes(path))
    try:
        with gzip.open(packed) as file:
            content = file.read(length + 1)  # no more: a small file can hold terabytes of zeros
    except (OSError, EOFError, zlib.error) as error:
        raise DamagedFile(f"{path} is not a gzip file ({error}); delete it and fetch it again") from error
    if len(content) != length or not content.startswith(expected):
        raise DamagedFile(f"{path} does not hold bytes of shape {list(shape)}; delete it and fetch it again")
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=len(expected)).reshape(shape).copy())
