"""Linear attention against its naive twin: odd lengths, odd widths, all types of features, shared states, threads."""

import math
from itertools import product

import pytest
import torch
from threads import same_bits
from torch import Tensor

from mpnn.kernels.recurrent import scan as kernel
from mpnn.kernels.recurrent.scan import ALL, FUTURE, PAST, Block

BLOCKS = {
    "all": [Block(0, 50, 0, 200, ALL)],
    "past": [Block(0, 200, 0, 200, PAST)],
    "future": [Block(0, 200, 0, 200, FUTURE)],
    "prefix": [Block(0, 200, 0, 90, ALL), Block(90, 200, 90, 200, PAST)],
    "rows between": [Block(3, 40, 5, 42, PAST), Block(41, 42, 0, 1, ALL), Block(150, 199, 100, 149, FUTURE)],
    "rows that overlap": [Block(10, 90, 0, 20, ALL), Block(60, 120, 0, 60, PAST), Block(60, 110, 40, 50, ALL)],
    "one": [Block(0, 1, 7, 8, FUTURE)],
    "none": [],
}


def naive(query: Tensor, key: Tensor, value: Tensor, scale: float, blocks: list[Block]) -> Tensor:
    """The twin: logits of all pairs times the number of blocks that have the pair as an edge."""
    edges = torch.zeros(query.shape[1], key.shape[1], dtype=query.dtype)
    for first, last, start, stop, extent in blocks:
        part = torch.ones(last - first, stop - start, dtype=query.dtype)
        edges[first:last, start:stop] += part if extent == ALL else part.tril() if extent == PAST else part.triu()
    logits = scale * torch.einsum("bngrf,bmgpf->bgrnpm", query, key) * edges[:, None]
    return torch.einsum("bgrnpm,bmgpd->bngrd", logits, value)


def features(shape: tuple[int, int, int, int], widths: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """query, key and value for [batch, G, R, P], of 200 nodes."""
    batch, groups, heads, sources = shape
    query = torch.randn(batch, 200, groups, heads, widths[0], dtype=dtype)
    key, value = (torch.randn(batch, 200, groups, sources, width, dtype=dtype) for width in widths)
    return [query, key, value]


def largest_error(found: Tensor, given: list[Tensor], scale: float, blocks: list[Block]) -> float:
    """Relative to the sum of the absolute values of all products."""
    exact = naive(*(x.double() for x in given), scale, blocks)
    size = naive(*(x.double().abs() for x in given), scale, blocks)
    return float(((found.double() - exact).abs() / size.clamp(min=1e-300)).max()) if found.numel() else 0.0


def bound(dtype: torch.dtype) -> float:
    """A number passes through a sum over at most 72 components, one over at most 200 sources of two blocks, and three
    products. Roundings, of eps / 2 of a partial sum at most, are independent (tests/support/error_bound.py)."""
    return 5 * math.sqrt(72 + 2 * 200 + 3) * torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("shape", [(2, 2, 1, 1), (1, 1, 3, 1), (1, 2, 1, 5), (1, 1, 50, 2)], ids=str)
@pytest.mark.parametrize("widths", [(5, 7), (72, 65), (1, 130)], ids=str)
@pytest.mark.covering
def test_it_computes_what_its_twin_does(name: str, shape: tuple[int, int, int, int], widths: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.float64):
        given = features(shape, widths, dtype)
        out = kernel.linear_attention(*given, 0.3, [number for block in BLOCKS[name] for number in block])
        assert out.dtype == dtype
        assert largest_error(out, given, 0.3, BLOCKS[name]) < bound(dtype)


@pytest.mark.parametrize("types", [*product([torch.bfloat16, torch.float16, torch.float32], repeat=3)], ids=str)
def test_any_mixture_of_types_is_added_up_in_float32(types: tuple[torch.dtype, ...]) -> None:
    given = [x.to(dtype) for x, dtype in zip(features((1, 2, 1, 1), (20, 9), torch.float32), types, strict=True)]
    out = kernel.linear_attention(*given, 0.3, [*BLOCKS["past"][0]])
    assert out.dtype == torch.float32
    assert largest_error(out, given, 0.3, BLOCKS["past"]) < bound(torch.float32)


@pytest.mark.parametrize("name", BLOCKS)
def test_the_scan_in_torch_does_too(name: str) -> None:
    given = features((2, 2, 3, 1), (5, 7), torch.float64)
    out = kernel._scan(*given, 0.3, BLOCKS[name])
    assert largest_error(out, given, 0.3, BLOCKS[name]) < bound(torch.float64)


@pytest.mark.parametrize("name", ["all", "past", "future"])
def test_the_same_bits_on_any_number_of_threads(name: str) -> None:
    given = features((1, 1, 1, 1), (24, 130), torch.float32)
    assert same_bits(lambda: [kernel.linear_attention(*given, 0.3, [*BLOCKS[name][0]])], 1, 2, 3, 8)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_passes_and_stays_out_of_rows_before_its_chunk(bad: float) -> None:
    for spoilt in range(3):
        given = features((1, 1, 1, 1), (9, 9), torch.float32)
        given[spoilt][0, 150, 0, 0, 3] = bad
        out = kernel.linear_attention(*given, 0.3, [*BLOCKS["past"][0]])[0, :, 0, 0]
        attending = out[150:] if spoilt else out[150]
        assert not attending.isfinite().all(-1).any()
        assert out[:144].isfinite().all()
