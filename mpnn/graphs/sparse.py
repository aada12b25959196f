"""Random and composed sparse topologies: random edges, Longformer, BigBird."""

import numpy as np

from mpnn.graph import capacity
from mpnn.graph.arguments import at_least
from mpnn.graph.runs import Ints, require_room
from mpnn.graph.topology import Pairs, Topology
from mpnn.graphs import sequence


def random(degree: int, block: int = 1, seed: int = 0) -> Topology:
    """Samples `degree` sources without replacement for each row, or whole blocks of sources for each block of rows.

    With `block` > 1, all rows of a block receive from the same `degree / block` random blocks of sources, so `degree`
    must be a multiple of `block`. The last block of sources may be shorter. The same seed and size give the same
    edges. A degree larger than the number of sources selects all sources.

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
    sizes = at_least("degree", degree, 0), at_least("block", block, 1), at_least("seed", seed, 0)
    if degree % block:
        raise ValueError(f"degree must be a multiple of block; got degree {degree} and block {block}")
    return Topology.of(_random, *sizes, alike=int(block))


def _random(i: Ints, num_src: int, degree: int, block: int = 1, seed: int = 0) -> Pairs:
    rows = len(i)
    columns = -(-num_src // block)
    generator = np.random.default_rng([seed, rows, num_src])
    drawn = _draw(generator, np.full(rows, columns), degree // block)
    return _blocks(drawn, block)


def expander(degree: int, seed: int = 0) -> Topology:
    """Returns a random graph of at most `degree` in-neighbors whose nodes are few steps from one another: each node
    receives from the two neighbors on each of degree / 2 random cycles through all nodes (Exphormer, Shirzad et al.
    2023, arXiv:2303.06147). The same seed and size give the same edges.

    ::

        expander(2)   ..#..#
                      ..#.#.
                      ##....
                      ....##
                      .#.#..
                      #..#..
    """
    at_least("seed", seed, 0)
    if at_least("degree", degree, 2) % 2:
        raise ValueError(f"degree must be even, two for each cycle; got {degree}")
    return Topology.of(_expander, int(degree), int(seed))


def _expander(i: Ints, num_src: int, degree: int, seed: int = 0) -> Pairs:
    if len(i) != num_src:
        raise ValueError(f"expander needs as many sources as destinations; got {len(i)} x {num_src}")
    generator = np.random.default_rng([seed, num_src])
    others = num_src * (num_src - 1)
    # About n log(n) cycles connect all pairs, and others would add nothing.
    cycles = min(degree // 2, 2 * num_src * num_src.bit_length()) if num_src > 1 else 0
    require_room(num_src, num_src, 2 * cycles * num_src)
    connected = np.zeros(others + num_src if degree > num_src else 0, bool)
    for _ in range(cycles):
        cycle = generator.permutation(num_src)
        for shift in (1, -1):
            source = np.empty_like(cycle)
            source[cycle] = np.roll(cycle, shift)
            yield source, source + 1
            if len(connected):
                connected[i * num_src + source] = True
        if len(connected) and np.count_nonzero(connected) == others:
            return


def longformer(window: int, globals: int | list[int] = 0) -> Topology:
    """Returns `window(w // 2) | global_nodes(g)`: w is the full width, as in Longformer (Beltagy et al. 2020).

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
    """Returns the topology of BigBird (Zaheer et al. 2020) in blocks of `block` nodes: a sliding window of `window`
    blocks, `random` random blocks for each block of rows, and the first `globals` blocks as sources and destinations of
    all nodes.

    As in the paper, random blocks are sampled from the blocks that are neither in the window nor global.

    ::

        bigbird(block=1, window=3, random=1, globals=1)   #######
                                                          ###.#..
                                                          ####.#.
                                                          #####..
                                                          ##.###.
                                                          ##..###
                                                          #.#..##
    """
    blocks = at_least("block", block, 1), at_least("window", window, 1), at_least("random", random, 0)
    sizes = *blocks, at_least("globals", globals, 0), at_least("seed", seed, 0)
    if window % 2 == 0:
        raise ValueError(f"window must be an odd number of blocks, so that it is symmetric; got {window}")
    return Topology.of(_bigbird, *sizes, alike=int(block), positional=True)


def _bigbird(
    i: Ints, num_src: int, block: int = 64, window: int = 3, random: int = 3, globals: int = 2, seed: int = 0
) -> Pairs:
    columns = -(-num_src // block)
    side = window // 2
    at = i // block
    num_global = min(globals, columns)
    low = np.clip(np.maximum(at - side, num_global), 0, columns)  # blocks of the window that are not global
    high = np.clip(at + side + 1, low, columns)
    generator = np.random.default_rng([seed, len(i), num_src])
    drawn = _draw(generator, np.where(at < globals, 0, columns - num_global - (high - low)), random)
    drawn = np.where(drawn < 0, drawn, drawn + num_global)
    blocks = np.where(drawn >= low[:, None], drawn + (high - low)[:, None], drawn)
    global_stop = np.where(at < globals, num_src, num_global * block)
    return [(0, global_stop), (low * block, high * block), *_blocks(blocks, block)]


def _blocks(blocks: Ints, size: int) -> Pairs:
    """Yields the runs of the sampled source blocks of each row, [rows, count]; -1 means no block."""
    for column in blocks.T:
        yield np.maximum(column, 0) * size, (column + 1) * size * (column >= 0)


def _draw(generator: np.random.Generator, available: Ints, count: int) -> Ints:
    """Samples distinct integers below `available[row]`, [rows, count], padded with -1."""
    rows = len(available)
    most = int(available.max(initial=0))
    count = min(count, most)
    numbers = rows * (most if count * 8 >= most else count)
    what = f"random sources: {rows:,} draws of {count:,} among {most:,}"
    capacity.require(32 * numbers, what, "use fewer nodes, a smaller degree or larger blocks")
    if count * 8 >= most:  # dense sampling: the first `count` of a random order
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
    while len(todo):  # sparse sampling: repeats are sampled again until all values are distinct
        part = np.sort(drawn[todo], axis=1)
        again = np.zeros(part.shape, bool)
        again[:, 1:] = part[:, 1:] == part[:, :-1]
        bad = again.any(axis=1)
        fresh = generator.integers(0, available[todo, None], part.shape)
        drawn[todo] = np.where(again, fresh, part)
        todo = todo[bad]
    return drawn
