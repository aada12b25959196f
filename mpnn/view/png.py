"""Pixels as the PNG image inside a page. Written here, so that a page needs no imaging library."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np
from numpy.typing import NDArray

_EIGHT_BITS, _RGB = 8, 2


def data_url(pixels: NDArray[np.uint8]) -> str:
    """The address `data:image/png;base64,...` of pixels, uint8 [height, width, 3].

    Raises:
        ValueError: if the array has another dtype or shape.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(f"pixels must be uint8 [height, width, 3]; got {pixels.dtype} {list(pixels.shape)}")
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, 3 * width)], 1)  # 0: no filter
    header = struct.pack(">IIBBBBB", width, height, _EIGHT_BITS, _RGB, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, content) for name, content in parts)
    return f"data:image/png;base64,{b64encode(png).decode('ascii')}"


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
