"""Attention over tiles on CUDA against `edge_list`, forward and all gradients, in Triton's interpreter or on a GPU."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_cases
import torch
from row_cases import INTERPRETED, SEED, TRITON, on_triton, poisoned
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mpnn import Graph, graphs
from mpnn.backends import edge_list, tiles
from mpnn.engine import choice
from mpnn.engine.plan import plan
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.graph.runs import Runs
from mpnn.graph.topology import Topology
from mpnn.kernels.tiles.cuda import config as tile_config, schedule as tile_schedule
from mpnn.kernels.tiles.cuda.config import Config, Launch
from mpnn.kernels.tiles.cuda.schedule import Schedule, TileGraph, Tiles
from mpnn.round import Result, Round
from mpnn.scores import Dot

__all__ = ["poisoned"]
CUDA = tiles.WAYS["cuda"]
SMALL = Config(Launch(32, 32, 32, 4, 2), Launch(32, 32, 32, 4, 2), Launch(32, 32, 16, 4, 2))
STEPS = Config(Launch(32, 64, 32, 4, 2), Launch(16, 64, 64, 4, 2), Launch(32, 32, 16, 4, 2))


def random_runs(num_dst: int, num_src: int, chance: float) -> Runs:
    """Some rows and columns are empty."""
    rng = np.random.default_rng(0)
    mask = rng.random((num_dst, num_src)) < chance
    mask[rng.random(num_dst) < 0.2] = False
    mask[:, rng.random(num_src) < 0.2] = False
    return Runs.from_dense(mask)


RUNS = {
    "complete": lambda: graphs.complete().bind(64, 96).runs,
    "causal": lambda: graphs.causal().bind(90).runs,
    "longformer": lambda: graphs.longformer(10, globals=1).bind(75).runs,
    "bigbird": lambda: graphs.bigbird(block=16, window=3, random=1, globals=1).bind(100).runs,
    "random": lambda: random_runs(67, 103, 0.3),
    "few rows": lambda: random_runs(3, 200, 0.5),
    "few columns": lambda: random_runs(200, 3, 0.5),
    "no edges": lambda: Runs.of(70, 70, []),
    "no sources": lambda: Runs.of(3, 0, []),
}


# ------------------------------------------------------------------------------------------------ the schedule


@pytest.mark.parametrize("sides", [(64, 32), (16, 64)], ids=str)
@pytest.mark.parametrize("name", RUNS)
def test_tiles_hold_the_edges_of_a_graph(name: str, sides: tuple[int, int]) -> None:
    runs, (rows, columns) = RUNS[name](), sides
    tiles = Tiles.of(runs, rows, columns)
    assert np.array_equal(dense(tiles, runs), padded(runs, rows, columns))
    assert len(np.unique(tiles.words, axis=0)) == len(tiles.words), "each pattern is stored once"


def dense(tiles: Tiles, runs: Runs) -> np.ndarray[Any, Any]:
    edges = np.zeros_like(padded(runs, tiles.rows, tiles.columns))
    for row, column, pattern in zip(tiles.row, tiles.column, tiles.pattern, strict=True):
        block = np.ones((tiles.rows, tiles.columns), bool)
        if pattern >= 0:
            bits = tiles.words[pattern].view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)[:, None] & 1
            block = bits.reshape(tiles.columns, tiles.rows).T.astype(bool)
            assert block.any()
            assert not block.all()
        edges[row * tiles.rows :, column * tiles.columns :][: tiles.rows, : tiles.columns] = block
    return edges


def padded(runs: Runs, rows: int, columns: int) -> np.ndarray[Any, Any]:
    edges = np.zeros((-(-runs.num_dst // rows) * rows, -(-runs.num_src // columns) * columns), bool)
    edges[: runs.num_dst, : runs.num_src] = runs.dense()
    return edges


def test_patterns_of_several_chunks_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = random_runs(400, 300, 0.3)
    whole = Tiles.of(runs, 32, 32)
    monkeypatch.setattr(tile_schedule, "_PAIRS_AT_ONCE", 500)
    assert np.array_equal(dense(Tiles.of(runs, 32, 32), runs), dense(whole, runs))
    monkeypatch.setattr(tile_schedule.np, "unique", several_share_a_hash)
    assert np.array_equal(dense(Tiles.of(runs, 32, 32), runs), dense(whole, runs))


def several_share_a_hash(hashes: Any, **options: Any) -> Any:
    return np.zeros(1), np.zeros(min(1, len(hashes)), int), np.zeros(len(hashes), int)


@pytest.mark.parametrize("name", RUNS)
def test_each_schedule_visits_each_tile_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_schedule, "_LEAST", 2)
    graph = TileGraph(RUNS[name](), 32, 32, "cpu")
    tiles = graph.tiles
    diagonals = graph.by_diagonal(2).schedule
    for schedule, of_unit in ((graph.by_row(2), tiles.row), (graph.by_column(2), tiles.column), (diagonals, None)):
        *_, number = (x[:-1].numpy() for x in schedule[1:5])
        assert np.array_equal(np.sort(number), np.arange(len(tiles.row)))
        for x, of_tiles in zip(schedule[1:4], (tiles.row, tiles.column, tiles.pattern), strict=True):
            assert np.array_equal(x[:-1].numpy(), of_tiles[number])
        assert_units(schedule, None if of_unit is None else of_unit[number], tiles.pattern[number])


def assert_units(schedule: Schedule, row_of_visit: Any, pattern: Any) -> None:
    row, first, middle, last, slot, place, middle_place, middle_pattern = schedule.units.numpy().T
    visits = np.concatenate([np.arange(a, b) for a, b in zip(first, last, strict=True)] or [np.zeros(0, int)])
    assert np.array_equal(np.sort(visits), np.arange(len(pattern)))
    assert (np.diff(last - first) <= 0).all(), "long units first"
    for r, a, m, b in zip(row, first, middle, last, strict=True):
        assert (pattern[a:m] < 0).all()
        assert (pattern[m:b] >= 0).all()
        assert row_of_visit is None or (row_of_visit[a:b] == r).all()
    assert np.array_equal(middle_pattern, schedule.pattern[middle])
    if row_of_visit is not None:
        along = schedule.column if np.array_equal(row_of_visit, schedule.row[:-1]) else schedule.row
        assert np.array_equal([place, middle_place], [along[first], along[middle]])
    slots = [s for _, a, b in schedule.divided.tolist() for s in range(a, b)]
    assert slots == list(range(schedule.slots)) == sorted(slot[slot >= 0])


def test_a_window_has_few_patterns_and_a_global_row_is_divided() -> None:
    graph = TileGraph(graphs.longformer(256, globals=1).bind(1 << 13).runs, 64, 64, "cpu")
    assert len(graph.tiles.words) < 10
    schedule = graph.by_row(16)
    assert schedule.slots >= 4
    units = schedule.units
    assert int((units[:, 3] - units[:, 1]).max()) <= 32


@pytest.mark.parametrize("name", ["causal", "random", "few columns", "bigbird"])
def test_edges_are_numbered_in_the_order_of_rows(name: str) -> None:
    runs = RUNS[name]()
    graph = TileGraph(runs, 32, 64, "cpu")
    before, tiles = graph.edges_before.numpy(), graph.tiles
    i, j = runs.edges()
    at = {pair: t for t, pair in enumerate(zip(tiles.row.tolist(), tiles.column.tolist(), strict=True))}
    tile = np.array([at[pair] for pair in zip((i // 32).tolist(), (j // 64).tolist(), strict=True)])
    first = before[tile, j % 64 // 32, i % 32]
    lower = np.array([runs.dense()[a, b // 32 * 32 : b].sum() for a, b in zip(i, j, strict=True)])
    assert np.array_equal(first + lower, np.arange(len(i)))


# ------------------------------------------------------------------------------------------------ attention


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles, few a unit, so that rows and columns are divided."""
    monkeypatch.setattr(tile_config, "choose", lambda *_: SMALL)
    monkeypatch.setattr(tile_schedule, "_LEAST", 2)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype).to(TRITON.device).requires_grad_()


def attending(
    graph: Graph, dtype: torch.dtype = torch.float32, batch: tuple[int, ...] = (),
    heads: tuple[int, int, int] = (2, 2, 2), widths: tuple[int, int] = (16, 16), scale: float = 0.3,
    softcap: float | None = None, **options: Any,
) -> Round:  # fmt: skip
    graph = graph.to(TRITON.device)
    query = leaf(*batch, graph.num_dst, heads[0], widths[0], dtype=dtype)
    key = leaf(*batch, graph.num_src, heads[1], widths[0], dtype=dtype)
    value = leaf(*batch, graph.num_src, heads[2], widths[1], dtype=dtype)
    return Round(graph, value, Dot(query, key, scale, softcap=softcap), **options)


def results(run: Any, round: Round, direction: Tensor) -> list[Tensor]:
    """The result, lse, and the gradients of all tensors."""
    out, _, lse, _ = run(round)
    loss = (out * direction.to(out.dtype)).sum()
    finite = None
    if lse is not None:
        finite = lse.masked_fill(lse.isinf(), 0.0)
        loss = loss + finite.sin().sum()
    leaves = [x for x in round.tensors if x.requires_grad]
    grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
    return [out, *([] if finite is None else [finite]), *grads]


class OnGpu:
    """`tiles` as it is on a GPU."""

    NAME = "tiles"
    run, refusal, estimate = staticmethod(CUDA.run), staticmethod(CUDA.refusal), staticmethod(CUDA.estimate)

    def serves(self, round: Round) -> tuple[frozenset[str], dict[str, str]]:
        return CUDA.SERVES | {"cpu"}, CUDA.REASONS


def planned(round: Round) -> Result:
    """The result by `tiles`, and by the rewrites that lead to it."""
    found = choice._by(OnGpu(), round)
    assert isinstance(found, choice.Choice), found
    return found.run(round)


def assert_agrees(round: Round, tolerance: float = 2e-6) -> None:
    """Results are those of `edge_list` in float64, and have the same bits again."""
    wide = round.map(lambda x, *_: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x)
    direction = torch.randn(*round.batch, round.graph.num_dst, round.heads, round.value.shape[-1], device=TRITON.device)
    ours = [x.detach() for x in results(planned, round, direction)]
    exact = [x.detach() for x in results(edge_list.run, wide, direction)]
    for got, want in zip(ours, exact, strict=True):
        assert got.dtype == torch.float32 or got.dtype == round.value.dtype
        size = max(float(want.abs().max()), 1.0) if want.numel() else 1.0
        torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance * size)
    if not INTERPRETED:
        assert all(map(torch.equal, ours, results(planned, round, direction)))


@on_triton
@pytest.mark.parametrize("name", RUNS)
def test_attention_over_each_graph(name: str, small: None) -> None:
    assert_agrees(attending(Graph.from_runs(RUNS[name]())))


def offsets(reach: int, heads: int) -> BiasTable:
    return BiasTable(leaf(2 * reach + 1, heads), Offset(reach))


OPTIONS: dict[str, Any] = {
    "softcap": lambda g: {"softcap": 1.5},
    "table": lambda g: {"bias": (offsets(20, 2), offsets(3, 1)), "batch": (2,)},
    "bias per edge": lambda g: {"bias": (leaf(g.num_edges, 2),), "batch": (2,)},
    "bias per batch and edge, softcap": lambda g: {
        "bias": (leaf(2, g.num_edges, 1), leaf(g.num_edges, 2)), "batch": (2,), "softcap": 2.0
    },
    "sinks": lambda g: {"sinks": leaf(2)},
    "nodes, lse": lambda g: {
        "batch": (2,), "dst_bias": leaf(2, g.num_dst, 2), "src_bias": leaf(2, g.num_src, 1),
        "return_lse": True, "heads": (2, 1, 1),
    },
    "dropout": lambda g: {"dropout": 0.4, "seed": SEED, "batch": (2,), "head_ids": (3, 9)},
    "softmax over destinations": lambda g: {"normalize": "softmax_dst"},
    "shared keys": lambda g: {"heads": (4, 2, 2), "widths": (24, 40)},
    "shared keys, other values": lambda g: {"heads": (4, 1, 2)},
    "negative scale": lambda g: {"scale": -0.5, "batch": (1, 2), "heads": (1, 1, 1)},
    "no scale": lambda g: {"scale": 0.0},
    "everything": lambda g: {
        "batch": (2,), "heads": (2, 1, 1), "bias": (offsets(5, 2), leaf(g.num_edges, 1)), "softcap": 2.0,
        "src_bias": leaf(2, g.num_src, 2), "return_lse": True, "dropout": 0.3, "seed": SEED,
    },
}  # fmt: skip


@on_triton
@pytest.mark.parametrize("option", OPTIONS)
def test_each_option(option: str, small: None) -> None:
    graph = Graph.from_runs(random_runs(40, 50, 0.4))
    assert_agrees(attending(graph, **OPTIONS[option](graph)))


@on_triton
def test_tiles_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tile_config, "choose", lambda *_: STEPS)
    graph = Graph.from_runs(random_runs(50, 140, 0.4) | Runs.of(50, 140, [(np.arange(16, 32), 0, 140)]))
    table = offsets(9, 2)
    assert_agrees(attending(graph, bias=(table, leaf(graph.num_edges, 2)), dropout=0.2, seed=SEED))


@on_triton
def test_dropout_by_ids_of_nodes(small: None) -> None:
    whole = (graphs.causal() & graphs.window(9)).bind(60)
    part = whole.rows(20, 60)
    order = torch.arange(20, 60, dtype=torch.int32), torch.arange(part.num_src, dtype=torch.int32) * 3
    part.node_ids = tuple(x.to(TRITON.device) for x in order)
    assert_agrees(attending(part, dropout=0.5, seed=SEED))


@on_triton
def test_dropout_of_keys_whose_numbers_have_other_upper_halves(small: None) -> None:
    graph = Graph.from_runs(Runs.of(5, 65_600, [(np.arange(5), 65_500, 65_600)]))
    round = attending(graph, dropout=0.5, seed=SEED)
    with torch.no_grad():
        found, expected = (run(round).out for run in (planned, edge_list.run))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)


@on_triton
@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)], ids=str)
def test_16_bits(dtype: torch.dtype, unit: float, small: None) -> None:
    # P and dS are rounded once, results once, and delta reads rounded results: a few units of the largest.
    graph = graphs.longformer(10, globals=1).bind(70)
    assert_agrees(attending(graph, dtype, batch=(2,)), tolerance=8 * unit)


@on_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_configurations_as_shipped(dtype: torch.dtype) -> None:
    graph = (graphs.causal() & graphs.window(70)).bind(130)
    wide = attending(graph, dtype, heads=(1, 1, 1), widths=(80, 64))
    assert_agrees(wide, tolerance=2e-6 if dtype == torch.float32 else 8 * 2**-8)


@on_triton
def test_other_nodes_do_not_matter(small: None) -> None:
    """A graph beside other graphs in one call has the results that it has alone, whatever the others hold."""
    graph = graphs.documents([40, 30]).bind(70)
    round = attending(graph)
    before = CUDA.run(round).out[:40]
    with torch.no_grad():
        for x in (round.value, round.score.query, round.score.key):
            x[40:] = 1e4 * torch.randn_like(x[40:])
    assert torch.equal(CUDA.run(round).out[:40], before)


@on_triton
def test_many_small_terms_do_not_drift_in_float32(small: None) -> None:
    """Weights of 1 / N add up to 1; a sum in 16 bits, or one that truncates, does not."""
    graph = graphs.complete().bind(5, 300)
    round = attending(graph)
    ones = torch.ones_like(round.value)
    out = CUDA.run(replace(round, value=ones, score=replace(round.score, scale=1e-3))).out
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=3e-7)


@on_triton
@pytest.mark.parametrize(
    ("topology", "dtype", "dropout", "backend"),
    [
        (graphs.complete(), torch.bfloat16, 0.0, "dense"),
        (graphs.causal(), torch.bfloat16, 0.0, "dense"),
        (graphs.complete(), torch.bfloat16, 0.1, "tiles"),
        (graphs.complete(), torch.float32, 0.0, "tiles"),
        (graphs.causal(), torch.float32, 0.1, "tiles"),
        (graphs.longformer(256, globals=1), torch.bfloat16, 0.0, "tiles"),
        (graphs.longformer(256, globals=1), torch.float32, 0.0, "tiles"),
    ],
)
def test_the_plan_on_an_h100(topology: Topology, dtype: torch.dtype, dropout: float, backend: str) -> None:
    graph = topology.bind(8192)
    with FakeTensorMode():
        query, key, value = (torch.empty(8192, 8, 64, dtype=dtype, device="cuda", requires_grad=True) for _ in range(3))
        seed = torch.zeros((), dtype=torch.int64, device="cuda")
    assert plan(Round(graph, value, Dot(query, key, 0.1), dropout=dropout, seed=seed)).backend == backend


def test_what_it_cannot_do_it_refuses() -> None:
    pytest.importorskip("triton")
    graph = graphs.causal().bind(9)
    for dtype, most in ((torch.float32, 128), (torch.bfloat16, 256)):
        round = attending(graph.to("cpu"), dtype, widths=(8, most + 1))
        assert f"at most {most} wide" in str(CUDA.refusal(round))
        assert CUDA.refusal(attending(graph, dtype, widths=(8, most))) is None
    assert "float64" not in CUDA.SERVES


# -------------------------------------------------------------------------------------- for a GPU, without one

COMPILING = """
import json, sys
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class NoDevice:
    get_current_target = lambda self: GPUTarget("cuda", int(sys.argv[1]), 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0

triton.runtime.driver.set_active(NoDevice())
launch, compiled = JITFunction.run, set()

def compile_only(self, *args, grid, warmup, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    assert len(kernel.asm["cubin"]) > 0
    compiled.add(self.fn.__name__)

JITFunction.run = compile_only
sys.path.insert(0, sys.argv[2])
import test_cuda_tiles as given
from mpnn import graphs
from mpnn.backends import tiles
from mpnn.kernels.tiles.cuda import schedule as tile_schedule
tile_schedule._LEAST = 2
given.TRITON = given.row_cases.CPU
graph = graphs.longformer(64, globals=1).bind(600)
dtype = getattr(torch, sys.argv[3])
options = given.OPTIONS["everything"](graph) if sys.argv[4] == "everything" else {}
tiles.WAYS["cuda"].run(given.attending(graph, dtype, widths=(64, 64), **options)).out.sum().backward()
print(json.dumps(sorted(compiled)))
"""


@pytest.mark.triton
@pytest.mark.skipif(not INTERPRETED, reason="there is a GPU to compile for")
@pytest.mark.parametrize(
    ("target", "dtype", "options"), [("90", "bfloat16", "everything"), ("90", "float32", ""), ("80", "float16", "")]
)
def test_every_kernel_compiles_for_a_gpu(target: str, dtype: str, options: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    folders = [str(Path(__file__).parent), str(Path(row_cases.__file__).parent), environment.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", COMPILING, target, folders[0], dtype, options],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(folders)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = {"attend", "join", "deltas", "by_query", "by_key", "add_parts"}
    kernels |= {"by_offset", "add_diagonals", "fill_words"} if options else set()
    kernels |= {"split"} if dtype == "float32" else set()
    assert set(json.loads(done.stdout)) == kernels
