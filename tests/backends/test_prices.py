"""Prices of rounds grow as their work does: with the batch, and with documents that are alike."""

import re
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from mpnn import graphs
from mpnn.aggregate import Max, Mean, Std, Sum
from mpnn.backends import BACKENDS, csr, edge_list, scan, tiles
from mpnn.backends.cost_model import is_once
from mpnn.engine.choice import own_refusal
from mpnn.graph.edge_tables import BiasTable
from mpnn.graph.relations import Offset
from mpnn.round import Round
from mpnn.scores import AdditiveScore, AdditiveV2Score, Dot

NODES = 64  # of a document: a whole tile


def rounds(batch: int, documents: int, grad: bool) -> Iterator[Round]:
    """Rounds of each kind over documents of each kind."""
    nodes = NODES * documents
    apart = graphs.documents([NODES] * documents)

    def of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(batch, nodes, *shape, dtype=dtype, requires_grad=grad)

    kinds = [topology.bind(nodes) for topology in (apart, graphs.causal() & apart, graphs.window(3) & apart)]
    kinds.append(graphs.from_edges(kinds[-1].edge_index, nodes))
    for graph in kinds:
        value = of(2, 8)
        score = Dot(of(4, 8), of(2, 8), 0.5)
        wide = [of(2, 8, dtype=torch.float64) for _ in range(3)]
        yield Round(graph, value, score)
        yield Round(graph, value, score, normalize="none")
        yield Round(graph, value, score, dropout=0.1, seed=torch.tensor(1))
        yield Round(graph, value, score, bias=(torch.zeros(batch, graph.num_edges, 4),))
        yield Round(graph, value, score, bias=(BiasTable(torch.zeros(9, 4), Offset(4)),))
        yield Round(graph, wide[0], Dot(wide[1], wide[2], 0.5))
        yield Round(graph, value, AdditiveScore(of(2), of(2), nn.LeakyReLU()))
        yield Round(graph, value, AdditiveV2Score(of(2, 8), of(2, 8), torch.zeros(2, 8), nn.LeakyReLU()))
        for reduce in (Sum(), Mean(), Max(), Std()):
            yield Round(graph, value, normalize="none", reduce=reduce)


def check(backend: ModuleType, one: Round, three: Round, but: str) -> None:
    """Compares what is counted for a round and for one of three times the work, but for operations of these names."""
    if own_refusal(backend, one) is not None:
        return
    counts = {kind: n for kind, n in backend.counts(one).items() if not re.match(but, kind)}
    expected = {kind: n if is_once(kind) else 3 * n for kind, n in counts.items()}
    more = backend.counts(three)
    assert {kind: more[kind] for kind in counts} == pytest.approx(expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.NAME)
def test_three_times_the_batch_is_three_times_the_work_of_a_call(backend: ModuleType, grad: bool) -> None:
    for one, three in zip(rounds(2, 1, grad), rounds(6, 1, grad), strict=True):
        check(backend, one, three, but="looked up")  # Entries of the batch share a table.


@pytest.mark.parametrize("backend", [edge_list, csr, tiles, scan], ids=lambda backend: backend.NAME)
def test_three_documents_are_three_times_the_work_of_one(backend: ModuleType) -> None:
    for one, three in zip(rounds(2, 1, True), rounds(2, 3, True), strict=True):
        # Numbers far apart are not in the cache, and windows at the ends of documents have tiles of their own.
        check(backend, one, three, but="far number|tile")
