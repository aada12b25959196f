"""FlexAttention over sequences of different lengths, in jagged tensors: each sequence by itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mpnn.flex.masks import BlockMask, check_device, create_block_mask
from mpnn.flex.programs import Mod
from mpnn.graphs.jagged import is_jagged, lengths_of, like, values_of


@dataclass(frozen=True, eq=False)
class NestedBlockMask:
    """The block masks of sequences of different lengths, one each."""

    masks: list[BlockMask]


def create_nested_block_mask(
    mask_mod: Mod,
    B: int | None,
    H: int | None,
    q_nt: Tensor,
    kv_nt: Tensor | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
) -> NestedBlockMask:
    """Returns the graphs of a mask_mod over jagged queries and keys [B, H, j, D], as torch's function of this name up
    to 2.9.

    Args:
        mask_mod: as of `create_block_mask`; q_idx and kv_idx count from the beginning of a sequence, and b is its
            number.
        B: no effect: there are as many sequences as the tensors have. H: the number of heads; None is 1.
        kv_nt: default q_nt. BLOCK_SIZE, _compile: no effect.
    """
    lengths = zip(_sequences("q_nt", q_nt), _sequences("kv_nt", q_nt if kv_nt is None else kv_nt), strict=True)
    sizes = [(len(q), len(kv)) for q, kv in lengths]
    return NestedBlockMask([create_block_mask(_of_sequence(mask_mod, k), 1, H, m, n) for k, (m, n) in enumerate(sizes)])


def _sequences(name: str, x: Tensor) -> tuple[Tensor, ...]:
    """The sequences of a jagged tensor [B, H, j, D], [n, H, D] each."""
    check_device(x.device)
    if not is_jagged(x) or x._ragged_idx != 2:  # type: ignore[attr-defined]  # of jagged tensors alone
        raise ValueError(f"{name} must be jagged, [B, H, j, D], as the other tensors are; got {list(x.shape)}")
    return values_of(name, x.transpose(1, 2)).split(lengths_of(x))


def _of_sequence(mod: Mod, number: int) -> Mod:
    """A mod with the number of a sequence in the place of b."""

    def shifted(*at: Any) -> Tensor:
        *score, b, h, q_idx, kv_idx = at
        return mod(*score, b + number, h, q_idx, kv_idx)

    return shifted


def over_sequences(
    attend: Callable[..., Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    score_mod: Any,
    block_mask: Any,
    options: dict[str, Any],
) -> Any:
    """Returns `flex_attention` of each sequence; the result and the log-sum-exp are jagged."""
    parts = [_sequences(name, x) for name, x in zip(("query", "key", "value"), qkv, strict=True)]
    if len({len(part) for part in parts}) > 1:
        raise ValueError(f"query, key and value must be of as many sequences; got {[len(part) for part in parts]}")
    masks = [None] * len(parts[0])
    if block_mask is not None:
        if not isinstance(block_mask, NestedBlockMask) or len(block_mask.masks) != len(masks):
            raise ValueError(f"jagged tensors need a block_mask of create_nested_block_mask, of {len(masks)} sequences")
        masks = block_mask.masks  # type: ignore[assignment]
    outs = []
    sums = []
    for k, (q, key, value, mask) in enumerate(zip(*parts, masks, strict=True)):
        mod = None if score_mod is None else _of_sequence(score_mod, k)
        q, key, value = (x.transpose(0, 1)[None] for x in (q, key, value))
        out, lse = attend(q, key, value, mod, mask, return_lse=True, **options)
        outs.append(out[0].transpose(0, 1))
        sums.append(lse[0].transpose(0, 1))
    return tuple(like(torch.cat(x), qkv[0]).transpose(1, 2) for x in (outs, sums))
