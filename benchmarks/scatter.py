"""torch_scatter's and torch_cluster's functions compared with these libraries, where they are compiled, and with
torch's own `index_add` and `scatter_reduce`.

Times are the processor's, the minimum of interleaved rounds: other programs of a shared machine only add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from benchmarks import report, units
from benchmarks.contest import BOTH, FORWARD, OURS, Case, Contest, Entry, Missing
from benchmarks.peers import unless_missing
from benchmarks.truth import Agreement, Whole
from mpnn.integrations import torch_cluster, torch_scatter

SCATTER, CLUSTER, TORCH = "torch_scatter", "torch_cluster", "plain torch"
SIZES = (4608, 2304, 64), (100_000, 10_000, 1), (100_000, 10_000, 64), (1_000_000, 100_000, 8)
"""Rows, targets and numbers of a row: messages of 128 molecules, a column, and graphs of ten edges a node."""

Function = Callable[[Tensor, Tensor, int], Tensor]  # of rows [E, D], their targets and how many there are


def _count(index: Tensor, count: int, like: Tensor) -> Tensor:
    return torch.bincount(index, minlength=count).clamp(min=1).to(like.dtype)[:, None]


def _sum(x: Tensor, index: Tensor, count: int) -> Tensor:
    return x.new_zeros(count, x.shape[1]).index_add(0, index, x)


def _reduced(how: str, x: Tensor, index: Tensor, count: int) -> Tensor:
    start = torch.ones if how == "prod" else torch.zeros
    at = index[:, None].expand_as(x)
    return start(count, x.shape[1], dtype=x.dtype).scatter_reduce(0, at, x, how, include_self=how == "prod")


def _deviation(x: Tensor, index: Tensor, count: int) -> Tensor:
    degree = _count(index, count, x)
    apart = x - (_sum(x, index, count) / degree)[index]
    return (_sum(apart.square(), index, count) / ((degree - 1).clamp(min=1) + 1e-6)).sqrt()


def _softmax(x: Tensor, index: Tensor, count: int) -> Tensor:
    top = _reduced("amax", x.detach(), index, count)
    exponentials = (x - top[index]).exp()
    return exponentials / _sum(exponentials, index, count)[index]


PLAIN: dict[str, Function] = {
    "sum": _sum,
    "mean": partial(_reduced, "mean"),
    "max": partial(_reduced, "amax"),
    "mul": partial(_reduced, "prod"),
    "std": _deviation,
    "softmax": _softmax,
}
"""The function of each name by torch's operations; in float64 what all are compared with."""


def _of(library: ModuleType, name: str, x: Tensor, index: Tensor, count: int) -> Tensor:
    found = getattr(library, f"scatter_{name}")(x, index, dim=0, dim_size=count)
    return found[0] if isinstance(found, tuple) else found


def _segments(library: ModuleType, name: str, x: Tensor, ptr: Tensor) -> Tensor:
    found: Tensor = library.segment_csr(x, ptr, reduce=name)
    return found


def cases(small: bool = False) -> Iterator[Case]:
    for rows, targets, width in ((60, 12, 8),) if small else SIZES:
        title = f"{rows:,} rows of {width} to {targets:,} targets"
        for name in PLAIN:
            yield Case(SCATTER, f"scatter_{name}, {title}", partial(_rows, name, rows, targets, width), (FORWARD, BOTH))
        for name in ("mean", "max"):
            make = partial(_sorted_rows, name, rows, targets, width)
            yield Case(SCATTER, f"segment_csr, {name}, {title}", make, (FORWARD, BOTH))
    many, clouds = (60, 3) if small else (10_000, 64)
    for name in ("knn_graph", "radius_graph", "fps", "nearest"):
        yield Case(CLUSTER, f"{name}, {many:,} points", partial(_points, name, many, 1), (FORWARD,))
        yield Case(
            CLUSTER, f"{name}, {clouds} clouds of 32 points", partial(_points, name, 32 * clouds, clouds), (FORWARD,)
        )


def _rows(name: str, rows: int, targets: int, width: int) -> Contest:
    index = torch.randint(0, targets, (rows,))
    x = torch.randn(rows, width, requires_grad=True)

    def entry(title: str, function: Function) -> Entry:
        return Entry(title, lambda: function(x, index, targets), [x])

    def compiled() -> Entry:
        import torch_scatter as library

        return entry(SCATTER, partial(_of, library, name))

    if name == "std":  # where a target has one number, its derivative is infinite there
        index = torch.arange(rows) % targets
    exact = Whole([x], lambda x: PLAIN[name](x, index, targets))
    entries: list[Entry | Missing] = [entry(OURS, partial(_of, torch_scatter, name))]
    entries += [unless_missing(SCATTER, SCATTER, compiled), entry(TORCH, PLAIN[name])]
    return Contest(entries, exact, exact.description, (), {"rows": rows})


def _sorted_rows(name: str, rows: int, targets: int, width: int) -> Contest:
    index = torch.randint(0, targets, (rows,)).sort().values
    ptr = torch.searchsorted(index, torch.arange(targets + 1))
    x = torch.randn(rows, width, requires_grad=True)

    def compiled() -> Entry:
        import torch_scatter as library

        return Entry(SCATTER, lambda: _segments(library, name, x, ptr), [x])

    exact = Whole([x], lambda x: PLAIN[name](x, index, targets))
    entries: list[Entry | Missing] = [Entry(OURS, lambda: _segments(torch_scatter, name, x, ptr), [x])]
    entries += [unless_missing(SCATTER, SCATTER, compiled)]
    entries += [Entry(TORCH, lambda: PLAIN[name](x, index, targets), [x])]
    return Contest(entries, exact, exact.description, (), {"rows": rows})


class _Same(Agreement):
    """Compares what `answer` gives: distances, which do not depend on which of two near points is taken."""


def _points(name: str, count: int, clouds: int) -> Contest:
    x = torch.rand(count, 3)
    batch = None if clouds == 1 else torch.arange(clouds).repeat_interleave(count // clouds)
    few = x[::4].contiguous(), None if batch is None else batch[::4].contiguous()
    r = (16 / (count / clouds) / 4.19) ** (1 / 3)  # some 16 neighbors
    arguments: dict[str, tuple[Any, ...]] = {
        "knn_graph": (x, 16, batch),
        "radius_graph": (x, r, batch),
        "fps": (x, batch, 0.25, False),
        "nearest": (x, few[0], batch, few[1]),
    }

    def call(library: ModuleType) -> Tensor:
        found: Tensor = getattr(library, name)(*arguments[name])
        return found

    def answer(library: ModuleType) -> Tensor:
        found = call(library)
        if name == "fps":
            return x[found]
        if name == "nearest":
            return (x - few[0][found]).norm(dim=1)
        lengths = (x[found[0]] - x[found[1]]).norm(dim=1)
        degree = torch.bincount(found[1], minlength=count).float()
        return torch.cat([degree, lengths.sort().values]) if name == "knn_graph" else degree.clamp(max=32)

    def entry(title: str, library: ModuleType) -> Entry:
        return Entry(title, lambda: call(library), answer=lambda: answer(library))

    def compiled() -> Entry:
        import torch_cluster as library

        return entry(CLUSTER, library)

    entries = [entry(OURS, torch_cluster), unless_missing(CLUSTER, CLUSTER, compiled)]
    return Contest(entries, _Same(), "each other's distances", (), {"points": count})


def section(results: dict[str, Any]) -> list[str]:
    """A line for each row, with the minimum times."""
    lines = [
        f"Measured by `{results['command']}` on one thread. Times are the processor's, the minimum of interleaved "
        f"rounds. Each result was compared before it was timed. {units.MEANING}"
        + (f" {results['note']}" if results.get("note") else ""),
        "",
        *report._machine(results),
        "",
        f"| case | direction | mpnn | {SCATTER}, {CLUSTER} | {units.RATIO} | {TORCH} | {units.RATIO} |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        if "entries" not in row:
            lines.append(f"| {row['case']} | {row['direction']} | {row.get('error') or row.get('skipped')} | | | | |")
            continue
        times = {name: entry["least"] for name, entry in row["entries"].items() if "least" in entry}
        shown = [row["case"], row["direction"], report.duration(times[OURS])]
        for seconds in (times.get(row["group"]), times.get(TORCH)):
            shown += ["", ""] if seconds is None else [report.duration(seconds), f"{seconds / times[OURS]:.2f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return lines
