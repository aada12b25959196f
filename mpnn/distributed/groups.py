"""The processes that share a graph, however the caller names them, and what travels between them: rows, states of
recurrences in the order of ranks, and sums."""

import math
from collections.abc import Callable, Iterable
from typing import Any, cast

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
    """One `all_to_all_single` along dimension 0, without gradient."""
    trip = _Trip(arriving, leaving, group)
    return trip.end(trip.begin(x.detach()))


class _Trip:
    """Rows on their way between processes: this many arrive from each, and leave for each. Numbers travel as bytes,
    which every transport takes."""

    def __init__(self, arriving: list[int], leaving: list[int], group: dist.ProcessGroup) -> None:
        self.arriving = arriving
        self.leaving = leaving
        self.group = group
        self.back: tuple[Tensor, _Trip] | None = None

    def begin(self, x: Tensor) -> Tensor:
        """Begins the all-to-all of x. The result holds what arrives when `end` has waited for it."""
        plain = x.reshape(len(x), math.prod(x.shape[1:])).contiguous().view(torch.uint8)
        plain = plain.cuda() if dist.get_backend(self.group) == "nccl" and not x.is_cuda else plain
        out = plain.new_empty(sum(self.arriving), plain.shape[1])
        self._device = x.device
        sizes = (self.arriving, self.leaving)
        self._sent, self._work = plain, dist.all_to_all_single(out, plain, *sizes, group=self.group, async_op=True)
        return out.view(x.dtype).view(len(out), *x.shape[1:])

    def end(self, out: Tensor) -> Tensor:
        self._work.wait()
        del self._sent, self._work
        return out.to(self._device)


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """x of every process, of one shape and dtype, [ranks, *x.shape], without gradient. It travels as bytes."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    mine = x.detach().contiguous().flatten().view(torch.uint8).to(device)
    gathered = mine.new_empty(dist.get_world_size(group), len(mine))
    dist.all_gather(list(gathered), mine, group)
    return gathered.to(x.device).view(x.dtype).view(len(gathered), *x.shape)


def ask(numbers: Tensor, sizes: list[int], group: dist.ProcessGroup) -> tuple[Tensor, list[int]]:
    """Sends each process this many of the numbers, one process after the other. Returns those that others send to this
    one, and how many each sends."""
    arriving = all_gather(torch.tensor(sizes), group)[:, dist.get_rank(group)].tolist()
    return all_to_all(numbers, arriving, sizes, group), arriving


def depart(
    rows: Tensor, arriving: list[int], leaving: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, Callable[[], Tensor]]:
    """Begins one all-to-all. Returns a tensor like the rows that arrive, and a function that waits for them. Gradients
    travel by the reverse one, to any order, while gradients of what was computed in between are."""
    trip = _Trip(arriving, leaving, group)
    flying: Tensor = _Depart.apply(rows, trip)
    return flying, lambda: cast(Tensor, _Arrive.apply(flying, trip))


class _Depart(torch.autograd.Function):
    """`_Trip.begin`, whose gradient ends the trip back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        return trip.begin(rows)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        (flying, trip), ctx.trip.back = ctx.trip.back, None
        return _Arrive.apply(flying, trip), None


class _Arrive(torch.autograd.Function):
    """`_Trip.end`, whose gradient begins the trip back. What flies has another shape than a gradient must have, so the
    trip holds it, and autograd passes on a stand-in."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        ctx.device = rows.device
        return trip.end(rows.view_as(rows))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        trip = ctx.trip
        back = _Trip(trip.leaving, trip.arriving, trip.group)
        trip.back = _Depart.apply(gradient, back), back
        return gradient.detach().to(ctx.device), None


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
