"""The switch `mpnn.deterministic_batches` itself; `tests/laws/union.py` has what it promises."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from mpnn import deterministic_batches
from mpnn.graph import batches


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
