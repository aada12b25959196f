"""The switch `mpnn.deterministic_batches` itself; `tests/laws/union.py` has what it promises."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mpnn import deterministic_batches
from mpnn.graph import batches
from mpnn.update.maps import Linear


class Other(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_blocks_nest_and_leave_nothing_behind() -> None:
    with deterministic_batches():
        with deterministic_batches(False):
            assert not batches.is_on()
        assert batches.is_on()
    assert not batches.is_on()
    assert torch._C._len_torch_function_stack() == 0


def test_it_does_not_end_another_mode() -> None:
    with deterministic_batches():
        with Other(), pytest.raises(RuntimeError, match="leave the other modes"):
            deterministic_batches(False)
        assert batches.is_on()
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("width", [1, 2, 3, 8, 9, 64])
@pytest.mark.parametrize("kind", [nn.Linear, Linear], ids=["torch", "mpnn"])
def test_rows_of_a_map_keep_their_bits(kind: type[nn.Linear], width: int) -> None:
    """With any number of rows, and wherever the rows lie in memory."""
    for depth in (1, 5, 30, 64, 66, 130, 768):
        layer, x = kind(depth, width), torch.randn(100, depth)
        with torch.no_grad(), deterministic_batches():
            whole = layer(x)
            for first, last in ((0, 1), (0, 4), (3, 6), (5, 18), (11, 24), (0, 40), (20, 99)):
                assert layer(x[first:last]).equal(whole[first:last]), (depth, first, last)
