"""Tiles of a structured graph: which blocks of pairs hold edges, and where, from runs alone."""

import numpy as np
from hypothesis import given, settings, strategies as st

from mpnn import graphs
from mpnn.graph.blocks import BlockMask, boundaries, count_blocks, grid
from mpnn.graph.runs import Runs


def listed(tiles: BlockMask) -> list[tuple[int, int, bool, int, int]]:
    row = np.repeat(np.arange(len(tiles.ptr) - 1), np.diff(tiles.ptr))
    return [tuple(t) for t in np.stack([row, tiles.column, tiles.full, tiles.low, tiles.high], 1).tolist()]


def by_looking(mask: np.ndarray, rows: int, columns: int) -> list[tuple[int, int, bool, int, int]]:
    """The same from all pairs: what `BlockMask.of` must never do."""
    found = []
    for r in range(-(-mask.shape[0] // rows)):
        for c in range(-(-mask.shape[1] // columns)):
            tile = mask[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            here = np.flatnonzero(tile.any(0))
            if len(here):
                found.append((r, c, bool(tile.all()), int(here[0]), int(here[-1]) + 1))
    return found


def test_a_window_by_hand() -> None:
    # i attends to i - 1, i, i + 1:     ■ ■ | · ·
    # tiles of 2 x 2                   ■ ■ | ■ ·
    #                                  · ■ | ■ ■
    #                                  · · | ■ ■
    tiles = BlockMask.of(graphs.window(1).bind(4).runs, 2, 2)
    assert listed(tiles) == [(0, 0, True, 0, 2), (0, 1, False, 0, 1), (1, 0, False, 1, 2), (1, 1, True, 0, 2)]


def test_blocks_begin_where_documents_do() -> None:
    graph = (graphs.documents([3, 2]) & graphs.causal()).bind(5)
    dst, src = boundaries(graph.runs)
    assert dst.tolist() == src.tolist() == [0, 3, 5]
    queries, keys = grid(dst, 2), grid(src, 4)
    assert queries.tolist() == [0, 2, 3, 5]
    assert keys.tolist() == [0, 3, 5]
    tiles = BlockMask.on(graph.runs, queries, keys)
    assert listed(tiles) == [(0, 0, False, 0, 2), (1, 0, True, 0, 3), (2, 1, False, 0, 2)]


def test_rows_without_edges_belong_to_the_document_before() -> None:
    #       · · · ·
    #       · ■ · ·
    #       · · · ·
    #       · · · ■
    dst, src = boundaries(Runs.from_edges(4, 4, np.array([1, 3]), np.array([1, 3])))
    assert dst.tolist() == [0, 1, 3, 4]
    assert src.tolist() == [0, 1, 3, 4]
    none = np.array([], np.int64)
    assert [x.tolist() for x in boundaries(Runs.from_edges(2, 3, none, none))] == [[0, 2], [0, 3]]


def test_columns_between_two_runs_of_a_tile_are_kept() -> None:
    tiles = BlockMask.of(Runs.from_edges(1, 6, np.array([0, 0]), np.array([1, 4])), 1, 6)
    assert listed(tiles) == [(0, 0, False, 1, 5)]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 9),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8))),
)
def test_equals_what_looking_finds_for_any_edges(
    num_dst: int, num_src: int, rows: int, columns: int, edges: set[tuple[int, int]]
) -> None:
    kept = sorted((i, j) for i, j in edges if i < num_dst and j < num_src)
    mask = np.zeros((num_dst, num_src), bool)
    for i, j in kept:
        mask[i, j] = True
    ends = np.array(kept, dtype=np.int64).reshape(-1, 2)
    runs = Runs.from_edges(num_dst, num_src, ends[:, 0], ends[:, 1])
    tiles = BlockMask.of(runs, rows, columns)
    assert listed(tiles) == by_looking(mask, rows, columns)
    ptr, row, order = tiles.transposed()
    turned = [(int(r), c) for c in range(len(ptr) - 1) for r in row[ptr[c] : ptr[c + 1]]]
    assert sorted(turned) == [(r, c) for r, c, *_ in listed(tiles)]
    assert [int(tiles.column[e]) for e in order] == [c for _, c in turned]


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (2, 6), (6, 2), (4, 6), (3, 2)]),
)
def test_blocks_are_counted_as_they_are_listed(num_dst: int, num_src: int, seed: int, size: tuple[int, int]) -> None:
    rng = np.random.default_rng(seed)
    runs = Runs.from_dense(rng.random((num_dst, num_src)) < rng.random())
    mask = BlockMask.of(runs, *size)
    area = int((mask.high - mask.low).sum()) * size[0]
    assert count_blocks(runs, *size) == (len(mask.column), area)
    empty = Runs.of(0, num_src, [])
    assert count_blocks(empty, *size) == (0, 0)
