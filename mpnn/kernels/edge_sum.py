"""A linear map of each edge plus terms of its two ends, and functions of the result, as differentiable functions of
tensors on CPU:

    z_ij = W e_ij + a_i + b_j          da_i = sum_j dz_ij          db_j = sum_i dz_ij

The edges are taken a block at a time, so that the rows gathered from the ends stay in the cache and those of the result
are written once. `RowMap` does the same for functions of rows without ends.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.kernels.memory import empty
from mpnn.kernels.once_differentiable import refuse_batches

BLOCK = 1 << 18  # numbers of a block: a megabyte


def serves(*operands: Tensor) -> bool:
    """Whether these tensors and the modes that are on are the kernel's; otherwise torch computes the sum."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.dtype == operands[0].dtype for x in operands)
        and operands[0].dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
    )


Step = tuple[Callable[..., Tensor], int]
"""A function `(z [rows, width], *parameters) -> [rows, width]` of each row by itself; the number of its parameters."""


class EdgeMap(torch.autograd.Function):
    """`EdgeMap.apply(steps, residual, dst, src, edge, weight, of_dst, of_src, *parameters)` -> new [B, E, F], and sums
    [B, N_dst, F] of them at each destination: `z` after the steps, plus the edges if `residual`.

    edge [B, E, D], weight [H, D], of_dst [B, N_dst, H] and of_src [B, N_src, H], float32 or float64; dst and src, int64
    [E], are the ends of the edges.

    Both passes take a block at a time through everything, so that nothing between leaves the cache; the backward pass
    computes it again.
    """

    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, steps: Sequence[Step], residual: bool, dst: Tensor, src: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        edge, weight, of_dst, of_src, *parameters = tensors
        ctx.steps, ctx.residual, ctx.ends = steps, residual, (dst, src)
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        width = edge.shape[-1] if residual else after(steps, edge.new_empty(0, len(weight)), parameters).shape[-1]
        out, sums = empty(edge, *edge.shape[:-1], width), edge.new_zeros(*of_dst.shape[:-1], width)
        for (e, new), (a, b, total), ends in _blocks(dst, src, len(weight), (edge, out), (of_dst, of_src, sums)):
            f = after(steps, _sums(weight, ends, e, a, b), parameters)
            if residual:
                torch.add(e, f, out=new)
            else:
                new.copy_(f)
            total.index_add_(0, ends[0], new)
        return out, sums

    @staticmethod
    def backward(ctx, d_new: Tensor | None, d_sums: Tensor | None) -> Any:  # type: ignore[no-untyped-def]
        refuse_batches(d_new, d_sums)
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[4:]
        upstream = [d for d in (d_new, d_sums) if d is not None]
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            wanted = [x for x, need in zip(tensors, needs, strict=True) if need]
            outputs = _by_torch(ctx.steps, ctx.residual, *ctx.ends, *tensors)
            outputs = [y for y, d in zip(outputs, (d_new, d_sums), strict=True) if d is not None]
            results = iter(torch.autograd.grad(outputs, wanted, upstream, create_graph=True))
            return None, None, None, None, *(next(results) if need else None for need in needs)
        edge, weight, of_dst, of_src, *parameters = (x.detach() for x in tensors)
        parameters = [p.requires_grad_(need) for p, need in zip(parameters, needs[4:], strict=True)]
        d_edge = empty(edge, *edge.shape) if needs[0] else None
        d_weight, totals = torch.zeros_like(weight), [torch.zeros_like(p) for p in parameters if p.requires_grad]
        d_dst, d_src = torch.zeros_like(of_dst), torch.zeros_like(of_src)
        of_edges = [edge, *(x for x in (d_edge, d_new) if x is not None)]
        of_nodes = [of_dst, of_src, d_dst, d_src, *(() if d_sums is None else (d_sums,))]
        dst, src = ctx.ends
        for (e, *more), (a, b, of_a, of_b, *d_total), ends in _blocks(dst, src, len(weight), of_edges, of_nodes):
            z = _sums(weight, ends, e, a, b).requires_grad_()
            with torch.enable_grad():
                f = after(ctx.steps, z, parameters)
            d_f = d_total[0].index_select(0, ends[0]) if d_total else torch.zeros_like(f)
            d_f = d_f if d_new is None else d_f.add_(more[-1])
            of_z, *gradients = torch.autograd.grad(f, [z, *(p for p in parameters if p.requires_grad)], d_f)
            for total, gradient in zip(totals, gradients, strict=True):
                total.add_(gradient)
            of_a.index_add_(0, ends[0], of_z)
            of_b.index_add_(0, ends[1], of_z)
            d_weight.addmm_(of_z.t(), e)
            if d_edge is not None:
                torch.addmm(d_f, of_z, weight, out=more[0]) if ctx.residual else torch.mm(of_z, weight, out=more[0])
        sums = iter(totals)
        of_parameters = (next(sums) if need else None for need in needs[4:])
        return None, None, None, None, d_edge, d_weight, d_dst, d_src, *of_parameters


class RowMap(torch.autograd.Function):
    """`RowMap.apply(steps, x, *parameters)` -> `x` [R, D] after the steps, [R, F], float32 or float64.

    Both passes take a block of rows at a time through all steps, so that nothing between is kept or leaves the cache;
    the backward pass computes it again.
    """

    @staticmethod
    def forward(ctx, steps: Sequence[Step], x: Tensor, *parameters: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.steps = steps
        ctx.save_for_backward(x, *parameters)
        width = after(steps, x[:0], parameters).shape[-1]
        out = empty(x, len(x), width)
        for rows, new in _rows(width, x, out):
            new.copy_(after(steps, rows, parameters))
        return out

    @staticmethod
    def backward(ctx, d_out: Tensor) -> Any:  # type: ignore[no-untyped-def]
        refuse_batches(d_out)
        tensors, needs = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # the gradients are to be differentiated
            wanted = [x for x, need in zip(tensors, needs, strict=True) if need]
            out = after(ctx.steps, tensors[0], tensors[1:])
            results = iter(torch.autograd.grad(out, wanted, d_out, create_graph=True))
            return None, *(next(results) if need else None for need in needs)
        x, *parameters = (x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True))
        wanted = [p for p in parameters if p.requires_grad]
        d_x, totals = empty(x, *x.shape) if needs[0] else None, [torch.zeros_like(p) for p in wanted]
        for rows, d_new, *d_rows in _rows(d_out.shape[-1], x.detach(), d_out, *(() if d_x is None else (d_x,))):
            rows = rows.requires_grad_(needs[0])
            with torch.enable_grad():
                new = after(ctx.steps, rows, parameters)
            gradients = list(torch.autograd.grad(new, [*([rows] if d_rows else []), *wanted], d_new))
            if d_rows:
                d_rows[0].copy_(gradients.pop(0))
            for total, gradient in zip(totals, gradients, strict=True):
                total.add_(gradient)
        sums = iter(totals)
        return None, d_x, *(next(sums) if need else None for need in needs[1:])


def _rows(width: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The rows of tensors [R, ...] in blocks, for work of this width."""
    size = max(1, BLOCK // max(1, width))
    return zip(*(x.split(size) for x in tensors), strict=True)


def _by_torch(steps: Sequence[Step], residual: bool, dst: Tensor, src: Tensor, *tensors: Tensor) -> list[Tensor]:
    """`EdgeMap` step by step, which autograd differentiates any number of times."""
    edge, weight, of_dst, of_src, *parameters = tensors
    z = edge @ weight.t() + of_dst.index_select(-2, dst) + of_src.index_select(-2, src)
    new = after(steps, z, parameters)
    new = edge + new if residual else new
    return [new, new.new_zeros(*of_dst.shape[:-1], new.shape[-1]).index_add(-2, dst, new)]


def after(steps: Sequence[Step], z: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """z after the steps."""
    at = 0
    for step, count in steps:
        z = step(z, *parameters[at : at + count])
        at += count
    return z


def _blocks(
    dst: Tensor, src: Tensor, width: int, of_edges: Sequence[Tensor], of_nodes: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor]]]:
    """For each entry of the batch and each block of edges: the rows of tensors [B, E, ...], the entries of tensors
    [B, N, ...], and the two ends of the edges."""
    size, num_edges = max(1, BLOCK // max(1, width)), len(dst)
    for entry in range(len(of_edges[0])):
        for first in range(0, num_edges, size):
            block = slice(first, first + size)
            rows = [x[entry, block] for x in of_edges]
            yield rows, [x[entry] for x in of_nodes], (dst[block], src[block])


def _sums(
    weight: Tensor, ends: tuple[Tensor, Tensor], edge: Tensor, of_dst: Tensor, of_src: Tensor, out: Tensor | None = None
) -> Tensor:
    at_ends = of_dst.index_select(0, ends[0]).add_(of_src.index_select(0, ends[1]))
    return torch.addmm(at_ends, edge, weight.t(), out=out)
