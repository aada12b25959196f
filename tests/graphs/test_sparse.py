"""Random edges, Longformer and BigBird: what was published, and what it costs to bind them at a million nodes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from well_formed import check_well_formed

from mpnn import graphs

# ------------------------------------------------------------------------------------------------ random


@pytest.mark.parametrize("n", [1, 2, 7, 53, 400])
@pytest.mark.parametrize("degree", [0, 1, 3, 40])
@pytest.mark.covering
def test_every_row_draws_so_many_sources(n: int, degree: int) -> None:
    graph = graphs.random(degree, seed=1).bind(n)
    check_well_formed(graph.runs)
    assert graph.degree().tolist() == [min(degree, n)] * n  # without replacement


@pytest.mark.parametrize("num_src", [12, 13, 53])
def test_rows_of_a_block_share_whole_blocks_of_sources(num_src: int) -> None:
    dense = graphs.random(6, block=3, seed=2).bind(17, num_src).dense()
    for first in range(0, 17, 3):
        rows = dense[first : first + 3]
        assert (rows == rows[0]).all()
        blocks = [block.tolist() for block in rows[0].split(3)]
        assert all(len(set(block)) == 1 for block in blocks)
        assert sum(block[0] for block in blocks) == 2


def test_the_same_seed_and_size_give_the_same_edges() -> None:
    def edges(seed: int, n: int) -> list[list[int]]:
        graph = graphs.random(4, seed=seed)._graph(n, n)  # past the cache of bind
        return graph.edge_index.tolist()

    assert edges(0, 50) == edges(0, 50)
    assert edges(0, 50) != edges(1, 50)


@pytest.mark.parametrize("degree", [3, 30])
def test_sources_are_drawn_evenly(degree: int) -> None:
    n = 60  # one of the two ways to draw serves few of many, the other the rest
    times = sum(graphs.random(degree, seed=seed).bind(n).dense().sum(0) for seed in range(100)).numpy()
    expected = 100 * degree
    # a binomial count over 100 * n rows; six deviations hold for all 60 sources but once in millions
    assert (abs(times - expected) < 6 * np.sqrt(expected * (1 - degree / n))).all()


# ------------------------------------------------------------------------------------------------ Longformer


# ------------------------------------------------------------------------------------------------ BigBird


@pytest.mark.parametrize(("window", "random", "globals"), [(3, 3, 2), (1, 2, 1), (5, 0, 3), (3, 1, 0)])
@pytest.mark.parametrize("n", [64, 61])  # a last block that is cut short by three
def test_bigbird_consists_of_blocks(window: int, random: int, globals: int, n: int) -> None:
    block, columns = 4, 16
    topology = graphs.bigbird(block=block, window=window, random=random, globals=globals, seed=5)
    dense = topology.bind(n).dense()
    padded = torch.zeros(columns * block, columns * block, dtype=torch.bool)
    padded[:n, :n] = dense
    blocks = padded.view(columns, block, columns, block)[:, 0, :, 0]
    assert torch.equal(padded[:n, :n], blocks.repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :n])

    i, j = np.indices((columns, columns))
    certain = torch.from_numpy((abs(i - j) <= window // 2) | (i < globals) | (j < globals))
    assert blocks[certain].all()
    drawn = blocks & ~certain  # neither in the window nor global, as published
    room = (~certain).sum(1)
    assert drawn.sum(1).tolist() == [min(random, int(r)) if k >= globals else 0 for k, r in enumerate(room)]


def test_bigbird_draws_for_each_row_block() -> None:
    bigbird = graphs.bigbird(block=2, random=3, seed=0).bind(200).dense()
    other_seed = graphs.bigbird(block=2, random=3, seed=1).bind(200).dense()
    certain = graphs.bigbird(block=2, random=0).bind(200).dense()
    drawn = {tuple(row.nonzero().squeeze(1).tolist()) for row in bigbird & ~certain}
    assert len(drawn) > 90  # 98 row blocks are not global, and hardly two draw the same three of 90 blocks or so
    assert not torch.equal(bigbird, other_seed)
    assert torch.equal(bigbird & certain, other_seed & certain)


def test_bigbird_on_fewer_blocks_than_it_asks_for_is_complete() -> None:
    assert graphs.bigbird().bind(150).runs.is_complete


# ------------------------------------------------------------------------------------------------ a million nodes

MEASURE = """
import re
from mpnn import graphs
graph = ({expression}).bind(1_000_000)
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)
print(peak, graph.num_edges)
"""

MILLION = {
    "graphs.bigbird()": 600_000_000,
    "graphs.window(64) | graphs.global_nodes(64) | graphs.random(192, block=64, seed=0)": 400_000_000,
}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("expression", MILLION)
@pytest.mark.slow
def test_a_million_nodes_bind_under_a_gigabyte(expression: str) -> None:
    # in a process of its own; getrusage would count the parent's pages too, which a fork inherits
    code = MEASURE.format(expression=expression)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    kilobytes, edges = (float(word) for word in done.stdout.split())
    assert edges > MILLION[expression]
    assert kilobytes < 1e6
