"""mpnn.kernels.dropout_threshold: the share of signed words below the threshold is the probability."""

import pytest

from mpnn.kernels.dropout_threshold import threshold

LEAST = -(2**31)


@pytest.mark.parametrize(
    ("p", "word"),
    [
        (0.0, LEAST),
        (2**-32, LEAST + 1),
        (0.25, LEAST // 2),
        (0.5, 0),
        (0.75, 2**30),
        (1 - 2**-32, 2**31 - 1),
        (1 - 2**-40, 2**31 - 1),  # a word of 32 bits: one in 2^32 is kept
        (1.0, 2**31 - 1),
    ],
)
def test_thresholds(p: float, word: int) -> None:
    assert threshold(p) == word
