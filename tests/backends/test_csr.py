"""mpnn.backends.csr: dtypes, heads and widths of rounds, what it counts of them, and what it refuses."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mpnn import graphs
from mpnn.aggregate import Max, Mean, Min, Sum, Var
from mpnn.backends import csr, edge_list
from mpnn.graph.edge_tables import EmbeddingTable
from mpnn.graph.relations import Offset
from mpnn.kernels.cpu import library
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot, LeakyReLU

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="needs the compiled kernels")
EDGES = torch.tensor([[3, 0, 2, 1, 1, 0, 3, 4, 2, 0, 1], [2, 0, 2, 3, 2, 2, 0, 2, 3, 2, 2]])
GRAPH = graphs.from_edges(EDGES, num_dst=4, num_src=5)  # row 1 has no edges
COUNT = EDGES.shape[1]


class Largest:
    """Max, of which each of several equal messages gets the whole gradient."""

    identity = -torch.inf
    combine: ClassVar[Any] = staticmethod(lambda a, b: max(a, b))
    gradient: ClassVar[Any] = staticmethod(lambda m, out: 1.0 if m == out else 0.0)

    def reduce(self, messages: Tensor, index: Any) -> Tensor:
        return Max().reduce(messages, index)


@pytest.mark.parametrize("reduce", [Sum(), Mean(), Max(), Min(), Var(), Largest()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("grad", [False, True], ids=["", "with gradients"])
def test_dtypes_of_aggregates(reduce: Any, dtype: torch.dtype, grad: bool) -> None:
    graph = graphs.from_edges(EDGES.unique(dim=1), num_dst=4, num_src=5)  # no two messages are equal
    value = torch.randn(2, 5, 1, 3).to(dtype).requires_grad_(grad)
    round = Round(graph, value, normalize="none", reduce=reduce)
    found, expected = csr.run(round).out, edge_list.run(round).out
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)
    if grad:
        (gradient,) = torch.autograd.grad(found.sum(), value)
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), value)[0])


def test_equal_messages_share_the_gradient_only_if_the_aggregator_says_so() -> None:
    value = torch.ones(5, 1, 2, dtype=torch.float64, requires_grad=True)
    found = csr.run(Round(GRAPH, value, normalize="none", reduce=Largest())).out
    (gradient,) = torch.autograd.grad(found.sum(), value)
    of_each = EDGES[0].bincount(minlength=5).double()[:, None, None].expand(5, 1, 2)
    torch.testing.assert_close(gradient, of_each)


@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (4, 4), (4, 1)], ids=str)
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_weights_of_more_heads_than_the_value(heads: tuple[int, int], batch: tuple[int, ...]) -> None:
    value = torch.randn(*batch, 5, heads[0], 3, dtype=torch.float64)
    for bias in (torch.randn(COUNT, heads[1]).double(), torch.randn(*batch, COUNT, heads[1]).double()):
        for reduce in (Sum(), Mean(), Max()):
            round = Round(GRAPH, value, normalize="none", bias=(bias,), reduce=reduce)
            torch.testing.assert_close(csr.run(round).out, edge_list.run(round).out)


@pytest.mark.parametrize("widths", [(0, 8), (8, 0), (0, 0), (3, 1)], ids=str)
def test_widths_of_zero(widths: tuple[int, int]) -> None:
    query, key = torch.randn(2, 4, 2, widths[0]), torch.randn(2, 5, 2, widths[0])
    round = Round(GRAPH, torch.randn(2, 5, 2, widths[1]), Dot(query, key, 0.5), return_weights=True)
    found, expected = csr.run(round), edge_list.run(round)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.weights, expected.weights)


def test_lse_of_rows_whose_logits_are_minus_infinity() -> None:
    bias = torch.zeros(COUNT, 2)
    bias[EDGES[1] == 3] = -torch.inf
    query, key, value = torch.randn(4, 2, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    round = Round(GRAPH, value, Dot(query, key, 0.5), bias=(bias,), return_lse=True)
    found, expected = csr.run(round), edge_list.run(round)
    torch.testing.assert_close(found.out, expected.out)
    torch.testing.assert_close(found.lse, expected.lse)
    assert found.lse is not None
    assert found.lse[[1, 3]].eq(-torch.inf).all()


def table(width: int) -> EmbeddingTable:
    return EmbeddingTable(torch.zeros(3, 2, width), Offset(1))


def test_vectors_of_edges_are_as_wide_as_what_they_are_added_to() -> None:
    query, key, value = torch.zeros(4, 2, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 6)
    vector = torch.zeros(2, 8)

    def refusal(score: Any, **options: Any) -> str | None:
        return csr._unsupported(Round(GRAPH, value, score, **options))

    def message(name: str, wide: int, width: int) -> str:
        return f"{name} is {wide} wide, and the features it is added to are {width} wide"

    assert refusal(Dot(query, key, 0.5, table(8))) is None
    assert refusal(Dot(query, key, 0.5, table(1))) == message("edge_key", 1, 8)
    assert refusal(Dot(query, key, 0.5), edge_value=table(6)) is None
    assert refusal(Dot(query, key, 0.5), edge_value=table(8)) == message("edge_value", 8, 6)
    edge = torch.zeros(COUNT, 2, 8)
    assert refusal(AdditiveV2Score(query, key, vector, LeakyReLU(), edge)) is None
    assert refusal(AdditiveV2Score(query, key, vector, LeakyReLU(), edge[..., :3])) == message("edge", 3, 8)
    assert refusal(AdditiveScore(query[..., 0], key[..., 0], LeakyReLU(), torch.zeros(COUNT, 2))) is None
    none = torch.zeros(4, 0, 8), torch.zeros(5, 0, 8)
    assert csr._unsupported(Round(GRAPH, none[1], Dot(*none, 0.5))) == "there is no head to compute"


def test_refusals_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    way = csr.ATTENTION["cuda"]
    query, key, value = torch.zeros(4, 2, 8), torch.zeros(5, 2, 8), torch.zeros(5, 2, 6)
    plain = Round(GRAPH, value, Dot(query, key, 0.5))
    narrow = Round(GRAPH, value, Dot(query, key, 0.5, table(1)))
    monkeypatch.setattr(csr, "unavailable", lambda *_: None)
    assert way.refusal(plain) is None
    assert "edge_key is 1 wide" in str(way.refusal(narrow))
    monkeypatch.setattr(csr, "unavailable", lambda *_: "there is no GPU")
    assert way.refusal(plain) == "there is no GPU"
    assert csr.AGGREGATION["cuda"].refusal(Round(GRAPH, value, normalize="none")) == "there is no GPU"


@pytest.mark.parametrize(("width", "padded"), [(8, 8), (9, 16), (16, 16), (1, 8)])
def test_counts_of_whole_vectors(width: int, padded: int) -> None:
    query, key, value = torch.zeros(3, 4, 2, 8), torch.zeros(3, 5, 2, 8), torch.zeros(3, 5, 2, width)
    counts = csr.counts(Round(GRAPH, value, Dot(query, key, 0.5)))
    assert counts["gathered number"] == 3 * COUNT * 2 * padded * 2  # keys and values
    assert counts["attending number"] == 3 * 4 * 2 * padded


@pytest.mark.parametrize("heads", [(16, 1, 1), (16, 2, 1), (16, 1, 2), (16, 4, 1)], ids=str)
def test_counts_of_keys_that_heads_share(heads: tuple[int, int, int]) -> None:
    """Keys of long rows are copied, if eight heads share them."""
    graph = graphs.complete().bind(16)
    query, key, value = (torch.zeros(16, h, 8) for h in heads)
    counts = csr.counts(Round(graph, value, Dot(query, key, 0.5)))
    gathered = 256 * 16 * 8 * 2
    most = max(heads[1:])
    if most > 2:
        assert counts["gathered number"] == gathered
    else:
        assert counts["copied number"] == gathered * most / 16
        assert counts["shared product"] == gathered
        assert "gathered number" not in counts


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("columns", [1, 4])
def test_data_of_each_edge_for_all_heads_and_entries(batch: tuple[int, ...], columns: int) -> None:
    round = Round(GRAPH, torch.zeros(*batch, 5, 4, 3))
    entries = round.batch.numel()
    for own in ((), batch):
        numbers, vectors = torch.randn(*own, COUNT, columns), torch.randn(*own, COUNT, columns, 3)
        expected = numbers.expand(*batch, COUNT, 4).reshape(entries, COUNT, 4)
        assert csr._each_edge(numbers, 4, round).equal(expected)
        expected = vectors.expand(*batch, COUNT, 4, 3).reshape(entries, COUNT, 4, 3)
        assert csr._each_edge(vectors, 4, round, trailing=2).equal(expected)
