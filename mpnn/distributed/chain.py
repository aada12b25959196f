"""Recurrences over several processes: each has a block of the nodes, in the order of ranks, and continues from the
state after the block before. Gradients of states travel the other way."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def run_in_rank_order(
    run: Callable[[Tensor], tuple[Tensor, Tensor]], first: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """The output of `run(state) -> (output, state after it)` on this process.

    Args:
        first: the state before all nodes, which gives shape and dtype; it needs a gradient if any input of `run` does.
    """
    out, last = run(_FromPrevious.apply(first, group))
    return _ToNext.apply(out, last.contiguous(), group)


class _FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, first: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        state = first.clone()
        if (rank := dist.get_rank(group)) > 0:
            dist.recv(state, group=group, group_src=rank - 1)
        return state

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if (rank := dist.get_rank(ctx.group)) > 0:
            dist.send(gradient.contiguous(), group=ctx.group, group_dst=rank - 1)
            return torch.zeros_like(gradient), None
        return gradient, None


class _ToNext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, last: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.next = dist.get_rank(group) + 1
        ctx.save_for_backward(last)
        if ctx.next < dist.get_world_size(group):
            dist.send(last, group=group, group_dst=ctx.next)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_last = torch.zeros_like(ctx.saved_tensors[0])
        if ctx.next < dist.get_world_size(ctx.group):
            dist.recv(of_last, group=ctx.group, group_src=ctx.next)
        return gradient, of_last, None
