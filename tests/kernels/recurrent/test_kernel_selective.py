"""mpnn.kernels.recurrent.selective: dtypes, nothing to scan, and factors of any strides."""

import pytest
import torch

from mpnn.kernels.cpu import library
from mpnn.kernels.recurrent.selective import selective_scan

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")


def inputs(nodes: int, channels: int, states: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    x, dt = torch.randn(2, nodes, channels), torch.rand(2, nodes, channels)
    given = [x, dt, -torch.rand(channels, states), torch.randn(2, nodes, states), torch.randn(2, nodes, states)]
    return [y.to(dtype) for y in given]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(5, 8, 4), (0, 8, 4), (5, 0, 4), (5, 8, 0)], ids=str)
def test_results_of_16_bits_are_float32(grad: bool, dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    given = [x.requires_grad_(grad) for x in inputs(*sizes, dtype)]
    y, last = selective_scan(*given)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert y.dtype == last.dtype == wide
    nodes, channels, states = sizes
    assert y.shape == (2, nodes, channels)
    assert last.shape == (2, channels, states)
    if not (nodes and states):
        assert not y.any()
        assert not last.any()
    state = torch.randn(2, channels, states).to(dtype)
    _, last = selective_scan(*given, state)
    assert last.dtype == wide
    if not nodes:
        assert last.equal(state.to(wide))


def test_factors_of_any_strides() -> None:
    x, dt, *rest = inputs(9, 16, 4)
    z = torch.randn(2, 9, 16, dtype=torch.float64)
    expected = selective_scan(x, dt, *rest, z=z)[0]  # type: ignore[arg-type,misc]
    for strided in (
        [y.mT.contiguous().mT for y in (x, dt, z)],
        [torch.stack([y, y], -1).flatten(-2)[..., ::2] for y in (x, dt, z)],
        [torch.cat([y, y], -1)[..., :16] for y in (x, dt, z)],
    ):
        found = selective_scan(*strided[:2], *rest, z=strided[2])[0]  # type: ignore[arg-type,misc]
        torch.testing.assert_close(found, expected)
