"""A linear map of each edge plus terms of its two ends, and functions of the result, as differentiable functions of
tensors on CPU:

    z_ij = W e_ij + a_i + b_j          da_i = sum_j dz_ij          db_j = sum_i dz_ij

The edges are taken a block at a time, so that the rows gathered from the ends stay in the cache and those of the result
are written once. `row_map` does the same for functions of rows without ends.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mpnn.kernels.derivatives import Kernel, launch
from mpnn.kernels.memory import empty

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


RowFunction = Callable[..., Tensor]
"""A function `f(z [rows, H], *parameters) -> [rows, F]` of each row by itself."""


def edge_map(f: RowFunction, residual: bool, dst: Tensor, src: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Of edge, weight, of_dst, of_src and parameters: new [B, E, F], and sums [B, N_dst, F] of them at each
    destination: `f(z)`, plus the edges if `residual`.

    edge [B, E, D], weight [H, D], of_dst [B, N_dst, H] and of_src [B, N_src, H], float32 or float64; dst and src, int64
    [E], are the ends of the edges.

    Both passes take a block at a time through everything, so that nothing between leaves the cache; the backward pass
    computes it again.
    """
    options = f, residual, dst, src
    return launch(_EDGE_MAP, options, partial(_by_torch, *options), *tensors)


_EdgeOptions = tuple[RowFunction, bool, Tensor, Tensor]


def _forward_of_edges(
    options: _EdgeOptions, needs: Sequence[bool], *tensors: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[()]]:
    f, residual, dst, src = options
    edge, weight, of_dst, of_src, *parameters = tensors
    width = edge.shape[-1] if residual else f(edge.new_empty(0, len(weight)), *parameters).shape[-1]
    out = empty(edge, *edge.shape[:-1], width)
    sums = edge.new_zeros(*of_dst.shape[:-1], width)
    for (e, new), (a, b, total), ends in _blocks(dst, src, len(weight), (edge, out), (of_dst, of_src, sums)):
        of_z = f(_sums(weight, ends, e, a, b), *parameters)
        if residual:
            torch.add(e, of_z, out=new)
        else:
            new.copy_(of_z)
        total.index_add_(0, ends[0], new)
    return (out, sums), ()


def _gradients_of_edges(
    options: _EdgeOptions,
    needs: Sequence[bool],
    tensors: Sequence[Tensor],
    saved: Any,
    d_new: Tensor | None,
    d_sums: Tensor | None,
) -> list[Tensor | None]:
    f, residual, dst, src = options
    edge, weight, of_dst, of_src, *parameters = (x.detach() for x in tensors)
    parameters = _leaves(parameters, needs[4:])
    d_edge = empty(edge, *edge.shape) if needs[0] else None
    d_weight, d_dst, d_src = (torch.zeros_like(x) for x in (weight, of_dst, of_src))
    of_edges = [edge, *(x for x in (d_edge, d_new) if x is not None)]
    of_nodes = [of_dst, of_src, d_dst, d_src, *(() if d_sums is None else (d_sums,))]
    for (e, *more), (a, b, of_a, of_b, *d_total), ends in _blocks(dst, src, len(weight), of_edges, of_nodes):
        z = _sums(weight, ends, e, a, b).requires_grad_()
        with torch.enable_grad():
            out = f(z, *parameters)
        d_out = d_total[0].index_select(0, ends[0]) if d_total else torch.zeros_like(out)
        d_out = d_out if d_new is None else d_out.add_(more[-1])
        out.backward(d_out)  # adds to the gradients of parameters
        of_z: Any = z.grad
        of_a.index_add_(0, ends[0], of_z)
        of_b.index_add_(0, ends[1], of_z)
        d_weight.addmm_(of_z.t(), e)
        if d_edge is not None:
            torch.addmm(d_out, of_z, weight, out=more[0]) if residual else torch.mm(of_z, weight, out=more[0])
    return [d_edge, d_weight, d_dst, d_src, *(p.grad for p in parameters)]


_EDGE_MAP = Kernel(_forward_of_edges, _gradients_of_edges)


def row_map(f: RowFunction, *tensors: Tensor) -> Tensor:
    """`f(x, *parameters)` [R, F], with x [R, D] in float32 or float64.

    Both passes take a block of rows at a time through all of f, so that nothing within it is kept or leaves the cache;
    the backward pass computes it again.
    """
    return launch(_ROW_MAP, f, f, *tensors)


def _forward_of_rows(f: RowFunction, needs: Sequence[bool], x: Tensor, *parameters: Tensor) -> tuple[Tensor, tuple[()]]:
    out = empty(x, len(x), f(x[:0], *parameters).shape[-1])
    for rows, new in _rows(x, out):
        new.copy_(f(rows, *parameters))
    return out, ()


def _gradients_of_rows(
    f: RowFunction, needs: Sequence[bool], tensors: Sequence[Tensor], saved: Any, d_out: Tensor
) -> list[Tensor | None]:
    x = tensors[0].detach()
    parameters = _leaves(tensors[1:], needs[1:])
    d_x = empty(x, *x.shape) if needs[0] else None
    for rows, d_new, *d_rows in _rows(x, d_out, *(() if d_x is None else (d_x,))):
        rows = rows.detach().requires_grad_(needs[0])
        with torch.enable_grad():
            new = f(rows, *parameters)
        new.backward(d_new)  # adds to the gradients of parameters
        if rows.grad is not None:
            d_rows[0].copy_(rows.grad)
    return [d_x, *(p.grad for p in parameters)]


_ROW_MAP = Kernel(_forward_of_rows, _gradients_of_rows)


def _leaves(tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Tensors that collect their gradients, from zeros on."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf) if leaf.requires_grad else None
    return leaves


def _rows(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors [R, ...] in blocks of rows, as many as the widest allows."""
    size = max(1, BLOCK // max(x.shape[-1] for x in tensors))
    return zip(*(x.split(size) for x in tensors), strict=True)


def _by_torch(f: RowFunction, residual: bool, dst: Tensor, src: Tensor, *tensors: Tensor) -> list[Tensor]:
    """`edge_map` step by step, which autograd differentiates any number of times."""
    edge, weight, of_dst, of_src, *parameters = tensors
    z = edge @ weight.t() + of_dst.index_select(-2, dst) + of_src.index_select(-2, src)
    new = f(z, *parameters)
    new = edge + new if residual else new
    return [new, new.new_zeros(*of_dst.shape[:-1], new.shape[-1]).index_add(-2, dst, new)]


def _blocks(
    dst: Tensor, src: Tensor, width: int, of_edges: Sequence[Tensor], of_nodes: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor], tuple[Tensor, Tensor]]]:
    """For each entry of the batch and each block of edges: the rows of tensors [B, E, ...], the entries of tensors
    [B, N, ...], and the two ends of the edges."""
    size = max(1, BLOCK // max(1, width))
    num_edges = len(dst)
    for entry in range(len(of_edges[0])):
        for first in range(0, num_edges, size):
            block = slice(first, first + size)
            rows = [x[entry, block] for x in of_edges]
            yield rows, [x[entry] for x in of_nodes], (dst[block], src[block])


def _sums(weight: Tensor, ends: tuple[Tensor, Tensor], edge: Tensor, of_dst: Tensor, of_src: Tensor) -> Tensor:
    at_ends = of_dst.index_select(0, ends[0]).add_(of_src.index_select(0, ends[1]))
    return torch.addmm(at_ends, edge, weight.t())
