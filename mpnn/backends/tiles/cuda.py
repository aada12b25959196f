"""Tiles on CUDA, with this library's Triton kernels; see `mpnn/kernels/tiles/cuda/attention.py`.

Kernels look up biases by offset in a table, and read all other biases edge by edge, as on a CPU.
"""

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mpnn.backends import reference as again
from mpnn.backends.cost_model import Counts, Estimate, both_ways, kind_of, priced
from mpnn.backends.tiles import cpu
from mpnn.backends.tiles.cpu import by_offset, count_tiles, heads_first, table
from mpnn.graph import Graph
from mpnn.kernels.cuda import schedule
from mpnn.kernels.tiles.cuda import config as tile_config
from mpnn.kernels.tiles.cuda.config import Config, Launch
from mpnn.round import Result, Round
from mpnn.scores import Dot

SERVES = (cpu.SERVES | {"cuda"}) - {"cpu", "float64"}
REASONS = cpu.REASONS | {"float64": "on CUDA its kernels run on tensor cores, which have no fast float64"}


_WIDE = {2: 128, 4: 64}  # wider heads have a price of their own, by bytes of a number


def refusal(round: Round) -> str | None:
    score = round.score
    assert isinstance(score, Dot)
    if (reason := schedule.unavailable(round.value, [])) is not None:
        return reason
    width = max(score.query.shape[-1], round.value.shape[-1])
    most = tile_config.widest(round.value.dtype)
    if width > most:
        return f"on CUDA its heads of {round.value.dtype} are at most {most} wide, and these are {width} wide"
    return None


def counts(round: Round) -> Counts:
    """Pairs in tiles times heads, those of partial tiles, products on pairs, and numbers of nodes."""
    score = round.score
    graph = round.graph
    tile = _config(round).forward
    assert isinstance(score, Dot)
    _, area = _count_tiles(graph, tile)
    heads = round.batch.numel() * round.heads
    width = max(score.query.shape[-1], round.value.shape[-1])
    kind = kind_of(round.value.dtype)
    # Tiles of wide heads leave fewer registers, and so take longer for each product.
    wide = "wide " * (width > _WIDE[round.value.dtype.itemsize])
    partial = min(2 * max(area - graph.num_edges, 0), area)  # a partial tile is half full
    widths = score.query.shape[-1] + round.value.shape[-1]
    operations = {
        "call": 1.0,
        f"{kind}pair": float(area * heads),
        f"{kind}partial pair": float(partial * heads),
        f"{wide}{kind}product": float(area * heads * widths),
        f"{kind}node number": float((graph.num_dst + graph.num_src) * heads * round.value.shape[-1]),
    }
    if round.dropout:
        operations["dropped pair"] = float(area * heads)
    if per_edge := sum(not by_offset(b) for b in round.bias):
        operations["biased edge"] = float(graph.num_edges * heads * per_edge)
    return both_ways(operations, round.needs_grad)


def estimate(round: Round) -> Estimate:
    numbers = sum(x.numel() for x in round.tensors) + round.batch.numel() * round.graph.num_dst * round.heads
    biases = round.graph.num_edges * round.heads * 4 * any(not by_offset(b) for b in round.bias)
    dtype = round.value.dtype
    size = numbers * (6 if dtype == torch.float32 else dtype.itemsize) + biases
    return priced(round.value.device, "tiles", counts(round), float(size))


def run(round: Round) -> Result:
    score = round.score
    value = round.value
    assert isinstance(score, Dot)
    query, key, padded = map(_with_batch, (score.query, score.key, value))
    if key.shape[2] != padded.shape[2]:
        key, padded = (x.repeat_interleave(round.heads // x.shape[2], 2) for x in (key, padded))
    if score.scale <= 0:  # kernels take the maximum of products before they are scaled
        query = -query if score.scale < 0 else query * 0.0
    kernels: Any = import_module("mpnn.kernels.tiles.cuda.attention")
    out, lse = kernels.TileAttention.apply(
        query,
        key,
        padded,
        table(round),
        _per_edge(round),
        *(None if x is None else heads_first(x) for x in round.node_biases()),
        _options(round, kernels),
    )
    out = out.to(round.result_dtype).view(*round.batch, *out.shape[1:])
    if not round.return_lse:
        return Result(out)
    lse = lse.nan_to_num(torch.nan, -torch.inf, -torch.inf).mT
    return Result(out, lse=lse.view(*round.batch, round.graph.num_dst, round.heads))


def _config(round: Round) -> Config:
    score = round.score
    assert isinstance(score, Dot)
    dtype = round.value.dtype
    width = max(score.query.shape[-1], round.value.shape[-1])
    tile = tile_config.choose(dtype, width).forward
    tiles, _ = _count_tiles(round.graph, tile)
    return tile_config.choose(dtype, width, tiles * tile.rows / max(round.graph.num_dst, 1))


def _count_tiles(graph: Graph, tile: Launch) -> tuple[int, int]:
    """The tiles that hold edges, and the pairs in them."""
    key = "tiles: counts", tile.rows, tile.columns
    return graph.cached(key, lambda: count_tiles(graph.runs, tile.rows, tile.columns))


def _options(round: Round, kernels: Any) -> Any:
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
    scale = abs(score.scale) or 1.0
    equal = partial(cpu.reference, again.form(round), scale)
    return kernels.Options(scale, score.softcap, dropout, graphs, _config(round), equal)


def _per_edge(round: Round) -> Tensor | None:
    """The sum of all biases per edge, [B or 1, H or 1, E]."""
    total = round.edge_bias(b for b in round.bias if not by_offset(b))
    if total is None:
        return None
    batch = round.batch if total.dim() > 2 else torch.Size(())
    return heads_first(total.expand(*batch, round.graph.num_edges, total.shape[-1]))


def _with_batch(x: Tensor) -> Tensor:
    """x [..., N, H, D] as [B, N, H, D]."""
    return x.flatten(0, -4) if x.dim() > 3 else x.unsqueeze(0)
