"""mpnn.kernels.recurrent.prefixes: running variances around a large common part."""

import torch

from mpnn.kernels.recurrent.prefixes import prefix_variances


def test_a_common_part_does_not_cancel() -> None:
    """The first numbers are the largest of float64 that hold the others to 2^-20."""
    x = torch.randint(0, 64, (50, 3)).double() / 64
    expected = torch.stack([x[: k + 1].var(0, correction=0) for k in range(50)])
    torch.testing.assert_close(prefix_variances(x), expected)
    assert prefix_variances(x + 2**40).equal(prefix_variances(x))
