"""Comparisons: entries that do the same work, and the bars that this library's entry has to clear."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

FORWARD, BOTH = "forward", "forward+backward"
STEP = "step"  # whatever `call` does, its own backward pass and optimizer included
OURS = "mpnn"


def as_it_is(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, eq=False)
class Entry:
    """One way to do the work of a contest.

    `call` runs it forward. `leaves` are what its backward pass differentiates by; `view` turns each of them, and so its
    gradient, into this library's layout. What `call` returns has that layout. Where `checked`, outputs and gradients
    must be those of the contest's truth; entries that compute something of the same shape only are not checked.
    `answer`, where a call returns nothing that could be compared, gives what is checked instead. `module` is in
    evaluation mode, without dropout, while it is checked, and in training mode while it is timed.
    """

    name: str
    call: Callable[[], Tensor]
    leaves: Sequence[Tensor] = ()
    view: Callable[[Tensor], Tensor] = as_it_is
    checked: bool = True
    only_forward: str = ""
    answer: Callable[[], Tensor] | None = None
    module: nn.Module | None = None


@dataclass(frozen=True)
class Missing:
    """A peer that cannot take part, and the sentence that says why."""

    name: str
    why: str


@dataclass(frozen=True)
class Bar:
    """A goal for the first entry's time (or memory).

    kind: "at most": time / (factor * time of `against`); "at least": factor * time of `against` / time;
    "seconds", "bytes": at most so much; "over": at most this many seconds more than `against`; "less memory": memory of
    `against` / ours.
    """

    text: str
    limit: float
    kind: str
    direction: str = FORWARD
    against: str = ""
    factor: float = 1.0

    def judge(self, entries: Mapping[str, Mapping[str, Any]], ours: str, time: str = "least") -> dict[str, Any]:
        """The verdict on measured entries, by name: text, limit, kind, measured, and pass, miss or not measured.

        Args:
            time: which time of an entry counts, "least" or "median".
        """
        own, peer = entries.get(ours, {}), entries.get(self.against, {})
        measured = None
        if self.kind == "bytes":
            measured = own.get("peak_bytes")
        elif self.kind == "seconds":
            measured = own.get(time)
        elif self.kind == "less memory":
            if own.get("peak_bytes") and peer.get("peak_bytes"):
                measured = peer["peak_bytes"] / own["peak_bytes"]
        elif self.kind == "over" and own.get(time) and peer.get(time):
            measured = own[time] - peer[time]
        elif own.get(time) and peer.get(time):
            share = own[time] / (self.factor * peer[time])
            measured = share if self.kind == "at most" else 1 / share
        verdict = {"text": self.text, "limit": self.limit, "kind": self.kind, "measured": measured}
        if measured is None:
            why = peer.get("note") or own.get("note") or f"{self.against or 'it'} was not measured"
            return verdict | {"status": "not measured", "why": why}
        passed = measured >= self.limit if self.kind in ("at least", "less memory") else measured <= self.limit
        return verdict | {"status": "pass" if passed else "miss"}


@dataclass(eq=False)
class Contest:
    """Entries on the same inputs; the first one is this library's and is the one that bars speak of.

    `verify(entry, direction)` gives the largest relative error of an entry, or raises `truth.Wrong`. `facts` are
    numbers about the inputs, such as nodes, edges and density, that plots show.
    """

    entries: Sequence[Entry | Missing]
    verify: Callable[[Entry, str], float] | None = None
    verified_by: str = ""
    bars: Sequence[Bar] = ()
    facts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Case:
    """A contest to be made when its turn comes: inputs of one case at a time are kept.

    `series` and `x` put its times into a plot: one line for each entry, x being the facts' entry of that name.
    """

    group: str
    name: str
    make: Callable[[], Contest]
    directions: Sequence[str] = (FORWARD, BOTH)
    series: str = ""
    x: str = ""

    @property
    def title(self) -> str:
        return f"{self.group}: {self.name}"
