"""Sums over the processes that share a graph."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from mpnn.distributed.groups import Mesh, group_of


def node_mean(losses: Tensor, mesh: Mesh = None, *, averaged: bool = True) -> Tensor:
    """Returns this process's loss, such that its mean over processes is the mean over the nodes of all processes.

        L = world / n * sum_i losses_i          over the own losses; n counts those of all processes

    DDP and FSDP2 average gradients over processes. The mean of local means would then weight a node of a small part
    more than one of a large part; with this loss, the averaged gradients are those of one process that has all nodes.
    The mean of L over the processes is the mean over all nodes.

    Args:
        losses: the losses of this process's nodes, of any shape; they may be empty on some processes.
        mesh: the processes, as in `partition`.
        averaged: whether gradients will be averaged over processes, as DDP and FSDP2 do. False: they will be added up,
            as `sum_gradients` does; then world is 1 in the formula, and the sum of L over the processes is the mean.

    Raises:
        ValueError: if no process has a loss.
    """
    group = group_of(mesh)
    count = torch.tensor(losses.numel(), device=losses.device)
    dist.all_reduce(count, group=group)
    if not count:
        raise ValueError("node_mean needs at least one loss on one process; all got none")
    return losses.sum() * ((dist.get_world_size(group) if averaged else 1) / int(count))


def sum_gradients(parameters: Iterable[torch.nn.Parameter], mesh: Mesh = None) -> None:
    """Adds up the gradients of all processes, in place. For models that neither DDP nor FSDP2 wraps. A parameter
    without a gradient counts as zero, so that all processes take part."""
    group = group_of(mesh)
    for parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
