"""mpnn.kernels.dense.varlen: what torch's flash kernel, which runs on a GPU, is called with."""

from types import SimpleNamespace
from typing import Any

import flash
import pytest
import torch
from torch import Tensor

from mpnn.kernels.dense import varlen


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop over groups in place of the kernel, which needs contiguous rows."""

    def forward(
        query: Tensor, key: Tensor, value: Tensor, dst_starts: Any, src_starts: Any, most_dst: int, most_src: int,
        dropout: float, causal: bool, return_mask: bool, *, scale: float,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert all(x.stride(-1) == 1 for x in (query, key, value))
        assert dropout == 0
        assert not return_mask
        if dst_starts is not None:
            return flash.packed(query, key, value, dst_starts, src_starts, most_dst, most_src, scale, causal), None
        assert (most_dst, most_src) == (query.shape[1], key.shape[1])
        assert src_starts is None
        assert not causal
        shared = query.shape[2] // key.shape[2]
        logits = scale * torch.einsum("bihd,bjhd->bhij", query, key.repeat_interleave(shared, 2))
        return torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), value.repeat_interleave(shared, 2)), None

    aten = SimpleNamespace(_flash_attention_forward=forward)
    monkeypatch.setattr(varlen, "torch", SimpleNamespace(ops=SimpleNamespace(aten=aten)))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_groups(causal: bool, strided: bool) -> None:
    starts = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    features = [torch.randn(9, heads, 8) for heads in (4, 2, 2)]
    expected = flash.packed(*features, starts, starts, 5, 5, 0.3, causal)  # type: ignore[misc]
    if strided:
        features = [x.mT.contiguous().mT for x in features]
    default = () if not causal else (True,)
    found = varlen.packed(*features, starts, starts, 5, 5, 0.3, *default)  # type: ignore[misc]
    torch.testing.assert_close(found, expected)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("strided", [False, True])
def test_all_pairs(strided: bool) -> None:
    query, key, value = (torch.randn(2, *shape, 8) for shape in ((5, 4), (7, 2), (7, 2)))
    q, k, v = (x.transpose(1, 2) for x in (query, *(x.repeat_interleave(2, 2) for x in (key, value))))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2)
    if strided:
        query, key, value = (x.mT.contiguous().mT for x in (query, key, value))
    torch.testing.assert_close(varlen.whole(query, key, value, 0.3), expected)
