"""Fashion-MNIST: IDX files by hand, damaged ones, and the real images."""

import gzip
import struct

import pytest
import torch
from fashion_mnist import fashion_mnist, read_idx
from real_data import real

from mpnn.data.errors import DamagedFile

CONTENT = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 1, 3) + bytes(range(6))


def test_idx_by_hand(tmp_path):
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(CONTENT, mtime=0))
    images = read_idx(path, (2, 1, 3))
    assert images.tolist() == [[[0, 1, 2]], [[3, 4, 5]]]
    assert images.dtype == torch.uint8


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (CONTENT, "is not a gzip file"),
        (gzip.compress(CONTENT, mtime=0)[:20], "is not a gzip file"),
        (gzip.compress(CONTENT[:-1], mtime=0), "does not hold bytes of shape"),
        (gzip.compress(CONTENT + b"\0", mtime=0), "does not hold bytes of shape"),
        (gzip.compress(b"\0\0\x0d" + CONTENT[3:], mtime=0), "does not hold bytes of shape"),
        (gzip.compress(b"", mtime=0), "does not hold bytes of shape"),
    ],
    ids=["no gzip", "cut", "too few", "too many", "other shape", "empty"],
)
def test_damaged_files_are_named(tmp_path, content, complaint):
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=complaint) as caught:
        read_idx(path, (2, 1, 3))
    assert str(path) in str(caught.value)


def test_other_splits_are_refused():
    with pytest.raises(ValueError, match="expected a split of train, test, got 'val'"):
        fashion_mnist("val")


def test_fashion_mnist_is_that_of_the_paper():
    images, kinds = real(fashion_mnist, "test")
    assert images.shape == (10_000, 28, 28)
    assert kinds.bincount().tolist() == [1000] * 10
    trousers, bags = (images[kinds == kind].float().mean(0) for kind in (1, 8))
    assert bags[14].mean() > trousers[14].mean()  # a bag is wider than trousers
