"""Forecasts against counts by hand, and against what exchanges are known to receive."""

from dataclasses import replace

import pytest

from docs.simulate import Machine, Work, sage, simulate, transformer
from mpnn import graphs
from mpnn.distributed import partition

SLOW_LINK = Machine("by hand", flops=1e6, memory_rate=float("inf"), link_rate=1e3, memory=1e9)


def test_a_window_by_hand():
    """16 tokens in two halves that fetch 2 from one another; 1 number travels, 10 operations a node, 1 an edge."""
    graph = graphs.window(2).bind(16)
    work = Work(width=1, dst_flops=8, src_flops=2, edge_flops=1, edge_numbers=0, dst_kept=3, src_kept=1, itemsize=4)
    found = simulate(partition(graph, 2, balance="nodes"), work, SLOW_LINK, layers=2)
    assert graph.num_edges == 74
    assert found.fetched == 2 * 4
    assert found.memory == 2 * 4 * (3 * 8 + 8 + 2)
    assert found.compute == pytest.approx(2 * 3 * (8 * 8 + 2 * 10 + 37) / 1e6)
    assert found.exchange == pytest.approx(2 * 2 * 8 / 1e3)
    alone = 2 * 3 * (8 * 16 + 2 * 16 + 74) / 1e6
    assert found.efficiency == pytest.approx(alone / (2 * found.seconds))


def test_bytes_are_those_of_the_plan():
    work = transformer(64, heads=8, kv_heads=4)
    for transport in ("halo", "heads", "stream", "queries"):
        part = partition(graphs.causal().bind(1000), 4, balance="zigzag")
        planned = {
            "halo": part.fetched_bytes(64),
            "heads": part.head_bytes(8, 4, 8),
            "stream": part.fetched_bytes(2 * 4 * 8),
            "queries": part.query_bytes(64, 8, 8),
        }[transport]
        found = simulate(part, replace(work, itemsize=4), SLOW_LINK, transport=transport)
        assert found.fetched == max(planned)


def test_scale_multiplies_nodes_and_edges():
    part = partition(graphs.from_edges([[0, 1, 2, 3], [1, 2, 3, 0]]), 2)
    small, large = (simulate(part, sage(8), SLOW_LINK, scale=scale) for scale in (1, 100))
    assert large.seconds == pytest.approx(100 * small.seconds)
    assert large.memory == pytest.approx(100 * small.memory)
    assert large.efficiency == pytest.approx(small.efficiency)


def test_one_rank_exchanges_nothing():
    found = simulate(partition(graphs.causal().bind(100), 1), transformer(16, heads=2), SLOW_LINK)
    assert (found.fetched, found.exchange, found.efficiency) == (0, 0, 1)


def test_what_cannot_be_divided_is_refused():
    part = partition(graphs.causal().bind(100), 3)
    with pytest.raises(ValueError, match="transport must be one of halo, heads, stream, queries; got 'ring'"):
        simulate(part, sage(8), SLOW_LINK, transport="ring")
    with pytest.raises(ValueError, match="this work has no heads"):
        simulate(part, sage(8), SLOW_LINK, transport="heads")
    with pytest.raises(ValueError, match="3 ranks do not divide 8 heads"):
        simulate(part, transformer(64, heads=8), SLOW_LINK, transport="heads")
