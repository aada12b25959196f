"""The figures of a CPU on pages: each comes from a record of a run, between comments that name it, and is not typed.

`<!-- cpu: NAME -->` and `<!-- cpu end -->` stand around the lines that the function of that name in `BLOCKS` returns.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import encoders, forward_mode, in_place, report, scatter, units
from benchmarks.contest import BOTH, FORWARD, OURS, STEP

Record = dict[str, Any]
Records = Mapping[str, Record]
Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "results"
NAMES = "cpu", "workloads", "encoders", "in_place", "real", "forward_mode", "scatter", "plans", "scaling", "sampling"
"""The records that `python -m benchmarks all` writes."""
COMPUTES = "mpnn/kernels", "mpnn/backends", "mpnn/engine"
"""The folders whose commits make a record older."""
MOST_COMMITS = 60
NOT_MEASURED = "Not measured yet."

MASKED = "torch SDPA, masked"
SHORT = (
    ("sparse", r"longformer\(", BOTH, MASKED),
    ("layers", r"Longformer\(.*dropout 0.0", BOTH, "HF LongformerSelfAttention"),
    ("irregular", r"TransformerConv", BOTH, "PyG TransformerConv"),
)
"""Group, start of the case, direction and peer of the rows of the README; the two greatest losses follow."""
WORK = {"sparse": "attention over", "layers": "a layer,", "irregular": "a convolution,"}
"""The work of each group, in the rows of the README."""
LOSSES = 2


def pages() -> list[Path]:
    """The pages with figures of a CPU."""
    every = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in every if "<!-- cpu: " in page.read_text()]


def read(folder: Path = RECORDS) -> dict[str, Record]:
    """The records that are there, by name."""
    files = {name: folder / f"{name}.json" for name in NAMES}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}


def fill(page: str, records: Records) -> str:
    """The page with all of its figures as the records have them."""

    def put(match: re.Match[str]) -> str:
        name = match[1]
        if name not in BLOCKS:
            raise ValueError(f"there are no figures {name!r} of a CPU; there are {', '.join(BLOCKS)}")
        return "\n".join([f"<!-- cpu: {name} -->", "", *_lines(name, records), "", "<!-- cpu end -->"])

    return re.sub(r"<!-- cpu: ([^>]*?) -->.*?<!-- cpu end -->", put, page, flags=re.DOTALL)


def _lines(name: str, records: Records) -> list[str]:
    try:
        return BLOCKS[name](records)
    except KeyError as missing:
        if missing.args[0] not in NAMES:
            raise
        return [NOT_MEASURED]


def without_figures(page: str) -> str:
    """The page without what is generated."""
    return re.sub(r"<!-- (\w+): [^>]*? -->.*?<!-- \1 end -->", "", page, flags=re.DOTALL)


# ------------------------------------------------------------------------------------------------ how old a record is


def has_history() -> bool:
    """Whether this folder is a repository with all of its commits."""
    done = _git("rev-parse", "--is-shallow-repository", "--show-toplevel")
    return done is not None and done.split("\n") == ["false", str(ROOT)]


def commits_since(commit: str) -> int | None:
    """The commits to kernels, backends and engine since this one; None if it is not in the history."""
    if _git("merge-base", "--is-ancestor", commit, "HEAD") is None:
        return None
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *COMPUTES)
    return None if count is None else int(count)


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


# ------------------------------------------------------------------------------------------------ rows


def rows_of(record: Record, group: str, case: str, direction: str) -> Iterator[Row]:
    """The measured rows of a group and direction whose case begins with a pattern."""
    for row in record["rows"]:
        is_of_kind = row["group"] == group and row["direction"] == direction and re.match(case, row["case"])
        if is_of_kind and "entries" in row:
            yield row


def ratio(row: Row, peer: str) -> float | None:
    """The peer's time / mpnn's time."""
    theirs, ours = (row["entries"].get(name, {}).get("least") for name in (peer, row["ours"]))
    return theirs / ours if theirs and ours else None


def machine(record: Record) -> str:
    """Returns a line that says what a table was measured on."""
    where = f"{report._processor(record)} ({record['instructions']})"
    threads = "one thread" if record["threads"] == 1 else f"{record['threads']} threads"
    measured = f"commit {record['commit']}, {record['date'][:10]}"
    return f"{where}, {threads}; torch {record['versions']['torch']}, float32; {measured}"


def _first_ratio(record: Record, group: str, case: str, direction: str, peer: str) -> str:
    """The peer's time / mpnn's time in the first row of a kind, or a dash."""
    found = next(rows_of(record, group, case, direction), None)
    times = None if found is None else ratio(found, peer)
    if times is None:
        return "-"
    return f"{times:.2f}" if times < 2 else f"{times:.1f}" if times < 10 else f"{times:.0f}"


# ------------------------------------------------------------------------------------------------ figures


def short(records: Records) -> list[str]:
    """The README's table: rows that were chosen, then those that this library loses most."""
    record = records["cpu"]
    lines = [f"| forward+backward | mpnn | peer | {units.RATIO} |", "|---|---|---|---|"]
    for group, case, direction, peer in SHORT:
        row = next((row for row in rows_of(record, group, case, direction) if ratio(row, peer)), None)
        line = None if row is None else _beside({**row, "case": f"{WORK[group]} {row['case']}"}, peer)
        lines += [line] if line else []
    lost = _losses(records)
    lines += [line for row, peer in lost if (line := _beside(row, peer))]
    equal = "In each row, mpnn and the peer compute the same function."
    last = " Each table ends with the lowest ratios of all measured cases with a backward pass." if lost else ""
    return [f"{equal} {units.MEANING}{last} The CPU of the first table: {machine(record)}.", "", *lines]


def peers(records: Records) -> list[str]:
    """The ratio of times for each peer."""
    record = records["cpu"]
    times = report.times_faster(record["rows"])
    return [
        f"{units.MEANING} For each peer: the median of its rows, then the lowest and the highest. {machine(record)}.",
        "",
        *report.spreads(times),
    ]


def losses(records: Records) -> list[str]:
    """The rows in which a peer is faster, the greatest losses first."""
    lost = _losses(records, None)
    lines = [line for row, peer in lost if (line := _beside(row, peer))]
    return [
        f"{len(lines)} cases with a backward pass, on {machine(records['cpu'])}.",
        "",
        f"| forward+backward | mpnn | peer | {units.RATIO} |",
        "|---|---|---|---|",
        *lines,
    ]


_WITH_LOSSES = "cpu", "real", "in_place"
_STEP = "step"


def _losses(records: Records, most: int | None = LOSSES) -> list[tuple[Row, str]]:
    """The rows with both directions in which a peer is faster, and the peer, the greatest losses first."""
    found: dict[str, tuple[float, Row, str]] = {}
    rows = [row for name in _WITH_LOSSES if name in records for row in records[name]["rows"]]
    for row in rows:
        if row["direction"] == FORWARD or row["group"] == "overhead":
            continue
        row = {**row, "case": f"{row['case']}, a training step"} if row["direction"] == _STEP else row
        for peer in row.get("entries", {}):
            is_of_others = report.is_equal(row, peer) and not peer.startswith(row["ours"])
            times = ratio(row, peer) if is_of_others else None
            if times is not None and times < min(0.95, found.get(row["case"], (1.0,))[0]):
                found[row["case"]] = times, row, peer
    ordered = sorted(found.values(), key=lambda loss: loss[0])[:most]
    return [(row, peer) for _, row, peer in ordered]


def _beside(row: Row, peer: str) -> str | None:
    times = ratio(row, peer)
    if times is None:
        return None
    ours, theirs = (report.duration(row["entries"][name]["least"]) for name in (row["ours"], peer))
    return f"| {row['case']} | {ours} | {peer}: {theirs} | {units.times(times)} |"


def length(records: Records) -> list[str]:
    """A sentence about a window compared with torch's attention with its mask, and one about growth with the length."""
    record = records["cpu"]
    row = next(rows_of(record, "sparse", r"causal\(\) & window\(", FORWARD))
    beside = [
        f"{times:.1f} times as fast as {what}"
        for name, what in ((MASKED, "torch's attention with this mask"), ("FlexAttention", "FlexAttention"))
        if (times := ratio(row, name))
    ]
    series = [row for row in record["rows"] if row["group"] == "length" and row["direction"] == FORWARD]
    times = {row["facts"]["nodes"]: row["entries"][row["ours"]]["least"] for row in series if "entries" in row}
    first, last = row["facts"]["nodes"], max(times)
    growth = times[last] / times[first]
    return [
        f"On one thread, mpnn computes attention over {first:,} tokens and `{row['case'].split(', N ')[0]}` "
        f"{' and '.join(beside)}. With {last // first} times the tokens, `{series[0]['series']}` takes {growth:.0f} "
        "times as long."
    ]


def models(records: Records) -> list[str]:
    """A table of models in place, and what it was measured on."""
    workloads, cpu = records["workloads"], records["cpu"]
    bert = [
        _first_ratio(workloads, "workload", f"BERT's layers, .*1 x 2,048 tokens, {kind}", direction, in_place.SDPA)
        for kind, direction in (("forward", FORWARD), ("a step", STEP))
    ]
    scan = [
        _first_ratio(cpu, "recurrence", r"Mamba-2's scan.*chunk 256", direction, "transformers")
        for direction in (FORWARD, BOTH)
    ]
    sentences = [_sentences(records, order) for order in ("unsorted", "sorted by length")]
    return [
        f"| | {units.RATIO} |",
        "|---|---|",
        f"| BERT's layers of transformers, 1 x 2,048 tokens, forward / training step | {' / '.join(bert)} |",
        f"| Mamba-2's scan, N 2,048, forward / with backward | {' / '.join(scan)} |",
        f"| all-MiniLM-L6-v2, 256 sentences unsorted / sorted by length | {' / '.join(sentences)} |",
        "",
        f"{machine(workloads)}.",
    ]


def _sentences(records: Records, order: str) -> str:
    return _first_ratio(
        records["workloads"], "workload", f"MiniLM, .* sentences, {order}", FORWARD, "sentence-transformers"
    )


def sentences(records: Records) -> list[str]:
    """How many times as fast `encode` is."""
    come, ordered = (_sentences(records, order) for order in ("unsorted", "sorted by length"))
    return [
        f"With mpnn, all-MiniLM-L6-v2 embeds 256 sentences of Python's manual {ordered} times as fast in batches of 32 "
        f"that `encode` sorts by length, and {come} times as fast in unsorted batches "
        f"({machine(records['workloads'])})."
    ]


def of_encoders(records: Records) -> list[str]:
    """Ratios of the times of MiniLM's shape, for each peer."""
    record = records["encoders"]
    peers = encoders.TRANSFORMERS, encoders.ONNX, encoders.OPENVINO
    lines = [f"| MiniLM's shape, {units.RATIO} | {' | '.join(peers)} |", "|---|---|---|---|"]
    for row in record["rows"]:
        if "entries" in row:
            times = [ratio(row, peer) for peer in peers]
            shown = ["" if x is None else f"{x:.2f}" for x in times]
            lines.append(f"| {row['case'].split(', ', 1)[1]} | {' | '.join(shown)} |")
    return [*lines, "", f"{machine(record)}."]


def of_models_in_place(records: Records) -> list[str]:
    """Times of models of transformers and of the same after `mpnn.hf.use`: each row of the record, losses included."""
    record = records["in_place"]
    lines = [f"| float32 | transformers | mpnn | {units.RATIO} |", "|---|---|---|---|"]
    for row in record["rows"]:
        names = list(row.get("entries", {}))
        if row["group"] == in_place.GROUP and len(names) == 2 and (times := ratio(row, names[1])):
            peer, ours = (report.duration(row["entries"][name]["least"]) for name in (names[1], row["ours"]))
            lines.append(f"| {row['case']} | {peer} | {ours} | {times:.2f} |")
    return [*lines, "", f"{machine(record)}."]


_OF_PERFORMANCE = re.compile(r"(MiniLM|GPT-2|Llama)(, \d+ layers of \d+)?, \d+ x \d+|Llama of .* call")


def memory_in_place(records: Records) -> list[str]:
    """Times and memory of an encoder, GPT-2 and Llama in place, and of the first call of a process."""
    record = records["in_place"]
    head = f"| float32 | transformers | mpnn | {units.RATIO} | memory, transformers | memory, mpnn |"
    lines = [head, "|---|---|---|---|---|---|"]
    for row in record["rows"]:
        if not _OF_PERFORMANCE.fullmatch(row["case"]):
            continue
        ours = row["entries"][row["ours"]]
        peer = next(entry for name, entry in row["entries"].items() if name != row["ours"])
        seconds = [report.duration(entry["least"]) for entry in (peer, ours)]
        room = [report.memory(entry["peak_bytes"]) if "peak_bytes" in entry else "" for entry in (peer, ours)]
        times = f"{peer['least'] / ours['least']:.2f}"
        lines.append(f"| {' | '.join([row['case'], *seconds, times, *room])} |")
    return [*lines, "", f"{machine(record)}."]


def weak_scaling(records: Records) -> list[str]:
    """Times of one and of two processes."""
    record = records["scaling"]
    lines = ["| | 1 process | 2 processes, twice the nodes | efficiency |", "|---|---|---|---|"]
    for row in record["rows"]:
        one, two = (report.duration(row[name]) for name in ("one", "two"))
        title = f"{row['case']}, {row['nodes']:,} nodes a process"
        lines.append(f"| {title} | {one} | {two} | {row['efficiency']:.2f} |")
    return [*lines, "", f"{machine(record)}."]


def of_samples(records: Records) -> list[str]:
    """Times of a batch compared with PyTorch Geometric's."""
    record = records["sampling"]
    head = f"| graph | work | mpnn, `neighbor_batches` | peer, `NeighborLoader` | {units.RATIO} |"
    lines = [head, "|---|---|---|---|---|"]
    for row in record["rows"]:
        work = row["case"].split(", ")[1]
        rates = row["batches_per_second"]
        peer = max((rate for name, rate in rates.items() if name != OURS), default=None)
        compared = ["", ""] if peer is None else [report.duration(1 / peer), units.times(rates[OURS] / peer)]
        where = f"{row['nodes']:,} nodes, {row['edges']:,} edges"
        lines.append(f"| {where} | {work} | {report.duration(1 / rates[OURS])} | {' | '.join(compared)} |")
    return [*lines, "", f"{machine(record)}."]


def of_forward_mode(records: Records) -> list[str]:
    """Derivatives in forward mode compared with forward passes."""
    record = records["forward_mode"]
    return [*forward_mode.table(record), "", f"{machine(record)}."]


BLOCKS: dict[str, Callable[[Records], list[str]]] = {
    "short": short,
    "peers": peers,
    "losses": losses,
    "length": length,
    "models": models,
    "sentences": sentences,
    "encoders": of_encoders,
    "in place": of_models_in_place,
    "memory in place": memory_in_place,
    "scaling": weak_scaling,
    "sampling": of_samples,
    "scatter": lambda records: scatter.section(records["scatter"]),
    "forward mode": of_forward_mode,
}
