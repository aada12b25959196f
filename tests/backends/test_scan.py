"""Linear attention: sums over sources taken first, exact on every graph made of a few stairs, in linear room."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mpnn import MessagePassing, engine, explain, graphs, ops
from mpnn.aggregate import Max
from mpnn.attention import Kernel
from mpnn.backends import edge_list, scan
from mpnn.engine.plan import choose, refusal as why_not
from mpnn.graph import Graph
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.kernels.recurrent.scan import linear_attention
from mpnn.round import Round
from mpnn.scores import Dot

PACKED = graphs.documents([100, 130, 1, 70])
GRAPHS: dict[str, Graph] = {
    "complete": graphs.complete().bind(37),
    "complete, rectangular": graphs.complete().bind(13, 300),
    "causal": graphs.causal().bind(300),
    "causal, a whole number of chunks": graphs.causal().bind(512),
    "causal, more destinations": graphs.causal().bind(200, 90),
    "causal, more sources": graphs.causal().bind(200).rows(0, 90),
    "strictly causal": (graphs.causal() - graphs.identity()).bind(150),
    "one node": graphs.causal().bind(1),
    "memory": graphs.memory(20).bind(140, 160),
    "prefix": graphs.prefix(70).bind(210),
    "documents": PACKED.bind(301),
    "causal documents": (graphs.causal() & PACKED).bind(301),
    "strictly causal documents": ((graphs.causal() & PACKED) - graphs.identity()).bind(301),
    "no source": graphs.complete().bind(3, 0),
    "no destination": graphs.causal().bind(0, 3),
}


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()


def request(graph: Graph, batch: tuple[int, ...] = (), heads: tuple[int, int, int] = (4, 4, 4)) -> Round:
    """Queries, keys and values with so many heads each."""
    query = leaf(*batch, graph.num_dst, heads[0], 5)
    key, value = leaf(*batch, graph.num_src, heads[1], 5), leaf(*batch, graph.num_src, heads[2], 7)
    return Round(graph, value, Dot(query, key, 0.3), normalize="none")


def run(backend: object, given: Round) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    out, _ = engine.run(given, backend.NAME)
    direction = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    return [out, *torch.autograd.grad((out * direction).sum(), [given.score.query, given.score.key, given.value])]


@pytest.mark.parametrize("heads", [(4, 4, 4), (4, 2, 2), (4, 1, 2), (6, 2, 3), (4, 4, 1)], ids=str)
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.covering
def test_is_the_specification(name: str, heads: tuple[int, int, int]) -> None:
    given = request(GRAPHS[name], (2, 1), heads)
    assert why_not(scan, given) is None
    # Sums of at most 512 x 5 float64 products of size about 1, in another order: 2560 * 1.1e-16 < 1e-12.
    for found, expected in zip(run(scan, given), run(edge_list, given), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_state_of_a_group_is_shared_and_nothing_grows_with_the_square() -> None:
    blocks = [0, 4, 0, 4, 1]
    query, key, value = leaf(1, 4, 1, 2, 2), leaf(1, 4, 1, 1, 2), leaf(1, 4, 1, 1, 3)
    assert torch.autograd.gradcheck(lambda *t: linear_attention(*t, 0.5, blocks), (query, key, value))
    assert torch.autograd.gradgradcheck(lambda *t: linear_attention(*t, 0.5, blocks), (query, key, value))
    torch.library.opcheck(linear_attention, (query, key, value, 0.5, blocks))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"normalize": "softmax"}, "needs dot products as weights"),
        ({"dropout": 0.1}, "never computes single weights"),
        ({"return_weights": True}, "never computes single weights"),
        ({"reduce": Max()}, "it cannot aggregate messages by max"),
        ({"score": None, "graph": graphs.window(2).bind(37)}, "running sums without weights are those of causal()"),
        ({"bias": (torch.zeros(1, 1),)}, "does not support bias per edge"),
        ({"edge_value": torch.zeros(1, 4, 7)}, "does not support edge_value per edge"),
        ({"graph": graphs.window(2).bind(37)}, "each row must have the same sources as the row before"),
        ({"graph": graphs.longformer(8, globals=1).bind(37)}, "each row must have the same sources as the row before"),
        ({"graph": graphs.from_edges(torch.zeros(2, 1, dtype=torch.int64), 37)}, "the graph is a list of edges"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_refuses_with_a_sentence(change: dict[str, object], reason: str) -> None:
    assert reason in why_not(scan, replace(request(GRAPHS["complete"]), **change))


@pytest.mark.parametrize("topology", [graphs.complete(), graphs.causal()], ids=str)
def test_the_plan_takes_it_where_sequences_are_long(topology: object, capsys: pytest.CaptureFixture[str]) -> None:
    op = MessagePassing(topology, "sum", None, Kernel(64, 4, features=64))
    assert explain(op, torch.randn(2048, 64)).backend == "scan"
    assert explain(op, torch.randn(8, 64)).backend != "scan"
    assert "scan" in capsys.readouterr().out


@pytest.mark.parametrize("nodes", [1, 16, 256])
def test_the_plan_takes_it_for_every_recurrence(nodes: int) -> None:
    """Also for the single node of a decoded token: the specification computes matrices of all pairs and many steps."""
    x = torch.randn(nodes, 2, 16)
    gated = Round(graphs.causal().bind(nodes), x, Dot(x, x, 1.0), normalize="none", log_gate=-torch.rand(nodes, 2, 1))
    assert choose(gated).name == "scan"


@pytest.mark.parametrize(
    ("batch", "nodes", "heads", "width", "name"), [(32, 2, 4, 64, "edge_list"), (1, 4, 1, 16, "scan")]
)
def test_the_plan_of_training_over_few_nodes(batch: int, nodes: int, heads: int, width: int, name: str) -> None:
    """Gradients of large states cost `scan` passes over them, and all pairs of two nodes cost little."""
    x, gate = torch.randn(batch, nodes, heads, width).requires_grad_(), -torch.rand(batch, nodes, heads, 1)
    gated = Round(graphs.causal().bind(nodes), x, Dot(x, x, 1.0), normalize="none", log_gate=gate)
    assert {choose(gated).name} == {name}


# ------------------------------------------------------------------------------------------------ without weights


PREFIXES = {
    "causal": graphs.causal().bind(64),
    "documents": (graphs.causal() & graphs.documents([20, 1, 19, 24])).bind(64),
    "prefix": graphs.prefix(30).bind(64),
    "causal and not itself": (graphs.causal() - graphs.identity()).bind(64),
    "last rows": graphs.causal().bind(64).rows(44, 64),
}


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "var", "std", "pna"])
@pytest.mark.parametrize("name", PREFIXES)
@pytest.mark.covering
def test_aggregates_of_prefixes(reduce: str, name: str) -> None:
    graph = PREFIXES[name]
    for x in (torch.randn(2, 64, 3, dtype=torch.float64), torch.randint(0, 4, (64, 3)).double()):  # the second has ties
        x = x.requires_grad_()

        def derivatives(backend: str, x: Tensor = x) -> list[Tensor]:
            out = ops.aggregate(graph, x, reduce, backend=backend)
            (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
            return [out, first, *torch.autograd.grad(first.square().sum(), x)]

        torch.testing.assert_close(derivatives("scan"), derivatives("edge_list"), rtol=1e-8, atol=1e-8)
    low = torch.randn(64, 3).bfloat16()
    torch.testing.assert_close(
        ops.aggregate(graph, low, reduce, backend="scan").float(),
        ops.aggregate(graph, low.float(), reduce),
        rtol=1e-2,
        atol=1e-2,
    )


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", "var", "std"])
@pytest.mark.parametrize("name", PREFIXES)
def test_no_bit_depends_on_nodes_behind_the_prefix(reduce: str, name: str) -> None:
    graph, x = PREFIXES[name], torch.randn(64, 3)
    before = ops.aggregate(graph, x, reduce, backend="scan")
    for value in (1e6, torch.inf, torch.nan):
        moved = torch.where(torch.arange(64)[:, None] < 45, x, value)
        apart = ~graph.dense()[:, 45:].any(1)
        assert apart.any()
        assert torch.equal(ops.aggregate(graph, moved, reduce, backend="scan")[apart], before[apart])


def test_other_graphs_and_a_large_common_part_of_variances() -> None:
    x = torch.randn(64, 3)
    for topology in (graphs.window(2), graphs.causal() & graphs.documents([4] * 16)):
        with pytest.raises(ValueError, match="running sums without weights are those of causal"):
            ops.aggregate(topology.bind(64), x, backend="scan")
    graph, offset = graphs.causal().bind(64), 1e4
    expected = ops.aggregate(graph, x.double(), "var", backend="edge_list")
    found = ops.aggregate(graph, (x + offset).double().float(), "var", backend="scan")
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=5e-3)  # x + offset is rounded by 5e-4


def test_a_short_convolution_counts_each_number_of_its_radius() -> None:
    """Of values [2, 10, 3, 4] and windows of 5 nodes."""
    graph = (graphs.causal() & graphs.window(4)).bind(10)
    value = torch.randn(2, 10, 3, 4)
    given = Round(graph, value, normalize="none", bias=(BiasTable(torch.randn(5, 3), Offset(4)),))
    assert why_not(scan, given) is None
    assert scan.counts(given) == {"call": 1.0, "shifted number": 2 * 10 * 3 * 4 * 5}


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (graphs.complete().bind(5, 3), True),
        (graphs.complete().bind(5, 1), True),
        (graphs.complete().bind(5, 0), False),
        (graphs.causal().bind(5), True),
        ((graphs.causal() - graphs.identity()).bind(5), True),
        (graphs.prefix(2).bind(5), True),
        (graphs.causal().bind(3, 0), False),
        (graphs.window(1).bind(5), False),
        (graphs.documents([2, 3]).bind(5), False),
        (graphs.longformer(2, globals=1).bind(9), False),
        (graphs.identity().bind(5), False),
    ],
    ids=str,
)
def test_which_graphs_are_of_prefixes(graph: Graph, expected: bool) -> None:
    assert scan._is_of_prefixes(graph) == expected


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        ((graphs.causal() & graphs.window(2)).bind(6), (2, [6])),
        (graphs.causal().bind(4), (3, [4])),
        (graphs.identity().bind(3), (0, [1, 1, 1])),
        ((graphs.causal() & graphs.window(1) & graphs.documents([3, 0, 1, 2])).bind(6), (1, [3, 1, 2])),
        ((graphs.causal() & graphs.window(9) & graphs.documents([1, 4])).bind(5), (3, [1, 4])),
        ((graphs.causal() & graphs.documents([2, 4])).bind(6), (3, [2, 4])),
        (graphs.window(2).bind(6), None),
        ((graphs.causal() & graphs.window(2)).bind(6, 5), None),
        ((graphs.causal() - graphs.identity()).bind(4), None),
        (graphs.complete().bind(4), None),
        ((graphs.causal() & graphs.longformer(2, globals=1)).bind(9), None),
        ((graphs.causal() & graphs.window(3) & graphs.documents([5, 2])).bind(7), (3, [5, 2])),
    ],
    ids=str,
)
def test_which_graphs_are_short_convolutions(graph: Graph, expected: tuple[int, list[int]] | None) -> None:
    assert scan._find_convolution(graph) == expected


@pytest.mark.parametrize("documents", [[12], [5, 7]], ids=str)
@pytest.mark.parametrize(("radius", "clip"), [(0, 0), (2, 2), (3, 1), (2, 5)])
@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("batch", [(), (2,), (1, 2)], ids=str)
@pytest.mark.covering(times=2)
def test_short_convolutions(documents: list[int], radius: int, clip: int, columns: int, batch: tuple[int, ...]) -> None:
    graph = (graphs.causal() & graphs.window(radius) & graphs.documents(documents)).bind(12)
    value, table = leaf(*batch, 12, 3, 4), leaf(2 * clip + 1, columns)
    given = Round(graph, value, normalize="none", bias=(BiasTable(table, Offset(clip)),))
    assert why_not(scan, given) is None
    (found, _), (expected, _) = (engine.run(given, name) for name in ("scan", "edge_list"))
    torch.testing.assert_close(found, expected)
    direction = torch.randn_like(found)
    got, wanted = (torch.autograd.grad(out, (value, table), direction) for out in (found, expected))
    torch.testing.assert_close(got, wanted)


def test_what_is_no_short_convolution() -> None:
    bias = BiasTable(torch.randn(5, 3), Offset(2))
    value = torch.randn(40, 3, 4)

    def refused(topology: object, value: Tensor = value, count: int = 1) -> bool:
        given = Round(topology.bind(40), value, normalize="none", bias=(bias,) * count)
        return scan._refuse_convolution(given) is not None

    causal = graphs.causal()
    assert not refused(causal & graphs.window(16))
    assert refused(causal & graphs.window(17))
    assert refused(graphs.window(2))
    assert refused(causal & graphs.window(2), value[:, :1])
    assert refused(causal & graphs.window(2), count=2)
    assert refused(causal & graphs.window(2), count=0)


def test_how_graphs_are_made_of_blocks() -> None:
    every, past = scan.ALL, scan.PAST
    documents = (graphs.causal() & graphs.documents([40, 24])).bind(64)
    assert scan._causal_blocks(documents) == [(0, 40, 0, 40, past), (40, 64, 40, 64, past)]
    assert scan._blocks(documents) == [(0, 40, 0, 40, past), (40, 64, 40, 64, past)]
    assert scan._blocks(graphs.complete().bind(20, 30)) == [(0, 20, 0, 30, every)]
    # All rows have the sources of the prefix, and those behind it have themselves and the ones between.
    assert scan._blocks(graphs.prefix(20).bind(64)) == [(0, 64, 0, 20, every), (20, 64, 20, 64, past)]
    assert scan._blocks(graphs.documents([4] * 16).bind(64)) is None, "documents are too short"
    assert scan._blocks(graphs.documents([16] * 4).bind(64)) == [(k, k + 16, k, k + 16, every) for k in (0, 16, 32, 48)]
    assert scan._blocks((graphs.causal() & graphs.window(3)).bind(64)) is None
    assert scan._blocks(graphs.longformer(4, globals=1).bind(64)) is None
