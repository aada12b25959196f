"""mpnn.kernels.memory: where tensors are allocated, and what kernels read."""

import pytest
import torch

from mpnn.kernels import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_large_tensors_begin_at_cache_lines(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    like = torch.zeros(1, dtype=torch.float32)
    monkeypatch.setattr(memory, "LARGE", 24 * dtype.itemsize)
    for shape, is_large in (((4, 6), True), ((2, 3, 4), True), ((23,), False), ((0, 5), False)):
        allocated: list[int] = []
        with monkeypatch.context() as patch:
            patch.setattr(memory.np, "empty", lambda *given, seen=allocated: seen.append(1) or _numpy_empty(*given))
            x = memory.empty(like, *shape, dtype=dtype)
        assert bool(allocated) == is_large
        assert x.shape == shape
        assert x.dtype == dtype
        assert not is_large or x.data_ptr() % 64 == 0
        x.fill_(3)
    assert memory.empty(like, 5, 5).dtype == torch.float32
    assert not memory.zeros(like, 5, 5).any()


_numpy_empty = memory.np.empty


def test_tensors_that_kernels_read() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert memory.plain(x) is x
    for other in (x.T, x.clone().requires_grad_(), torch._neg_view(x), x[:, ::2]):
        plain = memory.plain(other)
        assert plain.equal(other.detach())
        assert plain.is_contiguous()
        assert not plain.requires_grad
        assert not plain.is_neg()
    none = torch._efficientzerotensor((2, 3), dtype=torch.float64)
    plain = memory.plain(none)
    assert not plain._is_zerotensor()
    assert plain.equal(torch.zeros(2, 3, dtype=torch.float64))
