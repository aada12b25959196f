"""Topologies over images: neighborhoods against a loop over pixels, Swin's windows against Swin's own recipe."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
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


@pytest.mark.parametrize("topology", [graphs.grid(3, 5, 8), graphs.neighborhood(3, 5, 1), graphs.windows(3, 5, size=2)])
def test_the_class_of_an_edge_is_its_relative_position(topology: Topology) -> None:
    graph = topology.bind(15)
    src, dst = graph.edge_index
    dy, dx = src // 5 - dst // 5, src % 5 - dst % 5
    assert torch.equal(graph.edge_type, (dy + 1) * 3 + (dx + 1))
    assert graph.num_edge_types == 9


def test_a_neighborhood_with_a_number_for_each_class_is_a_convolution() -> None:
    kernel, image = torch.randn(3, 3, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    graph = graphs.neighborhood(5, 7, 1).bind(35)
    src, dst = graph.edge_index
    out = torch.zeros(35, dtype=torch.float64).index_add(0, dst, kernel.view(-1)[graph.edge_type] * image.view(-1)[src])
    torch.testing.assert_close(out.view(5, 7), F.conv2d(image[None, None], kernel[None, None], padding=1)[0, 0])


def swin(height: int, width: int, size: int, shift: int) -> Tensor:
    """The mask of Swin (Liu et al. 2021, section 3.2): roll the image, cut it into windows, and mask what
    the roll brought together from opposite edges, as its figure 4 numbers the regions of the rolled image."""

    def windows(image: Tensor) -> Tensor:
        """[windows, size * size]"""
        tiles = image.view(height // size, size, width // size, size)
        return tiles.permute(0, 2, 1, 3).reshape(-1, size * size)

    pixels = torch.arange(height * width).view(height, width)
    rolled = windows(torch.roll(pixels, (-shift, -shift), (0, 1)))
    region = torch.zeros(height, width)
    slices = (slice(0, -size), slice(-size, -shift), slice(-shift, None)) if shift else (slice(None),)
    for number, (down, across) in enumerate(itertools.product(slices, slices)):
        region[down, across] = number
    regions = windows(region)
    attend = regions[:, :, None] == regions[:, None, :]
    mask = torch.zeros(height * width, height * width, dtype=torch.bool)
    mask[rolled[:, :, None].expand_as(attend)[attend], rolled[:, None, :].expand_as(attend)[attend]] = True
    return mask


@pytest.mark.parametrize(
    ("height", "width", "size", "shift"),
    [(4, 4, 2, 0), (4, 4, 2, 1), (6, 9, 3, 1), (6, 9, 3, 2), (14, 14, 7, 3), (5, 5, 5, 2), (7, 14, 7, 0)],
)
def test_windows_are_those_of_swin(height: int, width: int, size: int, shift: int) -> None:
    graph = graphs.windows(height, width, size, shift).bind(height * width)
    assert torch.equal(graph.dense(), swin(height, width, size, shift))


@pytest.mark.parametrize("shift", [0, 1, 3, 5, 6, 7, 11, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
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
