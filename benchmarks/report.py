"""A page and its pictures from files of results. Only the reasons for missed goals are written by hand."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots, roofs, series
from benchmarks.contest import BOTH, FORWARD
from benchmarks.peers import IN_CACHE
from benchmarks.truth import TOLERANCE
from benchmarks.units import MEANING, RATIO, duration, memory
from mpnn.backends import BACKENDS

GROUPS = {
    "device": "What the device can do",
    "dense": "Complete and causal attention",
    "sparse": "Sparse attention over sequences",
    "length": "Time against N",
    "density": "Time against density",
    "shape": "Time against heads and width, sequences",
    "irregular": "Irregular graphs",
    "reduce": "Sums, means and maxima over irregular graphs",
    "edges": "Time against edges",
    "layers": "Attention layers of Hugging Face, in training mode",
    "model": "Whole models",
    "workload": "From input to result",
    "linear": "Linear attention",
    "recurrence": "Recurrences, against the torch code of transformers",
    "chosen": "Edges chosen by content, a bias of pairs, FlexAttention's functions",
    "physics": "Layers of physics",
    "molecules": "Graphs of molecules, new in each step",
    "overhead": "Overhead",
    "binding": "Binding",
}


def page(
    results: dict[str, Any],
    others: Mapping[str, dict[str, Any]] | None = None,
    reasons: str = "",
    further: Sequence[str] = (),
) -> str:
    """The text of the page. `others`: results of further runs by the title of their part of the page. `reasons`: why
    goals were missed, as Markdown. `further`: lines of other runs."""
    lines: list[str] = []
    for title, other in (others or {}).items():
        lines += ["", f"# {title}", "", f"Measured by `{other['command']}`.", "", *_machine(other), ""]
        lines += [*_bars(other["rows"]), *_tables(other["rows"])]
    lines += further
    if reasons:
        lines += ["", "# Why goals are missed", "", *folded("Goal by goal, and on other processors", [reasons.strip()])]
    # A page has one title: those of the parts, and the headings under them, are one level lower.
    lower = [f"#{line}" if line.startswith("#") else line for line in "\n".join(lines).split("\n")]
    return "\n".join([*_page(results), *lower]).rstrip() + "\n"


def draw(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Draws the pictures of the page into `img/` of its folder."""
    plots.draw(rows, folder / "img")
    if ratios := times_faster(rows):
        plots.draw_peers(ratios, folder / "img" / "performance_peers.png")


def _page(results: dict[str, Any]) -> list[str]:
    rows = results["rows"]
    lines = [
        "# The record of a CPU",
        "",
        f"`{results.get('command', 'python -m benchmarks cpu')}` measured these times, and `python -m benchmarks "
        "report` wrote this page. A row compares mpnn with peers: other programs that compute the same. All entries of "
        "a row ran interleaved, in one process and on the same inputs. Their results were compared before they were "
        f'timed. The entry "{IN_CACHE}" computes only the products of matrices in attention, over tiles that stay '
        "in the cache: no kernel can take less time. "
        f"Times are processor times, the minimum of all rounds. {MEANING} Memory is the peak that one call adds "
        "to the memory of the process, without its inputs. The error is the largest difference from the expected "
        "result or gradient, divided by its largest number. "
        f"An entry whose error exceeds {TOLERANCE:.0e} is not timed. If it is mpnn's entry, the whole row is left out. "
        "The times on GPUs have [their own page](gpu.md).",
        "",
        *_machine(results),
        "",
        *_peers(times_faster(rows)),
    ]
    lines += _tables(rows, with_pictures=True)
    lines += ["", *roofs.section(results)]
    return [*lines, "", *_bars(rows), "", *_left_out(rows)]


def is_equal(row: dict[str, Any], name: str) -> bool:
    """Whether an entry is a peer that computes the same. Where results of a row were compared, an entry that was not
    computes something else, but in the layers, whose weights differ."""
    errors = row.get("checked", {}).get("errors")
    was_compared = not errors or name in errors or row["group"] == "layers"
    return was_compared and not ("mpnn" in name or name == IN_CACHE or name.endswith(" nodes"))


def _peers(ratios: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    if not ratios:
        return []
    return [
        "## Peer by peer",
        "",
        "For each peer, the table has the median ratio of its rows, and in brackets the lowest and the highest.",
        "",
        "![The peer's time / mpnn's time for each peer, forward and forward+backward: a line from the lowest to the "
        "highest of all cases, and a point at the median; the table below has the numbers](img/performance_peers.png)",
        "",
        *spreads(ratios),
    ]


def spreads(ratios: Mapping[str, Mapping[str, Sequence[float]]]) -> list[str]:
    """A line for each peer: the ratio of its time to mpnn's."""
    lines = ["| peer | forward | forward+backward |", "|---|---|---|"]
    for name, found in ratios.items():
        lines.append(f"| {name} | {' | '.join(_spread(found.get(d, [])) for d in (FORWARD, BOTH))} |")
    return lines


OWN = [backend.NAME for backend in BACKENDS]
"""Backends of mpnn, which are no peers."""


def times_faster(rows: Sequence[dict[str, Any]], time: str = "least") -> dict[str, dict[str, list[float]]]:
    """For each peer and direction, its time / mpnn's time in each row in which it computes the same."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        for name, entry in row.get("entries", {}).items():
            is_peer = row["group"] != "overhead" and name not in (row["ours"], *OWN)
            if is_peer and time in entry and is_equal(row, name):
                ratio = entry[time] / row["entries"][row["ours"]][time]
                is_reference = row["group"] == "recurrence" and name == "transformers"
                peer = "transformers' reference code of recurrences" if is_reference else name
                direction = FORWARD if row["direction"] == FORWARD else BOTH  # a training step goes both ways
                found.setdefault(peer, {}).setdefault(direction, []).append(ratio)
    return found


def plans(results: dict[str, Any]) -> list[str]:
    """How far plans are from the fastest backend, by kind of graph."""
    lines = [
        "# Plans",
        "",
        f"`{results['command']}` measured how well the plan chooses backends. The regret of a choice is the time of "
        "the chosen backend divided by the time of the fastest one. The requests are drawn at random, with another "
        "seed than the requests from which the plan's estimates were fitted. All backends ran interleaved; times are "
        "minima of the processor's time. The goal is a mean regret of at most 1.03, and a regret above 1.3 in at most "
        "1% of the requests. " + results.get("note", ""),
        "",
        *_machine(results),
        "",
        "| graphs | rounds | mean regret | over 1.3 | largest |",
        "|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        numbers = f"{row['requests']:,} | {row['mean']:.3f} | {row['share']:.1%} | {row['largest']:.2f}"
        lines.append(f"| {row['kind']} | {numbers} |")
    return [*lines, "", *folded("The choices with the largest regrets", [f"- {line}" for line in results["worst"]])]


def _spread(ratios: Sequence[float]) -> str:
    if len(ratios) < 2:
        return f"{ratios[0]:.2f}" if ratios else ""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rows)"


def _tables(rows: Sequence[dict[str, Any]], with_pictures: bool = False) -> list[str]:
    lines = []
    for group, title in GROUPS.items():
        members = [row for row in rows if row["group"] == group]
        if members:
            lines += ["", f"## {title}", ""]
            if with_pictures and any(row["series"] and "entries" in row for row in members):
                lines += [f"![{title}](img/{plots.name_of(group)})", ""]
            lines += folded(f"{len(members)} rows", table(members))
    return lines


def folded(summary: str, lines: Sequence[str]) -> list[str]:
    """Lines that are shown when the summary is clicked."""
    return ["<details>", f"<summary>{summary}</summary>", "", *lines, "", "</details>"]


def _machine(results: dict[str, Any]) -> list[str]:
    versions = ", ".join(f"{name} {v}" for name, v in results["versions"].items() if v)
    absent = ", ".join(name for name, v in results["versions"].items() if not v)
    lines = [
        *([f"- {results['gpu']}"] if "gpu" in results else []),
        f"- {_processor(results)} ({results['instructions']}), {results['cores']} cores, {results['threads']} used "
        f"by all entries, {results['memory_gb']} GB; {results['system']}, Python {results['python']}",
        f"- {versions}",
        "; ".join([f"- commit {results['commit']}", results["date"], *_length(results)]),
    ]
    return [*lines, f"- not installed here: {absent}"] if absent else lines


def _processor(results: dict[str, Any]) -> str:
    """The name of the processor, and its family, as virtual machines hide the model."""
    return results["processor"] + (f", {results['family']}" if results.get("family") else "")


def _length(results: dict[str, Any]) -> list[str]:
    if "seconds" not in results:
        return []
    minutes = round(results["seconds"] / 60)
    return [f"took {minutes} minutes" if minutes > 1 else f"took {results['seconds']:.0f} seconds"]


# ------------------------------------------------------------------------------------------------ bars


def _bars(rows: Sequence[dict[str, Any]]) -> list[str]:
    verdicts = [
        {"case": f"{row['group']}: {row['case']}", "direction": row["direction"], **bar}
        for row in rows
        for bar in row.get("bars", [])
    ] + series.verdicts(rows)
    refused = [row for row in rows if "error" in row]
    if not verdicts and not refused:
        return []
    count = {status: sum(v["status"] == status for v in verdicts) for status in ("pass", "miss", "not measured")}
    lines = [
        "## Goals",
        "",
        "These goals were set before the work. The table has the missed goals first. "
        + f"{count['pass']} passed, {count['miss']} missed, {count['not measured']} not measured"
        + (f", {len(refused)} cases failed." if refused else "."),
        "",
    ]
    rows_of_bars = ["| case | direction | goal | measured | |", "|---|---|---|---|---|"]
    for v in sorted(verdicts, key=lambda v: ("miss", "not measured", "pass").index(v["status"])):
        note = f": {v['why']}" if v["status"] == "not measured" else ""
        shown = "-" if v["measured"] is None else amount(v["measured"], v["kind"])
        mark = "**miss**" if v["status"] == "miss" else v["status"]
        rows_of_bars.append(f"| {v['case']} | {v['direction']} | {v['text']} | {shown} | {mark}{note} |")
    for row in refused:
        failed = f"**failed**: {row['error']}"
        rows_of_bars.append(f"| {row['group']}: {row['case']} | {row['direction']} | | - | {failed} |")
    return [*lines, *folded("All goals", rows_of_bars)]


def amount(measured: float, kind: str) -> str:
    match kind:
        case "bytes":
            return memory(measured)
        case "seconds" | "over":
            return duration(measured)
    return f"{measured:.2f}x"


# ------------------------------------------------------------------------------------------------ tables


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each entry of each row."""
    lines = [
        f"| case | direction | entry | time | {RATIO} | rate | memory | largest error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "entries" not in row:
            note = f"**failed**: {row['error']}" if "error" in row else f"skipped: {row['skipped']}"
            lines.append(f"| {row['case']} | {row['direction']} | {note} | | | | | |")
            continue
        ours = row["entries"][row["ours"]]
        errors = row.get("checked", {}).get("errors", {})
        for i, (name, entry) in enumerate(row["entries"].items()):
            if "least" not in entry:
                continue
            ratio = "" if name == row["ours"] else f"{entry['least'] / ours['least']:.2f}"
            room = "" if entry.get("peak_bytes") is None else memory(entry["peak_bytes"])
            error = f"{errors[name]:.0e}" if name in errors else "not compared"
            first = (row["case"], row["direction"]) if i == 0 else ("", "")
            lines.append(
                f"| {first[0]} | {first[1]} | {name} | {duration(entry['least'])} | {ratio} | "
                f"{_rate(row, entry['least'])} | {room} | {error} |"
            )
    return lines


def _rate(row: dict[str, Any], seconds: float) -> str:
    """Useful work by time: products on edges, of which a backward pass takes 2.5 times as many; or bytes moved."""
    facts = row.get("facts", {})
    if "flops" in facts:
        rate = facts["flops"] * (3.5 if row["direction"] == BOTH else 1.0) / seconds
        return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"
    return f"{facts['bytes'] / seconds / 1e9:.3g} GB/s" if "bytes" in facts and row["direction"] != BOTH else ""


def _left_out(rows: Sequence[dict[str, Any]]) -> list[str]:
    notes: dict[str, list[str]] = {}
    for row in rows:
        for name, entry in row.get("entries", {}).items():
            if "note" in entry:
                notes.setdefault(f"{name}: {entry['note']}", []).append(f"{row['case']}, {row['direction']}")
    if not notes:
        return []
    entries = [f"- {note} ({len(where)} rows, first {where[0]})" for note, where in notes.items()]
    return ["## Left out", "", *folded("Entries without a time in some rows, and the reasons", entries)]
