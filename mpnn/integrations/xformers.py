"""xformers' `memory_efficient_attention` and its biases, on a CPU, with gradients, in any dtype.

    from mpnn.integrations.xformers import memory_efficient_attention      instead of xformers.ops
    python -m mpnn.shim xformers script.py                    for code that imports xformers itself

Signatures and semantics are those of xformers 0.0.32 (Lefaudeux et al. 2022). Each bias is a graph of one run a query:
`bias.graph(num_queries, num_keys)`. Paged biases are not served: gather the pages, or call
`mpnn.varlen.varlen_attn(block_table=...)`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from mpnn import ops
from mpnn.graph import Graph
from mpnn.varlen import spans

unbind = torch.unbind


def __getattr__(name: str) -> Any:
    """Names that xformers has and this module does not."""
    if "Paged" in name:
        raise ImportError(
            f"{name} is not served: gather the pages of keys and values and use the bias without Paged, or call "
            "mpnn.varlen.varlen_attn(block_table=..., seqused_k=...)"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns softmax(scale * query key^T + attn_bias) value, as `xformers.ops.memory_efficient_attention`.

    Args:
        query: [B, M, H, K], or [B, M, K] of one head, or [B, M, G, H, K] of groups of heads. key: the same for N keys.
            value: the same with a width of K_v.
        attn_bias: an `AttentionBias` of this module; or a tensor that expands to [B, H, M, N], [B, M, N] of one head or
            [B, G, H, M, N] of groups, in which -inf is not an edge. Where sequences are packed in one row, B is 1.
        p: the probability that a weight is dropped.
        scale: default 1 / sqrt(K).
        op: no effect. output_dtype: of the result; default that of the query.

    Returns:
        [B, M, H, K_v], in the form of the query.

    Raises:
        ValueError, TypeError: shapes, dtypes or the bias do not fit together.
    """
    out = _attend(query, key, value, attn_bias, p, scale, False)
    return out if output_dtype is None else out.to(output_dtype)


@torch.no_grad()
def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns `memory_efficient_attention` without gradients."""
    return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype)


def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Any = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse [B, H, M]): also the log-sum-exp of the scores."""
    if p != 0.0:
        raise NotImplementedError(
            "dropout is not supported on the non-autograd API. If you want to use dropout, please call "
            "`memory_efficient_attention` directly"
        )
    out, lse = _attend(query, key, value, attn_bias, p, scale, True)
    return out if output_dtype is None else out.to(output_dtype), lse


def _attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Any, dropout: float, scale: float | None, lse: bool
) -> Any:
    dims = query.dim()
    if dims not in (3, 4, 5) or not dims == key.dim() == value.dim():
        raise ValueError(
            "query, key and value must have shape [B, M, H, K], [B, M, K] or [B, M, G, H, K]; got "
            f"{list(query.shape)}, {list(key.shape)} and {list(value.shape)}"
        )
    q, k, v = (x.unsqueeze(2) if dims == 3 else x.flatten(2, -2) for x in (query, key, value))
    graph, numbers = _graph(bias, (len(q), q.shape[2], q.shape[1], k.shape[1]))
    graph = graph.to(q.device)
    per_edge = None
    if numbers is not None:
        src, dst = graph.edge_index
        per_edge = numbers[..., dst, src].transpose(1, 2)
    result = ops.attend(graph, q, k, v, bias=per_edge, scale=scale, dropout=dropout, return_lse=lse)
    out = (result[0] if lse else result).reshape(*query.shape[:-1], value.shape[-1])
    return (out, result[1].transpose(1, 2)) if lse else out


def _graph(bias: Any, shape: tuple[int, int, int, int]) -> tuple[Graph, Tensor | None]:
    """The graph of a bias for [B, H, M, N], and the numbers [B or 1, H or 1, M, N] that it adds."""
    _, _, queries, keys = shape
    is_tensor = isinstance(bias, Tensor)
    numbers = bias if is_tensor else getattr(bias, "_bias", None)
    pairs = AttentionBias() if bias is None or is_tensor else bias
    if not isinstance(pairs, AttentionBias):
        raise TypeError(
            f"attn_bias must be a tensor or an AttentionBias of mpnn.integrations.xformers; got {type(bias).__name__}"
        )
    if numbers is not None and numbers.dim() in (3, 4, 5):
        numbers = numbers.unsqueeze(1) if numbers.dim() == 3 else numbers.flatten(1, -3)
        numbers = numbers.expand(-1, -1, queries, keys)
    if numbers is not None and (
        numbers.dim() != 4 or any(n not in (1, m) for n, m in zip(numbers.shape, shape, strict=True))
    ):
        raise ValueError(f"attn_bias must expand to {list(shape)}; got {list(numbers.shape)}")
    return pairs.graph(queries, keys), numbers


# ---------------------------------------------------------------------------------------------------- biases


class AttentionBias:
    """A set of (query, key) pairs: all of them."""

    from_bottom_right: ClassVar[bool] = False
    is_causal: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Raises ValueError if the fields of a bias do not fit together."""

    @property
    def window(self) -> tuple[int, int]:
        """How many keys before and after its own a query attends to; -1 is no limit."""
        return -1, 0 if self.is_causal else -1

    def documents(self, num_queries: int, num_keys: int) -> tuple[list[int], list[int], list[int]]:
        """Returns the numbers of queries of each document, where its keys begin, and their numbers."""
        return [num_queries], [0], [num_keys]

    def graph(self, num_queries: int, num_keys: int) -> Graph:
        """Returns the pairs as a graph. Raises ValueError if the bias is of other sizes."""
        queries, starts, keys = self.documents(num_queries, num_keys)
        shifts = [n - m if self.from_bottom_right else 0 for m, n in zip(queries, keys, strict=True)]
        return spans(queries, keys, shifts, *self.window, src_starts=starts).bind(num_queries, num_keys)

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        """Returns 0 for a pair and -inf for others, of shape [..., M, N]."""
        absent = ~self.graph(*shape[-2:]).dense().to(device)
        return torch.zeros(shape, dtype=dtype, device=device).masked_fill(absent, -inf)

    def to(self, device: Any) -> "AttentionBias":
        """Returns the bias itself, which has no tensors."""
        return self


class _LastKeys(AttentionBias):
    """A query attends to the last `_window_size` keys up to its own."""

    _window_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._window_size <= 0:
            raise ValueError(f"Expected `window_size > 0`, but window_size={self._window_size}")

    @property
    def window(self) -> tuple[int, int]:
        return self._window_size - 1, 0


class LowerTriangularMask(AttentionBias):
    """Query i attends to the keys up to i."""

    is_causal = True

    def add_bias(self, bias: Tensor) -> "LowerTriangularMaskWithTensorBias":
        """Returns the same pairs, with a tensor that is added to the scores."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """Query i attends to the keys up to i; `bias` is added to the scores."""

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias

    def materialize(
        self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        return super().materialize(shape, dtype, device) + self._bias

    def to(self, device: Any) -> "LowerTriangularMaskWithTensorBias":
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Query i of M attends to the keys up to i + N - M."""

    from_bottom_right = True
    is_causal = True

    def make_local_attention(self, window_size: int) -> "LowerTriangularFromBottomRightLocalAttentionMask":
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(_LastKeys, LowerTriangularFromBottomRightMask):
    """A query attends to the last `_window_size` keys of `LowerTriangularFromBottomRightMask`."""

    _window_size: int


@dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """Query i of M attends to the keys from i + N - M - window_left to i + N - M + window_right."""

    window_left: int
    window_right: int
    from_bottom_right: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("window_left", "window_right"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"Invalid window value passed to `{type(self).__name__}`: expected `{name} >= 0` but got "
                    f"{name}={getattr(self, name)}"
                )

    @property
    def window(self) -> tuple[int, int]:
        return self.window_left, self.window_right


@dataclass
class SeqLenInfo:
    """Where sequences begin in a row, and how many of their places are used. The last of `seqstart_py` is the length of
    the row."""

    seqstart_py: list[int]
    seqlen_py: list[int]

    @classmethod
    def from_seqlens(cls, seqlens: Iterable[int]) -> "SeqLenInfo":
        lengths = [int(n) for n in seqlens]
        return cls([0, *np.cumsum(lengths, dtype=np.int64).tolist()], lengths)

    @property
    def seqstart(self) -> Tensor:
        return torch.tensor(self.seqstart_py, dtype=torch.int32)

    @property
    def seqlen(self) -> Tensor:
        return torch.tensor(self.seqlen_py, dtype=torch.int32)

    @property
    def max_seqlen(self) -> int:
        return max(self.seqlen_py, default=-1)

    @property
    def min_seqlen(self) -> int:
        return min(self.seqlen_py, default=-1)

    def intervals(self) -> Iterable[tuple[int, int]]:
        return ((start, start + n) for start, n in zip(self.seqstart_py, self.seqlen_py, strict=False))

    def split(self, x: Tensor, batch_sizes: Sequence[int] | None = None) -> list[Tensor]:
        """Returns the sequences of x [1, M, ...], in batches of `batch_sizes` sequences of one length."""
        if x.shape[:2] != (1, self.seqstart_py[-1]):
            raise ValueError(
                f"Invalid `torch.Tensor` of shape {tuple(x.shape)}, expected format (B, M, *) with B=1 and "
                f"M={self.seqstart_py[-1]}"
            )
        sizes = [1] * len(self.seqlen_py) if batch_sizes is None else batch_sizes
        ends = np.cumsum([0, *sizes])
        parts = x.split([self.seqstart_py[b] - self.seqstart_py[a] for a, b in pairwise(ends)], 1)
        return [part.reshape(size, -1, *x.shape[2:]) for size, part in zip(sizes, parts, strict=True)]


@dataclass
class _OfSequences(AttentionBias):
    """Queries and keys of sequences in one row; those of a sequence alone are pairs."""

    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo

    def __post_init__(self) -> None:
        if len(self.q_seqinfo.seqlen_py) != len(self.k_seqinfo.seqlen_py):
            raise ValueError(
                f"there must be as many sequences of queries as of keys; got {len(self.q_seqinfo.seqlen_py)} and "
                f"{len(self.k_seqinfo.seqlen_py)}"
            )

    def documents(self, num_queries: int, num_keys: int) -> tuple[list[int], list[int], list[int]]:
        for what, info, given in (("queries", self.q_seqinfo, num_queries), ("keys", self.k_seqinfo, num_keys)):
            if info.seqstart_py[-1] != given:
                raise ValueError(f"the sequences of attn_bias have {info.seqstart_py[-1]} {what}; got {given}")
        return self.q_seqinfo.seqlen_py, self.k_seqinfo.seqstart_py[:-1], self.k_seqinfo.seqlen_py


@dataclass
class BlockDiagonalMask(_OfSequences):
    """Each query attends to the keys of its sequence: packed sequences of different lengths."""

    _batch_sizes: Sequence[int] | None = None

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None, *, device: Any = None
    ) -> Any:
        queries = SeqLenInfo.from_seqlens(q_seqlen)
        return cls(queries, queries if kv_seqlen is None else SeqLenInfo.from_seqlens(kv_seqlen))

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[Any, Tensor]:
        """Returns the bias of batches [B_k, M_k, ...], and these in one row, [1, sum of B_k * M_k, ...]."""
        bias = cls.from_seqlens(_lengths(tensors))
        bias._batch_sizes = [len(x) for x in tensors]
        return bias, _joined(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls, tensors_q: Sequence[Tensor], tensors_k: Sequence[Tensor], tensors_v: Sequence[Tensor] | None = None
    ) -> tuple[Any, Tensor, Tensor, Tensor | None]:
        """Returns the bias of batches of queries, keys and values, and each of them in one row."""
        bias = cls.from_seqlens(_lengths(tensors_q), _lengths(tensors_k))
        bias._batch_sizes = [len(x) for x in tensors_q]
        return bias, _joined(tensors_q), _joined(tensors_k), None if tensors_v is None else _joined(tensors_v)

    def split_queries(self, tensor: Tensor) -> list[Tensor]:
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: Tensor) -> list[Tensor]:
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    split = split_queries

    @property
    def _parts(self) -> tuple[SeqLenInfo, SeqLenInfo, Any]:
        return self.q_seqinfo, self.k_seqinfo, self._batch_sizes

    def make_causal(self) -> "BlockDiagonalCausalMask":
        return BlockDiagonalCausalMask(*self._parts)

    def make_causal_from_bottomright(self) -> "BlockDiagonalCausalFromBottomRightMask":
        return BlockDiagonalCausalFromBottomRightMask(*self._parts)

    def make_local_attention(self, window_size: int) -> "BlockDiagonalCausalLocalAttentionMask":
        return BlockDiagonalCausalLocalAttentionMask(*self._parts, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionFromBottomRightMask":
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(*self._parts, window_size)


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """Query i of a sequence attends to its keys up to i."""

    is_causal = True


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalCausalMask):
    """Query i of M of a sequence attends to its keys up to i + N - M; no sequence has fewer keys than queries."""

    from_bottom_right = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for k, (m, n) in enumerate(zip(self.q_seqinfo.seqlen_py, self.k_seqinfo.seqlen_py, strict=True)):
            if n < m:
                raise ValueError(f"Block #{k} has num_keys={n} and num_queries={m}. Expected `num_keys >= num_queries`")


@dataclass
class BlockDiagonalCausalLocalAttentionMask(_LastKeys, BlockDiagonalCausalMask):
    """A query attends to the last `_window_size` keys of `BlockDiagonalCausalMask`."""

    _window_size: int = 0


@dataclass
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(_LastKeys, BlockDiagonalCausalFromBottomRightMask):
    """A query attends to the last `_window_size` keys of `BlockDiagonalCausalFromBottomRightMask`."""

    _window_size: int = 0


@dataclass
class BlockDiagonalGappyKeysMask(_OfSequences):
    """Each query attends to the keys of its sequence, which begin anywhere in the row of keys."""

    @classmethod
    def from_seqlens(
        cls, q_seqlen: Sequence[int], kv_seqstarts: Sequence[int], kv_seqlen: Sequence[int], *, device: Any = None
    ) -> Any:
        """Creates the mask from lengths. `kv_seqstarts` has one more number than there are sequences: the length of the
        row of keys."""
        return cls(SeqLenInfo.from_seqlens(q_seqlen), SeqLenInfo(list(kv_seqstarts), list(kv_seqlen)))


class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """The last query of a sequence is at its last key, and each attends to the keys up to its own."""

    from_bottom_right = True
    is_causal = True


@dataclass
class BlockDiagonalPaddedKeysMask(_OfSequences):
    """Each query attends to the keys of its sequence, the first of `kv_padding` places in a cache."""

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: Any = None,
    ) -> Any:
        return cls(SeqLenInfo.from_seqlens(q_seqlen), _padded(kv_padding, kv_seqlen))

    def make_local_attention(self, window_left: int, window_right: int) -> "BlockDiagonalLocalAttentionPaddedKeysMask":
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


@dataclass
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """The last query of a sequence is at its last key, and each attends to the keys up to its own."""

    causal_diagonal: Any = None
    from_bottom_right: ClassVar[bool] = True
    is_causal: ClassVar[bool] = True


@dataclass
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """A window around a query's own key; the last query of a sequence is at its last key."""

    window_left: int = 0
    window_right: int = 0
    from_bottom_right: ClassVar[bool] = True

    @property
    def window(self) -> tuple[int, int]:
        return self.window_left, self.window_right

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> "BlockDiagonalLocalAttentionPaddedKeysMask":
        return cls(SeqLenInfo.from_seqlens(q_seqlen), _padded(kv_padding, kv_seqlen), window_left, window_right)


@dataclass
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(_LastKeys, BlockDiagonalPaddedKeysMask):
    """A query attends to the last `_window_size` keys of `BlockDiagonalCausalWithOffsetPaddedKeysMask`."""

    _window_size: int = 1
    from_bottom_right: ClassVar[bool] = True

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> "BlockDiagonalCausalLocalAttentionPaddedKeysMask":
        return cls(SeqLenInfo.from_seqlens(q_seqlen), _padded(kv_padding, kv_seqlen), window_size)


def _padded(kv_padding: int, kv_seqlen: Sequence[int]) -> SeqLenInfo:
    if max(kv_seqlen, default=0) > kv_padding:
        raise ValueError(f"kv_seqlen must be at most kv_padding={kv_padding}; got {max(kv_seqlen)}")
    return SeqLenInfo(list(range(0, len(kv_seqlen) * kv_padding + 1, kv_padding)), list(kv_seqlen))


def _lengths(tensors: Sequence[Tensor]) -> list[int]:
    return [x.shape[1] for x in tensors for _ in range(len(x))]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([x.reshape(1, -1, *x.shape[2:]) for x in tensors], 1)
