"""mpnn.kernels.dense.feature_dropout: which tensors it takes, and parts of any number."""

import pytest
import torch

from mpnn.graph import rng
from mpnn.kernels.cpu import library
from mpnn.kernels.dense import feature_dropout

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")


def test_which_tensors_it_takes() -> None:
    """Rows and columns have numbers of 32 bits."""
    one = torch.zeros(1)
    most = 2**31 - 1
    for shape in ((most,), (1, most), (most, 1), (0,), (3, 0)):
        assert feature_dropout.drops_features(one.expand(shape) if 0 not in shape else torch.zeros(shape))
    for shape in ((most + 1,), (1, most + 1), (most + 1, 1), (2, 2**30, 1)):
        assert not feature_dropout.drops_features(one.expand(shape))
    assert not feature_dropout.drops_features(torch.zeros(()))
    assert not feature_dropout.drops_features(torch.zeros(3, dtype=torch.bfloat16))
    assert not feature_dropout.drops_features(torch.nn.Parameter(one))


@pytest.mark.parametrize("shape", [(1, 7), (5, 7), (2, 3, 1), (4, 0), (9,)], ids=str)
@pytest.mark.parametrize("least", [1, 4, 1000])
def test_parts_draw_what_the_specification_draws(
    shape: tuple[int, ...], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_dropout, "_MIN_COMPONENTS", least)
    x, seed = torch.randn(shape, dtype=torch.float64), torch.tensor(5)
    rows = x.numel() // max(shape[-1], 1)
    kept = rng.keep(seed, torch.tensor(0), torch.arange(rows)[:, None], torch.arange(shape[-1]), 0.3).view(shape)
    keys = rng.keys(seed, torch.tensor([0]))
    found = feature_dropout.drop_features(x, keys, 0.3)
    torch.testing.assert_close(found, torch.where(kept, x / 0.7, torch.zeros_like(x)))
