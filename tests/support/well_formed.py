"""What every algorithm over rows of runs relies on, as assertions."""

from itertools import pairwise

import numpy as np

from mpnn.graph.runs import Runs


def listed(runs: Runs) -> list[list[tuple[int, int]]]:
    """Row by row, the runs."""
    pairs = list(zip(runs.start.tolist(), runs.stop.tolist(), strict=True))
    return [pairs[a:b] for a, b in zip(runs.ptr[:-1], runs.ptr[1:], strict=True)]


def check_well_formed(runs: Runs) -> None:
    """Sorted, disjoint, not touching, not empty, inside: what every algorithm over runs relies on."""
    for array in (runs.ptr, runs.start, runs.stop):
        assert array.dtype == np.int64
    assert len(runs.ptr) == runs.num_dst + 1
    assert runs.ptr[0] == 0
    assert runs.ptr[-1] == len(runs.start) == len(runs.stop)
    for row in listed(runs):
        ends = [end for run in row for end in run]
        assert all(a < b for a, b in pairwise(ends)), row
        assert not ends or (ends[0] >= 0 and ends[-1] <= runs.num_src), row
