"""A linear map of each edge plus terms of its two ends, as a differentiable function of tensors on CPU:

    z_ij = W e_ij + a_i + b_j          da_i = sum_j dz_ij          db_j = sum_i dz_ij

The edges are taken a block at a time, so that the rows gathered from the ends stay in the cache and those of the result
are written once. The sums are segment sums (`mpnn.kernels.row_reduce`), which differentiate again, as all else here.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpnn.kernels.cpu import library
from mpnn.kernels.memory import empty
from mpnn.kernels.once_differentiable import refuse_batches
from mpnn.kernels.row_reduce import RowReduce
from mpnn.kernels.rows import Rows

_BLOCK = 1 << 17  # numbers of a block of the result


class Ends(NamedTuple):
    """One end of each edge, int64 [E]; the edges of each node as rows; and the node of each edge as rows."""

    node: Tensor
    edges: Rows
    nodes: Rows

    @staticmethod
    def of(node: Tensor, ptr: Tensor, edge_id: Tensor) -> "Ends":
        """`edge_id`: the edges sorted by this end, of which node r has those from ptr[r] to ptr[r + 1]."""
        return Ends(node, Rows(ptr, edge_id.int()), Rows(torch.arange(len(node) + 1), node.int()))


def serves(*operands: Tensor) -> bool:
    """Whether these tensors and the modes that are on are the kernel's; otherwise torch computes the sum."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype == operands[0].dtype for x in operands)
        and operands[0].dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and library.why_missing() is None
    )


class EdgeSum(torch.autograd.Function):
    """`EdgeSum.apply(edge, weight, of_dst, of_src, dst, src)` -> z [B, E, H], for edge [B, E, D], weight [H, D], of_dst
    [B, N_dst, H] and of_src [B, N_src, H], float32 or float64; `dst` and `src` are the `Ends` of the edges."""

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, edge: Tensor, weight: Tensor, of_dst: Tensor, of_src: Tensor, dst: Ends, src: Ends
    ) -> Tensor:
        ctx.save_for_backward(edge, weight)
        ctx.dst, ctx.src = dst, src
        size = max(1, _BLOCK // max(1, len(weight)))
        out = empty(edge, *edge.shape[:-1], len(weight))
        blocks = list(zip(dst.node.split(size), src.node.split(size), strict=True))
        for entry, e, a, b in zip(out, edge, of_dst, of_src, strict=True):
            for z, rows, (i, j) in zip(entry.split(size), e.split(size), blocks, strict=True):
                torch.addmm(a.index_select(0, i).add_(b.index_select(0, j)), rows, weight.t(), out=z)
        return out

    @staticmethod
    def backward(ctx, dz: Tensor) -> Any:  # type: ignore[no-untyped-def]
        refuse_batches(dz)
        edge, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dz = dz.contiguous()
        d_edge = dz @ weight if needs[0] else None
        d_weight = dz.flatten(0, 1).mT @ edge.flatten(0, 1) if needs[1] else None
        ends = ((ctx.dst, needs[2]), (ctx.src, needs[3]))
        sums = [RowReduce.apply(dz, None, end.edges, end.nodes, "sum") if need else None for end, need in ends]
        return d_edge, d_weight, *sums, None, None
