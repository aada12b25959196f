"""Random and composed sparse topologies: random edges, Longformer, BigBird."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from mpnn.graphs import sequence
from mpnn.graphs.check import at_least
from mpnn.runs import Ints
from mpnn.topology import Topology

Pairs = Iterable[tuple[ArrayLike, ArrayLike]]


def random(degree: int, block: int = 1, seed: int = 0) -> Topology:
    """`degree` sources drawn without replacement for each row, or for each block of rows, in whole blocks of sources.

    With `block` > 1 every row of a block of rows hears the same `degree / block` random blocks of sources (the last
    one may be cut short by the end), so `degree` must be a multiple of it. The same seed and size give the same edges;
    a degree beyond the number of sources means all of them.

    ::

        random(2)   ...#.#
                    ..#.#.
                    .#...#
                    ..#..#
                    ..#.#.
                    #..#..

        random(2, block=2)   ##....
                             ##....
                             ....##
                             ....##
                             ##....
                             ##....
    """
    at_least("degree", degree, 0)
    at_least("block", block, 1)
    at_least("seed", seed, 0)
    if degree % block:
        raise ValueError(f"degree must be a multiple of block; got degree {degree} and block {block}")
    return Topology.of(_random, int(degree), int(block), int(seed), alike=int(block))


def _random(i: Ints, num_src: int, degree: int, block: int = 1, seed: int = 0) -> Pairs:
    rows, columns = len(i), -(-num_src // block)
    generator = np.random.default_rng([seed, rows, num_src])
    drawn = _draw(generator, np.full(rows, columns), degree // block)
    return _blocks(drawn, block)


def longformer(window: int, globals: int | list[int] = 0) -> Topology:
    """`window(w // 2) | global_nodes(g)`: w is the whole width, as in Longformer (Beltagy et al. 2020).

    ::

        longformer(2, globals=1)   ######
                                   ###...
                                   ####..
                                   #.###.
                                   #..###
                                   #...##
    """
    at_least("window", window, 0)
    band = sequence.window(window // 2)
    return band if isinstance(globals, int) and globals == 0 else band | sequence.global_nodes(globals)


def bigbird(block: int = 64, window: int = 3, random: int = 3, globals: int = 2, seed: int = 0) -> Topology:
    """BigBird (Zaheer et al. 2020) in blocks: neighbours in a window of that many blocks, that many random blocks for
    each block of rows, and the first `globals` blocks both ways.

    As published, random blocks are drawn from those that are neither in the window nor global.

    ::

        bigbird(block=1, window=3, random=1, globals=1)   #######
                                                          ###.#..
                                                          ####.#.
                                                          #####..
                                                          ##.###.
                                                          ##..###
                                                          #.#..##
    """
    at_least("block", block, 1)
    at_least("window", window, 1)
    at_least("random", random, 0)
    at_least("globals", globals, 0)
    at_least("seed", seed, 0)
    if window % 2 == 0:
        raise ValueError(f"window must be an odd number of blocks, as many on each side; got {window}")
    sizes = (int(block), int(window), int(random), int(globals), int(seed))
    return Topology.of(_bigbird, *sizes, alike=int(block), positional=True)


def _bigbird(
    i: Ints, num_src: int, block: int = 64, window: int = 3, random: int = 3, globals: int = 2, seed: int = 0
) -> Pairs:
    columns, side, at = -(-num_src // block), window // 2, i // block
    taken = min(globals, columns)
    low = np.clip(np.maximum(at - side, taken), 0, columns)  # the blocks that the window adds to the global ones
    high = np.clip(at + side + 1, low, columns)
    generator = np.random.default_rng([seed, len(i), num_src])
    drawn = _draw(generator, np.where(at < globals, 0, columns - taken - (high - low)), random)
    drawn = np.where(drawn < 0, drawn, drawn + taken)
    blocks = np.where(drawn >= low[:, None], drawn + (high - low)[:, None], drawn)
    everything = np.where(at < globals, num_src, taken * block)
    return [(0, everything), (low * block, high * block), *_blocks(blocks, block)]


def _blocks(blocks: Ints, size: int) -> Pairs:
    """The runs of the source blocks drawn for each row [rows, count]; -1 stands for none."""
    for column in blocks.T:
        yield np.maximum(column, 0) * size, (column + 1) * size * (column >= 0)


def _draw(generator: np.random.Generator, available: Ints, count: int) -> Ints:
    """[rows, count]: distinct integers below `available[row]`, -1 where there are not so many."""
    rows = len(available)
    most = int(available.max(initial=0))
    count = min(count, most)
    if count * 8 >= most:  # dense draws: the first `count` of a random order
        keys = generator.random((rows, most))
        keys[np.arange(most) >= available[:, None]] = 2.0
        drawn = np.argsort(keys, axis=1)[:, :count]
        return np.where(np.take_along_axis(keys, drawn, 1) < 2.0, drawn, -1)
    drawn = np.full((rows, count), -1)
    enough = available >= count
    few = np.flatnonzero(~enough)
    for r in few:
        drawn[r, : available[r]] = np.arange(available[r])
    todo = np.flatnonzero(enough)
    drawn[todo] = generator.integers(0, available[todo, None], (len(todo), count))
    while len(todo):  # sparse draws: repeats are drawn again until none is left
        part = np.sort(drawn[todo], axis=1)
        again = np.zeros(part.shape, bool)
        again[:, 1:] = part[:, 1:] == part[:, :-1]
        bad = again.any(axis=1)
        fresh = generator.integers(0, available[todo, None], part.shape)
        drawn[todo] = np.where(again, fresh, part)
        todo = todo[bad]
    return drawn
