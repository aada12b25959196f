"""Which cases of a large grid the default suite runs: a few in which each value of each parameter occurs.

A test marked `covering`, or a file that is (`pytestmark`, where the test's name is one more parameter), keeps those
cases; its other cases become slow. `covering(times=2)` asks for each value twice. Of a test marked `sample(4)`, every
fourth case stays.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence

import pytest

LEFT_OUT = ("slow", "scatter", "triton")  # by default; such cases cover nothing


def leave_out_what_is_covered(items: Sequence[pytest.Item]) -> None:
    """Marks as slow what is not among the few cases of its grid: a choice by the order of collection alone."""
    markers: dict[str, pytest.Mark] = {}
    grids: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if any(map(item.get_closest_marker, LEFT_OUT)):
            continue
        for node, marker in item.iter_markers_with_node():
            if marker.name in ("covering", "sample"):
                grid = _function(item) if node is item else node.nodeid
                markers[grid] = marker
                grids[grid].append(item)
    for grid, cases in grids.items():
        marker = markers[grid]
        few = set(cases[:: marker.args[0]] if marker.name == "sample" else covering(cases, **marker.kwargs))
        for item in cases:
            if item not in few:
                item.add_marker(pytest.mark.slow)


def _function(item: pytest.Item) -> str:
    return item.nodeid.split("[")[0]


def covering(cases: Sequence[pytest.Item], times: int = 1) -> Iterator[pytest.Item]:
    """Takes the case with most values that occurred fewer than `times`, of such cases one with rare values."""
    values = {case: [("test", _function(case)), *_values(case)] for case in cases}
    seen: Counter[tuple[str, Hashable]] = Counter()

    def worth(case: pytest.Item) -> tuple[int, int]:
        counts = [seen[value] for value in values[case]]
        return sum(count < times for count in counts), -sum(counts)

    while values:
        best = max(values, key=worth)
        if worth(best)[0] == 0:
            return
        seen.update(values.pop(best))
        yield best


def _values(case: pytest.Item) -> Iterator[tuple[str, Hashable]]:
    """The parameters of a case; what has no hash is known by its identity."""
    parameters = case.callspec.params if hasattr(case, "callspec") else {}
    for name, value in parameters.items():
        try:
            hash(value)
        except TypeError:
            yield name, id(value)
        else:
            yield name, value
