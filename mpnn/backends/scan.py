"""Linear attention and recurrences: weights are inner products without a normalizer, so sums over sources are computed
first, in time linear in the nodes (`mpnn.kernels.recurrent.scan`). The sums are one matrix for rows with the same
sources, and a running sum if each row has one source more than the row before. On CPU and CUDA the running sum may have
gates, the delta rule, and a state that enters and leaves. On CUDA such a recurrence runs in parallel chunks if its
features are at most 256 wide, of at most 32 bits, and its documents have 16 nodes or more on average; else node by
node, as a step of decoding does.

Without a score, a weight for each head and offset over `causal() & window(radius)` is a short convolution
(`mpnn.kernels.recurrent.convolution`): the sum of a few shifted products. Without weights, sums, means, extremes
and variances over `causal()`, `prefix(k)` or `causal() & documents(...)` are running ones
(`mpnn.kernels.recurrent.prefixes`).
"""

from collections.abc import Callable
from itertools import accumulate, pairwise
from math import lcm
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn.aggregate import Max, Mean, Min, Sum, Var
from mpnn.backends.cost_model import Estimate, both_ways, priced
from mpnn.graph import Graph
from mpnn.graph.bound import cached_on_graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.graph.row_groups import bounds
from mpnn.kernels.cpu import library
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.kernels.recurrent.convolution import short_convolution
from mpnn.kernels.recurrent.prefixes import prefix_maxima, prefix_means, prefix_minima, prefix_sums, prefix_variances
from mpnn.kernels.recurrent.scan import ALL, LOGITS, PAST, Block, in_chunks, linear_attention, recurrence
from mpnn.round import Result, Round
from mpnn.round.needs import AGGREGATES, DEVICES, FLOATS
from mpnn.scores import Dot

NAME = "scan"

_MAX_RADIUS = 16  # of a short convolution
_MIN_ROWS = 16  # with the same first source, on average; below this the backend is not worthwhile
_MAX_GROUPS = (
    3  # of neighboring rows with the same first source, on average: the last source stays, then moves, then stays
)


_RECURRENCES = frozenset({"log_gate", "beta", "state", "return_state"})
SERVES = (  # on CPU and CUDA, with a score or without; `serves` is exact
    FLOATS | DEVICES | _RECURRENCES | {"Dot", "no score", "bias by Offset", "unnormalized", "sum", "gradient"}
)
_PREFIXES = FLOATS | AGGREGATES | {"cpu", "no score", "unnormalized", "gradient", "keep_accumulate_dtype"}
_WEIGHTS = "it needs dot products as weights, without a normalizer or softcap"
_SINGLE = "it never computes single weights, so it cannot drop or return them"
REASONS = {
    **dict.fromkeys(("softmax", "sigmoid", "softcap"), _WEIGHTS),
    **dict.fromkeys(("dropout", "return_weights"), _SINGLE),
    "explicit graph": "the graph is a list of edges, and running sums need a structured graph",
}


def serves(round: Round) -> tuple[frozenset[str], dict[str, str]]:
    if _is_without_weights(round):
        return _PREFIXES, {"explicit graph": REASONS["explicit graph"]}
    served = SERVES - {"no score", "bias by Offset"} if round.score is not None or not round.bias else SERVES - {"Dot"}
    if round.value.device.type in ("cpu", "cuda"):
        return served, REASONS
    return served - _RECURRENCES, REASONS | dict.fromkeys(_RECURRENCES, "recurrences run on CPU and CUDA only")


def refusal(round: Round) -> str | None:
    if round.recurrent:
        on_gpu = round.value.device.type == "cuda"
        return unavailable(round.value, round.tensors) if on_gpu else library.why_missing()
    if _is_without_weights(round):
        lengths = _documents(round.graph)
        count = len(lengths) if lengths is not None else int(_is_of_prefixes(round.graph))
        few = 0 < count * _MIN_ROWS <= round.graph.num_dst
        return None if few else "running sums without weights are those of causal() or prefix(), or of long documents"
    if round.score is None:
        return _why_no_convolution(round)
    if _blocks(round.graph) is None:
        return "each row must have the same sources as the row before, or one more, as in complete() and causal()"
    return None


def counts(round: Round) -> dict[str, float]:
    """Products of the states and of the logits within chunks, components moved, and blocks."""
    if _is_without_weights(round):
        kind = "compared" if type(round.reduce) in (Max, Min) else "summed"
        passes = 3.0 if type(round.reduce) is Var else 1.0
        return both_ways({"call": 1.0, f"{kind} number": passes * round.value.numel()}, round.needs_grad)
    if (convolved := _convolution(round)) is not None:
        numbers = float(round.value.numel()) * (convolved[0] + 1)
        return both_ways({"call": 1.0, "shifted number": numbers}, round.needs_grad)
    score = round.score
    blocks = _causal_blocks(round.graph) if round.recurrent else _blocks(round.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    heads = round.batch.numel() * round.heads
    deep = score.query.shape[-1]
    wide = round.value.shape[-1]
    nodes = sum(b.last - b.first + b.stop - b.start for b in blocks)
    logits = sum((b.last - b.first) * min(LOGITS, b.last - b.first) for b in blocks if b.extent != ALL)
    kind = "double " if round.accumulate_dtype == torch.float64 else ""
    calls = {"recurrence call": 1.0, "state number": float(heads * deep * wide)} if round.recurrent else {"call": 1.0}
    operations = calls | {
        "block": float(heads * len(blocks)),
        f"{kind}product": float(heads * (nodes * deep * wide + logits * (deep + wide))),
        f"{kind}number": float(heads * nodes * (deep + wide)),
    }
    if round.value.device.type == "cuda":
        operations |= _steps(round, deep, wide)
    return both_ways(operations, round.needs_grad)


def estimate(round: Round) -> Estimate:
    score = round.score
    operations = counts(round)
    if score is None:
        size = round.value.numel() * round.accumulate_dtype.itemsize
        return priced(round.value.device, NAME, operations, size)
    assert isinstance(score, Dot)
    deep = score.query.shape[-1]
    wide = round.value.shape[-1]
    dtype = round.accumulate_dtype
    size = round.batch.numel() * round.heads * dtype.itemsize * (deep * wide + 2 * LOGITS * (LOGITS + deep + wide))
    return priced(round.value.device, NAME, operations, size)


def _steps(round: Round, deep: int, wide: int) -> dict[str, float]:
    """Returns the number of steps that a GPU takes one after the other: the chunks, or the nodes, of the longest
    document of a recurrence, or the chunks of running sums."""
    if not round.recurrent:
        return {"step": round.graph.num_dst / LOGITS}
    lengths = _documents(round.graph) or [0]
    ends = list(accumulate(n for n in lengths if n)) or [0]
    chunked = in_chunks(round.value.dtype, deep, wide, ends)
    return {"chunk": max(lengths) / 64} if chunked else {"node": float(max(lengths))}


def run(round: Round) -> Result:
    if round.recurrent:
        return _run_recurrence(round)
    if _is_without_weights(round):
        return _run_prefixes(round)
    if (convolved := _convolution(round)) is not None:
        return _run_convolution(round, *convolved)
    score = round.score
    value = round.value
    blocks = _blocks(round.graph)
    assert isinstance(score, Dot)
    assert blocks is not None
    groups = lcm(score.key.shape[-2], value.shape[-2])
    query, key, value = (_in_groups(x, groups) for x in (score.query, score.key, value))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (query, key, value)):
        # torch treats the tangents of an operator without a rule as zeros
        raise NotImplementedError('scan has no forward-mode derivatives; name backend="edge_list"')
    out = linear_attention(query, key, value, score.scale, [number for block in blocks for number in block])
    shape = (*round.batch, round.graph.num_dst, round.heads, value.shape[-1])
    return Result(out.view(shape).to(round.value.dtype))


def _run_recurrence(round: Round) -> Result:
    score = cast(Dot, round.score)
    gate = round.log_gate
    gate = gate.squeeze(-1) if gate is not None and gate.shape[-1] == 1 else gate

    def flat(x: Tensor) -> Tensor:
        return x.reshape(round.batch.numel(), *x.shape[len(round.batch) :])

    features = flat(score.query), flat(score.key), flat(round.value)
    numbers = (None if x is None else flat(x) for x in (gate, round.beta, round.state))
    out, last = recurrence(
        *features, *numbers, scale=score.scale, documents=_documents(round.graph), dtype=round.value.dtype
    )
    last = last.view(*round.batch, *last.shape[1:])
    return Result(out.view(*round.batch, *out.shape[1:]), state=last if round.return_state else None)


_OF_PREFIXES: dict[type, Callable[[Tensor], Tensor]] = {
    Sum: prefix_sums, Mean: prefix_means, Max: prefix_maxima, Min: prefix_minima, Var: prefix_variances
}  # fmt: skip


def _is_without_weights(round: Round) -> bool:
    """Whether this aggregates values alone."""
    return not round.weighted and round.edge_value is None and not round.recurrent


def _run_prefixes(round: Round) -> Result:
    """Nodes first, so that running sums add rows to rows."""
    of_prefixes = _OF_PREFIXES[type(round.reduce)]
    x = round.value.to(round.accumulate_dtype).movedim(-3, 0)
    lengths = _documents(round.graph)
    if lengths is not None:
        out = torch.cat([of_prefixes(part) for part in x.flatten(1).split(lengths or [0])])
    else:
        count = _lengths(round.graph)
        out = of_prefixes(x.flatten(1)).index_select(0, (count - 1).clamp(min=0))
        out = torch.where(count[:, None] > 0, out, torch.zeros_like(out))
    out = out.view(round.graph.num_dst, *x.shape[1:]).movedim(0, -3)
    return Result(out.to(round.result_dtype))


def _lengths(graph: Graph) -> Tensor:
    """How many sources each destination of a graph of prefixes has, [N_dst]."""
    return graph.cached("lengths of prefixes", lambda: torch.from_numpy(graph.runs.degree()))


def _convolution(round: Round) -> tuple[int, list[int]] | None:
    if round.score is not None:
        return None
    return _find_convolution(round.graph)


def _why_no_convolution(round: Round) -> str | None:
    convolved = _convolution(round)
    if len(round.bias) != 1 or convolved is None or convolved[0] > _MAX_RADIUS or round.value.shape[-2] != round.heads:
        return (
            "without a score it computes short convolutions: one bias by Offset, with a weight for each head of the "
            f"values, over causal() & window(radius) with a radius of at most {_MAX_RADIUS}"
        )
    return None


def _run_convolution(round: Round, radius: int, documents: list[int]) -> Result:
    table = cast(BiasTable, round.bias[0])
    width = round.value.shape[-1]
    clip = cast(Offset, table.relation).clip
    rows = (clip - torch.arange(radius + 1, device=table.table.device)).clamp(min=0)  # of each offset before
    weight = table.table.index_select(0, rows).expand(-1, round.heads).repeat_interleave(width, -1)
    value = round.value.to(round.accumulate_dtype).flatten(-2)
    out = short_convolution(value, weight, documents)
    return Result(out.unflatten(-1, (round.heads, width)).to(round.value.dtype))


def _in_groups(x: Tensor, groups: int) -> Tensor:
    """Reshapes x [..., N, H, F] to [B, N, groups, H / groups, F]; repeats heads if there are fewer than groups."""
    if x.shape[-2] < groups:
        x = x.repeat_interleave(groups // x.shape[-2], -2)
    nodes, heads, width = x.shape[-3:]
    return x.reshape(x.shape[:-3].numel(), nodes, groups, heads // groups, width)


# ------------------------------------------------------------------------------------------------ the graph in blocks


@cached_on_graph
def _documents(graph: Graph) -> list[int] | None:
    """The lengths of causal documents, or None."""
    return graph.parts.lengths.tolist() if graph.parts is not None and graph.parts.is_causal else None


@cached_on_graph
def _is_of_prefixes(graph: Graph) -> bool:
    """Whether each destination attends to the first sources, some number of them: `prefix(k)`, `causal()`."""
    return graph.num_src > 0 and graph.runs.most_runs <= 1 and not graph.runs.start.any()


@cached_on_graph
def _find_convolution(graph: Graph) -> tuple[int, list[int]] | None:
    """The radius and the lengths of the documents of `causal() & window(radius) & documents(lengths)`, without empty
    ones; None if the graph is another."""
    runs = graph.runs
    nodes = graph.num_dst
    if nodes != graph.num_src or not runs.has_one_run_each or not (runs.stop == np.arange(nodes) + 1).all():
        return None
    count = runs.stop - runs.start
    radius = int(count.max(initial=1)) - 1
    begins = count == 1
    if not (begins[1:] | (count[1:] == np.minimum(count[:-1] + 1, radius + 1))).all() or count.sum() != graph.num_edges:
        return None
    lengths: list[int] = np.diff(np.flatnonzero(begins), append=nodes).tolist()
    return radius, lengths


def _causal_blocks(graph: Graph) -> list[Block]:
    ends = list(accumulate(_documents(graph) or (), initial=0))
    return [Block(a, b, a, b, PAST) for a, b in pairwise(ends)]


@cached_on_graph
def _blocks(graph: Graph) -> list[Block] | None:
    """The edges as blocks, or None if they do not form a few blocks.

    Neighboring rows with the same sources are a block. If each row has one source more than the row before, the sources
    of the first row but the last of them are a block, and the others a running sum.
    """
    runs = graph.runs
    if runs.most_runs > 1:
        return None
    first, last = bounds(runs)
    starts = runs.start[first]
    changes = np.count_nonzero(np.diff(starts))
    if changes * _MIN_ROWS > graph.num_dst or len(first) > _MAX_GROUPS * (changes + 1):
        return None
    row = runs.row
    blocks: list[Block] = []
    ends = np.stack([row[first], row[last] + 1, starts, runs.stop[first], runs.stop[last]], 1)
    for top, bottom, start, stop, end in ends.tolist():
        shared = stop - (end > stop)
        if blocks and blocks[-1][1:] == (top, start, shared, ALL):
            blocks[-1] = blocks[-1]._replace(last=bottom)
        elif start < shared:
            blocks.append(Block(top, bottom, start, shared, ALL))
        if shared < stop:
            blocks.append(Block(top, bottom, shared, end, PAST))
    return blocks
