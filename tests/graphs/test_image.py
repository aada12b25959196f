"""Topologies over images: neighborhoods against a loop over pixels, Swin's windows against Swin's own recipe."""

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpnn import Topology, graphs

SIZES = [(1, 1), (1, 7), (7, 1), (3, 5), (5, 3), (7, 7), (0, 3)]


def by_pixel(height: int, width: int, attends: Callable[[int, int], bool]) -> Tensor:
    """The mask of a rule about the offset (dy, dx) from the destination pixel to the source."""
    pixels = list(itertools.product(range(height), range(width)))
    mask = [[attends(b - y, a - x) for b, a in pixels] for y, x in pixels]
    return torch.tensor(mask, dtype=torch.bool).view(len(pixels), len(pixels))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_neighbors_of_pixels(height: int, width: int) -> None:
    for topology, attends in (
        (graphs.grid(height, width), lambda dy, dx: abs(dy) + abs(dx) == 1),
        (graphs.grid(height, width, 8), lambda dy, dx: max(abs(dy), abs(dx)) == 1),
        (graphs.neighborhood(height, width, 0), lambda dy, dx: dy == dx == 0),
        (graphs.neighborhood(height, width, 2), lambda dy, dx: max(abs(dy), abs(dx)) <= 2),
        (graphs.neighborhood(height, width, 100), lambda dy, dx: True),
    ):
        assert torch.equal(topology.bind(height * width).dense(), by_pixel(height, width, attends)), topology


def neighbors_along(size: int, kernel: int, dilation: int, stride: int, causal: bool, inward: bool) -> Tensor:
    """The mask along one axis, node by node: of the nodes of a node's remainder, the kernel around the leader of its
    group of `stride`, moved inward at a border."""
    mask = torch.zeros(size, size, dtype=torch.bool)
    for node in range(size):
        own = list(range(node % dilation, size, dilation))
        place = own.index(node)
        group = [p for p in range(len(own) + stride) if p // stride == place // stride]
        leader = min(group[-1] if causal else group[stride // 2], len(own) - 1)
        first = leader + 1 - kernel if causal else leader - kernel // 2
        if inward and not causal:
            first = min(max(first, 0), len(own) - kernel)
        kept = [p for p in range(first, first + kernel) if 0 <= p < len(own) and not (causal and p > place)]
        mask[node, [own[p] for p in kept]] = True
    return mask


def test_neighborhoods_in_any_dimension() -> None:
    """The masks with border="natten" are those of NATTEN 0.21.7 itself, see `test_natten.py`."""
    r = random.Random(0)
    for _ in range(150):
        shape = [r.randint(2, most) for most in r.choice([(40,), (9, 8), (5, 4, 5), (3, 3, 2, 3)])]
        inward = r.random() < 0.6
        dilation = [r.randint(1, n // 2) for n in shape]
        kernels = [r.randint(1, max(1, n // d) if inward else n + 2) for n, d in zip(shape, dilation, strict=True)]
        stride, causal = [r.randint(1, k) for k in kernels], [r.random() < 0.3 for _ in shape]
        options = {"kernel_size": kernels, "dilation": dilation, "stride": stride, "causal": causal}
        topology = graphs.neighborhood(*shape, border="natten" if inward else "cut", **options)
        expected = torch.ones(1, 1, dtype=torch.bool)
        for axis in zip(shape, kernels, dilation, stride, causal, strict=True):
            expected = torch.kron(expected.int(), neighbors_along(*axis, inward).int()).bool()
        assert torch.equal(topology.bind(len(expected)).dense(), expected), topology
        assert graphs.parse(repr(topology)) == topology


def test_types_of_neighbors() -> None:
    line = graphs.neighborhood(9, kernel_size=4, border="natten").bind(9)
    src, dst = line.edge_index
    assert torch.equal(line.edge_type, src - dst + 3)
    image = graphs.neighborhood(4, 6, kernel_size=3, border="natten").bind(24)
    src, dst = image.edge_index
    assert torch.equal(image.edge_type, (src // 6 - dst // 6 + 2) * 5 + src % 6 - dst % 6 + 2)
    assert graphs.neighborhood(4, 6, kernel_size=3) == graphs.neighborhood(4, 6, 1)
    assert graphs.neighborhood(height=4, width=6, radius=1) == graphs.neighborhood(4, 6, radius=[1, 1])
    assert not graphs.neighborhood(3, 4, 5, radius=1).bind(60).has_edge_types


@pytest.mark.parametrize("topology", [graphs.grid(3, 5, 8), graphs.neighborhood(3, 5, 1), graphs.windows(3, 5, size=2)])
def test_the_class_of_an_edge_is_its_relative_position(topology: Topology) -> None:
    graph = topology.bind(15)
    src, dst = graph.edge_index
    dy, dx = src // 5 - dst // 5, src % 5 - dst % 5
    assert torch.equal(graph.edge_type, (dy + 1) * 3 + (dx + 1))
    assert graph.num_edge_types == 9


@pytest.mark.parametrize("shift", [0, 1, 3, 5, 6, 7, 11, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.covering(times=2)
def test_windows_of_any_size_and_shift(size: int, shift: int) -> None:
    height, width = 5, 7

    def together(i: int, j: int) -> bool:
        """Into one window after the shift; and shifted by the same way, so that they lie before it as after it."""
        (y, x), (b, a) = divmod(i, width), divmod(j, width)
        moved = [((y - shift) % height, (x - shift) % width), ((b - shift) % height, (a - shift) % width)]
        same_window = moved[0][0] // size == moved[1][0] // size and moved[0][1] // size == moved[1][1] // size
        return same_window and moved[1][0] - moved[0][0] == b - y and moved[1][1] - moved[0][1] == a - x

    expected = torch.tensor([[together(i, j) for j in range(35)] for i in range(35)])
    graph = graphs.windows(height, width, size, shift).bind(35)
    assert torch.equal(graph.dense(), expected)


def test_windows_run_as_equal_cliques() -> None:
    graph = graphs.windows(6, 6, size=3).bind(36)
    assert [tuple(members.shape) for members in graph.cliques] == [(4, 9)]
    shifted = graphs.windows(6, 6, size=3, shift=1).bind(36)
    # pixel 0 is carried over the edge to stand beside 4 and 5, so both axes are cut into {0}, {1, 2, 3}, {4, 5}
    assert sum(members.numel() for members in shifted.cliques) == 36
    assert sorted({members.shape[1] for members in shifted.cliques}) == [1, 2, 3, 4, 6, 9]


@pytest.mark.parametrize("topology", [graphs.grid(0, 3), graphs.neighborhood(0, 3, 1), graphs.windows(0, 3, size=2)])
def test_an_image_may_have_no_pixel(topology: Topology) -> None:
    assert topology.bind(0).num_edges == 0
