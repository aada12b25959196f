"""Sums, means and extremes with torch_sparse's kernels (the extra `mpnn[scatter]`), without an E x d tensor."""

from functools import cache
from importlib.util import find_spec

from torch import Tensor

from mpnn.aggregate import Max, Mean, Min, Sum
from mpnn.backends.cost_model import Estimate, both_ways, priced
from mpnn.round import Result, Round
from mpnn.round.needs import first

NAME = "scatter"

_NAMES: dict[type, str] = {Sum: "sum", Mean: "mean", Max: "max", Min: "min"}


SERVES = frozenset(_NAMES.values()) | {
    "cpu", "cuda", "float32", "float64", "no score", "unnormalized", "bias per edge", "explicit graph", "gradient"
}  # fmt: skip
_COARSE = "it accumulates in the dtype of the features, which is too coarse with 16 bits"
REASONS = dict.fromkeys(("float16", "bfloat16"), _COARSE)


def refusal(round: Round) -> str | None:
    install = "pip install --no-build-isolation torch-scatter torch-sparse"
    ones = [isinstance(b, Tensor) and b.dim() == 2 and b.shape[1] == 1 for b in round.bias]
    shares = "its kernels give the whole gradient to one of several equal extremes, instead of sharing it"
    reasons = {
        f"it needs torch-scatter and torch-sparse: {install}": not _installed(),
        "it takes one weight per edge": len(ones) > 1 or not all(ones),
        "its kernels do not support a graph without edges": round.graph.num_edges == 0,
        # They divide by their number, which ends the process.
        "its kernels do not support features without numbers": round.value.numel() == 0,
        shares: type(round.reduce) in (Max, Min) and round.needs_grad,
    }
    return first(reasons)


@cache
def _installed() -> bool:
    return all(find_spec(name) is not None for name in ("torch_sparse", "torch_scatter"))


def counts(round: Round) -> dict[str, float]:
    numbers = round.graph.num_edges * round.batch.numel() * round.value.shape[-2:].numel()
    return both_ways({"call": 1.0, "number": float(numbers)}, round.needs_grad)


def estimate(round: Round) -> Estimate:
    return priced(round.value.device, NAME, counts(round), 0.0)


def run(round: Round) -> Result:
    from torch_sparse import SparseTensor, matmul

    graph = round.graph
    csr = round.graph.csr
    # The kernels read memory, which holds the numbers of a negated view with the other sign.
    biases = [b[:, 0].to(round.accumulate_dtype).resolve_neg() for b in round.bias if isinstance(b, Tensor)]
    weights = [csr.from_caller(b) for b in biases]
    matrix = SparseTensor(
        rowptr=csr.ptr,
        col=csr.col,
        value=weights[0] if weights else None,
        sparse_sizes=(graph.num_dst, graph.num_src),
        is_sorted=True,
    )
    features = round.value.resolve_neg().movedim(-3, 0)
    out = matmul(matrix, features.flatten(1), reduce=_NAMES[type(round.reduce)])
    if out.requires_grad:
        out.register_hook(Tensor.resolve_neg)
    return Result(out.view(graph.num_dst, *features.shape[1:]).movedim(0, -3))
