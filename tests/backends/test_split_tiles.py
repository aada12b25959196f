"""Tiles of split destinations: the same numbers as the specification, chosen where rows differ and runs are long."""

from dataclasses import replace

import pytest
import torch

from mpnn import Topology, engine, graphs
from mpnn.backends import tiles
from mpnn.engine.plan import choose
from mpnn.engine.rewrites.fold_stacked import fold
from mpnn.graph import Graph
from mpnn.graph.runs import Ints, Runs
from mpnn.kernels.tiles.cuda import config as tile_config
from mpnn.round import Round
from mpnn.scores import Dot
from tests.support.capabilities import GRAPHS

STRUCTURED = {name: graph for name, graph in GRAPHS.items() if not graph.is_explicit and graph.runs.num_runs}


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def round_over(graph: Graph, batch: tuple[int, ...] = (2,), heads: tuple[int, int] = (4, 2)) -> Round:
    query, key = leaf(*batch, graph.num_dst, heads[0], 5), leaf(*batch, graph.num_src, heads[1], 5)
    return Round(graph, leaf(*batch, graph.num_src, heads[1], 8), Dot(query, key, 0.4))


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every graph of runs is split. Returns a list of the numbers of pieces that were merged."""
    merged: list[int] = []
    merge = tiles._merge

    def counted(pieces: tiles.Pieces, *results: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        merged.append(len(pieces.row))
        return merge(pieces, *results)

    def pieces_of(round: Round) -> tiles.Pieces | None:
        return tiles._split(Graph.from_runs(round.graph.runs))

    monkeypatch.setattr(tiles, "_merge", counted)
    monkeypatch.setattr(tiles, "_MIN_LENGTH", 0)
    monkeypatch.setattr(tiles, "_few", lambda runs: False)
    monkeypatch.setattr(tiles, "_pieces", pieces_of)
    monkeypatch.setattr(tiles.WAYS["cpu"], "refusal", lambda round: None)  # scattered cliques run, too
    monkeypatch.setattr(tiles, "_count_on_cpu", lambda round: {"piece number": 1.0})
    return merged


@pytest.mark.parametrize("name", STRUCTURED)
@pytest.mark.parametrize("options", [{}, {"softcap": 1.5}, {"sinks": True}, {"return_lse": True}], ids=str)
@pytest.mark.covering(times=2)
def test_split_destinations_agree_with_the_specification(
    name: str, options: dict[str, object], always: list[int]
) -> None:
    graph = STRUCTURED[name]
    round = round_over(graph)
    if "softcap" in options:
        round = replace(round, score=replace(round.score, softcap=1.5))
    if "sinks" in options:
        round = replace(round, sinks=leaf(4))
    round = replace(round, return_lse="return_lse" in options)
    found, expected = engine.run(round, "tiles"), engine.run(round, "edge_list")
    assert always == [graph.runs.num_runs]
    inputs, weight = round.tensors, torch.randn_like(expected[0])
    finite = None if found[1] is None else expected[1].isfinite()  # type: ignore[union-attr]
    totals = []
    for out, lse in (found, expected):
        total = (out * weight).sum()
        totals.append(total if lse is None else total + lse[finite].sin().sum())
    for one, two in ((found[0], expected[0]), *zip(*(torch.autograd.grad(x, inputs) for x in totals), strict=True)):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=1e-10)
    if found[1] is not None:
        torch.testing.assert_close(found[1], expected[1], atol=1e-10, rtol=1e-10)


def test_derivatives_of_second_order_over_split_destinations(always: list[int]) -> None:
    round = round_over(graphs.global_nodes([2, 5]).bind(13), (), (2, 2))
    seconds = []
    for backend in ("tiles", "edge_list"):
        loss = engine.run(round, backend)[0].sin().sum()
        first = torch.autograd.grad(loss, round.tensors, create_graph=True)
        seconds.append(torch.autograd.grad(sum(x.square().sum() for x in first), round.tensors))
    assert len(always) == 1
    torch.testing.assert_close(*seconds, atol=1e-10, rtol=1e-10)


def chosen_blocks(size: int, length: int = 512, top: int = 4) -> Round:
    scores = torch.rand(1, 2, length, length // size)
    picked = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(top, -1).indices, True)
    graph = graphs.blocks(picked, size, length) & graphs.causal()
    query, key, value = (torch.randn(1, length, 2, 32, requires_grad=True) for _ in range(3))
    return fold(Round(graph, value, Dot(query, key, 0.2)))


def test_the_plan_splits_destinations_whose_blocks_differ() -> None:
    round = chosen_blocks(64, 2048)
    assert choose(round).name == "tiles"
    assert "piece number" in tiles.WAYS["cpu"].counts(round)
    pieces = tiles._split(round.graph)
    assert pieces is not None
    assert (
        tiles._tile_counts(pieces.graph, tiles.ROWS, tiles.COLUMNS)[1]
        < tiles._tile_counts(round.graph, tiles.ROWS, tiles.COLUMNS)[1] / 3
    )  # pairs in tiles


@pytest.mark.parametrize("topology", [graphs.causal(), graphs.window(50), graphs.longformer(64, globals=4)])
def test_rows_whose_neighbors_are_alike_stay_whole(topology: Topology) -> None:
    assert "piece number" not in tiles.WAYS["cpu"].counts(round_over(topology.bind(2048), (), (2, 2)))


def test_single_sources_are_not_split() -> None:
    graph = graphs.chosen(torch.randint(0, 2048, (2048, 8)), 2048)
    assert tiles._split(graph) is None


@pytest.mark.parametrize("change", ["bfloat16", "dropout", "bias"])
def test_what_pieces_do_not_compute_runs_over_whole_destinations(change: str) -> None:
    round = chosen_blocks(64, 2048)
    if change == "dropout":
        round = replace(round, dropout=0.5, seed=torch.tensor(1))
    elif change == "bias":
        round = replace(round, bias=(torch.zeros(round.graph.num_edges, 1),))
    else:
        score = replace(round.score, query=round.score.query.bfloat16(), key=round.score.key.bfloat16())
        round = replace(round, value=round.value.bfloat16(), score=score)
    assert "piece number" not in tiles.WAYS["cpu"].counts(round)
    assert tiles._pieces(round) is None


def test_very_many_runs_are_counted_in_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a quarter, also where rows grow and where every fourth row of tiles is another."""
    rows = torch.arange(4096)[:, None]
    taken: list[int] = []
    take = Runs.take

    def counted(runs: Runs, at: Ints) -> Runs:
        taken.append(len(at))
        return take(runs, at)

    monkeypatch.setattr(Runs, "take", counted)
    x, config = torch.zeros(4096, 1, 8), tile_config.choose(torch.float32, 8).forward
    for most in (rows + 1, torch.where(rows // tiles.ROWS % 4 == 0, 4096, 64)):
        graph = graphs.chosen((torch.rand(4096, 70) * most).long(), 4096)
        edges = graph.runs
        exact = tiles.count_blocks(edges, tiles.ROWS, tiles.COLUMNS)
        monkeypatch.setattr(tiles, "_MANY_RUNS", 1 << 21)
        assert tiles.count_tiles(edges, tiles.ROWS, tiles.COLUMNS) == exact
        assert not taken
        monkeypatch.setattr(tiles, "_MANY_RUNS", 1)
        assert tiles.count_tiles(edges, tiles.ROWS, tiles.COLUMNS) == pytest.approx(exact, rel=0.25)
        assert taken.pop() == 16 * tiles.ROWS
        pairs = tiles.WAYS["cuda"].counts(Round(graph, x, Dot(x, x, 1.0)))["pair"]
        assert pairs == pytest.approx(tiles.count_blocks(edges, config.rows, config.columns)[1], rel=0.25)
        assert taken.pop() == 16 * config.rows
