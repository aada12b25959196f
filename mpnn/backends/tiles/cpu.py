"""Tiles on CPU, with this library's kernels; see `mpnn/kernels/cpu/tile_attention.cpp`.

The kernel looks up biases by offset in a table, and reads all other biases edge by edge.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.backends import reference as again
from mpnn.backends.cost_model import Estimate, both_ways, of_biases, priced
from mpnn.backends.tiles import split
from mpnn.graph import Graph
from mpnn.graph.blocks import BlockMask, boundaries, count_blocks, grid
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, total
from mpnn.graph.relations import Offset
from mpnn.graph.runs import Runs
from mpnn.kernels.cpu import library
from mpnn.kernels.tiles.attention import COLUMNS, MAX_KEPT, ROWS, Dropout, Layout, Repeated, TileAttention
from mpnn.round import Result, Round, reads
from mpnn.round.needs import FLOATS, on_edges
from mpnn.scores import Dot

SERVES = FLOATS | on_edges("bias") | {
    "cpu", "Dot", "softmax", "softcap", "bias by nodes", "sum", "dropout", "head_ids",
    "node_ids", "return_lse", "keep_accumulate_dtype", "gradient"
}  # fmt: skip
_FOR_PAIRS = "edge_key and edge_value would be materialized for all pairs"
REASONS = {
    "explicit graph": "the graph is a list of edges, without runs that fill tiles",
    **dict.fromkeys(on_edges("edge_key") | on_edges("edge_value"), _FOR_PAIRS),
    "return_weights": "it does not materialize weights",
}

_MANY_RUNS = 1 << 21
_SAMPLES = 16
_FULL = 1.5  # pairs of tiles for each edge, up to which splitting rows cannot help
_GOLDEN = 0.6180339887  # multiples of it are spread evenly in 0 to 1


def refusal(round: Round) -> str | None:
    if (reason := library.why_missing()) is not None:
        return reason
    if round.graph.is_scattered:
        return "the nodes of its cliques are not contiguous; cliques run faster as a batch"
    return None


def counts(round: Round) -> dict[str, float]:
    """The counts of the cheaper way: of whole destinations, or of split ones."""
    ways = [_counts(round, round.graph, 0)]
    if (pieces := _pieces(round)) is not None:
        ways.append(_counts(round, pieces.graph, len(pieces.row)))
    return min(ways, key=lambda way: priced(round.value.device, "tiles", way, 0.0).seconds)


def _counts(round: Round, graph: Graph, pieces: int) -> dict[str, float]:
    """Pairs in tiles times heads, products on them, tiles, and components of nodes and of pieces that are copied."""
    score = round.score
    assert isinstance(score, Dot)
    (tiles, area), batch = _tile_counts(graph), round.batch.numel()
    heads = batch * round.heads
    widths = score.query.shape[-1] + round.value.shape[-1]
    pairs = float(area * heads)
    kind = "double " * (round.accumulate_dtype == torch.float64)
    nodes = graph.num_src * round.value.shape[-2] + graph.num_dst * round.heads
    operations = {"call": 1.0, f"{kind}pair": pairs, f"{kind}product": pairs * widths}
    operations |= {"tile": float(tiles * heads), "node number": float(batch * nodes * widths)}
    operations["row of tiles"] = float(-(-graph.num_dst // ROWS) * heads)
    if pieces:
        operations["piece number"] = float(batch * pieces * round.heads * widths)
    if round.dropout:
        operations["dropped pair"] = pairs
    if per_edge := [b for b in round.bias if not by_offset(b)]:
        operations |= {"biased edge": float(graph.num_edges * heads), **of_biases(per_edge, "edge", graph.num_edges)}
    if round.dst_bias is not None or round.src_bias is not None:
        operations["bias call"] = 1.0
    return both_ways(operations, round.needs_grad)


def estimate(round: Round) -> Estimate:
    graph = round.graph
    score = round.score
    assert isinstance(score, Dot)
    widths = score.query.shape[-1] + round.value.shape[-1]
    size = torch.finfo(round.accumulate_dtype).bits // 8
    one_head = (2 * graph.num_dst if round.needs_grad else graph.num_src) * widths * size
    biases = 0 if all(map(by_offset, round.bias)) else graph.num_edges * round.heads * size
    return priced(
        round.value.device, "tiles", counts(round), torch.get_num_threads() * min(one_head, MAX_KEPT) + biases
    )


def bind(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form over this graph."""
    score = round.score
    assert isinstance(score, Dot)
    is_plain = reads(round, ("value",), ("query", "key", "scale", "softcap")) and not round.needs_grad
    tensors = score.query, score.key, round.value
    if not is_plain or round.value.dim() > 4 or _pieces(round) is not None or not Repeated.serves(*tensors):
        return run
    layout = _layout_of(round.graph)
    shape = (*round.batch, round.graph.num_dst, round.heads, round.value.shape[-1])
    query, key, value = map(_pad, tensors)
    return partial(_run_again, Repeated(query, key, value, layout), shape)


def _run_again(kernel: Repeated, shape: tuple[int, ...], round: Round) -> Result:
    score: Any = round.score
    return Result(kernel(score.query, score.key, round.value, score.scale, score.softcap, shape))


def _layout_of(graph: Graph) -> Layout:
    return graph.cached("tiles: layout", lambda: _layout(graph))


def run(round: Round) -> Result:
    graph = round.graph
    score = round.score
    value = round.value
    assert isinstance(score, Dot)
    pieces = _pieces(round)
    pieces = pieces if pieces is not None and "piece number" in counts(round) else None
    query, key, padded = map(_pad, (score.query, score.key, value))
    if key.shape[2] != padded.shape[2]:
        key, padded = (x.repeat_interleave(round.heads // x.shape[2], 2) for x in (key, padded))
    if pieces is not None:
        query = query.index_select(1, pieces.row)
        graph = pieces.graph
    out, lse = TileAttention.apply(
        query,
        key,
        padded,
        table(round, ROWS),
        _per_edge([b for b in round.bias if not by_offset(b)], round),
        *(None if x is None else heads_first(x) for x in round.node_biases()),
        score.scale,
        score.softcap,
        _dropout(round),
        _layout_of(graph),
        partial(reference, again.form(round, graph), score.scale) if torch.is_grad_enabled() else None,
    )
    if pieces is not None:
        out, lse = split.merge(pieces, out, lse)
    out = out[..., : value.shape[-1]].to(round.result_dtype)
    out = out.view(*round.batch, *out.shape[1:])
    if not round.return_lse:
        return Result(out)
    lse = lse.nan_to_num(torch.nan, -torch.inf, -torch.inf).mT
    return Result(out, lse=lse.view(*round.batch, round.graph.num_dst, round.heads))


def reference(form: Round, scale: float, *tensors: Any) -> tuple[Tensor, Tensor]:
    """`TileAttention` by differentiable operations."""
    query, key, value, table, bias, dst_bias, src_bias = tensors
    graph = form.graph
    if table is not None:
        src, dst = graph.ends
        table = table.index_select(1, dst - src + graph.num_src - 1).mT
    if bias is not None:
        bias = bias.mT.squeeze(0) if len(bias) == 1 else bias.mT
    of_nodes = {name: x if x is None else x.mT for name, x in (("dst_bias", dst_bias), ("src_bias", src_bias))}
    score = {"query": query, "key": key, "scale": scale}
    result = again.run(again.filled(form, score, value=value, bias=(table, bias), return_lse=True, **of_nodes))
    assert result.lse is not None
    return result.out, result.lse.mT


def _pieces(round: Round) -> split.Pieces | None:
    """The pieces of the graph's rows, if the round may run over them: sums of 16-bit pieces would be rounded."""
    if round.biased or round.normalize != "softmax" or round.dropout or round.value.dtype.itemsize == 2:
        return None
    return round.graph.cached("tiles: pieces", lambda: _pieces_of(round.graph))


def _pieces_of(graph: Graph) -> split.Pieces | None:
    return None if _tile_counts(graph)[1] <= _FULL * graph.num_edges else split.pieces(graph)


def _tile_counts(graph: Graph) -> tuple[int, int]:
    return graph.cached("tiles: counts", lambda: count_tiles(graph.runs, ROWS, COLUMNS))


def count_tiles(runs: Runs, rows: int, columns: int) -> tuple[int, int]:
    """Tiles and pairs in them. Of very many runs, those of one row of tiles in each of `_SAMPLES` equal parts are
    counted, at places that no period of the graph repeats: an estimate needs no more."""
    step = runs.num_dst // (rows * _SAMPLES)
    if step < 2 or runs.num_runs < _MANY_RUNS:
        return count_blocks(runs, rows, columns)
    part = np.arange(_SAMPLES)
    first_rows = (part * step + ((part + 1) * _GOLDEN % 1 * step).astype(np.int64)) * rows
    counted = count_blocks(runs.take((first_rows[:, None] + np.arange(rows)).ravel()), rows, columns)
    tiles, area = (round(n * runs.num_dst / (rows * _SAMPLES)) for n in counted)
    return tiles, area


def _layout(graph: Graph) -> Layout:
    runs = graph.runs
    queries, keys = (grid(starts, size) for starts, size in zip(boundaries(runs), (ROWS, COLUMNS), strict=True))
    tiles = BlockMask.on(runs, queries, keys)
    ptr, row, order = tiles.transposed()
    length = runs.stop - runs.start
    arrays = (
        (tiles.ptr, tiles.column, tiles.full, tiles.low, tiles.high),
        (ptr, row, tiles.full[order], tiles.low[order], tiles.high[order]),
        (runs.ptr, runs.start, runs.stop, np.cumsum(length) - length),
    )
    by_query, by_key, of_runs = (tuple(map(np.ascontiguousarray, group)) for group in arrays)
    return Layout(by_query, by_key, of_runs, (queries, keys))


def _pad(x: Tensor) -> Tensor:
    """x [..., N, H, D] as [B, N, H, D], with D padded to a multiple of 8."""
    x = x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0)
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def heads_first(x: Tensor) -> Tensor:
    """x [..., N, H] as [B, H, N]."""
    return (x.flatten(0, -3) if x.dim() > 2 else x[None]).mT.contiguous().resolve_neg()


def _per_edge(biases: list[PerEdge], round: Round) -> Tensor | None:
    """The sum of all biases per edge, [B or 1, H, E]."""
    total = round.edge_bias(biases)
    if total is None:
        return None
    batch = round.batch if total.dim() > 2 else torch.Size(())
    total = total.expand(*batch, round.graph.num_edges, round.heads)
    return heads_first(total)


def _dropout(round: Round) -> Dropout | None:
    keys = round.dropout_keys()
    return None if keys is None else Dropout(keys, round.dropout, round.graph.node_ids)


def by_offset(bias: PerEdge) -> bool:
    """Whether a bias is a table by offset."""
    return isinstance(bias, EmbeddingTable) and type(bias.relation) is Offset


def table(round: Round, room: int = 0) -> Tensor | None:
    """The sum of all biases by offset, [H, offsets + room]: the bias of i - j is at index i - j + num_src - 1. None if
    there are no such biases.

    The look-up is `F.embedding`, whose gradient has the same bits in each run on CUDA, unlike that of `index_select`.
    """
    graph = round.graph
    biases = [b for b in round.bias if by_offset(b)]
    if not biases:
        return None
    offsets = graph.num_dst + graph.num_src - 1 + room
    i = torch.arange(offsets, device=graph.device) - (graph.num_src - 1) + graph.shift
    zero = torch.zeros((), dtype=torch.int64, device=graph.device)
    by_index = total(
        [
            F.embedding(b.relation.ids(i, zero), b.table.to(round.accumulate_dtype))
            for b in biases
            if isinstance(b, EmbeddingTable) and b.relation
        ]
    )
    return None if by_index is None else by_index.expand(-1, round.heads).T.contiguous()
