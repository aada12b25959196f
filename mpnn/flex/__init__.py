"""torch's FlexAttention (Dong et al. 2024, arXiv:2412.05496) on a CPU, with gradients: the same functions, over graphs.

    from mpnn.flex import create_block_mask, flex_attention        instead of torch.nn.attention.flex_attention

`programs.py` records mask_mods and score_mods, `pairs.py` and `bounds.py` turn conditions into runs of a graph,
`masks.py` keeps the graphs of block masks, and `scores.py` turns score_mods into biases and factors. Tensors that a
score_mod captures get gradients.
"""

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as of_torch

from mpnn.flex.masks import (
    BlockMask as BlockMask,
    check_device,
    create_block_mask as create_block_mask,
    create_nested_block_mask as create_nested_block_mask,
    graphs_of,
    of_mask,
    over_sequences,
)
from mpnn.flex.pairs import conjunction
from mpnn.flex.programs import Mod, check_constant, record
from mpnn.flex.scores import Form, attend, form_of
from mpnn.graph import Graph
from mpnn.graph.modes import uncompiled
from mpnn.graphs.jagged import is_jagged
from mpnn.round import validation
from mpnn.scores import check_scale


@uncompiled
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Mod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Computes attention with a score_mod and a block mask, as `torch.nn.attention.flex_attention.flex_attention`.

        out_i = sum_j softmax_j( score_mod(scale * <query_i, key_j>, b, h, i, j) ) value_j      over the j of the mask

    Args:
        query: [B, H, N, D]. key: [B, H_kv, M, D]. value: [B, H_kv, M, D_v]. On a CPU. All three may be jagged,
            [B, H, j, D]: functions count from the beginning of each sequence, and b is its number.
        score_mod: a function of (score, b, h, q_idx, kv_idx). It may add functions of the last four, multiply by
            functions of (b, h, q_idx) or of (b, h, kv_idx), apply `c * tanh(score / c)` before it adds, and return -inf
            by `torch.where`. It is read in each call, as a mask_mod is: tensors that they capture may have changed.
        block_mask: of `create_block_mask`, here or of torch; of `create_nested_block_mask` for jagged tensors. For a
        block mask of torch, the blocks that it lists are used, as by torch's kernel. scale: default 1 / sqrt(D), and 1
        for a width of 0. enable_gqa: allows H to be a multiple of H_kv. return_lse: also return the log-sum-exp of the
        scores, [B, H, N]; -inf for a row without edges. kernel_options: of GPU kernels; no effect. return_aux: an
        `AuxRequest` of torch, of `lse` only: also return its `AuxOutput`.

    Returns:
        out [B, H, N, D_v], (out, lse) or (out, AuxOutput). A row without edges gets zeros.

    Raises:
        ValueError: shapes do not fit together, score_mod has another form (the message names the operation), or
            `return_aux` asks for more than `lse`.
    """
    if return_aux is not None and (return_lse or return_aux.max_scores):
        raise ValueError("return_aux may ask for lse, not for max_scores, and goes without return_lse")
    if is_jagged(query):
        options = {"scale": scale, "enable_gqa": enable_gqa}
        result = over_sequences(flex_attention, (query, key, value), score_mod, block_mask, options)
        return _asked(result, return_lse, return_aux)
    for name, x in (("query", query), ("key", key), ("value", value)):
        validation.tensor(name, x)
        check_device(x.device)
        if x.dim() != 4:
            raise ValueError(f"query, key and value must have shape [B, H, N, D]; got {list(x.shape)}")
    batch, heads, *sizes = *query.shape[:3], key.shape[2]
    if len(key) != batch or key.shape[:3] != value.shape[:3]:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"expected query [B, H, N, D], key [B, H_kv, M, D] and value [B, H_kv, M, D_v]; got {shapes}")
    if heads != key.shape[1] and not enable_gqa:
        raise ValueError(f"query has {heads} heads and key {key.shape[1]}; pass enable_gqa=True")
    if 0 in (batch, heads, *sizes):
        score_mod = block_mask = None  # no pair to evaluate
    form = Form() if score_mod is None else _form(score_mod, query.dtype, (batch, heads, *sizes))
    bound = of_mask(block_mask, batch, heads, *sizes)
    if form.conditions:
        also = graphs_of(form.program.at(reduce(conjunction, form.conditions)), batch, heads, *sizes)
        both = range(max(len(bound), len(also))), range(max(len(bound[0]), len(also[0])))
        bound = [[_at(bound, b, h) & _at(also, b, h) for h in both[1]] for b in both[0]]
    every_b, every_h = torch.arange(batch), torch.arange(heads)
    if scale is not None:
        check_scale(scale)
    scale = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    run = partial(attend, query, key, value, form, scale, return_lse or (return_aux is not None and return_aux.lse))
    entries = [every_b] if len(bound) == 1 else every_b.split(1)
    parts = [every_h] if len(bound[0]) == 1 else every_h.split(1)
    rows = [[run(bound[i][k], b, h) for k, h in enumerate(parts)] for i, b in enumerate(entries)]
    out, lse = (torch.cat([torch.cat([x[k] for x in row], 1) for row in rows]) for k in (0, 1))
    return _asked((out, lse), return_lse, return_aux)


def _form(score_mod: Mod, dtype: torch.dtype, sizes: tuple[int, ...]) -> Form:
    """The form of a score_mod over scores of features of this type."""
    score = torch.promote_types(dtype, torch.float32)
    program = record(score_mod, score)
    check_constant(program, score_mod, sizes, score)
    return form_of(program)


def _asked(both: Any, return_lse: bool, return_aux: Any) -> Any:
    """Of a result and a log-sum-exp, what a call asks for."""
    out, lse = both
    if return_aux is not None:
        return out, of_torch.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def _at(bound: list[list[Graph]], b: int, h: int) -> Graph:
    row = bound[b % len(bound)]
    return row[h % len(row)]
