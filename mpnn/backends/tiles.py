"""Tiled attention for structured graphs: exact, at a cost proportional to the edges, forward and backward.

The graph's runs determine which tiles of (destinations, sources) are empty and which are full, for any length, without
visiting pairs. The kernels are written in C++ for CPU, and in Triton for CUDA. They look up biases by offset in a
table, and read all other biases edge by edge.

On CPU, NaN and infinities of a node reach only the rows that attend to it: a query tile with sums that are not finite
runs again, edge by edge in partial tiles. On CUDA, and in gradients, they can reach other rows of the same tiles,
because a weight of zero times NaN is NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mpnn.backends import reference
from mpnn.backends.cost_model import Counts, Estimate, both_ways, kind_of, of_biases, priced
from mpnn.backends.way import Way
from mpnn.graph import Graph
from mpnn.graph.blocks import BlockMask, boundaries, count_blocks, grid
from mpnn.graph.bound import cached_on_graph
from mpnn.graph.edge_tables import EmbeddingTable, PerEdge, total
from mpnn.graph.modes import is_transformed
from mpnn.graph.relations import Offset
from mpnn.graph.runs import Runs
from mpnn.kernels.cpu import library
from mpnn.kernels.cuda.schedule import unavailable
from mpnn.kernels.function import apply_of
from mpnn.kernels.rows import attention as row_attention
from mpnn.kernels.rows.rows import Rows
from mpnn.kernels.rows.spec import CONSTANT, NORMALIZERS
from mpnn.kernels.tiles.attention import (
    COLUMNS,
    MAX_KEPT,
    ROWS,
    Dropout,
    Layout,
    Options,
    Prefilled,
    TileAttention,
    present,
)
from mpnn.kernels.tiles.cuda import config as tile_config
from mpnn.kernels.tiles.cuda.config import Config
from mpnn.round import Result, Round
from mpnn.round.needs import FLOATS, on_edges
from mpnn.scores import Dot

NAME = "tiles"
_MANY_RUNS = 1 << 21
_SAMPLES = 16
_FULL = 1.5  # pairs of tiles for each edge, up to which splitting rows cannot help
_GOLDEN = 0.6180339887  # multiples of it are spread evenly in 0 to 1
_WIDE = {2: 128, 4: 64}  # wider heads have a price of their own on a GPU, by bytes of a number


def serves(round: Round) -> tuple[frozenset[str], dict[str, str]]:
    way = WAYS.get(round.value.device.type)
    return (way.SERVES, way.REASONS) if way else (frozenset(), {})


def refusal(round: Round) -> str | None:
    return WAYS[round.value.device.type].refusal(round)


def counts(round: Round) -> Counts:
    return WAYS[round.value.device.type].counts(round)


def estimate(round: Round) -> Estimate:
    return WAYS[round.value.device.type].estimate(round)


def has_tangents(round: Round) -> bool:
    return round.value.is_cpu


def bind(round: Round) -> Callable[[Round], Result]:
    return WAYS[round.value.device.type].bind(round)


def run(round: Round) -> Result:
    return bind(round)(round)


def _completed(round: Round, out: Tensor, lse: Tensor) -> Result:
    """The result of a round, of what kernels of tensors [B, N, H, D] returned."""
    width = round.value.shape[-1]
    # A view that changes nothing would be an operation of its own in the backward pass.
    out = (out if out.shape[-1] == width else out[..., :width]).to(round.result_dtype)
    shape = (*round.batch, *out.shape[-3:])
    out = out if out.shape == shape else out.view(shape)
    if not round.return_lse:
        return Result(out)
    lse = lse.nan_to_num(torch.nan, -torch.inf, -torch.inf).mT
    return Result(out, lse=lse.view(*round.batch, round.graph.num_dst, round.heads))


def _of_nodes(round: Round) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The biases of nodes as [B, H, N]."""
    dst_bias, src_bias = round.node_biases()
    if dst_bias is None or src_bias is None:
        return None, None
    return _heads_first(dst_bias), _heads_first(src_bias)


def _as_many_heads(round: Round, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values [..., N, H, D] with as many heads as each other."""
    if key.shape[-2] == value.shape[-2]:
        return key, value
    repeated = (x.repeat_interleave(round.heads // x.shape[-2], -2) for x in (key, value))
    return tuple(repeated)  # type: ignore[return-value]


def _reference(
    form: Round, graph: Graph, numbers: tuple[Any, ...], scale: float, *tensors: Any
) -> tuple[Tensor, Tensor]:
    """`TileAttention` by differentiable operations. `form`: the round without tensors, and `numbers` its softcap,
    dropout and seed."""
    query, key, value, table, bias, dst_bias, src_bias = tensors
    softcap, dropout, seed = numbers
    if table is not None:
        src, dst = graph.ends
        table = table.index_select(1, dst - src + graph.num_src - 1).mT
    if bias is not None:
        bias = bias.mT.squeeze(0) if len(bias) == 1 else bias.mT
    has_batch = query.dim() > 3
    biases = {"dst_bias": dst_bias, "src_bias": src_bias}
    of_nodes = {name: x if x is None else x.mT if has_batch else x.mT.squeeze(0) for name, x in biases.items()}
    fields = {"graph": graph, "dropout": dropout, "seed": seed, "value": value, "bias": (table, bias), **of_nodes}
    score = {"query": query, "key": key, "scale": scale, "softcap": softcap}
    out, _, lse, _ = reference.run(reference.filled(form, score, return_lse=True, **fields))
    assert lse is not None
    return out, lse.mT if has_batch else lse.mT.unsqueeze(0)


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


def _heads_first(x: Tensor) -> Tensor:
    """x [..., N, H] as [B, H, N]."""
    return (x.flatten(0, -3) if x.dim() > 2 else x[None]).mT.contiguous().resolve_neg()


def _per_edge(round: Round, heads: int | None = None) -> Tensor | None:
    """The sum of all biases per edge, [B or 1, heads, E]; heads None: H or 1."""
    total = round.edge_bias(b for b in round.bias if not _by_offset(b))
    if total is None:
        return None
    batch = round.batch if total.dim() > 2 else torch.Size(())
    return _heads_first(total.expand(*batch, round.graph.num_edges, heads or total.shape[-1]))


def _by_offset(bias: PerEdge) -> bool:
    """Whether a bias is a table by offset."""
    return isinstance(bias, EmbeddingTable) and type(bias.relation) is Offset


def _table(round: Round, room: int = 0) -> Tensor | None:
    """The sum of all biases by offset, [H, offsets + room]: the bias of i - j is at index i - j + num_src - 1. None if
    there are no such biases.

    The look-up is `F.embedding`, whose gradient has the same bits in each run on CUDA, unlike that of `index_select`.
    """
    graph = round.graph
    biases: list[Any] = [b for b in round.bias if _by_offset(b)]
    if not biases:
        return None
    offsets = graph.num_dst + graph.num_src - 1 + room
    i = torch.arange(offsets, device=graph.device) - (graph.num_src - 1) + graph.shift
    zero = torch.zeros((), dtype=torch.int64, device=graph.device)
    by_index = total([F.embedding(b.relation.ids(i, zero), b.table.to(round.accumulate_dtype)) for b in biases])
    assert by_index is not None
    return by_index.expand(-1, round.heads).T.contiguous()


def _with_batch(x: Tensor) -> Tensor:
    """x [..., N, H, D] as [B, N, H, D]."""
    return x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0)


# ------------------------------------------------------------------------------------------------ split rows


_MIN_PIECES = 1 << 11  # below, a second round costs more than full tiles save
_MIN_LENGTH = 8  # sources of a run on average: shorter ones do not fill tiles, however sorted


@dataclass(frozen=True, eq=False)
class Pieces:
    """Split destinations, for graphs in which rows side by side have other runs of sources (MoBA, NSA). Each run of
    each row becomes a destination of its own, a piece. Pieces are sorted by their runs, so that those of a tile have
    the same sources. A second round merges the pieces of a row: a softmax of their log-sum-exps.

        out_i = sum_p exp(lse_p - lse_i) out_p        lse_i = log sum_p exp(lse_p)        over the pieces p of row i

    `graph` has the pieces as destinations, `row` [P] is the row of each. `by_row`: the pieces of each row, and
    `by_piece` the row of each piece, as kernels read them."""

    graph: Graph
    row: Tensor
    by_row: Rows
    by_piece: Rows


def _split(graph: Graph) -> Pieces | None:
    """The pieces of the rows of a graph; None if splitting cannot help: few runs a row, or short ones."""
    if graph.is_explicit:
        return None
    runs = graph.runs
    if _few(runs) or runs.num_edges < _MIN_LENGTH * runs.num_runs:
        return None
    order = np.lexsort((runs.stop, runs.start))
    row = runs.row[order]
    count = runs.num_runs
    ptr = np.arange(count + 1)
    rank = np.empty(count, np.int64)
    rank[order] = np.arange(count)
    split = Graph.from_runs(Runs(count, runs.num_src, ptr, runs.start[order], runs.stop[order]))
    piece = torch.from_numpy(rank)
    by_row = Rows(torch.from_numpy(runs.ptr), piece.int(), piece)
    by_piece = Rows(torch.from_numpy(ptr), torch.from_numpy(row).int(), None, torch.from_numpy(order))
    return Pieces(split, torch.from_numpy(row), by_row, by_piece)


def _merge(pieces: Pieces, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Out [B, N_dst, H, D] and lse [B, H, N_dst] of rows, from those of their pieces; +inf for a row without edges."""
    heads = out.shape[-2]
    kinds = CONSTANT, NORMALIZERS["softmax"]
    spec = row_attention.Spec(pieces.by_row, lambda: pieces.by_piece, {}, heads, *kinds, scale=0.0, return_lse=True)
    tensors = row_attention.Tensors(out, bias=lse.mT.contiguous())
    merged, _, total = row_attention.attend(spec, tensors, partial(_merge_again, pieces))
    assert total is not None
    return merged, total.mT


def _merge_again(pieces: Pieces, *tensors: Any) -> tuple[Tensor, None, Tensor]:
    """The same by operations that are differentiable again."""
    of = row_attention.Tensors(*tensors)
    lse: Any = of.bias
    row = pieces.row
    shape = len(lse), pieces.by_row.num_rows, lse.shape[-1]
    index = row[None, :, None].expand_as(lse)
    top = lse.new_full(shape, -torch.inf).scatter_reduce(1, index, lse.detach(), "amax")
    weights = (lse - top.index_select(1, row)).exp()
    total = lse.new_zeros(shape).index_add(1, row, weights)
    out = of.value.new_zeros(*shape, of.value.shape[-1]).index_add(1, row, weights[..., None] * of.value)
    is_empty = total == 0
    total = total.masked_fill(is_empty, 1.0)
    return out / total[..., None], None, (top + total.log()).masked_fill(is_empty, torch.inf)


def _few(runs: Runs) -> bool:
    return runs.num_runs < max(_MIN_PIECES, runs.num_dst + 1)


# ------------------------------------------------------------------------------------------------ on a CPU


def _refuse_on_cpu(round: Round) -> str | None:
    if (reason := library.why_missing()) is not None:
        return reason
    if round.graph.is_scattered:
        return "the nodes of its cliques are not contiguous; cliques run faster as a batch"
    return None


def _count_on_cpu(round: Round) -> dict[str, float]:
    """The counts of the cheaper way: of whole destinations, or of split ones."""
    ways = [_counts(round, round.graph, 0)]
    if (pieces := _pieces(round)) is not None:
        ways.append(_counts(round, pieces.graph, len(pieces.row)))
    return min(ways, key=lambda way: priced(round.value.device, NAME, way, 0.0).seconds)


def _counts(round: Round, graph: Graph, pieces: int) -> dict[str, float]:
    """Pairs in tiles times heads, products on them, tiles, and components of nodes and of pieces that are copied."""
    score = round.score
    assert isinstance(score, Dot)
    (tiles, area), batch = _tile_counts(graph, ROWS, COLUMNS), round.batch.numel()
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
    if per_edge := [b for b in round.bias if not _by_offset(b)]:
        operations |= {"biased edge": float(graph.num_edges * heads), **of_biases(per_edge, "edge", graph.num_edges)}
    if round.dst_bias is not None or round.src_bias is not None:
        operations["bias call"] = 1.0
    return both_ways(operations, round.needs_grad)


def _bytes_on_cpu(round: Round) -> float:
    graph = round.graph
    score = round.score
    assert isinstance(score, Dot)
    widths = score.query.shape[-1] + round.value.shape[-1]
    size = torch.finfo(round.accumulate_dtype).bits // 8
    one_head = (2 * graph.num_dst if round.needs_grad else graph.num_src) * widths * size
    biases = 0 if all(map(_by_offset, round.bias)) else graph.num_edges * round.heads * size
    return torch.get_num_threads() * min(one_head, MAX_KEPT) + biases


class _Bound(NamedTuple):
    """The parts that all rounds of one form over a graph have in common.

    Attributes:
        form: the round without its tensors and its graph.
        pieces: those of its rows, if the round runs over them.
        apply: that of `TileAttention` if derivatives are recorded.
        in_place: whether the kernels take features as they are. They read them where they lie.
        is_plain: whether the result is what the kernels return for features taken as they are.
    """

    prefilled: Prefilled
    form: Round
    pieces: Pieces | None
    apply: Callable[..., tuple[Tensor, Tensor]] | None
    in_place: bool
    is_plain: bool


def _bind_on_cpu(round: Round) -> Callable[[Round], Result]:
    """The function that runs all rounds of this form over this graph."""
    score = round.score
    assert isinstance(score, Dot)
    pieces = _pieces(round)
    pieces = pieces if pieces is not None and "piece number" in _count_on_cpu(round) else None
    features = score.query, score.key, round.value
    is_whole = all(x.shape[-1] % 8 == 0 and x.dim() <= 4 for x in features)
    in_place = is_whole and score.key.shape[-2] == round.value.shape[-2] and pieces is None
    is_plain = in_place and not (round.biased or round.return_lse) and round.result_dtype == round.value.dtype
    form = reference.form(round).with_fields(graph=None, seed=None)
    apply = apply_of(TileAttention, round.tensors) if round.needs_grad or is_transformed() else None
    layout = _layout(round.graph if pieces is None else pieces.graph)
    return partial(_run_on_cpu, _Bound(Prefilled(layout), form, pieces, apply, in_place, is_plain))


def _run_on_cpu(bound: _Bound, round: Round) -> Result:
    score: Any = round.score
    query = score.query
    key = score.key
    value = round.value
    graph = round.graph
    pieces = bound.pieces
    if not bound.in_place:
        query, key, value = map(_pad, (query, key, value))
        key, value = _as_many_heads(round, key, value)
    if pieces is not None:
        query = query.index_select(1, pieces.row)
        graph = pieces.graph
    biases = (None,) * 4 if bound.is_plain else (_table(round, ROWS), _per_edge(round, round.heads), *_of_nodes(round))
    keys = round.dropout_keys() if round.dropout else None
    dropout = None if keys is None else Dropout(keys, round.dropout, round.graph.node_ids)
    if bound.apply is not None:
        numbers = score.softcap, round.dropout, round.seed
        equal = partial(_reference, bound.form, graph, numbers, score.scale)
        options = Options(bound.prefilled, score.scale, score.softcap, dropout, equal)
        out, lse = bound.apply(query, key, value, *biases, options)
    else:
        options = Options(bound.prefilled, score.scale, score.softcap, dropout)
        of_pairs = {} if bound.is_plain else present(*biases)
        out, lse = bound.prefilled.forward((query, key, value), of_pairs, options)
    if bound.is_plain:
        return Result(out)
    if pieces is not None:
        out, lse = _merge(pieces, out, lse)
    return _completed(round, out, lse)


def _pieces(round: Round) -> Pieces | None:
    """The pieces of the graph's rows, if the round may run over them: sums of 16-bit pieces would be rounded."""
    if round.biased or round.normalize != "softmax" or round.dropout or round.value.dtype.itemsize == 2:
        return None
    return _pieces_of(round.graph)


@cached_on_graph
def _pieces_of(graph: Graph) -> Pieces | None:
    return None if _tile_counts(graph, ROWS, COLUMNS)[1] <= _FULL * graph.num_edges else _split(graph)


@cached_on_graph
def _tile_counts(graph: Graph, rows: int, columns: int) -> tuple[int, int]:
    """The tiles that hold edges, and the pairs in them."""
    return count_tiles(graph.runs, rows, columns)


@cached_on_graph
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
    x = _with_batch(x)
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


# ------------------------------------------------------------------------------------------------ on a GPU


def _refuse_on_gpu(round: Round) -> str | None:
    score = round.score
    assert isinstance(score, Dot)
    if (reason := unavailable(round.value, [])) is not None:
        return reason
    width = max(score.query.shape[-1], round.value.shape[-1])
    most = tile_config.widest(round.value.dtype)
    if width > most:
        return f"on CUDA its heads of {round.value.dtype} are at most {most} wide, and these are {width} wide"
    return None


def _count_on_gpu(round: Round) -> Counts:
    """Pairs in tiles times heads, those of partial tiles, products on pairs, and numbers of nodes."""
    score = round.score
    graph = round.graph
    tile = _config_on_gpu(round).forward
    assert isinstance(score, Dot)
    _, area = _tile_counts(graph, tile.rows, tile.columns)
    heads = round.batch.numel() * round.heads
    width = max(score.query.shape[-1], round.value.shape[-1])
    kind = kind_of(round.value.dtype)
    # Tiles of wide heads leave fewer registers, and so take longer for each product.
    wide = "wide " * (width > _WIDE[round.value.dtype.itemsize])
    partial = min(2 * max(area - graph.num_edges, 0), area)  # a partial tile is half full
    widths = score.query.shape[-1] + round.value.shape[-1]
    operations = {
        "call": 1.0,
        "split call": float(round.value.dtype == torch.float32),
        f"{kind}pair": float(area * heads),
        f"{kind}partial pair": float(partial * heads),
        f"{wide}{kind}product": float(area * heads * widths),
        f"{kind}node number": float((graph.num_dst + graph.num_src) * heads * round.value.shape[-1]),
    }
    if round.dropout:
        operations["dropped pair"] = float(area * heads)
    if per_edge := sum(not _by_offset(b) for b in round.bias):
        operations["biased edge"] = float(graph.num_edges * heads * per_edge)
    return both_ways(operations, round.needs_grad)


def _bytes_on_gpu(round: Round) -> float:
    numbers = sum(x.numel() for x in round.tensors) + round.batch.numel() * round.graph.num_dst * round.heads
    biases = round.graph.num_edges * round.heads * 4 * any(not _by_offset(b) for b in round.bias)
    dtype = round.value.dtype
    return float(numbers * (6 if dtype == torch.float32 else dtype.itemsize) + biases)


def _run_on_gpu(round: Round) -> Result:
    score = round.score
    assert isinstance(score, Dot)
    query, key, value = map(_with_batch, (score.query, score.key, round.value))
    if score.scale <= 0:  # kernels take the maximum of products before they are scaled
        query = -query if score.scale < 0 else query * 0.0
    kernels: Any = import_module("mpnn.kernels.tiles.cuda.attention")  # imports Triton
    numbers = score.softcap, round.dropout, round.seed
    equal = partial(_reference, reference.form(round), round.graph, numbers, abs(score.scale) or 1.0)
    tensors = query, *_as_many_heads(round, key, value), _table(round), _per_edge(round), *_of_nodes(round)
    return _completed(round, *kernels.attend(_options_on_gpu(round, kernels), equal, *tensors))


def _config_on_gpu(round: Round) -> Config:
    score = round.score
    assert isinstance(score, Dot)
    dtype = round.value.dtype
    width = max(score.query.shape[-1], round.value.shape[-1])
    tile = tile_config.choose(dtype, width).forward
    tiles, _ = _tile_counts(round.graph, tile.rows, tile.columns)
    return tile_config.choose(dtype, width, tiles * tile.rows / max(round.graph.num_dst, 1))


def _options_on_gpu(round: Round, kernels: Any) -> Any:
    graph = round.graph
    score = round.score
    assert isinstance(score, Dot)
    dropout = None
    if round.dropout:
        assert round.seed is not None
        first_stream, streams = round.head_ids or (0, round.heads)
        dropout = kernels.Dropout(
            round.seed.to(round.value.device), round.dropout, first_stream, streams, graph.node_ids
        )
    graphs = graph.cached("tiles on CUDA", lambda: kernels.TileGraphs(graph.runs, graph.device))
    return kernels.Options(abs(score.scale) or 1.0, score.softcap, dropout, graphs, _config_on_gpu(round))


_SERVES = FLOATS | on_edges("bias") | {
    "cpu", "Dot", "softmax", "softcap", "bias by nodes", "sum", "dropout", "head_ids",
    "node_ids", "return_lse", "keep_accumulate_dtype", "gradient"
}  # fmt: skip
_FOR_PAIRS = "edge_key and edge_value would be materialized for all pairs"
_REASONS = {
    "explicit graph": "the graph is a list of edges, without runs that fill tiles",
    **dict.fromkeys(on_edges("edge_key") | on_edges("edge_value"), _FOR_PAIRS),
    "return_weights": "it does not materialize weights",
}
_NO_FLOAT64 = "on CUDA its kernels run on tensor cores, which have no fast float64"
WAYS = {
    "cpu": Way(NAME, _SERVES, _REASONS, _refuse_on_cpu, _count_on_cpu, _bytes_on_cpu, _bind_on_cpu),
    "cuda": Way(
        NAME,
        (_SERVES | {"cuda"}) - {"cpu", "float64"},
        _REASONS | {"float64": _NO_FLOAT64},
        _refuse_on_gpu,
        _count_on_gpu,
        _bytes_on_gpu,
        lambda round: _run_on_gpu,
    ),
}
SERVES = WAYS["cpu"].SERVES | WAYS["cuda"].SERVES  # on some device; `serves` is exact
