"""The digits of scikit-learn, split as every figure measured on them supposes."""

import sys

import pytest
import torch

from mpnn.data.digits import digits


def test_digits():
    pytest.importorskip("sklearn")
    data = digits()
    assert data.x.shape == (1797, 64)
    assert data.x.dtype == torch.float32
    assert (data.x.min(), data.x.max()) == (0, 1)
    assert data.y.dtype == torch.int64
    assert data.num_classes == 10
    assert (data.train_mask.int() + data.val_mask.int() + data.test_mask.int() == 1).all()
    assert data.y[data.train_mask].bincount().tolist() == [20] * 10
    assert (data.val_mask.sum(), data.test_mask.sum()) == (400, 1197)
    # Every figure measured on the digits depends on the split: it must not drift between versions.
    assert data.train_mask.nonzero().flatten()[:8].tolist() == [6, 14, 18, 34, 37, 47, 53, 54]


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install scikit-learn"):
        digits()
