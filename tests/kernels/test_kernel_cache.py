"""Compiled kernels where their cache on disk is missing, damaged or shared by several processes."""

import os
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest

import mpnn

KERNEL = """
from mpnn.kernels.cpu.caching import njit

@njit(cache=True, nogil=True)
def double(x):
    return x * 2
"""

ATTEND = """
import torch, mpnn
q, k, v = torch.randn(3, 5, 2, 8)
graph = mpnn.graphs.window(1).bind(5)
ours, reference = (mpnn.ops.attend(graph, q, k, v, backend=b) for b in ("csr", "dense"))
assert torch.allclose(ours, reference, atol=1e-5)
print(mpnn.__file__)
"""


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    path = tmp_path / "kernel.py"
    path.write_text(KERNEL)
    return path


def source(kernel: Path, dtype: type = np.float64) -> str:
    """Calls the kernel as a new process would, and says where its code came from."""
    double = runpy.run_path(str(kernel))["double"]
    assert double(np.arange(3, dtype=dtype)).tolist() == [0, 2, 4]
    return "cache" if sum(double.stats.cache_hits.values()) else "compiler"


def files(kernel: Path) -> tuple[Path, Path]:
    cache = kernel.parent / "__pycache__"
    return next(cache.glob("*.nbi")), next(cache.glob("*.nbc"))


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        (0, lambda whole: b"garbage"),
        (0, lambda whole: whole[: len(whole) // 2]),
        (1, lambda whole: b""),
        (1, lambda whole: whole[: len(whole) // 2]),
        (1, lambda whole: whole[:-100] + bytes([whole[-100] ^ 1]) + whole[-99:]),
    ],
    ids=["index: garbage", "index: half", "code: empty", "code: half", "code: one bit"],
)
def test_a_damaged_cache_is_repaired(kernel: Path, which: int, damage: Callable[[bytes], bytes]) -> None:
    assert [source(kernel), source(kernel)] == ["compiler", "cache"]
    path = files(kernel)[which]
    path.write_bytes(damage(path.read_bytes()))
    assert [source(kernel), source(kernel)] == ["compiler", "cache"]


def test_kernels_run_without_a_folder_for_the_cache(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernel.parent / "__pycache__").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert source(kernel) == "compiler"


def test_kernels_run_where_the_disk_is_full(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("mpnn.kernels.cpu.caching._CheckedFile._save_data", full)
    assert [source(kernel), source(kernel)] == ["compiler", "compiler"]


def test_code_of_other_types_under_the_same_name_is_not_run(kernel: Path) -> None:
    """What two processes leave that compile one function for different types at the same moment."""
    assert source(kernel) == "compiler"
    of_float64 = files(kernel)[1].read_bytes()
    shutil.rmtree(kernel.parent / "__pycache__")
    assert source(kernel, np.float32) == "compiler"
    files(kernel)[1].write_bytes(of_float64)
    assert [source(kernel, np.float32), source(kernel, np.float32)] == ["compiler", "cache"]


def start(root: Path, **environment: str) -> "subprocess.Popen[str]":
    inherited = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment = {**inherited, "PYTHONPATH": str(root), **environment}
    command = [sys.executable, "-c", ATTEND]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=root)


def answer(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return out.strip()


@pytest.mark.slow
def test_a_package_that_cannot_be_written_attends(tmp_path: Path) -> None:
    package = tmp_path / "mpnn"
    shutil.copytree(Path(mpnn.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "kernels" / "cpu" / "__pycache__").write_text("not a folder")
    process = start(tmp_path, XDG_CACHE_HOME=os.devnull, HOME=os.devnull)
    assert answer(process) == str(package / "__init__.py")


@pytest.mark.slow
def test_four_processes_compile_and_then_load_at_once(tmp_path: Path) -> None:
    root = Path(mpnn.__file__).parents[1]
    for _ in ("compile", "load"):
        for process in [start(root, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(4)]:
            answer(process)
