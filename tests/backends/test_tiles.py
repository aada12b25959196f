"""mpnn.backends.tiles on a CPU: heads and widths of all kinds, biases, lse, and derivatives of second order."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from mpnn import Graph, engine, graphs
from mpnn.backends import edge_list, tiles
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.graph.runs import Ints, Runs
from mpnn.kernels.cpu import library
from mpnn.round import Round
from mpnn.scores import Dot

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")
NODES = 40
GRAPHS = {
    "causal": graphs.causal().bind(NODES),
    "window": graphs.window(3).bind(NODES),
    "rows without edges": (graphs.causal() - graphs.window(2)).bind(NODES),
}


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def round_over(
    graph: Graph, batch: tuple[int, ...], heads: tuple[int, int, int], widths: tuple[int, int], **options: Any
) -> Round:
    query, key = leaf(*batch, NODES, heads[0], widths[0]), leaf(*batch, NODES, heads[1], widths[0])
    return Round(graph, leaf(*batch, NODES, heads[2], widths[1]), Dot(query, key, 0.4), **options)


def assert_as_specified(round: Round) -> None:
    """Outputs, lse and gradients are those of the specification, in the first call and in the next one."""
    expected = engine.run(round, "edge_list")
    direction = torch.randn_like(expected[0])
    gradients = torch.autograd.grad(expected[0], round.tensors, direction)
    for _ in range(2):
        found = engine.run(round, "tiles")
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(torch.autograd.grad(found[0], round.tensors, direction), gradients)
    with torch.no_grad():
        torch.testing.assert_close(engine.run(round, "tiles"), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("heads", [(8, 8, 8), (8, 2, 8), (8, 8, 2), (8, 2, 2), (4, 1, 2)], ids=str)
@pytest.mark.parametrize("widths", [(8, 8), (8, 16), (9, 8), (8, 9), (5, 3)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,), (1, 2)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.covering(times=2)
def test_heads_and_widths(
    heads: tuple[int, int, int], widths: tuple[int, int], batch: tuple[int, ...], name: str
) -> None:
    assert_as_specified(round_over(GRAPHS[name], batch, heads, widths))


@pytest.mark.parametrize("widths", [(8, 8), (5, 3)], ids=str)
def test_16_bit_features_in_the_dtype_of_the_arithmetic(widths: tuple[int, int]) -> None:
    given = round_over(GRAPHS["causal"], (2,), (2, 2, 2), widths)
    score: Any = given.score
    query, key, value = (x.detach().bfloat16() for x in (score.query, score.key, given.value))
    for keep, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        round = Round(given.graph, value, Dot(query, key, 0.4), keep_accumulate_dtype=keep)
        found, expected = engine.run(round, "tiles")[0], engine.run(round, "edge_list")[0]
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def biases(batch: tuple[int, ...], graph: Graph) -> dict[str, dict[str, Any]]:
    edges = graph.num_edges
    return {
        "of edges and heads": {"bias": (leaf(edges, 4),)},
        "of edges": {"bias": (leaf(edges, 1),)},
        "of edges in each entry": {"bias": (leaf(*batch, edges, 4),)},
        "of edges in each entry, and by offset": {"bias": (leaf(*batch, edges, 1), BiasTable(leaf(9, 4), Offset(4)))},
        "by offset": {"bias": (BiasTable(leaf(9, 1), Offset(4)), BiasTable(leaf(5, 4), Offset(2)))},
        "of nodes": {"dst_bias": leaf(*batch, NODES, 4), "src_bias": leaf(*batch, NODES, 4)},
        "of sources": {"src_bias": leaf(*batch, NODES, 4)},
    }


@pytest.mark.parametrize("kind", biases((), GRAPHS["causal"]))
@pytest.mark.parametrize("batch", [(), (1,), (2,)], ids=str)
@pytest.mark.parametrize("widths", [(5, 8), (8, 8)], ids=str)
def test_biases_and_their_derivatives_of_second_order(
    kind: str, batch: tuple[int, ...], widths: tuple[int, int]
) -> None:
    graph = GRAPHS["rows without edges"]
    round = round_over(graph, batch, (4, 2, 2), widths, return_lse=True, **biases(batch, graph)[kind])
    seconds = []
    finite = graph.degree() > 0
    for backend in ("tiles", "edge_list"):
        out, lse = engine.run(round, backend)
        assert isinstance(lse, Tensor)
        assert lse[..., ~finite, :].eq(-torch.inf).all()
        loss = out.sin().sum() + lse[..., finite, :].cos().sum()
        first = torch.autograd.grad(loss, round.tensors, create_graph=True)
        second = torch.autograd.grad(sum(x.square().sum() for x in first), round.tensors)
        seconds.append([out, lse, *first, *second])
    torch.testing.assert_close(*seconds, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", biases((), GRAPHS["causal"]))
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_tangents_of_biases(kind: str, batch: tuple[int, ...]) -> None:
    """Of each tensor alone, and of all."""
    graph = GRAPHS["window"]
    round = round_over(graph, batch, (4, 2, 2), (5, 8), return_lse=True, **biases(batch, graph)[kind])
    tensors = round.tensors
    for moved in [*([x] for x in tensors), tensors]:
        tangents = []
        for backend in (tiles, edge_list):
            with forward_ad.dual_level():
                duals = {id(x): forward_ad.make_dual(x.detach(), torch.ones_like(x)) for x in moved}
                found = backend.run(replaced(round, duals))
                pairs = [forward_ad.unpack_dual(x) for x in (found.out, found.lse) if x is not None]
                tangents.append([torch.zeros_like(x) if tangent is None else tangent for x, tangent in pairs])
        torch.testing.assert_close(*tangents)


def replaced(round: Round, tensors: dict[int, Tensor]) -> Round:
    """The round with these tensors in place of its own, by their ids."""

    def of(x: Any) -> Any:
        if isinstance(x, BiasTable):
            return BiasTable(of(x.table), x.relation)
        return tensors.get(id(x), x.detach() if isinstance(x, Tensor) else x)

    score: Any = round.score
    nodes = {"dst_bias": of(round.dst_bias), "src_bias": of(round.src_bias)}
    dot = Dot(of(score.query), of(score.key), score.scale)
    return Round(round.graph, of(round.value), dot, bias=tuple(map(of, round.bias)), return_lse=True, **nodes)


def test_biases_of_nodes_have_a_price() -> None:
    graph = GRAPHS["causal"]
    plain = round_over(graph, (), (4, 2, 2), (8, 8))
    assert "bias call" not in tiles.counts(plain)
    for names in (("dst_bias",), ("src_bias",), ("dst_bias", "src_bias")):
        biased = round_over(graph, (), (4, 2, 2), (8, 8), **{name: leaf(NODES, 4) for name in names})
        assert tiles.counts(biased)["bias call"] == 1


def test_all_edges_may_be_dropped() -> None:
    round = round_over(GRAPHS["causal"], (2,), (2, 2, 2), (8, 8), dropout=1.0, seed=torch.tensor(1))
    assert not tiles.run(round).out.any()


def test_lse_of_rows_whose_logits_are_minus_infinity() -> None:
    graph = GRAPHS["window"]
    bias = torch.zeros(graph.num_edges, 2, dtype=torch.float64)
    bias[graph.ends[1] == 5] = -torch.inf
    round = round_over(graph, (), (2, 2, 2), (8, 8), return_lse=True, bias=(bias,))
    (out, lse), (expected, expected_lse) = (engine.run(round, backend) for backend in ("tiles", "edge_list"))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    assert isinstance(lse, Tensor)
    assert lse[5].eq(-torch.inf).all()


def test_without_kernels_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    round = round_over(GRAPHS["causal"], (), (2, 2, 2), (8, 8))
    assert tiles.refusal(round) is None
    monkeypatch.setattr(library, "why_missing", lambda: "they are missing")
    assert tiles.refusal(round) == "they are missing"


# ------------------------------------------------------------------------------------------------ split rows


def pieces_of(graph: Graph) -> tiles.Pieces:
    pieces = tiles._split(graph)
    assert pieces is not None
    return pieces


@pytest.fixture
def split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_MIN_PIECES", 0)
    monkeypatch.setattr(tiles, "_MIN_LENGTH", 1)


@pytest.mark.usefixtures("split")
def test_pieces_are_merged_as_their_reference_merges_them() -> None:
    pieces = pieces_of((graphs.global_nodes([2, 20]) | graphs.window(1) - graphs.identity()).bind(NODES))
    out, lse = leaf(2, len(pieces.row), 3, 8), 3 * leaf(2, 3, len(pieces.row))
    found, total = tiles._merge(pieces, out, lse)
    tensors = [out, *[None] * 6, lse.mT, *[None] * 3]
    expected, _, expected_total = tiles._merge_again(pieces, *tensors)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(total, expected_total.mT)


@pytest.mark.usefixtures("split")
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_rows_with_several_runs_are_split(batch: tuple[int, ...]) -> None:
    graph = (graphs.global_nodes([2, 20]) | graphs.window(1) - graphs.identity()).bind(NODES)
    for widths in ((8, 8), (5, 16)):
        round = round_over(graph, batch, (4, 2, 2), widths)
        assert tiles._pieces(round) is not None
        split = tiles._counts(round, graph, len(pieces_of(graph).row))
        assert split["piece number"] == int(np.prod(batch)) * graph.runs.num_runs * 4 * sum(widths)
        assert_as_specified(round)


def test_few_or_short_runs_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = (graphs.global_nodes([2, 20]) | graphs.window(1)).bind(NODES)
    runs, edges = graph.runs.num_runs, graph.num_edges
    for pieces, length, expected in ((runs, 1, True), (runs + 1, 1, False), (0, edges / runs, True), (0, 3, False)):
        monkeypatch.setattr(tiles, "_MIN_PIECES", pieces)
        monkeypatch.setattr(tiles, "_MIN_LENGTH", length)
        assert (tiles._split(Graph.from_runs(graph.runs)) is not None) == expected, (pieces, length)
    one_run_a_row = graphs.causal().bind(NODES)
    monkeypatch.setattr(tiles, "_MIN_PIECES", 0)
    monkeypatch.setattr(tiles, "_MIN_LENGTH", 0)
    assert tiles._split(one_run_a_row) is None


def test_full_tiles_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[Graph] = []
    monkeypatch.setattr(tiles, "_split", splits.append)
    graph = (graphs.global_nodes([2, 20]) | graphs.window(1)).bind(NODES)
    area = tiles.count_tiles(graph.runs, tiles.ROWS, tiles.COLUMNS)[1]
    for full, expected in ((area / graph.num_edges, 0), (0.99 * area / graph.num_edges, 1)):
        monkeypatch.setattr(tiles, "_FULL", full)
        tiles._pieces_of(Graph.from_runs(graph.runs))
        assert len(splits) == expected


def test_a_sample_takes_a_row_of_tiles_of_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Ints] = []
    take = Runs.take

    def counted(runs: Runs, at: Ints) -> Runs:
        taken.append(at)
        return take(runs, at)

    monkeypatch.setattr(Runs, "take", counted)
    rows, parts = tiles.ROWS, tiles._SAMPLES
    for tiles_of_part in (1, 2, 5):
        runs = graphs.causal().bind(tiles_of_part * rows * parts).runs
        monkeypatch.setattr(tiles, "_MANY_RUNS", runs.num_runs)
        tiles.count_tiles(runs, rows, tiles.COLUMNS)
        assert len(taken) == (tiles_of_part > 1)
        if taken:
            chosen = taken.pop().reshape(parts, rows)
            assert (chosen == chosen[:, :1] + np.arange(rows)).all()
            assert (chosen[:, 0] % rows == 0).all()
            assert (chosen[:, 0] // (rows * tiles_of_part) == np.arange(parts)).all()
        monkeypatch.setattr(tiles, "_MANY_RUNS", runs.num_runs + 1)
        tiles.count_tiles(runs, rows, tiles.COLUMNS)
        assert not taken
