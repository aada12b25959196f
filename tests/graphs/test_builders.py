"""Every builder: tiny graphs drawn by hand, odd and prime sizes against a plain predicate, and its own docstring."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from drawings import draw, drawn
from well_formed import check_well_formed

from mpnn import Graph, Topology, graphs

# ------------------------------------------------------------------------------------------------ drawn by hand

DRAWN = {
    "complete().bind(2, 3)": """
        ###
        ###
    """,
    "causal().bind(4)": """
        #...
        ##..
        ###.
        ####
    """,
    "causal().bind(4).rows(0, 2)": """
        #...
        ##..
    """,
    "identity().bind(3)": """
        #..
        .#.
        ..#
    """,
    "window(1).bind(5)": """
        ##...
        ###..
        .###.
        ..###
        ...##
    """,
    "window(0).bind(2)": """
        #.
        .#
    """,
    "window(1, dilation=3).bind(7)": """
        #..#...
        .#..#..
        ..#..#.
        #..#..#
        .#..#..
        ..#..#.
        ...#..#
    """,
    "global_nodes(2).bind(5)": """
        #####
        #####
        ##...
        ##...
        ##...
    """,
    "global_nodes([1, 3]).bind(4)": """
        .#.#
        ####
        .#.#
        ####
    """,
    "global_nodes([3]).bind(4).rows(0, 2)": """
        ...#
        ...#
    """,
    "prefix(2).bind(4)": """
        ##..
        ##..
        ###.
        ####
    """,
    "documents([1, 0, 3]).bind(4)": """
        #...
        .###
        .###
        .###
    """,
    "documents([2, 0, 3], inner=prefix(2)).bind(5)": """
        ##...
        ##...
        ..##.
        ..##.
        ..###
    """,
    "documents([2, 1], src_lengths=[1, 2]).bind(3, 3)": """
        #..
        #..
        .##
    """,
    # 3 comes first and attends to itself; then 0 attends to 3 and itself; then 2; then 1, which attends to all
    "permutation([3, 0, 2, 1]).bind(4)": """
        #..#
        ####
        #.##
        ...#
    """,
    "memory(1).bind(3)": """
        ##..
        ###.
        ####
    """,
    "strided(3).bind(8)": """
        #.......
        ##......
        ###.....
        ####....
        .####...
        ..####..
        #..####.
        .#..####
    """,
    "longformer(2, globals=1).bind(5)": """
        #####
        ###..
        ####.
        #.###
        #..##
    """,
    "longformer(2, globals=[2]).bind(4)": """
        ###.
        ###.
        ####
        ..##
    """,
    "bigbird(block=2, window=1, random=0, globals=1).bind(5)": """
        #####
        #####
        ####.
        ####.
        ##..#
    """,
    "bigbird(block=1, window=3, random=0, globals=2).bind(6)": """
        ######
        ######
        ####..
        #####.
        ##.###
        ##..##
    """,
    "random(3).bind(2, 3)": """
        ###
        ###
    """,
    "grid(2, 3).bind(6)": """
        .#.#..
        #.#.#.
        .#...#
        #...#.
        .#.#.#
        ..#.#.
    """,
    "grid(2, 3, connectivity=8).bind(6)": """
        .#.##.
        #.####
        .#..##
        ##..#.
        ####.#
        .##.#.
    """,
    "neighborhood(3, 2, 1).bind(6)": """
        ####..
        ####..
        ######
        ######
        ..####
        ..####
    """,
    "windows(2, 4, size=2).bind(8)": """
        ##..##..
        ##..##..
        ..##..##
        ..##..##
        ##..##..
        ##..##..
        ..##..##
        ..##..##
    """,
    # shifted by one, a row of four pixels falls into {1, 2} and {3, 0}; 3 and 0 are no neighbors
    "windows(1, 4, size=2, shift=1).bind(4)": """
        #...
        .##.
        .##.
        ...#
    """,
    "windows(1, 5, size=3).bind(5)": """
        ###..
        ###..
        ###..
        ...##
        ...##
    """,
    "from_edges([[0, 2, 2], [1, 1, 0]])": """
        ..#
        #.#
        ...
    """,
    "from_edges([[3], [1]], num_src=4, num_dst=2)": """
        ....
        ...#
    """,
    "batch([causal().bind(2), complete().bind(1, 2)])": """
        #...
        ##..
        ..##
    """,
}


def built(expression: str) -> Graph:
    """What an expression of this file or of a docstring gives, in the words of the docstrings."""
    names = {**vars(graphs), "torch": torch, "scipy": scipy}
    if "networkx" in expression:
        names["networkx"] = pytest.importorskip("networkx")
    if "Data" in expression:
        names["Data"] = pytest.importorskip("torch_geometric.data").Data
    return eval(expression, names)


@pytest.mark.parametrize("expression", DRAWN)
def test_the_edges_are_those_drawn_by_hand(expression: str) -> None:
    graph = built(expression)
    check_well_formed(graph.runs)
    assert torch.equal(graph.dense(), drawn(DRAWN[expression])), "\n" + draw(graph)


# ------------------------------------------------------------------------------------------------ docstrings

PUBLISHED = [
    thing
    for name, thing in vars(graphs).items()
    if name != "register" and getattr(thing, "__module__", "").startswith("mpnn.graphs.")
]
_FIRST = re.compile(r"^ +(\S.*\))   ([#.]+)$")  # window(1)   ##...
_NEXT = re.compile(r"^ +([#.]+)$")


def drawings(docstring: str) -> list[tuple[str, list[str]]]:
    """(expression, rows) of every drawing: a line `expression   row`, then rows alone."""
    found: list[tuple[str, list[str]]] = []
    for line in docstring.splitlines():
        if first := _FIRST.match(line):
            found.append((first[1], [first[2]]))
        elif following := _NEXT.match(line):
            found[-1][1].append(following[1])
    return found


@pytest.mark.parametrize("builder", PUBLISHED, ids=lambda b: b.__name__)
def test_docstrings_draw_what_is_built(builder: Callable[..., Any]) -> None:
    docstring = builder.__doc__ or ""
    shown = drawings(docstring)
    assert ("::" in docstring) == bool(shown)
    for expression, rows in shown:
        assert expression.startswith(builder.__name__ + "(")
        given = built(expression)
        graph = given.bind(len(rows[0])) if isinstance(given, Topology) else given
        assert draw(graph).split() == rows, expression


def test_every_builder_of_the_contract_is_drawn() -> None:
    undrawn = {builder.__name__ for builder in PUBLISHED if not drawings(builder.__doc__ or "")}
    assert undrawn == {
        *("parse", "to_scipy", "to_networkx", "to_pyg", "to_torch_sparse", "to_sparse_tensor"),
        *("from_dgl", "from_torch_sparse", "from_sparse_tensor", "absent_edges"),
        *("CompressedGraph", "HeteroGraph", "HeteroSample", "TemporalGraph", "compressed", "open_csr", "write_csr"),
        *("as_topology", "from_tables", "sample"),
        *("edge_vectors", "farthest", "icosphere", "icosphere_points"),
    }


# ------------------------------------------------------------------------------------------------ against predicates

ODD_SIZES = [1, 2, 7, 13, 31, 53, 97]

PREDICATES: list[tuple[Topology, Callable[[np.ndarray, np.ndarray], Any]]] = [
    (graphs.complete(), lambda i, j: i >= 0),
    (graphs.causal(), lambda i, j: j <= i),
    (graphs.identity(), lambda i, j: j == i),
    (graphs.window(4), lambda i, j: abs(i - j) <= 4),
    (graphs.window(2**61), lambda i, j: i >= 0),
    (graphs.window(10**9, dilation=3), lambda i, j: (i - j) % 3 == 0),
    (graphs.global_nodes(3), lambda i, j: (i < 3) | (j < 3)),
    (graphs.global_nodes(10**12), lambda i, j: i >= 0),
    (graphs.global_nodes([]), lambda i, j: i < 0),
    (graphs.global_nodes([0]), lambda i, j: (i == 0) | (j == 0)),
    (graphs.prefix(5), lambda i, j: (j < 5) | (j <= i)),
    (graphs.prefix(0), lambda i, j: j <= i),
    *(
        (graphs.strided(s), lambda i, j, s=s: (j <= i) & ((i - j < s) | ((i - j) % s == 0)))
        for s in (1, 2, 3, 7, 17, 50)
    ),
    *(
        (graphs.window(r, d), lambda i, j, r=r, d=d: (abs(i - j) <= r * d) & ((i - j) % d == 0))
        for r, d in ((0, 2), (1, 2), (3, 5), (9, 3), (99, 4))
    ),
    *(
        (graphs.fixed(b, s), lambda i, j, b=b, s=s: (j <= i) & ((i // b == j // b) | (j % b >= b - s)))
        for b, s in ((1, 0), (3, 0), (3, 1), (5, 5), (7, 2), (8, 0), (50, 1))
    ),
    (graphs.longformer(7, globals=2), lambda i, j: (abs(i - j) <= 3) | (i < 2) | (j < 2)),
    (
        graphs.bigbird(block=4, window=3, random=0, globals=1),
        lambda i, j: (abs(i // 4 - j // 4) <= 1) | (i < 4) | (j < 4),
    ),
]


@pytest.mark.parametrize(("topology", "mask"), PREDICATES, ids=[str(topology) for topology, _ in PREDICATES])
@pytest.mark.covering
def test_square_and_rectangular_graphs_follow_their_predicate(
    topology: Topology, mask: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    for n in ODD_SIZES:
        for num_src in (n, n + 6, max(n - 3, 0)):
            graph = topology._graph(max(n, num_src), num_src)  # past the cache of bind
            part = graph.rows(0, n)
            check_well_formed(part.runs)
            assert (part.dense().numpy() == mask(*np.indices((n, num_src)))).all(), (n, num_src)


# ------------------------------------------------------------------------------------------------ what they cost


@pytest.mark.parametrize(
    ("topology", "num_runs"),
    [
        (graphs.strided(1), 100_000),
        (graphs.fixed(3, 3), 100_000),
        (graphs.fixed(2, 0), 100_000),
        (graphs.permutation(range(100_000)), 100_000),
        (graphs.permutation(range(99_999, -1, -1)), 100_000),
    ],
    ids=["strided", "fixed", "fixed without summary", "in order", "backwards"],
)
def test_topologies_of_one_run_a_row_are_bound_as_one_run_a_row(topology: Topology, num_runs: int) -> None:
    assert len(topology.bind(100_000).runs.start) == num_runs


def test_kernels_far_beyond_the_image_cost_what_lies_on_it() -> None:
    far = 10**12
    assert graphs.pooling(3, 4, far).bind(1, 12).runs.is_complete
    assert graphs.convolution(3, 4, [2 * far + 3, 2 * far + 4], padding=far).bind(1, 12).runs.is_complete
    holes = graphs.convolution(1, 7, [1, 2 * far + 3], padding=[0, 3 * far], dilation=[1, 3]).bind(1, 7)
    assert draw(holes).split() == ["#..#..#"]


# ------------------------------------------------------------------------------------------------ bad input

BAD = {
    "window(-1)": "radius must be at least 0; got -1",
    "window(1.5)": "radius must be an integer; got 1.5",
    "window(True)": "radius must be an integer; got True",
    "window(10**30)": r"radius must not exceed 2\*\*61",
    "window(2, dilation=0)": "dilation must be at least 1; got 0",
    "strided(0)": "stride must be at least 1; got 0",
    "fixed(0)": "block must be at least 1; got 0",
    "fixed(3, -1)": "summary must be at least 0; got -1",
    "fixed(3, 4)": "summary must be at most the block size 3; got 4",
    "global_nodes(-2)": "count must be at least 0; got -2",
    "global_nodes([1, -3])": "indices must not hold negative nodes; got -3",
    "global_nodes([0.5])": r"indices\[0\] must be an integer; got 0.5",
    "global_nodes('ab')": "indices must be an integer or a list of integers; got 'ab'",
    "global_nodes(torch.tensor(2))": r"indices must be an integer or a list of integers; got tensor\(2\)",
    "global_nodes([5]).bind(5)": "global node 5 does not exist among 5 nodes; bind at least 6",
    "prefix(-1)": "k must be at least 0; got -1",
    "documents(3)": "lengths must be a list of integers; got 3",
    "documents(torch.tensor(3))": r"lengths must be a list of integers; got tensor\(3\)",
    "documents(None)": "lengths must be a list of integers; got None",
    "documents(b'ab')": "lengths must be a list of integers; got b'ab'",
    "documents([3, -1])": r"lengths\[1\] must be at least 0; got -1",
    "documents([3, 2.0])": r"lengths\[1\] must be an integer; got 2.0",
    "permutation(3)": "order must be a list of integers; got 3",
    "permutation([0, 2])": r"order must hold each of 0..1 once; got \[0, 2\]",
    "permutation([0, 0])": r"order must hold each of 0..1 once; got \[0, 0\]",
    "permutation([1, 0]).bind(3)": r"the order has 2 nodes, but the graph is 3 x 3; bind\(2\), or give an order of",
    "documents([3, 4]).bind(8)": r"add up to 7, but the graph has 8 nodes; bind\(7\), or give lengths that add up to 8",
    "documents([3], inner=4)": r"inner must be a topology, as causal\(\) or prefix\(4\); got int",
    "documents([3], inner=memory(2))": r"inside documents cannot have memory nodes; got memory\(2\)",
    "documents([3], src_lengths=[1, 2])": "as many documents of sources as of destinations; got 2 and 1",
    "documents([3], src_lengths=[-1])": r"src_lengths\[0\] must be at least 0; got -1",
    "documents([3, 4], inner=causal()).bind(8)": r"add up to 7 destinations and 7 sources, but the graph is 8 x 8",
    "documents([3], causal(), src_lengths=[4]).bind(3, 4)": "a document of 3 destinations and 4 sources does not share",
    "memory(-1)": "length must be at least 0; got -1",
    "random(-1)": "degree must be at least 0; got -1",
    "random(2, seed=-1)": "seed must be at least 0; got -1",
    "random(2, seed=0.5)": "seed must be an integer; got 0.5",
    "random(3, block=2)": "degree must be a multiple of block; got degree 3 and block 2",
    "longformer(-2)": "window must be at least 0; got -2",
    "bigbird(window=2)": "window must be an odd number of blocks, so that it is symmetric; got 2",
    "bigbird(block=0)": "block must be at least 1; got 0",
    "bigbird(seed=-1)": "seed must be at least 0; got -1",
    "grid(2, 0)": "width must be at least 1; got 0",
    "grid(2, 2, connectivity=6)": r"connectivity must be 4 \(sides\) or 8 \(sides and corners\); got 6",
    "grid(2, 2, connectivity=8.0)": "connectivity must be an integer; got 8.0",
    "grid(2, 2).bind(5)": r"grid of 2 x 2 pixels needs 4 nodes, but the graph is 5 x 5; use bind\(4\), or the height",
    "neighborhood(2, 2, -1)": "radius must be at least 0; got -1",
    "neighborhood(2, 2, 1).bind(4, 5)": "neighborhood of 2 x 2 pixels needs 4 nodes, but the graph is 4 x 5",
    "neighborhood(3)": "neighborhood needs the size along each axis",
    "neighborhood()": "neighborhood needs the size along each axis",
    "neighborhood(3, 3, radius=1, kernel_size=3)": "pass radius or kernel_size, not both; got 1 and 3",
    "neighborhood(3, 3, radius=[1])": r"radius must be one integer, or one for each of 2 axes; got \[1\]",
    "neighborhood(3, 3, kernel_size=0)": "kernel_size must be at least 1; got 0",
    "neighborhood(3, 3, 1, stride=4)": r"stride must not exceed the kernel; got \[4, 4\] and kernels of \[3, 3\]",
    "neighborhood(5, kernel_size=3, dilation=2, border='natten')": r"must not exceed the shape; got \[3\] \* \[2\] for",
    "neighborhood(5, 1, border='wrap')": 'border must be "cut" or "natten"; got \'wrap\'',
    "neighborhood(5, 1, causal=1)": "causal must be a truth value, or one for each of 1 axes; got 1",
    "windows(2, 2, size=0)": "size must be at least 1; got 0",
    "windows(2, 2, size=2, shift=-1)": "shift must be at least 0; got -1",
    "windows(2, 2, size=2).bind(3)": "windows of 2 x 2 pixels needs 4 nodes, but the graph is 3 x 3",
}


@pytest.mark.parametrize("expression", BAD)
def test_a_bad_argument_is_named(expression: str) -> None:
    with pytest.raises((ValueError, TypeError), match=BAD[expression]):
        built(expression)
