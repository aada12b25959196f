"""Tables of what `python -m benchmarks gpu` measured, in docs/gpu.md and docs/comparison.md.

A page says where a table belongs: `<!-- gpu: NAME -->` and `<!-- gpu end -->`; what stands between is generated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from benchmarks.contest import BOTH, FORWARD, OURS, STEP
from benchmarks.report import duration, folded, memory, spreads, times_faster

Row = dict[str, Any]
Results = dict[str, Any]

GROUPS = {
    "irregular": "Attention over irregular graphs",
    "reduce": "Sums and maxima over irregular graphs",
    "structured": "Attention over sequences",
    "in place": "Models in place",
    "recurrence": "Recurrences",
    "host": "Small inputs, where launching takes longest",
    "capture": "As CUDA graphs",
    "peers": "Beside kernels that compile for long",
}
KERNELS = {"csr": "any graph", "tiles": "graphs of runs", "scan": "recurrences"}
LIMIT = 1.1  # of regret
SEVEN = "|---|---|---|---|---|---|---|"
HEAD = ("| case | entry | forward or step | forward+backward | launched in | memory | error |", SEVEN)


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


def _how() -> list[str]:
    return [
        "Times are medians by the GPU's events. Before each call the GPU's cache is overwritten. Calls are queued, so "
        "the time of a short call is that of the processor that launches it, which the column `launched in` has. In "
        "brackets: the peer's time over ours. An error is relative to the largest number, or to the norm where "
        "features have 16 bits. Memory is what one call adds, of the last direction."
    ]


def _run(results: Results) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items() if version)
    failed = sum("error" in row for row in results["rows"])
    return [
        f"- {results.get('gpu', 'no GPU')}; {versions}; Python {results['python']}",
        f"- commit {results['commit']}; {results['date']}; `{results['command']}`",
        f"- {len(results['rows'])} rows, {failed} of them failed; {len(results.get('not run', ()))} cases not run",
    ]


# ------------------------------------------------------------------------------------------------ tables


def table(rows: Iterable[Row]) -> list[str]:
    """A line for each entry of each case."""
    cases: dict[str, dict[str, Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], {})[row["direction"]] = row
    lines = list(HEAD)
    for case, directions in cases.items():
        pairs = [pair for row in directions.values() for pair in row.get("entries", {}).items()]
        for i, name in enumerate(dict.fromkeys(name for name, entry in pairs if "median" in entry)):
            lines.append(f"| {case if i == 0 else ''} | {name} | {_cells(directions, name)} |")
        for direction, row in directions.items():
            if "error" in row:
                lines.append(f"| {case} | {direction} failed: {_plain(row['error'])} | | | | | |")
    return lines


def _cells(directions: dict[str, Row], name: str) -> str:
    first = directions.get(FORWARD) or directions.get(STEP)
    entries = [row["entries"][name] for row in directions.values() if name in row.get("entries", {})]
    measured = [entry for entry in entries if "median" in entry]
    errors = [row.get("checked", {}).get("errors", {}).get(name) for row in directions.values()]
    known = [error for error in errors if error is not None]
    host, room = measured[0].get("host"), measured[-1].get("peak_bytes")
    return " | ".join(
        [
            _time(first, name),
            _time(directions.get(BOTH), name),
            "" if host is None else duration(host),
            "" if room is None else memory(room),
            f"{max(known):.0e}" if known else "not compared",
        ]
    )


def _time(row: Row | None, name: str) -> str:
    """A time, and for a peer how many times as long as ours."""
    entry = {} if row is None else row.get("entries", {}).get(name, {})
    if row is None or "median" not in entry:
        return ""
    ours = row["entries"].get(row["ours"], {}).get("median")
    ratio = "" if name == row["ours"] or not ours else f" ({entry['median'] / ours:.2f} x)"
    return f"{duration(entry['median'])}{ratio}"


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]


def _exact(rows: Iterable[Row]) -> list[str]:
    """The largest errors of each kernel, by type."""
    lines = ["| kernels | type | rows | largest error, forward | with gradients |", "|---|---|---|---|---|"]
    failed = []
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["group"] == "exact":
            found.setdefault((row["case"].split(",")[0], row["case"].rsplit(", ", 1)[1]), []).append(row)
            if "error" in row:
                failed.append(f"- {row['case']}, {row['direction']}: {_plain(row['error'])}")
    for (kernel, dtype), members in found.items():
        shown = " | ".join(_largest(row for row in members if row["direction"] == d) for d in (FORWARD, BOTH))
        lines.append(f"| `{kernel}`, {KERNELS.get(kernel, '')} | {dtype} | {len(members)} | {shown} |")
    if failed:
        lines += ["", *folded(f"{len(failed)} rows failed", failed)]
    return [
        "Every output and gradient against the specification in float64, and the same bits twice.",
        "",
        *lines,
    ]


def _largest(rows: Iterable[Row]) -> str:
    errors = [error for row in rows for error in row.get("checked", {}).get("errors", {}).values()]
    return f"{max(errors):.0e}" if errors else ""


def _plans(results: Results) -> list[str]:
    """How far plans are from the fastest backend. `halves` of the results are regrets of half of the rounds, at prices
    that were fitted to the other half."""
    rows = [row for row in results["rows"] if row["group"] == "plan"]
    halves = results.get("halves", ())
    ratios = regrets(rows)
    if not ratios:
        return ["No round ran by two backends."]
    lines = [
        "| round | direction | chosen | its time | fastest | its time | regret |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, chosen, quickest, ratio in sorted(ratios, key=lambda r: -r[-1]):
        cells = [row["case"], row["direction"]]
        for name in (chosen, quickest):
            cells += [name, duration(row["entries"][name]["median"])]
        lines.append(f"| {' | '.join(cells)} | {ratio:.2f} |")
    lead = [regret_of(rows), ""]
    if halves:
        lead = [f"At prices that were fitted to these rounds: {lead[0]}", ""]
        lead += ["Each half of the rounds, at prices that were fitted to the other half:", ""]
        lead += [*(f"- {half}" for half in halves), ""]
    return [*lead, *folded(f"{len(ratios)} rounds", lines)]


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


# ------------------------------------------------------------------------------------------------ blocks of pages


def _of_group(group: str) -> Callable[[Results], list[str]]:
    def block(results: Results) -> list[str]:
        rows = [row for row in results["rows"] if row["group"] == group]
        if not rows:
            return ["Not measured yet."]
        ratios = times_faster(rows, "median")
        lead = ["How many times as fast as each peer, the median:", "", *spreads(ratios), ""] if ratios else []
        return [*lead, *folded(f"{len(rows)} rows", table(rows))]

    return block


def _not_run(results: Results) -> list[str]:
    names = [f"- {name}" for name in dict.fromkeys(results.get("not run", ()))]
    return ["No case began when the time was over:", "", *names] if names else ["All cases ran."]


SHORT = (
    ("irregular", r"^GAT(Conv)? 8 x 8,.*169,343 nodes.*bfloat16", BOTH, "PyG GATConv"),
    ("in place", r"^GAT, 3 layers", STEP, "PyTorch Geometric"),
    ("structured", r"^longformer.*N 8192.*bfloat16, a layer$", FORWARD, r"^complete.*N 8192.*bfloat16, a layer$"),
)


def short(results: Results) -> list[str]:
    """Returns three rows: an irregular graph, a model in place, and a sparse graph compared with the complete one."""
    lines = ["| | mpnn | peer | |", "|---|---|---|---|"]
    for group, pattern, direction, peer in SHORT:
        found = list(_matching(results["rows"], group, direction, pattern))
        if line := _beside(found, peer, results):
            lines.append(line)
    versions = ", ".join(f"{name} {results['versions'][name]}" for name in ("torch", "triton"))
    return [*lines, "", f"{results.get('gpu')}, {versions}, {results['date'][:10]}, commit {results['commit']}."]


def _matching(rows: Iterable[Row], group: str, direction: str, pattern: str) -> Iterator[Row]:
    for row in rows:
        if row["group"] == group and row["direction"] == direction and re.search(pattern, row["case"]):
            yield row


def _beside(rows: Sequence[Row], peer: str, results: Results) -> str | None:
    """A line for the first of the rows that has the peer, which is an entry of it or the case of another row."""
    for row in rows:
        ours = row.get("entries", {}).get(OURS, {}).get("median")
        if peer in row.get("entries", {}):
            theirs, name = row["entries"][peer].get("median"), peer
        else:
            other = next(_matching(results["rows"], row["group"], row["direction"], peer), {})
            theirs, name = other.get("entries", {}).get(OURS, {}).get("median"), "over the complete graph"
        if ours and theirs:
            words = f"{row['case']}, {row['direction']}" if row["direction"] != STEP else row["case"]
            return f"| {words} | {duration(ours)} | {name}: {duration(theirs)} | {theirs / ours:.1f} x |"
    return None


BLOCKS: dict[str, Callable[[Results], list[str]]] = {
    "run": _run,
    "how": lambda results: _how(),
    "exact": lambda results: _exact(results["rows"]),
    "short": short,
    "plans": _plans,
    "not run": _not_run,
    **{group: _of_group(group) for group in GROUPS},
}
