"""The processes that share a graph, however the caller names them."""

from __future__ import annotations

from typing import TypeAlias

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Mesh: TypeAlias = "DeviceMesh | dist.ProcessGroup | None"
"""A DeviceMesh of one dimension, a process group, or None for all processes."""


def group_of(mesh: Mesh) -> dist.ProcessGroup:
    """The process group of a mesh.

    Raises:
        RuntimeError: if no process group was initialised.
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
