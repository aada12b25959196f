"""Tables of what `python -m benchmarks gpu` measured, in README.md, docs/gpu.md and
docs/comparison.md; the results have all rows.

A page says where a table belongs: `<!-- gpu: NAME -->` and `<!-- gpu end -->`; the text between them is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import gpu
from benchmarks.contest import BOTH, FORWARD, OURS
from benchmarks.report import duration, spreads, times_faster
from benchmarks.units import MEANING, RATIO

Row = dict[str, Any]
Results = dict[str, Any]

KERNELS = {"csr": "any graph", "tiles": "graphs of runs", "scan": "recurrences", "Mamba-1's scan": "its recurrence"}
LIMIT = 1.1  # of regret
LOST = 1.02  # times a peer's time, above which a row is lost and not a draw
LOSSES = 3  # of the short table
README = ("PyG GATConv", "PyTorch Geometric", "transformers")
"""The peers of the table in the README."""


def fill(page: str, results: Results) -> str:
    """The page with all of its tables as the results have them."""

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"there is no table {name!r} of a GPU; there are {', '.join(BLOCKS)}")
        return "\n".join([f"<!-- gpu: {name} -->", "", *BLOCKS[name](results), "", "<!-- gpu end -->"])

    return re.sub(r"<!-- gpu: ([^>]*?) -->.*?<!-- gpu end -->", put, page, flags=re.DOTALL)


def without_tables(page: str) -> str:
    """The page without what is generated."""
    return re.sub(r"<!-- gpu: [^>]*? -->.*?<!-- gpu end -->", "", page, flags=re.DOTALL)


def _run(results: Results) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    timed = sum("entries" in row for row in results["rows"])
    return [
        f"- {results.get('gpu', 'no GPU')}; {versions}; Python {results['python']}",
        f"- commit {results['commit']}; {results['date']}; `{results['command']}`; {timed} rows of times",
    ]


# ------------------------------------------------------------------------------------------------ what is exact


def _exact(results: Results) -> list[str]:
    """The largest errors of each kernel, by type."""
    lines = ["| kernels | type | checked | not checked | largest error, forward | with gradients |"]
    lines.append("|---|---|---|---|---|---|")
    found: dict[tuple[str, str], list[Row]] = {}
    for row in results["rows"]:
        if row["group"] == "exact":
            found.setdefault((row["case"].split(",")[0], row["case"].rsplit(", ", 1)[1]), []).append(row)
    for (kernel, dtype), members in found.items():
        failed = sum("error" in row for row in members)
        shown = " | ".join(_largest(row for row in members if row["direction"] == d) for d in (FORWARD, BOTH))
        counts = f"{len(members) - failed} | {failed or ''}"
        lines.append(f"| `{kernel}`, {KERNELS.get(kernel, '')} | {dtype} | {counts} | {shown} |")
    reasons = {_reason(row["error"]) for row in results["rows"] if "error" in row}
    return [*lines, "", f"Why rows were not checked or timed: {', '.join(sorted(reasons))}."] if reasons else lines


def _reason(error: str) -> str:
    """The kind of an error in words."""
    kind = error.split(":")[0]
    return {
        "OutOfMemoryError": "processes that shared the memory of the card",
        "IndexError": "a fault of the benchmark",
    }.get(kind, f"`{kind}`")


def _largest(rows: Iterable[Row]) -> str:
    errors = [error for row in rows for error in row.get("checked", {}).get("errors", {}).values()]
    return f"{max(errors):.0e}" if errors else ""


# ------------------------------------------------------------------------------------------------ peers


class Comparison(NamedTuple):
    """One row with one peer. `ratio`: the peer's time / mpnn's time."""

    group: str
    case: str
    direction: str
    ours: float
    peer: str
    theirs: float

    @property
    def ratio(self) -> float:
        return self.theirs / self.ours

    @property
    def line(self) -> str:
        where = self.case if self.direction not in (FORWARD, BOTH) else f"{self.case}, {self.direction}"
        times = f"{duration(self.ours)} | {self.peer}: {duration(self.theirs)}"
        return f"| {where} | {times} | {self.ratio:.2f} |"


def comparisons(rows: Iterable[Row]) -> list[Comparison]:
    """All rows in which another library computes the same."""
    found = []
    for row in rows:
        entries = row.get("entries", {})
        ours = entries.get(OURS, {}).get("median")
        for name, entry in entries.items():
            if ours and "median" in entry and not name.startswith(OURS):
                found.append(Comparison(row["group"], row["case"], row["direction"], ours, name, entry["median"]))
    return found


BESIDE = (f"| | mpnn | peer | {RATIO} |", "|---|---|---|---|")


def _peers(results: Results) -> list[str]:
    rows = [row for row in results["rows"] if any(c.case == row["case"] for c in comparisons([row]))]
    return [
        f"{MEANING} The median of rows, and the range:",
        "",
        *spreads(times_faster(rows, "median")),
    ]


def _lost(results: Results) -> list[str]:
    lost = sorted((c for c in comparisons(results["rows"]) if c.ratio * LOST < 1), key=lambda c: c.ratio)
    return [*BESIDE, *(c.line for c in lost)]


def short(results: Results) -> list[str]:
    """Returns for each peer the row of its median, of those with a backward pass, and the greatest losses."""
    found = comparisons(results["rows"])
    middle = _medians(found)
    losses = [c for c in sorted(found, key=lambda c: c.ratio)[:LOSSES] if c.ratio < 1 and c not in middle]
    lines = [c.line for c in sorted([*middle, *losses], key=lambda c: -c.ratio)]
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in ("torch", "triton"))
    machine = f"{results.get('gpu')}, {versions}, {results['date'][:10]}, commit {results['commit']}."
    rule = (
        "For each peer: the row of its median among those with a backward pass (the lower of two). "
        "Then the rows with the largest losses."
    )
    return [*BESIDE, *lines, "", f"{rule} {machine}"]


def _medians(found: Iterable[Comparison]) -> list[Comparison]:
    """Of each peer the row of its median, of those with a backward pass."""
    by_peer: dict[str, list[Comparison]] = {}
    for one in found:
        if one.direction != FORWARD:
            by_peer.setdefault(one.peer, []).append(one)
    return [sorted(of_peer, key=lambda c: c.ratio)[(len(of_peer) - 1) // 2] for of_peer in by_peer.values()]


def _readme(results: Results) -> list[str]:
    """The medians of the README's peers, then the greatest loss with a backward pass."""
    found = comparisons(results["rows"])
    middle = sorted((c for c in _medians(found) if c.peer in README), key=lambda c: -c.ratio)
    lost = min((c for c in found if c.direction != FORWARD), key=lambda c: c.ratio)
    head = f"| {results['gpu']}, commit {results['commit']} | mpnn | peer | {RATIO} |"
    return [head, BESIDE[1], *(c.line for c in middle), lost.line]


# ------------------------------------------------------------------------------------------------ sparse, captured


def _sparse(results: Results) -> list[str]:
    """Attention alone in bfloat16, complete and causal graphs first."""
    lines = ["| bfloat16 | forward | forward+backward |", "|---|---|---|"]
    pattern = re.compile(r"(.*), N \d+, B \d+, \d+ x \d+, bfloat16$")
    times: dict[str, Mapping[str, float]] = {}
    for row in results["rows"]:
        if row["group"] == "structured" and pattern.match(row["case"]) and "entries" in row:
            times[row["case"]] = {**times.get(row["case"], {}), row["direction"]: row["entries"][OURS]["median"]}
    lines += [f"| {case} | {duration(of[FORWARD])} | {duration(of[BOTH])} |" for case, of in times.items()]
    return lines


def _captured(results: Results) -> list[str]:
    lines = ["| bfloat16 | as a CUDA graph | called | launched by the host in |", "|---|---|---|---|"]
    for row in results["rows"]:
        if row["group"] == "capture" and "entries" in row and row["case"].endswith("bfloat16"):
            graph, called = row["entries"][OURS], row["entries"]["mpnn, called"]
            times = graph["median"], called["median"], called.get("host")  # which no run on a CPU has
            cells = ["" if x is None else duration(x) for x in times]
            lines.append(f"| {row['case'].removesuffix(', bfloat16')} | {' | '.join(cells)} |")
    return lines


# ------------------------------------------------------------------------------------------------ what never ran


def _never(results: Results) -> list[str]:
    """The cases of the command that the results have nothing of."""
    known = gpu.titles(results["rows"])
    kinds: dict[str, list[str]] = {}
    for case in gpu.cases(gpu.DEFAULT):
        if case.title not in known:
            kind, what = _kind(case.group, case.name)
            if what not in kinds.setdefault(kind, []):
                kinds[kind].append(what)
    return ["| | cases |", "|---|---|", *(f"| {kind} | {'; '.join(names)} |" for kind, names in kinds.items())]


def _kind(group: str, name: str) -> tuple[str, str]:
    """The kind of a case, and its name without the type of features."""
    what = re.sub(r", (bfloat16|float32)(?=,|$)", "", name)
    if what.endswith(", dropout by words"):
        return "dropout by words", what.removesuffix(", dropout by words")
    if group == gpu.PEERS:
        what, peer = what.split(", against ")
        return f"against {peer}", what
    return group, what


# ------------------------------------------------------------------------------------------------ plans


def _plans(results: Results) -> list[str]:
    """How far plans are from the fastest backend."""
    return [regret_of(_of_plans(results))]


def _of_plans(results: Results) -> list[Row]:
    return [row for row in results["rows"] if row["group"] == "plan"]


def regret_of(rows: Iterable[Row]) -> str:
    """A sentence on how far the choices are from the fastest."""
    ratios = [ratio for *_, ratio in regrets(rows)] or [1.0]
    within = sum(ratio <= LIMIT for ratio in ratios) / len(ratios)
    return (
        f"{len(ratios)} rounds ran by two backends or more. The time of the plan's choice over that of the fastest: "
        f"{fmean(ratios):.3f} in the mean, at most {max(ratios):.2f}, at most {LIMIT} for {within:.0%}."
    )


def regrets(rows: Iterable[Row]) -> list[tuple[Row, str, str, float]]:
    """Of rounds that several backends ran: the chosen backend, the fastest, and the ratio of their times."""
    found = []
    for row in rows:
        times = {name: entry["median"] for name, entry in row.get("entries", {}).items() if "median" in entry}
        if len(times) > 1 and row["ours"] in times:
            quickest = min(times, key=times.__getitem__)
            found.append((row, row["ours"], quickest, times[row["ours"]] / times[quickest]))
    return found


BLOCKS: dict[str, Callable[[Results], list[str]]] = {
    "run": _run,
    "exact": _exact,
    "peers": _peers,
    "lost": _lost,
    "sparse": _sparse,
    "captured": _captured,
    "never": _never,
    "plans": _plans,
    "short": short,
    "readme": _readme,
}
