"""Linear maps by the quicker product: torch's or oneDNN's (`mpnn/kernels/linear.py`).

The choice compares prices, as that of a backend does: nanoseconds of a call, of a multiplication with addition, and of
a packed number. `costs.json` has them for processors of one family, `mpnn tune` measures those of any other. Where
neither holds, torch computes all maps.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from mpnn.kernels import linear as onednn

TORCH, ONEDNN = "torch map", "onednn map"  # their names in tables of prices
_GAIN = 1.1  # oneDNN's product runs where it is expected to be this much quicker: prices are not exact


class Linear(nn.Linear):
    """`nn.Linear` by the quicker product. Parameters, their names and initialization are those of `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` by the quicker product: x [..., K], weight [N, K], bias [N] -> [..., N]."""
    out = by_onednn(x, weight, bias)
    return F.linear(x, weight, bias) if out is None else out


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """`F.linear(x, weight, bias)` by oneDNN, where this is quicker, or None where torch is to compute it.

    Torch computes maps in other dtypes than float32 and on other devices, maps of few rows, of subclasses of tensors,
    under autocast, in forward-mode derivatives and `torch.func`, and in programs that are traced or compiled. It
    computes second derivatives, too.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state():
        return None
    if not _is_quick(x, weight) or not _is_plain(x, weight, bias):
        return None
    out = onednn.linear(x.reshape(-1, x.shape[-1]), weight, bias, chosen)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], len(weight))


def _is_quick(x: Tensor, weight: Tensor) -> bool:
    if weight.dim() != 2:
        return False
    width, depth = weight.shape
    return depth > 0 and x.numel() >= depth * least_rows(depth, width, torch.get_num_threads())


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN's product of these tensors is what torch would compute, in the modes that are on."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    return (
        all(_is_float32_on_cpu(operand) for operand in operands)
        and x.shape[-1:] == weight.shape[1:]
        and (bias is None or bias.shape == weight.shape[:1])
        and torch._C._get_mkldnn_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and (forward_ad._current_level < 0 or all(forward_ad.unpack_dual(t).tangent is None for t in operands))
    )


def _is_float32_on_cpu(x: Tensor) -> bool:
    return (
        (type(x) is Tensor or type(x) is nn.Parameter)
        and x.dtype is torch.float32
        and x.is_cpu
        and x.layout is torch.strided
        and not (x.is_neg() or x.is_nested)
    )


# ------------------------------------------------------------------------------------------------ the choice


def counts(rows: int, depth: int, width: int, transposed: bool = False) -> dict[str, dict[str, float]]:
    """The operations of a product [rows, depth] [depth, width] by torch and by oneDNN. `transposed`: the product is the
    gradient of a weight, whose two operands are read by columns."""
    both = {"call": 1.0, "product": float(rows) * depth * width}
    packed = depth * (width + rows if transposed else width)
    return {TORCH: both, ONEDNN: {**both, "packed number": float(packed)}}


def chosen(rows: int, depth: int, width: int, transposed: bool = False) -> bool:
    """Whether oneDNN computes a product [rows, depth] [depth, width] in float32 on the threads that torch uses."""
    return _is_chosen(rows, depth, width, transposed, torch.get_num_threads())


def _is_chosen(rows: int, depth: int, width: int, transposed: bool, threads: int) -> bool:
    from mpnn.backends import cost_model  # imports all backends

    if onednn.why_missing() is not None or (prices := cost_model.map_prices(threads)) is None:
        return False
    taken = {
        name: sum(prices[name][kind] * n for kind, n in cost_model.per_thread(each, threads).items())
        for name, each in counts(rows, depth, width, transposed).items()
    }
    return taken[ONEDNN] * _GAIN < taken[TORCH]


@cache
def least_rows(depth: int, width: int, threads: int) -> float:
    """The number of rows from which oneDNN computes a map `depth -> width`; infinity where it never does. It packs the
    weight once per call, so more rows favor it."""
    few, many = 1, 1 << 24
    if not _is_chosen(many, depth, width, False, threads):
        return math.inf
    while few < many:
        middle = (few + many) // 2
        few, many = (few, middle) if _is_chosen(middle, depth, width, False, threads) else (middle + 1, many)
    return few


def is_useful() -> bool:
    """Whether oneDNN computes any map on the threads that torch uses."""
    return least_rows(4096, 4096, torch.get_num_threads()) < math.inf


def described(layers: Iterable[nn.Module], rows: int) -> str:
    """Which product computes the maps of these layers for so many rows: a line of `mpnn.explain`."""
    maps, threads = [layer for layer in layers if isinstance(layer, nn.Linear)], torch.get_num_threads()
    quick = [m for m in maps if type(m) is Linear and rows >= least_rows(m.in_features, m.out_features, threads)]
    quick = [m for m in quick if _is_plain(m.weight[:1], m.weight, m.bias)]
    return f"{len(quick)} by oneDNN, {len(maps) - len(quick)} by torch, for {rows:,} rows" if maps else ""
