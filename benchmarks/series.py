"""Bars that speak of a whole series, which no single row can judge: time must be linear in N."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ALLOWED = {"length": 1.25, "linear": 1.15}
LONG_ENOUGH = 4096  # below, what does not grow with N takes its share


def verdicts(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each series over nodes: time per node at its longest, over that at the first long enough one."""
    found = []
    for group in ("length", "linear"):
        for series in dict.fromkeys(row["series"] for row in rows if row["group"] == group):
            for direction in dict.fromkeys(row["direction"] for row in rows if row["series"] == series):
                found += _linear(rows, group, series, direction)
    return found


def _linear(rows: Sequence[dict[str, Any]], group: str, series: str, direction: str) -> list[dict[str, Any]]:
    times = {}
    for row in rows:
        if (row["group"], row["series"], row["direction"]) == (group, series, direction) and "entries" in row:
            times[row["facts"]["nodes"]] = row["entries"][row["ours"]].get("least")
    long = sorted(n for n, time in times.items() if n >= LONG_ENOUGH and time)
    if len(long) < 2:
        return []
    first, last = long[0], long[-1]
    measured = (times[last] / last) / (times[first] / first)
    limit = ALLOWED[group]
    text = f"{series}: time per node at N {last} at most {limit} x that at N {first}"
    verdict = {"case": series, "direction": direction, "text": text, "limit": limit, "kind": "at most"}
    return [verdict | {"measured": measured, "status": "pass" if measured <= limit else "miss"}]
