"""Linear maps by the faster product: torch's or oneDNN's (`mpnn/kernels/dense/onednn.py`).

The choice compares prices, as that of a backend does: nanoseconds of a call, of a multiplication with addition, and of
a number of a weight that is read. `costs.json` has them for processors of one family, `mpnn tune` measures those of
any other. Where neither holds, torch computes all maps.
"""

import math
from collections.abc import Iterable
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mpnn.graph import batches
from mpnn.graph.guard import is_plain
from mpnn.kernels.dense import onednn

# names in tables of prices
TORCH = "torch map"
ONEDNN = "onednn map"
MIN_ROWS = 16  # with fewer, the memory limits both products
_GAIN = 1.1  # oneDNN's product runs where it is expected to be this much faster: prices are not exact
_RECORDING = 60e3  # nanoseconds that torch takes in a training step for a map whose derivative is written in Python


class Linear(nn.Linear):
    """`nn.Linear` by the faster product. Parameters, their names and initialization are those of `nn.Linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Returns `F.linear(x, weight, bias)` by the faster product: x [..., K], weight [N, K], bias [N] -> [..., N].
    Narrow maps are padded where the bits of torch's product depend on the number of rows, or on where they lie in
    memory."""
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2  # torch has the sentence for anything else
    out = by_onednn(x, weight, bias)
    if out is not None:
        return out
    is_narrow = is_matrix and not torch.compiler.is_compiling() and len(weight) <= batches.NARROW
    if is_narrow and batches.needs_padding(x, weight):
        return batches.linear(x, weight, bias, least=0)
    return F.linear(x, weight, bias)


def by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool = False) -> Tensor | None:
    """`F.linear(x, weight, bias)` by oneDNN where this is faster, or None where torch is to compute it.

    Torch computes maps in other dtypes than float32 and on other devices, maps of few rows, of subclasses of tensors,
    under autocast, in forward-mode derivatives and `torch.func`, and in programs that are traced or compiled. It
    computes second derivatives, too.

    Args:
        transposed: the weight is [K, N].
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or type(weight) not in (Tensor, nn.Parameter):
        return None
    if weight.dim() != 2 or not weight.numel():
        return None
    depth, width = weight.shape if transposed else weight.shape[::-1]
    # This decides most calls in a fraction of a microsecond, so that decoding is as fast as with torch alone.
    rows = least_rows(depth, width, torch.get_num_threads(), weight.requires_grad)
    if x.numel() < depth * rows or batches.STATE.padding is not None:
        return None
    matrix = weight.t() if transposed else weight
    if not _is_plain(x, matrix, bias):
        return None
    out = onednn.linear(x.reshape(-1, depth), matrix, bias, chosen)
    return out if x.dim() == 2 else out.view(*x.shape[:-1], width)


def _is_plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether oneDNN's product of these tensors is what torch would compute, in the modes that are on."""
    return (
        x.dtype is torch.float32
        and is_plain(x)
        and onednn.reads(weight)
        and (bias is None or (onednn.reads(bias) and bias.shape == weight.shape[:1]))
        and x.shape[-1:] == weight.shape[1:]
        and torch._C._get_mkldnn_enabled()
    )


# ------------------------------------------------------------------------------------------------ the choice


def counts(rows: int, depth: int, width: int, transposed: bool = False) -> dict[str, dict[str, float]]:
    """The operations of a product [rows, depth] [depth, width] by torch and by oneDNN. `transposed`: the gradient of a
    weight, whose two operands are read by columns, which takes six times as long."""
    both = {"call": 1.0, "product": float(rows) * depth * width}
    read = 6.0 * depth * (rows + width) if transposed else float(depth * width)
    return {TORCH: both, ONEDNN: {**both, "read number": read}}


def chosen(rows: int, depth: int, width: int, transposed: bool = False) -> bool:
    """Whether oneDNN computes a product [rows, depth] [depth, width] in float32 on the threads that torch uses."""
    return _is_quicker(counts(rows, depth, width, transposed), torch.get_num_threads())


def _is_quicker(operations: dict[str, dict[str, float]], threads: int) -> bool:
    """Whether oneDNN is expected to compute a product of this number of operations in less time than torch."""
    ours, torchs = _nanoseconds(operations, threads)
    return ours * _GAIN < torchs


def _nanoseconds(operations: dict[str, dict[str, float]], threads: int) -> tuple[float, float]:
    """The time that a product of this number of operations is expected to take by oneDNN, infinity where there is no
    price for it, and by torch."""
    from mpnn.backends import cost_model  # imports all backends

    if onednn.why_missing() is not None or (prices := cost_model.map_prices(threads)) is None:
        return math.inf, 0.0
    ours, torchs = (
        sum(prices[way][kind] * n for kind, n in cost_model.per_thread(operations[way], threads).items())
        for way in (ONEDNN, TORCH)
    )
    return ours, torchs


@cache
def least_rows(depth: int, width: int, threads: int, is_learned: bool = False) -> float:
    """The number of rows from which oneDNN computes a map `depth -> width`; infinity where it never does. What a call
    does for the weight is divided by the rows, so more rows favor it.

    Args:
        is_learned: the weight requires a gradient. Then oneDNN runs where it is faster with the backward pass. It does
            not depend on whether a call records one, so that checkpointing computes the same bits again.
    """

    def is_quicker(rows: int) -> bool:
        if not _is_quicker(counts(rows, depth, width), threads):
            return False
        if not is_learned:
            return True
        times = [counts(rows, depth, width), counts(rows, width, depth), counts(width, rows, depth, transposed=True)]
        (ours, torchs), *backward = [_nanoseconds(operations, threads) for operations in times]
        ours += _RECORDING + sum(map(min, backward))
        return ours * _GAIN < torchs + sum(by_torch for _, by_torch in backward)

    few = MIN_ROWS
    many = 1 << 24
    if not is_quicker(many):
        return math.inf
    while few < many:
        middle = (few + many) // 2
        few, many = (few, middle) if is_quicker(middle) else (middle + 1, many)
    return few


def is_useful() -> bool:
    """Whether oneDNN computes any map on the threads that torch uses."""
    return least_rows(4096, 4096, torch.get_num_threads()) < math.inf


def forget() -> None:
    """Drops what was derived from prices, after they changed."""
    least_rows.cache_clear()


def described(layers: Iterable[nn.Module], rows: int) -> str:
    """Which product computes the maps of these layers for this many rows: a line of `mpnn.explain`."""
    maps = [layer for layer in layers if isinstance(layer, nn.Linear)]
    quick = [
        m for m in maps if type(m) is Linear and rows >= _rows_from(m) and _is_plain(m.weight[:1], m.weight, m.bias)
    ]
    return f"{len(quick)} by oneDNN, {len(maps) - len(quick)} by torch, for {rows:,} rows" if maps else ""


def _rows_from(layer: nn.Linear) -> float:
    return least_rows(layer.in_features, layer.out_features, torch.get_num_threads(), layer.weight.requires_grad)
