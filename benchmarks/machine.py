"""Where figures come from: hardware, versions and commit, without which they mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from ctypes import Structure, c_int64, c_void_p
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mpnn.backends.tuned import family, processor
from mpnn.kernels.cpu import library

PACKAGES = (
    *("torch", "numpy", "numba", "transformers", "torch-geometric", "local-attention"),
    *("torch-scatter", "torch-sparse", "natten", "dgl"),
)


def about(more: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the head of a file of results. `more`: packages whose versions matter too."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "processor": processor(),
        "family": family(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gb": round(_memory() / 1e9, 1),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": {name: _version(name) for name in (*PACKAGES, *more)},
    }


class Products(Structure):
    """`struct Products` of products.cpp."""

    _fields_ = (*((name, c_int64) for name in ("tiles", "rows", "columns", "width")), ("memory", c_void_p))


def multiply_in_cache(flops: float, width: int, rows: int = 32, columns: int = 96) -> None:
    """Products of the shapes of attention's tiles with about so many operations, on the threads that torch uses."""
    threads = torch.get_num_threads()
    memory = torch.ones(threads, 2 * columns * width + 2 * rows * width + rows * columns)
    tiles = round(flops / (4 * rows * columns * width))
    library.run("products", torch.float32, Products(tiles, rows, columns, width, memory.data_ptr()), parts=threads)


def commit() -> str:
    """The commit that is checked out, marked where files differ from it; "unknown" outside a repository."""
    root = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "mpnn")
        return git("rev-parse", "--short=12", "HEAD") + (" and changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
