"""Neighborhood attention by NATTEN's functions and modules, on a CPU, with gradients, in any dtype, without CUDA.

    from mpnn.integrations.natten import na2d                      instead of natten
    python -m mpnn.shim natten script.py              for code that imports natten itself

Signatures and semantics are those of NATTEN 0.21 (Hassani et al. 2023, arXiv:2204.07143; Hassani et al. 2025,
arXiv:2504.16922): the graph is `graphs.neighborhood(..., border="natten")`. Arguments that only concern kernels
(backend, tile shapes, kv_splits, kernel_schedule, torch_compile and the like) have no effect.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mpnn import graphs, ops
from mpnn.graph import Graph
from mpnn.graph.runs import Runs

HAS_LIBNATTEN = False
Sizes = int | Sequence[int]


def neighborhood_attention_generic(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kernel_size: Sizes,
    stride: Sizes = 1,
    dilation: Sizes = 1,
    is_causal: bool | Sequence[bool] | None = False,
    scale: float | None = None,
    additional_keys: Tensor | None = None,
    additional_values: Tensor | None = None,
    attention_kwargs: dict[str, Any] | None = None,
    backend: str | None = None,
    q_tile_shape: Any = None,
    kv_tile_shape: Any = None,
    backward_q_tile_shape: Any = None,
    backward_kv_tile_shape: Any = None,
    backward_kv_splits: Any = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Any:
    """Computes neighborhood attention: each token attends to the kernel_size nearest along each axis; at a border the
    kernel is moved inward.

    Args:
        query: [B, ..., H, D], with one to three axes in the middle. key: [B, ..., H_kv, D]. value: [B, ..., H_kv,
            D_v].
        kernel_size, stride, dilation, is_causal: one for all axes, or one for each; see `graphs.neighborhood`.
        scale: default 1 / sqrt(D).
        additional_keys, additional_values: [B, M, H_kv, D] and [B, M, H_kv, D_v], which all tokens attend to as well.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        out [B, ..., H, D_v], or (out, lse [B, ..., H]).

    Raises:
        ValueError: as NATTEN: shapes do not match, kernel_size * dilation exceeds the shape, or a stride its kernel.
    """
    shape = _check(query, key, value)
    if (additional_keys is None) != (additional_values is None):
        raise ValueError("`additional_keys` and `additional_values` must be either both Tensors or None.")
    kernels = _sizes("kernel_size", kernel_size, len(shape), 2)
    steps, apart = _sizes("stride", stride, len(shape), 1), _sizes("dilation", dilation, len(shape), 1)
    if any(k * d > n for k, d, n in zip(kernels, apart, shape, strict=True)):
        raise ValueError(
            "The product of kernel size and dilation cannot be larger than input size along any dimension, got "
            f"input_size={list(shape)}, kernel_size={kernels}, dilation={apart}."
        )
    causal = False if is_causal is None else is_causal
    graph = graphs.neighborhood(
        *shape, kernel_size=kernels, dilation=apart, stride=steps, border="natten", causal=causal
    ).bind(prod(shape))
    query, key, value = (x.flatten(1, len(shape)) for x in (query, key, value))
    if additional_keys is not None and additional_values is not None:
        graph = graph.derive(_beside, additional_keys.shape[1], num_dst=graph.num_dst)
        key, value = torch.cat([key, additional_keys], 1), torch.cat([value, additional_values], 1)
    result = ops.attend(graph.to(query.device), query, key, value, scale=scale, return_lse=return_lse)
    if return_lse:
        return tuple(x.unflatten(1, shape) for x in result)
    return result.unflatten(1, shape)


def _of_axes(axes: int) -> Any:
    """`neighborhood_attention_generic` for tokens along this many axes."""

    def attend(query: Tensor, *args: Any, **options: Any) -> Any:
        if query.dim() != axes + 3:
            raise ValueError(f"Expected {axes + 3}-D tensors as inputs to na{axes}d, got query.dim()={query.dim()}.")
        return neighborhood_attention_generic(query, *args, **options)

    attend.__name__ = attend.__qualname__ = f"na{axes}d"
    attend.__wrapped__ = neighborhood_attention_generic  # type: ignore[attr-defined]  # its signature
    attend.__doc__ = f"`neighborhood_attention_generic` of [B, {'XYZ'[:axes]}, H, D]: tokens along {axes} axes."
    return attend


na1d, na2d, na3d = _of_axes(1), _of_axes(2), _of_axes(3)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    seqlens_Q: Tensor | None = None,
    seqlens_KV: Tensor | None = None,
    cumulative_seqlen_Q: Tensor | None = None,
    cumulative_seqlen_KV: Tensor | None = None,
    max_seqlen_Q: int | None = None,
    max_seqlen_KV: int | None = None,
    backend: str | None = None,
    q_tile_size: int | None = None,
    kv_tile_size: int | None = None,
    backward_q_tile_size: int | None = None,
    backward_kv_tile_size: int | None = None,
    backward_kv_splits: int | None = None,
    backward_use_pt_reduction: bool = False,
    run_persistent_kernel: bool = True,
    kernel_schedule: Any = None,
    torch_compile: bool = False,
    return_lse: bool = False,
) -> Any:
    """Computes attention of [B, N, H, D] over [B, M, H_kv, D], or of sequences packed in one row, B = 1, whose lengths
    are given by seqlens or by cumulative_seqlen. Causal attention needs as many queries as keys.

    Returns:
        out [B, N, H, D_v], or (out, lse [B, N, H]).

    Raises:
        ValueError: shapes do not match, or a kind of lengths is given for queries only, or for keys only.
    """
    given = (seqlens_Q, seqlens_KV), (cumulative_seqlen_Q, cumulative_seqlen_KV)
    if any((one is None) != (other is None) for one, other in given):
        raise ValueError("lengths of sequences must be passed for both Q and KV, or for neither")
    if seqlens_Q is not None and seqlens_KV is not None:
        lengths = seqlens_Q.tolist(), seqlens_KV.tolist()
    elif cumulative_seqlen_Q is not None and cumulative_seqlen_KV is not None:
        lengths = cumulative_seqlen_Q.diff().tolist(), cumulative_seqlen_KV.diff().tolist()
    else:
        lengths = [query.shape[1]], [key.shape[1]]
    if is_causal and lengths[0] != lengths[1]:
        raise ValueError(f"is_causal needs as many queries as keys; got {lengths[0]} and {lengths[1]}")
    inner = graphs.causal() if is_causal else graphs.complete()
    topology = graphs.documents(lengths[0], inner, src_lengths=lengths[1])
    graph = topology.bind(query.shape[1], key.shape[1]).to(query.device)
    return ops.attend(graph, query, key, value, scale=scale, return_lse=return_lse)


def merge_attentions(
    outputs: list[Tensor], lse_tensors: list[Tensor], torch_compile: bool = True, use_autograd_fix: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns the attention over all keys, from outputs [B, N, H, D] and lse_tensors [B, N, H] over sets of keys."""
    return ops.merge(zip(outputs, lse_tensors, strict=True))


class NeighborhoodAttentionGeneric(nn.Module):
    """Neighborhood attention with its linear maps: qkv, and proj. Parameters have NATTEN's names.

    Args:
        na_dim: the number of axes. embed_dim: width of the tokens. qkv_bias: whether qkv has a bias.
        qk_scale: default 1 / sqrt(embed_dim / num_heads). proj_drop: dropout after proj.
        others: as `neighborhood_attention_generic`.
    """

    def __init__(
        self,
        na_dim: int,
        embed_dim: int,
        num_heads: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        dilation: Sizes = 1,
        is_causal: bool | Sequence[bool] = False,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        proj_drop: float = 0.0,
    ) -> None:
        super().__init__()
        if embed_dim % num_heads != 0:
            raise ValueError(
                "Number of attention heads must evenly divide embedding dimension, got "
                f"embed_dim={embed_dim}, num_heads={num_heads}."
            )
        self.na_dim = na_dim
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.kernel_size = kernel_size
        self.stride = stride
        self.dilation = dilation
        self.is_causal = is_causal
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, ..., embed_dim] to the same."""
        if x.dim() != self.na_dim + 2 or x.shape[-1] != self.embed_dim:
            raise ValueError(
                f"NeighborhoodAttention{self.na_dim}D expected [batch, {self.na_dim} axes, {self.embed_dim}]; got "
                f"{list(x.shape)}"
            )
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(-3)
        options = self.kernel_size, self.stride, self.dilation, self.is_causal, self.scale
        out = neighborhood_attention_generic(query, key, value, *options)
        mapped: Tensor = self.proj_drop(self.proj(out.flatten(-2)))
        return mapped

    def extra_repr(self) -> str:
        names = "head_dim", "kernel_size", "stride", "dilation", "is_causal"
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class NeighborhoodAttention1D(NeighborhoodAttentionGeneric):
    """Over tokens along one axis."""

    def __init__(self, embed_dim: int, num_heads: int, kernel_size: Sizes, *args: Any, **options: Any) -> None:
        super().__init__(1, embed_dim, num_heads, kernel_size, *args, **options)


class NeighborhoodAttention2D(NeighborhoodAttentionGeneric):
    """Over tokens along two axes."""

    def __init__(self, embed_dim: int, num_heads: int, kernel_size: Sizes, *args: Any, **options: Any) -> None:
        super().__init__(2, embed_dim, num_heads, kernel_size, *args, **options)


class NeighborhoodAttention3D(NeighborhoodAttentionGeneric):
    """Over tokens along three axes."""

    def __init__(self, embed_dim: int, num_heads: int, kernel_size: Sizes, *args: Any, **options: Any) -> None:
        super().__init__(3, embed_dim, num_heads, kernel_size, *args, **options)


def _beside(graph: Graph, count: int) -> Graph:
    """The graph with `count` more sources, from which each destination receives."""
    runs = graph.runs
    nodes = graph.num_src
    both = [(runs.row, runs.start, runs.stop), (np.arange(graph.num_dst), nodes, nodes + count)]
    return Graph.from_runs(Runs.of(graph.num_dst, nodes + count, both))


def _check(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """The shape of the tokens. Raises ValueError as NATTEN unless the three tensors match."""
    if query.dim() not in (4, 5, 6) or not query.dim() == key.dim() == value.dim():
        raise ValueError(
            "Expected 4-D, 5-D, or 6-D tensors as inputs (corresponding to NA1D, NA2D, and NA3D), all of one rank, got "
            f"query.dim()={query.dim()}, key.dim()={key.dim()}, value.dim()={value.dim()}."
        )
    shapes = [tuple(x.shape[1:-2]) for x in (query, key, value)]
    if len(set(shapes)) > 1:
        raise ValueError(
            "Neighborhood Attention operations require Q, K, and V to match in their token layouts, got "
            f"{shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    return shapes[0]


def _sizes(name: str, size: Any, axes: int, least: int) -> list[int]:
    """One integer for each axis. Raises ValueError as NATTEN otherwise."""
    sizes = list(size) if isinstance(size, Sequence) else [size] * axes
    if len(sizes) != axes or any(type(n) is not int or n < least for n in sizes):
        raise ValueError(
            f"Invalid value for `{name}`; expected an integer or iterable of {axes} integers, all >= {least}, got "
            f"{size!r}."
        )
    return sizes
