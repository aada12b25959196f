"""The processes that share a graph, however the caller names them."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

Mesh = DeviceMesh | dist.ProcessGroup | None
"""A DeviceMesh of one dimension, a process group, or None for all processes."""


def group_of(mesh: Mesh) -> dist.ProcessGroup:
    """The process group of a mesh.

    Raises:
        RuntimeError: if no process group was initialized.
        ValueError: if the mesh has more than one dimension.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group() in a program that torchrun starts, or pass "
            "the number of ranks to partition() to plan without processes"
        )
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            names = mesh.mesh_dim_names or ()
            raise ValueError(f"a graph is divided over one dimension of a mesh; got {mesh.ndim}: take one of {names}")
        return mesh.get_group()
    if mesh is None:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if not isinstance(mesh, dist.ProcessGroup):
        raise TypeError(f"mesh must be a DeviceMesh, a ProcessGroup or None; got {mesh!r}")
    return mesh


def all_to_all(x: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup) -> Tensor:
    """One `all_to_all_single` along dimension 0. Numbers travel as bytes, which every transport takes."""
    plain = x.reshape(len(x), math.prod(x.shape[1:])).contiguous().view(torch.uint8)
    plain = plain.cuda() if dist.get_backend(group) == "nccl" and not x.is_cuda else plain
    out = plain.new_empty(sum(arriving), plain.shape[1])
    dist.all_to_all_single(out, plain, arriving, leaving, group=group)
    return out.to(x.device).view(x.dtype).view(sum(arriving), *x.shape[1:])


def every(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of every process, of one shape and dtype, [ranks, *x.shape], without gradient. It travels as bytes."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = x.detach().contiguous().flatten().view(torch.uint8).to(device)
    found = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(found), mine, group)
    return found.to(x.device).view(x.dtype).view(len(found), *x.shape)


def ask(numbers: Tensor, sizes: list[int], group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """Sends each process so many of the numbers, one process after the other. Returns those that others send to this
    one, and how many each sends."""
    arriving = every(torch.tensor(sizes), group)[:, dist.get_rank(group)].tolist()
    return all_to_all(numbers, arriving, sizes, group), arriving


def exchanged(rows: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup) -> Tensor:
    """`all_to_all`, whose gradient travels back by the reverse one, to any order."""
    return _Exchange.apply(rows, arriving, leaving, group)


class _Exchange(torch.autograd.Function):
    """One all-to-all. Its gradient is the reverse one, itself an exchange that can be differentiated."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = leaving, arriving, group
        return all_to_all(rows, arriving, leaving, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchanged(gradient, *ctx.back), None, None, None
