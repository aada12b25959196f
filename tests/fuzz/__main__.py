"""`python -m tests.fuzz`: runs the fuzzer for a time or a number of cases on several processes, and records it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

GROUP = 8  # cases over one graph
CHUNK = 50  # groups that a process runs before it reports


def main() -> int:
    options = _options()
    if os.environ.get("MALLOC_PERTURB_") is None:  # read by the C library at start: fresh memory holds 0x7f bytes
        environment = {"MALLOC_PERTURB_": "128", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", **os.environ}
        os.execve(sys.executable, [sys.executable, "-m", "tests.fuzz", *sys.argv[1:]], environment)
    began, runs, failures = time.monotonic(), Counter[str](), 0
    groups = -(-options.cases // GROUP) if options.cases else None
    print(f"seed {options.seed}, {options.workers} processes; repeat with --seed {options.seed}", flush=True)
    with ProcessPoolExecutor(options.workers) as pool:
        next_seed, pending, shown = options.seed, set(), began
        while True:
            while len(pending) < 2 * options.workers and not _over(options, groups, next_seed, began, failures):
                count = CHUNK if groups is None else min(CHUNK, options.seed + groups - next_seed)
                pending.add(pool.submit(run_groups, next_seed, count))
                next_seed += count
            if not pending:
                break
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                counted, texts = future.result()
                runs.update(counted)
                failures += len(texts)
                for text in texts:
                    print(f"\n{text}\n", flush=True)
            if time.monotonic() - shown > 60 or not pending:
                shown = time.monotonic()
                print(f"{(shown - began) / 60:5.0f} min  {runs['cases']:>9,} cases  {failures} failures", flush=True)
    record = _record(options, runs, failures, time.monotonic() - began)
    print(json.dumps(record, indent=2))
    if options.record:
        Path(options.record).write_text(json.dumps(record, indent=2) + "\n")
    return 1 if failures else 0


def run_groups(seed: int, count: int) -> tuple[Counter[str], list[str]]:
    """Runs so many groups of cases from this seed on: who ran how often, and each failure as lines to paste."""
    import warnings

    import torch

    from .cases import draw_group
    from .compare import Failure, check
    from .shrink import failure_of, paste, shrink

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs, texts = Counter[str](), []
    for k in range(seed, seed + count):
        group = draw_group(k, GROUP)
        try:
            check(*group, runs=runs)
        except Failure as failure:
            alone = failure_of(failure.case)
            if alone is None:
                text = f"# {failure}\n# after the cases before it over the same graph: draw_group({k}, {GROUP})"
                texts.append(
                    f"{text}\nfrom tests.fuzz.cases import draw_group\nfrom tests.fuzz.compare import check\n"
                    f"check(*draw_group({k}, {GROUP}))"
                )
            else:
                texts.append(paste(shrink(alone)))
        except Exception as error:
            texts.append(f"# the fuzzer itself failed at draw_group({k}, {GROUP}): {type(error).__name__}: {error}")
    return runs, texts


def _over(options: Any, groups: int | None, next_seed: int, began: float, failures: int) -> bool:
    if failures >= options.most_failures or (groups is not None and next_seed >= options.seed + groups):
        return True
    return options.hours is not None and time.monotonic() - began > options.hours * 3600


def _options() -> Any:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--hours", type=float, help="stop after this time")
    parser.add_argument("--cases", type=int, help="stop after so many cases")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="the first seed (default: the time)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one a core)")
    parser.add_argument("--most-failures", type=int, default=20, help="stop after so many failures (default: 20)")
    parser.add_argument("--record", metavar="FILE", help="write what ran, as JSON")
    options = parser.parse_args()
    if options.hours is None and options.cases is None:
        parser.error("say how long: --hours 2, or --cases 10000")
    return options


def _record(options: Any, runs: Counter[str], failures: int, seconds: float) -> dict[str, Any]:
    import numpy
    import torch

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "commit": commit.stdout.strip(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "seed": options.seed,
        "cases": runs["cases"],
        "failures": failures,
        "minutes": round(seconds / 60, 1),
        "runs": {name: n for name, n in sorted(runs.items()) if name != "cases" and not name.endswith("refuses")},
        "refusals": {name.split()[0]: n for name, n in sorted(runs.items()) if name.endswith("refuses")},
        "processor": _processor(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": numpy.__version__},
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        vectors = "AVX-512" if any("avx512f" in line for line in lines) else "AVX2"
        return f"{name}, {vectors}, {os.cpu_count()} cores"
    except (OSError, StopIteration):
        return platform.processor()


if __name__ == "__main__":
    sys.exit(main())
