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
from mpnn.backends.cost_model import Counts, both_ways
from mpnn.backends.way import Way, members
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


def serves(round: Round) -> tuple[frozenset[str], dict[str, str]]:
    way = _way(round)
    return way.SERVES, way.REASONS


def _way(round: Round) -> Way:
    if round.recurrent:
        return RECURRENCE
    if round.score is not None:
        return PRODUCTS
    return CONVOLUTION if round.weighted else PREFIXES


refusal, counts, estimate, bind, run = members(_way)


# ------------------------------------------------------------------------------------------------ products of features


def _refuse_products(round: Round) -> str | None:
    if _blocks(round.graph) is None:
        return "each row must have the same sources as the row before, or one more, as in complete() and causal()"
    return None


def _count_products(round: Round) -> Counts:
    return _counts_of(round, cast(list[Block], _blocks(round.graph)), {"call": 1.0})


def _count_recurrence(round: Round) -> Counts:
    deep, wide = _widths(round)
    states = round.batch.numel() * round.heads * deep * wide
    return _counts_of(round, _causal_blocks(round.graph), {"recurrence call": 1.0, "state number": float(states)})


def _counts_of(round: Round, blocks: list[Block], calls: dict[str, float]) -> Counts:
    """Products of the states and of the logits within chunks, components moved, and blocks."""
    heads = round.batch.numel() * round.heads
    deep, wide = _widths(round)
    nodes = sum(b.last - b.first + b.stop - b.start for b in blocks)
    logits = sum((b.last - b.first) * min(LOGITS, b.last - b.first) for b in blocks if b.extent != ALL)
    kind = "double " if round.accumulate_dtype == torch.float64 else ""
    operations = calls | {
        "block": float(heads * len(blocks)),
        f"{kind}product": float(heads * (nodes * deep * wide + logits * (deep + wide))),
        f"{kind}number": float(heads * nodes * (deep + wide)),
    }
    if round.value.device.type == "cuda":
        operations |= _steps_on_gpu(round, deep, wide)
    return both_ways(operations, round.needs_grad)


def _bytes_of_products(round: Round) -> float:
    deep, wide = _widths(round)
    numbers = deep * wide + 2 * LOGITS * (LOGITS + deep + wide)
    return float(round.batch.numel() * round.heads * round.accumulate_dtype.itemsize * numbers)


def _widths(round: Round) -> tuple[int, int]:
    """The widths of a key and of a value."""
    return cast(Dot, round.score).key.shape[-1], round.value.shape[-1]


def _bytes_of_values(round: Round) -> float:
    return float(round.value.numel() * round.accumulate_dtype.itemsize)


def _steps_on_gpu(round: Round, deep: int, wide: int) -> dict[str, float]:
    """Returns the number of steps that a GPU takes one after the other: the chunks, or the nodes, of the longest
    document of a recurrence, or the chunks of running sums."""
    if not round.recurrent:
        return {"step": round.graph.num_dst / LOGITS}
    lengths = _documents(round.graph) or [0]
    ends = list(accumulate(n for n in lengths if n)) or [0]
    chunked = in_chunks(round.value.dtype, deep, wide, ends)
    return {"chunk": max(lengths) / 64} if chunked else {"node": float(max(lengths))}


def _run_products(round: Round) -> Result:
    score = cast(Dot, round.score)
    value = round.value
    groups = lcm(score.key.shape[-2], value.shape[-2])
    query, key, value = (_in_groups(x, groups) for x in (score.query, score.key, value))
    if any(forward_ad.unpack_dual(x).tangent is not None for x in (query, key, value)):
        # torch treats the tangents of an operator without a rule as zeros
        raise NotImplementedError('scan has no forward-mode derivatives; name backend="edge_list"')
    blocks = cast(list[Block], _blocks(round.graph))
    out = linear_attention(query, key, value, score.scale, [number for block in blocks for number in block])
    shape = (*round.batch, round.graph.num_dst, round.heads, value.shape[-1])
    return Result(out.view(shape).to(round.value.dtype))


# ------------------------------------------------------------------------------------------------ recurrences


def _refuse_recurrence(round: Round) -> str | None:
    return library.why_missing() if round.value.is_cpu else unavailable(round.value, round.tensors)


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


def _refuse_prefixes(round: Round) -> str | None:
    lengths = _documents(round.graph)
    count = len(lengths) if lengths is not None else int(_is_of_prefixes(round.graph))
    few = 0 < count * _MIN_ROWS <= round.graph.num_dst
    return None if few else "running sums without weights are those of causal() or prefix(), or of long documents"


def _count_prefixes(round: Round) -> Counts:
    kind = "compared" if type(round.reduce) in (Max, Min) else "summed"
    passes = 3.0 if type(round.reduce) is Var else 1.0
    return both_ways({"call": 1.0, f"{kind} number": passes * round.value.numel()}, round.needs_grad)


def _run_prefixes(round: Round) -> Result:
    """Nodes come first, so that running sums add rows to rows."""
    of_prefixes = _OF_PREFIXES[type(round.reduce)]
    x = round.value.to(round.accumulate_dtype).movedim(-3, 0)
    lengths = _documents(round.graph)
    if lengths is not None:
        out = torch.cat([of_prefixes(part) for part in x.flatten(1).split(lengths)])
    else:
        graph = round.graph
        count = graph.cached("lengths of prefixes", lambda: torch.from_numpy(graph.runs.degree()))
        out = of_prefixes(x.flatten(1)).index_select(0, (count - 1).clamp(min=0))
        out = torch.where(count[:, None] > 0, out, torch.zeros_like(out))
    out = out.view(round.graph.num_dst, *x.shape[1:]).movedim(0, -3)
    return Result(out.to(round.result_dtype))


# ------------------------------------------------------------------------------------------------ convolutions


def _refuse_convolution(round: Round) -> str | None:
    radius, _ = _find_convolution(round.graph) or (_MAX_RADIUS + 1, [])
    if len(round.bias) != 1 or radius > _MAX_RADIUS or round.value.shape[-2] != round.heads:
        return (
            "without a score it computes short convolutions: one bias by Offset, with a weight for each head of the "
            f"values, over causal() & window(radius) with a radius of at most {_MAX_RADIUS}"
        )
    return None


def _count_convolution(round: Round) -> Counts:
    radius, _ = _convolution(round)
    return both_ways({"call": 1.0, "shifted number": float(round.value.numel()) * (radius + 1)}, round.needs_grad)


def _convolution(round: Round) -> tuple[int, list[int]]:
    return cast(tuple[int, list[int]], _find_convolution(round.graph))


def _run_convolution(round: Round) -> Result:
    radius, documents = _convolution(round)
    table = cast(BiasTable, round.bias[0])
    width = round.value.shape[-1]
    clip = cast(Offset, table.relation).clip
    rows = (clip - torch.arange(radius + 1, device=table.table.device)).clamp(min=0)  # of each offset before
    weight = table.table.index_select(0, rows).expand(-1, round.heads).repeat_interleave(width, -1)
    value = round.value.to(round.accumulate_dtype).flatten(-2)
    out = short_convolution(value, weight, documents)
    return Result(out.unflatten(-1, (round.heads, width)).to(round.value.dtype))


# ------------------------------------------------------------------------------------------------ ways

_ANY = FLOATS | {"unnormalized", "gradient"}
_WEIGHTS = "it needs dot products as weights, without a normalizer or softcap"
_SINGLE = "it never computes single weights, so it cannot drop or return them"
_EXPLICIT = {"explicit graph": "the graph is a list of edges, and running sums need a structured graph"}
REASONS = _EXPLICIT | {
    **dict.fromkeys(("softmax", "sigmoid", "softcap"), _WEIGHTS),
    **dict.fromkeys(("dropout", "return_weights"), _SINGLE),
}
PRODUCTS = Way(
    NAME,
    _ANY | DEVICES | {"Dot", "sum"},
    REASONS,
    _refuse_products,
    _count_products,
    _bytes_of_products,
    lambda round: _run_products,
)
RECURRENCE = Way(
    NAME,
    _ANY | {"cpu", "cuda", "Dot", "sum", "log_gate", "beta", "state", "return_state"},
    REASONS | {"another device": "recurrences run on CPU and CUDA only"},
    _refuse_recurrence,
    _count_recurrence,
    _bytes_of_products,
    lambda round: _run_recurrence,
)
CONVOLUTION = Way(
    NAME,
    _ANY | DEVICES | {"no score", "bias by Offset", "sum"},
    REASONS,
    _refuse_convolution,
    _count_convolution,
    _bytes_of_values,
    lambda round: _run_convolution,
)
PREFIXES = Way(
    NAME,
    _ANY | AGGREGATES | {"cpu", "no score", "keep_accumulate_dtype"},
    _EXPLICIT,
    _refuse_prefixes,
    _count_prefixes,
    _bytes_of_values,
    lambda round: _run_prefixes,
)
SERVES = PRODUCTS.SERVES | RECURRENCE.SERVES | CONVOLUTION.SERVES  # in one way; `serves` is exact


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
    return graph.num_src > 0 and not graph.runs.start.any()


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
