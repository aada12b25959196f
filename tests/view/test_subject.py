"""What attends in the Attention pane, as the page stores it."""

from __future__ import annotations

import io
from base64 import b64decode

import numpy as np
import pytest

from mpnn.view.subject import Nodes, Patches, Tokens, data_url

Image = pytest.importorskip("PIL.Image")


def pixels_of(url: str) -> np.ndarray:
    """What another library reads from the image."""
    assert url.startswith("data:image/png;base64,")
    return np.asarray(Image.open(io.BytesIO(b64decode(url.split(",")[1]))).convert("RGB"))


def test_a_png_holds_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (pixels_of(data_url(pixels)) == pixels).all()


def test_pixels_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"pixels must be uint8 \[height, width, 3\]; got float64 \[2, 2\]"):
        data_url(np.zeros((2, 2)))  # type: ignore[arg-type]


def test_sizes_and_starts() -> None:
    pixels = np.zeros((4, 6, 3), np.uint8)
    assert (Tokens("abc").size, Tokens("abc").start) == (3, 1)
    assert Tokens("x" * 1000).start == 30
    patches = Patches(pixels, 2, 3, ["[CLS]"])
    assert (patches.size, patches.start) == (7, 0)
    assert Patches(pixels, 2, 3).start == 4  # in the middle


def test_pictures_of_nodes_are_one_image() -> None:
    pictures = np.arange(5, dtype=np.uint8)[:, None, None, None] * np.ones((1, 2, 2, 3), np.uint8)
    sprite = Nodes([7, 8, 9, 10, 11], [0] * 5, [0] * 5, 0, pictures).data()["sprite"]
    assert (sprite["rows"], sprite["columns"]) == (3, 2)
    sheet = pixels_of(sprite["image"])
    assert sheet.shape == (6, 4, 3)
    assert sheet[::2, ::2, 0].tolist() == [[0, 1], [2, 3], [4, 0]]
