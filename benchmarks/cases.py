"""All cases, in the order in which they run."""

from __future__ import annotations

from benchmarks import chosen, irregular, layers, physics, recurrences, sequences, small, whole
from benchmarks.contest import Case
from benchmarks.sizes import Sizes


def all_cases(sizes: Sizes, backend: str = "auto") -> list[Case]:
    """Args: backend: the one that every entry of this library names; "auto" leaves the choice to the plan."""
    return [
        *sequences.cases(sizes, backend),
        *irregular.cases(sizes, backend),
        *layers.cases(sizes, backend),
        *whole.cases(sizes, backend),
        *recurrences.cases(sizes),
        *physics.cases(sizes),
        *chosen.cases(sizes),
        *small.cases(sizes),
    ]


def select(cases: list[Case], only: list[str]) -> list[Case]:
    """Returns the cases whose title ("group: name") contains any of these texts; all if there are no texts.

    Raises:
        ValueError: no title does.
    """
    chosen = [case for case in cases if not only or any(text.lower() in case.title.lower() for text in only)]
    if not chosen:
        groups = ", ".join(dict.fromkeys(case.group for case in cases))
        raise ValueError(f"no case has {' or '.join(map(repr, only))} in its title; the groups are {groups}")
    return chosen
